"""Rényi divergences of compositions, rounded up; `privacy.renyi` has those of one release.

They add up over independent releases.

- Sampled Gaussian noise under add/remove: dp-accounting's (mironov2019renyi), with more than its rounding added.
- Other sampled releases: sampling only hides more, so as without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from matrixdp._check import Array
from matrixdp.adjacency import REPLACE
from matrixdp.privacy.cells import UNIT
from matrixdp.privacy.guarantee import GaussianProfile, Profile
from matrixdp.privacy.renyi import divergence

Orders = tuple[float, ...]


def divergences(steps: Mapping[tuple[Profile, float], int], adjacency: str, orders: Orders) -> Array:
    """The divergence of a composition at each order: of (profile, sampling rate), so many times each; rounded up."""
    total = np.zeros(len(orders))
    for (profile, rate), count in steps.items():
        total += count * np.array(_divergences(profile, 1.0 if adjacency == REPLACE else rate, orders))
    return np.asarray(total * (1.0 + 16.0 * UNIT * (len(steps) + 4)))


@lru_cache(maxsize=1024)
def _divergences(profile: Profile, rate: float, orders: Orders) -> tuple[float, ...]:
    if isinstance(profile, GaussianProfile) and rate < 1.0:
        return _sampled_gaussian(profile.mu, rate, orders)
    return tuple(divergence(profile, order) for order in orders)


def _sampled_gaussian(mu: float, rate: float, orders: Orders) -> tuple[float, ...]:
    """Of dp-accounting, with more than its rounding added."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    accountant = rdp.RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent((1.0 - 4.0 * UNIT) / mu)))
    at = np.array(orders)
    margin = 32.0 * UNIT * at * (4.0 + np.log(at) - math.log(rate) + at * mu**2) / (at - 1.0)
    return tuple(np.maximum(np.asarray(accountant.rdp), 0.0) + margin)


def log_delta(order: float, divergence: float, epsilon: float) -> float:
    """log of the delta at an epsilon that follows from a divergence: (x - e^epsilon)_+ <= c x^order for all x.

    Source: canonne2020discrete, Proposition 12.
    """
    return (order - 1.0) * (divergence - epsilon) + order * math.log1p(-1.0 / order) - math.log(order - 1.0)


def largest_divergence(order: float, epsilon: float, delta: float) -> float:
    """The largest divergence from which (epsilon, delta) follows, rounded down; it may be negative: then none is."""
    found = epsilon + (math.log(delta) - log_delta(order, 0.0, 0.0)) / (order - 1.0)
    return found - 1e-12 * (abs(found) + 1.0)
