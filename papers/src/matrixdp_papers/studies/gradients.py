"""IMGM's type I, whose results the paper left open: noise on the gradients of every lot, by its accounting and ours.

The noise of a lot is scaled in three ways: by Theorem 3.4 of Kairouz, Oh and Viswanath, which the paper names; by
IMGM's own Theorem 4; and by the exact accountant, which also uses amplification by sampling.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from matrixdp import __version__
from matrixdp._check import Shape
from matrixdp.accounting.accountant import Accountant
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, Spherical
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.matrix_mechanism import workload_error
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Counts, Frobenius
from matrixdp_papers import composition, datasets
from matrixdp_papers.studies import figures, noise_per_step, splits
from matrixdp_papers.studies.base import NO_NOISE, Mean, Progress, Results, Study, Table, beaten, beside, titled
from matrixdp_papers.studies.noise_per_step import DELTA, step_budget
from matrixdp_papers.studies.splits import CENTRED, Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone
    from matrixdp_papers.studies.training import Task

SEED = 2021
CLIP = 1.0
# The mechanisms for each layer, as a matrix, with their options. MVG favours the first output of a layer, because the
# singular vectors of a gradient, which the paper uses as directions, are as private as the gradient.
BY_LAYER: dict[str, dict[str, Any]] = {
    "classic": {},
    "analytic": {},
    "mvg": {"gamma": CLIP, "precision": "binary"},
    "mgm": {},
    "udn": {},
    "idn": {},
}
# Noise above this many times the clip leaves nothing to learn from, and no network is trained.
LARGEST_NOISE = 1000.0
KOV, THEOREM_4, EXACT = "KOV 3.4", "Theorem 4", "exact"


class Experiment(NamedTuple):
    """An experiment of table 1.

    Attributes:
        name: of the data set.
        model: the network in matrixdp_papers.networks.
        lot: the size of a lot.
        epochs: the paper's.
        trained: the epochs here, for which the budgets hold.
        learning_rate: with noise, one for all mechanisms.
        plain_rate: without noise and clipping, which change the size of a gradient.
        epsilons: of the whole training.
        repeats: how often each training is run.
    """

    name: str
    model: str
    lot: int
    epochs: int
    trained: int
    learning_rate: float
    plain_rate: float
    epsilons: tuple[float, ...]
    repeats: int


EXPERIMENTS = (
    Experiment("MNIST", "LeNet", 1024, 100, 20, 0.5, 0.2, (0.01, 0.1, 1.0), 3),
    Experiment("Adult", "MLP", 512, 50, 50, 0.5, 2.0, (0.01, 0.1, 1.0), 3),
    Experiment("Cora", "GCN", 200, 50, 50, 2.0, 10.0, (0.01, 0.1, 1.0), 3),
    Experiment("CIFAR-10", "VGG16", 1024, 30, 10, 0.1, 0.002, (0.01, 0.1, 1.0), 1),
    Experiment("SVHN", "AlexNet", 1024, 60, 2, 0.1, 0.05, (1.0,), 1),
)
# Of a smoke run.
SMOKE_TRAIN, SMOKE_TEST, SMOKE_EPSILON = 64, 32, 5.0
# Networks of millions of parameters are left to GPUs.
SMALL_MODELS = ("LeNet", "MLP", "GCN")


# --- the paper's accounting ---


def published_laws(shapes: list[Shape], step: Budget) -> dict[str, NoiseLaw | NotApplicable]:
    """The law of each mechanism for a step, or why there is none; layer by layer, R1SMG on all parameters."""
    from matrixdp.learn.noise import propose

    laws: dict[str, NoiseLaw | NotApplicable] = {}
    for name, options in BY_LAYER.items():
        try:
            laws[name] = propose(name, shapes, Frobenius(CLIP), step, by_layer=True, **options)
        except NotApplicable as reason:
            laws[name] = reason
    laws["r1smg"] = propose("r1smg", shapes, Frobenius(CLIP), step)
    return laws


def theorem_4(shapes: list[Shape], budget: Budget, steps: int) -> Gaussian:
    """IMGM's noise for a number of steps, by its own composition, which ignores sampling.

    Source: yang2021improved, Theorem 4.
    """
    size = sum(math.prod(shape) for shape in shapes)
    return Gaussian(Isotropic((size,), CLIP / composition.gaussian_step(budget.epsilon, budget.delta, steps)))


def matrix_mechanism_ratio(budget: Budget, records: int = 16) -> float:
    """The squared error of the matrix mechanism for a mean over that of Gaussian noise on the mean: 1."""
    given: dict[str, Any] = {"shape": (records,), "sensitivity": Counts(1), "budget": budget}
    workload = np.full((1, records), 1 / records)
    law = calibrate("matrix-mechanism", workload=workload, **given)
    direct = 1 / (records * float(gaussian.mu(budget.epsilon, budget.delta)))
    return workload_error(workload, law) / direct**2


class Truth(NamedTuple):
    """The guarantee of a training: its epsilon at DELTA, or the delta of a step at the claimed epsilon."""

    epsilon: float | None
    delta: float | None
    kept: bool


def truth(law: NoiseLaw, claimed: float, steps: int, sampling_rate: float) -> Truth:
    """The guarantee of all steps together; for R1SMG the delta of one step, a lower bound on the total."""
    certificate = certify(law, Frobenius(CLIP))
    if isinstance(law, Spherical):
        epsilon, _ = composition.before_sampling(claimed, DELTA, sampling_rate)
        delta = sampling_rate * certificate.delta(epsilon)
        return Truth(None, delta, delta <= DELTA)
    accountant = Accountant()
    accountant.add(certificate, steps, sampling_rate)
    epsilon = accountant.epsilon(DELTA)
    return Truth(epsilon, None, epsilon <= claimed)


# --- equal true guarantees ---


def exact_laws(task: Task, budget: Budget, epochs: int) -> dict[str, NoiseLaw]:
    """Gaussian noise, and MVG's, scaled so that the whole training keeps the budget exactly.

    The noise of the classic mechanism, MGM, UDN, IDN and IMGM is then the analytic Gaussian.
    """
    from matrixdp.learn.noise import balanced, propose
    from matrixdp.pipeline import sized_for_mu
    from matrixdp_papers.studies import training

    run = training.trainer(task, "analytic", budget, epochs, SEED)
    mu, sensitivity = run.certificate.mu, run.sensitivity
    assert mu is not None
    proposed = propose("mvg", task.shapes(), sensitivity, by_layer=True, **BY_LAYER["mvg"])
    assert isinstance(proposed, Gaussian)
    # seeded noise needs no room for a grid
    mvg = sized_for_mu(balanced(proposed, sensitivity), sensitivity, mu, with_drawing=False).law
    return {"analytic": run.noise.law, "mvg": mvg}


# --- measurements ---

# A noise, its accounting and the epsilon of the whole training; training without noise has neither of the latter.
Setting = tuple[str, str | None, float | None]
WITHOUT: Setting = ("none", None, None)
COLUMNS = ("noise", "accounting", "epsilon", "std / clip", "true epsilon", "claim", "accuracy")


def load(folder: datasets.Folder) -> dict[str, Split]:
    """The data sets of table 1; SVHN if its files are there."""
    cora = splits.cora(datasets.load_cora(folder))
    return {**splits.pictures(folder), "Adult": splits.adult(folder), "Cora": cora}


def make_task(experiment: Experiment, split: Split, smoke: bool) -> Task:
    """The network and its records on the device."""
    from matrixdp_papers import networks
    from matrixdp_papers.studies import training

    make = getattr(networks, experiment.model)
    graph = split.graph
    network = make if graph is None else lambda: make(graph.features, graph.edges)
    train, test = training.on_device(split.train), training.on_device(split.test)
    lot = len(train) // 2 if smoke else experiment.lot
    return training.Task(experiment.name, network, train, test, lot, experiment.learning_rate, CLIP)


def measure(
    experiment: Experiment, split: Split, smoke: bool, progress: Progress, only: Container[Setting] | None = None
) -> Table:
    """Trains with every mechanism under every accounting, where the noise leaves anything to learn from.

    With `only`, no other setting is trained; `matrixdp study --results` adds the result to that of an earlier run.
    """
    from matrixdp_papers.studies import training

    task = make_task(experiment, split, smoke)
    steps, rate, shapes = task.steps(experiment.trained), task.sampling_rate, task.shapes()
    seeds = range(SEED, SEED + experiment.repeats)

    def row(name: str, accounting: str, epsilon: float, law: NoiseLaw | NotApplicable) -> tuple[Any, ...]:
        if isinstance(law, NotApplicable):
            return (name, accounting, epsilon, None, None, "refused", None)
        true, relative, score = truth(law, epsilon, steps, rate), law.root_mean_square / CLIP, None
        if relative <= LARGEST_NOISE and (only is None or (name, accounting, epsilon) in only):
            budget = Budget(epsilon, DELTA)
            passes = (training.with_noise(task, law, budget, experiment.trained, seed) for seed in seeds)
            score = Mean.of(training.at_end(networks, task.test) for networks in passes)
        return (name, accounting, epsilon, relative, true.epsilon, "kept" if true.kept else "violated", score)

    without = None
    if only is None or WITHOUT in only:
        plain = (training.without_noise(task, experiment.trained, seed, experiment.plain_rate) for seed in seeds)
        without = Mean.of(training.at_end(networks, task.test) for networks in plain)
    label = split.test.label
    constant = Mean(split.most_frequent, math.nan, 1)
    rows: list[tuple[Any, ...]] = [
        (*WITHOUT, 0.0, None, None, without),
        ("the most frequent class", None, None, None, None, None, constant),
    ]
    for epsilon in progress(experiment.epsilons, experiment.name):
        budget = Budget(epsilon, DELTA)
        for name, law in published_laws(shapes, step_budget(epsilon, DELTA, steps)).items():
            rows.append(row(name, KOV, epsilon, law))
        rows.append(row("imgm", THEOREM_4, epsilon, theorem_4(shapes, budget, steps)))
        rows += [row(name, EXACT, epsilon, law) for name, law in exact_laws(task, budget, experiment.trained).items()]
    about = f"{experiment.name}, {experiment.model}, {len(task.train):,} records, lots of {task.lot}, {steps} steps"
    note = (
        f"Tested on {len(label):,} records; {experiment.trained} of the paper's {experiment.epochs} epochs, runs: "
        f"{experiment.repeats}. No network was trained where the noise is above {LARGEST_NOISE:g} times the clip."
    )
    return Table(f"{about}: test accuracy", COLUMNS, tuple(rows), note)


def run(data: dict[str, Split], smoke: bool, progress: Progress) -> Results:
    """Runs all experiments whose data are in the folder."""
    from matrixdp_papers.studies import training

    if smoke:
        rng = np.random.default_rng(SEED)
        data = {name: split.some(SMOKE_TRAIN, SMOKE_TEST, rng) for name, split in data.items()}
    device = training.pick_device().type
    large = not smoke and device == "cuda"
    setting: dict[str, Any] = {"delta": DELTA, "clip": CLIP, "seed": SEED, "smoke": smoke}
    tables = []
    for experiment in EXPERIMENTS:
        if experiment.name in data and (large or experiment.model in SMALL_MODELS):
            epochs, repeats = training.affordable(experiment.trained, experiment.repeats, least=2)
            experiment = experiment._replace(trained=epochs, repeats=repeats)
            if smoke:
                experiment = experiment._replace(trained=1, epsilons=(SMOKE_EPSILON,), repeats=1)
            tables.append(measure(experiment, data[experiment.name], smoke, progress))
            setting[experiment.name] = f"on {device}, matrixdp {__version__}"
    return tell(setting, tuple(tables))


# --- the report ---


def tell(setting: Mapping[str, Any], tables: tuple[Table, ...]) -> Results:
    """The report of what was measured."""
    measured = titled(tables, ": test accuracy")
    composed, renyi = noise_per_step.composition_table(), noise_per_step.renyi_table()
    pictures = {"composition": noise_per_step.picture(composed), "accuracy": _picture(measured)}
    found = beside([*noise_per_step.rows(composed, renyi), *(line for table in measured for line in _beside(table))])
    flags = [warning for table in measured for warning in (_flag(table), _unrun(table)) if warning]
    missing = _missing(measured)
    absent = [f"- Did not run: {', '.join(missing)}."] if missing else []
    ratio = matrix_mechanism_ratio(Budget(1.0, DELTA))
    lines = [*flags, *absent, *DIFFERENCE, _epochs(measured), CENTRED, MATRIX_MECHANISM.format(ratio)]
    return Results(dict(setting), (*measured, composed, renyi), found, "\n".join(lines), pictures)


def _beside(table: Table) -> list[tuple[str, str, str, str]]:
    """What each accounting leaves of the accuracy: the exact one at every epsilon, the others at the last."""
    rows, name = table.records(), table.title.split(",")[0]
    epsilons = sorted({row["epsilon"] for row in rows if row["epsilon"] is not None})

    def of(noise: str, accounting: str | None, epsilon: float | None = epsilons[-1]) -> str:
        key = noise, accounting, epsilon if accounting else None
        found = next(r["accuracy"] for r in rows if (r["noise"], r["accounting"], r["epsilon"]) == key)
        return "not trained" if found is None else str(found)

    sweep = ", ".join(f"{of('analytic', EXACT, epsilon)} at {epsilon:g}" for epsilon in epsilons)
    ours = (
        f"exact accounting {sweep}; at {epsilons[-1]:g} by KOV 3.4 {of('analytic', KOV)}, by Theorem 4 "
        f"{of('imgm', THEOREM_4)}; no noise {of('none', None)}"
    )
    constant = of("the most frequent class", None)
    why = f"most frequent class {constant}; R1SMG, which protects nothing, {of('r1smg', KOV)}"
    return [(f"{name}, accuracy of IMGM by epsilon", "in progress", ours, why)]


def _unrun(table: Table) -> str:
    """A warning where networks were not trained although their noise is not too large."""
    name = table.title.split(",")[0]
    rows = [row for row in table.records() if row["epsilon"] is not None]
    missing = [row for row in rows if row["accuracy"] is None and (row["std / clip"] or math.inf) <= LARGEST_NOISE]
    planned = next(experiment.epsilons for experiment in EXPERIMENTS if experiment.name == name)
    absent = [f"{epsilon:g}" for epsilon in planned if epsilon not in {row["epsilon"] for row in rows}]
    words = [f"{len(missing)} settings"] if missing else []
    words += [f"epsilon {' and '.join(absent)}"] if absent else []
    return f"- {name}: {' and '.join(words)} did not run for lack of device time." if words else ""


def _missing(tables: Sequence[Table]) -> list[str]:
    """The data sets that did not run."""
    ran = {table.title.split(",")[0] for table in tables}
    return [experiment.name for experiment in EXPERIMENTS if experiment.name not in ran]


def _epochs(tables: Sequence[Table]) -> str:
    """The epochs of each data set beside the paper's, as the tables note them."""
    notes = ((table.title.split(",")[0], table.note.split("; ")[1].split(" epochs")[0]) for table in tables)
    return f"- Epochs: {', '.join(f'{name} {epochs}' for name, epochs in notes)}."


def _flag(table: Table) -> str:
    """A warning where training without noise is no upper bound, as when its learning rate does not suit."""
    rows = [(row["noise"], row["accuracy"]) for row in table.records() if row["accuracy"] is not None]
    (_, without), *noisy = rows
    better = beaten(without, noisy)
    where = table.title.split(",")[0]
    words = f"- {where}: training without noise ({without}) did worse than {better}. Its learning rate was not tuned."
    return words if better else ""


def _picture(tables: list[Table]) -> Figure:
    """Accuracy against epsilon by accounting, two data sets in a row; where no network was trained there is no mark."""
    figure, panels = figures.panels(len(tables))
    for panel, table in zip(panels, tables, strict=True):
        rows = table.records()
        epsilons = sorted({row["epsilon"] for row in rows if row["epsilon"] is not None})
        found = {(row["noise"], row["accounting"], row["epsilon"]): row["accuracy"] for row in rows}
        series: dict[str, list[float | Mean]] = {
            label: [found.get((noise, accounting, epsilon)) or math.nan for epsilon in epsilons]
            for label, noise, accounting in CURVES
        }
        series[NO_NOISE] = [found["none", None, None]] * len(epsilons)
        title, labels = table.title.split(",")[0], ("epsilon of the whole training", "test accuracy")
        figures.curves(panel, epsilons, series, title=title, labels=labels, scales=("log", "linear"))
        figures.mark_constant(panel, found["the most frequent class", None, None].mean)
    missing = _missing(tables)
    title = f"did not run: {', '.join(missing)}; no mark: not trained" if missing else "no mark: not trained"
    figures.legend_below(figure, panels, columns=3, title=title)
    return figure


CURVES = (
    ("analytic, KOV 3.4", "analytic", KOV),
    ("IMGM, Theorem 4", "imgm", THEOREM_4),
    ("analytic, exact accountant", "analytic", EXACT),
    ("MVG, exact accountant", "mvg", EXACT),
    ("R1SMG, not private", "r1smg", KOV),
)
MATRIX_MECHANISM = (
    "- The matrix mechanism for a mean has {:.6g} times the error of Gaussian noise on the mean. It is the analytic "
    "Gaussian, and has no row."
)
DIFFERENCE = (
    "- The paper samples its lots, and composes them by Theorem 3.4 of Kairouz, Oh and Viswanath as if it did not. Its "
    "(epsilon/q, delta/q) is for released features (type II), and its Theorem 4 is not used.",
    "- IMGM with its best covariance is the analytic Gaussian. At equal true guarantees so are the classic noise and "
    "that of MGM, UDN and IDN; they have no rows of their own under the exact accounting.",
    "- MVG, MGM, UDN and IDN bound the norm of the whole noise, which costs more in every step. MVG favours the first "
    "output of a layer: the singular vectors of the gradients, which the paper takes, are private.",
    "- The paper sets the sensitivity of the mean gradient to the clip. Here the sum of the clipped gradients has it, "
    "and is then divided by the size of a lot. MVG's bound on the value is the clip too.",
    "- The learning rates without noise were picked from a few by the accuracy on the test records. With noise there "
    "is one rate for all mechanisms.",
    "- The paper's 55,000 and 5,000 records of MNIST are 60,000 and 10,000 here, and CIFAR-10 has 10,000 of 50,000 "
    "records, tested on 2,000. What is mixed in its GCN-Mixed for Cora is not stated: here it is a plain GCN.",
)

STUDY = Study(
    name="gradients",
    title="Noise on gradients, and its composition (IMGM, type I)",
    source="yang2021improved, sections 3.2 and 5, appendix B",
    claim=(
        "IMGM perturbs the gradients of every lot (delta 1e-5, epsilon 0.01 to 1) under Theorem 3.4 of Kairouz, Oh and "
        "Viswanath. It is to be compared with the classic and analytic Gaussian, MVG, the moments accountant and the "
        "matrix mechanism. The results of this type I are said to be in progress. Its own Theorem 4 composes IMGM, and "
        "appendix B gives its Rényi divergence."
    ),
    load=load,
    run=run,
    tell=tell,
)
