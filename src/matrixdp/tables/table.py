"""A table of people's data: its rows, what their cells can say, and whose they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE, checked
from matrixdp.errors import InvalidInput
from matrixdp.queries.answer import query
from matrixdp.queries.units import NO_UNIT, Numbering, Selection, checked_contributions
from matrixdp.tables.answers import TableAnswer
from matrixdp.tables.columns import OUT, STATES, Codes, Column, States
from matrixdp.tables.counts import change_in_cell_states, change_in_counts, shape_of
from matrixdp.tables.domain import Domain
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
    terms_of,
)
from matrixdp.tables.kinds import Numeric
from matrixdp.tables.logistic import STEPS, LogisticAnswer, check_two_classes
from matrixdp.tables.means import bounded_totals
from matrixdp.tables.moments import bounded_moments
from matrixdp.tables.outputs import Axes
from matrixdp.tables.quantiles import grid, in_bins, probabilities_in
from matrixdp.tables.reading import source_of
from matrixdp.tables.sources import Cells, positions
from matrixdp.tables.table_marginals import MarginalsAnswer, PlanOf, cells_in, change_in_table_marginals

Read = dict[str, tuple[States, Array]]
"""The state and the position of every cell of a batch, by column."""

Made = tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]
"""Which rows of a batch count, and what a query needs of each row."""


class Table:
    """Rows from any source, with a public domain and a unit of privacy.

    Rows are read anew for each query, in batches, and only the columns that it needs. That the source can be read, and
    what its columns are called, is taken as public; the number of its rows is not.

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

    def __init__(
        self,
        source: Any,
        domain: Domain,
        *,
        unit: str | None = None,
        contributions: int | None = None,
        adjacency: str = ADD_REMOVE,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Looks at the names of the columns and at no row.

        Args:
            source: see `matrixdp.tables.source_of`.
            domain: what the cells of each column can say, from public knowledge.
            unit: the column of ids whose owners the guarantee protects, each with all rows; without it, every row is
                a unit of its own. Rows without an id do not count.
            contributions: how many rows of a unit count, drawn in secret.
            adjacency: ADD_REMOVE, or REPLACE or ZERO_OUT where the number of units is public.
            columns: the names of the columns, for arrays and for separated text without a header.
        """
        if not isinstance(domain, Domain):
            raise InvalidInput(f"domain must be a Domain, got {_check.kind(domain)}; Domain.from_toml reads a file")
        if (unit is None) != (contributions is None):
            raise InvalidInput(
                "unit and contributions go together: the column of ids, and how many rows of an id count. Without a "
                "unit every row counts, and is protected by itself"
            )
        if unit is not None and (not isinstance(unit, str) or not unit.strip()):
            raise InvalidInput(f"unit must be the name of a column, got {_check.kind(unit)}")
        self.domain, self.unit = domain, unit
        self.contributions = 1 if contributions is None else checked_contributions(contributions)
        self.adjacency = checked(adjacency)
        self._source = source_of(source, columns)
        positions(self._source, [*domain, *([] if unit is None else [unit])])

    def __repr__(self) -> str:
        unit = "" if self.unit is None else f", at most {self.contributions} rows of each {self.unit}"
        return f"Table({self.domain}{unit})"

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
            codes, group = _codes(chosen, read, rows), np.zeros(rows)
            for place, each in enumerate(chosen.values()):
                group = group * len(each.labels) + codes[:, place]
            return inside & np.all(codes != OUT, axis=1), np.stack([group, values], axis=1)

        rows = self._collected(columns, made, 2)
        groups = math.prod(shape_of(chosen.values()))
        value = np.zeros((groups, 2))
        if len(rows):
            places = rows[:, 0].astype(np.int64)
            value = bounded_totals(rows[:, 1], low, high, groups=places, group_count=groups).value
        asked = query(what, of=column, columns=[list(item) for item in columns.items()], **self.parameters())
        axes = tuple((name, each.labels) for name, each in chosen.items()) or ((what.removesuffix("s"), (column,)),)
        sensitivity = change_in_means(value.shape, **asked["parameters"])
        return EstimateAnswer(value, sensitivity, asked, axes, OfTotals(low, high, summed=what == "sums"))

    def quantiles(self, column: str, probabilities: Sequence[float], *, bins: Any = 1 << 16) -> EstimateAnswer:
        """Quantiles of a numeric column; rows without a number are out.

        Args:
            column: the column.
            probabilities: between 0 and 1; 0.5 is the median.
            bins: public borders from the column's lower bound to its upper one, or a number of bins of equal width, or
                "whole" for a column of whole numbers. Ends of intervals are as fine as the bins; those of the domain
                are for counts.

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
        computed = QuantilesOf(measured.low, measured.high, bins, tuple(wanted.tolist()), sensitivity)
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

        rows = self._collected(columns, _terms(target, columns), len(low))
        value = bounded_moments(rows, low, high).value if len(rows) else np.zeros((len(low) + 1,) * 2)
        asked = query(
            "regression", target=target, columns=[list(item) for item in columns.items()], **self.parameters()
        )
        sensitivity = change_in_regression(value.shape, **asked["parameters"])
        computed = Regression(tuple(low), tuple(high), ridge)
        return EstimateAnswer(value, sensitivity, asked, (("term", ("intercept", *names)),), computed)

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
        rows = self._collected(columns, _terms(target, columns), 1 + len(low))
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
        value = bounded_moments(rows, low, high).value if len(rows) else np.zeros((len(low) + 1,) * 2)
        asked = query("moments", of=what, columns=[list(item) for item in chosen.items()], **self.parameters())
        sensitivity = change_in_moments(value.shape, **asked["parameters"])
        return EstimateAnswer(value, sensitivity, asked, axes, OfMoments(low, high, what, arguments))

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
        rows = self._collected(chosen, lambda read, rows: _inside(_codes(chosen, read, rows)))
        value = structure.answer(rows).value
        assert structure.certificate.query is not None
        found = structure.certificate.query["parameters"]
        shared = {name: found[name] for name in ("up_to", "families", "contrasts") if name in found}
        columns = [list(item) for item in chosen.items()]
        asked = query("table-marginals", columns=columns, **shared, **self.parameters())
        sensitivity = change_in_table_marginals(value.shape, **asked["parameters"])
        return MarginalsAnswer(value, sensitivity, asked, axes, plan, known)

    # --- for queries ---

    def codes(self, *by: str) -> Codes:
        """The rows that count as places among the labels of these columns, one row per line: still private.

        It is for queries on places, such as marginals of `domain.sizes`, with the same `contributions`.

        Guarantee: without the rows of one unit, at most `contributions` lines fewer. Under other adjacencies the number
            of lines would have to be public, which policies and units do not allow.
        """
        chosen = self.domain.chosen(by)
        return self._collected(chosen, lambda read, rows: _inside(_codes(chosen, read, rows)))

    def numbers(self, *columns: str) -> Array:
        """The rows that count as numbers inside the bounds of these columns, one row per line: still private.

        Rows with a missing or unexpected cell are out, unless its policy fills it in.

        Guarantee: as for `codes`.
        """
        chosen = {name: self.domain[name] for name in columns}

        def numbers_of(read: Read, rows: int) -> Made:
            found = [column.numbers(*read[name]) for name, column in chosen.items()]
            return np.all([inside for inside, _ in found], axis=0), np.stack([each for _, each in found], axis=1)

        return self._collected(chosen, numbers_of)

    def _collected(
        self, chosen: dict[str, Column], make: Callable[[Read, int], Made], width: int | None = None
    ) -> npt.NDArray[Any]:
        """The lines that count, of so many entries each; one per column by default."""
        if self.adjacency != ADD_REMOVE:
            raise InvalidInput(f"adjacency must be add/remove for rows to be handed out, got {self.adjacency}")
        if not chosen:
            raise InvalidInput("name at least one column")
        parts = list(self.rows(list(chosen), make))
        return np.concatenate(parts) if parts else np.empty((0, width or len(chosen)), dtype=np.int64)

    def parameters(self) -> dict[str, Any]:
        """The public parameters that say whom a query on this table protects."""
        if self.unit is None:
            return {"adjacency": self.adjacency}
        return {"unit": self.unit, "contributions": self.contributions, "adjacency": self.adjacency}

    def rows(self, names: Sequence[str], make: Callable[[Read, int], Made]) -> Iterator[npt.NDArray[Any]]:
        """The rows that count, as a query needs them, in parts.

        Args:
            names: the columns that the query reads.
            make: from a batch as read and its number of rows, which rows count, and an array with one line per row. It
                must treat each row by itself.

        Guarantee: without the rows of one unit, at most `contributions` lines fewer come out (see `units`).
        """
        wanted = list(dict.fromkeys([*names, *([] if self.unit is None else [self.unit])]))
        wanted = wanted or [next(iter(self.domain))]  # any will do, to count rows
        numbering, selection = Numbering(), Selection(self.contributions)
        for batch in self._source.batches(positions(self._source, wanted)):
            cells = dict(zip(wanted, batch, strict=True))
            read = {name: _read(self.domain[name], cells[name]) for name in names}
            inside, lines = make(read, batch[0].rows)
            if self.unit is None:
                yield lines[inside]
            else:
                ids = cells[self.unit]
                units = numbering.numbers(ids.values)
                units = units if ids.places is None else units[ids.places]
                inside = inside & (units != NO_UNIT)
                selection.add(units[inside], lines[inside])
        chosen = selection.rows()
        if chosen is not None:
            yield chosen


def _codes(chosen: Mapping[str, Column], read: Read, rows: int) -> Codes:
    """The place of each row's cell among the labels of each column."""
    found = [column.codes(*read[name]) for name, column in chosen.items()]
    return np.stack(found, axis=1) if found else np.empty((rows, 0), dtype=np.int64)


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


def _inside(codes: Codes) -> Made:
    return np.all(codes != OUT, axis=1), codes


def _names(argument: str, names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidInput(f"{argument} must be a sequence of names of columns, got {_check.kind(names)}")
    return names


def _read(column: Column, given: Cells) -> tuple[States, Array]:
    states, places = column.read(given.values)
    return (states, places) if given.places is None else (states[given.places], places[given.places])
