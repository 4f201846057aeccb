"""Sums and means of records."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from matrixdp._check import Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked, takes_relation
from matrixdp.queries import clipping, exact_sums
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.queries.clipping import Ball
from matrixdp.queries.records import read
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

    Guarantee: a neighbour changes the sum by norm at most `norm` (replace: twice that), or each entry by at most
        max(|low|, |high|) (replace: high - low, rounded up), for any number of records: nothing but the final sum
        is rounded, and the certificate covers that (see `matrixdp.queries.exact_sums`).

    Example:
        >>> from matrixdp import Budget, queries, release
        >>> answer = queries.sum([[31, 2], [45, 0]], low=0, high=[100, 10])
        >>> release(*answer, Budget(1.0, 1e-6)).value.shape
        (2,)
    """
    asked = query("sum", columns=columns, norm=norm, low=low, high=high, adjacency=checked(adjacency))
    rows = read(records, columns)
    bounds = clipping.region(norm, low, high, rows.shape[1])
    change = change_in_mean(rows.shape[1:], **asked["parameters"])
    return Answer(exact_sums.vector_value(exact_sums.vector(rows, bounds), bounds, 1), change, asked)


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
        size: what to divide by, a constant known without the data: the result is a mean only as far as it is the
            number of records. It may be left out, and is then that number, where that is public.

    Guarantee: that of `sum`, divided by the same number.

    Example:
        >>> from matrixdp import Budget, queries, release
        >>> out = release(*queries.mean([[31], [45], [28]], low=0, high=100, size=3), Budget(1.0, 1e-6))
        >>> out.value.shape
        (1,)
    """
    adjacency = checked(adjacency)
    rows = read(records, columns)
    bounds = clipping.region(norm, low, high, rows.shape[1])
    divisor = clipping.divisor(size, len(rows), adjacency)
    asked = query("mean", columns=columns, norm=norm, low=low, high=high, adjacency=adjacency, size=divisor)
    change = change_in_mean(rows.shape[1:], **asked["parameters"])
    return Answer(exact_sums.vector_value(exact_sums.vector(rows, bounds), bounds, divisor), change, asked)


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
    """What one record can change in the sum of clipped and truncated records over the size."""
    bounds = clipping.region(norm, low, high, shape[0])
    if isinstance(bounds, Ball):
        records = 2 if adjacency == REPLACE else 1
        return Frobenius(clipping.at_least(records * Fraction(bounds.norm) / size), adjacency)
    # Truncation can make a box wider, by less than a step: if it moves only the end that is nearer to zero.
    widths = (box.widths(adjacency, size) for box in (bounds, exact_sums.truncated(bounds)))
    return Entrywise(np.maximum(*widths), adjacency)
