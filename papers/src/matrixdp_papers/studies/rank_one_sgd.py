"""The training of R1SMG's case study III: its settings, the noise of each series, and accuracy by epoch."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Isotropic
from matrixdp.mechanisms import calibrate
from matrixdp.sensitivity import Frobenius
from matrixdp_papers import composition
from matrixdp_papers.studies.base import NO_NOISE, Mean, Progress, Table
from matrixdp_papers.studies.gradients import CLIP, SEED, Truth, truth
from matrixdp_papers.studies.noise_per_step import DELTA
from matrixdp_papers.studies.recalibrated import recalibrated
from matrixdp_papers.studies.splits import Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone, so that every install can list the study
    from torch import nn

    from matrixdp_papers.studies.training import Task

REPEATS = 3
LOT, LEARNING_RATE = 256, 0.15


class Case(NamedTuple):
    """A noise multiplier, the total epsilon that the paper states for it, and the budget of R1SMG per step."""

    multiplier: float
    total: float
    step: Budget


class Published(NamedTuple):
    """An experiment of section 7.3.

    Attributes:
        name: of the data set.
        model: the network in matrixdp_papers.networks.
        records: of the whole training set.
        sampled_from: the paper's q is 256 over this. It states 60,000 for MNIST, and "the same parameter setups" for
            CIFAR-10, which has 50,000.
        epochs: the paper's number of epochs, for which the noise is calibrated.
        goal: an accuracy; the first epoch that reaches it is reported.
        cases: its settings.
    """

    name: str
    model: str
    records: int
    sampled_from: int
    epochs: int
    goal: float
    cases: tuple[Case, ...]


PUBLISHED = (
    Published(
        "MNIST", "TutorialCNN", 60_000, 60_000, 30, 0.95,
        (Case(1.1, 1.795, Budget(0.71, 3.33e-7)), Case(0.5, 16.983, Budget(5.42, 3.33e-7))),
    ),
    Published(
        "CIFAR-10", "TutorialCIFAR", 50_000, 60_000, 100, 0.45,
        (Case(1.1, 2.673, Budget(0.54, 1e-7)), Case(0.5, 20.713, Budget(3.52, 1e-7))),
    ),
)  # fmt: skip


def true_for_one_step(law: NoiseLaw, total: Budget, sampling_rate: float) -> NoiseLaw:
    """The law with the least scale at which a single step keeps the budget of all steps."""
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


class Outcome(NamedTuple):
    """The result of a series: its test accuracy after each epoch, and its guarantee."""

    series: Series
    means: list[Mean]
    truth: Truth


class Measured(NamedTuple):
    """What came out for a data set: without noise, the series of each case, and accuracy on the training records."""

    published: Published
    task: Task
    without: list[Mean]
    cases: dict[Case, list[Outcome]]
    training: Table

    @property
    def curves(self) -> dict[str, list[Mean]]:
        """The test accuracy after each epoch by series."""
        outcomes = (outcome for case in self.cases.values() for outcome in case)
        return {NO_NOISE: self.without, **{outcome.series.name: outcome.means for outcome in outcomes}}


def measure(published: Published, split: Split, smoke: bool, progress: Progress) -> Measured:
    """Trains every series on a data set."""
    from matrixdp_papers import networks
    from matrixdp_papers.studies import training

    lot, (trained, repeats) = LOT, training.affordable(published.epochs, REPEATS, least=3)
    if smoke:
        lot, trained, repeats = len(split.train.label) // 2, 1, 1
    train, test = training.on_device(split.train), training.on_device(split.test)
    make = getattr(networks, published.model)
    task = training.Task(published.name, make, train, test, lot, LEARNING_RATE, CLIP)
    steps, seeds = task.steps(published.epochs), range(SEED, SEED + repeats)
    without = _means([training.by_epoch(training.without_noise(task, trained, seed), test) for seed in seeds])
    cases: dict[Case, list[Outcome]] = {}
    for case in published.cases:
        for each in progress(series(task, published, case, trained), published.name):
            passes = (_with_noise(task, published, case, each, seed) for seed in seeds)
            means = _means([training.by_epoch(trained, test) for trained in passes])
            true = truth(each.law, case.total, steps, task.sampling_rate)
            cases.setdefault(case, []).append(Outcome(each, means, true))
    tutorial = replace(task, network=lambda: networks.as_tensorflow(make()))
    return Measured(published, task, without, cases, on_training(tutorial, published, trained, progress))


def _with_noise(task: Task, published: Published, case: Case, each: Series, seed: int) -> Iterator[nn.Module]:
    from matrixdp_papers.studies import training

    budget = Budget(case.total, DELTA)
    return training.with_noise(task, each.law, budget, published.epochs, seed, epochs=each.epochs)


def _means(runs: list[list[list[float]]]) -> list[Mean]:
    """By epoch, from the test accuracy of each run."""
    return [Mean.of(score for (score,) in scores) for scores in zip(*runs, strict=True)]


CLAIMS, BY_EPOCH, ON_TRAINING = (
    ": claims and accuracy",
    ": test accuracy by epoch",
    ": with TensorFlow's first weights",
)


def on_training(
    task: Task, published: Published, epochs: int, progress: Progress, only: Container[str] | None = None
) -> Table:
    """Test and training accuracy by epoch, one run without noise and one of each published noise.

    With `only`, no other series is trained; `matrixdp study --results` adds the result to that of an earlier run.
    """
    from matrixdp_papers.studies import training

    runs = {NO_NOISE: training.without_noise(task, epochs, SEED)}
    for case in published.cases:
        for each in series(task, published, case, epochs)[:2]:
            runs[each.name] = _with_noise(task, published, case, each, SEED)
    rows: list[tuple[Any, ...]] = []
    for name in progress(list(runs), f"{published.name}, training accuracy"):
        scores: Sequence[Sequence[float | None]] = [[None, None]] * epochs
        if only is None or name in only:
            scores = training.by_epoch(runs[name], task.test, task.train)
        for kind, found in zip(KINDS, zip(*scores, strict=True), strict=True):
            rows.append((f"{name}, {kind}", *(found[mark - 1] for mark in _marks(epochs)), _first(found, published)))
    columns = ("accuracy", *(f"epoch {mark}" for mark in _marks(epochs)), f"epochs to {published.goal:.0%}")
    claimed = " and ".join(f"{case.total}" for case in published.cases)
    note = f"One run of each series, claimed epsilon {claimed}. The other tables are of PyTorch's first weights."
    return Table(f"{_about(published, task)}{ON_TRAINING}", columns, tuple(rows), note)


KINDS = ("test", "training")


def _about(published: Published, task: Task) -> str:
    return f"{published.name}, {published.model}, {len(task.train):,} records, lots of {task.lot}"


def tables(found: Measured) -> list[Table]:
    """Claims and accuracy, test accuracy by epoch, and accuracy on the training records."""
    published, task = found.published, found.task
    trained = len(found.without)
    rows: list[tuple[Any, ...]] = [
        (NO_NOISE, None, None, None, None, found.without[-1], _first([m.mean for m in found.without], published))
    ]
    for case, outcomes in found.cases.items():
        for each, means, true in outcomes:
            first = _first([mean.mean for mean in means], published)
            rows.append((each.name, each.law.root_mean_square, case.total, true.epsilon, true.delta, means[-1], first))
    columns = ("series", "std of the noise", "claimed epsilon", "true epsilon", "true delta of a step", "test accuracy",
               f"epochs to {published.goal:.0%}")  # fmt: skip
    note = (
        f"Claims and truths are for {published.epochs} epochs, at delta {DELTA:g} and at the claimed epsilon; "
        f"{trained} were run, and a single one with noise that is enough for one step. The true delta of R1SMG is that "
        "of one step, a lower bound. The noise is that on the sum of the clipped gradients."
    )
    marks = _marks(trained)
    by_epoch = tuple(
        (name, *(means[mark - 1] if mark <= len(means) else None for mark in marks))
        for name, means in found.curves.items()
    )
    about = _about(published, task)
    return [
        Table(f"{about}{CLAIMS}", columns, tuple(rows), note),
        Table(f"{about}{BY_EPOCH}", ("series", *(f"epoch {mark}" for mark in marks)), by_epoch),
        found.training,
    ]


def _marks(trained: int) -> list[int]:
    """The epochs that the tables show."""
    return [mark for mark in (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 60, 80, 100) if mark <= trained]


def _first(scores: Sequence[float | None], published: Published) -> int | None:
    """The first epoch that reaches the goal."""
    return next((epoch for epoch, score in enumerate(scores, 1) if score and score >= published.goal), None)
