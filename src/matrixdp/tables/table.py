"""A table of people's data, and the queries on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.queries.answer import query
from matrixdp.tables.answers import TableAnswer
from matrixdp.tables.columns import STATES, Column
from matrixdp.tables.counts import shape_of
from matrixdp.tables.estimates import (
    MOST_TERMS,
    EstimateAnswer,
    OfMoments,
    OfTotals,
    QuantilesOf,
    bounds_of,
    change_in_quantiles,
    features_of,
    is_indicated,
    moments_answer,
    terms_of,
)
from matrixdp.tables.kinds import Numeric
from matrixdp.tables.logistic import STEPS, LogisticAnswer, check_two_classes
from matrixdp.tables.mean import bounded_totals
from matrixdp.tables.outputs import Axes
from matrixdp.tables.quantile import INTERVALS, grid, in_bins, probabilities_in
from matrixdp.tables.rows import Made, Read, Rows, cell_of, codes_of
from matrixdp.tables.table_marginals import MarginalsAnswer, PlanOf, cells_in


class Table(Rows):
    """Rows from any source, with a public domain and a unit of privacy, and the queries on them.

    Each query reads the rows again, and returns an answer that is private until it is released.

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

        Guarantee: a unit changes the counts by at most `contributions` in all (replace: twice that); see
            `matrixdp.queries.units`.
        """
        chosen = self.domain.chosen(by)
        shape = shape_of(chosen.values())
        counts = np.zeros(math.prod(shape), dtype=np.int64)
        for cells in self.rows(list(chosen), partial(cell_of, chosen)):
            counts += np.bincount(cells, minlength=len(counts))
        return TableAnswer.of(counts.reshape(shape), self._asked("counts", chosen), axes=_axes(chosen))

    def cell_states(self, *columns: str) -> TableAnswer:
        """How many cells of each column are within its bounds, were clipped, are unexpected or missing.

        It is a query like any other and costs budget: such numbers reveal something about people too.

        Guarantee: a unit changes the four numbers of each column by at most `contributions` in all (replace: twice
            that).
        """
        chosen = self.domain.distinct(columns or self.domain)
        counts = np.zeros((len(chosen), len(STATES)), dtype=np.int64)

        def states_of(read: Read, rows: int) -> Made:
            return np.ones(rows, dtype=bool), np.stack([read[name][0] for name in chosen], axis=1).astype(np.int64)

        for states in self.rows(list(chosen), states_of):
            for place, column in enumerate(states.T):
                counts[place] += np.bincount(column, minlength=len(STATES))
        axes = (("column", tuple(chosen)), ("cells", STATES))
        return TableAnswer.of(counts, self._asked("cell-states", chosen), axes=axes)

    def means(self, column: str, by: Sequence[str] = ()) -> EstimateAnswer:
        """The mean of a column in each combination of categories of others; rows without a number are left out.

        Guarantee: a unit changes the totals of all groups by at most `contributions` in all.
        """
        return self._totals("means", column, by)

    def sums(self, column: str, by: Sequence[str] = ()) -> EstimateAnswer:
        """The sum of a column in each combination of categories of others; rows without a number are left out.

        Guarantee: that of `means`, whose totals it uses.
        """
        return self._totals("sums", column, by)

    def _totals(self, what: str, column: str, by: Sequence[str]) -> EstimateAnswer:
        chosen = self.domain.chosen(_names("by", by))
        columns = self.domain.distinct([*chosen, column])
        low, high = bounds_of(column, columns[column])

        def made(read: Read, rows: int) -> Made:
            inside, group = cell_of(chosen, read, rows)
            known, values = columns[column].numbers(*read[column])
            return inside & known, np.stack([group, values], axis=1)

        rows = self.collected(columns, made, 2)
        groups = math.prod(shape_of(chosen.values()))
        value = np.zeros((groups, 2))
        if len(rows):
            places = rows[:, 0].astype(np.int64)
            value = bounded_totals(rows[:, 1], low, high, groups=places, group_count=groups).value
        asked, axes = self._asked(what, columns, of=column), _axes(chosen) or ((what.removesuffix("s"), (column,)),)
        return EstimateAnswer.of(value, asked, axes=axes, computed=OfTotals(low, high, summed=what == "sums"))

    def quantiles(
        self, column: str, probabilities: Sequence[float], *, bins: Any = 1 << 16, intervals: float = INTERVALS
    ) -> EstimateAnswer:
        """Quantiles of a numeric column; rows without a number are left out.

        Args:
            column: the column.
            probabilities: between 0 and 1; 0.5 is the median.
            bins: public borders from the column's lower bound to its upper one, or a number of bins of equal width, or
                "whole" for a column of whole numbers. Ends of intervals are as fine as these bins; the bins of the
                domain are only for counts.
            intervals: the share of epsilon for the intervals, see `quantile.search_law`; with 0.01, the quantiles are
                more accurate and the intervals wider.

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
        axes = (("quantile", tuple(f"{p:g}" for p in wanted.tolist())),)
        share = _check.probability("intervals", intervals)
        sensitivity = change_in_quantiles(value.shape, **asked["parameters"])
        computed = QuantilesOf(measured.low, measured.high, bins, tuple(wanted.tolist()), sensitivity, share)
        return EstimateAnswer(value, sensitivity, asked, axes=axes, computed=computed, noise=computed.noise)

    def regression(self, target: str, on: Sequence[str], *, ridge: float = 0.0) -> EstimateAnswer:
        """Least squares of a column on others: the intercept, and one coefficient per feature.

        False and true count as 0 and 1, the values of an ordered column as 0, 1, 2 and so on. A categorical column is
        one feature per value but the first. Rows with a missing or unexpected cell are left out, unless it is filled
        in.

        Args:
            target: the column to explain.
            on: the columns that explain it.
            ridge: this times each squared coefficient, except the intercept, is added to the sum of squares.

        Guarantee: a unit changes the second moments by those of at most `contributions` rows.
        """
        columns = self.domain.distinct([target, *_names("on", on)])
        low, high, names = terms_of(target, columns)
        arguments = {"target": 0, "ridge": _check.at_least_zero("ridge", ridge)}
        rows = self.collected(columns, _terms(target, columns), len(low))
        asked, axes = self._asked("regression", columns, target=target), (("term", ("intercept", *names)),)
        return moments_answer(rows, asked, axes, OfMoments(tuple(low), tuple(high), "regression", arguments))

    def logistic_regression(
        self, target: str, on: Sequence[str], *, ridge: float = 1.0, steps: int = STEPS
    ) -> LogisticAnswer:
        """Logistic regression of a column with two values on others: the intercept, and one coefficient per feature.

        Coefficients are those of the log-odds of the second value, true for a boolean column. Features, and the rows
        that are left out, are those of `regression`. Error bars are for the penalised fit to the rows.

        Args:
            target: the column to explain.
            on: the columns that explain it.
            ridge: half of it is added to the loss for each squared coefficient of a feature mapped to [-1, 1].
            steps: how many gradients are released.

        Guarantee: a unit has at most `contributions` rows; see `matrixdp.tables.logistic`.
        """
        columns = self.domain.distinct([target, *_names("on", on)])
        check_two_classes(target, columns[target])
        low, high, names = features_of({name: columns[name] for name in on})
        rows = self.collected(columns, _terms(target, columns), 1 + len(low))
        return LogisticAnswer(
            rows=rows,
            low=tuple(low),
            high=tuple(high),
            ridge=_check.positive("ridge", ridge),
            steps=_check.count("steps", steps),
            query=self._asked("logistic-regression", columns, target=target),
            axes=(("term", ("intercept", *names)),),
        )

    def variances(self, *columns: str) -> EstimateAnswer:
        """The variance of each of these columns; rows in which one of them has no number are left out.

        Guarantee: a unit changes the second moments by those of at most `contributions` rows.
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

        Signs make the largest loading of a component positive.
        """
        if not _check.count("components", components) <= len(columns):
            raise InvalidInput(f"components must be at most as many as the {len(columns)} columns, got {components}")
        numbered = tuple(str(place + 1) for place in range(components))
        axes = (("component", numbered), ("loading", (*columns, "share of variance")))
        return self._moments("components", columns, axes, count=components)

    def _moments(self, what: str, columns: tuple[str, ...], axes: Axes, **arguments: Any) -> EstimateAnswer:
        chosen = self.domain.distinct(columns)
        if not 1 <= len(chosen) < MOST_TERMS:
            raise InvalidInput(f"name 1 to {MOST_TERMS - 1} columns, got {len(chosen)}")
        low, high = zip(*(bounds_of(name, column) for name, column in chosen.items()), strict=True)
        rows, asked = self.numbers(*chosen), self._asked("moments", chosen, of=what)
        return moments_answer(rows, asked, axes, OfMoments(low, high, what, arguments))

    def marginals(
        self, *tables: Sequence[str], up_to: int | None = None, ordered: Mapping[str, str] | None = None, **options: Any
    ) -> MarginalsAnswer:
        """Many tables of counts from one release, consistent with each other: see `plan_marginals`.

        A row that one of the columns leaves out is left out of all tables.

        Args:
            *tables: the tables, each as names of columns.
            up_to: instead, all tables of at most this many columns, over all columns with two labels or more.
            ordered: see `plan_marginals`.
            **options: `weights`, `targets` and `objective` of `plan_marginals`.

        Guarantee: a unit has at most `contributions` rows, each in one cell of every table.
        """
        if (up_to is None) == (not tables):
            raise InvalidInput("name the tables, or give up_to for all tables of up to that many columns, and not both")
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
        axes = _axes(chosen)
        cells_in(axes, known)
        value = structure.answer(self.collected(chosen, partial(codes_of, chosen))).value
        assert structure.certificate.query is not None
        found = structure.certificate.query["parameters"]
        shared = {name: found[name] for name in ("up_to", "families", "contrasts") if name in found}
        columns = [list(item) for item in chosen.items()]
        asked = query("table-marginals", columns=columns, **shared, **self.parameters())
        return MarginalsAnswer.of(value, asked, axes=axes, plan=plan, tables=known)

    def _asked(self, name: str, columns: Mapping[str, Column], **more: Any) -> dict[str, Any]:
        """The query as stated in its certificate."""
        return query(name, **more, columns=[list(item) for item in columns.items()], **self.parameters())


def _axes(columns: Mapping[str, Column]) -> Axes:
    return tuple((name, column.labels) for name, column in columns.items())


def _terms(target: str, columns: Mapping[str, Column]) -> Callable[[Read, int], Made]:
    """A function that makes rows of numbers for a regression: the target, then the features."""

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
