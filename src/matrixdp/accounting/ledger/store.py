"""What a ledger needs of the place where it is kept: `file` and `postgres` are the two that there are."""

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
    """A transaction on one ledger."""

    def header(self) -> Header:
        """What was fixed at creation, the number of entries, and the last hash."""

    def rows(self, after: int) -> Iterator[tuple[dict[str, Any], Any]]:
        """The fields of the entries after this number, but for the empty ones, and their hashes."""

    def row_with_key(self, key: str) -> tuple[dict[str, Any], Any] | None:
        """The entry with this idempotency key."""

    def has_hash(self, found: str) -> bool:
        """Whether an entry has this hash."""

    def document(self, name: str) -> Document:
        """The document with this SHA-256."""

    def check_pages(self) -> None:
        """Looks for damage below the level of rows."""

    def check_complete(self, entries: int) -> None:
        """Looks for rows that are not part of the chain, which has so many entries."""

    def append(self, record: Mapping[str, Any], found: str, documents: Mapping[str, Document]) -> None:
        """Writes an entry with its hash, and those of its documents that are not there yet."""

    def now(self) -> str:
        """The time, by the clock of the store, as it is stored."""


class Store(Protocol):
    """The place of a ledger."""

    @property
    def name(self) -> str:
        """What it is called in messages; never an address, which may have a password in it."""

    @property
    def path(self) -> Path | None:
        """The file, if it is one."""

    @property
    def loses_answers(self) -> bool:
        """Whether a commit may succeed and its answer be lost, so that every entry needs a key."""

    def exists(self) -> bool:
        """Whether there is a ledger."""

    def create(self, budget: Budget, relation: str | None, adaptive: bool) -> None:
        """Makes the ledger, unless another process is first."""

    def opened(self, work: Callable[[Session], Found]) -> Found:
        """Brings the store up to date, if it is not, and reads; it stays as it was if an error comes."""

    def read(self, work: Callable[[Session], Found]) -> Found:
        """The answer of a function that reads, in a transaction."""

    def write(self, work: Callable[[Session], Found]) -> Found:
        """The answer of a function that may write, once that is durable; nobody else writes meanwhile.

        It may be called again where its outcome is not known, and finds by its key what it has written.
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
