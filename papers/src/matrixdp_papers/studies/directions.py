"""Where directional noise pays: four tasks on real data, with directions that are public or found privately."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import Ridge

from matrixdp import queries
from matrixdp._check import Array
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Symmetric
from matrixdp.mechanisms import calibrate, expected_error
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.pipeline import sized_for_mu
from matrixdp.privacy import gaussian
from matrixdp.queries import Answer
from matrixdp_papers import datasets
from matrixdp_papers.studies import figures
from matrixdp_papers.studies.base import Mean, Progress, Results, Study, Table, beside
from matrixdp_papers.studies.mvg import CARDIOTOCOGRAPHY_CENTER, TRAINING
from matrixdp_papers.studies.mvg import load as load_mvg
from matrixdp_papers.studies.recalibrated import recalibrated

SEED = 2023
EPSILON = 1.0
GROUPS = 8
# Clip norm of a heart trace about its public center, with the diagnosis as one more number of this size.
NORM, DIAGNOSIS = 1.0, 0.5
# The share of mu^2 spent on directions.
DIRECTION_SHARE = 0.2


class Data(NamedTuple):
    """Records in rows, scaled to [0, 1], and whether a heart trace is normal."""

    liver: Array
    heart: Array
    normal: Array


def load(folder: datasets.Folder) -> Data:
    """Reads the data sets of MVG's experiments I and III."""
    scaled = load_mvg(folder)
    label = datasets.load_cardiotocography(folder).label
    return Data(scaled.liver, scaled.cardiotocography, np.asarray(label == 1, dtype=np.float64))


@dataclass(frozen=True)
class Task:
    """A query, what its answer is used for, and noise of many kinds for it.

    Attributes:
        title: for the table.
        answer: the query's value and set.
        budget: the guarantee of all laws but those "as published".
        options: the task as options of the mechanisms.
        laws: as published, by name; those in `exact` keep the budget exactly, without rescaling.
        truth: the noise-free result of the task.
    """

    title: str
    answer: Answer
    budget: Budget
    options: Mapping[str, Any]
    laws: Mapping[str, NoiseLaw]
    truth: Array
    exact: tuple[str, ...] = ("i.i.d.", "i.i.d., symmetric", "optimal")


def group_means(liver: Array) -> Task:
    """Means of all features over groups of records, from the matrix of records; who is in which group is public."""
    records = liver[: min(TRAINING, len(liver))]
    columns = np.arange(len(records)) * GROUPS // len(records)
    means = (columns == np.arange(GROUPS)[:, None]) / np.bincount(columns)[:, None]
    answer = queries.identity(records.T, low=0.0, high=1.0, records_are="columns")
    budget = Budget(EPSILON, 1 / len(records))
    given: dict[str, Any] = {"shape": answer.value.shape, "sensitivity": answer.sensitivity, "budget": budget}
    gamma = math.sqrt(answer.value.size)
    task: dict[str, Any] = {"column_utility": means}
    axes = np.linalg.svd(means)[2].T
    laws = {
        "i.i.d.": calibrate("analytic", **given),
        "MVG, uniform": calibrate("mvg", gamma=gamma, **given),
        "MGM, utility on the axes": calibrate("mgm", **task, **given),
        "MGM, utility's own directions": calibrate("mgm", column_directions=axes, **task, **given),
        "IDN": calibrate("idn", **given),
        "optimal": calibrate("optimal", **task, **given),
    }
    title = f"I. Means of {GROUPS} groups, from the records of Liver ({len(liver[0])} x {len(records)})"
    return Task(title, answer, budget, task, laws, answer.value @ means.T)


def scores(liver: Array) -> Task:
    """A score of each record: weights of the rows, from a regression on other records, which count as public."""
    size = min(TRAINING, 3 * len(liver) // 4)
    records, others = liver[:size], liver[size:]
    weights = Ridge(alpha=1.0).fit(others[:, :-1], others[:, -1]).coef_
    answer = queries.identity(records.T, low=0.0, high=1.0, records_are="columns")
    budget = Budget(EPSILON, 1 / size)
    given: dict[str, Any] = {"shape": answer.value.shape, "sensitivity": answer.sensitivity, "budget": budget}
    score = np.append(weights, 0.0)[None]
    task: dict[str, Any] = {"row_utility": score}
    axes = np.linalg.svd(score)[2].T
    laws = {
        "i.i.d.": calibrate("analytic", **given),
        "IDN": calibrate("idn", **given),
        "IDN, optimized": calibrate("idn", **task, **given),
        "UDN, optimized": calibrate("udn", **task, **given),
        "UDN, the score's own direction": calibrate("udn", row_directions=axes, **task, **given),
        "optimal": calibrate("optimal", **task, **given),
    }
    title = f"II. A score of each record, from the records of Liver ({len(liver[0])} x {size})"
    return Task(title, answer, budget, task, laws, score @ answer.value)


def cross_moments(heart: Array, normal: Array) -> Task:
    """The cross moment of each feature with the diagnosis: one column of the second moment, without its diagonal."""
    features = heart - CARDIOTOCOGRAPHY_CENTER[: heart.shape[1]]
    features = features / np.maximum(1.0, np.linalg.norm(features, axis=1, keepdims=True) / NORM)
    records = np.c_[features, DIAGNOSIS * (2 * normal - 1)]
    answer = queries.second_moment(records, norm=math.hypot(NORM, DIAGNOSIS), adjacency="add/remove")
    budget = Budget(EPSILON, 1 / len(records))
    given: dict[str, Any] = {"shape": answer.value.shape, "sensitivity": answer.sensitivity, "budget": budget}
    d = len(answer.value)
    gamma = float(len(records)) * (NORM**2 + DIAGNOSIS**2)
    last = np.eye(d)[-1]
    task: dict[str, Any] = {"row_utility": 1 - last, "column_utility": last}
    favoured = np.eye(d)[:, ::-1]
    scale = answer.sensitivity.frobenius_radius((d, d)) / float(gaussian.mu(budget.epsilon, budget.delta)) * HEADROOM
    laws = {
        "i.i.d.": calibrate("analytic", **given),
        "i.i.d., symmetric": Gaussian(Symmetric(d, scale * HEADROOM)),
        "MVG, binary": calibrate("mvg", gamma=gamma, precision="binary", important=1, directions=favoured, **given),
        "MGM with the utilities": calibrate("mgm", **task, **given),
        "optimal": calibrate("optimal", **task, **given),
    }
    title = f"III. Features against the diagnosis, from the second moment of CTG ({d} x {d}), add/remove"
    return Task(title, answer, budget, task, laws, answer.value[:-1, -1])


def measure(task: Task, runs: int, rng: np.random.Generator, progress: Progress) -> Table:
    """The error of every law, as published and at the same true guarantee, predicted and measured."""
    rows = []
    sides = [_matrix(task.options.get(name)) for name in ("row_utility", "column_utility")]
    base = expected_error(task.laws["i.i.d."], task.options)
    for name in progress(list(task.laws), task.title.split(".")[0]):
        law = task.laws[name]
        equal = law if name in task.exact else recalibrated(law, task.answer.sensitivity, task.budget)
        drawn = Mean.of(_error(equal.sample(rng), *sides) / base for _ in range(runs))
        share = expected_error(equal, task.options) / base
        relative = math.sqrt(share * base) / float(np.linalg.norm(task.truth))
        rows.append((name, expected_error(law, task.options) / base, share, drawn, relative))
    columns = ("noise", "error as published", "error at equal guarantee", "drawn", "RMS error / answer")
    note = f"Squared errors, i.i.d. = 1. Equal guarantee: a true {task.budget}."
    return Table(task.title, columns, tuple(rows), note)


def _matrix(utility: Any) -> Array | None:
    """W itself, with the roots of weights on its diagonal; None for all lines alike."""
    if utility is None:
        return None
    given = np.asarray(utility, dtype=np.float64)
    return np.diag(np.sqrt(given)) if given.ndim == 1 else given


def _error(noise: Array, rows: Array | None, columns: Array | None) -> float:
    """||W1 Z W2^T||^2."""
    seen = noise if rows is None else rows @ noise
    return float(np.sum(np.square(seen if columns is None else seen @ columns.T)))


def private_direction(heart: Array, runs: int, rng: np.random.Generator, progress: Progress) -> Table:
    """The variance along the first principal direction, which is not known beforehand; adjacency replace.

    All ways keep the same total budget. One release gives both the direction and the variance along it; or a share of
    mu^2 is spent on the direction, and the rest on noise that is optimised for it (or for no task in particular).
    """
    moved = heart - CARDIOTOCOGRAPHY_CENTER[: heart.shape[1]]
    answer = queries.second_moment(moved, norm=NORM, adjacency="replace")
    budget = Budget(EPSILON, 1 / len(heart))
    whole = float(gaussian.mu(budget.epsilon, budget.delta))
    shape, truth = answer.value.shape, answer.value
    given: dict[str, Any] = {"shape": shape, "sensitivity": answer.sensitivity, "budget": budget}
    plain = calibrate("optimal", **given)

    def sized(law: NoiseLaw, share: float) -> NoiseLaw:
        assert isinstance(law, Gaussian)
        return sized_for_mu(law, answer.sensitivity, whole * math.sqrt(share), with_drawing=False).law

    def first(noisy: Array) -> Array:
        return np.asarray(np.linalg.eigh((noisy + noisy.T) / 2)[1][:, -1])

    top = float(np.linalg.eigvalsh(truth)[-1])
    look, rest = sized(plain, DIRECTION_SHARE), sized(plain, 1 - DIRECTION_SHARE)
    scores: dict[str, list[tuple[float, float]]] = {}
    for _ in progress(range(runs), "IV"):
        once = truth + plain.sample(rng)
        v = first(once)
        found = {"one release for both": (v, float(v @ once @ v))}
        v = first(truth + look.sample(rng))
        made = calibrate("optimal", row_utility=v[None], column_utility=v[None], **given)
        for name, law in (
            ("private direction, no task", rest),
            ("private direction, optimal", sized(made, 1 - DIRECTION_SHARE)),
        ):
            found[name] = (v, float(v @ (truth + law.sample(rng)) @ v))
        for name, (direction, estimate) in found.items():
            along = float(direction @ truth @ direction)
            scores.setdefault(name, []).append((((estimate - along) / along) ** 2, 1 - along / top))
    rows = tuple(
        (name, Mean.of(error for error, _ in pairs), Mean.of(missed for _, missed in pairs))
        for name, pairs in scores.items()
    )
    columns = ("how", "squared relative error of the variance", "variance missed by the direction")
    title = f"IV. The variance along a direction found privately, CTG ({shape[0]} x {shape[0]}), replace"
    return Table(
        title,
        columns,
        rows,
        f"Total guarantee of each: {budget}; {DIRECTION_SHARE:.0%} of mu^2 is spent on the direction.",
    )


def run(data: Data, smoke: bool, progress: Progress) -> Results:
    """The four tasks."""
    rng = np.random.default_rng(SEED)
    runs = 5 if smoke else 2000
    tasks = group_means(data.liver), scores(data.liver), cross_moments(data.heart, data.normal)
    tables = (
        *(measure(task, runs, rng, progress) for task in tasks),
        private_direction(data.heart, runs, rng, progress),
    )
    setting = {"epsilon": EPSILON, "delta": "1/N", "runs": runs, "groups": GROUPS, "seed": SEED, "smoke": smoke}
    return tell(setting, tables)


def tell(setting: Mapping[str, Any], tables: tuple[Table, ...]) -> Results:
    """The report of what was measured."""
    figure, panels = figures.panels(4, width=8.0, height=2.6, columns=1)
    for panel, table in zip(panels[:3], tables[:3], strict=True):
        values = {row[0]: Mean(row[2], math.nan, 0) for row in table.rows}
        scale = "log" if min(value.mean for value in values.values()) < 0.3 else "linear"
        figures.bars(panel, values, title=table.title.split(",")[0], label="error, i.i.d. = 1", scale=scale)
    last = tables[3]
    base = last.rows[0][1].mean
    variances = {row[0]: Mean(row[1].mean / base, row[1].half_width / base, row[1].runs) for row in last.rows}
    figures.bars(panels[3], variances, title=last.title.split(",")[0], label="error of the variance, one release = 1")
    return Results(dict(setting), tables, _found(*tables), DIFFERENCE, {"directions": figure})


def _found(means: Table, scored: Table, cross: Table, paid: Table) -> str:
    first, score, second = ({row[0]: row for row in table.rows} for table in (means, scored, cross))
    third = {row[0]: row[1].mean for row in paid.rows}
    missed = {row[0]: f"{row[2].mean:.1%}" for row in paid.rows}
    idn = score["IDN, optimized"]
    mgm, own = first["MGM, utility's own directions"], first["optimal"]
    symmetric = second["i.i.d., symmetric"][2] / second["optimal"][2]
    alone = third["one release for both"]
    rows = (
        ("IDN with optimized noise (MGM 8.3)", "supposed to incur less error",
         f"{idn[1]:.2g} times the i.i.d. error, plain IDN {score['IDN'][1]:.2g} times; at equal guarantee {idn[2]:.3g}",
         "rows of little weight get more noise; the condition is loose"),
        ("optimized directions (MGM 6)", "the closed form is optimal",
         f"as published {mgm[1]:.2g} times the i.i.d. error; at equal guarantee {mgm[2]:.3g}",
         "the condition is loose; its directions help once that is mended"),
        ("the best noise for a utility (MGM eq. 25, IMGM 3.1)", "closed form",
         f"{own[2]:.3g} of i.i.d. ({1 / own[2]:.3g} times less)",
         "each group has one mean, and a record moves one group"),
        ("directions of domain knowledge (MVG)", "help", f"{symmetric:.3g} times less than symmetric i.i.d. noise",
         "a record's product of two parts is at most half its squared norm"),
        ("directions from private PCA (MVG)", "help",
         f"{alone / third['private direction, optimal']:.2f} times less than one release for both",
         f"{DIRECTION_SHARE:.0%} of mu^2 is spent on it; without the task "
         f"{alone / third['private direction, no task']:.2f}; the direction misses "
         f"{missed['private direction, optimal']} of the variance, not {missed['one release for both']}"),
    )  # fmt: skip
    return beside(rows)


DIFFERENCE = """\
- Direction pays where the sensitivity set has directions: one record of a matrix, or second moments. On a Frobenius
  ball i.i.d. noise is optimal for every task (docs/optimal-noise.md).
- The papers size their noise for the whole matrix by norms, which costs far more than any direction gains. "At equal
  guarantee" is their noise scaled until its certificate says what was asked for.
- In task I the gain is that of asking for the means instead of the records: the best noise for the task amounts to
  that query.
- In task II the weights are a regression on the other 97 records, taken as public.
- In task III the diagonal and the products of features get more noise, which the task does not see.
- In task IV the direction is the only private part of the task. What it costs is part of every total.
- Groups are public. Centers and clip norms were chosen with these public records in view, as in the study of MVG."""


STUDY = Study(
    name="directions",
    title="Where directional noise pays",
    source="yang2023matrix, sections 6 and 8.3; yang2021improved, section 3.1; chanyaswad2018mvg, directional noise",
    claim=(
        "Noise can be shaped for what a released matrix is used for. MGM gives the noise that is best under its "
        "condition for a task W1 A W2^T, and says that it incurs less error than i.i.d. noise. MVG takes directions "
        "from domain knowledge, or from private PCA."
    ),
    load=load,
    run=run,
    tell=tell,
)
