"""Quotas and reservations: who may spend how much of a ledger's budget, and what is kept free for whom.

**A quota** is a filter on the spends of its members, beside the filter on all spends, which every spend must pass too.

Guarantee: let a quota (epsilon, delta) be fixed before its members' first spend. Compare two worlds: the members'
    releases are made from one data set, or from its neighbour, and all other releases from the same one in both. All
    that anybody ever sees, refusals included, then differs by (epsilon, delta) at most: so much do the members'
    releases add to what is known. The releases of all together keep the ledger's budget.
Proof: given what was seen before, the answers to others have the same law in both worlds. So they are like randomness
    of the members' own, which the filters of `accounting.filter` allow in choosing the next block. The quota stops the
    members' blocks by the same filters, with its own epsilon and delta. Charges (mu, k) hold for a block whatever the
    budget is.

A quota per period counts the spends since the period began, by the times of the entries. A new period does not restore
the guarantee of the same records: only the lifetime total bounds that. Entries count by their order, and a time after
the present one counts too, so a clock that is put back opens no room.

**A reservation** holds blocks that were not drawn yet: so many single releases, each a block by itself, or one block
for a plan or a training. It is charged when it is made, and each block is used once.

Guarantee: what was never used may be given back. Proof: the filters bound the sums of costs of the blocks that were
    drawn, along every transcript, whatever decides which come next; so a block that was not drawn costs nothing. While
    it was held the sums were larger, which only refuses more. A block of several releases that was begun is never given
    back: its charge is for all of it, and where it was broken off may depend on the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matrixdp import _check
from matrixdp.accounting.domination import lies_under
from matrixdp.accounting.filter import Block, Charge, Spent
from matrixdp.accounting.ledger.chain import Document, canonical, sha256
from matrixdp.accounting.methods import Use
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.privacy.guarantee import Guarantee

PERIODS = ("year", "quarter", "month")
MOST_MEMBERS = 1000


@dataclass(frozen=True)
class Quota:
    """What some analysts may spend together, of the ledger's budget.

    Attributes:
        name: of the analyst or the team.
        budget: what the spends of its members may use together.
        per: "year", "quarter" or "month" (UTC), or None for the lifetime of the ledger.
        members: the analysts whose spends count.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Ledger
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> _ = ledger.set_quota("statistics", Budget(1.0, 1e-6), per="year", members=["ann", "bob"])
        >>> [(quota.name, quota.members) for quota in ledger.quotas()]
        [('statistics', ('ann', 'bob'))]
    """

    name: str
    budget: Budget
    per: str | None = None
    members: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        members = self.members or (self.name,)
        if isinstance(members, str) or not 0 < len(members) <= MOST_MEMBERS:
            raise InvalidInput(f"members must be names of analysts, at most {MOST_MEMBERS}")
        for kind, name in (("name", self.name), *(("members", member) for member in members)):
            check_name(kind, name)
        if not isinstance(self.budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {_check.kind(self.budget)}")
        self.budget.whole("a quota")
        if self.per is not None:
            _check.choice("per", self.per, PERIODS)
        object.__setattr__(self, "members", tuple(members))

    def since(self, time: str) -> str:
        """The first month of the period that this time lies in, as in "2026-10"; empty for the lifetime."""
        year, month = time[:4], int(time[5:7])
        first = {"year": 1, "quarter": month - (month - 1) % 3, "month": month}
        return "" if self.per is None else f"{year}-{first[self.per]:02}"

    def to_dict(self) -> dict[str, Any]:
        """The document of the quota."""
        numbers = {"epsilon": self.budget.epsilon, "delta": self.budget.delta}
        return {**_document(self.name), **numbers, "per": self.per, "members": list(self.members)}

    def __str__(self) -> str:
        return f"{self.budget}{f' per {self.per}' if self.per else ''}"


def no_quota(name: str) -> dict[str, Any]:
    """The document that removes a quota."""
    return _document(check_name("name", name))


def quota_fields(document: Document) -> tuple[dict[str, str], dict[str, Document]]:
    """What an entry says of a quota: the hash of its document, and the document."""
    digest = sha256(canonical(document))
    return {"quota": digest}, {digest: document}


def quota_of(document: Document) -> Quota | None:
    """The quota in a document; None where it removes one."""
    if (document["matrixdp"], document["schema"]) != ("quota", 1):
        raise InvalidInput("the document of a quota is of a schema that is not known here; upgrade matrixdp")
    check_name("name", document["name"])
    if "epsilon" not in document:
        return None
    budget = Budget(document["epsilon"], document["delta"])
    return Quota(document["name"], budget, document["per"], tuple(document["members"]))


def _document(name: str) -> dict[str, Any]:
    return {"matrixdp": "quota", "schema": 1, "name": name}


def check_name(kind: str, name: object) -> str:
    """A name of one line, at most 1000 printable characters."""
    if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= 1000):
        raise InvalidInput(f"{kind} must be a name of 1 to 1000 printable characters, got {_check.kind(name)}")
    return name


@dataclass(frozen=True)
class Reservation:
    """Blocks that are kept free, and were charged when that was asked for.

    Attributes:
        name: under which they are used.
        analyst: who may use them.
        purpose: what they are for.
        time: when they were reserved.
        guarantee: what each release guarantees, or is within.
        count: how many blocks were reserved: single releases, or one plan.
        left: how many are not used yet.
        block: the releases of one block.
        charge: what each block was charged.
        whole: whether this is one block of a plan or a training, which the first spend of a series uses.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Counts, Ledger, release
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> certificate = release([12, 3], Counts(1), Budget(0.5, 1e-7)).certificate
        >>> _ = ledger.reserve("spring report", certificate, count=2)
        >>> [(kept.name, kept.left) for kept in ledger.reservations()]
        [('spring report', 2)]
    """

    name: str
    analyst: str | None
    purpose: str | None
    time: str
    guarantee: Guarantee = field(compare=False)
    count: int
    left: int
    block: Block = field(repr=False)
    charge: Charge = field(repr=False)
    whole: bool = False

    def takes(self, block: Block, use: Use, analyst: str | None, is_series: bool) -> int:
        """How many of the blocks that are left a spend uses.

        Raises:
            InvalidInput: if the spend is not what was reserved.
            BudgetExceeded: if not so many are left.
        """
        if analyst != self.analyst:
            raise InvalidInput(f"analyst must be the one that the reservation {self.name!r} is for")
        if self.whole:
            if not is_series or dict(block) != dict(self.block):
                raise InvalidInput(
                    f"the reservation {self.name!r} is for one plan: spend its releases as a series with the "
                    "certificate, rate and number planned that were reserved"
                )
            needed = 1
        else:
            (kind,) = self.block
            if is_series or not (use == kind or lies_under(use, kind)):
                raise InvalidInput(
                    f"certificate must be the one that {self.name!r} was reserved for, or lie under it at every "
                    "epsilon, with the same sampling rate and no series"
                )
            needed = sum(block.values())
        if needed > self.left:
            raise BudgetExceeded(
                f"the reservation {self.name!r} has {self.left} of {self.count} left, not {needed}; nothing was spent"
            )
        return needed


Kind = tuple[frozenset[tuple[Use, int]], Charge | None]
"""A block and its charge; no charge where everything is fixed beforehand."""


@dataclass
class Own:
    """What each analyst was charged, month by month."""

    months: dict[tuple[str, str], Counter[Kind]] = field(default_factory=dict)

    def copy(self) -> Own:
        """The same, to add to."""
        return Own({place: Counter(kinds) for place, kinds in self.months.items()})

    def add(self, analyst: str | None, time: str, block: Mapping[Use, int], charge: Charge | None, times: int) -> None:
        """Adds so many blocks; a negative number takes them out."""
        kinds = self.months.setdefault((analyst or "", time[:7]), Counter())
        kinds[frozenset(block.items()), charge] += times

    def analysts(self) -> list[str]:
        """All that were ever charged; an empty name for spends without one."""
        return sorted({analyst for analyst, _ in self.months})

    def spent(
        self,
        budget: Budget,
        analysts: Iterable[str],
        since: str,
        adjacency: str,
        adaptive: bool,
        year: int | None = None,
    ) -> Spent:
        """What these analysts were charged since a month, or in one year, held to a budget."""
        found, chosen = Spent(budget, adaptive), {*analysts}
        for (analyst, month), kinds in self.months.items():
            if analyst in chosen and month >= since and year in (None, int(month[:4])):
                for (block, charge), times in kinds.items():
                    if charge is None:
                        found.fixed.update({use: count * times for use, count in block})
                    elif times:
                        found.add(dict(block), charge, adjacency, times)
        return found
