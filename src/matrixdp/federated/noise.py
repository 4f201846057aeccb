"""The noise that each of many releases needs, so that all of them together keep one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matrixdp._rounding import rounded_up
from matrixdp.accounting.accountant import Accountant
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.errors import GuaranteeViolated, InvalidInput
from matrixdp.learn.noise import balanced
from matrixdp.mechanisms import RECIPES
from matrixdp.pipeline import mu_of_each, sized_for_mu
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.drawing import Drawing, drawing_for
from matrixdp.sensitivity import Sensitivity

SIZES = ("exact", "published")


def budget_of_each(budget: Budget, releases: float) -> Budget:
    """The budget of each of `releases` releases: its epsilon at the delta of the whole budget."""
    epsilon = float(gaussian.epsilon(mu_of_each(budget, releases), budget.delta))
    if not epsilon > 0:
        raise InvalidInput(
            f"budget ({budget}) is too small for {releases:g} releases: each would have no epsilon left at this delta; "
            "use a larger epsilon or fewer releases"
        )
    return Budget(epsilon, budget.delta)


def sized(law: NoiseLaw, sensitivity: Sensitivity, mu: float, size: str) -> tuple[NoiseLaw, Drawing]:
    """The proposed law, rescaled as it will be drawn, and how to draw it.

    Args:
        law: what a mechanism proposes for the budget of one release.
        sensitivity: what a neighbour can change.
        mu: the largest mu of one release.
        size: "exact" scales Gaussian noise until its certificate has this mu; "published" keeps the mechanism's own
            scale where that is more noise.
    """
    if not isinstance(law, Gaussian):
        return law, drawing_for(law, sensitivity, None)
    if size == "published":
        kept = sized_for_mu(law, sensitivity, mu, may_shrink=False)
        if kept.law is law:
            return law, kept.drawing or Drawing()
    found = sized_for_mu(balanced(law, sensitivity), sensitivity, mu)
    return found.law, found.drawing or Drawing()


def with_norm_bound(mechanism: str, options: Mapping[str, Any], largest_norm: float) -> dict[str, Any]:
    """The options of a mechanism; one that needs a bound on the norm of the value (MVG's gamma) gets this one."""
    needed = mechanism in RECIPES and "gamma" in RECIPES[mechanism].options
    return {"gamma": largest_norm, **options} if needed else dict(options)


def check_total(mechanism: str, releases: Sequence[tuple[Certificate, int]], budget: Budget) -> Accountant:
    """The accountant of all releases; raises GuaranteeViolated unless they keep the budget together."""
    total = Accountant()
    for certificate, count in releases:
        total.add(certificate, count)
    refuted = mechanism in RECIPES and RECIPES[mechanism].refuted
    delta = total.delta(budget.epsilon)
    if refuted or not delta <= budget.delta:
        raise GuaranteeViolated(
            f"{mechanism} {'rests on a theorem that is false' if refuted else f'does not keep {budget}'}: over all "
            f"releases, delta at epsilon {budget.epsilon:g} is {rounded_up(delta, 3)}; use a Gaussian one, such as "
            "'analytic'"
        )
    return total


def line(epsilon: float | None, delta: float, span: str, change: str) -> str:
    """A guarantee in words, with epsilon rounded up; None means no guarantee."""
    if epsilon is None:
        return f"none ({change})"
    return f"epsilon {rounded_up(epsilon, 5)} at delta {delta:g} over {span} ({change})"
