"""Checks of arguments. Each predicate is written so that NaN fails, and each message says what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp.errors import InvalidInput

Array = npt.NDArray[np.float64]
Shape = tuple[int, ...]

# Lengths and standard deviations lie in this range, so that no square of them overflows or loses digits.
SMALLEST, LARGEST = 1e-75, 1e75


def number(name: str, value: Any) -> float:
    """A finite real number; booleans and strings are not numbers here."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise InvalidInput(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise InvalidInput(f"{name} must be finite, got {value!r}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    if not number(name, value) > 0:
        raise InvalidInput(f"{name} must be above 0, got {value!r}")
    return float(value)


def length(name: str, value: Any) -> float:
    """A positive number that can be squared safely: a radius, a bound, a standard deviation."""
    if not SMALLEST <= positive(name, value) <= LARGEST:
        raise InvalidInput(f"{name} must lie between {SMALLEST:g} and {LARGEST:g}, got {value!r}; change the units")
    return float(value)


def lengths(name: str, values: Array) -> Array:
    """An array of such numbers, made read-only."""
    if not (np.all(values >= SMALLEST) and np.all(values <= LARGEST)):
        raise InvalidInput(
            f"{name} must be above 0 (between {SMALLEST:g} and {LARGEST:g}) in every entry, "
            f"they go from {values.min()!r} to {values.max()!r}"
        )
    values.flags.writeable = False
    return values


def norm(array: Array) -> float:
    """The Frobenius norm, by pairwise sums: their error hardly grows with the number of entries, that of BLAS does."""
    return math.sqrt(float(np.sum(np.square(array))))


def at_least_zero(name: str, value: Any) -> float:
    """A finite number, 0 or above."""
    if not number(name, value) >= 0:
        raise InvalidInput(f"{name} must be 0 or above, got {value!r}")
    return float(value)


def probability(name: str, value: Any) -> float:
    """A number strictly between 0 and 1."""
    if not 0 < number(name, value) < 1:
        raise InvalidInput(f"{name} must lie strictly between 0 and 1, got {value!r}; 1e-6 is a common choice")
    return float(value)


def count(name: str, value: Any) -> int:
    """A whole number, 1 or above."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not int(value) >= 1:
        raise InvalidInput(f"{name} must be a whole number, 1 or above, got {value!r}")
    return int(value)


def choice(name: str, value: Any, options: Iterable[str]) -> str:
    """One of the listed words."""
    listed = list(options)
    if not isinstance(value, str) or value not in listed:
        raise InvalidInput(f"{name} must be one of {', '.join(listed)}, got {value!r}")
    return value


def shape(value: Any) -> Shape:
    """The shape of a released value: (n,) or (rows, columns)."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) not in (1, 2):
        raise InvalidInput(f"shape must be (n,) or (rows, columns), got {value!r}")
    return tuple(count("each entry of shape", side) for side in value)


def finite(name: str, value: Any, *, ndim: int | tuple[int, ...] = (1, 2)) -> Array:
    """A non-empty array of finite real numbers as float64, never a view that a caller could change later."""
    given = np.asarray(value)
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidInput(f"{name} must not be a masked array; fill or drop what is masked first")
    if given.dtype.kind not in "iuf":
        raise InvalidInput(f"{name} must be an array of real numbers, got dtype {given.dtype}; convert it first")
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if given.ndim not in allowed:
        dimensions = " or ".join(str(d) for d in allowed)
        raise InvalidInput(f"{name} must have {dimensions} dimensions, got {given.ndim} (shape {given.shape})")
    if not given.size > 0:
        raise InvalidInput(f"{name} must not be empty, got shape {given.shape}")
    if given.dtype.kind in "iu" and given.dtype.itemsize == 8 and max(int(given.max()), -int(given.min())) > 2**53:
        raise InvalidInput(f"{name} holds whole numbers above 2^53, which floats cannot tell apart; scale it first")
    array = np.array(given, dtype=np.float64)
    bad = ~np.isfinite(array)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise InvalidInput(
            f"{name} must be finite, got {array[place]} at {place} ({int(bad.sum())} such entries); "
            "drop or fill those records before the query"
        )
    return array


def broadcast(name: str, value: Any, target: Shape) -> Array:
    """A number, or an array of the target shape, as a finite array of that shape."""
    array = np.asarray(number(name, value)) if np.ndim(value) == 0 else finite(name, value)
    if array.shape not in ((), target):
        raise InvalidInput(f"{name} must have shape {target} or be a single number, got shape {array.shape}")
    return np.broadcast_to(array, target)
