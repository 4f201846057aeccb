"""The shape of Gaussian noise: covariances on the entries of a matrix, never larger in memory than their structure.

Every covariance S knows how to colour standard normal noise (multiply by a factor U, S = U U^T) and how to whiten a
difference (multiply by U^-1), so that mu_V = ||whiten(V)|| is the privacy of that difference. Covariances with full
support also answer the few questions about the precision S^-1 that the suprema over sensitivity sets need.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.errors import InvalidInput
from matrixdp.spectrum import Spectrum, times, unit

C = TypeVar("C", bound="Covariance")


class Covariance(ABC):
    """A covariance of the entries of a value, possibly supported on a subspace."""

    shape: Shape

    @property
    @abstractmethod
    def slack(self) -> float:
        """Relative error that rounding may have put into the norm of a whitened difference, from above."""

    @abstractmethod
    def color(self, normal: Array) -> Array:
        """Noise with this covariance, from standard normal entries."""

    @abstractmethod
    def whiten(self, difference: Array) -> Array:
        """The difference in units of the noise; its norm is mu for that difference."""

    @abstractmethod
    def variances(self) -> Array:
        """The variance of each entry."""

    @abstractmethod
    def scaled(self: C, factor: float) -> C:
        """The same shape of noise with every standard deviation multiplied by the factor."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for people."""

    @property
    def smallest_std(self) -> float:
        """The least standard deviation in any direction of the support: the smallest singular value of a factor."""
        return 1 / float(np.linalg.norm(self.whiten(self.softest_direction())))

    @abstractmethod
    def softest_direction(self) -> Array:
        """A unit difference that the noise hides worst."""

    @abstractmethod
    def power_trace(self, power: int) -> float:
        """tr(S^power): the moments of the spectrum, which determine the law of ||Z||^2."""

    def trace(self) -> float:
        """The expected squared Frobenius norm of the noise."""
        return float(np.sum(self.variances()))

    def weighted_trace(self, weights: Any) -> float:
        """The expected squared error when entry (i, j) counts weights[i, j] times."""
        counted = _check.broadcast("weights", weights, self.shape)
        if not np.all(counted >= 0):
            raise InvalidInput("weights must be 0 or above everywhere")
        return float(np.sum(counted * self.variances()))


class FullCovariance(Covariance):
    """A positive definite covariance; its precision is Q = S^-1."""

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
        """Lines of the value that may be hidden worst, each with the covariance whose precision is Q on that line.

        axis 0 gives rows, axis 1 columns; the line where the noise is weakest is always among them.
        """


class _Independent(FullCovariance):
    """Independent entries with a standard deviation, or one each."""

    std: Any

    @property
    def independent(self) -> bool:
        """Always."""
        return True

    @property
    def slack(self) -> float:
        """None beyond rounding."""
        return 0.0

    def color(self, normal: Array) -> Array:
        """Noise with this covariance."""
        return np.asarray(self.std * normal)

    def whiten(self, difference: Array) -> Array:
        """The difference in units of the noise."""
        return np.asarray(difference / self.std)

    def variances(self) -> Array:
        """The variance of each entry."""
        return np.broadcast_to(np.square(self.std), self.shape)

    def power_trace(self, power: int) -> float:
        """tr(S^power)."""
        return float(np.sum(self.variances() ** power))

    def precision(self, difference: Array) -> Array:
        """Q applied to a difference."""
        return self.whiten(self.whiten(difference))

    def precision_diagonal(self) -> Array:
        """The diagonal of Q."""
        return 1 / self.variances()

    def absolute_precision(self, bounds: Array) -> Array:
        """|Q| applied to bounds."""
        return self.precision(bounds)


@dataclass(frozen=True, eq=False)
class Isotropic(_Independent):
    """The same independent noise on every entry."""

    shape: Shape
    std: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check.shape(self.shape))
        object.__setattr__(self, "std", _check.positive("std", self.std))

    def scaled(self, factor: float) -> Isotropic:
        """The same noise, larger by the factor."""
        return Isotropic(self.shape, self.std * factor)

    def describe(self) -> str:
        """A few words for people."""
        return f"i.i.d. Gaussian, std {self.std:.6g}"

    def softest_direction(self) -> Array:
        """Any entry."""
        return unit(self.shape, (0,) * len(self.shape))

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """All lines are alike."""
        yield 0, Isotropic((self.shape[1 - axis],), self.std)


@dataclass(frozen=True, eq=False)
class Diagonal(_Independent):
    """Independent noise with a standard deviation of its own on every entry."""

    std: Array
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        std = _check.finite("std", self.std)
        if not np.all(std > 0):
            raise InvalidInput(f"std must be above 0 in every entry, the smallest is {std.min()!r}")
        std.flags.writeable = False
        object.__setattr__(self, "std", std)
        object.__setattr__(self, "shape", std.shape)

    def scaled(self, factor: float) -> Diagonal:
        """The same noise, larger by the factor."""
        return Diagonal(self.std * factor)

    def describe(self) -> str:
        """A few words for people."""
        return f"independent Gaussian, std {self.std.min():.6g} to {self.std.max():.6g}"

    def softest_direction(self) -> Array:
        """The entry with the least noise."""
        return unit(self.shape, np.unravel_index(int(np.argmin(self.std)), self.shape))

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """Each line has noise of its own."""
        for index, std in enumerate(np.moveaxis(self.std, axis, 0)):
            yield index, Diagonal(std)


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

    def variances(self) -> Array:
        """The variance of each entry."""
        return np.outer(self.rows.diagonal(self.rows.variances), self.columns.diagonal(self.columns.variances))

    def power_trace(self, power: int) -> float:
        """tr(S^power)."""
        return float(np.sum(self.rows.variances**power) * np.sum(self.columns.variances**power))

    def scaled(self, factor: float) -> Kronecker:
        """The same noise, larger by the factor."""
        return Kronecker(self.rows.scaled(factor), self.columns)

    def describe(self) -> str:
        """A few words for people."""
        least = math.sqrt(self.rows.variances.min() * self.columns.variances.min())
        most = math.sqrt(self.rows.variances.max() * self.columns.variances.max())
        return f"matrix Gaussian (rows x columns), std {least:.6g} to {most:.6g} along its axes"

    def softest_direction(self) -> Array:
        """The product of the two factors' softest directions."""
        return np.outer(self.rows.softest_direction(), self.columns.softest_direction())

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
        object.__setattr__(self, "std", _check.positive("std", self.std))
        trace_std = self.std if self.trace_std is None else self.trace_std
        object.__setattr__(self, "trace_std", _check.positive("trace_std", trace_std))
        object.__setattr__(self, "shape", (self.dimension, self.dimension))

    @property
    def slack(self) -> float:
        """None beyond rounding."""
        return 0.0

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

    def _parts(self, matrix: Array) -> tuple[Array, Array]:
        trace = np.eye(self.dimension) * (np.trace(matrix) / self.dimension)
        return trace, matrix - trace

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

    def scaled(self, factor: float) -> Symmetric:
        """The same noise, larger by the factor."""
        return Symmetric(self.dimension, self.std * factor, self.trace_std * factor)

    def describe(self) -> str:
        """A few words for people."""
        trace = "" if self.trace_std == self.std else f" ({self.trace_std:.6g} along the trace)"
        return f"symmetric Gaussian, std {self.std:.6g} in each coordinate{trace}"

    def softest_direction(self) -> Array:
        """A traceless matrix, or the identity's direction."""
        d = self.dimension
        if d == 1 or self.trace_std <= self.std:
            return np.eye(d) / math.sqrt(d)
        return np.diag(unit((d,), (0,)) - unit((d,), (1,))) / math.sqrt(2)


@dataclass(frozen=True, eq=False)
class Dense(FullCovariance):
    """Any covariance of the entries, taken row by row; as large as the square of their number.

    Give the matrix (or its Spectrum) and the value's shape, a vector by default.
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
        """When the matrix was given by its variances alone."""
        return self.matrix.directions is None

    @property
    def slack(self) -> float:
        """The error of the eigendecomposition."""
        return float(self.matrix.slack)

    def color(self, normal: Array) -> Array:
        """Noise with this covariance."""
        return np.reshape(self.matrix.color(normal.ravel()), self.shape)

    def whiten(self, difference: Array) -> Array:
        """The difference in units of the noise."""
        return np.reshape(self.matrix.whiten(difference.ravel()), self.shape)

    def variances(self) -> Array:
        """The variance of each entry."""
        return np.reshape(self.matrix.diagonal(self.matrix.variances), self.shape)

    def power_trace(self, power: int) -> float:
        """tr(S^power)."""
        return float(np.sum(self.matrix.variances**power))

    def scaled(self, factor: float) -> Dense:
        """The same noise, larger by the factor."""
        return Dense(self.matrix.scaled(factor), self.shape)

    def describe(self) -> str:
        """A few words for people."""
        least, most = np.sqrt(self.matrix.variances.min()), np.sqrt(self.matrix.variances.max())
        return f"correlated Gaussian, std {least:.6g} to {most:.6g} along its axes"

    def softest_direction(self) -> Array:
        """The eigenvector with the least variance."""
        return np.reshape(self.matrix.softest_direction(), self.shape)

    def precision(self, difference: Array) -> Array:
        """Q applied to a difference."""
        return np.reshape(times(self.matrix.inverse(), difference.ravel()), self.shape)

    def precision_matrix(self) -> Array:
        """Q itself, with as many rows as the value has entries."""
        inverse: Array = self.matrix.inverse()
        return np.diag(inverse) if inverse.ndim == 1 else inverse

    def precision_diagonal(self) -> Array:
        """The diagonal of Q."""
        return np.reshape(self.matrix.diagonal(1 / self.matrix.variances), self.shape)

    def absolute_precision(self, bounds: Array) -> Array:
        """|Q| applied to bounds."""
        return np.reshape(times(np.abs(self.matrix.inverse()), bounds.ravel()), self.shape)

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """The blocks of Q on each line, one by one."""
        blocks = self.precision_matrix().reshape(self.shape * 2)
        for index in range(self.shape[axis]):
            block = Spectrum.of("precision", blocks[index, :, index] if axis == 0 else blocks[:, index, :, index])
            yield index, Dense(block.inverted(extra_slack=2 * self.slack))
