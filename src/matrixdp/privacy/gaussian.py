"""Exact privacy of Gaussian noise: delta, epsilon and mu, each from the other two.

Noise N(0, S) that hides a difference V has `mu = ||S^(-1/2) V||`. With `a = epsilon/mu - mu/2` and `b = a + mu`,

    delta = Phi(-a) - e^epsilon Phi(-b) = phi(a) D,    D = R(a) - R(b),    R(t) = Phi(-t) / phi(t)  (the Mills ratio),

because `e^epsilon phi(b) = phi(a)`. Each formula below says which part of the range it serves and why it loses nothing there.

Arguments are taken as exact float64 numbers. Every answer lies on the private side of the truth: `delta` and `epsilon` are never too
small, `mu` is never too large, and the three agree with each other: `delta(mu(e, d), e) <= d` and `delta(m, epsilon(m, d)) <= d`.
They are within 1e-12 relative of the truth for epsilon from 1e-8 to 1e3 and delta from 1e-300 to 0.5; beyond, they stay one-sided.

Every formula is written once, for Python floats (fast for one setting) and for arrays (one vectorised solve): `xp` is the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.special
from scipy.special import cython_special

from matrixdp import _check
from matrixdp.errors import InvalidInput, NumericalFailure

Real = Any  # a float, or a one-dimensional float64 array, as the arithmetic says

# Margin on a computed delta, relative. The formulas err by at most 2e-14 (largest seen against 80 digits: 1.3e-14).
_GUARD = 1e-13
# A root is accepted within this relative distance (and one guard on delta) of the guarded truth.
_WINDOW = 1e-13
# A root is moved to the private side by this, relative, so that rounding the root itself cannot cross the line.
_SHIFT = 4e-15
_ITERATIONS = 40  # four are the most that were seen inside the range

_SCALE = 2.0**300  # deltas are computed in units of 2^-300, so that a subnormal one keeps its digits
_TINY, _LIFT = 1e-250, 2.0**600  # so small a problem is solved 2^600 times larger: see _lift
_HUGE = 1.7e308  # an epsilon above this is taken as this: the private side
_BLOCK = 8192  # entries of an array worked on at a time: they stay in the cache


# The two arithmetics ----------------------------------------------------------------------------------------------------------


class _Floats:
    """Python floats."""

    exp, log, sqrt = math.exp, math.log, math.sqrt
    erfcx, erfinv, ndtri = cython_special.erfcx, cython_special.erfinv, cython_special.ndtri
    maximum, minimum, nextafter = max, min, math.nextafter

    @staticmethod
    def where(condition: bool, value: float, other: float) -> float:
        return value if condition else other

    @staticmethod
    def choose(condition: bool, then: Callable[..., Real], otherwise: Callable[..., Real], *arguments: float) -> Real:
        """`then(...)` where the condition holds, `otherwise(...)` elsewhere."""
        return then(_Floats, *arguments) if condition else otherwise(_Floats, *arguments)

    @staticmethod
    def solve(step: Callable[..., Real], start: float, *data: float) -> float:
        """The first iterate that its own step accepts."""
        for _ in range(_ITERATIONS):
            accepted, following = step(_Floats, start, *data)
            if accepted:
                return start
            start = following
        raise NumericalFailure(f"no root within {_ITERATIONS} iterations for {data}; please report these arguments")


class _Arrays:
    """One-dimensional arrays, entry by entry."""

    exp, log, sqrt, where = np.exp, np.log, np.sqrt, np.where
    erfcx, erfinv, ndtri = scipy.special.erfcx, scipy.special.erfinv, scipy.special.ndtri
    maximum, minimum, nextafter = np.maximum, np.minimum, np.nextafter

    @staticmethod
    def choose(condition: Real, then: Callable[..., Real], otherwise: Callable[..., Real], *arguments: Real) -> Real:
        """As for floats; each function sees only its own entries."""
        result = np.empty(condition.shape)
        for mask, function in ((condition, then), (~condition, otherwise)):
            chosen = np.flatnonzero(mask)
            if chosen.size:
                result[chosen] = function(_Arrays, *(argument[chosen] for argument in arguments))
        return result

    @staticmethod
    def solve(step: Callable[..., Real], start: Real, *data: Real) -> Real:
        """As for floats; entries leave the iteration as they are accepted."""
        result = np.empty(start.shape)
        remaining = np.arange(start.size)
        for _ in range(_ITERATIONS):
            accepted, following = step(_Arrays, start, *data)
            result[remaining[accepted]] = start[accepted]
            going = np.flatnonzero(~accepted)
            if not going.size:
                return result
            remaining, start = remaining[going], following[going]
            data = tuple(entry[going] for entry in data)
        first = tuple(float(entry[0]) for entry in data)
        raise NumericalFailure(f"no root within {_ITERATIONS} iterations for {first}; please report these arguments")


# Exact sums and products of floats (Knuth, Dekker) ------------------------------------------------------------------------------


def _two_sum(x: Real, y: Real) -> tuple[Real, Real]:
    """x + y, rounded, and the rounding error."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _split(x: Real) -> tuple[Real, Real]:
    """Two halves of x with at most 26 bits each."""
    shifted = 134217729.0 * x  # 2^27 + 1
    high = shifted - (shifted - x)
    return high, x - high


def _two_product(x: Real, y: Real) -> tuple[Real, Real]:
    """x * y, rounded, and the rounding error."""
    product = x * y
    (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
    return product, ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low


def _two_parts(x: Fraction) -> tuple[float, float]:
    """The float nearest to x, and the rest."""
    return float(x), float(x - Fraction(float(x)))


def _divide_up(xp: Any, x: Real, power_of_two: Real) -> Real:
    """The least float that is at least x / power_of_two; only an underflow can round."""
    quotient = x / power_of_two
    return xp.where(quotient * power_of_two < x, xp.nextafter(quotient, math.inf), quotient)


# delta away from epsilon = 0 ----------------------------------------------------------------------------------------------------


def _mills(xp: Any, t: Real) -> Real:
    return 1.2533141373155003 * xp.erfcx(0.7071067811865476 * t)


def _difference_wide(xp: Any, c: Real, h: Real, a: Real) -> Real:
    """D as it stands: R(b) is well below R(a)."""
    return _mills(xp, a) - _mills(xp, c + h)


def _difference_forward(xp: Any, c: Real, h: Real, a: Real) -> Real:
    """D = 2 (h I_1 + h^3 I_3 + ...), I_n = int_0^oo x^n/n! e^(-cx - x^2/2) dx: no term is negative.

    I_0 = R(c), I_1 = 1 - c I_0, n I_n = I_(n-2) - c I_(n-1). The recurrence amplifies errors, the powers of h damp them more (c < 5).
    """
    before = _mills(xp, c)
    current = 1.0 - c * before
    total, power = h * current, h
    for n in range(2, 12):
        before, current = current, (before - c * current) / n
        power = power * h
        if n % 2:
            total = total + power * current
    return 2.0 * total


def _difference_backward(xp: Any, c: Real, h: Real, a: Real) -> Real:
    """The same sum for c >= 5, from the ratios r_n = I_n / I_(n-1) = 1 / (c + (n+1) r_(n+1)), which are stable downwards."""
    square, nested = h * h, 1.0
    above = 2.0 / (c + xp.sqrt(c * c + 84.0))  # r_21, roughly; its error has died out by n = 11
    for n in range(20, 0, -1):
        ratio = 1.0 / (c + (n + 1) * above)
        if n <= 10 and n % 2 == 0:
            nested = 1.0 + square * ratio * above * nested
        above = ratio
    return 2.0 * h * _mills(xp, c) * above * nested


def _difference_thin(xp: Any, c: Real, h: Real, a: Real) -> Real:
    return xp.choose(c < 5.0, _difference_forward, _difference_backward, c, h, a)


def _profile(xp: Any, mu: Real, epsilon: Real) -> tuple[Real, Real, Real, Real]:
    """(phi(a) * SCALE, D, a, b); delta is phi(a) D.

    phi(a) magnifies an error of a by a, up to 38, and a = epsilon/mu - mu/2 cancels. So a carries a second float, from the exact
    remainder of the division, and so does a^2. Below a = -9 delta is 1 to the last digit, above a = 60 it is 0.
    """
    c, h = epsilon / mu, 0.5 * mu
    product, error = _two_product(c, mu)
    near, rest = _two_sum(c, -h)
    rest = rest + ((epsilon - product) - error) / mu
    a = near + rest
    a_low = xp.maximum(xp.minimum(rest - (a - near), 1e-14), -1e-14)  # wider only where a is cut off
    a = xp.maximum(xp.minimum(a, 60.0), -9.0)
    square, square_low = _two_product(a, a)
    root = xp.exp(-0.25 * square)
    density = root * (0.3989422804014327 * _SCALE) * root * (1.0 - (0.5 * square_low + a * a_low))
    difference = xp.choose(mu >= 0.1 * (1.0 + c), _difference_wide, _difference_thin, c, h, a)
    return density, difference, a, c + h


# delta near epsilon = 0 ---------------------------------------------------------------------------------------------------------

# There delta hardly depends on epsilon, so to find epsilon one needs delta to far more digits than a float has:
#     delta(mu, epsilon) = delta(mu, 0) - F(epsilon),    F(epsilon) = int_0^epsilon phi(a(t)) R(b(t)) dt,
# with delta(mu, 0) in two floats. F is smooth, positive and well conditioned, so plain floats will do for it.

_NEAR = 2.0  # the largest mu served; for a larger one and delta <= 0.5 the other formula is well conditioned
_NEAR_GUARD = 1e-14  # margin on F
_BASE_GUARD = 2.0**-90  # margin on delta(mu, 0), relative

_NODES = [(float(0.5 + 0.5 * x), float(0.5 * w)) for x, w in zip(*np.polynomial.legendre.leggauss(8), strict=True)]
_ERF = [Fraction((-1) ** k, math.factorial(k) * (2 * k + 1)) for k in range(24)]
_ERF_EXACT, _ERF_PLAIN = [_two_parts(x) for x in reversed(_ERF[:12])], [float(x) for x in reversed(_ERF[12:])]


def _base(mu: Real) -> tuple[Real, Real]:
    """delta(mu, 0) = erf(mu / sqrt 8) = mu / sqrt(2 pi) * sum_k (-mu^2/8)^k / (k! (2k + 1)), mu < 2, in two floats."""
    square, square_low = _two_product(mu, 0.125 * mu)
    high, low = 0.0 * mu, 0.0
    for coefficient in _ERF_PLAIN:  # these add less than 1e-13 of the sum
        high = coefficient + square * high
    for coefficient, coefficient_low in _ERF_EXACT:
        product, error = _two_product(square, high)
        error = error + (square * low + square_low * high)
        high, rest = _two_sum(coefficient, product)
        low = rest + (error + coefficient_low)
    product, error = _two_product(mu, high)
    base, base_error = _two_product(0.3989422804014327, product)
    return base, base_error + 0.3989422804014327 * (error + mu * low) - 2.49232720227773e-17 * product


def _drop(xp: Any, mu: Real, epsilon: Real) -> Real:
    """F(epsilon) = mu int_0^c phi(s - h) R(s + h) ds for c = epsilon/mu < 1: eight Gauss-Legendre nodes leave 1e-16."""
    c, h = epsilon / mu, 0.5 * mu
    total = 0.0
    for node, weight in _NODES:
        s = node * c
        total = total + weight * xp.exp(-0.5 * (s - h) * (s - h)) * xp.erfcx(0.7071067811865476 * (s + h))
    return 0.5 * epsilon * total  # phi and R carry 1/sqrt(2 pi) and sqrt(pi/2): together 1/2


# delta --------------------------------------------------------------------------------------------------------------------------


def _delta_near(xp: Any, mu: Real, epsilon: Real) -> Real:
    """The least float that is at least delta(mu, 0) - F(epsilon), margins included."""
    base, base_low = _base(mu)
    high, low = _two_sum(base, -(1.0 - _NEAR_GUARD) * _drop(xp, mu, epsilon))
    result, error = _two_sum(high, low + (base_low + _BASE_GUARD * base))
    return xp.where(error > 0.0, xp.nextafter(result, math.inf), result)


def _delta_far(xp: Any, mu: Real, epsilon: Real) -> Real:
    density, difference, _, _ = _profile(xp, mu, epsilon)
    return _divide_up(xp, density * difference * (1.0 + _GUARD), _SCALE)


def _delta_positive(xp: Any, mu: Real, epsilon: Real) -> Real:
    mu = xp.minimum(mu, 1e155)  # from there on delta is 1 for every float epsilon
    epsilon = xp.minimum(xp.minimum(epsilon, mu * (mu + 1e20)), _HUGE)  # no overflow in _profile; delta only grows
    lift = xp.where(mu < _TINY, _LIFT, 1.0)
    mu, epsilon = lift * mu, lift * epsilon
    result = xp.choose((mu < _NEAR) & (epsilon < mu), _delta_near, _delta_far, mu, epsilon)
    return xp.minimum(xp.maximum(_divide_up(xp, result, lift), 5e-324), 1.0)


def _delta(xp: Any, mu: Real, epsilon: Real) -> Real:
    return xp.choose(mu > 0.0, _delta_positive, _zero, mu, epsilon)


def _zero(xp: Any, *arguments: Real) -> Real:
    return xp.where(arguments[0] > math.inf, 1.0, 0.0)


# mu and epsilon: Halley's iteration on ln delta; a root is returned only after its own delta was seen to be small enough -----------


def _halley(xp: Any, value: Real, slope: Real, curvature: Real) -> Real:
    """The step to the root; the bounds matter only far from it."""
    bend = 1.0 - value * curvature / (2.0 * slope * slope)
    return -value / (slope * xp.maximum(xp.minimum(bend, 3.0), 0.3))


def _compare(xp: Any, value: Real, target: Real, condition: Real) -> tuple[Real, Real]:
    """Whether delta = value meets the target closely enough, and ln(value / target) with the margin taken off the target."""
    upper = value * (1.0 + _GUARD)
    accepted = (upper <= target) & (upper >= target * (1.0 - _GUARD - _WINDOW * condition))
    ratio = value / (target * (1.0 - 1.5 * _GUARD))
    return accepted, xp.log(xp.maximum(xp.minimum(ratio, 1e300), 1e-300))


def _mu_step(xp: Any, mu: Real, epsilon: Real, target: Real) -> tuple[Real, Real]:
    """In ln mu: d delta / d mu = phi(a) and its derivative is phi(a) a b / mu."""
    density, difference, a, b = _profile(xp, mu, epsilon)
    slope = mu / difference
    accepted, value = _compare(xp, density * difference, target, slope)
    step = _halley(xp, value, slope, slope * (1.0 + a * b - slope))
    return accepted, mu * xp.exp(step) * (1.0 - _SHIFT)


def _mu(xp: Any, epsilon: Real, delta: Real) -> Real:
    """From below: delta <= Phi(-a) and mu(epsilon, delta) >= mu(0, delta)."""
    lift = xp.where((epsilon < _TINY) & (delta < _TINY), _LIFT, 1.0)
    epsilon, delta = lift * xp.minimum(epsilon, _HUGE), lift * delta
    guarded = delta * (1.0 - 2.0 * _GUARD)
    z = -xp.ndtri(guarded)
    root = abs(z) + 1.4142135623730951 * xp.sqrt(0.5 * z * z + epsilon)  # mu^2/2 + z mu = epsilon
    start = xp.maximum(xp.where(z > 0.0, epsilon / (0.5 * root + 5e-324), root), 2.8284271247461903 * xp.erfinv(guarded))
    result = xp.solve(_mu_step, start, epsilon, _SCALE * delta)
    return -_divide_up(xp, -result, lift)


def _epsilon_step(xp: Any, epsilon: Real, mu: Real, target: Real) -> tuple[Real, Real]:
    """In epsilon: d delta / d epsilon = -phi(a) R(b) and its derivative is phi(a) (1/mu - R(b))."""
    density, difference, _, b = _profile(xp, mu, epsilon)
    mills = _mills(xp, b)
    slope = mills / difference
    accepted, value = _compare(xp, density * difference, target, epsilon * slope)
    step = _halley(xp, value, -slope, (1.0 / mu - mills) / difference - slope * slope)
    return accepted, xp.maximum(epsilon + step, 0.0) * (1.0 + _SHIFT)


def _epsilon_far(xp: Any, mu: Real, delta: Real) -> Real:
    """From above: delta <= Phi(-a)."""
    start = mu * (0.5 * mu - xp.ndtri(delta * (1.0 - 2.0 * _GUARD)))
    return xp.solve(_epsilon_step, start, mu, _SCALE * delta)


def _epsilon_checked(xp: Any, mu: Real, delta: Real) -> Real:
    """delta so large that epsilon may be 0."""
    return xp.choose(delta >= _delta(xp, mu, 0.0 * mu), _zero, _epsilon_far, mu, delta)


def _drop_step(xp: Any, epsilon: Real, mu: Real, gap: Real) -> tuple[Real, Real]:
    """F' = phi(a) R(b), F'' = F' - phi(a)/mu."""
    a, b = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    density = 0.3989422804014327 * xp.exp(-0.5 * a * a)
    slope = density * _mills(xp, b)
    drop = _drop(xp, mu, epsilon)
    lower = (1.0 - _NEAR_GUARD) * drop
    accepted = (lower >= gap) & (lower <= gap * (1.0 + 2.0 * _WINDOW))
    return accepted, epsilon + _halley(xp, drop - (1.0 + _WINDOW) * gap, slope, slope - density / mu)


def _epsilon_of_gap(xp: Any, mu: Real, gap: Real) -> Real:
    gap = (gap + _BASE_GUARD * mu) * (1.0 + 1e-15)  # so that _delta_near, rounding for itself, comes out below delta
    return xp.solve(_drop_step, 2.0 * gap, mu, gap)


def _epsilon_near(xp: Any, mu: Real, delta: Real) -> Real:
    """F(epsilon) = delta(mu, 0) - delta."""
    base, base_low = _base(mu)
    high, low = _two_sum(base, -delta)
    gap = high + (low + (base_low + _BASE_GUARD * base))
    return xp.choose(gap > 0.0, _epsilon_of_gap, _zero, mu, gap)


def _epsilon_wide(xp: Any, mu: Real, delta: Real) -> Real:
    return xp.choose((mu >= _NEAR) & (delta > 0.6), _epsilon_checked, _epsilon_far, mu, delta)


def _epsilon_positive(xp: Any, mu: Real, delta: Real) -> Real:
    lift = xp.where(mu < _TINY, _LIFT, 1.0)
    mu, delta = lift * mu, lift * delta
    # delta = 0.2 mu at epsilon between 0.5 mu and 0.8 mu: there both ways are good, and _delta takes the near one up to mu
    result = xp.choose((mu < _NEAR) & (delta > 0.2 * mu), _epsilon_near, _epsilon_wide, mu, delta)
    return _divide_up(xp, result, lift)


def _epsilon_limit(xp: Any, mu: Real, delta: Real) -> Real:
    return xp.where(mu > 0.0, math.inf, 0.0)


def _epsilon(xp: Any, mu: Real, delta: Real) -> Real:
    """Above mu = 1.8e154 no float is large enough."""
    return xp.choose((mu > 0.0) & (mu < 1.8e154), _epsilon_positive, _epsilon_limit, mu, delta)


# The public functions -----------------------------------------------------------------------------------------------------------

_DOMAINS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "mu": (lambda x: x >= 0.0, "be 0 or above"),
    "epsilon": (lambda x: (x >= 0.0) & (x < math.inf), "be 0 or above, and finite"),
    "delta": (lambda x: (x > 0.0) & (x < 1.0), "lie strictly between 0 and 1; 1e-6 is a common choice"),
}


def _argument(name: str, value: Any) -> Any:
    """The argument as a float or an array of floats, refused if any entry lies outside its domain."""
    if type(value) is not float:
        given = np.asarray(value)
        if given.dtype.kind not in "iuf":
            raise InvalidInput(f"{name} must be a real number or an array of them, got {value!r}")
        value = given.astype(np.float64) if given.ndim else float(given)
    inside, rule = _DOMAINS[name]
    valid = inside(value)
    if not (valid if isinstance(value, float) else valid.all()):
        first = value if isinstance(value, float) else value[~valid].flat[0]
        raise InvalidInput(f"{name} must {rule}; got {first}")
    return value


def _evaluate(function: Callable[..., Real], **arguments: Any) -> Any:
    """One float, or the entries of the broadcast arrays a block at a time."""
    values = [_argument(name, value) for name, value in arguments.items()]
    if all(type(value) is float for value in values):
        return function(_Floats, *values)
    try:
        arrays = np.broadcast_arrays(*values)
    except ValueError:
        shapes = " and ".join(f"{name} {np.shape(value)}" for name, value in arguments.items())
        raise InvalidInput(f"the shapes must broadcast together, got {shapes}") from None
    flat = [np.ravel(array) for array in arrays]
    result = np.empty(flat[0].size)
    with np.errstate(all="ignore"):
        for first in range(0, result.size, _BLOCK):
            block = slice(first, first + _BLOCK)
            result[block] = function(_Arrays, *(entries[block] for entries in flat))
    return result.reshape(arrays[0].shape)


def delta(mu: Any, epsilon: Any) -> Any:
    return _evaluate(_delta, mu=mu, epsilon=epsilon)


def epsilon(mu: Any, delta: Any) -> Any:
    return _evaluate(_epsilon, mu=mu, delta=delta)


def mu(epsilon: Any, delta: Any) -> Any:
    return _evaluate(_mu, epsilon=epsilon, delta=delta)
