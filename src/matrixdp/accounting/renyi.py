"""Rényi divergences of compositions, rounded up; `privacy.renyi` has those of one release.

They add up over the releases of a composition.

- Sampled Gaussian noise under add/remove: from dp-accounting (mironov2019renyi), plus more than its rounding error.
- Other sampled releases: that of the release without sampling, which is an upper bound.
- A release that is only stated to be rho-concentrated (zCDP): alpha rho, by definition.
- A release that is only stated to have a pure epsilon E: that of randomized response with E, which dominates it at
  every epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp._rounding import rounded_up
from matrixdp.accounting.stated import StatedCurve
from matrixdp.adjacency import REPLACE
from matrixdp.privacy.cells import TINY, UNIT
from matrixdp.privacy.guarantee import GaussianProfile, Profile
from matrixdp.privacy.records import register
from matrixdp.privacy.renyi import divergence

_ORDERS = 1.0 + np.geomspace(1e-3, 1e6, 4000)  # at which concentrated privacy is converted

Orders = tuple[float, ...]


@dataclass(frozen=True)
class Concentrated:
    """The profile of a release of which only rho-zero-concentrated differential privacy is known.

    Guarantee: if the Rényi divergence is at most alpha rho at every order alpha > 1, in both directions, then
    delta(epsilon) is at least that of the release. It is the best bound over a grid of orders.
    Source: canonne2020discrete, Proposition 12.
    """

    rho: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", _check.at_least_zero("rho", self.rho))

    def delta(self, epsilon: float) -> float:
        """The least delta found at this epsilon."""
        if self.rho == 0.0:
            return 0.0
        epsilon = _check.at_least_zero("epsilon", epsilon)
        found = log_delta(_ORDERS, _ORDERS * self.rho, epsilon)
        found = found + 16.0 * UNIT * _ORDERS * (_ORDERS * self.rho + epsilon + 16.0)  # more than its rounding
        return min(1.0, math.exp(min(float(np.min(found)), 0.0)) * (1.0 + 1e-12) + TINY)

    def epsilon(self, delta: float) -> float:
        """The least epsilon found at this delta."""
        if self.rho == 0.0 or not delta > 0.0:
            return 0.0 if self.rho == 0.0 else math.inf
        added, of_order = math.log(delta), log_delta(_ORDERS, 0.0, 0.0)
        found = _ORDERS * self.rho + (of_order - added) / (_ORDERS - 1.0)
        rounding = 1e-12 * (_ORDERS * self.rho + (np.abs(of_order) + abs(added) + _ORDERS) / (_ORDERS - 1.0))
        return max(0.0, float(np.min(found + rounding)))

    def __str__(self) -> str:
        return f"rho = {rounded_up(self.rho)}"


register("concentrated", Concentrated)


def divergences(steps: Mapping[tuple[Profile, float], int], adjacency: str, orders: Orders) -> Array:
    """The divergence of a composition at each order, rounded up; `steps` counts each (profile, sampling rate)."""
    total = np.zeros(len(orders))
    for (profile, rate), count in steps.items():
        total += count * np.array(_divergences(profile, 1.0 if adjacency == REPLACE else rate, orders))
    return np.asarray(total * (1.0 + 16.0 * UNIT * (len(steps) + 4)))


@lru_cache(maxsize=1024)
def _divergences(profile: Profile, rate: float, orders: Orders) -> tuple[float, ...]:
    if isinstance(profile, GaussianProfile) and rate < 1.0:
        return _sampled_gaussian(profile.mu, rate, orders)
    if isinstance(profile, Concentrated):
        return tuple(order * profile.rho * (1.0 + 4.0 * UNIT) for order in orders)
    if isinstance(profile, StatedCurve) and profile.pure_epsilon < math.inf:
        return tuple(_randomized_response(profile.pure_epsilon, order) for order in orders)
    return tuple(divergence(profile, order) for order in orders)


def _randomized_response(epsilon: float, order: float) -> float:
    """log(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a-1), with p = e^epsilon / (1 + e^epsilon)."""
    total = float(np.logaddexp((order - 1.0) * epsilon, -order * epsilon)) - math.log1p(math.exp(-epsilon))
    return (max(total, 0.0) + 16.0 * UNIT * (order * epsilon + 1.0)) / (order - 1.0)


def _sampled_gaussian(mu: float, rate: float, orders: Orders) -> tuple[float, ...]:
    """The divergences from dp-accounting, plus more than their rounding error."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    accountant = rdp.RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent((1.0 - 4.0 * UNIT) / mu)))
    at = np.array(orders)
    margin = 32.0 * UNIT * at * (4.0 + np.log(at) - math.log(rate) + at * mu**2) / (at - 1.0)
    return tuple(np.maximum(np.asarray(accountant.rdp), 0.0) + margin)


def log_delta(order: Any, divergence: Any, epsilon: float) -> Any:
    """log of the delta that a divergence implies at an epsilon, from (x - e^epsilon)_+ <= c x^order for all x.

    Source: canonne2020discrete, Proposition 12.
    """
    return (order - 1.0) * (divergence - epsilon) + order * np.log1p(-1.0 / order) - np.log(order - 1.0)


def largest_divergence(order: float, epsilon: float, delta: float) -> float:
    """The largest divergence that implies (epsilon, delta), rounded down; negative if none does."""
    found = epsilon + (math.log(delta) - float(log_delta(order, 0.0, 0.0))) / (order - 1.0)
    return found - 1e-12 * (abs(found) + 1.0)
