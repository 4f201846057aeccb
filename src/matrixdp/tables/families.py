"""Which marginal tables are wanted, and how their errors are weighted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import REPLACE
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms.solvers import marginals as solver
from matrixdp.mechanisms.solvers import workloads
from matrixdp.residuals import ResidualBasis, Whole

# The most pairs of a table and a subset of its columns.
MOST_PAIRS = 1 << 23


def column_names(sizes: Any) -> tuple[str, ...]:
    """The names of the columns; raises InvalidInput unless their sizes are valid."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise InvalidInput(
            f"sizes must map the name of each column to how many values it has, got {_check.kind(sizes)}"
        )
    if not all(isinstance(name, str) for name in sizes):
        raise InvalidInput("sizes must have names of columns as keys, each a text")
    for size in sizes.values():
        if not _check.count("each size", size) >= 2:
            raise InvalidInput("each size must be 2 or above: a column with one value needs no table")
    return tuple(sizes)


def table_rows(names: tuple[str, ...], up_to: int | None, families: Any) -> Whole:
    """One table per row, as places in the names, padded with -1."""
    if (up_to is None) == (families is None):
        raise InvalidInput("give either up_to, for all tables of up to that many columns, or families, and not both")
    if families is not None:
        listed = sorted({tuple(sorted(located(columns, names))) for columns in families})
        if not listed or listed == [()]:
            raise InvalidInput("families must hold at least one table with a column")
        width = max(map(len, listed))
        _few(sum(2 ** len(row) for row in listed))
        return np.array([[*row, *[-1] * (width - len(row))] for row in listed], dtype=np.int64)
    order = _check.count("up_to", up_to)
    if not order <= len(names):
        raise InvalidInput(f"up_to must be at most {len(names)}, the number of columns, got {order}")
    counts = [math.comb(len(names), r) for r in range(order + 1)]
    _few(sum(count * 2**r for r, count in enumerate(counts)))
    tables = np.full((sum(counts), order), -1, dtype=np.int64)
    for r, end in zip(range(order + 1), np.cumsum(counts).tolist(), strict=True):
        flat = np.fromiter(chain.from_iterable(combinations(range(len(names)), r)), np.int64, counts[r] * r)
        tables[end - counts[r] : end, :r] = flat.reshape(counts[r], r)
    return tables


def _few(pairs: int) -> None:
    if not pairs <= MOST_PAIRS:
        raise InvalidInput(
            f"the tables have {pairs} subsets of columns, at most {MOST_PAIRS} are planned; ask for fewer tables"
        )


def located(columns: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    """A table as places in the names."""
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise InvalidInput(f"a table must be given by a sequence of columns, got {_check.kind(columns)}")
    listed = list(columns)
    unknown = [index for index, column in enumerate(listed) if column not in names]
    if unknown or len(set(listed)) != len(listed):
        raise InvalidInput(
            f"a table must name columns of the plan, each once; see number {(unknown or [0])[0] + 1} of {len(listed)}"
        )
    return tuple(names.index(column) for column in listed)


def measured(subsets: Whole, adjacency: str) -> Whole:
    """The residuals that get noise: under replace, not the total."""
    return subsets[np.any(subsets >= 0, axis=1)] if adjacency == REPLACE else subsets


def kinds_of(names: tuple[str, ...], ordered: Any) -> list[str | None]:
    """How each column is used: through prefix sums, range sums, or (None) its values."""
    given = ordered or {}
    if not isinstance(given, Mapping) or not set(given) <= set(names):
        raise InvalidInput("ordered must map columns of the plan to 'prefix' or 'ranges'")
    return [_check.choice("ordered", given[name], ("prefix", "ranges")) if name in given else None for name in names]


def contrasts_of(sizes: Sequence[int], kinds: Sequence[str | None], tables: Whole) -> tuple[Whole | None, ...]:
    """The contrasts of ordered columns; empty if no column is ordered."""
    together = int(np.max(np.sum(np.append([kind is not None for kind in kinds], False)[tables], axis=1)))
    wanted = {(n, kind) for n, kind in zip(sizes, kinds, strict=True) if kind}
    made = {(n, kind): solver.ordered_contrasts(n, kind, max(1, together)) for n, kind in wanted}
    return tuple(made.get((n, kind)) if kind else None for n, kind in zip(sizes, kinds, strict=True)) if made else ()


def factors(basis: ResidualBasis, attribute: int, kind: str | None) -> tuple[float, float]:
    """What a unit of variance of an attribute's contrasts adds to the error of the task, and what its mean adds.

    The task is every value of the attribute; for an ordered one its sums, which together count as much as the values.
    """
    n = basis.sizes[attribute]
    if kind is None:
        return float(np.sum(basis.spread(attribute))), 1 / n
    gram, queries = (workloads.prefix(n), n) if kind == "prefix" else (workloads.all_ranges(n), n * (n + 1) // 2)
    inverse, matrix = basis.inverse(attribute), gram.gram()
    return float(np.sum(inverse * (matrix @ inverse))) * n / queries, float(np.sum(matrix)) / n / queries


def by_table(name: str, given: Any, names: tuple[str, ...], tables: Whole, default: float) -> Array:
    """A number above 0 for each table, from those given and the default."""
    numbers = np.full(len(tables), default)
    if not given:
        return numbers
    rows = {tuple(i for i in row if i >= 0): index for index, row in enumerate(tables.tolist())}
    for columns, number in given.items():
        table = tuple(sorted(located(columns, names)))
        if table not in rows:
            raise InvalidInput(f"{name} must be for tables of the plan; one of {len(table)} columns is not among them")
        numbers[rows[table]] = _check.positive(name, number)
    return numbers


def limits_for(
    basis: ResidualBasis, found: solver.Incidence, names: tuple[str, ...], targets: Any, default: float
) -> Array:
    """For each table with a target: the coefficients of the residuals' variances in its mean variance / target^2."""
    limits = by_table("targets", targets, names, found.tables, default)
    cells = np.append(basis.sizes, 1.0)[found.tables].prod(axis=1)
    spreads = [float(np.sum(basis.spread(i))) for i in range(len(basis.sizes))]
    terms = found.coefficients(spreads, [1 / n for n in basis.sizes]) / (cells * limits**2)[found.table]
    limited = np.flatnonzero(np.isfinite(limits)).tolist()
    if not len(limited) <= solver.MOST:
        raise InvalidInput(f"at most {solver.MOST} tables may have a target, got {len(limited)}; give fewer")
    rows = []
    for table in limited:
        rows.append(solver.aligned(basis, found, found.by_subset(np.where(found.table == table, terms, 0.0))))
    return np.array(rows).reshape(len(rows), len(basis.subsets))
