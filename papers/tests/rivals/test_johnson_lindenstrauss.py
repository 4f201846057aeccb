"""The Johnson-Lindenstrauss transform: its exact delta against a simulation, its law, and its shifts."""

import math

import numpy as np
import pytest

from matrixdp import Budget, queries
from matrixdp.adjacency import REPLACE
from matrixdp.errors import InvalidInput
from matrixdp_papers.rivals import johnson_lindenstrauss as jl

BUDGET = Budget(1.0, 1e-3)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def moment(rng, norm=1.0, records=40, columns=3):
    return queries.second_moment(rng.standard_normal((records, columns)), norm=norm, adjacency=REPLACE)


@pytest.mark.parametrize(("rows", "ratio"), [(1, 1.0), (5, 1.0), (50, 0.4), (2952, 0.1)])
def test_delta_is_that_of_the_worst_pair_of_covariances(rows, ratio):
    """The likelihoods of N(0, K) and N(0, K') by draws from the first: within 5 standard errors (6e-7), rounded up."""
    count, c = 200_000, 1 + ratio**2
    x, y = np.random.default_rng(rows).chisquare(rows, (2, count))
    # K = diag(c, 1) and K' = diag(1, c), in units of the shift: z^T (K'^-1 - K^-1) z over the rows
    loss = (c * x * (1 - 1 / c) - y * (1 - 1 / c)) / 2
    values = np.maximum(0, 1 - np.exp(1.0 - loss))
    error = 5 * float(values.std()) / math.sqrt(count)
    found = jl.delta(1.0, ratio, rows)
    assert abs(found - values.mean()) <= error
    assert abs(jl.delta(1.0, 1.1 * ratio, rows) - values.mean()) > error  # a shift 10 % too small is told apart


def test_no_neighbours_are_easier_to_tell_apart(rng):
    """Random data, with one record replaced: the variances in common coordinates lie between 1/c and c."""
    shift = 0.7
    for _ in range(50):
        records = rng.standard_normal((6, 3)) * rng.choice([0.1, 1.0, 10.0], (6, 1))
        other = records.copy()
        other[0] = rng.standard_normal(3)
        first, second = (queries.second_moment(each, norm=1.0, adjacency=REPLACE).value for each in (records, other))
        lower = np.linalg.inv(np.linalg.cholesky(first + shift**2 * np.eye(3)))
        ratios = np.linalg.eigvalsh(lower @ (second + shift**2 * np.eye(3)) @ lower.T)
        assert np.sum(np.abs(ratios - 1) > 1e-9) <= 2
        assert 1 / (1 + shift**-2) - 1e-9 <= ratios.min()
        assert ratios.max() <= 1 + shift**-2 + 1e-9


def test_the_exact_shift_keeps_the_budget_and_a_smaller_one_does_not(rng):
    answer, rows = moment(rng, norm=2.0), 100
    shift = jl.exact_shift(answer, BUDGET, rows)
    assert jl.delta(1.0, 2.0 / shift, rows) <= BUDGET.delta
    assert jl.delta(1.0, 2.0 / (shift * (1 - 1e-5)), rows) > BUDGET.delta
    assert 0.999 < jl.epsilon(BUDGET.delta, 2.0 / shift, rows) <= 1.0001
    published = jl.published_shift(4.0, BUDGET, rows)
    assert published > 100 * shift  # the theorem is true, and loose
    assert published == pytest.approx(4.0 * 16 * math.sqrt(100 * math.log(2000)) * math.log(1.6e6))
    assert jl.published_rows(0.1, 0.05) == 2952


def test_it_estimates_the_moment_with_the_spread_of_projections(rng):
    """The mean and the variance of a diagonal entry, each within 5 standard errors (6e-7)."""
    answer, shift, rows, draws = moment(rng), 2.0, 20, 4000
    found = np.array([jl.johnson_lindenstrauss(answer, shift, rows, rng) for _ in range(draws)])
    true = np.diag(answer.value)
    variance = 2 * (true + shift**2) ** 2 / rows
    diagonal = np.einsum("nii->ni", found)
    assert np.all(np.abs(diagonal.mean(0) - true) <= 5 * np.sqrt(variance / draws))
    # the fourth moment of a mean of squares is at most 3 + 12/rows times the squared variance
    assert np.all(np.abs(diagonal.var(0) / variance - 1) <= 5 * math.sqrt((2 + 12 / rows) / draws))


def test_other_sets_are_refused(rng):
    answer = queries.second_moment(rng.standard_normal((5, 2)), norm=1.0)
    with pytest.raises(InvalidInput, match="REPLACE"):
        jl.johnson_lindenstrauss(answer, 1.0, 10, rng)
    with pytest.raises(InvalidInput, match="REPLACE"):
        jl.exact_shift(answer, BUDGET, 10)
    with pytest.raises(InvalidInput, match="shift"):
        jl.johnson_lindenstrauss(moment(rng), 0.0, 10, rng)
