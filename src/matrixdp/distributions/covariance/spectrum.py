"""Positive definite matrices as spectra, checked once when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.errors import InvalidInput, NumericalFailure

ROUNDOFF = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A positive definite matrix as variances along orthonormal directions (columns), the axes when none are given.

    Example:
        >>> from matrixdp.distributions.covariance import Spectrum
        >>> Spectrum.of("matrix", [[2.0, 0.0], [0.0, 1.0]]).variances.tolist()
        [1.0, 2.0]
    """

    variances: Array
    directions: Array | None = None
    slack: float = field(init=False)

    def __post_init__(self) -> None:
        variances = _check.finite("variances", self.variances, ndim=1)
        if not np.all(variances > 0):
            raise InvalidInput(f"variances must be above 0, the smallest is {variances.min()!r}")
        _check.lengths("the roots of variances", np.sqrt(variances))
        variances.flags.writeable = False
        object.__setattr__(self, "variances", variances)
        object.__setattr__(self, "slack", 0.0)
        if self.directions is None:
            return
        directions = _check.finite("directions", self.directions, ndim=2)
        size = len(variances)
        if directions.shape != (size, size):
            raise InvalidInput(f"directions must be {size} x {size}, got shape {directions.shape}")
        skew = _check.norm(directions.T @ directions - np.eye(size))
        if not skew <= 1e-8:
            raise InvalidInput(f"directions must have orthonormal columns; W^T W - I has norm {skew:.3g}")
        if skew > 8 * size * ROUNDOFF:
            # the remaining skew would be multiplied by the condition number, so it is removed; that of eigh is left, so
            # that a spectrum is read back unchanged
            turned, signs = np.linalg.qr(directions)
            directions = turned * np.where(np.diag(signs) < 0, -1.0, 1.0)
        directions.flags.writeable = False
        object.__setattr__(self, "directions", directions)
        object.__setattr__(self, "slack", _bounded_slack("directions", self._rounding()))

    def _rounding(self) -> float:
        """The slack of directions that are orthonormal up to a few roundings.

        The noise has the covariance W D W^T and differences are whitened by D^(-1/2) W^T. With E = W^T W - I the error
        is D^(-1/2) E D^(1/2), at most ||E|| times the condition number, and rounding adds as much again.
        """
        return 16 * len(self.variances) * ROUNDOFF * self.condition()

    @classmethod
    def _trusted(cls, variances: Array, directions: Array | None, slack: float) -> Spectrum:
        """Skips the checks, for arrays that come from another Spectrum or from eigh."""
        spectrum = object.__new__(cls)
        for name, value in (("variances", variances), ("directions", directions), ("slack", slack)):
            object.__setattr__(spectrum, name, value)
        return spectrum

    @classmethod
    def of(cls, name: str, matrix: Any) -> Spectrum:
        """The spectrum of a Spectrum, of a vector of variances, or of a symmetric positive definite matrix."""
        if isinstance(matrix, Spectrum):
            return matrix
        array = _check.finite(name, matrix)
        if array.ndim == 1:
            return cls(array)
        size = len(array)
        if array.shape != (size, size):
            raise InvalidInput(f"{name} must be square or a vector of variances, got shape {array.shape}")
        rounding = 8 * size * ROUNDOFF
        if not np.max(np.abs(array - array.T)) <= rounding * np.max(np.abs(array)):
            raise InvalidInput(f"{name} must be symmetric, got a matrix that differs from its transpose")
        variances, directions = np.linalg.eigh((array + array.T) / 2)
        if not variances[0] > rounding * variances[-1]:
            raise InvalidInput(
                f"{name} must be positive definite, its smallest eigenvalue is {variances[0]:.3g} "
                f"(largest {variances[-1]:.3g}); without noise in a direction, nothing is hidden there"
            )
        # eigh is backward stable: the computed spectrum is exact for a matrix within rounding * largest eigenvalue
        slack = _bounded_slack(name, rounding * float(variances[-1] / variances[0]))
        _check.lengths(f"standard deviations of {name}", np.sqrt(variances))
        found = cls._trusted(variances, directions, slack)
        return cls._trusted(variances, directions, max(slack, found._rounding()))

    def color(self, normal: Array) -> Array:
        """Multiplies a vector by a factor of the matrix."""
        stretched = np.sqrt(self.variances) * normal
        return stretched if self.directions is None else self.directions @ stretched

    def whiten(self, difference: Array) -> Array:
        """Multiplies a vector by the inverse of that factor."""
        turned = difference if self.directions is None else self.directions.T @ difference
        return turned / np.sqrt(self.variances)

    def multiplication_error(self) -> float:
        """The rounding error of W^T V relative to V (Frobenius): n roundings times the norm of |W|, at most sqrt(n).

        It includes two earlier roundings of each entry of V, such as of a sum and of a quotient.
        """
        size = len(self.variances)
        return (size**1.5 + 1 if self.directions is not None else 4.0) * ROUNDOFF

    def condition(self) -> float:
        """The ratio of the largest to the smallest standard deviation."""
        return float(np.sqrt(np.max(self.variances) / np.min(self.variances)))

    def diagonal(self, powers: Array) -> Array:
        """The diagonal of the matrix with these eigenvalues in place of the variances."""
        return powers if self.directions is None else np.square(self.directions) @ powers

    def task_error(self, gram: Array) -> float:
        """tr(P S) for a Gram matrix P, or the diagonal of a diagonal one."""
        if gram.ndim == 1:
            return float(gram @ self.diagonal(self.variances))
        if self.directions is None:
            return float(np.diagonal(gram) @ self.variances)
        return float(np.sum(self.directions * (gram @ self.directions), axis=0) @ self.variances)

    def inverse(self) -> Array:
        """The inverse matrix; a vector when the directions are the axes."""
        return 1 / self.variances if self.directions is None else (self.directions / self.variances) @ self.directions.T

    def inverted(self, extra_slack: float) -> Spectrum:
        """The spectrum of the inverse matrix."""
        return Spectrum._trusted(1 / self.variances, self.directions, self.slack + extra_slack)

    @property
    def smallest_std(self) -> float:
        """The least standard deviation in any direction."""
        return 1 / _check.norm(self.whiten(self.least_noise_direction()))

    def least_noise_direction(self) -> Array:
        """The unit direction with the least variance."""
        least = int(np.argmin(self.variances))
        if self.directions is None:
            return unit((len(self.variances),), (least,))
        return self.directions[:, least] / _check.norm(self.directions[:, least])

    def scaled(self, factor: float) -> Spectrum:
        """The matrix with every standard deviation multiplied by the factor."""
        return Spectrum._trusted(self.variances * factor**2, self.directions, self.slack)


def _bounded_slack(name: str, slack: float) -> float:
    """The slack, unless it is so large that a certificate would mean little."""
    if not slack <= 1e-3:
        raise NumericalFailure(f"{name}: the variances differ too much to certify (relative error {slack:.3g})")
    return slack


def unit(shape: Shape, place: tuple[Any, ...]) -> Array:
    """The array that is 1 in one place and 0 elsewhere."""
    unit = np.zeros(shape)
    unit[place] = 1.0
    return unit


def times(matrix: Array, vector: Array) -> Array:
    """A matrix, or the diagonal of a diagonal one, times a vector."""
    return matrix * vector if matrix.ndim == 1 else matrix @ vector
