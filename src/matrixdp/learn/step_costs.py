"""The guarantee of all steps of a training together, and how many steps fit into its budget."""

from __future__ import annotations

from dataclasses import dataclass

from matrixdp import _check
from matrixdp._rounding import rounded_up
from matrixdp.accounting.accountant import Accountant
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.learn.correlated_noise import CorrelatedNoise
from matrixdp.learn.noise import ParameterNoise
from matrixdp.privacy.certificate import Certificate

RESUMED = "each step counts once; one repeated from a checkpoint may be a second release, which is not counted"
"""What the guarantee of noise over time does not cover, unless a file has the steps that were released."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The privacy cost of a training's steps.

    Attributes:
        certificate: of one release: a step, or for noise over time what `releases` counts.
        noise: of the steps.
        rate: the sampling rate of a step, if steps are independent.
        budget: for all steps.
        seeded: whether noise and batches are reproducible.
    """

    certificate: Certificate
    noise: ParameterNoise | CorrelatedNoise
    rate: float
    budget: Budget
    seeded: bool

    def releases(self, steps: int) -> tuple[int, float]:
        """How many releases with the certificate these steps count as, and their sampling rate."""
        return self.noise.releases(steps) if isinstance(self.noise, CorrelatedNoise) else (steps, self.rate)

    def charged(self, taken: int, planned: int) -> int:
        """How many releases are charged for the steps taken; noise over time is charged as a whole."""
        return self.releases(planned)[0] if isinstance(self.noise, CorrelatedNoise) and taken else taken

    def after(self, steps: int) -> Accountant:
        """The accountant of the first `steps` steps."""
        accountant = Accountant(self.certificate.adjacency, reproducible=self.seeded)
        if steps:
            accountant.add(self.certificate, *self.releases(steps))
        return accountant

    def fits(self, steps: int) -> bool:
        """Whether this many steps keep the budget."""
        return self.after(steps).delta(self.budget.epsilon) <= self.budget.delta

    def affordable(self, planned: int | None, *, accept_violation: bool) -> int:
        """The planned number of steps; without one, a number that fits, at most half a percent below the largest.

        Raises:
            BudgetExceeded: if no step fits, or fewer than planned and accept_violation is False.
        """
        if planned is not None and (accept_violation or self.fits(planned)):
            return planned
        if not self.fits(1):
            one = self.after(1).epsilon(self.budget.delta)
            raise BudgetExceeded(
                f"budget ({self.budget}) is too small to take one step: it would cost epsilon {rounded_up(one)} with "
                f"the noise given ({self.certificate.law.describe()}); use more noise, a larger budget or smaller "
                "batches"
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

    def summary(self, taken: int, planned: int, sampling: str) -> str:
        """A readable summary of what the steps taken guarantee, and how."""
        epsilon, certificate = rounded_up(self.after(taken).epsilon(self.budget.delta)), self.certificate
        spent = f"epsilon {epsilon} at delta {self.budget.delta:g}" if taken else "nothing spent"
        resumed = isinstance(self.noise, CorrelatedNoise) and not self.noise.recorded  # no file has the released steps
        lines = [
            f"Private SGD: {spent} after {taken} of {planned} steps",
            f"  adjacency  {certificate.adjacency} ({certificate.adjacency.neighbours})",
            f"  change     {certificate.sensitivity}, in each gradient",
            f"  budget     {self.budget}",
            f"  sampling   {sampling}",
            f"  noise      {certificate.law.describe()}",
            f"  source     {certificate.source}",
            f"  drawn with {self.noise.drawing}",
            *([f"  resumed    {RESUMED}"] if resumed else []),
        ]
        return "\n".join(lines)


def planned_steps(epochs: int | None, steps: int | None, epoch_steps: int) -> int | None:
    """How many steps are planned, by epochs or by steps; None if neither is given."""
    if epochs is not None and steps is not None:
        raise InvalidInput(f"epochs and steps exclude each other, got {epochs!r} and {steps!r}")
    if epochs is not None:
        return _check.count("epochs", epochs) * epoch_steps
    return None if steps is None else _check.count("steps", steps)
