"""The least Gaussian noise for a finite set of differences and a linear task.

A task uses a released value through W; P = W^T W is its Gram matrix, and tr(P S) is its error under noise N(0, S). For
differences v_1 .. v_k and the unit budget (mu = 1) the best noise solves

    minimise tr(P S)   subject to   v_i^T S^-1 v_i <= 1 for all i.

A caller with budget B divides the covariance by B^2.

**Reduction.** The task sees a difference v only as y = W v, and noise only as T = W S W^T. So the problem is the same
as "minimise tr(T) subject to y_i^T T^-1 y_i <= 1": the ellipsoid of least trace around the points +-y_i.

**Dual.** Take weights w on the simplex, G = sum_i w_i y_i y_i^T and f(w) = tr(G^(1/2)). A feasible T has
tr(T^-1 G) = sum_i w_i y_i^T T^-1 y_i <= 1, so by Cauchy-Schwarz

    f(w)^2 = tr(T^(1/2) T^(-1/2) G^(1/2))^2 <= tr(T) tr(T^-1 G) <= tr(T):

every w gives a lower bound. Conversely T = f G^(1/2) has trace f^2 and puts y_i at the form g_i = y_i^T T^-1 y_i, where
sum_i w_i g_i = 1; multiplied by max g_i it is feasible. At the best w no g_i exceeds 1, and the two bounds agree.

**Iteration.** Write w_i = u_i^2 with u on the unit sphere. Then f is the nuclear norm of the matrix with columns
u_i y_i, convex in u, with gradient f u_i g_i. The step u <- u g maximises the tangent plane over the sphere, so it
never lowers f. A quasi-Newton method starts from that step, and falls back to it when its own step would lower f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy
from threadpoolctl import ThreadpoolController

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, NumericalFailure

ROUNDOFF = float(np.finfo(np.float64).eps)
# Kept between the largest v^T S^-1 v and 1, in addition to a bound on rounding.
MARGIN = 1e-10
# Curvature pairs that the quasi-Newton method remembers.
_MEMORY = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class Design:
    """The best noise found for a task at the unit budget, with the proof of how good it is.

    The covariance S is stored as its spectrum. That stays accurate when the task ignores some directions, whose
    variances are then millions of times larger. A dense matrix could lose a thousandth of the smallest variance.

    Attributes:
        variances: The eigenvalues of S, all above 0.
        directions: Its eigenvectors, as columns.
        weights: The dual weights w, one per vertex (per cell, for the standard basis), on the simplex.
        value: tr(P S), the expected squared error of the task.
        lower_bound: No covariance that keeps the unit budget has a smaller tr(P S).
        gap: value / lower_bound - 1.
        iterations: Evaluations of the dual, one eigendecomposition each.
    """

    variances: Array
    directions: Array
    weights: Array
    value: float
    lower_bound: float
    gap: float
    iterations: int

    @property
    def spectrum(self) -> Spectrum:
        """S itself."""
        return Spectrum(self.variances, self.directions)


def solve(
    P: npt.ArrayLike, vertices: npt.ArrayLike | None = None, tolerance: float = 1e-6, max_iterations: int = 2000
) -> Design:
    """The covariance of least tr(P S) under which every vertex stays within the unit budget.

    Two kinds of direction have no finite, positive optimum. Both get a variance that keeps S positive definite:

    - one in which vertices differ but which the task ignores (P singular): the more noise there, the less is needed
      elsewhere. Its variance is about 4/tolerance times the squared length of vertices in it, so the released value is
      useless there. To avoid that, add a small multiple of the identity to P.
    - one in which no vertex differs (vertices that do not span): no noise is needed. Its variance is so small that it
      adds at most a share tolerance/8 to the error.

    Eigenvalues of P below about 4e-16 N norm(P) cannot be distinguished from 0 and count as 0.

    Args:
        P: N x N, symmetric, positive semidefinite: W^T W for a task W.
        vertices: k x N, one difference per row; the set is the convex hull of these and their negatives. None means the
            standard basis: one cell of a histogram changes by at most 1, as in the matrix mechanism.
        tolerance: The largest relative gap between value and lower bound, both for the P given.
        max_iterations: Give up after this many eigendecompositions.

    Guarantee:
        max_i v_i^T S^-1 v_i <= 1 for S given by variances and directions, rounding included, with 1e-10 to spare;
        lower_bound <= optimum <= value.

    Raises:
        InvalidInput: P is not a Gram matrix, vertices do not fit it, or the task uses nothing that changes.
        NumericalFailure: The gap was not reached.

    Source: li2015matrix for the problem with the standard basis; denisov2022improved for a multiplicative step on w.
    Deviates: (1) any vertices; (2) the step is squared, accelerated and stops at a proven gap.
    """
    gram = _checked_gram(P)
    differences = None if vertices is None else _sized("vertices", vertices)
    if differences is not None and differences.shape[1] != len(gram):
        raise InvalidInput(f"vertices must have {len(gram)} columns, as many as P, got shape {differences.shape}")
    tolerance = _check.positive("tolerance", tolerance)
    max_iterations = _check.count("max_iterations", max_iterations)
    with _thread_pools().limit(limits=1, user_api="blas"):  # at these sizes threads cost more than they gain
        return _solve(gram, differences, tolerance, max_iterations)


def solve_kronecker(factors: Sequence[npt.ArrayLike], tolerance: float = 1e-6) -> tuple[Design, ...]:
    """The best noise for P = P_1 (x) .. (x) P_d when one cell changes by at most 1; S is the product of the designs.

    Both bounds factorise, so nothing of the size of the whole domain is formed. Let S_j, w_j belong to factor j.
    Primal: the diagonal of S^-1 = S_1^-1 (x) .. (x) S_d^-1 holds products of diagonal entries, each at most 1, and
    tr(P S) is the product of the tr(P_j S_j). Dual: w = w_1 (x) .. (x) w_d lies on the simplex. The matrix
    P^(1/2) diag(w) P^(1/2) is the Kronecker product of the factors' ones, and the trace of its root is the product of
    theirs. So the optimum is the product of the optima.

    Args:
        factors: The Gram matrices P_1 .. P_d, one per axis.
        tolerance: For the combined gap.

    Returns:
        One design per factor, with combined_gap(designs) <= tolerance.

    Raises:
        InvalidInput: No factor was given, or one is not a Gram matrix.
        NumericalFailure: The gap was not reached for some factor.
    """
    if not len(factors) > 0:
        raise InvalidInput("factors must hold at least one Gram matrix, got none")
    share = math.expm1(math.log1p(_check.positive("tolerance", tolerance)) / len(factors))
    return tuple(solve(factor, tolerance=share) for factor in factors)


def combined_gap(designs: Sequence[Design]) -> float:
    """The relative gap of the Kronecker product of designs."""
    return math.prod(1 + design.gap for design in designs) - 1


def _solve(gram: Array, vertices: Array | None, tolerance: float, max_iterations: int) -> Design:
    """`solve` on checked shapes: scale, reduce to the space that the task uses, solve there, and map back."""
    differences = np.eye(len(gram)) if vertices is None else vertices
    gram_unit, length = _power_of_two(gram), _power_of_two(differences)
    gram, differences = gram / gram_unit, differences / length

    spaces = _spaces(gram, None if vertices is None else differences)
    points = spaces.roots[:, None] * (spaces.seen.T @ differences.T)
    optimum = _least_trace(points, tolerance / 2, max_iterations)
    variances, directions = _complete(optimum, spaces, differences, tolerance)
    variances *= _room(variances, directions, differences)

    value = float(np.sum((spaces.task @ directions) ** 2 @ variances)) * gram_unit * length**2
    lower_bound = optimum.lower_bound * gram_unit * length**2
    return Design(
        variances=frozen(variances * length**2),
        directions=frozen(directions),
        weights=frozen(optimum.weights),
        value=value,
        lower_bound=lower_bound,
        gap=proven_gap(value, lower_bound, tolerance),
        iterations=optimum.iterations,
    )


def _power_of_two(matrix: Array) -> float:
    """The power of two nearest to the largest entry: dividing by it and multiplying again is exact."""
    return 2.0 ** round(math.log2(np.abs(matrix).max()))


class _Spaces(NamedTuple):
    """The division of R^N by task and vertices: orthonormal bases, as columns, of three spaces."""

    task: Array  # a square root of P
    seen: Array  # directions in which vertices differ, and which the task uses
    roots: Array  # of the eigenvalues of P along them
    blind: Array  # vertices differ, and the task ignores it
    unmoved: Array  # no vertex differs


def _spaces(gram: Array, vertices: Array | None) -> _Spaces:
    """The reduction; without vertices, the standard basis spans all of R^N."""
    eigenvalues, directions = scipy.linalg.eigh(gram, driver="evd")
    rounding = (len(gram) + 10) * ROUNDOFF * float(np.linalg.norm(gram))  # of each eigenvalue, with a margin
    if not eigenvalues[0] >= -rounding:
        raise InvalidInput("P must be positive semidefinite, it has a negative eigenvalue; give W^T W for a task W")
    task = np.sqrt(np.where(eigenvalues > 2 * rounding, eigenvalues, 0))[:, None] * directions.T
    moved, unmoved = (directions, directions[:, :0]) if vertices is None else _split(vertices)
    if unmoved.size > 0:
        eigenvalues, inner = scipy.linalg.eigh(moved.T @ gram @ moved, driver="evd")
        directions = moved @ inner
    seen = eigenvalues > 2 * rounding
    if not seen.any():
        raise InvalidInput("P must not be zero where vertices differ; this task needs no noise at all")
    # eigenvalues rounded down, so that the lower bound also holds for P itself
    return _Spaces(task, directions[:, seen], np.sqrt(eigenvalues[seen] - rounding), directions[:, ~seen], unmoved)


def _complete(optimum: _Optimum, spaces: _Spaces, differences: Array, tolerance: float) -> tuple[Array, Array]:
    """Variances and directions on all of R^N: the optimum on what the task uses, elsewhere as `solve` describes."""
    inner, singular, _ = scipy.linalg.svd(optimum.half / spaces.roots[:, None], overwrite_a=True, check_finite=False)
    variances = singular**2
    if not variances.min() > 0:
        raise NumericalFailure("P or vertices are too ill-conditioned: their directions differ too much in size")
    reach = float(np.max(np.sum((differences @ spaces.blind) ** 2, axis=1)))
    cost = float(np.sum((spaces.task @ spaces.unmoved) ** 2))
    spare = tolerance / 8 * float(np.sum(optimum.half**2))
    least = spare / cost if cost * variances.min() > spare else variances.min()
    blind, unmoved = np.full(spaces.blind.shape[1], 4 * reach / tolerance), np.full(spaces.unmoved.shape[1], least)
    directions = np.hstack([spaces.seen @ inner, spaces.blind, spaces.unmoved])
    return np.concatenate([variances, blind, unmoved]), directions


def _room(variances: Array, directions: Array, differences: Array) -> float:
    """The factor on the variances that brings every form v^T S^-1 v below 1, rounding included.

    Forms are sums of squares, which suffer little from the spread of the variances. Rounding moves a whitened vertex by
    N roundings of its length over the least standard deviation, and a form near 1 by twice that.
    """
    largest = float(np.max((differences @ directions) ** 2 @ (1 / variances)))
    longest = float(np.max(np.linalg.norm(differences, axis=1)))
    spread = longest / math.sqrt(largest * variances.min())
    return largest * (1 + MARGIN + 2 * len(variances) * ROUNDOFF * spread)


class _Optimum(NamedTuple):
    """A feasible covariance half half^T of nearly least trace around points, and the bound that shows it."""

    half: Array
    weights: Array
    lower_bound: float
    iterations: int


class _State(NamedTuple):
    """The dual at the weights u^2, where G = vectors diag(roots^2) vectors^T."""

    u: Array
    value: float  # f = tr(G^(1/2))
    lower_bound: float  # f^2, rounded down
    forms: Array  # g
    roots: Array
    vectors: Array
    rotated: Array  # vectors^T y_i, one column per point


def _least_trace(points: Array, tolerance: float, max_iterations: int) -> _Optimum:
    """The ellipsoid of least trace around the columns of points, which span their space, or the last one tried.

    Limited-memory BFGS for -log f on the sphere, where the gradient is u (1 - g) and a unit step gives u g.
    """
    state = _evaluate(points, np.ones(points.shape[1]))
    pairs: list[tuple[Array, Array]] = []
    iterations = 1
    while True:
        half = _primal(points, state)
        if np.sum(half**2) <= state.value**2 * (1 + tolerance) or iterations >= max_iterations:
            return _Optimum(half, state.u**2, state.lower_bound, iterations)
        gradient = state.u * (1 - state.forms)
        following = _evaluate(points, np.maximum(state.u - _quasi_newton(gradient, pairs), _floor(state)))
        iterations += 1
        if not following.value >= state.value * (1 - len(points) * ROUNDOFF):
            pairs.clear()
            following = _evaluate(points, state.u * state.forms)
            iterations += 1
        step, change = following.u - state.u, following.u * (1 - following.forms) - gradient
        if step @ change > ROUNDOFF * (change @ change):
            pairs.append((step, change))
            del pairs[:-_MEMORY]
        state = following


def _evaluate(points: Array, u: Array) -> _State:
    """The dual and its gradient: one eigendecomposition, or a slower and finer singular value decomposition."""
    u = u / np.linalg.norm(u)
    scaled = points * u
    margin = (len(points) + 10) * ROUNDOFF  # a generous bound for the error of a value, relative to the largest
    eigenvalues, vectors = scipy.linalg.eigh(scaled @ scaled.T, driver="evd", overwrite_a=True, check_finite=False)
    if eigenvalues[0] > 1e-9 * eigenvalues[-1]:
        roots, safe = np.sqrt(eigenvalues), np.sqrt(eigenvalues - margin * eigenvalues[-1])
    else:
        vectors, roots, _ = scipy.linalg.svd(scaled, full_matrices=False, check_finite=False)
        roots, safe = np.maximum(roots, margin * roots[0]), np.maximum(roots - margin * roots[0], 0)
    value = float(np.sum(roots))
    rotated = vectors.T @ points
    forms = (1 / roots) @ rotated**2 / value
    return _State(u, value, float(np.sum(safe)) ** 2, forms, roots, vectors, rotated)


def _floor(state: _State) -> Array:
    """The least that the next u may be: a hundredth of the last, and enough to matter where the form is above 1.

    A weight that has become tiny by mistake would take long to grow back, since u = 0 is stationary. What matters is
    measured by the leverage l_i = y_i^T G^-1 y_i, whose mean under the weights is r for points in R^r. The weight times
    the leverage is raised to an equal part r/k, times 1 - 1/g. No guard against 0 is needed, as l > g where g > 1.
    """
    leverage = state.roots**-2.0 @ state.rotated**2
    share = len(state.roots) / len(state.u) * np.maximum(state.forms - 1, 0)
    return np.maximum(np.sqrt(share / np.maximum(state.forms * leverage, 1)), state.u / 100)


def _quasi_newton(gradient: Array, pairs: list[tuple[Array, Array]]) -> Array:
    """The two-loop recursion: the inverse Hessian, known from pairs (step, change of gradient), times the gradient."""
    direction = gradient.copy()
    shares = []
    for step, change in reversed(pairs):
        shares.append(step @ direction / (step @ change))
        direction -= shares[-1] * change
    for (step, change), share in zip(pairs, reversed(shares), strict=True):
        direction += step * (share - change @ direction / (step @ change))
    return direction


def _primal(points: Array, state: _State) -> Array:
    """A factor of a feasible covariance from the dual: f G^(1/2), made feasible in the better of two ways.

    Multiplying by max g always works, and costs the factor max g. If the points are a basis there is a better way: in
    their coordinates the precision matrix has the diagonal g, and dividing its rows and columns by sqrt(g) makes every
    form exactly 1. The cost is of second order, because the first order is sum_i w_i (g_i - 1) = 0.
    """
    half = state.vectors * np.sqrt(state.roots * state.value * np.max(state.forms))
    if points.shape[0] == points.shape[1] and state.roots.min() > 1e-8 * state.roots.max():
        # in the points' coordinates the covariance f G^(1/2) is C^T C, with C = sqrt(f) roots^(-3/2) rotated diag(w)
        columns = math.sqrt(state.value) * state.u**2 * np.sqrt(state.forms)
        balanced = points @ (state.roots[:, None] ** -1.5 * state.rotated * columns).T
        if np.sum(balanced**2) < np.sum(half**2):
            half = balanced
    return half


def _split(differences: Array) -> tuple[Array, Array]:
    """Orthonormal bases, as columns, of the space that the rows span and of its complement."""
    _, singular, rows = np.linalg.svd(np.linalg.qr(differences, mode="r"))
    rank = int(np.sum(singular > max(differences.shape) * ROUNDOFF * singular[0]))
    return rows[:rank].T, rows[rank:].T


def proven_gap(value: float, lower_bound: float, tolerance: float) -> float:
    """The relative gap, if it is within the tolerance."""
    gap = value / lower_bound - 1
    if not gap <= tolerance:
        raise NumericalFailure(
            f"the relative gap is {gap:.3g}, above the tolerance {tolerance:.3g}; raise tolerance or max_iterations"
        )
    return gap


def _checked_gram(value: npt.ArrayLike) -> Array:
    """A symmetric matrix; `_spaces` checks that it is positive semidefinite."""
    gram = _sized("P", value)
    if gram.shape[0] != gram.shape[1] or not np.abs(gram - gram.T).max() <= 1e-12 * np.abs(gram).max():
        raise InvalidInput(f"P must be a symmetric matrix, got shape {gram.shape}; give W^T W for a task W")
    return (gram + gram.T) / 2


def _sized(name: str, value: npt.ArrayLike) -> Array:
    """A matrix that is not zero and whose entries can be squared."""
    matrix = _check.finite(name, value, ndim=2)
    largest = float(np.abs(matrix).max())
    if not largest > 0:
        raise InvalidInput(f"{name} must not be zero everywhere; then no noise is needed")
    if not 1e-100 <= largest <= 1e100:
        raise InvalidInput(f"{name} must have its largest entry between 1e-100 and 1e100, got {largest}; rescale it")
    return matrix


def frozen(array: Array) -> Array:
    """The array itself, made read-only."""
    array.flags.writeable = False
    return array


@cache
def _thread_pools() -> ThreadpoolController:
    """Looked up once, because that takes as long as a small solve."""
    return ThreadpoolController()
