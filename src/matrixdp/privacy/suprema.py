"""The largest norm of a whitened difference over a sensitivity set, which is mu for Gaussian noise.

Each supremum is an exact closed form or a proven upper bound; the flag `exact` says which. The witness is a difference
in the set that attains mu, or, for a bound, the worst one found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import REPLACE
from matrixdp.distributions.covariance import (
    Covariance,
    Dense,
    FullCovariance,
    Isotropic,
    Kronecker,
    OverTime,
    ResidualNoise,
    Symmetric,
    SymmetricEntries,
)
from matrixdp.distributions.covariance.over_time import MOST_STEPS
from matrixdp.distributions.covariance.spectrum import unit
from matrixdp.errors import NotCertifiable
from matrixdp.privacy import patterns
from matrixdp.residuals import Residuals, worst
from matrixdp.sensitivity import (
    L1,
    Counts,
    Entrywise,
    Frobenius,
    OneColumn,
    OneRow,
    Participation,
    RankOne,
    Sensitivity,
    Vertices,
)

Indices = npt.NDArray[np.intp]

# A bound this close, relative, to its witness counts as attained: the rest is rounding.
ATTAINED = 1e-9


@dataclass(frozen=True)
class Supremum:
    """The largest norm of a whitened difference over a set, and a function that returns a witness."""

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


def supremum(sensitivity: Sensitivity, covariance: Covariance) -> Supremum:
    """The largest mu over a sensitivity set: for i.i.d. noise, the longest difference over the standard deviation."""
    by_length = type(sensitivity) in _supremum.registry and not isinstance(sensitivity, Residuals)
    if isinstance(covariance, Isotropic) and by_length:
        mu = sensitivity.frobenius_radius(covariance.shape) / covariance.std
        return Supremum(mu, True, lambda: _supremum(sensitivity, covariance).witness())
    return _supremum(sensitivity, covariance)


@singledispatch
def _supremum(sensitivity: Sensitivity, covariance: Covariance) -> Supremum:
    raise NotCertifiable(f"no supremum is known for the set {_check.kind(sensitivity)}")


@_supremum.register
def _(sensitivity: Frobenius, covariance: Covariance) -> Supremum:
    """Exact: the radius along the direction with the least noise."""
    full, radius = _full(covariance), sensitivity.radius
    return Supremum(radius / full.smallest_std, True, lambda: radius * full.least_noise_direction())


@_supremum.register
def _(sensitivity: Entrywise, covariance: Covariance) -> Supremum:
    """At most sqrt(R^T |Q| R), with equality if some choice of signs of R makes no product Q_ij R_i R_j negative.

    The other bound is the ball around the box. Finding the best signs is NP-hard; a few steps of ascent suggest some.
    """
    full = _full(covariance)
    bounds = sensitivity.bounds(full.shape)
    if full.independent:
        return Supremum(_mu(full, bounds), True, lambda: bounds)
    by_entries = math.sqrt(float(np.sum(bounds * full.absolute_precision(bounds))))
    by_ball = _check.norm(bounds) / full.smallest_std
    return _attained(min(by_entries, by_ball), patterns.ascended(bounds, bounds, full.precision), full)


@_supremum.register(OneColumn)
@_supremum.register(OneRow)
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


@_supremum.register
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


@_supremum.register
def _(sensitivity: L1, covariance: Covariance) -> Supremum:
    """Exact for the plain ball, whose vertices are single entries, and for independent noise; otherwise a bound.

    A vertex of the set with largest entry b has k entries of size b and one of size r - k b. For independent noise the
    worst vertex has the largest sizes where the noise is least. Otherwise ||v|| <= sum |v_i| sqrt(Q_ii), which is
    largest for the same vertex.
    """
    full = _full(covariance)
    largest, whole, rest = sensitivity.worst(full.shape)
    deviations = np.sqrt(full.precision_diagonal().ravel())
    order: Indices = np.argsort(-deviations, kind="stable")[: whole + (rest > 0)]
    sizes = np.full(order.size, largest)
    sizes[whole:] = rest
    if order.size == 1 or full.independent:
        mu = _check.norm(sizes * deviations[order])
        return Supremum(mu, True, lambda: _signed(full, order, sizes))
    upper = min(float(np.sum(sizes * deviations[order])), sensitivity.frobenius_radius(full.shape) / full.smallest_std)
    return _attained(upper, _signed(full, order, sizes), full)


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


def _signed(covariance: FullCovariance, cells: Indices, bound: float | Array) -> Array:
    """A change of these cells by the bound (or a bound each), with signs that reinforce the first and then ascend."""
    box = np.zeros(math.prod(covariance.shape))
    box[cells] = bound
    box = box.reshape(covariance.shape)
    pull = covariance.precision(unit(covariance.shape, np.unravel_index(cells[0], covariance.shape)))
    corner = np.where(pull < 0, -box, box)
    return corner if covariance.independent else patterns.ascended(corner, box, covariance.precision)


@_supremum.register
def _(sensitivity: RankOne, covariance: Covariance) -> Supremum:
    """Exact for symmetric noise and for i.i.d. noise; otherwise the bound of the ball around the set.

    With symmetric noise, mu^2 of p u u^T - q w w^T is largest for u orthogonal to w, and is convex in (p, q). So the
    worst case is one record alone or two orthogonal records, all of full norm.
    """
    d, square = covariance.shape[0], sensitivity.radius**2
    two = sensitivity.adjacency == REPLACE and d > 1

    def records(apart: bool) -> Array:
        first = unit(covariance.shape, (0, 0))
        return square * (first - unit(covariance.shape, (1, 1)) if apart else first)

    if isinstance(covariance, Symmetric):
        # x x^T has the share 1/d of its squared length along the identity; two orthogonal records have no trace
        alone = math.hypot(math.sqrt(1 / d) / covariance.trace_std, math.sqrt(1 - 1 / d) / covariance.std)
        both = math.sqrt(2) / covariance.std if two else 0.0
        return Supremum(square * max(alone, both), True, lambda: records(apart=both > alone))
    if isinstance(covariance, SymmetricEntries):
        return _rank_one_by_entries(square, covariance, two)
    full = _full(covariance)
    candidates = [records(apart=False), *([records(apart=True)] if two else [])]
    axes = np.linalg.svd(full.least_noise_direction())
    for x in (axes.U[:, 0], axes.Vh[0], axes.U[:, 0] + axes.Vh[0]):
        if np.linalg.norm(x) > 0:
            candidates.append(square * np.outer(x, x) / float(x @ x))
    upper = sensitivity.frobenius_radius(full.shape) / full.smallest_std
    return _attained(upper, max(candidates, key=lambda v: _mu(full, v)), full)


def _rank_one_by_entries(square: float, covariance: SymmetricEntries, two: bool) -> Supremum:
    """A bound on the records' forms, exact if all records have the same form (docs/optimal-noise.md, second moments).

    In the directions U let K be the precision of the diagonal, q_ij = 1/(2 v_ij) that of sqrt(2) times an entry off it,
    and records of norm 1. With u_i = x_i^2 and w_i = y_i^2, which each add up to 1:

    - x x^T has the form u^T M u <= max M, where M_ii = K_ii and M_ij = K_ij + q_ij.
    - x x^T - y y^T has the form (u - w)^T K (u - w) + sum_ij q_ij (x_i x_j - y_i y_j)^2 (i, j different). As u - w adds
      up to 0, K may be replaced by -E, with E_ij = (K_ii + K_jj)/2 - K_ij. Let t = max(0, max(q_ij - E_ij)). Raising
      q_ij to E_ij + t, and the diagonal to t, does not lower the form, and makes it
      2 t (1 - (x.y)^2) + sum_ij E_ij (x_i y_j - x_j y_i)^2 <= 2 (t + max E)(1 - (x.y)^2).

    Shorter records are covered: the form is convex in their two squared norms, so largest at the ends.
    """
    precision = covariance.diagonal.inverse()
    precision = np.diag(precision) if precision.ndim == 1 else precision
    d, off = covariance.dimension, ~np.eye(covariance.dimension, dtype=bool)
    forms = precision + np.divide(0.5, covariance.off_diagonal, out=np.zeros((d, d)), where=off)
    largest = float(np.max(forms))
    axes = np.eye(d)
    candidates = [np.diag(axes[int(np.argmax(np.diagonal(forms)))])]
    if two:
        means = np.add.outer(np.diagonal(precision), np.diagonal(precision)) / 2
        apart = means - precision
        first, second = np.unravel_index(int(np.argmax(apart)), (d, d))
        candidates.append(np.diag(axes[first] - axes[second]))
        largest = max(largest, 2 * (float(np.max(apart)) + max(0.0, float(np.max((forms - means)[off])))))
    candidates = [square * covariance.turned(v) for v in candidates]
    return _attained(square * math.sqrt(largest), max(candidates, key=lambda v: _mu(covariance, v)), covariance)


@_supremum.register
def _(sensitivity: Vertices, covariance: Covariance) -> Supremum:
    """Exact: a convex function on a polytope is largest at a vertex."""
    worst = max(sensitivity.differences, key=lambda v: _mu(covariance, v))
    return Supremum(_mu(covariance, worst), True, lambda: worst)


@_supremum.register
def _(sensitivity: Residuals, covariance: Covariance) -> Supremum:
    """The longest difference of residuals in units of their noise; see `matrixdp.residuals.worst`."""
    basis, every = sensitivity.basis, range(len(sensitivity.basis.sizes))
    if isinstance(covariance, Isotropic):
        found, unit_std = sensitivity.longest, covariance.std
    elif isinstance(covariance, ResidualNoise) and covariance.basis.is_like(basis):
        kernels = [basis.kernel(attribute) for attribute in every]
        found, unit_std = worst(basis, kernels, covariance.stds**-2.0, sensitivity.adjacency), 1.0
    else:
        raise NotCertifiable(
            f"nothing is proven about {covariance.describe()} on residuals of marginals; use noise of one standard "
            "deviation per residual, with the same basis, or i.i.d. noise"
        )
    mu = sensitivity.records * math.sqrt(found.square) / unit_std
    return Supremum(mu, found.exact, lambda: sensitivity.difference(*found.cells))


@_supremum.register
def _(sensitivity: Participation, covariance: Covariance) -> Supremum:
    """The worst pattern, by the cases of `patterns`; exact if it is attained, otherwise a bound."""
    full = _full(covariance)
    if isinstance(full, OverTime) and not full.slack <= _check.LARGEST:
        raise NotCertifiable(f"{full.describe()}: C, or its inverse, grows too fast over the steps to be computed")
    if sensitivity.most_times(full.shape[0]) == 1:
        return _supremum(OneRow(sensitivity.clip), full)
    if full.independent and not isinstance(full, OverTime):
        precisions = full.precision_diagonal()
        square, pattern = sensitivity.heaviest(np.max(precisions, axis=1))
        columns = np.argmax(precisions[pattern], axis=1)
        return Supremum(
            sensitivity.clip * math.sqrt(square),
            True,
            lambda: _at_steps(sensitivity.clip, full, pattern, np.eye(full.shape[1])[columns]),
        )
    if isinstance(full, OverTime):
        return _of_strategy(sensitivity, full)
    if isinstance(full, Kronecker):
        rows, along = full.rows.inverse(), full.columns.least_noise_direction()
        gram = (np.diag(rows) if rows.ndim == 1 else rows) / full.columns.smallest_std**2
        return _of_gram(sensitivity, gram, full, along)
    pattern = sensitivity.first_pattern(full.shape[0])
    bound = sensitivity.frobenius_radius(full.shape) / full.smallest_std
    return _attained(bound, _at_steps(sensitivity.clip, full, pattern, np.eye(full.shape[1])[:1]), full)


def _of_strategy(sensitivity: Participation, covariance: OverTime) -> Supremum:
    """The worst pattern, without a matrix of all pairs of steps if the bands or the coefficients allow it."""
    along = np.arange(covariance.shape[1]) == 0.0
    if covariance.bands <= sensitivity.gap:
        square, pattern = sensitivity.heaviest(covariance.gram_diagonal)
        mu = sensitivity.clip * math.sqrt(square) / covariance.std
        return Supremum(mu, True, lambda: _at_steps(sensitivity.clip, covariance, pattern, along))
    if covariance.toeplitz and _decreasing(covariance):
        pattern = sensitivity.first_pattern(covariance.steps)
        taken = _at_steps(1.0, Isotropic((covariance.steps, 1), 1.0), pattern, np.ones((1, 1)))
        mu = sensitivity.clip * _check.norm(covariance.encode(taken)) / covariance.std
        return Supremum(mu, True, lambda: _at_steps(sensitivity.clip, covariance, pattern, along))
    if not covariance.steps <= MOST_STEPS:
        raise NotCertifiable(
            f"the worst pattern of {covariance.steps} steps is known for at most {sensitivity.gap} bands, or Toeplitz "
            f"coefficients that fall and stay above 0; others are searched up to {MOST_STEPS} steps"
        )
    return _of_gram(sensitivity, covariance.gram() / covariance.std**2, covariance, along)


def _decreasing(covariance: OverTime) -> bool:
    """Whether the coefficients of C fall and are at least 0; for C = B^-1 by Kaluza's theorem (`patterns`, case 3)."""
    given = covariance.coefficients
    if not covariance.inverse:
        return bool(np.all(np.diff(given) <= 0) and given[-1] >= 0)
    sums = np.cumsum(given)
    convex = np.square(sums[1:-1]) <= sums[:-2] * sums[2:] * (1 - 1e-12)
    return bool(np.all(given[1:] <= 0) and sums[-1] > 0 and np.all(convex))


def _of_gram(sensitivity: Participation, gram: Array, covariance: FullCovariance, along: Array) -> Supremum:
    square, pattern = patterns.worst_pattern(sensitivity, gram)
    rows = np.outer(patterns.signs(gram[np.ix_(pattern, pattern)]), along)
    witness = _at_steps(sensitivity.clip, covariance, pattern, rows)
    return _attained(sensitivity.clip * math.sqrt(square), witness, covariance)


def _at_steps(clip: float, covariance: Covariance, pattern: Indices, rows: Array) -> Array:
    """A difference with these rows, times clip, at the steps of a pattern."""
    difference = np.zeros(covariance.shape)
    difference[pattern] = clip * rows
    return difference
