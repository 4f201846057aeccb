"""PPCA: principal components by the exponential mechanism."""

from __future__ import annotations

from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions import generator
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.queries.moments import second_moment
from matrixdp_papers.rivals.bingham import matrix_bingham


def ppca(
    records: Any,
    k: int,
    epsilon: float,
    *,
    norm: float = 1.0,
    columns: Any = None,
    adjacency: str = "replace",
    sweeps: int = 50,
    rng: np.random.Generator | None = None,
) -> Array:
    """A basis of a k-dimensional subspace that captures much of the records' variance.

    The subspace is drawn with density exp(rate * tr(V^T X^T X V)), the matrix Bingham law. X has a record in each row,
    clipped to the norm r. Under "replace" the rate is epsilon/(2 r^2); with r = 1, n records and
    A = X^T X/n that is the published exp((n epsilon/2) tr(V^T A V)). Under "add/remove" it is epsilon/r^2.

    Args:
        records: one record per row, as for `matrixdp.queries.second_moment`.
        k: the dimension of the subspace, below that of the records.
        epsilon: the guarantee to keep.
        norm: the largest norm of a record; longer records are clipped to it.
        columns: which columns to use; all by default.
        adjacency: "replace" one record, as published, or "add/remove" one.
        sweeps: of the Gibbs sampler; one is enough for k = 1.
        rng: a numpy Generator, for reproducible studies.

    Returns:
        A matrix with k orthonormal columns, in no order: within the subspace they are turned at random.

    Guarantee: pure epsilon-DP for the law itself, records of norm at most r. The score tr(V^T X^T X V), a sum of
        |V^T x|^2 between 0 and r^2 over the records, changes by at most r^2 when one is replaced: the exponential
        mechanism's exp(epsilon score/(2 r^2)). When a record is added no score falls, and none rises by more
        than r^2. So the density rises by a factor of at most exp(rate r^2) for every V, and its integral by a factor
        between 1 and that: their ratio changes by at most exp(rate r^2), which allows twice the rate.

        For k = 1 the sample has that law, up to floating point. For k > 1 a run of finite length has it only in the
        limit. So epsilon holds up to an unknown delta, the distance of the chain from its limit. That distance
        seems small: on 784 features, k = 20, the score is stationary after a few sweeps. It is not proven small.

    Source: chaudhuri2013near, algorithm PPCA; hoff2009simulation for the sampler.
    Deviates: (1) the rate under "add/remove".
    """
    answer = second_moment(records, norm=norm, columns=columns, adjacency=adjacency)
    dimension = len(answer.value)
    if not _check.count("k", k) < dimension:
        raise InvalidInput(f"k must be below the number of columns, {dimension}, got {k}")
    score_sensitivity = answer.sensitivity.largest_entry(answer.value.shape)
    rate = _check.positive("epsilon", epsilon) / score_sensitivity
    rate = _check.positive("epsilon/norm^2", (rate if adjacency == "add/remove" else rate / 2) / HEADROOM)
    return matrix_bingham(rate * answer.value, k, _check.count("sweeps", sweeps), generator(rng))
