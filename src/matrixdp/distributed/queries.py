"""Queries on partitioned records: one pass, on the workers.

Each query but `identity` is computed from sums over the records. A worker clips the records of its partition and adds
them up as integers, with the code of `matrixdp.queries`, and the partial sums are added up in a tree. Integer sums are
exact, so the answer equals that of one machine to the last bit, whatever the partitions (see
`matrixdp.queries.exact_sums`). The sensitivity depends on the arguments alone (under replace also on the number of
records, which is public), so it is computed from one record of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import dask
import dask.array
import numpy as np

from matrixdp import _check, queries
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked, takes_relation
from matrixdp.distributed.partitions import Partitions, partitions, pieces
from matrixdp.errors import InvalidInput
from matrixdp.queries import Answer, clipping, exact_sums
from matrixdp.queries.answer import with_columns
from matrixdp.queries.clipping import Ball, Box
from matrixdp.queries.exact_sums import Integers
from matrixdp.queries.moments import change_in_covariance, covariance_query
from matrixdp.queries.records import read

FAN_IN = 8
"""The number of partial sums that one task adds up."""

Query = Callable[..., Answer]
Part = tuple[int, Any]  # how many records, and the sum over them: Integers, an array of counts, or None without records

NO_RECORDS = "records: every partition is empty"


@takes_relation
def sum(
    records: Any,
    *,
    norm: float | None = None,
    low: Any = None,
    high: Any = None,
    columns: Any = None,
    adjacency: str = ADD_REMOVE,
) -> Answer:
    """The sum of the clipped records: `matrixdp.queries.sum`, on `partitions`.

    Example:
        >>> import dask.array
        >>> from matrixdp import distributed
        >>> records = dask.array.random.default_rng(0).normal(size=(1000, 3), chunks=(250, 3))
        >>> distributed.sum(records, norm=1.0).sensitivity
        Frobenius(radius=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    query = partial(queries.sum, norm=norm, low=low, high=high, adjacency=adjacency)
    found = partitions(records, columns)
    known = query(found.zeros())  # also refuses wrong arguments before anything is read
    bounds = clipping.region(norm, low, high, len(found.columns))
    total, _ = _total(found, partial(_vector, bounds=bounds))
    return Answer(exact_sums.vector_value(total, bounds, 1), known.sensitivity, with_columns(known.query, columns))


@takes_relation
def mean(
    records: Any,
    *,
    norm: float | None = None,
    low: Any = None,
    high: Any = None,
    columns: Any = None,
    adjacency: str = ADD_REMOVE,
    size: int | None = None,
) -> Answer:
    """The sum of the clipped records, divided by a public number: `matrixdp.queries.mean`, on `partitions`.

    Example:
        >>> import dask.array
        >>> from matrixdp import distributed
        >>> records = dask.array.random.default_rng(0).normal(size=(1000, 3), chunks=(250, 3))
        >>> distributed.mean(records, norm=1.0, size=1000).sensitivity
        Frobenius(radius=0.001, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    query = partial(queries.mean, norm=norm, low=low, high=high, adjacency=adjacency)
    found = partitions(records, columns)
    query(found.zeros(), size=size)
    bounds = clipping.region(norm, low, high, len(found.columns))
    total, count = _total(found, partial(_vector, bounds=bounds))
    divisor = clipping.divisor(size, count, adjacency)
    known = query(found.zeros(), size=divisor)
    return Answer(
        exact_sums.vector_value(total, bounds, divisor), known.sensitivity, with_columns(known.query, columns)
    )


@takes_relation
def second_moment(
    records: Any,
    *,
    norm: float,
    columns: Any = None,
    adjacency: str = ADD_REMOVE,
    average: bool = False,
    size: int | None = None,
) -> Answer:
    """X^T X, for the matrix X with a clipped record in each row: `matrixdp.queries.second_moment`, on `partitions`.

    Example:
        >>> import dask.array
        >>> from matrixdp import distributed
        >>> records = dask.array.random.default_rng(0).normal(size=(1000, 3), chunks=(250, 3))
        >>> distributed.second_moment(records, norm=1.0).sensitivity
        RankOne(radius=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    query = partial(queries.second_moment, norm=norm, adjacency=adjacency, average=average)
    found = partitions(records, columns)
    query(found.zeros(), size=size)
    ball = Ball(norm)
    total, count = _total(found, partial(_moments, ball=ball))
    divisor = clipping.divisor(size, count, adjacency) if average else 1
    known = query(found.zeros(), size=divisor if average else None)
    return Answer(exact_sums.moment_value(total, ball, divisor), known.sensitivity, with_columns(known.query, columns))


@takes_relation
def covariance(
    records: Any,
    *,
    norm: float,
    columns: Any = None,
    adjacency: str = ADD_REMOVE,
    center: Any = None,
    size: int | None = None,
) -> Answer:
    """The covariance of the clipped records, about a public center or their mean: `matrixdp.queries.covariance`.

    Example:
        >>> import dask.array
        >>> from matrixdp import distributed
        >>> records = dask.array.random.default_rng(0).normal(size=(1000, 3), chunks=(250, 3))
        >>> distributed.covariance(records, norm=1.0, size=1000).sensitivity
        RankOne(radius=0.0632455532033676, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    query = partial(queries.covariance, norm=norm, adjacency=adjacency, center=center)
    found = partitions(records, columns)
    query(np.zeros((2, len(found.columns))), size=size)
    ball = Ball(norm)
    middle = None if center is None else _check.broadcast("center", center, (len(found.columns),))
    total, count = _total(found, partial(_moments, ball=ball, center=middle))
    divisor = clipping.divisor(size, count, adjacency)
    if center is not None:
        value = exact_sums.moment_value(total, ball, divisor)
    else:
        value = exact_sums.scatter_value(total, ball, count, divisor)
    asked = covariance_query(columns, norm, checked(adjacency), center, divisor, count)
    return Answer(value, change_in_covariance(value.shape, **asked["parameters"]), asked)


def _vector(records: Any, bounds: Ball | Box) -> Integers:
    return exact_sums.vector(read(records), bounds)


def _moments(records: Any, ball: Ball, center: Array | None = None) -> Integers:
    rows = read(records)
    return exact_sums.moments(rows if center is None else rows - center, ball)


@takes_relation
def histogram(records: Any, *, edges: Any, columns: Any = None, adjacency: str = ADD_REMOVE) -> Answer:
    """The number of records in each cell of a grid: `matrixdp.queries.histogram`, on `partitions`.

    Example:
        >>> import dask.array
        >>> from matrixdp import distributed
        >>> records = dask.array.random.default_rng(0).normal(size=(1000, 3), chunks=(250, 3))
        >>> distributed.histogram(records[:, 0], edges=[-2, -1, 0, 1, 2]).sensitivity
        Counts(cells=1, bound=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    query = partial(queries.histogram, edges=edges, adjacency=adjacency)
    found = partitions(records, columns)
    known = query(found.zeros())
    total, _ = _total(found, partial(_counts, query=query))
    return Answer(total, known.sensitivity, with_columns(known.query, columns))


def _counts(records: Any, query: Query) -> Array:
    return query(records).value  # whole numbers, whose sums are exact in floats


@takes_relation
def identity(
    records: Any,
    *,
    low: Any = None,
    high: Any = None,
    norm: float | None = None,
    records_are: str = "rows",
    columns: Any = None,
    adjacency: str = REPLACE,
) -> Answer:
    """The matrix of records, clipped: `matrixdp.queries.identity`, as a Dask array with one block per partition.

    Before the array is computed, only lengths of partitions that are not known yet are computed, as for a DataFrame.

    Guarantee: that of `matrixdp.queries.identity`, provided that the lengths of the partitions are public too: the
        blocks of the result reveal them.

    Example:
        >>> import dask.array
        >>> from matrixdp import distributed
        >>> records = dask.array.random.default_rng(0).normal(size=(1000, 3), chunks=(250, 3))
        >>> distributed.identity(records, norm=1.0).value.numblocks
        (4, 1)
    """
    query = partial(queries.identity, low=low, high=high, norm=norm, adjacency=adjacency)
    upright = _check.choice("records_are", records_are, ("rows", "columns")) == "rows"
    if not upright and not (columns is None and isinstance(records, dask.array.Array)):
        raise InvalidInput('records_are="columns" is for Dask arrays, without columns=: that would choose records')
    found = partitions(records if upright else records.T, columns)
    record = found.zeros() if upright else found.zeros().T
    known = query(record, records_are=records_are)
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
    return Answer(value if upright else value.T, known.sensitivity, with_columns(known.query, columns))


def _lengths(found: Partitions) -> Sequence[int]:
    known = [part.rows for part in found.parts if part.rows is not None]
    if len(known) == len(found.parts):
        return known
    with _check.withheld("computing the partitions"):
        counted: Sequence[int] = dask.compute(*[dask.delayed(len)(part.content) for part in found.parts])
    return counted


def _clipped(content: Any, place: str, columns: tuple[Any, ...], query: Query, rows: int) -> Array:
    """The clipped records of one partition; runs on a worker."""
    value, first = np.empty((rows, len(columns))), 0
    for piece in pieces(content, place, columns):
        last = first + len(piece)
        if last <= rows:
            value[first:last] = _at(place, query, piece).value
        first = last
    if first != rows:
        raise InvalidInput(f"{place}: has {first} records where it had {rows}; the data were changed")
    return value


def _total(found: Partitions, add_up: Callable[[Any], Any]) -> tuple[Any, int]:
    """The sum over all partitions, and the number of records."""
    partial_sum, sum_up = dask.delayed(_partial, pure=False), dask.delayed(_sum_up, pure=False)
    tree = [partial_sum(part.content, part.place, found.columns, add_up) for part in found.parts]
    while len(tree) > 1:
        tree = [sum_up(tree[first : first + FAN_IN]) for first in range(0, len(tree), FAN_IN)]
    with _check.withheld("computing the partitions"):
        count, total = tree[0].compute()
    if total is None:
        raise InvalidInput(NO_RECORDS)
    return total, count


def _partial(content: Any, place: str, columns: tuple[Any, ...], add_up: Callable[[Any], Any]) -> Part:
    """The sum over one partition; runs on a worker."""
    return _sum_up((len(piece), _at(place, add_up, piece)) for piece in pieces(content, place, columns))


def _sum_up(parts: Iterable[Part]) -> Part:
    """The sum of parts, with the total number of records."""
    count, total = 0, None
    for more, part in parts:
        count += more
        total = part if total is None else total if part is None else total + part
    return count, total


def _at(place: str, function: Callable[[Any], Any], piece: Any) -> Any:
    """Applies the function to a piece; its errors name the partition, and like those of `load` never quote a cell."""
    try:
        return function(piece)
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error}") from None
