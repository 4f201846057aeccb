"""Noise on symmetric matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.covariance.base import Covariance
from matrixdp.covariance.spectrum import ROUNDOFF, unit


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
        """Projects standard normal entries onto the symmetric matrices, then stretches the two parts."""
        trace, rest = self._parts((normal + normal.T) / 2)
        return np.asarray(self.trace_std * trace + self.std * rest)

    def whiten(self, difference: Array) -> Array:
        """The difference in units of the noise; infinite if it is not symmetric, for the noise cannot hide that."""
        if not np.array_equal(difference, difference.T):
            return np.full(self.shape, np.inf)
        trace, rest = self._parts(difference)
        return np.asarray(trace / self.trace_std + rest / self.std)

    def rank(self) -> int:
        """The entries on and above the diagonal."""
        return self.dimension * (self.dimension + 1) // 2

    def coordinates(self, white: Array) -> Array:
        """The diagonal, and sqrt(2) times what lies above it."""
        above = np.triu_indices(self.dimension, 1)
        return np.concatenate([np.diag(white), math.sqrt(2) * white[above]])

    def assemble(self, coordinates: Array) -> Array:
        """The symmetric matrix with these coordinates."""
        above = np.triu_indices(self.dimension, 1)
        white = np.zeros(self.shape)
        white[above] = coordinates[self.dimension :] / math.sqrt(2)
        return white + white.T + np.diag(coordinates[: self.dimension])

    def _parts(self, matrix: Array) -> tuple[Array, Array]:
        trace = np.eye(self.dimension) * (np.trace(matrix) / self.dimension)
        return trace, matrix - trace

    def whitening_error(self) -> float:
        """The trace is a sum of d entries; the rest is a few operations per entry, and two roundings of the value."""
        return 2 * (self.dimension + 16) * ROUNDOFF * self.condition()

    def variances(self) -> Array:
        """The variance of each entry."""
        d = self.dimension
        off = np.full(self.shape, self.std**2 / 2)
        np.fill_diagonal(off, self.std**2 * (1 - 1 / d) + self.trace_std**2 / d)
        return off

    def power_trace(self, power: int) -> float:
        """tr(S^power)."""
        free = self.dimension * (self.dimension + 1) / 2 - 1
        return float(free * self.std ** (2 * power) + self.trace_std ** (2 * power))

    def condition(self) -> float:
        """The ratio of the largest and the smallest standard deviation."""
        return float(max(self.std, self.trace_std) / min(self.std, self.trace_std))

    def scaled(self, factor: float) -> Symmetric:
        """The same noise, larger by the factor."""
        return Symmetric(self.dimension, self.std * factor, self.trace_std * factor)

    def describe(self) -> str:
        """A short human-readable description."""
        on = math.sqrt(self.std**2 + (self.trace_std**2 - self.std**2) / self.dimension)
        return f"symmetric Gaussian, std {self.std / math.sqrt(2):.6g} off the diagonal and {on:.6g} on it"

    def least_noise_direction(self) -> Array:
        """A traceless matrix, or the identity's direction."""
        d = self.dimension
        if d == 1 or self.trace_std <= self.std:
            return np.eye(d) / math.sqrt(d)
        return np.diag(unit((d,), (0,)) - unit((d,), (1,))) / math.sqrt(2)
