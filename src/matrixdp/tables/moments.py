"""Covariances, correlations and linear regressions of columns with public bounds, all from one release.

    moments = release_moments(records, low=[0, 0], high=[100, 5000], budget=Budget(1.0, 1e-6))
    moments.covariance(), moments.regression(target=1)

Values outside their bounds are clipped. Intervals cover the noise, not the sampling from a larger population.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked
from matrixdp.budget import Budget
from matrixdp.distributions import NoiseLaw, Product
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Release, Spends, prepare
from matrixdp.privacy.certificate import Certificate
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.queries.clipping import centred
from matrixdp.queries.moments import STEP, full_matrix, second_moment, summed_products
from matrixdp.sensitivity import L1, RankOne
from matrixdp.tables.mean import Estimate, people


@dataclass(frozen=True, eq=False)
class Moments:
    """A noisy matrix of second moments, and what follows from it at no further cost.

    Attributes:
        release: of `bounded_moments`, or of `bounded_products` where delta is 0.
        low: the lower bounds of the columns.
        high: their upper bounds.

    Intervals are to first order in the noise: coverage is near the level if the noise is small compared with the number
    of records and the spread of the columns, which `reliable` tests for regressions. It is measured in the tests.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import release_moments
        >>> people = np.random.default_rng(0).uniform([20, 0], [60, 9], size=(500, 2))
        >>> moments = release_moments(people, [0, 0], [100, 10], budget=Budget(1.0, 1e-6))
        >>> moments.mean().value.shape, moments.correlation().value.shape
        ((2,), (2, 2))
    """

    release: Release
    low: Array
    high: Array

    @property
    def certificate(self) -> Certificate:
        """What the release guarantees, and so everything computed from it."""
        return self.release.certificate

    def count(self, level: float = 0.95) -> Estimate:
        """The number of records."""
        return self._estimate(lambda moments: moments[:1, 0], level)

    def mean(self, level: float = 0.95) -> Estimate:
        """The mean of each column."""
        return self._estimate(lambda moments: moments[0, 1:] / moments[0, 0], level)

    def covariance(self, level: float = 0.95) -> Estimate:
        """The covariances of the columns, as a matrix; variances on its diagonal."""
        return self._estimate(_covariance, level)

    def correlation(self, level: float = 0.95) -> Estimate:
        """The correlations of the columns, as a matrix; intervals stay within -1 and 1."""
        return _within_one(self._estimate(_correlation, level))

    def variance(self, level: float = 0.95) -> Estimate:
        """The variance of each column."""
        return self._estimate(lambda moments: np.diag(_covariance(moments)), level)

    def components(self, count: int, level: float = 0.95) -> Estimate:
        """Principal components of the standardised columns: one row each, with one loading per column.

        The last number of a row is its share of the variance. Signs make the largest loading positive.
        """
        if not _check.count("components", count) <= len(self.low):
            raise InvalidInput(f"components must be at most as many as the {len(self.low)} columns, got {count}")
        first = _principal(self._scale @ self._matrix() @ self._scale.T, count)
        largest = np.argmax(np.abs(first[:, :-1]), axis=1)
        signs = np.where(first[np.arange(count), largest] < 0, -1.0, 1.0)

        def loadings(moments: Array) -> Array:
            found = _principal(moments, count)
            turned = np.sum(found[:, :-1] * first[:, :-1], axis=1) < 0  # eigenvectors have no sign of their own
            found[:, :-1] *= (signs * np.where(turned, -1.0, 1.0))[:, None]
            return found

        return _within_one(self._estimate(loadings, level))

    def regression(self, target: int, features: Any = None, *, ridge: float = 0.0, level: float = 0.95) -> Estimate:
        """Least squares of a column on others: the intercept first, then a coefficient per feature.

        Args:
            target: the place of the column to explain.
            features: the places of the columns that explain it; all others by default.
            ridge: this times each squared coefficient, except the intercept, is added to the sum of squares.
            level: the coverage of each interval.
        """
        chosen = self._features(target, features)
        penalty = _check.at_least_zero("ridge", ridge)
        floor = self._noise_floor(len(chosen) + 1)

        def fitted(moments: Array) -> Array:
            return _solved(moments, target + 1, [0, *(i + 1 for i in chosen)], penalty, floor, self._scale)

        return self._estimate(fitted, level)

    def reliable(self, target: int, features: Any = None) -> bool:
        """Whether the noise is small compared with the spread of the features, so that intervals hold."""
        places = [0, *(i + 1 for i in self._features(target, features))]
        moments = self._matrix()[np.ix_(places, places)]
        return bool(np.linalg.eigvalsh(moments)[0] > 4 * self._noise_floor(len(places)))

    def _features(self, target: int, features: Any) -> list[int]:
        columns = len(self.low)
        chosen = [i for i in range(columns) if i != target] if features is None else list(features)
        if target not in range(columns) or not chosen or not set(chosen) <= set(range(columns)) - {target}:
            raise InvalidInput(f"target and features must be different columns from 0 to {columns - 1}")
        return chosen

    @property
    def _scale(self) -> Array:
        """The matrix that takes (1, u) to (1, x)."""
        scale = np.diag(np.append(1.0, (self.high - self.low) / 2))
        scale[1:, 0] = (self.high + self.low) / 2
        return scale

    def _matrix(self) -> Array:
        """The noisy sum of z z^T, z = (1, u), where u has each column mapped to [-1, 1]."""
        value = np.asarray(self.release.value, dtype=np.float64)
        if value.ndim == 1:
            return full_matrix(value + value[0] * _halved_squares(len(self.low)))
        return np.asarray((value + value.T) / 2)

    def _noise_floor(self, size: int) -> float:
        """About the largest eigenvalue of the noise on a block of this size."""
        return 2 * float(np.max(self.release.standard_error)) * math.sqrt(size)

    def _of_release(self, weights: Array) -> Array:
        """Weights of the entries of the matrix, one matrix per function, as weights of what was released."""
        if np.ndim(self.release.value) == 2:
            return weights.reshape(len(weights), -1)
        rows, columns = np.triu_indices(weights.shape[1])
        found = (weights + np.swapaxes(weights, 1, 2))[:, rows, columns] / np.where(rows == columns, 2.0, 1.0)
        found[:, 0] += found @ _halved_squares(len(self.low))
        return np.asarray(found)

    def _estimate(self, function: Callable[[Array], Array], level: float) -> Estimate:
        """A function of the moments of (1, x), with intervals from its derivative."""
        _check.probability("level", level)
        matrix, scale = self._matrix(), self._scale
        value = np.asarray(function(scale @ matrix @ scale.T))
        step = 1e-6 * max(1.0, float(np.max(np.abs(matrix))))
        slopes = []
        for i, j in np.ndindex(matrix.shape):
            moved = np.zeros(matrix.shape)
            moved[i, j] += step / 2
            moved[j, i] += step / 2
            up, down = (np.asarray(function(scale @ (matrix + way * moved) @ scale.T)) for way in (1, -1))
            slopes.append((up - down).ravel() / (2 * step))
        weights = np.stack(slopes, axis=1).reshape(-1, *matrix.shape)
        noise, weighted = self.release.noise, self._of_release(weights)
        if isinstance(noise, Product):
            errors = math.sqrt(noise.variance) * np.linalg.norm(weighted, axis=1)
            half = _half_widths(noise, weighted, level).reshape(value.shape)
        else:
            linear = self.release.linear(weighted)
            ends, errors = linear.interval(level), linear.standard_error
            half = ((np.asarray(ends.high) - np.asarray(ends.low)) / 2).reshape(value.shape)
        return Estimate(
            value=value,
            standard_error=errors.reshape(value.shape),
            low=value - half,
            high=value + half,
            level=level,
            method="first order in the noise; coverage measured, not proven",
            certificate=self.certificate,
        )


def _half_widths(noise: Product, weights: Array, level: float) -> Array:
    """Approximate margins of linear functions of discrete noise, with rounded weights and a coarser step.

    Exact margins take long to compute, and an interval to first order is no more accurate.
    """
    sizes = np.abs(weights) / np.maximum(np.max(np.abs(weights), axis=1, keepdims=True), 1e-300)
    levels = np.round(sizes * 16)
    lengths = np.maximum(np.linalg.norm(levels, axis=1), 1.0)
    coarse = replace(noise, step=max(noise.step, 2.0 ** math.floor(math.log2(noise.scale / 32))))
    return np.asarray(coarse.linear(levels).half_width(level) * np.linalg.norm(weights, axis=1) / lengths)


def release_moments(
    records: Any,
    low: Any,
    high: Any,
    *,
    budget: Budget,
    contributions: int = 1,
    adjacency: str = ADD_REMOVE,
    mechanism: str | NoiseLaw = "auto",
    ledger: Spends | None = None,
    note: str = "",
    rng: np.random.Generator | None = None,
) -> Moments:
    """One noisy matrix of second moments, for means, covariances, correlations and regressions together.

    Args:
        records: one record per row, finite numbers.
        low: the least value of each column, public.
        high: the largest value of each column, public.
        budget: the guarantee to keep.
        contributions: how many records one person may have; more than one needs add/remove.
        adjacency: which data sets are neighbours.
        mechanism: a mechanism's name; "auto" takes the least expected error.
        ledger: charged before any noise is drawn.
        note: a note for the ledger; never data.
        rng: a numpy Generator, for reproducible studies; entropy from the operating system by default.

    Guarantee: `result.certificate`; see `bounded_moments`.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import release_moments
        >>> people = np.random.default_rng(0).uniform([20, 0], [60, 9], size=(500, 2))
        >>> moments = release_moments(people, [0, 0], [100, 10], budget=Budget(1.0, 1e-6))
        >>> moments.regression(1, [0]).value.shape  # of column 1 on column 0, with an intercept
        (2,)
    """
    made = bounded_products if isinstance(budget, Budget) and budget.delta == 0 else bounded_moments
    answer = made(records, low, high, contributions=contributions, adjacency=adjacency)
    released = prepare(*answer, budget, mechanism, query=answer.query, rng=rng).release(ledger, note)
    columns = np.shape(records)[1:]
    return Moments(released, *(np.array(_check.broadcast("low and high", end, columns)) for end in (low, high)))


def bounded_moments(
    records: Any, low: Any, high: Any, *, contributions: int = 1, adjacency: str = ADD_REMOVE
) -> Answer:
    """The sum of z z^T over the records, z = (1, u), where u has each column mapped from its bounds to [-1, 1].

    Guarantee: a record contributes z z^T with |z| <= r = sqrt(1 + columns), as |u| <= 1 in every column. k records of
        one person add up to a positive semidefinite matrix of trace at most k r^2. It is a mixture of k r^2 v v^T with
        |v| <= 1, and mu is convex, so RankOne(sqrt(k) r) contains the worst case.
    """
    z, asked = _mapped(records, low, high, contributions, adjacency)
    value = second_moment(z, norm=_longest(z.shape[1] - 1)).value
    return Answer(value, change_in_bounded_moments(value.shape, **asked["parameters"]), asked)


def bounded_products(
    records: Any, low: Any, high: Any, *, contributions: int = 1, adjacency: str = ADD_REMOVE
) -> Answer:
    """The same for noise that keeps delta = 0: entries on and above the diagonal, with 1/2 subtracted from each u_i^2.

    Guarantee: as |u_i| <= 1, a record contributes at most 1 in the first entry, and 1, 1/2 and 1 in those of u_i,
        u_i^2 - 1/2 and u_i u_j, each rounded to a whole multiple of `queries.moments.STEP`. For c columns that is at
        most 1 + 3c/2 + c(c - 1)/2 in l1 norm; for k records of one person k times that, under replace twice that.
    """
    z, asked = _mapped(records, low, high, contributions, adjacency)
    columns = z.shape[1] - 1
    value = summed_products(z, _most_in_all(columns), _halved_squares(columns))
    return Answer(value, change_in_bounded_moments(value.shape, **asked["parameters"]), asked)


def _mapped(records: Any, low: Any, high: Any, contributions: int, adjacency: str) -> tuple[Array, dict[str, Any]]:
    """The rows (1, u), and the query."""
    protected = people(contributions, checked(adjacency))
    rows = _check.finite("records", records, ndim=2)
    lower, upper = (_check.broadcast(name, end, rows.shape[1:]) for name, end in (("low", low), ("high", high)))
    with np.errstate(over="ignore"):
        half = (upper - lower) / 2
    if not np.all((half > 0) & (half < np.inf)):
        raise InvalidInput("low must be below high in every column, by a finite number above the least float")
    mapped = centred(rows, lower, upper)
    asked = query("bounded-moments", low=np.array(lower), high=np.array(upper), **protected)
    return np.column_stack([np.ones(len(rows)), mapped]), asked


@changes("bounded-moments")
def change_in_bounded_moments(
    shape: Shape, *, low: Any, high: Any, contributions: int, adjacency: str, unit: str | None = None
) -> RankOne | L1:
    """What a neighbour can change in the moments, or in a vector of products; see `bounded_moments`."""
    people(contributions, adjacency)
    columns = len(low)
    if shape == ((columns + 1) * (columns + 2) // 2,):
        records = contributions * (2 if adjacency == REPLACE else 1)
        return L1(records * _most_in_all(columns), None, adjacency, step=STEP)
    if shape != (columns + 1,) * 2:
        raise InvalidInput(f"the moments have shape {(columns + 1,) * 2}, or one axis of products, not {shape}")
    return RankOne(math.sqrt(contributions) * _longest(columns) * (1 + 1e-15), adjacency)


def _halved_squares(columns: int) -> Array:
    """1/2 at the squares of u among the entries on and above the diagonal, 0 elsewhere."""
    first, second = np.triu_indices(columns + 1)
    return np.where((first == second) & (first > 0), 0.5, 0.0)


def _most_in_all(columns: int) -> float:
    """The l1 norm of the products of one record, at most; see `bounded_products`."""
    return 1 + 1.5 * columns + columns * (columns - 1) / 2


def _longest(columns: int) -> float:
    """A bound on the norm of (1, u), by which no record is clipped."""
    return math.nextafter(math.sqrt(1 + columns), math.inf)


def _covariance(moments: Array) -> Array:
    count = max(float(moments[0, 0]), 1.0)  # noise may have made it less
    mean = moments[0, 1:] / count
    covariance: Array = moments[1:, 1:] / count - np.outer(mean, mean)
    return covariance


def _correlation(moments: Array) -> Array:
    covariance = _covariance(moments)
    stds = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
    scaled: Array = covariance / np.outer(stds, stds)
    np.fill_diagonal(scaled, 1.0)
    return scaled


def _within_one(found: Estimate) -> Estimate:
    value, low, high = (np.clip(part, -1, 1) for part in (found.value, found.low, found.high))
    return replace(found, value=value, low=low, high=high)


def _principal(moments: Array, count: int) -> Array:
    """Eigenvectors of the correlations for the largest eigenvalues, and each eigenvalue's share of all."""
    values, vectors = np.linalg.eigh(_correlation(moments))
    return np.column_stack([vectors.T[::-1][:count], values[::-1][:count] / len(values)])


def _solved(moments: Array, target: int, places: list[int], ridge: float, floor: float, scale: Array) -> Array:
    """Least squares from the moments of (1, x); a matrix that noise may have made singular is raised to the floor."""
    gram, right = moments[np.ix_(places, places)], moments[places, target]
    back = np.linalg.inv(scale[np.ix_(places, places)])
    lowest = float(np.linalg.eigvalsh(back @ gram @ back.T)[0])  # in the units of the release
    lift = max(0.0, floor - lowest)
    penalty = np.diag([0.0] + [ridge] * (len(places) - 1))
    units = scale[np.ix_(places, places)]
    return np.asarray(np.linalg.solve(gram + penalty + lift * units @ units.T, right))
