"""IMGM's type I, whose results the paper left open: noise on the gradients of every lot, by its accounting and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import brentq

from matrixdp._check import Shape
from matrixdp.accounting.accountant import Accountant
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, Spherical
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.matrix_mechanism import workload_error
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Counts, Frobenius
from matrixdp_papers import composition
from matrixdp_papers.studies import figures
from matrixdp_papers.studies.base import Mean, Progress, Table
from matrixdp_papers.studies.splits import CENTRED, Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone
    from matrixdp_papers.studies.training import Task

SEED = 2021
DELTA, CLIP = 1e-5, 1.0
# What is asked for a proposal for each layer, as a matrix, with its options. MVG favours the first output of a layer:
# the singular vectors of a gradient, which the paper takes as directions, are as private as the gradient.
BY_LAYER: dict[str, dict[str, Any]] = {
    "classic": {},
    "analytic": {},
    "mvg": {"gamma": CLIP, "precision": "binary"},
    "mgm": {},
    "udn": {},
    "idn": {},
}
# Laws whose noise differs by less are trained once.
SAME = 1e-6


class Lots(NamedTuple):
    """An experiment of table 1.

    Attributes:
        name: of the data set.
        model: the network in matrixdp_papers.networks.
        lot: the size of a lot.
        epochs: the paper's.
        trained: those here, for which the budgets are.
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
    Lots("MNIST", "LeNet", 1024, 100, 20, 0.5, 0.2, (0.1, 1.0), 3),
    Lots("Adult", "MLP", 512, 50, 50, 0.5, 2.0, (0.1, 1.0), 3),
    Lots("Cora", "GCN", 200, 50, 50, 2.0, 10.0, (0.1, 1.0), 3),
    Lots("CIFAR-10", "VGG16", 1024, 30, 10, 0.1, 0.002, (1.0,), 1),
    Lots("SVHN", "AlexNet", 1024, 60, 2, 0.1, 0.05, (1.0,), 1),
)
# In a smoke run, so large that the classic formula is refused.
SMOKE_EPSILON = 5.0
# Networks of millions of parameters are left to GPUs.
SMALL_MODELS = ("LeNet", "MLP", "GCN")


# --- the paper's accounting ---


def step_budget(epsilon: float, delta: float, steps: int, sampling_rate: float) -> Budget:
    """What the paper lets each lot spend: its composition solved for a step, and its amplification undone.

    Half of delta is the slack of the composition. The amplification, (epsilon/q, delta/q), is true for small epsilon
    at best.

    Source: kairouz2017composition, Theorem 3.4; yang2021improved, section 5.1.
    """
    slack = delta / 2
    step_delta = -math.expm1((math.log1p(-delta) - math.log1p(-slack)) / steps)

    def excess(step: float) -> float:
        return composition.kov(step, step_delta, steps, slack)[0] - epsilon

    step_epsilon = float(brentq(excess, 0.0, epsilon, xtol=1e-300, rtol=1e-14)) * (1 - 1e-12)
    return Budget(step_epsilon / sampling_rate, step_delta * (1 - 1e-12) / sampling_rate)


def published_laws(shapes: list[Shape], step: Budget) -> dict[str, NoiseLaw | NotApplicable]:
    """What each mechanism proposes for a step, or why it does not; layer by layer, but R1SMG on all parameters."""
    from matrixdp.learn.noise import propose

    laws: dict[str, NoiseLaw | NotApplicable] = {}
    for name, options in BY_LAYER.items():
        try:
            laws[name] = propose(name, shapes, Frobenius(CLIP), step, by_layer=True, **options)
        except NotApplicable as reason:
            laws[name] = reason
    laws["r1smg"] = propose("r1smg", shapes, Frobenius(CLIP), step)
    return laws


def matrix_mechanism_ratio(budget: Budget, records: int = 16) -> float:
    """The squared error of the matrix mechanism for a mean over that of Gaussian noise on the mean: 1."""
    given: dict[str, Any] = {"shape": (records,), "sensitivity": Counts(1), "budget": budget}
    workload = np.full((1, records), 1 / records)
    law = calibrate("matrix-mechanism", workload=workload, **given)
    direct = 1 / (records * float(gaussian.mu(budget.epsilon, budget.delta)))
    return workload_error(workload, law) / direct**2


class Truth(NamedTuple):
    """What a training guarantees: its epsilon at DELTA, or the delta of a step at the claimed epsilon."""

    epsilon: float | None
    delta: float | None
    kept: bool


def truth(law: NoiseLaw, claimed: float, steps: int, sampling_rate: float) -> Truth:
    """What all steps guarantee together; of R1SMG's noise only what one step leaves, a lower bound of delta."""
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
    """Every mechanism's noise in the size at which the whole training keeps the budget, and wastes nothing."""
    from matrixdp.learn.noise import balanced, propose
    from matrixdp.pipeline import sized_for_mu
    from matrixdp_papers.studies import training

    run = training.trainer(task, "analytic", budget, epochs, SEED)
    mu, sensitivity, shapes = run.certificate.mu, run.sensitivity, task.shapes()
    assert mu is not None
    laws: dict[str, NoiseLaw] = {"analytic": run.noise.law}
    for name, options in BY_LAYER.items():
        if name != "analytic":
            proposed = propose(name, shapes, sensitivity, by_layer=True, **options)
            assert isinstance(proposed, Gaussian)
            # seeded noise needs no room for a grid
            laws[name] = sized_for_mu(balanced(proposed, sensitivity), sensitivity, mu, with_drawing=False).law
    return laws


# --- measurements ---


class Measured(NamedTuple):
    """What came out for one data set: accuracy by accounting, mechanism and epsilon."""

    lots: Lots
    without: Mean
    least: float
    published: dict[str, list[Mean | None]]
    exact: dict[str, list[Mean]]
    ratios: dict[str, float]
    tables: tuple[Table, ...]


def make_task(lots: Lots, split: Split, smoke: bool) -> Task:
    """The network and its records on the device."""
    from matrixdp_papers import networks
    from matrixdp_papers.studies import training

    make = getattr(networks, lots.model)
    graph = split.graph
    network = make if graph is None else lambda: make(graph.features, graph.edges)
    train, test = training.on_device(split.train), training.on_device(split.test)
    lot = len(train) // 2 if smoke else lots.lot
    return training.Task(lots.name, network, train, test, lot, lots.learning_rate, CLIP)


def measure(lots: Lots, split: Split, smoke: bool, progress: Progress) -> Measured:
    """Trains with every mechanism under both accountings."""
    from matrixdp_papers.studies import training

    epochs, repeats = training.affordable(lots.trained, lots.repeats, least=2)
    lots = lots._replace(trained=epochs, repeats=repeats)
    if smoke:
        lots = lots._replace(trained=1, epsilons=(SMOKE_EPSILON,), repeats=1)
    task = make_task(lots, split, smoke)
    steps, rate, shapes = task.steps(lots.trained), task.sampling_rate, task.shapes()

    def trained(law: NoiseLaw, budget: Budget) -> Mean:
        passes = (training.with_noise(task, law, budget, lots.trained, seed) for seed in seeds)
        return Mean.of(training.at_end(networks, task.test) for networks in passes)

    seeds = range(SEED, SEED + lots.repeats)
    plain = (training.without_noise(task, lots.trained, seed, lots.plain_rate) for seed in seeds)
    without = Mean.of(training.at_end(networks, task.test) for networks in plain)
    published: dict[str, list[Mean | None]] = {}
    exact: dict[str, list[Mean]] = {}
    ratios: dict[str, float] = {}
    rows: list[tuple[Any, ...]] = []
    exact_rows: list[tuple[Any, ...]] = []
    for epsilon in lots.epsilons:
        budget = Budget(epsilon, DELTA)
        step = step_budget(epsilon, DELTA, steps, rate)
        for name, law in progress(list(published_laws(shapes, step).items()), f"{lots.name}, {epsilon:g}"):
            if isinstance(law, NotApplicable):
                published.setdefault(name, []).append(None)
                rows.append(
                    (name, epsilon, step.epsilon, None, None, None, f"refused, step epsilon {step.epsilon:.3g}", None)
                )
                continue
            true, score = truth(law, epsilon, steps, rate), trained(law, budget)
            word = "kept" if true.kept else "violated"
            published.setdefault(name, []).append(score)
            rows.append(
                (name, epsilon, step.epsilon, law.root_mean_square / CLIP, true.epsilon, true.delta, word, score)
            )
        laws = exact_laws(task, budget, lots.trained)
        for name, law in progress(list(laws.items()), f"{lots.name}, {epsilon:g}, exact"):
            ratios[name] = law.root_mean_square / laws["analytic"].root_mean_square
            same = name != "analytic" and abs(ratios[name] - 1) <= SAME
            score = exact["analytic"][-1] if same else trained(law, budget)
            exact.setdefault(name, []).append(score)
            exact_rows.append(
                (name, epsilon, law.root_mean_square / CLIP, ratios[name], score, "as analytic" if same else "")
            )
    label = split.test.label
    least = float(np.max(np.bincount(label)) / len(label))
    about = f"{lots.name}, {lots.model}, {len(task.train):,} records, lots of {task.lot}, {steps} steps"
    note = f"Accuracy without noise {without}; the most frequent class alone {least:.3g}."
    tables = (
        Table(
            f"{about}: the paper's accounting",
            ("mechanism", "claimed epsilon", "epsilon of a step", "std / clip", "true epsilon", "true delta of a step",
             "claim", "test accuracy"),
            tuple(rows), note,
        ),
        Table(
            f"{about}: equal true guarantees",
            ("mechanism", "epsilon", "std / clip", "x analytic", "test accuracy", "noise"), tuple(exact_rows), note,
        ),
    )  # fmt: skip
    return Measured(lots, without, least, published, exact, ratios, tables)


class Gradients(NamedTuple):
    """What came out for all data sets."""

    setting: dict[str, str]
    tables: tuple[Table, ...]
    figure: Figure
    found: list[str]
    difference: list[str]


def run(data: dict[str, Split], smoke: bool, progress: Progress) -> Gradients:
    """All experiments whose data are there."""
    from matrixdp_papers.studies import training

    large = not smoke and training.pick_device().type == "cuda"
    chosen = [lots for lots in EXPERIMENTS if lots.name in data and (large or lots.model in SMALL_MODELS)]
    measured = [measure(lots, data[lots.name], smoke, progress) for lots in chosen]
    tables = tuple(table for found in measured for table in found.tables)
    setting = {
        f"epochs, {lots.name} {lots.model}": f"{lots.trained} of the paper's {lots.epochs}, {lots.repeats} runs"
        for lots, *_ in measured
    }
    return Gradients(setting, tables, _picture(measured), [_found(found) for found in measured], _difference(measured))


def _picture(measured: list[Measured]) -> Figure:
    """Accuracy against epsilon: the paper's accounting, and the exact one."""
    figure, panels = figures.panels(len(measured), width=4.4)
    for panel, found in zip(panels, measured, strict=True):
        epsilons = found.lots.epsilons
        curves: dict[str, list[float | Mean]] = {
            f"{name}, paper": [math.nan if score is None else score for score in scores]
            for name, scores in found.published.items()
        }
        curves |= {f"{name}, exact": list(found.exact[name]) for name in ("analytic", "mvg")}
        curves["no noise"] = [found.without] * len(epsilons)
        labels = ("epsilon", "test accuracy")
        figures.curves(panel, epsilons, curves, title=found.lots.name, labels=labels, scales=("log", "linear"))
        panel.axhline(found.least, color="#999999", linestyle=":", linewidth=1)
    panels[-1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _found(found: Measured) -> str:
    lots, last = found.lots, found.lots.epsilons[-1]
    shown = ", ".join(f"{name} {scores[-1] or 'refused'}" for name, scores in found.published.items())
    same = [name for name, ratio in found.ratios.items() if name != "analytic" and abs(ratio - 1) <= SAME]
    alike = f"{', '.join(same)} are that same noise; " if same else ""
    others = ", ".join(
        f"{name} has {found.ratios[name]:.3g} times its std and {scores[-1]}"
        for name, scores in found.exact.items()
        if name not in ("analytic", *same)
    )
    return (
        f"- {lots.name}, {lots.model}, epsilon {last:g}: without noise {found.without}, the most frequent class "
        f"{found.least:.3g}. By the paper's accounting: {shown}. At equal true guarantees: Gaussian noise, which is "
        f"IMGM's and DP-SGD's, {found.exact['analytic'][-1]}; {alike}{others}." + beaten(found.without, found.exact)
    )


def beaten(without: Mean, others: Mapping[str, Sequence[Mean | None]]) -> str:
    """A warning where training without noise is no upper bound, as when its learning rate does not suit."""
    best, name = max((score.mean, name) for name, scores in others.items() for score in scores if score is not None)
    if best <= without.mean:
        return ""
    return f" Training without noise did worse than {name} ({best:.4g}), so that it is no limit of what can be had."


def _difference(measured: list[Measured]) -> list[str]:
    lines = []
    for found in measured:
        columns, last = found.tables[0].columns, found.lots.epsilons[-1]
        rows = [dict(zip(columns, row, strict=True)) for row in found.tables[0].rows]
        at_last = [row for row in rows if row["claimed epsilon"] == last]
        kept = [f"{row['mechanism']} {row['true epsilon']:.3g}" for row in at_last if row["true epsilon"] is not None]
        broken = [row["mechanism"] for row in at_last if row["claim"] == "violated"]
        lines.append(
            f"- {found.lots.name}: where the paper's accounting claims epsilon {last:g}, the truth is {', '.join(kept)}"
            + (f"; the claim of {', '.join(broken)} is false." if broken else ".")
        )
    return [*lines, *DIFFERENCE, CENTRED, MATRIX_MECHANISM.format(matrix_mechanism_ratio(Budget(1.0, DELTA)))]


MATRIX_MECHANISM = (
    "- The matrix mechanism is for many queries on one histogram. For the mean that is released here its error is "
    "{:.6g} times that of Gaussian noise on the mean. It is the analytic Gaussian, and has no row of its own."
)
DIFFERENCE = (
    "- Theorem 3.4 knows the epsilon and delta of each step and nothing else of the noise, so that it has to assume "
    "the worst; an accountant knows the noise. Mechanisms that bound the norm of the whole noise (MVG, MGM, UDN, IDN) "
    "give away more in every step.",
    "- Once each is scaled to the same true guarantee, the mechanisms that treat all entries alike are one and the "
    "same noise, the i.i.d. Gaussian of DP-SGD, which is the moments accountant's too; the tables have ratios.",
    "- The paper sets the sensitivity of the mean gradient to the clip norm. Here the sum of the clipped gradients has "
    "that sensitivity, and is then divided by the size of a lot. MVG's bound on the norm of the value is taken as the "
    "clip norm, as the paper has it. For the sum of a lot it would be larger, and so would its noise.",
    "- The learning rates without noise were picked from a few by the accuracy on the test records. "
    "With noise there is one rate for all mechanisms; those with far more noise might do better with smaller steps.",
    "- The singular vectors of the gradients, which the paper gives to MVG as directions, are private themselves; here "
    "it favours the first output of each layer.",
)
