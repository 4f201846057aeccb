"""The least Gaussian noise for a sensitivity set and a task."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import REPLACE
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Dense, Diagonal, Isotropic, Kronecker, Symmetric
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms.base import HEADROOM, recipe
from matrixdp.mechanisms.directions import roots_of
from matrixdp.mechanisms.solvers import design
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import L1, Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Sensitivity, Vertices

# Entries that no neighbour can change get this share of the least noise elsewhere.
LEAST_STD = 1e-6


@recipe("optimal", source="matrixdp, docs/optimal-noise.md")
def optimal(shape: Shape, sensitivity: Sensitivity, budget: Budget, *, weights: Any = None) -> Gaussian:
    """Minimises the expected (weighted) squared error over all Gaussian noise that keeps the budget.

    Args:
        weights: how much the squared error of each entry counts, a public array of the value's shape; all alike by
            default.
    """
    bound = float(gaussian.mu(budget.epsilon, budget.delta)) / HEADROOM
    counted = checked_weights(weights, shape)
    if isotropic_is_optimal(sensitivity, weights):
        return Gaussian(Isotropic(shape, sensitivity.frobenius_radius(shape) / bound))
    if isinstance(sensitivity, Vertices):
        return _vertices(sensitivity, counted, bound)
    if isinstance(sensitivity, Entrywise):
        return Gaussian(_entrywise(sensitivity.bounds(shape), counted, bound))
    if isinstance(sensitivity, (OneColumn, OneRow)) and weights is None:
        return Gaussian(_one_box(shape, sensitivity, bound))
    if isinstance(sensitivity, RankOne) and weights is None:
        covariance = _rank_one(shape[0], sensitivity, bound)
        return Gaussian(covariance.scaled(1 + covariance.slack))
    raise NotApplicable(f"optimal has no closed form for {type(sensitivity).__name__} with weights; use 'analytic'")


def checked_weights(weights: Any, shape: Shape) -> Array:
    """The weights of all entries, or ones."""
    if weights is None:
        return np.broadcast_to(1.0, shape)
    given = _check.broadcast("weights", weights, shape)
    if not (np.all(given >= 0) and np.any(given > 0)):
        raise InvalidInput("weights must be 0 or above everywhere and above 0 somewhere")
    return given


def isotropic_is_optimal(sensitivity: Sensitivity, weights: Any) -> bool:
    """Whether i.i.d. noise is known to be the optimum: by symmetry, or because all bounds are equal."""
    if isinstance(sensitivity, Frobenius):
        return True
    if isinstance(sensitivity, Counts) and sensitivity.cells == 1:
        return True
    if isinstance(sensitivity, L1) and (sensitivity.bound or sensitivity.radius) >= sensitivity.radius:
        return True  # its vertices are single entries, as those of Counts(1)
    if weights is not None:
        return False
    if isinstance(sensitivity, (OneColumn, OneRow)):
        return sensitivity.radius is not None or float(np.ptp(sensitivity.width)) == 0
    if isinstance(sensitivity, Entrywise):
        return float(np.ptp(sensitivity.bound)) == 0
    return isinstance(sensitivity, (Counts, L1))


def _one_box(shape: Shape, sensitivity: OneColumn | OneRow, bound: float) -> Kronecker:
    """Lines can be exchanged, so each place along the line has one scale: as for Entrywise on a single line."""
    along = _entrywise(sensitivity.widths(shape), np.ones(shape[1 - sensitivity.axis]), bound).variances()
    lines = np.ones(shape[sensitivity.axis])
    return Kronecker(lines, along) if sensitivity.axis == 0 else Kronecker(along, lines)


def _vertices(sensitivity: Vertices, weights: Array, bound: float) -> Gaussian:
    """The convex program of mechanisms/solvers/design.py."""
    vertices = np.stack([v.ravel() for v in sensitivity.differences])
    found = design.solve(np.diag(weights.ravel()), vertices)
    covariance = Dense(Spectrum(found.variances, found.directions), weights.shape)
    return Gaussian(
        covariance.scaled((1 + covariance.slack) / bound), note=f"within {found.gap:.1g} of the least error there is"
    )


def _entrywise(bounds: Array, weights: Array, bound: float) -> Diagonal:
    """Variances (R_i/w_i)(sum_j R_j w_j)/B^2 with w the roots of the weights, by the Cauchy-Schwarz inequality.

    A correlated covariance cannot do better: the set is unchanged when signs flip, so averaging over sign flips
    keeps the constraint (it is convex in the covariance) and the error, and leaves a diagonal.
    """
    roots, changing = roots_of(weights, bounds), bounds > 0
    total = float(np.sum(bounds * roots))
    if not total > 0:
        raise InvalidInput("weights must be above 0 for some entry that can change; this task needs no noise at all")
    std = np.divide(bounds, roots, out=np.zeros(bounds.shape), where=changing)
    std *= total
    std = np.sqrt(std, out=std) / bound
    return Diagonal(np.where(changing, std, LEAST_STD * std[changing].min()))


def _rank_one(dimension: int, sensitivity: RankOne, bound: float) -> Symmetric:
    """Noise on symmetric matrices with one scale on the trace and one on the traceless part.

    The set is unchanged by rotations x -> O x, so averaging a covariance over rotations keeps the constraint and the
    error; what is left acts as a number on each of the two invariant parts, the multiples of the identity and the
    traceless matrices (dimension D). With a = radius^4/B^2:
    add/remove: (1/d)/t + (1 - 1/d)/s <= 1/a, so t and s are in the ratio sqrt(1/d) : sqrt((1 - 1/d)/D).
    Replace: also 2/s <= 1/a (two orthogonal records have no trace), which is the tighter one; it leaves t = 2a/(d+1).
    """
    d, least = dimension, sensitivity.radius**4 / bound**2
    if d == 1:
        return Symmetric(1, math.sqrt(least))
    if sensitivity.adjacency == REPLACE:
        return Symmetric(d, math.sqrt(2 * least), math.sqrt(2 * least / (d + 1)))
    traceless = d * (d + 1) / 2 - 1
    total = math.sqrt(1 / d) + math.sqrt(traceless * (1 - 1 / d))
    trace_variance = least * math.sqrt(1 / d) * total
    variance = least * math.sqrt((1 - 1 / d) / traceless) * total
    return Symmetric(d, math.sqrt(variance), math.sqrt(trace_variance))
