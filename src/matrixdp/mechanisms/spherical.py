"""Spherical noise whose ideal law keeps the budget: the l2 mechanism, the best radius law of a family, and rank r.

matrixdp has no floating-point-safe sampler for any of them, so `release` refuses them unless accept_violation is set.
"""

from __future__ import annotations

import math

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Spherical
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms.base import HEADROOM, recipe
from matrixdp.privacy.spherical import best_member, scale_for
from matrixdp.sensitivity import Sensitivity


@recipe("l2", source="joseph2025l2")
def l2(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Spherical:
    """Density proportional to exp(-||z||/scale), with the least scale that keeps the budget.

    Source: joseph2025l2.
    Deviates: (1) calibrated by the exact profile of matrixdp.privacy.spherical.
    """
    return _least_scale(shape, sensitivity, budget, k=float(math.prod(shape)), p=1.0)


@recipe("rank-r", source="ji2024less, Definition 7")
def rank_r(shape: Shape, sensitivity: Sensitivity, budget: Budget, *, rank: int) -> Spherical:
    """A singular Gaussian in a uniformly random subspace, with the least scale that keeps the budget.

    Its direction is uniform and its radius that of `rank` independent normal variables. Rank 1 is R1SMG's law, the full
    rank is the i.i.d. Gaussian. The lower the rank, the more noise a true guarantee needs, because near the true value
    the density grows like r^(rank - M).

    Args:
        rank: dimensions of the subspace, from 1 to the number of entries.

    Source: ji2024less, Definition 7, the singular Gaussian of rank r; Definition 8 draws its subspace for rank 1.
    Deviates: (1) calibrated by the exact profile of matrixdp.privacy.spherical, not by the paper's Theorem 5.
    """
    size, rank = math.prod(shape), _check.count("rank", rank)
    if not rank <= size:
        raise NotApplicable(f"rank must be at most the number of entries, {size}, got {rank}")
    return _least_scale(shape, sensitivity, budget, k=float(rank), p=2.0)


@recipe("spherical", source="wei2026spherical", slow=True)
def spherical(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Spherical:
    """The member of the generalised-gamma family with the least expected error that keeps the budget.

    Never worse than the analytic Gaussian, which is a member. At epsilon 1, delta 1e-6 its squared error is a ninth of
    the Gaussian's for one entry, half for ten, and nearly the same for thousands.

    Source: wei2026spherical for the family, whose members can beat the Gaussian in low dimension.
    Deviates: (1) the exact profile, its computation and the search are matrixdp's own.
    """
    radius = sensitivity.frobenius_radius(shape) * HEADROOM
    best = best_member(math.prod(shape), radius, budget.epsilon, budget.delta)
    return Spherical(shape, k=best.k, p=best.p, scale=best.scale)


def _least_scale(shape: Shape, sensitivity: Sensitivity, budget: Budget, k: float, p: float) -> Spherical:
    """The least noise of one radius law that keeps the budget."""
    radius = sensitivity.frobenius_radius(shape) * HEADROOM
    scale = scale_for(math.prod(shape), k, p, radius, budget.epsilon, budget.delta)
    return Spherical(shape, k=k, p=p, scale=scale)
