"""The interface of covariances."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions import time_workloads
from matrixdp.errors import InvalidInput


class Covariance(ABC):
    """A covariance of the entries of a value, possibly supported on a subspace.

    Example:
        >>> from matrixdp.distributions.covariance import Covariance, Isotropic
        >>> noise = Isotropic((2, 3), std=2.0)
        >>> isinstance(noise, Covariance), noise.rank()
        (True, 6)
    """

    shape: Shape

    @property
    @abstractmethod
    def slack(self) -> float:
        """An upper bound on the relative rounding error of the norm of a whitened difference."""

    @abstractmethod
    def color(self, normal: Array) -> Array:
        """Noise with this covariance, from standard normal entries."""

    @abstractmethod
    def whiten(self, difference: Array) -> Array:
        """The difference in units of the noise; its norm is mu for that difference."""

    @abstractmethod
    def times(self, array: Array) -> Array:
        """S applied to an array."""

    def rank(self) -> int:
        """How many independent coordinates the noise has."""
        return math.prod(self.shape)

    def coordinates(self, white: Array) -> Array:
        """A whitened value as independent coordinates, in which the noise is standard normal."""
        return white.ravel()

    def assemble(self, coordinates: Array) -> Array:
        """The whitened value with these coordinates."""
        return coordinates.reshape(self.shape)

    @abstractmethod
    def whitening_error(self) -> float:
        """The largest rounding error of `coordinates(whiten(value))`, relative to its norm; 0 for independent noise.

        It includes two earlier roundings of each entry of the value.
        """

    @abstractmethod
    def variances(self) -> Array:
        """The variance of each entry."""

    def variance_range(self) -> tuple[float, float]:
        """The least and the largest variance of an entry."""
        variances = self.variances()
        return float(np.min(variances)), float(np.max(variances))

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The same shape of noise with every standard deviation multiplied by the factor."""

    @abstractmethod
    def describe(self) -> str:
        """A short human-readable description."""

    @abstractmethod
    def condition(self) -> float:
        """The ratio of the largest to the smallest standard deviation along any direction of the support."""

    @property
    def smallest_std(self) -> float:
        """The least standard deviation in any direction of the support: the smallest singular value of a factor."""
        return 1 / _check.norm(self.whiten(self.least_noise_direction()))

    @abstractmethod
    def least_noise_direction(self) -> Array:
        """A unit difference in the direction of least noise."""

    @abstractmethod
    def power_trace(self, power: int) -> float:
        """tr(S^power): the moments of the spectrum, which determine the law of ||Z||^2."""

    def trace(self) -> float:
        """The expected squared Frobenius norm of the noise."""
        return self.power_trace(1)

    def weighted_trace(self, weights: Any) -> float:
        """The expected squared error when entry (i, j) counts weights[i, j] times."""
        return float(np.sum(_check.weights(weights, self.shape) * self.variances()))

    def workload_trace(self, workload: Any) -> float:
        """The expected squared error over all answers of a workload over time, which acts along the rows."""
        if len(self.shape) != 2:
            raise InvalidInput(f"a workload over time needs noise with one row per step, got shape {self.shape}")
        task = time_workloads.coefficients(workload, self.shape[0])
        units = (unit.reshape(self.shape) for unit in np.eye(math.prod(self.shape)))
        return math.fsum(_check.norm(time_workloads.applied(task, self.color(unit))) ** 2 for unit in units)


class FullCovariance(Covariance):
    """A positive definite covariance; its precision is Q = S^-1.

    Example:
        >>> from matrixdp.distributions.covariance import FullCovariance, Isotropic, Symmetric
        >>> isinstance(Isotropic((2, 2), std=1.0), FullCovariance), isinstance(Symmetric(2, std=1.0), FullCovariance)
        (True, False)
    """

    @property
    @abstractmethod
    def independent(self) -> bool:
        """Whether the entries are independent of each other, so that Q is diagonal."""

    @abstractmethod
    def precision(self, difference: Array) -> Array:
        """Q applied to a difference."""

    @abstractmethod
    def precision_diagonal(self) -> Array:
        """The diagonal of Q, in the value's shape."""

    @abstractmethod
    def absolute_precision(self, bounds: Array) -> Array:
        """|Q| (entry by entry) applied to an array of bounds."""

    @abstractmethod
    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """Lines of the value that may have the least noise, each with the covariance whose precision is Q on that line.

        axis 0 gives rows, axis 1 columns; the line with the least noise is always among them.
        """
