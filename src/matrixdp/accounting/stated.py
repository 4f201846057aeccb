"""Profiles of releases that are known only by a stated guarantee, such as (epsilon, delta)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from matrixdp._rounding import rounded_up
from matrixdp.budget import Budget
from matrixdp.privacy.guarantee import Curve
from matrixdp.privacy.records import register

_UP = 1.0 + 2.0**-48
_POINTS = 257


@dataclass(frozen=True)
class StatedCurve(Curve):
    """A curve that ends at (E, d): the release is (E, d)-differentially private.

    So it is no worse than randomized response with E that reveals everything with probability d
    (kairouz2017composition), and the filters for pure noise accept it (`limits`).
    """

    @property
    def pure_epsilon(self) -> float:
        """Where delta reaches 0; infinite if it does not."""
        return self.epsilons[-1] if self.deltas[-1] == 0 else math.inf

    def __str__(self) -> str:
        return f"epsilon {rounded_up(self.epsilons[-1])}, delta {self.deltas[-1]:g}"


register("stated-curve", StatedCurve)


def by_budget(budget: Budget) -> StatedCurve:
    """The curve of the worst release with this epsilon and delta.

    It is delta + (1 - delta)(e^epsilon - e^x)/(1 + e^epsilon) up to x = epsilon, and delta beyond. The first part is
    linear in e^x, so two points determine it exactly.
    """
    epsilon, delta = budget.epsilon, budget.delta
    first = min(1.0, (delta + (1.0 - delta) * math.tanh(epsilon / 2.0)) * _UP)
    return StatedCurve((0.0, epsilon), (max(first, delta), delta))


def laplace(epsilon: float) -> StatedCurve:
    """The curve of Laplace noise with this pure epsilon, delta(x) = 1 - e^((x - epsilon)/2), by chords from above."""
    points = np.linspace(0.0, epsilon, _POINTS)
    deltas = -np.expm1((points - epsilon) / 2.0) * _UP
    deltas[-1] = 0.0
    return StatedCurve(tuple(points.tolist()), tuple(np.minimum(deltas, 1.0).tolist()))
