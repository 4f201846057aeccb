"""The analytic Gaussian mechanism."""

from __future__ import annotations

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.mechanisms.base import HEADROOM, recipe
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import Sensitivity


@recipe("analytic", source="balle2018improving, Theorem 8")
def analytic(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Gaussian:
    """I.i.d. noise with std s/B, the least that keeps the budget for an l2 sensitivity s.

    Source: balle2018improving, Theorem 8.
    Deviates: (1) B is solved to 1e-12 and rounded to the private side.
    """
    radius = sensitivity.frobenius_radius(shape)
    return Gaussian(Isotropic(shape, radius / float(gaussian.mu(budget.epsilon, budget.delta)) * HEADROOM))
