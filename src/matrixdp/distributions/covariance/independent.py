"""Independent noise on every entry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions import time_workloads
from matrixdp.distributions.covariance.base import FullCovariance
from matrixdp.distributions.covariance.spectrum import unit


class _Independent(FullCovariance):
    """Independent entries with one standard deviation, or one each; whitening is one division per entry."""

    std: Any
    independent = True
    slack = 0.0

    @property
    def smallest_std(self) -> float:
        return float(np.min(self.std))

    def color(self, normal: Array) -> Array:
        return np.asarray(self.std * normal)

    def whiten(self, difference: Array) -> Array:
        return np.asarray(difference / self.std)

    def times(self, array: Array) -> Array:
        return np.asarray(np.square(self.std) * array)

    def whitening_error(self) -> float:
        return 0.0

    def variances(self) -> Array:
        return np.broadcast_to(np.square(self.std), self.shape)

    def variance_range(self) -> tuple[float, float]:
        return float(np.min(self.std)) ** 2, float(np.max(self.std)) ** 2

    def condition(self) -> float:
        return float(np.max(self.std) / np.min(self.std))

    def precision(self, difference: Array) -> Array:
        return self.whiten(self.whiten(difference))

    def precision_diagonal(self) -> Array:
        return np.broadcast_to(1 / np.square(self.std), self.shape)

    def absolute_precision(self, bounds: Array) -> Array:
        return self.precision(bounds)


@dataclass(frozen=True, eq=False)
class Isotropic(_Independent):
    """The same independent noise on every entry.

    Example:
        >>> from matrixdp.distributions.covariance import Isotropic
        >>> Isotropic((6, 8), std=4.0).describe()
        'i.i.d. Gaussian, std 4'
    """

    shape: Shape
    std: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check.shape(self.shape))
        object.__setattr__(self, "std", _check.length("std", self.std))

    def power_trace(self, power: int) -> float:
        return math.prod(self.shape) * self.std ** (2 * power)

    def workload_trace(self, workload: Any) -> float:
        task = time_workloads.coefficients(workload, self.shape[0])
        return float(np.sum(time_workloads.column_squares(task))) * self.shape[1] * self.std**2

    def scaled(self, factor: float) -> Isotropic:
        return Isotropic(self.shape, self.std * factor)

    def describe(self) -> str:
        return f"i.i.d. Gaussian, std {self.std:.6g}"

    def least_noise_direction(self) -> Array:
        return unit(self.shape, (0,) * len(self.shape))

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """All lines are alike."""
        yield 0, Isotropic((self.shape[1 - axis],), self.std)


@dataclass(frozen=True, eq=False)
class Diagonal(_Independent):
    """Independent noise with one standard deviation per entry.

    Example:
        >>> from matrixdp.distributions.covariance import Diagonal
        >>> Diagonal([1.0, 2.0]).describe()
        'independent Gaussian, std 1 to 2'
    """

    std: Array
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        std = _check.lengths("std", _check.finite("std", self.std))
        object.__setattr__(self, "std", std)
        object.__setattr__(self, "shape", std.shape)

    def power_trace(self, power: int) -> float:
        return float(np.sum(self.std ** (2 * power)))

    def workload_trace(self, workload: Any) -> float:
        task = time_workloads.coefficients(workload, self.shape[0])
        return float(time_workloads.column_squares(task) @ np.sum(np.square(self.std), axis=1))

    def scaled(self, factor: float) -> Diagonal:
        return Diagonal(self.std * factor)

    def describe(self) -> str:
        return f"independent Gaussian, std {self.std.min():.6g} to {self.std.max():.6g}"

    def least_noise_direction(self) -> Array:
        return unit(self.shape, np.unravel_index(int(np.argmin(self.std)), self.shape))

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """All lines, each with its own standard deviations."""
        for index, std in enumerate(np.moveaxis(self.std, axis, 0)):
            yield index, Diagonal(std)
