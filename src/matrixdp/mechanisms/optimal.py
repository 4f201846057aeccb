"""The least Gaussian noise for a sensitivity set and a task; docs/optimal-noise.md has the proofs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.adjacency import REPLACE
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import (
    Covariance,
    Dense,
    Diagonal,
    Isotropic,
    Kronecker,
    Symmetric,
    SymmetricEntries,
)
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms.base import HEADROOM, recipe
from matrixdp.mechanisms.directions import UNSEEN_SHARE, roots_of
from matrixdp.mechanisms.solvers import design, second_moments
from matrixdp.mechanisms.task import Task, couples, square, task_error, task_of
from matrixdp.privacy import gaussian
from matrixdp.privacy.suprema import supremum
from matrixdp.sensitivity import L1, Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Sensitivity, Vertices

# Entries that no neighbour can change get this share of the least noise elsewhere.
LEAST_STD = 1e-6
# On a box, independent entries are within this relative gap of the least error for any task (docs/optimal-noise.md).
BOX_GAP = math.pi / 2 - 1

# The most dimensions for a task on second moments; more would take long.
MOST_DIMENSIONS = 128

# Noise for the unit budget (mu = 1), and a note on its proven distance from the least error, empty if it is the least.
Found = tuple[Covariance, str]


@recipe("optimal", source="matrixdp, docs/optimal-noise.md")
def optimal(
    shape: Shape,
    sensitivity: Sensitivity,
    budget: Budget,
    *,
    weights: Any = None,
    row_utility: Any = None,
    column_utility: Any = None,
) -> Gaussian:
    """Minimises the expected squared error of a task over all Gaussian noise that keeps the budget.

    Args:
        weights: how much the squared error of each entry counts, a public array of the value's shape; all alike by
            default.
        row_utility: W1 for the task W1 A W2^T (one column per row of the value), or a weight for each row; public. It
            has no effect beside weights.
        column_utility: W2, likewise for columns.
    """
    bound = float(gaussian.mu(budget.epsilon, budget.delta)) / HEADROOM
    task = task_of(shape, weights, row_utility, column_utility)
    if isotropic_is_optimal(sensitivity, weights, row_utility, column_utility):
        return Gaussian(Isotropic(shape, sensitivity.frobenius_radius(shape) / bound))
    covariance, note = _least(shape, sensitivity, task)
    return Gaussian(covariance.scaled((1 + covariance.slack) / bound), note=note)


def isotropic_is_optimal(
    sensitivity: Sensitivity, weights: Any, row_utility: Any = None, column_utility: Any = None
) -> bool:
    """Whether i.i.d. noise is proven optimal for this task (docs/optimal-noise.md, and `choice`, 1 to 4)."""
    if isinstance(sensitivity, Frobenius):
        return True
    rows, columns = (weights is None and couples(utility) for utility in (row_utility, column_utility))
    if _is_one_cell(sensitivity):
        return not (rows or columns)
    if isinstance(sensitivity, (OneColumn, OneRow)) and sensitivity.radius is not None:
        return not (rows if isinstance(sensitivity, OneRow) else columns)
    if not (weights is None and row_utility is None and column_utility is None):
        return False
    if isinstance(sensitivity, (OneColumn, OneRow)):
        return float(np.ptp(sensitivity.width)) == 0
    if isinstance(sensitivity, Entrywise):
        return float(np.ptp(sensitivity.bound)) == 0
    return isinstance(sensitivity, (Counts, L1))


def _is_one_cell(sensitivity: Sensitivity) -> bool:
    """Whether the extreme points of the set change one entry each."""
    if isinstance(sensitivity, L1):
        return (sensitivity.bound or sensitivity.radius) >= sensitivity.radius
    return isinstance(sensitivity, Counts) and sensitivity.cells == 1


def _least(shape: Shape, sensitivity: Sensitivity, task: Task) -> Found:
    """The noise of least error for the unit budget."""
    if isinstance(sensitivity, Vertices):
        return _vertices(sensitivity, task)
    if isinstance(sensitivity, Entrywise):
        bounds, weights = sensitivity.bounds(shape), task.weights
        if not np.any(bounds * weights > 0):
            raise InvalidInput(
                "weights must be above 0 for some entry that can change; this task needs no noise at all"
            )
        std = _box(bounds.ravel(), weights.ravel()).reshape(shape)
        return Diagonal(std), _within(BOX_GAP) if task.grams else ""
    if isinstance(sensitivity, (OneColumn, OneRow)):
        return _one_line(shape, sensitivity, task)
    if isinstance(sensitivity, L1) and _is_one_cell(sensitivity):
        sensitivity = Counts(1, sensitivity.radius)
    if isinstance(sensitivity, Counts):
        return _counts(sensitivity, task)
    if isinstance(sensitivity, RankOne):
        return _rank_one(shape[0], sensitivity, task)
    raise NotApplicable(f"optimal has no solver for the set {type(sensitivity).__name__}; use 'analytic'")


def _within(gap: float) -> str:
    return f"within {gap:.1g} of the least error there is"


def _vertices(sensitivity: Vertices, task: Task) -> Found:
    """The convex program of mechanisms/solvers/design.py."""
    vertices = np.stack([v.ravel() for v in sensitivity.differences])
    gram = np.kron(*map(square, task.grams)) if task.grams else np.diag(task.weights.ravel())
    found = design.solve(gram, vertices)
    return Dense(found.spectrum, task.weights.shape), _within(found.gap)


def _box(bounds: Array, weights: Array) -> Array:
    """Standard deviations for boxes along the last axis, by equality in the Cauchy-Schwarz inequality.

    Variances are (R_i/w_i)(sum_j R_j w_j), with w the roots of the weights; weights that are all 0 count as equal.
    """
    weights = np.where(np.any(weights * bounds > 0, axis=-1, keepdims=True), weights, 1.0)
    bounds = np.broadcast_to(bounds, weights.shape)
    roots, changing = roots_of(weights, bounds), bounds > 0
    std = np.divide(bounds, roots, out=np.zeros(bounds.shape), where=changing)
    std = np.sqrt(std * np.sum(bounds * roots, axis=-1, keepdims=True))
    return np.asarray(np.where(changing, std, LEAST_STD * std[changing].min()))


def _one_line(shape: Shape, sensitivity: OneColumn | OneRow, task: Task) -> Found:
    """The best noise for one line, times that of the matrix mechanism across the lines."""
    across = sensitivity.axis
    widths = np.ones(shape[1 - across]) if sensitivity.radius is not None else sensitivity.widths(shape)
    if task.grams is None:
        std = _box(widths, np.moveaxis(task.weights, across, 0))
        return Diagonal(np.moveaxis(std, 0, across)), ""
    side, along = _across(task.grams[across]), task.grams[1 - across]
    gap = side.gap
    if sensitivity.radius is not None:
        line = Spectrum(np.full(len(along), sensitivity.radius**2))
    elif along.ndim == 1:
        line = Spectrum(np.square(_box(widths, along)))
    else:
        line = Spectrum(np.square(_box(widths, np.diagonal(along))))
        gap = (1 + gap) * (1 + BOX_GAP) - 1
    pair = Kronecker(side.spectrum, line) if across == 0 else Kronecker(line, side.spectrum)
    return pair, _within(gap) if gap > 0 else ""


class _Side(NamedTuple):
    """The matrix mechanism for one axis."""

    spectrum: Spectrum
    lower_bound: float
    gap: float
    largest_weight: float


def _across(gram: Array) -> _Side:
    """For one cell that changes by 1, with less noise in directions unused by the task than `design` gives by default.

    For a diagonal Gram matrix i.i.d. noise is optimal, and the dual weights are proportional to its entries.
    """
    if gram.ndim == 1:
        total = float(np.sum(gram))
        return _Side(Spectrum(np.ones(len(gram))), total, 0.0, float(np.max(gram)) / total)
    blind = np.linalg.matrix_rank(gram, hermitian=True) < len(gram)
    found = design.solve(gram, tolerance=UNSEEN_SHARE if blind else 1e-6)
    return _Side(found.spectrum, found.lower_bound, found.gap, float(found.weights.max()))


def _counts(sensitivity: Counts, task: Task) -> Found:
    """Independent cells, the optimum for weights; for other tasks the matrix mechanism, or the better of the two."""
    cells = min(sensitivity.cells, task.weights.size)
    independent = Diagonal(sensitivity.bound * _several_cells(cells, task.weights))
    if task.grams is None:
        return independent, ""
    sides = [_across(gram) for gram in task.grams]
    one_cell = Kronecker(*(side.spectrum for side in sides))
    mechanism = one_cell.scaled(supremum(sensitivity, one_cell).mu)
    best = min((mechanism, independent), key=lambda covariance: task_error(task, Gaussian(covariance)))
    # the lower bound: random signs on at most `cells` cells, drawn with the weights of the design
    drawn = min(cells, 1 / math.prod(side.largest_weight for side in sides))
    lower_bound = sensitivity.bound**2 * drawn * math.prod(side.lower_bound for side in sides)
    return best, _within(task_error(task, Gaussian(best)) / lower_bound - 1)


def _several_cells(cells: int, weights: Array) -> Array:
    """Standard deviations if at most `cells` cells change by 1: precisions prop. to max(sqrt(weight), level).

    The level is such that the shares min(1, weight/level^2) add up to the number of cells. With fewer weights above 0
    than that, the others are raised.
    """
    roots = np.sqrt(weights.ravel())
    if np.count_nonzero(roots) < cells:
        roots = roots_of(weights.ravel(), np.ones(weights.size))
    squares = np.sort(np.square(roots))[::-1]
    tails = np.cumsum(squares[::-1])[::-1]
    left = cells - np.arange(cells)
    above = int(np.argmax(squares[:cells] * left <= tails[:cells] * (1 + 1e-12)))
    level = math.sqrt(tails[above] / left[above])
    precisions = np.maximum(roots, level)
    total = float(np.sum(np.sort(precisions)[-cells:]))
    return np.sqrt(total / precisions).reshape(weights.shape)


def _rank_one(dimension: int, sensitivity: RankOne, task: Task) -> Found:
    """Noise on symmetric matrices: two scales where all entries count alike, else what `second_moments` finds.

    The task is taken to the axes of both Gram matrices, on which it weighs entries if they commute. If they do not, the
    noise is the best of this form on these axes, and no bound is proven for other noise.
    """
    largest = sensitivity.radius**2
    replaced = sensitivity.adjacency == REPLACE
    if dimension == 1:
        return Symmetric(1, largest), ""
    if task.grams is None and float(np.ptp(task.weights)) == 0:
        return _two_scales(dimension, largest, replaced), ""
    if not dimension <= MOST_DIMENSIONS:
        raise NotApplicable(
            f"optimal makes noise for a task on second moments in at most {MOST_DIMENSIONS} dimensions, got "
            f"{dimension}; leave out weights and utilities for the least noise on all entries"
        )
    turned, commuting = None, True
    if task.grams is None:
        on, off = np.diag(np.diagonal(task.weights)), (task.weights + task.weights.T) / 2
    else:
        rows, columns = (square(gram) / float(np.sum(np.diagonal(square(gram)))) for gram in task.grams)
        turned = np.linalg.eigh(rows + (math.sqrt(5) - 1) / 2 * columns)[1]  # an uneven sum has the axes of both
        rows, columns = (turned.T @ gram @ turned for gram in (rows, columns))
        commuting = all(np.allclose(gram, np.diag(np.diagonal(gram)), rtol=0, atol=1e-9) for gram in (rows, columns))
        on, products = rows * columns, np.outer(np.diagonal(rows), np.diagonal(columns))
        off = np.maximum((products + products.T) / 2 + on, 0.0)
    found = second_moments.solve(on, off, replaced=replaced)
    kind = "there is" if dimension <= 4 else "with a sum-of-squares proof"
    proven = f"within {found.gap:.1g} of the least error {kind}"
    note = proven if commuting else "the best of its kind on the axes of both utilities"
    values, vectors = np.linalg.eigh(found.precision)
    covariance = SymmetricEntries(Spectrum(1 / values, vectors), found.off_diagonal, turned)
    return covariance.scaled(supremum(sensitivity, covariance).mu), note


def _two_scales(dimension: int, largest: float, replaced: bool) -> Symmetric:
    """One scale on the trace and one on the traceless part, of dimension D.

    The set is unchanged by rotations x -> O x, so averaging a covariance over rotations keeps the constraint and the
    error. What is left acts as a number on each of the two invariant parts. With a = radius^4:
    add/remove: (1/d)/t + (1 - 1/d)/s <= 1/a, so t and s are in the ratio sqrt(1/d) : sqrt((1 - 1/d)/D).
    Replace: also 2/s <= 1/a (the difference of two orthogonal records has no trace). It is tighter: t = 2a/(d+1).
    """
    d = dimension
    if replaced:
        return Symmetric(d, largest * math.sqrt(2), largest * math.sqrt(2 / (d + 1)))
    traceless = d * (d + 1) / 2 - 1
    total = math.sqrt(1 / d) + math.sqrt(traceless * (1 - 1 / d))
    trace_variance = math.sqrt(1 / d) * total
    variance = math.sqrt((1 - 1 / d) / traceless) * total
    return Symmetric(d, largest * math.sqrt(variance), largest * math.sqrt(trace_variance))
