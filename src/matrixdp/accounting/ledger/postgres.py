"""Ledgers in a PostgreSQL database, one for each data set.

The schema `matrixdp` has the tables `ledgers` (what was fixed at creation), `entries` and `documents`. An entry is
stored as the text that is hashed, so the server itself checks the chain. A trigger refuses an entry that is not the
next one, whose hash does not match the entry before it and its own text, or that changes a quota unless the owner of
the tables writes it. Others refuse updates and deletions. A role that may spend may only select and insert.

Writers take turns by an advisory lock that ends with its transaction: a row lock would need the right to update. The
primary key (data set, number) admits one entry per number, even without the lock. An operation that fails because a
connection or the server was lost is retried until the timeout; every entry has a key, which shows whether it was
written.

Passwords and TLS are left to the driver. The address is never shown, and messages of the driver are withheld, as they
may quote a part of it.
"""

from __future__ import annotations

import json
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC
from typing import Any

from matrixdp import _check, _extras
from matrixdp.accounting.ledger.chain import CHAIN, DOCUMENTS, Document, Header, canonical, hashed, new_header, sha256
from matrixdp.accounting.ledger.store import Found, Session, tampered
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, LedgerError

_extras.require("postgres", "psycopg")
import psycopg  # noqa: E402
from psycopg import sql  # noqa: E402

APPLICATION = 0x6D64706C  # "mdpl", the seed of the advisory locks

_REFUSE = """
CREATE FUNCTION matrixdp.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a ledger is append-only' USING ERRCODE = 'insufficient_privilege';
END $$"""
_CHECK_ENTRY = f"""
CREATE FUNCTION matrixdp.check_entry() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last BIGINT;
    previous TEXT;
    found JSON := NEW.fields::json;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(NEW.dataset, {APPLICATION}));
    SELECT number, hash INTO last, previous FROM matrixdp.entries
        WHERE dataset = NEW.dataset ORDER BY number DESC LIMIT 1;
    IF last IS NULL THEN
        SELECT 0, encode(sha256(convert_to(header, 'UTF8')), 'hex') INTO last, previous FROM matrixdp.ledgers
            WHERE dataset = NEW.dataset;
    END IF;
    IF NEW.number <> last + 1 THEN
        RAISE EXCEPTION 'this is not the next entry' USING ERRCODE = 'serialization_failure';
    END IF;
    IF NEW.hash <> encode(sha256(convert_to(previous || NEW.fields, 'UTF8')), 'hex')
        OR (found ->> 'number')::BIGINT <> NEW.number OR found ->> 'key' IS DISTINCT FROM NEW.key THEN
        RAISE EXCEPTION 'this entry is not part of the chain' USING ERRCODE = 'check_violation';
    END IF;
    IF found ->> 'kind' = 'quota' AND NOT pg_has_role(
        current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'MEMBER') THEN
        RAISE EXCEPTION 'quotas are set by the owner' USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NEW;
END $$"""

MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        "CREATE SCHEMA IF NOT EXISTS matrixdp",
        "CREATE TABLE matrixdp.versions (version INTEGER PRIMARY KEY, applied TIMESTAMPTZ NOT NULL DEFAULT now())",
        "CREATE TABLE matrixdp.ledgers (dataset TEXT PRIMARY KEY, header TEXT NOT NULL)",
        "CREATE TABLE matrixdp.entries (dataset TEXT NOT NULL REFERENCES matrixdp.ledgers, number BIGINT NOT NULL, "
        "key TEXT, fields TEXT NOT NULL, hash TEXT NOT NULL, PRIMARY KEY (dataset, number), UNIQUE (dataset, key))",
        "CREATE TABLE matrixdp.documents (dataset TEXT NOT NULL REFERENCES matrixdp.ledgers, sha256 TEXT NOT NULL, "
        "content TEXT NOT NULL, PRIMARY KEY (dataset, sha256), "
        "CHECK (sha256 = encode(sha256(convert_to(content, 'UTF8')), 'hex')))",
        _REFUSE,
        _CHECK_ENTRY,
        "CREATE TRIGGER next BEFORE INSERT ON matrixdp.entries FOR EACH ROW EXECUTE FUNCTION matrixdp.check_entry()",
        *(
            f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON matrixdp.{table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION matrixdp.refuse()"
            for table in ("ledgers", "entries", "documents")
        ),
    ),
}
"""The changes of each schema; the last key is the current schema."""

RIGHTS = ("read", "spend")

_TURN = f"SELECT pg_advisory_xact_lock(hashtextextended(%s, {APPLICATION}))"
_SETTINGS = (
    "SELECT set_config('lock_timeout', %s, true), set_config('idle_in_transaction_session_timeout', %s, true), "
    "set_config('search_path', 'pg_catalog', true), set_config('synchronous_commit', 'on', true)"
)
_NAMED = ", ".join(f"fields::json ->> '{name}'" for name in DOCUMENTS)
_HEADER = """
SELECT header, last.number, last.hash, (SELECT max(version) FROM matrixdp.versions) FROM matrixdp.ledgers
LEFT JOIN LATERAL (SELECT number, hash FROM matrixdp.entries WHERE entries.dataset = ledgers.dataset
    ORDER BY number DESC LIMIT 1) AS last ON true WHERE ledgers.dataset = %s"""

# Errors that are not retried, by PostgreSQL's states.
_REMEDIES = {
    "42501": "this role may not do that: its owner grants the right to spend with `matrixdp ledger grant`, and sets "
    "quotas itself; entries are never changed or removed",
    "55P03": "the timeout ended while others were writing",
    "53100": "the server's disk is full",
    "25006": "the server takes no writes: it is a replica, or read-only",
    "3F000": "it has no ledgers; create one with a budget",
    "42P01": "it has no ledgers; create one with a budget",
}
_NOT_ENCRYPTED = "the encrypted connection failed: see sslmode and sslrootcert in PostgreSQL's manual"
# The same for errors while connecting, told apart only by the text of the message, which is not shown itself.
_REFUSED = {
    "authentication failed": "the user or the password is wrong",
    "no password supplied": "a password is needed: put it into ~/.pgpass, or PGPASSWORD",
    "pg_hba.conf": "the server does not let this user in from here",
    "does not exist": "there is no such database or user",
    "SSL": _NOT_ENCRYPTED,
    "certificate": _NOT_ENCRYPTED,
}
# Another process has just made the tables, and this connection still remembers that there were none.
_FIRST = ("42P06", "42P07", "42710", "42723")
_UNREADABLE = (
    "the address cannot be read: write it as postgresql://user@host/database, with characters such as @ / : % "
    "percent-encoded"
)
_LOST = "the server cannot be reached, or the connection was lost; check that it runs, and the host and the port"


class PostgresSession:
    """A transaction on one ledger, opened by `Postgres`; its methods are those of `store.Session`."""

    def __init__(self, connection: Any, dataset: str, name: str) -> None:
        self.connection, self.dataset, self.name = connection, dataset, name

    def _rows(self, question: Any, *values: Any) -> list[Any]:
        found: list[Any] = self.connection.execute(question, (self.dataset, *values)).fetchall()
        return found

    def header(self) -> Header:
        ((text, number, head, version),) = self._rows(_HEADER) or [("{}", None, None, None)]
        _check_version(version, self.name)
        try:
            fields = json.loads(text)
            if fields.pop("chain") != CHAIN:
                raise KeyError
            header = Header(**fields)
        except (KeyError, TypeError, ValueError):
            raise tampered(self.name, "its header cannot be read") from None
        return replace(header, entries=number or 0, head=head or header.genesis())

    def rows(self, after: int) -> Iterator[tuple[dict[str, Any], Any]]:
        question = "SELECT fields, hash FROM matrixdp.entries WHERE dataset = %s AND number > %s ORDER BY number"
        return map(self._record, self._rows(question, after))

    def row_with_key(self, key: str) -> tuple[dict[str, Any], Any] | None:
        found = self._rows("SELECT fields, hash FROM matrixdp.entries WHERE dataset = %s AND key = %s", key)
        return self._record(found[0]) if found else None

    def _record(self, row: tuple[str, str]) -> tuple[dict[str, Any], Any]:
        try:
            record = json.loads(row[0])
            record["number"] + 0
        except (KeyError, TypeError, ValueError):
            raise tampered(self.name, "an entry cannot be read") from None
        return record, row[1]

    def has_hash(self, found: str) -> bool:
        return bool(self._rows("SELECT 1 FROM matrixdp.entries WHERE dataset = %s AND hash = %s", found))

    def document(self, name: str) -> Document:
        found = self._rows("SELECT content FROM matrixdp.documents WHERE dataset = %s AND sha256 = %s", name)
        if not found or sha256(found[0][0]) != name:
            raise tampered(self.name, f"the document {name} is not what was written")
        content: Document = json.loads(found[0][0])
        return content

    def check_pages(self) -> None:
        """Does nothing: PostgreSQL checks its pages itself."""

    def check_complete(self, entries: int) -> None:
        ((number,),) = self._rows("SELECT count(*) FROM matrixdp.entries WHERE dataset = %s")
        if number != entries:
            raise tampered(self.name, "it has entries that are not part of the chain")

    def check_documents(self) -> None:
        question = (
            "SELECT 1 FROM matrixdp.documents WHERE dataset = %s AND sha256 NOT IN (SELECT name FROM matrixdp.entries, "
            f"unnest(ARRAY[{_NAMED}]) AS name WHERE dataset = %s AND name IS NOT NULL) LIMIT 1"
        )
        if self._rows(question, self.dataset):
            raise tampered(self.name, "it has documents that no entry names")

    def append(self, record: Mapping[str, Any], found: str, documents: Mapping[str, Document]) -> None:
        for name, content in documents.items():
            row = (self.dataset, name, canonical(content))
            self.connection.execute("INSERT INTO matrixdp.documents VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", row)
        entry = (self.dataset, record["number"], record.get("key"), canonical(hashed(record)), found)
        self.connection.execute("INSERT INTO matrixdp.entries VALUES (%s, %s, %s, %s, %s)", entry)

    def now(self) -> str:
        ((found,),) = self.connection.execute("SELECT clock_timestamp()").fetchall()
        return str(found.astimezone(UTC).isoformat(timespec="microseconds"))


class Postgres:
    """The ledger of a data set in a database; its methods are those of `store.Store`.

    Args:
        address: the address of the database, as psycopg takes it.
        dataset: which of its ledgers.
        timeout: how many seconds to wait for other writers, and for a server that cannot be reached.
    """

    path, loses_answers = None, True

    def __init__(self, address: str, dataset: str | None, timeout: float) -> None:
        if dataset is None:
            raise InvalidInput("dataset must be given: a database has one ledger for each data set")
        self.name, self._dataset, self._timeout = f"of {dataset!r} on PostgreSQL", dataset, timeout
        self._address = address
        self._idle: list[tuple[int, Any]] = []
        weakref.finalize(self, _close, self._idle)

    def exists(self) -> bool:
        def work(session: PostgresSession) -> bool:
            known = "SELECT 1 FROM matrixdp.ledgers WHERE dataset = %s"
            return bool(_version(session.connection) and session._rows(known))

        return self._run(work)

    def create(self, budget: Budget, relation: str | None, adaptive: bool) -> None:
        header = new_header(budget, relation, adaptive)

        def work(session: PostgresSession) -> None:
            _migrate(session.connection, self.name)
            row = (self._dataset, canonical(header.fixed()))
            session.connection.execute("INSERT INTO matrixdp.ledgers VALUES (%s, %s) ON CONFLICT DO NOTHING", row)

        self._run(work, write=True)

    def opened(self, work: Callable[[Session], Found]) -> Found:
        if self._run(lambda session: _version(session.connection)) < max(MIGRATIONS):
            self._run(lambda session: _migrate(session.connection, self.name), write=True)
        return self.read(work)

    def read(self, work: Callable[[Session], Found]) -> Found:
        return self._run(work)

    def write(self, work: Callable[[Session], Found]) -> Found:
        def in_turn(session: PostgresSession) -> Found:
            session.connection.execute(_TURN, (self._dataset,))
            return work(session)

        return self._run(in_turn, write=True)

    def grant(self, role: str, may: str) -> None:
        _check.choice("may", may, RIGHTS)
        if not (isinstance(role, str) and role):
            raise InvalidInput(f"role must be the name of a role, got {_check.kind(role)}")
        to = sql.Identifier(role)

        def work(session: PostgresSession) -> None:
            run = session.connection.execute
            run(sql.SQL("GRANT USAGE ON SCHEMA matrixdp TO {}").format(to))
            run(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA matrixdp TO {}").format(to))
            if may == "spend":
                run(sql.SQL("GRANT INSERT ON matrixdp.entries, matrixdp.documents TO {}").format(to))

        self._run(work, write=True)

    def _run(self, work: Callable[[PostgresSession], Found], write: bool = False) -> Found:
        """What a function returns in a transaction, which is retried where a connection or a race was lost."""
        deadline, pause = time.monotonic() + self._timeout, 0.01
        while True:
            try:
                with self._transaction(write) as session:
                    return work(session)
            except psycopg.Error as error:
                words, again = _explained(error)
            if not again or time.monotonic() + pause > deadline:  # outside, so that no message of the driver is kept
                raise LedgerError(
                    f"the ledger {self.name} cannot be used: {words}. No spend is confirmed: release nothing"
                )
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2.0 * pause, 1.0)

    @contextmanager
    def _transaction(self, write: bool) -> Iterator[PostgresSession]:
        """A transaction, committed unless an error is raised inside; its connection is then kept for the next."""
        connection = self._connected()
        try:
            connection.execute(f"BEGIN ISOLATION LEVEL {'READ COMMITTED' if write else 'REPEATABLE READ READ ONLY'}")
            # the lock of a client that has vanished must end before the others time out
            gone = max(5000, int(1000 * self._timeout / 3))
            connection.execute(_SETTINGS, (f"{max(1, int(1000 * self._timeout))}ms", f"{gone}ms"))
            yield PostgresSession(connection, self._dataset, self.name)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._idle.append((os.getpid(), connection))

    def _connected(self) -> Any:
        """An idle connection that was kept, or a new one; those of a parent process are left alone."""
        while self._idle:
            process, connection = self._idle.pop()
            if process != os.getpid():
                _inherited.append(connection)
            elif not connection.closed:
                return connection
        waits: dict[str, Any] = {"connect_timeout": max(2, min(int(self._timeout), 10))}
        return psycopg.connect(
            self._address,
            autocommit=True,
            client_encoding="UTF8",
            application_name="matrixdp",
            prepare_threshold=None,
            **({} if "connect_timeout" in self._address else waits),
        )


_inherited: list[Any] = []  # never closed here: that would end the session of the process that opened them


def _close(idle: list[tuple[int, Any]]) -> None:
    for process, connection in idle:
        if process == os.getpid():
            connection.close()


def _version(connection: Any) -> int:
    """The schema version of the tables; 0 if there are none."""
    (found,) = connection.execute("SELECT to_regclass('matrixdp.versions') IS NOT NULL").fetchone()
    return int(connection.execute("SELECT max(version) FROM matrixdp.versions").fetchone()[0] or 0) if found else 0


def _check_version(version: int | None, name: str) -> None:
    if version is not None and version > max(MIGRATIONS):
        raise LedgerError(
            f"the ledger {name} has schema {version}, and this matrixdp reads up to {max(MIGRATIONS)}; upgrade matrixdp"
        )


def _migrate(connection: Any, name: str) -> None:
    """Upgrades the tables to the current schema, one process at a time."""
    connection.execute(_TURN, ("",))
    version = _version(connection)
    _check_version(version, name)
    for schema in range(version + 1, max(MIGRATIONS) + 1):
        for statement in MIGRATIONS[schema]:
            connection.execute(statement)
        connection.execute("INSERT INTO matrixdp.versions (version) VALUES (%s)", (schema,))


def _explained(error: Any) -> tuple[str, bool]:
    """What an error of the driver means, without its text, and whether to retry."""
    state = error.sqlstate
    if state in _REMEDIES:
        return _REMEDIES[state], False
    if state is None:
        text = str(error)
        words = next((words for part, words in _REFUSED.items() if part in text), None)
        away = words is None and isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
        return (_LOST if away else words or _UNREADABLE), away
    if state[:2] in ("08", "57", "40") or state in ("23505", "53300", *_FIRST):
        return ("too many connections" if state == "53300" else _LOST), True
    return f"PostgreSQL refuses it with the state {state}", False
