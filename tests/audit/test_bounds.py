"""The bounds themselves: exact where they say so, and never on the wrong side of the truth."""

import math

import numpy as np
import pytest
from scipy import stats

from matrixdp.audit import bounds
from matrixdp.privacy import gaussian

FALSE_ALARM = 1e-6


@pytest.mark.parametrize("trials", [1, 7, 50, 50_000])
@pytest.mark.parametrize("level", [0.3, 0.01, 2.5e-7])
def test_binomial_bounds_solve_their_equations(trials, level):
    hits = np.unique(np.linspace(1, trials, 40).round().astype(int))
    lower = bounds.binomial_lower(hits, trials, level)
    np.testing.assert_allclose(stats.binom.sf(hits - 1, trials, lower), level, rtol=1e-6)
    upper = bounds.binomial_upper(hits - 1, trials, level)
    np.testing.assert_allclose(stats.binom.cdf(hits - 1, trials, upper), level, rtol=1e-6)
    assert bounds.binomial_lower(0, trials, level) == 0
    assert bounds.binomial_upper(trials, trials, level) == 1


@pytest.mark.parametrize("trials", [5, 60])
def test_binomial_bounds_hold_as_often_as_stated(trials):
    """By enumeration, at every probability of a grid; without the stated margin they would not."""
    hits, level = np.arange(trials + 1), 0.05
    for truth in np.linspace(0.003, 0.997, 200):
        chances = stats.binom.pmf(hits, trials, truth)
        assert chances[bounds.binomial_lower(hits, trials, level) > truth].sum() <= level * (1 + 1e-9)
        assert chances[bounds.binomial_upper(hits, trials, level) < truth].sum() <= level * (1 + 1e-9)
    assert stats.binom.pmf(hits, trials, 0.5)[hits / trials > 0.5].sum() > level


def test_the_two_bounds_agree_on_what_refutes_a_claim():
    rng = np.random.default_rng(0)
    for _ in range(500):
        likely, unlikely, delta = rng.uniform(0, 1), rng.uniform(0.001, 1), rng.uniform(0, 0.3)
        epsilon = rng.exponential(1)
        by_epsilon = bounds.epsilon_bound(likely, unlikely, delta) > epsilon
        assert by_epsilon == (bounds.delta_bound(likely, unlikely, epsilon) > delta)
    assert bounds.delta_bound(1.0, 1e-12, 1e5) < 0
    assert bounds.epsilon_bound(0.1, 0.2, 0.3) == -math.inf


def test_the_chosen_events_are_nearly_the_best_there_are():
    """For two normal laws the best events are known; the chosen ones come close, in either direction."""
    rng, mu, epsilon, delta = np.random.default_rng(1), 1.0, 1.0, 0.05
    here, there = rng.standard_normal((2, 400_000))
    for scores in ((here, there + mu), (there + mu, here)):
        events = bounds.choose_events({"score": scores}, epsilon, delta, level=1e-3)
        found = bounds.bounds_from_events(events, {"score": scores}, epsilon, delta, level=1e-3)
        assert found[0] == pytest.approx(gaussian.epsilon(mu, delta), rel=0.05)
        assert found[1] == pytest.approx(gaussian.delta(mu, epsilon), rel=0.05)


def test_a_statistic_that_tells_more_is_preferred():
    rng = np.random.default_rng(2)
    pairs = {
        "blind": tuple(rng.standard_normal((2, 500))),
        "sharp": (rng.standard_normal(500), 2 + rng.standard_normal(500)),
    }
    assert {event.statistic for event in bounds.choose_events(pairs, 0.5, 0.01, 1e-3)} == {"sharp"}


@pytest.mark.parametrize(("size", "draws"), [(1, 40), (4, 40), (30, 100)])
def test_mu_from_scatter_is_exact(size, draws):
    """At confidence 0.9 it exceeds the truth in one case of ten: neither more nor less often than chance explains."""
    rng, repeats, confidence = np.random.default_rng(3), 2000, 0.9
    factor, difference = rng.standard_normal((size, size)), rng.standard_normal(size)
    truth = float(np.linalg.norm(np.linalg.solve(factor, difference)))

    def above(factor):
        count = 0
        for noise in rng.standard_normal((repeats, draws, size)):
            centred = (noise - noise.mean(axis=0)) @ factor.T
            lower = bounds.mu_from_scatter(centred.T @ centred, draws, difference, difference, confidence)
            count += lower > truth
        return count

    few, many = stats.binom.isf([1 - FALSE_ALARM / 2, FALSE_ALARM / 2], repeats, 1 - confidence)
    assert few <= above(factor) <= many
    assert above(0.95 * factor) > many  # noise that is 5 % short is told apart


def test_noise_without_a_full_scatter_is_measured_along_the_weights():
    noise = np.random.default_rng(4).standard_normal(1000)
    flat = np.outer(noise, [1.0, 1.0])
    difference, weights = np.array([1.0, 1.0]), np.array([0.5, 0.5])
    lower = bounds.mu_from_scatter(flat.T @ flat, 1000, difference, weights, 0.99)
    assert 0.9 < lower < 1
    assert bounds.mu_from_scatter(np.zeros((2, 2)), 1000, difference, weights, 0.99) == math.inf
    assert bounds.gaussian_bounds(math.inf, 1.0, 1e-6) == (math.inf, 1.0)
