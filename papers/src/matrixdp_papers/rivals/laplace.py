"""The Laplace and the exponential mechanism: pure differential privacy in its simplest form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions import generator
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.sensitivity import Counts, Entrywise, OneColumn, OneRow, Sensitivity, Vertices


def laplace(value: Any, sensitivity: Sensitivity, epsilon: float, *, rng: np.random.Generator | None = None) -> Array:
    """The value with independent Laplace noise of scale (l1 sensitivity)/epsilon on every entry.

    Args:
        value: the query's value, a vector or matrix of finite numbers.
        sensitivity: the sensitivity set; its l1 radius determines the scale.
        epsilon: the guarantee to keep.
        rng: a numpy Generator, for reproducible studies.

    Guarantee: pure epsilon-DP, for neighbours under the set's adjacency whose values differ by a member of the set.

    Source: dwork2014algorithmic, Theorem 3.6.
    """
    true_value = _check.finite("value", value)
    scale = l1_radius(sensitivity, true_value.shape) / _check.positive("epsilon", epsilon)
    return true_value + generator(rng).laplace(scale=_check.positive("noise scale", scale), size=true_value.shape)


def l1_radius(sensitivity: Sensitivity, shape: Shape) -> float:
    """The largest sum of absolute entries in a set, rounded up: the l1 sensitivity.

    Exact for counts, boxes, vertices, one line by its norm, Frobenius balls, and rank-one sets except under replace.
    For all other sets, an upper bound: sqrt(entries) times the Frobenius radius.
    """
    if not isinstance(sensitivity, Sensitivity):
        raise InvalidInput(f"sensitivity must be a set from matrixdp.sensitivity, got {sensitivity!r}")
    sensitivity.fits(shape)
    size = math.prod(shape)
    if isinstance(sensitivity, Counts):
        radius = min(sensitivity.cells, size) * sensitivity.bound
    elif isinstance(sensitivity, Entrywise):
        radius = float(np.sum(sensitivity.bounds(shape)))
    elif isinstance(sensitivity, Vertices):
        radius = max(float(np.sum(np.abs(vertex))) for vertex in sensitivity.differences)
    elif isinstance(sensitivity, (OneColumn, OneRow)) and sensitivity.radius is None:
        radius = float(np.sum(sensitivity.widths(shape)))
    elif isinstance(sensitivity, (OneColumn, OneRow)):
        radius = math.sqrt(shape[1 - sensitivity.axis]) * sensitivity.frobenius_radius(shape)
    else:
        radius = math.sqrt(size) * sensitivity.frobenius_radius(shape)
    return radius * HEADROOM


def exponential(scores: Any, sensitivity: float, epsilon: float, *, rng: np.random.Generator | None = None) -> int:
    """The index of a candidate, drawn with probability proportional to exp(epsilon score/(2 sensitivity)).

    With Gumbel noise on the log weights, the index of the largest has that law. Nothing is exponentiated, so scores of
    any size are safe.

    Args:
        scores: one number for each candidate, larger is better.
        sensitivity: the largest change of any score.
        epsilon: the guarantee to keep.
        rng: a numpy Generator, for reproducible studies.

    Guarantee: pure epsilon-DP, under the adjacency that the sensitivity was derived for.

    Source: dwork2014algorithmic, Theorem 3.10.
    """
    candidates = _check.finite("scores", scores, ndim=1)
    rate = _check.positive("epsilon", epsilon) / (2 * _check.positive("sensitivity", sensitivity))
    rate = _check.positive("epsilon/(2 sensitivity)", rate / HEADROOM)
    with np.errstate(over="ignore"):  # a score so far below the best is never drawn
        logarithms = (candidates - candidates.max()) * rate
    return int(np.argmax(logarithms + generator(rng).gumbel(size=len(candidates))))
