"""What a noise law really guarantees on a sensitivity set: the only place in matrixdp that claims privacy.

For Gaussian noise the whole statement is one number, mu = sup over the set of ||S^(-1/2) V||; `suprema` finds it.

A certificate of a release also says what the statement covers: the floating-point numbers that were released, or the
ideal law of the noise alone. Noise of which only the ideal law is known keeps no budget here, and `check_releasable`
and `refuse_unsafe_floats` refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, singledispatch
from typing import Any, Protocol

import numpy as np

from matrixdp._check import Array
from matrixdp.budget import Budget
from matrixdp.covariance import Isotropic
from matrixdp.errors import GuaranteeViolated, InvalidInput, NotCertifiable
from matrixdp.noise.laws import Gaussian, NoiseLaw, Spherical
from matrixdp.noise.sampler import Sampling
from matrixdp.privacy import gaussian, spherical
from matrixdp.privacy.suprema import ATTAINED, supremum
from matrixdp.sensitivity import Sensitivity

# mu is raised by this much, so that rounding in sums and norms can never put it below the truth.
ROUNDING = 1e-12

_UNSAFE = (
    "is not floating-point-safe: its guarantee is that of the ideal law, and which floating-point numbers come out can "
    "reveal the true value, whatever epsilon is"
)
_INSTEAD = "Use the mechanism 'auto', or another with Gaussian noise"


class Profile(Protocol):
    """The least delta for every epsilon, rounded up."""

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta."""


@dataclass(frozen=True)
class GaussianProfile:
    """The profile of Gaussian noise, which one number determines."""

    mu: float

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""
        return float(gaussian.delta(self.mu, epsilon))

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta."""
        return float(gaussian.epsilon(self.mu, delta))

    def __str__(self) -> str:
        return f"mu = {_up(self.mu, 6)}"


@dataclass(frozen=True, eq=False)
class Certificate:
    """What a release guarantees, for every epsilon and delta at once.

    Attributes:
        profile: delta for every epsilon, never below the truth.
        exact: whether the profile is that of a difference in the set, or a proven upper bound; a statement about what
            `covers` names.
        relation: "add/remove" or "replace".
        sensitivity: what a neighbour can change, in words.
        noise: the noise, in words.
        source: who proposed the noise.
        shape: the shape of the released value.
        budget: the budget that was asked for, if any; used for printing alone.
        sampling: how the release was drawn; None for a law that has not been drawn. What the drawing costs is in the
            guarantee: the grid in the profile, the error of the tables in delta and epsilon.
    """

    profile: Profile
    exact: bool
    relation: str
    sensitivity: str
    noise: str
    source: str
    shape: tuple[int, ...]
    budget: Budget | None = None
    sampling: Sampling | None = None
    _witness: Callable[[], Array] = field(repr=False, default=lambda: np.zeros(0))

    @property
    def mu(self) -> float | None:
        """The Gaussian differential privacy parameter; None for noise that is not Gaussian."""
        return self.profile.mu if isinstance(self.profile, GaussianProfile) else None

    @property
    def total_variation(self) -> float:
        """How far the drawn noise may be from its law."""
        return self.sampling.total_variation if self.sampling else 0.0

    @property
    def float_safe(self) -> bool:
        """Whether the guarantee covers the floating-point numbers that were released."""
        return self.sampling is not None and self.sampling.float_safe

    @property
    def covers(self) -> str:
        """What the guarantee is about, in words: the floating-point numbers released, or the ideal law alone."""
        if self.float_safe:
            return "the floating-point numbers released"
        if self.sampling is None:
            unsafe = "the ideal law only; no floating-point-safe sampler is known for it"
            return unsafe if self.mu is None else "the law of the noise, which has not been drawn"
        if self.sampling.reproducible:
            return "the ideal law only; seeded noise is not private"
        return "the ideal law only, not the floating-point numbers released"

    @property
    def unsafe_floats(self) -> bool:
        """Whether the noise was drawn in floating point, from secure entropy, without a proof about the numbers."""
        return self.sampling is not None and not self.sampling.float_safe and not self.sampling.reproducible

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""
        return with_sampling_error(self.profile.delta(epsilon), epsilon, self.total_variation)

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta."""
        return epsilon_with_sampling_error(self.profile.epsilon, delta, self.total_variation)

    def meets(self, budget: Budget) -> bool:
        """Whether the release keeps this budget, or the law if it has not been drawn; never true of unsafe floats."""
        return not self.unsafe_floats and self.delta(budget.epsilon) <= budget.delta

    @cached_property
    def witness(self) -> Array:
        """A difference in the set that is hidden worst; it attains mu when the certificate is exact."""
        return self._witness()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the witness, for JSON; `exact` is about what `covers` names."""
        asked = self.budget or Budget(1.0, 1e-6)
        return {
            "relation": self.relation,
            "mu": self.mu,
            "exact": self.exact,
            "covers": self.covers,
            "epsilon": self.epsilon(asked.delta),
            "delta": asked.delta,
            "budget": None if self.budget is None else {"epsilon": self.budget.epsilon, "delta": self.budget.delta},
            "shape": list(self.shape),
            "sensitivity": self.sensitivity,
            "noise": self.noise,
            "source": self.source,
            "sampling": None if self.sampling is None else str(self.sampling),
            "float_safe": self.float_safe,
            "total_variation": self.total_variation,
        }

    @property
    def _covers_law_only(self) -> bool:
        """Whether the guarantee stops short of the numbers released, or would if the law were drawn."""
        return self.mu is None if self.sampling is None else not self.sampling.float_safe

    def _tightness(self) -> str:
        tight = "exact" if self.exact else "an upper bound"
        if self._covers_law_only:
            return f"{tight} for the ideal law only"
        return f"{tight}, grid included" if self.exact and self.sampling and self.sampling.enlargement else tight

    def __str__(self) -> str:
        delta = self.budget.delta if self.budget else 1e-6
        neighbours = {"add/remove": "one record added or removed", "replace": "one record replaced"}[self.relation]
        lines = [
            ("relation", f"{self.relation} ({neighbours})"),
            ("change", self.sensitivity),
            ("guarantee", f"{self.profile} ({self._tightness()})"),
            ("", f"epsilon = {_up(self.epsilon(delta))} at delta = {delta:g}"),
            *([("covers", self.covers)] if self._covers_law_only else []),
            ("noise", f"{self.noise}, on {' x '.join(str(side) for side in self.shape)}"),
            ("source", self.source),
        ]
        if self.budget:
            lines.insert(4, ("asked for", str(self.budget)))
        if self.sampling:
            lines.append(("drawn with", str(self.sampling)))
        return "\n".join(["Privacy certificate", *(f"  {name:<10} {text}" for name, text in lines)])


def check_releasable(
    certificate: Certificate, budget: Budget, *, refuted: bool = False, accept_violation: bool = False
) -> None:
    """Raises GuaranteeViolated unless the noise keeps the budget, or the caller accepts that it does not.

    Args:
        certificate: the certificate of the noise as it will be drawn.
        budget: the promise to keep.
        refuted: the theorem that the noise rests on is false; it is then refused even where the noise is enough.
        accept_violation: True, and nothing else, accepts noise without the guarantee.
    """
    if accept_violation is True or (certificate.meets(budget) and not refuted):
        return
    if certificate.unsafe_floats and not refuted:
        reason = _UNSAFE
    else:
        delta, bound = certificate.delta(budget.epsilon), "" if certificate.exact else " (an upper bound)"
        reason = f"does not keep {budget}"
        if refuted:
            holds = ", although this noise happens to keep the budget" if delta <= budget.delta else ""
            reason = f"rests on a theorem that is false{holds}"
        reason += f": at epsilon {budget.epsilon:g} its delta is {delta:.3g}{bound}"
    raise GuaranteeViolated(
        f"{certificate.source} {reason}; nothing was released. {_INSTEAD}; in Python, accept_violation=True releases "
        "without the guarantee"
    )


def refuse_unsafe_floats(certificate: Certificate, what: str = "release") -> None:
    """Raises GuaranteeViolated for noise drawn in floating point without a proof about the numbers that come out.

    A law that has not been drawn passes, and so does seeded noise, whose certificate says that it is reproducible.

    Args:
        certificate: the certificate of the noise.
        what: what is refused, for the message.

    Source: mironov2012significance.
    """
    if certificate.unsafe_floats:
        raise GuaranteeViolated(f"{what} refused: the noise of {certificate.source} {_UNSAFE}. {_INSTEAD}")


def with_sampling_error(delta: float, epsilon: float, total_variation: float) -> float:
    """delta for noise within a total variation of its law: P'(E) <= P(E) + t <= e^eps (P''(E) + t) + delta + t."""
    if total_variation == 0:
        return delta
    # rounded up: what is added can be far below the last digit of delta
    total = delta + (1 + math.exp(min(epsilon, 700.0))) * total_variation * (1 + ROUNDING)
    return min(1.0, math.nextafter(total, math.inf))


def epsilon_with_sampling_error(epsilon_at: Callable[[float], float], delta: float, total_variation: float) -> float:
    """epsilon for noise within a total variation of its law, from epsilon as a function of delta for the law itself.

    The error grows with epsilon, so epsilon is raised until what the error leaves of delta is enough for it. What is
    then needed is enough itself, for at a smaller epsilon the error leaves more.
    """
    epsilon = epsilon_at(delta)
    if total_variation == 0:
        return epsilon
    for _ in range(100):
        left = math.nextafter(delta - with_sampling_error(0.0, epsilon, total_variation), 0.0)
        needed = epsilon_at(left) if left > 0 else math.inf
        if needed <= epsilon or not math.isfinite(needed):
            return needed
        # a little above what is needed now, so that this ends after a few steps
        epsilon = needed + max(1e-3 * (needed - epsilon), 1e-12 * needed)
    return math.inf


def certify(
    noise: NoiseLaw, sensitivity: Sensitivity, budget: Budget | None = None, sampling: Sampling | None = None
) -> Certificate:
    """Computes what a noise law guarantees on a sensitivity set.

    Guarantee: for every pair of neighbours whose values differ by a member of the set, and every epsilon, the release
    `value + noise` is (epsilon, certificate.delta(epsilon))-differentially private.

    Args:
        noise: the law that the noise is drawn from.
        sensitivity: what a neighbour can change.
        budget: the budget that was asked for; only changes how the certificate prints.
        sampling: how the noise is drawn, for the certificate of a release.

    Source: yang2021improved, Lemma 1 and Theorem 2; balle2018improving, Theorem 5.

    Raises:
        NotCertifiable: if the noise cannot hide some difference in the set at all.
    """
    if type(noise) not in _guarantee.registry or type(noise) is object:
        raise InvalidInput(f"noise must be a noise law, got {type(noise).__name__}; calibrate() makes one")
    if not isinstance(sensitivity, Sensitivity):
        raise InvalidInput(f"sensitivity must be a set from matrixdp.sensitivity, got {type(sensitivity).__name__}")
    sensitivity.fits(noise.shape)
    profile, exact, witness = _guarantee(noise, sensitivity)
    if sampling is not None and isinstance(profile, GaussianProfile):
        profile = GaussianProfile((profile.mu + sampling.enlargement) * (1 + ROUNDING))
    return Certificate(
        profile=profile,
        exact=exact,
        relation=sensitivity.relation,
        sensitivity=sensitivity.describe(),
        noise=noise.describe(),
        source=noise.source + (f"; {noise.note}" if noise.note else ""),
        shape=noise.shape,
        budget=budget,
        sampling=sampling,
        _witness=witness,
    )


@singledispatch
def _guarantee(noise: NoiseLaw, sensitivity: Sensitivity) -> tuple[Profile, bool, Callable[[], Array]]:
    """The profile of a law on a set, whether it is attained, and by which difference."""
    raise NotCertifiable(f"nothing is proven about the noise {type(noise).__name__}")


@_guarantee.register
def _(noise: Gaussian, sensitivity: Sensitivity) -> tuple[Profile, bool, Callable[[], Array]]:
    found = supremum(sensitivity, noise.covariance)
    mu = found.mu * (1 + ROUNDING + noise.covariance.slack)
    if not 0 < mu < math.inf:
        raise NotCertifiable(f"{noise.describe()} cannot hide every change allowed here: {sensitivity}")
    return GaussianProfile(mu), found.exact and noise.covariance.slack <= ATTAINED, found.witness


@_guarantee.register
def _(noise: Spherical, sensitivity: Sensitivity) -> tuple[Profile, bool, Callable[[], Array]]:
    """Only the length of a difference counts, and the longest is the worst."""
    radius = sensitivity.frobenius_radius(noise.shape) * (1 + ROUNDING)
    profile = spherical.Profile(
        dimension=math.prod(noise.shape), k=noise.k, p=noise.p, scale=noise.scale, radius=radius
    )
    longest = supremum(sensitivity, Isotropic(noise.shape, 1.0))
    return profile, True, longest.witness


def _up(value: float, digits: int = 4) -> str:
    """A positive number rounded up to a few digits, for a guarantee must not shrink in print."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.ceil(value / unit * (1 - 1e-9)) * unit:.{digits}g}"
