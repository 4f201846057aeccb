"""The law of ||Z||^2: exact moments against simulation, and the figures of the R1SMG paper."""

import math

import numpy as np
import pytest

from cases import COVARIANCES
from matrixdp.distributions import Gaussian, Spherical
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput
from matrixdp_papers.accuracy_loss import AccuracyLoss, accuracy_loss

LAWS = {name: Gaussian(case.covariance) for name, case in COVARIANCES.items()} | {
    "r1smg": Spherical((3, 3), k=1.0, p=2.0, scale=1.0),
    "l2": Spherical((3, 3), k=9.0, p=1.0, scale=0.5),
}


@pytest.mark.parametrize("name", LAWS)
def test_exact_moments_agree_with_simulation(name):
    """Each within 5 standard errors (false alarm about 6e-7 each); noise 5 % too large is told apart by the mean."""
    law, draws = LAWS[name], 40_000
    rng = np.random.default_rng(3)
    losses = np.array([np.sum(np.square(law.sample(rng))) for _ in range(draws)])
    exact, seen = accuracy_loss(law), AccuracyLoss(*(float(np.mean(losses**n)) for n in (1, 2, 3, 4)))
    deviation = math.sqrt(exact.variance / draws)
    assert abs(seen.mean - exact.mean) < 5 * deviation
    assert abs(1.05**2 * seen.mean - exact.mean) > 5 * deviation
    assert abs(seen.second - exact.second) < 5 * math.sqrt((exact.fourth - exact.second**2) / draws)
    assert seen.kurtosis == pytest.approx(exact.kurtosis, rel=0.35)
    assert seen.skewness == pytest.approx(exact.skewness, rel=0.15)


def test_the_papers_figures_for_rank_one_noise():
    loss = accuracy_loss(Spherical((89, 89), k=1.0, p=2.0, scale=3.0))
    assert loss.kurtosis == pytest.approx(35 / 3)
    assert loss.skewness == pytest.approx(5 / math.sqrt(3))
    assert loss.mean == pytest.approx(4.5)
    assert loss.central_kurtosis == pytest.approx(15.0)  # chi-square with one degree of freedom


def test_isotropic_noise_is_a_chi_square():
    loss = accuracy_loss(Gaussian(Isotropic((4, 5), 2.0)))
    assert loss.mean == pytest.approx(4 * 20)
    assert loss.variance == pytest.approx(16 * 2 * 20)
    assert loss.central_kurtosis == pytest.approx(3 + 12 / 20)


def test_bad_input():
    with pytest.raises(InvalidInput):
        accuracy_loss(1.0)
