"""MGM's type II: vertical federated learning, by the paper's accounting and at equal true guarantees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Isotropic
from matrixdp.mechanisms import calibrate
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Entrywise, Frobenius, OneRow, Sensitivity
from matrixdp_papers import datasets
from matrixdp_papers.datasets import Labelled
from matrixdp_papers.studies import federated_report, splits
from matrixdp_papers.studies.base import NO_NOISE, Mean, Progress, Results, Study, Table, beside, titled
from matrixdp_papers.studies.federated_report import ADDED_UP, CONSTANT, PER_ELEMENT, Found
from matrixdp_papers.studies.recalibrated import recalibrated
from matrixdp_papers.studies.splits import Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone, so that every install can list the study
    from matrixdp_papers.studies.split_learning import Release

SEED = 2023
DELTA, REPEATS = 1e-5, 3
EPSILONS = (1.0, 2.0, 5.0, 10.0)
CORRECTED_EPSILONS = (1.0, 2.0, 5.0, 8.0, 10.0)
# The norm of a record's gradient in a participant's own training, and the share of the budget that this training gets.
CLIP, UPDATE_SHARE = 0.1, 0.5
SMOKE_TRAIN, SMOKE_TEST = 60, 40
PAPER, EQUAL = ": the paper's accounting, matrices of", ": equal true guarantees"
CORRECTED = ": a discriminant that is corrected for the noise"
PUBLISHED = (PER_ELEMENT, ADDED_UP, "classic", "analytic", "mvg", "mgm", "udn", "idn", "matrix-mechanism")
COMPOSED = "idn, composed"


class Experiment(NamedTuple):
    """A column of table 3.

    Attributes:
        name: of the data set.
        rows, features: the shape of a released matrix.
        hidden: widths of the layers before the features, which the paper does not state.
        lot: records of a step of the training, which may be many released matrices.
        epochs: how often each record is released.
        learning_rate: of SGD, everywhere.
    """

    name: str
    rows: int
    features: int
    hidden: tuple[int, ...]
    lot: int
    epochs: int
    learning_rate: float


EXPERIMENTS = (
    Experiment("Adult", 2, 10, (32,), 256, 5, 0.3),
    Experiment("Purchase-100", 100, 64, (256,), 100, 20, 0.5),
    Experiment("Location", 100, 128, (), 100, 30, 0.5),
    Experiment("Texas-100", 30, 64, (256,), 30, 10, 0.5),
)


class Task(NamedTuple):
    """Training and test records, and how many of their columns the first participant has."""

    split: Split
    first: int


def load(folder: datasets.Folder) -> dict[str, Task]:
    """Adult and Location; Purchase-100 and Texas-100 if their files are there. The sizes are those of table 3."""
    tasks = {
        "Adult": Task(splits.adult(folder), datasets.ADULT_TWO_PARTS[0].stop),
        "Location": _halved(datasets.load_location(folder), 1_600, 3_410),
    }
    if datasets.has(datasets.PURCHASE100, folder):
        tasks["Purchase-100"] = _halved(datasets.load_purchase100(folder), 10_000, 97_324)
    if all(datasets.has(source, folder) for source in datasets.TEXAS100):
        tasks["Texas-100"] = _halved(datasets.load_texas100(folder), 10_000, 57_330)
    return tasks


def _halved(data: Labelled, train: int, test: int) -> Task:
    order = np.random.default_rng(SEED).permutation(len(data.label))
    known, new = (Labelled(data.records[part], data.label[part]) for part in (order[:train], order[train:][:test]))
    return Task(Split(known, new), data.records.shape[1] // 2)


# --- the noise of a release ---


class Point(NamedTuple):
    """A way to release features.

    Attributes:
        series: its name.
        epsilon: the claimed epsilon.
        release: how the features are released.
        each: the epsilon that the mechanism was given for a matrix, or an element.
        record: the epsilon of a record at a participant, counting its own rows only; if networks learn without noise,
            the truth is larger. For R1SMG, of one release.
        participant: the epsilon of everything that a participant sends, if all its data may change; None where it is
            not known.
        exact: whether the noise was scaled by its certificate.
    """

    series: str
    epsilon: float
    release: Release
    each: float | None = None
    record: float | None = None
    participant: float | None = None
    exact: bool = False

    @property
    def std(self) -> float:
        """The std of the noise on a feature."""
        return 0.0 if self.release.law is None else self.release.law.root_mean_square


def published_points(experiment: Experiment, records: int, epsilon: float) -> list[Point]:
    """The paper's accounting: Theorem 6 for the batches, each matrix by itself.

    The paper names its composition theorem for type I only; "composed" applies it to all releases here too.
    """
    from matrixdp_papers.studies import federated_noise
    from matrixdp_papers.studies.split_learning import Release

    shape = experiment.rows, experiment.features
    rate, releases = experiment.rows / records, -(-records // experiment.rows) * experiment.epochs
    each = federated_noise.before_sampling(Budget(epsilon, DELTA), rate)
    small = federated_noise.before_sampling(federated_noise.round_budget(epsilon, DELTA, releases), rate)
    laws: dict[str, NoiseLaw] = {name: federated_noise.published(name, shape, 2.0, each, each) for name in PUBLISHED}
    laws[COMPOSED] = federated_noise.published("idn", shape, 2.0, small, small)
    laws["r1smg"] = calibrate("r1smg", shape=shape, sensitivity=Entrywise(2.0), budget=each)
    points = []
    for name, law in laws.items():
        row, all_rows = (certify(law, found) for found in (OneRow(low=-1.0, high=1.0), Entrywise(2.0)))
        own = federated_noise.composed(row, experiment.epochs, DELTA)
        whole = federated_noise.composed(all_rows, releases, DELTA)
        spent = small.epsilon if name == COMPOSED else each.epsilon
        points.append(Point(name, epsilon, Release(law), spent, own, whole))
    return points


def exact_points(experiment: Experiment, records: int, epsilon: float) -> list[Point]:
    """Noise scaled so that a record (or a participant) keeps the budget over all epochs, in four ways to train.

    Mechanisms whose rescaled noise is that of the analytic Gaussian have no separate point.
    """
    from matrixdp.pipeline import mu_of_each, sized_for_mu
    from matrixdp_papers.studies import federated_noise
    from matrixdp_papers.studies.split_learning import Release

    budget, shape = Budget(epsilon, DELTA), (experiment.lot, experiment.features)
    row, box = OneRow(low=-1.0, high=1.0), Entrywise(2.0, adjacency="replace")

    def sized(name: str, change: Sensitivity, releases: float) -> Gaussian:
        law = calibrate(
            name, shape=shape, sensitivity=change, budget=Budget(0.5, DELTA), **federated_noise.shaped(name)
        )
        assert isinstance(law, Gaussian)
        found = sized_for_mu(law, change, mu_of_each(budget, releases)).law
        assert isinstance(found, Gaussian)
        return found

    def true(law: NoiseLaw, change: Sensitivity, releases: float) -> float:
        return federated_noise.composed(certify(law, change), releases, DELTA)

    # a record changes one row and one gradient per epoch, and both share one budget
    epochs, steps = experiment.epochs, -(-records // experiment.lot) * experiment.epochs
    training = Frobenius(2 * CLIP, adjacency="replace")
    update = Gaussian(Isotropic((1,), training.radius / mu_of_each(budget, epochs / UPDATE_SHARE)))
    points = list[Point]()
    for name in ("analytic", "mvg", "classic", "mgm", "udn", "idn"):
        law = sized(name, row, epochs / (1 - UPDATE_SHARE))
        if points and abs(law.root_mean_square / points[0].std - 1) <= federated_noise.SAME:
            continue
        mu = math.hypot(certify(law, row).mu or math.inf, certify(update, training).mu or math.inf)
        truth = float(gaussian.epsilon(mu * math.sqrt(epochs), DELTA))
        release = Release(law, update_std=update.root_mean_square)
        points.append(Point(f"{name}, private training", epsilon, release, None, truth, None, True))
    ways: dict[str, tuple[Release, float, float | None]] = {}
    fixed, once, whole = sized("analytic", row, epochs), sized("analytic", row, 1), sized("analytic", box, steps)
    ways["analytic, networks fixed"] = Release(fixed, learns=False), true(fixed, row, epochs), None
    ways["analytic, released once"] = Release(once, learns=False, once=True), true(once, row, 1), None
    ways["analytic, whole participant"] = Release(whole), true(whole, box, steps), true(whole, box, steps)
    first = recalibrated(calibrate("r1smg", shape=shape, sensitivity=row, budget=budget), row, budget)
    ways["r1smg, networks fixed"] = Release(first, learns=False), true(first, row, 1), None
    for name, (release, truth, of_whole) in ways.items():
        points.append(Point(name, epsilon, release, None, truth, of_whole, True))
    return points


# --- measurements ---


def measure(experiment: Experiment, task: Task, smoke: bool, progress: Progress) -> tuple[Table, ...]:
    """Trains with every release under both accountings."""
    from matrixdp_papers.studies import split_learning, training

    split, count = task.split, len(task.split.train.label)
    if smoke:
        experiment = experiment._replace(rows=min(experiment.rows, 20), lot=20, epochs=2)
    epsilons = EPSILONS[-1:] if smoke else EPSILONS
    points = [Point(NO_NOISE, math.inf, split_learning.Release(None))]
    for epsilon in progress(epsilons, f"{experiment.name}, noise"):
        points += published_points(experiment, count, epsilon)
        points += exact_points(experiment, count, epsilon)
    width, classes = split.train.records.shape[1], int(split.train.label.max()) + 1
    schedule = split_learning.Schedule(experiment.epochs, experiment.lot, experiment.learning_rate, CLIP)
    (records, label), test = (training.on_device(part).tensors for part in (split.train, split.test))
    seeds = range(SEED, SEED + (1 if smoke else REPEATS))

    def make() -> split_learning.Joined:
        return split_learning.Joined((task.first, width - task.first), experiment.hidden, experiment.features, classes)

    scores: dict[int, Mean] = {}
    for private in progress((False, True), experiment.name):
        chosen = [i for i, point in enumerate(points) if (point.release.update_std is not None) == private]
        trained = split_learning.train(make, [points[i].release for i in chosen], records, label, schedule, seeds)
        found = split_learning.accuracy(*trained, *test).T.tolist()
        scores |= {i: Mean.of(column) for i, column in zip(chosen, found, strict=True)}
    means = [scores[i] for i in range(len(points))]
    constant = Mean(split.most_frequent, math.nan, 1)
    return _tables(experiment, list(zip(points, means, strict=True)), constant, count, len(split.test.label))


def _tables(
    experiment: Experiment, points: list[tuple[Point, Mean]], constant: Mean, records: int, tested: int
) -> tuple[Table, ...]:
    about = f"{experiment.name}, {records:,} records, {experiment.features} features of each half"
    note = f"Tested on {tested:,} records. {experiment.epochs} epochs, {experiment.lot} records a step."
    rows: dict[bool, list[tuple[Any, ...]]] = {False: [], True: []}
    for name, score in ((NO_NOISE, points[0][1]), (CONSTANT, constant)):
        for exact, found in rows.items():
            found.append((name, *(None,) * (4 if exact else 5), score))
    for point, score in points[1:]:
        middle = () if point.exact else (point.each,)
        last = point.std, point.record, point.participant, score
        rows[point.exact].append((point.series, point.epsilon, *middle, *last))
    return (
        Table(f"{about}{PAPER} {experiment.rows} x {experiment.features}",
              ("mechanism", "claimed epsilon", "epsilon of a release", "std", "epsilon of a record's own rows",
               "true participant-level epsilon", "test accuracy"), tuple(rows[False]),
              f"{note} A record's own rows are not its only trace: the networks learn from it without noise; "
              "the epsilon of the participant covers all that it sends. R1SMG: that of one release."),
        Table(f"{about}{EQUAL}",
              ("training", "epsilon", "std", "true record-level epsilon", "true participant-level epsilon",
               "test accuracy"), tuple(rows[True]),
              f"{note} Private training clips the gradient of a record to {CLIP:g} and has {UPDATE_SHARE:.0%} of the "
              "budget. R1SMG has noise that is enough for a single release."),
    )  # fmt: skip


def corrected(task: Task, smoke: bool, progress: Progress) -> Table:
    """Adult, with one feature per participant, at a true guarantee."""
    from matrixdp_papers.studies import one_feature

    budgets = [Budget(epsilon, DELTA) for epsilon in (CORRECTED_EPSILONS[-1:] if smoke else CORRECTED_EPSILONS)]
    return one_feature.table(CORRECTED, task.split, budgets, 1 if smoke else REPEATS, progress)


def run(data: dict[str, Task], smoke: bool, progress: Progress) -> Results:
    """Runs the study on every dataset in the folder."""
    from matrixdp_papers.studies import training

    rng, tables = np.random.default_rng(SEED), list[Table]()
    for experiment in EXPERIMENTS:
        if experiment.name in data:
            task = data[experiment.name]
            if smoke:
                task = task._replace(split=task.split.some(SMOKE_TRAIN, SMOKE_TEST, rng))
            tables += measure(experiment, task, smoke, progress)
            if experiment.name == "Adult":
                tables.append(corrected(task, smoke, progress))
    setting = {"delta": DELTA, "participants": 2, "repeats": 1 if smoke else REPEATS, "seed": SEED, "smoke": smoke,
               "clip of a record's gradient": CLIP, "share of private training": UPDATE_SHARE,
               "device": str(training.pick_device()), "not run, data not available": ", ".join(
                   experiment.name for experiment in EXPERIMENTS if experiment.name not in data) or "none"}  # fmt: skip
    return tell(setting, tuple(tables))


# --- the report ---


def tell(setting: Mapping[str, Any], tables: tuple[Table, ...]) -> Results:
    """The report of what was measured."""
    papers = [table for table in tables if PAPER in table.title]
    measured = [Found.read(*pair) for pair in zip(papers, titled(tables, EQUAL), strict=True)]
    missing = [experiment.name for experiment in EXPERIMENTS if experiment.name not in {f.name for f in measured}]
    lines = [f"- Did not run, as the data are not available: {', '.join(missing)}."] if missing else []
    found = beside([line for entry in measured for line in _beside(entry)] + _beside_corrected(tables, measured))
    figure = federated_report.picture(measured, absent=missing)
    return Results(dict(setting), tables, found, "\n".join([*lines, *DIFFERENCE]), {"figure-3": figure})


def _beside(found: Found) -> list[tuple[str, str, str, str]]:
    last = max(next(iter(found.claimed.values())))
    names = {"idn": "IDN", PER_ELEMENT: "Gaussian", "matrix-mechanism": "matrix mechanism", "mvg": "MVG"}
    at = {word: found.claimed[name][last] for name, word in names.items()}
    scores = ", ".join(f"{word} {row['test accuracy']}" for word, row in at.items())
    stds = ", ".join(f"{word} {row['std']:.2g}" for word, row in at.items())
    true = f"{at['Gaussian']['true participant-level epsilon']:.2g}"
    rows = [
        (f"{found.name}: accuracy, claimed {last:g}", PAPER_SAYS.get(found.name, IDN_BEST), scores,
         f"std for features within 1: {stds}"),
        (f"{found.name}: mechanisms that learn at least half", "", found.learners(found.claimed),
         f"an epsilon for each element, the Gaussian's is {true} for a participant; R1SMG's claim is false"),
        (f"{found.name}: the same at a true epsilon up to {last:g}", "", found.learners(found.true),
         "hiding a record in every batch takes too much noise for these features"),
    ]  # fmt: skip
    return rows + found.flag()


def _beside_corrected(tables: tuple[Table, ...], measured: list[Found]) -> list[tuple[str, str, str, str]]:
    rows = [row for table in titled(tables, CORRECTED) for row in table.records()]
    if not rows:
        return []
    scores = ", ".join(f"{row['test accuracy']} at {row['epsilon']:g}" for row in rows)
    constant = next(found.least for found in measured if found.name == "Adult")
    why = f"the server subtracts the noise's variance, which it knows; the most frequent class has {constant:.3f}"
    return [("Adult: one feature of each half, at true epsilons", "", scores, why)]


IDN_BEST = "IDN best, Gaussian and matrix mechanism close, MVG destroys"
PAPER_SAYS = {"Adult": "IDN and Gaussian similar, matrix mechanism close, MVG destroys"}
DIFFERENCE = (
    "- The paper's epsilon for Gaussian noise is the one \"on each element\", its own words; 'added up' divides it by "
    "the number of elements, as its table 4 does. The matrix mechanism is on single elements too. With the identity "
    "as its task it is the analytic Gaussian there, hence close to the Gaussian.",
    "- Theorem 6 is stated for delta = 0 and for batches that nobody knows. Server and participants must agree on the "
    "records of a batch, so that sampling hides nothing. Over the batches the paper composes nothing here.",
    "- One record changes one row of a batch, not all of it, which the paper's sensitivity allows for. But a local "
    "network that learns from a record without noise carries it into the rows of others. A record is hidden only if "
    "the local training is private too, or left out.",
    "- At a true guarantee the classic noise, MGM, UDN and IDN are the analytic Gaussian, and have no rows.",
    "- With local networks left as they were made, features can be released once and used in every epoch.",
    "- One feature of each half, released twice, has far less noise than ten, released five times. The discriminant is "
    "corrected for it, where a network that is trained on noisy features shrinks their weights.",
    "- The server scales what it gets by 1/sqrt(1 + std^2), so that training is stable. The features of the test "
    "records have no noise, and labels are not protected.",
    "- Matrices of Adult have two rows as in table 3; a step of the training takes many of them, which changes no "
    "noise. The paper gives the shape of the features alone: layers, epochs and rates are ours.",
)

STUDY = Study(
    name="vertical",
    title="Vertical federated learning (MGM, type II)",
    source="yang2023matrix, section 8, figure 3",
    claim=(
        "Two participants with halves of the attributes release the tanh features of their networks with noise "
        "(epsilon 1 to 10, delta 1e-5). On Adult, Purchase, Location and Texas IDN is best overall, the more so the "
        "smaller epsilon is, and similar to Gaussian noise on Adult. Gaussian noise and the matrix mechanism follow, "
        "close to each other, and MVG destroys the model."
    ),
    load=load,
    run=run,
    tell=tell,
)
