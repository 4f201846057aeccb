"""Noise for a task, against convex programs that know nothing of the symmetries."""

import itertools
import math

import cvxpy
import numpy as np
import pytest

from cases import orthogonal
from matrixdp import Budget, calibrate, certify, compare, release
from matrixdp.adjacency import ADD_REMOVE, REPLACE
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms import expected_error
from matrixdp.mechanisms.optimal import isotropic_is_optimal
from matrixdp.mechanisms.solvers import design, second_moments
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import L1, Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Vertices

BUDGET = Budget(1.0, 1e-6)
MU = float(gaussian.mu(1.0, 1e-6))
LOW, HIGH = np.array([0.0, -1.0, 0.5]), np.array([1.0, 2.0, 0.9])


def gram(utility, size):
    given = np.eye(size) if utility is None else np.asarray(utility)
    return np.diag(given) if given.ndim == 1 else given.T @ given


def task_gram(shape, weights=None, row_utility=None, column_utility=None):
    if weights is not None:
        return np.diag(np.ravel(weights))
    return np.kron(gram(row_utility, shape[0]), gram(column_utility, shape[1]))


def law_for(shape, sensitivity, **task):
    """The optimal law, which must keep the budget and use it up: 1e-5 less noise would not."""
    law = calibrate("optimal", shape=shape, sensitivity=sensitivity, budget=BUDGET, **task)
    certificate = certify(law, sensitivity, BUDGET)
    assert certificate.meets(BUDGET)
    assert not certify(law.scaled(1 - 1e-5), sensitivity).meets(BUDGET)
    return law, certificate


def unit_error(shape, sensitivity, **task):
    """The error of the task for the unit budget, from the covariance multiplied out."""
    law, certificate = law_for(shape, sensitivity, **task)
    assert certificate.exact
    cells = math.prod(shape)
    factor = np.stack([law.covariance.color(e.reshape(shape)).ravel() for e in np.eye(cells)], axis=1)
    error = float(np.trace(task_gram(shape, **task) @ factor @ factor.T))
    assert expected_error(law, task) == pytest.approx(error, rel=1e-9)
    return error * MU**2


def weights_of(shape, seed=0):
    return np.random.default_rng(seed).uniform(0.05, 5, shape)


def corners(widths):
    return np.array(list(itertools.product(*((-w, w) for w in widths))))


def lines(shape, axis, members):
    for place, member in itertools.product(range(shape[axis]), members):
        v = np.zeros(shape)
        np.moveaxis(v, axis, 0)[place] = member
        yield v.ravel()


def few_cells(shape, cells):
    for chosen in itertools.combinations(range(math.prod(shape)), cells):
        for signs in itertools.product((-1, 1), repeat=cells):
            v = np.zeros(math.prod(shape))
            v[list(chosen)] = signs
            yield v


SHAPE = (2, 3)
SUMS = np.array([[1.0, 1.0], [0.3, -2.0]])
PAIRS = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, -1.0], [0.2, 0.0, 0.4]])
# name: (set, its extreme points, task)
FINITE = {
    "one row in a box, weights": (
        OneRow(LOW, HIGH), lines(SHAPE, 0, corners(HIGH - LOW)), {"weights": weights_of(SHAPE)},
    ),
    "one column in a box, weights": (
        OneColumn(LOW[:2], HIGH[:2]), lines(SHAPE, 1, corners((HIGH - LOW)[:2])), {"weights": weights_of(SHAPE, 1)},
    ),
    "one row in a box, sums of rows": (OneRow(LOW, HIGH), lines(SHAPE, 0, corners(HIGH - LOW)), {"row_utility": SUMS}),
    "one row in a box, sums of rows, weights of columns": (
        OneRow(LOW, HIGH), lines(SHAPE, 0, corners(HIGH - LOW)),
        {"row_utility": SUMS, "column_utility": np.array([1.0, 9.0, 0.1])},
    ),
    "one cell, sums on both sides": (Counts(1), few_cells(SHAPE, 1), {"row_utility": SUMS, "column_utility": PAIRS}),
    "an l1 ball, sums on both sides": (L1(1.0), few_cells(SHAPE, 1), {"row_utility": SUMS, "column_utility": PAIRS}),
    "two cells, weights": (Counts(2), few_cells(SHAPE, 2), {"weights": weights_of(SHAPE, 2)}),
    "three cells, weights": (Counts(3), few_cells(SHAPE, 3), {"weights": weights_of(SHAPE, 3) ** 3}),
    "two cells, weights of rows": (Counts(2), few_cells(SHAPE, 2), {"row_utility": np.array([1.0, 50.0])}),
    "all cells, weights": (Counts(6), few_cells(SHAPE, 6), {"weights": weights_of(SHAPE, 4)}),
    "listed changes": (Vertices(np.eye(2), SUMS), [np.eye(2).ravel(), SUMS.ravel()], {"row_utility": SUMS}),
}  # fmt: skip


@pytest.mark.parametrize("name", FINITE)
def test_the_optimum_is_that_of_the_list_of_all_changes(name):
    """The design solver on every extreme point, which uses no symmetry; its lower bound is proven."""
    sensitivity, points, task = FINITE[name]
    shape = (2, 2) if isinstance(sensitivity, Vertices) else SHAPE
    best = design.solve(task_gram(shape, **task), np.array(list(points)), tolerance=1e-5, max_iterations=20_000)
    error = unit_error(shape, sensitivity, **task)
    assert best.lower_bound * (1 - 1e-6) <= error <= best.lower_bound * (1 + 2e-5)


@pytest.mark.parametrize(
    "task",
    [{"weights": weights_of(SHAPE)}, {"row_utility": SUMS}, {"column_utility": PAIRS},
     {"row_utility": SUMS, "column_utility": PAIRS}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", [OneRow, OneColumn])
def test_lines_by_norm_agree_with_a_semidefinite_program(kind, task):
    """Blocks of the precision X are at most the identity; tr(P X^-1) is a matrix fraction."""
    m, n = SHAPE
    values, vectors = np.linalg.eigh(task_gram(SHAPE, **task) + 1e-9 * np.eye(m * n))
    X = cvxpy.Variable((m * n, m * n), PSD=True)
    cells = np.arange(m * n).reshape(SHAPE)
    blocks = list(cells) if kind is OneRow else list(cells.T)
    limits = [np.eye(len(block)) - X[block][:, block] >> 0 for block in blocks]
    best = cvxpy.Problem(cvxpy.Minimize(cvxpy.matrix_frac(np.sqrt(values) * vectors, X)), limits).solve(cvxpy.CLARABEL)
    error = unit_error(SHAPE, kind(1.0), **task)
    assert error == pytest.approx(best, rel=2e-4)
    couples = "row_utility" if kind is OneRow else "column_utility"
    isotropic = np.trace(task_gram(SHAPE, **task))
    assert isotropic_is_optimal(
        kind(1.0), task.get("weights"), task.get("row_utility"), task.get("column_utility")
    ) == (couples not in task)
    assert error < (1 - 1e-3) * isotropic if couples in task else error == pytest.approx(isotropic)


@pytest.mark.parametrize("seed", range(4))
def test_on_a_box_independent_noise_is_within_half_pi(seed):
    rng = np.random.default_rng(seed)
    task = {"row_utility": rng.normal(size=(2, 2)), "column_utility": rng.normal(size=(3, 3))}
    bounds = rng.uniform(0.2, 2, SHAPE)
    best = design.solve(task_gram(SHAPE, **task), corners(bounds.ravel()), tolerance=1e-4, max_iterations=20_000)
    error = unit_error(SHAPE, Entrywise(bounds), **task)
    assert best.lower_bound <= error <= best.value * math.pi / 2
    law, _ = law_for(SHAPE, Entrywise(bounds), **task)
    assert law.note == "within 0.6 of the least error there is"


@pytest.mark.parametrize("cells", [2, 3])
def test_several_cells_and_sums_are_within_the_gap_that_is_printed(cells):
    task = {"row_utility": SUMS, "column_utility": PAIRS}
    law, _ = law_for(SHAPE, Counts(cells), **task)
    points = np.array(list(few_cells(SHAPE, cells)))
    best = design.solve(task_gram(SHAPE, **task), points, tolerance=1e-4, max_iterations=20_000)
    gap = float(law.note.split()[1])
    assert best.lower_bound <= expected_error(law, task) * MU**2 <= best.value * (1.05 + gap)


def svec(V):
    return np.concatenate([np.diag(V), math.sqrt(2) * V[np.triu_indices(len(V), 1)]])


def moment_bound(D, p, replaced, seed=0):
    """A lower bound on the optimum: the design solver on many records, random and extreme."""
    rng, d = np.random.default_rng(seed), len(D)
    axes = np.eye(d)
    frames = [np.linalg.qr(rng.normal(size=(d, d)))[0].T for _ in range(120)]
    for i, j in itertools.combinations(range(d), 2):
        frames += [np.array([axes[i] + axes[j], axes[i] - axes[j]]) / math.sqrt(2), axes[[i, j]], axes[[j, i]]]
    found = []
    for frame in frames:
        first, second = (np.outer(x, x) for x in frame[:2])
        found += [svec(first), svec(second), *([svec(first - second)] if replaced else [])]
    P = np.zeros((d * (d + 1) // 2,) * 2)
    P[:d, :d], P[range(d, len(P)), range(d, len(P))] = D, p[np.triu_indices(d, 1)]
    return design.solve(P, np.array(found), tolerance=1e-4, max_iterations=20_000).lower_bound


WEIGHTS = {
    "spread": weights_of((3, 3)),
    "one row": np.eye(3)[[0, 0, 0]].T,
    "off the diagonal": np.eye(3)[[1, 0, 0]] * [1, 1, 0],
    "few directions": np.outer([1, 0.1, 0.01], [1, 0.1, 0.01]),
    "one entry": np.diag([1.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE])
@pytest.mark.parametrize("name", WEIGHTS)
def test_second_moments_with_weights_reach_the_bound_of_many_records(name, adjacency):
    weights = WEIGHTS[name]
    error = unit_error((3, 3), RankOne(1.0, adjacency), weights=weights)
    bound = moment_bound(np.diag(np.diag(weights)), (weights + weights.T) / 2, adjacency == REPLACE)
    assert bound * (1 - 1e-6) <= error <= bound * 1.004


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE])
@pytest.mark.parametrize("d", [2, 4, 9])
def test_second_moments_come_with_a_bound(d, adjacency):
    """With weights above 0 the two bounds meet; a smaller dual mass or a smaller error would cross them."""
    weights = weights_of((d, d), d)
    found = second_moments.solve(np.diag(np.diag(weights)), (weights + weights.T) / 2, replaced=adjacency == REPLACE)
    assert found.lower_bound <= found.value
    assert found.gap <= (0.05 if adjacency == REPLACE else 1e-6)
    assert unit_error((d, d), RankOne(1.0, adjacency), weights=weights) == pytest.approx(found.value, rel=1e-6)


def test_equal_weights_give_the_two_scales_in_closed_form():
    for replaced, d in itertools.product((False, True), (2, 3, 7)):
        found = second_moments.solve(np.eye(d), np.ones((d, d)), replaced=replaced)
        law = calibrate(
            "optimal", shape=(d, d), sensitivity=RankOne(1.0, REPLACE if replaced else ADD_REMOVE), budget=BUDGET
        )
        assert found.value == pytest.approx(law.expected_squared_error() * MU**2, rel=1e-6)


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE])
def test_a_projected_second_moment_is_a_weighted_one_on_turned_axes(adjacency):
    turned, roots = orthogonal(3, 3), np.array([2.0, 1.0, 0.1])
    records = RankOne(1.3, adjacency)
    both = unit_error((3, 3), records, row_utility=roots[:, None] * turned.T, column_utility=roots[:, None] * turned.T)
    assert both == pytest.approx(unit_error((3, 3), records, weights=np.outer(roots**2, roots**2)), rel=1e-5)
    one = unit_error((3, 3), records, row_utility=roots[:, None] * turned.T)
    assert one == pytest.approx(unit_error((3, 3), records, weights=np.outer(roots**2, np.ones(3))), rel=1e-5)


def test_utilities_that_do_not_commute_are_served_without_a_bound():
    task = {"row_utility": weights_of((2, 3), 5), "column_utility": weights_of((3, 3), 6)}
    law, _ = law_for((3, 3), RankOne(1.0), **task)
    assert "best of its kind" in law.note
    analytic = calibrate("analytic", shape=(3, 3), sensitivity=RankOne(1.0), budget=BUDGET)
    assert expected_error(law, task) < expected_error(analytic, task)


def test_i_i_d_noise_is_nearly_optimal_for_projections_of_many_directions():
    """The theorem: within (1 + e)/(1 - e)^2 of the optimum, e the sum of squares of the shares of the directions."""
    shares = np.geomspace(1, 0.3, 20) / np.sum(np.geomspace(1, 0.3, 20))
    e = float(np.sum(shares**2))
    found = second_moments.solve(np.diag(shares**2), np.outer(shares, shares), replaced=False)
    assert (1 + e) / 2 <= found.value * (1 + e) / (1 - e) ** 2
    assert found.value <= (1 + e) / 2 <= 1.1 * found.value


@pytest.mark.parametrize("cells", [3, 5, 8])
def test_counts_with_rows_that_matter_are_at_least_as_good_as_idn(cells):
    utility = np.array([1e6, 1.0, 1.0, 1e-2])
    given = {"shape": (4, 2), "sensitivity": Counts(cells), "budget": BUDGET, "row_utility": utility}
    found = compare(**given)
    rows = {row.mechanism: row.expected_squared_error for row in found if row.verdict in ("exact", "loose")}
    assert found.least_gaussian == "optimal"
    assert rows["optimal"] < 0.9 * min(rows["idn"], rows["analytic"])
    if cells == 8:
        assert rows["idn"] < rows["analytic"]
    assert calibrate("auto", **given).source.startswith("optimal")


@pytest.mark.parametrize(
    ("shape", "sensitivity", "task"),
    [
        ((2, 3), OneRow(LOW, HIGH), {"weights": np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])}),
        ((2, 3), OneRow(1.0), {"row_utility": np.array([[1.0, 1.0]])}),
        ((2, 3), Counts(3), {"weights": np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])}),
        ((2, 3), Counts(2), {"weights": np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])}),
        ((2, 3), Counts(1), {"row_utility": np.array([[1.0, 1.0]]), "column_utility": np.array([1.0, 0.0, 0.0])}),
        ((3, 3), RankOne(1.0), {"row_utility": np.array([[1.0, 2.0, 0.0]]), "column_utility": np.eye(3)[:1]}),
        ((3, 3), RankOne(1.0, REPLACE), {"weights": np.diag([0.0, 0.0, 2.0])}),
        ((6, 6), RankOne(1.0, REPLACE), {"row_utility": np.ones((1, 6)), "column_utility": np.ones((1, 6))}),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_task_never_looks_at_has_finite_noise(shape, sensitivity, task):
    law, _ = law_for(shape, sensitivity, **task)
    stds = np.sqrt(law.covariance.variances())
    assert np.all(np.isfinite(stds))
    assert stds.max() < 1e5 * stds.min()
    value = np.zeros(shape)
    out = release(value, sensitivity, BUDGET, mechanism="optimal", **task)
    assert out.certificate.meets(BUDGET)
    assert out.certificate.verify()


def test_many_rows_are_no_square_matrix():
    """A Gram matrix of all rows would have 80 GB."""
    shape, task = (100_000, 3), {"column_utility": PAIRS}
    for sensitivity, name in ((OneRow(1.0), "analytic"), (OneRow(LOW, HIGH), "optimal"), (Counts(1), "optimal")):
        law = calibrate("auto", shape=shape, sensitivity=sensitivity, budget=BUDGET, **task)
        assert law.source.startswith(name)
        assert expected_error(law, task) > 0


def test_frobenius_needs_no_direction_whatever_the_task():
    for task in ({"row_utility": SUMS}, {"column_utility": PAIRS}, {"weights": weights_of(SHAPE)}):
        law = calibrate("auto", shape=SHAPE, sensitivity=Frobenius(2.0), budget=BUDGET, **task)
        assert law.source.startswith("analytic")


@pytest.mark.parametrize(
    "task",
    [{"row_utility": np.ones(3)}, {"row_utility": -np.ones(2)}, {"column_utility": np.zeros((2, 3))},
     {"column_utility": np.full((1, 3), np.nan)}, {"weights": np.ones(2)}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "sensitivity", [Frobenius(1.0), OneRow(1.0), OneColumn(0.0, 1.0), Counts(1), Entrywise(1.0)], ids=str
)
def test_a_task_that_makes_no_sense_is_refused(sensitivity, task):
    for name in ("optimal", "auto"):
        with pytest.raises(InvalidInput, match=next(iter(task))):
            calibrate(name, shape=SHAPE, sensitivity=sensitivity, budget=BUDGET, **task)


def test_utilities_are_for_matrices():
    with pytest.raises(NotApplicable, match="rows and columns"):
        calibrate("optimal", shape=(4,), sensitivity=Counts(1), budget=BUDGET, row_utility=np.ones(4))
