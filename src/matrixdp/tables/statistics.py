"""Means, covariances and regressions of columns with public bounds, each from one release, with intervals.

    out = release_means(costs, 0, 5000, groups=regions, group_count=12, budget=Budget(1.0, 1e-6))
    out.value, out.low, out.high
    moments = release_moments(records, low=[0, 0], high=[100, 5000], budget=Budget(1.0, 1e-6))
    moments.covariance(), moments.regression(target=1)

Values outside their bounds count as the nearest bound. Intervals are about the noise, not about a larger population.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Isotropic
from matrixdp.distributions.margins import error_rate
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Release, Spends, prepare
from matrixdp.privacy.certificate import Certificate
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.queries.moments import second_moment
from matrixdp.sensitivity import Frobenius

# Steps between the bounds of a column to which each value is rounded for a mean, so that totals are whole numbers.
STEPS = 1 << 16


@dataclass(frozen=True, eq=False)
class Estimate:
    """Numbers computed from a release.

    Attributes:
        value: the numbers.
        standard_error: of the noise, to first order.
        low: lower ends of intervals.
        high: upper ends.
        level: the coverage of each that is aimed at; `method` says whether it is proven.
        method: how the intervals were made.
        certificate: what the release guarantees.
    """

    value: Array
    standard_error: Array
    low: Array
    high: Array
    level: float
    method: str
    certificate: Certificate


# --- means ---


def bounded_totals(
    values: Any, low: float, high: float, *, groups: Any = None, group_count: int = 1, adjacency: str = ADD_REMOVE
) -> Answer:
    """For each group, the sums of how far values lie above the lower bound, and below the upper one.

    A value x counts as a = (x - low)/(high - low) in the first sum and as 1 - a in the second, in whole multiples of
    1/STEPS. Their total is the number of records, and a record changes it by 1, whatever its value: so one record
    moves the pair by at most 1 in length, where a sum and a count by themselves would move by sqrt(2).

    Args:
        values: one finite number per record.
        low: the least value, public.
        high: the largest value, public.
        groups: the place of each record's group, from 0; a record with a place that does not exist is left out.
        group_count: how many groups there are; public.
        adjacency: which data sets are neighbours.

    Guarantee: the value has a row per group, in units of 1/STEPS. Add/remove changes one row by (k, STEPS - k), of norm
        at most STEPS; replace changes two rows so, or one by (j, -j), of norm at most sqrt(2) STEPS.
    """
    lower, upper = _interval(low, high)
    rows = _check.finite("values", values, ndim=1)
    count = _check.count("group_count", group_count)
    places = np.zeros(len(rows), dtype=np.int64) if groups is None else _check.array_of("groups", groups)
    if places.shape != rows.shape or places.dtype.kind not in "iu":
        raise InvalidInput(f"groups must be one whole number per value, got {_check.kind(groups)}")
    known = (places >= 0) & (places < count)
    above = np.round((np.clip(rows, lower, upper) - lower) / (upper - lower) * STEPS)[known]
    totals = [np.bincount(places[known], part, count) for part in (above, STEPS - above)]
    asked = query("bounded-totals", low=lower, high=upper, group_count=count, adjacency=checked(adjacency))
    value = np.stack(totals, axis=1).astype(np.float64)
    return Answer(value, change_in_bounded_totals(value.shape, **asked["parameters"]), asked)


@changes("bounded-totals")
def change_in_bounded_totals(shape: Shape, *, low: float, high: float, group_count: int, adjacency: str) -> Frobenius:
    """What a neighbour can change in the totals; see `bounded_totals`."""
    if shape != (group_count, 2):
        raise InvalidInput(f"the totals have shape {(group_count, 2)}, not {shape}")
    return Frobenius(STEPS * math.sqrt(2) * (1 + 1e-15) if adjacency == REPLACE else STEPS, adjacency)


def release_means(
    values: Any,
    low: float,
    high: float,
    *,
    budget: Budget,
    groups: Any = None,
    group_count: int = 1,
    adjacency: str = ADD_REMOVE,
    mechanism: str | NoiseLaw = "auto",
    level: float = 0.95,
    ledger: Spends | None = None,
    note: str = "",
    rng: np.random.Generator | None = None,
) -> Estimate:
    """The mean of a column, in each group; see `bounded_totals` and `means` for the arguments."""
    _check.probability("level", level)
    answer = bounded_totals(values, low, high, groups=groups, group_count=group_count, adjacency=adjacency)
    prepared = prepare(*answer, budget, mechanism, query=answer.query, rng=rng)
    return means(prepared.release(ledger, note), low, high, level)


def means(release: Release, low: float, high: float, level: float = 0.95) -> Estimate:
    """Means from released totals.

    With totals a and b the mean is low + (high - low) r, r = a/(a + b). The interval holds every r for which
    (1 - r) a - r b, of mean 0 at the true r, is within its margin: Fieller's. For i.i.d. Gaussian noise of standard
    deviation s and a margin of z, that is a quadratic inequality; otherwise both totals are covered at once, and the
    interval holds all their ratios. Both cover with at least the level, whatever the counts. A group whose count is
    lost in the noise has the whole range.

    Args:
        release: of `bounded_totals`.
        low: the least value.
        high: the largest value.
        level: the coverage of each interval.
    """
    lower, upper = _interval(low, high)
    above, below = (np.asarray(release.value, dtype=np.float64) / STEPS).T
    count = above + below
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(count > 0, np.clip(above / count, 0, 1), 0.5)
    law = release.noise
    if isinstance(law, Gaussian) and isinstance(law.covariance, Isotropic):
        std = law.covariance.std / STEPS
        drawing = release.certificate.drawing
        rounding = 0.0 if drawing is None or drawing.grid is None else 2 * drawing.grid.displacement
        margin = (-float(ndtri(error_rate(level) / 2)) + rounding) * std
        ends, method = _fieller(above, count, margin), "Fieller, covers at least the level"
        error = std * np.sqrt((1 - ratio) ** 2 + ratio**2)
    else:
        both = release.interval(math.sqrt(level))  # the two are independent
        least, most = (np.maximum(np.asarray(side) / STEPS, 0.0).T for side in (both.low, both.high))
        with np.errstate(divide="ignore", invalid="ignore"):
            bottom, top = least[0] / (least[0] + most[1]), most[0] / (most[0] + least[1])
        ends = np.where(np.isnan(bottom), 0.0, bottom), np.where(np.isnan(top), 1.0, top)
        method = "ratios of both totals' intervals, covers at least the level"
        errors = np.asarray(release.standard_error) / STEPS
        error = np.sqrt(((1 - ratio) * errors[:, 0]) ** 2 + (ratio * errors[:, 1]) ** 2)
    with np.errstate(divide="ignore"):
        error = np.where(count > 0, error / np.maximum(count, 1e-300), math.inf)
    width, rounded = upper - lower, 0.5 / STEPS
    return Estimate(
        value=lower + width * ratio,
        standard_error=width * error,
        low=lower + width * np.clip(ends[0] - rounded, 0, 1),
        high=lower + width * np.clip(ends[1] + rounded, 0, 1),
        level=level,
        method=method,
        certificate=release.certificate,
    )


def _fieller(above: Array, count: Array, margin: float) -> tuple[Array, Array]:
    """All r between 0 and 1 with (above - r count)^2 <= margin^2 (1 - 2 r + 2 r^2)."""
    square, linear, constant = count**2 - 2 * margin**2, above * count - margin**2, above**2 - margin**2
    root = np.sqrt(np.maximum(linear**2 - square * constant, 0.0))
    proper = (square > 0) & (count > 0)
    divisor = np.where(proper, square, 1.0)
    low, high = np.where(proper, (linear - root) / divisor, 0.0), np.where(proper, (linear + root) / divisor, 1.0)
    return low, high


def _interval(low: float, high: float) -> tuple[float, float]:
    lower, upper = _check.number("low", low), _check.number("high", high)
    if not lower < upper:
        raise InvalidInput(f"low must be below high, got {lower!r} and {upper!r}")
    return lower, upper


# --- moments ---


@dataclass(frozen=True, eq=False)
class Moments:
    """A noisy matrix of second moments, and what follows from it at no further cost.

    Attributes:
        release: the sum of z z^T, z = (1, u), where u has each column mapped to [-1, 1].
        low: the lower bounds of the columns.
        high: their upper bounds.

    Intervals are to first order in the noise: near the level where the noise is small beside the number of records and
    the spread of the columns, which `reliable` tells for regressions. Their coverage is measured in the tests.
    """

    release: Release
    low: Array
    high: Array

    @property
    def certificate(self) -> Certificate:
        """What the release guarantees, and so everything computed from it."""
        return self.release.certificate

    def count(self, level: float = 0.95) -> Estimate:
        """The number of records; exact up to the noise."""
        return self._estimate(lambda moments: moments[:1, 0], level)

    def mean(self, level: float = 0.95) -> Estimate:
        """The mean of each column."""
        return self._estimate(lambda moments: moments[0, 1:] / moments[0, 0], level)

    def covariance(self, level: float = 0.95) -> Estimate:
        """The covariances of the columns, as a matrix; variances on its diagonal."""
        return self._estimate(_covariance, level)

    def correlation(self, level: float = 0.95) -> Estimate:
        """The correlations of the columns, as a matrix; intervals stay within -1 and 1."""

        def correlated(moments: Array) -> Array:
            covariance = _covariance(moments)
            stds = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
            scaled: Array = covariance / np.outer(stds, stds)
            np.fill_diagonal(scaled, 1.0)
            return scaled

        found = self._estimate(correlated, level)
        return replace(
            found, value=np.clip(found.value, -1, 1), low=np.clip(found.low, -1, 1), high=np.clip(found.high, -1, 1)
        )

    def regression(self, target: int, features: Any = None, *, ridge: float = 0.0, level: float = 0.95) -> Estimate:
        """Least squares of a column on others: the intercept first, then a coefficient per feature.

        Args:
            target: the place of the column to explain.
            features: the places of the columns that explain it; all others by default.
            ridge: added to the sum of squares for each squared coefficient, but for the intercept.
            level: the coverage of each interval.
        """
        chosen = self._features(target, features)
        penalty = _check.at_least_zero("ridge", ridge)
        floor = self._noise_floor(len(chosen) + 1)

        def fitted(moments: Array) -> Array:
            return _solved(moments, target + 1, [0, *(i + 1 for i in chosen)], penalty, floor, self._scale)

        return self._estimate(fitted, level)

    def reliable(self, target: int, features: Any = None) -> bool:
        """Whether the noise is small beside the spread of the features, so that intervals of a regression hold."""
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
        value = np.asarray(self.release.value, dtype=np.float64)
        return np.asarray((value + value.T) / 2)

    def _noise_floor(self, size: int) -> float:
        """About the largest eigenvalue of the noise on so many rows."""
        return 2 * float(np.max(self.release.standard_error)) * math.sqrt(size)

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
        linear = self.release.linear(weights.reshape(len(weights), -1))
        ends = linear.interval(level)
        half = ((np.asarray(ends.high) - np.asarray(ends.low)) / 2).reshape(value.shape)
        return Estimate(
            value=value,
            standard_error=linear.standard_error.reshape(value.shape),
            low=value - half,
            high=value + half,
            level=level,
            method="first order in the noise; coverage measured, not proven",
            certificate=self.certificate,
        )


def release_moments(
    records: Any,
    low: Any,
    high: Any,
    *,
    budget: Budget,
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
        adjacency: which data sets are neighbours.
        mechanism: a mechanism's name; "auto" takes the least expected error.
        ledger: charged before any noise is drawn.
        note: what the ledger remembers of this release; never data.
        rng: a numpy Generator, for reproducible studies; entropy from the operating system by default.

    Guarantee: `result.certificate`; see `bounded_moments`.
    """
    answer = bounded_moments(records, low, high, adjacency=adjacency)
    released = prepare(*answer, budget, mechanism, query=answer.query, rng=rng).release(ledger, note)
    columns = (len(answer.value) - 1,)
    return Moments(released, *(np.array(_check.broadcast("low and high", end, columns)) for end in (low, high)))


def bounded_moments(records: Any, low: Any, high: Any, *, adjacency: str = ADD_REMOVE) -> Answer:
    """The sum of z z^T over the records, z = (1, u), where u has each column mapped from its bounds to [-1, 1].

    Guarantee: a record contributes z z^T with |z| <= sqrt(1 + columns), as |u| <= 1 in every column.
    """
    rows = _check.finite("records", records, ndim=2)
    lower, upper = (_check.broadcast(name, end, rows.shape[1:]) for name, end in (("low", low), ("high", high)))
    if not np.all(lower < upper):
        raise InvalidInput("low must be below high in every column")
    mapped = np.clip((rows - (lower + upper) / 2) / ((upper - lower) / 2), -1.0, 1.0)
    norm = math.nextafter(math.sqrt(1 + rows.shape[1]), math.inf)
    return second_moment(np.column_stack([np.ones(len(rows)), mapped]), norm=norm, adjacency=checked(adjacency))


def _covariance(moments: Array) -> Array:
    mean = moments[0, 1:] / moments[0, 0]
    covariance: Array = moments[1:, 1:] / moments[0, 0] - np.outer(mean, mean)
    return covariance


def _solved(moments: Array, target: int, places: list[int], ridge: float, floor: float, scale: Array) -> Array:
    """Least squares from the moments of (1, x); a matrix that noise may have made singular is raised to the floor."""
    gram, right = moments[np.ix_(places, places)], moments[places, target]
    back = np.linalg.inv(scale[np.ix_(places, places)])
    lowest = float(np.linalg.eigvalsh(back @ gram @ back.T)[0])  # in the units of the release
    lift = max(0.0, floor - lowest)
    penalty = np.diag([0.0] + [ridge] * (len(places) - 1))
    units = scale[np.ix_(places, places)]
    return np.asarray(np.linalg.solve(gram + penalty + lift * units @ units.T, right))
