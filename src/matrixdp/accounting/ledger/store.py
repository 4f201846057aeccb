"""What a ledger needs from the store that holds it; `file` and `postgres` implement it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from matrixdp import _check
from matrixdp.accounting.ledger.chain import Document, Header
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, LedgerError

Found = TypeVar("Found")


class Session(Protocol):
    """A transaction on one ledger; an error inside undoes it."""

    def header(self) -> Header:
        """What was fixed at creation, the number of entries, and the last hash."""

    def rows(self, after: int) -> Iterator[tuple[dict[str, Any], Any]]:
        """The fields that are not empty, and the hash, of each entry after this number."""

    def row_with_key(self, key: str) -> tuple[dict[str, Any], Any] | None:
        """The fields and the hash of the entry with this idempotency key, if there is one."""

    def has_hash(self, found: str) -> bool:
        """Whether an entry has this hash."""

    def document(self, name: str) -> Document:
        """The document with this SHA-256."""

    def check_pages(self) -> None:
        """Looks for damage below the level of rows, and raises an error if there is any."""

    def check_complete(self, entries: int) -> None:
        """Raises an error if there are rows that are not part of the chain, which has this number of entries."""

    def check_documents(self) -> None:
        """Raises an error if there are documents that no entry names."""

    def append(self, record: Mapping[str, Any], found: str, documents: Mapping[str, Document]) -> None:
        """Writes an entry with its hash, and those of its documents that are not there yet."""

    def now(self) -> str:
        """The time of the machine or the server, as it is stored."""


class Store(Protocol):
    """Where a ledger is kept."""

    @property
    def name(self) -> str:
        """The name of the ledger in messages; never an address, which may contain a password."""

    @property
    def path(self) -> Path | None:
        """The file, if it is one."""

    @property
    def loses_answers(self) -> bool:
        """Whether a commit may succeed and its answer be lost, so that every entry needs a key."""

    def exists(self) -> bool:
        """Whether there is a ledger."""

    def create(self, budget: Budget, relation: str | None, adaptive: bool) -> None:
        """Creates the ledger, and the tables if a database has none, unless another process is first."""

    def opened(self, work: Callable[[Session], Found]) -> Found:
        """Upgrades the store if it has an older schema, and reads."""

    def read(self, work: Callable[[Session], Found]) -> Found:
        """What a function that reads returns, in a transaction."""

    def write(self, work: Callable[[Session], Found]) -> Found:
        """What a function that may write returns, once that is durable; nobody else writes meanwhile.

        The function may be called again if the outcome is not known; it finds by its key what it has written.
        """

    def grant(self, role: str, may: str) -> None:
        """Lets a role of a database "read" or "spend"."""


def tampered(name: str | Path, finding: str) -> LedgerError:
    """The error for a ledger whose content is not what was written."""
    return LedgerError(
        f"the ledger {name} was changed by other means: {finding}. Release nothing on its account; restore it from a "
        "copy, and record there what was spent since"
    )


def store_of(path: str | os.PathLike[str], dataset: str | None, timeout: float) -> Store:
    """The file, or the database, behind a ledger."""
    if isinstance(path, str) and path.startswith(("postgresql://", "postgres://")):
        from matrixdp.accounting.ledger.postgres import Postgres

        return Postgres(path, dataset, timeout)
    from matrixdp.accounting.ledger.file import File

    try:
        found = Path(path).resolve()  # a later change of the working folder must not change the ledger
        found.exists()
    except Exception as reason:  # its text may quote what was given in place of a path
        raise InvalidInput(
            f"path must name a file that can be reached, got {_check.kind(path)} ({_check.origin(reason)})"
        ) from None
    return File(found, timeout)
