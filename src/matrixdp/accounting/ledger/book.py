"""Reads and writes the chain of a ledger: every entry is checked before it counts, and before it is committed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from matrixdp.accounting.ledger.chain import DOCUMENTS, Document, Fields, Header, hashed, link
from matrixdp.accounting.ledger.entries import Change, Entry, event_of
from matrixdp.accounting.ledger.spends import check_note
from matrixdp.accounting.ledger.store import Found, Session, Store, tampered
from matrixdp.accounting.ledger.totals import Total, before_the_first
from matrixdp.errors import InvalidInput, LedgerError, MatrixDPError
from matrixdp.privacy.records import encode
from matrixdp.privacy.verification import FAULTS, said

_FAULTS = (MatrixDPError, *FAULTS)


class Book:
    """The chain in a store, and its total as far as it was read.

    Attributes:
        store: where the ledger is kept.
        header: what was fixed at creation.
        budget: the budget of the ledger.
        adaptive: whether blocks may be chosen in view of earlier answers.
        origin: the total before the first entry.
        verified: the total as far as the chain was read.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.header = store.opened(self._open)

    def _open(self, session: Session) -> Header:
        header = session.header()
        try:
            self.origin = before_the_first(header)
        except InvalidInput:
            raise tampered(self.store.name, "its budget is not valid") from None
        self.budget, self.adaptive = self.origin.spent.budget, self.origin.spent.adaptive
        self.verified = self._check_all(session)
        return header

    def current(self) -> Total:
        """The total as it is now."""
        return self.store.read(self.catch_up)

    def read(self, work: Callable[[Session, Total], Found]) -> Found:
        """What a function of a session and the current total returns."""
        return self.store.read(lambda session: work(session, self.catch_up(session)))

    def write(self, work: Callable[[Session, Total], tuple[Found, Total]]) -> Found:
        """What a function that may append returns, once that is durable; it also returns the new total."""
        found, self.verified = self.store.write(lambda session: work(session, self.catch_up(session)))
        return found

    def catch_up(self, session: Session) -> Total:
        """Reads and checks the entries written since the last read, and gives the current total."""
        self.verified = self._followed(session, self.verified)
        return self.verified

    def append(
        self,
        session: Session,
        before: Total,
        record: Mapping[str, Any],
        documents: Mapping[str, Document],
        check: Callable[[Total, Entry | Change], None],
    ) -> tuple[Entry | Change, Total]:
        """Writes an entry of any kind, if the total after it passes the check."""
        record = {"number": before.entries + 1, "time": session.now(), **record}
        head = link(before.head, hashed(record))
        event = event_of(record, head, documents.__getitem__)
        after = before.followed_by([event])
        check(after, event)
        session.append(record, head, documents)
        self._followed(session, before)  # reads the entry back: only what verifies is committed
        return event, after

    def change(self, kind: str, note: str, prepare: Callable[[Total, str], Fields]) -> Change:
        """Writes an entry that releases nothing; `prepare` makes its fields and documents from the total and time."""
        check_note(note)
        key = secrets.token_hex(16) if self.store.loses_answers else None

        def work(session: Session, before: Total) -> tuple[Change, Total]:
            written = None if key is None else session.row_with_key(key)
            if written is not None:
                event, after = event_of(*written, session.document), before
            else:
                fields, documents = prepare(before, session.now())
                record = {"kind": kind, "note": note, "key": key, **fields}
                event, after = self.append(session, before, record, documents, lambda after, event: None)
            assert isinstance(event, Change)
            return event, after

        return self.write(work)

    def events(self) -> list[Entry | Change]:
        """All entries, oldest first."""
        return self.store.read(lambda session: list(self._walk(session, self.origin)))

    def check(self, head: str | None) -> tuple[Total, bool]:
        """Reads everything again, and says whether the chain contains a hash."""

        def work(session: Session) -> tuple[Total, bool]:
            self.catch_up(session)  # finds a file that was reset to an earlier state since the last look
            total = self._check_all(session)
            session.check_documents()  # not when a database is opened: whoever may spend can insert one, without harm
            return total, head in (None, self.origin.head) or session.has_hash(str(head))

        return self.store.read(work)

    def export(self) -> list[dict[str, Any]]:
        """What was fixed at creation, every entry with the documents that it is the first to name, and a summary."""

        def work(session: Session) -> tuple[list[Entry | Change], list[dict[str, Any]]]:
            events = list(self._walk(session, self.origin))
            lines: list[dict[str, Any]] = [{**session.header().fixed(), "hash": self.origin.head}]
            told: set[str] = set()
            for event in events:
                names = {event.fields[name] for name in DOCUMENTS if name in event.fields} - told
                documents = {"documents": {name: session.document(name) for name in sorted(names)}} if names else {}
                lines.append({**event.fields, **documents, "hash": event.hash})
                told |= names
            return events, lines

        events, lines = self.store.read(work)
        total = self.origin.followed_by(events)
        spent = encode(total.epsilon())
        return [*lines, {"entries": total.entries, "releases": total.releases, "spent": spent, "head": total.head}]

    def _check_all(self, session: Session) -> Total:
        session.check_pages()
        total = self._followed(session, self.origin)
        session.check_complete(total.entries)
        return total

    def _followed(self, session: Session, since: Total) -> Total:
        """A verified total with all entries after it, each of which must follow from those before it."""
        after = since.followed_by([])
        for event in self._walk(session, since):
            try:
                after.add(event)
            except _FAULTS as reason:
                finding = f"entry {event.number} does not follow from those before it ({said(reason)})"
                raise tampered(self.store.name, finding) from None
        return after

    def _walk(self, session: Session, since: Total) -> Iterator[Entry | Change]:
        """The entries after a verified total; each is checked before it is yielded."""
        header, number, head = session.header(), since.entries, since.head
        if header.genesis() != self.origin.head:
            raise tampered(
                self.store.name, "what was fixed at creation, such as the budget, is not what this process has read"
            )
        document = lru_cache(maxsize=8)(session.document)
        for record, found in session.rows(number):
            number += 1
            if record["number"] != number:
                raise tampered(self.store.name, f"entry {number} is missing")
            head = link(head, hashed(record))
            if head != found:
                fixed = ", or the budget and adjacency before it," if number == 1 else ""
                raise tampered(self.store.name, f"entry {number}{fixed} is not what was written")
            try:
                entry = event_of(record, head, document)
            except LedgerError:
                raise
            except _FAULTS as reason:
                raise tampered(self.store.name, f"entry {number} cannot be read ({type(reason).__name__})") from None
            yield entry
        if (number, head) != (header.entries, header.head):
            raise tampered(
                self.store.name, f"it should have {header.entries} entries and the head {header.head}, but does not"
            )
