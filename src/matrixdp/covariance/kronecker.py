"""Correlated rows and correlated columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.covariance.base import FullCovariance
from matrixdp.covariance.dense import Dense
from matrixdp.covariance.spectrum import Spectrum, times


@dataclass(frozen=True, eq=False)
class Kronecker(FullCovariance):
    """Rows correlated by one matrix and columns by another: cov(Z_ij, Z_kl) = rows_ik * columns_jl.

    Each factor is a covariance matrix, a vector of variances for a diagonal one, or a Spectrum.
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
        """When both factors are diagonal."""
        return self.rows.directions is None and self.columns.directions is None

    @property
    def slack(self) -> float:
        """The errors of both factors."""
        return float(self.rows.slack + self.columns.slack)

    def color(self, normal: Array) -> Array:
        """U1 N U2^T."""
        colored: Array = self.columns.color(self.rows.color(normal).T).T
        return colored

    def whiten(self, difference: Array) -> Array:
        """U1^-1 V U2^-T."""
        white: Array = self.columns.whiten(self.rows.whiten(difference).T).T
        return white

    def whitening_error(self) -> float:
        """Both factors are applied one after the other."""
        return float(self.rows.multiplication_error() + self.columns.multiplication_error()) * self.condition()

    def variances(self) -> Array:
        """The variance of each entry."""
        return np.outer(self.rows.diagonal(self.rows.variances), self.columns.diagonal(self.columns.variances))

    def power_trace(self, power: int) -> float:
        """tr(S^power)."""
        return float(np.sum(self.rows.variances**power) * np.sum(self.columns.variances**power))

    def condition(self) -> float:
        """The ratio of the largest and the smallest standard deviation."""
        return float(self.rows.condition() * self.columns.condition())

    def scaled(self, factor: float) -> Kronecker:
        """The same noise, larger by the factor."""
        return Kronecker(self.rows.scaled(factor), self.columns)

    def describe(self) -> str:
        """A short human-readable description."""
        least = math.sqrt(self.rows.variances.min() * self.columns.variances.min())
        most = math.sqrt(self.rows.variances.max() * self.columns.variances.max())
        return f"matrix Gaussian (rows x columns), std {least:.6g} to {most:.6g} along its axes"

    def least_noise_direction(self) -> Array:
        """The product of the two factors' directions of least noise."""
        return np.outer(self.rows.least_noise_direction(), self.columns.least_noise_direction())

    def precision(self, difference: Array) -> Array:
        """Q1 V Q2."""
        return times(self.rows.inverse(), times(self.columns.inverse(), difference.T).T)

    def precision_diagonal(self) -> Array:
        """The diagonal of Q."""
        return np.outer(self.rows.diagonal(1 / self.rows.variances), self.columns.diagonal(1 / self.columns.variances))

    def absolute_precision(self, bounds: Array) -> Array:
        """|Q1| R |Q2|."""
        return times(np.abs(self.rows.inverse()), times(np.abs(self.columns.inverse()), bounds.T).T)

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """Lines differ only in scale, so the one with the largest precision is the worst."""
        along, across = (self.columns, self.rows) if axis == 0 else (self.rows, self.columns)
        scales = across.diagonal(1 / across.variances)
        worst = int(np.argmax(scales))
        yield worst, Dense(along.scaled(1 / math.sqrt(scales[worst])))
