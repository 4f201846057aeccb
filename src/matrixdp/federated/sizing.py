"""How much noise each of many releases needs, so that all of them together keep one budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matrixdp.budget import Budget
from matrixdp.errors import GuaranteeViolated, InvalidInput
from matrixdp.learn.noise import with_mu
from matrixdp.mechanisms import RECIPES
from matrixdp.noise.laws import Gaussian, NoiseLaw
from matrixdp.noise.sampler import Sampling, sampling_for
from matrixdp.privacy import gaussian
from matrixdp.privacy.accountant import Accountant
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.sensitivity import Sensitivity

# The share of delta set aside for what the samplers are off, all releases together; it grows with epsilon.
RESERVE, RESERVE_ABOVE, LARGE_EPSILON = 1e-3, 0.5, 16.0

SIZES = ("exact", "published")


def mu_of_each(budget: Budget, releases: float) -> float:
    """mu of one of so many Gaussian releases that keep the budget together: B(epsilon, delta) / sqrt(releases)."""
    if not isinstance(budget, Budget):
        raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {type(budget).__name__}")
    reserve = RESERVE if budget.epsilon <= LARGE_EPSILON else RESERVE_ABOVE
    # a hair less, for the total is rounded up when it is added up
    return float(gaussian.mu(budget.epsilon, budget.delta * (1 - reserve))) / math.sqrt(releases) * (1 - 1e-12)


def budget_of_each(budget: Budget, releases: float) -> Budget:
    """The same as a budget: the epsilon of one release at the budget's own delta."""
    epsilon = float(gaussian.epsilon(mu_of_each(budget, releases), budget.delta))
    if not epsilon > 0:
        raise InvalidInput(
            f"budget ({budget}) is too small for {releases:g} releases: each would have no epsilon left at this delta; "
            "use a larger epsilon or fewer releases"
        )
    return Budget(epsilon, budget.delta)


def sized(law: NoiseLaw, sensitivity: Sensitivity, mu: float, size: str) -> tuple[NoiseLaw, Sampling]:
    """A proposed law in the size that it will be drawn in, and how to draw it.

    Args:
        law: what a mechanism proposes for the budget of one release.
        sensitivity: what a neighbour can change.
        mu: what one release may have.
        size: "exact" scales Gaussian noise until its certificate has this mu; "published" leaves what is more noise
            than that as the mechanism proposes it.
    """
    if isinstance(law, Gaussian) and size == "exact":
        return with_mu(law, sensitivity, mu)
    proposed = certify(law, sensitivity).mu
    sampling = sampling_for(law, sensitivity, proposed)
    if isinstance(law, Gaussian) and not (proposed or 0.0) + sampling.enlargement < mu:
        return with_mu(law, sensitivity, mu)
    return law, sampling


def check_total(mechanism: str, releases: Sequence[tuple[Certificate, int]], budget: Budget) -> Accountant:
    """What all releases guarantee together; GuaranteeViolated unless that is the budget."""
    total = Accountant()
    for certificate, count in releases:
        total.add(certificate, count)
    refuted = mechanism in RECIPES and RECIPES[mechanism].refuted
    delta = total.delta(budget.epsilon)
    if refuted or not delta <= budget.delta:
        raise GuaranteeViolated(
            f"{mechanism} {'rests on a theorem that is false' if refuted else f'does not keep {budget}'}: over all "
            f"releases, delta at epsilon {budget.epsilon:g} is {delta:.3g}; use a Gaussian one, such as 'analytic'"
        )
    return total


def line(epsilon: float | None, delta: float, span: str, change: str) -> str:
    """A guarantee in words, with epsilon rounded up; None says that there is none."""
    if epsilon is None:
        return f"none ({change})"
    return f"epsilon {math.ceil(epsilon * 1e4) / 1e4:.4f} at delta {delta:g} over {span} ({change})"
