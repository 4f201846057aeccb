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
from matrixdp.tables.arrow import arrow_cells
from matrixdp.tables.sources import ROWS, Batch, Cells, Source

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


def from_path(path: Path, columns: Sequence[str] | None) -> Source:
    """The source in a file, by the suffix of its name."""
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
    """The path; raises InvalidInput unless it is a file."""
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
        """The names and types of the columns, as the file declares them."""
        with self._opened() as file:
            return file.schema_arrow

    @property
    def names(self) -> Sequence[str]:
        return list(self.schema.names)

    def batches(self, wanted: Sequence[int]) -> Iterator[Batch]:
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

    Every line can be read. An unclosed quote ends with the file. The last cells of a short line are missing, and extra
    cells of a long line are ignored. Blank lines are not rows. Bytes that are invalid in the encoding are kept, and
    their cell is unexpected in every column.

    Args:
        path: a file, perhaps compressed (.gz, .bz2, .xz), or an open stream of text or bytes, such as `sys.stdin`,
            which can be read once.
        separator: one character.
        columns: the names of the columns, if the first line is a row and not a header.
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
        raise InvalidInput("separator must be one character, but not a quote or a line break")
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
        self._rest: Iterator[list[str]] | None = None
        if hasattr(path, "read"):
            text = path if isinstance(path, io.TextIOBase) else io.TextIOWrapper(path, **self._form)
            self._rest = self._rows(text)

    @property
    def names(self) -> Sequence[str]:
        if self._columns is None:
            with self._opened() as rows:
                self._columns = [cell.strip() for cell in next(rows, [])]
        return self._columns

    def batches(self, wanted: Sequence[int]) -> Iterator[Batch]:
        width = len(self.names)
        with self._opened() as rows:
            if self._rest is not None:  # a stream, whose header was read with the names
                self._rest = _read_once()
            elif self._has_header:
                next(rows, None)
            yield from row_batches(rows, wanted, width, texts=True)

    @contextmanager
    def _opened(self) -> Iterator[Iterator[list[str]]]:
        """The rows of a file from its start, or the remaining rows of a stream."""
        if self._rest is not None:
            with _check.withheld("reading the stream"):
                yield self._rest
            return
        opener = _OPENERS.get(self._path.suffix.lower(), open)
        with _check.withheld(f"reading {self._path.name}"), opener(self._path, "rt", **self._form) as file:
            yield self._rows(file)

    @property
    def _form(self) -> dict[str, Any]:
        return {"encoding": self._encoding, "errors": "surrogateescape", "newline": ""}

    def _rows(self, file: Any) -> Iterator[list[str]]:
        """The rows of a stream; no row causes an error. Cells may be long: a limit would split a row into several."""
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


def row_batches(
    rows: Iterator[Sequence[Any]], wanted: Sequence[int], width: int, *, texts: bool = False
) -> Iterator[Batch]:
    """Rows as batches of columns; the last cells of a short row are missing.

    Args:
        rows: the rows.
        wanted: the positions of the columns.
        width: how many cells a row should have.
        texts: whether all cells are texts, so that equal cells are the same; equal objects such as 1 and True are not.
    """
    lacking, chosen = (None,) * width, itemgetter(*wanted, *wanted[:1])  # one more, as one item alone gives no tuple
    picked = (chosen(row if len(row) >= width else (*row, *lacking)) for row in rows)
    while some := list(islice(picked, ROWS)):
        columns = list(zip(*some, strict=True))[:-1]
        yield [_distinct(column) if texts else Cells(column) for column in columns]


def _distinct(column: Sequence[str | None]) -> Cells:
    """The distinct texts and their places, so that a text that repeats is read once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(column))}
    return Cells(list(places), np.fromiter(map(places.__getitem__, column), dtype=np.int64, count=len(column)))
