"""IMGM's type II: features of a network released once with noise, by the paper's accounting and at equal guarantees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from matrixdp._check import Array, Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Kronecker
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms import calibrate
from matrixdp.plots import figure_of
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Entrywise, OneRow
from matrixdp_papers import datasets
from matrixdp_papers.studies import figures, splits
from matrixdp_papers.studies.base import NO_NOISE, Mean, Progress, Results, Study, Table, beside, titled
from matrixdp_papers.studies.recalibrated import recalibrated
from matrixdp_papers.studies.released_features import (
    BATCH,
    MOMENTUM,
    PUBLIC,
    SEED,
    SMOKE_BATCH,
    Features,
    Network,
    features,
    score,
)
from matrixdp_papers.studies.splits import CENTRED, Split

DELTA = 1e-5
EPSILONS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
REPEATS = 3

# One record is one row of features between -1 and 1. The paper lets every entry of a batch change.
RECORD = OneRow(low=-1.0, high=1.0)
WHOLE_BATCH = Entrywise(2.0, adjacency="replace")
PUBLIC_ALONE = "public fifth alone"
# Of a smoke run.
SMOKE_TRAIN, SMOKE_TEST, SMOKE_EPSILONS = 60, 24, (0.5, 50.0)


NETWORKS = (
    Network("MNIST", "LeNet", True, 10, 4, 50, 55_000),
    Network("CIFAR-10", "VGG16", True, 15, 10, 50, 50_000, front_rate=1e-4),
    Network("SVHN", "AlexNet", True, 10, 3, 20, 73_257),
    Network("IMDB", "BiLSTM", False, 6, 5, 10, 25_000),
)


def load(folder: datasets.Folder) -> dict[str, Split]:
    """The pictures and the reviews; SVHN if its files are there."""
    return {**splits.pictures(folder), "IMDB": splits.imdb(folder)}


# --- the noise of a batch ---


def published_budget(epsilon: float, records: int, batch: int) -> Budget:
    """(epsilon/q, delta/q) with q = batch / records, as in the paper."""
    return Budget(epsilon * records / batch, DELTA * records / batch)


def published_laws(shape: Shape, budget: Budget, shares: Array) -> dict[str, NoiseLaw | None]:
    """What each mechanism proposes for a batch, all of whose entries may change; None where it has no theorem."""
    given: dict[str, Any] = {"sensitivity": WHOLE_BATCH, "budget": budget}
    laws = {
        name: _proposed(name, shape=shape, **given) for name in ("classic", "analytic", "mgm", "udn", "idn", "r1smg")
    }
    # For MVG each column is a record, so that its directions concern the features.
    gamma = math.sqrt(math.prod(shape))
    mvg = calibrate("mvg", shape=shape[::-1], gamma=gamma, precision=shares, **given)
    return {**laws, "mvg": _transposed(mvg)}


def exact_laws(shape: Shape, budget: Budget, shares: Array) -> dict[str, NoiseLaw | None]:
    """The same noise, rescaled to keep the budget exactly if one record changes, in any batch."""
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


# --- measurements ---


class Measured(NamedTuple):
    """The results for one network, by mechanism and epsilon; None where a mechanism refuses.

    Attributes:
        features: the released features.
        epsilons: the claimed epsilons.
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


PAPER, TRUE, EQUAL, STDS = (
    ": test accuracy, the paper's accounting",
    ": true epsilon, the paper's accounting",
    ": test accuracy, equal true guarantees",
    ": std of the noise, equal true guarantees",
)


def _tables(found: Measured) -> list[Table]:
    network, columns = found.features.network, ("mechanism", *(f"epsilon {epsilon:g}" for epsilon in found.epsilons))
    records, width = found.features.private.shape
    about = f"{network.name}, {network.model}, {records:,} x {width} features"
    note = (
        f"Tested on {len(found.features.test_label):,} records. The intervals are over the noise and the top; there is "
        "one front."
    )
    alone = Mean(found.features.alone, math.nan, 1)
    others: dict[str, list[Any]] = {
        name: [score] * len(found.epsilons) for name, score in ((NO_NOISE, found.without), (PUBLIC_ALONE, alone))
    }

    def table(title: str, rows: Mapping[str, Sequence[Any]], note: str = "") -> Table:
        return Table(f"{about}{title}", columns, tuple((name, *row) for name, row in rows.items()), note)

    return [
        table(PAPER, {**others, **found.published}, note),
        table(TRUE, found.truths, f"For one record replaced, at delta {DELTA:g}."),
        table(EQUAL, {**others, **found.exact}, note),
        table(STDS, found.stds, "Empty where a mechanism has no theorem."),
    ]


def run(data: dict[str, Split], smoke: bool, progress: Progress) -> Results:
    """Runs the study for every network whose data are in the folder."""
    from matrixdp_papers.studies import training

    if smoke:
        rng = np.random.default_rng(SEED)
        data = {name: split.some(SMOKE_TRAIN, SMOKE_TEST, rng) for name, split in data.items()}
    measured = [measure(network, data[network.name], smoke, progress) for network in NETWORKS if network.name in data]
    tables = tuple(table for found in measured for table in _tables(found))
    setting = {
        "delta": DELTA, "batch": SMOKE_BATCH if smoke else BATCH, "repeats": 1 if smoke else REPEATS, "seed": SEED,
        "public share": PUBLIC, "momentum": MOMENTUM, "smoke": smoke, "device": str(training.pick_device()),
    }  # fmt: skip
    return tell(setting, tables)


# --- the report ---


def papers_size(name: str, records: int, width: int) -> Table:
    """The true epsilon of IMGM at the paper's number of records, with noise for a whole batch or for one row."""
    rows = []
    for epsilon in EPSILONS:
        budget = published_budget(epsilon, records, BATCH)
        laws = (
            calibrate("analytic", shape=(BATCH, width), sensitivity=change, budget=budget)
            for change in (WHOLE_BATCH, RECORD)
        )
        rows.append((epsilon, *(certify(law, RECORD).epsilon(DELTA) for law in laws)))
    columns = ("claimed epsilon", "all entries may change", "one row may change")
    note = f"IMGM is the analytic Gaussian. For one record replaced, at delta {DELTA:g}."
    return Table(f"{name}: true epsilon of IMGM at the paper's {records:,} records", columns, tuple(rows), note)


def tell(setting: Mapping[str, Any], tables: tuple[Table, ...]) -> Results:
    """The report of what was measured."""
    measured = {
        network: parts
        for network in NETWORKS
        if (parts := [t for end in (PAPER, TRUE, EQUAL, STDS) for t in titled(tables, end) if _of(t, network)])
    }
    sizes = {n: papers_size(n.name, n.records, _size(parts[0])[1]) for n, parts in measured.items()}
    found = beside(line for network, parts in measured.items() for line in _beside(network, parts, sizes[network]))
    ratios = [
        mvg / iid
        for *_, stds in measured.values()
        for mvg, iid in zip(_row(stds, "mvg"), _row(stds, "analytic"), strict=True)
    ]
    missing = [network.name for network in NETWORKS if network not in measured]
    lines = [f"- Did not run, as the data are not available: {', '.join(missing)}."] if missing else []
    lines += [
        "- A fifth of the training records is public here. The rest is released: "
        + ", ".join(f"{n.name} {_size(parts[0])[0]:,} (paper {n.records:,})" for n, parts in measured.items())
        + ". Truths at the paper's number are in tables of their own.",
        "- The top is trained for fewer epochs: "
        + ", ".join(f"{n.name} {n.epochs} (paper {n.paper_epochs})" for n in measured) + ".",
        *DIFFERENCE, CENTRED, MVG.format(max(ratios)),
    ]  # fmt: skip
    epochs = {f"epochs on the features, {n.name}": f"{n.epochs} of the paper's {n.paper_epochs}" for n in measured}
    kept = {name: value for name, value in setting.items() if not name.startswith("epochs on the features")}
    ordered = (*sizes.values(), *(table for parts in measured.values() for table in parts))
    return Results({**kept, **epochs}, ordered, found, "\n".join(lines), {"figure-1": _picture(measured)})


def _of(table: Table, network: Network) -> bool:
    return table.title.startswith(f"{network.name},")


def _size(table: Table) -> tuple[int, int]:
    """Records and features, from the title."""
    records, width = table.title.split(", ", 2)[2].split(" features")[0].split(" x ")
    return int(records.replace(",", "")), int(width)


def _row(table: Table, name: str) -> tuple[Any, ...]:
    return next(row[1:] for row in table.rows if row[0] == name)


def _beside(network: Network, parts: Sequence[Table], size: Table) -> list[tuple[str, str, str, str]]:
    paper, truths, equal, _ = parts
    claimed = [float(column.split()[1]) for column in paper.columns[1:]]
    last = len(claimed) - 1
    middle = last // 2
    broken, held = ([f"{row[0]:g}" for row in size.rows if (row[1] > row[0]) == above] for above in (True, False))
    return [
        (f"{network.name}: IMGM (analytic), claimed {claimed[middle]:g} and {claimed[last]:g}",
         "most accurate" + (", but for the analytic at some large epsilons" if network.name == "IMDB" else ""),
         f"{_row(paper, 'analytic')[middle]} and {_row(paper, 'analytic')[last]}",
         f"no noise {_row(paper, NO_NOISE)[0]}, public fifth alone {_row(paper, PUBLIC_ALONE)[0]}"),
        (f"{network.name}: the same at true guarantees", "", f"{_row(equal, 'analytic')[middle]} and "
         f"{_row(equal, 'analytic')[last]}", "IMGM, MGM, UDN, IDN and the classic noise are one noise then"),
        (f"{network.name}: MVG, claimed {claimed[last]:g}", "almost random", f"{_row(paper, 'mvg')[last]}; "
         f"{_row(equal, 'mvg')[last]} at a true guarantee", "its theorem is loose; its noise is not to blame"),
        (f"{network.name}: IMGM's claims at {network.records:,} records", "hold",
         f"false at {', '.join(broken) or 'none'}" + (f"; hold at {', '.join(held)}" if held else ""),
         f"truth for {size.rows[2][0]:g}: {size.rows[2][1]:.3g}; {size.rows[2][2]:,.0f} if one row may change"),
        (f"{network.name}: true epsilon of R1SMG, claimed {claimed[middle]:g}", "not in the paper",
         f"{_row(truths, 'r1smg')[middle]:.2g}, accuracy {_row(paper, 'r1smg')[middle]}", "it hides nothing"),
    ]  # fmt: skip


def _picture(measured: Mapping[Network, Sequence[Table]]) -> Figure:
    """Figure 1: accuracy against epsilon, as the paper accounts for it and as it is."""
    figure = figure_of(9.6, 3.6 * len(measured) + 0.8)
    grid = figure.subplots(len(measured), 2, squeeze=False, sharey=True)
    for row, (network, (paper, _, equal, _)) in zip(grid, measured.items(), strict=True):
        for panel, table, word in zip(row, (paper, equal), ("claimed", "true"), strict=True):
            epsilons = [float(name.split()[1]) for name in table.columns[1:]]
            curves: dict[str, list[float | Mean]] = {
                name: [math.nan if mean is None else mean for mean in means]
                for name, *means in table.rows
                if name not in (PUBLIC_ALONE, "classic")
            }
            iid = curves["analytic"]
            both = {"analytic": "analytic (= IMGM)"}
            curves = {both.get(name, name): means for name, means in curves.items() if name in both or means != iid}
            title, labels = f"{network.name}, {network.model}", (f"{word} epsilon", "test accuracy")
            figures.curves(panel, epsilons, curves, title=title, labels=labels, scales=("log", "linear"))
            panel.set_ylim(0, 1)
    absent = ", ".join(network.name for network in NETWORKS if network not in measured)
    figures.legend_below(figure, grid.flat, columns=4, title=f"did not run: {absent}" if absent else None)
    return figure


MVG = (
    "- At equal guarantees MVG's allocation has up to {:.3g} times the std of i.i.d. noise; the rest of its distance "
    "in the paper is its theorem."
)
DIFFERENCE = (
    "- The paper does not state a sensitivity for features. Here all entries of a batch may change by 2, as in MGM's "
    "equation 31: an assumption that favours its claims. One record changes one row, which asks for far less noise.",
    "- The budget is divided by the sampling rate, though every record is released, in one batch or another. A claim "
    "holds where the larger sensitivity outweighs this.",
    "- IMGM with its best covariance is the analytic Gaussian, so that it has no curve of its own. MGM, UDN and IDN "
    "without utilities are i.i.d. noise too, and at equal guarantees they are the same noise.",
    "- The classic formula is proven below epsilon 1 alone; where a cell is empty it was asked for more, which in the "
    "paper's accounting is epsilon/q.",
    "- The paper does not say on which records the layers before the features are trained. Here they are trained on a "
    "public fifth, none of which is released. Labels are public here; the paper does not mention them.",
    "- The noisy features are multiplied by a constant before the top is trained on them, which costs no privacy.",
)

STUDY = Study(
    name="features",
    title="Training on released features (IMGM, type II)",
    source="yang2021improved, section 5, figure 1",
    claim=(
        "Features of a batch, bounded by tanh and released once with noise, train the rest of a network. With delta "
        "1e-5 and (epsilon/q, delta/q) by sampling, IMGM is the most accurate. The analytic Gaussian follows, and is "
        "slightly better at some large epsilons on IMDB. MVG adds so much noise that it is almost random."
    ),
    load=load,
    run=run,
    tell=tell,
)
