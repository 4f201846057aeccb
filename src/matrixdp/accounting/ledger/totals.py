"""What a chain of entries adds up to, and what one more costs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from matrixdp.accounting.filter import Block, Charge, Spent
from matrixdp.accounting.ledger.entries import Entry, Spend
from matrixdp.accounting.methods import Use
from matrixdp.errors import BudgetExceeded, InvalidInput


@dataclass
class Series:
    """Releases that were planned, and charged, as one block: what they are, how many, and how many were made."""

    use: Use
    planned: int
    used: int = 0


@dataclass
class Total:
    """The beginning of a chain: its length, its last hash, and what was spent."""

    entries: int
    head: str
    adjacency: str | None
    spent: Spent
    releases: int = 0
    series: dict[str, Series] = field(default_factory=dict)

    def followed_by(self, entries: Iterable[Entry]) -> Total:
        """The same with more entries."""
        after = Total(self.entries, self.head, self.adjacency, self.spent.copy(), self.releases, dict(self.series))
        for entry in entries:
            after.add(entry)
        return after

    def add(self, entry: Entry) -> None:
        """Adds an entry."""
        self.entries, self.head, self.adjacency = entry.number, entry.hash, entry.adjacency
        self.releases += entry.count
        begun = self.begun(entry)
        block = entry.planned or entry.count
        if begun is None and (entry.planned is None or not self.spent.adaptive):
            self.spent.fixed[entry.use] += block
        elif begun is None:
            mu = math.inf if entry.charged_mu is None else entry.charged_mu
            self.spent.add({entry.use: block}, Charge(mu, entry.charged_delta or 0.0))
        if entry.series is not None:
            self.series[entry.series] = Series(entry.use, block, (begun.used if begun else 0) + entry.count)

    def begun(self, spend: Spend | Entry) -> Series | None:
        """The series that a spend is a later part of."""
        return None if spend.series is None else self.series.get(spend.series)

    def price(self, spend: Spend | Entry) -> dict[str, Any]:
        """What a spend costs if it comes next, and how many releases its block has.

        Raises:
            InvalidInput: if it does not keep to the plan of its series.
            BudgetExceeded: if the series has not so many releases left.
        """
        begun = self.begun(spend)
        planned = _planned_for(spend, begun)
        if begun is not None:
            return {"planned": planned, "charged_mu": 0.0, "charged_delta": 0.0}
        return {"planned": planned, **self._charge({spend.use: planned}, str(spend.adjacency))}

    def _charge(self, block: Block, adjacency: str) -> dict[str, float | None]:
        """The charge of a block that comes next; none in a ledger whose releases are all fixed beforehand."""
        if not self.spent.adaptive:
            return {"charged_mu": None, "charged_delta": None}
        charged = self.spent.charge(block, adjacency)
        charged = charged if math.isfinite(charged.delta) else Charge(math.inf, 1.0)
        mu = abs(charged.mu) if math.isfinite(charged.mu) else None  # SQLite knows no -0.0
        return {"charged_mu": mu, "charged_delta": charged.delta}

    def epsilon(self) -> float:
        """epsilon of everything together, at the budget's delta."""
        return self.spent.epsilon(self.adjacency or "")

    def fits(self) -> bool:
        """Whether everything together keeps the budget."""
        return self.spent.fits(self.adjacency or "")


def _planned_for(spend: Spend | Entry, begun: Series | None) -> int:
    """How many releases the block of a spend has, if the spend keeps to the plan."""
    name, count, asked = spend.series, spend.count, spend.planned
    if name is None:
        return count
    planned = begun.planned if begun else asked
    if planned is None:
        raise InvalidInput(f"planned must be given with the first spend of a series; {name!r} is new")
    if begun and asked not in (None, planned):
        raise InvalidInput(
            f"planned must stay what the first spend of the series fixed, {planned}, got {asked}; a longer "
            "plan is a new series"
        )
    if begun and begun.use != spend.use:
        raise InvalidInput(
            f"certificate and sampling_rate must be those that the series {name!r} was begun with; another "
            "kind of release is a new series"
        )
    left = planned - begun.used if begun else planned
    if not count <= left:
        raise BudgetExceeded(
            f"the series {name!r} was planned for {planned} releases, of which {left} are left, not "
            f"{count}; nothing was spent. More of them are a new series, with a charge of its own"
        )
    return planned
