"""The Wishart mechanism: a second moment with positive semidefinite noise. It is not private."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions import generator
from matrixdp.errors import GuaranteeViolated
from matrixdp.queries.moments import second_moment


def wishart(
    records: Any,
    epsilon: float,
    *,
    norm: float = 1.0,
    columns: Any = None,
    adjacency: str = "replace",
    size: int | None = None,
    accept_violation: bool = False,
    rng: np.random.Generator | None = None,
) -> Array:
    """X^T X/n plus a Wishart matrix with d + 1 degrees of freedom and scale 3 r^2/(2 n epsilon) I.

    Args:
        records: one record per row, as for `matrixdp.queries.second_moment`.
        epsilon: the claimed epsilon, which does not hold.
        norm: r, the largest norm of a record; longer records are clipped to it.
        columns: which columns to use; all by default.
        adjacency: "replace" one record, or "add/remove" one.
        size: n, the public number to divide by; the number of records by default, which only "replace" allows.
        accept_violation: draw although the guarantee does not hold, to reproduce a comparison.
        rng: a numpy Generator, for reproducible studies.

    Guarantee: none. Pure epsilon-DP is claimed, and refuted: with noise W >= 0 every output is at least its value. Let
        a neighbour have one more record x of norm r, or x in place of a record 0. It cannot produce the output A + W
        unless W >= x x^T/n. That fails with probability `impossible(epsilon)`, so delta is at least that at every
        epsilon; see `matrixdp_papers.claims.wishart` for the argument.

    Raises:
        GuaranteeViolated: unless accept_violation is set.

    Source: jiang2016wishart, Theorem 4 (refuted).
    Deviates: (1) records of any norm, by scale; (2) the matrix is returned, its eigenvectors are for the caller.
    """
    refuted = impossible(epsilon)
    if accept_violation is not True:
        raise GuaranteeViolated(
            f"the Wishart mechanism rests on a theorem that is false: at epsilon {epsilon:g} its delta is at least "
            f"{refuted:.3g}; nothing was released. Use mechanism='auto' of matrixdp.release, or "
            "accept_violation=True to draw without the guarantee"
        )
    answer = second_moment(records, norm=norm, columns=columns, adjacency=adjacency, average=True, size=size)
    unit = answer.sensitivity.largest_entry(answer.value.shape)
    scale = _check.positive("noise scale", 1.5 * unit / epsilon)
    return answer.value + noise(len(answer.value), scale, rng=rng)


def noise(dimension: int, scale: float, *, rng: np.random.Generator | None = None) -> Array:
    """A Wishart matrix with d + 1 degrees of freedom and a multiple of the identity as its scale."""
    d = _check.count("dimension", dimension)
    factor = math.sqrt(_check.positive("scale", scale)) * generator(rng).standard_normal((d, d + 1))
    return np.asarray(factor @ factor.T)


def impossible(epsilon: float) -> float:
    """The probability 1 - exp(-epsilon/3) of outputs that the neighbour never produces."""
    return -math.expm1(-_check.positive("epsilon", epsilon) / 3)
