"""The answer of a stream on each day, computed from released rows alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions import time_workloads
from matrixdp.distributions.covariance.over_time import sum_in_pairs
from matrixdp.privacy.certificate import Certificate
from matrixdp.streams import noise


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer of a stream on one day.

    Attributes:
        step: the day, from 1.
        value: the private answer of the workload, in the shape of the day's value.
        standard_error: of the noise, the same in every cell.

    Example:
        >>> from matrixdp import Budget, Participation
        >>> from matrixdp.streams import Stream
        >>> stream = Stream(steps=30, sensitivity=Participation(1.0), budget=Budget(1.0, 1e-6))
        >>> answer = stream.add(500.0)
        >>> answer.step, answer.value.shape
        (1, (1,))
    """

    step: int
    value: Array
    standard_error: float

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """A confidence interval for the true answer in each cell, for a Gaussian with this standard error."""
        from scipy.stats import norm  # here, because it is slow to import

        half = float(norm.ppf((1 + _check.probability("level", level)) / 2)) * self.standard_error
        return self.value - half, self.value + half


def answered(certificate: Certificate, workload: Array | str, noisy: Array) -> tuple[Array, float]:
    """The answer of the last of these rows, which are the first rows of a part, and its variance."""
    covariance, place = noise.over_time(certificate), len(noisy) - 1
    task = time_workloads.coefficients(workload, covariance.steps)
    variance = float(covariance.answer_variances(task)[place])
    if covariance.toeplitz and task.ndim == 1:  # one row of A C^-1 is enough
        weights = time_workloads.applied(task, covariance.decoder)
        return covariance.std * time_workloads.answer(weights, place, noisy), variance
    rows = np.zeros(covariance.shape)
    rows[: place + 1] = noisy
    return time_workloads.answer(task, place, covariance.color(rows)), variance


def total(certificate: Certificate, noisy: Array) -> Array:
    """The estimated sum of all rows of a part, as `answered` gives it, but rounded the same on every machine."""
    covariance = noise.over_time(certificate)
    weights = time_workloads.applied(np.ones(covariance.steps), covariance.decoder)
    return covariance.std * sum_in_pairs(weights[::-1], noisy)
