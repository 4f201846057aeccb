"""Columns of Arrow as cells, by their declared type: nothing here depends on a cell, or fails on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp.tables.sources import Cells

UNKNOWN = object()
"""A cell of a type that has no text, number or day, such as a list."""

_DAYS = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def arrow_cells(column: Any) -> Cells:
    """The distinct values of an Arrow column and their places, or the array of its numbers or days."""
    import pyarrow
    from pyarrow import compute, types

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    kind = column.type
    if types.is_dictionary(kind):
        values, inner = arrow_cells(column.dictionary)
        inner = np.arange(len(column.dictionary)) if inner is None else inner
        return Cells([*values, None], np.append(inner, len(values))[_places(column)])
    if types.is_floating(kind):
        return Cells(column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False))  # null is NaN
    if types.is_date(kind) or types.is_timestamp(kind):
        return Cells(_days(column, kind))
    if any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view, types.is_binary_view)):
        column = column.cast(pyarrow.large_binary())  # bytes that are not UTF-8 cannot become text
    elif not any(
        test(kind)
        for test in (types.is_integer, types.is_boolean, types.is_decimal, types.is_binary, types.is_large_binary)
    ):
        valid = compute.is_valid(column).to_numpy(zero_copy_only=False)
        return Cells([None, UNKNOWN], valid.astype(np.int64))
    coded = column.dictionary_encode()
    return Cells([*coded.dictionary.to_pylist(), None], _places(coded))


def _places(coded: Any) -> npt.NDArray[np.int64]:
    """The place in the dictionary of each row of a dictionary array; one past its end for null."""
    indices = coded.indices.fill_null(len(coded.dictionary))
    return np.asarray(indices.to_numpy(zero_copy_only=False).astype(np.int64))


def _days(column: Any, kind: Any) -> npt.NDArray[Any]:
    """Days since 1970-01-01, in the time zone that the column declares; any range, and NaT for null."""
    import pyarrow
    from pyarrow import compute, types

    if types.is_timestamp(kind) and kind.tz is not None:
        column = compute.local_timestamp(column)
    whole = pyarrow.int32() if types.is_date32(kind) else pyarrow.int64()
    valid = compute.is_valid(column).to_numpy(zero_copy_only=False)
    ticks = column.view(whole).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    a_day = 1 if types.is_date32(kind) else _DAYS["ms"] if types.is_date64(kind) else _DAYS[kind.unit]
    days = np.floor_divide(ticks, a_day)
    days[~valid] = np.iinfo(np.int64).min  # NaT
    return np.asarray(days.view("datetime64[D]"))


def draft_kinds(schema: Any) -> dict[str, str | None]:
    """The kind of column that each field of an Arrow schema declares; None where its type fits none."""
    from pyarrow import types

    def kind(declared: Any) -> str | None:
        if types.is_boolean(declared):
            return "boolean"
        if types.is_integer(declared) or types.is_floating(declared) or types.is_decimal(declared):
            return "numeric"
        if types.is_date(declared) or types.is_timestamp(declared):
            return "date"
        texts = (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary)
        return "categorical" if any(test(declared) for test in texts) else None

    return {field.name: kind(field.type) for field in schema}
