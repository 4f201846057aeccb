"""Dominating pairs: two laws that bound one release, with or without sampling of the records, at every epsilon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy import gaussian
from matrixdp.privacy.cells import UNIT, CellLoss
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import Curve, GaussianProfile, Profile, chords

_POINTS, _LAST_DELTA = 160, 1e-30  # points on the curve of noise that is not Gaussian, and delta at the last of them
_LARGEST_EPSILON = 2.0**9  # the last point of a curve whose delta never falls so low


def check_sampling_rate(value: float) -> float:
    """The sampling rate as a float, if it is above 0 and at most 1."""
    if not 1e-100 <= _check.number("sampling_rate", value) <= 1.0:
        raise InvalidInput(
            f"sampling_rate must be above 0 (from 1e-100) and at most 1, got {_check.shown(value)}; "
            "1 means every record is used"
        )
    return float(value)


def check_profile(profile: Profile) -> None:
    """Raises NotCertifiable for what is not a profile."""
    if not (isinstance(profile, Profile) and callable(profile.delta) and callable(profile.epsilon)):
        raise NotCertifiable(
            f"no composition is known for the profile of kind {_check.kind(profile)}: it must be hashable, with "
            "delta(epsilon) and epsilon(delta)"
        )


@lru_cache(maxsize=64)
def curve_points(profile: Profile) -> tuple[Array, Array]:
    """Points on the curve of noise that is not Gaussian, denser towards epsilon = 0; each may take milliseconds.

    Between them the curve is bounded by chords (`guarantee.chords`), beyond the last by the delta of the last.
    """
    if isinstance(profile, Curve):
        epsilons, deltas = np.array(profile.epsilons), np.array(profile.deltas)
    else:
        epsilons = _last_epsilon(profile) * np.linspace(0.0, 1.0, _POINTS + 1) ** 2
        deltas = np.array([profile.delta(float(epsilon)) for epsilon in epsilons])
    if not deltas[-1] < 1.0:
        raise NotCertifiable(f"delta is 1 at every epsilon up to {epsilons[-1]:g} for {profile}: it hides nothing")
    return epsilons, deltas


def _last_epsilon(profile: Profile) -> float:
    """The epsilon at which delta is 0 or negligible, or within 0.1 % of its limit."""
    pure = float(getattr(profile, "pure_epsilon", math.inf))  # where delta reaches 0, if the profile knows
    last = pure if pure < math.inf else profile.epsilon(_LAST_DELTA)
    if not last < math.inf:
        last, limit = 2.0**-20, profile.delta(_LARGEST_EPSILON)
        while last < _LARGEST_EPSILON and not profile.delta(last) <= 1.001 * limit:
            last *= 2.0
    return max(last, 1e-12)


@dataclass(frozen=True)
class Pair:
    """A pair of laws (P', Q') that bounds one release that uses each record with probability q, independently.

    Let (P, Q) be the pair of a certificate, and H its curve `sup over events of P - e^epsilon Q`, which is the same in
    both directions. By joint convexity, over the other sampled records, these pairs and curves bound the release:

        add/remove   ((1-q) Q + q P, Q), one record more in the first data set:   q H(log((e^epsilon - 1 + q) / q))
                     (P, (1-q) P + q Q), one record more in the second:           a H(log(q e^epsilon / a)),
                                                                                  a = 1 - (1-q) e^epsilon
        replace      ((1-q) R + q P, (1-q) R + q Q), R apart from P and Q:        q H(epsilon) for epsilon >= 0

    The first two are exact. In the third, the record is not sampled with probability 1 - q. A certificate for replaced
    records says nothing about a sample without the record, so no better pair follows from it. Hence sampling lowers
    epsilon and delta under add/remove, but only delta under replace.

    Guarantee: for every real epsilon `curve` is at least that of the release; so products of pairs bound compositions.
    Source: zhu2022optimal, on Poisson sampling, for add/remove. Deviates: replace, as above.

    Attributes:
        profile: the profile of the certificate.
        rate: q.
        sampled_first: True if the first law is the mixture, False if the second is; None under replace, or if q = 1.
    """

    profile: Profile
    rate: float
    sampled_first: bool | None

    @property
    def atomic(self) -> bool:
        """Whether this is discrete noise without sampling: the loss is a sum of independent ones with known atoms."""
        return isinstance(self.profile, DiscreteProfile) and self.rate == 1.0

    def atoms(self, floor: float) -> list[tuple[CellLoss, int]]:
        """The independent losses that add up to this one, each with its multiplicity; empty if it is not atomic.

        Args:
            floor: the largest mass that may be cut off and counted as an infinite loss.
        """
        if not (isinstance(self.profile, DiscreteProfile) and self.rate == 1.0):
            return []
        return self.profile.losses(floor)

    def curve(self, epsilon: Array) -> Array:
        """H of the pair at any real epsilon, rounded up."""
        q = self.rate
        epsilon = epsilon * (1.0 - 4.0 * UNIT * np.sign(epsilon))  # H falls, so this rounds up
        if self.sampled_first is None:
            return self._symmetric(epsilon, q)
        edge = math.log1p(-q)  # losses are at least this if the first law is the mixture, else at most its negative
        inside = epsilon > edge if self.sampled_first else epsilon < -edge
        bounded = np.where(inside, epsilon, 0.0)
        factor: Array | float
        if self.sampled_first:
            factor, outside = q, -np.expm1(np.minimum(epsilon, 0.0))
            far = bounded - math.log(q) + np.log(-np.expm1(edge - bounded))
        else:
            factor, outside = -np.expm1(edge + bounded), np.zeros(1)
            far = bounded + math.log(q) - np.log(factor)
        near = np.log1p(np.maximum(np.expm1(np.clip(bounded, -1.0, 1.0)) / factor, UNIT - 1.0))  # keeps small ones
        inner = np.where(np.abs(bounded) < 1.0, near, far)
        inner -= 8.0 * UNIT * (np.abs(inner) + np.abs(bounded) * (1.0 - 2.0 * math.log(q)))  # more than its rounding
        return np.where(inside, factor * self._symmetric(inner, 1.0), outside)

    def _symmetric(self, epsilon: Array, factor: float) -> Array:
        """factor * H; for epsilon below 0 by the symmetry H(-x) = 1 - e^-x + e^-x H(x)."""
        size = np.abs(epsilon)
        if isinstance(self.profile, GaussianProfile):
            value = factor * np.asarray(gaussian.delta(self.profile.mu, size))
        else:
            value = factor * chords(*curve_points(self.profile), size)
        return np.where(epsilon < 0.0, np.exp(-size) * value - np.expm1(-size), value) * (1.0 + 8.0 * UNIT)

    def window(self, floor: float) -> tuple[float, float]:
        """The range of losses to cover: above it H is at most the floor, or the delta of the last known point."""
        q = self.rate
        reach = self._reach(min(floor / q, 0.5))
        if self.sampled_first is None:
            return -reach, reach
        far, near = float(np.logaddexp(math.log1p(-q), math.log(q) + reach)), min(-math.log1p(-q), reach)
        return (-near, far) if self.sampled_first else (-far, near)

    def _reach(self, floor: float) -> float:
        if isinstance(self.profile, GaussianProfile):
            return max(float(gaussian.epsilon(self.profile.mu, floor)), self.profile.mu)
        epsilons, deltas = curve_points(self.profile)
        below = np.flatnonzero(deltas[1:] <= floor)
        return float(epsilons[1 + below[0] if below.size else -1])
