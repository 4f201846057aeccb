"""What many releases guarantee together: composition of certificates, with or without sampling of the records.

Gaussian releases without sampling compose in closed form, `mu^2 = sum mu_i^2`; all others by the laws of their privacy
losses (`losses`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import optimize

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import (
    Certificate,
    GaussianProfile,
    Profile,
    epsilon_with_sampling_error,
    with_sampling_error,
)
from matrixdp.privacy.composition import Noise, check_sampling_rate, dots
from matrixdp.privacy.losses import MOST_STEPS, Steps, by_losses
from matrixdp.sensitivity import RELATIONS

METHODS = ("auto", "exact", "pld", "renyi")

_UNIT = 2.0**-53
_LEAST_NOISE = 0.01  # of noise_multiplier_for

# --- a second answer ---


def _by_renyi(steps: Steps, relation: str, asked: str, value: float) -> float:
    """The same question answered by dp-accounting's Rényi accountant, with more than its rounding added."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    accountant, margin = rdp.RdpAccountant(), 0.0
    orders = accountant.orders
    for (noise, rate), count in steps.items():
        if not isinstance(noise, GaussianProfile) or (rate < 1.0 and relation == "replace"):
            raise NotCertifiable("method 'renyi' is for Gaussian noise, sampled under add/remove alone; use 'pld'")
        event = GaussianDpEvent((1.0 - 4.0 * _UNIT) / noise.mu)
        accountant.compose(event if rate == 1.0 else PoissonSampledDpEvent(rate, event), count)
        size = orders * (4.0 + np.log(orders) - math.log(rate) + orders * noise.mu**2)
        margin = margin + count * 32.0 * _UNIT * size / (orders - 1.0)
    convert = rdp.compute_epsilon if asked == "epsilon" else rdp.compute_delta
    return float(convert(orders, np.maximum(accountant.rdp, 0.0) + margin, value)[0]) * (1.0 + 1e-12)


def _answer(steps: Steps, relation: str, asked: str, value: float, method: str) -> float:
    """epsilon at this delta, or delta at this epsilon, never below the truth."""
    if not steps:
        return 0.0
    if method == "renyi":
        return _by_renyi(steps, relation, asked, value)
    ((noise, rate), count), *others = steps.items()
    if method != "pld" and not others and count == 1 and rate == 1.0:
        return noise.epsilon(value) if asked == "epsilon" else noise.delta(value)
    if method == "exact":
        raise NotCertifiable("no closed form for sampled releases, or several that are not Gaussian; use method 'pld'")
    answer, settled = by_losses(steps, relation, asked, value)
    if method == "auto" and not settled:
        try:
            return min(answer, _by_renyi(steps, relation, asked, value))
        except NotCertifiable:
            return answer
    return answer


def merged(entries: Iterable[tuple[Profile, float, int]]) -> Steps:
    """One step for each kind of release; Gaussian noise without sampling is one release with the root of sum mu^2."""
    steps: dict[tuple[Noise, float], int] = {}
    squares = []
    for noise, rate, count in entries:
        assert isinstance(noise, Noise)
        if isinstance(noise, GaussianProfile) and rate == 1.0:
            squares += [(noise.mu, count)]
        elif not (isinstance(noise, GaussianProfile) and noise.mu == 0.0):
            steps[noise, rate] = steps.get((noise, rate), 0) + count
    mu = math.sqrt(math.fsum(count * mu**2 for mu, count in squares)) * (1.0 + 8.0 * _UNIT)
    if [count for _, count in squares] == [1]:
        mu = squares[0][0]  # a single one may use the whole budget, and is not rounded
    return {(GaussianProfile(mu), 1.0): 1, **steps} if mu > 0.0 else steps


# --- the total-variation error of the samplers ---


def revealed(noise: Noise, total_variation: float, sampling_rate: float) -> float:
    """A probability k, so that the drawn release is no worse than one from its law that reveals all with probability k.

    Let D be the law's curve and t the total variation between law and sampler. For the drawn pair, H(e) is at most
    D(e) + (1 + exp e) t; and as H falls, at most D(e) + c for every e >= 0, with c = D(e0) + (1 + exp e0) t for any e0.
    Under Poisson sampling at rate q both directions of H are at most q, or less, times a value of the curve without
    sampling, so q c is added there. A pair that reveals all with probability k, and is as the law's otherwise, has the
    curve (1 - k) H + k; it lies above H + q c, in both directions, when k (1 - H(0)) >= q c, and H(0), the total
    variation of the law's pair, is at most q D(0). Over many releases k adds up, and is not multiplied by exp(epsilon)
    of the total.
    """
    t, q = total_variation, sampling_rate
    if t == 0.0:
        return 0.0
    if isinstance(noise, GaussianProfile):
        epsilons = np.linspace(0.0, 60.0, 241)
        deltas = np.asarray(gaussian.delta(noise.mu, epsilons))
    else:
        try:
            epsilons, deltas = dots(noise)
        except NotCertifiable:
            return math.inf
    c = float(np.min(deltas + (1.0 + np.exp(np.minimum(epsilons, 700.0))) * t))
    same = 1.0 - q * float(deltas[0]) * (1.0 + 1e-9)
    return q * c / same * (1.0 + 1e-9) if same > 0.0 else math.inf


# --- the public names ---


@dataclass(frozen=True)
class Entry:
    """What was added to an accountant."""

    certificate: Certificate
    count: int
    sampling_rate: float


def check_secret(certificate: Certificate) -> None:
    """Raises InvalidInput for the certificate of a seeded release: noise that can be repeated protects nothing."""
    if certificate.sampling is not None and certificate.sampling.reproducible:
        raise InvalidInput(
            "certificate must be that of a release with secret noise: seeded noise (rng=, generator=) is not private; "
            "leave the seed out. In a study, Accountant(reproducible=True) accounts for it"
        )


def _leak(entry: Entry) -> float:
    noise = entry.certificate.profile
    assert isinstance(noise, Noise)
    return revealed(noise, entry.certificate.total_variation, entry.sampling_rate)


class Accountant:
    """Adds up certificates: what do all these releases guarantee together?

    Guarantee: for all neighbours under `relation`, all releases together are (epsilon(delta), delta)-differentially
    private, also when a query depends on earlier answers; the certificates, counts and rates must not. (Where they do,
    keep a Ledger: its budget holds then, too.) Answers are never below the truth, and within about 1 % of the best that
    the certificates allow. Of spherical noise no delta below 1e-30 per release is known; where that is not
    enough, epsilon is infinite.
    Source: dong2022gaussian, Corollary 3.3, without sampling; zhu2022optimal and doroshenko2022connect, Algorithm 1,
        otherwise; mironov2019renyi for method "renyi".
    Deviates: 1. exact curves in place of densities; 2. the tilt; 3. replace with sampling, see composition.Pair.
    """

    def __init__(self, relation: str | None = None, *, reproducible: bool = False) -> None:
        """Starts with nothing spent.

        Args:
            relation: "add/remove" or "replace"; left out, that of the first certificate.
            reproducible: for studies alone: also takes certificates of seeded releases. Their noise can be repeated,
                so they are not private, and the answers are those that secret noise of the same law would have.
        """
        self._relation = None if relation is None else _check.choice("relation", relation, RELATIONS)
        self._reproducible = reproducible
        self._history: list[Entry] = []

    @property
    def relation(self) -> str | None:
        """The neighbouring relation of every certificate; None before the first."""
        return self._relation

    @property
    def history(self) -> tuple[Entry, ...]:
        """What was added, in order."""
        return tuple(self._history)

    def copy(self) -> Accountant:
        """An accountant with the same history, to try something out."""
        other = Accountant(self._relation, reproducible=self._reproducible)
        other._history = list(self._history)
        return other

    def add(self, certificate: Certificate, count: int = 1, sampling_rate: float = 1.0) -> None:
        """Adds `count` releases with this certificate.

        Args:
            certificate: of one release, on the records that it used.
            count: how many such releases.
            sampling_rate: the probability with which each record was used, independently of the others and anew for
                each release (Poisson sampling; shuffling, or batches of a fixed size, is something else). Neither the
                noise nor a divisor may depend on how many were drawn.
        """
        if not isinstance(certificate, Certificate):
            raise InvalidInput(f"certificate must be a Certificate, got {type(certificate)}; certify() makes one")
        if not self._reproducible:
            check_secret(certificate)
        if not isinstance(certificate.profile, Noise):
            raise NotCertifiable(f"no composition is known for the profile {certificate.profile!r}")
        count, rate = _check.count("count", count), check_sampling_rate(sampling_rate)
        if self._relation not in (None, certificate.relation):
            raise InvalidInput(
                f"certificate must have the relation {self._relation!r} like the others, got {certificate.relation!r}: "
                "guarantees about different neighbours do not add up; certify every release for the same relation"
            )
        self._relation = certificate.relation
        self._history.append(Entry(certificate, count, rate))

    def epsilon(self, delta: float, method: str = "auto") -> float:
        """The least epsilon that is proven at this delta.

        Args:
            delta: strictly between 0 and 1.
            method: "exact" (Gaussian noise without sampling, or a single release), "pld" (privacy-loss distributions,
                for everything), "renyi" (Gaussian noise, looser), or "auto", the best of them.
        """
        return self._ask("epsilon", _check.probability("delta", delta), method)

    def delta(self, epsilon: float, method: str = "auto") -> float:
        """The least delta that is proven at this epsilon, 0 or above; `method` as for epsilon."""
        return self._ask("delta", _check.at_least_zero("epsilon", epsilon), method)

    def _ask(self, asked: str, value: float, method: str) -> float:
        """The answer for the laws, and the total-variation errors of all samplers on top."""
        method = _check.choice("method", method, METHODS)
        steps = merged((entry.certificate.profile, entry.sampling_rate, entry.count) for entry in self._history)
        relation = self._relation or RELATIONS[0]
        variation = math.fsum(entry.count * entry.certificate.total_variation for entry in self._history)
        leaked = math.fsum(entry.count * _leak(entry) for entry in self._history) * (1.0 + 1e-12)
        if asked == "delta":
            found = _answer(steps, relation, "delta", value, method)
            added = math.nextafter(found + leaked, math.inf) if leaked else found
            return min(with_sampling_error(found, value, variation), added)
        left = math.nextafter(value - leaked, 0.0) if leaked else value
        found = _answer(steps, relation, "epsilon", left, method) if left > 0.0 else math.inf
        if variation == 0.0 or (found < math.inf and with_sampling_error(0.0, found, variation) >= leaked):
            return found
        return epsilon_with_sampling_error(
            lambda delta: _answer(steps, relation, "epsilon", delta, method), value, variation
        )


def noise_multiplier_for(
    epsilon: float, delta: float, sampling_rate: float, steps: int, relation: str = "add/remove"
) -> float:
    """The standard deviation of Gaussian noise, in units of the sensitivity, at which so many releases keep a budget.

    Guarantee: with it, an Accountant answers at most `epsilon` at `delta`, and at most `delta` at `epsilon`. The least
    multiplier that will do is at most 1 % below, without sampling only by a rounding error. The search ends at 0.01.

    Args:
        epsilon: above 0.
        delta: strictly between 0 and 1.
        sampling_rate: as for Accountant.add.
        steps: how many releases.
        relation: "add/remove" or "replace"; the sensitivity is that of the query without sampling.
    """
    budget, rate = Budget(epsilon, delta), check_sampling_rate(sampling_rate)
    steps, relation = _check.count("steps", steps), _check.choice("relation", relation, RELATIONS)
    if rate < 1.0 and not steps <= MOST_STEPS:
        raise InvalidInput(f"steps must be at most {MOST_STEPS} with sampling, got {steps}")

    def at(multiplier: float, asked: str, value: float) -> float:
        noise = GaussianProfile((1.0 + 4.0 * _UNIT) / multiplier)
        return _answer(merged([(noise, rate, steps)]), relation, asked, value, "auto")

    @cache
    def excess(multiplier: float) -> float:
        return math.log(max(at(multiplier, "epsilon", budget.delta), 1e-300) / budget.epsilon)

    unsampled = math.sqrt(steps) / float(gaussian.mu(budget.epsilon, budget.delta)) * (1.0 + 32.0 * _UNIT)
    if rate == 1.0:
        return unsampled
    high = max(rate * unsampled, _LEAST_NOISE)
    while excess(high) > 0.0:
        high *= 2.0
    low = 0.5 * high
    while low > _LEAST_NOISE and not excess(low) > 0.0:
        low, high = 0.5 * low, low
    answer = optimize.brentq(excess, low, high, rtol=5e-4) if low > _LEAST_NOISE else high
    while at(answer, "epsilon", budget.delta) > budget.epsilon or at(answer, "delta", budget.epsilon) > budget.delta:
        answer *= 1.002
    return float(answer)
