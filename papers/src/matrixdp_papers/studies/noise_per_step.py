"""The noise of a step by six theorems of composition, and IMGM's Rényi divergence beside the truth."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import brentq

from matrixdp.accounting.accountant import noise_multiplier_for
from matrixdp.accounting.renyi import largest_divergence
from matrixdp.budget import Budget
from matrixdp.privacy import gaussian
from matrixdp_papers import composition
from matrixdp_papers.studies import figures
from matrixdp_papers.studies.base import Mean, Table

DELTA = 1e-5
STEPS = (1, 10, 100, 1180, 5400, 54_000)
SAMPLED = 1024 / 60_000


def step_budget(epsilon: float, delta: float, steps: int) -> Budget:
    """The budget of each lot: the paper's composition solved for a step. Half of delta is slack.

    Source: kairouz2017composition, Theorem 3.4; yang2021improved, section 5.1, which has no amplification here.
    """
    slack = delta / 2
    step_delta = -math.expm1((math.log1p(-delta) - math.log1p(-slack)) / steps)

    def excess(step: float) -> float:
        return composition.kov(step, step_delta, steps, slack)[0] - epsilon

    step_epsilon = float(brentq(excess, 0.0, epsilon, xtol=1e-300, rtol=1e-14)) * (1 - 1e-12)
    return Budget(step_epsilon, step_delta * (1 - 1e-12))


def composition_table(steps: tuple[int, ...] = STEPS) -> Table:
    """The noise of a step by six theorems, for epsilon 1 in all; half of delta is slack where a theorem has one."""
    epsilon = 1.0
    rows = []
    for count in steps:
        step = step_budget(epsilon, DELTA, count)
        strong = composition.strong_step(epsilon, DELTA, count, DELTA / 2)
        budgets = (_optimal_step(epsilon, count), (step.epsilon, step.delta), strong)
        by_budget = (1 / float(gaussian.mu(*budget)) for budget in budgets)
        rows.append((
            count, 1 / composition.gaussian_step(epsilon, DELTA, count), *by_budget, _renyi_std(epsilon, count),
            noise_multiplier_for(epsilon, DELTA, SAMPLED, count),
        ))  # fmt: skip
    columns = ("steps", "Theorem 4", "KOV 3.3", "KOV 3.4", "strong", "Rényi", "exact, sampled")
    note = (
        f"In multiples of the clip, at delta {DELTA:g}. Without sampling the exact accountant is Theorem 4. With it, "
        f"a record is in a lot with probability {SAMPLED:.3g}."
    )
    return Table("Std of the noise of a step at a total epsilon of 1", columns, tuple(rows), note)


def _optimal_step(epsilon: float, steps: int) -> tuple[float, float]:
    """The budget of a step by Theorem 3.3 of Kairouz, Oh and Viswanath, with half of delta as slack."""
    delta = -math.expm1((math.log1p(-DELTA) - math.log1p(-DELTA / 2)) / steps) * (1 - 1e-12)

    def excess(log_step: float) -> float:
        return math.log(max(composition.optimal_delta(math.exp(log_step), delta, steps, epsilon), 1e-300) / DELTA)

    if excess(math.log(epsilon)) <= 0:  # one step may spend it all
        return epsilon, delta
    return math.exp(float(brentq(excess, math.log(epsilon / steps), math.log(epsilon), xtol=1e-12)) - 1e-9), delta


def _renyi_std(epsilon: float, steps: int) -> float:
    """The least noise for which some order of the Rényi divergence proves the budget."""
    found = (largest_divergence(order, epsilon, DELTA) / order for order in np.geomspace(1.1, 1000, 2000))
    return math.sqrt(steps / (2 * max(found)))


def renyi_table() -> Table:
    """Appendix B's divergence of IMGM, beside the truth."""
    mu = float(gaussian.mu(1.0, DELTA))
    rows = tuple(
        (order, (2 * order + 1) * mu / (2 * (order - 1)) * math.exp(mu * (order**2 + order) / 2), order * mu**2 / 2)
        for order in (2.0, 5.0, 10.0, 20.0, 50.0)
    )
    note = (
        "The paper takes the moment of the privacy loss for that of the likelihood ratio, and leaves out a logarithm."
    )
    return Table("Rényi divergence of IMGM at epsilon 1", ("order", "appendix B", "true"), rows, note)


def rows(composed: Table, renyi: Table) -> list[tuple[str, str, str, str]]:
    """The theorems' numbers beside the paper's, for the report."""
    at = next(row for row in composed.records() if row["steps"] == 1180)
    order, paper, true = next(row for row in renyi.rows if row[0] == 10)
    return [
        ("noise of a lot, epsilon 1, 1,180 lots", f"KOV 3.4: {at['KOV 3.4']:.0f} x clip", f"{at['Theorem 4']:.0f} x "
         f"clip by its own Theorem 4; {at['exact, sampled']:.3g} with sampling",
         "KOV knows the budget of a step only; Theorem 4 knows the noise"),
        ("its composition is tight (Theorem 4)", "yes", "yes, without sampling", "the lots are sampled, and Theorem 4 "
         "takes no account of it"),
        (f"Rényi divergence, order {order:g} (appendix B)", f"{paper:.2g}", f"{true:.2g}", "the formula is vacuous, "
         "and its derivation wrong"),
    ]  # fmt: skip


def picture(table: Table) -> Figure:
    """The std of a step against the number of steps."""
    figure, (panel,) = figures.panels(1, width=6.4, height=4.4)
    steps, *curves = (list(column) for column in zip(*table.rows, strict=True))
    series: dict[str, list[float | Mean]] = dict(zip(table.columns[1:], curves, strict=True))
    labels = ("steps", "std of a step / clip")
    figures.curves(panel, steps, series, title="Noise of a step, total epsilon 1, delta 1e-5", labels=labels)
    figures.legend_below(figure, [panel], columns=3)
    return figure
