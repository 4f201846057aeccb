"""Sums and means of records."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.queries import clipping, exact_sums
from matrixdp.queries.answer import Answer
from matrixdp.queries.clipping import Ball, Box
from matrixdp.queries.records import read
from matrixdp.sensitivity import RELATIONS, Entrywise, Frobenius, Sensitivity


def sum(
    records: Any,
    *,
    norm: float | None = None,
    low: Any = None,
    high: Any = None,
    columns: Any = None,
    relation: str = "add/remove",
) -> Answer:
    """The sum of the clipped records, a vector with one entry a column.

    Args:
        records: see `load`.
        norm: the largest norm of a record.
        low: instead of norm, the least value of an entry, a number or one a column.
        high: the largest value of an entry, likewise.
        columns: which columns to use; all by default.
        relation: "add/remove" one record, or "replace" one.

    Guarantee: a neighbour changes the sum by norm at most `norm` (replace: twice that), or each entry by at most
        max(|low|, |high|) (replace: high - low, rounded up), for any number of records: nothing but the final sum
        is rounded, and the certificate covers that (see `matrixdp.queries.exact_sums`).
    """
    _check.choice("relation", relation, RELATIONS)
    rows = read(records, columns)
    bounds = clipping.region(norm, low, high, rows.shape[1])
    sensitivity = _change(bounds, relation, 1)
    return Answer(exact_sums.vector_value(exact_sums.vector(rows, bounds), bounds, 1), sensitivity)


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
    """The sum of the clipped records, divided by a public number.

    Args:
        records: see `load`.
        norm: the largest norm of a record.
        low: instead of norm, the least value of an entry, a number or one a column.
        high: the largest value of an entry, likewise.
        columns: which columns to use; all by default.
        relation: "replace" one record, where the number of records is public, or "add/remove" one.
        size: what to divide by; the number of records by default, which only "replace" allows. A constant known
            without the data: under "add/remove" the result is a mean only as far as it is the number of records.

    Guarantee: that of `sum`, divided by the same number.
    """
    _check.choice("relation", relation, RELATIONS)
    rows = read(records, columns)
    bounds = clipping.region(norm, low, high, rows.shape[1])
    divisor = clipping.divisor(size, len(rows), relation)
    sensitivity = _change(bounds, relation, divisor)
    return Answer(exact_sums.vector_value(exact_sums.vector(rows, bounds), bounds, divisor), sensitivity)


def _change(bounds: Ball | Box, relation: str, divisor: int) -> Sensitivity:
    """What one record can change in the sum of clipped and truncated records over the divisor."""
    if isinstance(bounds, Ball):
        records = 1 if relation == "add/remove" else 2
        return Frobenius(clipping.at_least(records * Fraction(bounds.norm) / divisor), relation)
    # Truncation can make a box wider, by less than a step: if it moves only the end that is nearer to zero.
    widths = (box.widths(relation, divisor) for box in (bounds, exact_sums.truncated(bounds)))
    return Entrywise(np.maximum(*widths), relation)
