"""The noise of a stream: that of the whole, or of one part after the other where it has no end.

**Without an end.** `steps=None` works in parts of 32, 64, 128, ... days, each with the square-root strategy at the same
mu. A record takes part once, hence in one part; the other parts have the same law with and without it, given what was
released before, so the guarantee of all of them is that of the worst part. The total of day t has at most log2(t)
noises in it, each with a standard deviation of about log(t)/pi + 1 units: its error grows as log(t)^(3/2).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp._check import Shape
from matrixdp.adjacency import Adjacency
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic, OverTime
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.mechanisms import RECIPES, calibrate
from matrixdp.pipeline import SAMPLER_SHARE, sized_for_budget, sized_for_mu
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate, check_releasable
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee
from matrixdp.sensitivity import Participation

FIRST_PART = 32
"""Days of the first part of a stream without an end; each part is twice as long as the one before."""


def of_whole(
    shape: Shape, sensitivity: Participation, budget: Budget, workload: Any, *, mechanism: str, **options: Any
) -> Certificate:
    """The certificate of a stream with values of shape (steps, size)."""
    if mechanism == "auto" or (mechanism in RECIPES and "workload" in RECIPES[mechanism].options):
        options = {**options, "workload": workload}
    law: Any = calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=budget, **options)
    if isinstance(law, Gaussian) and isinstance(law.covariance, Isotropic):  # is noise over time with one band
        law = Gaussian(OverTime(np.ones(1), law.shape, law.covariance.std), law.source, law.note)
    if not isinstance(law, Gaussian) or not isinstance(law.covariance, OverTime):
        raise InvalidInput(f"mechanism must be one over time, such as 'toeplitz', got noise of {law.source}")
    certificate = sized_for_budget(law, sensitivity, budget)
    check_releasable(certificate, budget)
    return certificate


def of_part(number: int, size: int, sensitivity: Participation, budget: Budget) -> Certificate:
    """The certificate of one part, from 0, of a stream without an end."""
    whole, length = without_end(sensitivity, budget), FIRST_PART * 2**number
    assert whole.mu is not None
    law = calibrate("inverse-banded", shape=(length, size), sensitivity=sensitivity, budget=budget, bands=length)
    assert isinstance(law, Gaussian)
    certificate = sized_for_mu(law, sensitivity, whole.mu)
    assert certificate.mu is not None
    if not (certificate.mu <= whole.mu and certificate.total_variation <= whole.total_variation):
        raise NumericalFailure(f"the next {length} days do not fit the guarantee; begin another stream")
    check_releasable(certificate, budget)
    return certificate


def without_end(sensitivity: Participation, budget: Budget) -> Guarantee:
    """What each part of a stream without an end keeps, and so all of them: one mu, and a share of delta."""
    share = budget.delta * SAMPLER_SHARE
    mu = float(gaussian.mu(budget.epsilon, budget.delta - share)) * (1 - 1e-9)
    error = share / (1 + math.exp(budget.epsilon)) / 2
    return Guarantee(GaussianProfile(mu), Adjacency(sensitivity.adjacency), error)


def over_time(certificate: Certificate) -> OverTime:
    """The covariance of a stream's law."""
    assert isinstance(certificate.law, Gaussian)
    assert isinstance(certificate.law.covariance, OverTime)
    return certificate.law.covariance
