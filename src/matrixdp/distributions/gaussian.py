"""Gaussian noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions.base import NoiseLaw, generator
from matrixdp.distributions.covariance import Covariance, Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.secure.grid import Grid

# Levels of the grid on which a law is drawn when no release says how fine it has to be: steps of 2^-28.
LEVELS = 4


@dataclass(frozen=True, eq=False)
class Gaussian(NoiseLaw):
    """Gaussian noise with mean zero and this covariance."""

    covariance: Covariance
    source: str = "covariance given by the caller"
    note: str = ""
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.covariance, Covariance):
            raise InvalidInput(
                "covariance must come from matrixdp.distributions.covariance (Isotropic, ...), got "
                f"{type(self.covariance).__name__}"
            )
        object.__setattr__(self, "shape", self.covariance.shape)

    def expected_squared_error(self, weights: Any = None) -> float:
        return self.covariance.trace() if weights is None else self.covariance.weighted_trace(weights)

    def sample(self, rng: np.random.Generator | None = None) -> Array:
        if rng is None:
            return self.covariance.color(secure_normal(self.shape))
        return self.covariance.color(generator(rng).standard_normal(self.shape))

    def describe(self) -> str:
        return self.covariance.describe()

    def stream(self, chunk_rows: int, values: Any = None) -> Iterator[Array]:
        """Draws the noise some rows at a time, in constant memory, from one fresh key that no block uses twice.

        Args:
            chunk_rows: rows of a chunk.
            values: what the noise is added to: anything of this shape that gives arrays for slices of rows, such as a
                memory map. The noise alone by default.

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

    def scaled(self, factor: float) -> Gaussian:
        """The same law with every standard deviation multiplied by the factor."""
        return replace(self, covariance=self.covariance.scaled(factor))


def secure_normal(shape: Shape) -> Array:
    """Standard normal noise from a fresh key, on a grid of 2^-28."""
    from matrixdp.secure import kernels  # numba, when it is needed

    return kernels.standard(shape, Grid(LEVELS))
