"""Queries on partitioned records: one pass, on the workers.

Each of these queries is a sum over the records, up to a public factor. So a worker asks the query of `matrixdp.queries`
about its partition, with the same clipping, and the partial values are added up in a tree. What a neighbour can change
depends on the arguments alone; one record of zeros is enough to ask the query for that.

The tree adds two by two, as `matrixdp.queries.clipping.total` does, and is the same every time. So the bound on the
rounding of a sum that is given there holds here, too.

`DataDependentBound` warns where the records are: in the log of the worker that finds a bound to be the extreme of its
partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import dask
import dask.array
import numpy as np

from matrixdp import _check, queries
from matrixdp._check import Array
from matrixdp.distributed.partitions import Partitions, partitions, pieces
from matrixdp.errors import InvalidInput
from matrixdp.queries import Answer, clipping
from matrixdp.queries.moments import change_about_mean
from matrixdp.queries.records import read
from matrixdp.sensitivity import Frobenius

FAN_IN = 8
"""Partial values that one task adds up."""

Query = Callable[..., Answer]
Part = tuple[int, Array | None]  # how many records, and the query's value on them

NO_RECORDS = "records: every partition is empty"


def sum(
    records: Any,
    *,
    norm: float | None = None,
    low: Any = None,
    high: Any = None,
    columns: Any = None,
    relation: str = "add/remove",
) -> Answer:
    """The sum of the clipped records: `matrixdp.queries.sum`, on `partitions`."""
    return _added(records, columns, partial(queries.sum, norm=norm, low=low, high=high, relation=relation))


def mean(
    records: Any,
    *,
    norm: float | None = None,
    low: Any = None,
    high: Any = None,
    columns: Any = None,
    relation: str = "replace",
    size: int | None = None,
) -> Answer:
    """The sum of the clipped records, divided by a public number: `matrixdp.queries.mean`, on `partitions`."""
    bounds = {"norm": norm, "low": low, "high": high, "relation": relation}
    return _averaged(records, columns, partial(queries.sum, **bounds), partial(queries.mean, **bounds), relation, size)


def second_moment(
    records: Any,
    *,
    norm: float,
    columns: Any = None,
    relation: str = "add/remove",
    average: bool = False,
    size: int | None = None,
) -> Answer:
    """X^T X, for the matrix X with a clipped record in each row: `matrixdp.queries.second_moment`, on `partitions`."""
    query = partial(queries.second_moment, norm=norm, relation=relation)
    if average:
        return _averaged(records, columns, query, partial(query, average=True), relation, size)
    return _added(records, columns, partial(query, size=size))


def covariance(
    records: Any,
    *,
    norm: float,
    columns: Any = None,
    relation: str = "replace",
    center: Any = None,
    size: int | None = None,
) -> Answer:
    """The covariance, about a public center or the records' own mean: `matrixdp.queries.covariance`, on `partitions`.

    About their mean the scatter is sum x x^T - s s^T / n, with s the sum of the n clipped records, from one pass. If
    (256 + log2 n + 2) 2^-53 = a, the first term is off by at most a n r^2 and, as |s| <= n r, the second by 2 a n r^2
    and some: no more than the 4 a n r^2 of one machine, where records of norm up to 2r are added.
    """
    query = partial(queries.covariance, norm=norm, relation=relation, center=center)
    if center is not None:
        return _averaged(records, columns, partial(query, size=1), query, relation, size)
    found = partitions(records, columns)
    query(np.zeros((2, len(found.columns))), size=size)  # refuses wrong arguments before anything is read
    count, sums = _total(found, partial(_moments, norm=norm))
    divisor = clipping.divisor(size, count, relation)
    change = change_about_mean(clipping.Ball(norm), count, divisor, relation)
    return Answer((sums[:-1] - np.outer(sums[-1], sums[-1]) / count) / divisor, change)


def _moments(records: Any, norm: float) -> Answer:
    """The second moment of the clipped records, and below it their sum."""
    rows = clipping.Ball(norm).clip(read(records))
    moment, vector = clipping.total(clipping.gram, rows), clipping.total(clipping.add, rows)
    change = clipping.root_at_least(Fraction(norm) ** 4 + Fraction(norm) ** 2)
    return Answer(np.vstack([moment, vector]), Frobenius(change, "add/remove"))


def histogram(records: Any, *, edges: Any, columns: Any = None, relation: str = "add/remove") -> Answer:
    """How many records fall into each cell of a grid: `matrixdp.queries.histogram`, on `partitions`."""
    return _added(records, columns, partial(queries.histogram, edges=edges, relation=relation))


def identity(
    records: Any,
    *,
    low: Any = None,
    high: Any = None,
    norm: float | None = None,
    records_are: str = "rows",
    columns: Any = None,
    relation: str = "replace",
) -> Answer:
    """The matrix of records, clipped: `matrixdp.queries.identity`, as a Dask array with a block a partition.

    Nothing is read before the array is computed, but for the lengths of the partitions of a Dask DataFrame.

    Guarantee: that of `matrixdp.queries.identity`, provided that the lengths of the partitions are public too: they are
        the blocks of the result.
    """
    query = partial(queries.identity, low=low, high=high, norm=norm, relation=relation)
    upright = _check.choice("records_are", records_are, ("rows", "columns")) == "rows"
    if not upright and not (columns is None and isinstance(records, dask.array.Array)):
        raise InvalidInput('records_are="columns" is for Dask arrays, without columns=: that would choose records')
    found = partitions(records if upright else records.T, columns)
    record = found.zeros() if upright else found.zeros().T
    sensitivity = query(record, records_are=records_are).sensitivity
    blocks = [
        dask.array.from_delayed(
            dask.delayed(_clipped, pure=False)(part.content, part.place, found.columns, query, rows),
            shape=(rows, len(found.columns)),
            dtype=np.float64,
        )
        for part, rows in zip(found.parts, _lengths(found), strict=True)
        if rows
    ]
    if not blocks:
        raise InvalidInput(NO_RECORDS)
    value = dask.array.concatenate(blocks)
    return Answer(value if upright else value.T, sensitivity)


def _lengths(found: Partitions) -> Sequence[int]:
    known = [part.rows for part in found.parts if part.rows is not None]
    if len(known) == len(found.parts):
        return known
    counted: Sequence[int] = dask.compute(*[dask.delayed(len)(part.content) for part in found.parts])
    return counted


def _clipped(content: Any, place: str, columns: tuple[Any, ...], query: Query, rows: int) -> Array:
    """The clipped records of one partition; runs on a worker."""
    value, first = np.empty((rows, len(columns))), 0
    for piece in pieces(content, place, columns):
        last = first + len(piece)
        if last <= rows:
            value[first:last] = _ask(query, piece, place)
        first = last
    if first != rows:
        raise InvalidInput(f"{place}: has {first} records where it had {rows}; the data were changed")
    return value


def _added(records: Any, columns: Any, query: Query) -> Answer:
    """The sum of a query over all partitions."""
    found = partitions(records, columns)
    sensitivity = query(found.zeros()).sensitivity  # also refuses wrong arguments before anything is read
    return Answer(_total(found, query)[1], sensitivity)


def _averaged(records: Any, columns: Any, part: Query, whole: Query, relation: str, size: int | None) -> Answer:
    """The sum of `part` over all partitions, over the divisor of the query `whole`."""
    found = partitions(records, columns)
    whole(found.zeros(), size=size)
    count, value = _total(found, part)
    divisor = clipping.divisor(size, count, relation)
    return Answer(value / divisor, whole(found.zeros(), size=divisor).sensitivity)


def _total(found: Partitions, query: Query) -> tuple[int, Array]:
    """The number of records, and the sum of a query over all partitions."""
    partial_value, sum_up = dask.delayed(_partial, pure=False), dask.delayed(_sum_up, pure=False)
    tree = [partial_value(part.content, part.place, found.columns, query) for part in found.parts]
    while len(tree) > 1:
        tree = [sum_up(tree[first : first + FAN_IN]) for first in range(0, len(tree), FAN_IN)]
    count, value = tree[0].compute()
    if value is None:
        raise InvalidInput(NO_RECORDS)
    return count, value


def _partial(content: Any, place: str, columns: tuple[Any, ...], query: Query) -> Part:
    """A query on one partition; runs on a worker."""
    return _sum_up((len(piece), _ask(query, piece, place)) for piece in pieces(content, place, columns))


def _sum_up(parts: Iterable[Part]) -> Part:
    """The parts added two by two, then those sums two by two, and so on; never more than log2 of them are held."""
    waiting: list[tuple[int, Part]] = []
    for part in parts:
        level = 0
        while waiting and waiting[-1][0] == level:
            part, level = _plus(waiting.pop()[1], part), level + 1
        waiting.append((level, part))
    total: Part = (0, None)
    for _, part in reversed(waiting):
        total = _plus(part, total)
    return total


def _plus(first: Part, second: Part) -> Part:
    count = first[0] + second[0]
    if first[1] is None or second[1] is None:
        return count, second[1] if first[1] is None else first[1]
    return count, first[1] + second[1]


def _ask(query: Query, piece: Any, place: str) -> Array:
    """A query's value; its errors name the partition, and like those of `load` never quote a cell."""
    try:
        return query(piece).value
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error}") from None
