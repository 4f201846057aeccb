"""The file of a stream: its settings, its key, what was released, and the few private rows that later days need.

Training and federated rounds with noise over time use the same kind of file; their days are steps or rounds. A stream
without an end also has the tables of `blocks`, from its first block on.

It is one SQLite file, readable and writable by its owner alone, with one transaction per day: a killed process leaves
the state before the day or after it, never in between. Beside it, FILE.mark has the number of days, updated after each.

Refused are a file that others can read; a copy, which has another inode or another name; and a file with fewer days
than its mark, or than this process has seen. If it was moved on purpose, the original must be gone, and the mark that
stayed there counts too. Not detected is an older state in the same inode whose mark is as old, as after restoring a
snapshot of the whole disk, or was deleted. Then a day can be released twice. If it has the same value after the same
days, its noise is the same; otherwise its noise is new, and the guarantee is that of two releases.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from matrixdp import _check
from matrixdp.errors import InvalidInput, StreamError

# "mdps", "mdpt", "mdpu": no other file is mistaken for one of these.
APPLICATIONS = {"stream": 0x6D647073, "training": 0x6D647074, "federation": 0x6D647075}
TABLES = (
    "CREATE TABLE stream (id TEXT, key BLOB, settings TEXT, ledger TEXT, paid INTEGER, place TEXT)",
    "CREATE TABLE parts (number INTEGER PRIMARY KEY, certificate TEXT)",
    "CREATE TABLE days (number INTEGER PRIMARY KEY, fingerprint BLOB, noisy BLOB)",
    "CREATE TABLE carried (number INTEGER PRIMARY KEY, part INTEGER, private BLOB)",
)


class State:
    """The state of a stream in a file, or in memory where no path is given.

    Args:
        path: the file, which `create` makes.
        kind: one of APPLICATIONS.
        moved: accept a file whose name or inode changed: it was moved on purpose, and the original no longer exists.
    """

    def __init__(self, path: Path | None, kind: str = "stream", *, moved: bool = False) -> None:
        self.path, self.kind, self._seen = path, kind, 0
        self._memory = sqlite3.connect(":memory:", isolation_level=None) if path is None else None
        if self._memory is not None:
            weakref.finalize(self, _close, self._memory)
        self._moved = moved

    @property
    def exists(self) -> bool:
        """Whether there is a file with a stream in it."""
        return self.path is not None and self.path.exists() and self.path.stat().st_size > 0

    def create(self, settings: str, ledger: str | None) -> None:
        """Makes the file and writes identity, key and settings, unless another process was first."""
        if self.path is not None:
            try:
                self.path.touch(mode=0o600)
            except OSError as reason:
                raise StreamError(f"the {self.kind} {self.path} cannot be created ({reason.strerror})") from None
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                for statement in (f"PRAGMA application_id = {APPLICATIONS[self.kind]}", *TABLES):
                    connection.execute(statement)
                row = (secrets.token_hex(16), secrets.token_bytes(32), settings, ledger, _place(self.path))
                connection.execute("INSERT INTO stream VALUES (?, ?, ?, ?, 0, ?)", row)
            connection.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """An exclusive transaction; when it ends, what it wrote is on the disk, or undone."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA application_id").fetchone() != (APPLICATIONS[self.kind],):
                raise StreamError(f"{self.path} is not a {self.kind}, or a damaged one; it was not touched")
            self._check_place(connection)
            self._check_days(connection, self.path)
            yield connection
            connection.execute("COMMIT")
            self._seen = self.days(connection)
            if self.path is not None:
                self._write_mark(connection, _mark_of(self.path))

    @staticmethod
    def fixed(connection: sqlite3.Connection) -> tuple[Any, ...]:
        """Identity, key, settings, ledger, and whether that was charged."""
        found: tuple[Any, ...] = connection.execute("SELECT id, key, settings, ledger, paid FROM stream").fetchone()
        return found

    @staticmethod
    def days(connection: sqlite3.Connection) -> int:
        """How many days were released."""
        (days,) = connection.execute("SELECT count(*) FROM days").fetchone()
        return int(days)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if self._memory is not None:
            try:
                yield self._memory
            except sqlite3.ProgrammingError:
                raise StreamError(
                    f"a {self.kind} in memory is used by the thread that made it; give state= for others"
                ) from None
            finally:
                if self._memory.in_transaction:
                    self._memory.execute("ROLLBACK")
            return
        assert self.path is not None
        self._check_mode(self.path)
        try:
            connection = sqlite3.connect(f"{self.path.as_uri()}?mode=rw", timeout=60.0, isolation_level=None, uri=True)
        except sqlite3.Error as reason:
            raise StreamError(f"the {self.kind} {self.path} cannot be opened ({reason})") from None
        try:
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA fullfsync = ON")
            connection.execute("PRAGMA secure_delete = ON")  # private rows that are no longer needed are overwritten
            yield connection
        except sqlite3.Error as reason:
            raise StreamError(f"the {self.kind} {self.path} cannot be used ({reason}); nothing was released") from None
        finally:
            connection.close()  # rolls back what was not committed

    def _check_mode(self, path: Path) -> None:
        try:
            found = path.stat()
        except OSError as reason:
            raise StreamError(f"the {self.kind} {path} cannot be read ({reason.strerror}); begin one first") from None
        if os.name == "posix" and stat.S_IMODE(found.st_mode) & 0o077:
            raise StreamError(f"the {self.kind} {path} holds a key, and others can read it; chmod 600 it")

    def _check_place(self, connection: sqlite3.Connection) -> None:
        (place,) = connection.execute("SELECT place FROM stream").fetchone()
        if place == _place(self.path):
            return
        if not self._moved:
            raise StreamError(
                f"the {self.kind} {self.path} is a copy, or was moved: two copies would release a step twice. Use the "
                "original; if it no longer exists, open this one with moved=True (--moved)"
            )
        original = Path(place.split("/", 2)[2])
        if original.exists() and _place(original) == place:
            raise StreamError(f"the {self.kind} {self.path} is a copy of {original}, which still exists; use that one")
        self._check_days(connection, original)
        connection.execute("UPDATE stream SET place = ?", (_place(self.path),))

    def _check_days(self, connection: sqlite3.Connection, path: Path | None) -> None:
        """Refuses a state with fewer days than this process has seen, or than the mark beside the path has."""
        days, known = self.days(connection), self._seen
        if path is not None:
            known = max(known, self._marked(connection, _mark_of(path)))
        if days < known:
            raise StreamError(
                f"the {self.kind} {self.path} was reset to an earlier state: it has {days} steps, and had {known}. A "
                f"step must not be released twice; restore the later state, or begin another {self.kind}, with its own "
                "budget"
            )

    def _marked(self, connection: sqlite3.Connection, mark: Path) -> int:
        """How many days a mark has; 0 if there is none, or it belongs to another stream."""
        words = mark.read_text(encoding="ascii", errors="replace").split() if mark.exists() else []
        ours = len(words) == 2 and words[0] == self.fixed(connection)[0] and words[1].isdecimal()
        return int(words[1]) if ours else 0

    def _write_mark(self, connection: sqlite3.Connection, mark: Path) -> None:
        """Overwrites a line of fixed length, under the lock, so that no process writes fewer days than another.

        A broken mark counts as none, an old one as fewer days.
        """
        try:
            connection.execute("BEGIN IMMEDIATE")
            if self._marked(connection, mark) != (days := self.days(connection)):
                handle = os.open(mark, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    os.write(handle, f"{self.fixed(connection)[0]} {days:>20}\n".encode())
                    os.fsync(handle)
                finally:
                    os.close(handle)
            connection.execute("ROLLBACK")
        except (OSError, sqlite3.Error) as reason:
            raise StreamError(
                f"{mark} could not be written ({reason}). What was released is in {self.path}: ask for the same step "
                "again"
            ) from None


def _place(path: Path | None) -> str:
    """The file's inode and path; a copy differs in at least one of them."""
    if path is None:
        return ""
    found = path.stat()
    return f"{found.st_dev}/{found.st_ino}/{path}"


def _mark_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.mark")


def checked_path(state: Any) -> Path | None:
    """The absolute path of a state; None without one."""
    if state is None:
        return None
    if not isinstance(state, (str, os.PathLike)):
        raise InvalidInput(f"state must be the path of a file, got {_check.kind(state)}")
    return Path(state).resolve()


def _close(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.ProgrammingError):  # raised when another thread collects the garbage
        connection.close()
