"""The matrix Gaussian mechanism (MGM) and its two special forms: unimodal (UDN) and independent (IDN) noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Kronecker
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.mechanisms.base import recipe
from matrixdp.mechanisms.directions import largest_root, rows_and_columns, squared_radius, utility
from matrixdp.sensitivity import Sensitivity


@recipe("mgm", source="yang2023matrix, Theorem 1")
def mgm(
    shape: Shape,
    sensitivity: Sensitivity,
    budget: Budget,
    *,
    row_utility: Any = None,
    column_utility: Any = None,
    row_directions: Any = None,
    column_directions: Any = None,
) -> Gaussian:
    """Row and column covariances with ||U1^-1||_F ||U2^-1||_F <= c, the best for a task W1 A W2^T.

    Args:
        row_utility: W1 (one column per row of the value), or a weight for each row direction; public.
        column_utility: W2, likewise for columns.
        row_directions: orthonormal noise directions of the rows (columns of the matrix), public; the axes by default.
        column_directions: likewise for columns.

    Source: yang2023matrix, Theorem 1 and Algorithm 1.
    Deviates: (1) the optimum (eq. 25) has the constant outside the root; (2) directions that the task does not use get
        finite noise.
    """
    m, n = rows_and_columns("mgm", shape)
    c = math.sqrt(_budget_constant(shape, sensitivity, budget))
    return Gaussian(
        Kronecker(
            _allocate(row_utility, row_directions, m, c, "row"),
            _allocate(column_utility, column_directions, n, c, "column"),
        )
    )


@recipe("udn", source="yang2023matrix, Theorem 2")
def udn(
    shape: Shape,
    sensitivity: Sensitivity,
    budget: Budget,
    *,
    row_utility: Any = None,
    row_directions: Any = None,
) -> Gaussian:
    """Correlated rows, independent columns: ||U1^-1||_F <= c.

    Args:
        row_utility: W1 (one column per row of the value), or a weight for each row direction; public.
        row_directions: orthonormal noise directions of the rows (columns of the matrix), public; the axes by default.

    Source: yang2023matrix, Theorem 2.
    Deviates: as mgm.
    """
    m, n = rows_and_columns("udn", shape)
    constant = _budget_constant(shape, sensitivity, budget)
    return Gaussian(Kronecker(_allocate(row_utility, row_directions, m, constant, "row"), np.ones(n)))


@recipe("idn", source="yang2023matrix, Theorem 3")
def idn(shape: Shape, sensitivity: Sensitivity, budget: Budget, *, row_utility: Any = None) -> Gaussian:
    """Independent entries with one scale per row: ||U1^-1||_F^2 <= m/s^2 (sqrt(z^2 + 2 epsilon) - z)^2.

    s = w sqrt(mn), where w is the most that an entry can change (the paper's b - a).

    Args:
        row_utility: W1 (one column per row of the value), or a weight for each row.

    Source: yang2023matrix, Theorem 3.
    Deviates: (1) the proof there mixes sigma and its root; with ||Delta'||^2 <= w^2 n ||U1^-1||_F^2 and the
        Cauchy-Schwarz inequality the statement holds, also when every column changes.
    """
    m, n = rows_and_columns("idn", shape)
    width = sensitivity.largest_entry(shape)
    z = math.sqrt(squared_radius(m * n, budget.delta))
    constant = largest_root(1.0, 2 * z, budget.epsilon) ** 2 / (width**2 * n)
    return Gaussian(Kronecker(_allocate(row_utility, None, m, constant, "row"), np.ones(n)))


def _budget_constant(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> float:
    """c^2, where c solves s^2 c^2 + 2 z s c = 2 epsilon."""
    radius = sensitivity.frobenius_radius(shape)
    z = math.sqrt(squared_radius(math.prod(shape), budget.delta))
    return largest_root(radius**2, 2 * z * radius, budget.epsilon) ** 2


def _allocate(task: Any, directions: Any, size: int, constant: float, side: str) -> Spectrum:
    """Variances sum(sqrt P)/(sqrt(P_k) C), so that their inverses add up to C and the weighted error is least."""
    turned = None if directions is None else _check.finite(f"{side}_directions", directions, ndim=2)
    roots = np.sqrt(utility(f"{side}_utility", task, turned, size))
    return Spectrum(float(np.sum(roots)) / (roots * constant), turned)
