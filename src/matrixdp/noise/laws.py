"""Noise laws: what is added to a value. A law describes and draws noise; it claims nothing about privacy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.covariance import Covariance
from matrixdp.errors import InvalidInput


class NoiseLaw(ABC):
    """A law of additive noise with mean zero."""

    source: str
    """Who proposed it, for the certificate: a mechanism's name and theorem."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The shape of the noise."""

    @abstractmethod
    def expected_squared_error(self, weights: Any = None) -> float:
        """E ||Z||_F^2, or the sum of weights[i, j] E Z_ij^2."""

    @abstractmethod
    def sample(self, rng: np.random.Generator | None = None) -> Array:
        """Draws the noise; from the operating system's entropy unless a numpy Generator is given."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for people."""

    @property
    def std(self) -> float:
        """The root mean square of the noise over its entries."""
        return math.sqrt(self.expected_squared_error() / math.prod(self.shape))


@dataclass(frozen=True, eq=False)
class Gaussian(NoiseLaw):
    """Gaussian noise."""

    covariance: Covariance
    source: str = "covariance given by the caller"

    def __post_init__(self) -> None:
        if not isinstance(self.covariance, Covariance):
            raise InvalidInput(
                f"covariance must come from matrixdp.covariance (Isotropic, Diagonal, ...), got {self.covariance!r}"
            )

    @property
    def shape(self) -> Shape:
        """The shape of the noise."""
        return self.covariance.shape

    def expected_squared_error(self, weights: Any = None) -> float:
        """E ||Z||_F^2, or weighted."""
        return self.covariance.trace() if weights is None else self.covariance.weighted_trace(weights)

    def sample(self, rng: np.random.Generator | None = None) -> Array:
        """Draws the noise."""
        return self.covariance.color(generator(rng).standard_normal(self.shape))

    def describe(self) -> str:
        """A few words for people."""
        return self.covariance.describe()


def generator(rng: np.random.Generator | None) -> np.random.Generator:
    """The caller's numpy Generator, or a fresh one seeded by the operating system."""
    if rng is None:
        return np.random.default_rng()
    if not isinstance(rng, np.random.Generator):
        raise InvalidInput(f"rng must be a numpy Generator or None, got {rng!r}; use numpy.random.default_rng(seed)")
    return rng
