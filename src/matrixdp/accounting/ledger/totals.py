"""What a chain of entries adds up to, and what one more costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matrixdp.accounting.domination import lies_under
from matrixdp.accounting.filter import Block, Charge, Spent
from matrixdp.accounting.ledger.entries import Entry, Spend
from matrixdp.accounting.methods import Use
from matrixdp.errors import BudgetExceeded, InvalidInput


@dataclass
class Series:
    """Releases that were planned, and charged, as one block: how many of each kind, and how many of these were made.

    Attributes:
        planned: how many releases of each kind.
        plan: the SHA-256 of the document that says so; None for a plan of one kind.
        used: how many of each kind in `planned` were made.
    """

    planned: Mapping[Use, int]
    plan: str | None = None
    used: Counter[Use] = field(default_factory=Counter)

    def place(self, use: Use, count: int) -> Use | None:
        """The kind in the plan that so many releases may be counted as: their own, or one that they lie under."""
        open_ = [kind for kind, planned in self.planned.items() if self.used[kind] + count <= planned]
        if use in open_:
            return use
        return next((kind for kind in open_ if lies_under(use, kind)), None) if self.plan is not None else None

    def after(self, use: Use, count: int) -> Series:
        """The series with so many more releases made."""
        place = self.place(use, count)
        return Series(self.planned, self.plan, self.used + Counter({use if place is None else place: count}))


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
        block = entry.plan_uses or {entry.use: entry.planned or entry.count}
        if begun is None and (entry.planned is None or not self.spent.adaptive):
            self.spent.fixed.update(block)
        elif begun is None:
            mu = math.inf if entry.charged_mu is None else entry.charged_mu
            self.spent.add(block, Charge(mu, entry.charged_delta or 0.0), str(entry.adjacency))
        if entry.series is not None:
            self.series[entry.series] = (begun or Series(block, entry.plan)).after(entry.use, entry.count)

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
        block = _block_of(spend, begun)
        planned = {"planned": sum(block.values())}
        if begun is not None:
            return {**planned, "charged_mu": 0.0, "charged_delta": 0.0}
        return {**planned, **self._charge(block, str(spend.adjacency))}

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


def _block_of(spend: Spend | Entry, begun: Series | None) -> Block:
    """The releases of the block of a spend, if the spend keeps to the plan."""
    name, count, asked, use = spend.series, spend.count, spend.planned, spend.use
    if name is None:
        return {use: count}
    if begun is None and asked is None:
        raise InvalidInput(f"planned must be given with the first spend of a series; {name!r} is new")
    series = begun or Series(spend.plan_uses or {use: asked or 0}, spend.plan)
    planned = sum(series.planned.values())
    if begun and (asked not in (None, planned) or spend.plan not in (None, series.plan)):
        raise InvalidInput(
            f"planned must stay what the first spend of the series fixed, {planned}, got {asked}; a longer "
            "plan, or another one, is a new series"
        )
    if series.place(use, count) is not None:
        return series.planned
    if series.plan is None and use not in series.planned:
        raise InvalidInput(
            f"certificate and sampling_rate must be those that the series {name!r} was begun with; another "
            "kind of release is a new series"
        )
    if series.place(use, 1) is None and not any(use == kind or lies_under(use, kind) for kind in series.planned):
        raise InvalidInput(
            f"certificate must lie under a release that the plan {name!r} has, at every epsilon; this one is in none"
        )
    left = planned - series.used.total()
    raise BudgetExceeded(
        f"the series {name!r} was planned for {planned} releases, of which {left} are left, not "
        f"{count}{' of this kind' if series.plan else ''}; nothing was spent. More of them are a new series, with a "
        "charge of its own"
    )
