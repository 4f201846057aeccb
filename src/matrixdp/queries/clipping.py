"""Clipping that enforces a sensitivity.

Clipping is floating-point-safe: a clipped record obeys its bound in exact arithmetic, whatever its size, and the radius
of a set is rounded up. Norm clipping therefore stops a few units in the last place short of the norm.

A clipped record depends on that record alone, to the last bit: not on its position, the other records, the memory
layout or the machine. Every operation is correctly rounded by IEEE 754, entry by entry, and the squares of a record are
added in a fixed order. `matrixdp.queries.exact_sums` adds clipped records without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE, REPLACE
from matrixdp.errors import InvalidInput

# Squares of bounds, and sums of billions of them, stay far from overflow and underflow inside these limits.
SMALLEST, LARGEST = 1e-30, 1e30
# How many entries are processed at a time: half a megabyte, which stays in the cache.
ENTRIES = 1 << 16
# Scales any float so that its square is finite; the square of a scaled float does not vanish if it overflowed before.
FAR = 2.0**-600


@dataclass(frozen=True)
class Ball:
    """Records of norm at most `norm`; longer ones are scaled down to it."""

    norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", _check.positive("norm", self.norm))
        if not SMALLEST <= self.norm <= LARGEST:
            raise InvalidInput(f"norm must lie between {SMALLEST} and {LARGEST}, got {self.norm}; rescale the records")

    def clip(self, records: Array) -> Array:
        """The records, each scaled down if needed so that its norm is at most the bound in exact arithmetic."""
        # Above twice the rounding error of a norm, so that neither the test nor the scaling can be wrong by rounding.
        slack = (records.shape[1] + 16) * np.finfo(np.float64).eps
        bound = self.norm * (1 - slack)
        with np.errstate(over="ignore", under="ignore"):  # an overflow means too long; underflow does no harm
            norms = _norms(records)
            longest = norms.max()
            if longest <= bound:
                return records
            if not longest < math.inf:
                far, records = np.isinf(norms), records.copy()
                near = records[far] * FAR
                records[far] = near * (2 * self.norm / _norms(near))[:, None]
                norms = _norms(records)
            shares = bound / np.maximum(norms, bound)  # exactly 1 for a record that is short enough
            clipped: Array = records * shares[:, None]
        return clipped


def center_of(center: Any, shape: tuple[int, ...]) -> Array:
    """A public center of records, near enough to 0 that no record overflows when it is subtracted."""
    middle = _check.broadcast("center", center, shape)
    if not np.all(np.abs(middle) <= LARGEST):
        raise InvalidInput(f"center must lie within {LARGEST} of 0; rescale the records")
    return middle


def centred(records: Array, low: Any, high: Any) -> Array:
    """The records clipped to public bounds and mapped so that these become -1 and 1.

    They are clipped first, so that no record overflows, however large: the warning would reveal it.
    """
    middle, half = (np.asarray(high) + low) / 2, (np.asarray(high) - low) / 2
    scaled: Array = np.clip((np.clip(records, low, high) - middle) / half, -1.0, 1.0)
    return scaled


@dataclass(frozen=True, eq=False)
class Box:
    """Records with low <= entry <= high, one bound for all columns or one per column; other entries are clipped."""

    low: Array
    high: Array

    def clip(self, records: Array) -> Array:
        """The records, each entry moved into its interval."""
        return np.clip(records, self.low, self.high)

    def widths(self, adjacency: str, divisor: int = 1) -> Any:
        """How far one record can move each entry of a sum divided by the divisor, rounded up; a number or one each."""
        ends = [(Fraction(float(a)), Fraction(float(b))) for a, b in np.broadcast(self.low, self.high)]
        reach = [max(abs(a), abs(b)) if adjacency != REPLACE else b - a for a, b in ends]
        bounds = [at_least(width / divisor) for width in reach]
        return bounds[0] if self.low.ndim == self.high.ndim == 0 else np.array(bounds)


def region(norm: Any, low: Any, high: Any, columns: int) -> Ball | Box:
    """What records are clipped to: a ball by `norm`, or a box by `low` and `high`.

    Raises:
        InvalidInput: unless exactly one of the two is given, and fits the number of columns.
    """
    if (norm is None) == (low is None and high is None):
        raise InvalidInput(
            "give either norm, or low and high, and not both: without a bound one record could change the value "
            "by any amount, and the bound has to be known without the data"
        )
    if norm is not None:
        return Ball(norm)
    ends = []
    for name, end in (("low", low), ("high", high)):
        if end is None:
            raise InvalidInput(f"{name} is missing; a box needs both low and high")
        values = (
            np.asarray(_check.number(name, end))
            if _check.array_of(name, end).ndim == 0
            else _check.broadcast(name, end, (columns,))
        )
        if not np.all(np.abs(values) <= LARGEST):
            raise InvalidInput(f"{name} must lie between {-LARGEST} and {LARGEST}; rescale the records")
        ends.append(values)
    if not np.all(ends[1] > ends[0]):
        raise InvalidInput("high must be above low in every column")
    return Box(ends[0], ends[1])


def divisor(size: Any, adjacency: str) -> int | None:
    """The public number that a mean divides by; None for the number of records, where that is public.

    Raises:
        InvalidInput: under ADD_REMOVE without a size, since there the number of records is itself private.
    """
    if size is None:
        if adjacency != ADD_REMOVE:
            return None
        raise InvalidInput(
            "size is missing: a public constant to divide by, known without the data. Under add/remove the number of "
            "records is private, and dividing by it is not covered by the guarantee. If that number is public, use "
            'adjacency="replace"; if it is not, release queries.sum and a count (queries.histogram) and divide them'
        )
    return checked_size(size)


def checked_size(size: Any) -> int:
    """A public number to divide by."""
    if not _check.count("size", size) < 2**63:
        raise InvalidInput("size must be below 2^63; it is a number of records")
    return int(size)


def at_least(exact: Fraction) -> float:
    """The smallest float that is not below an exact number."""
    nearest = float(exact)
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


def root_at_least(exact: Fraction) -> float:
    """The square root of an exact number, rounded up."""
    root = math.sqrt(exact)
    while not Fraction(root) ** 2 >= exact:
        root = math.nextafter(root, math.inf)
    return root


def _norms(records: Array) -> Array:
    norms = np.empty(len(records))
    height = max(ENTRIES // records.shape[1], 1)
    for first in range(0, len(records), height):
        squares = np.square(records[first : first + height].T, order="C")
        while len(squares) > 1:
            half = (len(squares) + 1) // 2
            squares[: len(squares) - half] += squares[half:]
            squares = squares[:half]
        norms[first : first + height] = np.sqrt(squares[0])
    return norms
