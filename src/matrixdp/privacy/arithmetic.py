"""Two arithmetics with one interface, so that formulas are written once for floats and arrays; and exact operations.

Formulas take `Floats` (fast for one setting) or `Arrays` (one vectorised solve) as an argument `xp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import scipy

from matrixdp.errors import InvalidInput, NumericalFailure

Real = Any  # a float, or a one-dimensional float64 array, as the arithmetic says

_BLOCK = 8192  # entries of an array worked on at a time: they stay in the cache
_ITERATIONS = 40  # at most 5 were observed for useful arguments, 7 outside


class Floats:
    """Python floats."""

    exp, log, sqrt = math.exp, math.log, math.sqrt
    maximum, minimum, nextafter = max, min, math.nextafter

    @staticmethod
    @cache
    def special() -> Any:
        """Special functions, loaded when first needed, as loading them takes longer than the rest of the package."""
        from scipy.special import cython_special

        return cython_special

    @staticmethod
    def where(condition: bool, value: float, other: float) -> float:
        """`value` if the condition holds, else `other`."""
        return value if condition else other

    @staticmethod
    def choose(condition: bool, then: Callable[..., Real], otherwise: Callable[..., Real], *arguments: float) -> Real:
        """`then(...)` where the condition holds, `otherwise(...)` elsewhere."""
        return then(Floats, *arguments) if condition else otherwise(Floats, *arguments)

    @staticmethod
    def solve(step: Callable[..., Real], start: float, *data: float) -> float:
        """The first iterate that the step accepts; a step returns whether it does, and the next iterate."""
        for _ in range(_ITERATIONS):
            accepted, following = step(Floats, start, *data)
            if accepted:
                return start
            start = following
        raise _no_root(step, data)


class Arrays:
    """One-dimensional arrays, entry by entry."""

    exp, log, sqrt, where = np.exp, np.log, np.sqrt, np.where
    maximum, minimum, nextafter = np.maximum, np.minimum, np.nextafter

    @staticmethod
    def special() -> Any:
        """Special functions, loaded when first needed."""
        return scipy.special

    @staticmethod
    def choose(condition: Real, then: Callable[..., Real], otherwise: Callable[..., Real], *arguments: Real) -> Real:
        """As for floats; each function sees only its own entries."""
        result = np.empty(condition.shape)
        for mask, function in ((condition, then), (~condition, otherwise)):
            chosen = np.flatnonzero(mask)
            if chosen.size:
                result[chosen] = function(Arrays, *(argument[chosen] for argument in arguments))
        return result

    @staticmethod
    def solve(step: Callable[..., Real], start: Real, *data: Real) -> Real:
        """As for floats; an entry leaves the iteration when it is accepted."""
        result = np.empty(start.shape)
        places = np.arange(start.size)
        for _ in range(_ITERATIONS):
            accepted, following = step(Arrays, start, *data)
            result[places[accepted]] = start[accepted]
            left = np.flatnonzero(~accepted)
            if not left.size:
                return result
            places, start = places[left], following[left]
            data = tuple(entries[left] for entries in data)
        raise _no_root(step, tuple(float(entries[0]) for entries in data))


def _no_root(step: Callable[..., Real], data: tuple[float, ...]) -> NumericalFailure:
    return NumericalFailure(f"no root in {_ITERATIONS} iterations of {step.__name__} for {data}; please report it")


def divide_up(xp: Any, x: Real, power_of_two: Real) -> Real:
    """The least float that is at least x / power_of_two; only an underflow can round."""
    quotient = x / power_of_two
    return xp.where(quotient * power_of_two < x, xp.nextafter(quotient, math.inf), quotient)


# --- exact sums and products (Knuth, Dekker): the rounded result and the rounding error ---


def two_sum(x: Real, y: Real) -> tuple[Real, Real]:
    """x + y, rounded, and the rounding error."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _split(x: Real) -> tuple[Real, Real]:
    """x as a sum of two floats of at most 26 bits."""
    shifted = 134217729.0 * x  # 2^27 + 1
    high = shifted - (shifted - x)
    return high, x - high


def two_product(x: Real, y: Real) -> tuple[Real, Real]:
    """x * y, rounded, and the rounding error."""
    product = x * y
    (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
    return product, ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low


def evaluate(function: Callable[..., Real], given: Mapping[str, Real]) -> Any:
    """A function `f(xp, ...)` of the given arguments: a float for floats, otherwise an array, a block at a time."""
    if all(type(value) is float for value in given.values()):
        return function(Floats, *given.values())
    try:
        arrays = np.broadcast_arrays(*given.values())
    except ValueError:
        shapes = " and ".join(f"{name} {np.shape(value)}" for name, value in given.items())
        raise InvalidInput(f"the shapes must broadcast together, got {shapes}") from None
    flat = [np.ravel(array) for array in arrays]
    result = np.empty(flat[0].size)
    with np.errstate(all="ignore"):  # intermediate overflows and underflows lead to the right limit
        for first in range(0, result.size, _BLOCK):
            block = slice(first, first + _BLOCK)
            result[block] = function(Arrays, *(entries[block] for entries in flat))
    return result.reshape(arrays[0].shape)
