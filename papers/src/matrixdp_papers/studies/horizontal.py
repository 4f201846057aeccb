"""MGM's type I: horizontal federated learning, by the paper's accounting and at equal true guarantees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from matrixdp.budget import Budget
from matrixdp_papers import datasets
from matrixdp_papers.datasets import Labelled
from matrixdp_papers.studies import federated_report, splits
from matrixdp_papers.studies.base import NO_NOISE, Mean, Progress, Results, Study, Table, beside, titled
from matrixdp_papers.studies.federated_report import ADDED_UP, CONSTANT, PER_ELEMENT, Found
from matrixdp_papers.studies.splits import CENTRED, Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone, so that every install can list the study
    import torch

    from matrixdp_papers.studies.federated_noise import Point
    from matrixdp_papers.studies.parallel_training import Clients

SEED = 2023
DELTA, CLIENTS = 1e-5, 5
# Noise per entry, in units of the clip value: above the first nothing is learned, so only one round is run; below the
# second the noise is negligible, and no run is needed.
LARGEST, NEGLIGIBLE = 100.0, 0.01
# DP-SGD in the clients, another unit of privacy: the norm of a record's gradient.
RECORD_CLIP, RECORD_EPSILONS = 1.0, (1.0, 10.0)
# Of a smoke run: records of a client, records to test, and rounds.
SMOKE_TRAIN, SMOKE_TEST, SMOKE_ROUNDS = 8, 16, 2
PAPER, EQUAL, RECORD = (
    ": the paper's accounting",
    ": equal true client-level guarantees",
    ": DP-SGD in the clients, ANOTHER UNIT: one record, not a client",
)
LARGE = (PER_ELEMENT, "analytic", "mvg", "idn", "r1smg")
ALL = (PER_ELEMENT, ADDED_UP, "classic", "analytic", "mvg", "mgm", "idn", "r1smg")


class Experiment(NamedTuple):
    """A column of table 2.

    Attributes:
        name: of the data set.
        model: the network in matrixdp_papers.networks.
        clip: the largest entry of an update.
        lot: the size of a batch in the clients.
        rounds: the number of uploads that the noise and the guarantees cover.
        epochs: passes over a client's records in a round.
        paper: the paper's lot, rounds and epochs.
        learning_rate: in the clients.
        side_by_side: whether all networks are trained at once.
        mechanisms: those of the paper's accounting.
        epsilons: of the whole training.
        repeats: how often each training is run.
        record_lot: the expected size of a batch in DP-SGD; None leaves it out.
        record_rate: the learning rate of DP-SGD.
    """

    name: str
    model: str
    clip: float
    lot: int
    rounds: int
    epochs: int
    paper: tuple[int, int, int]
    learning_rate: float
    side_by_side: bool
    mechanisms: tuple[str, ...]
    epsilons: tuple[float, ...]
    repeats: int = 3
    record_lot: int | None = None
    record_rate: float = 1.0

    def settings(self) -> str:
        """How it differs from the paper's."""
        ours = (self.lot, self.rounds, self.epochs)
        pairs = zip(("batches of", "rounds", "local epochs"), ours, self.paper, strict=True)
        return ", ".join(f"{word} {ours} (paper {theirs})" for word, ours, theirs in pairs)


EXPERIMENTS = (
    Experiment("MNIST", "LeNet", 0.01, 64, 25, 3, (64, 25, 3), 0.1, True, ALL, (1, 10, 1e3, 1e5, 1e6),
               record_lot=512),
    Experiment("Adult", "MLP", 0.015, 64, 10, 2, (64, 10, 2), 0.1, True, (*ALL, "udn", "matrix-mechanism"),
               (1, 10, 1e2, 1e3, 1e4, 1e5, 1e6), record_lot=1024),
    Experiment("IMDB", "LSTM", 0.3, 256, 10, 2, (256, 10, 2), 2e-2, False, LARGE, (1, 100, 1e7)),
    Experiment("CIFAR-10", "ResNet18", 0.05, 64, 50, 1, (16, 50, 3), 3e-4, False, LARGE, (1, 100, 1e7), repeats=1),
)  # fmt: skip


def load(folder: datasets.Folder) -> dict[str, Split]:
    """The paper's data sets; MNIST is divided as there, 55,000 and 5,000, and CIFAR-10 is a fifth of it."""
    digits = splits.digits(datasets.load_mnist(folder))
    train, test = (Labelled(digits.records[part], digits.label[part]) for part in (slice(55_000), slice(55_000, None)))
    return {
        "MNIST": Split(train, test),
        "Adult": splits.adult(folder),
        "IMDB": splits.imdb(folder),
        "CIFAR-10": splits.cifar10(folder),
    }


# --- training ---


def rounds_run(point: Point, experiment: Experiment) -> int:
    """The rounds to run: all, one where the noise prevents learning, or none where it is negligible."""
    if point.noise is None:
        return experiment.rounds
    relative = point.noise.law.root_mean_square / experiment.clip
    if not relative <= LARGEST:
        return 1
    return experiment.rounds if relative >= NEGLIGIBLE else 0


def federate(
    clients: Clients, points: list[Point], experiment: Experiment, initial: torch.Tensor, progress: Progress
) -> torch.Tensor:
    """The weights after all rounds, repeats x points x parameters; all points share their batches and first weights.

    Args:
        clients: who train.
        points: how uploads are made private; the first has no noise.
        experiment: its clip value and rounds.
        initial: repeats x parameters.
        progress: over the rounds.
    """
    weights = initial[:, None].repeat(1, len(points), 1)
    runs = [rounds_run(point, experiment) for point in points]
    alive = [index for index, rounds in enumerate(runs) if rounds == experiment.rounds]
    # before any noise all points are equal, so the first round is trained once
    first = clients.updates(initial[:, None], 0)
    for index, point in enumerate(points):
        weights[:, index] += averaged(first[:, 0], point, experiment.clip)
    for turn in progress(range(1, experiment.rounds), experiment.name):
        found = clients.updates(weights[:, alive], turn)
        for place, index in enumerate(alive):
            weights[:, index] += averaged(found[:, place], points[index], experiment.clip)
    for index, rounds in enumerate(runs):
        if not rounds:
            weights[:, index] = weights[:, 0]
    return weights


def averaged(updates: torch.Tensor, point: Point, clip: float) -> torch.Tensor:
    """The update of the server's model: the mean of the clients' updates, clipped and with noise.

    Args:
        updates: repeats x clients x parameters; not modified.
        point: how uploads are made private.
        clip: the largest entry.
    """
    uploads = updates.nan_to_num(nan=0.0).clamp(-clip, clip)
    if point.noise is not None:
        for upload in uploads.flatten(0, 1):
            point.noise.add_(upload)
    return uploads.mean(dim=1)


class Measured(NamedTuple):
    """The results for one dataset.

    Attributes:
        experiment: as it was run.
        least: the share of the most frequent class.
        points: with their accuracy; the first has no noise.
        records: epsilon and accuracy of DP-SGD, and the true epsilon of a record.
        tested: the number of test records.
    """

    experiment: Experiment
    least: float
    points: list[tuple[Point, Mean]]
    records: list[tuple[float, Mean, float]]
    tested: int


def measure(experiment: Experiment, split: Split, smoke: bool, progress: Progress) -> tuple[Table, ...]:
    """Trains with every mechanism under both accountings, and by DP-SGD."""
    import torch
    from torch.utils.data import TensorDataset

    from matrixdp.federated.tensors import flat
    from matrixdp_papers import networks
    from matrixdp_papers.studies import federated_noise, parallel_training, training

    share = len(split.train.label) // CLIENTS
    if smoke:
        experiment = experiment._replace(rounds=SMOKE_ROUNDS, epochs=1, lot=share // 2, repeats=1, epsilons=(1.0, 1e7))
    make = getattr(networks, experiment.model)
    if smoke and not experiment.side_by_side:  # millions of parameters take minutes on a CPU
        make = {"LSTM": partial(networks.LSTM, embedding=4, hidden=8), "ResNet18": networks.TutorialCIFAR}[
            experiment.model
        ]
    train, test = (training.on_device(part) for part in (split.train, split.test))
    owned = [TensorDataset(*train[client * share : (client + 1) * share]) for client in range(CLIENTS)]
    records, label = (torch.stack(columns) for columns in zip(*(part.tensors for part in owned), strict=True))
    network, generator = training.seeded_network(make, SEED), training.generator(SEED)
    kind = parallel_training.SideBySide if experiment.side_by_side else parallel_training.OneByOne
    clients: Clients = kind(network, records, label, experiment.epochs, experiment.lot, experiment.learning_rate)
    uploads = federated_noise.Uploads(
        network, experiment.clip, experiment.rounds, DELTA, experiment.lot / share, generator
    )
    points = [federated_noise.Point(NO_NOISE, math.inf, None)]
    for epsilon in progress(experiment.epsilons, f"{experiment.name}, noise"):
        points += federated_noise.published_points(uploads, experiment.mechanisms, epsilon)
        points += federated_noise.exact_points(uploads, experiment.mechanisms, epsilon)
    seeds = range(SEED, SEED + experiment.repeats)
    initial = torch.stack([flat(training.seeded_network(make, seed)) for seed in seeds])
    weights = federate(clients, points, experiment, initial, progress)
    scores = clients.accuracy(weights.flatten(0, 1), *test.tensors).view(weights.shape[:2])
    means = [Mean.of(column) for column in scores.T.tolist()]
    singles = []
    if experiment.record_lot is not None:
        lot = min(experiment.record_lot, share // 2)
        rate = experiment.record_rate
        tasks = [training.Task(experiment.name, make, part, test, lot, rate, RECORD_CLIP) for part in owned]
        for epsilon in progress(RECORD_EPSILONS[: 1 if smoke else None], f"{experiment.name}, DP-SGD"):
            budget = Budget(epsilon, DELTA)
            found, truth = parallel_training.record_level(tasks, budget, experiment.rounds, experiment.epochs, seeds)
            singles.append((epsilon, Mean.of(found), truth))
    measured = Measured(
        experiment, split.most_frequent, list(zip(points, means, strict=True)), singles, len(split.test.label)
    )
    return _tables(measured, share, uploads.size)


def _tables(found: Measured, share: int, size: int) -> tuple[Table, ...]:
    experiment = found.experiment
    about = f"{experiment.name}, {experiment.model}, {CLIENTS} clients of {share:,} records"
    note = f"Tested on {found.tested:,} records. {size:,} parameters, clip value {experiment.clip:g}, "
    note += f"{experiment.settings()}."
    constant = Mean(found.least, math.nan, 1)
    plain = (
        (NO_NOISE, None, None, 0.0, None, experiment.rounds, found.points[0][1]),
        (CONSTANT, None, None, None, None, None, constant),
    )
    rows: dict[bool, list[tuple[Any, ...]]] = {False: list(plain), True: list(plain)}
    for point, score in found.points[1:]:
        assert point.noise is not None
        relative, run = point.noise.law.root_mean_square / experiment.clip, rounds_run(point, experiment)
        middle = point.ratio if point.exact else point.each
        rows[point.exact].append((point.series, point.epsilon, middle, relative, point.truth, run, score))
    last = ("std / clip", "true client-level epsilon", "rounds run", "test accuracy")
    tables = [
        Table(f"{about}{PAPER}",
              ("mechanism", "claimed epsilon", "epsilon of a round", *last), tuple(rows[False]),
              f"{note} The epsilon of a round is that of a layer, or of an element ('per element'). The true one is "
              "that of all layers and rounds, of R1SMG that of one round alone."),
        Table(f"{about}{EQUAL}",
              ("mechanism", "epsilon", "x analytic", *last), tuple(rows[True]),
              f"{note} R1SMG has noise that is enough for a single round."),
    ]  # fmt: skip
    if found.records:
        columns = ("training", "epsilon of a record", "true record-level epsilon", "test accuracy")
        lines = tuple(("record-level DP-SGD", epsilon, truth, score) for epsilon, score, truth in found.records)
        note = (
            f"Batches of {experiment.record_lot} expected, one record added or removed; a client as a whole has none."
        )
        tables.append(Table(f"{about}{RECORD}", columns, lines, note))
    return tuple(tables)


def run(data: dict[str, Split], smoke: bool, progress: Progress) -> Results:
    """Trains and reports on every data set."""
    from matrixdp_papers.studies import training

    rng, tables = np.random.default_rng(SEED), list[Table]()
    for experiment in EXPERIMENTS:
        if experiment.name in data:
            split = data[experiment.name]
            most = (CLIENTS * SMOKE_TRAIN, SMOKE_TEST) if smoke else (len(split.train.label), len(split.test.label))
            tables += measure(experiment, split.some(*most, rng), smoke, progress)
    setting = {"delta": DELTA, "clients": CLIENTS, "seed": SEED, "smoke": smoke, "device": str(training.pick_device()),
               "rounds run where the noise is above 100 clip values": 1, "below a hundredth of one": 0,
               **{f"{e.name} {e.model}": f"{e.settings()}, {e.repeats} runs" for e in EXPERIMENTS},
               "CIFAR-10": "10,000 of 50,000 pictures",
               "optimizer of the clients": "SGD; IMDB and CIFAR-10 Adam"}  # fmt: skip
    return tell(setting, tuple(tables))


# --- the report ---


def tell(setting: Mapping[str, Any], tables: tuple[Table, ...]) -> Results:
    """The report of what was measured."""
    measured = []
    for paper in titled(tables, PAPER):
        about = paper.title.removesuffix(PAPER)
        (equal,) = titled(tables, about + EQUAL)
        singles = {
            r["epsilon of a record"]: r["test accuracy"] for t in titled(tables, about + RECORD) for r in t.records()
        }
        measured.append(Found.read(paper, equal, singles))
    found = beside(line for entry in measured for line in _beside(entry))
    figure = federated_report.picture(measured, of=" of a client")
    return Results(dict(setting), tables, found, "\n".join(DIFFERENCE), {"figure-2": figure})


def _beside(found: Found) -> list[tuple[str, str, str, str]]:
    first = min(next(iter(found.claimed.values())))
    names = {PER_ELEMENT: "Gaussian", "idn": "IDN", "mvg": "MVG"}
    at = {word: found.claimed[name][first] for name, word in names.items()}
    scores = ", ".join(f"{word} {row['test accuracy']}" for word, row in at.items())
    loud = ", ".join(f"{word} {row['std / clip']:.2g}" for word, row in at.items())
    needed = ", ".join(f"{word} {found.least_epsilon(found.claimed[name])}" for name, word in names.items())
    true = ", ".join(f"{name} {found.least_epsilon(rows)}" for name, rows in found.true.items())
    rows = [
        (f"{found.name}: accuracy, claimed {first:g}", "IDN > Gaussian > MVG", scores,
         f"std / clip: {loud}; no noise {found.without}"),
        (f"{found.name}: least epsilon at which half is learned", "IDN's is the least", needed,
         f"the Gaussian's epsilon is on each element; a claimed {first:g} is truly "
         f"{at['Gaussian']['true client-level epsilon']:.2g}"),
        (f"{found.name}: the same at true guarantees", "", true, "to hide one of five clients takes more noise than "
         "what it sends"),
    ]  # fmt: skip
    if found.records:
        scores = ", ".join(f"{score} at {epsilon:g}" for epsilon, score in found.records.items())
        rows.append((f"{found.name}: DP-SGD in the clients", "", scores, "hides a record, not a client: another unit"))
    return rows + found.flag()


DIFFERENCE = (
    '- The paper\'s epsilon for Gaussian noise is the one "on each element", its own words, and it names no '
    "composition over the rounds for it. With epsilon divided by the number of elements ('added up'), as in its table "
    "4, IDN has less noise.",
    "- Theorem 6 is used for batches. But a client's upload depends on all its records, so sampling hides nothing. "
    "It is also stated for delta = 0. Layers are not composed in the paper; in the true epsilon they are.",
    "- At a true guarantee the classic noise, MGM, UDN and IDN are the analytic Gaussian, and have no rows.",
    "- The matrix mechanism with the identity as its task is the analytic Gaussian on each element. It is run where "
    "the paper does, on Adult.",
    "- MVG favours the first row of each matrix; the paper takes singular vectors of the private gradients.",
    "- CIFAR-10: 10,000 of 50,000 records, tested on 2,000, with one of three local epochs, and batches of 64 instead "
    "of 16. All data sets have the paper's rounds.",
    CENTRED,
)

STUDY = Study(
    name="horizontal",
    title="Horizontal federated learning (MGM, type I)",
    source="yang2023matrix, section 8, figure 2",
    claim=(
        "Five clients upload the updates of their models, clipped entry by entry and with noise (delta 1e-5). Theorem "
        "3.4 of Kairouz, Oh and Viswanath composes the rounds of MVG, MGM and the matrix mechanism. Accuracy follows "
        "IDN > Gaussian > MVG on MNIST, Adult, IMDB and CIFAR-10; on Adult the matrix mechanism is close to Gaussian "
        "noise, and better than UDN."
    ),
    load=load,
    run=run,
    tell=tell,
)
