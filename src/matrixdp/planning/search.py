"""Finds the noise of all releases of a plan at once.

Releases with equal sets, shapes and weights have the same law. There are two candidates: Gaussian noise for all
releases, or discrete noise wherever it applies. Discrete noise has one exponent t for all, and scales s prop. to
(k m^p / w)^(1 / (2 + p)) for k entries that change by m steps, with weight w of s^2 in the error. That has the least
error if the privacy losses add up like (m/s)^p, p = 1 for pure noise and 2 otherwise. Gaussian noise has mu^2 prop. to
the square root of its error at mu = 1, which has the least error. A few exponents, and shares of Gaussian noise, are
tried. The result need not be optimal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import scipy

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.accounting import methods
from matrixdp.accounting.methods import Use
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, Product
from matrixdp.distributions.product import steps_variance
from matrixdp.errors import InvalidInput, NotApplicable, NotCertifiable, NumericalFailure
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.mechanisms.solvers.discrete_scales import best_exponent
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import certify
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile
from matrixdp.privacy.records import encode, kind_of
from matrixdp.residuals import Residuals
from matrixdp.sensitivity import L1, Entrywise, OneColumn, OneRow, RankOne, Sensitivity, Vertices

ROOM = 1e-4
"""The share of delta that is left for the total-variation errors of the samplers."""
ROUGH, _FINE = 5e-3, 1e-6  # tolerances of a scale, during the search and at its end
_SHARES = 0.05  # tolerance of the share of Gaussian noise


@dataclass(frozen=True, eq=False)
class Kind:
    """Releases with one set, shape and weight, and the noise that they can have.

    Attributes:
        sensitivity: the set.
        count: how many releases.
        weight: the weight of the squared error of one entry; times the number of entries if the shape is known.
        normal: Gaussian noise, to be rescaled; None for delta = 0.
        discrete: discrete noise, to be rescaled; None if the set has none.
    """

    sensitivity: Sensitivity
    count: int
    weight: float
    normal: Gaussian | None
    discrete: Product | None

    @cached_property
    def normal_error(self) -> float:
        """The weighted squared error of Gaussian noise with mu = 1."""
        assert self.normal is not None
        each = self.normal.expected_squared_error() / math.prod(self.normal.shape)
        return self.weight * each * mu_of(self.normal, self.sensitivity) ** 2

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The entries that change, as (steps, entries)."""
        assert self.discrete is not None
        profile = certify(self.discrete, self.sensitivity).profile
        assert isinstance(profile, DiscreteProfile)
        return profile.groups

    def profile(self, exponent: float, scale: float) -> DiscreteProfile:
        """The profile of one release with discrete noise of this scale, in steps."""
        (shift, cells), *others = self.groups
        return DiscreteProfile(exponent, scale, shift, cells, tuple(others))

    def discrete_law(self, exponent: float, scale: float) -> Product:
        """Discrete noise of this scale, in steps."""
        assert self.discrete is not None
        return replace(self.discrete, exponent=exponent, scale=scale * self.discrete.step)

    def discrete_error(self, exponent: float, scale: float) -> float:
        """The weighted squared error of one release with discrete noise of this scale, in steps."""
        assert self.discrete is not None
        return self.weight * self.discrete.step**2 * steps_variance(exponent, scale)

    def relative_scale(self, power: float) -> float:
        """The scale up to a factor common to all kinds, by the formula at the top of the module."""
        assert self.discrete is not None
        cost = sum(cells * shift**power for shift, cells in self.groups)
        return float((cost / (self.weight * self.discrete.step**2)) ** (1.0 / (2.0 + power)))


def kinds_of(budget: Budget, sets: Any, weights: Any, shapes: Any) -> tuple[list[Kind], list[Kind]]:
    """The kinds of releases, and the kind of each release in order."""
    budget.whole("a plan")
    sets = list(sets) if isinstance(sets, Iterable) else []
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
        written = repr(encode(each)) if kind_of(each) else id(each)  # the whole set; its extent is not enough
        keys.append((type(each), written, shape, weight))
    found: dict[tuple[Any, ...], Kind] = {}
    for key, each, weight, shape in zip(keys, sets, counted, shaped, strict=True):
        if key not in found:
            entries = 1 if shapes is None else math.prod(shape)
            pure, discrete = budget.delta == 0, _discrete(shape, each, budget)
            normal = None if pure else gaussian_noise(shape, each, budget, shapes is None)
            found[key] = Kind(each, keys.count(key), weight * entries, normal, discrete)
    return list(found.values()), [found[key] for key in keys]


def _own_shape(sensitivity: Sensitivity) -> Shape:
    """The smallest shape on which a set has its full size; raises InvalidInput if the size grows with the shape."""
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
    if isinstance(sensitivity, L1):
        return (math.ceil(sensitivity.radius / (sensitivity.bound or sensitivity.radius)),)
    return (max(int(getattr(sensitivity, "cells", 1)), 1),)


def gaussian_noise(shape: Shape, sensitivity: Sensitivity, budget: Budget, alike: bool = False) -> Gaussian:
    """Gaussian noise of the least error; with `alike`, or if none is found, i.i.d. noise."""
    law: NoiseLaw | None = None
    if not alike:
        try:
            best = "marginals" if isinstance(sensitivity, Residuals) else "optimal"
            law = calibrate(best, shape=shape, sensitivity=sensitivity, budget=budget)
        except (NotApplicable, NotCertifiable, NumericalFailure):
            law = None
    law = law or calibrate("analytic", shape=shape, sensitivity=sensitivity, budget=budget)
    assert isinstance(law, Gaussian)
    return law


def _discrete(shape: Shape, sensitivity: Sensitivity, budget: Budget) -> Product | None:
    """Discrete noise for the set; None if there is none, which is an error for delta = 0."""
    name = "discrete" if budget.delta > 0 else "laplace"
    try:
        law = calibrate(name, shape=shape, sensitivity=sensitivity, budget=budget)
    except NotApplicable as reason:
        if budget.delta > 0:
            return None
        raise InvalidInput(f"sets must have pure noise for {budget}, {sensitivity} has none: {reason}") from None
    assert isinstance(law, Product)
    return law


def mu_of(law: Gaussian, sensitivity: Sensitivity) -> float:
    """The mu of Gaussian noise on a set."""
    mu = certify(law, sensitivity).mu
    assert mu is not None
    return mu


def least_error(budget: Budget, kinds: Sequence[Kind]) -> dict[Kind, NoiseLaw]:
    """The laws with the least total error found."""
    if budget.delta == 0:
        return _pure_laws(budget, kinds)
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


def _pure_laws(budget: Budget, kinds: Sequence[Kind]) -> dict[Kind, NoiseLaw]:
    """Discrete Laplace noise whose pure epsilons add up to the budget's, at the scales above with p = 1."""
    relative = {kind: kind.relative_scale(1.0) for kind in kinds}
    factor = _pure_factor(relative, budget)
    while not methods.pure_epsilon(_uses(relative, 1.0, factor)) <= budget.epsilon:
        factor = math.nextafter(factor, math.inf)
    return {kind: kind.discrete_law(1.0, scale * factor) for kind, scale in relative.items()}


def _pure_factor(relative: Mapping[Kind, float], budget: Budget) -> float:
    """The factor of the scales at which the pure epsilons of discrete Laplace noise add up to the budget's."""
    changes = [kind.count * cells * shift / scale for kind, scale in relative.items() for shift, cells in kind.groups]
    return math.fsum(changes) / budget.epsilon


def _uses(relative: Mapping[Kind, float], exponent: float, factor: float) -> Counter[Use]:
    """All releases of the kinds, with discrete noise at these scales times the factor."""
    found: Counter[Use] = Counter()
    for kind, scale in relative.items():
        found[Use(kind.profile(exponent, scale * factor))] += kind.count
    return found


def _gaussian_laws(kinds: Sequence[Kind], mu: float) -> tuple[dict[Kind, NoiseLaw], float]:
    """Gaussian noise of the least total error, and that error: mu^2, which adds up, is prop. to the roots of errors."""
    roots = {kind: math.sqrt(kind.normal_error) for kind in kinds}
    whole = math.fsum(kind.count * roots[kind] for kind in kinds)
    laws, error = dict[Kind, NoiseLaw](), 0.0
    for kind in kinds:
        own = mu * math.sqrt(roots[kind] / whole) * (1.0 - 1e-12)
        assert kind.normal is not None
        laws[kind] = kind.normal.scaled(mu_of(kind.normal, kind.sensitivity) / own * HEADROOM)
        error += kind.count * kind.normal_error / own**2
    return laws, error


@dataclass(frozen=True, eq=False)
class _Mixture:
    """Discrete noise of one exponent for some kinds, and Gaussian noise for the others."""

    budget: Budget
    grained: Sequence[Kind]
    normal: Sequence[Kind]
    exponent: float
    whole: float

    def best(self) -> tuple[dict[Kind, NoiseLaw], float] | None:
        """The laws with the least error found, and that error."""
        if not self.normal:
            return self._at(0.0, _FINE)

        def error(share: float) -> float:
            found = self._at(share, ROUGH)
            return math.inf if found is None else math.log(found[1])

        # the error is unbounded at both ends
        found = scipy.optimize.minimize_scalar(
            error, bounds=(0.02, 0.98), method="bounded", options={"xatol": _SHARES, "maxiter": 9}
        )
        return self._at(float(found.x), _FINE)

    def _at(self, share: float, tolerance: float) -> tuple[dict[Kind, NoiseLaw], float] | None:
        """The laws, and their error, if Gaussian noise has this share of mu^2."""
        mu = self.whole * math.sqrt(share)
        scales = self._scales(mu, tolerance)
        if scales is None:
            return None
        laws, error = _gaussian_laws(self.normal, mu) if self.normal else ({}, 0.0)
        for kind, scale in scales.items():
            laws[kind] = kind.discrete_law(self.exponent, scale)
            error += kind.count * kind.discrete_error(self.exponent, scale)
        return laws, error

    def _scales(self, mu: float, tolerance: float) -> dict[Kind, float] | None:
        """The least scales found, in their proportions, at which all releases together keep the budget."""
        power = 1.0 if self.exponent == 1.0 else 2.0
        relative = {kind: kind.relative_scale(power) for kind in self.grained}
        target = self.budget.delta * (1.0 - ROOM)

        @cache
        def excess(log_factor: float) -> float:
            normal = {Use(GaussianProfile(mu)): 1} if mu > 0.0 else {}
            uses = {**normal, **_uses(relative, self.exponent, math.exp(log_factor))}
            found = methods.delta(uses, "add/remove", self.budget.epsilon)
            return math.log(max(found, 1e-300) / target)

        try:
            low, high = _bracket(excess, math.log(_pure_factor(relative, self.budget)))
            root = float(scipy.optimize.brentq(excess, low, high, xtol=tolerance, rtol=1e-15))
            while tolerance <= _FINE and not excess(root) <= 0.0:
                root += tolerance
        except (InvalidInput, NotCertifiable):  # no scale in range
            return None
        return {kind: scale * math.exp(root) for kind, scale in relative.items()}


def _bracket(excess: Callable[[float], float], start: float) -> tuple[float, float]:
    """Two points around a root: the function is above 0 at the first, and at most 0 at the second."""
    step, high = 0.05, start
    while not excess(high) <= 0.0:
        high, step = high + step, 2.0 * step
    low, step = high - step, 0.05
    while not excess(low) > 0.0:
        low, step = low - step, 2.0 * step
    return low, high
