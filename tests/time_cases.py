"""Small trainings with noise over time, for tests."""

import numpy as np

from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import OverTime
from matrixdp.learn.time_plan import Training
from training_cases import trainer


def public(**changes):
    """What is public of a small training."""
    usual = {"records": 40, "batch_size": 5, "steps": 16, "size": 30, "change": 1.0, "order": "sampled"}
    return Training(**(usual | changes))


def over_time(coefficients, steps, size, std=1.0, **options):
    return Gaussian(OverTime(np.asarray(coefficients, dtype=float), (steps, size), std, **options))


def correlated(order="sampled", **changes):
    """A quick trainer with noise over time."""
    settings = {"noise": "banded", "bands": 4, "steps": 12, "batch_size": 8, "order": order} | changes
    if settings["bands"] is None:
        del settings["bands"]
    return trainer(**settings)
