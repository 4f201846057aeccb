"""The rank-1 singular multivariate Gaussian mechanism (R1SMG), as published; its theorem is false."""

from __future__ import annotations

import math

import scipy

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Spherical
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms.base import recipe
from matrixdp.sensitivity import Sensitivity


@recipe("r1smg", source="ji2024less, Theorem 5 (refuted)", refuted=True)
def r1smg(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Spherical:
    """A normal variable of variance 2 s^2/(epsilon psi) times a uniform direction.

    Refuted: the proof fixes the directions of the two noises that lead to one output and compares the conditional
    densities. But the output does not show its direction. Its density grows like r^-(M-1) near the true value, and most
    outputs reveal which of two neighbours they came from. The certificate shows the true profile.

    Source: ji2024less, Definition 8 and Theorem 5.
    Deviates: (1) the paper requires epsilon below 1/M but uses larger ones itself, so this is not required here. Kept
        to reproduce the paper, and refused by `release`.
    """
    size = math.prod(shape)
    if not size > 2:
        raise NotApplicable(f"r1smg is stated for more than 2 entries, got {size}; use 'analytic'")
    log_gamma = scipy.special.gammaln
    log_psi = math.log(budget.delta) + float(log_gamma((size - 1) / 2) - log_gamma(size / 2)) - 0.5 * math.log(math.pi)
    psi = math.exp(2 / (size - 2) * log_psi)
    if not psi > 1e-150:
        raise NotApplicable(f"r1smg has no finite noise at delta {budget.delta:g} for {size} entries; use 'analytic'")
    variance = 2 * sensitivity.frobenius_radius(shape) ** 2 / (budget.epsilon * psi)
    return Spherical(shape, k=1.0, p=2.0, scale=math.sqrt(2 * variance))
