"""The matrix mechanism as a recipe: its noise keeps the budget and nothing else answers the workload better."""

import numpy as np
import pytest

from matrixdp import Budget, calibrate, certify, compare, release
from matrixdp.distributions import Gaussian, Spherical
from matrixdp.distributions.covariance import Diagonal, Kronecker
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms import RECIPES
from matrixdp.mechanisms.matrix_mechanism import workload_error
from matrixdp.mechanisms.solvers import workloads
from matrixdp.sensitivity import Counts, Frobenius

BUDGET = Budget(0.5, 1e-6)


def queries(name, n):
    ranges = [np.r_[np.zeros(i), np.ones(j - i), np.zeros(n - j)] for i in range(n) for j in range(i + 1, n + 1)]
    return {
        "identity": np.eye(n),
        "total": np.ones((1, n)),
        "prefix": np.tril(np.ones((n, n))),
        "all-ranges": np.stack(ranges),
    }[name]


@pytest.mark.parametrize("name", ["identity", "total", "prefix", "all-ranges"])
@pytest.mark.parametrize("shape", [(12,), (4, 5)], ids=str)
@pytest.mark.parametrize("bound", [1.0, 3.0])
def test_it_keeps_the_budget_and_beats_independent_noise(name, shape, bound):
    sensitivity = Counts(1, bound)
    law = calibrate("matrix-mechanism", shape=shape, sensitivity=sensitivity, budget=BUDGET, workload=name)
    certificate = certify(law, sensitivity)
    assert certificate.meets(BUDGET)
    assert certificate.delta(BUDGET.epsilon) >= BUDGET.delta * (1 - 1e-6)
    W = queries(name, shape[0]) if len(shape) == 1 else np.kron(queries(name, shape[0]), queries(name, shape[1]))
    factor = np.stack([law.covariance.color(e.reshape(shape)).ravel() for e in np.eye(W.shape[1])], axis=1)
    assert workload_error(name, law) == pytest.approx(np.sum((W @ factor) ** 2), rel=1e-6)
    plain = calibrate("analytic", shape=shape, sensitivity=sensitivity, budget=BUDGET)
    assert workload_error(name, law) <= workload_error(name, plain) * (1 + 1e-5)
    singular = np.sum(np.linalg.svd(W, compute_uv=False)) ** 2 / W.shape[1]
    assert workload_error(name, law) >= singular * bound**2 / certificate.mu**2 * (1 - 1e-9)


def test_a_given_matrix_a_workload_object_and_a_name_agree():
    tasks = ["prefix", workloads.prefix(8), np.tril(np.ones((8, 8)))]
    laws = [calibrate("matrix-mechanism", shape=(8,), sensitivity=Counts(1), budget=BUDGET, workload=t) for t in tasks]
    errors = [workload_error("prefix", law) for law in laws]
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-5)


def test_marginals_and_unions():
    task = workloads.marginals((4, 3), [1, 2])
    law = calibrate("matrix-mechanism", shape=(4, 3), sensitivity=Counts(1), budget=BUDGET, workload=task)
    assert certify(law, Counts(1)).meets(BUDGET)
    # Uniform weights are optimal for marginals: the singular value bound is reached.
    mu = certify(law, Counts(1)).mu
    assert workload_error(task, law) == pytest.approx(
        np.sum(np.sqrt(np.linalg.eigvalsh(task.gram()))) ** 2 / 12 / mu**2, rel=1e-4
    )
    mixed = workloads.union(workloads.tensor(workloads.prefix(4), workloads.total(3)), workloads.marginals((4, 3), 2))
    law = calibrate("matrix-mechanism", shape=(4, 3), sensitivity=Counts(1), budget=BUDGET, workload=mixed)
    assert certify(law, Counts(1)).meets(BUDGET)
    assert workload_error(mixed, law) < workload_error(
        mixed, calibrate("analytic", shape=(4, 3), sensitivity=Counts(1), budget=BUDGET)
    )


def test_replacing_a_record_changes_two_cells():
    replaced = Counts(2, relation="replace")
    law = calibrate("matrix-mechanism", shape=(10,), sensitivity=replaced, budget=BUDGET, workload="prefix")
    certificate = certify(law, replaced)
    assert certificate.exact
    assert certificate.meets(BUDGET)


def test_a_large_product_domain_is_never_formed():
    law = calibrate("matrix-mechanism", shape=(128, 96), sensitivity=Counts(1), budget=BUDGET, workload="prefix")
    assert isinstance(law.covariance, Kronecker)
    assert certify(law, Counts(1)).meets(BUDGET)


def test_a_union_on_a_domain_too_large_to_form_is_refused():
    with pytest.raises(NotApplicable, match="at most 16384"):
        calibrate(
            "matrix-mechanism",
            shape=(256, 256),
            sensitivity=Counts(1),
            budget=BUDGET,
            workload=workloads.marginals((256, 256), [1, 2]),
        )


def test_errors_of_a_workload_under_every_kind_of_noise():
    shape, W = (2, 3), np.random.default_rng(0).standard_normal((4, 6))
    rng = np.random.default_rng(1)
    laws = [
        Gaussian(Diagonal(rng.uniform(1, 2, shape))),
        Gaussian(Kronecker(np.array([1.0, 2.0]), np.eye(3) + 0.2)),
        calibrate("optimal", shape=shape, sensitivity=Counts(1), budget=BUDGET),
    ]
    for law in laws:
        factor = np.stack([law.covariance.color(e.reshape(shape)).ravel() for e in np.eye(6)], axis=1)
        assert workload_error(W, law) == pytest.approx(np.sum((W @ factor) ** 2))
    round_law = Spherical(shape, k=6.0, p=1.0, scale=1.0)
    assert workload_error(W, round_law) == pytest.approx(round_law.root_mean_square**2 * np.sum(W**2))


def test_compare_ranks_by_the_workload():
    table = compare((32,), Counts(1), BUDGET, workload="prefix")
    errors = {row.mechanism: row.expected_squared_error for row in table if row.gaussian}
    assert next(iter(errors)) == "matrix-mechanism"
    assert table.auto in ("laplace", "discrete")  # on so few cells, independent noise that is not Gaussian has less
    assert errors["matrix-mechanism"] < 0.6 * errors["analytic"]


def test_release_answers_the_workload_as_well_as_promised():
    """The mean of 400 errors about tr(P S), within 2e-9 bounds on weighted sums of squares (Laurent, Massart, 2000)."""
    rng, W = np.random.default_rng(2), np.tril(np.ones((16, 16)))
    value = rng.integers(0, 50, 16).astype(float)
    errors = []
    for _ in range(400):
        out = release(value, Counts(1), BUDGET, mechanism="matrix-mechanism", workload="prefix")
        errors.append(np.sum((W @ (out.value - value)) ** 2))
    expected = workload_error("prefix", out.noise)
    factor = W @ np.stack([out.noise.covariance.color(e) for e in np.eye(16)], axis=1)
    shares = np.linalg.svd(factor, compute_uv=False) ** 2 / expected
    assert np.sum(shares) == pytest.approx(1)
    x, length = np.log(1e9), np.linalg.norm(shares) / 20
    low, high = 1 - 2 * length * np.sqrt(x), 1 + 2 * length * np.sqrt(x) + 2 * np.max(shares) / 400 * x
    assert low < np.mean(errors) / expected < high
    assert 0.75**2 * high < low  # so that noise a quarter short is always told apart


def test_what_does_not_fit_is_refused():
    given = {"shape": (4,), "sensitivity": Counts(1), "budget": BUDGET}
    for bad in ("suffix", np.ones((2, 5)), np.zeros((2, 4)), workloads.prefix(5), np.full((1, 4), np.nan)):
        with pytest.raises(InvalidInput):
            calibrate("matrix-mechanism", workload=bad, **given)
    with pytest.raises(InvalidInput, match="one row per query"):
        calibrate("matrix-mechanism", **given)
    with pytest.raises(NotApplicable, match="Counts"):
        calibrate("matrix-mechanism", shape=(4,), sensitivity=Frobenius(1.0), budget=BUDGET, workload="prefix")
    assert RECIPES["matrix-mechanism"].options["workload"]
