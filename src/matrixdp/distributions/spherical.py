"""Spherical noise: a uniform direction times an independent radius."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions.base import NoiseLaw, generator
from matrixdp.distributions.gaussian import secure_normal
from matrixdp.distributions.margins import Margin, error_rate


@dataclass(frozen=True, eq=False)
class Spherical(NoiseLaw):
    """A uniform direction times a radius with density proportional to r^(k-1) exp(-(r/scale)^p).

    k = M (the number of entries) and p = 2 is the i.i.d. Gaussian of standard deviation scale/sqrt(2); k = M and p = 1
    is the l2 mechanism; k = 1 and p = 2 is R1SMG.

    Example:
        >>> from matrixdp.distributions import Spherical
        >>> noise = Spherical((2, 2), k=4, p=2, scale=1.0)  # i.i.d. Gaussian of variance 1/2
        >>> round(noise.expected_squared_error(), 6)
        2.0
    """

    shape: Shape
    k: float
    p: float
    scale: float
    source: str = "parameters given by the caller"
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check.any_shape(self.shape))
        for name in ("k", "p", "scale"):
            object.__setattr__(self, name, _check.positive(name, getattr(self, name)))

    def radius_moment(self, order: float) -> float:
        """E ||Z||^order."""
        return radius_moment(self.k, self.p, self.scale, order)

    def expected_squared_error(self, weights: Any = None) -> float:
        """E ||Z||_F^2, or weighted; every entry has the same variance."""
        total = self.radius_moment(2)
        return total if weights is None else total * float(np.mean(_check.weights(weights, self.shape)))

    @property
    def standard_error(self) -> Array:
        return np.broadcast_to(self.root_mean_square, self.shape)

    def margin(self, level: float = 0.95, *, simultaneous: bool = False) -> Margin:
        """Quantiles of one coordinate, by integration over the radius; by Bonferroni for all entries at once."""
        alpha = error_rate(level) / (math.prod(self.shape) if simultaneous else 1)
        return Margin(self._coordinate(alpha), float(level))

    def linear_covariance(self, weights: Array) -> Array:
        return np.asarray(self.root_mean_square**2 * (weights @ weights.T))

    def linear_margin(self, weights: Array, level: float, *, simultaneous: bool) -> Margin:
        """A linear function has the law of one coordinate times the length of its weights."""
        alpha = error_rate(level) / (len(weights) if simultaneous else 1)
        return Margin(np.linalg.norm(weights, axis=1) * self._coordinate(alpha), float(level))

    def _coordinate(self, alpha: float) -> float:
        """The number that the absolute value of one coordinate exceeds with probability alpha, to 1e-9 from above.

        The square of a coordinate of a uniform direction has the law Beta(1/2, (M - 1)/2). The upper tail of the radius
        is e^-t with t exponential; integrating over t keeps full relative accuracy.
        """
        power, others = self.k / self.p, (math.prod(self.shape) - 1) / 2

        def beyond(height: float) -> float:
            """The probability that the absolute value of a coordinate exceeds this many scales."""
            tail = float(scipy.special.gammaincc(power, height**self.p))
            if not (tail > 0 and others):
                return tail

            def density(t: float) -> float:
                radius = scipy.special.gammainccinv(power, tail * math.exp(-t)) ** (1 / self.p)
                share = min(1.0, (height / radius) ** 2) if radius > 0 else 1.0
                return float(math.exp(-t) * scipy.special.betainc(others, 0.5, 1 - share))

            return tail * float(scipy.integrate.quad(density, 0, 60, epsabs=0, epsrel=1e-11, limit=500)[0])

        high = 1.0
        while beyond(high) > alpha:
            high *= 2
        low = high
        while beyond(low) <= alpha:
            low /= 2
        found = scipy.optimize.brentq(
            lambda height: math.log(max(beyond(height), 1e-300) / alpha), low, high, xtol=1e-300, rtol=1e-11
        )
        return self.scale * float(found) * (1 + 1e-9)

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
        return f"spherical, radius density r^{self.k - 1:g} exp(-(r/{self.scale:.6g})^{self.p:g})"


def radius_moment(k: float, p: float, scale: float, order: float) -> float:
    """E rho^order = scale^order Gamma((k + order)/p) / Gamma(k/p); order 2 is the expected squared error of a release.

    Example:
        >>> from matrixdp.distributions import radius_moment
        >>> round(radius_moment(4, 2, 1.0, 2), 6)  # E rho^2 of four entries of variance 1/2
        2.0
    """
    k, p, order = _check.positive("k", k), _check.positive("p", p), _check.positive("order", order)
    return math.exp(order * math.log(_check.positive("scale", scale)) + log_gamma_ratio(k / p, order / p))


def stirling_error(a: float) -> float:
    """log Gamma(a) minus Stirling's formula, without cancellation at large a."""
    if a < 16.0:
        return math.lgamma(a) - ((a - 0.5) * math.log(a) - a + 0.5 * math.log(2.0 * math.pi))
    inverse = 1.0 / (a * a)
    return (1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse * (1 / 1680 - inverse / 1188)))) / a


def log_gamma_ratio(a: float, step: float) -> float:
    """log(Gamma(a + step) / Gamma(a)), without cancellation at large a."""
    correction = stirling_error(a + step) - stirling_error(a)
    return (a - 0.5) * math.log1p(step / a) + step * math.log(a + step) - step + correction


def secure_gamma(shape: float) -> float:
    """A gamma variable from the operating system's entropy, by inversion that is accurate in both tails.

    A uniform float below 1/2, with 53 significant bits at any size, is the probability of the lower or upper tail.
    """
    exponent = 2
    while not (word := secrets.randbits(64)):
        exponent += 64
    exponent += 64 - word.bit_length()
    share = math.ldexp(1 + secrets.randbits(52) * 2.0**-52, -exponent)
    upper = secrets.randbits(1)
    return float(scipy.special.gammainccinv(shape, share) if upper else scipy.special.gammaincinv(shape, share))
