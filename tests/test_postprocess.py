"""Post-processing: projections are optimal, idempotent and of use; shrinkage beats the raw release where it should.

The errors compared are means over hundreds of seeded releases; each bound lies 20 standard errors or more from what is
seen, so another seed would fail with a chance far below 1e-6.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, minimize

from matrixdp import postprocess
from matrixdp.errors import InvalidInput
from matrixdp.postprocess import clip, low_rank, nearest_psd, nonnegative, soft_threshold, symmetrise

rng = np.random.default_rng(0)
FACTOR = rng.standard_normal((8, 2))
PSD = FACTOR @ FACTOR.T
COUNTS = np.concatenate([rng.integers(0, 200, 10), np.zeros(90)]).reshape(10, 10)
SPARSE = np.where(rng.random((30, 30)) < 0.02, 50.0, 0.0)
FRACTIONS = rng.random((10, 10))

# name: (true matrix, std of the noise, post-processing, the largest share of the raw squared error that may remain)
GAINS = {
    "symmetrise": (PSD, 1.0, symmetrise, 0.7),
    "clip": (FRACTIONS, 1.0, lambda A: clip(A, 0, 1), 0.5),
    "nearest_psd": (PSD, 1.0, nearest_psd, 0.6),
    "low_rank": (PSD, 0.1, lambda A: low_rank(A, 2), 0.6),
    "nonnegative": (COUNTS, 5.0, nonnegative, 0.7),
    "nonnegative with total": (COUNTS, 5.0, lambda A: nonnegative(A, total=COUNTS.sum()), 0.45),
    "soft_threshold": (SPARSE, 1.0, lambda A: soft_threshold(A, 1.0), 0.5),
}


@pytest.mark.parametrize("name", GAINS)
def test_the_error_falls_on_a_fitting_matrix(name):
    truth, std, process, share = GAINS[name]
    draws = np.random.default_rng(1)
    raw = processed = 0.0
    for _ in range(200):
        noise = std * draws.standard_normal(truth.shape)
        raw += float(np.sum(noise**2))
        processed += float(np.sum((process(truth + noise) - truth) ** 2))
    assert processed <= share * raw


def test_projections_never_move_away_from_the_set():
    """A projection onto a convex set that holds the truth cannot raise the error, draw by draw."""
    draws = np.random.default_rng(2)
    cases = [(PSD, symmetrise), (PSD, nearest_psd), (COUNTS, nonnegative)]
    cases.append((COUNTS, lambda A: nonnegative(A, COUNTS.sum())))
    cases.append((FRACTIONS, lambda A: clip(A, 0, 1)))
    for truth, process in cases:
        for _ in range(50):
            noisy = truth + 3 * draws.standard_normal(truth.shape)
            assert np.linalg.norm(process(noisy) - truth) <= np.linalg.norm(noisy - truth) * (1 + 1e-12)


MATRIX = np.random.default_rng(3).standard_normal((5, 5))
PROJECTIONS = {
    "symmetrise": symmetrise,
    "clip": lambda A: clip(A, -0.5, 0.5),
    "nearest_psd": nearest_psd,
    "low_rank": lambda A: low_rank(A, 2),
    "nonnegative": nonnegative,
    "nonnegative with total": lambda A: nonnegative(A, total=3.0),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_are_idempotent_and_leave_their_input_alone(name):
    given_matrix = MATRIX.copy()
    once = PROJECTIONS[name](given_matrix)
    np.testing.assert_array_equal(given_matrix, MATRIX)
    assert not np.array_equal(once, MATRIX)
    np.testing.assert_allclose(PROJECTIONS[name](once), once, atol=1e-12)


def test_nearest_psd_is_optimal():
    """Moreau: A = P - N with P, N positive semidefinite and P N = 0, for the symmetric part; the rest is orthogonal."""
    nearest = nearest_psd(MATRIX)
    np.testing.assert_array_equal(nearest, nearest.T)
    negative = nearest - (MATRIX + MATRIX.T) / 2
    assert np.linalg.eigvalsh(nearest).min() >= -1e-12
    assert np.linalg.eigvalsh(negative).min() >= -1e-12
    assert abs(np.sum(nearest * negative)) <= 1e-12
    distance = np.linalg.norm(nearest - MATRIX)
    found = minimize(lambda f: np.sum((f.reshape(5, 5) @ f.reshape(5, 5).T - MATRIX) ** 2), MATRIX.ravel())
    assert distance**2 == pytest.approx(found.fun, rel=1e-6)


def test_low_rank_is_optimal():
    for rank in (1, 2, 5):
        nearest = low_rank(MATRIX, rank)
        assert np.linalg.matrix_rank(nearest) == rank
        values = np.linalg.svd(MATRIX, compute_uv=False)
        assert np.sum((nearest - MATRIX) ** 2) == pytest.approx(np.sum(values[rank:] ** 2), abs=1e-12)
    start = np.random.default_rng(4).standard_normal(10)
    found = minimize(lambda f: np.sum((np.outer(f[:5], f[5:]) - MATRIX) ** 2), start)
    assert np.sum((low_rank(MATRIX, 1) - MATRIX) ** 2) <= found.fun + 1e-9
    assert low_rank(MATRIX[:2], 1).shape == (2, 5)


reals = st.one_of(st.floats(-100, 100), st.sampled_from([1e308, -1e308, 0.0, 1e-300]))


@settings(max_examples=200, deadline=None)
@given(values=st.lists(reals, min_size=1, max_size=8).map(np.array), total=st.floats(0, 1000))
def test_nonnegative_with_total_meets_the_kkt_conditions(values, total):
    """One threshold for all entries above 0, and no entry at 0 lies above it."""
    nearest = nonnegative(values, total)
    assert np.all(nearest >= 0)
    assert np.sum(nearest) == pytest.approx(total, rel=1e-12)
    kept = nearest > 0
    if not np.any(kept):
        assert total == 0
        return
    shifted = np.maximum(values / 4 - values.max() / 4, -1e4) * 4  # a common shift; quarters so as not to overflow
    thresholds = shifted[kept] - nearest[kept]
    assert np.ptp(thresholds) <= 1e-9 * (1 + total)
    assert np.all(shifted[~kept] <= thresholds.min() + 1e-9 * (1 + total))


def test_nonnegative_with_total_agrees_with_an_optimiser():
    values = np.array([0.9, -0.4, 0.3, 0.2])
    found = minimize(
        lambda x: np.sum((x - values) ** 2),
        np.full(4, 0.5),
        bounds=[(0, None)] * 4,
        constraints=[LinearConstraint(np.ones(4), 2.0, 2.0)],
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(nonnegative(values, 2.0), found.x, atol=1e-6)
    np.testing.assert_allclose(nonnegative([3.0, 1.0], 1.0), [1.0, 0.0])
    np.testing.assert_allclose(nonnegative([[0.5, 0.5]], 2.0), [[1.0, 1.0]])
    np.testing.assert_array_equal(nonnegative([1.0, -2.0]), [1.0, 0.0])
    np.testing.assert_array_equal(nonnegative([1.0, 2.0], 0), [0.0, 0.0])


def test_soft_threshold_by_hand():
    np.testing.assert_array_equal(soft_threshold([3.0, -3.0, 0.5], 1.0, threshold=1.0), [2.0, -2.0, 0.0])
    np.testing.assert_array_equal(soft_threshold([3.0, -3.0, 0.5], 1.0, threshold=0.0), [3.0, -3.0, 0.5])
    step = 2 * np.sqrt(2 * np.log(4))
    np.testing.assert_allclose(soft_threshold([[9.0, -9.0], [1.0, 0.0]], 2.0), [[9 - step, step - 9], [0, 0]])
    assert soft_threshold([5.0], 1.0) == [5.0]


def test_arrays_of_bounds():
    np.testing.assert_array_equal(clip([5.0, -5.0], [0, -1], [1, 1]), [1.0, -1.0])
    np.testing.assert_array_equal(clip([5.0, -5.0], 2, 2), [2.0, 2.0])
    np.testing.assert_array_equal(symmetrise([[0.0, 1e308], [1.5e308, 0.0]]), [[0.0, 1.25e308], [1.25e308, 0.0]])


BAD_MATRICES = [
    np.array([[np.nan]]),
    np.array([[np.inf]]),
    np.zeros((0, 0)),
    np.ones((2, 2, 2)),
    [["a"]],
    None,
    1.0,
    [[1j]],
]
ONE_ARGUMENT = {
    "symmetrise": symmetrise,
    "clip": lambda A: clip(A, 0, 1),
    "nearest_psd": nearest_psd,
    "low_rank": lambda A: low_rank(A, 1),
    "nonnegative": nonnegative,
    "nonnegative with total": lambda A: nonnegative(A, 1.0),
    "soft_threshold": lambda A: soft_threshold(A, 1.0),
}


@pytest.mark.parametrize("bad", BAD_MATRICES, ids=repr)
@pytest.mark.parametrize("name", ONE_ARGUMENT)
def test_bad_matrices(name, bad):
    with pytest.raises(InvalidInput, match="matrix"):
        ONE_ARGUMENT[name](bad)


BAD_ARGUMENTS = {
    "symmetrise shape": (lambda: symmetrise(np.ones((2, 3))), "square"),
    "symmetrise vector": (lambda: symmetrise(np.ones(2)), "dimensions"),
    "psd shape": (lambda: nearest_psd(np.ones((2, 3))), "square"),
    "clip reversed": (lambda: clip(MATRIX, 1, 0), "low must be at most high"),
    "clip NaN": (lambda: clip(MATRIX, np.nan, 1), "low"),
    "clip shape": (lambda: clip(MATRIX, 0, [1, 2]), "high"),
    "rank 0": (lambda: low_rank(MATRIX, 0), "rank"),
    "rank 6": (lambda: low_rank(MATRIX, 6), "rank must be at most 5"),
    "rank 1.5": (lambda: low_rank(MATRIX, 1.5), "rank"),
    "rank vector": (lambda: low_rank(np.ones(3), 1), "dimensions"),
    "total negative": (lambda: nonnegative(MATRIX, -1.0), "total"),
    "total NaN": (lambda: nonnegative(MATRIX, np.nan), "total"),
    "soft_threshold std": (lambda: soft_threshold(MATRIX, -1.0), "std"),
    "soft_threshold threshold": (lambda: soft_threshold(MATRIX, 1.0, threshold=-1.0), "threshold"),
    "soft_threshold NaN": (lambda: soft_threshold(MATRIX, 1.0, threshold=np.nan), "threshold"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name):
    call, message = BAD_ARGUMENTS[name]
    with pytest.raises(InvalidInput, match=message):
        call()


def test_every_function_is_covered_by_the_tables():
    public = {name for name, f in vars(postprocess).items() if getattr(f, "__module__", "") == postprocess.__name__}
    assert {name for name in public if not name.startswith("_")} == {name.split(" ")[0] for name in ONE_ARGUMENT}
    assert {name.split(" ")[0] for name in GAINS} == {name.split(" ")[0] for name in ONE_ARGUMENT}
