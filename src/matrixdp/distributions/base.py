"""The interface of noise laws. A law describes noise and draws single samples; it claims nothing about privacy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Self

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.distributions.margins import LinearNoise, Margin, as_weights
from matrixdp.errors import InvalidInput, NotApplicable


class NoiseLaw(ABC):
    """A law of additive noise with mean zero.

    Example:
        >>> from matrixdp import Budget, Frobenius, calibrate
        >>> from matrixdp.distributions import NoiseLaw
        >>> noise = calibrate("analytic", shape=(6, 8), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6))
        >>> isinstance(noise, NoiseLaw), noise.shape, noise.sample().shape
        (True, (6, 8), (6, 8))
    """

    source: str
    """Where the law comes from, for the certificate: a mechanism's name and theorem."""

    note: str
    """A further remark for the certificate."""

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

    def attributed_to(self, source: str) -> Self:
        """The same law with this source."""
        return replace(self, source=source)  # type: ignore[type-var]

    def reshaped(self, shape: Shape) -> Self:
        """The same noise on values of another shape, whose entries come in the same order."""
        return replace(self, shape=shape)  # type: ignore[type-var]

    @property
    def root_mean_square(self) -> float:
        """The root of the mean variance over all entries; `standard_error` has the std of each entry."""
        return math.sqrt(self.expected_squared_error() / math.prod(self.shape))

    # --- error bars; a law from outside the package supports those that it overrides ---

    @property
    def standard_error(self) -> Array:
        """The standard deviation of the noise in every entry, in the shape of the value."""
        raise NotApplicable(f"the standard error of single entries is not known for {self.describe()}")

    @property
    def standard_error_range(self) -> tuple[float, float]:
        """The least and the largest standard error of an entry."""
        found = self.standard_error
        found = found[tuple(slice(None) if stride else 0 for stride in found.strides)]  # broadcast axes need one look
        return float(np.min(found)), float(np.max(found))

    def margin(self, level: float = 0.95, *, simultaneous: bool = False) -> Margin:
        """Margins that the noise stays inside with this probability: in each entry, or in all of them at once."""
        raise NotApplicable(f"intervals are not known for {self.describe()}")

    def half_width(self, level: float = 0.95, *, simultaneous: bool = False) -> Array:
        """How far the noise may move each entry with this probability: half the width of an interval.

        It covers the noise alone. The interval of a release adds the distance that its value was rounded to the grid.
        """
        return np.broadcast_to(self.margin(level, simultaneous=simultaneous).size, self.shape)

    def linear(self, weights: Any) -> LinearNoise:
        """The noise W vec(Z) of linear functions, each given by a row of weights or an array of the value's shape."""
        checked = as_weights(weights, self.shape)
        return LinearNoise(self, checked, self.linear_covariance(checked))

    def linear_covariance(self, weights: Array) -> Array:
        """W cov(Z) W^T, for weights of shape (functions, entries)."""
        raise NotApplicable(f"linear functions are not known for {self.describe()}")

    def linear_margin(self, weights: Array, level: float, *, simultaneous: bool) -> Margin:
        """As `margin`, for linear functions."""
        raise NotApplicable(f"intervals are not known for {self.describe()}")


def generator(rng: np.random.Generator | None) -> np.random.Generator:
    """The caller's numpy Generator, or a fresh one seeded by the operating system.

    Example:
        >>> from matrixdp.distributions import generator
        >>> generator(None).standard_normal(3).shape
        (3,)
    """
    if rng is None:
        return np.random.default_rng()
    if not isinstance(rng, np.random.Generator):
        raise InvalidInput(f"rng must be a numpy Generator or None, got {type(rng).__name__}; use default_rng(seed)")
    return rng
