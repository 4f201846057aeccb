"""The Johnson-Lindenstrauss transform: a second moment from Gaussian random projections of the records.

The projections are the noise. With K the second moment and w a public shift, the release is the mean of `rows` draws
z z^T, z from N(0, K + w^2 I), less w^2 I. That is the law of M^T M for projections M of the records with w I appended.

The exact guarantee, which the source bounds by composing over rows: let x be replaced by y, both of norm at most r, and
let K_0 be the moment of the other records plus w^2 I, so that K_0 >= w^2 I. Then

    K + w^2 I = K_0 + x x^T <= (1 + r^2/w^2) (K_0 + y y^T) = (1 + r^2/w^2) (K' + w^2 I),

and the same with x and y swapped. The difference y y^T - x x^T has one eigenvalue of each sign at most. So there are
coordinates in which the first law is N(0, I) and the second has independent entries, of variance 1 except for two. One
is between 1 and c = 1 + r^2/w^2, the other between 1/c and 1. Adding independent noise to both laws, and scaling, turns
a ratio of variances c into any ratio between 1 and c. The ratios c and 1/c are therefore the worst case. It is attained
where x, y and the other records are orthogonal. With a = (c - 1)/2, b = (1 - 1/c)/2 and independent chi-squares S_1,
S_2 with `rows` degrees of freedom, the privacy loss is a S_2 - b S_1, and

    delta(epsilon) = E max(0, 1 - exp(epsilon + b S_1 - a S_2)).

Swapping the data sets swaps the two coordinates, so it is the same in the other direction.

Source: blocki2012johnson, the algorithm for covariance matrices and its Theorem (claimed); the exact law is ours.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import chi2

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import REPLACE
from matrixdp.budget import Budget
from matrixdp.distributions import generator
from matrixdp.errors import InvalidInput
from matrixdp.queries import Answer
from matrixdp.sensitivity import RankOne

# Intervals of the upper sum over S_1, and the tail probability at either end, which is added to delta.
_INTERVALS, _ENDS = 20_000, 1e-18
# The relative error of a chi-square tail; a rounded difference of two is widened by it.
_ROUNDING = 1e-12


def johnson_lindenstrauss(answer: Answer, shift: float, rows: int, rng: np.random.Generator | None = None) -> Array:
    """An unbiased estimate of a second moment or covariance, from `rows` projections.

    Args:
        answer: from `matrixdp.queries.second_moment` or `covariance`, with adjacency REPLACE.
        shift: w, the singular value added in every direction; from `published_shift` or `exact_shift`.
        rows: the number of projections.
        rng: a numpy Generator, for reproducible studies.

    Guarantee: `delta(epsilon, radius/shift, rows)` at every epsilon, one record replaced, on real numbers.

    Source: blocki2012johnson.
    Deviates: (1) drawn from the second moment of the records, which has the same law as projecting them; (2) the
        public shift is subtracted again; (3) one record is replaced by another, both of bounded norm.
    """
    _radius(answer)
    count, size = _check.count("rows", rows), len(answer.value)
    added = _check.positive("shift", shift) ** 2 * np.eye(size)
    values, vectors = np.linalg.eigh(answer.value + added)
    projected = generator(rng).standard_normal((count, size)) * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    return np.asarray(projected.T @ projected / count - added)


def published_rows(relative_error: float, failure: float) -> int:
    """The number of projections that estimate a variance within this relative error, up to this failure probability."""
    error, probability = (_check.positive(*pair) for pair in (("relative_error", relative_error), ("failure", failure)))
    return math.ceil(8 * math.log(2 / probability) / error**2)


def published_shift(distance: float, budget: Budget, rows: int) -> float:
    """The shift of the source's theorem, for neighbours that differ in one record, by at most the distance.

    The formula was not checked against the paper's text. A public implementation for graphs uses the same one.
    """
    count = _check.count("rows", rows)
    scale = 16 * math.sqrt(count * math.log(2 / budget.delta)) / budget.epsilon
    return _check.positive("distance", distance) * scale * math.log(16 * count / budget.delta)


def exact_shift(answer: Answer, budget: Budget, rows: int) -> float:
    """The least shift that keeps the budget when one record is replaced, up to 1e-6 and rounded up."""
    radius, small, large = _radius(answer), 0.0, 1.0
    while delta(budget.epsilon, 1 / large, rows) > budget.delta:
        small, large = large, 2 * large
    while large - small > 1e-6 * large:
        middle = (small + large) / 2
        if delta(budget.epsilon, 1 / middle, rows) > budget.delta:
            small = middle
        else:
            large = middle
    return large * radius


def delta(epsilon: float, ratio: float, rows: int) -> float:
    """The delta of the transform, rounded up, for a ratio of the largest norm of a record to the shift.

    Given S_1, the mean over S_2 is P[S_2 > t] - exp(epsilon + b S_1) c^(-rows/2) P[S_2 > c t] with t = (epsilon +
    b S_1)/a. It falls in S_1, so its value at the lower end of an interval bounds it there.
    """
    count, square = _check.count("rows", rows), _check.positive("ratio", ratio) ** 2
    up, down = square / 2, square / (1 + square) / 2
    edges = np.linspace(chi2.ppf(_ENDS, count), chi2.isf(_ENDS, count), _INTERVALS + 1)
    below = chi2.cdf(edges, count)
    losses = _check.at_least_zero("epsilon", epsilon) + down * edges[:-1]
    start = losses / up
    tilted = np.exp(losses - count / 2 * math.log1p(square) + chi2.logsf(start * (1 + square), count))
    means = np.clip(chi2.sf(start, count) * (1 + _ROUNDING) - tilted * (1 - _ROUNDING), 0.0, 1.0)
    return min(1.0, float(means @ np.diff(below)) * (1 + _ROUNDING) + 2 * _ENDS)


def epsilon(claimed_delta: float, ratio: float, rows: int) -> float:
    """The least epsilon at a delta, up to 1e-6 and rounded up."""
    small, large = 0.0, 1.0
    while delta(large, ratio, rows) > claimed_delta:
        small, large = large, 2 * large
    while large - small > 1e-6:
        middle = (small + large) / 2
        small, large = (middle, large) if delta(middle, ratio, rows) > claimed_delta else (small, middle)
    return large


def _radius(answer: Answer) -> float:
    changed = answer.sensitivity
    if not isinstance(changed, RankOne) or changed.adjacency != REPLACE:
        raise InvalidInput(
            f"answer must be a second moment or covariance with adjacency REPLACE, got one with the set {changed!r}"
        )
    return changed.radius
