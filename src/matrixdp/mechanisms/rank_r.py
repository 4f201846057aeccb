"""Gaussian noise in a random subspace of a given rank, sized by its exact profile."""

from __future__ import annotations

import math

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Spherical
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms.base import HEADROOM, recipe
from matrixdp.privacy.spherical import scale_for
from matrixdp.sensitivity import Sensitivity


@recipe("rank-r", source="ji2024less, Definition 7")
def rank_r(shape: Shape, sensitivity: Sensitivity, budget: Budget, *, rank: int) -> Spherical:
    """A singular Gaussian in a uniformly random subspace, with the least scale that keeps the budget.

    Its direction is uniform and its radius that of `rank` independent normal variables. Rank 1 is R1SMG's law, the full
    rank is the i.i.d. Gaussian. The lower the rank, the more noise a true guarantee takes: towards the true value the
    density grows like r^(rank - M).

    Source: ji2024less, Definition 7, the singular Gaussian of rank r; Definition 8 draws its subspace for rank 1.
    Deviates: (1) calibrated by the exact profile of matrixdp.privacy.spherical, not by the paper's Theorem 5.

    Args:
        shape: of the value.
        sensitivity: what a neighbour can change.
        budget: the budget to keep.
        rank: dimensions of the subspace, from 1 to the number of entries.
    """
    size, rank = math.prod(shape), _check.count("rank", rank)
    if not rank <= size:
        raise NotApplicable(f"rank must be at most the number of entries, {size}, got {rank}")
    radius = sensitivity.frobenius_radius(shape) * HEADROOM
    scale = scale_for(size, k=float(rank), p=2.0, radius=radius, epsilon=budget.epsilon, delta=budget.delta)
    return Spherical(shape, k=float(rank), p=2.0, scale=scale)
