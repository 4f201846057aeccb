"""The exact profile of spherical noise, against 30-digit values, closed forms, another formula and simulation."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from matrixdp.distributions import radius_moment
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy import gaussian
from matrixdp.privacy.spherical import Profile, best_member, scale_for

TOLERANCE = 1e-8
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "spherical.json").read_text())


def one_sided(truth, got):
    return truth <= got <= truth * (1 + TOLERANCE)


def golden(name):
    case = dict(GOLDEN[name])
    truth, epsilon = mp.mpf(case.pop("delta")), case.pop("epsilon")
    return Profile(**case), epsilon, truth


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    profile, epsilon, truth = golden(name)
    assert one_sided(truth, profile.delta(epsilon))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values_reject_a_scale_that_is_off_by_five_percent(name):
    profile, epsilon, truth = golden(name)
    for factor in (0.95, 1.05):
        assert not one_sided(truth, replace(profile, scale=factor * profile.scale).delta(epsilon))


R1SMG = [
    (10, 0.05, 983.66, 0.106),
    (100, 0.005, 532.65, 0.3635),
    (7921, 1e-5, 201055, 0.2166),
    (26010, 0.71, 2.82, 1.0),
]


@pytest.mark.parametrize(("dimension", "epsilon", "variance", "expected"), R1SMG)
def test_r1smg_at_its_published_noise(dimension, epsilon, variance, expected):
    delta = Profile(dimension, 1, 2, math.sqrt(2 * variance), 1).delta(epsilon)
    assert delta == pytest.approx(expected, abs=5e-4 if dimension == 10 else 5e-5)


def test_r1smg_calibrated_honestly_needs_half_a_trillion_times_the_energy_of_the_gaussian():
    scale = scale_for(7921, 1, 2, 1, 0.5, 1e-7)
    assert radius_moment(1, 2, scale, 2) / (7921 / gaussian.mu(0.5, 1e-7) ** 2) == pytest.approx(5e11, rel=0.05)


MU_EPSILON = [(0.24, 1), (1, 0.1), (1e-6, 1e-6), (10, 50), (0.1, 0.7), (1e-11, 0), (5, 0), (40, 3)]


@pytest.mark.parametrize("dimension", [1, 2, 3, 4, 11, 100, 10_001, 10**7])
@pytest.mark.parametrize(("mu", "epsilon"), MU_EPSILON)
def test_gaussian_in_any_dimension(dimension, mu, epsilon):
    truth = gaussian.delta(mu, epsilon)
    assert one_sided(truth * (1 - 1e-12), Profile(dimension, dimension, 2, math.sqrt(2) / mu, 1).delta(epsilon))


@pytest.mark.parametrize("ratio", [1e-3, 0.7, 20.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_laplace(ratio, share):
    epsilon = share * ratio
    truth = -math.expm1((epsilon - ratio) / 2)
    assert one_sided(truth * (1 - 1e-12), Profile(1, 1, 1, 1 / ratio, 1).delta(epsilon))


@pytest.mark.parametrize("scale", [1 / 3, 0.1, 7.7])
@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12, 1e-15])
def test_laplace_next_to_its_pure_epsilon(scale, gap):
    """There delta hangs on the last digits of s/c - epsilon: it stays one-sided, a few roundings of s/c above."""
    epsilon = 1 / scale * (1 - gap)
    with mp.workdps(40):
        truth = max(-mp.expm1((mp.mpf(epsilon) - 1 / mp.mpf(scale)) / 2), 0)
    assert truth <= Profile(1, 1, 1, scale, 1).delta(epsilon) <= truth * (1 + TOLERANCE) + 1e-14 / scale


@pytest.mark.parametrize("dimension", [1, 2, 30, 10**5])
def test_l2_mechanism_is_pure(dimension):
    profile = Profile(dimension, dimension, 1, 0.5, 1)
    assert profile.pure_epsilon == profile.epsilon(0) == 2
    assert profile.delta(2) == profile.delta(7) == 0
    assert profile.delta(2 - 1e-6) > 0
    assert profile.epsilon(1e-9) <= 2
    assert scale_for(dimension, dimension, 1, 1, 2, 0) == 0.5
    for k, p in [(dimension, 1.01), (0.99 * dimension, 1)]:
        assert Profile(dimension, k, p, 0.5, 1).epsilon(0) == math.inf


def test_pure_epsilon_is_never_rounded_down():
    for ratio in np.random.default_rng(1).uniform(0.1, 10, 200):
        exact = mp.mpf(1) / mp.mpf(float(ratio))
        for p in (1.0, 0.7):
            with mp.workdps(40):
                assert exact ** mp.mpf(p) <= Profile(3, 3, p, ratio, 1).pure_epsilon <= exact**p * (1 + 3e-15)
        scale = scale_for(3, 3, 1, 1, ratio, 0)
        assert Profile(3, 3, 1, scale, 1).delta(ratio) == 0


# Another formula --------------------------------------------------------------------------------------------


def by_balls(dimension, k, p, scale, radius, epsilon):
    """Noise of decreasing density is uniform in a random ball: delta is the expected share of it outside another ball.

    See tests/golden/spherical.py. In plain floats and with a plain rule it is good for five digits.
    """
    shape, s = k / p, radius / scale
    low, high = special.gammaincinv(shape, 1e-14), special.gammainccinv(shape + 1, 1e-14)
    edges = np.linspace(np.log(low), np.log(high), 601)
    nodes, weights = np.polynomial.legendre.leggauss(6)
    z = (edges[:-1, None] + np.diff(edges)[:, None] * (nodes + 1) / 2).ravel()
    weights = (np.diff(edges)[:, None] * weights / 2).ravel()
    singular = (1 - k / dimension) * np.exp(shape * z - np.exp(z) - special.gammaln(shape))
    regular = k / dimension * np.exp((shape + 1) * z - np.exp(z) - special.gammaln(shape + 1))

    inner = np.exp(z / p)
    step = np.zeros_like(z)  # log of the outer radius over the inner one, by bisection
    upper = np.log1p(epsilon / np.exp(z)) / p
    for _ in range(70):
        middle = (step + upper) / 2
        below = (dimension - k) * middle + np.exp(z) * np.expm1(p * middle) < epsilon
        step, upper = np.where(below, middle, step), np.where(below, upper, middle)
    outer = inner * np.exp(step)

    def cap(ball, distance):
        half = special.betainc((dimension + 1) / 2, 0.5, np.clip(1 - (distance / ball) ** 2, 0, 1)) / 2
        return np.where(distance >= 0, half, 1 - half)

    distance = s / 2 - inner**2 * np.expm1(2 * step) / (2 * s)
    outside = 1 - cap(inner, distance) - np.exp(dimension * step) * cap(outer, s - distance)
    outside = np.where(outer >= inner + s, 0, np.where(outer <= s - inner, 1, outside))
    return float(weights @ ((singular + regular) * outside))


@pytest.mark.parametrize("dimension", [1, 2, 7, 300, 10**6])
@pytest.mark.parametrize("share", [1, 0.6])
@pytest.mark.parametrize("p", [0.5, 1.1, 2, 4])
@pytest.mark.parametrize(("mu", "epsilon"), [(0.3, 0.5), (2.0, 1.5)])
def test_the_other_formula_agrees(dimension, share, p, mu, epsilon):
    k = min(max(share * dimension, 0.5 * p), dimension)
    scale = math.sqrt(dimension / radius_moment(k, p, 1, 2))  # one unit of variance an entry
    profile = Profile(dimension, k, p, scale, mu)
    assert profile.delta(epsilon) == pytest.approx(by_balls(dimension, k, p, scale, mu, epsilon), rel=1e-4, abs=1e-9)


# The supremum -----------------------------------------------------------------------------------------------


members = st.tuples(
    st.sampled_from([1, 2, 3, 5, 20, 500, 10**6]),
    st.floats(0, 1),
    st.floats(0.25, 8),
    st.floats(-3, 2),
    st.floats(0, 5),
)


@settings(max_examples=30, deadline=None)
@given(members)
def test_delta_grows_with_the_radius_and_falls_with_epsilon(member):
    dimension, share, p, log_radius, epsilon = member
    k = min(max(share * dimension, 0.5, p / 4), dimension)
    p = min(p, 4 * k)
    scale = math.sqrt(dimension / radius_moment(k, p, 1, 2))
    radii = 10**log_radius * np.array([0.5, 0.9, 1.0, 1.01, 1.5])
    deltas = [Profile(dimension, k, p, scale, radius).delta(epsilon) for radius in radii]
    assert all(0 <= delta <= 1 for delta in deltas)
    assert all(small <= large * (1 + TOLERANCE) for small, large in pairwise(deltas))
    wider = Profile(dimension, k, p, scale, radii[0]).delta(epsilon + 0.1)
    assert wider <= deltas[0] * (1 + TOLERANCE)


def test_why_k_above_the_dimension_is_refused():
    """Two humps on a line: a difference of one half distance is worse than one of the full distance."""
    x = np.linspace(-40, 40, 80_001)

    def total_variation(shift):
        density = np.abs(x) ** 49 * np.exp(-(x**2))
        moved = np.abs(x - shift) ** 49 * np.exp(-((x - shift) ** 2))
        return 0.5 * np.abs(density - moved).sum() / density.sum()

    assert total_variation(5.0) > 0.99
    assert total_variation(10.0) < 0.6
    with pytest.raises(NotCertifiable, match="k must be at most the dimension"):
        Profile(1, 50, 2, 1, 1)


# Simulation -------------------------------------------------------------------------------------------------


def simulated_interval(noise, radius, scale, k, p, epsilon):
    """Both directions of the divergence from one sample, as intervals that hold with probability 1 - 1e-6 together.

    Empirical Bernstein bounds (Maurer and Pontil, 2009), four one-sided ones of 2.5e-7 each: the values lie in [0, 1].
    """
    count, dimension = noise.shape
    r = np.linalg.norm(noise, axis=1)
    for sign in (1, -1):
        moved = np.sqrt(r**2 + radius**2 - 2 * sign * radius * noise[:, 0])
        loss = (dimension - k) * np.log(moved / r) + (moved / scale) ** p - (r / scale) ** p
        values = -np.expm1(np.minimum(epsilon - loss, 0))
        log_term = math.log(2 / 2.5e-7)
        half = math.sqrt(2 * values.var(ddof=1) * log_term / count) + 7 * log_term / (3 * (count - 1))
        yield values.mean() - half, values.mean() + half


def test_simulation_in_300_dimensions_accepts_the_profile_and_rejects_a_scale_off_by_five_percent():
    dimension, k, p, radius, epsilon = 300, 290.0, 1.2, 1.0, 0.3
    scale = math.sqrt(dimension / radius_moment(k, p, 1, 2))
    rng = np.random.default_rng(20240817)
    noise = rng.standard_normal((60_000, dimension))
    noise *= (scale * rng.gamma(k / p, size=60_000) ** (1 / p) / np.linalg.norm(noise, axis=1))[:, None]
    delta = Profile(dimension, k, p, scale, radius).delta(epsilon)
    smaller, larger = (Profile(dimension, k, p, factor * scale, radius).delta(epsilon) for factor in (0.95, 1.05))
    for low, high in simulated_interval(noise, radius, scale, k, p, epsilon):
        assert low <= delta <= high
        assert larger < low
        assert high < smaller


# Inverses ---------------------------------------------------------------------------------------------------

MEMBERS = [(1, 1, 1), (1, 0.7, 2), (2, 2, 1.1), (10, 10, 2), (10, 1, 2), (1000, 990, 1.2), (10**7, 10**7, 2)]


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("delta", [0.3, 1e-6, 1e-12])
def test_epsilon_is_the_least(member, delta):
    scale = math.sqrt(member[0] / radius_moment(member[1], member[2], 1, 2))
    profile = Profile(*member, scale, 0.4)
    epsilon = profile.epsilon(delta)
    assert profile.delta(epsilon) <= delta
    assert epsilon == 0 or profile.delta(epsilon * (1 - 1e-7)) > delta


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(("epsilon", "delta"), [(1, 1e-6), (0.01, 1e-12), (50, 1e-3), (0, 0.01)])
def test_scale_is_the_least(member, epsilon, delta):
    scale = scale_for(*member, 3, epsilon, delta)
    assert Profile(*member, scale, 3).delta(epsilon) <= delta
    assert Profile(*member, scale * (1 - 5e-9), 3).delta(epsilon) > delta


def test_scale_of_the_gaussian():
    scale = scale_for(50, 50, 2, 3, 1, 1e-6)
    truth = math.sqrt(2) * 3 / gaussian.mu(1, 1e-6)
    assert truth <= scale <= truth * (1 + 2e-9)


def test_without_delta_only_bounded_losses_will_do():
    assert scale_for(4, 4, 0.5, 1, 2, 0) == pytest.approx(0.25)
    for k, p, epsilon in [(4, 2, 1), (3, 1, 1), (4, 1, 0)]:
        with pytest.raises(NotCertifiable, match="needs k = dimension"):
            scale_for(4, k, p, 1, epsilon, 0)


def test_extreme_ratios():
    for k, p in [(3, 2), (3, 1), (0.5, 2), (3, 0.25), (3, 8)]:
        assert 1 - 1e-3 < Profile(3, k, p, 1, 1e30).delta(1) <= 1
        assert Profile(3, k, p, 1e30, 1).delta(1) < (1e-12 if k == 3 else 1e-9)
        assert Profile(3, k, p, 1, 1).delta(1e6) < 1e-30 or k < 3
    assert Profile(10**7, 1, 2, 1, 1).epsilon(1e-12) < 1e12
    assert Profile(2, 2, 2, 1, 1).delta(1e300) < 1e-30


# Moments and the search -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [2, 4, 6, 8])
@pytest.mark.parametrize(("k", "p"), [(1, 2), (0.5, 8), (3, 1), (40, 1.3), (10**7, 2), (9e6, 0.7)])
def test_radius_moments(k, p, order):
    with mp.workdps(40):
        truth = mp.mpf("1.7") ** order * mp.gammaprod([(mp.mpf(k) + order) / mp.mpf(p)], [mp.mpf(k) / mp.mpf(p)])
        assert abs(mp.mpf(radius_moment(k, p, 1.7, order)) / truth - 1) < 1e-12


def test_moments_of_known_laws():
    assert radius_moment(12, 2, math.sqrt(2) * 3, 2) == pytest.approx(12 * 9)  # Gaussian
    assert radius_moment(12, 1, 3, 2) == pytest.approx(12 * 13 * 9)  # l2 mechanism
    moment = {order: radius_moment(1, 2, 5, order) for order in (2, 4, 6, 8)}  # R1SMG: of the squared error L
    assert moment[8] / moment[4] ** 2 == pytest.approx(35 / 3)
    assert moment[6] / moment[4] ** 1.5 == pytest.approx(5 / math.sqrt(3))


@pytest.mark.parametrize(
    ("dimension", "epsilon", "delta", "share"),
    [
        (1, 1, 1e-6, 0.1121),
        (5, 1, 1e-6, 0.3263),
        (50, 0.5, 1e-7, 0.8436),
        (3, 0.1, 1e-3, 0.808),
        (10_001, 1, 1e-6, 1.0),
    ],
)
def test_best_member(dimension, epsilon, delta, share):
    best = best_member(dimension, 2.0, epsilon, delta)
    assert best.radius == 2
    assert best.delta(epsilon) <= delta
    error = radius_moment(best.k, best.p, best.scale, 2)
    analytic = 4 * dimension / gaussian.mu(epsilon, delta) ** 2
    assert error <= analytic * (1 + 1e-8)
    assert error / analytic == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 0.01), (0.1, 0.5), (3, 0.9), (50, 1e-12)])
def test_best_member_at_odd_budgets(epsilon, delta):
    best = best_member(1, 1.0, epsilon, delta)
    assert best.delta(epsilon) <= delta
    assert radius_moment(best.k, best.p, best.scale, 2) <= (1 + 1e-8) / gaussian.mu(epsilon, delta) ** 2


# Bad input --------------------------------------------------------------------------------------------------

BAD = [math.nan, math.inf, -1.0, 0.0, "1", None, True, 1j]
GOOD = {"dimension": 3, "k": 2.0, "p": 2.0, "scale": 1.0, "radius": 1.0}


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("name", GOOD)
def test_bad_members(name, bad):
    with pytest.raises(InvalidInput, match=name):
        Profile(**{**GOOD, name: bad})


def test_bad_arguments():
    profile = Profile(**GOOD)
    for bad in [math.nan, math.inf, -1.0, "1", None, True]:
        for call in (profile.delta, profile.epsilon, lambda x: scale_for(3, 2, 2, 1, x, 1e-6)):
            with pytest.raises(InvalidInput):
                call(bad)
        for call in (lambda x: scale_for(3, 2, 2, 1, 1, x), lambda x: best_member(3, 1, 1, x)):
            with pytest.raises(InvalidInput, match="delta"):
                call(bad)
    for delta in (1.0, 2.0):
        with pytest.raises(InvalidInput, match="delta"):
            profile.epsilon(delta)
    for k, p in [(0.4, 1), (1, 9), (1, 0.2), (0.5, 3)]:
        with pytest.raises(InvalidInput, match="k must be at least"):
            Profile(3, k, p, 1, 1)
    with pytest.raises(InvalidInput, match="radius / scale"):
        Profile(3, 3, 2, 1e-60, 1e60)
    with pytest.raises(InvalidInput, match="order"):
        radius_moment(1, 1, 1, -1)
