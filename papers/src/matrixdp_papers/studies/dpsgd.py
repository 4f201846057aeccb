"""Private SGD in two papers: R1SMG's deep learning, and the gradients of IMGM, whose results were left open."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from matrixdp.accounting.accountant import Accountant
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Isotropic
from matrixdp.mechanisms import calibrate
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Frobenius
from matrixdp_papers import composition, datasets
from matrixdp_papers.studies import figures, imgm_gradients, splits
from matrixdp_papers.studies.base import Mean, Progress, Results, Study, Table
from matrixdp_papers.studies.imgm_gradients import CLIP, DELTA, SEED, Truth, truth
from matrixdp_papers.studies.recalibrated import recalibrated
from matrixdp_papers.studies.splits import Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone, so that every install can list the study
    from matrixdp_papers.studies.training import Task

REPEATS = 3
LOT, LEARNING_RATE = 256, 0.15
# delta' of equation 16.
SLACK = 1e-10
# Records of a smoke run.
SMOKE_TRAIN, SMOKE_TEST = 64, 32


class Case(NamedTuple):
    """A noise multiplier, the epsilon that the paper says it has in all, and what R1SMG may then spend on a step."""

    multiplier: float
    total: float
    step: Budget


class Published(NamedTuple):
    """An experiment of section 7.3.

    Attributes:
        name: of the data set.
        model: the network in matrixdp_papers.networks.
        records: how many the paper has.
        epochs: how many the paper has, for which the noise is sized.
        trained: how many of them are run here.
        goal: an accuracy whose epoch is reported.
        cases: its settings.
    """

    name: str
    model: str
    records: int
    epochs: int
    trained: int
    goal: float
    cases: tuple[Case, ...]


PUBLISHED = (
    Published(
        "MNIST", "TutorialCNN", 60_000, 30, 30, 0.95,
        (Case(1.1, 1.795, Budget(0.71, 3.33e-7)), Case(0.5, 16.983, Budget(5.42, 3.33e-7))),
    ),
    Published(
        "CIFAR-10", "TutorialCIFAR", 50_000, 100, 100, 0.45,
        (Case(1.1, 2.673, Budget(0.54, 1e-7)), Case(0.5, 20.713, Budget(3.52, 1e-7))),
    ),
)  # fmt: skip


def load(folder: datasets.Folder) -> dict[str, Split]:
    """The data sets of both papers; SVHN if its files are there."""
    cora = splits.cora(datasets.load_cora(folder))
    return {**splits.pictures(folder), "Adult": splits.adult(folder), "Cora": cora}


# --- what is true ---


def multiplier_epsilon(multiplier: float, epochs: int, records: int, method: str = "auto") -> float:
    """The epsilon of DP-SGD with Gaussian noise, in lots of 256."""
    accountant = Accountant()
    certificate = certify(Gaussian(Isotropic((1,), multiplier * CLIP)), Frobenius(CLIP))
    accountant.add(certificate, round(epochs * records / LOT), LOT / records)
    return accountant.epsilon(DELTA, method)


def true_for_one_step(law: NoiseLaw, total: Budget, sampling_rate: float) -> NoiseLaw:
    """The law in the least size at which a single step keeps the budget that was meant for all."""
    step = composition.before_sampling(total.epsilon, total.delta, sampling_rate)
    return recalibrated(law, Frobenius(CLIP), Budget(*step))


class Series(NamedTuple):
    """A way to train: its noise, and the epochs to run."""

    name: str
    law: NoiseLaw
    epochs: int


def series(task: Task, published: Published, case: Case, trained: int) -> tuple[Series, ...]:
    """DP-SGD and R1SMG as published; then Gaussian noise that keeps the claim, and R1SMG if there were but one step."""
    from matrixdp_papers.studies import training

    total, size = Budget(case.total, DELTA), sum(math.prod(shape) for shape in task.shapes())
    rank_one = calibrate("r1smg", shape=(size,), sensitivity=Frobenius(CLIP), budget=case.step)
    sized = training.trainer(task, "analytic", total, published.epochs, SEED).noise.law
    enough = true_for_one_step(rank_one, total, task.sampling_rate)
    return (
        Series(f"DP-SGD {case.multiplier}", Gaussian(Isotropic((size,), case.multiplier * CLIP)), trained),
        Series(f"R1SMG {case.step.epsilon}", rank_one, trained),
        Series(f"DP-SGD sized to {case.total}", sized, trained),
        Series(f"R1SMG, one step in {case.total}", enough, 1),  # an epoch shows that nothing is learned
    )


# --- R1SMG, section 7.3 ---


class Outcome(NamedTuple):
    """What came of a series: its accuracy after each epoch, and what it guarantees."""

    series: Series
    means: list[Mean]
    truth: Truth

    @property
    def final(self) -> Mean:
        """The accuracy at the end."""
        return self.means[-1]


class Measured(NamedTuple):
    """What came out for a data set: without noise, and the series of each case."""

    published: Published
    task: Task
    without: list[Mean]
    cases: dict[Case, list[Outcome]]

    @property
    def curves(self) -> dict[str, list[Mean]]:
        """The accuracy after each epoch by series."""
        outcomes = (outcome for case in self.cases.values() for outcome in case)
        return {"no noise": self.without, **{outcome.series.name: outcome.means for outcome in outcomes}}


def measure(published: Published, split: Split, smoke: bool, progress: Progress) -> Measured:
    """Trains every series on a data set."""
    from matrixdp_papers import networks
    from matrixdp_papers.studies import training

    lot, (trained, repeats) = LOT, training.affordable(published.trained, REPEATS, least=3)
    if smoke:
        lot, trained, repeats = len(split.train.label) // 2, 1, 1
    train, test = training.on_device(split.train), training.on_device(split.test)
    task = training.Task(published.name, getattr(networks, published.model), train, test, lot, LEARNING_RATE, CLIP)
    steps, seeds = task.steps(published.epochs), range(SEED, SEED + repeats)
    without = _means([training.by_epoch(training.without_noise(task, trained, seed), test) for seed in seeds])
    cases: dict[Case, list[Outcome]] = {}
    for case in published.cases:
        budget, planned = Budget(case.total, DELTA), published.epochs
        for each in progress(series(task, published, case, trained), published.name):
            passes = (training.with_noise(task, each.law, budget, planned, seed, epochs=each.epochs) for seed in seeds)
            means = _means([training.by_epoch(trained, test) for trained in passes])
            true = truth(each.law, case.total, steps, task.sampling_rate)
            cases.setdefault(case, []).append(Outcome(each, means, true))
    return Measured(published, task, without, cases)


def _means(runs: list[list[float]]) -> list[Mean]:
    return [Mean.of(scores) for scores in zip(*runs, strict=True)]


def _tables(found: Measured) -> tuple[Table, Table]:
    published, task = found.published, found.task
    trained = len(found.without)
    rows: list[tuple[Any, ...]] = [
        ("no noise", None, None, None, None, found.without[-1], _first(found.without, published))
    ]
    for case, outcomes in found.cases.items():
        for each, means, true in outcomes:
            first = _first(means, published)
            rows.append((each.name, each.law.root_mean_square, case.total, true.epsilon, true.delta, means[-1], first))
    columns = ("series", "std of the noise", "claimed epsilon", "true epsilon", "true delta of a step", "test accuracy",
               f"epochs to {published.goal:.0%}")  # fmt: skip
    note = (
        f"Claims and truths are for {published.epochs} epochs, at delta {DELTA:g} and at the claimed epsilon; "
        f"{trained} were run, and a single one with noise that is enough for one step. The true delta of R1SMG is that "
        "of one step, a lower bound. The noise is that on the sum of the clipped gradients."
    )
    marks = [mark for mark in (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 60, 80, 100) if mark <= trained]
    by_epoch = tuple(
        (name, *(means[mark - 1] if mark <= len(means) else None for mark in marks))
        for name, means in found.curves.items()
    )
    about = f"{published.name}, {published.model}, {len(task.train):,} records, lots of {task.lot}"
    return (
        Table(f"{about}: claims and accuracy", columns, tuple(rows), note),
        Table(f"{about}: test accuracy by epoch", ("series", *(f"epoch {mark}" for mark in marks)), by_epoch),
    )


def _first(means: list[Mean], published: Published) -> int | None:
    """The first epoch with the accuracy that is the goal."""
    return next((epoch for epoch, mean in enumerate(means, 1) if mean.mean >= published.goal), None)


def _picture(measured: list[Measured]) -> Figure:
    """Figures 7 and 8: test accuracy by epoch."""
    figure, panels = figures.panels(len(measured), width=6.4)
    for panel, found in zip(panels, measured, strict=True):
        for index, (name, means) in enumerate(found.curves.items()):
            colour, mark = figures.COLOURS[index % len(figures.COLOURS)], figures.MARKS[index % len(figures.MARKS)]
            heights = [mean.mean for mean in means]
            panel.plot(range(1, len(means) + 1), heights, label=name, color=colour, marker=mark, markersize=3)
        panel.set(xlabel="epoch", ylabel="test accuracy", title=found.published.name)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=6)
    return figure


def _found(found: Measured) -> list[str]:
    lines = []
    for case, (gaussian, rank_one, sized, enough) in found.cases.items():
        step = certify(rank_one.series.law, Frobenius(CLIP))
        lines.append(
            f"- {found.published.name}, multiplier {case.multiplier}: accuracy without noise {found.without[-1]}. "
            f"DP-SGD {gaussian.final}, at a true epsilon of {gaussian.truth.epsilon:.4g} (the paper says "
            f"{case.total}). R1SMG with the paper's budget for a step {rank_one.final}; the true delta of a step is "
            f"{step.delta(case.step.epsilon):.3g} at the claimed {case.step.epsilon}, and its epsilon at {DELTA:g} is "
            f"{step.epsilon(DELTA):.3g}. With noise that does keep epsilon {case.total}: Gaussian {sized.final}; R1SMG "
            f"{enough.final}, if a single step were all."
            + imgm_gradients.beaten(found.without[-1], {each.series.name: [each.final] for each in found.cases[case]})
        )
    return lines


def _difference(found: Measured) -> list[str]:
    published, task, lines = found.published, found.task, []
    rate, setting = LOT / published.records, f"{published.records:,} records and {published.epochs} epochs"
    for multiplier, total, step in published.cases:
        renyi, exact = (
            multiplier_epsilon(multiplier, published.epochs, published.records, method) for method in ("renyi", "auto")
        )
        linear = composition.amortised(total, DELTA, published.epochs, rate, SLACK, amplification="linear")
        sound = composition.amortised(total, DELTA, published.epochs, rate, SLACK)
        lines.append(
            f"- {published.name}, multiplier {multiplier}, with {setting}: epsilon is {renyi:.4g} by the Rényi "
            f"accountant and {exact:.4g} by the exact one; the paper says {total}. Its equation 16 gives a step "
            f"({linear[0]:.3g}, {linear[1]:.3g}) of that; the paper has ({step.epsilon:g}, {step.delta:g}). With the "
            "amplification that holds, log(1 + q (e^epsilon - 1)) in place of q epsilon, a step may spend "
            f"{sound[0]:.3g}."
        )
    if len(task.train) != published.records:
        lines.append(
            f"- {published.name}: {len(task.train):,} of the paper's {published.records:,} records are at hand. So a "
            f"record is in a batch with probability {task.sampling_rate:.3g}, not {rate:.3g}, and the same multiplier "
            "protects it less; the true epsilons are those of the records at hand."
        )
    return lines


def _better(measured: list[Measured]) -> str:
    """How often R1SMG wins as published, and why."""
    pairs = [(rank_one, plain) for found in measured for plain, rank_one, *_ in found.cases.values()]
    wins = sum(rank_one.final.mean > plain.final.mean for rank_one, plain in pairs)
    ratio = max(rank_one.series.law.root_mean_square / plain.series.law.root_mean_square for rank_one, plain in pairs)
    gap = max(abs(rank_one.final.mean - plain.final.mean) for rank_one, plain in pairs)
    return (
        f"- As published R1SMG is more accurate than DP-SGD in {wins} of {len(pairs)} settings, but it protects "
        "nothing. The density of its noise has a pole at the true gradient, so that a step tells almost surely whether "
        "a record was in its batch. No composition of steps can mend that. Its noise has at most "
        f"{ratio:.2g} times the std of DP-SGD's, so that it shows what clipping alone leaves. The two end within "
        f"{gap:.2g} of each other. So little does the noise of DP-SGD cost at this learning rate, and the rest of the "
        "distance to training without noise is clipping."
    )


def run(data: dict[str, Split], smoke: bool, progress: Progress) -> Results:
    """Both papers, as far as their data are there."""
    from matrixdp_papers.studies import training

    if smoke:
        rng = np.random.default_rng(SEED)
        data = {name: split.some(SMOKE_TRAIN, SMOKE_TEST, rng) for name, split in data.items()}
    measured = [measure(p, data[p.name], smoke, progress) for p in PUBLISHED if p.name in data]
    gradients = imgm_gradients.run(data, smoke, progress)
    found = [line for entry in measured for line in _found(entry)] + gradients.found
    difference = [
        _better(measured),
        *(line for entry in measured for line in _difference(entry)),
        *gradients.difference,
    ]
    epochs = {
        f"epochs, {p.name} {p.model}": f"{len(without)} of the paper's {p.epochs}, {without[-1].runs} runs"
        for p, _, without, _ in measured
    }
    setting = {"delta": DELTA, "clip": CLIP, "seed": SEED, "smoke": smoke, "learning rate (R1SMG)": LEARNING_RATE,
               "device": str(training.pick_device()), **epochs, **gradients.setting}  # fmt: skip
    tables = (*(table for entry in measured for table in _tables(entry)), *gradients.tables)
    pictures = {"figures-7-and-8": _picture(measured), "lots": gradients.figure}
    return Results(setting, tables, "\n".join(found), "\n".join(difference), pictures)


STUDY = Study(
    name="dpsgd",
    title="Private SGD (R1SMG, case study III; IMGM, type I)",
    source="ji2024less, section 7.3, figures 7 and 8; yang2021improved, section 5",
    claim=(
        "R1SMG: with the same total budget, (1.795, 1e-5) and (16.983, 1e-5) on MNIST, (2.673, 1e-5) and "
        "(20.713, 1e-5) on CIFAR-10, SGD with rank-one noise is more accurate than DP-SGD. It needs fewer epochs: 95 % "
        "on MNIST after 5, against 14. IMGM: perturbs the gradients of every lot under Theorem 3.4 of Kairouz, "
        "Oh and Viswanath, next to the classic and analytic Gaussian, MVG, the moments accountant and the matrix "
        "mechanism. The results of this type I are said to be in progress."
    ),
    load=load,
    run=run,
)
