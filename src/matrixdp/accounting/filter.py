"""Privacy filters: what may still be released when noise, counts and sampling rates depend on earlier answers.

A *block* is a set of releases that are fixed before any of their answers is seen: a plan, or several releases with one
certificate and sampling rate. (Their queries may depend on earlier answers, and the answers may be given one by one,
with other blocks between.)

**Several filters at once.** Let filters i = 1, ..., n be fixed in advance. Let an interaction that stops before filter
i is exceeded be (epsilon, d_i)-differentially private. Costs are not negative and add up, so a filter that holds for a
transcript holds for every prefix of it.

Guarantee: an interaction that continues while at least one of them holds is (epsilon, sum d_i)-differentially private.
Proof: let A_i be the transcripts for which filter i holds and none before it does. The A_i are disjoint, and every
    transcript is in one. On A_i the interaction and the one that filter i stops have equal probabilities, under each
    of two neighbours P and Q. So P(S n A_i) <= e^epsilon Q(S n A_i) + d_i for every event S; add these up.

**Samplers.** A drawn block is no worse than a draw from its law that reveals everything with probability k_b
(`Use.revealed`). On transcripts in which nothing was revealed, P and Q have the densities that they have with exact
laws, times one common factor of at most 1. So the excess P - e^epsilon Q of an event is at most that with exact laws.
Something is revealed with probability at most E[sum k_b], which is also held to a share of delta.

**The Gaussian filter.** Each block is charged a pair (mu_b, k_b): it is no worse than Gaussian noise with mu_b that,
with probability k_b, reveals everything instead. The filter holds while sum mu_b^2 <= mu^2 and sum k_b <= k.

Guarantee: an interaction that it stops is (epsilon, delta_mu(epsilon) + k)-differentially private, where delta_mu is
    the profile of Gaussian noise with mu.
Proof: fix two neighbours, and let H be the curve of a block, `sup over events of P - e^epsilon Q`, in its worse
    direction. The pair "Gaussian with mu_b, and all revealed with probability k_b" has, in both directions, the curve
    (1 - k_b) delta_mu_b + k_b. Let that be at least H at every epsilon >= 0. Then the answers of the block can be
    computed from one draw of that pair, without knowing which neighbour is the true one (Blackwell's theorem, see
    dong2022gaussian). So it is enough to bound what is seen if the pair is drawn when the block is announced and the
    whole draw is shown. On transcripts in which nothing was revealed, as above, the excess of any event is at most that
    of adaptively chosen Gaussian noise with sum mu_b^2 <= mu^2, which is at most delta_mu(epsilon) (smith2022fully).

    (mu, k) must be fixed in advance, because the largest mu and the largest k over all transcripts count. It is not
    enough to hold delta_mu(epsilon) + k below delta along each transcript, with its own mu and k: one could spend k
    where the answers are harmless and mu where they are not.

Charges: Gaussian noise without sampling has mu_b = mu_1 sqrt(count), exactly. For any other block, H is computed from
    its privacy-loss distributions (`losses`; proven there, as the block is fixed). k_b is a share of k that shrinks
    from one such block to the next, and mu_b is the least mu found whose curve is at least H. k_b includes the
    samplers' error once more, so that a charge can be read by itself.

The other filters, for pure noise, for pure and Gaussian noise, and by Rényi divergences, are in `limits`. Of delta, the
Gaussian filter has 85 % for mu and 3 % for k, the samplers have 1 %, and the other filters share the rest. Ledgers from
before schema 5 keep the Gaussian filter that they began with as their only one: 95 % for mu, and 5 % for k.

**delta = 0.** There is one filter: the pure epsilons of all blocks, drawn exactly, add up to at most epsilon. Along
every transcript the ratio of the densities of P and Q is at most e to that sum, whatever was chosen in view of answers.

A single block is accounted for by its Composition, which is tighter than its charge, and may use the whole delta: the
first block is fixed before any answer, and if its charge does not fit, no other block ever follows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from matrixdp._check import Array
from matrixdp.accounting import limits, methods
from matrixdp.accounting.limits import Cost, Limit
from matrixdp.accounting.losses import MOST_STEPS, curves
from matrixdp.accounting.methods import Use, merged
from matrixdp.budget import Budget
from matrixdp.privacy import gaussian
from matrixdp.privacy.cells import UNIT
from matrixdp.privacy.guarantee import GaussianProfile

_UP = 1.0 + 32.0 * UNIT  # more than the rounding of the few operations that follow one another here
RESERVE, REVEALED, SAMPLERS = 0.15, 0.03, 0.01
"""Shares of delta: what mu does not have (this costs Gaussian noise 0.9 % of epsilon); k; the samplers."""
RESERVE_ALONE = 0.05
"""The share of delta that mu does not have, which is k, where the Gaussian filter is the only one."""
_FIRST_SHARE, _NEXT_SHARE = 0.36, 0.6  # of k, for the first block that is not Gaussian, and from one to the next
_POINTS = 1000  # epsilons at which two curves are compared
_GUARD = 1e-9  # more than the relative error of gaussian.delta in the range below
_LEAST_EPSILON, _LARGEST_EPSILON, _LEAST_K = 1e-8, 1e3, 1e-290
_LARGEST_MU = 1e3

Block = Mapping[Use, int]  # how many releases of each kind it has


@dataclass(frozen=True)
class Charge:
    """Says that a block is no worse than Gaussian noise with mu that reveals everything with probability delta."""

    mu: float
    delta: float


@dataclass
class Spent:
    """The charges of all blocks, and the budget that they are held to.

    Attributes:
        budget: the budget.
        adaptive: whether blocks may be chosen in view of earlier answers; if not, all releases are in `fixed`.
        several: whether all filters are used, or only the Gaussian one.
        fixed: releases that were all fixed before any answer; together they are the first block.
        kinds: how often each of the other blocks occurs.
        converted: how many additions were not Gaussian; each has a share of k.
        mus: how often each mu was charged.
        deltas: how often each delta was charged.
        costs: how often each cost occurred, for the other filters.
    """

    budget: Budget
    adaptive: bool = True
    several: bool = True
    fixed: Counter[Use] = field(default_factory=Counter)
    kinds: Counter[frozenset[tuple[Use, int]]] = field(default_factory=Counter)
    converted: int = 0
    mus: Counter[float] = field(default_factory=Counter)
    deltas: Counter[float] = field(default_factory=Counter)
    costs: Counter[Cost] = field(default_factory=Counter)

    def copy(self) -> Spent:
        """A copy that can be changed."""
        return replace(
            self,
            fixed=Counter(self.fixed),
            kinds=Counter(self.kinds),
            mus=Counter(self.mus),
            deltas=Counter(self.deltas),
            costs=Counter(self.costs),
        )

    @property
    def blocks(self) -> int:
        """How many blocks there are besides `fixed`."""
        return self.kinds.total()

    def charge(self, block: Block, adjacency: str, times: int = 1) -> Charge:
        """The charge of each of `times` equal blocks if they come next."""
        return charge(block, self._share(self.converted + (not _is_gaussian(self.fixed))) / times, adjacency)

    def add(self, block: Block, charged: Charge | None, adjacency: str, times: int = 1) -> None:
        """Adds `times` equal blocks with this charge each; a negative number removes blocks that were never used.

        Blocks without a charge were fixed before any answer, and are added to `fixed`.
        """
        if charged is None:
            self.fixed.update({use: count * times for use, count in block.items()})
            return
        kind = frozenset(block.items())
        counters: list[tuple[Counter[Any], Any]] = [(self.kinds, kind), (self.mus, charged.mu)]
        counters.append((self.deltas, charged.delta))
        if self.several and not self._pure:
            counters.append((self.costs, limits.cost(block, adjacency, limits.orders_for(self.budget))))
        for counter, name in counters:
            counter[name] += times
            if not counter[name]:
                del counter[name]
        self.converted += times > 0 and not _is_gaussian(block)

    def fits(self, adjacency: str) -> bool:
        """Whether all blocks together keep the budget."""
        if self._pure:
            return self.epsilon(adjacency) <= self.budget.epsilon
        if self._is_one_block():
            return methods.delta(self._one_block(), adjacency, self.budget.epsilon) <= self.budget.delta
        total, spent = self._total(adjacency), self._cost()
        kept = self._kept(total) and float(gaussian.delta(total.mu, self.budget.epsilon)) <= self._rest()
        return kept or any(limit.holds(spent) for limit in self._limits(spent))

    def epsilon(self, adjacency: str) -> float:
        """epsilon of all blocks together at the budget's delta, rounded up: the least over all filters."""
        if self._pure:
            return methods.epsilon(self._releases(), adjacency, 0.0)
        if self._is_one_block():
            return methods.epsilon(self._one_block(), adjacency, self.budget.delta)
        total, spent = self._total(adjacency), self._cost()
        found = float(gaussian.epsilon(total.mu, self._rest())) if self._kept(total) else math.inf
        return min([found, *(limit.epsilon(spent) for limit in self._limits(spent))])

    def remaining(self, adjacency: str) -> float:
        """The largest mu of one more Gaussian release that keeps the budget, rounded down."""
        if self._pure:
            return 0.0
        whole = float(gaussian.mu(self.budget.epsilon, self.budget.delta))
        if not (self.blocks or self.fixed):
            return whole
        if not self.adaptive:
            return self._remaining_of_plan(whole, adjacency)
        total, spent, found = self._total(adjacency), self._cost(), 0.0
        if self._kept(total):
            whole = float(gaussian.mu(self.budget.epsilon, self._rest()))
            found = math.sqrt(max(whole**2 / _UP**4 - total.mu**2, 0.0)) / _UP
        return max([found, *(limit.room(spent) for limit in self._limits(spent))])

    def remaining_pure(self, adjacency: str) -> float:
        """The epsilon of one more release with delta = 0 that the filters for pure noise allow, rounded down.

        Where the budget's delta is above 0 and all releases are fixed beforehand, there is no such filter: the answer
        is 0 after the first release.
        """
        if not (self.blocks or self.fixed):
            return self.budget.epsilon
        if self._pure:
            return max(math.nextafter(self.budget.epsilon - self.epsilon(adjacency), 0.0), 0.0)
        spent = self._cost()
        found = [limit.pure_room(spent) for limit in self._limits(spent) if isinstance(limit, limits.PureAndGaussian)]
        return max(found, default=0.0)

    def _remaining_of_plan(self, high: float, adjacency: str) -> float:
        low = 0.0
        for _ in range(40 if _is_gaussian(self.fixed) else 12):  # other totals are slow, and accurate to 1 %
            middle, more = (low + high) / 2, self.copy()
            more.fixed[Use(GaussianProfile(middle))] += 1
            low, high = (middle, high) if more.fits(adjacency) else (low, middle)
        return low

    @property
    def _pure(self) -> bool:
        return self.budget.delta == 0.0

    def _releases(self) -> Counter[Use]:
        """How many releases of each kind all blocks have."""
        found = Counter(self.fixed)
        for block, times in self.kinds.items():
            for use, count in block:
                found[use] += times * count
        return found

    def _share(self, converted: int) -> float:
        """The k of a block that follows `converted` others that are not Gaussian."""
        return self._k() * _FIRST_SHARE * _NEXT_SHARE**converted

    def _k(self) -> float:
        """The largest total k of the Gaussian filter."""
        return (REVEALED if self.several else RESERVE_ALONE) * self.budget.delta

    def _rest(self) -> float:
        """The largest delta_mu(epsilon) of the Gaussian filter."""
        return (1.0 - (RESERVE if self.several else RESERVE_ALONE)) * self.budget.delta

    def _kept(self, total: Charge) -> bool:
        """Whether what may be revealed is within its share of delta, and mu is finite."""
        sampled = not self.several or self._cost().revealed <= SAMPLERS * self.budget.delta
        return sampled and total.delta <= self._k() and total.mu < math.inf

    def _cost(self) -> Cost:
        """The cost of all blocks in the other filters."""
        return limits.total(self.costs)

    def _limits(self, spent: Cost) -> tuple[Limit, ...]:
        """The other filters that apply; none if the samplers have used up their share."""
        allowed = self.several and self.costs and not self.fixed and spent.revealed <= SAMPLERS * self.budget.delta
        return limits.limits_for(self.budget) if allowed else ()

    def _total(self, adjacency: str) -> Charge:
        """The sums of the charges, rounded up."""
        older = charge(self.fixed, self._share(0), adjacency)
        mu = math.sqrt(math.fsum([older.mu**2, *(times * mu**2 for mu, times in self.mus.items())])) * _UP
        return Charge(mu, math.fsum([older.delta, *(times * delta for delta, times in self.deltas.items())]) * _UP)

    def _is_one_block(self) -> bool:
        return self.blocks + bool(self.fixed) <= 1

    def _one_block(self) -> Block:
        return self.fixed or dict(next(iter(self.kinds), ()))


def _is_gaussian(block: Block) -> bool:
    return all(use.gaussian for use in block)


def charge(block: Block, k: float, adjacency: str) -> Charge:
    """The charge of a block: that of Gaussian noise, or the least mu found that dominates together with k."""
    leak = math.fsum(count * use.revealed() for use, count in block.items()) * _UP
    plain = _mu_without_sampling(block)
    if _is_gaussian(block) or not k >= _LEAST_K:
        return Charge(plain, leak)
    dominating = _dominating_mu(tuple(block.items()), k, adjacency)
    return Charge(dominating, leak + k) if dominating < plain else Charge(plain, leak)


def is_enough(block: Block, charged: Charge) -> bool:
    """Whether a charge that was read is large enough; for blocks that are not Gaussian, mu need only be above 0.

    It may be 0 if the block may reveal more than its samplers do. Recomputing takes long; `ledger.exports` does so.
    """
    least = charge(block, 0.0, "")
    revealed = charged.delta >= least.delta * (1.0 - 1e-9)
    if _is_gaussian(block):
        enough = charged.mu >= least.mu * (1.0 - 1e-9)
    else:
        enough = charged.mu > 0.0 or (charged.mu == 0.0 and charged.delta > least.delta)
    return (enough and revealed) or charged.mu == math.inf  # which no budget allows


def _mu_without_sampling(block: Block) -> float:
    """mu of a block of Gaussian noise, ignoring sampling, which can only lower it; infinite for other noise."""
    gaussians = [(use.profile.mu, count) for use, count in block.items() if isinstance(use.profile, GaussianProfile)]
    if len(gaussians) < len(block):
        return math.inf
    mu = math.sqrt(math.fsum(count * mu**2 for mu, count in gaussians)) * _UP
    return max(mu for mu, _ in gaussians) if sum(block.values()) == 1 else mu


@lru_cache(maxsize=1024)
def _dominating_mu(block: tuple[tuple[Use, int], ...], k: float, adjacency: str) -> float:
    """A mu with (1 - k) delta_mu + k >= H at every epsilon >= 0, or infinity.

    Both sides fall as epsilon grows. So it is enough that H at each point of a grid is at most the other side at the
    next point, and at most k at the last.
    """
    steps = merged(dict(block))
    if not steps:
        return 0.0
    if sum(steps.values()) > MOST_STEPS:
        return math.inf
    found = curves(steps, adjacency, (k, math.sqrt(k), 0.1))
    last = found.epsilon(k)
    if not last < math.inf:
        return math.inf
    epsilons = np.linspace(0.0, last, _POINTS + 1)
    return _least_mu(np.append(found.deltas(epsilons[:-1]), k), epsilons, k)


def _least_mu(deltas: Array, epsilons: Array, k: float) -> float:
    """The least mu found whose curve, with k, dominates the deltas as described above; they must end at k or below."""
    if not deltas[-1] <= k:
        return math.inf
    inside = np.clip(epsilons[1:], _LEAST_EPSILON, _LARGEST_EPSILON)

    def dominates(mu: float) -> bool:
        curve = np.where(epsilons[1:] <= _LARGEST_EPSILON, np.asarray(gaussian.delta(mu, inside)), 0.0)
        return bool(np.all(deltas[:-1] <= ((1.0 - k) * curve + k) * (1.0 - _GUARD)))

    low, high = 0.0, 1.0
    while not dominates(high):
        low, high = high, 2.0 * high
        if high > _LARGEST_MU:
            return math.inf
    while high - low > 1e-6 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if dominates(middle) else (middle, high)
    return high


def adaptive_epsilon(use: Use, count: int, delta: float, adjacency: str) -> float:
    """The least epsilon found of a ledger with this delta that takes `count` releases, each chosen after the others.

    For noise that is not Gaussian, the Gaussian filter is left out, as its charges take long to compute.
    """
    charged = charge({use: 1}, 0.0, adjacency)

    def takes(epsilon: float) -> bool:
        spent = Spent(Budget(epsilon, delta))
        spent.add({use: 1}, charged, adjacency, count)
        return spent.fits(adjacency)

    low, high = 1e-3, 1.0
    while not takes(high):
        low, high = high, 2.0 * high
        if high > _LARGEST_EPSILON:
            return math.inf
    while high > 1.002 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if takes(middle) else (middle, high)
    return high
