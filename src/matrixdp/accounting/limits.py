"""Privacy filters other than the Gaussian one: what a block costs in each, and the total cost that each allows.

Each filter is fixed in advance with a share d of the budget's delta. An interaction that stops before the filter is
exceeded is (epsilon, d)-differentially private, whatever is chosen in view of earlier answers. Costs add up along a
transcript. They are computed for noise that is drawn exactly from its law.

- *Pure noise and Gaussian noise* (`PureAndGaussian`): delta_mu(epsilon - E) <= d. The pure epsilons of all blocks that
  are not Gaussian add up to at most E, and the squares of mu of the Gaussian ones to at most mu^2.
  Proof: let R have the Gaussian blocks of the neighbour Q and all others of P. P and R differ in Gaussian blocks alone,
  so P(S) <= e^(epsilon - E) R(S) + d (smith2022fully). R and Q differ in the others alone, and the ratio of their
  densities is at most e^E along every transcript, so R(S) <= e^E Q(S).
  With no Gaussian block E may be a little above epsilon: an (E, 0)-private release is (epsilon, d)-private if
  e^E - e^epsilon <= d (1 + e^E), as randomized response is the worst case (kairouz2017composition).
  A release stated by a curve that ends at (E, d) is no worse than randomized response with E that reveals everything
  with probability d (kairouz2017composition). So it costs E, and d is added to what the samplers reveal.
- *Rényi* (`Renyi`), at a fixed order: the divergences add up to at most R, which implies (epsilon, d)
  (feldman2021individual, for divergences that are chosen in view of earlier answers).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from matrixdp.accounting.methods import Use, pure_epsilon
from matrixdp.accounting.renyi import Orders, divergences, largest_divergence, log_delta
from matrixdp.accounting.stated import StatedCurve
from matrixdp.budget import Budget
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import GaussianProfile, Profile

_UP = 1.0 + 2.0**-48  # more than the rounding of the few operations that follow one another here
PURE = 0.01
"""The share of delta of the filter for pure noise alone."""
MIXED = ((0.25, 0.01), (0.5, 0.01), (0.75, 0.01))
"""Shares of epsilon for pure noise, and shares of delta, of the filters for pure and Gaussian noise."""
RENYI = ((1.0, 0.03), (2.0, 0.02), (5.0, 0.02))
"""Orders of the Rényi filters, relative to the best for Gaussian noise, and their shares of delta."""
_ABOVE = 1e-3  # added to each share of epsilon in MIXED, so that releases of exactly that share fit
_MOST_ORDER = 2**16


@dataclass(frozen=True)
class Cost:
    """What blocks cost in each filter.

    Attributes:
        squares: the sum of mu^2 of Gaussian noise, as if it were not sampled.
        pure: the sum of the pure epsilons of all releases except Gaussian ones without sampling; infinite if one of
            them has no pure epsilon, such as sampled Gaussian noise.
        renyi: the Rényi divergence of all releases at each order of the filters.
        revealed: a bound on the probability that something is revealed by the samplers, or by stated curves that do
            not end at delta = 0; see `Use.revealed`.
    """

    squares: float
    pure: float
    renyi: tuple[float, ...]
    revealed: float


def cost(block: Mapping[Use, int], adjacency: str, orders: Orders) -> Cost:
    """The cost of a block, rounded up."""
    rest = {use: count for use, count in block.items() if not use.gaussian}
    squares = [count * use.profile.mu**2 for use, count in block.items() if isinstance(use.profile, GaussianProfile)]
    steps: Counter[tuple[Profile, float]] = Counter()
    for use, count in block.items():
        steps[use.profile, use.sampling_rate] += count
    ended = {use: use.profile for use in rest if isinstance(use.profile, StatedCurve)}
    pure = [pure_epsilon({use: count for use, count in rest.items() if use not in ended})]
    pure += [rest[use] * curve.epsilons[-1] for use, curve in ended.items()]
    revealed = [count * use.revealed() for use, count in block.items()]
    revealed += [rest[use] * curve.deltas[-1] for use, curve in ended.items()]
    return Cost(
        squares=math.fsum(squares) * _UP,
        pure=math.fsum(pure) * (_UP if ended else 1.0),
        renyi=tuple(map(float, divergences(steps, adjacency, orders))),
        revealed=math.fsum(revealed) * _UP,
    )


def total(costs: Mapping[Cost, int]) -> Cost:
    """The sum of costs, each as often as it occurred, rounded up."""

    def added(values: list[float]) -> float:
        return math.fsum(count * value for value, count in zip(values, costs.values(), strict=True)) * _UP

    return Cost(
        squares=added([each.squares for each in costs]),
        pure=added([each.pure for each in costs]),
        renyi=tuple(added(list(values)) for values in zip(*(each.renyi for each in costs), strict=True)),
        revealed=added([each.revealed for each in costs]),
    )


@dataclass(frozen=True)
class PureAndGaussian:
    """Allows a total of `pure` in pure epsilons and of `mu` in Gaussian noise; delta_mu(epsilon - pure) <= `delta`."""

    pure: float
    mu: float
    delta: float

    def holds(self, cost: Cost) -> bool:
        """Whether this cost is allowed."""
        return cost.pure <= self.pure and cost.squares <= self.mu**2 / _UP

    def epsilon(self, cost: Cost) -> float:
        """The epsilon that the cost would need with this filter, at its delta."""
        if not cost.pure <= self.pure:
            return math.inf
        if self.mu == 0.0:
            return cost.pure if cost.squares == 0.0 else math.inf
        return self.pure + float(gaussian.epsilon(math.sqrt(cost.squares) * _UP, self.delta))

    def room(self, cost: Cost) -> float:
        """The largest mu of one more Gaussian release, rounded down."""
        return math.sqrt(max(self.mu**2 / _UP**2 - cost.squares, 0.0)) / _UP if cost.pure <= self.pure else 0.0

    def pure_room(self, cost: Cost) -> float:
        """The largest pure epsilon of one more exactly drawn release, rounded down."""
        return max(self.pure / _UP**2 - cost.pure, 0.0) / _UP if cost.squares <= self.mu**2 / _UP**2 else 0.0


@dataclass(frozen=True)
class Renyi:
    """Allows Rényi divergences up to `divergence`, in total, at one order; `place` is its index in `Cost.renyi`."""

    place: int
    order: float
    divergence: float
    delta: float

    def holds(self, cost: Cost) -> bool:
        """Whether this cost is allowed."""
        return cost.renyi[self.place] <= self.divergence

    def epsilon(self, cost: Cost) -> float:
        """The epsilon that the cost would need with this filter, at its delta."""
        spent = cost.renyi[self.place]
        return spent + (float(log_delta(self.order, 0.0, 0.0)) - math.log(self.delta)) / (self.order - 1.0)

    def room(self, cost: Cost) -> float:
        """The largest mu of one more Gaussian release, rounded down."""
        return math.sqrt(2.0 * max(self.divergence / _UP - cost.renyi[self.place], 0.0) / self.order) / _UP


Limit = PureAndGaussian | Renyi


@lru_cache(maxsize=64)
def orders_for(budget: Budget) -> Orders:
    """The orders of the Rényi filters: integers, for which the divergence of sampled Gaussian noise is a finite sum."""
    best = 1.0 + 2.0 * math.log(1.0 / budget.delta) / budget.epsilon
    return tuple(float(min(max(round(factor * best), 2), _MOST_ORDER)) for factor, _ in RENYI)


@lru_cache(maxsize=64)
def limits_for(budget: Budget) -> tuple[Limit, ...]:
    """The filters for a budget, other than the Gaussian one."""
    epsilon, pure = budget.epsilon, PURE * budget.delta
    found: list[Limit] = [
        PureAndGaussian(epsilon + (math.log1p(pure * math.exp(-epsilon)) - math.log1p(-pure)) / _UP, 0.0, pure)
    ]
    for part, share in MIXED:
        most, delta = (part + _ABOVE) * epsilon, share * budget.delta
        found.append(PureAndGaussian(most, float(gaussian.mu(epsilon - most, delta)), delta))
    for place, (order, (_, share)) in enumerate(zip(orders_for(budget), RENYI, strict=True)):
        delta = share * budget.delta
        found.append(Renyi(place, order, largest_divergence(order, epsilon, delta), delta))
    return tuple(found)
