"""IMGM's type II: features of a network released once with noise, by the paper's accounting and at equal guarantees."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from matrixdp._check import Array, Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, Spherical
from matrixdp.distributions.covariance import Blocks, FullCovariance, Kronecker
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms import calibrate
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Entrywise, Frobenius, OneRow
from matrixdp_papers import datasets
from matrixdp_papers.datasets import Labelled
from matrixdp_papers.studies import figures, splits
from matrixdp_papers.studies.base import Mean, Progress, Results, Study, Table
from matrixdp_papers.studies.recalibrated import recalibrated
from matrixdp_papers.studies.splits import CENTRED, Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone, so that every install can list the study
    from torch import Tensor, nn

SEED = 2021
DELTA = 1e-5
EPSILONS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
REPEATS = 3
BATCH = 256
PUBLIC = 0.2
"""The share of the training records that is taken as public: the front is trained on it, and it is not released."""

# One record is one row of features between -1 and 1. The paper lets every entry of a batch change.
RECORD = OneRow(low=-1.0, high=1.0)
WHOLE_BATCH = Entrywise(2.0, adjacency="replace")
# MVG's binary allocation: this share of the precision for this share of the features.
PRECISION, FAVOURED = 0.9, 0.25
MOMENTUM = 0.9
# Of the front, on the public records.
FRONT_BATCH = 64
# Of a smoke run.
SMOKE_TRAIN, SMOKE_TEST, SMOKE_BATCH, SMOKE_EPSILONS = 60, 24, 16, (0.5, 50.0)


class Network(NamedTuple):
    """A network of table 1.

    Attributes:
        name: of the data set.
        model: in matrixdp_papers.networks.
        tanh: whether its activation is to be replaced by tanh, so that the features lie in [-1, 1].
        front_epochs: for which the whole network is trained on the public records.
        epochs: for which the top is trained on the released features.
        paper_epochs: the paper's.
        front_rate: of Adam, for the whole network.
        rate: of SGD, for the top.
    """

    name: str
    model: str
    tanh: bool
    front_epochs: int
    epochs: int
    paper_epochs: int
    front_rate: float = 1e-3
    rate: float = 0.02


NETWORKS = (
    Network("MNIST", "LeNet", True, 10, 4, 50),
    Network("CIFAR-10", "VGG16", True, 15, 10, 50, front_rate=1e-4),
    Network("SVHN", "AlexNet", True, 10, 3, 20),
    Network("IMDB", "BiLSTM", False, 6, 5, 10),
)


def load(folder: datasets.Folder) -> dict[str, Split]:
    """The pictures and the reviews; SVHN if its files are there."""
    return {**splits.pictures(folder), "IMDB": splits.imdb(folder)}


# --- the noise of a batch ---


def published_budget(epsilon: float, records: int, batch: int) -> Budget:
    """(epsilon/q, delta/q) with q = batch / records, as the paper has it."""
    return Budget(epsilon * records / batch, DELTA * records / batch)


def published_laws(shape: Shape, budget: Budget, shares: Array) -> dict[str, NoiseLaw | None]:
    """What each mechanism proposes for a batch, all of whose entries may change; None where it has no theorem."""
    given: dict[str, Any] = {"sensitivity": WHOLE_BATCH, "budget": budget}
    laws = {
        name: _proposed(name, shape=shape, **given) for name in ("classic", "analytic", "mgm", "udn", "idn", "r1smg")
    }
    # MVG has a record in each column, so that directions are for the features.
    gamma = math.sqrt(math.prod(shape))
    mvg = calibrate("mvg", shape=shape[::-1], gamma=gamma, precision=shares, **given)
    return {**laws, "mvg": _transposed(mvg)}


def exact_laws(shape: Shape, budget: Budget, shares: Array) -> dict[str, NoiseLaw | None]:
    """The same noise in the size at which it keeps the budget if one record changes, in whatever batch it is."""
    proposed = published_laws(shape, Budget(0.5, budget.delta), shares)
    laws = {name: None if law is None else recalibrated(law, RECORD, budget) for name, law in proposed.items()}
    return {**laws, "classic": _proposed("classic", shape=shape, sensitivity=RECORD, budget=budget)}


def _proposed(mechanism: str, **given: Any) -> NoiseLaw | None:
    try:
        return calibrate(mechanism, **given)
    except NotApplicable:
        return None


def _transposed(law: NoiseLaw) -> Gaussian:
    assert isinstance(law, Gaussian)
    assert isinstance(law.covariance, Kronecker)
    return replace(law, covariance=Kronecker(law.covariance.columns, law.covariance.rows))


def binary_shares(public: Array) -> Array:
    """Most of MVG's precision for the features that vary most among the public records."""
    spread = np.var(public, axis=0)
    favoured = spread >= np.sort(spread)[-max(1, round(FAVOURED * len(spread)))]
    shares = np.where(favoured, PRECISION / np.sum(favoured), (1 - PRECISION) / max(1, np.sum(~favoured)))
    return np.asarray(shares / np.sum(shares))


# --- networks ---


class Features(NamedTuple):
    """Features of one network: of the private records, in whole batches, and of the test records."""

    network: Network
    top: Callable[[], nn.Module]
    private: Tensor
    label: Tensor
    test: Tensor
    test_label: Tensor
    shares: Array
    alone: float
    batch: int


def features(network: Network, split: Split, smoke: bool) -> Features:
    """Trains the whole network on the public records and makes the features of the others, which it has never seen."""
    import torch
    from torch import nn

    from matrixdp_papers import networks
    from matrixdp_papers.studies import training

    options = {"activation": nn.Tanh} if network.tanh else {}
    factory = getattr(networks, network.model)
    whole: Any = training.seeded_network(lambda: factory(**options), SEED)
    order = np.random.default_rng(SEED).permutation(len(split.train.label))
    cut = round(PUBLIC * len(order))
    public, private = (_part(split.train, rows) for rows in (order[:cut], order[cut:]))
    epochs = 1 if smoke else network.front_epochs
    shown, kept, test = (training.on_device(part) for part in (public, private, split.test))
    optimizer = torch.optim.Adam(whole.parameters(), lr=network.front_rate)
    trained = training.passes(whole, optimizer, shown, epochs=epochs, lot=FRONT_BATCH, seed=SEED)
    alone = training.at_end(trained, test)
    front = whole[: networks.SPLIT].eval()

    def rows(data: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            parts = [front(data[first : first + training.CHUNK]) for first in range(0, len(data), training.CHUNK)]
            return torch.cat(parts).flatten(1)

    batch = SMOKE_BATCH if smoke else BATCH
    size = len(kept) // batch * batch
    template: nn.Module = whole[networks.SPLIT :]

    def top() -> nn.Module:
        new = copy.deepcopy(template).cpu()  # where a seed is worth the same on all machines
        for module in new.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        return new

    return Features(
        network=network,
        top=top,
        private=rows(kept.tensors[0][:size]),
        label=kept.tensors[1][:size],
        test=rows(test.tensors[0]),
        test_label=test.tensors[1],
        shares=binary_shares(rows(shown.tensors[0]).double().cpu().numpy()),
        alone=alone,
        batch=batch,
    )


def _part(data: Labelled, rows: npt.NDArray[np.int64]) -> Labelled:
    return Labelled(data.records[rows], data.label[rows])


def score(found: Features, law: NoiseLaw | None, epochs: int, seed: int) -> float:
    """Draws the noise of every batch once, trains a new top on the noisy features, and judges it by clean ones."""
    import torch
    from torch.utils.data import TensorDataset

    from matrixdp_papers.studies import training

    noisy = found.private.clone()
    if law is not None:
        add_noise(noisy, law, found.batch, seed)
    # A public constant keeps the inputs of the top of order one, whatever the noise.
    scale = 1.0 if law is None else 1 / math.sqrt(1 + law.root_mean_square**2)
    top = training.seeded_network(found.top, seed)
    data, test = TensorDataset(noisy * scale, found.label), TensorDataset(found.test * scale, found.test_label)
    optimizer = torch.optim.SGD(top.parameters(), lr=found.network.rate, momentum=MOMENTUM)
    networks = training.passes(top, optimizer, data, epochs=epochs, lot=found.batch, seed=seed)
    return training.at_end(networks, test)


def add_noise(rows: Tensor, law: NoiseLaw, batch: int, seed: int) -> None:
    """Adds a draw of the law to every batch of rows, where they lie."""
    from matrixdp.learn.noise import ParameterNoise
    from matrixdp_papers.studies import training

    flat: NoiseLaw
    if isinstance(law, Spherical):
        flat = replace(law, shape=(math.prod(law.shape),))
    else:
        assert isinstance(law, Gaussian)
        assert isinstance(law.covariance, FullCovariance)
        flat = replace(law, covariance=Blocks((law.covariance,)))
    # The certificates are made elsewhere, from the sets; this only draws.
    noise = ParameterNoise(flat, Frobenius(1.0), 1.0, generator=training.generator(seed))
    for part in rows.view(-1, batch * rows.shape[1]):
        noise.add_(part)


# --- measurements ---


class Measured(NamedTuple):
    """What came out for one network, by mechanism and epsilon; None where a mechanism refuses.

    Attributes:
        features: that were released.
        epsilons: that were asked for.
        without: accuracy without noise.
        published, truths: accuracy and true epsilon with the paper's noise.
        exact, stds: accuracy and size of the noise at equal true guarantees.
    """

    features: Features
    epsilons: tuple[float, ...]
    without: Mean
    published: dict[str, list[Mean | None]]
    truths: dict[str, list[float | None]]
    exact: dict[str, list[Mean | None]]
    stds: dict[str, list[float | None]]


def measure(network: Network, split: Split, smoke: bool, progress: Progress) -> Measured:
    """Releases the features with every mechanism at every epsilon under both accountings."""
    found = features(network, split, smoke)
    epsilons, repeats, epochs = (SMOKE_EPSILONS, 1, 1) if smoke else (EPSILONS, REPEATS, network.epochs)
    shape, records = (found.batch, found.private.shape[1]), len(found.private)

    def trained(law: NoiseLaw | None) -> Mean:
        return Mean.of(score(found, law, epochs, seed) for seed in range(SEED, SEED + repeats))

    result = Measured(found, epsilons, trained(None), {}, {}, {}, {})
    for epsilon in progress(epsilons, network.name):
        step = published_budget(epsilon, records, found.batch)
        for name, law in published_laws(shape, step, found.shares).items():
            true = None if law is None else certify(law, RECORD).epsilon(DELTA)
            result.truths.setdefault(name, []).append(true)
            result.published.setdefault(name, []).append(None if law is None else trained(law))
        laws = exact_laws(shape, Budget(epsilon, DELTA), found.shares)
        iid = trained(laws["analytic"])
        for name, law in laws.items():
            mean = None if law is None else iid if same_noise(law, laws["analytic"]) else trained(law)
            result.exact.setdefault(name, []).append(mean)
            result.stds.setdefault(name, []).append(None if law is None else law.root_mean_square)
    return result


def same_noise(law: NoiseLaw, other: NoiseLaw | None) -> bool:
    """Whether two laws are Gaussian and give every entry the same variance, up to rounding."""
    if not (isinstance(law, Gaussian) and isinstance(other, Gaussian)):
        return False
    return bool(np.allclose(law.covariance.variances(), other.covariance.variances(), rtol=1e-6, atol=0))


def _tables(found: Measured) -> list[Table]:
    network, columns = found.features.network, ("mechanism", *(f"epsilon {epsilon:g}" for epsilon in found.epsilons))
    records, width = found.features.private.shape
    about = f"{network.name}, {network.model}, {records:,} x {width} features"
    note = (
        f"Accuracy without noise {found.without}; of the whole network, trained on the public records alone, "
        f"{found.features.alone:.3g}. The intervals are over the noise and the top; there is one front."
    )

    def table(title: str, rows: Mapping[str, Sequence[Any]], note: str = "") -> Table:
        return Table(f"{about}: {title}", columns, tuple((name, *row) for name, row in rows.items()), note)

    return [
        table("test accuracy, the paper's accounting", found.published, note),
        table("true epsilon, the paper's accounting", found.truths, f"For one record replaced, at delta {DELTA:g}."),
        table("test accuracy, equal true guarantees", found.exact, note),
        table("std of the noise, equal true guarantees", found.stds, "Empty where a mechanism has no theorem."),
    ]


def _picture(measured: list[Measured]) -> Figure:
    """Figure 1: accuracy against epsilon, as the paper accounts for it and as it is."""
    figure = Figure(figsize=(4.4 * len(measured), 6.8), layout="constrained")
    grid = figure.subplots(2, len(measured), squeeze=False)
    for column, found in zip(grid.T, measured, strict=True):
        for panel, scores, word in zip(
            column, (found.published, found.exact), ("paper", "equal guarantees"), strict=True
        ):
            curves: dict[str, list[float | Mean]] = {
                name: [math.nan if mean is None else mean for mean in means] for name, means in scores.items()
            }
            curves["no noise"] = [found.without] * len(found.epsilons)
            title, labels = f"{found.features.network.name}, {word}", ("epsilon", "test accuracy")
            figures.curves(panel, found.epsilons, curves, title=title, labels=labels, scales=("log", "linear"))
    grid[0, -1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _found(found: Measured) -> str:
    network, last = found.features.network, len(found.epsilons) - 1
    middle = last // 2
    paper, exact = (
        "; ".join(
            f"epsilon {found.epsilons[at]:g}: "
            + ", ".join(f"{name} {row[at] or 'refused'}" for name, row in scores.items())
            for at in sorted({middle, last})
        )
        for scores in (found.published, found.exact)
    )
    truths = ", ".join(f"{name} {row[middle]:.3g}" for name, row in found.truths.items() if row[middle] is not None)
    return (
        f"- {network.name}: without noise {found.without}; the network that was trained on the public fifth alone "
        f"{found.features.alone:.3g}. The paper's accounting: {paper}. Its true epsilons where "
        f"{found.epsilons[middle]:g} is claimed: {truths}. At equal true guarantees: {exact}."
    )


def _difference(measured: list[Measured]) -> str:
    lines, ratios = [], []
    for found in measured:
        claims = {
            name: [f"{epsilon:g}" for epsilon, true in zip(found.epsilons, row, strict=True) if true and true > epsilon]
            for name, row in found.truths.items()
        }
        broken = "; ".join(f"{name} at {', '.join(epsilons)}" for name, epsilons in claims.items() if epsilons)
        lines.append(f"- {found.features.network.name}: claims of epsilon that are false: {broken or 'none'}.")
        ratios += [a / b for a, b in zip(found.stds["mvg"], found.stds["analytic"], strict=True) if a and b]
    return "\n".join([*lines, *DIFFERENCE, CENTRED, MVG.format(min(ratios), max(ratios))])


def run(data: dict[str, Split], smoke: bool, progress: Progress) -> Results:
    """Every network whose data are there."""
    from matrixdp_papers.studies import training

    if smoke:
        rng = np.random.default_rng(SEED)
        data = {name: split.some(SMOKE_TRAIN, SMOKE_TEST, rng) for name, split in data.items()}
    measured = [measure(network, data[network.name], smoke, progress) for network in NETWORKS if network.name in data]
    tables = tuple(table for found in measured for table in _tables(found))
    setting = {
        "delta": DELTA, "batch": SMOKE_BATCH if smoke else BATCH, "repeats": 1 if smoke else REPEATS, "seed": SEED,
        "public share": PUBLIC, "momentum": MOMENTUM, "smoke": smoke, "device": str(training.pick_device()),
        **{f"epochs on the features, {n.name}": f"{n.epochs} of the paper's {n.paper_epochs}" for n in NETWORKS},
    }  # fmt: skip
    found = "\n".join(map(_found, measured))
    return Results(setting, tables, found, _difference(measured), {"figure-1": _picture(measured)})


MVG = (
    "- At equal guarantees MVG's allocation has {:.3g} to {:.3g} times the std of i.i.d. noise; the rest of its "
    "distance in the paper is its theorem."
)
DIFFERENCE = (
    "- The paper counts two things that do not belong together. All entries of a batch may change by 2, where one "
    "record changes one row: too much, by the root of the batch size. And the budget is divided by the sampling rate, "
    "where every record is released, in one batch or another: too little. A claim holds if the first outweighs it.",
    "- IMGM with its best covariance is the analytic Gaussian, so that it has no curve of its own. MGM, UDN and IDN "
    "without utilities are i.i.d. noise too, and at equal guarantees they are the same noise.",
    "- The classic formula is proven below epsilon 1 alone; where a cell is empty it was asked for more, which in the "
    "paper's accounting is epsilon/q.",
    "- R1SMG's noise by the paper's accounting hides nothing, as its true epsilons say.",
    "- The paper does not tell on which records the layers before the features are trained. Here it is a fifth of the "
    "training set that is taken as public, and none of it is released; the labels are public, as in the paper.",
    "- The noisy features are multiplied by a constant before the top is trained on them, which costs no privacy.",
)

STUDY = Study(
    name="features",
    title="Training on released features (IMGM, type II)",
    source="yang2021improved, section 5, figure 1",
    claim=(
        "Features of a batch, bounded by tanh and released once with noise, train the rest of a network. With delta "
        "1e-5 and (epsilon/q, delta/q) by sampling, IMGM is the most accurate, followed by the analytic Gaussian, "
        "which is slightly better at some large epsilons on IMDB; MVG adds so much noise that it is almost random."
    ),
    load=load,
    run=run,
)
