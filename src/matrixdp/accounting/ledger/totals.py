"""What a chain of entries adds up to, and what one more costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from matrixdp.accounting.domination import lies_under
from matrixdp.accounting.filter import Block, Charge, Spent, is_enough
from matrixdp.accounting.ledger.entries import Change, Entry
from matrixdp.accounting.ledger.rules import Own, Quota, Reservation
from matrixdp.accounting.ledger.spends import Spend
from matrixdp.accounting.methods import Use
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput, LedgerError


@dataclass
class Series:
    """Releases that were planned, and charged, as one block: how many of each kind, and how many of these were made.

    Attributes:
        planned: how many releases of each kind.
        plan: the SHA-256 of the document that says so; None for a plan of one kind.
        analyst: who was charged.
        used: how many of each kind in `planned` were made.
    """

    planned: Mapping[Use, int]
    plan: str | None = None
    analyst: str | None = None
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
        made = Counter({use if place is None else place: count})
        return Series(self.planned, self.plan, self.analyst, self.used + made)


@dataclass
class Total:
    """The beginning of a chain: its length, its last hash, what was charged, and the rules that hold.

    Attributes:
        entries: its length.
        head: its last hash.
        adjacency: that of all spends.
        spent: what was charged; what is reserved is charged when that is asked for.
        releases: how many were made.
        series: those that were begun.
        quotas: by name.
        reservations: the open ones, by name.
        own: what each analyst was charged.
    """

    entries: int
    head: str
    adjacency: str | None
    spent: Spent
    releases: int = 0
    series: dict[str, Series] = field(default_factory=dict)
    quotas: dict[str, Quota] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    own: Own = field(default_factory=Own)

    def followed_by(self, events: Iterable[Entry | Change]) -> Total:
        """The same with more entries."""
        after = replace(
            self,
            spent=self.spent.copy(),
            series=dict(self.series),
            quotas=dict(self.quotas),
            reservations=dict(self.reservations),
            own=self.own.copy(),
        )
        for event in events:
            after.add(event)
        return after

    def add(self, event: Entry | Change) -> None:
        """Adds an entry."""
        self.entries, self.head = event.number, event.hash
        if isinstance(event, Entry):
            self.adjacency = event.adjacency
            (self._add_reservation if event.kind == "reservation" else self._add_spend)(event)
        elif event.kind == "return":
            self._charged(self.reservations.pop(event.name), -1)
        elif event.quota is None:
            self.quotas.pop(event.name, None)
        else:
            self.quotas[event.name] = event.quota

    def _add_spend(self, entry: Entry) -> None:
        self.releases += entry.count
        begun = self.begun(entry)
        block = _planned_block(entry)
        if begun is None and entry.reservation is not None:
            held = self.reservations[entry.reservation]
            left = held.left - held.takes(block, entry.use, entry.analyst, entry.series is not None)
            if left:
                self.reservations[held.name] = replace(held, left=left)
            else:
                del self.reservations[held.name]
        elif begun is None and (entry.planned is None or not self.spent.adaptive):
            self.spent.fixed.update(block)
            self.own.add(entry.analyst, entry.time, block, None, 1)
        elif begun is None:
            charged = _charge_of(entry)
            if not is_enough(block, charged):
                raise LedgerError(f"entry {entry.number} was charged less than its release costs")
            self.spent.add(block, charged, str(entry.adjacency))
            self.own.add(entry.analyst, entry.time, block, charged, 1)
        if entry.series is not None:
            series = begun or Series(block, entry.plan, entry.analyst)
            self.series[entry.series] = series.after(entry.use, entry.count)

    def _add_reservation(self, entry: Entry) -> None:
        whole = bool(entry.plan_uses) or entry.series is not None
        found = Reservation(
            name=entry.reservation or "",
            analyst=entry.analyst,
            purpose=entry.purpose,
            time=entry.time,
            guarantee=entry.guarantee,
            count=1 if whole else entry.count,
            left=1 if whole else entry.count,
            block=_planned_block(entry) if whole else {entry.use: 1},
            charge=_charge_of(entry),
            whole=whole,
        )
        self.reservations[found.name] = found
        self._charged(found, 1)

    def _charged(self, held: Reservation, sign: int) -> None:
        """Charges a reservation, or gives back what is left of it."""
        adjacency = str(self.adjacency)
        self.spent.add(held.block, held.charge, adjacency, sign * held.left)
        self.own.add(held.analyst, held.time, held.block, held.charge, sign * held.left)

    def begun(self, spend: Spend | Entry) -> Series | None:
        """The series that a spend is a later part of."""
        return None if spend.series is None else self.series.get(spend.series)

    def price(self, spend: Spend | Entry) -> dict[str, Any]:
        """What a spend or a reservation costs if it comes next, and how many releases its block has.

        Raises:
            InvalidInput: if it does not keep to the plan of its series, or to what was reserved.
            BudgetExceeded: if the series or the reservation has not so many releases left.
        """
        if spend.kind == "reservation":
            return self._price_of_reservation(spend)
        begun = self.begun(spend)
        if begun is not None and self.quotas and begun.analyst != spend.analyst:
            raise InvalidInput(
                f"analyst must be the one who was charged for the series {spend.series!r}; others have their own quotas"
            )
        block = _block_of(spend, begun)
        planned = {"planned": sum(block.values())}
        if begun is None and spend.reservation is not None:
            self.reserved(spend.reservation).takes(block, spend.use, spend.analyst, spend.series is not None)
        if begun is not None or spend.reservation is not None:
            return {**planned, "charged_mu": 0.0, "charged_delta": 0.0}
        return {**planned, **self._charge(block, str(spend.adjacency))}

    def _price_of_reservation(self, spend: Spend | Entry) -> dict[str, Any]:
        if not self.spent.adaptive:
            raise InvalidInput("a ledger whose releases are all fixed beforehand takes no reservations")
        if spend.reservation in self.reservations or spend.series in self.series:
            raise InvalidInput(f"name must be new: there is an open reservation {spend.reservation!r}")
        if spend.series is not None:
            block = _block_of(spend, None)
            return {"planned": sum(block.values()), **self._charge(block, str(spend.adjacency))}
        return {"planned": spend.count, **self._charge({spend.use: 1}, str(spend.adjacency), spend.count)}

    def reserved(self, name: str) -> Reservation:
        """The open reservation with this name."""
        if name not in self.reservations:
            raise InvalidInput(f"there is no open reservation {name!r}; `Ledger.reserve` makes one")
        return self.reservations[name]

    def quotas_of(self, analyst: str | None) -> list[Quota]:
        """The quotas that cover an analyst.

        Raises:
            InvalidInput: if there are quotas, and none of them covers the analyst.
        """
        found = [quota for quota in self.quotas.values() if analyst in quota.members]
        if self.quotas and not found:
            asked = "none was given" if analyst is None else "this one has no quota"
            raise InvalidInput(
                f"analyst must be named, and have a quota, as this ledger has quotas; {asked}. Say "
                f"Ledger(..., analyst=NAME) or --analyst NAME; nothing was spent"
            )
        return found

    def spent_of(self, quota: Quota, time: str) -> Spent:
        """What the members of a quota were charged in the period of this time, held to the quota."""
        return self.own.spent(quota.budget, quota.members, quota.since(time), self.adjacency or "", self.spent.adaptive)

    def check_quotas(self, analyst: str | None, time: str) -> None:
        """Raises BudgetExceeded if what an analyst was charged passes a quota in the period of this time."""
        for quota in self.quotas_of(analyst):
            spent = self.spent_of(quota, time)
            if not spent.fits(self.adjacency or ""):
                raise BudgetExceeded(
                    f"after this spend, epsilon at delta {quota.budget.delta:g} would be "
                    f"{spent.epsilon(self.adjacency or ''):.4g} for the quota {quota.name!r}, which is {quota}; "
                    "nothing was spent. What is left: ledger.left(), or matrixdp ledger left"
                )

    def check_budget(self, budget: Budget, name: str) -> None:
        """Raises BudgetExceeded if everything together passes the budget of the ledger with this name."""
        if self.fits():
            return
        if budget.delta == 0 and self.epsilon() == math.inf:
            raise BudgetExceeded(
                f"the budget of {name} is {budget}, which only pure releases keep, drawn exactly, and not all would "
                "be; nothing was spent. Release with Budget(epsilon, 0), which has discrete Laplace noise"
            )
        raise BudgetExceeded(
            f"after this spend, epsilon at delta {budget.delta:g} would be {self.epsilon():.4g}, and the budget of "
            f"{name} is {budget}; nothing was spent. What is left: ledger.remaining(), or matrixdp ledger show"
        )

    def _charge(self, block: Block, adjacency: str, times: int = 1) -> dict[str, float | None]:
        """The charge of each of so many blocks that come next; none where all releases are fixed beforehand."""
        if not self.spent.adaptive:
            return {"charged_mu": None, "charged_delta": None}
        charged = self.spent.charge(block, adjacency, times)
        charged = charged if math.isfinite(charged.delta) else Charge(math.inf, 1.0)
        mu = abs(charged.mu) if math.isfinite(charged.mu) else None  # SQLite knows no -0.0
        return {"charged_mu": mu, "charged_delta": charged.delta}

    def epsilon(self) -> float:
        """epsilon of everything together, at the budget's delta."""
        return self.spent.epsilon(self.adjacency or "")

    def fits(self) -> bool:
        """Whether everything together keeps the budget."""
        return self.spent.fits(self.adjacency or "")


def _planned_block(entry: Entry) -> Block:
    return entry.plan_uses or {entry.use: entry.planned or entry.count}


def _charge_of(entry: Entry) -> Charge:
    return Charge(math.inf if entry.charged_mu is None else entry.charged_mu, entry.charged_delta or 0.0)


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
