"""An approximation of delta for independent entries with discrete noise: fast, for searches only, without a guarantee.

With K(s) = log E e^(s l), the cumulant function of the total loss l, the sum (1) of privacy/cells.py is for every s > 0
an integral along the vertical line through s,

    delta(epsilon) = 1/(2 pi i) int e^F(z) dz,      F(z) = K(z) - z epsilon - log z - log(1 + z).

F is convex on the positive axis, and along the line through its minimum the integrand falls fastest. Laplace's method
there, with the next term of its series (daniels1954saddlepoint), is within a few percent where many atoms contribute.
"""

from __future__ import annotations

import math

import numpy as np

from matrixdp._check import Array

_ATOMS = 24.0  # per scale
_DEPTH = 45.0  # where tails are cut, as an exponent
_STEPS = 30  # of Newton's iteration, at most


class Saddlepoint:
    """The logarithm of an approximate delta at one epsilon, as a function of the scale.

    Attributes:
        exponent: t.
        groups: entries that change, as (shift in steps, number of entries).
        epsilon: where delta is computed.
    """

    def __init__(self, exponent: float, groups: tuple[tuple[int, int], ...], epsilon: float) -> None:
        self.exponent, self.groups, self.epsilon = exponent, groups, epsilon
        self._tilt = 1.0  # the last one, from which the next search begins

    def log_delta(self, scale: float) -> float:
        """log of the approximate delta; minus infinity if no loss exceeds epsilon."""
        losses = [_loss(self.exponent, scale, shift) for shift, _ in self.groups]
        counts = [count for _, count in self.groups]
        top = sum(count * float(values[0]) for (_, values), count in zip(losses, counts, strict=True))
        if not top > self.epsilon:
            return -math.inf
        tilt, low, high = self._tilt, 0.0, math.inf
        for _ in range(_STEPS):
            moments = np.zeros(5)
            for loss, count in zip(losses, counts, strict=True):
                moments += count * _cumulants(*loss, tilt)
            slope = moments[1] - self.epsilon - 1.0 / tilt - 1.0 / (1.0 + tilt)
            curvature = moments[2] + 1.0 / tilt**2 + 1.0 / (1.0 + tilt) ** 2
            if abs(slope) <= 1e-4 * math.sqrt(curvature) or tilt * (top - self.epsilon) > 1e3:
                break
            low, high = (tilt, high) if slope < 0.0 else (low, tilt)
            proposed = tilt - slope / curvature
            tilt = proposed if low < proposed < high else 0.5 * (low + min(high, 4.0 * tilt))
        self._tilt = tilt
        third = (moments[3] - 2.0 / tilt**3 - 2.0 / (1.0 + tilt) ** 3) / curvature**1.5
        fourth = (moments[4] + 6.0 / tilt**4 + 6.0 / (1.0 + tilt) ** 4) / curvature**2
        series = max(1.0 + fourth / 8.0 - 5.0 * third**2 / 24.0, 0.1)
        exponent = moments[0] - tilt * self.epsilon - math.log(tilt * (1.0 + tilt))
        return float(exponent - 0.5 * math.log(2.0 * math.pi * curvature) + math.log(series))


def _loss(exponent: float, scale: float, shift: int) -> tuple[Array, Array]:
    """log masses and losses of one entry, decreasing; one atom represents several neighbouring ones."""
    stride = max(int(scale / _ATOMS), 1)
    reach = math.ceil(scale * _DEPTH ** (1.0 / exponent))
    places = np.arange(-reach, shift + reach + 1.0, stride)
    near, far = ((np.abs(x) / scale) ** exponent for x in (places, places - shift))
    return -near - math.log(float(np.sum(np.exp(-near)))), far - near


def _cumulants(logs: Array, losses: Array, tilt: float) -> Array:
    """K at the tilt, and its first four derivatives."""
    terms = logs + tilt * losses
    largest = float(terms.max())
    weights = np.exp(terms - largest)
    total = float(weights.sum())
    mean = float(weights @ losses) / total
    centred = losses - mean
    square = centred * centred
    second, third, fourth = (float(weights @ x) / total for x in (square, square * centred, square * square))
    return np.array([largest + math.log(total), mean, second, third, fourth - 3.0 * second**2])
