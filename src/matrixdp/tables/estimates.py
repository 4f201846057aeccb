"""Means, quantiles, regressions and moments of a table: labelled answers that are computed from one release.

Each adds noise to a vector or a matrix whose set follows from the public domain (`changes` below), and computes
labelled numbers from the result. Only add/remove is accepted: which rows count is private, and so is their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE
from matrixdp.budget import Allotment, Budget
from matrixdp.distributions import NoiseLaw, QuantileSearch
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Release
from matrixdp.privacy.certificate import Certificate
from matrixdp.queries.answer import Answer, changes
from matrixdp.sensitivity import L1, Counts, Sensitivity
from matrixdp.tables.answers import PreparedTable, TableAnswer
from matrixdp.tables.columns import Column
from matrixdp.tables.counts import Named, domain_of, rows_of, shape_of
from matrixdp.tables.kinds import Boolean, Categorical, Numeric, Ordered
from matrixdp.tables.mean import Estimate, change_in_bounded_totals, means, sums
from matrixdp.tables.moments import Moments, bounded_moments, bounded_products, change_in_bounded_moments
from matrixdp.tables.outputs import NUMBERS, Axes, Labelled
from matrixdp.tables.quantile import INTERVALS, grid, quantiles, search_law

# The most terms of a regression: with these, its error bars take seconds.
MOST_TERMS = 64
# Components count as distinguishable if every loading has a standard error below this.
RELIABLE = 0.1

Computed = Callable[[Release, float], Mapping[str, Any]]
"""From a release and a level to columns of numbers, with intervals of that level."""


@dataclass(frozen=True, eq=False, repr=False)
class TableEstimates(Labelled):
    """Numbers computed from a release, with labels and error bars; they cost nothing beyond it.

    Attributes:
        release: the noisy vector or matrix that they were computed from, with the certificate.
        axes: the labels.

    Example:
        >>> import pandas
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import Categorical, Domain, Numeric, Table
        >>> frame = pandas.DataFrame({"region": ["north", "south", "north"], "age": [31, 45, 28]})
        >>> ages = Numeric(0, 100, bins=[0, 18, 65, 100])
        >>> table = Table(frame, Domain({"region": Categorical(["north", "south"]), "age": ages}))
        >>> means = table.means("age", by=["region"]).release(Budget(1.0, 1e-6))
        >>> means.table().columns.tolist()
        ['region', 'value', 'standard_error', 'low', 'high']
    """

    release: Release
    axes: Axes
    computed: Computed

    @property
    def certificate(self) -> Certificate:
        """What the release guarantees, and so everything computed from it."""
        return self.release.certificate

    def certified(self, certificate: Certificate) -> TableEstimates:
        """The same with this certificate."""
        return replace(self, release=replace(self.release, certificate=certificate))

    def _numbers(self, level: float) -> dict[str, Any]:
        return dict(self.computed(self.release, level))


class EstimateAnswer(TableAnswer):
    """The value behind estimates, still private; its axes are the labels of the estimates.

    Attributes:
        computed: from a release and the level of the intervals to the columns of numbers.
        noise: the noise law that "auto" uses, if this query defines one.
        pure: the answer that is released instead if delta is 0.
    """

    computed: Computed
    noise: Callable[[Budget], NoiseLaw] | None = None
    pure: Answer | None = None

    def outcome(self, out: Release) -> Labelled:
        """The estimates."""
        return TableEstimates(out, self.axes, self.computed)

    def prepare(self, budget: Budget, mechanism: str | NoiseLaw = "auto", **options: Any) -> PreparedTable:
        """All steps of `release` before the ledger is charged."""
        if self.pure is not None and isinstance(budget, Budget) and budget.delta == 0:
            instead = EstimateAnswer(*self.pure, self.query, axes=self.axes, computed=self.computed)
            return instead.prepare(budget, mechanism, **options)
        if mechanism == "auto" and not options and self.noise is not None and not isinstance(budget, Allotment):
            mechanism = self.noise(budget)
        prepared = super().prepare(budget, mechanism, **options)
        certificate = prepared.prepared.certificate
        if not isinstance(certificate.law, QuantileSearch):  # noise without intervals must fail before it is charged
            self.computed(Release(np.zeros(certificate.shape), certificate, certificate.law), 0.95)
        return prepared


# --- means ---


@changes("means")
def change_in_means(
    shape: Shape, *, of: str, columns: Named, adjacency: str, unit: str | None = None, contributions: int = 1
) -> L1:
    """Each row of a unit changes the two totals of one group by 1 together; see `mean.bounded_totals`."""
    domain = domain_of(columns)
    low, high = bounds_of(of, domain[of])
    groups = math.prod(shape_of([column for name, column in domain.items() if name != of]))
    terms: dict[str, Any] = {"contributions": rows_of(unit, contributions), "adjacency": added(adjacency)}
    return change_in_bounded_totals(shape, low=low, high=high, group_count=groups, **terms)


changes("sums")(change_in_means)


@dataclass(frozen=True)
class OfTotals:
    """Means or sums from released totals, for `EstimateAnswer`."""

    low: float
    high: float
    summed: bool

    def __call__(self, release: Release, level: float) -> Mapping[str, Array]:
        """Values, standard errors and intervals."""
        return numbers_of((sums if self.summed else means)(release, self.low, self.high, level))


def numbers_of(found: Estimate) -> dict[str, Array]:
    """The columns of numbers of an estimate."""
    return {name: np.ravel(getattr(found, name)) for name in NUMBERS}


# --- quantiles ---


@changes("quantiles")
def change_in_quantiles(
    shape: Shape, *, columns: Named, adjacency: str, bins: Any = None, unit: str | None = None, contributions: int = 1
) -> Sensitivity:
    """Each row of a unit changes the count of at most one bin by 1; older certificates have the bins in the column."""
    ((_, column),) = columns
    edges = column.bins if bins is None else grid(column.low, column.high, bins)
    if shape != (len(edges) - 1,):
        raise InvalidInput(f"there are {len(edges) - 1} bins, not {shape}")
    rows = rows_of(unit, contributions)
    return Counts(1, adjacency=added(adjacency)) if rows == 1 else L1(rows, None, added(adjacency), step=1)


@dataclass(frozen=True)
class QuantilesOf:
    """Quantiles from a released histogram, for `EstimateAnswer`."""

    low: float
    high: float
    bins: Any
    probabilities: tuple[float, ...]
    sensitivity: Sensitivity
    intervals: float = INTERVALS

    @property
    def edges(self) -> Array:
        """The borders of the bins."""
        return grid(self.low, self.high, self.bins)

    def __call__(self, release: Release, level: float) -> Mapping[str, Array]:
        """Values and intervals; they have no standard error."""
        found = quantiles(release, self.edges, np.array(self.probabilities), level)
        if not isinstance(self.bins, str):
            return {"value": found.estimate, "low": found.low, "high": found.high}
        low, high = np.ceil(found.low) + 0.0, np.floor(found.high)  # whole numbers in whose bins they lie; no -0
        return {"value": np.clip(np.floor(found.estimate + 0.5), low, high), "low": low, "high": high}

    def noise(self, budget: Budget) -> NoiseLaw:
        """The search for these quantiles."""
        return search_law((len(self.edges) - 1,), self.probabilities, self.sensitivity, budget, self.intervals)


# --- regressions ---


@changes("regression")
def change_in_regression(
    shape: Shape, *, target: str, columns: Named, adjacency: str, unit: str | None = None, contributions: int = 1
) -> Sensitivity:
    """Each row of a unit adds z z^T with |z| <= sqrt(1 + columns), or products; see `moments.bounded_moments`."""
    low, high, _ = terms_of(target, domain_of(columns))
    rows = rows_of(unit, contributions)
    return change_in_bounded_moments(shape, low=low, high=high, contributions=rows, adjacency=added(adjacency))


def terms_of(target: str, columns: Mapping[str, Column]) -> tuple[list[float], list[float], tuple[str, ...]]:
    """The bounds of the target and of all features, and the names of the features.

    A categorical column is one feature per value but the first, 1 in rows with that value and 0 in others.
    """
    ends = bounds_of(target, columns[target])
    low, high, names = features_of({name: column for name, column in columns.items() if name != target})
    return [ends[0], *low], [ends[1], *high], names


def features_of(columns: Mapping[str, Column]) -> tuple[list[float], list[float], tuple[str, ...]]:
    """The bounds and the names of the features that columns make."""
    bounds, names = list[tuple[float, float]](), list[str]()
    for name, column in columns.items():
        if is_indicated(column):
            names += [f"{name}={value}" for value in column.categories[1:]]
            bounds += [(0.0, 1.0)] * (len(column.categories) - 1)
        else:
            names.append(name)
            bounds.append(bounds_of(name, column))
    if not 1 <= len(names) < MOST_TERMS:
        raise InvalidInput(
            f"a regression must have 1 to {MOST_TERMS - 1} features, got {len(names)}; a categorical column is one per "
            "value but the first"
        )
    low, high = zip(*bounds, strict=True)
    return list(low), list(high), tuple(names)


def is_indicated(column: Column) -> bool:
    """Whether a column enters a regression as one feature per value but the first."""
    return isinstance(column, Categorical) and not isinstance(column, Ordered)


def bounds_of(name: str, column: Column) -> tuple[float, float]:
    """The bounds of a column's numbers: false and true are 0 and 1, values of an ordered list 0, 1, 2 and so on."""
    if isinstance(column, Numeric) and math.isfinite(column.high - column.low):
        return column.low, column.high
    if isinstance(column, Boolean):
        return 0.0, 1.0
    if isinstance(column, Ordered) and len(column.values) > 1:
        return 0.0, len(column.values) - 1.0
    raise InvalidInput(f"column {name!r} must be numeric, boolean or ordered to count as a number")


def moments_answer(rows: Array, asked: Mapping[str, Any], axes: Axes, computed: OfMoments) -> EstimateAnswer:
    """What is computed from the second moments of rows, or where delta is 0 from products."""
    low, high, sides = computed.low, computed.high, len(computed.low) + 1
    values = [
        made(rows, low, high).value if len(rows) else np.zeros(shape)
        for made, shape in ((bounded_moments, (sides, sides)), (bounded_products, (sides * (sides + 1) // 2,)))
    ]
    return EstimateAnswer.of(values[0], asked, axes=axes, computed=computed, pure=Answer.of(values[1], asked))


# --- variances, covariances, correlations, components ---


@changes("moments")
def change_in_moments(
    shape: Shape, *, of: str, columns: Named, adjacency: str, unit: str | None = None, contributions: int = 1
) -> Sensitivity:
    """Each row of a unit adds z z^T with |z| <= sqrt(1 + columns), or products; see `moments.bounded_moments`."""
    low, high = zip(*(bounds_of(name, column) for name, column in domain_of(columns).items()), strict=True)
    rows = rows_of(unit, contributions)
    return change_in_bounded_moments(shape, low=low, high=high, contributions=rows, adjacency=added(adjacency))


@dataclass(frozen=True)
class OfMoments:
    """What follows from released moments, for `EstimateAnswer`: a method of `Moments`, and its arguments."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    of: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, release: Release, level: float) -> Mapping[str, Any]:
        """Values, standard errors and intervals; for regressions and components also whether these are reliable.

        They are if the noise is small enough for intervals to hold, or for components to be distinguishable.
        """
        moments = Moments(release, np.array(self.low), np.array(self.high))
        found: Estimate = getattr(moments, self.of)(**self.arguments, level=level)
        numbers: dict[str, Any] = numbers_of(found)
        if self.of == "regression":
            numbers["reliable"] = np.full(len(found.value), moments.reliable(self.arguments["target"]))
        if self.of == "components":
            apart = np.max(found.standard_error, axis=1) < RELIABLE
            numbers["reliable"] = np.repeat(apart, found.value.shape[1])
        return numbers


def added(adjacency: str) -> str:
    """The adjacency; raises InvalidInput unless it is add/remove."""
    if adjacency != ADD_REMOVE:
        raise InvalidInput(f"adjacency must be add/remove for estimates and marginals of a table, got {adjacency}")
    return adjacency
