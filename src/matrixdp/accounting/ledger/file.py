"""The SQLite file behind a ledger: its tables, and how it is created, opened, upgraded, read and written.

The table `ledger` has one row: what was fixed at creation, the number of entries and the last hash. `entries` has one
row per entry. `documents` has the certificates, curves, plans and quotas that entries name, each once, so entries with
equal certificates share one. Files from before schema 4 keep the columns in which their entries stated their
guarantees; newer entries leave them empty.

The file is written with a rollback journal and `synchronous = EXTRA`: between operations it is one complete file, and a
commit returns only when the data and the folder's entries have reached the disk. (A write-ahead log would flush less
often, but it keeps recent spends in a second file, which a copy easily misses, and needs memory shared by all
processes.)
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from matrixdp.accounting.ledger.chain import DOCUMENTS, Document, Header, canonical, new_header, now, sha256
from matrixdp.accounting.ledger.store import Found, Session, tampered
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, LedgerError

SCHEMA = 6
APPLICATION = 0x6D64706C  # "mdpl": no other program's SQLite file is taken for a ledger

# The columns that each schema added. `planned` is the number of releases in the block of an entry, empty before schema
# 3. The charges are those of the block, in its first entry, and 0 in the others. `certificate`, `curve`, `plan` and
# `quota` name documents.
ADDED = {
    2: {"count": "INTEGER NOT NULL DEFAULT 1", "sampling_rate": "REAL NOT NULL DEFAULT 1.0"},
    3: {"series": "TEXT", "planned": "INTEGER", "charged_mu": "REAL", "charged_delta": "REAL"},
    4: {
        **{"certificate": "TEXT", "curve": "TEXT", "dataset": "TEXT", "analyst": "TEXT", "purpose": "TEXT"},
        **{"unit": "TEXT NOT NULL DEFAULT 'record'", "key": "TEXT"},
    },
    5: {"plan": "TEXT"},
    6: {"kind": "TEXT NOT NULL DEFAULT 'spend'", "reservation": "TEXT", "quota": "TEXT"},
}
COLUMNS = {"number": "INTEGER PRIMARY KEY", "time": "TEXT", "note": "TEXT"}
for _columns in ADDED.values():
    COLUMNS |= _columns
# The other changes of each schema.
CHANGES: dict[int, tuple[str, ...]] = {
    3: ("ALTER TABLE ledger ADD COLUMN adaptive INTEGER", "ALTER TABLE ledger ADD COLUMN place TEXT"),
    4: (
        "CREATE TABLE documents (sha256 TEXT PRIMARY KEY, content TEXT)",
        "CREATE UNIQUE INDEX entries_by_key ON entries (key)",
    ),
}
CREATE = (
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
    "CREATE TABLE ledger (id TEXT, epsilon REAL, delta REAL, relation TEXT, created TEXT, entries INTEGER, head TEXT, "
    "adaptive INTEGER, place TEXT)",
    f"CREATE TABLE entries ({', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())}, hash TEXT)",
    *CHANGES[4],
)
HEADER = "id, epsilon, delta, relation, created, entries, head, adaptive"

# Held by every operation, and while the process forks: a child must not inherit a file that SQLite has locked.
_no_fork = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)


class FileSession:
    """A transaction on a ledger's file, opened by `File`; its methods are those of `store.Session`."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection, self.path = connection, path

    def header(self) -> Header:
        rows = self.connection.execute(f"SELECT {HEADER} FROM ledger").fetchall()
        if len(rows) != 1:
            raise sqlite3.DatabaseError(f"malformed: {len(rows)} rows in the table ledger")
        return Header(*rows[0])

    def rows(self, after: int) -> Iterator[tuple[dict[str, Any], Any]]:
        return self._rows("SELECT * FROM entries WHERE number > ? ORDER BY number", after)

    def row_with_key(self, key: str) -> tuple[dict[str, Any], Any] | None:
        return next(self._rows("SELECT * FROM entries WHERE key = ?", key), None)

    def _rows(self, question: str, value: Any) -> Iterator[tuple[dict[str, Any], Any]]:
        found = self.connection.execute(question, (value,))
        names = [column[0] for column in found.description]
        for row in found:
            record = {name: part for name, part in zip(names, row, strict=True) if part is not None}
            yield record, record.pop("hash", None)

    def has_hash(self, found: str) -> bool:
        return self.connection.execute("SELECT 1 FROM entries WHERE hash = ?", (found,)).fetchone() is not None

    def document(self, name: str) -> Document:
        (text,) = self.connection.execute("SELECT content FROM documents WHERE sha256 = ?", (name,)).fetchone() or ("",)
        if not isinstance(text, str) or sha256(text) != name:
            raise tampered(self.path, f"the document {name} is not what was written")
        content: Document = json.loads(text)
        return content

    def check_pages(self) -> None:
        found = _pragma(self.connection, "quick_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(f"malformed: {found}")

    def check_complete(self, entries: int) -> None:
        if self.connection.execute("SELECT count(*) FROM entries").fetchone() != (entries,):
            raise tampered(self.path, "it has entries that are not part of the chain")
        self.check_documents()  # nobody but a writer of the whole file can add one

    def check_documents(self) -> None:
        named = (f"SELECT {name} FROM entries WHERE {name} IS NOT NULL" for name in DOCUMENTS)
        unused = f"SELECT 1 FROM documents WHERE sha256 NOT IN ({' UNION '.join(named)})"
        if self.connection.execute(unused).fetchone():
            raise tampered(self.path, "it has documents that no entry names")

    def append(self, record: Mapping[str, Any], found: str, documents: Mapping[str, Document]) -> None:
        texts = [(name, canonical(content)) for name, content in documents.items()]
        self.connection.executemany("INSERT OR IGNORE INTO documents VALUES (?, ?)", texts)
        places = ", ".join("?" * (len(record) + 1))
        row = (*record.values(), found)
        self.connection.execute(f"INSERT INTO entries ({', '.join(record)}, hash) VALUES ({places})", row)
        self.connection.execute("UPDATE ledger SET entries = ?, head = ?", (record["number"], found))

    def now(self) -> str:
        return now()


class File:
    """A ledger's file; its methods are those of `store.Store`.

    Args:
        path: the file.
        timeout: how many seconds to wait for other writers.
    """

    loses_answers = False

    def __init__(self, path: Path, timeout: float) -> None:
        self.path, self.name, self._timeout = path, str(path), timeout

    def exists(self) -> bool:
        return self.path.exists()

    def create(self, budget: Budget, relation: str | None, adaptive: bool) -> None:
        """Creates the file under another name and then renames it, so that nobody ever sees half a ledger.

        Processes that create the same ledger take turns, by a lock that ends with its process; so no ledger is ever
        replaced. This needs no hard links.
        """
        path = self.path
        draft, lock = (path.with_name(f".{path.name}.{end}") for end in ("draft", "lock"))
        try:
            lock.touch(mode=0o600)
            with _connection_to(lock, self._timeout, mode="rwc") as turn:
                turn.execute("BEGIN EXCLUSIVE")
                if not path.exists():
                    try:
                        _fill(draft, new_header(budget, relation, adaptive))
                        os.replace(draft, path)
                    finally:
                        draft.unlink(missing_ok=True)
                    sync_folder(path.parent)
                with suppress(OSError):  # Windows does not remove a file that is in use
                    lock.unlink()  # only now: as long as there is no ledger, all must wait for the same lock
        except LedgerError:
            if not path.exists():  # else another process was first, and has removed the lock: its ledger is the one
                raise
        except OSError as reason:
            raise LedgerError(
                f"the ledger {path} could not be created ({reason}); its folder must exist and be writable"
            ) from None

    def opened(self, work: Callable[[Session], Found]) -> Found:
        with self.transaction("BEGIN", oldest=1) as session:
            current = _is_current(session.connection, self.path)
        with self.transaction("BEGIN" if current else "BEGIN IMMEDIATE", oldest=1) as session:
            if not current:
                _upgrade(session.connection, self.path)
            return work(session)

    def read(self, work: Callable[[Session], Found]) -> Found:
        with self.transaction() as session:
            return work(session)

    def write(self, work: Callable[[Session], Found]) -> Found:
        with self.transaction("BEGIN IMMEDIATE") as session:
            return work(session)

    def grant(self, role: str, may: str) -> None:
        raise InvalidInput("grant is for ledgers on PostgreSQL; the rights to a file are the system's: chmod, chown")

    @contextmanager
    def transaction(self, begin: str = "BEGIN", *, oldest: int = SCHEMA) -> Iterator[FileSession]:
        """A transaction, committed unless an error is raised inside."""
        with _connection_to(self.path, self._timeout) as connection:
            if _pragma(connection, "application_id") != APPLICATION:
                raise LedgerError(f"{self.path} is not a ledger, or a damaged one; it was not touched")
            _check_name(connection, self.path)
            if _pragma(connection, "journal_mode = DELETE") != "delete":
                raise LedgerError(f"{self.path} has no rollback journal; close the other programs that have it open")
            connection.execute(begin)
            schema = _pragma(connection, "user_version")
            if not oldest <= schema <= SCHEMA:
                raise LedgerError(
                    f"{self.path} has schema {schema}, and this matrixdp reads up to {SCHEMA}; upgrade matrixdp"
                )
            yield FileSession(connection, self.path)
            connection.execute("COMMIT")


def sync_folder(folder: Path) -> None:
    """Makes sure that the entries of a folder have reached the disk, on systems that support it."""
    if os.name == "posix":
        entry = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)


def _fill(draft: Path, header: Header) -> None:
    """Writes a new ledger; what a killed process has left there is removed first."""
    for left in (draft, draft.with_name(f"{draft.name}-journal")):
        left.unlink(missing_ok=True)
    draft.touch(mode=0o600)
    with _connection_to(draft) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in CREATE:
            connection.execute(statement)
        row = astuple(replace(header, head=header.genesis()))
        connection.execute("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)
        connection.execute("COMMIT")


def _is_current(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has the current schema, and has noted the name under which it is opened or cannot be written."""
    if _pragma(connection, "user_version") < SCHEMA:
        return False
    return bool(_known_place(connection) == _place(path)) or _out_of_reach(path) is not None


def _upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Upgrades an older file to the current schema, and notes its name.

    Its hashes stay valid: they cover neither fields at their default nor the name.
    """
    for schema in range(_pragma(connection, "user_version") + 1, SCHEMA + 1):
        for name, kind in ADDED[schema].items():
            connection.execute(f"ALTER TABLE entries ADD COLUMN {name} {kind}")
        for statement in CHANGES.get(schema, ()):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {schema}")
    connection.execute("UPDATE ledger SET place = ?", (_place(path),))


def _place(path: Path) -> str:
    """The inode of its folder and the name of a file, which tell the hard links of a file apart."""
    return f"{os.stat(path.parent).st_ino}/{path.name}"


def _known_place(connection: sqlite3.Connection) -> Any:
    (place,) = connection.execute("SELECT place FROM ledger").fetchone() or (None,)
    return place


def _check_name(connection: sqlite3.Connection, path: Path) -> None:
    """Raises LedgerError for a file with several hard links, unless it is opened by the name noted in it.

    SQLite keeps the journal that undoes an interrupted spend beside the name that was used. Under another name it would
    not be found, and spends could be lost. While the file has one name, each opening notes it; so a link that was made
    as a backup does no harm, and is itself refused.
    """
    if os.stat(path).st_nlink == 1:
        return
    known = _known_place(connection) if _pragma(connection, "user_version") >= 3 else None
    if known != _place(path):
        raise LedgerError(
            f"the ledger {path} has more than one hard link, and "
            + ("this is not the name that it is used under" if known else "it is not known which of them is in use")
            + ": after a crash, spends could be lost. Use the other name; to use this one, copy the file and put the "
            "copy in its place"
        )


@contextmanager
def _connection_to(path: Path, timeout: float = 60.0, mode: str = "rw") -> Iterator[sqlite3.Connection]:
    """A connection to a file for one operation; errors of SQLite are raised as LedgerError.

    Args:
        path: the file.
        timeout: how many seconds to wait for others.
        mode: SQLite's mode: "rw" for a file that exists, "rwc" for one that may have to be created.
    """
    address = f"{path.as_uri()}?mode={mode}"
    try:
        # closing it rolls back a transaction that was not committed
        with _no_fork, closing(sqlite3.connect(address, timeout=timeout, isolation_level=None, uri=True)) as connection:
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA fullfsync = ON")  # macOS: through the drive's own cache
            yield connection
    except (sqlite3.Error, UnicodeDecodeError) as reason:  # the latter where a damaged name is to be shown
        raise LedgerError(
            f"the ledger {path} cannot be used ({reason}); {_remedy(path)}. No spend is confirmed: release nothing"
        ) from reason


def _out_of_reach(path: Path) -> Path | None:
    """The file or its folder, if this account may not read and write it."""
    effective = os.access in os.supports_effective_ids
    for place in (path, path.parent):
        if place.exists() and not os.access(place, os.R_OK | os.W_OK, effective_ids=effective):
            return place
    return None


def _remedy(path: Path) -> str:
    """What to do about a file that cannot be used; names its owner if permissions are the reason."""
    place = _out_of_reach(path)
    if place is not None:
        return (
            f"this account may not read and write {place}, which belongs to account number {place.stat().st_uid}: "
            "use that account, or have the file and its folder made writable for this one"
        )
    return "it must be undamaged, writable like its folder, on a disk with free space, and not locked by others"


def _pragma(connection: sqlite3.Connection, text: str) -> Any:
    """The value of one of SQLite's settings."""
    return connection.execute(f"PRAGMA {text}").fetchone()[0]
