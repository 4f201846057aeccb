"""The classic Gaussian mechanism."""

from __future__ import annotations

import math

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms.base import recipe
from matrixdp.sensitivity import Sensitivity


@recipe("classic", source="dwork2014algorithmic, Theorem A.1")
def classic(shape: Shape, sensitivity: Sensitivity, budget: Budget, *, beyond_proof: bool = False) -> Gaussian:
    """I.i.d. noise with std s sqrt(2 ln(1.25/delta))/epsilon.

    Args:
        beyond_proof: use the formula at epsilon of 1 and above too, where it is not proven and for large epsilon false.

    Source: dwork2014algorithmic, Theorem A.1.
    Deviates: none; the theorem is proven for epsilon below 1, and above it nothing is proposed unless forced.
    """
    if not (budget.epsilon < 1 or beyond_proof is True):
        raise NotApplicable(
            f"classic is proven for epsilon below 1 only, got {budget.epsilon:g}, and fails for large epsilon; "
            "use 'analytic', which is right at any epsilon"
        )
    radius = sensitivity.frobenius_radius(shape)
    return Gaussian(Isotropic(shape, radius * math.sqrt(2 * math.log(1.25 / budget.delta)) / budget.epsilon))
