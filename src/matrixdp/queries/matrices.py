"""The identity query: the records themselves, clipped."""

from __future__ import annotations

from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked, takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.queries.clipping import Ball, region
from matrixdp.queries.records import load
from matrixdp.sensitivity import OneColumn, OneRow, Sensitivity


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
    """The matrix of records, clipped.

    Args:
        records: see `load`.
        low: the least value of an entry, a number or one for each entry of a record.
        high: the largest value of an entry, likewise.
        norm: instead of low and high, the largest norm of a record.
        records_are: "rows", or "columns" for a matrix with one record per column.
        columns: which columns to use, when records are rows; all by default.
        adjacency: REPLACE or ZERO_OUT; another number of records would be a matrix of another shape.

    Guarantee: replacing one record changes one row (column) of the value, by at most high - low in each entry, or by at
        most twice `norm` in norm; zeroing it out, by at most max(|low|, |high|), or `norm`. This holds only if each
        record keeps its row: the order of the records must not depend on their content. Shuffle records that were
        sorted by a column first. The order is not checked, since a warning would depend on the records.

    Example:
        >>> from matrixdp.queries import identity
        >>> identity([[0.2, 1.7], [0.9, 0.4]], low=0, high=1).value.tolist()
        [[0.2, 1.0], [0.9, 0.4]]
    """
    adjacency = checked(adjacency)
    if adjacency == ADD_REMOVE:
        raise InvalidInput(
            "adjacency must be replace or zero-out for the records themselves: adding or removing a record changes the "
            "shape of the value, which is public"
        )
    upright = _check.choice("records_are", records_are, ("rows", "columns")) == "rows"
    if not upright and columns is not None:
        raise InvalidInput('columns cannot be chosen when records_are="columns": that would choose records')
    rows = load(records, columns)
    rows = rows if upright else np.ascontiguousarray(rows.T)
    bounds = region(norm, low, high, rows.shape[1])
    clipped = bounds.clip(rows)
    asked = query(
        "identity", columns=columns, norm=norm, low=low, high=high, records_are=records_are, adjacency=adjacency
    )
    return Answer.of(clipped if upright else np.ascontiguousarray(clipped.T), asked)


@changes("identity")
def change_in_records(
    shape: Shape,
    *,
    records_are: str,
    adjacency: str,
    norm: Any = None,
    low: Any = None,
    high: Any = None,
    columns: Any = None,
) -> Sensitivity:
    """One row or column changes; for a box only its widths matter, which are rounded up."""
    line, width = (OneRow, shape[1]) if records_are == "rows" else (OneColumn, shape[0])
    bounds = region(norm, low, high, width)
    if isinstance(bounds, Ball):
        return line(radius=bounds.norm * (2 if adjacency == REPLACE else 1), adjacency=adjacency)
    return line(low=0.0, high=bounds.widths(adjacency), adjacency=adjacency)
