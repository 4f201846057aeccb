"""Alias tables of exact integer probabilities for discrete Laplace and generalised Gaussian noise, at any scale.

The noise K has P(K = j) prop. to exp(-(|j|/s)^t) on the whole numbers. Small scales need one table of |K| and a sign.
Larger scales are composed of independent tables:

1. *Discrete Laplace (t = 1), any scale.* K = A - B with A, B geometric, P(A = a) prop. to q^a, q = e^(-1/s). In base m
   write A = sum m^i A_i. As q^A is the product of (q^(m^i))^(A_i), the digits are independent: A_i is geometric with
   ratio r_i = q^(m^i), cut to 0, ..., m - 1, and the last one is geometric and not cut. So

       K = sum m^i D_i,      D_i = A_i - B_i independent,     P(D_i = d) prop. to r_i^|d| - r_i^(2m - |d|),  |d| < m,

   (sum r^(a + b) over a - b = d), and the last D_i is discrete Laplace of scale s/m^i. With m = 2048, two tables reach
   scales of 330,000, three 6.8e8. There is no error but that of the tables.
2. *Discrete Gaussian (t = 2), large scales.* K = 128 K_1 + K_2 with K_2 discrete Gaussian of variance parameter
   (13/8)^2 128^2 and K_1 of the rest. As in fact 2 of grid.py (with g = 128, c = 13/8 and y a whole number, and both
   laws normalised over whole numbers), the probability of every y is that of the discrete Gaussian times
   C (1 + A(y)), |A| <= a = 2q/(1 - q), q = exp(-2 pi^2 v), v = s_1^2 c^2/(s_1^2 + c^2), s_1^2 the variance parameter of
   K_1. As both laws sum to 1, |C (1 + A) - 1| <= 2a/(1 - a), and the total variation is at most half of that.
3. *1 < t < 2.* No split is known: |x|^t is not smooth at 0, so the Fourier transform of the law falls only like a
   power, and no narrow remainder hides a coarse grid. One table of up to 2^16 columns must suffice: (2^16/s)^t >= 50.
   That limits the scale to between 1,300 (t near 1) and 9,300 (t near 2); the privacy of larger ones could be computed,
   but they cannot be drawn.

A table has 2^c columns, c = 11, ..., 16, and serves |K| < 2^c. Probabilities of |K| are whole multiples of 2^-127. A
64-bit word holds a column (c bits), a sign (1 bit) and a number to compare with the column's threshold (63 - c bits);
if it equals the threshold, one word in 2^(63-c), a second word decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.secure.entropy import Words

Whole = npt.NDArray[np.int64]

LEAST_SCALE = 2.0**-10
"""The least scale, in steps: all draws are 0 but about two in e^1024."""

FIXED = 192
"""Bits after the point in the arithmetic that builds tables."""

ONE = 1 << FIXED
"""The number 1 in that arithmetic."""

BASE_BITS = 11
"""The bits of a digit of a geometric variable."""

BASE = 1 << BASE_BITS
"""The base of those digits, and the least number of columns."""

TOTAL = 1 << 127
"""Probabilities of a table are whole multiples of 1 / TOTAL."""

TIE_BITS = 64
"""The bits of the second word, which breaks ties."""

_LEAST_BITS, _MOST_BITS, _SPLIT_BITS = BASE_BITS, 16, 13  # of a column number; wider laws are split if possible
_DEEP = 50.0  # a table ends where probabilities are below e^-50 of the largest
_DIGITS = Context(prec=70)  # 232 bits
_REFINEMENT, _SMOOTH = 128, Fraction(13, 8)  # of a discrete Gaussian that is split
_TAIL = (1 << FIXED - 38) - 1  # the bits after those by which exponentials are looked up
# Added to a total variation for the arithmetic. Its errors are below 2^-140: each of at most 2^16 weights has an error
# below 2^35 units of 2^-192.
_SLACK = Fraction(1, 1 << 110)


@dataclass(frozen=True, eq=False)
class AliasTable:
    """An alias table for a symmetric law on the whole numbers, of 2^c columns.

    Column i holds `threshold << (c + 1) | alias`: a word of that column gives |K| = i if its upper bits are below the
    threshold, and |K| = alias if they are above. If they are equal, it is i for a second word below `ties[i]`.
    """

    packed: Words
    """The columns, read-only."""

    ties: Words
    """The lower 64 bits of the thresholds, read-only."""

    total_variation: float
    """An upper bound on the total-variation distance between the law that the table draws and the ideal one."""

    def numerators(self) -> list[int]:
        """P(|K| = k) for k = 0, 1, ... as whole multiples of 2^-127."""
        columns = self.packed.size
        totals, capacity = [0] * columns, TOTAL // columns
        for column, (packed, tie) in enumerate(zip(self.packed.tolist(), self.ties.tolist(), strict=True)):
            own = packed // (2 * columns) << TIE_BITS | tie
            totals[column] += own
            totals[packed % columns] += capacity - own
        return totals

    def ties_broken(self, words: Words, more: Words) -> Whole:
        """The change of K where a word equals its threshold, and was given the alias: 64 more bits decide."""
        size = np.uint64(self.packed.size)
        columns = words & (size - np.uint64(1))
        chosen = self.packed[columns]
        own = ((words ^ chosen) // (size + size) == 0) & (more < self.ties[columns])
        change = columns.astype(np.int64) - (chosen & (size - np.uint64(1))).astype(np.int64)
        return np.where(own, np.where(words & size, -change, change), 0)


class Remainder(Protocol):
    """What an exact table leaves out of its law."""

    def changes(self, words: Words, more: Words, further: Callable[[int], Iterator[int]]) -> Whole:
        """The change of K where the words of a tie belong to the remainder; `further` has more words for an entry."""


@dataclass(frozen=True, eq=False)
class Digits:
    """K as a sum of independent digits, each drawn from a table and multiplied by 2^shift.

    Guarantee: the law of K is within `total_variation` of P(K = j) prop. to exp(-(|j|/scale)^exponent).
    """

    tables: tuple[AliasTable, ...]
    shifts: tuple[int, ...]
    total_variation: float
    remainders: tuple[Remainder, ...] = ()
    """One per table, if the law is drawn exactly."""


def largest_scale(exponent: float) -> float:
    """The largest scale, in steps, for which there are tables: 2^40 for exponent 1, 2^16 for 2, smaller between."""
    if exponent == 1.0:
        return 2.0**40
    return 2.0**16 if exponent == 2.0 else (1 << _MOST_BITS) / _DEEP ** (1.0 / exponent)


def checked_exponent(exponent: Any) -> float:
    """The exponent, from 1 to 2."""
    if not 1.0 <= _check.number("exponent", exponent) <= 2.0:
        raise InvalidInput(
            f"exponent must lie between 1 (discrete Laplace) and 2 (discrete Gaussian), got {_check.shown(exponent)}"
        )
    return float(exponent)


def checked_scale(exponent: float, scale: Any, name: str = "scale_in_steps") -> float:
    """The scale in steps, which must be in the range for which there are tables."""
    found, largest = _check.positive(name, scale), largest_scale(exponent)
    if not LEAST_SCALE <= found <= largest:
        raise InvalidInput(
            f"{name} must lie between {LEAST_SCALE:.3g} and {largest:.6g} steps for exponent {exponent:g}, got "
            f"{found!r}; use a coarser grid for a larger scale, a finer one for a smaller scale, or exponent 1 or 2"
        )
    return found


@lru_cache(maxsize=32)
def digits(exponent: float, scale: float) -> Digits:
    """The tables of the law with this exponent, from 1 to 2, and this scale in steps.

    Raises:
        InvalidInput: if no tables are known for this law.
    """
    checked_scale(checked_exponent(exponent), scale, "scale")
    if exponent == 1.0:
        return _laplace_digits(scale)
    if exponent == 2.0 and scale * math.sqrt(_DEEP) > 1 << _SPLIT_BITS:
        return _split_gaussian(scale)
    return _together([_generalised(exponent, scale, Fraction(scale))], [0], 0.0)


def _together(tables: Sequence[AliasTable], shifts: Sequence[int], split: float) -> Digits:
    distance = 1.000001 * (sum(table.total_variation for table in tables) + split)
    return Digits(tuple(tables), tuple(shifts), distance)


def _laplace_digits(scale: float) -> Digits:
    """Discrete Laplace noise, by 1. above."""
    found = [alias_table(weights, beyond) for _, weights, beyond in laplace_weights(scale)]
    return _together(found, [BASE_BITS * i for i in range(len(found))], 0.0)


def laplace_weights(scale: float) -> list[tuple[Fraction, list[int], int]]:
    """The digits of discrete Laplace noise: the rate of each, the weights of its sizes, and that of all larger ones."""
    rate, found = 1 / Fraction(scale), []
    while (1 << _SPLIT_BITS) * rate < _DEEP:  # P(d) prop. to r^|d| - r^(2m - |d|) for |d| < m, r = e^-rate
        powers = _powers(exponential(-rate), 2 * BASE + 1)
        found.append((rate, [powers[d] - powers[2 * BASE - d] for d in range(BASE)], 0))
        rate *= BASE
    ratio = exponential(-rate)
    weights = _powers(ratio, 1 << _bits(_DEEP / float(rate)))
    return [*found, (rate, weights, 2 * (weights[-1] * ratio // (ONE - ratio) + 1) if ratio else 0)]


def _powers(ratio: int, count: int) -> list[int]:
    powers = [ONE]
    for _ in range(count - 1):
        powers.append(powers[-1] * ratio >> FIXED)
    return powers


def _split_gaussian(scale: float) -> Digits:
    """Discrete Gaussian noise, by 2. above; exp(-(k/scale)^2) has the variance parameter scale^2 / 2."""
    fine_squared = 2 * _SMOOTH**2 * _REFINEMENT**2
    coarse_squared = (Fraction(scale) ** 2 - fine_squared) / _REFINEMENT**2
    variance, smooth = float(coarse_squared / 2), float(_SMOOTH**2)
    q = math.exp(-19.739 * variance * smooth / (variance + smooth))  # 19.739 < 2 pi^2
    tables = [_gaussian(squared) for squared in (coarse_squared, fine_squared)]
    return _together(tables, [_REFINEMENT.bit_length() - 1, 0], 2.001 * q)


def _gaussian(squared_scale: Fraction) -> AliasTable:
    """P(k) prop. to exp(-k^2 / squared_scale), by products of neighbours."""
    columns = 1 << _bits(math.sqrt(squared_scale * _DEEP))
    weights, weight = [], ONE
    ratio, decay = exponential(-1 / squared_scale), exponential(-2 / squared_scale)
    for _ in range(columns):
        weights.append(weight)
        weight, ratio = weight * ratio >> FIXED, ratio * decay >> FIXED
    return alias_table(weights, 2 * (weight * ONE // (ONE - ratio) + 1))


def _generalised(exponent: float, scale: float, exact_scale: Fraction) -> AliasTable:
    """P(k) prop. to exp(-(k/scale)^exponent), by logarithms and exponentials."""
    if exponent == 2.0:
        return _gaussian(exact_scale**2)
    columns, most = 1 << _bits(scale * _DEEP ** (1.0 / exponent)), FIXED * ONE
    sizes = _scaled_powers(exponent, scale, columns + 1)
    weights = [_decay(size) if size < most else 0 for size in sizes]
    beyond = weights.pop()  # sizes are convex in k, so ratios of neighbours fall
    ratio = beyond * ONE // weights[-1] + 1 if weights[-1] else 0
    return alias_table(weights, 2 * (beyond * ONE // (ONE - ratio) + 2))


def _bits(columns: float) -> int:
    """The bits of a column number, for this many columns."""
    return max(math.ceil(math.log2(columns)), _LEAST_BITS)


# --- fixed-point arithmetic ---


def _fixed(value: Decimal) -> int:
    """A number in fixed point, rounded to the nearest multiple of 2^-192."""
    return int(_DIGITS.multiply(value, Decimal(ONE)).to_integral_value())


@cache
def _log_two() -> int:
    return _fixed(_DIGITS.ln(Decimal(2)))


def _times(x: int, factor: float) -> int:
    numerator, denominator = factor.as_integer_ratio()
    return x * numerator // denominator


def _scaled_powers(exponent: float, scale: float, count: int) -> list[int]:
    """(k/scale)^exponent for k = 0, ..., count - 1: computed for primes, and multiplied for the others.

    The logarithm of an odd prime p is computed from its neighbours, whose factors are less than p:
    log p = (log(p - 1) + log(p + 1)) / 2 + artanh(1/(2 p^2 - 1)). An error of at most 8 log2(k) units in log k passes
    from neighbours to primes, as halving k takes away more than a prime adds. Powers of primes have a relative error of
    2^17 units, and so results below 2^8 have an error below 2^34 units: 2^8 16 2^17, and k^2 for the unit.
    """
    unit = _fixed(_DIGITS.power(Decimal(scale), Decimal(-exponent)))
    least = _least_factors(count + 1)
    logs, scaled = [0] * (count + 1), [0, unit] + [0] * (count - 1)
    powers: dict[int, int] = {}  # p^exponent, of the primes
    for k in range(2, count):
        factor = least[k]
        if factor < k:
            scaled[k] = scaled[k // factor] * powers[factor] >> FIXED
            logs[k] = logs[factor] + logs[k // factor]
        else:
            logs[k] = (
                _log_two() if k == 2 else _log_between(_log_of(k - 1, logs, least), _log_of(k + 1, logs, least), k)
            )
            doublings, left = divmod(_times(logs[k], exponent), _log_two())
            powers[k] = _decay(_log_two() - left) << doublings + 1
            scaled[k] = powers[k] * unit >> FIXED
    return scaled[:count]


def _log_of(k: int, logs: list[int], least: list[int]) -> int:
    """log of a composite number, from its factors."""
    return logs[least[k]] + logs[k // least[k]]


def _log_between(below: int, above: int, p: int) -> int:
    """log p from the logarithms of its neighbours."""
    square, power, series, n = (2 * p * p - 1) ** 2, ONE * (2 * p * p - 1), 0, 1
    while power := power // square:
        series += power // n
        n += 2
    return (below + above) // 2 + series


def _least_factors(count: int) -> list[int]:
    """The least prime factor of k = 0, ..., count - 1."""
    least = np.arange(count)
    for p in range(math.isqrt(count), 1, -1):
        if least[p] == p:
            least[p * p :: p] = p
    return [int(factor) for factor in least]


@cache
def _exponentials() -> list[list[int]]:
    """The tables that `_decay` looks up: exp(-i/2^b) for i = 0, 1, ..., and b = 2, 14, 26, 38."""
    lengths = {2: 1 << 10, 14: 1 << 12, 26: 1 << 12, 38: 1 << 12}
    return [_powers(_fixed(_DIGITS.exp(Decimal(-(2.0**-bits)))), length) for bits, length in lengths.items()]


def _decay(x: int) -> int:
    """exp(-x), all in fixed point; for x from 0 to 2^8.

    The error is below 2^15 units, and below 2^39 x + 8 for x below 2^-26: entry i of a table has an error of at most
    1.5 i, of the first table at most 8, and the errors of factors up to 1 add up.
    """
    first, second, third, fourth = _exponentials()
    head, rest = x >> FIXED - 38, x & _TAIL  # the rest is below 2^-38, and its fifth power, over 5!, vanishes
    high = first[head >> 36] * second[head >> 24 & 4095] >> FIXED
    product = high * (third[head >> 12 & 4095] * fourth[head & 4095] >> FIXED) >> FIXED
    half = rest * rest >> FIXED + 1  # exp(-rest) = 1 - rest + half - half (2 rest - half) / 6
    return product - (product * (rest - half + (half * (rest + rest - half) >> FIXED) // 6) >> FIXED)


def exponential(x: Fraction) -> int:
    """exp(x) for x <= 0, in fixed point."""
    return _decay(-((x.numerator << FIXED) // x.denominator)) if x > -FIXED else 0


# --- the tables themselves ---


def alias_table(weights: Sequence[int], beyond: int) -> AliasTable:
    """The alias table of P(k) prop. to weights[|k|], given |k| < len(weights); `beyond` is the weight of all others."""
    both_signs = [(2 if k else 1) * weight for k, weight in enumerate(weights)]
    served = sum(both_signs)
    per_weight = (TOTAL << 2 * FIXED) // served
    numerators = [weight * per_weight >> 2 * FIXED for weight in both_signs]  # at most TOTAL weight / served
    numerators[0] += TOTAL - sum(numerators)  # what the others miss, at most one per column
    # |n/T - w/N| with N = served + beyond, over both signs, and what is beyond; halved. The others miss what 0
    # has too much
    errors = 2 * (numerators[0] * served - TOTAL * both_signs[0])
    distance = Fraction(errors, 2 * TOTAL * served) + Fraction(beyond, served + beyond)
    return AliasTable(*alias(numerators), math.nextafter(float(distance + _SLACK), math.inf))


def alias(numerators: Sequence[int]) -> tuple[Words, Words]:
    """Walker's table, built by Vose's method: a column with room to spare is filled up by one that overflows.

    Returns the packed columns and the ties.

    Source: walker1977efficient; vose1991linear.
    Deviates: 1. whole numbers, so nothing is lost; 2. a full column is stored as its own alias with threshold 0.
    """
    rest, capacity = list(numerators), TOTAL // len(numerators)
    aliases, thresholds = list(range(len(rest))), [0] * len(rest)
    low = [i for i in aliases if rest[i] < capacity]
    high = [i for i in aliases if rest[i] > capacity]
    while low:
        needy, rich = low.pop(), high[-1]
        aliases[needy], thresholds[needy] = rich, rest[needy]
        left = rest[rich] = rest[rich] + rest[needy] - capacity
        if left <= capacity:
            high.pop()
            if left < capacity:
                low.append(rich)
    halves = np.frombuffer(b"".join(whole.to_bytes(16, "little") for whole in thresholds), "<u8").reshape(-1, 2)
    packed = halves[:, 1] * np.uint64(2 * len(rest)) | np.array(aliases, dtype=np.uint64)
    return _read_only(packed), _read_only(halves[:, 0].astype(np.uint64))


def _read_only(words: Words) -> Words:
    words.flags.writeable = False
    return words
