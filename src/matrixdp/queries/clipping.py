"""Clipping that enforces a sensitivity, and sums that keep to it.

Clipping is safe in floating point: after it a record obeys its bound in exact arithmetic, whatever its size, and the
radius of a set is rounded up. Norm clipping therefore stops a few units in the last place short of the norm.

What is left is the rounding of a sum: the sets speak of exact sums. `total` adds blocks of 256 records pair by pair, so
a computed sum of n records of norm at most r lies within (256 + log2 n + 2) 2^-53 n r of the exact one, and two
neighbours' sums differ by a member of the set plus an error of norm at most 7e-14 n r (r^2 for second moments; divided
as the value is): 7e-8 of the radius for a million records. A certificate does not count it; under isotropic noise it
raises mu by at most that fraction. Under "replace" a box much narrower than it is far from 0 fares worse, since its
radius is the width while r is the distance: subtract a public offset from such records first.

Source: casacuberta2022widespread (why the order and rounding of a sum belong to its sensitivity).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput
from matrixdp.queries.records import DataDependentBound

# Squares of bounds, and sums of billions of them, stay far from overflow and underflow inside these limits.
SMALLEST, LARGEST = 1e-30, 1e30
BLOCK = 256
# Takes any float to where its square is finite, and one whose square is not to where it does not vanish either.
FAR = 2.0**-600


@dataclass(frozen=True)
class Ball:
    """Records of norm at most `norm`; longer ones are shortened to it."""

    norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", _check.positive("norm", self.norm))
        if not SMALLEST <= self.norm <= LARGEST:
            raise InvalidInput(f"norm must lie between {SMALLEST} and {LARGEST}, got {self.norm}; rescale the records")

    def clip(self, records: Array) -> Array:
        """The records, each shortened if needed so that its norm is at most the bound in exact arithmetic."""
        # Above twice the rounding error of a norm, so that neither the test nor the scaling can be wrong by rounding.
        slack = (records.shape[1] + 16) * np.finfo(np.float64).eps
        bound = self.norm * (1 - slack)
        with np.errstate(over="ignore", under="ignore"):  # an overflow means too long, what underflows is no matter
            norms = _norms(records)
            longest = norms.max()
            if math.isclose(longest, self.norm, rel_tol=1e-12) and not _natural(self.norm) and _differ(records):
                _warn(f"norm={self.norm:g} is the largest norm among the records")
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


@dataclass(frozen=True, eq=False)
class Box:
    """Records with low <= entry <= high, one bound for all columns or one each; entries outside move to the end."""

    low: Array
    high: Array

    def clip(self, records: Array) -> Array:
        """The records, each entry moved into its interval."""
        warn_of_ends("low and high", self.low, self.high, records, stacklevel=4)
        return np.clip(records, self.low, self.high)

    def widths(self, relation: str, divisor: int = 1) -> Any:
        """How far one record can move each entry of a sum over the divisor, rounded up: a number, or one a column."""
        ends = [(Fraction(float(a)), Fraction(float(b))) for a, b in np.broadcast(self.low, self.high)]
        reach = [max(abs(a), abs(b)) if relation == "add/remove" else b - a for a, b in ends]
        bounds = [at_least(width / divisor) for width in reach]
        return bounds[0] if self.low.ndim == self.high.ndim == 0 else np.array(bounds)


def region(norm: Any, low: Any, high: Any, columns: int) -> Ball | Box:
    """What records are clipped to: a ball by `norm`, or a box by `low` and `high`.

    Raises:
        InvalidInput: unless exactly one of the two is given, and fits the number of columns.
    """
    if (norm is None) == (low is None and high is None):
        raise InvalidInput(
            "give either norm, or low and high, and not both: without a bound one record could change anything, "
            "and the bound has to be known without looking at the data"
        )
    if norm is not None:
        return Ball(norm)
    ends = []
    for name, end in (("low", low), ("high", high)):
        if end is None:
            raise InvalidInput(f"{name} is missing; a box needs both low and high")
        values = np.asarray(_check.number(name, end)) if np.ndim(end) == 0 else _check.broadcast(name, end, (columns,))
        if not np.all(np.abs(values) <= LARGEST):
            raise InvalidInput(f"{name} must lie between {-LARGEST} and {LARGEST}, got {end!r}; rescale the records")
        ends.append(values)
    if not np.all(ends[1] > ends[0]):
        raise InvalidInput(f"high must be above low in every column, got low {low!r}, high {high!r}")
    return Box(ends[0], ends[1])


def divisor(size: Any, count: int, relation: str) -> int:
    """The public number that a mean divides by: `size`, or under "replace" the number of records.

    Raises:
        InvalidInput: under "add/remove" without a size, since there the number of records is itself private.
    """
    if size is None:
        if relation == "replace":
            return count
        raise InvalidInput(
            'relation="add/remove" needs a size, a public constant to divide by: the number of records is private '
            'there, and dividing by it is not covered by the guarantee. Or use relation="replace"'
        )
    constant = _check.count("size", size)
    if relation == "add/remove" and constant == count and not _plain(constant):
        _warn(f"size={constant} is the number of records, which is private under add/remove")
    return constant


def total(part: Callable[[Array], Array], records: Array) -> Array:
    """The sum of `part` over blocks of records, added by halves so that rounding does not grow with their number."""
    if len(records) <= BLOCK:
        return part(records)
    half = len(records) // 2
    return total(part, records[:half]) + total(part, records[half:])


def add(records: Array) -> Array:
    """The sum of a block of records."""
    vector: Array = records.sum(axis=0)
    return vector


def gram(records: Array) -> Array:
    """The second moment of a block of records."""
    return records.T @ records


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


def warn_of_ends(name: str, low: Array, high: Array, records: Array, stacklevel: int) -> None:
    """Warns if an end is the smallest or largest entry, in every column it stands for, and not a plain number."""
    for end, extreme in ((low, np.min), (high, np.max)):
        seen = extreme(records, axis=0 if end.ndim else None)
        if np.all(end == seen) and not all(_plain(float(value)) for value in end.flat) and _differ(records):
            _warn(f"{name}: an end is the smallest or largest entry of the records", stacklevel + 1)
            return


def warn_of_center(center: Array, records: Array) -> None:
    """Warns if a center is the mean of the records, and not made of plain numbers."""
    with np.errstate(over="ignore"):
        mean = records.mean(axis=0)
    if np.allclose(center, mean, rtol=1e-12, atol=0) and not all(map(_plain, center)) and _differ(records):
        _warn("center is the mean of the records")


def _norms(records: Array) -> Array:
    norms: Array = np.sqrt(np.einsum("ij,ij->i", records, records))
    return norms


def _differ(records: Array) -> bool:
    return bool(np.any(records != records[0]))


def _plain(value: float) -> bool:
    """At most three significant digits: a number that people choose, and that need not come from the data."""
    return float(f"{value:.3g}") == value


def _natural(norm: float) -> bool:
    """Plain, or the root of a plain number, as the norm of a vector of ones is."""
    return _plain(norm) or _plain(float(f"{norm**2:.12g}"))


def _warn(what: str, stacklevel: int = 4) -> None:
    warnings.warn(
        f"{what}; a bound taken from the data reveals it, and the guarantee does not hold. Choose bounds from what is "
        "known without the data; if this one was, ignore this warning",
        DataDependentBound,
        stacklevel=stacklevel,
    )
