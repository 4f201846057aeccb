"""The privacy-loss distribution of many releases, on a grid, by Fourier transforms; and epsilon and delta from it.

Each release is described by a pair of laws (P, Q), whose curve is `H(epsilon) = sup over events of P - e^epsilon Q`.
It is at least that of every pair of neighbours (`pairs.Pair`). The product of the pairs then bounds the composition,
also of queries that depend on earlier answers (zhu2022optimal).

The loss log(P/Q) is put on a grid of step h so that the curve equals H on the grid and is linear in e^epsilon between,
hence never too small (doroshenko2022connect); h is halved until the answer converges. Losses of discrete noise are put
on the grid atom by atom (`privacy.cells`), to the same effect. dp-accounting's Fourier transform adds the losses. An
exponential tilt, e^(tilt l) p(l), first makes the losses that matter likely: so rounding is relative to the answer, not
to 1, and delta = 1e-15 or 1e-100 is as accurate as 1e-5. A bound on the rounding of the transform, to first order, is
added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from matrixdp._check import Array
from matrixdp.accounting.pairs import Pair
from matrixdp.adjacency import REPLACE
from matrixdp.privacy.cells import UNIT, CellLoss
from matrixdp.privacy.guarantee import Profile

_SETTLED = 0.003  # the change of epsilon, relative, below which halving h ends
_CELLS, _MOST_SUMS = [2**bits for bits in range(8, 20)], 2**22  # cells of the grids in turn, and of a total
MOST_STEPS = 10**9  # beyond, rounding of the transform is no longer negligible
_SHARE, _LEAST_FLOOR = 1e-4, 1e-304  # the share of delta for the losses above the grid, and the least such delta
_MANY = 4096  # entries with discrete noise, above which the grid is coarser
_TAIL = 1e-20  # tilted mass outside the window of the transform

Steps = Mapping[tuple[Profile, float], int]  # (profile, sampling rate) -> how often


@dataclass(frozen=True)
class _Loss:
    """A loss on the grid: masses at (start + i) h and at infinity, and the number of independent copies."""

    start: int
    masses: Array
    infinite: float
    count: int

    def log_terms(self, h: float, tilt: float) -> tuple[float, Array]:
        """log of the sum of e^(tilt l) p(l), and the logs of its terms."""
        with np.errstate(divide="ignore"):
            terms = np.log(self.masses) + tilt * h * np.arange(self.start, self.start + self.masses.size)
        largest = float(terms.max())
        return largest + math.log(float(np.exp(terms - largest).sum())), terms


def on_grid(pair: Pair, window: tuple[float, float], h: float, count: int) -> _Loss:
    """The distribution whose curve equals H on the grid; each mass is rounded up."""
    start, end = math.floor(window[0] / h), math.ceil(window[1] / h) + 1
    deltas = pair.curve(h * np.arange(start, end + 1, dtype=np.float64))
    drops = -np.diff(deltas)
    gained = np.append(1.0 - deltas[0], drops / -math.expm1(-h))
    lost = np.append(drops / math.expm1(min(h, 700.0)), 0.0)
    masses = gained - lost + 4.0 * UNIT * (np.abs(gained) + np.abs(lost))
    return _Loss(start, np.maximum(masses, 0.0), float(deltas[-1]), count)


@dataclass(frozen=True)
class _Total:
    """The total loss: probability e^(log_scale - tilt l) times the mass at l = (start + i) h; the rest at infinity."""

    h: float
    start: int
    masses: Array
    log_scale: float
    tilt: float
    infinite: float
    error: float  # of the masses, in the l2 norm
    outside: float  # tilted mass that the window may have lost

    def delta(self, epsilon: float) -> float:
        """H of the product, rounded up."""
        return min(1.0, self.infinite + self.finite_delta(epsilon))

    def finite_delta(self, epsilon: float) -> float:
        """What finite losses contribute to it."""
        first = max(math.floor(epsilon / self.h) - self.start, 0)
        excess = np.maximum(self.h * np.arange(self.start + first, self.start + self.masses.size) - epsilon, 0.0)
        weights = -np.expm1(-excess) * np.exp(-self.tilt * excess)
        return self._rounded_up(epsilon, float(weights @ self.masses[first:]), float(np.linalg.norm(weights)))

    def deltas(self, epsilons: Array) -> Array:
        """`delta` at many epsilons, each moved down to a multiple of h first, as H falls: much faster."""
        places = np.floor(epsilons / self.h).astype(int) - self.start
        excess = self.h * np.arange(self.masses.size + max(-int(places.min()), 0))
        weights = -np.expm1(-excess) * np.exp(-self.tilt * excess)
        norm, found = float(np.linalg.norm(weights)), np.ones(len(places))
        for index, place in enumerate(places):
            masses = self.masses[max(place, 0) :]
            here = weights[max(-place, 0) :][: masses.size]
            found[index] = self.infinite + self._rounded_up(self.h * (self.start + place), float(here @ masses), norm)
        return np.minimum(found, 1.0)

    def _rounded_up(self, epsilon: float, inside: float, norm: float) -> float:
        """The contribution of finite losses, from the weighted sum of the masses and the norm of the weights."""
        inside = inside * (1.0 + 1e-9) + self.error * norm + self.outside + 1e-300
        exponent = self.log_scale - self.tilt * epsilon + math.log(inside)
        return math.exp(min(max(exponent, -744.0), 1.0))  # e^-744 is the least float

    def epsilon(self, delta: float) -> float:
        """The least epsilon at which H is at most delta, rounded up."""
        low, high = 0.0, max(self.h * (self.start + self.masses.size), self.h)
        if self.delta(low) <= delta:
            return low
        if not self.delta(high) <= delta:
            return math.inf
        while high - low > 1e-7 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


def _sum(losses: Sequence[_Loss], h: float, tilt: float) -> _Total:
    from dp_accounting.pld import common  # half a second to load each, and most programs never come here
    from scipy import signal

    def transform_error(size: int) -> float:
        return 16.0 * UNIT * math.log2(2 * size + 2)

    start, masses, log_scale, error = 0, np.ones(1), 0.0, 0.0
    for loss in losses:
        log_sum, terms = loss.log_terms(h, tilt)
        powers, first = np.exp(terms - log_sum), 0
        if loss.count > 1:
            with np.errstate(over="ignore"):  # in orders of Chernoff's bound that are then not used
                first, powers = common.self_convolve(powers, loss.count, _TAIL)
            powers = np.maximum(powers, 0.0)
        norm = float(np.linalg.norm(powers))
        masses = np.maximum(signal.fftconvolve(masses, powers), 0.0)
        error += transform_error(masses.size) * (loss.count + 3) * norm
        start += loss.start * loss.count + first
        # each term was rounded in proportion to its logarithm
        rounding = 4.0 * UNIT * (8.0 + abs(log_sum) + tilt * h * (abs(loss.start) + loss.masses.size))
        log_scale += loss.count * (log_sum + rounding)
    finite = math.fsum(loss.count * math.log1p(-loss.infinite) for loss in losses)
    return _Total(h, start, masses, log_scale, tilt, -math.expm1(finite) * (1.0 + 1e-12), error, _TAIL * len(losses))


def _atoms_on_grid(atoms: CellLoss, h: float, count: int) -> _Loss:
    """Atoms, each split between its neighbours on the grid, whose step must be a power of two."""
    found = atoms.on_grid(h)
    return _Loss(round(float(found.losses[-1]) / h), found.masses[::-1], found.infinite, count)


def _law(pairs: Mapping[Pair, int], cells: int, floor: float, question: Question) -> _Total:
    """The distribution of the total loss on a grid of `cells` cells; the losses above it add at most the floor."""
    share = max(floor / sum(pairs.values()), _LEAST_FLOOR)
    atoms = [(loss, n * count) for pair, count in pairs.items() for loss, n in pair.atoms(share)]
    smooth = [(pair, pair.window(share), count) for pair, count in pairs.items() if not pair.atomic]
    windows = [(float(loss.losses[-1]), float(loss.losses[0])) for loss, _ in atoms]
    h = max(high - low for low, high in [*windows, *(window for _, window, _ in smooth)]) / cells
    if atoms:
        coarser = 16.0 if sum(count for _, count in atoms) > _MANY else 1.0  # a sum of many reaches far
        h = 2.0 ** math.floor(math.log2(coarser * h))
    losses = [_atoms_on_grid(loss, h, count) for loss, count in atoms]
    losses += [on_grid(pair, window, h, count) for pair, window, count in smooth]
    return _sum(losses, h, _best_tilt(losses, h, question))


def _best_tilt(losses: Sequence[_Loss], h: float, question: Question) -> float:
    """The tilt of Chernoff's bound. It need not be exact: every tilt gives a bound, a good tilt a tight one."""

    def objective(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        log_bound = math.fsum(loss.count * loss.log_terms(h, tilt)[0] for loss in losses)
        log_bound -= math.log1p(tilt) + tilt * math.log1p(1.0 / tilt)  # the largest (1 - e^-x) e^(-tilt x)
        return question.chernoff(log_bound, tilt)

    top = h * max(loss.start + loss.masses.size for loss in losses)
    bounds = (math.log(1e-3 / top), math.log(1e9 / top))
    found = scipy.optimize.minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 0.05})
    return math.exp(found.x)


# --- questions to a composition: epsilon at a delta, or delta at an epsilon ---


@dataclass(frozen=True)
class EpsilonAt:
    """What is the least epsilon at this delta?"""

    delta: float

    def asked_of(self, profile: Profile) -> float:
        """The answer of a profile, or of a privacy-loss distribution."""
        return profile.epsilon(self.delta)

    def chernoff(self, log_bound: float, tilt: float) -> float:
        """Chernoff's bound on the answer, where H(epsilon) <= e^(log_bound - tilt epsilon)."""
        return (log_bound - math.log(self.delta)) / tilt

    def laws(self, pairs: Mapping[Pair, int]) -> Iterator[_Total]:
        """The distributions of the loss on finer and finer grids; they end where no finer grid can help."""
        for cells in _CELLS:
            law = _law(pairs, cells, self.delta * _SHARE, self)
            yield law
            if not law.infinite < self.delta:  # the curve of some noise is not known down to this delta
                return

    def tolerance(self, answer: float) -> float:
        """The change of the answer, relative, below which it has settled."""
        return _SETTLED


@dataclass(frozen=True)
class DeltaAt:
    """What is the least delta at this epsilon?"""

    epsilon: float

    def asked_of(self, profile: Profile) -> float:
        """The answer of a profile, or of a privacy-loss distribution."""
        return profile.delta(self.epsilon)

    def chernoff(self, log_bound: float, tilt: float) -> float:
        """The logarithm of Chernoff's bound on the answer, where H(epsilon) <= e^(log_bound - tilt epsilon)."""
        return log_bound - tilt * self.epsilon

    def laws(self, pairs: Mapping[Pair, int]) -> Iterator[_Total]:
        """The distributions of the loss on finer and finer grids; the mass above the grid shrinks with the answer."""
        floor = 1e-8
        for cells in _CELLS:
            law = _law(pairs, cells, floor, self)
            while law.infinite > (finite := law.finite_delta(self.epsilon)) and floor > _LEAST_FLOOR:
                floor *= 1e-8
                law = _law(pairs, cells, floor, self)
            floor = min(floor, _SHARE * finite)
            yield law

    def tolerance(self, answer: float) -> float:
        """The change of the answer, relative, below which it has settled; about that of epsilon."""
        return 0.3 * _SETTLED * (1.0 - math.log(max(answer, 1e-300)))


Question = EpsilonAt | DeltaAt


def by_losses(steps: Steps, adjacency: str, question: Question) -> tuple[float, bool]:
    """The answer for a composition, the worse of both directions, and whether it has converged."""
    if sum(steps.values()) > MOST_STEPS:
        return math.inf, False
    answer, settled = 0.0, True
    for pairs in _directions(steps, adjacency):
        found = _settle(pairs, question, enough=answer)
        answer, settled = max(answer, found.answer), settled and found.settled
    return answer, settled


@dataclass(frozen=True)
class _Settled:
    """The answer for one direction, whether it has converged, and the distribution of the loss on the last grid."""

    answer: float
    settled: bool
    law: _Total


def _settle(pairs: Mapping[Pair, int], question: Question, enough: float = 0.0) -> _Settled:
    """The least answer over finer and finer grids, each a bound; it is not improved once it is at most `enough`."""
    best = last = math.inf
    for law in question.laws(pairs):
        found = question.asked_of(law)
        near = last < math.inf and abs(last - found) <= question.tolerance(found) * last
        best, last = min(best, found), found
        if near or best <= enough or law.masses.size > _MOST_SUMS:
            break
    return _Settled(best, near or best <= enough, law)


@dataclass(frozen=True)
class Curves:
    """H of a composition at every epsilon: for each direction, a few distributions of the loss with different tilts."""

    directions: tuple[tuple[_Total, ...], ...]

    def deltas(self, epsilons: Array) -> Array:
        """H at these epsilons, the larger of both directions, rounded up."""
        worse = [np.min([law.deltas(epsilons) for law in laws], axis=0) for laws in self.directions]
        return np.asarray(np.max(worse, axis=0))

    def epsilon(self, delta: float) -> float:
        """The least epsilon at which H is at most delta in both directions, rounded up."""
        return max(min(law.epsilon(delta) for law in laws) for laws in self.directions)


def curves(steps: Steps, adjacency: str, deltas: Sequence[float]) -> Curves:
    """The curves of a composition of at most MOST_STEPS steps, tightest where H is near one of the deltas."""
    return Curves(
        tuple(
            tuple(_settle(pairs, EpsilonAt(delta)).law for delta in deltas) for pairs in _directions(steps, adjacency)
        )
    )


def _directions(steps: Steps, adjacency: str) -> Iterator[Mapping[Pair, int]]:
    """The pairs with one more record in the first data set, and in the second; only once if both are the same."""
    for sampled_first in (True, False):
        pairs = {
            Pair(noise, rate, None if rate == 1.0 or adjacency == REPLACE else sampled_first): count
            for (noise, rate), count in steps.items()
        }
        if sampled_first or any(pair.sampled_first is not None for pair in pairs):
            yield pairs
