"""The accuracy loss ||Z||^2 of a noise law: its mean, variance, kurtosis and skewness."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import singledispatch

from matrixdp.distributions import Gaussian, NoiseLaw, Spherical
from matrixdp.errors import InvalidInput


@dataclass(frozen=True)
class AccuracyLoss:
    """The first four moments of L = ||Z||^2 about zero, and quantities derived from them.

    The R1SMG paper defines kurtosis and skewness about zero, E[L^4]/E[L^2]^2 and E[L^3]/E[L^2]^(3/2), and interprets
    large values as stability. But heavier tails mean more extreme draws, not fewer; the central versions show this.
    """

    mean: float
    second: float
    third: float
    fourth: float

    @property
    def variance(self) -> float:
        """E (L - E L)^2."""
        return self.second - self.mean**2

    @property
    def kurtosis(self) -> float:
        """E[L^4]/E[L^2]^2, as ji2024less defines it."""
        return self.fourth / self.second**2

    @property
    def skewness(self) -> float:
        """E[L^3]/E[L^2]^(3/2), as ji2024less defines it."""
        return self.third / math.sqrt(self.second) ** 3

    @property
    def central_kurtosis(self) -> float:
        """E (L - E L)^4 / variance^2; 3 for a normal law."""
        mean = self.mean
        fourth = self.fourth - 4 * mean * self.third + 6 * mean**2 * self.second - 3 * mean**4
        return fourth / self.variance**2


@singledispatch
def accuracy_loss(law: NoiseLaw) -> AccuracyLoss:
    """The exact moments of ||Z||^2 for a noise law."""
    raise InvalidInput(f"the moments of {type(law).__name__} are not known")


@accuracy_loss.register
def _(law: Gaussian) -> AccuracyLoss:
    """A sum of independent scaled chi-squares has the cumulants 2^(n-1) (n-1)! tr(S^n)."""
    k1, k2, k3, k4 = (c * law.covariance.power_trace(n) for n, c in ((1, 1), (2, 2), (3, 8), (4, 48)))
    return AccuracyLoss(
        mean=k1,
        second=k2 + k1**2,
        third=k3 + 3 * k2 * k1 + k1**3,
        fourth=k4 + 4 * k3 * k1 + 3 * k2**2 + 6 * k2 * k1**2 + k1**4,
    )


@accuracy_loss.register
def _(law: Spherical) -> AccuracyLoss:
    """||Z|| is the radius."""
    second, fourth, sixth, eighth = (law.radius_moment(order) for order in (2, 4, 6, 8))
    return AccuracyLoss(mean=second, second=fourth, third=sixth, fourth=eighth)
