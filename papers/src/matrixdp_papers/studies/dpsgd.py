"""Private SGD with R1SMG's noise: its deep learning, and what several of its releases guarantee together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from matrixdp.accounting.accountant import Accountant
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.mechanisms import calibrate
from matrixdp.plots import figure_of
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Frobenius
from matrixdp_papers import composition, datasets
from matrixdp_papers.studies import figures, rank_one_sgd, splits
from matrixdp_papers.studies.base import NO_NOISE, Mean, Progress, Results, Study, Table, beside, titled
from matrixdp_papers.studies.gradients import CLIP, SEED
from matrixdp_papers.studies.noise_per_step import DELTA
from matrixdp_papers.studies.rank_one_sgd import (
    BY_EPOCH,
    CLAIMS,
    KINDS,
    LEARNING_RATE,
    LOT,
    ON_TRAINING,
    PUBLISHED,
    Case,
    Published,
)
from matrixdp_papers.studies.splits import CENTRED, Split

# delta' of equation 16.
SLACK = 1e-10
# Records of a smoke run.
SMOKE_TRAIN, SMOKE_TEST = 64, 32


def load(folder: datasets.Folder) -> dict[str, Split]:
    """The pictures."""
    return splits.pictures(folder)


def run(data: dict[str, Split], smoke: bool, progress: Progress) -> Results:
    """Runs the study on every dataset in the folder."""
    from matrixdp_papers.studies import training

    if smoke:
        rng = np.random.default_rng(SEED)
        data = {name: split.some(SMOKE_TRAIN, SMOKE_TEST, rng) for name, split in data.items()}
    measured = [rank_one_sgd.measure(p, data[p.name], smoke, progress) for p in PUBLISHED if p.name in data]
    epochs = {
        f"epochs, {p.name} {p.model}": f"{len(without)} of the paper's {p.epochs}, {without[-1].runs} runs"
        for p, _, without, *_ in measured
    }
    setting = {"delta": DELTA, "clip": CLIP, "seed": SEED, "smoke": smoke, "learning rate": LEARNING_RATE,
               "device": str(training.pick_device()), **epochs}  # fmt: skip
    return tell(setting, tuple(table for entry in measured for table in rank_one_sgd.tables(entry)))


# --- composition, which the paper leaves open ---


def multiplier_epsilon(multiplier: float, epochs: int, records: int, method: str = "auto") -> float:
    """The epsilon of DP-SGD with Gaussian noise, in lots of 256."""
    accountant = Accountant()
    certificate = certify(Gaussian(Isotropic((1,), multiplier * CLIP)), Frobenius(CLIP))
    accountant.add(certificate, round(epochs * records / LOT), LOT / records)
    return accountant.epsilon(DELTA, method)


# The epsilon of ten releases from the law of their loss, which a test computes from R1SMG's density.
ADDED_UP = 1173


def composed_table(counts: tuple[int, ...] = (1, 10)) -> Table:
    """The guarantee of several releases of R1SMG together, by the accountant, which rounds up."""
    claimed, size = Budget(0.005, DELTA), 100
    certificate = certify(calibrate("r1smg", shape=(size,), sensitivity=Frobenius(1.0), budget=claimed), Frobenius(1.0))
    rows = []
    for count in counts:
        accountant = Accountant()
        accountant.add(certificate, count)
        rows.append((count, count * claimed.epsilon, accountant.epsilon(DELTA)))
    columns = ("releases", "claimed epsilon, added up", "true epsilon, at most")
    note = (
        f"At delta {DELTA:g}. That of one release is exact. The accountant bounds its curve by chords, which costs 2 % "
        f"for ten: their losses, added up on a fine grid, give {ADDED_UP:,}."
    )
    return Table(f"R1SMG, {size} numbers, epsilon {claimed.epsilon:g} claimed each", columns, tuple(rows), note)


# --- the report ---


def tell(setting: Mapping[str, Any], tables: tuple[Table, ...]) -> Results:
    """The report of what was measured."""
    claims, curves, firsts = (titled(tables, end) for end in (CLAIMS, BY_EPOCH, ON_TRAINING))
    composed = composed_table()
    pairs = [(next(p for p in PUBLISHED if table.title.startswith(f"{p.name},")), table) for table in claims]
    rows = [row for published, table in pairs for row in _beside(published, table)]
    for (published, _), table in zip(pairs, firsts, strict=True):
        rows += [_beside_training(published, case, table) for case in published.cases]
    one, many = composed.rows[0], composed.rows[-1]
    ours = f"{ADDED_UP:,}, at most {many[2]:,.0f} (one: {one[2]:,.0f})"
    why = "the theorem of a single release is false already"
    rows.append((f"epsilon of {many[0]} releases, {one[1]:g} claimed each", "left open", ours, why))
    difference = [line for published, table in pairs for line in _records(published, table)] + list(DIFFERENCE)
    found, pictures = (*claims, *firsts, *curves, composed), {"figures-7-and-8": _picture(curves, firsts)}
    return Results(dict(setting), found, beside(rows), "\n".join(difference), pictures)


def _beside(published: Published, table: Table) -> list[tuple[str, str, str, str]]:
    accuracy, true, delta = table["test accuracy"], table["true epsilon"], table["true delta of a step"]
    first, name, rows = table[table.columns[-1]], published.name, []
    for case in published.cases:
        gaussian, rank_one, sized, enough = _names(case)
        same = published.sampled_from == published.records
        rows += [
            (f"{name}, multiplier {case.multiplier}: total epsilon", f"{case.total}", _totals(published, case),
             "the paper's accountant is Rényi's" if same else "its total fits neither sampling rate"),
            (f"{name}, {case.total}: R1SMG more accurate than DP-SGD", "yes",
             f"{accuracy[rank_one]} against {accuracy[gaussian]}",
             f"R1SMG reveals who is in a lot: delta of a step {delta[rank_one]:.2g}"),
            (f"{name}, {case.total}: with noise that keeps the claim", "",
             f"DP-SGD {accuracy[sized]}; R1SMG {accuracy[enough]}, for a single step", "true epsilon of DP-SGD as "
             f"published, on our records: {true[gaussian]:.4g}"),
            (f"{name}, {case.total}: budget of a step (equation 16)", str(case.step),
             _step(published, case),
             "q epsilon is no bound for sampling; log(1 + q (e^epsilon - 1)) is"),
        ]  # fmt: skip
    gaussian, rank_one, *_ = _names(published.cases[-1])
    if name == "MNIST":
        rows.append((
            f"MNIST, {published.cases[-1].total}: epochs to 95 %", "R1SMG 5, DP-SGD 14",
            f"{first[rank_one] or 'none of 30'} and {first[gaussian] or 'none of 30'}; without noise "
            f"{first[NO_NOISE]}", "clipping, the first weights and the learning rate decide, not the noise",
        ))  # fmt: skip
    return rows


def _beside_training(published: Published, case: Case, table: Table) -> tuple[str, str, str, str]:
    """Accuracy on training records, and the first epoch at the goal with TensorFlow's first weights."""
    gaussian, rank_one, *_ = _names(case)
    *_, last, goal = table.columns
    scores, reached = table[last], table[goal]

    def of(name: str) -> str:
        epoch = reached[f"{name}, test"]
        found = f"{scores[f'{name}, training']:.3g}, test {scores[f'{name}, test']:.3g}"
        return f"{found} ({published.goal:.0%}: {f'epoch {epoch}' if epoch else 'not reached'})"

    ours = f"R1SMG {of(rank_one)}; DP-SGD {of(gaussian)}; no noise {of(NO_NOISE)}"
    what = f"{published.name}, {case.total}: training accuracy, {last}, TensorFlow's first weights"
    said = "R1SMG higher, in fewer epochs" + (", such as 80 %" if published.name == "CIFAR-10" else "")
    lead = scores[f"{rank_one}, training"] - scores[f"{gaussian}, training"]
    return what, said, ours, f"clipping costs more than noise: R1SMG minus DP-SGD is {lead:+.1g}, in one run"


def _names(case: Case) -> tuple[str, str, str, str]:
    """The series of a case, as `series` has them."""
    return (f"DP-SGD {case.multiplier}", f"R1SMG {case.step.epsilon}", f"DP-SGD sized to {case.total}",
            f"R1SMG, one step in {case.total}")  # fmt: skip


def _totals(published: Published, case: Case) -> str:
    """The total epsilon, by Rényi divergences and exactly."""

    def at(records: int) -> list[float]:
        return [multiplier_epsilon(case.multiplier, published.epochs, records, kind) for kind in ("renyi", "auto")]

    renyi, exact = at(published.sampled_from)
    return f"{renyi:.4g} by Rényi, {exact:.4g} exactly{_at_own_rate(published, at)}"


def _step(published: Published, case: Case) -> str:
    """The budget of a step, by the paper's equation and by a sound one."""

    def budgets(records: int) -> list[tuple[float, float]]:
        rate = LOT / records
        return [
            composition.amortised(case.total, DELTA, published.epochs, rate, SLACK, amplification=kind)
            for kind in ("linear", "exact")
        ]

    linear, sound = budgets(published.sampled_from)
    own = _at_own_rate(published, lambda records: [epsilon for epsilon, _ in budgets(records)])
    return f"{linear[0]:.3g}, {linear[1]:.3g} by its equation; epsilon {sound[0]:.3g} by a sound one{own}"


def _at_own_rate(published: Published, at: Callable[[int], list[float]]) -> str:
    """The same two numbers at the sampling rate of the whole training set, where that is not the paper's."""
    if published.sampled_from == published.records:
        return ""
    first, second = at(published.records)
    return f" (at q = {LOT}/{published.records:,}: {first:.4g} and {second:.4g})"


def _records(published: Published, table: Table) -> list[str]:
    """A warning where a part of the records is available."""
    held = int(table.title.split(", ")[2].removesuffix(" records").replace(",", ""))
    if held == published.records:
        return []
    return [
        f"- {published.name}: {held:,} of its {published.records:,} records are available, so a record is in a lot "
        f"with probability {LOT / held:.3g}. The paper has {LOT}/{published.sampled_from:,}, as on MNIST. True "
        "epsilons are those of the records available. Tested on 2,000 records."
    ]


def _epochs(table: Table) -> list[int]:
    return [int(column.removeprefix("epoch ")) for column in table.columns if column.startswith("epoch ")]


def _picture(curves: list[Table], firsts: list[Table]) -> Figure:
    """Figures 7 and 8, a panel for each case: test accuracy by epoch; then test and training accuracy of one run."""
    tables = (*curves, *firsts)
    figure = figure_of(10.0, 3.2 * len(tables) + 0.6)
    grid = figure.subplots(len(tables), 2, squeeze=False, sharey=True)
    style = figures.styles((*LABELS, *(label + ON_RECORDS for label in LABELS[:3])))
    for row, table in zip(grid, tables, strict=True):
        published = next(p for p in PUBLISHED if table.title.startswith(f"{p.name},"))
        epochs = _epochs(table)
        found = {name: scores[: len(epochs)] for name, *scores in table.rows}
        for panel, case in zip(row, published.cases, strict=True):
            shown = dict(zip(LABELS, (NO_NOISE, *_names(case)), strict=True))
            title, what = f"{published.name}, claimed epsilon {case.total}", "test accuracy"
            if table.title.endswith(ON_TRAINING):
                ends = dict(zip(KINDS, ("", ON_RECORDS), strict=True))
                shown = {f"{label}{ends[kind]}": f"{shown[label]}, {kind}" for label in LABELS[:3] for kind in KINDS}
                title, what = f"{title}, TensorFlow's first weights", "accuracy"
            series: dict[str, list[float | Mean]] = {
                label: [math.nan if score is None else score for score in found[name]] for label, name in shown.items()
            }
            figures.curves(panel, epochs, series, title=title, labels=("epoch", what), scales=LINEAR, style=style)
    for panel in grid.flat:
        panel.set_ylim(0, 1)
    figures.legend_below(figure, grid.flat, columns=3)
    return figure


LINEAR = ("linear", "linear")
ON_RECORDS = ", on training records"
LABELS = (
    NO_NOISE,
    "DP-SGD, published noise",
    "R1SMG, published noise",
    "DP-SGD, sized to the claim",
    "R1SMG, enough noise for one step",
)
DIFFERENCE = (
    "- The density of R1SMG's noise has a pole at the true gradient. A step tells almost surely whether a record was "
    "in its lot, and no composition of steps can mend that.",
    "- Its noise has about a hundredth of the std of DP-SGD's, so it shows what clipping alone leaves. DP-SGD ends "
    "close to it: the noise costs little, and clipping costs the rest.",
    "- Accuracy on training records is that of one run of each series. R1SMG ends above DP-SGD at every budget, by "
    "0.002 to 0.008. With noise of either kind it stays close to that on test records. Only training without clipping "
    "exceeds the paper's 80 % on CIFAR-10.",
    "- The paper's 95 % after 5 epochs against 14 was not found. The paper does not state its learning rate; that of "
    "the tutorial it follows, 0.15, is taken. TensorFlow's first weights are larger than PyTorch's and learn faster. "
    "Then R1SMG has 95 % on test records in epoch 21, and DP-SGD in 22, or in 24 with the smaller budget.",
    "- IMGM's noise on gradients is the study `gradients`.",
    CENTRED,
)

STUDY = Study(
    name="dpsgd",
    title="Private SGD (R1SMG, case study III)",
    source="ji2024less, section 7.3, figures 7 and 8",
    claim=(
        "With the same total budget, (1.795, 1e-5) and (16.983, 1e-5) on MNIST, (2.673, 1e-5) and (20.713, 1e-5) on "
        "CIFAR-10, SGD with rank-one noise is more accurate than DP-SGD. It needs fewer epochs: 95 % on MNIST after 5, "
        "against 14."
    ),
    load=load,
    run=run,
    tell=tell,
)
