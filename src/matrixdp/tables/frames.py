"""Rows from data frames and arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check, _extras
from matrixdp.errors import InvalidInput
from matrixdp.tables.arrow import arrow_cells
from matrixdp.tables.sources import ROWS, Batch, Cells, Source


@dataclass(frozen=True, eq=False)
class Frame:
    """A data frame in memory, or one that is computed in parts."""

    names: Sequence[Any]
    read: Callable[[Sequence[int]], Iterator[Batch]]

    def batches(self, wanted: Sequence[int]) -> Iterator[Batch]:
        with _check.withheld("reading the frame"):
            yield from self.read(wanted)


def from_array(array: npt.NDArray[Any], columns: Sequence[str] | None) -> Source:
    """The rows of a two-dimensional array, or of one with named fields."""
    if array.dtype.names is not None and array.ndim == 1:
        names: Sequence[str] = list(array.dtype.names)
        parts = [array[name] for name in names]
    else:
        if array.ndim != 2:
            raise InvalidInput(f"an array must have rows and columns, got {array.ndim} dimensions")
        if columns is None or len(columns) != array.shape[1]:
            raise InvalidInput(f"columns must name the {array.shape[1]} columns of the array, in order")
        names, parts = list(columns), list(array.T)

    def read(wanted: Sequence[int]) -> Iterator[Batch]:
        for first in range(0, len(array), ROWS):
            yield [Cells(_known(parts[place][first : first + ROWS])) for place in wanted]

    return Frame(names, read)


def _known(values: npt.NDArray[Any]) -> Sequence[Any] | npt.NDArray[Any]:
    """Numbers and days stay arrays; all else is a list of cells."""
    if isinstance(values, np.ma.MaskedArray):
        values = np.ma.filled(values.astype(object), None)
    return values if values.dtype.kind in "iufM" else list(values)


def from_frame(given: Any) -> Source:
    """The rows of any data frame that narwhals knows."""
    _extras.require("tables", "narwhals", "pyarrow")
    import narwhals

    if type(given).__module__.partition(".")[0] == "dask":
        return Frame(list(given.columns), lambda wanted: _dask(given, wanted))
    try:
        given = narwhals.to_native(given, pass_through=True)
        frame = narwhals.from_native(given)
    except Exception as reason:  # its text may quote names, or cells
        raise InvalidInput(
            "source must be a data frame whose columns have different names, an array, a path, csv_file(...) or "
            f"sql(...), got {_check.kind(given)} ({type(reason).__name__})"
        ) from None
    if frame.implementation.is_pandas():
        return Frame(list(given.columns), lambda wanted: _pandas(given, wanted))
    if frame.implementation.is_polars():
        return Frame(frame.collect_schema().names(), lambda wanted: _polars(frame.lazy().to_native(), wanted))
    names = frame.collect_schema().names()

    def read(wanted: Sequence[int]) -> Iterator[Batch]:
        part = frame.select([names[place] for place in wanted])
        table = part.collect("pyarrow").to_native() if isinstance(part, narwhals.LazyFrame) else part.to_arrow()
        for batch in table.to_batches(max_chunksize=ROWS):
            yield [arrow_cells(column) for column in batch.columns]

    return Frame(names, read)


def _pandas(frame: Any, wanted: Sequence[int]) -> Iterator[Batch]:
    for first in range(0, len(frame), ROWS):
        part = frame.iloc[first : first + ROWS]
        yield [_pandas_cells(part.iloc[:, place]) for place in wanted]


def _pandas_cells(column: Any) -> Cells:
    """Columns of numpy types as they are; those that Arrow holds, or may hold, by Arrow; others as objects.

    As objects of pandas, days far away and bytes that are not text would fail.
    """
    import pandas
    import pyarrow

    if isinstance(column.dtype, np.dtype):
        return Cells(_known(column.to_numpy()))
    on_arrow = isinstance(column.dtype, (pandas.ArrowDtype, pandas.DatetimeTZDtype))
    if on_arrow or getattr(column.dtype, "storage", None) == "pyarrow":
        return arrow_cells(pyarrow.array(column))
    return Cells(list(column.astype(object)))


def _dask(frame: Any, wanted: Sequence[int]) -> Iterator[Batch]:
    for part in range(frame.npartitions):
        yield from _pandas(frame.partitions[part].compute(), wanted)


def _polars(frame: Any, wanted: Sequence[int]) -> Iterator[Batch]:
    import polars

    names = frame.collect_schema().names()
    for part in frame.select([names[place] for place in wanted]).collect_batches(chunk_size=ROWS):
        batch = []
        for column in part.get_columns():
            if column.dtype == polars.Object:
                batch.append(Cells(column.to_list()))
            else:  # Arrow has no 128-bit integers
                plain = column.cast(polars.String) if str(column.dtype).endswith("Int128") else column
                batch.append(arrow_cells(plain.to_arrow()))
        yield batch
