"""The view Plan: the statistics wanted, a budget divided among them, and their error bars before anything is spent."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.explorer.jobs import Tell, silent
from matrixdp.explorer.snippets import Snippet, command, lines
from matrixdp.explorer.statistics import Statistic
from matrixdp.explorer.tables import About, ErrorBars, error_bars
from matrixdp.planning import Plan
from matrixdp.sensitivity import L1, Counts, RankOne, Sensitivity
from matrixdp.tables import TableAnswer

PLAN_FILE = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is planned.

    Attributes:
        about: the table.
        statistics: what is wanted.
        budget: for all statistics together.
        rows: a public guess of the number of rows.
    """

    about: About
    statistics: tuple[Statistic, ...]
    budget: Budget
    rows: int = 1000


@dataclass(frozen=True)
class Part:
    """One statistic of a plan.

    Attributes:
        statistic: what is wanted.
        epsilon: of this statistic alone, at the budget's delta.
        noise: the mechanism of its noise.
        bars: the error bars.
    """

    statistic: Statistic
    epsilon: float
    noise: str
    bars: ErrorBars


@dataclass(frozen=True)
class Planned:
    """All that the view shows.

    Attributes:
        request: what was asked for.
        parts: one per statistic.
        epsilon: of all of them together, at the budget's delta.
        plan: the composition as JSON, if several were planned together.
        snippet: code that gives the same plan.
    """

    request: Request
    parts: tuple[Part, ...]
    epsilon: float
    plan: str
    snippet: Snippet


def planned(request: Request, tell: Tell = silent) -> Planned:
    """Fixes the noise of all statistics for the least total error. No private row is read, and nothing is spent."""
    steps = 2 * len(request.statistics) + 1
    made = request.about.made(request.rows)
    answers = []
    for place, statistic in enumerate(request.statistics):
        tell(place, steps)
        answers.append(statistic.answer(made))
    plan = _plan(request, answers)
    budgets = [request.budget] if plan is None else list(plan)
    prepared = []
    for place, (answer, budget) in enumerate(zip(answers, budgets, strict=True)):
        tell(len(answers) + 1 + place, steps)
        prepared.append(answer.prepare(budget))
    certificates = [each.prepared.certificate for each in prepared]
    epsilons = [each.epsilon(request.budget.delta) for each in certificates]
    noises = [each.source.partition(" [")[0] for each in certificates]
    bars = map(error_bars, request.statistics, answers, prepared)
    parts = tuple(map(Part, request.statistics, epsilons, noises, bars))
    together = epsilons[0]
    if plan is not None:  # it meets the budget, which may be less than the epsilon found by bisection
        together = min(plan.composition.epsilon(request.budget.delta), request.budget.epsilon)
    snippet = _snippet(request, answers)
    return Planned(request, parts, together, "" if plan is None else plan.to_json(), snippet)


def _plan(request: Request, answers: list[TableAnswer]) -> Plan | None:
    """The plan of all releases together; None for a single one, which gets the whole budget."""
    if len(answers) == 1:
        return None
    if any(statistic.method == "marginals" for statistic in request.statistics):
        raise InvalidInput("marginals have noise of their own, from a whole budget: plan them alone")
    sets, shapes = [answer.sensitivity for answer in answers], [shape_of(answer) for answer in answers]
    found: Plan = request.budget.plan(sets, _weights(request, answers), shapes)
    return found


def _weights(request: Request, answers: list[TableAnswer]) -> list[float]:
    """Weights such that the plan minimises each statistic's mean squared error over its squared sensitivity, weighted.

    So equal weights mean equal error bars for tables of counts, whatever their sizes.
    """
    found = []
    for statistic, answer in zip(request.statistics, answers, strict=True):
        shape = shape_of(answer)
        scale = math.prod(shape) * answer.sensitivity.frobenius_radius(shape) ** 2
        found.append(float(f"{statistic.weight / scale:.6g}"))
    return found


def shape_of(answer: TableAnswer) -> Shape:
    """The shape of what is released."""
    return tuple(int(side) for side in answer.value.shape)


# --- the same elsewhere ---


def _snippet(request: Request, answers: list[TableAnswer]) -> Snippet:
    budget = f"Budget({request.budget.epsilon!r}, {request.budget.delta!r})"
    calls = [statistic.python() for statistic in request.statistics]
    sizing = {"epsilon": repr(request.budget.epsilon), "delta": repr(request.budget.delta)}
    released = [
        command("release", "RECORDS.csv", domain=request.about.shown or request.about.domain, **request.about.words())
        + f" {shlex.join(statistic.options)}"
        for statistic in request.statistics
    ]
    python = [
        "from matrixdp import Budget",
        "from matrixdp.tables import Domain, Table",
        "",
        request.about.python("RECORDS.csv"),
    ]
    if len(answers) == 1:
        (line,) = released
        python += [f"out = {calls[0]}.release({budget})"]
        return Snippet(
            lines(python), lines(f"{line} --epsilon {sizing['epsilon']} --delta {sizing['delta']} --out table.csv")
        )
    weights = _weights(request, answers)
    python += [
        f"answers = [{', '.join(calls)}]",
        "sets, shapes = [each.sensitivity for each in answers], [each.value.shape for each in answers]",
        f"plan = {budget}.plan(sets, {weights!r}, shapes)",
        "print(plan)",
    ]
    texts = ["x".join(map(str, shape_of(each))) + f" of {set_text(each.sensitivity)}" for each in answers]
    given = [word for text in texts for word in ("--release", text)]
    given += [word for weight in weights for word in ("--weight", repr(weight))]
    commands = [
        command("ledger", "create", "budget.db", **sizing),
        command("ledger", "plan", "budget.db", *given, out=PLAN_FILE),
        *(f"{line} --plan {PLAN_FILE} --ledger budget.db --out table{n}.csv" for n, line in enumerate(released, 1)),
    ]
    return Snippet(lines(python), lines(commands))


def set_text(sensitivity: Sensitivity) -> str:
    """A set as the command line writes it."""
    if isinstance(sensitivity, Counts):
        return f"counts:{sensitivity.cells}" + ("" if sensitivity.bound == 1 else f",{sensitivity.bound!r}")
    if isinstance(sensitivity, L1):
        bound = sensitivity.radius if sensitivity.bound is None else sensitivity.bound
        step = "" if sensitivity.step is None else f",{sensitivity.step!r}"
        return f"l1:{sensitivity.radius!r},{bound!r}{step}"
    if isinstance(sensitivity, RankOne):
        return f"rankone:{sensitivity.radius!r}"
    raise InvalidInput(f"the command line has no form for this set: {sensitivity}")
