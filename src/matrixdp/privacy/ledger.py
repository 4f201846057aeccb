"""A budget that outlives the process: one SQLite file with every spend, shared by all who release from the records.

A spend is on the disk before any noise is drawn, so a crash can waste budget but never lose a spend. The file is
written with a rollback journal and `synchronous = EXTRA`: at rest it is one whole file, and a commit returns only when
the data and the folder's entries have reached the disk. (A write-ahead log would flush less often, but it keeps recent
spends in a second file, easily left behind by a copy, and it needs memory shared by all processes.)

Entries form a chain: each stores the SHA-256 of the hash before it and of its own fields, and the table `ledger` stores
how many there are and the last hash. docs/ledger.md says what this finds and what it cannot.

Every operation opens a connection of its own, and none is open while the process forks.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.filter import Charge, Spent
from matrixdp.privacy.ledger_entries import Entry, Verified, checked, entry_of, planned_for, record_of, use_of
from matrixdp.privacy.ledger_file import (
    APPLICATION,
    COLUMNS,
    INSERT,
    SCHEMA,
    SELECT,
    LedgerError,
    check_name,
    connection_to,
    create,
    hashed,
    is_current,
    link,
    pragma,
    read_header,
    upgrade,
)
from matrixdp.sensitivity import RELATIONS


@dataclass(frozen=True)
class Remaining:
    """What one more Gaussian release may use: mu, and the epsilon that it may promise at the budget's delta.

    The total-variation error of that release's sampler comes on top; for matrices of many millions of entries, stay a
    little below.
    """

    mu: float
    epsilon: float


class Ledger:
    """A budget in a file, for any number of processes and threads.

    Guarantee: the releases charged to the ledger, taken together, keep its budget under its relation, also when
    queries, noise, counts and sampling rates are chosen in view of earlier answers; with `adaptive=False`, when the
    queries are. (Entries of files from before schema 3 count as fixed beforehand.) A spend that returns is on the disk.
    Source: smith2022fully for Gaussian noise; the rest, with the proof, in `privacy.filter`.

    Args:
        path: the SQLite file; it is created if it does not exist and a budget is given.
        budget: what all spends together may use. An existing ledger keeps its own, and another one is an error.
        relation: "add/remove" or "replace"; if it is not given at creation, the first spend fixes it.
        adaptive: False, at creation, promises that the noise, counts and sampling rates of all releases are fixed
            before the first answer. Then nothing is kept back, and the total is that of an Accountant.
        timeout: how many seconds to wait for other processes that are writing.

    Raises:
        LedgerError: if there is no ledger and no budget to make one, or the file cannot be used or was tampered with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: Budget | None = None,
        *,
        relation: str | None = None,
        adaptive: bool | None = None,
        timeout: float = 60.0,
    ) -> None:
        if budget is not None and not isinstance(budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {_check.kind(budget)}")
        if relation is not None:
            _check.choice("relation", relation, RELATIONS)
        if adaptive is not None and not isinstance(adaptive, bool):
            raise InvalidInput(f"adaptive must be True, False or None, got {_check.kind(adaptive)}")
        self._timeout = _check.positive("timeout", timeout)
        try:
            self.path = Path(path).resolve()  # a later change of the working folder must not change the ledger
            exists = self.path.exists()
        except Exception as reason:  # its text may quote what was given in place of a path
            raise InvalidInput(
                f"path must name a file that can be reached, got {_check.kind(path)} ({_check.origin(reason)})"
            ) from None
        if not exists:
            if budget is None:
                raise LedgerError(f"there is no ledger {self.path}; create it with a budget (matrixdp ledger create)")
            create(self.path, budget, relation, adaptive is not False, self._timeout)
        with self._transaction("BEGIN", oldest=1) as connection:
            current = is_current(connection, self.path)
        with self._transaction("BEGIN" if current else "BEGIN IMMEDIATE", oldest=1) as connection:
            if not current:
                upgrade(connection, self.path)
            header = read_header(connection)
            try:
                self.budget, self.adaptive = Budget(header.epsilon, header.delta), header.adaptive != 0
            except InvalidInput:
                raise self._tampered("its budget is none") from None
            self._origin = Verified(0, header.genesis(), header.relation, Spent(self.budget, self.adaptive))
            self._verified = self._check_all(connection)
        if budget is not None and budget != self.budget:
            raise InvalidInput(f"budget must be the ledger's own ({self.budget!r} in {self.path}), got {budget!r}")
        if adaptive is not None and header.adaptive not in (None, int(adaptive)):
            raise InvalidInput(f"adaptive must be the ledger's own, {self.adaptive}, got {adaptive!r}")
        if relation is not None and relation != self._verified.relation:
            raise InvalidInput(f"relation must be the ledger's own, {self._verified.relation!r}, got {relation!r}")

    @property
    def relation(self) -> str | None:
        """The relation that all spends share; None until the first spend, if none was given at creation."""
        return self._current().relation

    def spend(
        self,
        certificate: Certificate,
        note: str = "",
        *,
        count: int = 1,
        sampling_rate: float = 1.0,
        series: str | None = None,
        planned: int | None = None,
    ) -> Entry:
        """Charges a release to the budget. When it returns, the spend is on the disk and the noise may be drawn.

        A series is a plan that is carried out in parts, such as a training by epochs. Its first spend charges all
        `planned` releases as one block; the later ones use them up and cost nothing more. What is never used stays
        charged: whether a plan was broken off may depend on the answers, so nothing is given back.

        Args:
            certificate: what the release guarantees.
            note: what to remember of it, in one line; never data.
            count: how many such releases this is.
            sampling_rate: the probability that a record takes part, where each release draws its own Poisson sample.
            series: a name for the plan that this spend is a part of, unique in this ledger, such as
                `secrets.token_hex(8)`; the certificate and the sampling rate must be the same for all parts.
            planned: how many releases the whole series is; fixed by its first spend.

        Raises:
            BudgetExceeded: if the total would pass the budget, or a series its plan; nothing is written then.
            LedgerError: if the spend could not be confirmed; nothing may be released then.
        """
        entry = checked(certificate, note, count, sampling_rate, series, planned)
        record = record_of(entry)
        with self._transaction("BEGIN IMMEDIATE") as connection:
            before = self._catch_up(connection)
            if before.relation not in (None, certificate.relation):
                raise InvalidInput(
                    f"certificate must hold under the ledger's relation, {before.relation!r}, got "
                    f"{certificate.relation!r}; ask the query for the ledger's, or keep a second ledger"
                )
            begun = before.series.get(series) if series is not None else None
            record |= {"number": before.entries + 1, "planned": planned_for(entry, begun)}
            record |= {"charged_mu": 0.0, "charged_delta": 0.0} if begun else self._charge(before, record)
            head = link(before.head, hashed(record))
            after = before.followed_by([(record, head)])
            if begun is None:
                self._check_budget(after)
            connection.execute(INSERT, (*record.values(), head))
            connection.execute("UPDATE ledger SET entries = ?, head = ?", (after.entries, head))
            self._advance(connection, before)  # reads it back: only what verifies is committed
        self._verified = after
        return entry_of(record, head)

    def _charge(self, before: Verified, record: Mapping[str, Any]) -> dict[str, float | None]:
        if not self.adaptive:
            return {}
        charged = before.spent.charge(((use_of(record), record["planned"]),), record["relation"])
        charged = charged if math.isfinite(charged.delta) else Charge(math.inf, 1.0)
        return {"charged_mu": charged.mu if math.isfinite(charged.mu) else None, "charged_delta": charged.delta}

    def _check_budget(self, after: Verified) -> None:
        relation = after.relation or ""
        if not after.spent.fits(relation):
            epsilon = after.spent.epsilon(relation)
            raise BudgetExceeded(
                f"after this spend, epsilon at delta {self.budget.delta:g} would be {epsilon:.4g}, "
                f"and the budget of {self.path} is {self.budget}; nothing was spent. What is left: ledger.remaining(), "
                "or matrixdp ledger show"
            )

    def spent(self) -> float:
        """The epsilon that all spends together have used, at the budget's delta."""
        verified = self._current()
        return verified.spent.epsilon(verified.relation or "")

    def remaining(self) -> Remaining:
        """The largest Gaussian release without sampling that the ledger would still take, rounded down.

        In a ledger of such releases, mu is sqrt(B^2 - sum of mu_i^2), where B is the budget's own mu; of the mu at 95 %
        of the budget's delta, after the first, if the ledger is adaptive.
        """
        verified = self._current()
        mu = verified.spent.remaining(verified.relation or "")
        if not verified.entries:
            return Remaining(mu, self.budget.epsilon)
        # less by 1e-9, for a release that keeps this epsilon may have a mu above ours by rounding
        return Remaining(mu, float(gaussian.epsilon(mu * (1 - 1e-9), self.budget.delta)))

    def history(self) -> list[Entry]:
        """All spends, oldest first; the chain is checked on the way."""
        with self._transaction("BEGIN") as connection:
            return [entry_of(record, found) for record, found in self._walk(connection, self._origin)]

    def verify(self, head: str | None = None) -> str:
        """Reads the whole file again and checks it.

        Args:
            head: a hash that was kept elsewhere; the chain must contain it, so no entry up to it was changed since.

        Returns:
            The head, which is the last hash of the chain.
        """
        if head is not None and not isinstance(head, str):
            raise InvalidInput(f"head must be a hash as verify() gives it, a str, got {_check.kind(head)}")
        with self._transaction("BEGIN") as connection:
            self._catch_up(connection)  # finds a file that was put back to an earlier state since the last look
            verified = self._check_all(connection)
            known = connection.execute("SELECT 1 FROM entries WHERE hash = ?", (head,)).fetchone()
        if head not in (None, self._origin.head) and not known:
            raise LedgerError(
                f"{self.path} does not contain the hash {head}; entries were removed or rewritten since it was kept"
            )
        return verified.head

    def export(self) -> list[dict[str, Any]]:
        """What was fixed at creation, every entry, and the head: all that an outsider needs to check the chain."""
        with self._transaction("BEGIN") as connection:
            header = read_header(connection)
            entries = [entry_of(record, found).to_dict() for record, found in self._walk(connection, self._origin)]
        first = {**header.fixed(), "hash": self._origin.head}
        return [first, *entries, {"entries": header.entries, "head": header.head}]

    def _current(self) -> Verified:
        with self._transaction("BEGIN") as connection:
            return self._catch_up(connection)

    def _catch_up(self, connection: sqlite3.Connection) -> Verified:
        """Checks what was written since the last look; what was seen before is remembered, not read again."""
        self._verified = self._advance(connection, self._verified)
        return self._verified

    def _check_all(self, connection: sqlite3.Connection) -> Verified:
        found = pragma(connection, "quick_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(f"malformed: {found}")
        verified = self._advance(connection, self._origin)
        if connection.execute("SELECT count(*) FROM entries").fetchone()[0] != verified.entries:
            raise self._tampered("it has entries that are not part of the chain")
        return verified

    def _advance(self, connection: sqlite3.Connection, since: Verified) -> Verified:
        return since.followed_by(self._walk(connection, since))

    def _walk(self, connection: sqlite3.Connection, since: Verified) -> Iterator[tuple[dict[str, Any], str]]:
        """The entries after a verified beginning, and their hashes; each is checked before it is given out."""
        header, number, head = read_header(connection), since.entries, since.head
        if header.genesis() != self._origin.head:
            raise self._tampered("what was fixed at creation, such as the budget, is not what this process has read")
        for *row, found in connection.execute(SELECT, (number,)):
            number += 1
            record = dict(zip(COLUMNS, row, strict=True))
            if record["number"] != number:
                raise self._tampered(f"entry {number} is missing")
            head = link(head, hashed(record))
            if head != found:
                fixed = ", or the budget and relation before it," if number == 1 else ""
                raise self._tampered(f"entry {number}{fixed} is not what was written")
            yield record, head
        if (number, head) != (header.entries, header.head):
            raise self._tampered(f"it should have {header.entries} entries and the head {header.head}, and has not")

    def _tampered(self, finding: str) -> LedgerError:
        return LedgerError(
            f"the ledger {self.path} was changed by other means: {finding}. Release nothing on its account; restore it "
            "from a copy, and record there what was spent since"
        )

    @contextmanager
    def _transaction(self, begin: str, *, oldest: int = SCHEMA) -> Iterator[sqlite3.Connection]:
        """A transaction on the ledger's file, committed unless an error comes up inside."""
        with connection_to(self.path, self._timeout) as connection:
            if pragma(connection, "application_id") != APPLICATION:
                raise LedgerError(f"{self.path} is not a ledger, or a damaged one; it was not touched")
            check_name(connection, self.path)
            if pragma(connection, "journal_mode = DELETE") != "delete":
                raise LedgerError(f"{self.path} has no rollback journal; close the other programs that have it open")
            connection.execute(begin)
            schema = pragma(connection, "user_version")
            if not oldest <= schema <= SCHEMA:
                raise LedgerError(
                    f"{self.path} has schema {schema}, and this matrixdp reads up to {SCHEMA}; upgrade matrixdp"
                )
            yield connection
            connection.execute("COMMIT")
