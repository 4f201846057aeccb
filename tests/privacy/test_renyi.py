"""Rényi divergences of certificates against closed forms and sums over the noise."""

import math

import numpy as np
import pytest

from matrixdp import Budget, calibrate, certify, release
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Diagonal
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import Counts, Frobenius, Vertices

BUDGET = Budget(1.0, 1e-5)


@pytest.mark.parametrize("order", [1.001, 2.0, 10.0, 500.0])
def test_gaussian_noise_has_the_closed_form(order):
    change, variances = np.array([1.0, 2.0]), np.array([4.0, 9.0])
    certificate = certify(Gaussian(Diagonal(np.sqrt(variances))), Vertices(change))
    exact = order / 2 * float(np.sum(change**2 / variances))
    assert exact <= certificate.renyi(order) <= exact * (1 + 1e-9)


@pytest.mark.parametrize("mechanism", ["laplace", "discrete-gaussian"])
@pytest.mark.parametrize("order", [1.5, 4.0, 30.0])
def test_discrete_noise_has_the_sum_over_its_cells(mechanism, order):
    law = calibrate(mechanism, shape=(1,), sensitivity=Counts(1), budget=BUDGET)
    profile = certify(law, Counts(1)).profile
    cells = np.arange(-4000, 4001.0)
    logs = -((np.abs(cells) / profile.scale_in_steps) ** profile.exponent)
    logs -= np.log(np.sum(np.exp(logs)))
    shift = profile.shift
    p, q = logs[shift:-shift], logs[: -2 * shift]
    terms = order * p + (1 - order) * q
    exact = (np.max(terms) + math.log(np.sum(np.exp(terms - np.max(terms))))) / (order - 1)
    assert exact * (1 - 1e-9) <= certify(law, Counts(1)).renyi(order) <= exact * (1 + 1e-6)


def test_infinite_where_no_bound_is_known():
    spherical = certify(calibrate("l2", shape=(3,), sensitivity=Frobenius(1.0), budget=BUDGET), Frobenius(1.0))
    assert spherical.renyi(2.0) == math.inf
    drawn = release(np.zeros(2), Frobenius(1.0), BUDGET).certificate
    assert drawn.total_variation > 0
    assert drawn.renyi(2.0) == math.inf


@pytest.mark.parametrize("order", [1.0, 0.5, -2.0, math.nan, "2", None])
def test_orders_that_make_no_sense_are_refused(order):
    certificate = certify(calibrate("analytic", shape=(2,), sensitivity=Frobenius(1.0), budget=BUDGET), Frobenius(1.0))
    with pytest.raises(InvalidInput, match="order"):
        certificate.renyi(order)
