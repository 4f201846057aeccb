"""Quotas and reservations: who may spend how much of a ledger's budget, and what is reserved for whom.

**A quota** is a filter on the spends of its members. Every spend must also pass the filter on all spends.

Guarantee: let a quota (epsilon, delta) be fixed before its members' first spend. Compare two worlds: the members'
    releases are made from a data set in one and from its neighbour in the other; all other releases are made from the
    same data set in both. Then everything that anybody ever sees, refusals included, is (epsilon, delta)-close. So the
    members' releases add no more than that to what is known. All releases together keep the ledger's budget.
Proof: given what was seen before, the answers to others have the same law in both worlds. So they are like the members'
    own randomness, which the filters of `accounting.filter` allow in choosing the next block. The quota stops the
    members' blocks by the same filters, with its own epsilon and delta. Charges (mu, k) of a block hold for any budget.

A quota per period counts the spends since the period began, by the times of the entries. A new period does not restore
the guarantee of the same records: only the lifetime total bounds that. Entries with a time after the current one count
as well, so a clock that is set back frees no budget.

**A reservation** holds blocks that were not drawn yet: single releases, each a separate block, or one block for a plan
or a training. It is charged when it is made, and each block is used once.

Guarantee: blocks that were never used may be given back. Proof: the filters bound the sums of the costs of the blocks
    that were drawn, along every transcript, however the next block is chosen; so a block that was not drawn costs
    nothing. While it was held the sums were larger, which can only refuse more. A block of several releases that was
    begun is never given back: its charge is for all of it, and where it was stopped may depend on the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matrixdp import _check
from matrixdp.accounting.domination import lies_under
from matrixdp.accounting.filter import Block, Charge, Spent
from matrixdp.accounting.ledger.chain import Document, Fields, canonical, sha256
from matrixdp.accounting.methods import Use
from matrixdp.budget import Budget, checked_budget
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.privacy.guarantee import Guarantee

PERIODS = ("year", "quarter", "month")
MOST_MEMBERS = 1000
LONGEST_NAME = 1000


@dataclass(frozen=True)
class Quota:
    """How much of the ledger's budget some analysts may spend together.

    Attributes:
        name: the name of the analyst or the team.
        budget: what the spends of its members may use together.
        per: "year", "quarter" or "month" (UTC), or None for the lifetime of the ledger.
        members: the analysts whose spends count; by default the one named `name`.

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
        checked_budget(self.budget).whole("a quota")
        if self.per is not None:
            _check.choice("per", self.per, PERIODS)
        object.__setattr__(self, "members", tuple(members))

    def since(self, time: str) -> str:
        """The first month of the period that contains this time, as in "2026-10"; empty for the lifetime."""
        year, month = time[:4], int(time[5:7])
        first = {"year": 1, "quarter": month - (month - 1) % 3, "month": month}
        return "" if self.per is None else f"{year}-{first[self.per]:02}"

    def to_dict(self) -> dict[str, Any]:
        """The document of the quota."""
        numbers = {"epsilon": self.budget.epsilon, "delta": self.budget.delta}
        return {**quota_document(self.name), **numbers, "per": self.per, "members": list(self.members)}

    def __str__(self) -> str:
        return f"{self.budget}{f' per {self.per}' if self.per else ''}"


def quota_document(name: str) -> dict[str, Any]:
    """The document that removes a quota; with a budget, period and members added, it sets one."""
    return {"matrixdp": "quota", "schema": 1, "name": name}


def quota_fields(document: Document) -> Fields:
    """The fields and documents of an entry about a quota: the hash of its document, and the document."""
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


def check_name(kind: str, name: object) -> str:
    """The name, if it has 1 to 1000 printable characters."""
    if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME):
        example = ", such as secrets.token_hex(8)" if kind in ("series", "key") else ""
        raise InvalidInput(
            f"{kind} must be a name of 1 to {LONGEST_NAME} printable characters{example}, got {_check.kind(name)}"
        )
    return name


@dataclass(frozen=True)
class Reservation:
    """Blocks that are reserved, and were charged when the reservation was made.

    Attributes:
        name: the name under which they are used.
        analyst: who may use them.
        purpose: what they are for.
        time: when they were reserved.
        guarantee: what each release guarantees at least.
        count: how many blocks were reserved: single releases, or one plan.
        left: how many are not used yet.
        block: the releases of one block.
        charge: the charge of each block.
        whole: whether this is one block for a plan or a training, used by the first spend of a series.

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
        """How many of the remaining blocks a spend uses.

        Raises:
            InvalidInput: if the spend is not what was reserved.
            BudgetExceeded: if fewer are left.
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
"""A block and its charge; None if all releases are fixed beforehand."""


@dataclass
class Own:
    """What each analyst was charged, month by month."""

    months: dict[tuple[str, str], Counter[Kind]] = field(default_factory=dict)

    def copy(self) -> Own:
        """A copy that can be changed."""
        return Own({place: Counter(kinds) for place, kinds in self.months.items()})

    def add(self, analyst: str | None, time: str, block: Mapping[Use, int], charge: Charge | None, times: int) -> None:
        """Adds `times` equal blocks; a negative number removes them."""
        kinds = self.months.setdefault((analyst or "", time[:7]), Counter())
        kinds[frozenset(block.items()), charge] += times

    def analysts(self) -> list[str]:
        """All analysts ever charged; an empty name for spends without one."""
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
        """The charges of these analysts since a month, or in one year, with this budget."""
        found, chosen = Spent(budget, adaptive), {*analysts}
        for (analyst, month), kinds in self.months.items():
            if analyst in chosen and month >= since and year in (None, int(month[:4])):
                for (block, charge), times in kinds.items():
                    if times:
                        found.add(dict(block), charge, adjacency, times)
        return found
