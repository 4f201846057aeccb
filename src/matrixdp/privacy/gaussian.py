"""Exact privacy of Gaussian noise: delta, epsilon and mu, each from the other two.

Noise N(0, S) that hides a difference V has `mu = ||S^(-1/2) V||`. The privacy loss is then normal, with standard
deviation mu and the mean mu^2/2 under one of two neighbours, -mu^2/2 under the other. So the z-scores of epsilon are

    z_first = epsilon/mu - mu/2    and    z_second = epsilon/mu + mu/2,

and, since e^epsilon phi(z_second) = phi(z_first), with the Mills ratio R(z) = Phi(-z) / phi(z),

    delta = Phi(-z_first) - e^epsilon Phi(-z_second) = phi(z_first) gap,    gap = R(z_first) - R(z_second).

Arguments are taken as exact float64 numbers. Every answer is on the private side of the truth: `delta` and `epsilon`
are never too small, `mu` is never too large, and the three agree with one another: `delta(mu(e, d), e) <= d` and
`delta(m, epsilon(m, d)) <= d`. For epsilon from 1e-8 to 1e3 and delta from 1e-300 to 0.5 their relative error is at
most 1e-12; outside that range they still stay on the private side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp.errors import InvalidInput
from matrixdp.privacy.arithmetic import Real, divide_up, evaluate, two_product, two_sum

_GUARD = 1e-13  # margin on a computed delta, relative; 2.2e-14 is the largest error in 140,000 random settings
_WINDOW = 1e-13  # a root is accepted within this of the guarded truth, relative
_SHIFT = 4e-15  # a root moves to the private side by this, relative, so that its own rounding cannot bring it back

_SCALE = 2.0**300  # deltas are computed in units of 2^-300, so that a subnormal one keeps its digits
_TINY, _LIFT = 1e-250, 2.0**600  # below _TINY mu, epsilon and delta grow in proportion, so they are scaled up first
_HUGE = 1.7e308  # a larger epsilon is taken as this one, which is the private side

_PHI_0, _PHI_0_LOW = 0.3989422804014327, -2.49232720227773e-17  # 1 / sqrt(2 pi) in two floats
_ROOT_2, _ROOT_HALF, _MILLS_0 = math.sqrt(2.0), math.sqrt(0.5), math.sqrt(math.pi / 2.0)


# --- delta away from epsilon = 0 ---


def _mills(xp: Any, z: Real) -> Real:
    return _MILLS_0 * xp.special().erfcx(_ROOT_HALF * z)


def _terms(xp: Any, mu: Real, epsilon: Real) -> tuple[Real, Real, Real, Real]:
    """(phi(z_first) in units of 1/SCALE, gap, z_first, z_second); the product of the first two is delta.

    phi magnifies an error of z_first by z_first, up to 38, and z_first is a difference that cancels. So it is held in
    two floats, with the exact remainder of the division, and so is its square. Below z_first = -9 delta is 1 to the
    last digit, above 60 it is 0.
    """
    ratio, half_mu = epsilon / mu, 0.5 * mu
    product, error = two_product(ratio, mu)
    high, low = two_sum(ratio, -half_mu)
    low = low + ((epsilon - product) - error) / mu
    z_first = high + low
    z_first_low = xp.maximum(xp.minimum(low - (z_first - high), 1e-14), -1e-14)  # it is larger only where z is cut off
    z_first = xp.maximum(xp.minimum(z_first, 60.0), -9.0)
    square, square_low = two_product(z_first, z_first)
    root = xp.exp(-0.25 * square)  # one factor of two, as the whole may underflow
    density = root * (_PHI_0 * _SCALE) * root * (1.0 - (0.5 * square_low + z_first * z_first_low))
    gap = xp.choose(mu >= 0.1 * (1.0 + ratio), _gap_wide, _gap_thin, ratio, half_mu, z_first)
    return density, gap, z_first, ratio + half_mu


def _gap_wide(xp: Any, ratio: Real, half_mu: Real, z_first: Real) -> Real:
    """The gap as it stands: mu >= 0.1 (1 + epsilon/mu) keeps R(z_second) well below R(z_first)."""
    return _mills(xp, z_first) - _mills(xp, ratio + half_mu)


def _gap_thin(xp: Any, ratio: Real, half_mu: Real, z_first: Real) -> Real:
    """Taylor's series around ratio = epsilon/mu, in which every term is positive.

    gap = 2 (half_mu I_1 + half_mu^3 I_3 + ...) with I_n = int_0^oo x^n/n! e^(-ratio x - x^2/2) dx.
    """
    return xp.choose(ratio < 5.0, _gap_forward, _gap_backward, ratio, half_mu)


def _gap_forward(xp: Any, ratio: Real, half_mu: Real) -> Real:
    """From I_0 = R(ratio), I_1 = 1 - ratio I_0 and n I_n = I_(n-2) - ratio I_(n-1).

    Errors grow with n, but the powers of half_mu fall faster.
    """
    before = _mills(xp, ratio)
    current = 1.0 - ratio * before
    total, power = half_mu * current, half_mu
    for n in range(2, 12):
        before, current = current, (before - ratio * current) / n
        power = power * half_mu
        if n % 2:
            total = total + power * current
    return 2.0 * total


def _gap_backward(xp: Any, ratio: Real, half_mu: Real) -> Real:
    """From the quotients r_n = I_n / I_(n-1) = 1 / (ratio + (n+1) r_(n+1)), whose errors die out downwards."""
    square, nested = half_mu * half_mu, 1.0
    above = 2.0 / (ratio + xp.sqrt(ratio * ratio + 84.0))  # r_21, roughly
    for n in range(20, 0, -1):
        quotient = 1.0 / (ratio + (n + 1) * above)
        if n in (2, 4, 6, 8, 10):
            nested = 1.0 + square * quotient * above * nested
        above = quotient
    return 2.0 * half_mu * _mills(xp, ratio) * above * nested


# --- delta near epsilon = 0 ---
#
# There delta hardly changes with epsilon, so epsilon needs more digits of delta than a float has:
#     delta(mu, epsilon) = delta(mu, 0) - drop,    drop = int_0^epsilon phi(z_first(t)) R(z_second(t)) dt,
# with delta(mu, 0) in two floats. The drop is smooth, positive and well conditioned: plain floats are enough for it.

_NEAR = 2.0  # the largest mu served; above it, with delta <= 0.5, epsilon is well conditioned without this
_DROP_GUARD = 1e-14  # margin on the drop, relative; its error is below 1e-15
_BASE_GUARD = 2.0**-90  # margin on delta(mu, 0), relative; its error is below 2^-99

_NODES = [(0.5 + 0.5 * float(x), 0.25 * float(w)) for x, w in zip(*np.polynomial.legendre.leggauss(8), strict=True)]
_TERMS = [Fraction((-1) ** k, math.factorial(k) * (2 * k + 1)) for k in range(23, -1, -1)]
_TERMS_HIGH = [float(term) for term in _TERMS]
_TERMS_LOW = [float(term - Fraction(high)) for term, high in zip(_TERMS, _TERMS_HIGH, strict=True)]


def _base(mu: Real) -> tuple[Real, Real]:
    """delta(mu, 0) = erf(mu / sqrt 8) = mu / sqrt(2 pi) sum_k (-mu^2/8)^k / (k! (2k + 1)) in two floats, for mu < 2."""
    square, square_low = two_product(mu, 0.125 * mu)
    high, low = 0.0, 0.0
    for term in _TERMS_HIGH[:12]:  # together below 1e-13 of the sum, so one float is enough
        high = term + square * high
    for term, term_low in zip(_TERMS_HIGH[12:], _TERMS_LOW[12:], strict=True):
        product, error = two_product(square, high)
        error = error + (square * low + square_low * high)
        high, rest = two_sum(term, product)
        low = rest + (error + term_low)
    product, error = two_product(mu, high)
    base, base_low = two_product(_PHI_0, product)
    return base, base_low + (_PHI_0 * (error + mu * low) + _PHI_0_LOW * product)


def _drop(xp: Any, mu: Real, epsilon: Real) -> Real:
    """The drop for epsilon < mu: eight Gauss-Legendre nodes leave 2e-17 of it."""
    ratio, half_mu = epsilon / mu, 0.5 * mu
    total = 0.0
    for node, weight in _NODES:
        t = node * ratio
        z_first, z_second = t - half_mu, t + half_mu
        total = total + weight * xp.exp(-0.5 * z_first * z_first) * xp.special().erfcx(_ROOT_HALF * z_second)
    return epsilon * total


# --- delta ---


def _delta_near(xp: Any, mu: Real, epsilon: Real) -> Real:
    """The least float that is at least delta(mu, 0) less the drop, margins included."""
    base, base_low = _base(mu)
    high, low = two_sum(base, -(1.0 - _DROP_GUARD) * _drop(xp, mu, epsilon))
    result, error = two_sum(high, low + (base_low + _BASE_GUARD * base))
    return xp.where(error > 0.0, xp.nextafter(result, math.inf), result)


def _delta_far(xp: Any, mu: Real, epsilon: Real) -> Real:
    density, gap, _, _ = _terms(xp, mu, epsilon)
    return divide_up(xp, density * gap * (1.0 + _GUARD), _SCALE)


def _delta(xp: Any, mu: Real, epsilon: Real) -> Real:
    positive = mu > 0.0
    mu = xp.maximum(xp.minimum(mu, 1e155), 5e-324)  # from 1e155 on delta is 1 for every float epsilon
    epsilon = xp.minimum(xp.minimum(epsilon, mu * (mu + 1e20)), _HUGE)  # no overflow in _terms; delta only grows
    lift = xp.where(mu < _TINY, _LIFT, 1.0)
    mu, epsilon = lift * mu, lift * epsilon
    result = xp.choose((mu < _NEAR) & (epsilon < mu), _delta_near, _delta_far, mu, epsilon)
    return xp.where(positive, xp.minimum(xp.maximum(divide_up(xp, result, lift), 5e-324), 1.0), 0.0)


# --- mu and epsilon: Halley's iteration; a root is returned only once its own delta was checked to be small enough ---


def _halley(xp: Any, value: Real, slope: Real, curvature: Real) -> Real:
    """The step towards the root, from a function's value and two derivatives: Newton's step, corrected for the bend.

    The bounds on the correction matter only far from the root.
    """
    bend = 1.0 - value * curvature / (2.0 * slope * slope)
    return -value / (slope * xp.maximum(xp.minimum(bend, 3.0), 0.3))


def _compare(xp: Any, density: Real, gap: Real, z_first: Real, target: Real, condition: Real) -> tuple[Real, Real]:
    """Whether delta, rounded up, meets the target closely enough; and ln(delta / target), with a margin.

    Close enough means within _WINDOW of the root, relative, which is `condition` times as much of delta. The error of
    the logarithm grows like z_first^2 in the last digit, but so does the condition number; that of the root does not.
    """
    rounded_up = density * gap * (1.0 + _GUARD)
    accepted = (rounded_up <= target) & (rounded_up >= target * (1.0 - _GUARD - _WINDOW * condition))
    ratio = gap * ((1.0 + 1.5 * _GUARD) * _PHI_0 * 2.0**150) / target  # 2^150 at a time: 2^300 might overflow
    return accepted, xp.log(ratio) + (150.0 * math.log(2.0) - 0.5 * z_first * z_first)


def _mu_step(xp: Any, mu: Real, epsilon: Real, target: Real) -> tuple[Real, Real]:
    """One iteration on ln delta as a function of ln mu.

    d delta / d mu = phi(z_first), so the slope is mu phi(z_first) / delta = mu / gap. The derivative of phi(z_first)
    in mu is phi(z_first) z_first z_second / mu, so that of the slope is slope (1 + z_first z_second - slope).
    """
    density, gap, z_first, z_second = _terms(xp, mu, epsilon)
    slope = mu / gap
    accepted, value = _compare(xp, density, gap, z_first, target, slope)
    curvature = slope * (1.0 + z_first * z_second - slope)
    return accepted, mu * xp.exp(_halley(xp, value, slope, curvature)) * (1.0 - _SHIFT)


def _mu(xp: Any, epsilon: Real, delta: Real) -> Real:
    """The iteration starts below the root, at the larger of two bounds.

    As delta < Phi(-z_first), mu is at least the root of mu^2/2 + quantile mu = epsilon, where Phi(-quantile) = delta;
    as mu grows with epsilon, it is at least mu(0, delta).
    """
    lift = xp.where((epsilon < _TINY) & (delta < _TINY), _LIFT, 1.0)
    epsilon, delta = lift * xp.minimum(epsilon, _HUGE), lift * delta
    guarded = (1.0 - 2.0 * _GUARD) * delta
    quantile = -xp.special().ndtri(guarded)
    root = abs(quantile) + _ROOT_2 * xp.sqrt(0.5 * quantile * quantile + epsilon) + 5e-324
    from_tail = xp.where(quantile > 0.0, epsilon / (0.5 * root), root)
    start = xp.maximum(from_tail, 2.0 * _ROOT_2 * xp.special().erfinv(guarded))
    result = xp.solve(_mu_step, start * (1.0 - _SHIFT), epsilon, _SCALE * delta)
    return -divide_up(xp, -result, lift)


def _epsilon_step(xp: Any, epsilon: Real, mu: Real, target: Real) -> tuple[Real, Real]:
    """One iteration on ln delta as a function of epsilon / mu.

    d delta / d epsilon = -phi(z_first) R(z_second), and the derivative of that is phi(z_first) (1/mu - R(z_second)).
    With width = mu / gap, the slope is -width R(z_second), and its derivative width (1 - mu R(z_second)) - slope^2.
    """
    density, gap, z_first, z_second = _terms(xp, mu, epsilon)
    mills, width = _mills(xp, z_second), mu / gap
    fall = width * mills
    accepted, value = _compare(xp, density, gap, z_first, target, fall * (epsilon / mu))
    step = _halley(xp, value, -fall, width * (1.0 - mu * mills) - fall * fall)
    return accepted, xp.maximum(epsilon + mu * step, 0.0) * (1.0 + _SHIFT)


def _epsilon_far(xp: Any, mu: Real, delta: Real) -> Real:
    """The iteration starts above the root, as delta < Phi(-z_first)."""
    start = mu * (0.5 * mu - xp.special().ndtri((1.0 - 2.0 * _GUARD) * delta))
    return xp.solve(_epsilon_step, start * (1.0 + _SHIFT), mu, _SCALE * delta)


def _epsilon_high(xp: Any, mu: Real, delta: Real) -> Real:
    """For a delta so large that epsilon may be 0."""
    zero = delta >= _delta(xp, mu, 0.0 * mu)
    return xp.where(zero, 0.0, _epsilon_far(xp, mu, xp.where(zero, 0.6, delta)))


def _epsilon_rest(xp: Any, mu: Real, delta: Real) -> Real:
    return xp.choose((mu >= _NEAR) & (delta > 0.6), _epsilon_high, _epsilon_far, mu, delta)


def _drop_step(xp: Any, epsilon: Real, mu: Real, wanted: Real) -> tuple[Real, Real]:
    """One iteration on the drop: its slope is phi(z_first) R(z_second), and that of the slope, slope - phi/mu."""
    z_first, z_second = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    density = _PHI_0 * xp.exp(-0.5 * z_first * z_first)
    slope = density * _mills(xp, z_second)
    drop = _drop(xp, mu, epsilon)
    rounded_down = (1.0 - _DROP_GUARD) * drop
    accepted = (rounded_down >= wanted) & (rounded_down <= (1.0 + 2.0 * _WINDOW) * wanted)
    return accepted, epsilon + _halley(xp, drop - (1.0 + _WINDOW) * wanted, slope, slope - density / mu)


def _epsilon_near(xp: Any, mu: Real, delta: Real) -> Real:
    """The epsilon at which the drop is delta(mu, 0) - delta."""
    base, base_low = _base(mu)
    high, low = two_sum(base, -delta)
    difference = high + (low + (base_low + _BASE_GUARD * base))
    # slightly more, so that _delta_near, with its own rounding, stays below delta
    wanted = (xp.maximum(difference, 0.0) + _BASE_GUARD * base) * (1.0 + 1e-15)
    return xp.where(difference > 0.0, xp.solve(_drop_step, 2.0 * wanted, mu, wanted), 0.0)


def _epsilon(xp: Any, mu: Real, delta: Real) -> Real:
    inside = xp.maximum(xp.minimum(mu, 1.8e154), 5e-324)  # above, no float is large enough for epsilon
    lift = xp.where(inside < _TINY, _LIFT, 1.0)
    lifted, delta = lift * inside, lift * delta
    # delta = 0.2 mu at epsilon between 0.5 mu and 0.8 mu: both ways do well there, and _delta_near serves up to mu
    result = xp.choose((lifted < _NEAR) & (delta > 0.2 * lifted), _epsilon_near, _epsilon_rest, lifted, delta)
    return xp.where(mu > inside, math.inf, xp.where(mu < inside, 0.0, divide_up(xp, result, lift)))


# --- the public functions ---

_DOMAINS: dict[str, tuple[Callable[[Real], Any], str]] = {
    "mu": (lambda x: x >= 0.0, "be 0 or above"),
    "epsilon": (lambda x: (x >= 0.0) & (x < math.inf), "be finite, 0 or above"),
    "delta": (lambda x: (x > 0.0) & (x < 1.0), "lie strictly between 0 and 1 (1e-6 is a common choice)"),
}


def _argument(name: str, value: Any) -> Real:
    """The argument as a float or an array of floats; raises InvalidInput if any entry is outside its domain."""
    if type(value) is not float:
        try:
            given = np.asarray(value)
        except ValueError:
            raise InvalidInput(f"{name} must be a number or an array, got lists of unequal length") from None
        except Exception:
            raise InvalidInput(f"{name} must be a number or an array, got {type(value).__name__}") from None
        if given.dtype.kind not in "iuf":
            raise InvalidInput(f"{name} must be a number or an array of them, got {type(value).__name__}; convert it")
        with np.errstate(over="ignore"):  # a long double may become infinite
            value = given.astype(np.float64) if given.ndim else float(given)
    inside, rule = _DOMAINS[name]
    valid = inside(value)
    if valid is not True and not np.all(valid):
        wrong = value if type(value) is float else f"an array with {int(np.sum(~valid))} entries that do not"
        raise InvalidInput(f"{name} must {rule}, got {wrong}")
    return value


def _evaluate(function: Callable[..., Real], **arguments: Any) -> Any:
    """One float for two floats, otherwise an array."""
    return evaluate(function, {name: _argument(name, value) for name, value in arguments.items()})


def delta(mu: npt.ArrayLike, epsilon: npt.ArrayLike) -> Any:
    """The least delta for which Gaussian noise of this mu is (epsilon, delta)-private.

    Args:
        mu: The sensitivity in units of the noise, 0 or above; infinity is no protection.
        epsilon: Finite, 0 or above. Two numbers give a float; arrays broadcast, and give an array.

    Returns:
        At least the true delta; 0 only if mu is 0, never above 1.

    Guarantee: for all neighbours at most mu apart, the release is (epsilon, returned delta)-private.
    Source: balle2018improving, Theorem 8.
    Deviates: none; rounded up.

    Example:
        >>> from matrixdp.privacy import gaussian
        >>> round(gaussian.delta(1.0, 1.0), 6)
        0.126937
    """
    return _evaluate(_delta, mu=mu, epsilon=epsilon)


def epsilon(mu: npt.ArrayLike, delta: npt.ArrayLike) -> Any:
    """The least epsilon for which Gaussian noise of this mu is (epsilon, delta)-private.

    Args:
        mu: As for `delta`.
        delta: Strictly between 0 and 1. Two numbers give a float; arrays broadcast, and give an array.

    Returns:
        At least the true epsilon; 0 if delta is at least `delta(mu, 0)`, infinity if no float is large enough.

    Guarantee: for all neighbours at most mu apart, the release is (returned epsilon, delta)-private.
    Source: balle2018improving, Theorem 8, solved for epsilon.
    Deviates: none; rounded up.

    Example:
        >>> from matrixdp.privacy import gaussian
        >>> round(gaussian.epsilon(0.5, 1e-6), 4)
        2.2541
    """
    return _evaluate(_epsilon, mu=mu, delta=delta)


def mu(epsilon: npt.ArrayLike, delta: npt.ArrayLike) -> Any:
    """The largest mu at which Gaussian noise is (epsilon, delta)-private; the least std is sensitivity / mu.

    Args:
        epsilon: Finite, 0 or above.
        delta: Strictly between 0 and 1. Two numbers give a float; arrays broadcast, and give an array.

    Returns:
        At most the true mu.

    Guarantee: for all neighbours at most the returned mu apart, the release is (epsilon, delta)-private.
    Source: balle2018improving, Theorem 8 and Algorithm 1.
    Deviates: 1. Halley's iteration in place of a bracketing search; 2. rounded down.

    Example:
        >>> from matrixdp.privacy import gaussian
        >>> round(gaussian.mu(1.0, 1e-6), 4)
        0.2367
    """
    return _evaluate(_mu, epsilon=epsilon, delta=delta)
