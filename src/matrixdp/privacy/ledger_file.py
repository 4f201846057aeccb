"""The file behind a ledger: its tables, its chain of hashes, and how it is created, opened and brought up to date."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matrixdp.budget import Budget
from matrixdp.errors import MatrixDPError

SCHEMA = 3
APPLICATION = 0x6D64706C  # "mdpl": no other program's SQLite file is taken for a ledger
CHAIN = "matrixdp ledger, chain 1"
LONGEST_NOTE = 1000

PROFILE = {"mu": "REAL", "dimension": "INTEGER", "k": "REAL", "p": "REAL", "scale": "REAL", "radius": "REAL"}
# The columns that a schema added. `planned` is how many releases the block of an entry has, and empty before schema 3;
# the charges are those of the block, in its first entry, and 0 in the others.
ADDED = {
    2: {"count": "INTEGER NOT NULL DEFAULT 1", "sampling_rate": "REAL NOT NULL DEFAULT 1.0"},
    3: {"series": "TEXT", "planned": "INTEGER", "charged_mu": "REAL", "charged_delta": "REAL"},
}
COLUMNS = {
    **{"number": "INTEGER PRIMARY KEY", "time": "TEXT", "note": "TEXT", "relation": "TEXT", "exact": "INTEGER"},
    **PROFILE,
    **{"total_variation": "REAL", "sensitivity": "TEXT", "noise": "TEXT", "source": "TEXT", "shape": "TEXT"},
    **ADDED[2],
    **ADDED[3],
}
DEFAULTS = {"count": 1, "sampling_rate": 1.0}

CREATE = (
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
    "CREATE TABLE ledger (id TEXT, epsilon REAL, delta REAL, relation TEXT, created TEXT, entries INTEGER, head TEXT, "
    "adaptive INTEGER, place TEXT)",
    f"CREATE TABLE entries ({', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())}, hash TEXT)",
)
HEADER = "id, epsilon, delta, relation, created, entries, head, adaptive"
INSERT = f"INSERT INTO entries ({', '.join(COLUMNS)}, hash) VALUES ({'?, ' * len(COLUMNS)}?)"
SELECT = f"SELECT {', '.join(COLUMNS)}, hash FROM entries WHERE number > ? ORDER BY number"

# Held by every operation, and while the process forks: a child must not inherit a file that SQLite has locked.
_no_fork = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)


class LedgerError(MatrixDPError):
    """The ledger cannot be read, written or trusted; release nothing on its account."""


@dataclass(frozen=True)
class Header:
    """The one row of the table `ledger`."""

    id: str
    epsilon: float
    delta: float
    relation: str | None
    created: str
    entries: int = 0
    head: str = ""
    adaptive: int | None = None  # empty before schema 3

    def fixed(self) -> dict[str, Any]:
        """What never changes after creation."""
        fields = asdict(self)
        known = ("adaptive",) if self.adaptive is not None else ()
        names = ("id", "epsilon", "delta", "relation", "created", *known)
        return {"chain": CHAIN, **{name: fields[name] for name in names}}

    def genesis(self) -> str:
        """The hash before the first entry."""
        return link("", self.fixed())


def hashed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are hashed: not those that are empty or at their default, as older schemas lacked some."""
    return {name: value for name, value in record.items() if value != DEFAULTS.get(name)}


def link(previous: str, fields: Mapping[str, Any]) -> str:
    """The next hash of the chain."""
    return hashlib.sha256((previous + _canonical(fields)).encode()).hexdigest()


# One way to write a record, in ASCII; a blob that somebody put in is written as its repr, and so does not verify.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr).encode


def sync_folder(folder: Path) -> None:
    """Makes sure that the entries of a folder have reached the disk, where a system lets one."""
    if os.name == "posix":
        entry = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)


def create(path: Path, budget: Budget, relation: str | None, adaptive: bool, timeout: float) -> None:
    """Makes the file under another name and then renames it, so that nobody ever sees half a ledger.

    Those who would create the same ledger take turns, by a lock that ends with its process; so no ledger is ever
    replaced. It needs no hard links.
    """
    draft, lock = (path.with_name(f".{path.name}.{end}") for end in ("draft", "lock"))
    try:
        lock.touch(mode=0o600)
        with connection_to(lock, timeout, mode="rwc") as turn:
            turn.execute("BEGIN EXCLUSIVE")
            if not path.exists():
                try:
                    header = Header(secrets.token_hex(16), budget.epsilon, budget.delta, relation, now())
                    _fill(draft, replace(header, adaptive=int(adaptive)))
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


def _fill(draft: Path, header: Header) -> None:
    """A new ledger; what a killed process has left there is removed first."""
    for left in (draft, draft.with_name(f"{draft.name}-journal")):
        left.unlink(missing_ok=True)
    draft.touch(mode=0o600)
    with connection_to(draft) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in CREATE:
            connection.execute(statement)
        row = astuple(replace(header, head=header.genesis()))
        connection.execute("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)
        connection.execute("COMMIT")


def is_current(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has the present schema and knows the name under which it is opened, or can only be read."""
    if pragma(connection, "user_version") < SCHEMA:
        return False
    return bool(_known_place(connection) == _place(path)) or _out_of_reach(path) is not None


def upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Brings an older file to the present schema, and notes its name.

    Its hashes stay: they leave out what is at its default, and the name.
    """
    for schema in range(pragma(connection, "user_version") + 1, SCHEMA + 1):
        for name, kind in ADDED[schema].items():
            connection.execute(f"ALTER TABLE entries ADD COLUMN {name} {kind}")
        if schema == 3:
            connection.execute("ALTER TABLE ledger ADD COLUMN adaptive INTEGER")
            connection.execute("ALTER TABLE ledger ADD COLUMN place TEXT")
        connection.execute(f"PRAGMA user_version = {schema}")
    connection.execute("UPDATE ledger SET place = ?", (_place(path),))


def _place(path: Path) -> str:
    """The name of a file and the number of its folder, which tell the hard links of a file apart."""
    return f"{os.stat(path.parent).st_ino}/{path.name}"


def _known_place(connection: sqlite3.Connection) -> Any:
    (place,) = connection.execute("SELECT place FROM ledger").fetchone() or (None,)
    return place


def check_name(connection: sqlite3.Connection, path: Path) -> None:
    """Of a file with several hard links, only the name that it was last used under is accepted.

    SQLite keeps what undoes an interrupted spend beside the name that was used. Under another name it would not be
    found, and spends could be lost. While there is one name, each opening notes it; so a link that was made as a backup
    does no harm, and is refused itself.
    """
    if os.stat(path).st_nlink == 1:
        return
    known = _known_place(connection) if pragma(connection, "user_version") >= 3 else None
    if known != _place(path):
        raise LedgerError(
            f"the ledger {path} has more than one hard link, and "
            + ("this is not the name that it is used under" if known else "it is not known which of them is in use")
            + ": after a crash, spends could be lost. Use the other name; to use this one, copy the file and put the "
            "copy in its place"
        )


@contextmanager
def connection_to(path: Path, timeout: float = 60.0, mode: str = "rw") -> Iterator[sqlite3.Connection]:
    """A connection to a file for one operation; SQLite's errors come out as a LedgerError.

    Args:
        path: the file.
        timeout: how many seconds to wait for others.
        mode: SQLite's: "rw" for a file that exists, "rwc" for one that may have to be created.
    """
    address = f"{path.as_uri()}?mode={mode}"
    try:
        # closing it rolls back a transaction that was not committed
        with _no_fork, closing(sqlite3.connect(address, timeout, isolation_level=None, uri=True)) as connection:
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
    """What to do about a file that cannot be used; whose it is, if that is the reason."""
    place = _out_of_reach(path)
    if place is not None:
        return (
            f"this account may not read and write {place}, which belongs to account number {place.stat().st_uid}: "
            "use that account, or have the file and its folder made writable for this one"
        )
    return "it must be a whole file, writable together with its folder, on a disk with space, and not held by others"


def pragma(connection: sqlite3.Connection, text: str) -> Any:
    """The value of one of SQLite's settings."""
    return connection.execute(f"PRAGMA {text}").fetchone()[0]


def read_header(connection: sqlite3.Connection) -> Header:
    """The one row of the table `ledger`."""
    rows = connection.execute(f"SELECT {HEADER} FROM ledger").fetchall()
    if len(rows) != 1:
        raise sqlite3.DatabaseError(f"malformed: {len(rows)} rows in the table ledger")
    return Header(*rows[0])


def now() -> str:
    """The time as it is stored."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
