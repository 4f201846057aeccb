"""From scores to lower bounds on epsilon and delta.

Let P and Q be the laws of the output on two neighbours, in either order. (epsilon, delta)-privacy says that
P(S) <= e^epsilon Q(S) + delta for every set S of outputs. So a lower confidence bound on P(S) and an upper one on Q(S)
bound epsilon at a delta, and delta at an epsilon, from below. S may be chosen in any way that does not depend on the
outputs that are then counted in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from matrixdp._check import Array
from matrixdp.privacy.guarantee import GaussianProfile

Scores = Mapping[str, tuple[Array, Array]]
"""By the statistic's name: the scores of outputs on the value, and of outputs on its neighbour."""

Counted = npt.NDArray[np.intp]

# Thresholds tried from each end, at ranks that grow by a constant factor, so that the tails are searched finely.
_THRESHOLDS = 300
# Above this epsilon, no number of samples gives a bound on delta.
_LARGEST_EPSILON = 700.0


def binomial_lower(hits: Any, trials: int, level: float) -> Array:
    """A lower bound on a probability that fails with probability at most `level`.

    Source: clopper1934use.
    """
    hits = np.asarray(hits)
    return np.where(hits > 0, special.betaincinv(np.maximum(hits, 1), trials - hits + 1.0, level), 0.0)


def binomial_upper(hits: Any, trials: int, level: float) -> Array:
    """An upper bound on a probability that fails with probability at most `level`.

    Source: clopper1934use.
    """
    hits = np.asarray(hits)
    return np.where(hits < trials, special.betainccinv(hits + 1.0, np.maximum(trials - hits, 1), level), 1.0)


def epsilon_bound(likely: Any, unlikely: Any, delta: float) -> Array:
    """The epsilon that P(S) >= likely and Q(S) <= unlikely imply at a delta; below 0 where they imply nothing."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.maximum(likely - delta, 0.0)) - np.log(unlikely))


def delta_bound(likely: Any, unlikely: Any, epsilon: float) -> Array:
    """The delta that P(S) >= likely and Q(S) <= unlikely imply at an epsilon; below 0 where they imply nothing."""
    return np.asarray(likely - math.exp(min(epsilon, _LARGEST_EPSILON)) * unlikely)


@dataclass(frozen=True)
class Event:
    """The outputs whose score lies on one side of a threshold.

    Attributes:
        statistic: the name of the statistic that gives the scores.
        threshold: the score that divides the outputs.
        above: True for scores above the threshold, False for those at or below it.
        favours: the input that makes the event likely: 0 for the value, 1 for its neighbour.
    """

    statistic: str
    threshold: float
    above: bool
    favours: int

    def bounds(self, scores: Scores, level: float) -> tuple[Array, Array]:
        """A lower bound on P(S) and an upper bound on Q(S), each of which fails with probability at most `level`."""
        both = scores[self.statistic]
        above = [np.asarray(np.count_nonzero(one > self.threshold)) for one in both]
        return _rates(above, [len(one) for one in both], self.above, self.favours, level)


def _rates(
    above: Sequence[Counted], trials: Sequence[int], is_above: bool, favours: int, level: float
) -> tuple[Array, Array]:
    hits = above if is_above else [n - k for n, k in zip(trials, above, strict=True)]
    other = 1 - favours
    return (
        binomial_lower(hits[favours], trials[favours], level),
        binomial_upper(hits[other], trials[other], level),
    )


def choose_events(scores: Scores, epsilon: float, delta: float, level: float) -> tuple[Event, Event]:
    """The event that gives the largest bound on epsilon, and the one that gives the largest bound on delta.

    The confidence bounds themselves are maximised, so that an event in a tail with hardly any outputs is not chosen by
    chance.
    """
    best: list[tuple[float, Event]] = []
    for name, both in scores.items():
        thresholds = _thresholds(np.concatenate(both))
        above = [len(one) - np.searchsorted(np.sort(one), thresholds, side="right") for one in both]
        trials = [len(one) for one in both]
        for is_above, favours in ((True, 0), (True, 1), (False, 0), (False, 1)):
            rates = _rates(above, trials, is_above, favours, level)
            found = []
            for bound in (epsilon_bound(*rates, delta), delta_bound(*rates, epsilon)):
                place = int(np.argmax(bound))
                found.append((float(bound[place]), Event(name, float(thresholds[place]), is_above, favours)))
            best = [max(pair, key=lambda scored: scored[0]) for pair in zip(best or found, found, strict=True)]
    (_, for_epsilon), (_, for_delta) = best
    return for_epsilon, for_delta


def _thresholds(scores: Array) -> Array:
    """Observed scores at ranks that are dense at both ends and sparse in the middle."""
    ranks = np.unique(np.round(np.geomspace(1, len(scores), _THRESHOLDS))).astype(np.intp)
    ordered = np.sort(scores)
    return np.unique(np.concatenate([ordered[ranks - 1], ordered[-ranks]]))


def bounds_from_events(
    events: Sequence[Event], scores: Scores, epsilon: float, delta: float, level: float
) -> tuple[float, float, str]:
    """Lower bounds on epsilon and on delta that hold together, and the statistic that gave the first.

    Guarantee: neither bound is above the truth, except with probability 2 * level per event, as each event needs two
    probabilities. The events must not have been chosen by these scores.

    Source: jagielski2020auditing for the bound on epsilon.
    """
    rates = [event.bounds(scores, level) for event in events]
    epsilons = [float(epsilon_bound(*rate, delta)) for rate in rates]
    deltas = [float(delta_bound(*rate, epsilon)) for rate in rates]
    best = int(np.argmax(epsilons))
    return max(0.0, epsilons[best]), max(0.0, *deltas), events[best].statistic


def mu_from_scatter(scatter: Array, draws: int, difference: Array, weights: Array, confidence: float) -> float:
    """A lower bound on mu from draws of Gaussian noise, whatever its mean and covariance.

    The scatter W of N draws in k coordinates is the sum of (x - mean)(x - mean)^T, and S their covariance. W is Wishart
    distributed with N - 1 degrees of freedom, so (v^T S^-1 v) / (v^T W^-1 v) is chi-square distributed with N - k. For
    the difference v, the numerator is mu^2. Where W is singular, the noise is measured along the weights only.

    Guarantee: at most the truth with probability exactly `confidence`, if the draws are independent, identically
    distributed and normal, and are added to the value; nothing otherwise.

    Source: muirhead1982aspects, Theorem 3.2.12; nasr2023tight for auditing through mu.
    Deviates: (1) nasr2023tight bounds mu by the error rates at a threshold. Here the difference is known, so only the
        noise must be measured, and a few thousand draws determine mu to a few percent at any delta.
    """
    try:
        white = np.linalg.solve(np.linalg.cholesky(scatter), difference)
        square, freedom = float(white @ white), draws - len(difference)
    except np.linalg.LinAlgError:
        noise = float(weights @ scatter @ weights)
        if not noise > 0:
            return math.inf
        square, freedom = float(weights @ difference) ** 2 / noise, draws - 1
    return math.sqrt(2.0 * float(special.gammaincinv(freedom / 2, 1 - confidence)) * square)


def gaussian_bounds(mu: float, epsilon: float, delta: float) -> tuple[float, float]:
    """Lower bounds on epsilon and on delta from a lower bound on mu."""
    if mu == math.inf:
        return math.inf, 1.0
    profile = GaussianProfile(mu)
    return profile.epsilon(delta), profile.delta(epsilon)
