"""Noise on symmetric matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions.covariance.base import Covariance
from matrixdp.distributions.covariance.spectrum import ROUNDOFF, Spectrum, unit
from matrixdp.errors import InvalidInput


class _OnSymmetric(Covariance):
    """Noise on symmetric matrices only; a whitened value is symmetric too."""

    dimension: int

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


@dataclass(frozen=True, eq=False)
class Symmetric(_OnSymmetric):
    """Noise on symmetric matrices only: i.i.d. in an orthonormal basis of them, with a separate scale on the trace.

    `std` is the standard deviation of each coordinate of the traceless part, `trace_std` of the coordinate along
    identity/sqrt(d), equal to `std` by default. An entry off the diagonal and its mirror image are equal, of variance
    std^2/2.

    Example:
        >>> from matrixdp.distributions.covariance import Symmetric
        >>> Symmetric(5, std=2.0).shape
        (5, 5)
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
        """The traceless part is a difference, which keeps up to d roundings of the trace."""
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
        """S applied to the symmetric part of an array; S is zero on the rest."""
        return self._scaled_parts((array + array.T) / 2, self.std**2, self.trace_std**2)

    def _scaled_parts(self, matrix: Array, traceless: float, trace: float) -> Array:
        """The traceless part times one number, and the multiple of the identity times another."""
        mean, scaled = float(np.trace(matrix)) / self.dimension, matrix * traceless
        np.fill_diagonal(scaled, trace * mean + traceless * (np.diagonal(matrix) - mean))
        return scaled

    def whitening_error(self) -> float:
        """The trace is a sum of d entries; the rest is a few operations per entry, and two roundings of the value."""
        return 2 * (self.dimension + 16) * ROUNDOFF * self.condition()

    def variances(self) -> Array:
        d = self.dimension
        off = np.full(self.shape, self.std**2 / 2)
        np.fill_diagonal(off, self.std**2 * (1 - 1 / d) + self.trace_std**2 / d)
        return off

    def task_error(self, rows: Array, columns: Array) -> float:
        """tr(P S) for P = rows (x) columns and S = std^2 (I + T)/2 + (trace_std^2 - std^2) e e^T.

        T is the transposition, with tr(P T) = <rows, columns>, and e the direction of the identity, with
        e^T P e = <rows, columns>/d.
        """
        both, inner = float(np.trace(rows)) * float(np.trace(columns)), float(np.sum(rows * columns))
        on_trace = (self.trace_std**2 - self.std**2) / self.dimension
        return float(self.std**2 * (both + inner) / 2 + on_trace * inner)

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


@dataclass(frozen=True, eq=False)
class SymmetricEntries(_OnSymmetric):
    """Noise U Y U^T on symmetric matrices; Y has independent entries off the diagonal and any covariance on it.

    Attributes:
        diagonal: the covariance of the d entries on Y's diagonal: a matrix, or its Spectrum.
        off_diagonal: the variances of Y's other entries, a symmetric matrix whose diagonal is not used.
        directions: the orthonormal columns of U; the axes by default.

    Example:
        >>> from matrixdp.distributions.covariance import SymmetricEntries
        >>> SymmetricEntries([1.0, 2.0], [[0.0, 0.5], [0.5, 0.0]]).shape
        (2, 2)
    """

    diagonal: Any
    off_diagonal: Any
    directions: Any = None
    dimension: int = field(init=False)
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        diagonal = Spectrum.of("diagonal", self.diagonal)
        size = len(diagonal.variances)
        off = _check.finite("off_diagonal", self.off_diagonal, ndim=2)
        if off.shape != (size, size) or not np.array_equal(off, off.T):
            raise InvalidInput(f"off_diagonal must be a symmetric {size} x {size} matrix, got shape {off.shape}")
        np.fill_diagonal(off, 1.0)
        if not np.all(off > 0):
            raise InvalidInput("off_diagonal must hold variances above 0")
        _check.lengths("the roots of off_diagonal", np.sqrt(off))
        np.fill_diagonal(off, 0.0)
        off.flags.writeable = False
        turned = None if self.directions is None else Spectrum(np.ones(size), self.directions).directions
        for name, value in (("diagonal", diagonal), ("off_diagonal", off), ("directions", turned)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "dimension", size)
        object.__setattr__(self, "shape", (size, size))

    @property
    def slack(self) -> float:
        """Errors of the eigendecomposition, of sums of d^2 products, and of two products with the directions."""
        turned = 0.0 if self.directions is None else 32 * self.dimension * ROUNDOFF * self.condition()
        return float(self.diagonal.slack + 8 * self.dimension**2 * ROUNDOFF + turned)

    def color(self, normal: Array) -> Array:
        """Entries off the diagonal of the symmetric part have variance 1/2."""
        return self.turned(self._scaled((normal + normal.T) / 2, np.sqrt(2 * self.off_diagonal), self.diagonal.color))

    def whiten(self, difference: Array) -> Array:
        """The difference in units of the noise; infinite if it is not symmetric, for the noise cannot hide that."""
        if not np.array_equal(difference, difference.T):
            return np.full(self.shape, np.inf)
        stds = np.sqrt(2 * self.off_diagonal) + np.eye(self.dimension)
        return self._scaled(self.turned(difference, back=True), 1 / stds, self.diagonal.whiten)

    def times(self, array: Array) -> Array:
        """S applied to the symmetric part of an array; each pair of equal off-diagonal entries counts twice."""
        seen = self.turned((array + array.T) / 2, back=True)
        return self.turned(self._scaled(seen, 2 * self.off_diagonal, lambda on: self.diagonal_covariance() @ on))

    def _scaled(self, matrix: Array, off: Array, on: Any) -> Array:
        scaled = matrix * off
        np.fill_diagonal(scaled, on(np.diagonal(matrix)))
        return scaled

    def turned(self, matrix: Array, back: bool = False) -> Array:
        """U A U^T, or with `back` U^T A U; exactly symmetric."""
        if self.directions is None:
            return matrix
        left = self.directions.T if back else self.directions
        turned = left @ matrix @ left.T
        return np.asarray((turned + turned.T) / 2)

    def whitening_error(self) -> float:
        """Two products with directions of Y, one with those of its diagonal, and two roundings of the value."""
        turns = 1 if self.directions is None else 3
        return float(turns * (self.dimension**1.5 + 4) * ROUNDOFF * self.condition())

    def _spread(self) -> Array:
        """The variances along orthonormal axes: of the diagonal, then of sqrt(2) times what lies above it."""
        return np.concatenate([self.diagonal.variances, 2 * self.off_diagonal[np.triu_indices(self.dimension, 1)]])

    def variances(self) -> Array:
        """Entry (a, b) of U Y U^T has the coefficients U_ai U_bj on Y_ij."""
        on = self.diagonal_covariance()
        if self.directions is None:
            return np.asarray(self.off_diagonal + np.diag(np.diagonal(on)))
        U, both, square = self.directions, on + self.off_diagonal, np.square(self.directions)
        aligned = np.stack([np.sum((U * row) @ both * (U * row), axis=1) for row in U])
        return np.asarray(aligned + square @ self.off_diagonal @ square.T)

    def diagonal_covariance(self) -> Array:
        """The covariance of Y's diagonal, multiplied out."""
        axes, variances = self.diagonal.directions, self.diagonal.variances
        return np.diag(variances) if axes is None else np.asarray((axes * variances) @ axes.T)

    def task_error(self, rows: Array, columns: Array) -> float:
        """tr(P S) for the Gram matrix P = rows (x) columns: the expected squared norm of W1 Z W2^T."""
        rows, columns = self.turned(rows, back=True), self.turned(columns, back=True)
        crossed = rows * columns + np.outer(np.diagonal(rows), np.diagonal(columns))
        return float(np.sum(rows * columns * self.diagonal_covariance()) + np.sum(crossed * self.off_diagonal))

    def power_trace(self, power: int) -> float:
        return float(np.sum(self._spread() ** power))

    def condition(self) -> float:
        spread = self._spread()
        return float(np.sqrt(spread.max() / spread.min()))

    def scaled(self, factor: float) -> SymmetricEntries:
        return SymmetricEntries(self.diagonal.scaled(factor), self.off_diagonal * factor**2, self.directions)

    def describe(self) -> str:
        spread = np.sqrt(self._spread())
        return f"symmetric Gaussian, std {spread.min():.6g} to {spread.max():.6g} along its axes"

    def least_noise_direction(self) -> Array:
        """A diagonal matrix, or one with a single entry above the diagonal, in the directions U."""
        least = np.zeros(self.shape)
        pair = np.unravel_index(int(np.argmin(self.off_diagonal + np.diag([np.inf] * self.dimension))), self.shape)
        if self.dimension == 1 or self.diagonal.variances.min() <= 2 * self.off_diagonal[pair]:
            np.fill_diagonal(least, self.diagonal.least_noise_direction())
        else:
            least[pair] = least[pair[::-1]] = math.sqrt(0.5)
        return self.turned(least)
