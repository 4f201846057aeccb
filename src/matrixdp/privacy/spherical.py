"""Exact privacy of spherical noise: the profile of a member of the generalised-gamma family, and the best member.

Noise `n = rho * u` in R^M: u is uniform on the sphere, rho has density prop. to `r^(k-1) exp(-(r/c)^p)`. The Gaussian
of standard deviation std is (k, p, c) = (M, 2, sqrt(2) std), the l2 mechanism is (M, 1, c), and R1SMG, whose radius is
distributed as |N(0, sigma*)|, is (1, 2, sqrt(2 sigma*)). The density of n at length r is prop. to g = e^(-phi),

    phi(r) = (M - k) log r + (r/c)^p,

which increases for k <= M. For a difference v of length s the loss at n is `L = phi(r') - phi(r)` with `r' = |n - v|`,
and `delta(epsilon) = E[(1 - e^(epsilon - L))_+]`.

The worst difference. For k <= M delta never decreases as s grows, so s is the worst of all lengths up to s.
Proof: up to the constant of the density,

    1 - delta = int min(g(|x|), e^epsilon g(|x-v|)) dx = int_0^oo vol{x: g(|x|) > y and e^epsilon g(|x-v|) > y} dy.

As g decreases, the set is where a ball around 0 meets a ball around v; the radii do not depend on v, and the volume
cannot grow as the centres move apart. This uses nothing but a radially decreasing density. For k > M the density
vanishes at the origin and shorter differences can be worse (two narrow humps on a line are), so such a k is refused.

The direction. The map `x -> v - x` exchanges the two densities, so both directions of the divergence are equal.

How it is computed. Given r the loss increases with `x = -cos(angle between n and v)`, as `r'^2 = r^2 + s^2 + 2 r s x`.
So only x above a threshold counts: the one with `r' = R`, where `phi(R) = phi(r) + epsilon`. All is written relative to
R, so that no nearly equal numbers are subtracted, and the integrand is positive. The inner integral runs over
arcsin(x), whose density is prop. to cos^(M-2), on a window that follows the threshold and the width 1/sqrt(M); the
outer one runs over `z = log((r/c)^p p/k)`, adaptively, with breaks where the threshold passes x = 1 and x = -1.

What is proven: the supremum over the set, and the bound for radii outside the window, namely their probability (4e-40
unless s/c is astronomical). What is estimated: the outer error, by the difference between a 24 and a 16 point rule on
each panel, added in full although it is the error of the coarser one; the inner error and rounding, by a relative
margin of 1e-9. Against 30-digit values and finer rules, no error above 1e-12 has been observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import scipy

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions.spherical import log_gamma_ratio, radius_moment, stirling_error
from matrixdp.errors import InvalidInput, NotCertifiable, NumericalFailure
from matrixdp.privacy import gaussian

# Outside these ranges, the radii that matter span more orders of magnitude than floats do.
_LEAST_K, _LEAST_P, _LARGEST_P, _LEAST_SHAPE = 0.5, 0.25, 8.0, 0.25
_LEAST_RATIO, _LARGEST_RATIO = 1e-100, 1e100

_OUTSIDE = 1e-40  # probability of the radii cut off at either end
_LEAST_DELTA = 1e-30  # a smaller delta is too close to what was cut off, and is treated as delta = 0
_DEPTH = 50.0  # angles whose density is below e^-50 of the largest are cut off
_SATURATED = 40.0  # where the loss is this far above epsilon, 1 - e^(epsilon - L) is 1
_TOLERANCE = 1e-10  # of the outer integral, relative
_MOST_PANELS = 100  # to refine at a time; a handful is usual
_BACKWARD = 2e-15  # s is raised by this, relative, which outweighs all rounding of the loss
_MARGIN = 1e-9  # for the inner integral and rounding, relative
_ROOT = 1e-10  # tolerance of a scale or an epsilon, relative
_LARGEST_SEARCH = 10_000  # above, the best member gains less than 0.1 % at delta = 1e-6, and a Gaussian composes better


def _unit_rule(points: int) -> tuple[Array, Array]:
    """Gauss-Legendre on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return 0.5 * (nodes + 1.0), 0.5 * weights


def _graded_rule(points: int) -> tuple[Array, Array]:
    """Gauss-Legendre after u -> u^2 (3 - 2u), which makes the power (M+1)/2 of the integrand at a break a whole one."""
    nodes, weights = _unit_rule(points)
    return nodes**2 * (3.0 - 2.0 * nodes), 6.0 * nodes * (1.0 - nodes) * weights


_INNER_NODES, _INNER_WEIGHTS = _unit_rule(40)
_FINE, _COARSE = _graded_rule(24), _graded_rule(16)
_OUTER_NODES = np.concatenate([_FINE[0], _COARSE[0]])


@dataclass(frozen=True)
class _Divergence:
    """The integral for a member with c = 1, a difference of length `shift` and one epsilon."""

    dimension: int
    k: float
    p: float
    shift: float
    epsilon: float

    @property
    def shape(self) -> float:
        """The shape of the gamma distribution of (rho/c)^p."""
        return self.k / self.p

    def bound(self) -> float:
        """The divergence, rounded up."""
        low, high, outside = self._window()
        edges = self._edges(low, high)
        left, right = edges[:-1], edges[1:]
        total = error = 0.0
        while True:
            width = right - left
            values = self._integrand(left[:, None] + width[:, None] * _OUTER_NODES)
            fine = (values[:, : _FINE[1].size] @ _FINE[1]) * width
            panel_error = np.abs(fine - (values[:, _FINE[1].size :] @ _COARSE[1]) * width)
            poor = (panel_error > _TOLERANCE / 16.0 * (total + fine.sum())) & (width > 1e-9 * (high - low))
            if np.count_nonzero(poor) > _MOST_PANELS:
                poor[:] = False  # finer panels would see rounding alone; the error found so far is added
            total += float(fine[~poor].sum())
            error += float(panel_error[~poor].sum())
            if not poor.any():
                return min(1.0, (total + error) * (1.0 + _MARGIN) + outside)
            middle = 0.5 * (left[poor] + right[poor])
            left, right = np.concatenate([left[poor], middle]), np.concatenate([middle, right[poor]])

    def _window(self) -> tuple[float, float, float]:
        """The range of z that is integrated, and a bound on the rest, where the integrand is at most the density.

        Radii below s e^-300 and powers of the radius below e^-600 are also cut off: their inverses would overflow.
        """
        shape = self.shape
        low = math.log(max(float(scipy.special.gammaincinv(shape, _OUTSIDE)), 1e-300))
        low = max(low, self.p * (math.log(self.shift) - 300.0), -600.0)
        high = math.log(float(scipy.special.gammainccinv(shape, _OUTSIDE)))
        outside = float(scipy.special.gammainc(shape, math.exp(low)) + scipy.special.gammaincc(shape, math.exp(high)))
        return low - math.log(shape), high - math.log(shape), 2.0 * outside

    def _edges(self, low: float, high: float) -> Array:
        """Panels with breaks where the threshold passes x = 1 and x = -1: there the integrand is not smooth.

        phi' falls and then rises (one of the two may be missing), and so does the loss in front, phi(r + s) - phi(r).
        So it is above epsilon at an end of the window or nowhere, and a grid that includes the ends sees it.
        """
        edges = list(np.linspace(low, high, 13))
        grid = np.linspace(low, high, 257)
        for x in (1.0, -1.0):
            for i in np.flatnonzero(np.diff(self._excess(grid, x) > 0.0)):
                edges.append(scipy.optimize.brentq(self._excess, grid[i], grid[i + 1], args=(x,)))
        return np.unique(edges)

    def _relative_shift(self, z: Array) -> Array:
        """s / r."""
        return np.exp(math.log(self.shift) - (z + math.log(self.shape)) / self.p)

    def _excess(self, z: Any, x: float) -> Any:
        """L - epsilon at x = 1, where r' = r + s, or at x = -1, where r' = |r - s|; finite for the root finder."""
        shift = self._relative_shift(z)
        growth = np.log1p(shift) if x > 0.0 else np.log(np.maximum(np.abs(shift - 1.0), 1e-300))  # log(r' / r)
        loss = (self.dimension - self.k) * growth + self.shape * np.exp(z) * np.expm1(self.p * growth)
        return np.minimum(loss, 1e300) - self.epsilon

    def _integrand(self, z: Array) -> Array:
        """The density of z times E[(1 - e^(epsilon - L))_+ given z]."""
        log_density = -self.shape * (np.expm1(z) - z) - stirling_error(self.shape)
        norm = math.sqrt(self.shape / (2.0 * math.pi))
        return norm * np.exp(log_density) * self._conditional(z.ravel()).reshape(z.shape)

    def _conditional(self, z: Array) -> Array:
        power, shift = self.shape * np.exp(z), self._relative_shift(z)
        growth = self._growth(power, self.epsilon)  # log(R / r)
        saturated = self._growth(power, self.epsilon + _SATURATED)
        threshold, saturation = (np.expm1(2.0 * t) / (2.0 * shift) - 0.5 * shift for t in (growth, saturated))
        active = threshold < 1.0
        power, shift, growth = (entry[active, None] for entry in (power, shift, growth))
        rise, weight = self._angles(threshold[active, None], saturation[active, None])
        step = 0.5 * np.log1p(2.0 * shift * rise * np.exp(-2.0 * growth))  # log(r' / R)
        excess = (self.dimension - self.k) * step + power * np.exp(self.p * growth) * np.expm1(self.p * step)
        result = np.zeros_like(z)
        result[active] = -(weight * np.expm1(-excess)).sum(axis=1)  # the excess is L - epsilon
        return result

    def _growth(self, power: Array, loss: float) -> Array:
        """log(r'/r) at which the loss is reached: the root t of (M - k) t + (r/c)^p (e^(pt) - 1) = loss.

        Each term alone bounds the root from above; from there Newton's iteration descends, the function being convex.
        """
        slack = self.dimension - self.k
        root = np.log1p(loss / power) / self.p
        if slack == 0.0:
            return root
        root = np.minimum(root, loss / slack)
        for _ in range(100):
            value = slack * root + power * np.expm1(self.p * root) - loss
            change = value / (slack + self.p * power * np.exp(self.p * root))
            root = root - change
            if not (np.abs(change) > 1e-14 * root + 1e-300).any():
                return root
        raise NumericalFailure(f"no threshold found for {self}; please report these arguments")

    def _angles(self, threshold: Array, saturation: Array) -> tuple[Array, Array]:
        """The inner rule, one row per radius: nodes, as x less the threshold, and weights.

        Two panels: up to saturation the integrand rises from 0 to 1, beyond only the density of the angle is left.
        """
        if self.dimension == 1:
            return np.maximum(np.array([1.0, -1.0]) - threshold, 0.0), np.full((threshold.size, 2), 0.5)
        exponent = self.dimension - 2
        first = np.maximum(threshold, -1.0)
        start = np.arcsin(first)
        reach = -math.expm1(-2.0 * _DEPTH / exponent) if exponent else 1.0  # sin^2 of the angle of density e^-DEPTH
        low = np.maximum(start, -math.asin(math.sqrt(reach)))
        densest = np.sin(np.maximum(low, 0.0)) ** 2
        high = np.arcsin(np.sqrt(np.minimum(densest + (1.0 - densest) * reach, 1.0)))
        middle = np.clip(np.arcsin(np.clip(saturation, -1.0, 1.0)), low, high)
        angle = np.hstack([low + (middle - low) * _INNER_NODES, middle + (high - middle) * _INNER_NODES])
        weight = np.hstack([(middle - low) * _INNER_WEIGHTS, (high - middle) * _INNER_WEIGHTS])
        log_norm = log_gamma_ratio(0.5 * (self.dimension - 1), 0.5) - 0.5 * math.log(math.pi)
        square = np.minimum(np.sin(angle) ** 2, 1.0 - 2.0**-53)
        weight *= np.exp(log_norm + 0.5 * exponent * np.log1p(-square))
        rise = 2.0 * np.cos(0.5 * (angle + start)) * np.sin(0.5 * (angle - start))  # sin(angle) - sin(start)
        return rise + (first - threshold), weight


def _member(dimension: int, k: float, p: float) -> tuple[int, float, float]:
    """The arguments; raises an error if the theorem does not cover them."""
    dimension, k, p = _check.count("dimension", dimension), _check.positive("k", k), _check.positive("p", p)
    if not k <= dimension:
        raise NotCertifiable(
            f"k must be at most the dimension {dimension}, got {k}: above it the density vanishes at the origin, and a "
            "shorter difference may be worse"
        )
    if not (k >= _LEAST_K and _LEAST_P <= p <= _LARGEST_P and k / p >= _LEAST_SHAPE):
        raise InvalidInput(
            f"k must be at least {_LEAST_K}, p lie between {_LEAST_P} and {_LARGEST_P}, and k/p be at least "
            f"{_LEAST_SHAPE}, got k = {k}, p = {p}"
        )
    return dimension, k, p


@dataclass(frozen=True)
class Profile:
    """The privacy profile of spherical noise for all differences of length at most `radius`.

    Guarantee: for all values at distance at most `radius` and every epsilon, the release is (epsilon, delta(epsilon))-
    differentially private. It is tight: `truth <= delta(epsilon) <= (1 + 1e-8) truth` where the truth is 1e-30 or more,
    except next to a pure epsilon, where delta depends on the last digits of s/c: there it answers for an s that is
    larger by 2e-15, relative. The top of the module says what of this is proven and what is estimated.
    Source: the top of the module; joseph2025l2 and ji2024less for two members, wei2026spherical for the family.

    Attributes:
        dimension: M, the number of entries of the released value.
        k: between 0.5 and M.
        p: between 0.25 and 8, and at most 4k.
        scale: c.
        radius: s, the l2 sensitivity.
    """

    dimension: int
    k: float
    p: float
    scale: float
    radius: float

    def __post_init__(self) -> None:
        dimension, k, p = _member(self.dimension, self.k, self.p)
        scale, radius = _check.positive("scale", self.scale), _check.positive("radius", self.radius)
        if not _LEAST_RATIO < radius / scale < _LARGEST_RATIO:
            raise InvalidInput(f"radius / scale must lie between 1e-100 and 1e100, got {radius} / {scale}")
        for name, value in {"dimension": dimension, "k": k, "p": p, "scale": scale, "radius": radius}.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"spherical noise, k = {self.k:g}, p = {self.p:g}, scale {self.scale:g} for radius {self.radius:g}"

    @property
    def pure_epsilon(self) -> float:
        """The epsilon from which delta is 0: (s/c)^p, the largest loss, for k = M and p <= 1; otherwise infinite."""
        if not (self.k == self.dimension and self.p <= 1.0):
            return math.inf
        value = math.pow(self.radius / self.scale, self.p)
        if self.p == 1.0 and Fraction(value) * Fraction(self.scale) >= Fraction(self.radius):
            return value
        return value * (1.0 + 1e-15)

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon, rounded up; it is the same in both directions."""
        epsilon = _check.at_least_zero("epsilon", epsilon)
        if epsilon >= self.pure_epsilon:
            return 0.0
        with np.errstate(over="ignore"):  # a loss or threshold may be infinite
            shift = self.radius / self.scale * (1.0 + _BACKWARD)
            return _Divergence(self.dimension, self.k, self.p, shift, epsilon).bound()

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta, rounded up by about 1e-9, relative; infinite if there is none."""
        delta = _check.delta(delta)
        if delta < _LEAST_DELTA:
            return self.pure_epsilon
        if self.delta(0.0) <= delta:
            return 0.0
        mu = self.radius * math.sqrt(self.dimension / radius_moment(self.k, self.p, self.scale, 2))
        guess = max(float(gaussian.epsilon(mu, delta)), 1e-6)
        return min(_least(self.delta, delta, guess), self.pure_epsilon)


def _least(function: Callable[[float], float], target: float, guess: float, tolerance: float = _ROOT) -> float:
    """The least argument at which a decreasing function is at most the target, from above; infinite if none is."""

    @cache
    def gap(argument: float) -> float:
        return math.log(max(function(argument), 1e-300) / target)

    low = high = guess
    factor = 1.1
    while gap(high) > 0.0:
        low, high, factor = high, high * factor, min(factor**2, 1e6)
        if not high < 1e300:
            return math.inf
    while not gap(low) > 0.0:
        low, high, factor = low / factor, low, min(factor**2, 1e6)
    root = float(scipy.optimize.brentq(gap, low, high, xtol=1e-300, rtol=tolerance))
    step = tolerance
    while gap(root) > 0.0:
        root, step = min(root * (1.0 + step), high), 2.0 * step
    return root


def scale_for(dimension: int, k: float, p: float, radius: float, epsilon: float, delta: float) -> float:
    """The least scale at which a member keeps the budget, rounded up by about 1e-9, relative.

    Guarantee: `Profile(dimension, k, p, scale, radius).delta(epsilon) <= delta`.

    Args:
        dimension: M.
        k: between 0.5 and M.
        p: between 0.25 and 8, and at most 4k.
        radius: the l2 sensitivity.
        epsilon: 0 or above.
        delta: 0 or above; below 1e-30 only k = M, p <= 1 and epsilon > 0 can keep it.

    Raises:
        NotCertifiable: if no scale is large enough.
    """
    dimension, k, p = _member(dimension, k, p)
    radius, epsilon = _check.positive("radius", radius), _check.at_least_zero("epsilon", epsilon)
    return _scale(dimension, k, p, radius, epsilon, _check.delta(delta), _ROOT)


def _scale(dimension: int, k: float, p: float, radius: float, epsilon: float, delta: float, tolerance: float) -> float:
    if delta < _LEAST_DELTA:
        if not (k == dimension and p <= 1.0 and epsilon > 0.0):
            raise NotCertifiable(
                f"delta = {delta:g} needs k = dimension, p <= 1 and epsilon > 0; got {k=}, {p=}, {epsilon=}"
            )
        scale = radius / math.pow(epsilon, 1.0 / p)
        while Profile(dimension, k, p, scale, radius).pure_epsilon > epsilon:
            scale *= 1.0 + 1e-15
        return scale
    guess = radius * math.sqrt(dimension / radius_moment(k, p, 1.0, 2)) / float(gaussian.mu(epsilon, delta))
    return _least(lambda scale: Profile(dimension, k, p, scale, radius).delta(epsilon), delta, guess, tolerance)


def best_member(dimension: int, radius: float, epsilon: float, delta: float) -> Profile:
    """The member with the least expected squared error found among those that keep the budget.

    Two searches go over p at k = M, then over k at constant kp, along which the error hardly changes. The Gaussian and
    the l2 mechanism are also candidates, so the result is never worse. At epsilon = 1, delta = 1e-6 it has 89 % less
    error than the Gaussian in one dimension, 48 % less in 10, 14 % less in 50, and a share of about 7.5/M less in many.
    Above 10,000 dimensions there is no search, and the Gaussian is returned.

    Args:
        dimension: M.
        radius: the l2 sensitivity.
        epsilon: 0 or above.
        delta: at least 1e-30 and below 1.
    """
    dimension, radius = _check.count("dimension", dimension), _check.positive("radius", radius)
    epsilon, delta = _check.at_least_zero("epsilon", epsilon), _check.probability("delta", delta)
    if not delta >= _LEAST_DELTA:
        raise InvalidInput(f"delta must be at least {_LEAST_DELTA} for a search, got {delta}; use scale_for with p = 1")

    def error(k: float, p: float) -> float:
        return radius_moment(k, p, _scale(dimension, k, p, 1.0, epsilon, delta, tolerance=1e-6), 2)

    def minimiser(function: Callable[[float], float], low: float, high: float) -> float:
        found = scipy.optimize.minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-3})
        return float(found.x)

    size = float(dimension)
    candidates = [(size, 2.0)]
    if dimension <= _LARGEST_SEARCH:
        p = minimiser(lambda p: error(size, p), 0.5, 3.0)
        least_share = max(0.6, 1.001 * math.sqrt(_LEAST_SHAPE * p / size))
        share = minimiser(lambda share: error(share * size, p / share), least_share, 1.0)
        candidates += [(size, 1.0), (size, p), (share * size, p / share)]
    scales = [_scale(dimension, k, p, radius, epsilon, delta, _ROOT) for k, p in candidates]
    profiles = [Profile(dimension, k, p, scale, radius) for (k, p), scale in zip(candidates, scales, strict=True)]
    return min(profiles, key=lambda profile: radius_moment(profile.k, profile.p, profile.scale, 2))
