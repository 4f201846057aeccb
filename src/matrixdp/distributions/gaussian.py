"""Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions.base import NoiseLaw, generator
from matrixdp.distributions.covariance import Covariance, Isotropic
from matrixdp.distributions.margins import Margin, error_rate, sidak
from matrixdp.errors import InvalidInput
from matrixdp.secure.grid import Grid

# Levels of the grid where no release determines how fine it must be: steps of 2^-28 standard deviations.
LEVELS = 4


@dataclass(frozen=True, eq=False)
class Gaussian(NoiseLaw):
    """Gaussian noise with mean zero and this covariance.

    Attributes:
        covariance: of the entries of a vector or a matrix.
        source: where the law comes from.
        note: a further remark for the certificate.
        value_shape: the shape of the value, if it differs from that of the covariance; the entries are the same, in the
            same order.

    Example:
        >>> from matrixdp import Frobenius, certify
        >>> from matrixdp.distributions import Gaussian
        >>> from matrixdp.distributions.covariance import Isotropic
        >>> noise = Gaussian(Isotropic((6, 8), std=4.0))
        >>> round(certify(noise, Frobenius(1.0)).mu, 6)
        0.25
    """

    covariance: Covariance
    source: str = "covariance given by the caller"
    note: str = ""
    value_shape: Shape | None = None
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.covariance, Covariance):
            raise InvalidInput(
                "covariance must come from matrixdp.distributions.covariance (Isotropic, ...), got "
                f"{type(self.covariance).__name__}"
            )
        own = self.covariance.shape
        shape = own if self.value_shape is None else _check.any_shape(self.value_shape)
        if math.prod(shape) != math.prod(own):
            raise InvalidInput(f"value_shape must have {math.prod(own)} entries, as the covariance has, got {shape}")
        object.__setattr__(self, "value_shape", None if shape == own else shape)
        object.__setattr__(self, "shape", shape)

    def expected_squared_error(self, weights: Any = None, *, workload: Any = None) -> float:
        """E ||Z||_F^2, or weighted; with a workload over time (`time_workloads`), the sum over all its answers."""
        if workload is not None:
            if weights is not None:
                raise InvalidInput("weights and workload exclude each other: give one of them")
            return self.covariance.workload_trace(workload)
        if weights is None:
            return self.covariance.trace()
        counted = _check.broadcast("weights", weights, self.shape)
        return self.covariance.weighted_trace(counted.reshape(self.covariance.shape))

    @property
    def entry_std(self) -> Any:
        """The standard deviation of every entry, in the shape of the value; one number if it is the same for all."""
        if isinstance(self.covariance, Isotropic):
            return self.covariance.std
        return np.sqrt(self.covariance.variances()).reshape(self.shape)

    @property
    def standard_error(self) -> Array:
        return np.broadcast_to(self.entry_std, self.shape)

    @property
    def standard_error_range(self) -> tuple[float, float]:
        """The least and the largest standard error of an entry, without an array as large as the value."""
        least, largest = self.covariance.variance_range()
        return math.sqrt(least), math.sqrt(largest)

    def margin(self, level: float = 0.95, *, simultaneous: bool = False) -> Margin:
        """Quantiles of the normal law; by Sidak's inequality for all entries at once."""
        entries = math.prod(self.shape) if simultaneous else 1
        return Margin(self.entry_std * normal_quantile(sidak(error_rate(level), entries)), float(level))

    def linear_covariance(self, weights: Array) -> Array:
        shape = self.covariance.shape
        colored = np.stack([self.covariance.times(row.reshape(shape)).ravel() for row in weights])
        covariance = weights @ colored.T
        return np.asarray((covariance + covariance.T) / 2)

    def linear_margin(self, weights: Array, level: float, *, simultaneous: bool) -> Margin:
        stds = np.sqrt(np.maximum(np.diagonal(self.linear_covariance(weights)), 0.0))
        alpha = sidak(error_rate(level), len(weights) if simultaneous else 1)
        return Margin(stds * normal_quantile(alpha), float(level))

    def sample(self, rng: np.random.Generator | None = None) -> Array:
        own = self.covariance.shape
        normal = secure_normal(own) if rng is None else generator(rng).standard_normal(own)
        return self.covariance.color(normal).reshape(self.shape)

    def describe(self) -> str:
        return self.covariance.describe()

    def stream(self, chunk_rows: int, values: Any = None) -> Iterator[Array]:
        """Draws the noise some rows at a time, in constant memory; each chunk has a key derived from one fresh key.

        Args:
            chunk_rows: rows per chunk.
            values: what the noise is added to: anything of this shape that returns arrays for slices of rows, such as a
                memory map. By default the noise alone is drawn.

        Returns:
            An iterator over the noisy chunks, on a grid of 2^-28 standard deviations.
        """
        from matrixdp.secure import kernels  # numba, when it is needed

        if not isinstance(self.covariance, Isotropic):
            raise InvalidInput(f"only i.i.d. noise can be drawn by rows, got {self.describe()}; use sample()")
        source = np.broadcast_to(0.0, self.shape) if values is None else values
        if tuple(source.shape) != self.shape:
            raise InvalidInput(f"values must have the shape {self.shape} of the noise, got {tuple(source.shape)}")
        chunks = kernels.stream(source, self.covariance.std, Grid(LEVELS), rows=_check.count("chunk_rows", chunk_rows))
        return (np.asarray(chunk, dtype=np.float64) for chunk in chunks)

    def reshaped(self, shape: Shape) -> Gaussian:
        """The same noise on values of another shape, whose entries come in the same order."""
        return replace(self, value_shape=shape)

    def scaled(self, factor: float) -> Gaussian:
        """The same law with every standard deviation multiplied by the factor."""
        return replace(self, covariance=self.covariance.scaled(factor))


def normal_quantile(alpha: float) -> float:
    """The number that the absolute value of a standard normal variable exceeds with probability alpha."""
    return -float(scipy.special.ndtri(alpha / 2)) * (1 + 1e-14)


def secure_normal(shape: Shape) -> Array:
    """Standard normal noise from a fresh key, on a grid of 2^-28."""
    from matrixdp.secure import kernels  # numba, when it is needed

    return kernels.standard(shape, Grid(LEVELS))
