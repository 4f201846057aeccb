"""Test statistics: each turns a stack of outputs into one score per output.

If the law of the noise is known, the likelihood ratio is the best. If it is not, `linear` projects on the difference of
the inputs, `radial` compares the distances to them, and `learned` is fitted to outputs that are not used again. The
sign of a score does not matter: events in both directions are tried.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions import Gaussian, NoiseLaw, Product, Spherical
from matrixdp.distributions.covariance import FullCovariance
from matrixdp.errors import InvalidInput

Statistic = Callable[[Array], Array]

# With more entries than this, `learned` uses summaries of an output, not its entries.
_MOST_FEATURES = 500
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, eq=False)
class Lesson:
    """Outputs to fit statistics to, one per row, and the centres of the outputs on each input."""

    on_value: Array
    on_neighbour: Array
    value: Array
    neighbour: Array

    @classmethod
    def of(cls, value: Any, neighbour: Any, outputs: tuple[Array, Array]) -> Lesson:
        """Outputs to whose shape the inputs broadcast are centred at the inputs, all others at their means."""
        shape = outputs[0].shape[1:]
        rows = _rows(outputs[0]), _rows(outputs[1])
        try:
            inputs = [
                _check.finite("an input", given, ndim=tuple(range(len(shape) + 1))) for given in (value, neighbour)
            ]
            centres = [np.broadcast_to(given, shape).ravel() for given in inputs]
        except (TypeError, ValueError):
            centres = [np.mean(one, axis=0) for one in rows]
        return cls(*rows, *centres)


def _rows(outputs: Array) -> Array:
    return outputs.reshape(len(outputs), -1)


def linear(lesson: Lesson) -> Statistic:
    """The projection on the difference of the inputs, with each entry divided by its estimated variance."""
    variances = (np.var(lesson.on_value, axis=0) + np.var(lesson.on_neighbour, axis=0)) / 2
    # entries without noise get a large weight, but a finite one
    floor = 1e-9 * float(np.max(variances)) or 1.0
    weights = (lesson.neighbour - lesson.value) / np.maximum(variances, floor)
    return lambda outputs: _rows(outputs) @ weights


def radial(lesson: Lesson) -> Statistic:
    """The log of the ratio of the distances to the two inputs; its sign says which one is nearer."""
    return lambda outputs: _log_distance(outputs, lesson.neighbour) - _log_distance(outputs, lesson.value)


def _log_distance(outputs: Array, centre: Array) -> Array:
    return np.asarray(np.log(np.maximum(np.linalg.norm(_rows(outputs) - centre, axis=1), _TINY)))


def learned(lesson: Lesson) -> Statistic:
    """A logistic regression on the entries, their squares and the two statistics above."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    straight = linear(lesson)

    def features(outputs: Array) -> Array:
        near = [_log_distance(outputs, centre) for centre in (lesson.value, lesson.neighbour)]
        summaries = np.stack([straight(outputs), *near, near[1] - near[0]], axis=1)
        entries = _rows(outputs) - lesson.value
        return np.hstack([summaries, entries, np.square(entries)]) if entries.shape[1] <= _MOST_FEATURES else summaries

    model = make_pipeline(StandardScaler(), LogisticRegression())
    labels = np.repeat([0, 1], [len(lesson.on_value), len(lesson.on_neighbour)])
    with warnings.catch_warnings(), threadpool_limits(1):
        # a fit that stops early still gives valid scores: the bounds come from other outputs
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features(np.concatenate([lesson.on_value, lesson.on_neighbour])), labels)
    return lambda outputs: np.asarray(model.decision_function(features(outputs)))


LEARNT: dict[str, Callable[[Lesson], Statistic]] = {"linear": linear, "radial": radial, "learned": learned}


@singledispatch
def likelihood_ratio(law: NoiseLaw, difference: Array) -> Statistic:
    """The ratio of the densities of an output with centres at 0 and at the difference, up to a monotone map."""
    raise InvalidInput(f"the density of {type(law).__name__} is not known; use audit() with another statistic")


@likelihood_ratio.register
def _(law: Gaussian, difference: Array) -> Statistic:
    """<S^-1 V, output>."""
    weights = _weights(law, difference).ravel()
    return lambda outputs: _rows(outputs) @ weights


def _weights(law: Gaussian, difference: Array) -> Array:
    """S^-1 V."""
    covariance = law.covariance
    if isinstance(covariance, FullCovariance):
        return covariance.precision(difference)
    # noise on the symmetric matrices is coloured by the symmetric root of its covariance
    return covariance.whiten(covariance.whiten(difference))


@likelihood_ratio.register
def _(law: Spherical, difference: Array) -> Statistic:
    """The density at length r is proportional to r^(k-M) exp(-(r/scale)^p)."""
    origin, far, surplus = np.zeros(difference.size), difference.ravel(), math.prod(law.shape) - law.k

    def energy(log_distance: Array) -> Array:
        return surplus * log_distance + np.exp(law.p * (log_distance - math.log(law.scale)))

    return lambda outputs: energy(_log_distance(outputs, far)) - energy(_log_distance(outputs, origin))


@likelihood_ratio.register
def _(law: Product, difference: Array) -> Statistic:
    """Entries are independent, with log-densities -(|x|/scale)^exponent, after the values were floored to the grid."""
    changed = np.flatnonzero(difference)
    far = law.step * np.floor(difference.ravel()[changed] / law.step)

    def energy(distances: Array) -> Array:
        return np.asarray(np.sum(np.abs(distances / law.scale) ** law.exponent, axis=1))

    return lambda outputs: energy(_rows(outputs)[:, changed] - far) - energy(_rows(outputs)[:, changed])


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Linear coordinates of outputs, in which Gaussian noise is measured.

    Attributes:
        name: the statistic that is computed from them, in words.
        read: maps a stack of outputs to their coordinates, one output per row.
        weights: the likelihood ratio as a linear function of these coordinates.
    """

    name: str
    read: Callable[[Array], Array]
    weights: Array


def coordinates(law: Gaussian, difference: Array, most: int) -> Coordinates:
    """All entries, if there are at most `most`, so that a wrong covariance is detected; else the likelihood ratio."""
    weights = _weights(law, difference)
    if isinstance(law.covariance, FullCovariance):
        places = np.arange(weights.size)
    else:
        # symmetric noise repeats itself below the diagonal
        places = np.flatnonzero(np.triu(np.ones(law.shape)))
        weights = weights + np.tril(weights, -1).T
    if len(places) <= most:
        return Coordinates("every linear statistic", lambda outputs: _rows(outputs)[:, places], weights.ravel()[places])
    ratio = likelihood_ratio(law, difference)
    return Coordinates("likelihood ratio", lambda outputs: ratio(outputs)[:, None], np.ones(1))
