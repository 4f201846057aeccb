"""The records themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.queries.answer import Answer
from matrixdp.queries.clipping import Ball, region
from matrixdp.queries.records import load
from matrixdp.sensitivity import RELATIONS, OneColumn, OneRow


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
    """The matrix of records, clipped.

    Args:
        records: see `load`.
        low: the least value of an entry, a number or one for each entry of a record.
        high: the largest value of an entry, likewise.
        norm: instead of low and high, the largest norm of a record.
        records_are: "rows", or "columns" for a matrix with one record a column.
        columns: which columns to use, when records are rows; all by default.
        relation: "replace" only; another number of records would be a matrix of another shape.

    Guarantee: replacing one record changes one row (column) of the value, by at most high - low in each entry, or by
        at most 2 norm in norm, provided that each record keeps its row: their order must not depend on what is in them.
        Shuffle records that were sorted by a column first. Nothing here looks whether they were: a warning would
        depend on the records.
    """
    if _check.choice("relation", relation, RELATIONS) != "replace":
        raise InvalidInput(
            'relation must be "replace" for the records themselves: adding or removing a record changes the shape '
            "of the value, and so shows at once"
        )
    upright = _check.choice("records_are", records_are, ("rows", "columns")) == "rows"
    if not upright and columns is not None:
        raise InvalidInput('columns cannot be chosen when records_are="columns": that would choose records')
    rows = load(records, columns)
    rows = rows if upright else np.ascontiguousarray(rows.T)
    bounds = region(norm, low, high, rows.shape[1])
    clipped = bounds.clip(rows)
    line = OneRow if upright else OneColumn
    # In a box only its widths count, and these are rounded up.
    extent = {"radius": 2 * bounds.norm} if isinstance(bounds, Ball) else {"low": 0.0, "high": bounds.widths("replace")}
    return Answer(clipped if upright else np.ascontiguousarray(clipped.T), line(**extent))
