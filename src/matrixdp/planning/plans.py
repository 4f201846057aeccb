"""Budgets that several releases share: the noise of all of them is fixed beforehand, and their composition certified.

A law sized for n copies of itself must not be mixed with another law sized the same way: three discrete Laplace laws
and one Gaussian, each sized for four copies at (1, 1e-6), together have 149 times that delta. So either every law is
fixed at once (`Plan`), or one reference profile dominates all releases at every epsilon (`Shared`).

Guarantee: whatever `search` finds, only the composition of the certificates claims privacy (`Plan.composition`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.accounting.composition import Composition, Part
from matrixdp.accounting.domination import lies_under
from matrixdp.accounting.methods import Use
from matrixdp.adjacency import ADD_REMOVE, checked
from matrixdp.budget import Allotment, Budget
from matrixdp.distributions import Gaussian, NoiseLaw, Product
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput, MatrixDPError, NotApplicable, NumericalFailure
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.pipeline import sized_for_budget
from matrixdp.planning.search import ROOM, ROUGH, Kind, gaussian_noise, kinds_of, least_error, mu_of
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.discrete import DiscreteProfile, is_pure
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee, Profile
from matrixdp.sensitivity import Sensitivity
from matrixdp.sensitivity.entries import checked_set

# The share of delta that the total-variation errors of the samplers may use.
USED = 1e-5
_SOURCE = "a shared reference [matrixdp, planning]"
_INFLATED = (1.0, 1.0 + 1e-6, 1.0 + 1e-4, 1.01)  # factors of the noise, tried until the composition keeps the budget


@dataclass(frozen=True, eq=False)
class PlannedRelease(Allotment):
    """One release of a plan. `release(value, sensitivity, part)` takes it in place of a Budget.

    Attributes:
        sensitivity: its set.
        noise: its noise law; for a plan without shapes, on the smallest shape on which the set has its full size.
        guarantee: the guarantee that the plan counts for it.
        composition: the composition that it is a part of.
        shaped: whether the shape was planned.

    Example:
        >>> from matrixdp import Budget, Counts, release
        >>> part = Budget(1.0, 1e-6).plan([Counts(1)] * 3)[0]
        >>> release([12, 3], part.sensitivity, part).value.shape
        (2,)
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
        """Raises InvalidInput unless the planned guarantee dominates the release at every epsilon."""
        _check_under(certificate, self.guarantee, "part of the plan")

    def terms(self) -> Mapping[str, Any]:
        """The whole plan, which a ledger charges with its first release."""
        return {"series": _name(self.composition), "plan": self.composition}


@dataclass(frozen=True, eq=False)
class Plan(Sequence[PlannedRelease]):
    """Releases whose noise was fixed at once.

    Guarantee: that of `composition`: all releases together keep the budget, also when queries depend on earlier
    answers. Each part is for one release; only a ledger refuses a second one.

    Attributes:
        budget: what all releases together may use.
        composition: the certificate of all of them together; `to_json` writes it, and `matrixdp verify` checks it.
        parts: one per release.

    Example:
        >>> from matrixdp import Budget, Counts, RankOne, release
        >>> budget = Budget(1.0, 1e-6)
        >>> plan = budget.plan([Counts(1), RankOne(1.0)])
        >>> plan.composition.meets(budget)
        True
        >>> out = release([[12, 3], [40, 7]], Counts(1), plan[0])
    """

    budget: Budget
    composition: Composition
    parts: tuple[PlannedRelease, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)

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
        """Reads a plan with shapes; raises InvalidInput if it does not verify or does not keep its budget."""
        composition = Composition.from_json(text)
        verification = composition.verify()
        if not verification:
            raise InvalidInput(f"the plan does not verify: {verification.findings[0]}")
        certificates = [part.certificate for part in composition.parts for _ in range(part.count)]
        known = [each for each in certificates if isinstance(each, Certificate)]
        if composition.budget is None or len(known) < len(certificates):
            raise InvalidInput("the plan must have a budget, and the shape and set of every release")
        if any(part.sampling_rate != 1.0 for part in composition.parts):
            raise InvalidInput("the plan must not have sampled parts: a release uses every record")
        if not composition.meets(composition.budget):
            raise InvalidInput(f"the releases of the plan do not keep its budget together: {composition.budget}")
        return _assembled(composition.budget, composition, [(each.law, each, each.sensitivity) for each in known], True)

    def __str__(self) -> str:
        return str(self.composition)


@dataclass(frozen=True, eq=False)
class Shared(Allotment):
    """The budget of each of several releases that share one: a reference must dominate each at every epsilon.

    Guarantee: any `releases` such releases together keep the whole budget, whatever their sets; see
    `accounting.domination` for how that is checked. Only a ledger counts them.

    Attributes:
        releases: the largest number of releases.
        reference: the guarantee that must dominate each release.
        composition: the composition of `releases` references, which keeps the whole budget.

    Example:
        >>> from matrixdp import Budget, Counts, release
        >>> each = Budget(1.0, 1e-6).shared(12, like=Counts(1))
        >>> each.releases, release([12, 3], Counts(1), each).value.shape
        (12, (2,))
    """

    releases: int = field(kw_only=True)
    reference: Guarantee = field(kw_only=True)
    composition: Composition = field(kw_only=True, repr=False)

    def law(self, shape: Shape, sensitivity: Sensitivity) -> NoiseLaw:
        """The least noise found for this set that the reference dominates."""
        found = [law for law in self._candidates(shape, sensitivity) if self._allows(law, sensitivity)]
        if not found:
            raise InvalidInput(
                f"no noise for this set lies under the shared reference at every epsilon: {sensitivity}; plan the "
                "releases together (budget.plan), or share with like= this set, or without like="
            )
        return min(found, key=lambda law: law.expected_squared_error())

    def check(self, certificate: Certificate) -> None:
        """Raises InvalidInput unless the reference dominates the release at every epsilon."""
        _check_under(certificate, self.reference, "reference that is shared")

    def terms(self) -> Mapping[str, Any]:
        """The composition of all references, which a ledger charges with the first release."""
        return {"series": _name(self.composition), "plan": self.composition}

    def _allows(self, law: NoiseLaw, sensitivity: Sensitivity) -> bool:
        return lies_under(Use(certify(law, sensitivity).profile), Use(self.reference.profile))

    def _candidates(self, shape: Shape, sensitivity: Sensitivity) -> Iterator[NoiseLaw]:
        reference = self.reference.profile
        if isinstance(reference, GaussianProfile):
            law = gaussian_noise(shape, sensitivity, self.alone)
            yield law.scaled(mu_of(law, sensitivity) / reference.mu * HEADROOM)
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
        while high > (1.0 + ROUGH) * low:
            middle = math.sqrt(low * high)
            allowed = self._allows(replace(laplace, scale=middle), sensitivity)
            low, high = (low, middle) if allowed else (middle, high)
        yield replace(laplace, scale=high, source=_SOURCE)


def plan(budget: Budget, sets: Sequence[Sensitivity], weights: Any = None, shapes: Any = None) -> Plan:
    """See `Budget.plan`."""
    kinds, order = kinds_of(budget, sets, weights, shapes)
    best = least_error(budget, kinds)
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
    budget.whole("a plan")
    releases = _check.count("releases", releases)
    adjacency = checked(ADD_REMOVE if like is None else checked_set("like", like).adjacency)
    profile: Profile
    if budget.delta == 0:  # randomized response, which dominates all noise with this pure epsilon
        scale = releases / budget.epsilon
        while not is_pure(budget.epsilon, scale, releases):
            scale = math.nextafter(scale, math.inf)
        profile = DiscreteProfile(1.0, scale)
    elif like is None:
        left = budget.delta * (1.0 - ROOM)
        profile = GaussianProfile(float(gaussian.mu(budget.epsilon, left)) / math.sqrt(releases) * (1.0 - 1e-12))
    else:
        profile = plan(budget, [like] * releases)[0].guarantee.profile
    reference = Guarantee(profile, adjacency, _most_variation(budget, releases))
    composition = Composition((Part(reference, releases),), budget)
    alone = _alone(reference, budget)
    return Shared(alone.epsilon, alone.delta, releases=releases, reference=reference, composition=composition)


# --- from laws to parts ---


def _larger(law: NoiseLaw, factor: float) -> NoiseLaw:
    """The same noise, larger by a factor."""
    if isinstance(law, Product):
        return replace(law, scale=law.scale * factor)
    assert isinstance(law, Gaussian)
    return law.scaled(factor)


def _planned(
    kind: Kind, law: NoiseLaw, budget: Budget, releases: int, shaped: bool
) -> tuple[NoiseLaw, Guarantee, Sensitivity]:
    """The noise of a release, the guarantee that the plan counts for it, and its set."""
    undrawn = certify(law, kind.sensitivity)
    if not shaped:
        most = _most_variation(budget, releases)
        return law, Guarantee(undrawn.profile, undrawn.adjacency, most), kind.sensitivity
    return law, sized_for_budget(law, kind.sensitivity, _alone(undrawn, budget)), kind.sensitivity


def _most_variation(budget: Budget, releases: int) -> float:
    """The largest total-variation error that the sampler of each release may have."""
    return USED * budget.delta / (releases * (1.0 + math.exp(min(budget.epsilon, 700.0))))


def _alone(guarantee: Guarantee, budget: Budget) -> Budget:
    """The budget that one of the releases keeps alone, at the delta of the whole, with room for its sampler."""
    return Budget(max(guarantee.profile.epsilon(budget.delta * (1.0 - ROOM)), 1e-9), budget.delta)


def _assembled(
    budget: Budget, composition: Composition, found: Sequence[tuple[NoiseLaw, Guarantee, Sensitivity]], shaped: bool
) -> Plan:
    parts = []
    for law, guarantee, sensitivity in found:
        alone = _alone(certify(law, sensitivity), budget)  # from the law, as when it was sized
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
    """The same i.i.d. noise for values of another shape, read as a matrix."""
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
    """The name of a plan's series in a ledger; equal plans have equal names."""
    try:
        text = composition.to_json()
    except MatrixDPError as reason:
        raise InvalidInput(f"the plan has no JSON form: {reason}") from None
    return f"plan {hashlib.sha256(text.encode()).hexdigest()[:16]}"
