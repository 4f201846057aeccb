"""Independent discrete noise, where few entries change: discrete Laplace, and the laws between it and the Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Product
from matrixdp.errors import NotApplicable
from matrixdp.mechanisms.base import recipe
from matrixdp.privacy.discrete import best_exponent, scale_for
from matrixdp.privacy.guarantee import with_total_variation
from matrixdp.secure.discrete import Tabled
from matrixdp.sensitivity import Counts, Entrywise, Sensitivity

# The share of delta that is left for the total-variation error of the tables; more where e^epsilon makes that larger.
ROOM = 5e-7
# More than the error of the tables for an entry, which takes milliseconds to build; a release counts the true one.
USUAL_ERROR = 1e-18
# Steps of the grid in a bound that is no whole number, or whose values may have been rounded.
FINENESS = {"laplace": 1024, "discrete": 64}
# Budgets whose profiles are computed.
LARGEST_EPSILON, LEAST_DELTA = 500.0, 1e-200
# With more entries than this that change, Gaussian noise is at least as good.
MOST_CELLS = 64


def _change(shape: Shape, sensitivity: Sensitivity, budget: Budget, fineness: int) -> tuple[float, int, int]:
    """The step of the grid, a power of two, and how many entries change by how many steps."""
    if not isinstance(sensitivity, (Counts, Entrywise)):
        raise NotApplicable("is for sets where few entries change by one bound: Counts, or Entrywise with one bound")
    if not (budget.epsilon <= LARGEST_EPSILON and budget.delta >= LEAST_DELTA):
        raise NotApplicable(f"is for epsilon up to {LARGEST_EPSILON:g} and delta from {LEAST_DELTA:g}, got {budget}")
    counts = isinstance(sensitivity, Counts)
    cells = sensitivity.worst_cells(shape) if isinstance(sensitivity, Counts) else sensitivity.changed_entries(shape)
    if not cells <= MOST_CELLS:
        raise NotApplicable(f"is for at most {MOST_CELLS} entries that change, got {cells}; Gaussian noise is as good")
    bound = sensitivity.largest_entry(shape)
    if isinstance(sensitivity, Entrywise) and np.min(sensitivity.bounds(shape)) < bound:
        raise NotApplicable("is for entries with one bound")
    spread = isinstance(sensitivity, Counts) and sensitivity.spread  # then a coarser step could move many entries
    whole = counts and float(bound).is_integer() and (bound <= fineness or spread)
    step = 1.0 if whole else 2.0 ** math.floor(math.log2(bound / fineness))
    return step, math.ceil(bound / step) + (0 if counts else 1), cells  # as the certificate counts them


def _with_room(budget: Budget, cells: int, make: Callable[[float], Product]) -> Product:
    """The law for so much of delta that the total-variation error of its tables fits beside it."""
    law = make(budget.delta * (1 - ROOM))
    if with_total_variation(0.0, budget.epsilon, cells * USUAL_ERROR) <= 0.5 * ROOM * budget.delta:
        return law
    error = cells * Tabled(law.exponent, law.scale_in_steps).total_variation
    added = with_total_variation(0.0, budget.epsilon, error)
    if added <= 0.5 * ROOM * budget.delta:
        return law
    left = budget.delta - 2 * added
    if not left > 0:
        raise NotApplicable(f"has tables with an error of {added:.2g} in delta at this epsilon, too large for {budget}")
    return make(left)


@recipe("laplace", source="ghosh2012universally")
def laplace(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product:
    """Discrete Laplace noise: whole multiples of a step, of the least scale that keeps the budget.

    Source: ghosh2012universally for one count.
    Deviates: (1) the scale is solved for the exact profile at (epsilon, delta), several cells included.
    """
    step, shift, cells = _change(shape, sensitivity, budget, FINENESS["laplace"])

    def make(delta: float) -> Product:
        return Product(shape, step, 1.0, scale_for(budget.epsilon, delta, shift, cells) * step)

    return _with_room(budget, sensitivity.changed_entries(shape), make)


@recipe("discrete", source="matrixdp, privacy/discrete.py")
def discrete(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product:
    """Noise prop. to exp(-(|j|/scale)^t) on a grid, with the t from 1 to 2 and the scale of the least variance."""
    step, shift, cells = _change(shape, sensitivity, budget, FINENESS["discrete"])

    def make(delta: float) -> Product:
        found = best_exponent(budget.epsilon, delta, shift, cells)
        return Product(shape, step, found.exponent, found.scale_in_steps * step)

    return _with_room(budget, sensitivity.changed_entries(shape), make)
