"""A table of people's data, and what can be asked of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.queries.answer import query
from matrixdp.tables.answers import TableAnswer
from matrixdp.tables.columns import OUT, STATES, Column
from matrixdp.tables.counts import change_in_cell_states, change_in_counts, shape_of
from matrixdp.tables.estimates import (
    MOST_TERMS,
    EstimateAnswer,
    OfMoments,
    OfTotals,
    QuantilesOf,
    Regression,
    bounds_of,
    change_in_means,
    change_in_moments,
    change_in_quantiles,
    change_in_regression,
    features_of,
    is_indicated,
    moments_of,
    terms_of,
)
from matrixdp.tables.kinds import Numeric
from matrixdp.tables.logistic import STEPS, LogisticAnswer, check_two_classes
from matrixdp.tables.means import bounded_totals
from matrixdp.tables.outputs import Axes
from matrixdp.tables.quantiles import INTERVALS, grid, in_bins, probabilities_in
from matrixdp.tables.rows import Made, Read, Rows, codes_of, counted_rows
from matrixdp.tables.table_marginals import MarginalsAnswer, PlanOf, cells_in, change_in_table_marginals


class Table(Rows):
    """Rows from any source, with a public domain and a unit of privacy, and the queries on them.

    Each query reads the rows anew, and gives an answer that is private until it is released.

    Example:
        >>> import pandas
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import Categorical, Domain, Numeric, Table
        >>> frame = pandas.DataFrame({"region": ["north", "south", "north"], "age": [31, 45, 28]})
        >>> ages = Numeric(0, 100, bins=[0, 18, 65, 100])
        >>> table = Table(frame, Domain({"region": Categorical(["north", "south"]), "age": ages}))
        >>> out = table.counts("region").release(Budget(1.0, 1e-6))
        >>> out.value.shape  # north, south, and one cell each for what is missing or unexpected
        (4,)
    """

    def counts(self, *by: str) -> TableAnswer:
        """How many rows there are in each combination of categories of these columns; without columns, in all.

        Guarantee: a unit changes the counts by at most `contributions` in all, a unit that is replaced by that much
            twice (see `matrixdp.queries.units`).
        """
        chosen = self.domain.chosen(by)
        shape = shape_of(chosen.values())
        sides = [len(column.labels) for column in chosen.values()]
        counts = np.zeros(int(np.prod(sides)), dtype=np.int64)

        def cell_of(read: Read, rows: int) -> Made:
            cell, inside = np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=bool)
            for name, column in chosen.items():
                codes = column.codes(*read[name])
                inside &= codes != OUT
                cell = cell * len(column.labels) + codes
            return inside, cell

        for cells in self.rows(list(chosen), cell_of):
            counts += np.bincount(cells, minlength=len(counts))
        asked = query("counts", columns=[list(item) for item in chosen.items()], **self.parameters())
        axes = tuple((name, column.labels) for name, column in chosen.items())
        return TableAnswer(counts.reshape(shape), change_in_counts(shape, **asked["parameters"]), asked, axes)

    def cell_states(self, *columns: str) -> TableAnswer:
        """How many cells of each column are within its bounds, were clipped, are unexpected or missing.

        It is a query like any other and must be paid for: such numbers tell about people too.

        Guarantee: a unit changes the four numbers of each column by at most `contributions` in all.
        """
        names = list(columns) or list(self.domain)
        chosen: dict[str, Column] = {name: self.domain[name] for name in names}
        if len(chosen) != len(names):
            raise InvalidInput("a column is named twice")
        counts = np.zeros((len(chosen), len(STATES)), dtype=np.int64)

        def states_of(read: Read, rows: int) -> Made:
            return np.ones(rows, dtype=bool), np.stack([read[name][0] for name in chosen], axis=1).astype(np.int64)

        for states in self.rows(names, states_of):
            for place, column in enumerate(states.T):
                counts[place] += np.bincount(column, minlength=len(STATES))
        asked = query("cell-states", columns=[list(item) for item in chosen.items()], **self.parameters())
        axes = (("column", tuple(chosen)), ("cells", STATES))
        sensitivity = change_in_cell_states(counts.shape, **asked["parameters"])
        return TableAnswer(counts, sensitivity, asked, axes)

    def means(self, column: str, by: Sequence[str] = ()) -> EstimateAnswer:
        """The mean of a column in each combination of categories of others; rows without a number are out.

        Guarantee: a unit changes the totals of all groups by at most `contributions` in all.
        """
        return self._totals("means", column, by)

    def sums(self, column: str, by: Sequence[str] = ()) -> EstimateAnswer:
        """The sum of a column in each combination of categories of others; rows without a number are out.

        Guarantee: that of `means`, whose totals it uses.
        """
        return self._totals("sums", column, by)

    def _totals(self, what: str, column: str, by: Sequence[str]) -> EstimateAnswer:
        chosen = self.domain.chosen(_names("by", by))
        if column in chosen:
            raise InvalidInput(f"column {column!r} is named twice")
        measured = self.domain[column]
        low, high = bounds_of(column, measured)
        columns = {**chosen, column: measured}

        def made(read: Read, rows: int) -> Made:
            inside, values = measured.numbers(*read[column])
            codes, group = codes_of(chosen, read, rows), np.zeros(rows)
            for place, each in enumerate(chosen.values()):
                group = group * len(each.labels) + codes[:, place]
            return inside & np.all(codes != OUT, axis=1), np.stack([group, values], axis=1)

        rows = self.collected(columns, made, 2)
        groups = math.prod(shape_of(chosen.values()))
        value = np.zeros((groups, 2))
        if len(rows):
            places = rows[:, 0].astype(np.int64)
            value = bounded_totals(rows[:, 1], low, high, groups=places, group_count=groups).value
        asked = query(what, of=column, columns=[list(item) for item in columns.items()], **self.parameters())
        axes = tuple((name, each.labels) for name, each in chosen.items()) or ((what.removesuffix("s"), (column,)),)
        sensitivity = change_in_means(value.shape, **asked["parameters"])
        return EstimateAnswer(value, sensitivity, asked, axes, OfTotals(low, high, summed=what == "sums"))

    def quantiles(
        self, column: str, probabilities: Sequence[float], *, bins: Any = 1 << 16, intervals: float = INTERVALS
    ) -> EstimateAnswer:
        """Quantiles of a numeric column; rows without a number are out.

        Args:
            column: the column.
            probabilities: between 0 and 1; 0.5 is the median.
            bins: public borders from the column's lower bound to its upper one, or a number of bins of equal width, or
                "whole" for a column of whole numbers. Ends of intervals are as fine as the bins; those of the domain
                are for counts.
            intervals: the share of epsilon for the intervals, see `quantiles.search_law`; 0.01 for the best values.

        Guarantee: a unit changes the counts of the bins by at most `contributions` in all.
        """
        measured = self.domain[column]
        if not isinstance(measured, Numeric):
            raise InvalidInput(f"column {column!r} must be numeric for quantiles, and is {type(measured).__name__}")
        edges, wanted = grid(measured.low, measured.high, bins), probabilities_in(probabilities)
        rows = self.numbers(column)
        value = in_bins(rows[:, 0], edges)
        bins = bins if isinstance(bins, (int, str)) else tuple(edges.tolist())
        asked = query("quantiles", columns=[[column, measured]], bins=bins, **self.parameters())
        sensitivity = change_in_quantiles(value.shape, **asked["parameters"])
        axes = (("quantile", tuple(f"{p:g}" for p in wanted.tolist())),)
        share = _check.probability("intervals", intervals)
        computed = QuantilesOf(measured.low, measured.high, bins, tuple(wanted.tolist()), sensitivity, share)
        return EstimateAnswer(value, sensitivity, asked, axes, computed, computed.noise)

    def regression(self, target: str, on: Sequence[str], *, ridge: float = 0.0) -> EstimateAnswer:
        """Least squares of a column on others: the intercept, and a coefficient per feature.

        False and true count as 0 and 1, the values of an ordered column as 0, 1, 2 and so on. A categorical column is
        one feature per value but the first. Rows with a missing or unexpected cell are out, unless that is filled in.

        Args:
            target: the column to explain.
            on: the columns that explain it.
            ridge: added to the sum of squares for each squared coefficient, but for the intercept.

        Guarantee: a unit changes the second moments by `contributions` matrices of one row each.
        """
        columns = {name: self.domain[name] for name in (target, *_names("on", on))}
        if len(columns) != 1 + len(on):
            raise InvalidInput("a column is named twice")
        low, high, names = terms_of(target, columns)
        _check.at_least_zero("ridge", ridge)

        rows = self.collected(columns, _terms(target, columns), len(low))
        asked = query(
            "regression", target=target, columns=[list(item) for item in columns.items()], **self.parameters()
        )
        moments, pure = moments_of(rows, low, high, change_in_regression, asked)
        computed = Regression(tuple(low), tuple(high), ridge)
        return EstimateAnswer(*moments, asked, (("term", ("intercept", *names)),), computed, pure=pure)

    def logistic_regression(
        self, target: str, on: Sequence[str], *, ridge: float = 1.0, steps: int = STEPS
    ) -> LogisticAnswer:
        """Logistic regression of a column with two values on others: the intercept, and a coefficient per feature.

        Coefficients are those of the logarithm of the odds of the second value, true for a boolean column. Features,
        and the rows that are out, are those of `regression`. Error bars are about the penalised fit of the rows.

        Args:
            target: the column to explain.
            on: the columns that explain it.
            ridge: half of it is added to the loss for each squared coefficient of a feature mapped to [-1, 1].
            steps: how many gradients are released.

        Guarantee: a unit has at most `contributions` rows; see `matrixdp.tables.logistic`.
        """
        columns = {name: self.domain[name] for name in (target, *_names("on", on))}
        if len(columns) != 1 + len(on):
            raise InvalidInput("a column is named twice")
        check_two_classes(target, columns[target])
        low, high, names = features_of({name: columns[name] for name in on})
        rows = self.collected(columns, _terms(target, columns), 1 + len(low))
        asked = query(
            "logistic-regression", target=target, columns=[list(item) for item in columns.items()], **self.parameters()
        )
        return LogisticAnswer(
            rows=rows, low=tuple(low), high=tuple(high), ridge=_check.positive("ridge", ridge),
            steps=_check.count("steps", steps), query=asked, axes=(("term", ("intercept", *names)),),
        )  # fmt: skip

    def variances(self, *columns: str) -> EstimateAnswer:
        """The variance of each of these columns; rows in which one of them has no number are out.

        Guarantee: a unit changes the second moments by `contributions` matrices of one row each.
        """
        return self._moments("variance", columns, (("column", columns),))

    def covariance(self, *columns: str) -> EstimateAnswer:
        """The covariances of these columns, with variances on the diagonal; see `variances`."""
        return self._moments("covariance", columns, (("column", columns), ("with", columns)))

    def correlation(self, *columns: str) -> EstimateAnswer:
        """The correlations of these columns; see `variances`."""
        return self._moments("correlation", columns, (("column", columns), ("with", columns)))

    def pca(self, *columns: str, components: int = 2) -> EstimateAnswer:
        """Principal components of these columns, standardised: loadings, and shares of the variance; see `variances`.

        Signs are such that the largest loading of a component is positive.
        """
        if not _check.count("components", components) <= len(columns):
            raise InvalidInput(f"components must be at most as many as the {len(columns)} columns, got {components}")
        numbered = tuple(str(place + 1) for place in range(components))
        axes = (("component", numbered), ("loading", (*columns, "share of variance")))
        return self._moments("components", columns, axes, (components,))

    def _moments(
        self, what: str, columns: tuple[str, ...], axes: Axes, arguments: tuple[Any, ...] = ()
    ) -> EstimateAnswer:
        chosen = {name: self.domain[name] for name in columns}
        if len(chosen) != len(columns):
            raise InvalidInput("a column is named twice")
        if not 1 <= len(chosen) < MOST_TERMS:
            raise InvalidInput(f"name 1 to {MOST_TERMS - 1} columns, got {len(chosen)}")
        low, high = zip(*(bounds_of(name, column) for name, column in chosen.items()), strict=True)
        rows = self.numbers(*chosen)
        asked = query("moments", of=what, columns=[list(item) for item in chosen.items()], **self.parameters())
        moments, pure = moments_of(rows, low, high, change_in_moments, asked)
        return EstimateAnswer(*moments, asked, axes, OfMoments(low, high, what, arguments), pure=pure)

    def marginals(
        self, *tables: Sequence[str], up_to: int | None = None, ordered: Mapping[str, str] | None = None, **options: Any
    ) -> MarginalsAnswer:
        """Many tables of counts from one release, consistent with each other: see `plan_marginals`.

        A row that is out of the count by one of the columns is out of all tables.

        Args:
            *tables: the tables, each as names of columns.
            up_to: instead, all tables of at most so many columns, of all columns with two labels or more.
            ordered: see `plan_marginals`.
            **options: `weights`, `targets` and `objective` of `plan_marginals`.

        Guarantee: a unit has at most `contributions` rows, each in one cell of every table.
        """
        if (up_to is None) == (not tables):
            raise InvalidInput("name the tables, or give up_to for all tables of so many columns, and not both")
        families = None if up_to is not None else [tuple(_names("a table", table)) for table in tables]
        counted = [name for name, size in self.domain.sizes.items() if size > 1]
        names = counted if families is None else list(dict.fromkeys(chain.from_iterable(families)))
        chosen = {name: self.domain[name] for name in names}
        for table in families or [(name,) for name in names]:
            self.domain.chosen(table)
        plan = PlanOf(
            {name: len(column.labels) for name, column in chosen.items()},
            {"up_to": up_to, "families": families, "ordered": ordered, "contributions": self.contributions},
            options,
        )
        structure = plan.structure()
        known = tuple(tuple(names[i] for i in row if i >= 0) for row in structure.incidence.tables.tolist())
        axes = tuple((name, column.labels) for name, column in chosen.items())
        cells_in(axes, known)
        rows = self.collected(chosen, lambda read, rows: counted_rows(codes_of(chosen, read, rows)))
        value = structure.answer(rows).value
        assert structure.certificate.query is not None
        found = structure.certificate.query["parameters"]
        shared = {name: found[name] for name in ("up_to", "families", "contrasts") if name in found}
        columns = [list(item) for item in chosen.items()]
        asked = query("table-marginals", columns=columns, **shared, **self.parameters())
        sensitivity = change_in_table_marginals(value.shape, **asked["parameters"])
        return MarginalsAnswer(value, sensitivity, asked, axes, plan, known)


def _terms(target: str, columns: Mapping[str, Column]) -> Callable[[Read, int], Made]:
    """What makes a row of numbers for a regression: the target, then the features."""

    def made(read: Read, rows: int) -> Made:
        inside, parts = np.ones(rows, dtype=bool), []
        for name, column in columns.items():
            known, values = column.numbers(*read[name])
            inside &= known
            if is_indicated(column) and name != target:
                parts.append(values[:, None] == np.arange(1, len(column.categories)))
            else:
                parts.append(values[:, None])
        return inside, np.concatenate(parts, axis=1).astype(np.float64)

    return made


def _names(argument: str, names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidInput(f"{argument} must be a sequence of names of columns, got {_check.kind(names)}")
    return names
