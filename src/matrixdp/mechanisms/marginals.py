"""Noise on the residuals of marginals, with the least error in the requested tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import ResidualNoise
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms.base import recipe, sized
from matrixdp.mechanisms.solvers import marginals as solver
from matrixdp.privacy import gaussian
from matrixdp.residuals import ResidualBasis, Residuals, separations, triples
from matrixdp.sensitivity import Sensitivity


@recipe("marginals", source="xiao2023optimal")
def marginals(
    shape: Shape,
    sensitivity: Sensitivity,
    budget: Budget,
    *,
    error: Any = None,
    limits: Any = None,
    largest: Any = None,
) -> Gaussian:
    """One standard deviation per residual, chosen for the least total variance of the tables computed from them.

    Args:
        error: the cost of one unit of variance of each residual, a number above 0 per subset of the basis. By default
            the cost is the summed variance of the tables of all these subsets.
        limits: upper limits on the variances of tables, one row per table: the coefficients of the residuals'
            variances in the table's variance, divided by its limit. None by default.
        largest: minimise the largest variance over these tables instead of the error; rows like those of limits.

    Source: xiao2023optimal; the proof is in `matrixdp.mechanisms.solvers.marginals`.
    Deviates: (1) replace: the optimum where pairs of cells are few up to symmetry; otherwise, and always with limits or
        `largest`, by a bound on each residual; (2) any contrasts.
    """
    if not isinstance(sensitivity, Residuals):
        raise NotApplicable(f"marginals needs a Residuals set, got {type(sensitivity).__name__}; see plan_marginals")
    sensitivity.fits(shape)
    basis = sensitivity.basis
    if sensitivity.adjacency == REPLACE and not np.all(np.any(basis.subsets >= 0, axis=1)):
        raise NotApplicable("marginals needs no noise on the total under replace, where it is public: leave it out")
    cost = _default_error(basis) if error is None else _check.finite("error", error, ndim=1)
    if cost.shape != (len(basis.subsets),) or not np.all(cost > 0):
        raise InvalidInput(f"error must be {len(basis.subsets)} numbers above 0, one per subset")
    bound = float(gaussian.mu(budget.epsilon, budget.delta)) / sensitivity.records
    variances = _variances(basis, sensitivity.adjacency, cost, limits, largest, bound)
    return sized(ResidualNoise(basis, np.sqrt(variances)), sensitivity, budget)


def _variances(basis: ResidualBasis, adjacency: str, error: Array, limits: Any, largest: Any, bound: float) -> Array:
    """s_A^2, up to a factor; with limits, at the bound on mu of one record."""
    kernels = [basis.kernel(attribute) for attribute in range(len(basis.sizes))]
    if adjacency == ADD_REMOVE:
        constraint = basis.products([float(np.max(np.diag(kernel))) for kernel in kernels])
    else:
        constraint = separations(basis, kernels)
        kinds = [triples(kernel)[0] for kernel in kernels]
        few = math.prod(map(len, kinds)) <= solver.MOST and len(error) <= solver.MOST
        if few and limits is None and largest is None:
            return solver.several_constraints(solver.pair_constraints(basis, kinds), error)
    if limits is None and largest is None:
        return solver.closed_form(constraint, error)
    rows = _check.finite("limits", limits if largest is None else largest, ndim=2)
    if not (rows.shape[0] <= solver.MOST and rows.shape[1] == len(error) and np.all(rows >= 0)):
        raise InvalidInput(f"limits must be at most {solver.MOST} rows of {len(error)} numbers, 0 or above")
    if largest is not None:
        return solver.least_largest(constraint, rows)
    return solver.with_limits(constraint / bound**2, error, rows)


def _default_error(basis: ResidualBasis) -> Array:
    """The summed variance over the tables of all subsets of the basis."""
    found = solver.incidence(basis.subsets, len(basis.sizes))
    spreads = [float(np.sum(basis.spread(i))) for i in range(len(basis.sizes))]
    return solver.aligned(basis, found, found.by_subset(found.coefficients(spreads, [1 / n for n in basis.sizes])))
