"""The auditor on trial: how often it rejects the innocent, on pure noise and on claims that are exactly tight."""

import math

import numpy as np
import pytest
from scipy import stats
from threadpoolctl import threadpool_limits

from matrixdp import Budget, calibrate
from matrixdp.audit import audit, audit_law, audit_scores, bounds
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import Frobenius

# Audits are run at this confidence, so that a rate above what it allows would show.
CONFIDENCE = 0.95
FALSE_ALARM = 1e-6


@pytest.fixture(autouse=True)
def one_thread():
    """Many small fits are faster without threads."""
    with threadpool_limits(1):
        yield


def most(audits):
    """How many audits of the innocent may reject, except with probability FALSE_ALARM."""
    return stats.binom.isf(FALSE_ALARM, audits, 1 - CONFIDENCE)


def cauchy(rng, size):
    return rng.standard_cauchy((2, size))


def normal(rng, size):
    return rng.standard_normal((2, size))


def bits(rng, size):
    return rng.integers(0, 2, (2, size)).astype(float)


@pytest.mark.parametrize(("size", "audits"), [(50, 400), (50_000, 40)])
@pytest.mark.parametrize("scores", [normal, cauchy, bits])
def test_null_scores(scores, size, audits):
    """Scores that know nothing keep even (0, 0): any bound above 0 is a false alarm, and a large one is a bug."""
    rng = np.random.default_rng(0)
    results = [audit_scores(*scores(rng, size), 0, 0, confidence=CONFIDENCE, rng=rng) for _ in range(audits)]
    assert sum(result.rejected for result in results) <= most(audits)
    assert max(result.epsilon_lower for result in results) < (1.0 if size == 50 else 0.05)
    strict = [audit_scores(*scores(rng, size), 0, 0, rng=rng) for _ in range(audits // 4)]
    assert not any(result.rejected for result in strict)


def tight_bits(rng, size, epsilon=1.0):
    """Randomised response, which keeps (epsilon, 0) and not a bit less."""
    truth = rng.random((2, size)) < math.exp(epsilon) / (1 + math.exp(epsilon))
    return truth[0].astype(float), 1.0 - truth[1]


@pytest.mark.parametrize("size", [50, 2000])
def test_a_claim_that_is_exactly_tight(size, monkeypatch):
    audits = 400

    def rejected(epsilon=1.0):
        rng = np.random.default_rng(1)
        scores = (tight_bits(rng, size, epsilon) for _ in range(audits))
        return sum(audit_scores(*pair, 1.0, 0, confidence=CONFIDENCE, rng=rng).rejected for pair in scores)

    assert rejected() <= most(audits)
    if size == 2000:
        assert rejected(epsilon=1.5) > most(audits)  # a claim that is false is seen
    for name in ("binomial_lower", "binomial_upper"):
        monkeypatch.setattr(bounds, name, lambda hits, trials, level: np.asarray(hits) / trials + 1e-9)
    assert rejected() > most(audits)  # an auditor that trusts plain frequencies fails this very test


@pytest.mark.parametrize("statistic", ["linear", "radial", "learned"])
@pytest.mark.parametrize("samples", [40, 400])
def test_tight_gaussian_noise_in_a_black_box(statistic, samples):
    """Statistics that are learned from the outputs do not find what is not there."""
    rng, audits = np.random.default_rng(2), 100
    value, neighbour = np.zeros(5), np.eye(5)[0]
    std = 1 / gaussian.mu(1.0, 0.1)
    rejected = sum(
        audit(
            lambda given: given + std * rng.standard_normal(5),
            value,
            neighbour,
            1.0,
            0.1,
            samples=samples,
            confidence=CONFIDENCE,
            statistic=statistic,
        ).rejected
        for _ in range(audits)
    )
    assert rejected <= most(audits)


@pytest.mark.parametrize("samples", [20, 200])
def test_the_gaussian_method_alarms_exactly_as_often_as_stated(samples):
    rng, audits, budget = np.random.default_rng(3), 400, Budget(1.0, 1e-6)
    law = calibrate("analytic", shape=(2, 3), sensitivity=Frobenius(1.0), budget=budget)
    rejected = sum(
        audit_law(law, Frobenius(1.0), budget, samples=samples, confidence=CONFIDENCE, rng=rng).rejected
        for _ in range(audits)
    )
    assert stats.binom.isf(1 - FALSE_ALARM, audits, 1 - CONFIDENCE) <= rejected <= most(audits)


def test_sorted_scores_do_no_harm():
    rng = np.random.default_rng(4)
    pair = np.sort(rng.standard_normal((2, 4000)), axis=1)
    before = pair.copy()
    assert not audit_scores(pair[0], pair[1][::-1], 0, 0, rng=rng).rejected
    np.testing.assert_array_equal(pair, before)
