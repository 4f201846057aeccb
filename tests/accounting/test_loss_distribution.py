"""The privacy loss on a grid against closed forms, and in the hands of another accountant."""

import math

import numpy as np
import pytest

from matrixdp import Accountant, Budget, calibrate, certify, release
from matrixdp.accounting.loss_distribution import loss_distribution
from matrixdp.errors import InvalidInput
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee
from matrixdp.sensitivity import Counts, Frobenius


@pytest.mark.parametrize("mu", [0.05, 0.4, 3.0])
def test_gaussian_losses_are_those_of_the_closed_form(mu):
    """Never below, on the grid equal, and between its points at most what a chord of a convex curve adds."""
    losses = loss_distribution(Guarantee(GaussianProfile(mu), "add/remove"), step=1e-3)
    for epsilon in (0.0, 0.1, 0.5, 0.5005):
        true, found = float(gaussian.delta(mu, epsilon)), losses.delta(epsilon)
        assert true <= found <= true * (1 + 1e-3) + 2e-15
    # the loss has the law N(mu^2/2, mu^2)
    assert np.sum(losses.masses) + losses.infinite == pytest.approx(1, abs=1e-9)
    mean = losses.masses @ losses.losses
    assert mean == pytest.approx(mu**2 / 2, abs=1e-6)
    assert losses.masses @ (losses.losses - mean) ** 2 == pytest.approx(mu**2, rel=1e-4)


def test_dp_accounting_composes_it_as_the_accountant_does():
    certificate = certify(
        calibrate("analytic", shape=(3,), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6)), Frobenius(1.0)
    )
    ours = Accountant()
    ours.add(certificate, 10)
    theirs = loss_distribution(certificate).to_dp_accounting().self_compose(10).get_epsilon_for_delta(1e-6)
    assert ours.epsilon(1e-6) <= theirs * (1 + 1e-9)
    assert theirs <= ours.epsilon(1e-6) * 1.001
    # a planted fault: a tenth less noise passes
    short = Guarantee(GaussianProfile(certificate.mu / 0.9), "add/remove")
    assert loss_distribution(short).to_dp_accounting().self_compose(10).get_epsilon_for_delta(1e-6) > theirs * 1.05


@pytest.mark.parametrize("mechanism", ["laplace", "discrete"])
def test_discrete_noise_is_never_below_its_profile(mechanism):
    certificate = certify(calibrate(mechanism, shape=(4,), sensitivity=Counts(2), budget=Budget(1.0, 1e-5)), Counts(2))
    losses = loss_distribution(certificate)
    for epsilon in (0.0, 0.3, 0.9):
        assert certificate.delta(epsilon) <= losses.delta(epsilon) <= certificate.delta(epsilon) * 1.02 + 1e-12


def test_the_error_of_a_sampler_is_an_infinite_loss():
    out = release(np.zeros(2), Frobenius(1.0), Budget(1.0, 1e-6))
    losses = loss_distribution(out.certificate)
    assert losses.delta(1.0) >= out.certificate.delta(1.0)
    rough = Guarantee(out.certificate.profile, "add/remove", total_variation=1e-9)
    assert loss_distribution(rough).infinite >= 1e-9
    assert loss_distribution(rough).delta(1.0) >= rough.delta(1.0) - 1e-15


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, "1", None, 1e-12])
def test_steps_that_make_no_sense_are_refused(step):
    with pytest.raises(InvalidInput, match="step"):
        loss_distribution(Guarantee(GaussianProfile(1.0), "add/remove"), step)


def test_only_guarantees_have_a_loss():
    with pytest.raises(InvalidInput, match="certificate"):
        loss_distribution(1.0)
