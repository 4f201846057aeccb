"""What can be read from a ledger: what was spent, by whom, and what is left."""

from __future__ import annotations

from typing import Any

from matrixdp import _check
from matrixdp.accounting.ledger.book import Book
from matrixdp.accounting.ledger.entries import Change, Entry
from matrixdp.accounting.ledger.left import Left, Remaining, left
from matrixdp.accounting.ledger.rules import Quota, Reservation
from matrixdp.accounting.ledger.statement import Facts, statement
from matrixdp.accounting.ledger.totals import Total
from matrixdp.accounting.methods import Use, Uses
from matrixdp.adjacency import Adjacency
from matrixdp.errors import InvalidInput, LedgerError
from matrixdp.privacy.guarantee import Guarantee


class Account:
    """The operations of a ledger that only read."""

    def __init__(self, book: Book, names: dict[str, str | None]) -> None:
        self._book, self._names = book, names
        self.name, self.path = book.store.name, book.store.path
        self.budget, self.adaptive = book.budget, book.adaptive

    @property
    def adjacency(self) -> Adjacency | None:
        """The adjacency that all spends share; None until the first spend, if none was given at creation."""
        found = self._book.current().adjacency
        return None if found is None else Adjacency(found)

    @property
    def relation(self) -> Adjacency | None:
        """Another name of `adjacency`."""
        return self.adjacency

    @property
    def origin(self) -> str:
        """The hash before the first entry, unique to this ledger."""
        return self._book.origin.head

    def spent(self, analyst: str | None = None) -> float:
        """The epsilon of all spends together, at the budget's delta; or of one analyst's own spends."""
        total = self._book.current()
        return total.epsilon() if analyst is None else self._own(total, analyst)

    def analysts(self) -> dict[str, float]:
        """The epsilon of each analyst's own spends, at the budget's delta; an empty name for those without one."""
        total = self._book.current()
        return {analyst: self._own(total, analyst) for analyst in total.own.analysts()}

    def _own(self, total: Total, analyst: str) -> float:
        adjacency = total.adjacency or ""
        return total.own.spent(self.budget, [analyst], "", adjacency, self.adaptive).epsilon(adjacency)

    def spent_with(self, certificate: Guarantee) -> float:
        """The epsilon of all spends together if this release were added; nothing is spent."""
        use = Use(certificate.profile, certificate.total_variation)
        return self._with({use: 1}, str(certificate.adjacency)).epsilon()

    def spent_over_time(self) -> list[float]:
        """The epsilon of all spends together after each entry of `history`."""
        found, total = [], self._book.origin.followed_by([])
        for event in self._book.events():
            total.add(event)
            if event.kind == "spend":
                found.append(total.epsilon())
        return found

    def remaining(self) -> Remaining:
        """The largest Gaussian release without sampling, and the largest pure one, that the ledger would still take.

        If all releases so far are Gaussian and without sampling, mu is sqrt(B^2 - sum of mu_i^2), where B is the mu of
        the budget. In an adaptive ledger, after the first release, B is the mu at 85 % of the budget's delta (95 % if
        the ledger is from before schema 5). If the ledger was opened for an analyst, the quotas of that analyst count
        as well. All numbers are rounded down.
        """
        rows = self.left() if self._names["analyst"] else self.left()[:1]
        return Remaining(*(min(getattr(row, name) for row in rows) for name in ("mu", "epsilon", "pure")))

    def left(self, like: Guarantee | None = None, analyst: str | None = None) -> list[Left]:
        """What is left: first of the lifetime total, and then of each quota.

        Args:
            like: the certificate of a release; `Left.releases` then says how many more like it fit.
            analyst: whose quotas; by default those of the analyst that the ledger was opened for, or else all quotas.
        """
        who = analyst or self._names["analyst"]
        return self._book.read(lambda session, total: left(total, who, session.now(), like))

    def history(self) -> list[Entry]:
        """All spends, oldest first; the chain is checked as it is read."""
        return [event for event in self._book.events() if isinstance(event, Entry) and event.kind == "spend"]

    def changes(self) -> list[Entry | Change]:
        """All quotas, reservations and returns, oldest first."""
        return [event for event in self._book.events() if event.kind != "spend"]

    def quotas(self) -> list[Quota]:
        """The quotas that hold now."""
        return [*self._book.current().quotas.values()]

    def reservations(self) -> list[Reservation]:
        """The open reservations."""
        return [*self._book.current().reservations.values()]

    def statement(self, year: int | None = None, kind: str = "markdown") -> str:
        """One page in plain language: what was released, whom it protects, the total, the risk, the head.

        Args:
            year: the year (UTC) of the releases to list; by default all. The total is always that of all years.
            kind: "markdown", "html", or "json" in the fields of the public registry of deployments.
        """
        if year is not None and not 1900 <= _check.count("year", year) <= 9999:
            raise InvalidInput(f"year must be one with four digits, got {_check.shown(year)}")
        events = self._book.events()
        total = self._book.origin.followed_by(events)
        spends = [event for event in events if isinstance(event, Entry) and event.kind == "spend"]
        chosen = [entry for entry in spends if year is None or entry.time[:4] == f"{year:04}"]
        adjacency, adaptive = total.adjacency or "", self.adaptive
        # parts of a series, and spends from a reservation, may have been charged in another year
        apart = any(entry.series is not None or entry.reservation is not None for entry in spends)
        of_year = total.own.spent(self.budget, total.own.analysts(), "", adjacency, adaptive, year)
        facts = Facts(
            dataset=self._names["dataset"] or (self.path.name if self.path else self.name),
            year=year,
            entries=chosen,
            units=sorted({entry.unit for entry in spends}) or ["record"],
            before=len(spends),
            budget=self.budget,
            adjacency=total.adjacency,
            spent=total.epsilon(),
            spent_in_year=None if apart else of_year.epsilon(adjacency),
            adaptive=adaptive,
            kept=total.fits(),
            analysts={analyst: self._own(total, analyst) for analyst in total.own.analysts()},
            quotas=[*total.quotas.values()],
            head=total.head,
        )
        return statement(facts, kind)

    def verify(self, head: str | None = None) -> str:
        """Reads the whole ledger again and checks it.

        Args:
            head: a hash that was kept elsewhere; the chain must contain it, so no entry up to it was changed since.

        Returns:
            The head, which is the last hash of the chain.
        """
        if head is not None and not isinstance(head, str):
            raise InvalidInput(f"head must be a hash as verify() gives it, a str, got {_check.kind(head)}")
        total, known = self._book.check(head)
        if not known:
            raise LedgerError(
                f"{self.name} does not contain the hash {head}; entries were removed or rewritten since it was kept"
            )
        return total.head

    def export(self) -> list[dict[str, Any]]:
        """What was fixed at creation, every entry, and the head: all that `verify_export` needs.

        Each entry comes with those of its documents that no earlier entry had.
        """
        return self._book.export()

    def _with(self, uses: Uses, adjacency: str) -> Total:
        """The total after these releases, if they were spent next as one block."""
        after = self._book.current().followed_by([])
        charged = after.spent.charge(uses, adjacency) if self.adaptive else None
        after.spent.add(uses, charged, adjacency)
        after.adjacency = adjacency
        return after
