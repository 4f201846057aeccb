"""Spherical noise whose ideal law keeps the budget: the l2 mechanism, and the best radius law of a family.

No floating-point-safe sampler is known here for either, so `release` refuses them unless a violation is accepted.
"""

from __future__ import annotations

import math

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Spherical
from matrixdp.mechanisms.base import HEADROOM, recipe
from matrixdp.privacy.spherical import best_member, scale_for
from matrixdp.sensitivity import Sensitivity


@recipe("l2", source="joseph2025l2")
def l2(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Spherical:
    """Density proportional to exp(-||z||/scale), with the least scale that keeps the budget.

    Source: joseph2025l2.
    Deviates: (1) calibrated by the exact profile of matrixdp.privacy.spherical.
    """
    size = math.prod(shape)
    radius = sensitivity.frobenius_radius(shape) * HEADROOM
    scale = scale_for(size, k=float(size), p=1.0, radius=radius, epsilon=budget.epsilon, delta=budget.delta)
    return Spherical(shape, k=float(size), p=1.0, scale=scale)


@recipe("spherical", source="wei2026spherical", slow=True)
def spherical(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Spherical:
    """The member of the generalised-gamma family with the least expected error that keeps the budget.

    Never worse than the analytic Gaussian, which is a member; at epsilon 1, delta 1e-6 it has a ninth of its error for
    one entry, half for ten, and nearly all of it for thousands.

    Source: wei2026spherical for the family, whose members can beat the Gaussian in low dimension.
    Deviates: (1) the exact profile, its computation and the search are matrixdp's own.
    """
    radius = sensitivity.frobenius_radius(shape) * HEADROOM
    best = best_member(math.prod(shape), radius, budget.epsilon, budget.delta)
    return Spherical(shape, k=best.k, p=best.p, scale=best.scale)
