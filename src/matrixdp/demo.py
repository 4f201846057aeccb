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
from matrixdp._rounding import rounded_up
from matrixdp.budget import Budget
from matrixdp.comparison import compare
from matrixdp.errors import BudgetExceeded, InvalidInput, NotCertifiable
from matrixdp.pipeline import Release, release
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.records import digest

if TYPE_CHECKING:
    from rich.console import Console

TOTAL = Budget(1.0, 1e-6)
# Both were chosen with these public records in view; with private ones that would be an uncounted spend.
# Bins for the ink in one half of a picture:
INK = np.linspace(3, 17, 15)
# How many directions of the noisy second moment are kept:
DIRECTIONS = 8
# Each share is this much smaller, so that rounding cannot make the shares add up to more than the whole.
ROUNDING = 1e-9


def run(out: Path, console: Console, rng: np.random.Generator | None = None) -> None:
    """Releases a second-moment matrix and a 2-d histogram of handwritten digits, and explains each step.

    Args:
        out: a folder for the files; those of an earlier demo are replaced.
        console: where the explanation is printed.
        rng: a numpy Generator, for a demo that can be repeated; entropy from the operating system by default.

    Guarantee: both releases together keep the budget TOTAL, for one record added or removed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise InvalidInput(f"out must be a folder that can be written, got {str(out)!r} ({reason})") from None

    console.rule("1. The records")
    pixels, ink = _digits()
    console.print(
        f"{len(pixels)} pictures of handwritten digits, 8 x 8 pixels each, that come with scikit-learn. They are "
        "public, and only for that reason may this demo draw the true matrices next to the noisy ones.\n"
        "Two questions: which pixels are inked together (a 64 x 64 second-moment matrix; every picture is clipped to "
        "norm 1), and how the ink is spread over the upper and the lower half (a 14 x 14 histogram)."
    )
    moment = queries.second_moment(pixels, norm=1.0)
    histogram = queries.histogram(ink, edges=[INK, INK])

    console.rule("2. One budget for both")
    share = equal_share(TOTAL, releases=2)
    console.print(
        f"In all we guarantee {TOTAL}. The privacy of Gaussian noise is one number, mu, and the squares of mu add up "
        f"exactly. The budget is worth mu = {gaussian.mu(TOTAL.epsilon, TOTAL.delta):.4f}, so each release may have "
        f"mu = {gaussian.mu(share.epsilon, share.delta):.4f}: alone, that is {share}, more than half of the epsilon."
    )

    console.rule("3. Which mechanism?")
    console.print("Each mechanism proposes noise for that share; the certificate says what the noise really gives.")
    comparisons = [compare(answer.value.shape, answer.sensitivity, share) for answer in (moment, histogram)]
    for comparison in comparisons:
        console.print(comparison)

    console.rule("4. Two releases")
    console.print("Each takes the Gaussian noise with the least error that keeps its share, as the squares add up:")
    truths = {"second-moment": moment.value, "histogram": histogram.value}
    released = {
        "second-moment": release(*moment, share, rng=rng),
        "histogram": release(*histogram, share, rng=rng),
    }
    for name, noisy in released.items():
        _write(out, name, noisy)
        console.print(f"\n{name}.csv\n{noisy.certificate}", markup=False, soft_wrap=True)

    console.rule("5. Better, for free")
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
        _write_matrix(out / f"{name}-postprocessed.csv", better[name])

    console.rule("6. What was spent")
    mu = math.hypot(*(_mu(noisy.certificate) for noisy in released.values()))
    spent = float(gaussian.epsilon(mu, TOTAL.delta))
    if not spent <= TOTAL.epsilon:
        raise BudgetExceeded(f"the releases spent epsilon {spent} at delta {TOTAL.delta:g}, more than {TOTAL}")
    console.print(
        f"sqrt(mu1^2 + mu2^2) = {mu:.4f}, which certifies epsilon = {rounded_up(spent, 5)} at delta = "
        f"{TOTAL.delta:g} for both together: within the budget of {TOTAL.epsilon:g}, and nothing was wasted."
    )

    pictures = plots.side_by_side(
        [[truths[name], released[name].value, better[name]] for name in truths],
        titles=["true (public data)", "released", "post-processed"],
        labels=["second moment", "pictures in the bin"],
        axes=[("pixel", "pixel"), ("ink in the upper half", "ink in the lower half")],
    )
    plots.save(pictures, out / "demo.png")
    plots.save(plots.comparison_chart(*comparisons), out / "comparison.png")
    console.rule("Files")
    names = [f"{name}{end}" for name in truths for end in (".csv", ".certificate.json", "-postprocessed.csv")]
    for name in ["demo.png", "comparison.png", *names]:
        console.print(f"  {out / name}", markup=False, soft_wrap=True)


def equal_share(total: Budget, releases: int) -> Budget:
    """The budget for each of several Gaussian releases, at the total's delta, so that all of them keep the total.

    Guarantee: Gaussian releases of the same records that each keep the share keep, together, the total, even when
    later ones are chosen in view of earlier ones.

    Source: dong2022gaussian, composition of Gaussian differential privacy.
    """
    mu = float(gaussian.mu(total.epsilon, total.delta)) / math.sqrt(releases) * (1 - ROUNDING)
    return Budget(float(gaussian.epsilon(mu, total.delta)), total.delta)


def _mu(certificate: Certificate) -> float:
    if certificate.mu is None:
        raise NotCertifiable(f"the squares of mu add up for Gaussian noise only, not for {certificate.law.describe()}")
    return certificate.mu


def _digits() -> tuple[Array, Array]:
    """The pixels of every picture, from 0 to 1, and its ink in the upper and in the lower half."""
    _extras.require("sklearn", "sklearn")
    from sklearn.datasets import load_digits

    pixels = np.asarray(load_digits().data, dtype=np.float64) / 16
    return pixels, pixels.reshape(len(pixels), 2, 32).sum(axis=2)


def _write(out: Path, name: str, noisy: Release) -> None:
    """The certificate first, so that no noisy matrix is ever without one."""
    content = io.BytesIO()
    np.savetxt(content, noisy.value, delimiter=",", fmt="%.17g")
    released = {"file": f"{name}.csv", "sha256": digest(content.getvalue())}
    certificate = replace(noisy.certificate, released=released)
    (out / f"{name}.certificate.json").write_text(certificate.to_json() + "\n", encoding="utf-8")
    (out / f"{name}.csv").write_bytes(content.getvalue())


def _write_matrix(path: Path, value: Array) -> None:
    np.savetxt(path, value, delimiter=",", fmt="%.17g")


def _distance(value: Array, truth: Array) -> float:
    return float(np.sqrt(np.mean((value - truth) ** 2)))
