"""Compositions with few atoms: the privacy losses of discrete noise are listed; Gaussian noise is added in closed form.

Let the discrete releases have total loss l_a with probability p_a, and let H be the curve of the others, such as one
Gaussian release. Then the curve of all of them is sum_a p_a H(epsilon - l_a), at any real epsilon: given outcome a, the
best event for the others is the one that attains their curve at epsilon - l_a. Losses and masses are rounded up, which
can only increase the sum (`privacy.cells`, remark 1, and H falls). So the answer has no grid error. That matters where
a large atom is near epsilon: for four pure releases of epsilon/4 each, the largest loss is epsilon itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from matrixdp._check import Array
from matrixdp.accounting.pairs import Pair
from matrixdp.privacy.cells import TINY, UNIT, CellLoss, sum_rounding
from matrixdp.privacy.guarantee import GaussianProfile

_MOST = 20_000  # atoms in all
_LATTICE = 4096  # atoms of one kind of noise
_FLOOR = 1e-280  # mass that is cut off
_ROOT = 1e-12


@dataclass(frozen=True, eq=False)
class Atoms:
    """The distribution of the total loss of discrete releases, and one more release (`other`)."""

    losses: Array
    masses: Array
    infinite: float
    other: Pair | None

    def delta(self, epsilon: float) -> float:
        """The least delta at this epsilon, rounded up."""
        rest = epsilon - self.losses - 4.0 * UNIT * (abs(epsilon) + np.abs(self.losses))
        curve = np.maximum(-np.expm1(rest), 0.0) if self.other is None else self.other.curve(rest)
        found = float(np.sum(self.masses * curve)) * (1.0 + sum_rounding(self.losses.size)) + TINY
        return min(found + self.infinite, 1.0)

    def epsilon(self, delta: float) -> float:
        """The least epsilon at this delta, rounded up."""
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = 0.0, 1.0
        while not self.delta(high) <= delta:
            low, high = high, 2.0 * high
            if high > 1e6:
                return math.inf
        while high - low > _ROOT * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


def few_atoms(pairs: Mapping[Pair, int]) -> Atoms | None:
    """The composition of discrete noise and at most one Gaussian release; None if it has too many atoms."""
    others = [pair for pair in pairs if not pair.atomic]
    single = all(isinstance(pair.profile, GaussianProfile) and pair.rate == 1.0 and pairs[pair] == 1 for pair in others)
    if len(others) > 1 or len(others) == len(pairs) or not single:
        return None
    losses, masses, infinite = np.zeros(1), np.ones(1), 0.0
    for pair, count in pairs.items():
        for cell, cells in pair.atoms(_FLOOR):
            number = cells * count
            power = _power(cell, number)
            if power is None or losses.size * power.losses.size > _MOST:
                return None
            infinite += number * cell.infinite
            losses = np.add.outer(losses, power.losses).ravel()
            masses = np.multiply.outer(masses, power.masses).ravel() * (1.0 + 4.0 * UNIT)
    return Atoms(losses, masses, infinite * (1.0 + 8.0 * UNIT), others[0] if others else None)


def _power(loss: CellLoss, count: int) -> CellLoss | None:
    """The sum of `count` independent losses, by direct convolution on their lattice; None if it has too many atoms."""
    if count == 1:
        return loss if loss.losses.size <= _MOST else None
    if not loss.spacing or count * (loss.losses.size - 1) >= _LATTICE:
        return None
    masses, power, left = np.ones(1), loss.masses, count
    while left:
        masses = np.convolve(masses, power) if left & 1 else masses
        left >>= 1
        power = np.convolve(power, power) if left else power
    masses = masses * (1.0 + 4.0 * UNIT * masses.size * (math.log2(count) + 4.0)) + TINY * masses.size
    top = count * float(loss.losses[0]) * (1.0 + 2.0 * UNIT)
    return CellLoss(top - loss.spacing * np.arange(float(masses.size)), masses, 0.0, loss.spacing)
