"""Scales of discrete noise that keep a budget, and the exponent with the least variance.

A search proposes a scale. Before it is returned, its delta is computed, rounded up, by `privacy.discrete`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import scipy

from matrixdp import _check
from matrixdp.distributions.product import steps_variance
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.mechanisms.solvers.saddlepoint import Saddlepoint
from matrixdp.privacy.cell_sums import CLOSE
from matrixdp.privacy.discrete import FAR_BELOW, DiscreteProfile, Groups, crossing, delta_of, is_pure, total_steps
from matrixdp.secure.tables import LEAST_SCALE, checked_exponent, largest_scale

_ROOT, _CLOSE_ROOT = 1e-12, 1e-7  # relative tolerance of a scale; the second where delta is approximate
_ROUGH = 3e-4  # relative error of delta during the search for an exponent
_EXPONENTS, _NEAR = 64, 2  # exponents are multiples of 1/64; at an end, the search stops within 2 of these
_DISCRETE, _SMALL = 4.0, 32.0  # below this many shifts and steps, delta may rise with the scale
_SECANTS = 20  # steps of the secant method before bisection
_FAR_ABOVE = 2.0  # log of a ratio of deltas, above the error of the saddle point
_MANY = 3  # from this many entries on, the search for an exponent uses the saddle point
_FINE = 48.0  # atoms per scale that suffice in the search for an exponent


def scale_for(
    epsilon: float, delta: float, shift: int = 1, cells: int = 1, exponent: float = 1.0, others: Groups = ()
) -> float:
    """The least scale found, in steps, at which the noise keeps the budget.

    For exponent 1 delta falls as the scale grows, since discrete Laplace noise of a larger scale is that of a smaller
    one plus independent noise. So this is the least scale, up to a relative 1e-11. For larger exponents delta can rise
    with the scale where the scale is about as large as the shift, so smaller scales are tried too, in steps of 2 %.

    Guarantee: `DiscreteProfile(exponent, scale, shift, cells, others).delta(epsilon) <= delta`, evaluated at this very
        scale.

    Args:
        epsilon: above 0, or 0 if delta is above 0.
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
    scale = max(total_steps(asked.groups) / epsilon, LEAST_SCALE)
    if not scale < largest_scale(1.0):
        raise NotCertifiable("no scale in range keeps the budget; use a coarser grid")
    while not is_pure(epsilon, scale, total_steps(asked.groups)):
        scale = math.nextafter(scale, math.inf)
    return scale


def best_exponent(epsilon: float, delta: float, shift: int = 1, cells: int = 1, others: Groups = ()) -> DiscreteProfile:
    """The exponent and scale with the least variance among those that keep the budget, as far as a search finds.

    Exponents are multiples of 1/64. Laplace is always a candidate, and the only one for delta = 0. The more cells
    change, the larger is the best exponent.

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
    """A budget and a change, for which a scale is searched."""

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
        """The profile of this noise."""
        return DiscreteProfile(exponent, scale, *self.groups[0], self.groups[1:])

    def excess(self, exponent: float, tolerance: float | None = None) -> Callable[[float], float]:
        """log(delta / allowed delta) as a function of the scale; the budget is kept at 0 or below."""

        @cache
        def function(scale: float) -> float:
            stride = max(int(scale / _FINE), 1) if tolerance == _ROUGH else 1
            found = delta_of(exponent, scale, self.groups, self.epsilon, tolerance, 0.01 * self.delta, stride)
            return math.log(max(found / self.delta, FAR_BELOW))

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
        """An approximate scale, to about 1e-4, at which delta falls to what is allowed, from an approximate delta.

        Uses a saddle point where many atoms contribute.
        """
        if not self._many(guess):
            return self._change_of_sign(exponent, self.excess(exponent, _ROUGH), guess, 1e-4)
        about, allowed = Saddlepoint(exponent, self.groups, self.epsilon), math.log(self.delta)
        return self._change_of_sign(exponent, lambda scale: max(about.log_delta(scale) - allowed, -10.0), guess, 1e-4)

    def _many(self, scale: float) -> bool:
        """Whether enough atoms contribute for the saddle point to approximate delta."""
        return self.length(0) >= _MANY and scale >= self.shift

    def _laplace_guess(self) -> float:
        """A first scale: the root if only the largest loss exceeds epsilon; else from a coarser grid or Gaussian noise.

        The largest loss is (sum of shifts) a, with probability (1 + q)^-k, q = e^-a, a = 1/scale.
        """
        total, cells = total_steps(self.groups), self.length(0)
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
        """A scale that keeps the budget while one smaller by the relative tolerance does not.

        Uses the secant method, in logarithms, within a bracket of scales that are too small and large enough.
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
        """A smaller scale that also keeps the budget, where delta is not monotone; else the same scale."""
        rough, about = self.excess(exponent, _ROUGH), Saddlepoint(exponent, self.groups, self.epsilon)
        for tried in (scale * 0.98**i for i in range(59, 0, -1)):
            if self._many(tried) and about.log_delta(tried) - math.log(self.delta) > _FAR_ABOVE:
                continue
            if tried >= LEAST_SCALE and rough(tried) <= 0.01 and excess(tried) <= 0.0:
                below = max(0.98 * tried, LEAST_SCALE)
                return crossing(excess, below, tried, _CLOSE_ROOT) if excess(below) > 0.0 else tried
        return scale

    def matching(self, exponent: float, variance: float | None = None) -> float:
        """The scale with about this variance; by default the smaller of those of Gaussian noise and of pure privacy."""
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
