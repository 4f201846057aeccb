"""Correlated rows and correlated columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.distributions import time_workloads
from matrixdp.distributions.covariance.base import FullCovariance
from matrixdp.distributions.covariance.dense import Dense
from matrixdp.distributions.covariance.spectrum import Spectrum


@dataclass(frozen=True, eq=False)
class Kronecker(FullCovariance):
    """Rows correlated by one matrix and columns by another: cov(Z_ij, Z_kl) = rows_ik * columns_jl.

    Each factor is a covariance matrix, a vector of variances for a diagonal one, or a Spectrum.

    Example:
        >>> from matrixdp.distributions.covariance import Kronecker
        >>> Kronecker(rows=[[2.0, 0.5], [0.5, 1.0]], columns=[1.0, 1.0, 4.0]).shape
        (2, 3)
    """

    rows: Any
    columns: Any
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", Spectrum.of("rows", self.rows))
        object.__setattr__(self, "columns", Spectrum.of("columns", self.columns))
        object.__setattr__(self, "shape", (len(self.rows.variances), len(self.columns.variances)))

    @property
    def independent(self) -> bool:
        return self.rows.directions is None and self.columns.directions is None

    @property
    def slack(self) -> float:
        return float(self.rows.slack + self.columns.slack)

    @property
    def smallest_std(self) -> float:
        return float(self.rows.smallest_std * self.columns.smallest_std)

    def color(self, normal: Array) -> Array:
        """U1 N U2^T."""
        colored: Array = color(normal, side(self.rows), side(self.columns))
        return colored

    def whiten(self, difference: Array) -> Array:
        """U1^-1 V U2^-T."""
        white: Array = whiten(difference, side(self.rows), side(self.columns))
        return white

    def times(self, array: Array) -> Array:
        """U U^T V, where U^T differs from U^-1 by the variances along the directions."""
        return self.color(self.whiten(array) * np.outer(self.rows.variances, self.columns.variances))

    def whitening_error(self) -> float:
        """Both factors are applied one after the other."""
        return float(self.rows.multiplication_error() + self.columns.multiplication_error()) * self.condition()

    def variances(self) -> Array:
        return np.outer(self.rows.diagonal(self.rows.variances), self.columns.diagonal(self.columns.variances))

    def variance_range(self) -> tuple[float, float]:
        rows, columns = (each.diagonal(each.variances) for each in (self.rows, self.columns))
        return float(np.min(rows) * np.min(columns)), float(np.max(rows) * np.max(columns))

    def power_trace(self, power: int) -> float:
        return float(np.sum(self.rows.variances**power) * np.sum(self.columns.variances**power))

    def workload_trace(self, workload: Any) -> float:
        """tr(A S1 A^T) tr(S2)."""
        task = time_workloads.coefficients(workload, self.shape[0])
        factor = color(np.eye(self.shape[0]), side(self.rows), (None, None))
        return float(np.sum(np.square(time_workloads.applied(task, factor))) * np.sum(self.columns.variances))

    def task_error(self, rows: Array, columns: Array) -> float:
        """tr(P S) for the Gram matrix P = rows (x) columns; each a matrix, or the diagonal of a diagonal one."""
        return float(self.rows.task_error(rows) * self.columns.task_error(columns))

    def condition(self) -> float:
        return float(self.rows.condition() * self.columns.condition())

    def scaled(self, factor: float) -> Kronecker:
        return Kronecker(self.rows.scaled(factor), self.columns)

    def describe(self) -> str:
        least = math.sqrt(self.rows.variances.min() * self.columns.variances.min())
        most = math.sqrt(self.rows.variances.max() * self.columns.variances.max())
        return f"matrix Gaussian (rows x columns), std {least:.6g} to {most:.6g} along its axes"

    def least_noise_direction(self) -> Array:
        return np.outer(self.rows.least_noise_direction(), self.columns.least_noise_direction())

    def precision(self, difference: Array) -> Array:
        """Q1 V Q2."""
        return _between(self.rows.inverse(), difference, self.columns.inverse())

    def precision_diagonal(self) -> Array:
        return np.outer(self.rows.diagonal(1 / self.rows.variances), self.columns.diagonal(1 / self.columns.variances))

    def absolute_precision(self, bounds: Array) -> Array:
        """|Q1| R |Q2|."""
        return _between(np.abs(self.rows.inverse()), bounds, np.abs(self.columns.inverse()))

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """Lines differ only in scale, so the one with the largest precision is the worst."""
        along, across = (self.columns, self.rows) if axis == 0 else (self.rows, self.columns)
        scales = across.diagonal(1 / across.variances)
        worst = int(np.argmax(scales))
        yield worst, Dense(along.scaled(1 / math.sqrt(scales[worst])))


# Standard deviations (None if all are 1), and the directions as columns of a matrix (None for the axes).
Side = tuple[Any, Any]


def side(spectrum: Spectrum) -> Side:
    """The factor U = directions diag(stds) of one side."""
    stds = None if np.all(spectrum.variances == 1) else np.sqrt(spectrum.variances)
    return stds, spectrum.directions


def color(normal: Any, rows: Side, columns: Side) -> Any:
    """U1 N U2^T, for arrays and tensors alike; diagonal factors cost one pass each, and no second array."""
    (row_stds, row_directions), (column_stds, column_directions) = rows, columns
    colored = normal * (1.0 if row_stds is None else row_stds[:, None])
    if row_directions is not None:
        colored = row_directions @ colored
    if column_stds is not None:
        colored *= column_stds
    return colored if column_directions is None else colored @ column_directions.T


def whiten(difference: Any, rows: Side, columns: Side) -> Any:
    """U1^-1 V U2^-T, likewise."""
    (row_stds, row_directions), (column_stds, column_directions) = rows, columns
    turned = difference if row_directions is None else row_directions.T @ difference
    if column_directions is not None:
        turned = turned @ column_directions
    white = turned / (1.0 if row_stds is None else row_stds[:, None])
    if column_stds is not None:
        white /= column_stds
    return white


def _between(rows: Array, array: Array, columns: Array) -> Array:
    """The product of three matrices; a vector represents a diagonal matrix."""
    left = rows[:, None] * array if rows.ndim == 1 else rows @ array
    return left * columns if columns.ndim == 1 else left @ columns
