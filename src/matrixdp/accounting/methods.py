"""How a total is computed: closed form, privacy-loss distributions, Rényi divergences; and the errors of the samplers.

Gaussian releases without sampling compose in closed form, `mu^2 = sum mu_i^2`. So does discrete noise of one exponent
and scale, as one release with more entries, and so do releases stated by a rho (zCDP), which add up. All others compose
by their privacy-loss distributions (`losses`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.accounting.atoms import few_atoms
from matrixdp.accounting.losses import DeltaAt, EpsilonAt, Question, Steps, by_losses
from matrixdp.accounting.pairs import Pair, check_profile, curve_points
from matrixdp.accounting.renyi import Concentrated, divergences
from matrixdp.adjacency import REPLACE
from matrixdp.errors import NotCertifiable
from matrixdp.privacy import gaussian
from matrixdp.privacy.cells import UNIT
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Profile, epsilon_with_total_variation, with_total_variation

METHODS = ("auto", "exact", "pld", "renyi")

_MOST_ENTRIES = 4096  # entries of discrete noise that are merged into one release
_FEW_POINTS, _LAST_POINT = 13, 60.0  # on the curve of discrete noise


@dataclass(frozen=True)
class Use:
    """One kind of release, as far as a total depends on it.

    Attributes:
        profile: the profile of its noise law.
        total_variation: the total-variation error of its sampler.
        sampling_rate: the probability with which it uses a record.
    """

    profile: Profile
    total_variation: float = 0.0
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        check_profile(self.profile)

    @property
    def gaussian(self) -> bool:
        """Whether this is Gaussian noise without sampling, which mu describes completely."""
        return isinstance(self.profile, GaussianProfile) and self.sampling_rate == 1.0

    def revealed(self) -> float:
        """A probability k: the drawn release is no worse than one from its law that reveals all with probability k.

        Let D be the law's curve and t the total variation between law and sampler. For the drawn pair, H(e) is at most
        D(e) + (1 + exp e) t; and as H falls, at most D(e) + c for every e >= 0, with c = D(e0) + (1 + exp e0) t for any
        e0. Under Poisson sampling at rate q both directions of H are at most q times a value of the curve without
        sampling, so q c is added there. A pair that reveals all with probability k, and is otherwise the law's pair,
        has the curve (1 - k) H + k. It is at least H + q c, in both directions, when k (1 - H(0)) >= q c. H(0), the
        total variation of the law's pair, is at most q D(0). Over many releases k adds up, without a factor
        exp(epsilon) of the total.
        """
        t, q = self.total_variation, self.sampling_rate
        if t == 0.0:
            return 0.0
        try:
            epsilons, deltas = _points(self.profile)
        except NotCertifiable:
            return math.inf
        c = float(np.min(deltas + (1.0 + np.exp(np.minimum(epsilons, 700.0))) * t))
        same = 1.0 - q * float(deltas[0]) * (1.0 + 1e-9)
        return q * c / same * (1.0 + 1e-9) if same > 0.0 else math.inf


@lru_cache(maxsize=256)
def _points(profile: Profile) -> tuple[Array, Array]:
    """Some points on the curve of a profile, the first at epsilon = 0."""
    if isinstance(profile, GaussianProfile):
        epsilons = np.linspace(0.0, 60.0, 241)
        return epsilons, np.asarray(gaussian.delta(profile.mu, epsilons))
    if isinstance(profile, DiscreteProfile):
        last = min(profile.pure_epsilon, _LAST_POINT)
        epsilons = np.append(0.0, last * np.geomspace(1.0 / 64.0, 1.0, _FEW_POINTS))
        return epsilons, np.array([profile.delta(float(epsilon)) for epsilon in epsilons])
    return curve_points(profile)


Uses = Mapping[Use, int]  # how often each kind of release occurs


def epsilon(uses: Uses, adjacency: str, delta: float, method: str = "auto") -> float:
    """The least epsilon that is proven at this delta, the errors of all samplers included.

    For delta = 0 it is the sum of the pure epsilons if all noise is drawn exactly, and infinite otherwise.
    """
    if delta == 0.0:
        return pure_epsilon(uses) if all(use.total_variation == 0.0 for use in uses) else math.inf
    steps, variation, leaked = merged(uses), _variation(uses), _leaked(uses)
    left = math.nextafter(delta - leaked, 0.0) if leaked else delta
    found = answer(steps, adjacency, EpsilonAt(left), method) if left > 0.0 else math.inf
    if variation == 0.0 or (found < math.inf and with_total_variation(0.0, found, variation) >= leaked):
        return found
    return epsilon_with_total_variation(
        lambda share: answer(steps, adjacency, EpsilonAt(share), method), delta, variation
    )


def delta(uses: Uses, adjacency: str, epsilon: float, method: str = "auto") -> float:
    """The least delta that is proven at this epsilon, the errors of all samplers included."""
    found, leaked = answer(merged(uses), adjacency, DeltaAt(epsilon), method), _leaked(uses)
    added = math.nextafter(found + leaked, math.inf) if leaked else found
    return min(with_total_variation(found, epsilon, _variation(uses)), added)


def _variation(uses: Uses) -> float:
    return math.fsum(count * use.total_variation for use, count in uses.items())


def _leaked(uses: Uses) -> float:
    return math.fsum(count * use.revealed() for use, count in uses.items()) * (1.0 + 1e-12)


def merged(uses: Uses) -> Steps:
    """One step per kind of release; unsampled Gaussian noise, discrete noise of one law, and zCDP are merged."""
    steps: dict[tuple[Profile, float], int] = {}
    gaussians: list[tuple[float, int]] = []
    rhos: list[float] = []
    discrete: dict[tuple[float, float], list[tuple[DiscreteProfile, int]]] = {}
    for use, count in uses.items():
        noise, rate = use.profile, use.sampling_rate
        if isinstance(noise, GaussianProfile) and rate == 1.0:
            gaussians += [(noise.mu, count)]
        elif isinstance(noise, DiscreteProfile) and rate == 1.0:
            discrete.setdefault((noise.exponent, noise.scale_in_steps), []).append((noise, count))
        elif isinstance(noise, Concentrated):  # sampling only hides more
            rhos += [count * noise.rho]
        elif not (isinstance(noise, GaussianProfile) and noise.mu == 0.0):
            steps[noise, rate] = steps.get((noise, rate), 0) + count
    mu = math.sqrt(math.fsum(count * mu**2 for mu, count in gaussians)) * (1.0 + 8.0 * UNIT)
    if [count for _, count in gaussians] == [1]:
        ((mu, _),) = gaussians  # a single one may use the whole budget, and is not rounded
    for profiles in discrete.values():
        steps.update(_one_release(profiles))
    if any(rhos):
        steps[Concentrated(math.fsum(rhos) * (1.0 + 8.0 * UNIT)), 1.0] = 1
    return {(GaussianProfile(mu), 1.0): 1, **steps} if mu > 0.0 else steps


def _one_release(profiles: list[tuple[DiscreteProfile, int]]) -> dict[tuple[Profile, float], int]:
    """Counted profiles of discrete noise of one exponent and scale, as one profile of all their entries."""
    groups: Counter[int] = Counter()
    for profile, count in profiles:
        for shift, cells in profile.groups:
            groups[shift] += cells * count
    if groups.total() > _MOST_ENTRIES:
        return {(profile, 1.0): count for profile, count in profiles}
    (shift, cells), *others = sorted(groups.items())
    first = profiles[0][0]
    return {(DiscreteProfile(first.exponent, first.scale_in_steps, shift, cells, tuple(others)), 1.0): 1}


def pure_epsilon(uses: Uses) -> float:
    """The sum of the epsilons at which delta is 0, rounded up; sampling, which can only lower it, is ignored."""
    total = Fraction(0)
    for use, count in uses.items():
        each = exact_pure_epsilon(use.profile)
        if each is None:
            return math.inf
        total += count * each
    found = float(total)
    return found if found >= total else math.nextafter(found, math.inf)


def exact_pure_epsilon(profile: Profile) -> Fraction | None:
    """The epsilon at which the delta of a profile reaches 0; None if it never does."""
    if isinstance(profile, DiscreteProfile):
        return profile.exact_pure_epsilon
    found = float(getattr(profile, "pure_epsilon", math.inf))
    return Fraction(found) if found < math.inf else None


def closed_form(steps: Steps) -> Profile | None:
    """The profile of a composition that is one release without sampling, or can be written as one."""
    ((noise, rate), count), *others = steps.items()
    return noise if not others and count == 1 and rate == 1.0 else None


def answer(steps: Steps, adjacency: str, question: Question, method: str = "auto") -> float:
    """The answer to a question for noise drawn exactly from its laws, never below the truth."""
    method = _check.choice("method", method, METHODS)
    if not steps:
        return 0.0
    if method == "renyi":
        return _by_renyi(steps, adjacency, question)
    profile = closed_form(steps)
    if profile is not None and method != "pld":
        return question.asked_of(profile)
    if method == "exact":
        raise NotCertifiable("no closed form for sampled releases, or several that are not Gaussian; use method 'pld'")
    pure = pure_epsilon({Use(noise, sampling_rate=rate): count for (noise, rate), count in steps.items()})
    if isinstance(question, DeltaAt) and question.epsilon >= pure:
        return 0.0
    listed = few_atoms({Pair(noise, rate, None): count for (noise, rate), count in steps.items()})
    found, settled = by_losses(steps, adjacency, question) if listed is None else (question.asked_of(listed), True)
    if isinstance(question, EpsilonAt):
        found = min(found, pure)
    if method == "auto" and not settled:
        try:
            return min(found, _by_renyi(steps, adjacency, question))
        except NotCertifiable:
            return found
    return found


def _by_renyi(steps: Steps, adjacency: str, question: Question) -> float:
    """The answer by Rényi divergences, at the best of dp-accounting's orders."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    orders = tuple(map(float, rdp.RdpAccountant().orders))
    found = divergences(steps, adjacency, orders)
    if not np.any(np.isfinite(found)) or (adjacency == REPLACE and any(rate < 1.0 for _, rate in steps)):
        raise NotCertifiable(
            "method 'renyi' is for Gaussian and discrete noise, sampled under add/remove alone; use 'pld'"
        )
    if isinstance(question, EpsilonAt):
        total, _ = rdp.compute_epsilon(orders, found, question.delta)
    else:
        total, _ = rdp.compute_delta(orders, found, question.epsilon)
    return float(total) * (1.0 + 1e-12)
