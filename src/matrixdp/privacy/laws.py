"""What each noise law guarantees on a set, and how laws from outside the package are added.

A law describes noise (`matrixdp.distributions`). Its guarantee is computed here, never by the mechanism that chose it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import singledispatch
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions import Gaussian, NoiseLaw, Product, QuantileSearch, Spherical
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy import records, spherical
from matrixdp.privacy.discrete import DiscreteProfile, Groups
from matrixdp.privacy.guarantee import ROUNDING, GaussianProfile, Profile
from matrixdp.privacy.suprema import ATTAINED, supremum
from matrixdp.secure.discrete import LIMIT
from matrixdp.secure.tables import LEAST_SCALE
from matrixdp.sensitivity import L1, Counts, Entrywise, Sensitivity

MOST_STEPS = 2**14
"""If one entry of an l1 ball may change by more steps, the whole radius is counted in one entry, to save seconds."""


@dataclass(frozen=True)
class Claim:
    """What a law guarantees on a set.

    Attributes:
        profile: delta for every epsilon, never below the truth.
        exact: True if a difference in the set attains the profile, False if the profile is a proven upper bound.
        witness: returns a worst-case difference in the set.
    """

    profile: Profile
    exact: bool
    witness: Callable[[], Array]


@singledispatch
def claim(law: NoiseLaw, sensitivity: Sensitivity) -> Claim:
    """What a law guarantees on a set.

    Raises:
        NotCertifiable: if the noise cannot hide some difference in the set at all, or nothing is proven about it.
    """
    added = _ADDED.get(type(law))
    if added is None:
        raise NotCertifiable(
            f"nothing is proven about the noise {type(law).__name__}; matrixdp.register_law adds a law"
        )
    profile = added.profile(law, sensitivity)
    if not isinstance(profile, Profile):
        raise InvalidInput(f"the profile of {added.kind} must have delta(epsilon) and epsilon(delta)")
    return Claim(profile, added.exact, lambda: added.witness(law, sensitivity))


@claim.register
def _(law: Gaussian, sensitivity: Sensitivity) -> Claim:
    """The profile has one parameter, mu: the largest norm of a whitened difference."""
    found = supremum(sensitivity.read_as(law.shape, law.covariance.shape), law.covariance)
    mu = found.mu * (1 + ROUNDING + law.covariance.slack)

    def witness() -> Array:
        return found.witness().reshape(law.shape)

    if not 0 < mu < math.inf:
        raise NotCertifiable(f"{law.describe()} cannot hide every change allowed here: {sensitivity}")
    return Claim(GaussianProfile(mu), found.exact and law.covariance.slack <= ATTAINED, witness)


@claim.register
def _(law: Spherical, sensitivity: Sensitivity) -> Claim:
    """Only the length of a difference counts, and the longest is the worst."""
    radius = sensitivity.frobenius_radius(law.shape) * (1 + ROUNDING)
    profile = spherical.Profile(dimension=math.prod(law.shape), k=law.k, p=law.p, scale=law.scale, radius=radius)
    return Claim(profile, True, lambda: longest(law, sensitivity))


@claim.register
def _(law: Product, sensitivity: Sensitivity) -> Claim:
    """The worst difference in whole steps, after values are floored to the grid."""
    groups, attained = steps_changed(sensitivity, law.shape, law.step)
    profile = DiscreteProfile(law.exponent, law.scale_in_steps, *groups[0], groups[1:])
    return Claim(profile, attained, lambda: longest(law, sensitivity))


@claim.register
def _(law: QuantileSearch, sensitivity: Sensitivity) -> Claim:
    """The profile that dominates every release with this pure epsilon: randomized response with odds e^epsilon.

    That is discrete Laplace noise of scale 1/epsilon on one entry that changes by 1.
    """
    groups, _ = steps_changed(sensitivity, law.shape, 1.0)
    changes = sum(steps * entries for steps, entries in groups)
    epsilon = float(changes * (law.levels * Fraction(law.rate) + 1 / Fraction(law.scale))) * (1 + ROUNDING)
    if not epsilon <= 1 / LEAST_SCALE:
        raise NotCertifiable(f"a search for quantiles is certified up to epsilon {1 / LEAST_SCALE:g}, got {epsilon:g}")
    profile = DiscreteProfile(1.0, math.nextafter(1 / epsilon, 0.0))
    return Claim(profile, False, lambda: longest(law, sensitivity))


def steps_changed(sensitivity: Sensitivity, shape: Shape, step: float) -> tuple[Groups, bool]:
    """The worst change on a grid, as groups of (steps, entries); and whether a difference in the set attains it.

    Floor turns a difference of at most b into at most ceil(b/step) steps. Counts are exact. Entries with bounds, such
    as sums, may have been rounded twice before, each time by 2^-53 of at most 2^51 steps: for both values together,
    that is at most one step more.

    The same holds for an l1 ball of radius r: an entry that differs by v changes by less than v/step + 2 steps, and the
    n entries together by at most T = ceil(r/step) + 2n - 1 steps. All T steps in one entry are at least as bad as any
    other way to divide them (Schur-convexity: `privacy.discrete`, 3.). Values that are multiples of the step are not
    moved: T = r/step, and each entry changes by at most B = b/step, where b is the largest difference of one entry. The
    worst case is then B steps in T // B entries, and the rest in one.
    """
    if math.frexp(step)[0] != 0.5:
        raise NotCertifiable(f"the step of discrete noise must be a power of two, got {step!r}")
    if not isinstance(sensitivity, (Counts, Entrywise, L1)):
        raise NotCertifiable(
            f"discrete noise is certified where entries change by their own bounds or in l1, not for: {sensitivity}"
        )
    longest_change = sensitivity.radius if isinstance(sensitivity, L1) else sensitivity.largest_entry(shape)
    if not longest_change / step < LIMIT:
        raise NotCertifiable(f"the step of the noise, {step:g}, is too small for changes of {longest_change:g}")
    if isinstance(sensitivity, L1):
        return _steps_in_l1(sensitivity, shape, step)
    if isinstance(sensitivity, Counts):
        bounds, rounding = np.full(sensitivity.changed_entries(shape), sensitivity.bound), 0
    else:
        bounds, rounding = sensitivity.bounds(shape)[sensitivity.bounds(shape) > 0], 1
    steps = np.ceil(bounds / step).astype(np.int64) + rounding  # the quotient is exact
    sizes, counts = np.unique(steps, return_counts=True)
    return tuple(zip(sizes.tolist(), counts.tolist(), strict=True)), bool(np.all(steps * step == bounds))


def _steps_in_l1(sensitivity: L1, shape: Shape, step: float) -> tuple[Groups, bool]:
    total = math.ceil(sensitivity.radius / step)
    if sensitivity.step is None or not sensitivity.step >= step:
        return ((total + 2 * math.prod(shape) - 1, 1),), False
    most = math.ceil(sensitivity.largest_entry(shape) / step)
    total = min(total, most * math.prod(shape))
    if most > MOST_STEPS:
        return ((total, 1),), total == most
    whole, rest = divmod(total, most)
    return ((most, whole), *([(rest, 1)] if rest else [])), True


def is_known(law: Any) -> bool:
    """Whether a guarantee is known for exactly this class; a subclass may draw something else."""
    return isinstance(law, NoiseLaw) and (type(law) in claim.registry or type(law) in _ADDED)


def longest(law: NoiseLaw, sensitivity: Sensitivity) -> Array:
    """A difference of the largest norm in the set."""
    matrix = sensitivity.matrix_shape(law.shape)
    found = supremum(sensitivity.read_as(law.shape, matrix), Isotropic(matrix, 1.0))
    return found.witness().reshape(law.shape)


# --- laws from outside the package ---


@dataclass(frozen=True)
class AddedLaw:
    """A law that was registered from outside; see `register_law`."""

    kind: str
    profile: Callable[[Any, Sensitivity], Profile]
    witness: Callable[[Any, Sensitivity], Array]
    add_noise: Callable[[Any, Array], Array]
    exact: bool
    float_safe: bool


_ADDED: dict[type, AddedLaw] = {}


def added_law(law: NoiseLaw) -> AddedLaw | None:
    """How a law from outside the package was registered; None for matrixdp's own laws."""
    return _ADDED.get(type(law))


def register_law(
    law: type[NoiseLaw],
    *,
    kind: str,
    profile: Callable[[Any, Sensitivity], Profile],
    add_noise: Callable[[Any, Array], Array] | None = None,
    float_safe: bool = False,
    exact: bool = False,
    witness: Callable[[Any, Sensitivity], Array] = longest,
) -> None:
    """Makes a noise law from outside the package known to certificates, releases, accountants, ledgers and audits.

    Guarantee: none by matrixdp. A certificate for such a law rests on the profile and the sampler given here, and says
        that matrixdp does not vouch for them.

    Args:
        law: a frozen dataclass derived from `matrixdp.distributions.NoiseLaw`; its fields are written as JSON.
        kind: its name in JSON, such as "acme.discrete-laplace".
        profile: a function of a law and a set that returns a Profile: an immutable, hashable object with delta(epsilon)
            and epsilon(delta), for the worst difference in the set and the worse of both directions, never below the
            truth, with delta convex in e^epsilon. If delta reaches 0, its attribute `pure_epsilon` says where; budgets
            with delta = 0 need it. The function raises NotCertifiable if nothing is proven.
        add_noise: a function of a law and a value that returns the noisy value, with secret randomness; by default
            `value + law.sample()`.
        float_safe: whether the author claims that the profile covers the floating-point numbers that add_noise returns.
            `release` refuses a law without this claim, and so do ledgers once it has been drawn.
        exact: whether a difference in the set attains the profile.
        witness: a function of a law and a set that returns a worst-case difference, for audits; by default the longest.

    Example:
        >>> from dataclasses import dataclass
        >>> import numpy as np
        >>> from matrixdp import Budget, Counts, certify, register_law
        >>> from matrixdp.distributions import NoiseLaw
        >>> from matrixdp.privacy.guarantee import GaussianProfile
        >>> @dataclass(frozen=True)
        ... class Wide(NoiseLaw):
        ...     shape: tuple
        ...     source: str = "acme"
        ...     note: str = ""
        ...     def expected_squared_error(self, weights=None):
        ...         return 100.0 * np.prod(self.shape)
        ...     def sample(self, rng=None):
        ...         return 10.0 * np.random.default_rng().normal(size=self.shape)
        ...     def describe(self):
        ...         return "Gaussian, std 10"
        >>> _ = register_law(Wide, kind="acme.wide", profile=lambda law, sensitivity: GaussianProfile(0.1))
        >>> certify(Wide((3,)), Counts(1)).delta(1.0) < 1e-15
        True
    """
    if not (isinstance(law, type) and issubclass(law, NoiseLaw)):
        raise InvalidInput(f"law must be a class derived from NoiseLaw, got {_check.kind(law)}")
    if not isinstance(kind, str) or "." not in kind:
        raise InvalidInput("kind must be a name with a dot, such as 'acme.discrete-laplace': others are matrixdp's own")
    records.register(kind, law)
    _ADDED[law] = AddedLaw(kind, profile, witness, add_noise or _with_sample, exact, float_safe)


def _with_sample(law: NoiseLaw, value: Array) -> Array:
    return value + law.sample()
