"""PostgreSQL: cells as text, fetched in batches, and errors without their text.

Text is fetched in the database's own encoding and decoded here. Conversion on the server fails for some characters,
which would be an error that depends on a cell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from matrixdp import _extras
from matrixdp.errors import InvalidInput

_ADDRESSES = ("postgresql://", "postgres://")

# Error states that PostgreSQL raises before it reads a row.
_REFUSALS = {
    "42P01": "the query names a table that does not exist",
    "42703": "the query names a column that does not exist",
    "42601": "the query is not one SELECT in PostgreSQL's syntax",
    "42501": "the user may not read what the query names",
}


def is_address(database: Any) -> bool:
    """Whether this is the address of a PostgreSQL database."""
    return isinstance(database, str) and database.startswith(_ADDRESSES)


def is_connection(connection: Any) -> bool:
    """Whether this is an open connection of psycopg."""
    psycopg = sys.modules.get("psycopg")
    return psycopg is not None and isinstance(connection, psycopg.Connection)


def connect(address: str) -> Any:
    """A connection for reading. Messages of the driver are withheld: they may quote a part of the password."""
    _extras.require("postgres", "psycopg")
    import psycopg

    try:
        connection = psycopg.connect(address)
    except psycopg.Error:
        raise InvalidInput(
            "database: no connection to PostgreSQL at the address given; check that the server runs, and the host, "
            "port, database, user and password, with characters such as @ / : % in them percent-encoded"
        ) from None
    connection.read_only = True
    return connection


@contextmanager
def refusals(connection: Any) -> Iterator[None]:
    """Explains errors that PostgreSQL raises before it reads a row, and lost connections; others pass unchanged."""
    try:
        yield
    except Exception as error:
        lost = is_connection(connection) and connection.broken
        told = "the connection was lost; try again" if lost else _REFUSALS.get(getattr(error, "sqlstate", None) or "")
        if told is None:
            raise
        raise InvalidInput(f"reading from PostgreSQL failed: {told}") from None


@contextmanager
def cursor(connection: Any) -> Iterator[Any]:
    """A server-side cursor, so that rows are not fetched all at once; dates in ISO form, text that always decodes."""
    from psycopg.adapt import Loader
    from psycopg.rows import tuple_row

    with connection.transaction():
        connection.execute("SET LOCAL DateStyle TO ISO")
        connection.execute("SELECT set_config('client_encoding', current_setting('server_encoding'), true)")
        encoding = "utf-8" if connection.info.encoding == "ascii" else connection.info.encoding

        class Text(Loader):
            def load(self, data: Any) -> str:
                return bytes(data).decode(encoding, "surrogateescape")

        with connection.cursor("matrixdp", row_factory=tuple_row) as served:
            served.adapters.register_loader("text", Text)
            yield served
