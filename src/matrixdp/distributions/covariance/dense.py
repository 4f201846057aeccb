"""Arbitrary covariances, for a modest number of entries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions.covariance.base import FullCovariance
from matrixdp.distributions.covariance.spectrum import Spectrum, times
from matrixdp.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Dense(FullCovariance):
    """Any covariance of the entries, taken row by row; as large as the square of their number.

    Give the matrix (or its Spectrum) and the value's shape, a vector by default.

    Example:
        >>> from matrixdp.distributions.covariance import Dense
        >>> Dense([[2.0, 0.5], [0.5, 1.0]]).shape
        (2,)
    """

    matrix: Any
    shape: Shape = ()

    def __post_init__(self) -> None:
        spectrum = Spectrum.of("matrix", self.matrix)
        size = len(spectrum.variances)
        shape = _check.shape(self.shape or (size,))
        if math.prod(shape) != size:
            raise InvalidInput(f"matrix covers {size} entries, shape {shape} has {math.prod(shape)}")
        object.__setattr__(self, "matrix", spectrum)
        object.__setattr__(self, "shape", shape)

    @property
    def independent(self) -> bool:
        return self.matrix.directions is None

    @property
    def slack(self) -> float:
        """The error of the eigendecomposition."""
        return float(self.matrix.slack)

    def color(self, normal: Array) -> Array:
        return np.reshape(self.matrix.color(normal.ravel()), self.shape)

    def whiten(self, difference: Array) -> Array:
        return np.reshape(self.matrix.whiten(difference.ravel()), self.shape)

    def times(self, array: Array) -> Array:
        return self.color(self.whiten(array).ravel() * self.matrix.variances)

    def whitening_error(self) -> float:
        """One product with the directions."""
        return float(self.matrix.multiplication_error() * self.condition())

    def variances(self) -> Array:
        return np.reshape(self.matrix.diagonal(self.matrix.variances), self.shape)

    def power_trace(self, power: int) -> float:
        return float(np.sum(self.matrix.variances**power))

    def condition(self) -> float:
        return float(self.matrix.condition())

    def scaled(self, factor: float) -> Dense:
        return Dense(self.matrix.scaled(factor), self.shape)

    def describe(self) -> str:
        least, most = np.sqrt(self.matrix.variances.min()), np.sqrt(self.matrix.variances.max())
        return f"correlated Gaussian, std {least:.6g} to {most:.6g} along its axes"

    def least_noise_direction(self) -> Array:
        return np.reshape(self.matrix.least_noise_direction(), self.shape)

    def precision(self, difference: Array) -> Array:
        return np.reshape(times(self.matrix.inverse(), difference.ravel()), self.shape)

    def precision_matrix(self) -> Array:
        """Q itself, with as many rows as the value has entries."""
        inverse: Array = self.matrix.inverse()
        return np.diag(inverse) if inverse.ndim == 1 else inverse

    def precision_diagonal(self) -> Array:
        return np.reshape(self.matrix.diagonal(1 / self.matrix.variances), self.shape)

    def absolute_precision(self, bounds: Array) -> Array:
        return np.reshape(times(np.abs(self.matrix.inverse()), bounds.ravel()), self.shape)

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """The blocks of Q on each line, one by one."""
        blocks = self.precision_matrix().reshape(self.shape * 2)
        for index in range(self.shape[axis]):
            block = Spectrum.of("precision", blocks[index, :, index] if axis == 0 else blocks[:, index, :, index])
            yield index, Dense(block.inverted(extra_slack=2 * self.slack))
