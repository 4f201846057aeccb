"""PPCA and the Bingham sampler: against exact laws, the ratio of densities, and where the subspace points."""

import itertools
import math
import time

import numpy as np
import pytest
from scipy import stats

from matrixdp.errors import InvalidInput
from matrixdp_papers.rivals.bingham import matrix_bingham
from matrixdp_papers.rivals.ppca import ppca

ANGLES = np.linspace(0, np.pi, 2_001)
DIRECTIONS = np.column_stack([np.cos(ANGLES), np.sin(ANGLES)])


def log_density(matrix):
    """Of the Bingham law on the half circle: a von Mises law of the doubled angle, normalised by quadrature."""
    exponent = np.einsum("ni,ij,nj->n", DIRECTIONS, matrix, DIRECTIONS)
    weights = np.exp(exponent - exponent.max())
    return exponent - exponent.max() - math.log(np.mean(weights[1:]) * np.pi)


def distribution(matrix):
    density = np.exp(log_density(matrix))
    steps = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return lambda angle: np.interp(angle, ANGLES, steps / steps[-1])


def test_density_is_von_mises():
    ours = log_density(np.diag([1.5, -0.5]))
    assert np.exp(ours) == pytest.approx(2 * stats.vonmises(1.0).pdf(2 * ANGLES), rel=1e-9)


RECORDS = np.random.default_rng(0).uniform(-0.7, 0.7, (12, 2))


@pytest.mark.parametrize(("adjacency", "rate"), [("replace", 1.0), ("add/remove", 2.0)])
def test_one_component_in_the_plane_has_the_exact_law(adjacency, rate):
    """KS at 1e-6 against exp(rate tr V^T X^T X V); half and twice the rate are rejected."""
    rng = np.random.default_rng(1)
    sample = [ppca(RECORDS, 1, 2.0, adjacency=adjacency, sweeps=1, rng=rng)[:, 0] for _ in range(1500)]
    angles = np.array([math.atan2(y, x) % math.pi for x, y in sample])
    moment = RECORDS.T @ RECORDS
    assert stats.kstest(angles, distribution(rate * moment)).pvalue > 1e-6
    assert stats.kstest(angles, distribution(rate / 2 * moment)).pvalue < 1e-6
    assert stats.kstest(angles, distribution(rate * 2 * moment)).pvalue < 1e-6


@pytest.mark.parametrize("adjacency", ["replace", "add/remove"])
def test_density_ratios_keep_epsilon(adjacency):
    """The exact guarantee for one component in the plane, and that 1.1 times the rate would break it."""
    epsilon, rng = 1.0, np.random.default_rng(2)
    rate = epsilon / 2 if adjacency == "replace" else epsilon
    unit = rng.standard_normal((6, 2))
    ends = [*np.eye(2), np.zeros(2), *(unit / np.linalg.norm(unit, axis=1, keepdims=True))]
    worst = {1.0: 0.0, 1.1: 0.0}
    for base in (np.zeros((2, 2)), np.diag([60.0, 0.0]), np.diag([3.0, 1.0])):
        for x, y in itertools.product(ends, ends if adjacency == "replace" else [np.zeros(2)]):
            for factor in worst:
                first, second = (log_density(factor * rate * (base + np.outer(v, v))) for v in (x, y))
                worst[factor] = max(worst[factor], float(np.abs(first - second).max()))
    assert worst[1.0] <= epsilon
    assert worst[1.1] > epsilon


@pytest.mark.parametrize(("dimension", "columns"), [(4, 2), (3, 2)])
def test_several_components_have_the_right_mean(dimension, columns):
    """E V V^T within 5 standard errors of importance sampling (false alarm about 1e-6 an entry), half of A is not.

    With 2 of 3 columns the complement is drawn.
    """
    values = np.array([5.0, 2.0, 1.0, -1.0])[:dimension]
    rng, draws = np.random.default_rng(3), 600
    turn = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0]
    A = turn @ np.diag(values) @ turn.T
    sample = np.array([matrix_bingham(A, columns, 2, rng) for _ in range(draws)])
    assert np.allclose(np.einsum("nik,nil->nkl", sample, sample), np.eye(columns), atol=1e-12)
    energies = np.sum(np.einsum("ij,nik->njk", turn, sample) ** 2, axis=2)
    uniform = np.linalg.qr(rng.standard_normal((100_000, dimension, columns)))[0]
    squares = np.sum(uniform**2, axis=2)
    error = 5 * energies.std(axis=0) / math.sqrt(draws)
    for factor, agrees in ((1.0, True), (0.5, False)):
        weights = np.exp(factor * (squares @ values))
        exact = weights @ squares / weights.sum()
        assert bool(np.all(np.abs(energies.mean(axis=0) - exact) < error)) is agrees


def test_without_budget_the_subspace_is_uniform():
    """E V V^T = k/d I within 5 standard errors."""
    rng, draws = np.random.default_rng(4), 400
    records = np.outer(np.ones(20), [1.0, 0, 0, 0, 0])
    squares = np.array([np.sum(ppca(records, 2, 1e-9, sweeps=1, rng=rng) ** 2, axis=1) for _ in range(draws)])
    assert np.all(np.abs(squares.mean(axis=0) - 0.4) < 5 * squares.std(axis=0) / math.sqrt(draws))


def test_with_budget_it_finds_the_leading_directions():
    rng = np.random.default_rng(5)
    basis = np.linalg.qr(rng.standard_normal((30, 30)))[0]
    records = rng.standard_normal((4000, 30)) * np.r_[3.0, 2.0, 2.0, np.full(27, 0.1)] @ basis.T
    spans = [ppca(records, 3, epsilon, norm=6.0, sweeps=5, rng=rng) for epsilon in (0.01, 1.0, 50.0)]
    energy = [np.linalg.norm(basis[:, :3].T @ span) ** 2 / 3 for span in spans]
    assert energy[0] < energy[1] < energy[2]
    assert energy[1] > 0.8
    assert energy[2] > 0.99


def test_long_records_are_shortened():
    short, long = (ppca(f * RECORDS, 1, 2.0, norm=0.1, rng=np.random.default_rng(6)) for f in (10.0, 1e6))
    assert short == pytest.approx(long)


def test_many_features_are_fast():
    rng = np.random.default_rng(7)
    spectrum = 3e4 * np.r_[0.4, 0.05 / np.arange(1, 400)]
    start = time.process_time()  # not that of others, on a busy machine
    V = matrix_bingham(np.diag(spectrum), 20, 3, rng)
    assert time.process_time() - start < 20
    assert np.allclose(V.T @ V, np.eye(20), atol=1e-12)
    assert 0.8 * spectrum[:20].sum() < np.sum(spectrum @ V**2) < spectrum[:20].sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must"),
        ({"k": 2}, "k must"),
        ({"k": 1.0}, "k must"),
        ({"epsilon": np.nan}, "epsilon"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"norm": -1.0}, "norm"),
        ({"adjacency": "swap"}, "adjacency"),
        ({"sweeps": 0}, "sweeps"),
        ({"rng": 1}, "rng"),
        ({"records": [[np.nan, 1.0]]}, "records"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        ppca(**({"records": RECORDS, "k": 1, "epsilon": 1.0} | arguments))
