"""Sums and means of records."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from matrixdp._check import Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked, takes_relation
from matrixdp.queries import clipping, exact_sums
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.queries.clipping import Ball, Box
from matrixdp.queries.exact_sums import Integers
from matrixdp.queries.records import Rows, rows_of
from matrixdp.sensitivity import Entrywise, Frobenius, Sensitivity


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
    """The sum of the clipped records, a vector with one entry per column.

    Args:
        records: see `load`.
        norm: the largest norm of a record.
        low: instead of norm, the least value of an entry, a number or one per column.
        high: the largest value of an entry, likewise.
        columns: which columns to use; all by default.
        adjacency: which data sets are neighbours; ADD_REMOVE, REPLACE or ZERO_OUT.

    Guarantee: a neighbour changes the sum by a vector of norm at most `norm` (replace: twice that), or each entry by at
        most max(|low|, |high|) (replace: high - low, rounded up). This holds for any number of records: only the final
        sum is rounded, and the certificate covers that (see `matrixdp.queries.exact_sums`).

    Example:
        >>> from matrixdp import Budget, queries, release
        >>> answer = queries.sum([[31, 2], [45, 0]], low=0, high=[100, 10])
        >>> release(*answer, Budget(1.0, 1e-6)).value.shape
        (2,)
    """
    asked = query("sum", columns=columns, norm=norm, low=low, high=high, adjacency=checked(adjacency))
    rows = rows_of(records, columns)
    bounds = clipping.region(norm, low, high, rows.width)
    total, _ = _summed(rows, bounds, asked)
    return Answer.of(exact_sums.vector_value(total, bounds, 1), asked)


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
    """The sum of the clipped records, divided by a public number.

    Args:
        records: see `load`.
        norm: the largest norm of a record.
        low: instead of norm, the least value of an entry, a number or one per column.
        high: the largest value of an entry, likewise.
        columns: which columns to use; all by default.
        adjacency: which data sets are neighbours; REPLACE and ZERO_OUT where the number of records is public.
        size: what to divide by, a constant known without the data; ADD_REMOVE needs it. The number of records by
            default; with any other size the result is that sum over `size`, and not the mean.

    Guarantee: that of `sum`, divided by the same number.

    Example:
        >>> from matrixdp import Budget, queries, release
        >>> out = release(*queries.mean([[31], [45], [28]], low=0, high=100, size=3), Budget(1.0, 1e-6))
        >>> out.value.shape
        (1,)
    """
    adjacency = checked(adjacency)
    rows = rows_of(records, columns)
    bounds = clipping.region(norm, low, high, rows.width)
    divisor = clipping.divisor(size, adjacency)
    asked = query("mean", columns=columns, norm=norm, low=low, high=high, adjacency=adjacency, size=divisor)
    total, count = _summed(rows, bounds, asked)
    divisor = asked["parameters"].setdefault("size", count)
    return Answer.of(exact_sums.vector_value(total, bounds, divisor), asked)


def _summed(rows: Rows, bounds: Ball | Box, asked: Mapping[str, Any]) -> tuple[Integers, int]:
    change_in_mean((rows.width,), **asked["parameters"])  # refuses bounds too small for exact sums
    return rows.total(partial(exact_sums.vector, bounds=bounds))


@changes("sum")
@changes("mean")
def change_in_mean(
    shape: Shape,
    *,
    adjacency: str,
    norm: Any = None,
    low: Any = None,
    high: Any = None,
    size: int = 1,
    columns: Any = None,
) -> Sensitivity:
    """What one record can change in the sum of clipped and truncated records divided by the size."""
    bounds, size = clipping.region(norm, low, high, shape[0]), clipping.checked_size(size)
    if isinstance(bounds, Ball):
        records = 2 if adjacency == REPLACE else 1
        return Frobenius(clipping.at_least(records * Fraction(bounds.norm) / size), adjacency)
    # Truncation can widen a box, by less than a step, if it moves only the end that is nearer to zero.
    widths = (box.widths(adjacency, size) for box in (bounds, exact_sums.truncated(bounds)))
    return Entrywise(np.maximum(*widths), adjacency)
