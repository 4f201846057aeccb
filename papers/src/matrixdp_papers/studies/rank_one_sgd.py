"""The training of R1SMG's case study III: its settings, the noise of each series, and accuracy by epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Isotropic
from matrixdp.mechanisms import calibrate
from matrixdp.sensitivity import Frobenius
from matrixdp_papers import composition
from matrixdp_papers.studies.base import Mean, Progress, Table
from matrixdp_papers.studies.gradients import CLIP, DELTA, SEED, Truth, truth
from matrixdp_papers.studies.recalibrated import recalibrated
from matrixdp_papers.studies.splits import Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone, so that every install can list the study
    from torch import nn

    from matrixdp_papers.studies.training import Task

REPEATS = 3
LOT, LEARNING_RATE = 256, 0.15
# The paper does not state its learning rate, so the epochs to its goal are counted at others too.
RATES, RATE_EPOCHS = (0.5, 1.5), 15


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


class Curve(NamedTuple):
    """The accuracy after each epoch, on the test records and on the training records."""

    test: list[Mean]
    training: list[Mean]

    def first(self, goal: float) -> int | None:
        """The first epoch with this test accuracy."""
        return next((epoch for epoch, mean in enumerate(self.test, 1) if mean.mean >= goal), None)


class Outcome(NamedTuple):
    """What came of a series: its accuracy, and what it guarantees."""

    series: Series
    curve: Curve
    truth: Truth


class Measured(NamedTuple):
    """What came out for a data set: without noise, the series of each case, and the epochs needed by learning rate."""

    published: Published
    task: Task
    without: Curve
    cases: dict[Case, list[Outcome]]
    rates: Table | None

    @property
    def curves(self) -> dict[str, Curve]:
        """The accuracies by series."""
        outcomes = (outcome for case in self.cases.values() for outcome in case)
        return {"no noise": self.without, **{outcome.series.name: outcome.curve for outcome in outcomes}}


def measure(published: Published, split: Split, smoke: bool, progress: Progress) -> Measured:
    """Trains every series on a data set."""
    from matrixdp_papers import networks
    from matrixdp_papers.studies import training

    lot, (trained, repeats) = LOT, training.affordable(published.trained, REPEATS, least=3)
    if smoke:
        lot, trained, repeats = len(split.train.label) // 2, 1, 1
    train, test = training.on_device(split.train), training.on_device(split.test)
    make = getattr(networks, published.model)
    task = training.Task(published.name, lambda: networks.as_tensorflow(make()), train, test, lot, LEARNING_RATE, CLIP)
    steps, seeds = task.steps(published.epochs), range(SEED, SEED + repeats)
    without = _curve(task, (training.without_noise(task, trained, seed) for seed in seeds))
    cases: dict[Case, list[Outcome]] = {}
    for case in published.cases:
        for each in progress(series(task, published, case, trained), published.name):
            curve = _trained(task, published, case, each, seeds)
            true = truth(each.law, case.total, steps, task.sampling_rate)
            cases.setdefault(case, []).append(Outcome(each, curve, true))
    rates = None
    if published.name == "MNIST":
        variants = {f"rate {rate:g}": replace(task, learning_rate=rate) for rate in RATES}
        variants["PyTorch's weights"] = replace(task, network=make)
        rates = by_rate(variants, published, min(trained, RATE_EPOCHS), seeds, progress)
    return Measured(published, task, without, cases, rates)


def _trained(task: Task, published: Published, case: Case, each: Series, seeds: range) -> Curve:
    from matrixdp_papers.studies import training

    budget, planned = Budget(case.total, DELTA), published.epochs
    return _curve(
        task, (training.with_noise(task, each.law, budget, planned, seed, epochs=each.epochs) for seed in seeds)
    )


def _curve(task: Task, runs: Iterable[Iterable[nn.Module]]) -> Curve:
    """The means over runs; each yields its network after each epoch."""
    from matrixdp_papers.studies import training

    scores = np.array([training.by_epoch(networks, task.test, task.train) for networks in runs])
    test, train = ([Mean.of(column) for column in part] for part in scores.transpose(2, 1, 0))
    return Curve(test, train)


def by_rate(variants: Mapping[str, Task], published: Published, epochs: int, seeds: range, progress: Progress) -> Table:
    """How many epochs are needed to the goal in variants of a task, with the larger budget."""
    case, rows = published.cases[-1], []
    for name in progress(list(variants), f"{published.name}, learning rates"):
        task = variants[name]
        for each in series(task, published, case, epochs)[:2]:
            curve = _trained(task, published, case, each, seeds)
            rows.append((f"{each.name}, {name}", curve.first(published.goal), curve.test[-1]))
    columns = ("series", f"epochs to {published.goal:.0%}", f"test accuracy, epoch {epochs}")
    note = (
        f"Elsewhere the learning rate is {LEARNING_RATE:g} and the first weights are TensorFlow's. PyTorch's are here "
        "at that rate."
    )
    return Table(f"{published.name}, claimed epsilon {case.total}{BY_RATE}", columns, tuple(rows), note)


CLAIMS, BY_RATE = ": claims and accuracy", ": epochs needed, by learning rate"
TEST, TRAINING = ": test accuracy by epoch", ": training accuracy by epoch"


def tables(found: Measured) -> list[Table]:
    """Claims and accuracy, accuracy by epoch, and where measured the epochs needed by learning rate."""
    published, task, goal = found.published, found.task, found.published.goal
    trained, plain = len(found.without.test), found.without
    rows: list[tuple[Any, ...]] = [
        ("no noise", None, None, None, None, plain.test[-1], plain.training[-1], plain.first(goal))
    ]
    for case, outcomes in found.cases.items():
        for each, curve, true in outcomes:
            last = curve.test[-1], curve.training[-1], curve.first(goal)
            rows.append((each.name, each.law.root_mean_square, case.total, true.epsilon, true.delta, *last))
    columns = ("series", "std of the noise", "claimed epsilon", "true epsilon", "true delta of a step", "test accuracy",
               "training accuracy", f"epochs to {goal:.0%}")  # fmt: skip
    note = (
        f"Claims and truths are for {published.epochs} epochs, at delta {DELTA:g} and at the claimed epsilon; "
        f"{trained} were run, and a single one with noise that is enough for one step. The true delta of R1SMG is that "
        "of one step, a lower bound. The noise is that on the sum of the clipped gradients."
    )
    marks = [mark for mark in (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 60, 80, 100) if mark <= trained]
    about = f"{published.name}, {published.model}, {len(task.train):,} records, lots of {task.lot}"

    def by_epoch(title: str, curves: dict[str, list[Mean]]) -> Table:
        lines = tuple(
            (name, *(means[mark - 1] if mark <= len(means) else None for mark in marks))
            for name, means in curves.items()
        )
        return Table(f"{about}{title}", ("series", *(f"epoch {mark}" for mark in marks)), lines)

    return [
        Table(f"{about}{CLAIMS}", columns, tuple(rows), note),
        by_epoch(TEST, {name: curve.test for name, curve in found.curves.items()}),
        by_epoch(TRAINING, {name: curve.training for name, curve in found.curves.items()}),
        *([] if found.rates is None else [found.rates]),
    ]
