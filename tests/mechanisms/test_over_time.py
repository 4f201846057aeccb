"""Strategies over time: the solver against dense algebra and a general one, the recipes, and workloads."""

from itertools import combinations

import cvxpy
import numpy as np
import pytest
from scipy.optimize import linprog

from matrixdp import Budget, Participation, calibrate, certify, compare, release
from matrixdp.distributions import Gaussian, time_workloads
from matrixdp.distributions.covariance import Dense, Diagonal, Isotropic, Kronecker, OverTime
from matrixdp.errors import InvalidInput, NotApplicable, NotCertifiable
from matrixdp.mechanisms.solvers import over_time, workload_error
from matrixdp.mechanisms.solvers.workload_error import error_of
from matrixdp.privacy import suprema
from matrixdp.sensitivity import Counts

BUDGET = Budget(1.0, 1e-6)
RECIPES = ("banded", "toeplitz", "inverse-banded", "binary-tree")
RATES = np.linspace(1.0, 0.2, 24)
WORKLOADS = {
    "prefix": "prefix",
    "window": "window:5",
    "decay": "decay:0.8",
    "momentum": "momentum:0.9",
    "coefficients": [1.0, -0.5, 0.25],
    "schedule": time_workloads.schedule(RATES, 0.9),
    "matrix": np.tril(np.random.default_rng(0).uniform(0.5, 1, (24, 24))),
}


def dense(rows):
    steps, bands = rows.shape
    full = np.zeros((steps, steps))
    for t in range(steps):
        for j in range(min(bands, t + 1)):
            full[t, t - j] = rows[t, j]
    return full


def random_rows(steps, bands, seed):
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.uniform(0.8, 1.2, (steps, 1)), rng.uniform(-0.2, 0.5, (steps, bands - 1))], axis=1)
    return np.where(np.arange(bands) <= np.arange(steps)[:, None], rows, 0.0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_error_and_gradient(name):
    """Against dense algebra and differences."""
    task = time_workloads.coefficients(WORKLOADS[name], 24)
    rows = random_rows(24, 4, 1)
    value, gradient = error_of(task)(rows)
    matrix = time_workloads.matrix(task)

    def exact(entries):
        return np.sum((matrix @ np.linalg.inv(dense(entries))) ** 2)

    assert value == pytest.approx(exact(rows))
    moved = random_rows(24, 4, 2) - random_rows(24, 4, 3)
    slope = (exact(rows + 1e-6 * moved) - exact(rows - 1e-6 * moved)) / 2e-6
    assert np.sum(gradient * moved) == pytest.approx(slope, rel=1e-5)
    assert (workload_error._inverse_bands(task) is None) == (name in ("window", "coefficients", "matrix"))


def test_the_inside_of_the_dual_matrix():
    rows = random_rows(9, 3, 4)
    X = dense(rows).T @ dense(rows)
    task = np.ones(9)
    M = time_workloads.matrix(task).T @ time_workloads.matrix(task)
    D = np.linalg.inv(X) @ M @ np.linalg.inv(X)
    _, gradient = error_of(task)(rows)
    inside = np.abs(np.subtract.outer(np.arange(9), np.arange(9))) < 3
    np.testing.assert_allclose(workload_error.dual_diagonal(rows, -gradient / 2), np.sum(np.abs(D) * inside, axis=1))


def patterns(sensitivity, steps):
    if sensitivity.cyclic:
        return [list(range(r, steps, sensitivity.gap)) for r in range(sensitivity.gap)]
    chosen = [c for k in range(1, sensitivity.times + 1) for c in combinations(range(steps), k)]
    return [list(c) for c in chosen if all(np.diff(c) >= sensitivity.gap)]


SETS = {
    "once": Participation(1.0),
    "three times": Participation(1.0, separation=3, times=3),
    "all": Participation(1.0, separation=3, times=4),
    "cyclic": Participation(1.0, separation=3, cyclic=True),
}


@pytest.mark.parametrize("sensitivity", SETS.values(), ids=SETS)
def test_cover_is_a_linear_program(sensitivity):
    z = np.random.default_rng(5).uniform(0, 1, 11)
    rows = np.array([[float(i in p) for i in range(11)] for p in patterns(sensitivity, 11)])
    best = -linprog(-z, A_ub=rows, b_ub=np.ones(len(rows))).fun
    assert over_time.cover(sensitivity, z) == pytest.approx(best)


@pytest.mark.parametrize("name", ["prefix", "window", "schedule"])
@pytest.mark.parametrize("sensitivity", SETS.values(), ids=SETS)
def test_banded_against_a_general_solver(sensitivity, name):
    """The optimum of cvxpy lies between the bound and the value; the bound of any strategy lies below it."""
    steps, bands = 8, 3
    workload = time_workloads.schedule(RATES[:steps], 0.9) if name == "schedule" else WORKLOADS[name]
    task = time_workloads.coefficients(workload, steps)
    found = over_time.banded(sensitivity, task, bands, tolerance=1e-4)
    A, X = time_workloads.matrix(task), cvxpy.Variable((steps, steps), symmetric=True)
    outside = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps))) >= bands
    rules = [cvxpy.sum([X[i, i] for i in p]) <= 1 for p in patterns(sensitivity, steps)]
    error = cvxpy.matrix_frac(A.T, X)
    optimum = cvxpy.Problem(cvxpy.Minimize(error), [*rules, cvxpy.multiply(outside, X) == 0]).solve(cvxpy.CLARABEL)
    assert found.lower_bound <= optimum * (1 + 1e-4)
    assert found.value >= optimum * (1 - 1e-4)
    assert found.gap < 0.06
    C = dense(found.coefficients)
    largest = max(np.sum((C.T @ C)[p, p]) for p in patterns(sensitivity, steps))
    assert found.value == pytest.approx(largest * np.sum((A @ np.linalg.inv(C)) ** 2))
    for seed in range(5):
        columns = over_time._columns(random_rows(steps, bands, seed))
        other = over_time._with_bound(sensitivity, columns, error_of(task))
        assert other.lower_bound <= optimum * (1 + 1e-4)
        assert other.value >= optimum * (1 - 1e-4)


@pytest.mark.parametrize("seed", [0, 31, 36])
def test_a_search_that_tries_shares_far_from_the_best_goes_on(seed):
    """A first step so large that all shares but one are 0 in floats would leave columns without any norm."""
    task = np.tril(np.random.default_rng(seed).uniform(0.2, 1.0, (5, 5)))
    found = over_time.banded(Participation(1.0, times=4), task, 1)
    assert found.gap < 0.03


def test_numbers_of_bands_without_a_known_worst_pattern_are_left_out(monkeypatch):
    """Over many steps, only those up to the separation have one for coefficients that do not fall."""
    monkeypatch.setattr(suprema, "MOST_STEPS", 20)
    few = Participation(1.0, separation=4, times=3)
    law = calibrate("toeplitz", shape=(24, 1), sensitivity=few, budget=BUDGET, workload="window:5")
    assert law.covariance.bands <= 4
    with pytest.raises(NotCertifiable, match="worst pattern"):
        calibrate("toeplitz", shape=(24, 1), sensitivity=few, budget=BUDGET, workload="window:5", bands=12)


def test_once_is_solved_to_the_gap():
    found = over_time.banded(Participation(1.0), np.ones(128), 8, tolerance=1e-3)
    assert found.gap <= 1e-3
    assert found.value < over_time.toeplitz(np.ones(128), 8).value


@pytest.mark.parametrize("workload", ["prefix", "decay:0.9", [1.0]], ids=str)
def test_records_that_take_part_in_few_of_the_blocks(workload):
    """At most 4 times, 8 apart, in 96 steps: the squared norms of columns are shared out by blocks and by all steps."""
    task = time_workloads.coefficients(workload, 96)
    found = over_time.banded(Participation(1.0, separation=8, times=4), task, 8)
    assert found.gap < 0.01
    assert found.value <= over_time.toeplitz(task, 8).value * 4 * (1 + 1e-3)  # its columns have equal norms


def test_the_diagonal_of_a_strategy_is_positive():
    """The search may cross 0 on it, as here; the sign of a row of C does not matter, and is chosen afterwards."""
    workload = time_workloads.schedule(np.linspace(1, 0.05, 200), 0.9)
    law = calibrate("banded", shape=(200, 1), sensitivity=Participation(1.0), budget=BUDGET, bands=8, workload=workload)
    assert certify(law, Participation(1.0)).meets(BUDGET)
    found = over_time.banded(Participation(1.0), workload, 8)
    assert np.all(found.coefficients[:, 0] > 0)
    assert found.value == pytest.approx(np.sum((workload @ np.linalg.inv(dense(found.coefficients))) ** 2))


@pytest.mark.parametrize("steps", [31, 32, 40, 60])
def test_the_error_of_a_long_window(steps):
    """Its inverse has entries far from the diagonal, and is not that of running sums."""
    task = time_workloads.coefficients(f"window:{steps}", 64)
    rows = random_rows(64, 3, 6)
    value, _ = error_of(task)(rows)
    assert value == pytest.approx(np.sum((time_workloads.matrix(task) @ np.linalg.inv(dense(rows))) ** 2))


def test_toeplitz_is_a_minimum():
    task = np.ones(200)
    found = over_time.toeplitz(task, 6)
    for j in range(1, 6):
        for step in (1e-3, -1e-3):
            c = found.coefficients.copy()
            c[j] += step
            law = OverTime(c, (200, 1))
            assert law.workload_trace(task) * np.sum(c**2) > found.value
    assert OverTime(found.coefficients, (200, 1)).workload_trace(task) * np.sum(found.coefficients**2) == pytest.approx(
        found.value
    )


@pytest.mark.parametrize("name", ["schedule", "matrix"])
def test_toeplitz_is_a_minimum_for_a_matrix(name):
    task = time_workloads.coefficients(WORKLOADS[name], 24)
    found = over_time.toeplitz(task, 4)

    def value(c):
        return OverTime(c, (24, 1)).workload_trace(task) * np.sum(c**2)

    assert found.value == pytest.approx(value(found.coefficients))
    for j in range(1, 4):
        for step in (1e-2, -1e-2):
            assert value(found.coefficients + step * np.eye(4)[j]) > found.value


@pytest.mark.parametrize("workload", [[0.001, 1.0], [1.0, 5.0], [1.0, -3.0, 1.0]], ids=str)
def test_workloads_whose_inverse_grows(workload):
    """Answers that weigh an earlier step most: the square root grows with the steps, and is not the start of a search.

    Independent noise, of one band, is never better; "auto" and "compare" take what is left.
    """
    steps, sensitivity = 400, Participation(1.0, separation=8, times=4)
    settings = {"shape": (steps, 1), "sensitivity": sensitivity, "budget": BUDGET, "workload": workload}
    fresh = calibrate("analytic", shape=(steps, 1), sensitivity=sensitivity, budget=BUDGET)
    most = fresh.expected_squared_error(workload=workload) * (1 + 1e-6)
    for mechanism in ("toeplitz", "inverse-banded", "banded", "auto"):
        law = calibrate(mechanism, **settings)
        assert law.expected_squared_error(workload=workload) <= most
        assert certify(law, sensitivity).meets(BUDGET)
    with pytest.raises(NotApplicable, match="inverse square root of this workload grows"):
        calibrate("inverse-banded", **settings, bands=32)
    assert {"toeplitz", "inverse-banded"} <= {row.mechanism for row in compare(**settings) if row.verdict == "exact"}


def test_the_square_root():
    root = over_time.square_root(np.ones(6), 6)
    np.testing.assert_allclose(root, [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128, -7 / 256])
    decay = time_workloads.coefficients("decay:0.7", 6)
    twice = np.convolve(over_time._root(decay, 0.5), over_time._root(decay, 0.5))[:6]
    np.testing.assert_allclose(twice, decay)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("mechanism", RECIPES)
def test_recipes_keep_the_budget(mechanism, name):
    sensitivity = Participation(0.5, separation=6, times=3)
    law = calibrate(mechanism, shape=(24, 2), sensitivity=sensitivity, budget=BUDGET, workload=WORKLOADS[name])
    certificate = certify(law, sensitivity, BUDGET)
    assert certificate.meets(BUDGET)
    assert certificate.delta(1.0) >= 0.99e-6
    assert not certify(law.scaled(0.999), sensitivity).meets(BUDGET)
    task = time_workloads.matrix(time_workloads.coefficients(WORKLOADS[name], 24))
    noise = law.covariance.color(np.repeat(np.eye(24)[:, :, None], 1, axis=2).reshape(24, 24))
    assert law.expected_squared_error(workload=WORKLOADS[name]) == pytest.approx(2 * np.sum((task @ noise) ** 2))


@pytest.mark.parametrize("workload", ["prefix", WORKLOADS["matrix"][:4, :4], [1.0, 0.5]], ids=["prefix", "matrix", "c"])
def test_the_error_of_a_workload_for_every_covariance(workload):
    task = time_workloads.matrix(time_workloads.coefficients(workload, 4))
    rows = np.cov(np.random.default_rng(1).standard_normal((4, 9)))
    std = np.random.default_rng(2).uniform(1, 2, (4, 3))
    cases = {
        Isotropic((4, 3), 1.5): 1.5**2 * np.eye(12),
        Diagonal(std): np.diag(std.ravel() ** 2),
        Kronecker(rows, np.array([1.0, 2.0, 3.0])): np.kron(rows, np.diag([1.0, 2.0, 3.0])),
        Dense(np.kron(rows, np.eye(3)) + 0.1, (4, 3)): np.kron(rows, np.eye(3)) + 0.1,
    }
    for covariance, oracle in cases.items():
        wide = np.kron(task, np.eye(3))
        exact = np.trace(wide @ oracle @ wide.T)
        assert Gaussian(covariance).expected_squared_error(workload=workload) == pytest.approx(exact)


def test_compare_ranks_by_running_sums():
    sensitivity = Participation(1.0, separation=32, times=4)
    rows = {row.mechanism: row for row in compare(shape=(128, 1), sensitivity=sensitivity, budget=BUDGET)}
    errors = {name: rows[name].expected_squared_error for name in (*RECIPES, "analytic")}
    assert errors["banded"] < errors["toeplitz"] < errors["binary-tree"] < errors["analytic"]
    assert errors["inverse-banded"] < errors["binary-tree"]
    assert errors["analytic"] / errors["banded"] > 5
    assert [rows[name].verdict for name in RECIPES] == ["exact", "exact", "exact", "exact"]
    best = calibrate("auto", shape=(128, 1), sensitivity=sensitivity, budget=BUDGET)
    assert best.expected_squared_error(workload="prefix") == pytest.approx(min(errors.values()))


def test_where_records_always_take_part_independent_noise_is_hard_to_beat():
    rows = {r.mechanism: r for r in compare((16, 1), Participation(1.0, times=16), BUDGET, ["banded", "analytic"])}
    assert rows["banded"].expected_squared_error <= rows["analytic"].expected_squared_error * (1 + 1e-6)


def test_a_release_over_time_is_floating_point_safe():
    """Chi-square of whitened noise; false alarm 1e-9, and noise 15 % short is told apart."""
    sensitivity, shape = Participation(1.0, separation=25, times=4), (100, 30)
    value = np.random.default_rng(3).uniform(0, 50, shape)
    out = release(value, sensitivity, BUDGET, "inverse-banded", bands=8)
    assert out.certificate.float_safe
    assert out.certificate.verify()
    square = np.linalg.norm(out.noise.covariance.whiten(out.value - value)) ** 2
    from scipy.stats import chi2

    low, high = chi2.ppf([5e-10, 1 - 5e-10], 3000)
    assert low < square < high
    assert not low < 0.85**2 * 3000 < high


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (np.triu(np.ones((8, 8))), "lower triangular"),
        (np.ones((8, 4)), "one row and one column per step"),
        (np.tril(np.ones((8, 8)), -1), "0 on its diagonal"),
        ([0.0, 1.0], "first coefficient"),
        (np.ones(9), "9 coefficients"),
        ([1.0, np.nan], "must be finite"),
        ("suffix", "must be one of prefix"),
        ("window:0", "must be one of prefix"),
        ("decay:1.5", "factors lie from 0 to 1"),
        ("window:inf", "a window has 1 step or more"),
        ("momentum:x", "must be one of prefix"),
    ],
)
@pytest.mark.parametrize("mechanism", RECIPES)
def test_bad_workloads(mechanism, workload, message):
    with pytest.raises(InvalidInput, match=message):
        calibrate(mechanism, shape=(8, 1), sensitivity=Participation(1.0), budget=BUDGET, workload=workload)


@pytest.mark.parametrize(
    ("mechanism", "bands", "message"),
    [
        ("banded", 5, "at most the separation, 4"),
        ("banded", 0, "whole number"),
        ("toeplitz", 9, "at most the number of steps, 8"),
        ("inverse-banded", 2.5, "whole number"),
    ],
)
def test_bad_bands(mechanism, bands, message):
    sensitivity = Participation(1.0, separation=4, times=2)
    with pytest.raises(InvalidInput, match=message):
        calibrate(mechanism, shape=(8, 1), sensitivity=sensitivity, budget=BUDGET, bands=bands)


def test_other_sets_are_sent_elsewhere():
    for mechanism in RECIPES:
        with pytest.raises(NotApplicable, match="Participation"):
            calibrate(mechanism, shape=(8, 1), sensitivity=Counts(1), budget=BUDGET)


def test_bad_schedules():
    with pytest.raises(InvalidInput, match="rates must be above 0"):
        time_workloads.schedule([1.0, 0.0])
    with pytest.raises(InvalidInput, match="momentum must lie"):
        time_workloads.schedule([1.0], 1.0)


@pytest.mark.slow
def test_many_steps_with_a_toeplitz_strategy():
    law = calibrate(
        "toeplitz", shape=(100_000, 1), sensitivity=Participation(1.0, separation=1000, times=100), budget=BUDGET
    )
    assert certify(law, Participation(1.0, separation=1000, times=100), BUDGET).exact
    independent = calibrate("analytic", shape=(100_000, 1), sensitivity=Participation(1.0, times=100), budget=BUDGET)
    assert law.expected_squared_error(workload="prefix") < independent.expected_squared_error(workload="prefix") / 25


@pytest.mark.parametrize("mechanism", ["toeplitz", "inverse-banded"])
@pytest.mark.parametrize(
    "sensitivity",
    [Participation(1.0), Participation(1.0, separation=4, times=2), Participation(1.0, separation=150, times=3)],
)
def test_bands_are_chosen_by_the_error(mechanism, sensitivity):
    """Most bands pay for records that take part rarely; the separation itself is tried, too."""
    chosen = calibrate(mechanism, shape=(500, 1), sensitivity=sensitivity, budget=BUDGET)
    least = chosen.expected_squared_error(workload="prefix")
    for bands in (1, 4, 64, 150, 256):
        given = calibrate(mechanism, shape=(500, 1), sensitivity=sensitivity, budget=BUDGET, bands=bands)
        assert least <= given.expected_squared_error(workload="prefix") * (1 + 1e-9)


def test_long_rows_keep_few_bands():
    """Of a stream with long rows, no more than 64 are kept."""
    law = calibrate("toeplitz", shape=(365, 2**20), sensitivity=Participation(1.0), budget=BUDGET)
    assert law.covariance.coefficients.shape[-1] == 64


@pytest.mark.parametrize("covariance", [Isotropic((24, 3), 2.0), Diagonal(np.linspace(1, 2, 72).reshape(24, 3))])
def test_the_error_of_independent_noise(covariance):
    matrix = np.tril(np.ones((24, 24)))
    expected = np.sum(np.square(matrix) @ covariance.variances())
    assert covariance.workload_trace("prefix") == pytest.approx(expected)


@pytest.mark.parametrize(
    "sensitivity",
    [
        Participation(1.0, separation=5, times=4),
        Participation(1.0, separation=5, times=19),
        Participation(1.0, separation=5, times=20),
        Participation(1.0, separation=45, times=3),  # the last block is shorter
        Participation(1.0, separation=5, cyclic=True),
    ],
    ids=str,
)
def test_the_gap_is_small_however_often_a_record_takes_part(sensitivity):
    """Also where it takes part less often than it could; a Toeplitz strategy is banded, so it cannot be better."""
    task = time_workloads.coefficients("prefix", 100)
    assert over_time.banded(sensitivity, task, 5).gap < 0.02
    errors = {
        name: calibrate(name, shape=(100, 1), sensitivity=sensitivity, budget=BUDGET, bands=5)
        for name in ("banded", "toeplitz")
    }
    banded, toeplitz = (law.expected_squared_error(workload="prefix") for law in errors.values())
    assert banded <= toeplitz
