"""The privacy loss of one entry with discrete noise, rounded up.

Noise P(j) prop. to e^(-phi(|j|)) on the whole numbers, phi(x) = (x/scale)^t, 1 <= t <= 2, against the same noise
shifted by m steps: the loss at j is `l(j) = phi(|j - m|) - phi(|j|)`, which never increases with j as phi is convex.
For independent entries the losses add up, and with x_+ = max(x, 0)

    delta(epsilon) = sum over (j_1, ..., j_k) of prod p(j_i) (1 - e^(epsilon - sum l(j_i)))_+ .                      (1)

Two remarks about (1) are used throughout.

1. It increases with every mass p and every loss l, whether or not they still belong to a pair of laws. So masses and
   losses are rounded up one by one. The far left tail is given the loss infinity, the far right tail the loss at
   which it was cut.
2. It is convex in each x_i = e^(-l_i) by itself. So an atom at l may be replaced by two atoms at neighbouring points of
   a grid, with the same total of p and of p e^(-l): that can only increase (1). (This is doroshenko2022connect, for a
   law that is discrete to begin with.) The increase is of second order in the step of the grid; it is of first order
   where the sum has a large atom within a few steps of epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from matrixdp._check import Array

UNIT = 2.0**-53
TINY = 1e-307  # more than underflow can lose
DEPTHS = (60.0, 150.0, 400.0, 740.0)  # where tails are cut, as exponents; e^-745 is the least float


@dataclass(frozen=True, eq=False)
class CellLoss:
    """The distribution of the privacy loss of one entry, rounded up.

    Guarantee: put these masses and losses into (1), and add `infinite` for every entry: the result is at least delta.

    Attributes:
        losses: in decreasing order.
        masses: the masses of the losses.
        infinite: the mass that was cut off on the left, where losses have no bound.
        spacing: above 0 if `losses[i] = losses[0] - spacing * i`; sums of losses are then rounded up as well.
    """

    losses: Array
    masses: Array
    infinite: float
    spacing: float = 0.0

    def on_grid(self, step: float) -> CellLoss:
        """The loss moved by remark 2 to whole multiples of the step, which is a power of two."""
        floors = np.floor(self.losses / step)
        above = np.clip(self.losses - floors * step, 0.0, step)
        share = np.expm1(-above) / math.expm1(-step)
        upper = self.masses * (share + 8.0 * UNIT)
        lower = self.masses * (np.exp(-above) * np.expm1(above - step) / math.expm1(-step) + 8.0 * UNIT)
        top = int(floors[0]) + 1
        places = (top - floors).astype(np.int64)  # of the lower neighbour, counted downwards
        size = int(places[-1]) + 1
        masses = np.asarray(np.bincount(places, lower, size), dtype=np.float64)
        masses += np.bincount(places - 1, upper, size)
        masses *= 1.0 + 4.0 * UNIT * float(np.max(np.bincount(places)))
        return CellLoss(step * (top - np.arange(float(size))), masses, self.infinite, step)


@lru_cache(maxsize=64)
def cell_loss(exponent: float, scale: float, shift: int, depth: float = DEPTHS[0], stride: int = 1) -> CellLoss:
    """The loss of one entry that is shifted by this many steps.

    Args:
        exponent: t.
        scale: in steps.
        shift: m.
        depth: `infinite` is about e^-depth; it is 0 for t = 1.
        stride: if above 1, only every stride-th atom is kept, with the mass of its neighbours: an approximation without
            a guarantee, for searches.
    """
    if exponent == 1.0:
        return _laplace(scale, shift)
    if stride > 1:
        return _thinned(exponent, scale, shift, depth, stride)
    reach = math.ceil(scale * depth ** (1.0 / exponent)) + 1
    sizes = np.arange(reach + shift + 1.0)
    phi = (sizes / scale) ** exponent  # correct to 8 units, relative
    weights = np.exp(-phi)
    normaliser = (2.0 * np.sum(weights[1:]) + 1.0) * (1.0 - sum_rounding(sizes.size))
    masses = (weights * (1.0 + 16.0 * UNIT * (phi + 2.0)) + TINY) / normaliser
    tail = 1.001 * float(masses[reach] / -math.expm1(phi[reach - 1] - phi[reach]))  # phi is convex: a geometric series
    places = np.arange(-reach, shift + reach + 1)
    near, far = np.abs(places), np.abs(places - shift)
    atoms = masses[near]
    atoms[-1] += tail
    if exponent == 2.0:
        spacing = 2.0 * shift / scale**2
        top = shift * (shift + 2.0 * reach) / scale**2 * (1.0 + 32.0 * UNIT)
        return CellLoss(top - spacing * np.arange(places.size), atoms, tail, spacing)
    losses = phi[far] - phi[near] + 16.0 * UNIT * (phi[far] + phi[near])
    return CellLoss(np.maximum.accumulate(losses[::-1])[::-1], atoms, tail)


def _thinned(exponent: float, scale: float, shift: int, depth: float, stride: int) -> CellLoss:
    """An approximation of the loss of one entry, from every stride-th atom."""
    reach = math.ceil(scale * depth ** (1.0 / exponent)) + 1
    places = np.arange(-reach, shift + reach + 1.0, stride)
    near, far = ((np.abs(x) / scale) ** exponent for x in (places, places - shift))
    masses = np.exp(-near)
    masses /= np.sum(masses)
    spacing = 2.0 * shift * stride / scale**2 if exponent == 2.0 else 0.0
    return CellLoss(far - near, masses, 0.0, spacing)


def sum_rounding(size: int) -> float:
    """More than the relative error of numpy's pairwise sum of this many rounded positive terms."""
    return 2.0 * UNIT * (64.0 + math.log2(size + 1.0))


def _laplace(scale: float, shift: int) -> CellLoss:
    """Losses (m - 2j)/scale for j = 0, ..., m; below 0 and above m they are as at 0 and at m."""
    rate, places = 1.0 / scale, np.arange(shift + 1.0)
    masses = np.exp(-rate * places)
    masses[1:-1] *= -math.expm1(-rate)
    masses *= (1.0 + 4.0 * UNIT * (rate * places + 8.0)) / (1.0 + math.exp(-rate))
    top = rate * shift * (1.0 + 16.0 * UNIT)
    return CellLoss(top - 2.0 * rate * places, masses + TINY, 0.0, 2.0 * rate)
