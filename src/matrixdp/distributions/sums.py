"""Tails of discrete noise, and of weighted sums of it: exact by convolution, or bounded.

K is symmetric on the whole numbers, P(K = j) prop. to exp(-(|j|/scale)^t), and T = sum_j w_j K_j of independent K_j.
`margin` finds m with P(|T| > m) <= alpha.

1. *Lattice.* Let w_j = c n_j + r_j and K_j = h L_j + d_j with whole n_j and L_j, halves of h rounded away from 0. Then
   T = c h sum n_j L_j + c sum n_j d_j + sum r_j K_j. Weights that are whole multiples of one number have r_j = 0, and
   if the transform need not be too long, h = 1 and d_j = 0. Then only the first sum is left, and the margin is exact.
   Otherwise the second and third sum get a hundredth of alpha each:
   |d_j| <= h/2, symmetric and independent, so P(|sum n_j d_j| > b) <= 2 exp(-2 b^2 / sum (n_j h)^2) (Hoeffding).
2. *Convolution.* The law of the first sum modulo N has the discrete Fourier transform prod_j Phi(n_j t mod N). What
   wraps around lies beyond N/2; its probability is bounded by 3 and takes a ten-thousandth of alpha. Rounding each
   value of Phi by u changes a sum of probabilities by at most the sum over t of (number of weights) u |transform|.
3. *Bound.* M(x) = E exp(x K) - 1 is a power series in x^2 with coefficients at least 0, so M(x) <= (x/y)^2 M(y) for
   |x| <= y. With w the largest |w_j|, and any x > 0,
   P(|T| > m) <= 2 exp(-x m / w + M(x) sum w_j^2 / w^2).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import scipy

from matrixdp._check import Array

_DEPTH, _DEEPER = 60.0, 400.0  # terms below e^-60 change no digit of a sum; of E exp(xK), below e^-400
_LEVELS = 64, 4096  # the least and the most levels to which weights without a common divisor are rounded
_LONGEST, _WORK = 1 << 22, 1 << 25  # points of a transform, and points times the number of different weights
_SHARE = 0.01  # of alpha, for each rounding
_WRAPPED = 1e-4  # of alpha, for what wraps around
_ROUNDING = 2.0**-46  # of one value of Phi
_SAME = 1e-14  # the relative difference up to which a weight counts as a multiple of another


def quantile(exponent: float, scale: float, alpha: float) -> tuple[int, float]:
    """The least k with P(|K| > k) <= alpha, and that probability."""
    if exponent == 1.0:
        k = max(0, math.ceil(-scale * math.log(alpha * (1 + math.exp(-1 / scale)) / 2)) - 1)
        while k > 0 and _beyond_laplace(scale, k - 1) <= alpha:
            k -= 1
        while not _beyond_laplace(scale, k) <= alpha:
            k += 1
        return k, _beyond_laplace(scale, k)
    tails = 2 * _upper_tails(exponent, scale)[1:]
    k = int(np.count_nonzero(tails > alpha))
    return k, float(tails[k]) if k < len(tails) else 0.0


def _beyond_laplace(scale: float, k: int) -> float:
    """P(|K| > k) of discrete Laplace noise; a power of q = e^(-1/scale) would lose digits where the scale is large."""
    return 2 * math.exp(-(k + 1) / scale) / (1 + math.exp(-1 / scale))


def margin(exponent: float, scale: float, weights: Array, alpha: float) -> tuple[float, float]:
    """A number m with P(|sum_j weights_j K_j| > m) <= alpha, and a bound on that probability."""
    sizes = np.abs(weights[weights != 0])
    if sizes.size == 0:
        return 0.0, 0.0
    if sizes.size == 1:
        k, beyond = quantile(exponent, scale, alpha)
        return k * float(sizes[0]), beyond
    bounded = _bounded(exponent, scale, sizes, alpha), alpha
    convolved = _convolved(exponent, scale, sizes, alpha)
    return bounded if convolved is None or bounded[0] < convolved[0] else convolved


def _convolved(exponent: float, scale: float, sizes: Array, alpha: float) -> tuple[float, float] | None:
    """As `margin`, by 1 and 2; None if the transform would be too long or too inexact."""
    unit = _common_divisor(sizes) or float(np.max(sizes)) / _levels(exponent, scale, sizes, alpha)
    whole = np.rint(sizes / unit)
    rest = sizes - unit * whole
    rounded = bool(np.any(np.abs(rest) > 2 * _SAME * sizes))
    groups, counts = np.unique(whole[whole > 0], return_counts=True)
    longest = min(_LONGEST, _WORK // len(groups))
    reach = _bounded(exponent, scale, whole[whole > 0], _WRAPPED * alpha)  # in steps of K times the unit
    coarse = 1
    while 2 * reach / coarse + 3 > longest:
        coarse *= 2
    if coarse > max(1.0, scale):
        return None
    extra, share, spread = 0.0, alpha * (1 - 2 * _WRAPPED), float(np.sum(np.square(whole)))
    if rounded:
        extra += _bounded(exponent, scale, np.abs(rest[rest != 0]), _SHARE * alpha)
        share -= _SHARE * alpha
    if coarse > 1:
        extra += unit * coarse * math.sqrt(math.log(2 / (_SHARE * alpha)) / 2 * spread)
        share -= _SHARE * alpha
    moved = math.sqrt(math.log(2 / (_WRAPPED * alpha)) / 2 * spread) if coarse > 1 else 0.0  # by the d_j, at most
    length = scipy.fft.next_fast_len(2 * math.ceil(reach / coarse + moved) + 3, real=True)
    transform = _transform(_coarse_law(exponent, scale, coarse), groups, counts, length)
    law = np.maximum(scipy.fft.irfft(transform, length), 0.0)
    beyond = 2 * np.cumsum(law[length // 2 : 0 : -1])[::-1]  # of more than 0, 1, ... on both sides, from above
    beyond += _ROUNDING * (1 + sizes.size * float(np.sum(np.abs(transform))))
    place = int(np.count_nonzero(beyond > share))
    if place == len(beyond):
        return None
    return (unit * coarse * place + extra) * (1 + 1e-9), min(float(beyond[place]) + alpha - share, alpha)


def _common_divisor(sizes: Array) -> float | None:
    """A number of which all sizes are small whole multiples; None if none is found."""
    least = float(np.min(sizes))
    for divisor in range(1, 17):
        quotients = sizes * (divisor / least)
        if np.all(np.abs(quotients - np.rint(quotients)) <= _SAME * quotients) and np.max(quotients) <= 1 << 12:
            return least / divisor
    return None


def _levels(exponent: float, scale: float, sizes: Array, alpha: float) -> int:
    """The number of levels to which weights without a common divisor are rounded, limited by the work."""
    reach = 2 * _bounded(exponent, scale, sizes, _WRAPPED * alpha) / float(np.max(sizes))
    most = math.sqrt(_WORK / reach)  # there are no more groups than levels, and none than weights
    return int(min(max(_WORK / (reach * min(sizes.size, most)), _LEVELS[0]), _LEVELS[1]))


def _transform(law: Array, groups: Array, counts: Any, length: int) -> Array:
    """prod_j Phi(n_j t mod N) for t = 0 ... N/2, from P(L = 0), P(L = 1), ..."""
    places = np.arange(len(law)) % length
    wrapped = np.bincount(places, law, length) + np.bincount(-places % length, law, length)
    wrapped[0] -= law[0]
    phi = scipy.fft.rfft(wrapped).real
    frequencies = np.arange(length // 2 + 1)
    product = np.ones(len(frequencies))
    for group, count in zip(groups.astype(np.int64).tolist(), counts.tolist(), strict=True):
        turned = frequencies * group % length
        product *= phi[np.minimum(turned, length - turned)] ** count
    return product


@lru_cache(maxsize=8)
def _coarse_law(exponent: float, scale: float, coarse: int) -> Array:
    """P(L = i), i = 0, 1, ..., of L = K/coarse rounded to the nearest whole number, halves away from 0."""
    last = math.ceil(scale * _DEPTH ** (1 / exponent)) // coarse + 2
    edges = np.arange(1, last + 1) * coarse - coarse // 2  # K >= the i-th means L >= i
    if exponent == 1.0:
        reached = np.exp(-edges / scale) / (1 + math.exp(-1 / scale))
    else:
        tails = _upper_tails(exponent, scale)
        reached = np.where(edges < len(tails), tails[np.minimum(edges, len(tails) - 1)], 0.0)
    return np.concatenate([[1 - 2 * reached[0]], reached[:-1] - reached[1:]])


@lru_cache(maxsize=8)
def _upper_tails(exponent: float, scale: float) -> Array:
    """P(K >= k) for k = 0, 1, ... until it vanishes."""
    sizes = np.arange(math.ceil(scale * _DEPTH ** (1 / exponent)) + 2.0)
    weights = np.exp(-((sizes / scale) ** exponent))
    return np.asarray(np.cumsum(weights[::-1])[::-1] / (2 * np.sum(weights[1:]) + 1))


def _bounded(exponent: float, scale: float, sizes: Array, alpha: float) -> float:
    """A number m with P(|T| > m) <= alpha, by 3."""
    largest = float(np.max(sizes))
    energy = float(np.sum(np.square(sizes / largest)))
    points, moments = _moments(exponent, scale)
    return largest * float(np.min((math.log(2 / alpha) + energy * moments) / points)) * (1 + 1e-12)


@lru_cache(maxsize=32)
def _moments(exponent: float, scale: float) -> tuple[Array, Array]:
    """Some points x, and E exp(xK) - 1 at each."""
    if exponent == 1.0:
        rate = 1 / scale
        points = np.concatenate([np.geomspace(1e-7, 0.5, 60), 1 - np.geomspace(0.45, 1e-6, 60)]) * rate
        grown = 4 * math.exp(-rate) * np.sinh(points / 2) ** 2
        return points, grown / (np.expm1(-rate) ** 2 - grown)
    last = scale * _DEEPER ** (1 / exponent)
    points = np.geomspace(1e-7 / scale, 0.75 * _DEEPER / last, 48)
    sizes = np.arange(1.0, math.ceil(last) + 1)
    logs = -((sizes / scale) ** exponent)
    normaliser = 1 + 2 * float(np.sum(np.exp(logs)))
    shares = [float(np.sum(np.exp(logs) * 4 * np.sinh(np.minimum(x * sizes, 600) / 2) ** 2)) for x in points]
    return points, np.asarray(shares) / normaliser
