"""What the steps of a training guarantee together, and how many of them fit into its budget."""

from __future__ import annotations

from dataclasses import dataclass

from matrixdp import _check
from matrixdp.accounting.accountant import Accountant
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.learn.correlated_noise import CorrelatedNoise
from matrixdp.learn.noise import ParameterNoise
from matrixdp.privacy.certificate import Certificate


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The accounts of a training.

    Attributes:
        certificate: of one release.
        noise: of the steps.
        rate: at which they are sampled, where they are independent.
        budget: for all steps.
        seeded: whether noise and batches are reproducible.
    """

    certificate: Certificate
    noise: ParameterNoise | CorrelatedNoise
    rate: float
    budget: Budget
    seeded: bool

    def releases(self, steps: int) -> tuple[int, float]:
        """As how many releases with the certificate so many steps count, and at which sampling rate."""
        return self.noise.releases(steps) if isinstance(self.noise, CorrelatedNoise) else (steps, self.rate)

    def after(self, steps: int) -> Accountant:
        """The accountant of the first so many steps."""
        accountant = Accountant(self.certificate.adjacency, reproducible=self.seeded)
        if steps:
            accountant.add(self.certificate, *self.releases(steps))
        return accountant

    def fits(self, steps: int) -> bool:
        """Whether so many steps keep the budget."""
        return self.after(steps).delta(self.budget.epsilon) <= self.budget.delta

    def affordable(self, planned: int | None, *, accept_violation: bool) -> int:
        """How many steps fit into the budget; never more than were planned.

        Raises:
            BudgetExceeded: if that is none, or fewer than planned, unless that is accepted.
        """
        if planned is not None and (accept_violation or self.fits(planned)):
            return planned
        if not self.fits(1):
            one = self.after(1).epsilon(self.budget.delta)
            raise BudgetExceeded(
                f"budget ({self.budget}) is too small to take one step: it would cost epsilon {one:.4g} with the noise "
                f"given ({self.certificate.law.describe()}); use more noise, a larger budget or smaller batches"
            )
        low, high = 1, 2
        while self.fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 200):
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        if planned is not None:
            raise BudgetExceeded(
                f"budget ({self.budget}) allows {low} steps with the noise given, not the {planned} that are planned; "
                "use more noise, or name a mechanism to get the size that it takes"
            )
        return low


def planned_steps(epochs: int | None, steps: int | None, epoch_steps: int) -> int | None:
    """How many steps are planned, by epochs or by steps; None if neither is given."""
    if epochs is not None and steps is not None:
        raise InvalidInput(f"epochs and steps exclude each other, got {epochs!r} and {steps!r}")
    if epochs is not None:
        return _check.count("epochs", epochs) * epoch_steps
    return None if steps is None else _check.count("steps", steps)
