"""Records in partitions: blocks of a Dask array, partitions of a Dask DataFrame, row groups of a Parquet folder.

Errors name the place of a partition: for Parquet the file and the row group, because these can be repaired or replaced.
A row group is read in batches, so that a worker's memory does not depend on the size of row groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import dask.array
import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput
from matrixdp.queries import load
from matrixdp.queries.records import FIRST, Rows, is_file, name_of, read
from matrixdp.secure.kernels import Floats

if TYPE_CHECKING:
    import pyarrow

FAN_IN = 8
"""The number of partial sums that one task adds up."""

Part = tuple[int, Any]
"""How many records, and the sum over them; None without records."""

NO_RECORDS = "records: every partition is empty"

BATCH_ENTRIES = 1 << 22
"""Entries of a row group that are read at a time: 16 MiB of float32."""

PIECE_ENTRIES = 1 << 19
"""Entries that a query processes at a time: 4 MiB of float64, which stay in the cache from loading to adding."""

LEAST_ROWS = 512
"""The fewest records in a full piece, so that adding up the sums of pieces costs little compared with the sums. Pieces
hold this times a power of two: full blocks of `matrixdp.queries.exact_sums`."""


@dataclass(frozen=True)
class RowGroup:
    """A row group of a Parquet file, not yet read."""

    path: Path
    number: int
    rows: int
    names: tuple[str, ...]
    """The columns that the file must have."""
    chosen: tuple[str, ...]
    """The columns to read."""
    stamp: tuple[int, int]
    """Size and modification time of the file."""

    @property
    def place(self) -> str:
        """The file and the row group."""
        return f"{self.path}, row group {self.number}"

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """Reads the records in batches; refuses a file that was changed since the query was made."""
        from pyarrow import ArrowException

        size = max(1, BATCH_ENTRIES // len(self.chosen))
        count = 0
        try:
            if _stamp(self.path) != self.stamp:  # the same noise on other values would reveal their difference
                raise InvalidInput(f"{self.place}: the file was changed since the query was made; run the query again")
            with _open(self.path) as file:
                _check_names(_columns_of(file), self.names, self.place)
                # One thread, because the scheduler already runs one task per core.
                options = {"row_groups": [self.number], "columns": list(self.chosen), "use_threads": False}
                for batch in file.iter_batches(size, **options):
                    count += batch.num_rows
                    yield batch.select(list(self.chosen))
        except (ArrowException, OSError) as error:  # their text may quote a cell or a name
            raise InvalidInput(f"{self.place}: cannot be read ({type(error).__name__})") from None
        if count != self.rows:
            raise InvalidInput(f"{self.place}: has {count} records where it had {self.rows}; the data were changed")


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, eq=False)
class Partition:
    """Some records: their place, the Dask task or row group that yields them, and how many, None if unknown."""

    place: str
    content: Any
    rows: int | None = None


@dataclass(frozen=True, eq=False)
class Partitions(Rows):
    """All records, and the names or positions of the columns that were chosen."""

    parts: list[Partition]
    columns: tuple[Any, ...]

    def zeros(self) -> Array:
        """One record of zeros, on which a query gives the same sensitivity as on any records."""
        return np.zeros((1, len(self.columns)))

    @property
    def width(self) -> int:
        """See `Rows`."""
        return len(self.columns)

    def total(self, add_up: Callable[[Array], Any]) -> tuple[Any, int]:
        """See `Rows`; partial sums are added up in a tree."""
        partial_sum, sum_up = dask.delayed(_partial, pure=False), dask.delayed(_sum_up, pure=False)
        tree = [partial_sum(part.content, part.place, self.columns, add_up) for part in self.parts]
        while len(tree) > 1:
            tree = [sum_up(tree[first : first + FAN_IN]) for first in range(0, len(tree), FAN_IN)]
        with _check.withheld("computing the partitions"):
            count, total = tree[0].compute()
        if total is None:
            raise InvalidInput(NO_RECORDS)
        return total, count


def _partial(content: Any, place: str, columns: tuple[Any, ...], add_up: Callable[[Array], Any]) -> Part:
    """The sum over one partition; runs on a worker."""
    found = pieces(content, place, columns)
    return _sum_up((len(piece), named(place, lambda records: add_up(read(records)), piece)) for piece in found)


def _sum_up(parts: Iterable[Part]) -> Part:
    """The sum of parts, with the total number of records."""
    count, total = 0, None
    for more, part in parts:
        count += more
        total = part if total is None else total if part is None else total + part
    return count, total


def named(place: str, function: Callable[[Any], Any], piece: Any) -> Any:
    """Applies the function to a piece; its errors name the partition, and like those of `load` never quote a cell."""
    try:
        return function(piece)
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error}") from None


def pieces(content: Any, place: str, columns: tuple[Any, ...]) -> Iterator[Any]:
    """The records of a partition in non-empty pieces, arrays or data frames with these columns; runs on a worker."""
    if isinstance(content, RowGroup):
        first = 0
        for batch in content.batches():
            yield from _of_batch(batch, first)
            first += batch.num_rows
    elif isinstance(content, np.ndarray):
        _check_names(range(content.shape[1]), columns, place)
        yield from _cut(content, content)
    else:
        _check_names(content.columns, columns, place)
        frame = content[list(columns)]
        yield from _cut(frame, frame.to_numpy())


def _cut(records: Any, values: Any) -> Iterator[Any]:
    """Small pieces of finite floats; other records whole, so that an error can name their rows and columns."""
    if not len(records):
        return
    if not (type(values) is np.ndarray and values.dtype.kind == "f" and np.isfinite(values).all()):
        yield records
        return
    for place in _places(*values.shape):
        yield values[place]


def _of_batch(batch: pyarrow.RecordBatch, first: int) -> Iterator[Any]:
    """The same for a batch stored by columns, without copying a column; `first` is the position of its first record."""
    columns = [column for column in map(_floats, batch.columns) if column is not None]
    if len(columns) == batch.num_columns:
        for place in _places(batch.num_rows, len(columns)):
            piece = np.stack([column[place] for column in columns]).T
            if not np.isfinite(piece).all():  # here, where the piece is still in the cache
                break
            yield piece
        else:
            return
    frame = batch.to_pandas(ignore_metadata=True, use_threads=False)
    frame.attrs[FIRST] = first
    yield frame


def _floats(column: pyarrow.Array) -> Floats | None:
    """A column of floats without nulls, not copied; None for other columns."""
    from pyarrow.types import is_floating

    return column.to_numpy() if is_floating(column.type) and not column.null_count else None


def _places(rows: int, columns: int) -> Iterator[slice]:
    """The rows of each piece, as slices."""
    height = LEAST_ROWS << max(PIECE_ENTRIES // (LEAST_ROWS * columns), 1).bit_length() - 1
    return (slice(first, min(first + height, rows)) for first in range(0, rows, height))


def partitions(records: Any, columns: Any = None) -> Partitions:
    """The partitions of the records, with only the chosen columns.

    Args:
        records: a Dask array with one record per row (one dimension means one column), a Dask DataFrame or Series, or
            the path of a Parquet file or of a folder of them. Every worker must be able to read the files.
        columns: which columns to use, by name or by position from 0; all by default.

    Raises:
        InvalidInput: if the records are of another kind, or the files do not all have the same columns.
    """
    if isinstance(records, (str, Path)):
        groups = _row_groups(Path(records), columns)
        parts = [Partition(group.place + _counted(columns), group, group.rows) for group in groups]
        return Partitions(parts, groups[0].chosen)
    frames = sys.modules.get("dask.dataframe")  # a data frame can only come from there
    if frames is not None and isinstance(records, (frames.DataFrame, frames.Series)):
        return _of_frame(records.to_frame() if isinstance(records, frames.Series) else records, columns)
    return _of_array(records, columns)


def _of_frame(frame: Any, columns: Any) -> Partitions:
    names = list(frame.columns)
    chosen = [names[i] for i in _picked(names, columns)]
    tasks, note = frame[chosen].to_delayed(), _counted(columns)
    parts = [Partition(f"records, partition {i}{note}", task) for i, task in enumerate(tasks)]
    return Partitions(parts, tuple(chosen))


def _counted(columns: Any) -> str:
    """A note for errors: column positions count the chosen columns only."""
    return "" if columns is None else ", chosen columns"


def _of_array(records: Any, columns: Any) -> Partitions:
    if not isinstance(records, dask.array.Array):
        raise InvalidInput(
            "records must be a Dask array, a Dask DataFrame, or the path of a Parquet file or folder, got "
            f"{type(records).__name__}; use matrixdp.queries for what fits into memory"
        )
    if records.ndim not in (1, 2):
        raise InvalidInput(f"records must have one record per row, got {records.ndim} dimensions")
    array = records[:, None] if records.ndim == 1 else records
    if not isinstance(array.shape[1], (int, np.integer)):
        raise InvalidInput("records must have a known number of columns; call compute_chunk_sizes() on them first")
    if columns is not None:
        array = array[:, _picked(range(int(array.shape[1])), columns)]
    array = array.rechunk({1: -1})
    rows = [None if np.isnan(count) else int(count) for count in array.chunks[0]]
    blocks = enumerate(zip(array.to_delayed().ravel(), rows, strict=True))
    parts = [Partition(f"records, block {i}{_counted(columns)}", task, count) for i, (task, count) in blocks]
    return Partitions(parts, tuple(range(int(array.shape[1]))))


def _row_groups(path: Path, columns: Any = None) -> list[RowGroup]:
    """The non-empty row groups of a file or folder, in the order of file names; reads footers only."""
    from pyarrow import ArrowException

    groups: list[RowGroup] = []
    names: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    for file_path in _files(path):
        try:
            with _open(file_path) as file:
                found = _columns_of(file)
                rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        except (ArrowException, OSError) as error:
            kind = type(error).__name__
            raise InvalidInput(f"records: {file_path} is not a Parquet file that can be read ({kind})") from None
        if not names:
            names = found
            chosen = tuple(names[i] for i in _picked(names, columns))
        _check_names(found, names, f"{file_path}, row group 0")
        stamp = _stamp(file_path)
        groups += [RowGroup(file_path, i, count, names, chosen, stamp) for i, count in enumerate(rows) if count]
    if not groups:
        raise InvalidInput(f"records: {path} holds no records")
    return groups


def _check_names(found: Any, wanted: tuple[Any, ...], place: str) -> None:
    """Refuses a partition whose columns are not those of the first one: the matrix would be ragged."""
    if set(found) != set(wanted):
        missing = [i for i, name in enumerate(wanted) if name not in found]
        added = [i for i, name in enumerate(found) if name not in wanted]
        raise InvalidInput(
            f"{place}: its {len(found)} columns are not the {len(wanted)} of the first partition (missing: positions "
            f"{missing} of the first; added: positions {added}); repair it or leave it out"
        )


def _files(path: Path) -> list[Path]:
    if is_file(path):
        return [path.resolve()]
    if not path.is_dir():
        raise InvalidInput(f"records: there is no file or folder {name_of(path)}")
    files = sorted(file for file in path.resolve().rglob("*.parquet") if file.is_file())
    nested = [file for file in files if file.parent != path.resolve()]
    if nested:
        raise InvalidInput(
            f"records: {len(nested)} files are in folders inside {path}, and the names of such folders may be columns; "
            "give one folder of files, or use dask.dataframe.read_parquet"
        )
    if not files:
        raise InvalidInput(f"records: {path} holds no files that end in .parquet")
    return files


def _open(path: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path, pre_buffer=False, buffer_size=1 << 16)  # streams a row group instead of holding its bytes


def _columns_of(file: Any) -> tuple[str, ...]:
    schema = file.schema_arrow
    index = (schema.pandas_metadata or {}).get("index_columns", [])  # row labels that pandas stored, not records
    return tuple(name for name in schema.names if name not in index)


def _picked(names: Any, columns: Any) -> list[int]:
    """The positions of the chosen columns, by applying `load` to a record of positions."""
    import pandas

    if not names:
        raise InvalidInput("records must have at least one column")
    positions = np.arange(len(names))[None]
    record = positions if isinstance(names, range) else pandas.DataFrame(positions, columns=list(names))
    return [int(position) for position in load(record, columns)[0]]
