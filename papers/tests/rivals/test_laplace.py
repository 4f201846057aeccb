"""The Laplace and exponential mechanisms: l1 sensitivities, exact ratios, and an audit that catches half the noise."""

import math

import numpy as np
import pytest
from scipy import stats

from cases import SHAPE
from matrixdp.audit import audit
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Vertices
from matrixdp_papers.rivals.laplace import exponential, l1_radius, laplace

BOX = np.array([0.5, 1.0, 2.0])
RADII = {
    "counts": (Counts(2, 1.5), 3.0),
    "counts of few cells": (Counts(20), 9.0),
    "entrywise": (Entrywise(np.arange(1.0, 10).reshape(3, 3)), 45.0),
    "frobenius": (Frobenius(2.0), 6.0),
    "one column": (OneColumn(2.0), 2 * math.sqrt(3)),
    "one row in a box": (OneRow(low=0.0, high=BOX), 3.5),
    "rank one": (RankOne(2.0), 12.0),
    "vertices": (Vertices(np.eye(3), np.full((3, 3), -1.0)), 9.0),
}


@pytest.mark.parametrize("name", RADII)
def test_l1_radius_is_the_largest_sum_of_absolute_entries(name):
    sensitivity, exact = RADII[name]
    got = l1_radius(sensitivity, SHAPE)
    assert exact <= got <= exact * (1 + 1e-10)


def test_rank_one_replace_is_a_bound():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 2000, 3))
    x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, y))
    differences = np.einsum("ni,nj->nij", x, x) - np.einsum("ni,nj->nij", y, y)
    assert np.abs(differences).sum(axis=(1, 2)).max() <= l1_radius(RankOne(1.0, "replace"), SHAPE)


def test_noise_has_the_laplace_law():
    """KS at 1e-6; a scale 10 % off is rejected too."""
    noise = laplace(np.zeros(50_000), Counts(2), 0.5, rng=np.random.default_rng(1))
    assert stats.kstest(noise, stats.laplace(scale=4.0).cdf).pvalue > 1e-6
    assert stats.kstest(noise, stats.laplace(scale=3.6).cdf).pvalue < 1e-6


@pytest.mark.parametrize(("spent", "rejected"), [(1.0, False), (2.0, True)])
def test_audit(spent, rejected):
    """The claim epsilon 1 stands, and falls when the noise is half as large (false alarms: 1e-6)."""
    rng = np.random.default_rng(2)
    found = audit(
        lambda x: laplace(x, Counts(1), spent, rng=rng), np.array([3.0, 0.0]), np.array([4.0, 0.0]), 1.0, 0.0,
        samples=20_000, statistic="linear",
    )  # fmt: skip
    assert found.rejected is rejected
    assert found.epsilon_lower > 0.8 * spent


def test_exponential_mechanism_has_its_law():
    """Chi-square at 1e-6; twice the rate is rejected too."""
    scores, draws = np.array([0.0, 1.0, 2.0, -3.0]), 20_000
    rng = np.random.default_rng(3)
    seen = np.bincount([exponential(scores, 2.0, 1.5, rng=rng) for _ in range(draws)], minlength=4)
    for rate, agrees in ((1.5 / 4, True), (1.5 / 2, False)):
        law = np.exp(rate * scores)
        assert (stats.chisquare(seen, draws * law / law.sum()).pvalue > 1e-6) == agrees


def test_exponential_mechanism_with_scores_of_any_size():
    assert exponential([-1e308, 1e308], 1.0, 1.0) == 1
    assert exponential([1e300, 0.0, -1e300], 1e-3, 5.0) == 0
    assert exponential([7.0], 1.0, 1.0) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0, "1", None, True])
def test_bad_numbers(bad):
    for call in (
        lambda: laplace(np.zeros(2), Counts(1), bad),
        lambda: exponential(np.zeros(2), bad, 1.0),
        lambda: exponential(np.zeros(2), 1.0, bad),
        lambda: laplace(np.zeros(2), bad, 1.0),
    ):
        with pytest.raises(InvalidInput):
            call()


def test_bad_arguments():
    with pytest.raises(InvalidInput, match="noise scale"):
        laplace(np.zeros(2), Counts(1), 1e-320)
    with pytest.raises(InvalidInput, match="scores"):
        exponential([0.0, np.nan], 1.0, 1.0)
    with pytest.raises(InvalidInput, match="value"):
        laplace([np.nan], Counts(1), 1.0)
    with pytest.raises(InvalidInput, match="rng"):
        laplace([1.0], Counts(1), 1.0, rng=3)
