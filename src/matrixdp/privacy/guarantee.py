"""What a release guarantees: delta for every epsilon, and for which neighbours; accountants and ledgers use no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp._rounding import rounded_up
from matrixdp.adjacency import Adjacency
from matrixdp.adjacency import checked as checked_adjacency
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.privacy import gaussian

# The relative amount by which mu is raised, so that rounding in sums and norms can never put it below the truth.
ROUNDING = 1e-12


@runtime_checkable
class Profile(Hashable, Protocol):
    """The least delta for every epsilon, rounded up, of a pair of laws; it holds in both directions.

    Profiles are immutable and hashable, so that an accountant can count equal ones.
    """

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta."""


@dataclass(frozen=True)
class GaussianProfile:
    """The profile of Gaussian noise, which mu determines."""

    mu: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", _check.at_least_zero("mu", self.mu))

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""
        return float(gaussian.delta(self.mu, epsilon))

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta; infinite at delta = 0, unless mu is 0."""
        if delta == 0:
            return math.inf if self.mu > 0 else 0.0
        return float(gaussian.epsilon(self.mu, delta))

    def __str__(self) -> str:
        return f"mu = {rounded_up(self.mu, 6)}"


@dataclass(frozen=True)
class Curve:
    """A profile known at some points; between them it is bounded by chords, as it is convex in e^epsilon.

    Attributes:
        epsilons: increasing, from 0.
        deltas: the delta at each epsilon; the last one also holds beyond.
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("epsilons", "deltas"):
            numbers = tuple(_check.at_least_zero(name, number) for number in getattr(self, name))
            object.__setattr__(self, name, numbers)
        rising = all(low < high for low, high in zip(self.epsilons, self.epsilons[1:], strict=False))
        falling = all(high >= low for high, low in zip(self.deltas, self.deltas[1:], strict=False))
        if not (len(self.epsilons) == len(self.deltas) >= 2 and self.epsilons[0] == 0 and rising and falling):
            raise InvalidInput("a curve needs at least two epsilons that increase from 0, and as many falling deltas")

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""
        at = np.array([_check.at_least_zero("epsilon", epsilon)])
        return float(chords(np.array(self.epsilons), np.array(self.deltas), at)[0]) * (1 + ROUNDING)

    def epsilon(self, delta: float) -> float:
        """The least epsilon found that holds at this delta."""
        if not self.deltas[-1] * (1 + ROUNDING) <= delta:
            return math.inf
        low, high = 0.0, self.epsilons[-1]
        if self.delta(low) <= delta:
            return low
        while high - low > 1e-12 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    def __str__(self) -> str:
        return f"delta {rounded_up(self.delta(1.0))} at epsilon 1"


def chords(epsilons: Array, deltas: Array, epsilon: Array) -> Array:
    """Chords, linear in e^epsilon, through these points, which bound a convex curve; constant beyond the last."""
    right = np.clip(np.searchsorted(epsilons, epsilon), 1, epsilons.size - 1)
    left, inside = right - 1, np.minimum(epsilon, epsilons[-1])
    gap = np.expm1(epsilons[left] - epsilons[right])
    to_left: Array = np.expm1(inside - epsilons[right]) / gap
    to_right: Array = np.exp(inside - epsilons[right]) * np.expm1(epsilons[left] - inside) / gap
    return deltas[left] * to_left + deltas[right] * to_right


@dataclass(frozen=True, eq=False)
class Guarantee:
    """What a release guarantees, for every epsilon and delta at once.

    Attributes:
        profile: delta for every epsilon, never below the truth.
        adjacency: which data sets are neighbours.
        total_variation: the total-variation error of the sampler, included in `delta` and `epsilon`.
    """

    profile: Profile
    adjacency: Adjacency
    total_variation: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.adjacency, Adjacency):
            object.__setattr__(self, "adjacency", checked_adjacency(self.adjacency))
        object.__setattr__(self, "total_variation", _check.at_least_zero("total_variation", self.total_variation))

    @property
    def relation(self) -> Adjacency:
        """Another name of `adjacency`."""
        return self.adjacency

    @property
    def mu(self) -> float | None:
        """The Gaussian differential privacy parameter; None for noise that is not Gaussian."""
        return self.profile.mu if isinstance(self.profile, GaussianProfile) else None

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""
        return with_total_variation(self.profile.delta(epsilon), epsilon, self.total_variation)

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta."""
        return epsilon_with_total_variation(self.profile.epsilon, delta, self.total_variation)

    def renyi(self, order: float) -> float:
        """An upper bound on the Rényi divergence at an order above 1, exact for Gaussian noise.

        Guarantee: the divergence of the outputs on any two neighbours is at most this, in both directions. It is
            infinite where no bound is known: for noise that is neither Gaussian nor discrete, and for a sampler with a
            total-variation error, which bounds no divergence. `certify(law, set)` has the divergence of the law.
        Source: mironov2017renyi. Deviates: none.
        """
        from matrixdp.privacy.renyi import divergence

        if not _check.number("order", order) > 1.0:
            raise InvalidInput(f"order must be above 1, got {_check.shown(order)}")
        return math.inf if self.total_variation > 0 else divergence(self.profile, float(order))

    def meets(self, budget: Budget) -> bool:
        """Whether this budget is kept."""
        ideal = _ideal_delta(self.profile, budget.epsilon)
        return with_total_variation(ideal, budget.epsilon, self.total_variation) <= budget.delta


@lru_cache(maxsize=256)
def _ideal_delta(profile: Profile, epsilon: float) -> float:
    """delta of a law drawn without error, cached: releases are often alike, and discrete noise takes milliseconds."""
    return profile.delta(epsilon)


def with_total_variation(delta: float, epsilon: float, total_variation: float) -> float:
    """delta for noise within total variation t of its law: P'(E) <= P(E) + t <= e^eps (Q'(E) + t) + delta + t."""
    if total_variation == 0:
        return delta
    # rounded up, because the sum may lose a term far below the last digit of delta
    total = delta + (1 + math.exp(min(epsilon, 700.0))) * total_variation * (1 + ROUNDING)
    return min(1.0, math.nextafter(total, math.inf))


def epsilon_with_total_variation(epsilon_at: Callable[[float], float], delta: float, total_variation: float) -> float:
    """epsilon for noise within a total variation of its law, from epsilon as a function of delta for the law itself.

    The error grows with epsilon, so epsilon is raised until the law needs no more than it at the delta that the error
    leaves. The epsilon that the law then needs is enough, because at a smaller epsilon the error leaves more of delta.
    """
    epsilon = epsilon_at(delta)
    if total_variation == 0:
        return epsilon
    for _ in range(100):
        left = math.nextafter(delta - with_total_variation(0.0, epsilon, total_variation), 0.0)
        needed = epsilon_at(left) if left > 0 else math.inf
        if needed <= epsilon or not math.isfinite(needed):
            return needed
        # slightly above what is needed now, so that this ends after a few steps
        epsilon = needed + max(1e-3 * (needed - epsilon), 1e-12 * needed)
    return math.inf
