"""Every covariance against its dense oracle."""

import numpy as np
import pytest

from cases import COVARIANCES, SHAPE, spd
from matrixdp.covariance import Dense, Diagonal, FullCovariance, Isotropic, Kronecker, Symmetric
from matrixdp.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.noise.laws import Gaussian

FULL = {name: case for name, case in COVARIANCES.items() if isinstance(case.covariance, FullCovariance)}


@pytest.fixture(params=COVARIANCES, ids=str)
def case(request):
    return COVARIANCES[request.param]


@pytest.fixture(params=FULL, ids=str)
def full(request):
    return FULL[request.param]


def probe(seed):
    return np.random.default_rng(seed).standard_normal(SHAPE)


def test_color_is_a_factor_of_the_covariance(case):
    factor = np.stack([case.covariance.color(e.reshape(SHAPE)).ravel() for e in np.eye(9)], axis=1)
    np.testing.assert_allclose(factor @ factor.T, case.oracle, rtol=1e-10, atol=1e-12)


def test_whiten_inverts_the_covariance(case):
    v = probe(0)
    v = v if isinstance(case.covariance, FullCovariance) else v + v.T
    square = np.linalg.norm(case.covariance.whiten(v)) ** 2
    np.testing.assert_allclose(square, v.ravel() @ np.linalg.pinv(case.oracle) @ v.ravel(), rtol=1e-9)


def test_variances_and_traces(case):
    variances = np.diag(case.oracle).reshape(SHAPE)
    np.testing.assert_allclose(case.covariance.variances(), variances, rtol=1e-10)
    assert case.covariance.trace() == pytest.approx(np.trace(case.oracle))
    weights = np.abs(probe(1))
    assert case.covariance.weighted_trace(weights) == pytest.approx(np.sum(weights * variances))
    assert Gaussian(case.covariance).expected_squared_error(weights) == pytest.approx(np.sum(weights * variances))
    assert Gaussian(case.covariance).std == pytest.approx(np.sqrt(np.trace(case.oracle) / 9))


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_power_traces(case, power):
    expected = np.trace(np.linalg.matrix_power(case.oracle, power))
    assert case.covariance.power_trace(power) == pytest.approx(expected, rel=1e-9)


def test_smallest_std_is_the_smallest_singular_value_of_a_factor(case):
    values = np.linalg.eigvalsh(case.oracle)
    least = values[values > 1e-9 * values.max()].min()
    assert case.covariance.smallest_std == pytest.approx(np.sqrt(least))
    soft = case.covariance.softest_direction()
    assert np.linalg.norm(soft) == pytest.approx(1)
    assert np.linalg.norm(case.covariance.whiten(soft)) == pytest.approx(1 / np.sqrt(least))


def test_coordinates_are_orthonormal_and_turn_back(case):
    white = case.covariance.whiten(probe(6) if isinstance(case.covariance, FullCovariance) else probe(6) + probe(6).T)
    coordinates = case.covariance.coordinates(white)
    assert len(coordinates) == np.linalg.matrix_rank(case.oracle)
    assert np.linalg.norm(coordinates) == pytest.approx(np.linalg.norm(white))
    np.testing.assert_allclose(case.covariance.assemble(coordinates), white, atol=1e-12)


def test_condition(case):
    values = np.linalg.eigvalsh(case.oracle)
    values = values[values > 1e-9 * values.max()]
    assert case.covariance.condition() == pytest.approx(np.sqrt(values.max() / values.min()))


def test_scaled_multiplies_every_std(case):
    twice = case.covariance.scaled(2.0)
    np.testing.assert_allclose(twice.variances(), 4 * case.covariance.variances())
    assert twice.smallest_std == pytest.approx(2 * case.covariance.smallest_std)
    assert twice.slack == case.covariance.slack


def test_precision(full):
    inverse = np.linalg.inv(full.oracle)
    v, bounds = probe(2), np.abs(probe(3))
    np.testing.assert_allclose(full.covariance.precision(v).ravel(), inverse @ v.ravel(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(full.covariance.precision_diagonal().ravel(), np.diag(inverse), rtol=1e-9)
    np.testing.assert_allclose(
        full.covariance.absolute_precision(bounds).ravel(), np.abs(inverse) @ bounds.ravel(), rtol=1e-9
    )
    off = inverse - np.diag(np.diag(inverse))
    assert full.covariance.independent == (np.abs(off).max() < 1e-12)


@pytest.mark.parametrize("axis", [0, 1])
def test_lines_carry_the_blocks_of_the_precision_and_hold_the_worst(full, axis):
    blocks = np.linalg.inv(full.oracle).reshape(SHAPE * 2)
    exact = [blocks[i, :, i] if axis == 0 else blocks[:, i, :, i] for i in range(SHAPE[axis])]
    worst = []
    for index, line in full.covariance.lines(axis):
        v = probe(4)[0]
        assert np.linalg.norm(line.whiten(v)) ** 2 == pytest.approx(v @ exact[index] @ v)
        worst.append(1 / line.smallest_std**2)
    assert max(worst) == pytest.approx(max(np.linalg.eigvalsh(block)[-1] for block in exact))


def test_samples_have_the_covariance(case):
    """Chi-square of whitened norms. False alarm 1e-6; noise 5 % short is told apart."""
    draws, rank = 4000, np.linalg.matrix_rank(case.oracle)
    rng = np.random.default_rng(7)
    inverse = np.linalg.pinv(case.oracle)

    def z_score(shrink):
        z = np.stack([shrink * Gaussian(case.covariance).sample(rng).ravel() for _ in range(draws)])
        total = np.einsum("ij,jk,ik->", z, inverse, z)
        return (total - draws * rank) / np.sqrt(2 * draws * rank)

    assert abs(z_score(1.0)) < 4.9
    assert abs(z_score(0.95)) > 4.9


def test_a_swapped_kronecker_factor_is_told_apart():
    rows, columns = spd(3, 2), spd(3, 3)
    right, wrong = Kronecker(rows, columns), Kronecker(columns, rows)
    v = probe(5)
    exact = v.ravel() @ np.linalg.inv(np.kron(rows, columns)) @ v.ravel()
    assert np.linalg.norm(right.whiten(v)) ** 2 == pytest.approx(exact)
    assert np.linalg.norm(wrong.whiten(v)) ** 2 != pytest.approx(exact, rel=1e-3)


def test_large_kronecker_stays_small():
    big = Kronecker(np.linspace(1, 2, 4608), np.linspace(1, 3, 512))
    assert big.shape == (4608, 512)
    assert big.smallest_std == pytest.approx(1.0)
    assert big.trace() == pytest.approx(np.linspace(1, 2, 4608).sum() * np.linspace(1, 3, 512).sum())


@pytest.mark.parametrize(
    ("matrix", "error", "words"),
    [
        (np.array([[1.0, 2.0], [2.0, 1.0]]), InvalidInput, "positive definite"),
        (np.array([[1.0, 1.0], [1.0, 1.0]]), InvalidInput, "positive definite"),
        (np.array([[1.0, 0.5], [0.0, 1.0]]), InvalidInput, "symmetric"),
        (np.ones((2, 3)), InvalidInput, "square"),
        (np.array([1.0, -1.0]), InvalidInput, "above 0"),
        (np.array([1.0, 0.0]), InvalidInput, "above 0"),
        (np.diag([1.0, 1e-13]), NumericalFailure, "differ too much"),
        (np.array([[1.0, np.nan], [np.nan, 1.0]]), InvalidInput, "finite"),
    ],
)
def test_matrices_that_are_not_covariances_are_refused_never_mended(matrix, error, words):
    for build in (lambda: Dense(matrix), lambda: Kronecker(matrix, np.ones(2)), lambda: Kronecker(np.ones(2), matrix)):
        with pytest.raises(error, match=words):
            build()


def test_directions_must_be_orthonormal():
    with pytest.raises(InvalidInput, match="orthonormal"):
        Spectrum(np.ones(2), np.array([[1.0, 0.1], [0.0, 1.0]]))
    with pytest.raises(InvalidInput, match="2 x 2"):
        Spectrum(np.ones(2), np.eye(3))


def test_ill_conditioning_widens_the_slack():
    assert Dense(np.diag([1.0, 1e-8]) + 0.0).slack > 1e-9
    assert Dense(np.eye(2)).slack < 1e-14


def test_symmetric_noise_is_symmetric_and_cannot_hide_what_is_not():
    noise = Symmetric(4, 1.0, 0.5).color(np.random.default_rng(0).standard_normal((4, 4)))
    np.testing.assert_array_equal(noise, noise.T)
    assert np.linalg.norm(Symmetric(2, 1.0).whiten(np.array([[0.0, 1.0], [0.0, 0.0]]))) == np.inf


def test_dense_shape_must_fit():
    with pytest.raises(InvalidInput, match="covers 4 entries"):
        Dense(np.eye(4), (3, 2))


def test_values_given_cannot_be_changed_afterwards():
    std = np.ones(3)
    law = Diagonal(std)
    std[0] = 0.01
    assert law.std[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        law.std[0] = 0.01
    with pytest.raises(AttributeError):
        Isotropic((2,), 1.0).std = 0.1
