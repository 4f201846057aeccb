"""The classic Gaussian mechanism."""

from __future__ import annotations

import math

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.covariance import Isotropic
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms.base import recipe
from matrixdp.noise.laws import Gaussian
from matrixdp.sensitivity import Sensitivity


@recipe("classic", source="dwork2014algorithmic, Theorem A.1")
def classic(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Gaussian:
    """I.i.d. noise with std s sqrt(2 ln(1.25/delta))/epsilon.

    Source: dwork2014algorithmic, Theorem A.1.
    Deviates: none; the theorem is proven for epsilon below 1, and nothing is proposed at or above it.
    """
    if not budget.epsilon < 1:
        raise NotApplicable(
            f"classic is proven for epsilon below 1 only, got {budget.epsilon:g}, and fails for large epsilon; "
            "use 'analytic', which needs less noise at any epsilon"
        )
    radius = sensitivity.frobenius_radius(shape)
    return Gaussian(Isotropic(shape, radius * math.sqrt(2 * math.log(1.25 / budget.delta)) / budget.epsilon))
