"""Rényi divergences of releases, rounded up.

For alpha > 1, `D = log(E_Q (P/Q)^alpha) / (alpha - 1)` adds up over independent releases. x^alpha is convex, so D is an
f-divergence: what a pair that dominates at every real epsilon has is at least what the dominated pair has (Blackwell).
Profiles are those of the worst difference of a set at every real epsilon (`privacy.discrete`, 1. to 3.; for Gaussian
noise the largest mu), and are the same in both directions. Hence D of a profile's own pair is the largest on the set.

- Gaussian noise: alpha mu^2 / 2.
- Discrete noise: a sum of `log(E_P e^((alpha - 1) l)) / (alpha - 1)` over the entries, from the losses l. For
  exponent 1 there are finitely many. Otherwise the terms of the sum, e^f(x) at j = -x, are such that
  f(x) = -phi(x) + (alpha - 1)(phi(x + m) - phi(x)) is concave for x >= 0: phi' increases, and phi'' decreases for
  1 <= t <= 2. So what lies beyond any x is at most a geometric series with the ratio e^(f(x) - f(x - 1)).
- Sampled Gaussian noise under add/remove: dp-accounting's (mironov2019renyi), with more than its rounding added.
- Other sampled releases: sampling only hides more, so as without it.
- What is merely stated as rho-concentrated (zCDP): alpha rho, by definition.
- Of other profiles no divergence is known here: infinite.
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
from matrixdp.adjacency import REPLACE
from matrixdp.privacy.cells import TINY, UNIT, cell_loss, sum_rounding
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Profile
from matrixdp.privacy.records import register

_DEPTH = 60.0  # terms that are e^-60 of the largest are left to the bound on the rest
_MOST_TERMS = 2**21
_ORDERS = 1.0 + np.geomspace(1e-3, 1e6, 4000)  # at which concentrated privacy is converted

Orders = tuple[float, ...]


@dataclass(frozen=True)
class Concentrated:
    """The profile of what is known to be rho-zero-concentrated differentially private, and no more than that.

    Guarantee: the Rényi divergence is at most alpha rho at every order alpha > 1, in both directions. delta(epsilon) is
    at least that of every such release, by the best of some orders.
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
    """The divergence of a composition at each order: of (profile, sampling rate), so many times each; rounded up."""
    total = np.zeros(len(orders))
    for (profile, rate), count in steps.items():
        total += count * np.array(_divergences(profile, 1.0 if adjacency == REPLACE else rate, orders))
    return np.asarray(total * (1.0 + 16.0 * UNIT * (len(steps) + 4)))


@lru_cache(maxsize=1024)
def _divergences(profile: Profile, rate: float, orders: Orders) -> tuple[float, ...]:
    if isinstance(profile, GaussianProfile):
        if rate == 1.0:
            return tuple(0.5 * order * profile.mu**2 * (1.0 + 8.0 * UNIT) for order in orders)
        return _sampled_gaussian(profile.mu, rate, orders)
    if isinstance(profile, DiscreteProfile):
        groups = ((profile.shift, profile.cells), *profile.others)
        return tuple(
            math.fsum(
                cells * _of_cell(profile.exponent, profile.scale_in_steps, shift, order) for shift, cells in groups
            )
            for order in orders
        )
    if isinstance(profile, Concentrated):
        return tuple(order * profile.rho * (1.0 + 4.0 * UNIT) for order in orders)
    return (math.inf,) * len(orders)


def _of_cell(exponent: float, scale: float, shift: int, order: float) -> float:
    """The divergence of one entry with discrete noise that is shifted by so many steps."""
    more = order - 1.0
    if exponent == 1.0:
        loss = cell_loss(exponent, scale, shift)
        terms = np.log(loss.masses) + more * loss.losses
        return _log_sum(terms, more * float(loss.losses[0]) + 8.0) / more * (1.0 + 4.0 * UNIT)
    reach = (
        math.ceil(more * shift + scale * _DEPTH ** (1.0 / exponent)) + 1
    )  # the largest term is at more * shift or less
    if reach + shift > _MOST_TERMS:
        return math.inf
    phi = (np.arange(reach + shift + 1.0) / scale) ** exponent
    normaliser = math.log((2.0 * float(np.sum(np.exp(-phi[1:]))) + 1.0) * (1.0 - sum_rounding(phi.size)))
    places = np.arange(-reach, shift + reach + 1)
    near, far = phi[np.abs(places)], phi[np.abs(places - shift)]
    terms = -near + more * (far - near)
    size = 16.0 * UNIT * (order * float(np.max(near + far)) + 8.0)  # more than the rounding of a term
    ratio = math.exp(min(float(terms[0] - terms[1]) + 2.0 * size, 0.0))
    if not ratio < 1.0:
        return math.inf
    rest = [
        float(terms[0]) + math.log(ratio / (1.0 - ratio)),
        -float(near[-1]) - math.log(-math.expm1(near[-2] - near[-1])),
    ]
    total = _log_sum(np.append(terms, rest), 0.0) + 2.0 * size - normaliser
    return max(total, 0.0) / more * (1.0 + 4.0 * UNIT) + 8.0 * UNIT


def _log_sum(terms: Array, size: float) -> float:
    """log of the sum of exponentials, rounded up; each term was rounded in proportion to `size`."""
    largest = float(np.max(terms))
    total = float(np.sum(np.exp(terms - largest))) * (1.0 + sum_rounding(terms.size) + 800.0 * 4.0 * UNIT)
    return largest + math.log(total) + 8.0 * UNIT * (abs(largest) + size + 1.0)


def _sampled_gaussian(mu: float, rate: float, orders: Orders) -> tuple[float, ...]:
    """Of dp-accounting, with more than its rounding added."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    accountant = rdp.RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent((1.0 - 4.0 * UNIT) / mu)))
    at = np.array(orders)
    margin = 32.0 * UNIT * at * (4.0 + np.log(at) - math.log(rate) + at * mu**2) / (at - 1.0)
    return tuple(np.maximum(np.asarray(accountant.rdp), 0.0) + margin)


def log_delta(order: Any, divergence: Any, epsilon: float) -> Any:
    """log of the delta at an epsilon that follows from a divergence: (x - e^epsilon)_+ <= c x^order for all x.

    Source: canonne2020discrete, Proposition 12.
    """
    return (order - 1.0) * (divergence - epsilon) + order * np.log1p(-1.0 / order) - np.log(order - 1.0)


def largest_divergence(order: float, epsilon: float, delta: float) -> float:
    """The largest divergence from which (epsilon, delta) follows, rounded down; it may be negative: then none is."""
    found = epsilon + (math.log(delta) - float(log_delta(order, 0.0, 0.0))) / (order - 1.0)
    return found - 1e-12 * (abs(found) + 1.0)
