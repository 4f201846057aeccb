"""MVG, MGM, UDN and IDN: the published conditions hold with equality, and their closed-form optima are optimal."""

import math

import numpy as np
import pytest

from cases import orthogonal
from matrixdp import Budget, calibrate, certify, release
from matrixdp.errors import BudgetExceeded, InvalidInput, NotApplicable
from matrixdp.mechanisms import expected_error
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import Entrywise, Frobenius, OneColumn, RankOne

BUDGET = Budget(0.8, 1e-5)
SHAPE = (4, 6)


def radius_squared(m, n, delta):
    return 2 * math.sqrt(-m * n * math.log(delta)) - 2 * math.log(delta) + m * n


def mvg_phi(m, n, s, gamma, epsilon, zeta):
    r = min(m, n)
    h, half = sum(1 / i for i in range(1, r + 1)), sum(i**-0.5 for i in range(1, r + 1))
    a, b = (h + half) * gamma**2 + 2 * h * gamma * s, 2 * (m * n) ** 0.25 * h * s * zeta
    return (-b + math.sqrt(b * b + 8 * a * epsilon)) / (2 * a)


@pytest.mark.parametrize("precision", ["uniform", "binary", np.array([0.4, 0.3, 0.2, 0.1])], ids=str)
@pytest.mark.parametrize("radius", ["published", "laurent-massart"])
def test_mvg_unimodal_meets_theorem_3_with_equality(precision, radius):
    law = calibrate(
        "mvg", shape=SHAPE, sensitivity=Frobenius(2.0), budget=BUDGET, gamma=5.0, radius=radius, precision=precision
    )
    square = radius_squared(*SHAPE, 1e-5)
    phi = mvg_phi(*SHAPE, 2.0, 5.0, 0.8, square if radius == "published" else math.sqrt(square))
    rows, columns = (np.linalg.norm(1 / side.variances) for side in (law.covariance.rows, law.covariance.columns))
    assert rows * columns == pytest.approx(phi**2, rel=1e-9)
    assert certify(law, Frobenius(2.0)).meets(BUDGET)


def test_mvg_equimodal_meets_theorem_3_with_equality():
    law = calibrate("mvg", shape=(4, 4), sensitivity=RankOne(1.0), budget=BUDGET, gamma=1.0, modes="equimodal")
    phi = mvg_phi(4, 4, 1.0, 1.0, 0.8, radius_squared(4, 4, 1e-5))
    assert np.linalg.norm(1 / law.covariance.rows.variances) ** 2 == pytest.approx(phi**2, rel=1e-9)
    np.testing.assert_array_equal(law.covariance.rows.variances, law.covariance.columns.variances)
    with pytest.raises(NotApplicable, match="square"):
        calibrate("mvg", shape=SHAPE, sensitivity=Frobenius(1.0), budget=BUDGET, gamma=1.0, modes="equimodal")


def test_mvg_directions_get_their_precision():
    W = orthogonal(4, 0)
    law = calibrate(
        "mvg", shape=SHAPE, sensitivity=Frobenius(1.0), budget=BUDGET, gamma=1.0,
        directions=W, precision="binary", important=1, share=0.97,
    )  # fmt: skip
    covariance = W @ np.diag(law.covariance.rows.variances) @ W.T
    assert W[:, 0] @ covariance @ W[:, 0] == pytest.approx(law.covariance.rows.variances[0])
    assert law.covariance.rows.variances[0] * math.sqrt(97) == pytest.approx(law.covariance.rows.variances[1])


def test_mvg_asks_for_gamma_in_words():
    with pytest.raises(InvalidInput, match="largest Frobenius norm that the value can have"):
        calibrate("mvg", shape=SHAPE, sensitivity=Frobenius(1.0), budget=BUDGET)


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0.0}, {"gamma": np.nan}, {"radius": "mine"}, {"modes": "bimodal"}, {"precision": "all"},
        {"precision": np.array([0.5, 0.5])}, {"precision": np.array([0.5, 0.5, 0.5, 0.5])},
        {"precision": np.array([1.0, 0.0, 0.0, 0.0])}, {"precision": "binary", "important": 4},
        {"precision": "binary", "share": 1.0}, {"directions": np.ones((4, 4))}, {"directions": np.eye(3)},
    ],
    ids=str,
)  # fmt: skip
def test_mvg_refuses(options):
    with pytest.raises(InvalidInput):
        calibrate("mvg", shape=SHAPE, sensitivity=Frobenius(1.0), budget=BUDGET, **({"gamma": 1.0} | options))


def test_mvg_directions_from_a_private_release_are_charged_to_the_same_budget():
    rng = np.random.default_rng(3)
    value = rng.standard_normal((4, 4))
    whole = Budget(2.0, 1e-6)
    pca = release(value @ value.T, RankOne(1.0, "replace"), Budget(0.5, 1e-6), "optimal")
    law = calibrate("mvg", shape=(4, 9), sensitivity=OneColumn(1.0), budget=whole, gamma=3.0, directions=pca)
    both = math.hypot(pca.certificate.mu, certify(law, OneColumn(1.0)).mu)
    assert gaussian.delta(both, whole.epsilon) <= whole.delta
    alone = calibrate("mvg", shape=(4, 9), sensitivity=OneColumn(1.0), budget=whole, gamma=3.0)
    assert law.expected_squared_error() > alone.expected_squared_error()
    assert f"mu = {pca.certificate.mu:.4g}" in str(certify(law, OneColumn(1.0)))
    leading = np.linalg.eigh((pca.value + pca.value.T) / 2)[1][:, -1]
    assert abs(law.covariance.rows.directions[:, 0] @ leading) == pytest.approx(1)
    small = Budget(0.4, 1e-6)
    with pytest.raises(BudgetExceeded, match="nothing is left"):
        calibrate("mvg", shape=(4, 9), sensitivity=OneColumn(1.0), budget=small, gamma=3.0, directions=pca)
    added = release(value @ value.T, RankOne(1.0), Budget(0.5, 1e-6), "optimal")
    with pytest.raises(InvalidInput, match="adjacency add/remove"):
        calibrate("mvg", shape=(4, 9), sensitivity=OneColumn(1.0), budget=whole, gamma=3.0, directions=added)
    with pytest.raises(InvalidInput, match="5 x 5"):
        calibrate("mvg", shape=(5, 9), sensitivity=OneColumn(1.0), budget=whole, gamma=3.0, directions=pca)


def inverse_squares(side):
    return float(np.sum(1 / side.variances))


def mgm_constant(m, n, s, budget):
    z = math.sqrt(radius_squared(m, n, budget.delta))
    return ((-2 * z * s + math.sqrt((2 * z * s) ** 2 + 8 * s**2 * budget.epsilon)) / (2 * s**2)) ** 2


UTILITIES = [None, np.array([1.0, 2.0, 0.5, 9.0]), np.random.default_rng(0).standard_normal((3, 4))]


@pytest.mark.parametrize("task", UTILITIES, ids=["none", "weights", "matrix"])
@pytest.mark.parametrize("turned", [False, True])
def test_mgm_and_udn_meet_their_condition_with_equality_and_are_optimal(task, turned):
    W = orthogonal(4, 1) if turned else None
    constant = mgm_constant(*SHAPE, 2.0, BUDGET)
    both = calibrate(
        "mgm", shape=SHAPE, sensitivity=Frobenius(2.0), budget=BUDGET, row_utility=task, row_directions=W,
        column_utility=np.arange(1.0, 7.0),
    ).covariance  # fmt: skip
    one = calibrate(
        "udn", shape=SHAPE, sensitivity=Frobenius(2.0), budget=BUDGET, row_utility=task, row_directions=W
    ).covariance
    assert inverse_squares(both.rows) * inverse_squares(both.columns) == pytest.approx(constant, rel=1e-9)
    assert inverse_squares(one.rows) == pytest.approx(constant, rel=1e-9)
    np.testing.assert_array_equal(one.columns.variances, np.ones(6))
    directions = np.eye(4) if W is None else W
    weights = np.ones(4) if task is None else task
    if weights.ndim == 2:
        weights = np.sum((weights @ directions) ** 2, axis=0)
    best = float(weights @ one.rows.variances)
    assert best == pytest.approx(np.sum(np.sqrt(weights)) ** 2 / constant, rel=1e-9)
    rng = np.random.default_rng(5)
    for _ in range(300):
        other = np.exp(rng.normal(0, 1, 4))
        other *= np.sum(1 / other) / constant
        assert weights @ other >= best * (1 - 1e-9)


def test_idn_meets_theorem_3_with_equality():
    law = calibrate("idn", shape=SHAPE, sensitivity=Entrywise(2.0), budget=BUDGET, row_utility=np.array([1.0, 2, 3, 4]))
    z2 = radius_squared(*SHAPE, BUDGET.delta)
    s_hat = 2.0 * math.sqrt(24)
    right = 4 / s_hat**2 * (math.sqrt(z2 + 2 * BUDGET.epsilon) - math.sqrt(z2)) ** 2
    assert inverse_squares(law.covariance.rows) == pytest.approx(right, rel=1e-9)
    assert certify(law, Entrywise(2.0)).exact
    assert certify(law, Entrywise(2.0)).meets(BUDGET)


def test_a_direction_nobody_looks_at_gets_large_but_finite_noise():
    law = calibrate("udn", shape=SHAPE, sensitivity=Frobenius(1.0), budget=BUDGET, row_utility=np.array([1.0, 0, 1, 1]))
    variances = law.covariance.rows.variances
    assert np.isfinite(variances).all()
    assert variances[1] == pytest.approx(1000 / 3 * variances[0])
    error = float(np.sum(variances[[0, 2, 3]]))
    alone = calibrate("udn", shape=(3, 6), sensitivity=Frobenius(1.0), budget=BUDGET).covariance.rows.variances
    assert error == pytest.approx(float(np.sum(alone)), rel=0.2)
    seen = calibrate(
        "udn", shape=SHAPE, sensitivity=Frobenius(1.0), budget=BUDGET, row_utility=np.array([1.0, 1, 1, 1])
    )
    assert variances[0] < seen.covariance.rows.variances[0]


@pytest.mark.parametrize("name", ["mgm", "udn", "idn"])
def test_utilities_that_make_no_sense_are_refused(name):
    given = {"shape": SHAPE, "sensitivity": Frobenius(1.0), "budget": BUDGET}
    for bad in (np.ones(3), -np.ones(4), np.zeros(4), np.ones((2, 3)), np.full(4, np.nan)):
        with pytest.raises(InvalidInput, match="row_utility"):
            calibrate(name, row_utility=bad, **given)
    with pytest.raises(NotApplicable, match="rows and columns"):
        calibrate(name, shape=(5,), sensitivity=Frobenius(1.0), budget=BUDGET)


def test_known_looseness_of_idn():
    """Against one classic Gaussian on the whole matrix, IDN is looser by about mn/(2 ln(1.25/delta))."""
    shape, box, budget = (120, 400), Entrywise(0.02), Budget(0.9, 1e-5)
    idn = calibrate("idn", shape=shape, sensitivity=box, budget=budget).expected_squared_error()
    classic = calibrate("classic", shape=shape, sensitivity=box, budget=budget).expected_squared_error()
    assert idn / classic == pytest.approx(120 * 400 / (2 * math.log(1.25e5)), rel=0.1)


@pytest.mark.parametrize("name", ["udn", "mgm"])
def test_directions_that_a_task_misses_but_for_rounding_get_finite_noise(name):
    """The axes of a singular value decomposition are orthogonal to the task up to 1e-17, not exactly."""
    task = np.array([[0.2009, 0.1652, 0.0209, 0.0978, 0.0945, 0.0]])
    axes = np.linalg.svd(task)[2].T
    law = calibrate(name, shape=(6, 5), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6),
                    row_utility=task, row_directions=axes)  # fmt: skip
    rows, columns = law.covariance.rows, law.covariance.columns
    assert rows.variances.max() / rows.variances.min() < 1e8
    by_hand = float(np.sum(rows.variances * np.square(task @ rows.directions)) * np.sum(columns.variances))
    assert expected_error(law, {"row_utility": task}) == pytest.approx(by_hand, rel=1e-9)
