"""Records from an array, a data frame or a file, as a matrix with one record per row.

Errors give the place and the kind of the problem, and never quote a cell, a header or a row's label: messages end up in
logs, cells are private, and what was taken for a header or a label may be a cell.
"""

from __future__ import annotations

import csv
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from matrixdp import _check, _extras
from matrixdp._check import Array
from matrixdp.errors import InvalidInput, MatrixDPError

if TYPE_CHECKING:
    import pandas

Order = Literal["C", "K"]  # row by row in memory, or as given
REMEDY = "drop or fill such records before the query, or choose other columns"
FIRST = "matrixdp: position of the first row"
"""The attribute of a data frame that is part of a larger one: row numbers in messages start from it."""


class Rows(ABC):
    """Records that a query adds up, wherever they are: here, or in partitions of `matrixdp.distributed`."""

    @property
    @abstractmethod
    def width(self) -> int:
        """How many columns were chosen."""

    @abstractmethod
    def total(self, add_up: Callable[[Array], Any]) -> tuple[Any, int]:
        """The sum of what a function gives for parts of the records, and the number of records."""


@dataclass(frozen=True, eq=False)
class InMemory(Rows):
    """Records in one array, which is their only part."""

    values: Array

    @property
    def width(self) -> int:
        """See `Rows`."""
        return int(self.values.shape[1])

    def total(self, add_up: Callable[[Array], Any]) -> tuple[Any, int]:
        """See `Rows`."""
        return add_up(self.values), len(self.values)


def rows_of(records: Any, columns: Any = None) -> Rows:
    """Records as `load` reads them, or as they are if they can be added up already."""
    return records if isinstance(records, Rows) else InMemory(read(records, columns))


def load(records: Any, columns: Any = None) -> Array:
    """Reads records into a new matrix of finite numbers, one record per row.

    Args:
        records: an array with a record in each row (one dimension means one column), a pandas DataFrame or Series, or
            the path of a .csv, .npy or .parquet file. Booleans count as 0 and 1. A CSV file is separated by commas, in
            UTF-8. A first line of numbers only is a record, and one without numbers is the header. A mix of both is
            refused, since it may be a header or a damaged record.
        columns: which columns to read, by name (data frames, CSV files with a header, Parquet files) or by position
            from 0; all by default. Columns that are not read may hold anything.

    Raises:
        InvalidInput: if anything is missing, not a number or not finite. The message gives the file and line (CSV, as
            an editor counts) or the row, and the column, both by position from 0. Whether and where there is an error
            depends on the records and is visible to whoever sees it: no guarantee covers that.

    Example:
        >>> import pandas
        >>> from matrixdp.queries import load
        >>> pandas.DataFrame({"age": [31, 45], "income": [40, 52]}).to_csv("people.csv", index=False)
        >>> load("people.csv", columns=["income"]).tolist()
        [[40.0], [52.0]]
    """
    return read(records, columns, order="C")


def read(records: Any, columns: Any = None, order: Order = "K") -> Array:
    """`load`, but by default in the memory order of the records, which may be column by column."""
    # Records can be a data frame only if pandas was imported already, so arrays do not pay for the import.
    loaded_pandas = sys.modules.get("pandas")
    if isinstance(records, (str, Path)):
        return _from_file(Path(records), columns)
    if loaded_pandas is not None and isinstance(records, loaded_pandas.Series):
        records = records.to_frame()
    if loaded_pandas is not None and isinstance(records, loaded_pandas.DataFrame):
        picked = _select(list(records.columns), columns, "records")
        return _from_frame(records.iloc[:, picked], picked, "records", order)
    return _from_array(records, columns, "records", order)


def _from_file(path: Path, columns: Any) -> Array:
    readers = {".csv": _from_csv, ".npy": _from_npy, ".parquet": _from_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:  # the text is not quoted: it may be the content of a file
        raise InvalidInput(f"records: a path must end in {', '.join(readers)}; other formats can be read with pandas")
    if not is_file(path):
        raise InvalidInput(f"records: there is no file {name_of(path)}")
    try:
        return reader(path, columns)
    except (MatrixDPError, MemoryError):
        raise
    except OSError as error:
        raise InvalidInput(f"records: {path} cannot be read ({error.strerror or type(error).__name__})") from None
    except Exception as error:
        raise InvalidInput(f"records: {path} cannot be read ({_check.origin(error)})") from None


def is_file(path: Path) -> bool:
    """Whether there is such a file.

    Raises:
        InvalidInput: for text that cannot be a path, such as the content of a file.
    """
    try:
        return path.is_file()
    except OSError:
        raise InvalidInput("records: the text given is not a file path; to use it as data, parse it first") from None


def name_of(path: Path) -> str:
    """A path for a message; text that cannot be a path, such as the content of a file, is not quoted."""
    return str(path) if str(path).isprintable() and len(path.name) <= 255 else "of the name given"


def _from_array(given: Any, columns: Any, source: str, order: Order = "C") -> Array:
    if isinstance(given, np.ma.MaskedArray):
        raise InvalidInput(f"{source}: masked arrays hide what is missing; drop or fill such records first")
    values = _check.array_of(source, given)
    if values.dtype.kind not in "biuf":
        raise InvalidInput(
            f"{source} must be an array of real numbers, got dtype {_check.entries(values.dtype)}; convert it first"
        )
    if values.ndim not in (1, 2):
        raise InvalidInput(f"{source} must have a record in each row, got {values.ndim} dimensions")
    if values.ndim == 1:
        values = values[:, None]
    picked = _select(range(values.shape[1]), columns, source)
    with np.errstate(over="ignore"):  # a long double may become infinite, which is refused next
        chosen = np.array(values if columns is None else values[:, picked], dtype=np.float64, order=order)
    return _complete(chosen, picked, lambda row: f"{source}, row {row}", source)


def _from_npy(path: Path, columns: Any) -> Array:
    try:
        values = np.load(path, allow_pickle=False)  # unpickling runs whatever code the file holds
    except (ValueError, EOFError):
        raise InvalidInput(f"records: {path} is not a plain .npy file of numbers (pickles are not read)") from None
    return _from_array(values, columns, str(path))


def _from_parquet(path: Path, columns: Any) -> Array:
    _extras.require("tables", "pyarrow")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
        schema = file.schema_arrow
        index = (schema.pandas_metadata or {}).get("index_columns", [])  # row labels that pandas stored, not records
        names = [name for name in schema.names if name not in index]
        picked = _select(names, columns, str(path))
        frame = file.read(columns=[names[i] for i in picked]).to_pandas(ignore_metadata=True)
    except ArrowException as error:  # its text may quote a cell or a name
        raise InvalidInput(f"records: {path} is not a Parquet file that can be read ({type(error).__name__})") from None
    return _from_frame(frame[[names[i] for i in picked]], picked, str(path))


def _from_frame(frame: pandas.DataFrame, positions: Sequence[int], source: str, order: Order = "C") -> Array:
    """The chosen columns of a data frame; `positions` are their positions among all columns."""
    first = frame.attrs.get(FIRST, 0)
    values = np.empty((len(frame), len(positions)), order="C" if order == "C" else "F")
    for target, position in enumerate(positions):
        column = frame.iloc[:, target]
        if column.dtype.kind not in "biuf":
            raise InvalidInput(_not_numeric(column, source, first, position))
        with np.errstate(over="ignore"):
            values[:, target] = column.to_numpy(dtype=np.float64, na_value=np.nan)
    return _complete(values, positions, lambda row: f"{source}, row {first + row}", source)


def _not_numeric(column: pandas.Series[Any], source: str, first: int, position: int) -> str:
    """The message for a column that is not numeric: its first cell that is not a number, where there is one."""
    cells = column.to_numpy(dtype=object)
    others = [row for row, cell in enumerate(cells) if not isinstance(cell, (bool, int, float, np.number))]
    dtype = _check.entries(column.dtype)
    if not others:
        return f"{source}, column {position}: has dtype {dtype}; convert it with astype(float)"
    row = first + others[0]
    return f"{source}, row {row}, column {position}: not a real number (dtype {dtype}); convert or drop it"


def _from_csv(path: Path, columns: Any) -> Array:
    numbers, lines = array("d"), array("q")
    names: list[Any] = []
    picked: list[int] = []
    for line, cells in _lines(path):
        if not names:
            names = _header(cells, path, line)
            picked = _select(names, columns, str(path))
            if isinstance(names[0], str):
                continue
        if len(cells) != len(names):
            raise InvalidInput(f"{path}, line {line}: has {len(cells)} cells, the lines before have {len(names)}")
        try:
            numbers.extend([_number(cells[i]) for i in picked])
        except ValueError:
            wrong = next(i for i in picked if not _is_number(cells[i]))
            state = "not a number (expected ',' as separator and '.' as decimal point)"
            state = state if cells[wrong].strip() else "empty"
            raise InvalidInput(f"{path}, line {line}, column {wrong}: {state}; {REMEDY}") from None
        lines.append(line)
    values = np.array(numbers, dtype=np.float64).reshape(len(lines), len(picked))
    return _complete(values, picked, lambda row: f"{path}, line {lines[row]}", str(path))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, each with the number of the line it starts on."""
    last = blank = 0
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            for cells in reader:
                line, last = last + 1, reader.line_num
                if not cells:
                    blank = blank or line
                elif blank:
                    raise InvalidInput(f"{path}, line {blank}: blank; only the end of a file may have blank lines")
                else:
                    yield line, cells
        except csv.Error:
            raise InvalidInput(f"{path}, line {reader.line_num}: not valid CSV; check its quotes") from None
        except UnicodeDecodeError:
            raise InvalidInput(f"{path}: not UTF-8 text; convert the file first") from None


def _header(row: list[str], path: Path, line: int) -> list[Any]:
    """The columns' names, or their positions if the first line is a record."""
    numeric = [_is_number(cell) for cell in row]
    if all(numeric):
        return list(range(len(row)))
    if any(numeric):
        raise InvalidInput(
            f"{path}, line {line}: numbers and other cells mixed (column {numeric.index(False)} is not a number), so "
            "it may be a header or a damaged record; repair it, or read the file with pandas"
        )
    return [cell.strip() for cell in row]


def _number(cell: str) -> float:
    if "_" in cell:  # float() accepts 1_000, other programs do not
        raise ValueError
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _select(names: Sequence[Any], columns: Any, source: str) -> list[int]:
    """The positions of the columns asked for."""
    seen: dict[Any, int] = {}
    for position, name in enumerate(names):
        if name != "" and seen.setdefault(name, position) != position:
            raise InvalidInput(f"{source}: columns {seen[name]} and {position} have the same name; rename one")
    if columns is None:
        picked = list(range(len(names)))
    elif isinstance(columns, (str, Integral)):
        picked = [_position(names, columns, source)]
    elif isinstance(columns, Iterable):
        with _check.withheld("going through columns"):
            asked = list(columns)
        picked = [_position(names, item, source, listed=type(columns) in (list, tuple)) for item in asked]
        if not picked or len(set(picked)) != len(picked):
            raise InvalidInput(f"columns must name at least one column, and each once, got {len(picked)}")
    else:
        raise InvalidInput(f"columns must be a list of names or positions, got {_check.shown(columns)}")
    nameless = [i for i in picked if names[i] == ""]
    if nameless:
        raise InvalidInput(f"{source}: column {nameless[0]} has no name; name it, or choose others with columns=")
    return picked


def _position(names: Sequence[Any], item: Any, source: str, listed: bool = True) -> int:
    """A name's position; a whole number is a position unless the names are numbers themselves.

    A message shows a name that the caller has listed, but not one from a data frame given in place of a list.
    """
    numbered = any(isinstance(name, Integral) for name in names)
    if isinstance(item, Hashable) and not isinstance(item, bool):
        if item in names:
            return list(names).index(item)
        if isinstance(item, Integral) and not numbered and 0 <= item < len(names):
            return int(item)
    asked = repr(item) if listed and type(item) is str else _check.shown(item) if listed else _check.kind(item)
    ways = "by name" if numbered and not isinstance(names, range) else f"by position 0 to {len(names) - 1}, or by name"
    raise InvalidInput(f"columns: {source} has no column {asked}; it has {len(names)} columns, chosen {ways}")


def _complete(values: Array, positions: Sequence[int], place: Callable[[int], str], source: str) -> Array:
    """The values, if there are any and all are finite."""
    if not values.size > 0:
        raise InvalidInput(f"{source}: holds no records (shape {values.shape})")
    whole = np.isfinite(values)
    if not whole.all():
        row, column = (int(i) for i in np.argwhere(~whole)[0])
        state = "missing (NaN)" if np.isnan(values[row, column]) else "infinite"
        raise InvalidInput(f"{place(row)}, column {positions[column]}: {state}; {REMEDY}")
    return values
