"""A demonstration on public data: two releases under one budget, with certificates and pictures."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matrixdp import _extras, plots, postprocess, queries
from matrixdp._check import Array
from matrixdp._pages import wrapped
from matrixdp._rounding import rounded_up
from matrixdp.accounting.composition import Composition, Part
from matrixdp.budget import Budget
from matrixdp.comparison import compare
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.pipeline import Release, release
from matrixdp.privacy.records import digest

if TYPE_CHECKING:
    from rich.console import Console

TOTAL = Budget(1.0, 1e-6)
# Both were chosen by looking at these public records; with private records that would be an uncounted spend.
# Bins for the ink in one half of a picture:
INK = np.linspace(3, 17, 15)
# How many directions of the noisy second moment are kept:
DIRECTIONS = 8
PLAN = "plan.json"


def run(out: Path, console: Console, rng: np.random.Generator | None = None) -> None:
    """Releases a second-moment matrix and a 2-d histogram of handwritten digits, and explains each step.

    Args:
        out: a folder for the files; those of an earlier demo are replaced.
        console: where the explanation is printed.
        rng: a numpy Generator, for a reproducible demo; entropy from the operating system by default.

    Guarantee: both releases together keep the budget TOTAL, for one record added or removed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise InvalidInput(f"out must be a folder that can be written, got {str(out)!r} ({reason})") from None

    _heading(console, "1. The records")
    pixels, ink = _digits()
    console.print(
        f"{len(pixels)} pictures of handwritten digits, 8 x 8 pixels each, that come with scikit-learn. They are "
        "public, and only for that reason may this demo draw the true matrices next to the noisy ones.\n"
        "Two questions: which pixels are inked together (a 64 x 64 second-moment matrix; every picture is clipped to "
        "norm 1), and how the ink is spread over the upper and the lower half (a 14 x 14 histogram)."
    )
    moment = queries.second_moment(pixels, norm=1.0)
    histogram = queries.histogram(ink, edges=[INK, INK])

    _heading(console, "2. One budget for both")
    shapes = [answer.value.shape for answer in (moment, histogram)]
    with console.status("planning"):
        plan = TOTAL.plan(
            [moment.sensitivity, histogram.sensitivity], [1 / math.prod(shape) for shape in shapes], shapes=shapes
        )
    console.print(
        f"In all we guarantee {TOTAL}. The noise of both is fixed at once, for the least error of an average entry of "
        "each, and what they guarantee together is certified before anything is released:"
    )
    console.print(wrapped(str(plan), console.width), markup=False, soft_wrap=True)

    _heading(console, "3. Which mechanism?")
    console.print(
        "Each release has its part of the budget. How much noise would each mechanism add for that part, and what "
        "does this noise really guarantee?\n"
    )
    answers = zip((moment, histogram), plan, strict=True)
    with console.status("comparing"):
        comparisons = [compare(answer.value.shape, answer.sensitivity, part.alone) for answer, part in answers]
    for comparison in comparisons:
        console.print(replace(comparison, rows=comparison.applicable))  # without why others propose no noise

    _heading(console, "4. Two releases")
    console.print("Each has the noise that was planned for it:")
    truths = {"second-moment": moment.value, "histogram": histogram.value}
    released = {
        "second-moment": release(*moment, plan[0], rng=rng),
        "histogram": release(*histogram, plan[1], rng=rng),
    }
    for name, noisy in released.items():
        _write(out, name, noisy)
        certificate = wrapped(str(noisy.certificate), console.width)
        console.print(f"\n{name}.csv\n{certificate}", markup=False, soft_wrap=True)

    _heading(console, "5. Better, for free")
    better = {
        "second-moment": postprocess.low_rank(postprocess.nearest_psd(released["second-moment"].value), DIRECTIONS),
        "histogram": postprocess.nonnegative(released["histogram"].value),
    }
    console.print(
        "Whatever is computed from a release alone costs no privacy. A second-moment matrix has no negative "
        f"eigenvalues (and we keep its {DIRECTIONS} largest), a histogram no negative counts. Root mean square error:"
    )
    for name, truth in truths.items():
        before, after = _distance(released[name].value, truth), _distance(better[name], truth)
        console.print(f"  {name:<13}  {before:.2f} as released, {after:.2f} after post-processing")
        (out / f"{name}-postprocessed.csv").write_bytes(_csv(better[name]))

    _heading(console, "6. What was spent")
    spent = Composition(tuple(Part(noisy.certificate) for noisy in released.values()), TOTAL)
    if not spent.meets(TOTAL):
        raise BudgetExceeded(f"the releases spent more than {TOTAL}")
    console.print(
        f"epsilon = {rounded_up(spent.epsilon(TOTAL.delta), 5)} at delta = {TOTAL.delta:g} for both together: within "
        f"the budget of {TOTAL.epsilon:g}. `matrixdp verify {out / PLAN}` computes the plan again."
    )
    (out / PLAN).write_text(plan.to_json() + "\n", encoding="utf-8")

    pictures = plots.side_by_side(
        [[truths[name], released[name].value, better[name]] for name in truths],
        titles=["true (public data)", "released", "post-processed"],
        labels=["second moment", "pictures in the bin"],
        axes=[("pixel", "pixel"), ("ink in the upper half", "ink in the lower half")],
    )
    plots.save(pictures, out / "demo.png")
    plots.save(plots.comparison_chart(*comparisons), out / "comparison.png")
    _heading(console, "Files")
    names = [f"{name}{end}" for name in truths for end in (".csv", ".certificate.json", "-postprocessed.csv")]
    for name in ["demo.png", "comparison.png", PLAN, *names]:
        console.print(f"  {out / name}", markup=False, soft_wrap=True)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.rule(text)


def _digits() -> tuple[Array, Array]:
    """The pixels of every picture, from 0 to 1, and its ink in the upper and in the lower half."""
    _extras.require("sklearn", "sklearn")
    from sklearn.datasets import load_digits

    pixels = np.asarray(load_digits().data, dtype=np.float64) / 16
    return pixels, pixels.reshape(len(pixels), 2, 32).sum(axis=2)


def _write(out: Path, name: str, noisy: Release) -> None:
    """Writes the certificate first, so that no noisy matrix is ever without one."""
    content = _csv(noisy.value)
    released = {"file": f"{name}.csv", "sha256": digest(content)}
    certificate = replace(noisy.certificate, released=released)
    (out / f"{name}.certificate.json").write_text(certificate.to_json() + "\n", encoding="utf-8")
    (out / f"{name}.csv").write_bytes(content)


def _csv(value: Array) -> bytes:
    content = io.BytesIO()
    np.savetxt(content, value, delimiter=",", fmt="%.17g")
    return content.getvalue()


def _distance(value: Array, truth: Array) -> float:
    return float(np.sqrt(np.mean((value - truth) ** 2)))
