"""The interface of noise laws. A law describes noise and draws single samples; it claims nothing about privacy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Self

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.errors import InvalidInput


class NoiseLaw(ABC):
    """A law of additive noise with mean zero."""

    source: str
    """Who proposed it, for the certificate: a mechanism's name and theorem."""

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

    @property
    def std(self) -> float:
        """The root mean square of the noise over its entries."""
        return math.sqrt(self.expected_squared_error() / math.prod(self.shape))


def generator(rng: np.random.Generator | None) -> np.random.Generator:
    """The caller's numpy Generator, or a fresh one seeded by the operating system."""
    if rng is None:
        return np.random.default_rng()
    if not isinstance(rng, np.random.Generator):
        raise InvalidInput(f"rng must be a numpy Generator or None, got {type(rng).__name__}; use default_rng(seed)")
    return rng
