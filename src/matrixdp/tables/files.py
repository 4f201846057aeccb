"""Rows from files: separated text and Parquet."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from matrixdp import _check, _extras
from matrixdp.errors import InvalidInput
from matrixdp.tables import arrow
from matrixdp.tables.sources import ROWS, Batch, Cells, Source

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


def from_path(path: Path, columns: Sequence[str] | None) -> Source:
    """The source in a file, by how its name ends."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".parquet"]:
        return Parquet(existing(path))
    if suffixes and suffixes[-1] in _OPENERS:
        suffixes = suffixes[:-1]
    if suffixes and suffixes[-1] in _SEPARATORS:
        return csv_file(path, separator=_SEPARATORS[suffixes[-1]], columns=columns)
    raise InvalidInput(
        f"source: a path must end in .csv, .tsv (also with {', '.join(_OPENERS)}) or .parquet; use csv_file(path, "
        "separator=...) for other text, sql(database, query) for a database"
    )


def existing(path: Path) -> Path:
    """The path, if there is a file."""
    try:
        there = path.is_file()
    except (OSError, ValueError):
        there = False
    if not there:  # the text is not shown where it may be the content of a file, or an address with a password
        plain = str(path).isprintable() and len(str(path)) <= 255 and ":/" not in str(path)
        shown = str(path) if plain else "of the name given"
        raise InvalidInput(f"source: there is no file {shown}")
    return path


_LONGEST = 2**31 - 1  # characters in a cell of text


@dataclass(frozen=True, eq=False)
class Parquet:
    """A Parquet file, read by row groups."""

    path: Path

    @property
    def schema(self) -> Any:
        """What the file declares of its columns."""
        with self._opened() as file:
            return file.schema_arrow

    @property
    def names(self) -> Sequence[str]:
        """See `Source`."""
        return list(self.schema.names)

    def batches(self, wanted: Sequence[int]) -> Iterator[Batch]:
        """See `Source`."""
        names = self.names
        with self._opened() as file:
            for batch in file.iter_batches(batch_size=ROWS, columns=[names[place] for place in wanted]):
                yield [arrow_cells(batch.column(batch.schema.get_field_index(names[place]))) for place in wanted]

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        _extras.require("tables", "pyarrow")
        from pyarrow.parquet import ParquetFile

        with _check.withheld(f"reading {self.path.name}"), ParquetFile(self.path) as file:
            yield file


def csv_file(
    path: Any, *, separator: str = ",", columns: Sequence[str] | None = None, encoding: str = "utf-8-sig"
) -> CsvFile:
    """Separated text, with a header unless the columns are named here.

    Every line can be read: quotes that do not close end with the file; a short line lacks its
    last cells, and what a long one has too many is left out. Blank lines are no rows. What is no text in the encoding
    is kept, and is unexpected in every column.

    Args:
        path: a file, perhaps compressed (.gz, .bz2, .xz), or an open stream of text or bytes, such as `sys.stdin`,
            which can be read once.
        separator: one character.
        columns: the names of the columns, where the first line is a row.
        encoding: of the text.

    Example:
        >>> import pandas
        >>> from matrixdp.tables import Categorical, Domain, Table, csv_file
        >>> pandas.DataFrame({"region": ["north"], "age": [31]}).to_csv("visits.csv", sep=";", index=False)
        >>> domain = Domain({"region": Categorical(["north", "south"])})
        >>> Table(csv_file("visits.csv", separator=";"), domain).counts("region").sensitivity
        Counts(cells=1, bound=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    if not isinstance(separator, str) or len(separator) != 1 or separator in '"\r\n':
        raise InvalidInput("separator must be one character, and no quote or end of a line")
    try:
        "".encode(encoding)
    except (LookupError, TypeError):
        raise InvalidInput(f"encoding must be one that Python knows, got {_check.kind(encoding)}") from None
    if not hasattr(path, "read"):
        path = existing(Path(path))
    return CsvFile(path, separator, None if columns is None else list(columns), encoding)


class CsvFile:
    """Separated text; `csv_file` makes one."""

    def __init__(self, path: Any, separator: str, columns: list[str] | None, encoding: str) -> None:
        self._path, self._separator, self._encoding = path, separator, encoding
        self._columns, self._has_header = columns, columns is None
        self._rest = self._rows(self._as_text(path)) if hasattr(path, "read") else None

    @property
    def names(self) -> Sequence[str]:
        """See `Source`."""
        if self._columns is None:
            if self._rest is not None:
                with _check.withheld("reading the stream"):
                    self._columns = _header(next(self._rest, []))
            else:
                with self._opened() as file:
                    self._columns = _header(next(self._rows(file), []))
        return self._columns

    def batches(self, wanted: Sequence[int]) -> Iterator[Batch]:
        """See `Source`."""
        width = len(self.names)
        if self._rest is not None:
            rows, self._rest = self._rest, _read_once()
            with _check.withheld("reading the stream"):
                yield from row_batches(rows, wanted, width, texts=True)
            return
        with self._opened() as file:
            rows = self._rows(file)
            if self._has_header:
                next(rows, None)
            yield from row_batches(rows, wanted, width, texts=True)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        opener = _OPENERS.get(self._path.suffix.lower(), open)
        with _check.withheld(f"reading {self._path.name}"), opener(self._path, "rt", **self._form) as file:
            yield file

    @property
    def _form(self) -> dict[str, Any]:
        return {"encoding": self._encoding, "errors": "surrogateescape", "newline": ""}

    def _as_text(self, stream: Any) -> Any:
        return stream if isinstance(stream, io.TextIOBase) else io.TextIOWrapper(stream, **self._form)

    def _rows(self, file: Any) -> Iterator[list[str]]:
        """The rows of a stream; none makes it fail. Cells may be long, as a limit would make several rows of one."""
        csv.field_size_limit(_LONGEST)
        reader = csv.reader(file, delimiter=self._separator)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error:
                row = [""]
            if row:
                yield row


def _read_once() -> Iterator[list[str]]:
    raise InvalidInput("the stream was read already; write it to a file first, to query it more than once")
    yield


def _header(row: list[str]) -> list[str]:
    return [cell.strip() for cell in row]


def row_batches(
    rows: Iterator[Sequence[Any]], wanted: Sequence[int], width: int, *, texts: bool = False
) -> Iterator[Batch]:
    """Rows as batches of columns; a short row lacks its last cells.

    Args:
        rows: the rows.
        wanted: the positions of the columns.
        width: how many cells a row should have.
        texts: whether all cells are texts, so that equal ones are the same; others, such as 1 and True, need not be.
    """
    lacking, chosen = (None,) * width, itemgetter(*wanted, *wanted[:1])  # one more, as one alone is no tuple
    picked = (chosen(row if len(row) >= width else (*row, *lacking)) for row in rows)
    while some := list(islice(picked, ROWS)):
        columns = list(zip(*some, strict=True))[:-1]
        yield [_distinct(column) if texts else Cells(column) for column in columns]


def _distinct(column: Sequence[str | None]) -> Cells:
    """Each different text once, and where it stands: texts repeat, and each is then read once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(column))}
    return Cells(list(places), np.fromiter(map(places.__getitem__, column), dtype=np.int64, count=len(column)))


def arrow_cells(column: Any) -> Cells:
    """A column of Arrow as cells."""
    return Cells(*arrow.cells(column))
