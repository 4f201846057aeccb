"""R1SMG as published and as it is, the l2 mechanism, and the best spherical law."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import kstest, norm

from matrixdp import Budget, calibrate, certify, compare, release
from matrixdp.distributions import Gaussian, Spherical
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import GuaranteeViolated, InvalidInput, NotApplicable
from matrixdp.sensitivity import Counts, Frobenius, RankOne


@pytest.mark.parametrize(
    ("size", "epsilon", "delta", "variance", "true_delta"),
    [
        (10, 0.05, 1e-5, 983.66, 0.106),
        (100, 0.005, 1e-5, 532.65, 0.3635),
        (7921, 1e-5, 1e-7, 201055, 0.2166),
        (26010, 0.71, 3.33e-7, 2.82, 1.000),
    ],
)
def test_r1smg_has_the_published_scale_and_its_certificate_refutes_it(size, epsilon, delta, variance, true_delta):
    law = calibrate("r1smg", shape=(size,), sensitivity=Frobenius(1.0), budget=Budget(epsilon, delta))
    assert law.expected_squared_error() == pytest.approx(variance, rel=2e-3)
    certificate = certify(law, Frobenius(1.0))
    assert certificate.exact
    assert certificate.delta(epsilon) == pytest.approx(true_delta, abs=6e-4)
    row = compare((size,), Frobenius(1.0), Budget(epsilon, delta), mechanisms=["r1smg"]).rows[0]
    assert row.verdict == "violated"


def test_r1smg_needs_more_than_two_entries():
    with pytest.raises(NotApplicable, match="more than 2"):
        calibrate("r1smg", shape=(2,), sensitivity=Frobenius(1.0), budget=Budget(0.1, 1e-5))


def test_r1smg_distinguishes_neighbours_in_practice():
    """The nearer of two neighbouring values is nearly always the true one: no (0.71, 3.3e-7) guarantee allows that."""
    law = calibrate("r1smg", shape=(2000,), sensitivity=Frobenius(1.0), budget=Budget(0.71, 3.33e-7))
    neighbour = np.zeros(2000)
    neighbour[0] = 1.0
    rng = np.random.default_rng(0)
    right = sum(np.linalg.norm(z) < np.linalg.norm(z - neighbour) for z in (law.sample(rng) for _ in range(300)))
    assert right >= 0.98 * 300  # a (0.71, 3.33e-7) mechanism lets no test be right more than 67 % of the time


@pytest.mark.parametrize("rank", [1, 3, 12])
def test_rank_r_noise_is_tight_and_its_full_rank_is_the_gaussian(rank):
    budget, given = Budget(0.9, 1e-5), {"shape": (4, 3), "sensitivity": Frobenius(2.0)}
    law = calibrate("rank-r", budget=budget, rank=rank, **given)
    assert certify(law, Frobenius(2.0)).meets(budget)
    assert not certify(replace(law, scale=law.scale * (1 - 1e-6)), Frobenius(2.0)).meets(budget)
    iid = calibrate("analytic", budget=budget, **given).expected_squared_error()
    if rank == 12:
        assert law.expected_squared_error() == pytest.approx(iid, rel=1e-6)
    else:
        assert law.expected_squared_error() > 2 * iid
    # the radius is that of so many normal variables: 3 degrees of freedom have a mean square of 3
    assert law.expected_squared_error() == pytest.approx(rank * law.scale**2 / 2)


def test_release_refuses_rank_r_noise():
    """Its ideal law keeps the budget, but which floats come out can reveal the value."""
    with pytest.raises(GuaranteeViolated, match="floating-point-safe"):
        release(np.zeros(5), Frobenius(1.0), Budget(0.9, 1e-5), "rank-r", rank=2)


def test_rank_r_noise_has_a_rank_that_fits():
    for bad, error in ((0, InvalidInput), (1.5, InvalidInput), (13, NotApplicable)):
        with pytest.raises(error, match="rank"):
            calibrate("rank-r", shape=(4, 3), sensitivity=Frobenius(2.0), budget=Budget(0.9, 1e-5), rank=bad)


@pytest.mark.parametrize(("k", "p"), [(5.0, 2.0), (5.0, 1.0), (1.0, 2.0), (3.0, 1.5)])
def test_the_sampler_draws_the_law(k, p):
    """Kolmogorov-Smirnov on radius and one coordinate of the direction, at 1e-6; a radius 10 % short is told apart."""
    from scipy.stats import gengamma

    law, rng = Spherical((5,), k=k, p=p, scale=2.0), np.random.default_rng(1)
    draws = np.stack([law.sample(rng) for _ in range(20000)])
    radius = np.linalg.norm(draws, axis=1)
    exact = gengamma(k / p, p, scale=2.0).cdf
    assert kstest(radius, exact).pvalue > 1e-6
    assert kstest(0.9 * radius, exact).pvalue < 1e-6
    cosine = draws[:, 0] / radius
    z = (np.mean(cosine**2) - 1 / 5) / (np.std(cosine**2) / math.sqrt(len(cosine)))
    assert abs(z) < norm.isf(0.5e-6)


def test_spherical_law_has_its_moments():
    law = Spherical((2, 2), k=4.0, p=2.0, scale=math.sqrt(2) * 3.0)
    same = Gaussian(Isotropic((2, 2), 3.0))
    assert law.expected_squared_error() == pytest.approx(same.expected_squared_error())
    weights = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert law.expected_squared_error(weights) == pytest.approx(same.expected_squared_error(weights))
    assert law.root_mean_square == pytest.approx(3.0)
    with pytest.raises(InvalidInput, match="weights"):
        law.expected_squared_error(-weights)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("name", ["k", "p", "scale"])
def test_spherical_law_refuses_nonsense(name, bad):
    with pytest.raises(InvalidInput, match=name):
        Spherical((3,), **({"k": 3.0, "p": 2.0, "scale": 1.0} | {name: bad}))


def test_a_gaussian_written_as_a_spherical_law_has_the_gaussian_certificate():
    size, std = 12, 2.5
    spherical = certify(Spherical((3, 4), k=size, p=2.0, scale=math.sqrt(2) * std), Counts(2))
    gaussian = certify(Gaussian(Isotropic((3, 4), std)), Counts(2))
    for epsilon in (0.1, 1.0, 3.0):
        assert spherical.delta(epsilon) == pytest.approx(gaussian.delta(epsilon), rel=1e-6)
    assert spherical.mu is None
    assert np.linalg.norm(spherical.witness) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("sensitivity", [Frobenius(2.0), Counts(2), RankOne(1.0, relation="replace")], ids=str)
def test_l2_is_tight(sensitivity):
    budget = Budget(0.7, 1e-5)
    law = calibrate("l2", shape=(3, 3), sensitivity=sensitivity, budget=budget)
    assert certify(law, sensitivity).meets(budget)
    short = Spherical((3, 3), k=law.k, p=law.p, scale=law.scale * 0.9999)
    assert not certify(short, sensitivity).meets(budget)


@pytest.mark.slow
def test_spherical_is_never_worse_than_the_gaussian_and_far_better_in_low_dimension():
    budget = Budget(1.0, 1e-6)
    for size, share in ((1, 0.15), (3, 0.3), (10, 0.6), (400, 0.99)):
        given = {"shape": (size,), "sensitivity": Frobenius(1.0), "budget": budget}
        best = calibrate("spherical", **given).expected_squared_error()
        plain = calibrate("analytic", **given).expected_squared_error()
        l2 = calibrate("l2", **given).expected_squared_error()
        assert best <= min(plain, l2) * (1 + 1e-6)
        assert best <= share * plain


def test_slow_mechanisms_are_left_out_unless_named():
    rows = {row.mechanism: row for row in compare((3,), Frobenius(1.0), Budget(0.5, 1e-6))}
    assert "by name" in rows["spherical"].note
    named = compare((3,), Frobenius(1.0), Budget(0.5, 1e-6), mechanisms=["spherical"]).rows[0]
    assert named.verdict == "not float-safe"


def test_a_delta_that_r1smg_cannot_serve_does_not_stop_auto():
    given = {"shape": (3,), "sensitivity": Frobenius(1.0), "budget": Budget(1.0, 1e-300)}
    with pytest.raises(NotApplicable, match="no finite noise"):
        calibrate("r1smg", **given)
    assert isinstance(calibrate("auto", **given), Gaussian)
