"""The least noise for many marginal tables at once, by noise on their residuals.

With noise of variance s_A^2 on the residual of A (`matrixdp.residuals`), the summed variance of table S is a sum over
the subsets A of S of s_A^2 times a coefficient. With weights per table the error is sum_A v_A s_A^2.

**Add/remove.** A record has mu^2 = sum_A p_A / s_A^2, whatever its cell. By Cauchy-Schwarz the error is at least
(sum_A sqrt(p_A v_A))^2 / mu^2, and s_A^2 = sqrt(p_A / v_A) (sum_A sqrt(p_A v_A)) / mu^2 attains it. It is the optimum
over all Gaussian noise on the domain where weights are constant within each table. The task stays the same when the
values of an attribute are permuted, so by convexity some best covariance does too. Such a covariance is a multiple of
the identity on each residual space, for these are irreducible and differ from each other.

**Several constraints.** Under replace each pair of cells C requires sum_A m_CA / s_A^2 <= mu^2. The least error is
max over weights u on the simplex of (sum_A sqrt(v_A (m^T u)_A))^2 / mu^2. For a fixed u it is the closed form above, a
lower bound, and at the best u no constraint is broken. The least largest variance over tables, relative to targets,
has the same form with the roles of constraints and tables exchanged.

Source: xiao2023optimal, for add/remove, and for the convex program behind other losses.
Deviates: (1) replace, and ordered attributes; (2) whole-number contrasts that are drawn floating-point-safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from matrixdp._check import Array
from matrixdp.errors import NotApplicable, NumericalFailure
from matrixdp.mechanisms.solvers import design, workloads
from matrixdp.residuals import ResidualBasis, Whole, helmert, keys

# The relative distance from the optimum at which the convex programs stop.
GAP = 1e-7
# The most constraints, and the most residuals, of a convex program.
MOST = 1 << 10
# The share of the error that is added to limits, so that residuals outside all limits get finite noise.
_SHARE = 1e-6
# Bits of the contrasts of an ordered attribute: rounding them costs 0.3 % at 85 values, 5 % with 8 bits. All ordered
# attributes of a table share the bits that 64-bit residuals of 2^26 records leave.
_BITS, _SHARED_BITS = 12, 36


@dataclass(frozen=True)
class Incidence:
    """Which residuals each table is made of: pairs of a table and a subset of it.

    Attributes:
        tables: one set of attributes per row, filled up with -1.
        subsets: all subsets of the tables, in the same form, small ones first.
        table: of each pair, the row of the table.
        subset: the row of the subset.
        inside: the attributes of the subset, filled up with -1.
        outside: those of the table that the subset lacks, filled up with -1.
    """

    tables: Whole
    subsets: Whole
    table: Whole
    subset: Whole
    inside: Whole
    outside: Whole

    def coefficients(self, inside: Sequence[float], outside: Sequence[float]) -> Array:
        """Of each pair, the product of a factor per attribute in the subset, and of another per attribute beside it."""
        within, beside = np.append(inside, 1.0), np.append(outside, 1.0)
        return np.asarray(within[self.inside].prod(axis=1) * beside[self.outside].prod(axis=1))

    def by_subset(self, terms: Array) -> Array:
        """The sum over the pairs of each subset."""
        return np.bincount(self.subset, terms, len(self.subsets)).astype(np.float64)


def incidence(tables: Whole, attributes: int) -> Incidence:
    """All subsets of the tables."""
    width = tables.shape[1]
    parts = list(_parts(tables))
    found = np.concatenate([keys(inside, attributes) for _, inside, _ in parts])
    inside = np.concatenate([_padded(inside, width) for _, inside, _ in parts])
    outside = np.concatenate([_padded(outside, width) for _, _, outside in parts])
    sorted_keys, first = np.unique(found, return_index=True)
    subsets = inside[first]
    order = np.lexsort([*subsets.T[::-1], np.sum(subsets >= 0, axis=1)])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return Incidence(
        tables=tables,
        subsets=subsets[order],
        table=np.concatenate([rows for rows, _, _ in parts]),
        subset=rank[np.searchsorted(sorted_keys, found)],
        inside=inside,
        outside=outside,
    )


def _parts(tables: Whole) -> Iterator[tuple[Whole, Whole, Whole]]:
    """Tables of one size at a time, and one choice of columns: rows, the attributes chosen, the others."""
    sizes = np.sum(tables >= 0, axis=1)
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        for chosen in range(size + 1):
            for columns in combinations(range(size), chosen):
                others = [column for column in range(size) if column not in columns]
                yield rows, tables[rows][:, list(columns)], tables[rows][:, others]


def _padded(rows: Whole, width: int) -> Whole:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1)


def aligned(basis: ResidualBasis, found: Incidence, values: Array) -> Array:
    """Numbers for the subsets of the tables, in the order of the basis, which may lack some of them."""
    attributes = len(basis.sizes)
    have, want = keys(found.subsets, attributes), keys(basis.subsets, attributes)
    order = np.argsort(have)
    places = order[np.minimum(np.searchsorted(have, want, sorter=order), len(have) - 1)]
    return np.where(have[places] == want, values[places], 0.0)


# --- variances ---


def pair_constraints(basis: ResidualBasis, kinds: Sequence[Array]) -> Array:
    """The constraint of each pair of cells, up to symmetry, on 1/s_A^2 under replace: q_A(a) + q_A(b) - 2 c_A(a, b).

    Args:
        basis: the residuals.
        kinds: for each attribute the triples (K(a, a), K(b, b), K(a, b)); see `matrixdp.residuals.worst`.
    """
    choices = np.indices([len(values) for values in kinds]).reshape(len(kinds), -1)
    terms = []
    for part in range(3):
        chosen = [values[choice, part] for values, choice in zip(kinds, choices, strict=True)]
        factors = np.stack([*chosen, np.ones(choices.shape[1])], axis=1)
        terms.append(factors[:, basis.subsets].prod(axis=2))
    squares = terms[0] + terms[1] - 2 * terms[2]
    return np.asarray(np.maximum(squares[np.max(squares, axis=1) > 0], 0))


def closed_form(constraint: Array, error: Array) -> Array:
    """s_A^2 of least sum_A error[A] s_A^2 subject to sum_A constraint[A] / s_A^2 <= 1."""
    return np.asarray(np.sqrt(constraint / error) * np.sum(np.sqrt(constraint * error)))


def several_constraints(constraints: Array, error: Array) -> Array:
    """s_A^2 of least sum_A error[A] s_A^2 subject to sum_A constraints[C, A] / s_A^2 <= 1 for every C."""
    weights = best_mixture(constraints, error)
    variances = closed_form(weights @ constraints, error)
    return np.asarray(variances * np.max(constraints @ (1 / variances)))


def least_largest(constraint: Array, errors: Array) -> Array:
    """s_A^2 of least max over T of sum_A errors[T, A] s_A^2, subject to sum_A constraint[A] / s_A^2 <= 1."""
    return closed_form(constraint, best_mixture(errors, constraint) @ errors)


def with_limits(constraint: Array, error: Array, limits: Array) -> Array:
    """s_A^2 of least sum_A error[A] s_A^2 subject to the constraint and sum_A limits[T, A] s_A^2 <= 1 for every T.

    The dual adds a price z_T >= 0 per limit to the error: maximise (sum_A sqrt(constraint_A (error + limits^T z)_A))^2
    - sum z, which is concave, with gradient sum_A limits[T, A] s_A^2 - 1 at the closed form for that error. If rounding
    still breaks a limit, the result is mixed with that of `least_largest`, which keeps all limits.

    Raises:
        NotApplicable: if the limits cannot be kept.
    """
    from scipy.optimize import minimize  # slow to import, and seldom needed

    scale = float(np.sum(np.sqrt(constraint * error))) ** 2
    safe = least_largest(constraint, limits + _SHARE * error / scale)  # residuals outside all limits get large noise
    reach = float(np.max(limits @ safe))
    if not reach <= 1:
        raise NotApplicable(
            f"the targets need {reach**0.5:.4g} times the mu of this budget; use a larger budget, or standard errors "
            f"{reach**0.5:.4g} times as large"
        )

    def negative_dual(prices: Array) -> tuple[float, Array]:
        priced = error / scale + limits.T @ prices
        root = float(np.sum(np.sqrt(constraint * priced)))
        return float(np.sum(prices)) - root**2, 1 - limits @ closed_form(constraint, priced)

    found = minimize(
        negative_dual, np.zeros(len(limits)), jac=True, method="L-BFGS-B", bounds=[(0, None)] * len(limits),
        options={"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-9},
    )  # fmt: skip
    best = closed_form(constraint, error / scale + limits.T @ found.x)
    beyond, room = float(np.max(limits @ best)) - 1, 1 - reach
    if beyond <= 0:
        return best
    # 1/s^2 is what the constraint is linear in; the variance of a mixture of precisions is convex
    share = beyond / (beyond + room)
    return np.asarray(1 / ((1 - share) / best + share / safe))


def best_mixture(rows: Array, weights: Array) -> Array:
    """u on the simplex with the largest f(u) = sum_A sqrt(weights[A] (rows^T u)_A), by an interior-point method.

    f is concave and homogeneous of degree 1/2, so f(u)^2 is within a share g of the maximum if no entry of the
    gradient, times 2/f, exceeds 1 + g. Newton steps on f(u) + t sum log u, t decreasing, until the share is below GAP.

    Raises:
        NumericalFailure: if the share is not reached.
    """
    count = len(rows)
    u = np.full(count, 1 / count)
    scale = weights / np.sum(weights * np.mean(rows, axis=0))

    def terms(point: Array) -> Array:
        return np.asarray(np.sqrt(scale * (point @ rows)))

    def value(point: Array, t: float) -> float:
        return float(np.sum(terms(point)) + t * np.sum(np.log(point)))

    t = 1.0 / count
    for _ in range(400):
        root = terms(u)
        slope = rows @ (scale / (2 * root))
        if np.max(slope) * 2 / np.sum(root) - 1 <= GAP:
            return np.asarray(u)
        curved = rows * (scale / (2 * root**1.5))
        hessian = -(curved @ curved.T) - np.diag(t / u**2)
        gradient = slope + t / u
        solved = np.linalg.solve(hessian, np.stack([gradient, np.ones(count)], axis=1))
        step = -solved[:, 0] + solved[:, 1] * (np.sum(solved[:, 0]) / np.sum(solved[:, 1]))
        gain = float(gradient @ step)
        length = min(1.0, 0.95 / max(1e-300, float(np.max(-step / u))))
        before = value(u, t)
        while length > 1e-12 and not value(u + length * step, t) >= before + 0.1 * length * gain:
            length /= 2
        u = u + length * step
        u /= np.sum(u)
        if gain <= 1e-3 * t * count:
            t /= 4
    raise NumericalFailure("the best noise for these tables was not found; ask for fewer tables, or use add/remove")


# --- ordered attributes ---


def ordered_contrasts(size: int, workload: str, together: int = 1) -> Whole:
    """Contrasts of an ordered attribute whose equal noise is near the best for its prefix sums or ranges.

    The best covariance G on the vectors of sum zero for the workload's Gram matrix, when one value changes, comes from
    `design.solve`. Contrasts G^(-1/2), symmetric on that space, get equal noise from it. They are rounded to whole
    numbers. That may make the noise slightly suboptimal, but not the guarantee wrong: it is computed from them.

    Args:
        size: how many values the attribute has.
        workload: "prefix" or "ranges".
        together: the most ordered attributes of any table.
    """
    gram = {"prefix": workloads.prefix, "ranges": workloads.all_ranges}[workload](size).gram()
    k = np.arange(1.0, size)
    basis = helmert(size) / np.sqrt(k * (k + 1))[:, None]
    found = design.solve(basis @ gram @ basis.T, vertices=basis.T, tolerance=1e-4)
    root = (found.directions / np.sqrt(found.variances)) @ found.directions.T @ basis
    largest = 2 ** min(_BITS, _SHARED_BITS // together)
    whole = np.round(root / np.max(np.abs(root)) * largest).astype(np.int64)
    # the largest entry of each row takes up what rounding added to its sum
    whole[np.arange(size - 1), np.argmax(np.abs(whole), axis=1)] -= np.sum(whole, axis=1)
    return np.asarray(whole)
