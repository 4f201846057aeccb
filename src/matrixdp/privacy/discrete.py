"""Exact privacy profiles of independent discrete noise on a grid.

Noise: independent entries K with P(K = j) = p(j) prop. to exp(-(|j|/scale)^t) on the whole numbers, 1 <= t <= 2; t = 1
is discrete Laplace, t = 2 the discrete Gaussian. Only this is used of p: it is symmetric and *log-concave*,
p(j)^2 >= p(j-1) p(j+1), since |j|^t is convex. Write H_v(epsilon) = sup over events E of P(E) - e^epsilon P(E - v), the
delta of a difference v in whole steps.

The worst difference. For every real epsilon

1. *One entry: H_v never decreases with |v|.* By log-concavity p(j)/p(j - v) never increases with j, for v > 0. So the
   best event is {j <= c}, and H_v = sup_c P(K <= c) - e^epsilon P(K <= c - v), where every term increases with v.
   By symmetry of p, v and -v are alike, and both directions of the divergence are equal.
2. *Entries: H_v never decreases with any |v_i|.* Domination at every epsilon carries over to products (zhu2022optimal).
   Hence the worst difference of `Counts(k, bound)` changes k entries by exactly the bound, and that of `Entrywise`
   every entry by its bound; signs do not matter.
3. *H_v grows as a step is taken from a smaller entry and given to a larger one (Schur-convexity).* Let v_1 >= v_2 >= 0,
   and r = v_1 + v_2. Fix the other entries, which enter as a constant c, and sum over x_1 = x, x_2 = s - x:

       1 - H_v = sum_s sum_x min(f_s(x), c f_(s-r)(x - v_1)),        f_s(x) = p(x) p(s - x).

   f_s is log-concave and symmetric about s/2. The inner sum is the integral over y > 0 of the number of whole x with
   f_s(x) > y and c f_(s-r)(x - v_1) > y: the overlap of two intervals, whose centres are s/2 and s/2 + (v_1 - v_2)/2.
   Their lengths do not depend on how r is divided, and the overlap cannot grow as the centres move apart.
   So on the l1 ball of radius r the worst difference is in one entry; if |v_i| <= b as well, floor(r/b) entries change
   by b and one by the rest.

None of this holds without log-concavity: a law with p(0), p(2) large and p(1) small hides a shift of 2 better than 1.

Draws from tables are within some total variation of p, and a table that ends is not log-concave. So p is certified, and
the error of the tables is added. Only the exact sampler keeps delta = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import scipy

from matrixdp import _check
from matrixdp._check import Array
from matrixdp._rounding import rounded_up
from matrixdp.distributions.product import steps_variance
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy.cell_sums import Cells
from matrixdp.privacy.cells import TINY, UNIT, CellLoss, cell_loss
from matrixdp.secure.tables import checked_exponent, checked_scale

Groups = tuple[tuple[int, int], ...]
"""Entries that change, as (shift in steps, number of entries)."""

FAR_BELOW = math.exp(-10.0)
"""A ratio of deltas below which searches do not distinguish."""

_ROOT = 1e-12  # tolerance of an epsilon, relative
_ROUGH = 1e-4  # tolerance of deltas and epsilons that only say where to look
_LARGEST_EPSILON = 1e4


@dataclass(frozen=True)
class DiscreteProfile:
    """The profile of discrete noise against the same noise shifted in some entries, never below the truth.

    Guarantee: `delta(epsilon)` is at least H_v(epsilon) for v with `cells` entries of size `shift`, and those in
        `others`. With a step g that divides the bound, that is the worst case of `Counts(cells, shift * g)` by 2.
        above; of an l1 ball of radius r with `cells=1, shift=ceil(r/g)`, by 3., if values are multiples of g; and of
        `Entrywise` with one group per bound. `laws.steps_changed` adds steps for values that were rounded before.
    Accuracy: at most (1 + 1e-9) H_v(epsilon - 1e-12) for exponents 1 (up to 10,000 cells) and 2, and for up to three
        cells (1e-8 for three cells at scales above 40); otherwise within 1e-4 of H_v, relative, for up to 64 cells.

    Attributes:
        exponent: t, from 1 to 2.
        scale_in_steps: the scale of the noise, in steps of the grid.
        shift: how many steps an entry changes by.
        cells: how many entries change by that.
        others: more entries that change at the same time, as (shift, cells).
    """

    exponent: float
    scale_in_steps: float
    shift: int = 1
    cells: int = 1
    others: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "exponent", checked_exponent(self.exponent))
        object.__setattr__(self, "scale_in_steps", checked_scale(self.exponent, self.scale_in_steps))
        for shift, cells in self.groups:
            _check.count("shift", shift)
            _check.count("cells", cells)
        if len({shift for shift, _ in self.groups}) < len(self.groups):
            raise InvalidInput("others must have each shift once; add up the cells that change by the same")

    @property
    def groups(self) -> Groups:
        """All entries that change, as (shift, cells)."""
        return ((self.shift, self.cells), *self.others)

    @property
    def pure_epsilon(self) -> float:
        """The epsilon at which delta reaches 0: the sum of all shifts over the scale for exponent 1, else infinite.

        It is rounded up to the next float, so that noise of scale m/epsilon keeps epsilon to the last digit.
        """
        exact = self.exact_pure_epsilon
        if exact is None:
            return math.inf
        found = float(exact)
        return found if found >= exact else math.nextafter(found, math.inf)

    @property
    def exact_pure_epsilon(self) -> Fraction | None:
        """`pure_epsilon` without rounding; None if it is infinite."""
        return None if self.exponent > 1.0 else total_steps(self.groups) / Fraction(self.scale_in_steps)

    @property
    def variance(self) -> float:
        """The variance of the noise of one entry, in squared steps."""
        return steps_variance(self.exponent, self.scale_in_steps)

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""
        return delta_of(self.exponent, self.scale_in_steps, self.groups, _check.at_least_zero("epsilon", epsilon))

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta, rounded up."""
        if _check.delta(delta) == 0.0:
            return self.pure_epsilon

        def above(epsilon: float, tolerance: float | None = None) -> float:
            found = delta_of(self.exponent, self.scale_in_steps, self.groups, epsilon, tolerance, 0.01 * delta)
            return math.log(max(found / delta, FAR_BELOW))

        def roughly_above(epsilon: float) -> float:
            return above(epsilon, _ROUGH if epsilon > 0.0 else None)  # at 0 the sign must be the exact one

        if above(0.0) <= 0.0:
            return 0.0
        high = min(self.pure_epsilon, 2.0**-10)
        while not roughly_above(high) <= 0.0:
            high *= 2.0
            if high > _LARGEST_EPSILON:
                return math.inf
        near = crossing(roughly_above, 0.0, high, _ROUGH)
        low, high = near * (1.0 - _ROUGH), near * (1.0 + _ROUGH)
        while not above(high) <= 0.0:
            low, high = high, near + 8.0 * (high - near)
        while low > 0.0 and above(low) <= 0.0:
            low, high = max(near - 8.0 * (near - low), 0.0), low
        return crossing(above, low, high, 1e-11)

    def losses(self, floor: float = 1e-26) -> list[tuple[CellLoss, int]]:
        """The privacy losses of single entries, for composition with others: (loss of one entry, number of entries).

        Args:
            floor: the largest mass that may be cut off, over all entries together (from 1e-300).
        """
        depth = 8.0 - math.log(max(_check.positive("floor", floor), 1e-300) / sum(cells for _, cells in self.groups))
        found = [(cell_loss(self.exponent, self.scale_in_steps, m, min(depth, 740.0)), n) for m, n in self.groups]
        if not sum(loss.infinite * cells for loss, cells in found) <= floor:
            raise NotCertifiable(f"the losses cannot be cut off at a mass of {floor}; use a larger floor")
        return found

    def __str__(self) -> str:
        if self.exponent == 1.0:
            return f"pure epsilon {rounded_up(self.pure_epsilon)}"
        return f"delta {rounded_up(self.delta(1.0))} at epsilon 1"


def total_steps(groups: Groups) -> int:
    """The total change of all entries, in steps."""
    return sum(shift * cells for shift, cells in groups)


@lru_cache(maxsize=4096)
def delta_of(
    exponent: float,
    scale: float,
    groups: Groups,
    epsilon: float,
    tolerance: float | None = None,
    enough: float = 0.0,
    stride: int = 1,
) -> float:
    """(1) of cells.py, rounded up, by the quickest method; see `Cells.delta` for the last three arguments."""
    if exponent == 1.0 and is_pure(epsilon, scale, total_steps(groups)):
        return 0.0
    shift, cells = groups[0]
    if exponent == 1.0 and len(groups) == 1 and cells == 1:
        found = _one_laplace(scale, shift, epsilon)
    elif exponent == 1.0 and len(groups) == 1 and shift == 1:
        found = _binomial(scale, cells, epsilon)
    else:
        found = Cells(exponent, scale, groups).delta(epsilon, tolerance, enough, stride)
    return min(found, 1.0)


def is_pure(epsilon: float, scale: float, total: int) -> bool:
    """Whether total/scale <= epsilon; computed in fractions where rounding could matter."""
    above = epsilon * scale - total
    return above > 1e-12 * total or (above > -1e-12 * total and Fraction(epsilon) * Fraction(scale) >= total)


def _one_laplace(scale: float, shift: int, epsilon: float) -> float:
    """Discrete Laplace in one entry: H = sup_c P(K <= c) - e^epsilon P(K <= c - m), in closed form.

    For 0 <= c < m, with a = 1/scale, q = e^-a and x = m a - epsilon, the difference is
    (q (1 - e^(-c a)) + 1 - e^(c a - x)) / (1 + q). It is largest where 2 c a < x <= 2 (c + 1) a, and both terms are
    positive there; on both sides of that c it is tried as well, as x is rounded, up. It increases with x.
    """
    rate = 1.0 / scale
    above = shift * rate * (1.0 + 8.0 * UNIT) - epsilon * (1.0 - 4.0 * UNIT)
    middle, best = math.ceil(0.5 * above * scale) - 1, 0.0
    for c in range(max(middle - 1, 0), min(middle + 1, shift - 1) + 1):
        first = -math.exp(-rate) * math.expm1(-c * rate)
        best = max(best, first - math.expm1(c * rate * (1.0 - 4.0 * UNIT) - above))
    return best / (1.0 + math.exp(-rate)) * (1.0 + 32.0 * UNIT) + TINY


def _binomial(scale: float, cells: int, epsilon: float) -> float:
    """Discrete Laplace and shifts of 1: every loss is 1/scale with probability 1/(1+q), q = e^(-1/scale), or -1/scale.

    So the sum is (2b - k)/scale with b binomial.
    """
    rate = 1.0 / scale
    first = max(math.floor((cells + epsilon * scale) / 2.0 * (1.0 - 8.0 * UNIT)), 0)
    number = np.arange(first, cells + 1.0)
    above = np.maximum(rate * (2.0 * number - cells) * (1.0 + 4.0 * UNIT) - epsilon, 0.0)
    sizes = _log_binomials(cells)[first:]
    log_mass = sizes - rate * (cells - number) - cells * math.log1p(math.exp(-rate))
    rounding = 8.0 * UNIT * (2.0 * math.lgamma(cells + 1.0) + cells * (1.0 + rate) + 64.0)
    return float(np.sum(np.exp(log_mass) * -np.expm1(-above))) * (1.0 + rounding) + 1e-307


@lru_cache(maxsize=16)
def _log_binomials(cells: int) -> Array:
    """log of cells over b, for b = 0, ..., cells."""
    if cells <= 512:
        return np.array([math.log(math.comb(cells, b)) for b in range(cells + 1)])
    logs = scipy.special.gammaln(np.arange(1.0, cells + 2.0))
    return np.asarray(logs[-1] - logs - logs[::-1])


def crossing(function: Callable[[float], float], low: float, high: float, tolerance: float = _ROOT) -> float:
    """A point at or just above a root, where the function is at most 0; it is above 0 at `low` but not at `high`."""
    root = float(scipy.optimize.brentq(function, low, high, xtol=tolerance * high, rtol=max(tolerance, 1e-15)))
    step = tolerance * (root or high)
    while root < high and not function(root) <= 0.0:
        root, step = min(root + step, high), 2.0 * step
    return root
