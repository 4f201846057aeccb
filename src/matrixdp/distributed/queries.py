"""Queries on partitioned records: one pass, on the workers.

Each query but `identity` is that of `matrixdp.queries`, on `partitions`. A worker clips the records of its partition
and adds them up as integers, and the partial sums are added up in a tree. Integer sums are exact, so the answer equals
that of one machine to the last bit, whatever the partitions (see `matrixdp.queries.exact_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import dask
import dask.array
import numpy as np

from matrixdp import _check, queries
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE, REPLACE, takes_relation
from matrixdp.distributed.partitions import NO_RECORDS, Partitions, named, partitions, pieces
from matrixdp.errors import InvalidInput
from matrixdp.queries import Answer
from matrixdp.queries.answer import with_columns

Query = Callable[..., Answer]


def _asked(query: Query, records: Any, columns: Any, **options: Any) -> Answer:
    """A query on partitions, with the columns that were chosen."""
    answer = query(partitions(records, columns), **options)
    return Answer(answer.value, answer.sensitivity, with_columns(answer.query, columns))


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
    return _asked(queries.sum, records, columns, norm=norm, low=low, high=high, adjacency=adjacency)


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
    return _asked(queries.mean, records, columns, norm=norm, low=low, high=high, adjacency=adjacency, size=size)


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
    options = {"norm": norm, "adjacency": adjacency, "average": average, "size": size}
    return _asked(queries.second_moment, records, columns, **options)


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
    options = {"norm": norm, "adjacency": adjacency, "center": center, "size": size}
    return _asked(queries.covariance, records, columns, **options)


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
    return _asked(queries.histogram, records, columns, edges=edges, adjacency=adjacency)


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
            value[first:last] = named(place, query, piece).value
        first = last
    if first != rows:
        raise InvalidInput(f"{place}: has {first} records where it had {rows}; the data were changed")
    return value
