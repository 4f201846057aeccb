"""What a noise law really guarantees on a sensitivity set: the only place in matrixdp that claims privacy.

For Gaussian noise the whole statement is one number, mu = sup over the set of ||S^(-1/2) V||. Each supremum below is
exact in closed form or a proven upper bound; the flag `exact` says which, and the witness is a difference in the set
that attains mu (or, for a bound, the worst one found).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.budget import Budget
from matrixdp.covariance import Covariance, Dense, FullCovariance, Isotropic, Symmetric
from matrixdp.covariance.spectrum import unit
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.noise.laws import Gaussian, NoiseLaw, Spherical
from matrixdp.noise.sampler import Sampling
from matrixdp.privacy import gaussian, spherical
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Sensitivity, Vertices

Indices = npt.NDArray[np.intp]

# mu is raised by this much, so that rounding in sums and norms can never put it below the truth.
ROUNDING = 1e-12
# A bound this close to its witness is attained: what is left is rounding.
ATTAINED = 1e-9


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
        exact: whether the profile is that of a difference in the set, or a proven upper bound.
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

    def delta(self, epsilon: float) -> float:
        """The least delta that holds at this epsilon."""
        return with_sampling_error(self.profile.delta(epsilon), epsilon, self.total_variation)

    def epsilon(self, delta: float) -> float:
        """The least epsilon that holds at this delta."""
        return epsilon_with_sampling_error(self.profile.epsilon, delta, self.total_variation)

    def meets(self, budget: Budget) -> bool:
        """Whether the release keeps this budget."""
        return self.delta(budget.epsilon) <= budget.delta

    @cached_property
    def witness(self) -> Array:
        """A difference in the set that is hidden worst; it attains mu when the certificate is exact."""
        return self._witness()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the witness, for JSON."""
        asked = self.budget or Budget(1.0, 1e-6)
        return {
            "relation": self.relation,
            "mu": self.mu,
            "exact": self.exact,
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

    def _tightness(self) -> str:
        if not self.exact:
            return "an upper bound"
        return "exact, grid included" if self.sampling and self.sampling.enlargement else "exact"

    def __str__(self) -> str:
        delta = self.budget.delta if self.budget else 1e-6
        neighbours = {"add/remove": "one record added or removed", "replace": "one record replaced"}[self.relation]
        lines = [
            ("relation", f"{self.relation} ({neighbours})"),
            ("change", self.sensitivity),
            ("guarantee", f"{self.profile} ({self._tightness()})"),
            ("", f"epsilon = {_up(self.epsilon(delta))} at delta = {delta:g}"),
            ("noise", f"{self.noise}, on {' x '.join(str(side) for side in self.shape)}"),
            ("source", self.source),
        ]
        if self.budget:
            lines.insert(4, ("asked for", str(self.budget)))
        if self.sampling:
            lines.append(("drawn with", str(self.sampling)))
        return "\n".join(["Privacy certificate", *(f"  {name:<10} {text}" for name, text in lines)])


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
        raise InvalidInput(f"noise must be a noise law, got {noise!r}; calibrate() makes one")
    if not isinstance(sensitivity, Sensitivity):
        raise InvalidInput(f"sensitivity must be a set from matrixdp.sensitivity, got {sensitivity!r}")
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
    raise NotCertifiable(f"nothing is proven about the noise {noise!r}")


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


@dataclass(frozen=True)
class Supremum:
    """The largest norm of a whitened difference over a set."""

    mu: float
    exact: bool
    witness: Callable[[], Array]


def _attained(upper: float, witness: Array, covariance: Covariance) -> Supremum:
    """A bound with the worst difference found; exact when that difference reaches it."""
    return Supremum(upper, _mu(covariance, witness) >= upper * (1 - ATTAINED), lambda: witness)


def _mu(covariance: Covariance, difference: Array) -> float:
    return _check.norm(covariance.whiten(difference))


def _full(covariance: Covariance) -> FullCovariance:
    if not isinstance(covariance, FullCovariance):
        raise NotCertifiable(
            f"{covariance.describe()} hides only symmetric changes; this set allows others: use a RankOne set, "
            "or noise on all entries"
        )
    return covariance


@singledispatch
def supremum(sensitivity: Sensitivity, covariance: Covariance) -> Supremum:
    """The largest mu over a sensitivity set."""
    raise NotCertifiable(f"no supremum is known for the set {sensitivity!r}")


@supremum.register
def _(sensitivity: Frobenius, covariance: Covariance) -> Supremum:
    """Exact: the radius along the direction with the least noise."""
    full, radius = _full(covariance), sensitivity.radius
    return Supremum(radius / full.smallest_std, True, lambda: radius * full.softest_direction())


@supremum.register
def _(sensitivity: Entrywise, covariance: Covariance) -> Supremum:
    """At most sqrt(R^T |Q| R), with equality when some choice of signs of R makes every product Q_ij R_i R_j positive.

    The other bound is the ball around the box. Finding the best signs is NP-hard; a few steps of ascent suggest some.
    """
    full = _full(covariance)
    bounds = sensitivity.bounds(full.shape)
    by_entries = math.sqrt(float(np.sum(bounds * full.absolute_precision(bounds))))
    by_ball = _check.norm(bounds) / full.smallest_std
    return _attained(min(by_entries, by_ball), _worst_corner(bounds, bounds, full), full)


def _worst_corner(start: Array, bounds: Array, covariance: FullCovariance) -> Array:
    """A corner of the box that no step along the gradient improves."""
    corner = start
    if covariance.independent:
        return corner
    for _ in range(50):
        pull = covariance.precision(corner)
        better = np.where(pull < 0, -bounds, bounds)
        if np.array_equal(better, corner):
            break
        corner = better
    return corner


@supremum.register(OneColumn)
@supremum.register(OneRow)
def _(sensitivity: OneColumn | OneRow, covariance: Covariance) -> Supremum:
    """The worst line, on which the set is a ball or a box."""
    full = _full(covariance)
    best: tuple[int, Supremum] | None = None
    for index, line in full.lines(sensitivity.axis):
        on_line: Sensitivity
        if sensitivity.radius is not None:
            on_line = Frobenius(sensitivity.radius)
        else:
            on_line = Entrywise(sensitivity.widths(full.shape))
        found = supremum(on_line, line)
        found = replace(found, mu=found.mu * (1 + line.slack))
        if best is None or found.mu > best[1].mu:
            best = index, found
    assert best is not None
    where, worst = best

    def witness() -> Array:
        difference = np.zeros(full.shape)
        np.moveaxis(difference, sensitivity.axis, 0)[where] = worst.witness()
        return difference

    return Supremum(worst.mu, worst.exact, witness)


@supremum.register
def _(sensitivity: Counts, covariance: Covariance) -> Supremum:
    """Exact for independent noise and for one cell; for several correlated cells, bounds on the sum of |Q_ij|."""
    full = _full(covariance)
    cells = min(sensitivity.cells, math.prod(full.shape))
    precisions = full.precision_diagonal().ravel()
    top: Indices = np.argpartition(precisions, -cells)[-cells:]
    if cells == 1 or full.independent:
        mu = sensitivity.bound * math.sqrt(float(np.sum(precisions[top])))
        return Supremum(mu, True, lambda: _signed(full, top, sensitivity.bound))
    if isinstance(full, Dense):
        square, top = _worst_cells(np.abs(full.precision_matrix()), cells)
    else:
        # |Q_ij| <= sqrt(Q_ii Q_jj), so the sum over the cells is at most the square of the sum of the roots
        square = float(np.sum(np.sqrt(precisions[top]))) ** 2
    upper = sensitivity.bound * min(math.sqrt(square), math.sqrt(cells) / full.smallest_std)
    return _attained(upper, _signed(full, top, sensitivity.bound), full)


def _worst_cells(weights: Array, cells: int) -> tuple[float, Indices]:
    """A bound on the sum of |Q_ij| over any `cells` of the indices (exact for two), and good candidates."""
    diagonal = np.diag(weights).copy()
    if cells == 2:
        pairs = diagonal[:, None] + diagonal[None, :] + 2 * weights
        np.fill_diagonal(pairs, -np.inf)
        first, second = np.unravel_index(int(np.argmax(pairs)), pairs.shape)
        return float(pairs[first, second]), np.array([first, second])
    off = weights.copy()
    np.fill_diagonal(off, 0)
    rows = diagonal + np.sort(off, axis=1)[:, -(cells - 1) :].sum(axis=1)
    top: Indices = np.argsort(rows)[-cells:]
    return float(np.sum(rows[top])), top


def _signed(covariance: FullCovariance, cells: Indices, bound: float) -> Array:
    """A change of these cells by the bound, with signs that reinforce each other, as they do with the first cell."""
    box = np.zeros(math.prod(covariance.shape))
    box[cells] = bound
    box = box.reshape(covariance.shape)
    pull = covariance.precision(unit(covariance.shape, np.unravel_index(cells[0], covariance.shape)))
    return _worst_corner(np.where(pull < 0, -box, box), box, covariance)


@supremum.register
def _(sensitivity: RankOne, covariance: Covariance) -> Supremum:
    """Exact for symmetric noise and for i.i.d. noise; otherwise the ball around the set.

    With symmetric noise, mu^2 of p u u^T - q w w^T is largest for u orthogonal to w, and is convex in (p, q), so the
    worst case is one record alone or two orthogonal records, all of full norm.
    """
    dimension, radius = covariance.shape[0], sensitivity.radius
    first = radius**2 * unit(covariance.shape, (0, 0))
    candidates = [first]
    if sensitivity.relation == "replace" and dimension > 1:
        candidates.append(first - radius**2 * unit(covariance.shape, (1, 1)))
    if isinstance(covariance, Symmetric):
        worst = max(candidates, key=lambda v: _mu(covariance, v))
        return Supremum(_mu(covariance, worst), True, lambda: worst)
    full = _full(covariance)
    soft = full.softest_direction()
    axes = np.linalg.svd(soft)
    for x in (axes.U[:, 0], axes.Vh[0], axes.U[:, 0] + axes.Vh[0]):
        if np.linalg.norm(x) > 0:
            candidates.append(radius**2 * np.outer(x, x) / float(x @ x))
    upper = sensitivity.frobenius_radius(full.shape) / full.smallest_std
    return _attained(upper, max(candidates, key=lambda v: _mu(full, v)), full)


@supremum.register
def _(sensitivity: Vertices, covariance: Covariance) -> Supremum:
    """Exact: a convex function on a polytope is largest at a vertex."""
    worst = max(sensitivity.differences, key=lambda v: _mu(covariance, v))
    return Supremum(_mu(covariance, worst), True, lambda: worst)


def _up(value: float, digits: int = 4) -> str:
    """A positive number rounded up to a few digits, for a guarantee must not shrink in print."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.ceil(value / unit * (1 - 1e-9)) * unit:.{digits}g}"
