"""What many releases guarantee together: composition of certificates, with or without sampling of the records.

Gaussian releases without sampling compose in closed form, `mu^2 = sum mu_i^2`. Otherwise each release is described by
a pair of laws (P, Q) whose curve `H(epsilon) = sup over events of P - e^epsilon Q` is at least that of every pair of
neighbours (composition.Pair); the product of the pairs then bounds the composition, also of queries that depend on
earlier answers (zhu2022optimal).

The loss log(P/Q) is put on a grid of step h, so that H is met on the grid and is linear in e^epsilon between, hence
never too small (doroshenko2022connect); h is halved until the answer settles. dp-accounting's Fourier transform adds
the losses, after an exponential tilt, e^(tilt l) p(l), that makes the losses that matter the likely ones: so rounding
is relative to the answer, not to 1, and delta = 1e-15 or 1e-100 comes out as well as 1e-5. A bound on the rounding of
the transform, to first order, is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy import optimize
from scipy.special import erfc

from matrixdp import _check
from matrixdp._check import Array
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
from matrixdp.privacy.composition import Noise, Pair, check_sampling_rate
from matrixdp.sensitivity import RELATIONS

METHODS = ("auto", "exact", "pld", "renyi")

_UNIT = 2.0**-53
_SETTLED = 0.003  # the change of epsilon, relative, below which halving h ends
_FIRST_CELLS, _MOST_CELLS, _MOST_SUMS = 256, 2**19, 2**22
_MOST_STEPS = 10**9  # beyond, rounding of the transform is no longer negligible
_SHARE, _LEAST_FLOOR = 1e-4, 1e-304  # of delta, given away for the losses above the grid
_TAIL = 1e-20  # tilted mass outside the window of the transform
_LEAST_NOISE = 0.01  # of noise_multiplier_for

Steps = Mapping[tuple[Noise, float], int]  # (profile, sampling rate) -> how often


# --- the sum of the losses ---


@dataclass(frozen=True)
class _Loss:
    """A loss on the grid, masses at (start + i) h and at infinity, and the number of its independent copies."""

    start: int
    masses: Array
    infinite: float
    count: int

    def log_terms(self, h: float, tilt: float) -> tuple[float, Array]:
        """log of sum e^(tilt l) p(l), and of its terms."""
        with np.errstate(divide="ignore"):
            terms = np.log(self.masses) + tilt * h * np.arange(self.start, self.start + self.masses.size)
        largest = float(terms.max())
        return largest + math.log(float(np.exp(terms - largest).sum())), terms


def _on_grid(pair: Pair, window: tuple[float, float], h: float, count: int) -> _Loss:
    """The law whose curve meets H on the grid; each mass is rounded up."""
    start, end = math.floor(window[0] / h), math.ceil(window[1] / h) + 1
    deltas = pair.curve(h * np.arange(start, end + 1, dtype=np.float64))
    drops = -np.diff(deltas)
    gained = np.append(1.0 - deltas[0], drops / -math.expm1(-h))
    lost = np.append(drops / math.expm1(min(h, 700.0)), 0.0)
    masses = gained - lost + 4.0 * _UNIT * (np.abs(gained) + np.abs(lost))
    return _Loss(start, np.maximum(masses, 0.0), float(deltas[-1]), count)


@dataclass(frozen=True)
class _Total:
    """The sum of the losses: e^(log_scale - tilt l) times the mass at l = (start + i) h, and the rest at infinity."""

    h: float
    start: int
    masses: Array
    log_scale: float
    tilt: float
    infinite: float
    error: float  # of the masses, in the l2 norm
    outside: float  # tilted mass that the window may have lost

    def delta(self, epsilon: float) -> float:
        """H of the product, rounded up."""
        first = max(math.floor(epsilon / self.h) - self.start, 0)
        excess = np.maximum(self.h * np.arange(self.start + first, self.start + self.masses.size) - epsilon, 0.0)
        weights = -np.expm1(-excess) * np.exp(-self.tilt * excess)
        inside = float(weights @ self.masses[first:]) * (1.0 + 1e-9)
        inside += self.error * float(np.linalg.norm(weights)) + self.outside + 1e-300
        exponent = self.log_scale - self.tilt * epsilon + math.log(inside)
        return min(1.0, self.infinite + math.exp(min(max(exponent, -744.0), 1.0)))  # e^-744 is the least float

    def epsilon(self, delta: float) -> float:
        """The least epsilon at which H is at most delta, rounded up."""
        low, high = 0.0, max(self.h * (self.start + self.masses.size), self.h)
        if self.delta(low) <= delta:
            return low
        if not self.delta(high) <= delta:
            return math.inf
        while high - low > 1e-7 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


def _sum(losses: Sequence[_Loss], h: float, tilt: float) -> _Total:
    from dp_accounting.pld import common  # half a second to load each, and most programs never come here
    from scipy import signal

    def transform_error(size: int) -> float:
        return 16.0 * _UNIT * math.log2(2 * size + 2)

    start, masses, log_scale, error = 0, np.ones(1), 0.0, 0.0
    for loss in losses:
        log_sum, terms = loss.log_terms(h, tilt)
        powers, first = np.exp(terms - log_sum), 0
        if loss.count > 1:
            with np.errstate(over="ignore"):  # in orders of Chernoff's bound that are then not used
                first, powers = common.self_convolve(powers, loss.count, _TAIL)
            powers = np.maximum(powers, 0.0)
        norm = float(np.linalg.norm(powers))
        masses = np.maximum(signal.fftconvolve(masses, powers), 0.0)
        error += transform_error(masses.size) * (loss.count + 3) * norm
        start += loss.start * loss.count + first
        # each term was rounded in proportion to its logarithm
        rounding = 4.0 * _UNIT * (8.0 + abs(log_sum) + tilt * h * (abs(loss.start) + loss.masses.size))
        log_scale += loss.count * (log_sum + rounding)
    finite = math.fsum(loss.count * math.log1p(-loss.infinite) for loss in losses)
    return _Total(h, start, masses, log_scale, tilt, -math.expm1(finite) * (1.0 + 1e-12), error, _TAIL * len(losses))


def _best_tilt(losses: Sequence[_Loss], h: float, asked: str, value: float) -> float:
    """Chernoff's. It need not be exact: every tilt gives a bound, a good one a tight bound."""

    def objective(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        log_bound = math.fsum(loss.count * loss.log_terms(h, tilt)[0] for loss in losses)
        log_bound -= math.log1p(tilt) + tilt * math.log1p(1.0 / tilt)  # the largest (1 - e^-x) e^(-tilt x)
        return (log_bound - math.log(value)) / tilt if asked == "epsilon" else log_bound - tilt * value

    top = h * max(loss.start + loss.masses.size for loss in losses)
    bounds = (math.log(1e-3 / top), math.log(1e9 / top))
    return math.exp(optimize.minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 0.05}).x)


def _by_losses(steps: Steps, relation: str, asked: str, value: float) -> tuple[float, bool]:
    """epsilon at this delta, or delta at this epsilon, and whether it has settled; the worse of both directions."""
    if sum(steps.values()) > _MOST_STEPS:
        return math.inf, False
    answer, settled = 0.0, True
    for sampled_first in (True, False):
        pairs = {
            Pair(noise, rate, None if rate == 1.0 or relation == "replace" else sampled_first): count
            for (noise, rate), count in steps.items()
        }
        if not sampled_first and all(pair.sampled_first is None for pair in pairs):
            break
        found, done = _settle(pairs, asked, value, enough=answer)
        answer, settled = max(answer, found), settled and done
    return answer, settled


def _settle(pairs: Mapping[Pair, int], asked: str, value: float, enough: float) -> tuple[float, bool]:
    """The answer on finer and finer grids. Each is a bound, so the least counts, and none below `enough` is needed."""
    total, best, last, cells = sum(pairs.values()), math.inf, math.inf, _FIRST_CELLS
    floor = value * _SHARE if asked == "epsilon" else 1e-8
    while cells <= _MOST_CELLS:
        windows = [pair.window(max(floor / total, _LEAST_FLOOR)) for pair in pairs]
        h = max(high - low for low, high in windows) / cells
        losses = [
            _on_grid(pair, window, h, count) for (pair, count), window in zip(pairs.items(), windows, strict=True)
        ]
        law = _sum(losses, h, _best_tilt(losses, h, asked, value))
        if asked == "epsilon":
            found, tolerance = law.epsilon(value), _SETTLED
            if not law.infinite < value:  # spherical noise, of whose curve only so much is known
                break
        else:
            found, finite = law.delta(value), replace(law, infinite=0.0).delta(value)
            tolerance = 0.3 * _SETTLED * (1.0 - math.log(max(found, 1e-300)))
            if law.infinite > finite and floor > _LEAST_FLOOR:
                floor *= 1e-8
                continue
            floor = min(floor, _SHARE * finite)
        settled = last < math.inf and abs(last - found) <= tolerance * last
        best, last, cells = min(best, found), found, 2 * cells
        if settled or best <= enough:
            return best, True
        if law.masses.size > _MOST_SUMS:
            break
    return best, False


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
    answer, settled = _by_losses(steps, relation, asked, value)
    if method == "auto" and not settled:
        try:
            return min(answer, _by_renyi(steps, relation, asked, value))
        except NotCertifiable:
            return answer
    return answer


def _merged(entries: Iterable[tuple[Profile, float, int]]) -> Steps:
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


# --- what the samplers were off ---


def _revealed(entry: Entry) -> float:
    """A probability k, so that the drawn release is no worse than one from its law that reveals all with probability k.

    Let D be the law's curve and t the total variation between law and sampler. For the drawn pair, H(e) is at most
    D(e) + (1 + exp e) t; and as H falls, at most D(e) + c for every e >= 0, with c = D(e0) + (1 + exp e0) t for any e0.
    Under Poisson sampling at rate q (add/remove) both directions of H are at most q, or less, times a value of the
    curve without sampling, so q c is added there. A pair that reveals all with probability k, and is as the law's
    otherwise, has the curve (1 - k) H + k; it lies above H + q c, in both directions, when k (1 - H(0)) >= q c, and
    H(0), the total variation of the law's pair, is at most q (2 Phi(mu/2) - 1). Over many releases k adds up, and is
    not multiplied by exp(epsilon) of the total.
    """
    t, noise = entry.certificate.total_variation, entry.certificate.profile
    if t == 0.0:
        return 0.0
    sampled_replace = entry.sampling_rate < 1.0 and entry.certificate.relation == "replace"
    if not isinstance(noise, GaussianProfile) or sampled_replace:
        return math.inf
    epsilons = np.linspace(0.0, 60.0, 241)
    c = float(np.min(gaussian.delta(noise.mu, epsilons) + (1.0 + np.exp(epsilons)) * t))
    same = 1.0 - entry.sampling_rate + entry.sampling_rate * float(erfc(noise.mu / 2.0**1.5))  # 1 - q (2 Phi - 1)
    return entry.sampling_rate * c / same * (1.0 + 1e-9) if same > 0.0 else math.inf


# --- the public names ---


@dataclass(frozen=True)
class Entry:
    """What was added to an accountant."""

    certificate: Certificate
    count: int
    sampling_rate: float


class Accountant:
    """Adds up certificates: what do all these releases guarantee together?

    Guarantee: for all neighbours under `relation`, all releases together are (epsilon(delta), delta)-differentially
    private, also when a query depends on earlier answers; the certificates, counts and rates must not. (Without
    sampling and with Gaussian noise they may, if the total is held to a budget that was fixed first: smith2022fully.)
    Answers are never below the truth, and within about 1 % of the best that the certificates allow. Of spherical noise
    no delta below 1e-30 a release is known; where that is not enough, epsilon is infinite.
    Source: dong2022gaussian, Corollary 3.3, without sampling; zhu2022optimal and doroshenko2022connect, Algorithm 1,
        otherwise; mironov2019renyi for method "renyi".
    Deviates: 1. exact curves in place of densities; 2. the tilt; 3. replace with sampling, see composition.Pair.
    """

    def __init__(self, relation: str | None = None) -> None:
        """Starts with nothing spent.

        Args:
            relation: "add/remove" or "replace"; left out, that of the first certificate.
        """
        self._relation = None if relation is None else _check.choice("relation", relation, RELATIONS)
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
        other = Accountant(self._relation)
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
            raise InvalidInput(f"certificate must be a Certificate, got {certificate!r}; certify() makes one")
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
        """The answer for the laws, and what the samplers of all releases were off on top."""
        method = _check.choice("method", method, METHODS)
        steps = _merged((entry.certificate.profile, entry.sampling_rate, entry.count) for entry in self._history)
        relation = self._relation or RELATIONS[0]
        variation = math.fsum(entry.count * entry.certificate.total_variation for entry in self._history)
        revealed = math.fsum(entry.count * _revealed(entry) for entry in self._history) * (1.0 + 1e-12)
        if asked == "delta":
            found = _answer(steps, relation, "delta", value, method)
            added = math.nextafter(found + revealed, math.inf) if revealed else found
            return min(with_sampling_error(found, value, variation), added)
        left = math.nextafter(value - revealed, 0.0) if revealed else value
        found = _answer(steps, relation, "epsilon", left, method) if left > 0.0 else math.inf
        if variation == 0.0 or (found < math.inf and with_sampling_error(0.0, found, variation) >= revealed):
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
    if rate < 1.0 and not steps <= _MOST_STEPS:
        raise InvalidInput(f"steps must be at most {_MOST_STEPS} with sampling, got {steps}")

    def at(multiplier: float, asked: str, value: float) -> float:
        noise = GaussianProfile((1.0 + 4.0 * _UNIT) / multiplier)
        return _answer(_merged([(noise, rate, steps)]), relation, asked, value, "auto")

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
