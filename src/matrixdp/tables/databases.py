"""Rows from databases: SQLite, DuckDB, PostgreSQL, and any connection of Python's database interface.

Cells are fetched as text wherever the database can convert them: a date, a number or a type that its driver cannot
represent would otherwise cause an error that depends on a cell.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matrixdp import _check, _extras
from matrixdp.errors import InvalidInput
from matrixdp.tables import postgres
from matrixdp.tables.arrow import arrow_cells
from matrixdp.tables.files import existing, row_batches
from matrixdp.tables.sources import ROWS, Batch

_SQLITE = (".sqlite", ".sqlite3", ".db")


@dataclass(frozen=True, eq=False)
class Relation:
    """A DuckDB relation, computed by DuckDB; it may be larger than memory."""

    relation: Any

    @property
    def names(self) -> Sequence[str]:
        return list(self.relation.columns)

    def batches(self, wanted: Sequence[int]) -> Iterator[Batch]:
        with _check.withheld("reading the DuckDB relation"):
            chosen = [(_quoted(self.names[place]), str(self.relation.types[place])) for place in wanted]
            texts = [name if kind in ("FLOAT", "DOUBLE") else f"CAST({name} AS VARCHAR)" for name, kind in chosen]
            for batch in self.relation.project(", ".join(texts)).to_arrow_reader(ROWS):
                yield [arrow_cells(column) for column in batch.columns]


@dataclass(frozen=True, eq=False)
class Sql:
    """A query to a database; `sql` makes one."""

    database: Any = field(repr=False)  # an address may hold a password
    query: str

    @property
    def names(self) -> Sequence[str]:
        with self._connected() as connection:
            if _is_duckdb(connection):
                return Relation(connection.sql(self.query)).names
            with closing(connection.cursor()) as cursor:
                cursor.execute(f"SELECT * FROM ({self.query}\n) AS matrixdp_source LIMIT 0")
                return [str(column[0]) for column in cursor.description]

    def batches(self, wanted: Sequence[int]) -> Iterator[Batch]:
        names = self.names
        with self._connected() as connection:
            if _is_duckdb(connection):
                yield from Relation(connection.sql(self.query)).batches(wanted)
                return
            text = _SQLITE_BYTES if isinstance(connection, sqlite3.Connection) else "CAST({0} AS TEXT)"
            cells = ", ".join(text.format(_quoted(names[place])) for place in wanted)
            opened: AbstractContextManager[Any] = (
                postgres.cursor(connection) if postgres.is_connection(connection) else closing(connection.cursor())
            )
            with opened as cursor:
                cursor.execute(f"SELECT {cells} FROM ({self.query}\n) AS matrixdp_source")
                parts = iter(lambda: cursor.fetchmany(ROWS), [])
                yield from row_batches((row for part in parts for row in part), range(len(wanted)), len(wanted))

    def declared(self) -> dict[str, str | None]:
        """The kind of column that the database's types declare for each column, without reading a row."""
        with self._connected() as connection:
            if _is_duckdb(connection):
                relation = connection.sql(self.query)
                types: Iterable[tuple[str, str]] = zip(relation.columns, map(str, relation.types), strict=True)
            else:
                with closing(connection.cursor()) as cursor:
                    types = self._types(connection, cursor)
            return {str(name): _kind(declared) for name, declared in types}

    def _types(self, connection: Any, cursor: Any) -> Iterable[tuple[str, str]]:
        if isinstance(connection, sqlite3.Connection):  # SQLite declares types only for tables and views
            cursor.execute(f"CREATE TEMP VIEW matrixdp_source AS {self.query}")
            found = cursor.execute("PRAGMA table_info(matrixdp_source)").fetchall()
            cursor.execute("DROP VIEW matrixdp_source")
            return [(name, declared) for _, name, declared, *_ in found]
        cursor.execute(f"SELECT * FROM ({self.query}\n) AS matrixdp_source LIMIT 0")
        return [(column[0], getattr(column, "type_display", "")) for column in cursor.description]

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        with _check.withheld("reading from the database"):
            if isinstance(self.database, (str, Path)):
                with closing(_connect(str(self.database))) as connection, postgres.refusals(connection):
                    yield connection
            else:
                with postgres.refusals(self.database):
                    yield self.database


# SQLite accepts any bytes as text, and its driver fails on those that are not UTF-8.
_SQLITE_BYTES = "CASE typeof({0}) WHEN 'text' THEN CAST({0} AS BLOB) ELSE {0} END"


# How names of types begin, and the kind of column that they declare.
_TYPES = {
    "boolean": ("BOOL",),
    "numeric": ("INTEGER", "INT2", "INT4", "INT8", "INT(", "TINYINT", "SMALLINT", "MEDIUMINT", "BIGINT", "HUGEINT",
                "UINT", "USMALLINT", "UTINYINT", "UBIGINT", "UHUGEINT", "UINTEGER", "REAL", "FLOAT", "DOUBLE", "DEC",
                "NUMERIC"),
    "date": ("DATE", "TIMESTAMP"),
    "categorical": ("CHAR", "VARCHAR", "NCHAR", "NVARCHAR", "TEXT", "STRING", "BPCHAR", "CLOB", "ENUM"),
}  # fmt: skip


def _kind(declared: str) -> str | None:
    name = declared.upper()
    if name.endswith(("]", "RANGE")):  # several values in a cell
        return None
    return next(
        (kind for kind, starts in _TYPES.items() if name.startswith(starts) or (kind, name) == ("numeric", "INT")), None
    )


def _is_duckdb(connection: Any) -> bool:
    return type(connection).__name__ == "DuckDBPyConnection"


def _connect(database: str) -> Any:
    if postgres.is_address(database):
        return postgres.connect(database)
    path = existing(Path(database))
    if path.suffix.lower() in _SQLITE:
        return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    _extras.require("tables", "duckdb")
    import duckdb

    return duckdb.connect(path, read_only=True, config={"autoinstall_known_extensions": "false"})


def sql(database: Any, query: str) -> Sql:
    """The rows of a query to a database.

    Args:
        database: the path of a SQLite (.db, .sqlite, .sqlite3) or DuckDB (.duckdb) file, opened for reading; an address
            `postgresql://...`, which needs the extra `postgres`; or an open connection of Python's database interface.
        query: one SELECT. It must be chosen without looking at the cells, and must not drop or join rows in a way that
            the unit of privacy does not cover.

    Example:
        >>> import sqlite3
        >>> from matrixdp.tables import Categorical, Domain, Table, sql
        >>> database = sqlite3.connect(":memory:")
        >>> _ = database.execute("create table visits (region text)")
        >>> _ = database.execute("insert into visits values ('north'), ('south')")
        >>> domain = Domain({"region": Categorical(["north", "south"])})
        >>> Table(sql(database, "select region from visits"), domain).counts("region").sensitivity
        Counts(cells=1, bound=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
        >>> database.close()
    """
    if not isinstance(query, str) or not query.strip():
        raise InvalidInput(f"query must be a SELECT, got {_check.kind(query)}")
    if isinstance(database, (str, Path)) and not postgres.is_address(database):
        suffix = Path(database).suffix.lower()
        if suffix not in (*_SQLITE, ".duckdb"):
            raise InvalidInput(
                f"database must be a path that ends in {', '.join(_SQLITE)} (SQLite) or .duckdb, an address "
                "postgresql://..., or an open connection"
            )
        existing(Path(database))
    return Sql(database, query.strip().rstrip(";"))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
