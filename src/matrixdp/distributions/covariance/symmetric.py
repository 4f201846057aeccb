"""Noise on symmetric matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions.covariance.base import Covariance
from matrixdp.distributions.covariance.spectrum import ROUNDOFF, unit


@dataclass(frozen=True, eq=False)
class Symmetric(Covariance):
    """Noise on symmetric matrices only: i.i.d. in an orthonormal basis of them, with a scale of its own on the trace.

    `std` is the standard deviation of each coordinate of the traceless part, `trace_std` of the coordinate along
    identity/sqrt(d); they are equal unless both are given. Entries off the diagonal have variance std^2/2, twice each.
    """

    dimension: int
    std: float
    trace_std: Any = None
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimension", _check.count("dimension", self.dimension))
        object.__setattr__(self, "std", _check.length("std", self.std))
        trace_std = self.std if self.trace_std is None else self.trace_std
        object.__setattr__(self, "trace_std", _check.length("trace_std", trace_std))
        object.__setattr__(self, "shape", (self.dimension, self.dimension))

    @property
    def slack(self) -> float:
        """The traceless part is a difference, in which d roundings of the trace can be left."""
        return 4 * self.dimension * ROUNDOFF * self.condition()

    def color(self, normal: Array) -> Array:
        """Projects standard normal entries onto the symmetric matrices, then scales the two parts."""
        return self._scaled_parts((normal + normal.T) / 2, self.std, self.trace_std)

    def whiten(self, difference: Array) -> Array:
        """The difference in units of the noise; infinite if it is not symmetric, for the noise cannot hide that."""
        if not np.array_equal(difference, difference.T):
            return np.full(self.shape, np.inf)
        return self._scaled_parts(difference, 1 / self.std, 1 / self.trace_std)

    def times(self, array: Array) -> Array:
        """Only the symmetric part of an array meets the noise."""
        return self._scaled_parts((array + array.T) / 2, self.std**2, self.trace_std**2)

    def _scaled_parts(self, matrix: Array, traceless: float, trace: float) -> Array:
        """The traceless part times one number, and the multiple of the identity times another."""
        mean, scaled = float(np.trace(matrix)) / self.dimension, matrix * traceless
        np.fill_diagonal(scaled, trace * mean + traceless * (np.diagonal(matrix) - mean))
        return scaled

    def rank(self) -> int:
        """The entries on and above the diagonal."""
        return self.dimension * (self.dimension + 1) // 2

    def coordinates(self, white: Array) -> Array:
        """The diagonal, and sqrt(2) times what lies above it."""
        coordinates = np.concatenate([np.diagonal(white), *(row[i + 1 :] for i, row in enumerate(white))])
        coordinates[self.dimension :] *= math.sqrt(2)
        return coordinates

    def assemble(self, coordinates: Array) -> Array:
        white, place = np.zeros(self.shape), self.dimension
        for i, row in enumerate(white):
            above = self.dimension - 1 - i
            row[i + 1 :] = coordinates[place : place + above]
            place += above
        white /= math.sqrt(2)
        white += white.T
        np.fill_diagonal(white, coordinates[: self.dimension])
        return white

    def whitening_error(self) -> float:
        """The trace is a sum of d entries; the rest is a few operations per entry, and two roundings of the value."""
        return 2 * (self.dimension + 16) * ROUNDOFF * self.condition()

    def variances(self) -> Array:
        d = self.dimension
        off = np.full(self.shape, self.std**2 / 2)
        np.fill_diagonal(off, self.std**2 * (1 - 1 / d) + self.trace_std**2 / d)
        return off

    def power_trace(self, power: int) -> float:
        free = self.dimension * (self.dimension + 1) / 2 - 1
        return float(free * self.std ** (2 * power) + self.trace_std ** (2 * power))

    def condition(self) -> float:
        return float(max(self.std, self.trace_std) / min(self.std, self.trace_std))

    def scaled(self, factor: float) -> Symmetric:
        return Symmetric(self.dimension, self.std * factor, self.trace_std * factor)

    def describe(self) -> str:
        on = math.sqrt(self.std**2 + (self.trace_std**2 - self.std**2) / self.dimension)
        return f"symmetric Gaussian, std {self.std / math.sqrt(2):.6g} off the diagonal and {on:.6g} on it"

    def least_noise_direction(self) -> Array:
        """A traceless matrix, or the identity's direction."""
        d = self.dimension
        if d == 1 or self.trace_std <= self.std:
            return np.eye(d) / math.sqrt(d)
        return np.diag(unit((d,), (0,)) - unit((d,), (1,))) / math.sqrt(2)
