"""The total of a chain of entries, and the cost of one more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from matrixdp._rounding import rounded_up
from matrixdp.accounting.domination import lies_under
from matrixdp.accounting.filter import Block, Charge, Spent, is_enough
from matrixdp.accounting.ledger.chain import Header
from matrixdp.accounting.ledger.entries import Change, Entry
from matrixdp.accounting.ledger.rules import Own, Quota, Reservation
from matrixdp.accounting.methods import Use
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput


@dataclass
class Series:
    """Releases that were planned and charged as one block.

    Attributes:
        planned: how many releases of each kind.
        plan: the SHA-256 of the plan's document; None for a series of one kind.
        analyst: who was charged.
        used: how many of each kind in `planned` were made.
    """

    planned: Mapping[Use, int]
    plan: str | None = None
    analyst: str | None = None
    used: Counter[Use] = field(default_factory=Counter)

    def place(self, use: Use, count: int) -> Use | None:
        """The kind in the plan that these releases may be counted as: their own, or one that dominates it."""
        open_ = [kind for kind, planned in self.planned.items() if self.used[kind] + count <= planned]
        if use in open_:
            return use
        return next((kind for kind in open_ if lies_under(use, kind)), None) if self.plan is not None else None

    def after(self, use: Use, count: int) -> Series:
        """The series after these releases; raises InvalidInput if it was not planned for them, or not for so many."""
        place = self.place(use, count)
        if place is None:
            raise InvalidInput("the series was not planned for this release, or not for so many")
        return Series(self.planned, self.plan, self.analyst, self.used + Counter({place: count}))


@dataclass
class Total:
    """The total of a chain up to some entry: what was charged, and the rules that hold.

    Attributes:
        entries: the number of entries.
        head: the last hash.
        adjacency: the adjacency of all spends.
        spent: what was charged; a reservation is charged when it is made.
        releases: how many releases were made.
        series: the series that were begun, by name.
        quotas: the quotas that hold, by name.
        reservations: the open reservations, by name.
        own: what each analyst was charged.
        undrawn: the last month in which each analyst spent the certificate of a law that has not been drawn.
        begins_fixed: whether its first entries may have no charge, as in a ledger from before schema 3.
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
    undrawn: dict[str, str] = field(default_factory=dict)
    begins_fixed: bool = False

    def followed_by(self, events: Iterable[Entry | Change]) -> Total:
        """A copy of this total with more entries added."""
        after = replace(
            self,
            spent=self.spent.copy(),
            series=dict(self.series),
            quotas=dict(self.quotas),
            reservations=dict(self.reservations),
            own=self.own.copy(),
            undrawn=dict(self.undrawn),
        )
        for event in events:
            after.add(event)
        return after

    def add(self, event: Entry | Change) -> None:
        """Adds an entry.

        Raises:
            InvalidInput: if it does not follow from those before it, whoever wrote it; or BudgetExceeded, if it uses
                more than was reserved. For noise that is not Gaussian, its charge is not computed again.
        """
        self.entries, self.head = event.number, event.hash
        if isinstance(event, Entry):
            if self.adjacency not in (None, event.adjacency):
                raise InvalidInput(f"adjacency must be that of the ledger, {self.adjacency}")
            self.adjacency = event.adjacency
            (self._add_reservation if event.kind == "reservation" else self._add_spend)(event)
        elif event.kind == "return":
            self._charged(self.reserved(event.name), -1)
            del self.reservations[event.name]
        elif event.quota is None:
            self.quotas.pop(event.name, None)
        else:
            self.quotas[event.name] = event.quota

    def _add_spend(self, entry: Entry) -> None:
        self.releases += entry.count
        if entry.undrawn:
            analyst, month = entry.analyst or "", entry.time[:7]
            self.undrawn[analyst] = max(month, self.undrawn.get(analyst, month))
        begun = self.begun(entry)
        block = _planned_block(entry)
        if entry.series is None and block != {entry.use: entry.count}:
            raise InvalidInput("without a series, as many releases are charged as are made, and of the same kind")
        if begun is None and entry.reservation is not None:
            held = self.reserved(entry.reservation)
            left = held.left - held.takes(block, entry.use, entry.analyst, entry.series is not None)
            if left:
                self.reservations[held.name] = replace(held, left=left)
            else:
                del self.reservations[held.name]
        elif begun is None:
            if entry.planned is None and not (self.begins_fixed and not self.spent.blocks):
                raise InvalidInput("only the first entries of a ledger from before schema 3 have no number planned")
            fixed = entry.planned is None or not self.spent.adaptive
            charged = None if fixed else _charge_of(entry, block)
            self.spent.add(block, charged, str(entry.adjacency))
            self.own.add(entry.analyst, entry.time, block, charged, 1)
        if entry.series is not None:
            series = begun or Series(block, entry.plan, entry.analyst)
            self.series[entry.series] = series.after(entry.use, entry.count)

    def _add_reservation(self, entry: Entry) -> None:
        whole = bool(entry.plan_uses) or entry.series is not None
        block = _planned_block(entry) if whole else {entry.use: 1}
        found = Reservation(
            name=entry.reservation or "",
            analyst=entry.analyst,
            purpose=entry.purpose,
            time=entry.time,
            guarantee=entry.guarantee,
            count=1 if whole else entry.count,
            left=1 if whole else entry.count,
            block=block,
            charge=_charge_of(entry, block),
            whole=whole,
        )
        self.reservations[found.name] = found
        self._charged(found, 1)

    def _charged(self, held: Reservation, sign: int) -> None:
        """Charges a reservation (sign 1), or gives back what is left of it (sign -1)."""
        adjacency = str(self.adjacency)
        self.spent.add(held.block, held.charge, adjacency, sign * held.left)
        self.own.add(held.analyst, held.time, held.block, held.charge, sign * held.left)

    def begun(self, spend: Entry) -> Series | None:
        """The series that a spend is a later part of."""
        return None if spend.series is None else self.series.get(spend.series)

    def price(self, spend: Entry) -> dict[str, Any]:
        """The charge of a spend or a reservation if it comes next, and how many releases its block has.

        Raises:
            InvalidInput: if it deviates from the plan of its series, or from what was reserved.
            BudgetExceeded: if the series or the reservation has fewer releases left.
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

    def _price_of_reservation(self, spend: Entry) -> dict[str, Any]:
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
        """The charges of the members of a quota in the period of this time, with the quota as their budget."""
        return self.own.spent(quota.budget, quota.members, quota.since(time), self.adjacency or "", self.spent.adaptive)

    def is_pure(self, analyst: str | None) -> bool:
        """Whether the ledger, or a quota that covers an analyst, has delta = 0."""
        quotas = [quota.budget for quota in self.quotas.values() if analyst in quota.members]
        return any(budget.delta == 0 for budget in (self.spent.budget, *quotas))

    def has_undrawn(self, quota: Quota, time: str) -> bool:
        """Whether, in the period of this time, a member of a quota spent the certificate of a law not drawn."""
        since = quota.since(time)
        return any(month >= since for analyst, month in self.undrawn.items() if analyst in quota.members)

    def check_quotas(self, analyst: str | None, time: str) -> None:
        """Raises BudgetExceeded if the charges exceed a quota of an analyst in the period of this time."""
        for quota in self.quotas_of(analyst):
            spent = self.spent_of(quota, time)
            if not spent.fits(self.adjacency or ""):
                raise BudgetExceeded(
                    f"after this spend, epsilon at delta {quota.budget.delta:g} would be "
                    f"{rounded_up(spent.epsilon(self.adjacency or ''))} for the quota {quota.name!r}, which is "
                    f"{quota}; nothing was spent. What is left: ledger.left(), or matrixdp ledger left"
                )

    def check_budget(self, budget: Budget, name: str) -> None:
        """Raises BudgetExceeded if all charges together exceed the budget of the ledger with this name."""
        if self.fits():
            return
        if budget.delta == 0 and self.epsilon() == math.inf:
            raise BudgetExceeded(
                f"the budget of {name} is {budget}, so every release must be pure and drawn exactly, and this one is "
                "not; nothing was spent. Release with Budget(epsilon, 0), which has discrete Laplace noise"
            )
        raise BudgetExceeded(
            f"after this spend, epsilon at delta {budget.delta:g} would be {rounded_up(self.epsilon())}, and the "
            f"budget of {name} is {budget}; nothing was spent. What is left: ledger.remaining(), or matrixdp ledger "
            "show"
        )

    def _charge(self, block: Block, adjacency: str, times: int = 1) -> dict[str, float | None]:
        """The charge of each of `times` equal blocks that come next; None if all releases are fixed beforehand."""
        if not self.spent.adaptive:
            return {"charged_mu": None, "charged_delta": None}
        charged = self.spent.charge(block, adjacency, times)
        charged = charged if math.isfinite(charged.delta) else Charge(math.inf, 1.0)
        mu = abs(charged.mu) if math.isfinite(charged.mu) else None  # SQLite knows no -0.0
        return {"charged_mu": mu, "charged_delta": charged.delta}

    def epsilon(self) -> float:
        """epsilon of all charges together, at the budget's delta."""
        return self.spent.epsilon(self.adjacency or "")

    def fits(self) -> bool:
        """Whether all charges together keep the budget."""
        return self.spent.fits(self.adjacency or "")


def _planned_block(entry: Entry) -> Block:
    return entry.plan_uses or {entry.use: entry.planned or entry.count}


def _charge_of(entry: Entry, block: Block) -> Charge:
    found = Charge(math.inf if entry.charged_mu is None else entry.charged_mu, entry.charged_delta or 0.0)
    if not is_enough(block, found):
        raise InvalidInput("it was charged less than its release costs")
    return found


def before_the_first(header: Header) -> Total:
    """The total of a ledger before its first entry."""
    spent = Spent(Budget(header.epsilon, header.delta), header.adaptive != 0, several=header.adaptive == 2)
    return Total(0, header.genesis(), header.relation, spent, begins_fixed=header.adaptive is None)


def _block_of(spend: Entry, begun: Series | None) -> Block:
    """The releases of the block of a spend; raises an error if the spend deviates from the plan."""
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
            f"certificate must lie under a release of the plan {name!r} at every epsilon; this one lies under none"
        )
    left = planned - series.used.total()
    raise BudgetExceeded(
        f"the series {name!r} was planned for {planned} releases, of which {left} are left, not "
        f"{count}{' of this kind' if series.plan else ''}; nothing was spent. More of them are a new series, with a "
        "charge of its own"
    )
