"""Every covariance against its dense oracle."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from scipy.linalg import block_diag

from cases import COVARIANCES, SETS, SHAPE, orthogonal, spd
from matrixdp import certify
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import (
    Blocks,
    Dense,
    Diagonal,
    FullCovariance,
    Isotropic,
    Kronecker,
    OverTime,
    Symmetric,
    over_time,
)
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.sensitivity import Frobenius

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
    assert Gaussian(case.covariance).root_mean_square == pytest.approx(np.sqrt(np.trace(case.oracle) / 9))


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_power_traces(case, power):
    expected = np.trace(np.linalg.matrix_power(case.oracle, power))
    assert case.covariance.power_trace(power) == pytest.approx(expected, rel=1e-9)


def test_smallest_std_is_the_smallest_singular_value_of_a_factor(case):
    values = np.linalg.eigvalsh(case.oracle)
    least = values[values > 1e-9 * values.max()].min()
    assert case.covariance.smallest_std == pytest.approx(np.sqrt(least))
    soft = case.covariance.least_noise_direction()
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
    assert big.smallest_std == 1.0
    assert big.trace() == pytest.approx(np.linspace(1, 2, 4608).sum() * np.linspace(1, 3, 512).sum())


@pytest.mark.parametrize("columns", [np.ones(400), np.linspace(1, 3, 400)], ids=["one", "many"])
def test_diagonal_factors_cost_one_array_and_the_certificate_none(columns):
    """Rounding is that of two products per entry, whichever way they are written."""
    stds, value = np.linspace(1, 2, 600), np.random.default_rng(0).standard_normal((600, 400))
    covariance = Kronecker(stds**2, columns)
    np.testing.assert_array_equal(covariance.color(value), (value * stds[:, None]) * np.sqrt(columns))
    np.testing.assert_array_equal(covariance.whiten(value), (value / stds[:, None]) / np.sqrt(columns))
    assert peak(lambda: covariance.color(value)) < 1.2 * value.nbytes
    assert peak(lambda: covariance.whiten(value)) < 1.2 * value.nbytes
    assert peak(lambda: certify(Gaussian(covariance), Frobenius(1.0))) < 0.3 * value.nbytes


def peak(call):
    """The most memory that a call has at once."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


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


# --- blocks: a vector in parts, against one dense matrix ---

TURNED, VARIANCES = orthogonal(2, 4), np.array([0.5, 3.0])
BLOCKS = {
    "all kinds": (
        Blocks(
            (
                Isotropic((2, 2), 0.8),
                Diagonal(np.array([0.5, 1.5, 2.5])),
                Kronecker(Spectrum(VARIANCES, TURNED), spd(3, 8)),
                Dense(spd(2, 9)),
            )
        ),
        block_diag(
            0.64 * np.eye(4),
            np.diag([0.25, 2.25, 6.25]),
            np.kron(TURNED @ np.diag(VARIANCES) @ TURNED.T, spd(3, 8)),
            spd(2, 9),
        ),
    ),
    "independent": (
        Blocks((Diagonal(np.array([[1.0, 2.0]])), Isotropic((3,), 0.1), Kronecker(np.array([4.0, 9.0]), np.ones(1)))),
        np.diag([1.0, 4.0, 0.01, 0.01, 0.01, 4.0, 9.0]),
    ),
    "one part": (Blocks((Kronecker(spd(2, 1), spd(2, 2)),)), np.kron(spd(2, 1), spd(2, 2))),
    "parts of parts": (
        Blocks((Blocks((Isotropic((2,), 2.0), Dense(spd(2, 3)))), Isotropic((1,), 3.0))),
        block_diag(4 * np.eye(2), spd(2, 3), 9.0),
    ),
}


@pytest.fixture(params=BLOCKS)
def blocks(request):
    covariance, oracle = BLOCKS[request.param]
    return covariance, Dense(oracle), oracle


def test_blocks_agree_with_one_dense_matrix(blocks):
    covariance, dense, oracle = blocks
    size = len(oracle)
    v, bounds = np.random.default_rng(0).standard_normal(size), np.linspace(0.2, 1, size)
    assert covariance.shape == dense.shape == (size,)
    assert [place.stop for place in covariance.places][-1] == size
    factor = np.stack([covariance.color(e) for e in np.eye(size)], axis=1)
    np.testing.assert_allclose(factor @ factor.T, oracle, rtol=1e-10, atol=1e-12)
    assert np.linalg.norm(covariance.whiten(v)) == pytest.approx(np.linalg.norm(dense.whiten(v)))
    np.testing.assert_allclose(covariance.whiten(covariance.color(v)), v, rtol=1e-9, atol=1e-12)
    for name in ("variances", "precision_diagonal"):
        np.testing.assert_allclose(getattr(covariance, name)(), getattr(dense, name)(), rtol=1e-9)
    np.testing.assert_allclose(covariance.precision(v), dense.precision(v), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(covariance.absolute_precision(bounds), dense.absolute_precision(bounds), rtol=1e-9)
    for name in ("trace", "condition", "rank"):
        assert getattr(covariance, name)() == pytest.approx(getattr(dense, name)())
    for power in (1, 2, 3):
        assert covariance.power_trace(power) == pytest.approx(dense.power_trace(power))
    assert covariance.smallest_std == pytest.approx(dense.smallest_std)
    soft = covariance.least_noise_direction()
    assert np.linalg.norm(soft) == pytest.approx(1)
    assert np.linalg.norm(covariance.whiten(soft)) == pytest.approx(1 / dense.smallest_std)
    assert covariance.independent == (np.count_nonzero(oracle - np.diag(np.diag(oracle))) == 0)
    np.testing.assert_allclose(covariance.scaled(3.0).variances(), 9 * dense.variances())
    assert covariance.scaled(3.0).slack == covariance.slack == max(part.slack for part in covariance.parts)
    assert covariance.whitening_error() == max(part.whitening_error() for part in covariance.parts)
    assert "parts" in covariance.describe()


@pytest.mark.parametrize("name", ["Frobenius", "Entrywise, one bound", "Counts, two"])
def test_blocks_are_certified_as_one_dense_matrix_is(blocks, name):
    """For several counts at once, only a dense matrix is looked at pair by pair; the bound for blocks may be above."""
    covariance, dense, _ = blocks
    found, expected = (certify(Gaussian(c), SETS[name].sensitivity) for c in (covariance, dense))
    assert found.mu >= expected.mu * (1 - 1e-9)
    if name != "Counts, two":
        assert found.mu <= expected.mu * (1 + 1e-9)
    reached = np.linalg.norm(covariance.whiten(found.witness))
    assert reached <= found.mu
    if found.exact:
        assert reached == pytest.approx(found.mu, rel=1e-8)


def test_blocks_have_no_lines_and_need_parts():
    with pytest.raises(InvalidInput, match="no rows or columns"):
        list(BLOCKS["all kinds"][0].lines(0))
    for parts in ((), (Symmetric(2, 1.0),), (np.eye(2),)):
        with pytest.raises(InvalidInput, match="parts must be covariances"):
            Blocks(parts)


def test_symmetric_noise_is_described_by_the_stds_of_its_entries():
    covariance = Symmetric(4, 2.0, 3.0)
    stds = np.sqrt(covariance.variances())
    assert f"std {stds[0, 1]:.6g} off the diagonal and {stds[2, 2]:.6g} on it" in covariance.describe()


def test_rows_one_by_one_are_as_exact_as_they_say():
    """Against rational numbers; row after row of C X, from rows of X or, for an inverse, of C X."""
    rng, steps = np.random.default_rng(6), 40
    root = np.cumprod([1.0, *((j - 1.5) / j for j in range(1, steps))])
    for coefficients, inverse in ((root, True), (root[:5], True), (1 / np.arange(1.0, 31), False)):
        covariance = OverTime(coefficients, (steps, 1), inverse=inverse)
        values, exact = rng.normal(size=(steps, 1)) * 1e6, list[Fraction]()
        rows = list[np.ndarray]()
        for step in range(steps):
            known = rows if inverse else values[:step]
            rows.append(covariance.encode_next(step, values[step], np.array(known[::-1]).reshape(-1, 1)))
            first, *later = (Fraction(c) for c in covariance.bands_at(step))
            before = exact if inverse else [Fraction(x) for x in values[:step, 0]]
            mixed = sum((c * x for c, x in zip(later, before[::-1], strict=False)), Fraction(0))
            now = Fraction(values[step, 0])
            exact.append((now - mixed) / first if inverse else first * now + mixed)
        off = np.linalg.norm([float(Fraction(row[0]) - truth) for row, truth in zip(rows, exact, strict=True)])
        assert off <= covariance.row_by_row_share * covariance.whitening_error() * np.linalg.norm(rows)


def test_many_terms_are_added_in_pairs():
    """One term at a time, a thousand that are below half a unit of the first would be lost."""
    weights, rows = np.ones(1024), np.full((1024, 2), 1.5 * 2.0**-54)
    rows[0] = 1.0
    truth = math.fsum(rows[:, 0])
    assert abs(sum(rows[:, 0]) - truth) > 100 * 2.0**-53
    np.testing.assert_allclose(over_time.sum_in_pairs(weights, rows), truth, rtol=11 * 2.0**-53)
    assert over_time.sum_in_pairs(weights[:0], rows[:0]).tolist() == [0.0, 0.0]
    odd = np.random.default_rng(7).integers(-9, 9, (13, 3)).astype(float)
    np.testing.assert_array_equal(over_time.sum_in_pairs(odd[:, 0], odd), odd[:, 0] @ odd)
