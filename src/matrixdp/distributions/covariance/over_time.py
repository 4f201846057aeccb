"""Noise that is correlated over time: the rows of the value are steps.

With a lower-triangular strategy C, `C X + std Z` is released and decoded to `X + std C^-1 Z`. Rows of the noise have
covariance std^2 (C^T C)^-1, its columns are independent. Rows are released one by one, and each row of X may depend on
earlier releases (denisov2022improved).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions import time_workloads
from matrixdp.distributions.covariance.base import FullCovariance
from matrixdp.distributions.covariance.dense import Dense
from matrixdp.distributions.covariance.independent import Isotropic
from matrixdp.distributions.covariance.spectrum import Spectrum, unit
from matrixdp.errors import InvalidInput

MOST_STEPS = 4096
"""The most steps for which a dense steps x steps matrix is formed."""

MANY_BANDS = 64
"""With more bands than this, products use dense matrices."""


@dataclass(frozen=True, eq=False)
class OverTime(FullCovariance):
    """Rows with covariance std^2 (C^T C)^-1 and independent columns, for a lower-triangular C with few bands.

    Attributes:
        coefficients: C by its bands. A vector c means a Toeplitz matrix, C[t, t - j] = c[j]; a matrix with one row per
            step means C[t, t - j] = coefficients[t, j]. As many bands as steps make a dense C.
        shape: of the value: steps and columns.
        std: of the noise that is added to C X.
        inverse: whether the coefficients are those of C^-1 instead, so that C is dense.

    Example:
        >>> from matrixdp.distributions.covariance import OverTime
        >>> OverTime([1.0, 0.5], shape=(30, 1), std=2.0).shape
        (30, 1)
    """

    coefficients: Array
    shape: Shape
    std: float = 1.0
    inverse: bool = False

    def __post_init__(self) -> None:
        shape = _check.shape(self.shape)
        if len(shape) != 2:
            raise InvalidInput(f"shape must be (steps, columns), got {shape}")
        bands = _check.finite("coefficients", self.coefficients)
        rows, width = bands.shape if bands.ndim == 2 else (shape[0], len(bands))
        if rows != shape[0] or not width <= shape[0]:
            raise InvalidInput(
                f"coefficients must be a vector of at most {shape[0]} bands or have one row per step, got {bands.shape}"
            )
        if bands.ndim == 2 and np.any(np.triu(bands[:width], 1)):
            raise InvalidInput("coefficients must be 0 where a band lies before the first step (row t, band j > t)")
        diagonal = bands[..., :1]
        if not np.all((diagonal >= _check.SMALLEST) & (diagonal <= _check.LARGEST)):
            raise InvalidInput("coefficients must be above 0 in the first band, the diagonal")
        if not isinstance(self.inverse, (bool, np.bool_)):
            raise InvalidInput(f"inverse must be True or False, got {_check.shown(self.inverse)}")
        bands.flags.writeable = False
        for name, value in (("coefficients", bands), ("shape", shape), ("std", _check.length("std", self.std))):
            object.__setattr__(self, name, value)

    @property
    def steps(self) -> int:
        """How many rows the value has."""
        return self.shape[0]

    @property
    def bands(self) -> int:
        """How many bands C has."""
        return self.steps if self.inverse else self.coefficients.shape[-1]

    # --- the strategy ---

    def encode(self, rows: Array) -> Array:
        """C times rows."""
        return _solve(self.coefficients, rows) if self.inverse else _times(self.coefficients, rows)

    def bands_at(self, step: int) -> Array:
        """The coefficients of one row, from 0: the diagonal, then that of the step before, and so on."""
        return (self.coefficients if self.toeplitz else self.coefficients[step])[: step + 1]

    def encode_next(self, step: int, row: Array, before: Array) -> Array:
        """Row `step`, from 0, of C X, computed from row `step` of X and earlier rows, the latest first.

        Args:
            step: which row.
            row: x_step.
            before: the bands - 1 earlier rows, or all if there are fewer: of X, or of C X where `inverse`.
        """
        bands = self.bands_at(step)
        mixed = sum_in_pairs(bands[1:], before[: len(bands) - 1])
        return np.asarray((row - mixed) / bands[0] if self.inverse else bands[0] * row + mixed)

    def decode(self, rows: Array) -> Array:
        """C^-1 times rows."""
        return _times(self.coefficients, rows) if self.inverse else _solve(self.coefficients, rows)

    @cached_property
    def column(self) -> Array:
        """The first column of C, which determines a Toeplitz C."""
        return self.encode(unit((self.steps, 1), (0, 0)))[:, 0]

    @cached_property
    def decoder(self) -> Array:
        """The first column of C^-1, likewise."""
        return self.decode(unit((self.steps, 1), (0, 0)))[:, 0]

    @property
    def toeplitz(self) -> bool:
        """Whether C is the same at every step."""
        return self.coefficients.ndim == 1

    def strategy(self) -> Array:
        """C as a dense matrix."""
        self._check_dense()
        return self.encode(np.eye(self.steps)) if self.inverse else _filled(self.coefficients, self.steps)

    @cached_property
    def _inverse(self) -> Array:
        """C^-1 as a dense matrix."""
        self._check_dense()
        return _filled(self.coefficients, self.steps) if self.inverse else self.decode(np.eye(self.steps))

    def _check_dense(self) -> None:
        if not self.steps <= MOST_STEPS:
            raise InvalidInput(
                f"this needs all pairs of {self.steps} steps, for at most {MOST_STEPS}; use a Toeplitz strategy"
            )

    @cached_property
    def gram_diagonal(self) -> Array:
        """The diagonal of C^T C: the squared norms of the columns of C."""
        if self.toeplitz:
            return np.cumsum(np.square(self.column))[::-1]
        if self.inverse:
            return np.asarray(np.sum(np.square(self.strategy()), axis=0))
        squares, total = np.square(self.coefficients), np.zeros(self.steps)
        for band in range(self.bands):
            total[: self.steps - band] += squares[band:, band]
        return total

    def gram(self) -> Array:
        """C^T C."""
        strategy = self.strategy()
        return np.asarray(strategy.T @ strategy)

    # --- what every covariance answers ---

    @property
    def independent(self) -> bool:
        return self.coefficients.shape[-1] == 1 or not np.any(self.coefficients[..., 1:])

    @property
    def slack(self) -> float:
        return self.whitening_error() + self.steps * 2.0**-52

    def color(self, normal: Array) -> Array:
        return np.asarray(self.std * self.decode(normal))

    def whiten(self, difference: Array) -> Array:
        return np.asarray(self.encode(difference) / self.std)

    def times(self, array: Array) -> Array:
        """std^2 C^-1 C^-T times an array; the transpose of a Toeplitz C is C with time reversed."""
        turned = self.decode(array[::-1])[::-1] if self.toeplitz else self._inverse.T @ array
        return np.asarray(self.std**2 * self.decode(turned))

    def whitening_error(self) -> float:
        """2 (bands + 8) 2^-53 k, where k >= || |C| || || |C^-1| || in the spectral norm.

        Products: the error of C x is at most g |C||x|, g = (bands + 4) 2^-53, and ||x|| <= ||C^-1|| ||C x||.
        Substitution: the solution of B y = x is that of B + E, |E| <= g |B|, so its error is at most
        g ||B^-1|| || |B| || ||y||. The factor 2 covers terms of second order.
        """
        bands: int = self.coefficients.shape[-1]
        return 2 * (bands + 8) * 2.0**-53 * self._amplification

    @property
    def row_by_row_share(self) -> float:
        """The error of `encode_next`, as a share of `whitening_error`: it adds in pairs, log2(bands) deep.

        A sum of m products then has an error of at most g = (log2(m) + 1) 2^-53 times the sum of their absolute values,
        log2 rounded up; the rest is as in `whitening_error`. Substitution adds two roundings: a difference, a quotient.
        """
        bands: int = self.coefficients.shape[-1]
        return ((bands - 1).bit_length() + 8) / (bands + 8)

    @cached_property
    def _amplification(self) -> float:
        """A bound on k: a norm is at most the root of the largest row sum times the largest column sum."""
        if self.toeplitz:
            return float(np.sum(np.abs(self.column))) * float(np.sum(np.abs(self.decoder)))
        sizes = [np.abs(self.strategy()), np.abs(self._inverse)]
        return float(np.sqrt(np.prod([side.sum(axis=axis).max() for side in sizes for axis in (0, 1)])))

    @cached_property
    def rounding_feedback(self) -> float:
        """The factor by which feedback lengthens the total rounding of rows to the grid; 1 unless `inverse`.

        Row t of C x may be computed from earlier rows after they were rounded to the grid, so that noise can be drawn
        again instead of stored (`learn.correlated_noise`). The rows are then C (x + diag(C^-1) h), h the roundings.
        """
        if not self.inverse:
            return 1.0
        diagonal = np.broadcast_to(self.coefficients[..., 0], self.steps)
        if self.toeplitz:
            return max(1.0, float(np.sum(np.abs(self.column)) * diagonal[0]))
        sizes = np.abs(self.strategy()) * diagonal
        return max(1.0, float(np.sqrt(np.max(np.sum(sizes, axis=0)) * np.max(np.sum(sizes, axis=1)))))

    def variances(self) -> Array:
        return np.broadcast_to(self._row_variances[:, None], self.shape)

    def variance_range(self) -> tuple[float, float]:
        return float(np.min(self._row_variances)), float(np.max(self._row_variances))

    @property
    def _row_variances(self) -> Array:
        squares = np.cumsum(np.square(self.decoder)) if self.toeplitz else np.sum(np.square(self._inverse), axis=1)
        return np.asarray(self.std**2 * squares)

    def answer_variances(self, workload: Any) -> Array:
        """The variance of every answer of a workload over time, the same in every column."""
        task = time_workloads.coefficients(workload, self.steps)
        if self.toeplitz and task.ndim == 1:
            squares = np.cumsum(np.square(time_workloads.applied(task, self.decoder)))
        else:
            squares = np.sum(np.square(time_workloads.applied(task, self._inverse)), axis=1)
        return np.asarray(self.std**2 * squares)

    def workload_trace(self, workload: Any) -> float:
        return self.shape[1] * float(np.sum(self.answer_variances(workload)))

    def scaled(self, factor: float) -> OverTime:
        return OverTime(self.coefficients, self.shape, self.std * factor, self.inverse)

    def describe(self) -> str:
        kind = "Toeplitz" if self.toeplitz else "banded"
        width = self.coefficients.shape[-1]
        bands = f"{width} band{'s' if width > 1 else ''}{' of the inverse' if self.inverse else ''}"
        return f"Gaussian correlated over {self.steps} steps ({kind} strategy C, {bands}), std {self.std:.6g} on C x"

    @cached_property
    def _singular_values(self) -> tuple[Array, Array]:
        """The singular values of C, largest first, and the right singular vector of the largest."""
        found = np.linalg.svd(self.strategy())
        return np.asarray(found.S), np.asarray(found.Vh[0])

    def condition(self) -> float:
        values, _ = self._singular_values
        return float(values[0] / values[-1])

    @property
    def smallest_std(self) -> float:
        return float(self.std / self._singular_values[0][0])

    def least_noise_direction(self) -> Array:
        direction = np.zeros(self.shape)
        direction[:, 0] = self._singular_values[1]
        return direction

    def power_trace(self, power: int) -> float:
        columns = self.shape[1]
        if power == -1:
            return columns * float(np.sum(self.gram_diagonal)) / self.std**2
        if power == 1:
            return columns * float(np.sum(self._row_variances))
        return columns * float(np.sum((self.std / self._singular_values[0]) ** (2 * power)))

    def precision(self, difference: Array) -> Array:
        white = self.whiten(difference)[::-1]
        if self.toeplitz:  # as in `times`
            return self.whiten(white)[::-1]
        return np.asarray(self.strategy().T @ white[::-1] / self.std)

    def precision_diagonal(self) -> Array:
        return np.broadcast_to((self.gram_diagonal / self.std**2)[:, None], self.shape)

    def absolute_precision(self, bounds: Array) -> Array:
        return np.asarray(np.abs(self.gram()) @ bounds / self.std**2)

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """The row with the least noise given all others; all columns are alike."""
        if axis == 0:
            worst = int(np.argmax(self.gram_diagonal))
            yield worst, Isotropic(self.shape[1:], self.std / float(np.sqrt(self.gram_diagonal[worst])))
        else:
            precision = Spectrum.of("precision", self.gram() / self.std**2)
            yield 0, Dense(precision.inverted(extra_slack=2 * self.slack))


def _filled(coefficients: Array, steps: int) -> Array:
    """A banded matrix in full."""
    full = np.zeros((steps, steps))
    for band in range(coefficients.shape[-1]):
        entries = coefficients[band] if coefficients.ndim == 1 else coefficients[band:, band]
        full[np.arange(band, steps), np.arange(steps - band)] = entries
    return full


def sum_in_pairs(weights: Array, rows: Array) -> Array:
    """Weighted rows, added in pairs, then pairs of pairs, and so on; in blocks of columns, to save memory."""
    total, width = np.zeros(rows.shape[1]), max(1, 2**20 // max(1, len(weights)))
    for first in range(0, rows.shape[1] if len(weights) else 0, width):
        terms = weights[:, None] * rows[:, first : first + width]
        while len(terms) > 1:
            half = len(terms) // 2
            terms = np.concatenate([terms[:half] + terms[half : 2 * half], terms[2 * half :]])
        total[first : first + width] = terms[0]
    return total


def _times(coefficients: Array, rows: Array) -> Array:
    """The product of a banded matrix and rows."""
    if coefficients.ndim == 1:
        from scipy.signal import lfilter  # here, because it is slow to import

        return np.asarray(lfilter(coefficients, [1.0], rows, axis=0))
    if coefficients.shape[1] > MANY_BANDS:
        return np.asarray(_filled(coefficients, len(rows)) @ rows)
    product = coefficients[:, :1] * rows
    for band in range(1, coefficients.shape[1]):
        product[band:] += coefficients[band:, band, None] * rows[: len(rows) - band]
    return np.asarray(product)


def _solve(coefficients: Array, rows: Array) -> Array:
    """The solution of a banded triangular system, by forward substitution."""
    if coefficients.ndim == 1:
        from scipy.signal import lfilter

        return np.asarray(lfilter([1.0], coefficients, rows, axis=0))
    from scipy.linalg.lapack import dtbtrs

    steps, width = coefficients.shape
    lapack = np.zeros((width, steps))
    for band in range(width):
        lapack[band, : steps - band] = coefficients[band:, band]
    solution, _ = dtbtrs(lapack, rows, uplo="L")
    return np.asarray(solution)
