"""The file behind a ledger: its tables, its chain of hashes, and how it is created, opened and brought up to date."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matrixdp.budget import Budget
from matrixdp.errors import MatrixDPError

SCHEMA = 2
APPLICATION = 0x6D64706C  # "mdpl": no other program's SQLite file is taken for a ledger
CHAIN = "matrixdp ledger, chain 1"
LONGEST_NOTE = 1000
# Folders in which ledgers are made, and how often to look again whether a second name has gone.
DRAFTS, PATIENCE = ".matrixdp-", 40

PROFILE = {"mu": "REAL", "dimension": "INTEGER", "k": "REAL", "p": "REAL", "scale": "REAL", "radius": "REAL"}
SINCE_SCHEMA_2 = {"count": "INTEGER NOT NULL DEFAULT 1", "sampling_rate": "REAL NOT NULL DEFAULT 1.0"}
COLUMNS = {
    **{"number": "INTEGER PRIMARY KEY", "time": "TEXT", "note": "TEXT", "relation": "TEXT", "exact": "INTEGER"},
    **PROFILE,
    **{"total_variation": "REAL", "sensitivity": "TEXT", "noise": "TEXT", "source": "TEXT", "shape": "TEXT"},
    **SINCE_SCHEMA_2,
}
DEFAULTS = {"count": 1, "sampling_rate": 1.0}

CREATE = (
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
    "CREATE TABLE ledger (id TEXT, epsilon REAL, delta REAL, relation TEXT, created TEXT, entries INTEGER, head TEXT)",
    f"CREATE TABLE entries ({', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())}, hash TEXT)",
)
FROM_SCHEMA_1 = (
    "PRAGMA user_version = 2",
    *(f"ALTER TABLE entries ADD COLUMN {name} {kind}" for name, kind in SINCE_SCHEMA_2.items()),
)
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

    def fixed(self) -> dict[str, Any]:
        """What never changes after creation."""
        fields = asdict(self)
        return {"chain": CHAIN, **{name: fields[name] for name in ("id", "epsilon", "delta", "relation", "created")}}

    def genesis(self) -> str:
        """The hash before the first entry."""
        return link("", self.fixed())


def hashed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are hashed: not those that are empty or at their default, as in schema 1, which lacked some."""
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


def create(path: Path, budget: Budget, relation: str | None) -> None:
    """Makes the file under another name and then links it to its own, so that nobody ever sees half a ledger."""
    header = Header(secrets.token_hex(16), budget.epsilon, budget.delta, relation, now())
    try:
        with TemporaryDirectory(dir=path.parent, prefix=DRAFTS) as folder:
            draft = Path(folder, path.name)
            draft.touch(mode=0o600)
            with connection_to(draft) as connection:
                connection.execute("BEGIN IMMEDIATE")
                for statement in CREATE:
                    connection.execute(statement)
                row = astuple(replace(header, head=header.genesis()))
                connection.execute("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                connection.execute("COMMIT")
            with suppress(FileExistsError):  # another process was first: its ledger is the one
                os.link(draft, path)
        sync_folder(path.parent)
    except OSError as reason:
        raise LedgerError(
            f"the ledger {path} could not be created ({reason}); its folder must exist and be writable"
        ) from None


def upgrade(connection: sqlite3.Connection) -> None:
    """Brings an older file to the present schema. Its hashes stay: they leave out what is at its default."""
    if pragma(connection, "user_version") == 1:
        for statement in FROM_SCHEMA_1:
            connection.execute(statement)


@contextmanager
def connection_to(path: Path, timeout: float = 60.0) -> Iterator[sqlite3.Connection]:
    """A connection to an existing file for one operation; SQLite's errors come out as a LedgerError."""
    _check_one_name(path)
    address = f"{path.as_uri()}?mode=rw"
    try:
        # closing it rolls back a transaction that was not committed
        with _no_fork, closing(sqlite3.connect(address, timeout, isolation_level=None, uri=True)) as connection:
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA fullfsync = ON")  # macOS: through the drive's own cache
            yield connection
    except sqlite3.Error as reason:
        raise LedgerError(
            f"the ledger {path} cannot be used ({reason}); it must be a whole file, writable together with its folder, "
            "on a disk with space, and not held by others for long. No spend is confirmed: release nothing"
        ) from reason


def _check_one_name(path: Path) -> None:
    """Refuses a file with a second name: SQLite would look for what a crash has left beside the other one."""
    for _ in range(PATIENCE):
        try:
            found = os.stat(path)
        except OSError:
            return  # SQLite says what is wrong
        if found.st_nlink == 1 or not stat.S_ISREG(found.st_mode):
            return
        # a draft that is linked has done its work; a process that was killed may have left it
        for draft in path.parent.glob(f"{DRAFTS}*/*"):
            with suppress(OSError):  # its maker may be removing it too
                if draft.name == path.name and draft.samefile(path):
                    draft.unlink()
        time.sleep(0.05)
    raise LedgerError(
        f"the ledger {path} has a second name, a hard link: after a crash, spends under one of them could be lost; "
        "remove the other"
    )


def pragma(connection: sqlite3.Connection, text: str) -> Any:
    """The value of one of SQLite's settings."""
    return connection.execute(f"PRAGMA {text}").fetchone()[0]


def read_header(connection: sqlite3.Connection) -> Header:
    """The one row of the table `ledger`."""
    rows = connection.execute("SELECT id, epsilon, delta, relation, created, entries, head FROM ledger").fetchall()
    if len(rows) != 1:
        raise sqlite3.DatabaseError(f"malformed: {len(rows)} rows in the table ledger")
    return Header(*rows[0])


def now() -> str:
    """The time as it is stored."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
