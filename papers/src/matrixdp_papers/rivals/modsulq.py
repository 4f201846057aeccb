"""MOD-SULQ: principal components of a second moment with symmetric Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.budget import Budget, checked_budget
from matrixdp.distributions import Gaussian, generator
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import GuaranteeViolated, InvalidInput, NotApplicable
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.drawing import Drawing
from matrixdp.queries.moments import second_moment
from matrixdp.sensitivity import Frobenius, Sensitivity


@dataclass(frozen=True, eq=False)
class NoisyComponents:
    """A noisy second moment, its leading eigenvectors as columns (largest eigenvalue first), and the guarantee."""

    second_moment: Array
    components: Array
    certificate: Certificate


def mod_sulq(
    records: Any,
    k: int,
    budget: Budget,
    *,
    norm: float = 1.0,
    columns: Any = None,
    adjacency: str = "replace",
    size: int | None = None,
    rng: np.random.Generator | None = None,
) -> NoisyComponents:
    """The top k eigenvectors of X^T X/n with Gaussian noise, one draw for every pair of symmetric entries.

    Args:
        records: one record per row, as for `matrixdp.queries.second_moment`.
        k: how many components.
        budget: the guarantee to keep.
        norm: the largest norm of a record; longer records are clipped to it.
        columns: which columns to use; all by default.
        adjacency: "replace" one record, as published, or "add/remove" one.
        size: n, the public number to divide by; the number of records by default, which only "replace" allows.
        rng: a numpy Generator, for reproducible studies.

    Guarantee: `result.certificate`, which is exact for the ideal law: (epsilon, delta)-DP and much stronger, see
        `modsulq_certificate`. The noise is drawn in floating point, as published, and is not floating-point-safe.

    Raises:
        GuaranteeViolated: if the published noise does not keep the budget; no such setting is known.

    Source: chaudhuri2013near, algorithm MOD-SULQ.
    Deviates: (1) records of any norm, by scale.
    """
    answer = second_moment(records, norm=norm, columns=columns, adjacency=adjacency, average=True, size=size)
    dimension = len(answer.value)
    if not _check.count("k", k) <= dimension:
        raise InvalidInput(f"k must be at most the number of columns, {dimension}, got {k}")
    randomness = generator(rng)
    # The largest entry that a record can have in the average is norm^2/n.
    unit = answer.sensitivity.largest_entry(answer.value.shape)
    std = published_std(dimension, budget) * unit
    certificate = modsulq_certificate(dimension, std, answer.sensitivity, budget)
    if not certificate.meets(budget):
        raise GuaranteeViolated(
            f"the published noise does not keep {budget} in {dimension} dimensions; nothing released"
        )
    upper = np.triu(std * randomness.standard_normal(answer.value.shape))
    noisy = answer.value + upper + np.triu(upper, 1).T
    vectors = np.linalg.eigh(noisy)[1][:, ::-1]
    drawn = replace(certificate, drawing=Drawing(reproducible=rng is not None))
    return NoisyComponents(noisy, vectors[:, :k], drawn)


def published_std(dimension: int, budget: Budget) -> float:
    """The published standard deviation of an entry, as a multiple of norm^2/n.

    Source: chaudhuri2013near, algorithm MOD-SULQ: beta = (d+1)/(n epsilon) sqrt(2 ln((d^2+d)/(2 sqrt(2 pi) delta)))
        + 1/(n sqrt(epsilon)).
    """
    d = _check.count("dimension", dimension)
    checked_budget(budget)
    odds = (d**2 + d) / (2 * math.sqrt(2 * math.pi) * budget.delta)
    if not odds >= 1:
        raise NotApplicable(
            f"the published formula needs a delta below {odds * budget.delta:.3g}, got {budget.delta:g}"
        )
    return (d + 1) / budget.epsilon * math.sqrt(2 * math.log(odds)) + 1 / math.sqrt(budget.epsilon)


def modsulq_certificate(
    dimension: int, std: float, sensitivity: Sensitivity, budget: Budget | None = None
) -> Certificate:
    """What i.i.d. noise on the upper triangle of a symmetric matrix guarantees; the lower one repeats it.

    The upper triangle of a symmetric difference V has the squared norm (|V|_F^2 + sum_i V_ii^2)/2, at most |V|_F^2 with
    equality for diagonal V. Records along the axes make V diagonal and of the largest norm, so the l2 sensitivity of
    the upper triangle is the Frobenius radius of the set, and is attained.
    """
    d = _check.count("dimension", dimension)
    law = Gaussian(Isotropic((d * (d + 1) // 2,), std), source="MOD-SULQ [chaudhuri2013near]")
    return certify(law, Frobenius(sensitivity.frobenius_radius((d, d)), adjacency=sensitivity.adjacency), budget)
