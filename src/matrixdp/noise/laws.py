"""Noise laws: what is added to a value. A law describes and draws noise; it claims nothing about privacy."""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import gammainccinv, gammaincinv

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.covariance import Covariance, Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.noise.grid import Grid
from matrixdp.privacy.spherical import radius_moment

# Levels of the grid on which a law is drawn when no release says how fine it has to be: steps of 2^-28.
LEVELS = 4


class NoiseLaw(ABC):
    """A law of additive noise with mean zero."""

    source: str
    """Who proposed it, for the certificate: a mechanism's name and theorem."""

    note: str
    """Anything else that the certificate should say."""

    shape: Shape
    """The shape of the noise."""

    @abstractmethod
    def expected_squared_error(self, weights: Any = None) -> float:
        """E ||Z||_F^2, or the sum of weights[i, j] E Z_ij^2."""

    @abstractmethod
    def sample(self, rng: np.random.Generator | None = None) -> Array:
        """Draws the noise; from the operating system's entropy unless a numpy Generator is given."""

    @abstractmethod
    def describe(self) -> str:
        """A short human-readable description."""

    @abstractmethod
    def attributed_to(self, source: str) -> NoiseLaw:
        """The same law with this source."""

    @property
    def std(self) -> float:
        """The root mean square of the noise over its entries."""
        return math.sqrt(self.expected_squared_error() / math.prod(self.shape))


@dataclass(frozen=True, eq=False)
class Gaussian(NoiseLaw):
    """Gaussian noise."""

    covariance: Covariance
    source: str = "covariance given by the caller"
    note: str = ""
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.covariance, Covariance):
            raise InvalidInput(
                f"covariance must come from matrixdp.covariance (Isotropic, ...), got {type(self.covariance).__name__}"
            )
        object.__setattr__(self, "shape", self.covariance.shape)

    def expected_squared_error(self, weights: Any = None) -> float:
        """E ||Z||_F^2, or weighted."""
        return self.covariance.trace() if weights is None else self.covariance.weighted_trace(weights)

    def sample(self, rng: np.random.Generator | None = None) -> Array:
        """Draws the noise."""
        if rng is None:
            return self.covariance.color(secure_normal(self.shape))
        return self.covariance.color(generator(rng).standard_normal(self.shape))

    def describe(self) -> str:
        """A short human-readable description."""
        return self.covariance.describe()

    def attributed_to(self, source: str) -> Gaussian:
        """The same law with this source."""
        return replace(self, source=source)

    def stream(self, chunk_rows: int, values: Any = None) -> Iterator[Array]:
        """Draws the noise some rows at a time, in constant memory, from one fresh key that no block uses twice.

        Args:
            chunk_rows: rows of a chunk.
            values: what the noise is added to: anything of this shape that gives arrays for slices of rows, such as a
                memory map. The noise alone by default.

        Returns:
            An iterator over the noisy chunks, on a grid of 2^-28 standard deviations.
        """
        from matrixdp.noise import kernels  # numba, when it is needed

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


@dataclass(frozen=True, eq=False)
class Spherical(NoiseLaw):
    """A uniform direction times a radius with density proportional to r^(k-1) exp(-(r/scale)^p).

    k = M (the number of entries) and p = 2 is the i.i.d. Gaussian of standard deviation scale/sqrt(2); k = M and p = 1
    is the l2 mechanism; k = 1 and p = 2 is R1SMG.
    """

    shape: Shape
    k: float
    p: float
    scale: float
    source: str = "parameters given by the caller"
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check.shape(self.shape))
        for name in ("k", "p", "scale"):
            object.__setattr__(self, name, _check.positive(name, getattr(self, name)))

    def radius_moment(self, order: float) -> float:
        """E ||Z||^order."""
        return radius_moment(self.k, self.p, self.scale, order)

    def expected_squared_error(self, weights: Any = None) -> float:
        """E ||Z||_F^2, or weighted; every entry has the same variance."""
        total = self.radius_moment(2)
        if weights is None:
            return total
        counted = _check.broadcast("weights", weights, self.shape)
        if not np.all(counted >= 0):
            raise InvalidInput("weights must be 0 or above everywhere")
        return total * float(np.mean(counted))

    def sample(self, rng: np.random.Generator | None = None) -> Array:
        """Draws a direction and a radius."""
        if rng is None:
            direction, power = secure_normal(self.shape), secure_gamma(self.k / self.p)
        else:
            direction = generator(rng).standard_normal(self.shape)
            power = float(rng.standard_gamma(self.k / self.p))
        radius = self.scale * power ** (1 / self.p)
        return np.asarray(direction * (radius / float(np.linalg.norm(direction))))

    def describe(self) -> str:
        """A short human-readable description."""
        return f"spherical, radius density r^{self.k - 1:g} exp(-(r/{self.scale:.6g})^{self.p:g})"

    def attributed_to(self, source: str) -> Spherical:
        """The same law with this source."""
        return replace(self, source=source)


def secure_normal(shape: Shape) -> Array:
    """Standard normal noise from a fresh key, on a grid of 2^-28."""
    from matrixdp.noise import kernels  # numba, when it is needed

    return kernels.standard(shape, Grid(LEVELS))


def secure_gamma(shape: float) -> float:
    """A gamma variable from the operating system's entropy, as a quantile that is fine in both tails.

    A float below 1/2 with all its digits, whatever its size, is taken from the lower or the upper end.
    """
    exponent = 2
    while not (word := secrets.randbits(64)):
        exponent += 64
    exponent += 64 - word.bit_length()
    share = math.ldexp(1 + secrets.randbits(52) * 2.0**-52, -exponent)
    upper = secrets.randbits(1)
    return float(gammainccinv(shape, share) if upper else gammaincinv(shape, share))


def generator(rng: np.random.Generator | None) -> np.random.Generator:
    """The caller's numpy Generator, or a fresh one seeded by the operating system."""
    if rng is None:
        return np.random.default_rng()
    if not isinstance(rng, np.random.Generator):
        raise InvalidInput(f"rng must be a numpy Generator or None, got {type(rng).__name__}; use default_rng(seed)")
    return rng
