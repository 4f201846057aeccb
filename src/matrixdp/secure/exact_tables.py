"""Discrete Laplace noise from tables without any error: what the tables leave out is drawn as well.

The digits of the noise (1. in tables.py) are independent, so each is drawn exactly on its own. A digit D has
T = 2^127 equally likely pairs of words, signs apart. Let n_k be whole numbers with n_k <= T P(|D| = k). Then

    P(|D| = k)  =  n_k / T  +  (E / T) R(k),      E = T - sum n_k,      R(k) = (T P(|D| = k) - n_k) / E,

and R is a probability law, as its terms are not negative and T P sums to T. So: draw from the table of the n_k, and
from R for E of the T pairs. In the table these pairs count towards the largest n_k. They are chosen among pairs whose
first word is a tie of some column with that alias, so that the loops need no other branch than that for ties. E / T is
below 2^-60.

R is drawn by inversion: V uniform on [0, E) gives the k with T_(k+1) <= V < T_k, where
T_k = T P(|D| >= k) - sum of n_j over j >= k. Bits of V are drawn until they determine k, with as many digits as needed.
With r = e^-rate and base m, r^m = 0 for the last digit, which has no largest value, summing P(d) of tables.py gives

    P(|D| >= k)  =  2 (r^k - r^m - r^(m+1) + r^(2m-k+1)) / ((1 + r) (1 - r^m)^2),      0 < k <= m.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, localcontext
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from matrixdp.errors import NumericalFailure
from matrixdp.secure.entropy import Words
from matrixdp.secure.tables import BASE, BASE_BITS, TIE_BITS, TOTAL, AliasTable, Digits, Whole, alias, laplace_weights


@lru_cache(maxsize=32)
def exact_digits(scale: float) -> Digits:
    """The tables of discrete Laplace noise of this scale, in steps, and what they leave out."""
    found = laplace_weights(scale)
    digits = [_exact(rate, i + 1 < len(found), weights, beyond) for i, (rate, weights, beyond) in enumerate(found)]
    shifts = tuple(BASE_BITS * i for i in range(len(found)))
    return Digits(tuple(digit.table for digit in digits), shifts, 0.0, tuple(digits))


def _exact(rate: Fraction, cut: bool, weights: list[int], beyond: int) -> ExactDigit:
    """The table of n_k, one below what the weights give, as the error of the weights is below 2^-30 of a unit."""
    both_signs = [(2 if k else 1) * weight for k, weight in enumerate(weights)]
    whole = sum(both_signs) + beyond
    numerators = [max(TOTAL * weight // whole - 1, 0) for weight in both_signs]
    largest = max(range(len(numerators)), key=numerators.__getitem__)
    rest = TOTAL - sum(numerators)
    numerators[largest] += rest
    table = AliasTable(*alias(numerators), 0.0)
    aliases = table.packed % np.uint64(table.packed.size)
    for column in np.flatnonzero(aliases == largest):
        if rest <= (1 << TIE_BITS) - int(table.ties[column]):
            return ExactDigit(table, rate, cut, largest, rest, int(column))
    raise NumericalFailure(
        f"no column has room for what a table of rate {float(rate):.17g} leaves out; change the step"
    )


@dataclass(frozen=True, eq=False)
class ExactDigit:
    """One digit of discrete Laplace noise: a table, and the law R of what it leaves out.

    Attributes:
        table: of the n_k, with E added to the largest.
        rate: r = e^-rate.
        cut: whether sizes are below the base; the last digit has no bound.
        usual: the size with the largest n_k.
        rest: E.
        column: ties of this column whose second word is one of the last E are drawn from R.
    """

    table: AliasTable
    rate: Fraction
    cut: bool
    usual: int
    rest: int
    column: int

    def changes(self, words: Words, more: Words, further: Callable[[int], Iterator[int]]) -> Whole:
        """The change of the digit where its words belong to R, and it was given the usual size."""
        size, packed = np.uint64(self.table.packed.size), self.table.packed[self.column]
        first = np.uint64((1 << TIE_BITS) - self.rest)
        tied = (words % size == self.column) & ((words ^ packed) // (size + size) == 0)
        found = np.zeros(words.size, dtype=np.int64)
        for place in np.flatnonzero(tied & (more >= first)):
            change = self.drawn(further(int(place))) - self.usual
            found[place] = -change if words[place] & size else change
        return found

    def drawn(self, words: Iterator[int]) -> int:
        """A size from R, by inversion."""
        known = 0
        for length in itertools.count(64, 64):
            known = known << 64 | next(words)
            # its own context: the caller's may round differently, or have fewer digits
            with localcontext(Context(100 + length, ROUND_HALF_EVEN, MIN_EMIN, MAX_EMAX, traps=[])):
                low, high = (Decimal(self.rest * (known + end)) / (1 << length) for end in (0, 1))
                k = self._last_above(low)
                # _mass_from errs by less than 1e65 units of the last place: (1 - r^m)^-2 < 1e18, and T < 1e39
                margin = Decimal(10) ** -(35 + length)
                if self._mass_from(k) - margin >= high and self._mass_from(k + 1) + margin <= low:
                    return k
        raise AssertionError  # the loop ends with a result

    def _last_above(self, value: Decimal) -> int:
        """The last k with T_k above the value, at the current precision."""
        low, high = 0, 1
        while self._mass_from(high) > value:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._mass_from(middle) > value else (low, middle)
        return low

    def _mass_from(self, k: int) -> Decimal:
        """T_k: the probability under R of k and above, times E."""
        if k == 0:
            return Decimal(self.rest)
        if self.cut and k >= BASE:
            return Decimal(0)
        r, end = self._power(1), self._power(BASE) if self.cut else Decimal(0)
        top = self._power(k) - end * (1 + r) + (self._power(2 * BASE - k + 1) if self.cut else 0)
        return 2 * TOTAL * top / ((1 + r) * (1 - end) ** 2) - self._served[min(k, len(self._served) - 1)]

    def _power(self, exponent: int) -> Decimal:
        """r^exponent."""
        size = self.rate * exponent
        return (Decimal(-size.numerator) / size.denominator).exp()

    @cached_property
    def _served(self) -> list[int]:
        """The sums of n_j over j >= k, for k = 0, 1, ...; the last one is 0."""
        numerators = self.table.numerators()
        numerators[self.usual] -= self.rest
        return [*itertools.accumulate(reversed(numerators), initial=0)][::-1]
