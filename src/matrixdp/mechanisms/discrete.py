"""Independent discrete noise, for few changed entries: discrete Laplace, discrete Gaussian, and laws between them."""

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
from matrixdp.secure.discrete import Sampler
from matrixdp.sensitivity import L1, Counts, Entrywise, Sensitivity

# The share of delta reserved for the total-variation error of the sampler's tables; more where e^epsilon enlarges it.
ROOM = 5e-7
# An upper bound on the usual total-variation error per entry, since building tables takes milliseconds; the certificate
# of a release uses the actual error.
USUAL_ERROR = 1e-18
# Grid steps per bound, where the bound is not a whole number or values may have been rounded: for discrete Laplace with
# one changed entry (closed form), with several, and for other exponents.
FINEST, FINER, FINE = 1024, 128, 64
# On an l1 ball, grid steps in the radius per step that flooring all entries may add.
L1_FINENESS = 64
# Budgets whose profiles are computed.
LARGEST_EPSILON, LEAST_DELTA = 500.0, 1e-200
# With more entries than this that change by the largest amount, Gaussian noise is at least as good.
MOST_CELLS = 64
# Exponents other than 1 would take seconds where an entry changes by more steps than this.
MOST_STEPS = 2**12


@dataclass(frozen=True)
class _Setting:
    """A shape, a budget, the grid step, and the worst change in steps, as in the certificate."""

    shape: Shape
    budget: Budget
    step: float
    groups: Groups
    entries: int

    def law(self, make: Callable[[float], tuple[float, float]]) -> Product:
        """The law at a delta reduced by the total-variation error of its tables.

        Args:
            make: maps a delta to the exponent and the scale in steps.
        """
        epsilon, delta = self.budget.epsilon, self.budget.delta

        def made(share: float) -> Product:
            try:
                exponent, scale_in_steps = make(share)
            except NotCertifiable as reason:
                raise NotApplicable(f"no noise keeps {self.budget} on a grid of {self.step:g}: {reason}") from None
            return Product(self.shape, self.step, exponent, scale_in_steps * self.step)

        def added(error: float) -> float:
            return with_total_variation(0.0, epsilon, self.entries * error)

        found = made(delta * (1 - ROOM))
        if delta == 0 or added(USUAL_ERROR) <= 0.5 * ROOM * delta:  # with delta = 0 noise is drawn exactly
            return found
        more = added(Sampler(found.exponent, found.scale_in_steps).total_variation)
        if more <= 0.5 * ROOM * delta:
            return found
        if not delta - 2 * more > 0:
            raise NotApplicable(f"discrete noise has an error of {more:.2g} in delta here, too large for {self.budget}")
        return made(delta - 2 * more)

    def law_of(self, exponent: float) -> Product:
        """The law with this exponent and the least scale that keeps the budget."""
        (shift, cells), *others = self.groups

        def scale(delta: float) -> tuple[float, float]:
            return exponent, scale_for(self.budget.epsilon, delta, shift, cells, exponent, tuple(others))

        return self.law(scale)


def _setting(shape: Shape, sensitivity: Sensitivity, budget: Budget, fineness: int) -> _Setting:
    if not isinstance(sensitivity, (Counts, Entrywise, L1)):
        raise NotApplicable("discrete noise is for Counts, L1, and Entrywise with one bound; use Gaussian noise")
    if not (budget.epsilon <= LARGEST_EPSILON and (budget.delta == 0 or budget.delta >= LEAST_DELTA)):
        raise NotApplicable(
            f"discrete noise is for epsilon up to {LARGEST_EPSILON:g} and delta 0 or from {LEAST_DELTA:g}, got {budget}"
        )
    if isinstance(sensitivity, Entrywise) and np.min(sensitivity.bounds(shape)) < sensitivity.largest_entry(shape):
        raise NotApplicable("discrete noise is for entries with one bound; use 'optimal'")
    step = _step(shape, sensitivity, fineness)
    try:
        groups, _ = steps_changed(sensitivity, shape, step)
    except NotCertifiable as reason:
        raise NotApplicable(f"discrete noise has no grid here: {reason}") from None
    cells = sum(cells for _, cells in groups)
    if not (cells <= MOST_CELLS or budget.delta == 0):
        raise NotApplicable(
            f"discrete noise is for at most {MOST_CELLS} entries that change, got {cells}; Gaussian noise is as good"
        )
    return _Setting(shape, budget, step, groups, sensitivity.changed_entries(shape))


def _step(shape: Shape, sensitivity: Sensitivity, fineness: int) -> float:
    """The step of the grid, a power of two: 1 for whole counts, else so fine that rounding costs little noise."""
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
    """Discrete Laplace noise on multiples of a step, with the least scale that keeps the budget.

    With delta = 0 the scale is the l1 sensitivity on the grid, rounding included, over epsilon; noise is drawn exactly.

    Source: ghosh2012universally for one count.
    Deviates: (1) the scale is solved for the exact profile at (epsilon, delta), several cells included.
    """
    return _laplace(shape, sensitivity, budget)


def _laplace(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product:
    finer = FINEST if sensitivity.changed_entries(shape) == 1 or isinstance(sensitivity, L1) else FINER
    return _setting(shape, sensitivity, budget, finer).law_of(1.0)


@recipe("discrete", source="matrixdp, privacy/discrete.py", pure=True)
def discrete(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product:
    """Noise prop. to exp(-(|j|/scale)^t) on a grid, with t from 1 to 2 and the scale chosen for the least variance.

    Only t = 1 keeps delta = 0, and only t = 1 is tried where an entry changes by more than 4096 steps.
    """
    setting = _setting(shape, sensitivity, budget, FINE)
    (shift, cells), *others = setting.groups
    if shift > MOST_STEPS:
        return setting.law_of(1.0)

    def best(delta: float) -> tuple[float, float]:
        found = best_exponent(budget.epsilon, delta, shift, cells, tuple(others))
        return found.exponent, found.scale_in_steps

    # "laplace" has a finer grid where the bound is not a whole number
    return min(setting.law(best), _laplace(shape, sensitivity, budget), key=Product.expected_squared_error)


@recipe("discrete-gaussian", source="canonne2020discrete")
def discrete_gaussian(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product:
    """Discrete Gaussian noise: P(j) prop. to exp(-(j/scale)^2) on a grid, with the least scale that keeps the budget.

    Source: canonne2020discrete.
    Deviates: (1) the scale is solved for the exact profile at (epsilon, delta), several cells included; (2) drawn from
        tables, without rejection.
    """
    setting = _setting(shape, sensitivity, budget, FINE)
    shift, _ = setting.groups[0]
    if shift > MOST_STEPS:
        raise NotApplicable(
            f"discrete-gaussian is for changes of at most {MOST_STEPS} steps of a grid, got {shift}; if the values of "
            "an L1 set are whole multiples of a step, name it: L1(radius, step=1)"
        )
    return setting.law_of(2.0)
