"""Gaussian noise on a grid: exact tables, and how several of them make a fine grid.

Floating-point noise leaks: which floats a sum can reach depends on the value. So a value is put on a grid, in units of
the noise's standard deviation, and a whole number K of steps is added. The proof rests on three facts.

1. Rounding commutes with the grid. For x on the grid of step h, `round(x + Z) = x + round(Z)`. So if h K has the law of
   Z = N(0, 1) rounded to the grid, P(K = k) = Phi((k + 1/2) h) - Phi((k - 1/2) h), the output is the continuous
   Gaussian mechanism on x, rounded afterwards: post-processing, which keeps the guarantee exactly.

2. A coarse discrete Gaussian and a narrow continuous one add up to a continuous one. Let D be discrete Gaussian,
   P(D = k) prop. to exp(-k^2 / (2 s^2)), and W = N(0, (c g)^2) independent of it. Complete the square in

       density of g D + W at y  prop. to  sum_k exp(-k^2 / (2 s^2) - (y - g k)^2 / (2 c^2 g^2))
                                =  exp(-y^2 / (2 sigma^2))  sum_k exp(-(k - m)^2 / (2 v)),

       sigma^2 = g^2 (s^2 + c^2),    v = s^2 c^2 / (s^2 + c^2),    m = (y/g) s^2 / (s^2 + c^2).

   By Poisson summation the last sum is sqrt(2 pi v) (1 + 2 sum_{j>0} q^(j^2) cos(2 pi j m)), q = exp(-2 pi^2 v), and
   the normaliser of D is sqrt(2 pi s^2) (1 + 2 sum_{j>0} r^(j^2)), r = exp(-2 pi^2 s^2) < q. Hence the ratio of the
   density to that of N(0, sigma^2) is (1 + A) / (1 + B) with |A|, |B| <= 2 q / (1 - q) and B > 0: everywhere within
   4 q / (1 - q) of 1. The total variation is at most half of that.

3. So a level can be refined. Draw D on the coarse grid g, and the narrow W on the fine grid h = g/128: as x and g D
   both lie on the fine grid, x + g D + round(W) = round(x + g D + W). W can be split again in the same way.

With grids g_l = 128^-l and c = 13/8, L levels draw

    L = 1:  round(N(0, 1))                       on g_1, std 128 steps;
    L > 1:  D with s^2 = 128^2 - c^2             on g_1, which leaves N(0, (c g_1)^2), as g_1^2 (s^2 + c^2) = 1;
            D with s^2 = c^2 (128^2 - 1)         on g_2 ... g_(L-1), which leaves N(0, (c g_l)^2) each time;
            round(N(0, (c g_(L-1))^2))           on g_L, std 128 c = 208 steps,

so K has the law of round(N(0, 1)) on the step 128^-L, up to a total variation of 2 q, q = 2^-75, per split, and of the
tail of 2^-73 that each table but the first leaves out.

Each table serves |K| < 2048, more than 9.8 standard deviations. Probabilities of |K| are whole multiples of 2^-127, and
Walker's alias method turns them into 2048 columns, each shared by at most two outcomes. A 64-bit word holds a column
(11 bits), a sign (1 bit) and 52 bits to compare with the column's threshold: one word, one look-up, no rejection. So
the time does not depend on the noise, except for ties: a word that equals the first 52 bits of its threshold, one in
2^52, needs a second word for the other 64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.secure.tables import FIXED, ONE, AliasTable, alias_table, exponential

REFINEMENT = 128
"""How much finer each level makes the grid."""

COLUMNS = 1 << 11
"""The number of columns of a table; a look-up gives |K| below this."""

SIGN_BIT = 11
"""The bit of a word that is the sign of K; the column is below it, the threshold above."""

FINEST = 5
"""The most levels: a step of 2^-35 standard deviations."""

LIMIT = 2.0**49
"""Values must stay below this many steps, so that floats hold value and noise exactly."""

_SMOOTH = Fraction(13, 8)  # c: 3/2 would leave q = 2^-64, and 7/4 would cut off a tail of 2^-64
# q of fact 2 at the first split, where v is least; 19.739 < 2 pi^2
_SPLIT = math.exp(-19.739 * float(_SMOOTH**2 * (1 - _SMOOTH**2 / REFINEMENT**2)))


@cache
def rounded_gaussian(std: int) -> AliasTable:
    """N(0, std^2) rounded to whole numbers, for a std of 128 or more.

    The mass of a cell is the density's Taylor series about its centre, integrated: with He_n the Hermite polynomials,
    P(k) = phi(k/std)/std * sum over even n of He_n(k/std) / (std^n 2^n (n+1)!). As |He_n(x)| phi(x) < sqrt(n!) / 2
    (Cramer), the terms from n = 16 on are below 2^-150 together.
    """
    variance = std * std
    weights = _weights(Fraction(variance))
    return _table([weight * _cell(k, variance) >> FIXED for k, weight in enumerate(weights[:COLUMNS])], weights)


@cache
def discrete_gaussian(variance: Fraction) -> AliasTable:
    """P(k) prop. to exp(-k^2 / (2 variance)) on the whole numbers; the parameter is nearly the variance."""
    weights = _weights(variance)
    return _table(weights[:COLUMNS], weights)


def _weights(variance: Fraction) -> list[int]:
    """exp(-k^2 / (2 variance)) for k = 0, 1, ... until it vanishes, in fixed point: only products of neighbours."""
    weights, weight = [], ONE
    ratio, decay = exponential(-1 / (2 * variance)), exponential(-1 / variance)
    while weight:
        weights.append(weight)
        weight, ratio = weight * ratio >> FIXED, ratio * decay >> FIXED
    return weights


def _cell(k: int, variance: int) -> int:
    """The mass of the cell around k over the density at k, in fixed point."""
    before, current, total, divisor = 0, ONE, ONE, 1
    for n in range(1, 15):
        before, current = current, (k * current - (n - 1) * before) // variance  # He_n(k/std) / std^n
        divisor *= 2 * (n + 1)
        if n % 2 == 0:
            total += current // divisor
    return total


def _table(masses: Sequence[int], weights: Sequence[int]) -> AliasTable:
    """The alias table of P(k) = masses[|k|] / normaliser, given that |k| < 2048.

    Both laws have the normaliser sum_k exp(-k^2 / (2 s^2)): for the rounded Gaussian it should be s sqrt(2 pi), and the
    two differ by exp(-2 pi^2 s^2), far below anything that is computed here.
    """
    normaliser, served = (2 * sum(parts) - parts[0] for parts in (weights, masses))
    return alias_table([*masses, *[0] * (COLUMNS - len(masses))], abs(normaliser - served))


@dataclass(frozen=True)
class Grid:
    """Standard Gaussian noise on the whole multiples of `step`.

    Guarantee: let the continuous mechanism N(0, 1) be (epsilon, delta)-private for differences enlarged by
        `displacement` in every entry that changes. Then values rounded to this grid, plus its noise, are
        (epsilon, delta + (1 + e^epsilon) M total_variation)-private, M the number of entries.
    Source: mironov2012significance for the leak; facts 1 to 3 above for the proof.
    """

    levels: int
    """How many words and look-ups an entry takes, without ties."""

    def __post_init__(self) -> None:
        if not _check.count("levels", self.levels) <= FINEST:
            raise InvalidInput(f"levels must be at most {FINEST}, got {self.levels}")

    @property
    def step(self) -> float:
        """The distance of neighbouring grid points, in standard deviations: a power of two."""
        return float(REFINEMENT) ** -self.levels

    @property
    def displacement(self) -> float:
        """How far putting two values on the grid can move their difference, in standard deviations, per entry.

        Each value is rounded by half a step. Before that it may have been rounded up to six times with a relative error
        of 2^-53, on at most LIMIT = 2^49 steps, by three eighths of a step in all: twice as an exact sum and a quotient
        of it, and four times in the conversion to units of the noise.
        """
        return 1.75 * self.step

    @property
    def tables(self) -> tuple[AliasTable, ...]:
        """One table per level, coarsest first: K = (... (K_1 * 128 + K_2) * 128 + ...) + K_L."""
        return _tables(self.levels)

    @property
    def total_variation(self) -> float:
        """An upper bound on the total-variation error of one entry: all tables, and fact 2 at each split."""
        return 1.000001 * (sum(table.total_variation for table in self.tables) + (self.levels - 1) * 2.001 * _SPLIT)


@cache
def _tables(levels: int) -> tuple[AliasTable, ...]:
    """The tables of a grid with this many levels, built once per process."""
    if levels == 1:
        return (rounded_gaussian(REFINEMENT),)
    middle = discrete_gaussian(_SMOOTH**2 * (REFINEMENT**2 - 1))
    last = rounded_gaussian(int(REFINEMENT * _SMOOTH))
    return discrete_gaussian(REFINEMENT**2 - _SMOOTH**2), *[middle] * (levels - 2), last


def plan(fineness: float) -> Grid:
    """The coarsest grid whose step is at most this many standard deviations."""
    wanted = _check.positive("fineness", fineness)
    for levels in range(1, FINEST + 1):
        if Grid(levels).step <= wanted:
            return Grid(levels)
    raise InvalidInput(f"fineness must be at least {Grid(FINEST).step:.3g} standard deviations, got {fineness!r}")
