"""Exact privacy of independent discrete noise on a grid: profiles, scales, and the exponent with the least variance.

Noise: independent entries K with P(K = j) = p(j) prop. to exp(-(|j|/scale)^t) on the whole numbers, 1 <= t <= 2; t = 1
is discrete Laplace, t = 2 the discrete Gaussian. Only this is used of p: it is symmetric and *log-concave*,
p(j)^2 >= p(j-1) p(j+1), since |j|^t is convex. Write H_v(epsilon) = sup over events E of P(E) - e^epsilon P(E - v), the
delta of a difference v in whole steps.

The worst difference. For every real epsilon

1. *One entry: H_v never decreases with |v|.* By log-concavity p(j)/p(j - v) never increases with j, for v > 0. So the
   best event is {j <= c}, and H_v = sup_c P(K <= c) - e^epsilon P(K <= c - v), where every term increases with v.
   By symmetry of p, v and -v are alike, and both directions of the divergence are equal.
2. *Entries: H_v never decreases with any |v_i|.* What dominates at every epsilon dominates in a product
   (zhu2022optimal). Hence for `Counts(k, bound)` the worst is k entries by exactly the bound, and for `Entrywise` every
   entry by its bound; signs do not matter.
3. *H_v grows as a step is taken from a smaller entry and given to a larger one (Schur-convexity).* Let v_1 >= v_2 >= 0,
   and r = v_1 + v_2. Fix the other entries, which enter as a constant c, and sum over x_1 = x, x_2 = s - x:

       1 - H_v = sum_s sum_x min(f_s(x), c f_(s-r)(x - v_1)),        f_s(x) = p(x) p(s - x).

   f_s is log-concave and symmetric about s/2. The inner sum is the integral over y > 0 of the number of whole x with
   f_s(x) > y and c f_(s-r)(x - v_1) > y: the overlap of two intervals, whose centres are s/2 and s/2 + (v_1 - v_2)/2.
   Their lengths do not depend on how r is divided, and the overlap cannot grow as the centres move apart.
   So on the l1 ball of radius r the worst is all in one entry; if |v_i| <= b too, floor(r/b) entries by b and one by
   the rest.

None of this holds without log-concavity: a law with p(0), p(2) large and p(1) small hides a shift of 2 better than 1.

Drawing from tables is within some total variation of p, and a table cut at its end is not log-concave: certify p, and
add the error of the tables. Only the exact sampler keeps delta = 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np
import scipy

from matrixdp import _check
from matrixdp._check import Array
from matrixdp._rounding import rounded_up
from matrixdp.distributions.product import checked_exponent, checked_scale, steps_variance
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy.cell_sums import CLOSE, Cells
from matrixdp.privacy.cells import TINY, UNIT, CellLoss, cell_loss
from matrixdp.privacy.saddlepoint import Saddlepoint
from matrixdp.secure.tables import LEAST_SCALE, largest_scale

Groups = tuple[tuple[int, int], ...]
"""Entries that change, as (shift in steps, number of entries)."""

_ROOT, _CLOSE_ROOT = 1e-12, 1e-7  # of a scale or an epsilon, relative; where delta is known to some digits only
_ROUGH = 3e-4  # the error in delta while an exponent is sought
_EXPONENTS, _NEAR = 64, 2  # exponents that are tried lie on multiples of 1/64; next to an end, at most 2 of these away
_DISCRETE, _SMALL = 4.0, 32.0  # below so many shifts, and so many steps, delta need not fall as the scale grows
_SECANTS = 20  # steps of the secant method, before halving takes over
_MANY = 3  # entries from which on a search for an exponent looks at the saddle point
_LARGEST_EPSILON = 1e4
_FINE = 48.0  # while an exponent is sought, so many atoms in a scale will do


@dataclass(frozen=True)
class DiscreteProfile:
    """The profile of discrete noise against itself, shifted in some entries: k-fold composition, never below the truth.

    Guarantee: `delta(epsilon)` is at least H_v(epsilon) for v with `cells` entries of size `shift`, and what is in
        `others`. With a step g that divides the bound, that is the worst of `Counts(cells, shift * g)` by 2. above; for
        an l1 ball of radius r, `cells=1, shift=ceil(r/g)` by 3.; for `Entrywise`, one group per bound.
    Accuracy: at most (1 + 1e-9) H_v(epsilon - 1e-12) for exponents 1 (up to 10,000 cells) and 2, and for up to three
        cells (1e-8 for three cells at scales above 40); otherwise within 1e-4 of H_v, relative, for up to 64 cells.

    Attributes:
        exponent: t, from 1 to 2.
        scale_in_steps: of the noise, in steps of the grid.
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
        for shift, cells in self._groups:
            _check.count("shift", shift)
            _check.count("cells", cells)
        if len({shift for shift, _ in self._groups}) < len(self._groups):
            raise InvalidInput("others must have each shift once; add up the cells that change by the same")

    @property
    def _groups(self) -> tuple[tuple[int, int], ...]:
        return ((self.shift, self.cells), *self.others)

    @property
    def pure_epsilon(self) -> float:
        """Where delta reaches 0: the sum of all shifts over the scale for exponent 1, else infinite.

        The least float that is not below it, so that noise of scale m/epsilon keeps epsilon to the last digit.
        """
        if self.exponent > 1.0:
            return math.inf
        total, scale = _total(self._groups), Fraction(self.scale_in_steps)
        found = total / self.scale_in_steps
        return found if Fraction(found) * scale >= total else math.nextafter(found, math.inf)

    @property
    def variance(self) -> float:
        """Of the noise of one entry, in steps."""
        return steps_variance(self.exponent, self.scale_in_steps)

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""
        return self._delta(_check.at_least_zero("epsilon", epsilon))

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta, rounded up."""
        if not 0.0 <= _check.number("delta", delta) < 1.0:
            raise InvalidInput(f"delta must lie between 0 and 1, got {_check.shown(delta)}")
        if delta == 0.0 or self.delta(0.0) <= delta:
            return self.pure_epsilon if delta == 0.0 else 0.0
        high = min(self.pure_epsilon, 2.0**-10)
        while not self._delta(high, enough=0.01 * delta) <= delta:
            high *= 2.0
            if high > _LARGEST_EPSILON:
                return math.inf
        return _crossing(
            lambda epsilon: max(_log(self._delta(epsilon, enough=0.01 * delta) / delta), -10.0), 0.0, high, 1e-11
        )

    def losses(self, floor: float = 1e-26) -> list[tuple[CellLoss, int]]:
        """The privacy losses of single entries, for composition with others: (loss of one entry, number of entries).

        Args:
            floor: the mass that is cut off, all entries together, is at most this much (from 1e-300).
        """
        depth = 8.0 - math.log(max(_check.positive("floor", floor), 1e-300) / sum(cells for _, cells in self._groups))
        found = [(cell_loss(self.exponent, self.scale_in_steps, m, min(depth, 740.0)), n) for m, n in self._groups]
        if not sum(loss.infinite * cells for loss, cells in found) <= floor:
            raise NotCertifiable(f"the losses cannot be cut off at a mass of {floor}; use a larger floor")
        return found

    def _delta(self, epsilon: float, enough: float = 0.0) -> float:
        return _delta(self.exponent, self.scale_in_steps, self._groups, epsilon, enough=enough)

    def __str__(self) -> str:
        return f"delta {rounded_up(self.delta(1.0))} at epsilon 1"


def _total(groups: Groups) -> int:
    return sum(shift * cells for shift, cells in groups)


@lru_cache(maxsize=4096)
def _delta(
    exponent: float,
    scale: float,
    groups: Groups,
    epsilon: float,
    tolerance: float | None = None,
    enough: float = 0.0,
    stride: int = 1,
) -> float:
    """(1) of cells.py, rounded up, in the quickest way; see `Cells.delta` for the last arguments."""
    if exponent == 1.0 and _is_pure(epsilon, scale, _total(groups)):
        return 0.0
    shift, cells = groups[0]
    if exponent == 1.0 and len(groups) == 1 and cells == 1:
        found = _one_laplace(scale, shift, epsilon)
    elif exponent == 1.0 and len(groups) == 1 and shift == 1:
        found = _binomial(scale, cells, epsilon)
    else:
        found = Cells(exponent, scale, groups).delta(epsilon, tolerance, enough, stride)
    return min(found, 1.0)


def _is_pure(epsilon: float, scale: float, total: int) -> bool:
    """Whether total/scale <= epsilon; where rounding could decide, fractions do."""
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


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


def _crossing(function: Callable[[float], float], low: float, high: float, tolerance: float = _ROOT) -> float:
    """A point at or just above a root, where the function is 0 or below: above 0 at `low`, and not at `high`."""
    root = float(scipy.optimize.brentq(function, low, high, xtol=tolerance * high, rtol=max(tolerance, 1e-15)))
    step = tolerance * root
    while root < high and not function(root) <= 0.0:
        root, step = min(root + step, high), 2.0 * step
    return root


# --- scales and exponents ---


def scale_for(
    epsilon: float, delta: float, shift: int = 1, cells: int = 1, exponent: float = 1.0, others: Groups = ()
) -> float:
    """The least scale found, in steps, at which the noise keeps the budget.

    For exponent 1 delta falls as the scale grows, since discrete Laplace noise of a larger scale is that of a smaller
    one plus independent noise; so this is the least scale, to about 1e-11, relative. For larger exponents delta can
    rise with the scale while that is about the shift, so smaller scales are tried there too, in steps of 2 %.

    Guarantee: `DiscreteProfile(exponent, scale, shift, cells, others).delta(epsilon) <= delta`, evaluated at this very
        scale.

    Args:
        epsilon: above 0, or 0 if delta is not.
        delta: from 0 for exponent 1, otherwise above 0; below 1.
        shift: steps that an entry changes by.
        cells: entries that change.
        exponent: from 1 to 2.
        others: more entries that change at the same time, as (shift, cells).

    Raises:
        NotCertifiable: delta is 0 and the exponent above 1, or the scale would be out of range.
    """
    return _scale_for(_Asked(*_budget(epsilon, delta), _groups(shift, cells, others)), checked_exponent(exponent))


@lru_cache(maxsize=1024)
def _scale_for(asked: _Asked, exponent: float) -> float:
    epsilon, delta = asked.epsilon, asked.delta
    if delta > 0.0:
        return asked.scale(exponent)
    if exponent > 1.0:
        raise NotCertifiable("delta = 0 needs exponent 1")
    scale = max(_total(asked.groups) / epsilon, LEAST_SCALE)
    if not scale < largest_scale(1.0):
        raise NotCertifiable("no scale in range keeps the budget; use a coarser grid")
    while not _is_pure(epsilon, scale, _total(asked.groups)):
        scale = math.nextafter(scale, math.inf)
    return scale


def best_exponent(epsilon: float, delta: float, shift: int = 1, cells: int = 1, others: Groups = ()) -> DiscreteProfile:
    """The exponent and scale with the least variance among those that keep the budget, as far as a search finds.

    Exponents are multiples of 1/64. Laplace is always a candidate, and all there is for delta = 0. The more cells share
    the budget, the larger is the exponent.

    Guarantee: that of `scale_for`.
    """
    return _best_exponent(_Asked(*_budget(epsilon, delta), _groups(shift, cells, others)))


@lru_cache(maxsize=1024)
def _best_exponent(asked: _Asked) -> DiscreteProfile:
    laplace = asked.profile(1.0, _scale_for(asked, 1.0))
    if asked.delta == 0.0:
        return laplace
    found, scales = {0: laplace.variance}, {0: laplace.scale_in_steps}

    def variance(index: int) -> float:
        if index not in found:
            finite = [other for other in found if found[other] < math.inf]
            t, nearest = 1.0 + index / _EXPONENTS, found[min(finite, key=lambda other: abs(other - index))]
            try:
                scales[index] = asked.rough_scale(t, asked.matching(t, nearest))
                found[index] = steps_variance(t, scales[index])
            except NotCertifiable:  # no scale in range
                found[index] = math.inf
        return found[index]

    best = min((0, 18, 40, _EXPONENTS), key=variance)
    while (vertex := _vertex(found, best)) not in found:
        variance(vertex)
        best = min(found, key=found.__getitem__)
    if best == 0:
        return laplace
    t = 1.0 + best / _EXPONENTS
    return min(laplace, asked.profile(t, asked.scale(t, scales[best])), key=lambda profile: profile.variance)


def _vertex(found: dict[int, float], best: int) -> int:
    """Where the parabola through the best point and its neighbours is least; at an end, half way to the next point."""
    below, above = [i for i in found if i < best], [i for i in found if i > best]
    if not (below and above):
        nearest = min(above) if above else max(below)
        return (best + nearest) // 2 if abs(best - nearest) > _NEAR else best
    left, right = max(below), min(above)
    rise, fall = (found[right] - found[best]) / (right - best), (found[best] - found[left]) / (best - left)
    if not (math.isfinite(rise - fall) and rise > fall):
        return best
    return round(0.5 * (left + best) - 0.5 * fall * (right - left) / (rise - fall))


def _budget(epsilon: float, delta: float) -> tuple[float, float]:
    epsilon = _check.at_least_zero("epsilon", epsilon)
    if not 0.0 <= _check.number("delta", delta) < 1.0 or epsilon == delta == 0.0:
        raise InvalidInput(f"delta must lie between 0 and 1, and not be 0 with epsilon = 0, got {_check.shown(delta)}")
    if not epsilon <= 1000.0 or 0.0 < delta < 1e-280:
        raise InvalidInput("epsilon must be at most 1000, and delta 0 or at least 1e-280")
    return epsilon, float(delta)


def _groups(shift: int, cells: int, others: Groups) -> Groups:
    return tuple((_check.count("shift", m), _check.count("cells", n)) for m, n in ((shift, cells), *others))


@dataclass(frozen=True)
class _Asked:
    """A budget and a change: what a scale is sought for."""

    epsilon: float
    delta: float
    groups: Groups

    @property
    def shift(self) -> int:
        """The most steps that an entry changes by."""
        return max(shift for shift, _ in self.groups)

    def length(self, power: int) -> float:
        """The l1 or l2 norm of the change, in steps; for 0, how many entries change."""
        total = sum(shift**power * cells for shift, cells in self.groups)
        return math.sqrt(total) if power == 2 else total

    def profile(self, exponent: float, scale: float) -> DiscreteProfile:
        """The profile that such noise would have."""
        return DiscreteProfile(exponent, scale, *self.groups[0], self.groups[1:])

    def excess(self, exponent: float, tolerance: float | None = None) -> Callable[[float], float]:
        """log of delta over what is allowed, as a function of the scale; 0 or below is private."""

        @cache
        def function(scale: float) -> float:
            stride = max(int(scale / _FINE), 1) if tolerance == _ROUGH else 1
            found = _delta(exponent, scale, self.groups, self.epsilon, tolerance, 0.01 * self.delta, stride)
            return max(_log(found / self.delta), -10.0)

        return function

    def scale(self, exponent: float, rough: float | None = None) -> float:
        """The least scale found at which delta is small enough."""
        if exponent == 1.0:
            return self._change_of_sign(1.0, self.excess(1.0), self._laplace_guess(), _ROOT)
        if rough is None:
            rough = self.rough_scale(exponent, self.matching(exponent))
        excess = self.excess(exponent, CLOSE)
        found = self._change_of_sign(exponent, excess, rough, _CLOSE_ROOT)
        if found <= min(_DISCRETE * self.shift, _SMALL):
            found = self._smaller(exponent, excess, found)
        exact, step = self.excess(exponent), 1e-10 * found
        while not exact(found) <= 0.0:
            found, step = found + step, 2.0 * step
        return found

    def rough_scale(self, exponent: float, guess: float) -> float:
        """A scale at which delta changes from too large to small enough, to about 1e-4 and with a rougher delta.

        By a saddle point where many atoms contribute.
        """
        if self.length(0) < _MANY or guess < self.shift:
            return self._change_of_sign(exponent, self.excess(exponent, _ROUGH), guess, 1e-4)
        about, allowed = Saddlepoint(exponent, self.groups, self.epsilon), math.log(self.delta)
        return self._change_of_sign(exponent, lambda scale: max(about.log_delta(scale) - allowed, -10.0), guess, 1e-4)

    def _laplace_guess(self) -> float:
        """Where the largest loss alone is above epsilon, the root; else from a coarser grid, or as for Gaussian noise.

        The largest loss is (sum of shifts) a, with probability (1 + q)^-k, q = e^-a, a = 1/scale.
        """
        total, cells = _total(self.groups), self.length(0)
        rate = self.epsilon / total
        for _ in range(3):
            share = self.delta * math.exp(cells * math.log1p(math.exp(-rate)))
            if not share < 0.999 * -math.expm1(-2.0 * rate):
                break
            rate = (self.epsilon - math.log1p(-share)) / total
        else:
            return min(max(1.0 / rate, LEAST_SCALE), largest_scale(1.0))
        if cells == 1 or self.shift < 64:
            return self.matching(1.0)
        coarse = _Asked(self.epsilon, self.delta, tuple((max(shift // 16, 1), cells) for shift, cells in self.groups))
        return min(coarse.scale(1.0) * self.shift / coarse.shift, largest_scale(1.0))

    def _change_of_sign(
        self, exponent: float, excess: Callable[[float], float], guess: float, tolerance: float
    ) -> float:
        """A scale at which delta is small enough, and at one that is less by the tolerance, relative, it is not.

        By the secant method, in logarithms, inside what is known to be too small and small enough.
        """
        low, high, largest = 0.0, math.inf, largest_scale(exponent)
        slope = -2.0 + 2.0 * math.log(self.delta)  # as for Gaussian noise
        scale, before = guess, (0.0, 0.0)
        for attempt in itertools.count():
            value = excess(scale)
            if attempt and scale != before[0] and min(value, before[1]) > -10.0:
                slope = min((value - before[1]) / math.log(scale / before[0]), -0.1)
            low, high = (scale, high) if value > 0.0 else (low, scale)
            if low >= largest:
                raise NotCertifiable("no scale in range keeps the budget; use a coarser grid, or exponent 1")
            if high <= max(low * (1.0 + tolerance), LEAST_SCALE) or slope * tolerance <= value <= 0.0:
                break
            # a little to the private side, so that the last step ends there
            step = min(max(-value / slope + 0.3 * tolerance, -0.7), 0.7)
            before, scale = (scale, value), scale * math.exp(step)
            if not low < scale < high or attempt > _SECANTS:
                scale = (
                    math.sqrt(low * high) if low > 0.0 and high < math.inf else before[0] * 2.0 ** (1 if low else -1)
                )
            scale = min(max(scale, LEAST_SCALE), largest)
        return high

    def _smaller(self, exponent: float, excess: Callable[[float], float], scale: float) -> float:
        """The same, or a smaller scale that is private as well, where delta is not monotone."""
        rough = self.excess(exponent, _ROUGH)
        for tried in (scale * 0.98**i for i in range(59, 0, -1)):
            if tried >= LEAST_SCALE and rough(tried) <= 0.01 and excess(tried) <= 0.0:
                below = max(0.98 * tried, LEAST_SCALE)
                return _crossing(excess, below, tried, _CLOSE_ROOT) if excess(below) > 0.0 else tried
        return scale

    def matching(self, exponent: float, variance: float | None = None) -> float:
        """The scale with about this variance, by default that of Gaussian noise or, if it is less, for pure privacy."""
        moments = scipy.special.gammaln([1.0 / exponent, 3.0 / exponent])
        factor = math.exp(0.5 * float(moments[0] - moments[1]))
        if variance is not None:
            return min(max(factor * math.sqrt(variance), LEAST_SCALE), largest_scale(exponent))
        z = math.sqrt(-2.0 * math.log(self.delta))
        mu = 2.0 * self.epsilon / (z + math.sqrt(z * z + 2.0 * self.epsilon)) + 2.5 * self.delta
        std = self.length(2) / mu
        if self.epsilon > 0.0:
            std = min(std, math.sqrt(2.0) * self.length(1) / self.epsilon)
        return min(max(factor * std, LEAST_SCALE), largest_scale(exponent))
