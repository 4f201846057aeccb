"""Independent discrete noise, where little changes: discrete Laplace, discrete Gaussian, and the laws between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Product
from matrixdp.errors import NotApplicable, NotCertifiable
from matrixdp.mechanisms.base import recipe
from matrixdp.mechanisms.solvers.discrete_scales import best_exponent, scale_for
from matrixdp.privacy.discrete import Groups
from matrixdp.privacy.guarantee import with_total_variation
from matrixdp.privacy.laws import steps_changed
from matrixdp.secure.discrete import Tabled
from matrixdp.sensitivity import L1, Counts, Entrywise, Sensitivity

# The share of delta that is left for the total-variation error of the tables; more where e^epsilon makes that larger.
ROOM = 5e-7
# More than the error of the tables for an entry, which takes milliseconds to build; a release counts the true one.
USUAL_ERROR = 1e-18
# Steps of the grid in a bound that is no whole number, or whose values may have been rounded: for discrete Laplace in
# one entry, which has a closed form, in several, and for other exponents.
FINEST, FINER, FINE = 1024, 128, 64
# On an l1 ball, steps of the grid in the radius for each step that flooring every entry may add.
L1_FINENESS = 64
# Budgets whose profiles are computed.
LARGEST_EPSILON, LEAST_DELTA = 500.0, 1e-200
# With more entries than this that change by the largest amount, Gaussian noise is at least as good.
MOST_CELLS = 64
# Where an entry changes by more steps than this, exponents other than 1 would take seconds.
MOST_STEPS = 2**12


@dataclass(frozen=True)
class _Setting:
    """A shape and a budget, the step of the grid, and the worst change in steps as the certificate counts it."""

    shape: Shape
    budget: Budget
    step: float
    groups: Groups
    entries: int

    def law(self, make: Callable[[float], tuple[float, float]]) -> Product:
        """The law for so much of delta that the total-variation error of its tables fits beside it.

        Args:
            make: from a delta to the exponent and the scale in steps.
        """
        try:
            return self._law(make)
        except NotCertifiable as reason:
            raise NotApplicable(f"has no noise for {self.budget} on a grid of {self.step:g}: {reason}") from None

    def _law(self, make: Callable[[float], tuple[float, float]]) -> Product:
        epsilon, delta = self.budget.epsilon, self.budget.delta
        found = self._product(*make(delta * (1 - ROOM)))
        if delta == 0:  # drawn exactly
            return found
        if with_total_variation(0.0, epsilon, self.entries * USUAL_ERROR) <= 0.5 * ROOM * delta:
            return found
        error = self.entries * Tabled(found.exponent, found.scale_in_steps).total_variation
        added = with_total_variation(0.0, epsilon, error)
        if added <= 0.5 * ROOM * delta:
            return found
        left = delta - 2 * added
        if not left > 0:
            raise NotApplicable(f"has tables with an error of {added:.2g} in delta here, too large for {self.budget}")
        return self._product(*make(left))

    def _product(self, exponent: float, scale_in_steps: float) -> Product:
        return Product(self.shape, self.step, exponent, scale_in_steps * self.step)


def _setting(shape: Shape, sensitivity: Sensitivity, budget: Budget, fineness: int) -> _Setting:
    if not isinstance(sensitivity, (Counts, Entrywise, L1)):
        raise NotApplicable(
            "is for sets where little changes: Counts, L1, or Entrywise with one bound; use Gaussian noise"
        )
    if not (budget.epsilon <= LARGEST_EPSILON and (budget.delta == 0 or budget.delta >= LEAST_DELTA)):
        raise NotApplicable(
            f"is for epsilon up to {LARGEST_EPSILON:g}, and delta 0 or from {LEAST_DELTA:g}, got {budget}"
        )
    if isinstance(sensitivity, Entrywise) and np.min(sensitivity.bounds(shape)) < sensitivity.largest_entry(shape):
        raise NotApplicable("is for entries with one bound")
    step = _step(shape, sensitivity, fineness)
    try:
        groups, _ = steps_changed(sensitivity, shape, step)
    except NotCertifiable as reason:
        raise NotApplicable(f"has no grid: {reason}") from None
    cells = sum(cells for _, cells in groups)
    if not (cells <= MOST_CELLS or budget.delta == 0):
        raise NotApplicable(f"is for at most {MOST_CELLS} entries that change, got {cells}; Gaussian noise is as good")
    return _Setting(shape, budget, step, groups, sensitivity.changed_entries(shape))


def _step(shape: Shape, sensitivity: Sensitivity, fineness: int) -> float:
    """The step of the grid, a power of two: whole numbers for counts, and fine enough that rounding hardly costs."""
    bound = sensitivity.largest_entry(shape)
    if isinstance(sensitivity, Counts) and float(bound).is_integer() and bound <= fineness:
        return 1.0
    if not isinstance(sensitivity, L1):
        return _power_of_two(bound / fineness)
    if sensitivity.step is not None:
        return sensitivity.step
    return _power_of_two(min(bound / fineness, sensitivity.radius / (2 * math.prod(shape) * L1_FINENESS)))


def _power_of_two(most: float) -> float:
    return float(2.0 ** math.floor(math.log2(most)))


@recipe("laplace", source="ghosh2012universally", pure=True)
def laplace(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product:
    """Discrete Laplace noise: whole multiples of a step, of the least scale that keeps the budget.

    With delta = 0 the scale is the l1 sensitivity over epsilon, and a release draws the noise exactly.

    Source: ghosh2012universally for one count.
    Deviates: (1) the scale is solved for the exact profile at (epsilon, delta), several cells included.
    """
    finer = FINEST if sensitivity.changed_entries(shape) == 1 or isinstance(sensitivity, L1) else FINER
    setting = _setting(shape, sensitivity, budget, finer)
    (shift, cells), *others = setting.groups
    return setting.law(lambda delta: (1.0, scale_for(budget.epsilon, delta, shift, cells, others=tuple(others))))


@recipe("discrete", source="matrixdp, privacy/discrete.py", pure=True)
def discrete(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product:
    """Noise prop. to exp(-(|j|/scale)^t) on a grid, with the t from 1 to 2 and the scale of the least variance.

    Only t = 1 keeps delta = 0, and only it is tried where an entry changes by more than 4096 steps.
    """
    setting = _setting(shape, sensitivity, budget, FINE)
    (shift, cells), *others = setting.groups
    if shift > MOST_STEPS:
        return setting.law(lambda delta: (1.0, scale_for(budget.epsilon, delta, shift, cells, others=tuple(others))))

    def best(delta: float) -> tuple[float, float]:
        found = best_exponent(budget.epsilon, delta, shift, cells, tuple(others))
        return found.exponent, found.scale_in_steps

    return setting.law(best)


@recipe("discrete-gaussian", source="canonne2020discrete")
def discrete_gaussian(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product:
    """Discrete Gaussian noise: P(j) prop. to exp(-(j/scale)^2) on a grid, of the least scale that keeps the budget.

    Source: canonne2020discrete.
    Deviates: (1) the scale is solved for the exact profile at (epsilon, delta), several cells included; (2) drawn from
        tables, without rejection.
    """
    setting = _setting(shape, sensitivity, budget, FINE)
    (shift, cells), *others = setting.groups
    if shift > MOST_STEPS:
        raise NotApplicable(
            f"is for changes of at most {MOST_STEPS} steps of a grid, got {shift}; if the values of an L1 set are "
            "whole multiples of a step, name it: L1(radius, step=1)"
        )
    return setting.law(lambda delta: (2.0, scale_for(budget.epsilon, delta, shift, cells, 2.0, tuple(others))))
