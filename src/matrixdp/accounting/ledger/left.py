"""What is left of a ledger's budget and of its quotas: as mu, as epsilon, and as a number of releases."""

from __future__ import annotations

from dataclasses import dataclass

from matrixdp.accounting.filter import Spent, charge
from matrixdp.accounting.ledger.rules import Quota
from matrixdp.accounting.ledger.totals import Total
from matrixdp.accounting.methods import Use
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import Guarantee

MOST_RELEASES = 10**9


@dataclass(frozen=True)
class Remaining:
    """What one more release may use: Gaussian noise with `mu` and its `epsilon`, or pure noise with `pure`.

    `epsilon` is that of `mu` at the budget's delta. `pure` is the epsilon of one more release with delta = 0, as in
    `Budget(pure, 0)`. With a delta above 0, a ledger whose releases are all fixed beforehand, or one from before schema
    5, has `pure` = 0 once it has an entry. With delta = 0 no Gaussian release fits: mu is 0, and epsilon is `pure`.

    The total-variation error of that release's sampler is not included; for matrices of many millions of entries, stay
    slightly below.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Ledger
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> round(ledger.remaining().epsilon, 6)
        3.0
    """

    mu: float
    epsilon: float
    pure: float


@dataclass(frozen=True)
class Left:
    """What is left of the budget of a ledger, or of a quota.

    Attributes:
        name: "total" for the lifetime budget of the ledger, or the name of the quota.
        per: the period of the quota; None for the lifetime.
        since: the first month of the current period, as in "2026-10"; None for the lifetime.
        budget: the whole budget or quota.
        spent: epsilon of what was charged, reservations included, at the budget's delta.
        reserved: epsilon of the open reservations alone.
        mu: the largest mu of one more Gaussian release.
        epsilon: the epsilon of that release at the budget's delta.
        pure: the epsilon of one more release with delta = 0, in place of that one; see `Remaining`.
        releases: how many more releases like the one given fit, one by one; for noise that is not Gaussian a few more
            may fit. None if none was given.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Ledger
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> [(left.name, left.spent) for left in ledger.left()]
        [('total', 0.0)]
    """

    name: str
    per: str | None
    since: str | None
    budget: Budget
    spent: float
    reserved: float
    mu: float
    epsilon: float
    pure: float
    releases: int | None = None


def remaining(spent: Spent, adjacency: str) -> Remaining:
    """The largest Gaussian release without sampling, and the largest pure one, that fit, rounded down."""
    mu, budget, pure = spent.remaining(adjacency), spent.budget, spent.remaining_pure(adjacency)
    if budget.delta == 0.0 or not (spent.blocks or spent.fixed):
        return Remaining(mu, pure, pure)
    # lower by 1e-9, because a release that keeps this epsilon may have a mu above ours by rounding
    return Remaining(mu, float(gaussian.epsilon(mu * (1 - 1e-9), budget.delta)), pure)


def left(total: Total, analyst: str | None, time: str, like: Guarantee | None) -> list[Left]:
    """What is left of the total, then of every quota that covers the analyst, or of all quotas if none is given."""
    if like is not None and not isinstance(like, Guarantee):
        raise InvalidInput("like must be a Certificate or a Guarantee")
    if like is not None and total.adjacency not in (None, like.adjacency):
        raise InvalidInput(f"like must hold under the ledger's adjacency, {total.adjacency}, got {like.adjacency}")
    quotas = [*total.quotas.values()] if analyst is None else total.quotas_of(analyst)
    found = [_left("total", None, total.spent, total, like)]
    return found + [_left(quota.name, quota, total.spent_of(quota, time), total, like, time) for quota in quotas]


def _left(name: str, quota: Quota | None, spent: Spent, total: Total, like: Guarantee | None, time: str = "") -> Left:
    adjacency = total.adjacency or ("" if like is None else str(like.adjacency))
    held = [
        each
        for each in total.reservations.values()
        if quota is None or (each.analyst in quota.members and each.time[:7] >= quota.since(time))
    ]
    reserved = Spent(spent.budget, spent.adaptive)
    for each in held:
        reserved.add(each.block, each.charge, adjacency, each.left)
    room = remaining(spent, adjacency)
    return Left(
        name=name,
        per=None if quota is None else quota.per,
        since=None if quota is None else quota.since(time) or None,
        budget=spent.budget,
        spent=spent.epsilon(adjacency),
        reserved=reserved.epsilon(adjacency) if held else 0.0,
        mu=room.mu,
        epsilon=room.epsilon,
        pure=room.pure,
        releases=None if like is None else releases(spent, like),
    )


def releases(spent: Spent, like: Guarantee) -> int:
    """How many more such releases fit, each chosen after the others; a lower bound.

    For noise that is not Gaussian, the Gaussian filter is left out, as its charges take long to compute.
    """
    use, adjacency = Use(like.profile, like.total_variation), str(like.adjacency)
    charged = charge({use: 1}, 0.0, adjacency) if spent.adaptive else None

    def fits(count: int) -> bool:
        after = spent.copy()
        after.add({use: 1}, charged, adjacency, count)
        return after.fits(adjacency)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > MOST_RELEASES:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
