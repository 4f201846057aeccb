"""A budget that outlives the process: one file with every spend, shared by all who release from the records.

A spend is on the disk before any noise is drawn, so a crash can waste budget but never lose a spend. The file is
written with a rollback journal and `synchronous = EXTRA`: at rest it is one whole file, and a commit returns only when
the data and the folder's entries have reached the disk. (A write-ahead log would flush less often, but it keeps recent
spends in a second file, easily left behind by a copy, and it needs memory shared by all processes.)

Entries form a chain (`chain`), and the file stores how many there are and the last hash. docs/ledger.md says what this
finds and what it cannot. `exports` checks what `export` writes, without the ledger.

Every operation opens a connection of its own, and none is open while the process forks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from matrixdp import _check
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.filter import Spent
from matrixdp.accounting.ledger.chain import DOCUMENTS, hashed, link
from matrixdp.accounting.ledger.entries import Entry, checked, entry_of
from matrixdp.accounting.ledger.file import File, Session, tampered
from matrixdp.accounting.ledger.totals import Total
from matrixdp.adjacency import Adjacency, takes_relation
from matrixdp.adjacency import checked as checked_adjacency
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput, LedgerError, MatrixDPError
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import Guarantee
from matrixdp.privacy.records import encode


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

    Guarantee: the releases charged to the ledger, taken together, keep its budget under its adjacency, also when
    queries, noise, counts and sampling rates are chosen in view of earlier answers; with `adaptive=False`, when the
    queries are. (Entries of files from before schema 3 count as fixed beforehand.) A spend that returns is on the disk.
    Source: smith2022fully for Gaussian noise; the rest, with the proofs, in `accounting.filter` and `limits`.

    Args:
        path: the SQLite file; it is created if it does not exist and a budget is given.
        budget: what all spends together may use. An existing ledger keeps its own, and another one is an error.
        adjacency: which data sets are neighbours; if it is not given at creation, the first spend fixes it.
        adaptive: False, at creation, promises that the noise, counts and sampling rates of all releases are fixed
            before the first answer. Then nothing is kept back, and the total is that of an Accountant.
        timeout: how many seconds to wait for other processes that are writing.

    Raises:
        LedgerError: if there is no ledger and no budget to make one, or the file cannot be used or was tampered with.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Counts, Ledger, release
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> out = release([12, 3], Counts(1), Budget(1.0, 1e-7), ledger=ledger, note="two counts")
        >>> [entry.note for entry in ledger.history()], ledger.remaining().epsilon < 3
        (['two counts'], True)
    """

    @takes_relation
    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: Budget | None = None,
        *,
        adjacency: str | None = None,
        adaptive: bool | None = None,
        timeout: float = 60.0,
    ) -> None:
        if budget is not None and not isinstance(budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {_check.kind(budget)}")
        if budget is not None:
            budget.with_delta("a ledger")
        if adjacency is not None:
            adjacency = checked_adjacency(adjacency)
        if adaptive is not None and not isinstance(adaptive, bool):
            raise InvalidInput(f"adaptive must be True, False or None, got {_check.kind(adaptive)}")
        timeout = _check.positive("timeout", timeout)
        try:
            self.path = Path(path).resolve()  # a later change of the working folder must not change the ledger
            exists = self.path.exists()
        except Exception as reason:  # its text may quote what was given in place of a path
            raise InvalidInput(
                f"path must name a file that can be reached, got {_check.kind(path)} ({_check.origin(reason)})"
            ) from None
        self._file = File(self.path, timeout)
        if not exists:
            if budget is None:
                raise LedgerError(f"there is no ledger {self.path}; create it with a budget (matrixdp ledger create)")
            self._file.create(budget, adjacency, adaptive is not False)
        with self._file.opened() as session:
            header = session.header()
            try:
                self.budget, self.adaptive = (
                    Budget(header.epsilon, header.delta).with_delta("a ledger"),
                    header.adaptive != 0,
                )
            except InvalidInput:
                raise tampered(self.path, "its budget is none") from None
            spent = Spent(self.budget, self.adaptive, several=header.adaptive == 2)
            self._origin = Total(0, header.genesis(), header.relation, spent)
            self._verified = self._check_all(session)
        if budget is not None and budget != self.budget:
            raise InvalidInput(f"budget must be the ledger's own ({self.budget!r} in {self.path}), got {budget!r}")
        if adaptive is not None and header.adaptive is not None and adaptive is not self.adaptive:
            raise InvalidInput(f"adaptive must be the ledger's own, {self.adaptive}, got {adaptive!r}")
        if adjacency is not None and adjacency != self._verified.adjacency:
            raise InvalidInput(f"adjacency must be the ledger's own, {self._verified.adjacency}, got {adjacency}")

    @property
    def adjacency(self) -> Adjacency | None:
        """The adjacency that all spends share; None until the first spend, if none was given at creation."""
        found = self._current().adjacency
        return None if found is None else Adjacency(found)

    @property
    def relation(self) -> Adjacency | None:
        """Another name of `adjacency`."""
        return self.adjacency

    @property
    def origin(self) -> str:
        """The hash before the first entry, which no other ledger has."""
        return self._origin.head

    def spend(
        self,
        certificate: Guarantee,
        note: str = "",
        *,
        count: int = 1,
        sampling_rate: float = 1.0,
        series: str | None = None,
        planned: int | None = None,
        plan: Composition | None = None,
        dataset: str | None = None,
        analyst: str | None = None,
        purpose: str | None = None,
        unit: str = "record",
        key: str | None = None,
    ) -> Entry:
        """Charges a release to the budget. When it returns, the spend is on the disk and the noise may be drawn.

        A series is a plan that is carried out in parts, such as a training by epochs. Its first spend charges all
        `planned` releases as one block; the later ones use them up and cost nothing more. What is never used stays
        charged: whether a plan was broken off may depend on the answers, so nothing is given back.

        Args:
            certificate: what the release guarantees: a Certificate, or a Guarantee for what is known from elsewhere.
            note: what to remember of it, in one line; never data.
            count: how many such releases this is.
            sampling_rate: the probability that a record takes part, where each release draws its own Poisson sample.
            series: a name for the plan that this spend is a part of, unique in this ledger, such as
                `secrets.token_hex(8)`; the certificate and the sampling rate must be the same for all parts.
            planned: how many releases the whole series is; fixed by its first spend.
            plan: for a series of several kinds of releases, all of them, in place of `planned`; see `Budget.plan`. Each
                spend uses up one that has the same guarantee, or under which it lies at every epsilon.
            dataset: which data set the release is made from.
            analyst: who asks for it.
            purpose: what it is for.
            unit: whom the guarantee protects, such as "record" or "user".
            key: an idempotency key, unique in this ledger. A spend that is repeated with the same key, as its answer
                was lost, is charged once and gets the entry that was written. A key pays for the noise of one release:
                where that may have been drawn already, use another key.

        Raises:
            BudgetExceeded: if the total would pass the budget, or a series its plan; nothing is written then.
            InvalidInput: if an argument cannot be used, or the key has paid for something else.
            LedgerError: if the spend could not be confirmed; nothing may be released then.
        """
        spend = checked(
            certificate,
            self.budget.epsilon,
            note=note,
            count=count,
            sampling_rate=sampling_rate,
            series=series,
            planned=planned,
            plan=plan,
            unit=unit,
            dataset=dataset,
            analyst=analyst,
            purpose=purpose,
            key=key,
        )
        with self._file.transaction("BEGIN IMMEDIATE") as session:
            before = self._catch_up(session)
            written = None if key is None else session.row_with_key(key)
            if written is not None:
                entry = entry_of(*written, session.document)
                if not spend.is_that_of(entry):
                    raise InvalidInput(f"key has paid for another spend, entry {entry.number}; nothing was spent")
                return entry
            if before.adjacency not in (None, certificate.adjacency):
                raise InvalidInput(
                    f"certificate must hold under the ledger's adjacency, {before.adjacency}, got "
                    f"{certificate.adjacency}; ask the query for the ledger's, or keep a second ledger"
                )
            named = spend.plan if before.begun(spend) is None else None  # the later parts of a plan do not name it
            record = {"number": before.entries + 1, **spend.record(), "plan": named, **before.price(spend)}
            head = link(before.head, hashed(record))
            entry = entry_of(record, head, spend.documents.__getitem__)
            after = before.followed_by([entry])
            if before.begun(spend) is None:
                self._check_budget(after)
            session.append(record, head, spend.documents)
            before.followed_by(self._walk(session, before))  # reads it back: only what verifies is committed
        self._verified = after
        return entry

    def plan(self, sets: Sequence[Any], weights: Sequence[float] | None = None, shapes: Any = None) -> Any:
        """Plans releases for the whole budget; see `Budget.plan`. The first of them pays for all.

        Raises:
            BudgetExceeded: if the plan does not fit beside what was spent; `budget.split` gives a part to plan for.
        """
        planned = self.budget.plan(sets, weights, shapes)
        after, uses = self._current().followed_by([]), planned.composition.uses
        adjacency = str(planned.composition.adjacency)
        if self.adaptive:
            after.spent.add(uses, after.spent.charge(uses, adjacency), adjacency)
        else:
            after.spent.fixed.update(uses)
        after.adjacency = adjacency
        self._check_budget(after)
        return planned

    def _check_budget(self, after: Total) -> None:
        if not after.fits():
            raise BudgetExceeded(
                f"after this spend, epsilon at delta {self.budget.delta:g} would be {after.epsilon():.4g}, "
                f"and the budget of {self.path} is {self.budget}; nothing was spent. What is left: ledger.remaining(), "
                "or matrixdp ledger show"
            )

    def spent(self) -> float:
        """The epsilon that all spends together have used, at the budget's delta."""
        return self._current().epsilon()

    def remaining(self) -> Remaining:
        """The largest Gaussian release without sampling that the ledger would still take, rounded down.

        In a ledger of such releases, mu is sqrt(B^2 - sum of mu_i^2), where B is the budget's own mu; of the mu at 85 %
        of the budget's delta, after the first, if the ledger is adaptive (95 % if it is from before schema 5).
        """
        total = self._current()
        mu = total.spent.remaining(total.adjacency or "")
        if not total.entries:
            return Remaining(mu, self.budget.epsilon)
        # less by 1e-9, for a release that keeps this epsilon may have a mu above ours by rounding
        return Remaining(mu, float(gaussian.epsilon(mu * (1 - 1e-9), self.budget.delta)))

    def history(self) -> list[Entry]:
        """All spends, oldest first; the chain is checked on the way."""
        with self._file.transaction() as session:
            return list(self._walk(session, self._origin))

    def verify(self, head: str | None = None) -> str:
        """Reads the whole file again and checks it.

        Args:
            head: a hash that was kept elsewhere; the chain must contain it, so no entry up to it was changed since.

        Returns:
            The head, which is the last hash of the chain.
        """
        if head is not None and not isinstance(head, str):
            raise InvalidInput(f"head must be a hash as verify() gives it, a str, got {_check.kind(head)}")
        with self._file.transaction() as session:
            self._catch_up(session)  # finds a file that was put back to an earlier state since the last look
            total = self._check_all(session)
            known = head in (None, self.origin) or session.has_hash(str(head))
        if not known:
            raise LedgerError(
                f"{self.path} does not contain the hash {head}; entries were removed or rewritten since it was kept"
            )
        return total.head

    def export(self) -> list[dict[str, Any]]:
        """What was fixed at creation, every entry, and the head: all that `verify_export` needs to check everything.

        An entry brings those of its documents along that no earlier entry had.
        """
        with self._file.transaction() as session:
            entries = list(self._walk(session, self._origin))
            lines: list[dict[str, Any]] = [{**session.header().fixed(), "hash": self.origin}]
            told: set[str] = set()
            for entry in entries:
                names = {entry.fields[name] for name in DOCUMENTS if name in entry.fields} - told
                documents = {"documents": {name: session.document(name) for name in sorted(names)}} if names else {}
                lines.append({**entry.fields, **documents, "hash": entry.hash})
                told |= names
        total = self._origin.followed_by(entries)
        spent = encode(total.epsilon())
        return [*lines, {"entries": total.entries, "releases": total.releases, "spent": spent, "head": total.head}]

    def _current(self) -> Total:
        with self._file.transaction() as session:
            return self._catch_up(session)

    def _catch_up(self, session: Session) -> Total:
        """Checks what was written since the last look; what was seen before is remembered, not read again."""
        self._verified = self._verified.followed_by(self._walk(session, self._verified))
        return self._verified

    def _check_all(self, session: Session) -> Total:
        session.check_pages()
        total = self._origin.followed_by(self._walk(session, self._origin))
        session.check_complete(total.entries)
        return total

    def _walk(self, session: Session, since: Total) -> Iterator[Entry]:
        """The entries after a verified beginning; each is checked before it is given out."""
        header, number, head = session.header(), since.entries, since.head
        if header.genesis() != self.origin:
            raise tampered(
                self.path, "what was fixed at creation, such as the budget, is not what this process has read"
            )
        document = lru_cache(maxsize=8)(session.document)
        for record, found in session.rows(number):
            number += 1
            if record["number"] != number:
                raise tampered(self.path, f"entry {number} is missing")
            head = link(head, hashed(record))
            if head != found:
                fixed = ", or the budget and adjacency before it," if number == 1 else ""
                raise tampered(self.path, f"entry {number}{fixed} is not what was written")
            try:
                entry = entry_of(record, head, document)
            except LedgerError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, MatrixDPError) as reason:
                raise tampered(self.path, f"entry {number} cannot be read ({type(reason).__name__})") from None
            yield entry
        if (number, head) != (header.entries, header.head):
            raise tampered(
                self.path, f"it should have {header.entries} entries and the head {header.head}, and has not"
            )
