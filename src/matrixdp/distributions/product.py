"""Independent discrete noise on a grid: discrete Laplace, discrete Gaussian, and the laws between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions import sums
from matrixdp.distributions.base import NoiseLaw, generator
from matrixdp.distributions.margins import Margin, attained, error_rate, sidak
from matrixdp.secure.tables import checked_exponent, checked_scale

_DEPTH = 60.0  # terms below e^-60 change no digit of a sum


@dataclass(frozen=True, eq=False)
class Product(NoiseLaw):
    """Independent entries `step * K` with P(K = j) prop. to exp(-(|j| / scale_in_steps)^exponent), j a whole number.

    Exponent 1 is the discrete Laplace law, exponent 2 the discrete Gaussian. The law is log-concave for all of them.

    Attributes:
        shape: of the noise.
        step: g, the step of the grid.
        exponent: t, from 1 to 2.
        scale: s, in the units of the value. The quotient s/g, rounded to a float, defines the law.
        source: where the law comes from.
        note: a further remark for the certificate.

    Example:
        >>> from matrixdp import Counts, certify
        >>> from matrixdp.distributions import Product
        >>> noise = Product((3, 4), step=1.0, exponent=1.0, scale=2.0)
        >>> noise.describe()
        'discrete Laplace, scale 2, on multiples of 1'
        >>> round(certify(noise, Counts(1)).epsilon(0), 6)
        0.5
    """

    shape: Shape
    step: float
    exponent: float
    scale: float
    source: str = "parameters given by the caller"
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check.any_shape(self.shape))
        object.__setattr__(self, "step", _check.length("step", self.step))
        object.__setattr__(self, "scale", _check.length("scale", self.scale))
        object.__setattr__(self, "exponent", checked_exponent(self.exponent))
        checked_scale(self.exponent, self.scale_in_steps)

    @property
    def scale_in_steps(self) -> float:
        """The scale in steps of the grid, s/g; with the exponent it determines the law of K."""
        return self.scale / self.step

    @property
    def variance(self) -> float:
        """The variance of every entry, in the squared units of the value."""
        return self.step**2 * steps_variance(self.exponent, self.scale_in_steps)

    def expected_squared_error(self, weights: Any = None) -> float:
        """E ||Z||_F^2, or weighted; every entry has the same variance."""
        if weights is None:
            return math.prod(self.shape) * self.variance
        return self.variance * float(np.sum(_check.weights(weights, self.shape)))

    @property
    def standard_error(self) -> Array:
        return np.broadcast_to(math.sqrt(self.variance), self.shape)

    def margin(self, level: float = 0.95, *, simultaneous: bool = False) -> Margin:
        """A whole number of steps, so the level attained is at least the one requested, and often higher."""
        entries = math.prod(self.shape) if simultaneous else 1
        steps, beyond = sums.quantile(self.exponent, self.scale_in_steps, sidak(error_rate(level), entries))
        return Margin(self.step * steps, attained(level, math.exp(entries * math.log1p(-beyond))))

    def linear_covariance(self, weights: Array) -> Array:
        return np.asarray(self.variance * (weights @ weights.T))

    def linear_margin(self, weights: Array, level: float, *, simultaneous: bool) -> Margin:
        """By convolution (`sums`); for several at once by Bonferroni, because they are dependent."""
        alpha = error_rate(level) / (len(weights) if simultaneous else 1)
        found = [sums.margin(self.exponent, self.scale_in_steps, row, alpha) for row in weights]
        steps, beyond = np.transpose(found)
        passed = np.sum(beyond) if simultaneous else np.max(beyond)
        return Margin(self.step * steps, attained(level, 1 - float(passed)))

    def sample(self, rng: np.random.Generator | None = None) -> Array:
        """Draws the noise; whole multiples of the step."""
        if rng is None:
            from matrixdp.secure import discrete  # numba, when it is needed

            steps = discrete.noise(self.shape, self.exponent, self.scale_in_steps)
        elif self.exponent == 1.0:
            vanishing, drawn = -math.expm1(-1.0 / self.scale_in_steps), generator(rng)
            steps = drawn.geometric(vanishing, self.shape) - drawn.geometric(vanishing, self.shape)
        else:
            below = np.cumsum(steps_probabilities(self.exponent, self.scale_in_steps))
            places = np.searchsorted(below, generator(rng).random(self.shape) * below[-1], side="right")
            steps = places - (below.size - 1) // 2
        return np.asarray(self.step * steps, dtype=np.float64)

    def describe(self) -> str:
        names = {1.0: "discrete Laplace", 2.0: "discrete Gaussian"}
        name = names.get(self.exponent, f"discrete generalised Gaussian, exponent {self.exponent:g}")
        return f"{name}, scale {self.scale:.6g}, on multiples of {self.step:g}"


@lru_cache(maxsize=256)
def steps_variance(exponent: float, scale_in_steps: float) -> float:
    """E K^2 of P(K = j) prop. to exp(-(|j|/scale)^exponent), correct to about 1e-13, relative.

    2q / (1-q)^2 for discrete Laplace, q = e^(-1/scale); otherwise a sum.
    """
    t, scale = checked_exponent(exponent), checked_scale(exponent, scale_in_steps)
    if t == 1.0:
        return 2.0 * math.exp(-1.0 / scale) / math.expm1(-1.0 / scale) ** 2
    sizes = np.arange(1.0, math.ceil(scale * _DEPTH ** (1.0 / t)) + 2.0)
    weights = 2.0 * np.exp(-((sizes / scale) ** t))
    return float(np.sum(weights * sizes**2) / (1.0 + np.sum(weights)))


def steps_probabilities(exponent: float, scale_in_steps: float) -> Array:
    """P(K = j) for j = -n, ..., n, up to tails of about e^-60; for studies, not rounded either way."""
    t, scale = checked_exponent(exponent), checked_scale(exponent, scale_in_steps)
    sizes = np.abs(np.arange(-(n := math.ceil(scale * _DEPTH ** (1.0 / t))), n + 1.0))
    weights = np.exp(-((sizes / scale) ** t))
    return np.asarray(weights / np.sum(weights))
