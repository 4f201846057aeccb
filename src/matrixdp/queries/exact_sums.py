"""Sums of clipped records without rounding, so that a neighbour changes them by no more than the bound.

A sum in floating point depends on the order of the records, and its rounding error grows with their number: one record
can change it by more than its norm. Here a sum is computed in three steps.

1. Every record is truncated, by itself: its entries are rounded towards zero to whole multiples of a step, the power of
   two at or above the bound times 2^-53 (second moments: 2^-42). No entry and no norm grows, so a clipped record stays
   within its bound. Only a box, under replace, can become wider, by less than a step; its width is that of the
   truncated ends, rounded up.
2. The multiples are added as integers. Integer sums are exact in any order, so the sum depends on the records alone,
   not on their order, blocks, threads or partitions. The sums of two neighbours differ by one truncated record
   (replace: by the difference of two), for any number of records.
3. The sum, or its quotient by a public number, becomes the nearest float: one rounding of relative error 2^-53, which
   `matrixdp.secure.grid.Grid.displacement` and `Covariance.whitening_error` account for.

Truncation moves a sum of n records by at most n steps per entry: 2e-7 of the bound for a billion records. It moves a
second moment by at most twice n steps times the bound: 9e-4 of the squared bound for a billion. Both are far less than
the noise, and change the released value, not its privacy.

The integers are added by floating-point units, which are exact on integers up to 2^53. An entry of a record is written
as u 2^b + v, with integers u and v of a and b bits and one sign. For sums a = 26, b = 27, so that 2^26 records can be
added in float64. For second moments a = b = 21, and with U and V for the matrices of u and v

    X^T X = 2^42 U^T U + 2^21 ((U + V)^T (U + V) - U^T U - V^T V) + V^T V.

As |u| <= 2^21, |v| < 2^21 and |u + v| < 2^22, no entry of these products of up to 512 records exceeds
512 * 2^44 = 2^53, nor does a part of its sum. So in whatever order a matrix product multiplies and adds, fused or not,
it computes integers that float64 holds.

Source: ozaki2012error (exact matrix products from split factors); casacuberta2022widespread (why the order and rounding
    of a sum belong to its sensitivity).
Deviates: 1. one step for all records, so that sums over many products are exact too; 2. two slices hold a whole record,
    not its leading part; 3. the mixed product is that of U + V less the other two, since a symmetric one is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp._check import Array
from matrixdp.queries.clipping import ENTRIES, Ball, Box

Whole = npt.NDArray[np.int64]

SUM_DIGITS = 26, 27
MOMENT_DIGITS = 21, 21
"""The bits of u and of v in an entry of a record."""

ROWS = 512
"""Records in a matrix product, at most."""

GROUP = 1 << 18
"""Records whose products are added in int64, at most: 2^9 blocks of ROWS, each at most 2^53."""

LIMB = 62
"""Bits of the lower half of an integer."""


@dataclass(frozen=True, eq=False)
class Integers:
    """An array of integers high * 2^62 + low, 0 <= low < 2^62, that add up exactly.

    A sum of n records has 53 bits plus those of n, a second moment 84 plus those of n: up to 2^40 records fit.
    """

    high: Whole
    low: Whole

    @classmethod
    def of(cls, values: Whole, shift: int) -> Integers:
        """The integers values * 2^shift, with a shift below 62."""
        rest = LIMB - shift
        return cls(values >> rest, (values & ((1 << rest) - 1)) << shift)

    def __add__(self, other: Integers) -> Integers:
        low = self.low + other.low  # below 2^63
        return Integers(self.high + other.high + (low >> LIMB), low & ((1 << LIMB) - 1))

    def __getitem__(self, place: Any) -> Integers:
        return Integers(self.high[place], self.low[place])

    def exact(self) -> npt.NDArray[np.object_]:
        """The integers, of any size."""
        exact: npt.NDArray[np.object_] = (self.high.astype(object) << LIMB) + self.low.astype(object)
        return exact


def vector(records: Array, bounds: Ball | Box) -> Integers:
    """The sum of the clipped and truncated records, in steps."""
    total = _zeros(records.shape[1])
    for upper, lower in _digits(records, bounds, SUM_DIGITS):
        total += Integers.of(_whole(upper.sum(axis=0)), SUM_DIGITS[1]) + Integers.of(_whole(lower.sum(axis=0)), 0)
    return total


def vector_value(total: Integers, bounds: Ball | Box, divisor: int) -> Array:
    """The floats nearest to a sum divided by the divisor."""
    return _nearest(total.exact(), divisor, _exponents(bounds) - sum(SUM_DIGITS))


def moments(records: Array, ball: Ball) -> Integers:
    """The second moment of the clipped and truncated records, in squared steps, and below it their sum, in steps."""
    columns = records.shape[1]
    total = _zeros(columns + 1, columns)
    for first in range(0, len(records), GROUP):
        total += _moments(records[first : first + GROUP], ball)
    return total


def _moments(records: Array, ball: Ball) -> Integers:
    """`moments` of at most GROUP records."""
    columns, shift = records.shape[1], MOMENT_DIGITS[1]
    high, both, low = np.zeros((3, columns + 1, columns), dtype=np.int64)
    for upper, lower in _digits(records, ball, MOMENT_DIGITS):
        joint = upper + lower
        for total, part in ((high, upper), (both, joint), (low, lower)):
            for first in range(0, len(part), ROWS):
                block = part[first : first + ROWS]
                total[:-1] += _whole(block.T @ block)
        both[-1] += _whole(joint.sum(axis=0))
        low[-1] += _whole(lower.sum(axis=0))
    return Integers.of(high, 2 * shift) + Integers.of(both - high - low, shift) + Integers.of(low, 0)


def moment_value(total: Integers, ball: Ball, divisor: int) -> Array:
    """The floats nearest to a second moment divided by the divisor."""
    return _symmetric(total[_above(total)].exact(), divisor, ball)


def scatter_value(total: Integers, ball: Ball, count: int, divisor: int) -> Array:
    """The floats nearest to the scatter of `count` records about their mean, divided by the divisor.

    With M for the second moment and s for the sum the scatter is M - s s^T / count, here (count M - s s^T) / count.
    """
    row, column = _above(total)
    vector = total[-1].exact()
    numerators = count * total[row, column].exact() - vector[row] * vector[column]
    return _symmetric(numerators, count * divisor, ball)


def _above(total: Integers) -> tuple[Whole, ...]:
    """The places on and above the diagonal of the second moment."""
    return np.triu_indices(total.low.shape[1])


def _symmetric(numerators: npt.NDArray[np.object_], divisor: int, ball: Ball) -> Array:
    """The symmetric matrix of the quotients, in units of the records, from the entries on and above its diagonal."""
    values = _nearest(numerators, divisor, 2 * (_exponents(ball) - sum(MOMENT_DIGITS)))
    columns = math.isqrt(2 * len(values))
    row, column = np.triu_indices(columns)
    matrix = np.empty((columns, columns))
    matrix[row, column] = matrix[column, row] = values
    return matrix


def truncated(box: Box) -> Box:
    """The smallest box that holds the truncated records of a box: truncation keeps the order of two numbers."""
    exponents = sum(SUM_DIGITS) - _exponents(box)
    ends = (np.ldexp(np.trunc(np.ldexp(end, exponents)), -exponents) for end in (box.low, box.high))
    return Box(*ends)


def _digits(records: Array, bounds: Ball | Box, bits: tuple[int, int]) -> Iterator[tuple[Array, Array]]:
    """The matrices of u and v, some records at a time."""
    scale = np.ldexp(1.0, bits[0] - _exponents(bounds))
    height = max(ENTRIES // records.shape[1] // ROWS, 1) * ROWS
    for first in range(0, len(records), height):
        # column by column in memory, so that each operation runs over many records at once
        clipped = bounds.clip(np.asfortranarray(records[first : first + height]))
        with np.errstate(under="ignore"):  # what underflows is truncated to 0
            rest = clipped * scale
        upper = np.trunc(rest)
        rest -= upper
        rest *= 2.0 ** bits[1]
        yield upper, np.trunc(rest, out=rest)


def _exponents(bounds: Ball | Box) -> Whole:
    """The exponent of the least power of two at or above any entry: one for all columns, or one per column."""
    reach = bounds.norm if isinstance(bounds, Ball) else np.maximum(np.abs(bounds.low), np.abs(bounds.high))
    return np.asarray(np.frexp(np.nextafter(reach, 0.0))[1])


def _nearest(numerators: npt.NDArray[np.object_], divisor: int, exponents: Whole) -> Array:
    """The floats nearest to numerators * 2^exponents / divisor: Python rounds a quotient of integers correctly."""
    quotients = (numerators / divisor).astype(np.float64)
    return np.asarray(np.ldexp(quotients, exponents))


def _whole(integers: Array) -> Whole:
    return integers.astype(np.int64)


def _zeros(*shape: int) -> Integers:
    return Integers(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))
