"""The bootstrap of post-processings: its coverage, and where it is refused."""

import math

import numpy as np
import pytest
import scipy

from matrixdp import Budget, Counts, Frobenius, release
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.postprocess import clip, low_rank, nearest_psd, nonnegative, symmetrise

BUDGET = Budget(1.0, 1e-6)
FALSE_ALARM = 1e-6


def test_the_bootstrap_covers_where_post_processing_is_smooth():
    rng = np.random.default_rng(9)
    directions = np.linalg.qr(rng.standard_normal((12, 2)))[0]
    cases = [
        (low_rank, (2,), 400 * directions @ np.diag([3.0, 2.0]) @ directions.T),
        (nearest_psd, (), 500 * np.eye(12)),
        (symmetrise, (), np.zeros((12, 12))),
        (nonnegative, (1e6,), np.full((12, 12), 1e6 / 144)),
        (clip, (0.0, 1000.0), np.full((12, 12), 500.0)),
    ]
    for function, arguments, value in cases:
        law, truth, hits = Gaussian(Isotropic((12, 12), 5.0)), function(value, *arguments), []
        for _ in range(30):
            out = release(value, Frobenius(1.0), BUDGET, law)
            found = out.bootstrap(function, *arguments, level=0.9, draws=199, rng=rng)
            hits.append(np.mean(((found.low <= truth) & (truth <= found.high))[np.triu_indices(12)]))
        # entries are correlated, so that the spread between releases is measured; 30 of them, t-distributed
        reach = scipy.stats.t.ppf(1 - FALSE_ALARM / 2, 29) * np.std(hits, ddof=1) / math.sqrt(30)
        assert abs(np.mean(hits) - 0.9) <= reach + 0.02  # 0.02 for curvature and for 199 draws
        assert np.mean(hits) > 0.82


def test_the_bootstrap_is_refused_where_its_coverage_is_not_valid():
    law, rng = Gaussian(Isotropic((6, 6), 5.0)), np.random.default_rng(10)
    at_zero = release(np.zeros((6, 6)), Frobenius(1.0), BUDGET, law)
    for function, arguments in [
        (nonnegative, ()),
        (nonnegative, (10.0,)),
        (nearest_psd, ()),
        (clip, (0, 9)),
        (low_rank, (1,)),
    ]:
        with pytest.raises(NotApplicable, match="no valid bootstrap here"):
            at_zero.bootstrap(function, *arguments, rng=rng)
    with pytest.raises(NotApplicable, match="symmetrise, clip"):
        at_zero.bootstrap(np.max)
    with pytest.raises(InvalidInput, match="draws must be at least"):
        at_zero.bootstrap(symmetrise, level=0.999, draws=100)
    with pytest.raises(InvalidInput, match="level"):
        at_zero.bootstrap(symmetrise, level=2.0)
    floored = release(np.full(5, 99.5), Counts(1), BUDGET, "laplace")
    with pytest.raises(NotApplicable, match="floored"):
        floored.bootstrap(nonnegative)
    whole = release(np.full(5, 99), Counts(1), BUDGET, "laplace")
    found = whole.bootstrap(nonnegative, rng=rng)
    assert np.all((found.low <= whole.value) & (whole.value <= found.high))


def test_what_the_refusal_prevents():
    """The largest of ten thousand equal entries: a bootstrap at 90 % would never cover it."""
    rng = np.random.default_rng(11)
    for _ in range(20):
        value = rng.standard_normal(10_000)
        again = np.max(value + rng.standard_normal((99, 10_000)), axis=1)
        assert 2 * np.max(value) - np.quantile(again, 0.95) > 0.0
