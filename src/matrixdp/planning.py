"""Budgets that several releases share: the noise of all of them is fixed beforehand, and their composition certified.

A law sized for n copies of itself must not be mixed with another one so sized: three discrete Laplace laws and one
Gaussian, each for four copies at (1, 1e-6), have 149 times that delta together. So either every law is fixed at once
(`Plan`), or all releases lie under one reference profile at every epsilon (`Shared`).

The search. Releases with equal sets, shapes and weights have the same law. What can have discrete noise has it with one
exponent t, at scales s prop. to (k m^p / w)^(1 / (2 + p)) for k entries that change by m steps, and the weight w of
s^2 in the error: the least error if the privacy losses add up like (m/s)^p, p = 1 for pure noise and 2 otherwise. The
rest is Gaussian with mu^2 prop. to the root of its error at mu = 1, which is the least error. That leaves the exponent,
and the share of Gaussian noise, which are tried; or all of it is Gaussian. What is found need not be the optimum.

Guarantee: whatever was found, only the composition of the certificates claims privacy (`Plan.composition`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import scipy

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.accounting import methods
from matrixdp.accounting.composition import Composition, Part
from matrixdp.accounting.domination import lies_under
from matrixdp.accounting.methods import Use
from matrixdp.adjacency import ADD_REMOVE, checked
from matrixdp.budget import Allotment, Budget, register_planners
from matrixdp.distributions import Gaussian, NoiseLaw, Product
from matrixdp.distributions.covariance import Isotropic
from matrixdp.distributions.product import steps_variance
from matrixdp.errors import InvalidInput, MatrixDPError, NotApplicable, NotCertifiable, NumericalFailure
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.pipeline import sized_for_budget
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.discrete import DiscreteProfile, best_exponent
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee, Profile
from matrixdp.sensitivity import Entrywise, OneColumn, OneRow, RankOne, Sensitivity, Vertices

# The share of delta that is left for the total-variation errors of the samplers, and the most of it that they may use.
ROOM, USED = 1e-4, 1e-5
_ROUGH, _FINE = 5e-3, 1e-6  # of a scale, while a plan is sought, and in the end
_SHARES = 0.05  # of the share of Gaussian noise
_SOURCE = "a shared reference [matrixdp, planning.py]"
_INFLATED = (1.0, 1.0 + 1e-6, 1.0 + 1e-4, 1.01)  # noise, until the composition keeps the budget


@dataclass(frozen=True, eq=False)
class PlannedRelease(Allotment):
    """One release of a plan. `release(value, sensitivity, part)` takes it in place of a Budget.

    Attributes:
        sensitivity: its set.
        noise: its noise; for a plan without shapes, on the smallest shape that the set has.
        guarantee: what the plan counts it as.
        composition: the composition that it is a part of.
        shaped: whether the shape was planned.
    """

    sensitivity: Sensitivity = field(kw_only=True)
    noise: NoiseLaw = field(kw_only=True)
    guarantee: Guarantee = field(kw_only=True)
    composition: Composition = field(kw_only=True, repr=False)
    shaped: bool = field(kw_only=True)

    def law(self, shape: Shape, sensitivity: Sensitivity) -> NoiseLaw:
        """The planned noise, for a value of this shape."""
        if self.shaped and shape != self.noise.shape:
            raise InvalidInput(f"value must have the shape that was planned, {self.noise.shape}, got {shape}")
        return self.noise if self.shaped else _on_shape(self.noise, shape, sensitivity.matrix_shape(shape))

    def check(self, certificate: Certificate) -> None:
        """Raises InvalidInput unless the release lies under what was planned, at every epsilon."""
        _check_under(certificate, self.guarantee, "part of the plan")

    def terms(self) -> Mapping[str, Any]:
        """The whole plan, which a ledger charges with its first release."""
        return {"series": _name(self.composition), "plan": self.composition}


@dataclass(frozen=True, eq=False)
class Plan(Sequence[PlannedRelease]):
    """Releases whose noise was fixed at once.

    Guarantee: `composition`: all of them together keep the budget, also when queries depend on earlier answers. Each
    part is for one release; a ledger refuses a second one.

    Attributes:
        budget: what all of them may use.
        composition: the certificate of all of them together; `to_json` writes it, and `matrixdp verify` checks it.
        parts: one per release.
    """

    budget: Budget
    composition: Composition
    parts: tuple[PlannedRelease, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[PlannedRelease]:
        return iter(self.parts)

    @property
    def certificate(self) -> Composition:
        """Another name of `composition`."""
        return self.composition

    @property
    def laws(self) -> tuple[NoiseLaw, ...]:
        """The noise of each release."""
        return tuple(part.noise for part in self.parts)

    def to_json(self) -> str:
        """The composition as JSON, from which `from_json` reads the plan if shapes were planned."""
        return self.composition.to_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads a plan with shapes, if it is true."""
        composition = Composition.from_json(text)
        verification = composition.verify()
        if not verification:
            raise InvalidInput(f"the plan is not true: {verification.findings[0]}")
        certificates = [part.certificate for part in composition.parts for _ in range(part.count)]
        known = [each for each in certificates if isinstance(each, Certificate)]
        if composition.budget is None or len(known) < len(certificates):
            raise InvalidInput("the plan must have a budget, and the shape and set of every release")
        return _assembled(composition.budget, composition, [(each.law, each, each.sensitivity) for each in known], True)

    def __str__(self) -> str:
        return str(self.composition)


@dataclass(frozen=True, eq=False)
class Shared(Allotment):
    """A budget for each of several releases that share one: each must lie under one reference at every epsilon.

    Guarantee: any `releases` of them together keep the whole budget, whatever their sets; see
    `accounting.domination` for how that is checked. Only a ledger counts them.

    Attributes:
        releases: how many there are at most.
        reference: what each of them may have at most.
        composition: the composition of as many references, which keeps the whole budget.
    """

    releases: int = field(kw_only=True)
    reference: Guarantee = field(kw_only=True)
    composition: Composition = field(kw_only=True, repr=False)

    def law(self, shape: Shape, sensitivity: Sensitivity) -> NoiseLaw:
        """The least noise found for this set that lies under the reference."""
        found = [law for law in self._candidates(shape, sensitivity) if self._allows(law, sensitivity)]
        if not found:
            raise InvalidInput(
                f"no noise for this set lies under the shared reference at every epsilon: {sensitivity}; plan the "
                "releases together (budget.plan), or share with like= this set, or without like="
            )
        return min(found, key=lambda law: law.expected_squared_error())

    def check(self, certificate: Certificate) -> None:
        """Raises InvalidInput unless the release lies under the reference, at every epsilon."""
        _check_under(certificate, self.reference, "reference that is shared")

    def terms(self) -> Mapping[str, Any]:
        """The composition of all references, which a ledger charges with the first release."""
        return {"series": _name(self.composition), "plan": self.composition}

    def _allows(self, law: NoiseLaw, sensitivity: Sensitivity) -> bool:
        return lies_under(Use(certify(law, sensitivity).profile), Use(self.reference.profile))

    def _candidates(self, shape: Shape, sensitivity: Sensitivity) -> Iterator[NoiseLaw]:
        reference = self.reference.profile
        if isinstance(reference, GaussianProfile):
            law = _gaussian(shape, sensitivity, self.alone)
            yield law.scaled(_mu(law, sensitivity) / reference.mu * HEADROOM)
        try:
            laplace = calibrate("laplace", shape=shape, sensitivity=sensitivity, budget=self.alone)
        except NotApplicable:
            return
        assert isinstance(laplace, Product)
        if isinstance(reference, DiscreteProfile):
            scale = reference.scale_in_steps * laplace.step
            yield replace(laplace, exponent=reference.exponent, scale=scale, source=_SOURCE)
        high = laplace.scale
        while not self._allows(replace(laplace, scale=high), sensitivity):
            high *= 2.0
            if high > 64.0 * laplace.scale:
                return
        low = 0.5 * high
        while high > (1.0 + _ROUGH) * low:
            middle = math.sqrt(low * high)
            allowed = self._allows(replace(laplace, scale=middle), sensitivity)
            low, high = (low, middle) if allowed else (middle, high)
        yield replace(laplace, scale=high, source=_SOURCE)


def plan(budget: Budget, sets: Sequence[Sensitivity], weights: Any = None, shapes: Any = None) -> Plan:
    """See `Budget.plan`."""
    kinds, order = _kinds(budget, sets, weights, shapes)
    best = _least(budget, kinds)
    for factor in _INFLATED:
        found = [
            _planned(kind, _larger(law, factor), budget, len(order), shapes is not None) for kind, law in best.items()
        ]
        parts = tuple(Part(each[1], kind.count) for kind, each in zip(best, found, strict=True))
        composition = Composition(parts, budget)
        if composition.meets(budget):
            by_kind = dict(zip(best, found, strict=True))
            return _assembled(budget, composition, [by_kind[kind] for kind in order], shapes is not None)
    raise NumericalFailure(f"delta {budget.delta:g} is too small for the total-variation error of the samplers")


def shared(budget: Budget, releases: int, like: Sensitivity | None = None) -> Shared:
    """See `Budget.shared`."""
    _check_whole(budget)
    releases = _check.count("releases", releases)
    if not isinstance(like, Sensitivity | None):
        raise InvalidInput(f"like must be a set from matrixdp.sensitivity, got {_check.kind(like)}")
    adjacency = checked(ADD_REMOVE if like is None else like.adjacency)
    profile: Profile
    if like is None:
        left = budget.delta * (1.0 - ROOM)
        profile = GaussianProfile(float(gaussian.mu(budget.epsilon, left)) / math.sqrt(releases) * (1.0 - 1e-12))
    else:
        profile = plan(budget, [like] * releases)[0].guarantee.profile
    reference = Guarantee(profile, adjacency, _most_variation(budget, releases))
    composition = Composition((Part(reference, releases),), budget)
    alone = _alone(reference, budget)
    return Shared(alone.epsilon, alone.delta, releases=releases, reference=reference, composition=composition)


register_planners(plan=plan, shared=shared)


# --- what a plan is made of ---


@dataclass(frozen=True, eq=False)
class _Kind:
    """Releases with one set, shape and weight, and what noise they can have.

    Attributes:
        sensitivity: the set.
        count: how many.
        weight: of the squared error of one entry; summed over the entries if the shape is known.
        normal: Gaussian noise, in any size.
        discrete: discrete noise, in any size, if there is any.
    """

    sensitivity: Sensitivity
    count: int
    weight: float
    normal: Gaussian
    discrete: Product | None

    @cached_property
    def normal_error(self) -> float:
        """Of Gaussian noise with mu = 1."""
        each = self.normal.expected_squared_error() / math.prod(self.normal.shape)
        return self.weight * each * _mu(self.normal, self.sensitivity) ** 2

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The entries that change, as (steps, entries)."""
        assert self.discrete is not None
        profile = certify(self.discrete, self.sensitivity).profile
        assert isinstance(profile, DiscreteProfile)
        return ((profile.shift, profile.cells), *profile.others)

    def profile(self, exponent: float, scale: float) -> DiscreteProfile:
        """Of one release with discrete noise of this scale, in steps."""
        (shift, cells), *others = self.groups
        return DiscreteProfile(exponent, scale, shift, cells, tuple(others))

    def discrete_law(self, exponent: float, scale: float) -> Product:
        """Discrete noise of this scale, in steps."""
        assert self.discrete is not None
        return replace(self.discrete, exponent=exponent, scale=scale * self.discrete.step)

    def discrete_error(self, exponent: float, scale: float) -> float:
        """Of one release with it."""
        assert self.discrete is not None
        return self.weight * self.discrete.step**2 * steps_variance(exponent, scale)

    def relative_scale(self, power: float) -> float:
        """The scale, up to a factor that all kinds share; see the module."""
        assert self.discrete is not None
        cost = sum(cells * shift**power for shift, cells in self.groups)
        return float((cost / (self.weight * self.discrete.step**2)) ** (1.0 / (2.0 + power)))


def _kinds(budget: Budget, sets: Any, weights: Any, shapes: Any) -> tuple[list[_Kind], list[_Kind]]:
    """The kinds of releases, and the kind of each release in order."""
    _check_whole(budget)
    sets = list(sets)
    if not sets or not all(isinstance(each, Sensitivity) for each in sets):
        raise InvalidInput("sets must be a list of sets from matrixdp.sensitivity, one per release, and not be empty")
    if len({each.adjacency for each in sets}) > 1:
        raise InvalidInput("sets must share one adjacency: guarantees about different neighbours do not add up")
    counted = [1.0] * len(sets) if weights is None else [_check.positive("weights", each) for each in weights]
    shaped = [_own_shape(each) for each in sets] if shapes is None else [_check.any_shape(each) for each in shapes]
    if not len(sets) == len(counted) == len(shaped):
        raise InvalidInput(f"weights and shapes must have one entry per set, {len(sets)}")
    keys: list[tuple[Any, ...]] = []
    for each, weight, shape in zip(sets, counted, shaped, strict=True):
        each.fits(shape)
        keys.append((type(each), each.extent(shape), shape, weight))
    found: dict[tuple[Any, ...], _Kind] = {}
    for key, each, weight, shape in zip(keys, sets, counted, shaped, strict=True):
        if key not in found:
            entries = 1 if shapes is None else math.prod(shape)
            normal, discrete = _gaussian(shape, each, budget, shapes is None), _discrete(shape, each, budget)
            found[key] = _Kind(each, keys.count(key), weight * entries, normal, discrete)
    return list(found.values()), [found[key] for key in keys]


def _check_whole(budget: Budget) -> None:
    if isinstance(budget, Allotment):
        raise InvalidInput(f"a plan needs a whole budget, not a part of another plan, got {budget}")
    budget.with_delta("a plan")


def _own_shape(sensitivity: Sensitivity) -> Shape:
    """The smallest shape that has all of a set, where one stands for all."""
    if isinstance(sensitivity, Vertices):
        return tuple(sensitivity.differences[0].shape)
    if isinstance(sensitivity, RankOne):
        return (1, 1)
    per_entry = isinstance(sensitivity, Entrywise) or (
        isinstance(sensitivity, (OneColumn, OneRow)) and sensitivity.radius is None
    )
    if per_entry:
        raise InvalidInput(f"shapes must be given for a set whose size depends on the shape: {sensitivity}")
    if isinstance(sensitivity, (OneColumn, OneRow)):
        return (1, 1)
    return (max(int(getattr(sensitivity, "cells", 1)), 1),)


def _gaussian(shape: Shape, sensitivity: Sensitivity, budget: Budget, alike: bool = False) -> Gaussian:
    """Gaussian noise of the least error, or the same for all entries."""
    law: NoiseLaw | None = None
    if not alike:
        try:
            law = calibrate("optimal", shape=shape, sensitivity=sensitivity, budget=budget)
        except (NotApplicable, NotCertifiable, NumericalFailure):
            law = None
    law = law or calibrate("analytic", shape=shape, sensitivity=sensitivity, budget=budget)
    assert isinstance(law, Gaussian)
    return law


def _discrete(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product | None:
    """Discrete noise, if there is any for the set."""
    try:
        law = calibrate("discrete", shape=shape, sensitivity=sensitivity, budget=budget)
    except NotApplicable:
        return None
    assert isinstance(law, Product)
    return law


def _mu(law: Gaussian, sensitivity: Sensitivity) -> float:
    mu = certify(law, sensitivity).mu
    assert mu is not None
    return mu


# --- the search ---


def _least(budget: Budget, kinds: Sequence[_Kind]) -> dict[_Kind, NoiseLaw]:
    """The laws with the least total error found."""
    grained = [kind for kind in kinds if kind.discrete is not None]
    normal = [kind for kind in kinds if kind.discrete is None]
    whole = float(gaussian.mu(budget.epsilon, budget.delta * (1.0 - ROOM)))
    laws, least = _gaussian_laws(kinds, whole)
    if not grained:
        return laws
    cells = sum(kind.count * sum(cells for _, cells in kind.groups) for kind in grained)
    alone = best_exponent(budget.epsilon, budget.delta * (1.0 - ROOM), 1, min(cells, 4096)).exponent
    for exponent in sorted({1.0, alone}):
        search = _Mixture(budget, grained, normal, exponent, whole)
        found = search.best()
        if found is not None and found[1] < least:
            laws, least = found
    return laws


def _gaussian_laws(kinds: Sequence[_Kind], mu: float) -> tuple[dict[_Kind, NoiseLaw], float]:
    """Gaussian noise for all, of the least error: the squares of mu, which add up, in proportion to roots of errors."""
    roots = {kind: math.sqrt(kind.normal_error) for kind in kinds}
    whole = math.fsum(kind.count * roots[kind] for kind in kinds)
    laws, error = dict[_Kind, NoiseLaw](), 0.0
    for kind in kinds:
        own = mu * math.sqrt(roots[kind] / whole) * (1.0 - 1e-12)
        laws[kind] = kind.normal.scaled(_mu(kind.normal, kind.sensitivity) / own * HEADROOM)
        error += kind.count * kind.normal_error / own**2
    return laws, error


@dataclass(frozen=True, eq=False)
class _Mixture:
    """Discrete noise of one exponent for some kinds, and Gaussian noise for the others."""

    budget: Budget
    grained: Sequence[_Kind]
    normal: Sequence[_Kind]
    exponent: float
    whole: float

    def best(self) -> tuple[dict[_Kind, NoiseLaw], float] | None:
        """The laws with the least error found, and that error."""
        if not self.normal:
            return self._at(0.0, _FINE)

        def error(share: float) -> float:
            found = self._at(share, _ROUGH)
            return math.inf if found is None else math.log(found[1])

        # both ends cost without bound
        found = scipy.optimize.minimize_scalar(
            error, bounds=(0.02, 0.98), method="bounded", options={"xatol": _SHARES, "maxiter": 9}
        )
        return self._at(float(found.x), _FINE)

    def _at(self, share: float, tolerance: float) -> tuple[dict[_Kind, NoiseLaw], float] | None:
        """The laws where the others have so much of the square of mu."""
        mu = self.whole * math.sqrt(share)
        scales = self._scales(mu, tolerance)
        if scales is None:
            return None
        laws, error = _gaussian_laws(self.normal, mu) if self.normal else ({}, 0.0)
        for kind, scale in scales.items():
            laws[kind] = kind.discrete_law(self.exponent, scale)
            error += kind.count * kind.discrete_error(self.exponent, scale)
        return laws, error

    def _scales(self, mu: float, tolerance: float) -> dict[_Kind, float] | None:
        """The least scales, in their proportion, at which everything keeps the budget, as far as bisection finds."""
        power = 1.0 if self.exponent == 1.0 else 2.0
        relative = {kind: kind.relative_scale(power) for kind in self.grained}
        target = self.budget.delta * (1.0 - ROOM)

        @cache
        def excess(log_factor: float) -> float:
            uses = {Use(GaussianProfile(mu)): 1} if mu > 0.0 else {}
            for kind, scale in relative.items():
                use = Use(kind.profile(self.exponent, scale * math.exp(log_factor)))
                uses[use] = uses.get(use, 0) + kind.count
            found = methods.delta(uses, "add/remove", self.budget.epsilon)
            return math.log(max(found, 1e-300) / target)

        changes = [kind.count * cells * shift / relative[kind] for kind in self.grained for shift, cells in kind.groups]
        pure = math.log(math.fsum(changes) / self.budget.epsilon)
        try:
            low, high = _bracket(excess, pure)
            root = float(scipy.optimize.brentq(excess, low, high, xtol=tolerance, rtol=1e-15))
            while tolerance <= _FINE and not excess(root) <= 0.0:
                root += tolerance
        except (InvalidInput, NotCertifiable):  # no scale in range
            return None
        return {kind: scale * math.exp(root) for kind, scale in relative.items()}


def _bracket(excess: Callable[[float], float], start: float) -> tuple[float, float]:
    """Two points around a root: above 0 at the first, at most 0 at the second."""
    step, high = 0.05, start
    while not excess(high) <= 0.0:
        high, step = high + step, 2.0 * step
    low, step = high - step, 0.05
    while not excess(low) > 0.0:
        low, step = low - step, 2.0 * step
    return low, high


# --- from laws to parts ---


def _larger(law: NoiseLaw, factor: float) -> NoiseLaw:
    """The same noise, larger by a factor."""
    if isinstance(law, Product):
        return replace(law, scale=law.scale * factor)
    assert isinstance(law, Gaussian)
    return law.scaled(factor)


def _planned(
    kind: _Kind, law: NoiseLaw, budget: Budget, releases: int, shaped: bool
) -> tuple[NoiseLaw, Guarantee, Sensitivity]:
    """The noise of a release, what the plan counts it as, and its set."""
    undrawn = certify(law, kind.sensitivity)
    if not shaped:
        most = _most_variation(budget, releases)
        return law, Guarantee(undrawn.profile, undrawn.adjacency, most), kind.sensitivity
    return law, sized_for_budget(law, kind.sensitivity, _alone(undrawn, budget)), kind.sensitivity


def _most_variation(budget: Budget, releases: int) -> float:
    """The most that the sampler of each of so many releases may err by."""
    return USED * budget.delta / (releases * (1.0 + math.exp(min(budget.epsilon, 700.0))))


def _alone(guarantee: Guarantee, budget: Budget) -> Budget:
    """What one of the releases keeps by itself, at the delta of the whole, with room for its sampler."""
    return Budget(max(guarantee.profile.epsilon(budget.delta * (1.0 - ROOM)), 1e-9), budget.delta)


def _assembled(
    budget: Budget, composition: Composition, found: Sequence[tuple[NoiseLaw, Guarantee, Sensitivity]], shaped: bool
) -> Plan:
    parts = []
    for law, guarantee, sensitivity in found:
        alone = _alone(certify(law, sensitivity), budget)  # of the law, as when it was sized
        parts.append(
            PlannedRelease(
                alone.epsilon,
                alone.delta,
                sensitivity=sensitivity,
                noise=law,
                guarantee=guarantee,
                composition=composition,
                shaped=shaped,
            )
        )
    return Plan(budget, composition, tuple(parts))


def _on_shape(law: NoiseLaw, shape: Shape, matrix: Shape) -> NoiseLaw:
    """The same noise for values of another shape, read as a matrix; it is the same for every entry."""
    if isinstance(law, Product):
        return law.reshaped(shape)
    found = Gaussian(Isotropic(matrix, law.root_mean_square)).attributed_to(law.source)
    return found if matrix == shape else found.reshaped(shape)


def _check_under(certificate: Certificate, planned: Guarantee, what: str) -> None:
    same = certificate.adjacency == planned.adjacency
    drawn = Use(certificate.profile, certificate.total_variation)
    if not (same and lies_under(drawn, Use(planned.profile, planned.total_variation))):
        raise InvalidInput(
            f"the release must lie under the {what} at every epsilon, and have its adjacency, {planned.adjacency}; it "
            f"has {certificate.profile} under {certificate.adjacency}. Use the set that was planned, or plan again"
        )


@lru_cache(maxsize=64)
def _name(composition: Composition) -> str:
    """The series of a plan in a ledger: equal plans have equal names."""
    try:
        text = composition.to_json()
    except MatrixDPError as reason:
        raise InvalidInput(f"the plan has no JSON form: {reason}") from None
    return f"plan {hashlib.sha256(text.encode()).hexdigest()[:16]}"
