"""delta of independent entries with discrete noise: the sum (1) of cells.py, rounded up.

- One entry: term by term.
- Losses on a common lattice, as for t = 1 (steps of 2/scale) and for t = 2 and one shift m (steps of 2m/scale^2): by
  direct convolution, if it is short.
- Two or three other entries: term by term over all but one of them, and by cumulative sums over the last.
- Otherwise: by a Fourier transform after an exponential tilt e^(tilt l) p(l), which makes the losses near epsilon
  likely; a bound on its rounding is added.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.privacy.cells import DEPTHS, TINY, UNIT, CellLoss, cell_loss, sum_rounding

_DIRECT = 4096  # atoms of a sum on a lattice that is convolved directly
_MOST_TERMS, _FEW_TERMS = 2_000_000, 10_000  # of a sum over two or three entries; the latter if a rougher sum will do
_MOST_BINS = 2**20  # of a Fourier transform
_FEW_BINS = 2**14  # up to which the lattice of the losses is used even if a coarser grid would do
_WIDTH = 8.5  # half the window of the transform, in standard deviations of the tilted law
_OUTSIDE = 1e-14  # tilted mass above the window that is accepted without a wider one
_CUT = 1e-12  # the share of delta that may be due to the tails cut off
_ENOUGH_ATOMS = 512  # of an entry, for approximations

EXACT, CLOSE = 1e-10, 1.5e-5
"""What splitting atoms may add to delta, relative: for up to three entries, and for more."""


@dataclass(frozen=True)
class Cells:
    """Independent entries with the same noise: groups of (shift in steps, number of entries)."""

    exponent: float
    scale: float
    groups: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """The number of entries."""
        return sum(count for _, count in self.groups)

    def delta(self, epsilon: float, tolerance: float | None = None, enough: float = 0.0, stride: int = 1) -> float:
        """(1), rounded up.

        Args:
            epsilon: any.
            tolerance: what splitting atoms may add, relative, where no large atom is near epsilon; by default EXACT
                or CLOSE, and finer grids are tried until that holds everywhere.
            enough: a result of at most this is not improved further.
            stride: 1; above 1, an approximation without a guarantee, see `cell_loss`.
        """
        settle = tolerance is None
        if tolerance is None:
            tolerance = EXACT if self.count <= 3 else CLOSE
        found = 1.0
        for depth in DEPTHS:
            total = _total(self, depth, stride)
            infinite = math.fsum(count * loss.infinite for count, loss in zip(total.counts, total.losses, strict=True))
            finite = _finite(total, epsilon, tolerance, settle)
            found = min(found, (finite + infinite) * (1.0 + 8.0 * UNIT))
            if infinite <= _CUT * finite or found <= enough:
                break
        return found


def _finite(total: _Total, epsilon: float, tolerance: float, settle: bool) -> float:
    """The part of (1) with finite losses."""
    losses, counts, top = total.losses, total.counts, total.top
    if not epsilon < top * (1.0 + 8.0 * UNIT):
        return 0.0
    entries = [loss for loss, count in zip(losses, counts, strict=True) for _ in range(min(count, 4))]
    if sum(counts) == 1:
        return _excess(losses[0].losses, losses[0].masses, epsilon)
    lattice = total.spacing
    if lattice:
        above = math.ceil((top - epsilon) / lattice * (1.0 + 8.0 * UNIT)) + 1  # all others have no excess
        above = min(above, total.length)
        if above <= _DIRECT:
            return _convolved(losses, counts, epsilon, above)
    most = _MOST_TERMS if tolerance <= EXACT else _FEW_TERMS
    if len(entries) <= 3 and not lattice and math.prod(entry.losses.size for entry in entries[:-1]) <= most:
        return _enumerated(entries, epsilon)
    return _transformed(total, epsilon, tolerance, settle)


def _excess(losses: Array, masses: Array, epsilon: float) -> float:
    """Sum of masses (1 - e^(epsilon - loss))_+, rounded up."""
    above = np.maximum(losses - epsilon, 0.0)
    return float(np.sum(masses * -np.expm1(-above))) * (1.0 + sum_rounding(losses.size)) + TINY


def _convolved(losses: Sequence[CellLoss], counts: Sequence[int], epsilon: float, size: int) -> float:
    """From the `size` largest sums on a lattice, by direct convolution of positive terms, so that rounding is relative.

    Places count downwards from the largest loss and add up, so later ones never contribute to these.
    """
    masses, top = np.ones(1), 0.0
    for loss, count in zip(losses, counts, strict=True):
        top += count * loss.losses[0]
        power = loss.masses[:size]
        for bit in itertools.count():
            if count >> bit & 1:
                masses = np.convolve(masses, power)[:size]
            if not count >> bit + 1:
                break
            power = np.convolve(power, power)[:size]
    rounding = 4.0 * UNIT * masses.size * (math.log2(sum(counts)) + 4.0)
    sums = top - losses[0].spacing * np.arange(float(masses.size))
    return _excess(sums, masses, epsilon) * (1.0 + rounding) + TINY * masses.size


def _enumerated(entries: Sequence[CellLoss], epsilon: float) -> float:
    """A sum over all atoms of all entries but the last; the last contributes by its cumulative sums."""
    *others, last = entries
    sums, masses = np.zeros(1), np.ones(1)
    for other in others:
        sums = np.add.outer(sums, other.losses).ravel()
        masses = np.multiply.outer(masses, other.masses).ravel()
    below = epsilon - sums - 4.0 * UNIT * (abs(epsilon) + np.abs(sums))  # the last loss must be above this
    below, masses = below[below < last.losses[0]], masses[below < last.losses[0]]
    number = np.searchsorted(-last.losses, -below)  # of its losses that are
    margin = UNIT * (last.losses.size + 16.0)
    first = np.append(0.0, np.cumsum(last.masses) * (1.0 + margin))
    second = np.append(0.0, np.cumsum(last.masses * np.exp(np.minimum(-last.losses, 700.0))) * (1.0 - 2.0 * margin))
    excess = first[number] - np.exp(np.minimum(below, 700.0)) * second[number]
    terms = masses * np.maximum(excess, 0.0)
    return float(np.sum(terms)) * (1.0 + sum_rounding(terms.size)) + TINY


# --- by a Fourier transform ---


def _transformed(total: _Total, epsilon: float, tolerance: float, settle: bool) -> float:
    """By a Fourier transform of the tilted masses, on the lattice of the losses or on a grid.

    Every grid gives an upper bound, and the least is returned. To settle, a grid is compared with one four times as
    coarse: the error of the finer one is at most a third of the difference if errors are of first order.
    """
    tilt, hope = _tilt(total, epsilon)
    if hope < math.log(0.1 * tolerance):
        return 1.0
    spread = math.sqrt(total.tilted(tilt).variance)
    if total.spacing and (settle or 2.0 * _WIDTH * spread <= _FEW_BINS * total.spacing):
        return total.summed(epsilon, tilt)
    # splitting an atom raises log M by about tilt (tilt + 1) step^2 / 12; where delta is near 1 the tilt is small, and
    # what counts is how quickly the law and e^-loss change
    pace = max(tilt, 1.0, min(1.0 / max(spread, 1e-3), 8.0))
    wanted = math.sqrt(12.0 * tolerance / (sum(total.counts) * pace * (pace + 1.0)))
    span = max(float(loss.losses[0] - loss.losses[-1]) for loss in total.losses)
    least = max(4.0 * _WIDTH * spread, span) / _MOST_BINS
    step = 2.0 ** math.floor(math.log2(max(wanted, least)))
    found = _on_grid(total, step, epsilon, tilt)
    if settle:
        before = _on_grid(total, 4.0 * step, epsilon, tilt)
        while before > (1.0 + 20.0 * tolerance) * found and step > 4.0 * least:
            step, before = step / 4.0, found
            found = min(_on_grid(total, step, epsilon, tilt), before)
    return found


# These are cached because a search ends by asking about its last scale again, to settle it.


@lru_cache(maxsize=4)
def _total(cells: Cells, depth: float, stride: int) -> _Total:
    losses = (cell_loss(cells.exponent, cells.scale, shift, depth, stride) for shift, _ in cells.groups)
    return _Total(tuple(losses), tuple(count for _, count in cells.groups))


@lru_cache(maxsize=4)
def _tilt(total: _Total, epsilon: float) -> tuple[float, float]:
    """The tilt of the transform, and the logarithm of a bound on 1 - delta."""
    about = total.thinned()
    return about.best_tilt(epsilon), about.log_hope(epsilon)


@lru_cache(maxsize=4)
def _on_grid(total: _Total, step: float, epsilon: float, tilt: float) -> float:
    return total.on_grid(step).summed(epsilon, tilt)


@dataclass(frozen=True)
class _Moments:
    """log M, mean and variance of the total loss, with masses prop. to e^(tilt l) p(l)."""

    log_moment: float
    mean: float
    variance: float


@dataclass(frozen=True, eq=False)
class _Total:
    """The sum of independent losses, some of them several times."""

    losses: tuple[CellLoss, ...]
    counts: tuple[int, ...]

    @cached_property
    def logs(self) -> list[Array]:
        """The logarithms of the masses."""
        with np.errstate(divide="ignore"):
            return [np.log(loss.masses) for loss in self.losses]

    @property
    def top(self) -> float:
        """The largest sum."""
        return math.fsum(count * loss.losses[0] for count, loss in zip(self.counts, self.losses, strict=True))

    @property
    def spacing(self) -> float:
        """Of the lattice of all losses; 0 if there is none."""
        return self.losses[0].spacing if len({loss.spacing for loss in self.losses}) == 1 else 0.0

    @property
    def length(self) -> int:
        """How many sums there are on that lattice."""
        return sum(count * (loss.losses.size - 1) for count, loss in zip(self.counts, self.losses, strict=True)) + 1

    def on_grid(self, step: float) -> _Total:
        """The sum with every loss moved to a grid."""
        return _Total(tuple(loss.on_grid(step) for loss in self.losses), self.counts)

    def thinned(self) -> _Total:
        """An approximation: fewer atoms, and without the masses added for a cut tail or for rounding."""
        return _Total(tuple(_thinned(loss) for loss in self.losses), self.counts)

    def log_hope(self, epsilon: float) -> float:
        """An upper bound on log(1 - delta): 1 - delta = E min(1, e^(epsilon - loss)) <= E e^((epsilon - loss) / 2)."""
        return 0.5 * epsilon + self.tilted(-0.5).log_moment

    def tilted(self, tilt: float) -> _Moments:
        """The moments of the tilted law."""
        log_moment = mean = variance = 0.0
        for loss, logs, count in zip(self.losses, self.logs, self.counts, strict=True):
            terms = logs + tilt * loss.losses
            largest = float(np.max(terms))
            weights = np.exp(terms - largest)
            total = float(np.sum(weights))
            centre = float(np.sum(weights * loss.losses)) / total
            log_moment += count * (largest + math.log(total))
            mean += count * centre
            variance += count * float(np.sum(weights * np.square(loss.losses - centre))) / total
        return _Moments(log_moment, mean, variance)

    def best_tilt(self, epsilon: float) -> float:
        """Chernoff's tilt, roughly: the tilted mean is epsilon + log(1 + 1/tilt). Every tilt gives a bound.

        At the root the derivative of `log M(tilt) - tilt epsilon + log max_x (1 - e^-x) e^(-tilt x)` vanishes.
        """
        top = self.top
        low, high = 1e-6 / max(top, 1.0), 1e6 / max(top, 1e-3)
        tilt = min(max(1.0 / max(top, 1e-3), 10.0 * low), 0.1 * high)
        for _ in range(60):
            now = self.tilted(tilt)
            excess = now.mean - epsilon - math.log1p(1.0 / tilt)
            if abs(excess) <= 0.05 * math.sqrt(now.variance) or high < 1.0001 * low:
                break
            low, high = (tilt, high) if excess < 0.0 else (low, tilt)
            proposed = tilt - excess / (now.variance + 1.0 / (tilt * (1.0 + tilt)))
            tilt = proposed if low < proposed < high else math.sqrt(low * high)
        return tilt

    def summed(self, epsilon: float, tilt: float) -> float:
        """(1) by a Fourier transform; the losses are on a lattice."""
        length, moments = self.length, self.tilted(tilt)
        wanted = 2.0 * _WIDTH * math.sqrt(moments.variance) / self.spacing + 64.0
        while True:
            bins = _bins(min(wanted, length))
            first, outside = (0, 0.0) if bins >= length else self._window(tilt, moments, bins)
            if outside <= _OUTSIDE or bins >= min(length, 4 * _MOST_BINS):
                return self._summed(epsilon, tilt, first, bins, outside)
            wanted *= 2.0

    def _window(self, tilt: float, now: _Moments, bins: int) -> tuple[int, float]:
        """The first place of a window around the tilted mean, and Chernoff's bound on the tilted mass before it.

        Places are counted downwards from the largest sum.
        """
        first = max(math.floor((self.top - now.mean) / self.spacing) - bins // 2, 0)
        if first == 0:
            return 0, 0.0
        edge = self.top - self.spacing * first  # sums above it are outside
        more, best = (edge - now.mean) / max(now.variance, 1e-300), 0.0
        for factor in (0.25, 0.5, 1.0):
            higher = self.tilted(tilt + factor * more)
            best = min(best, higher.log_moment - now.log_moment - factor * more * edge)
        return first, 1.001 * math.exp(best)

    def _summed(self, epsilon: float, tilt: float, first: int, bins: int, outside: float) -> float:
        """The transform of n numbers, the powers, the transform back, and (1) from its result.

        Mass that wraps around from below the window only adds to the sum; mass above it is added in full.

        Rounding: in the l2 norm, in which a transform is an isometry, its error is at most 16 log2(n) units times the
        norm of its input; higham2002accuracy, section 24.1, has half of that. As no transformed value is above 1 +
        error, the error of the k-th power is k times that of its base.
        """
        unit = 16.0 * UNIT * (math.log2(bins) + 1.0)
        product: npt.NDArray[np.complex128] = np.ones(bins // 2 + 1, dtype=np.complex128)
        log_scale = error = 0.0
        for loss, logs, count in zip(self.losses, self.logs, self.counts, strict=True):
            terms = logs + tilt * (loss.losses - loss.losses[0])
            largest = float(np.max(terms))
            weights = np.exp(terms - largest)
            total = float(np.sum(weights))
            masses = np.zeros(-(-weights.size // bins) * bins)
            masses[: weights.size] = weights / total
            masses = masses.reshape(-1, bins).sum(axis=0)
            growth = math.exp(min(count * unit * math.sqrt(bins), 700.0))
            error += count * (unit * _check.norm(masses) * growth + 4.0 * UNIT)
            product = product * _power(np.fft.rfft(masses), count)
            spread = tilt * self.spacing * loss.losses.size + 800.0  # of the exponents; each is rounded in proportion
            log_scale += count * (largest + math.log(total) + 4.0 * UNIT * spread)
        found = np.roll(np.fft.irfft(product, bins), -(first % bins))
        error += unit * _check.norm(found)
        above = self.top - self.spacing * (first + np.arange(float(bins))) - epsilon
        inside = above > 0.0
        above, found = above[inside], np.maximum(found[inside], 0.0)
        weights = -np.expm1(-above) * np.exp(-tilt * above)
        excess = float(np.sum(weights * found)) * (1.0 + sum_rounding(bins))
        excess += error * _check.norm(weights) + outside / (1.0 + tilt) + TINY
        exponent = log_scale + tilt * (self.top - epsilon) * (1.0 + 4.0 * UNIT) + math.log(excess)
        return math.exp(min(exponent, 1.0))


def _thinned(loss: CellLoss) -> CellLoss:
    """The first and the last atom, and every stride-th between them with the mass of its neighbours."""
    stride = max(loss.losses.size // _ENOUGH_ATOMS, 1)
    losses, masses = (np.concatenate([x[:1], x[1:-1:stride], x[-1:]]) for x in (loss.losses, loss.masses))
    masses[1:-1] *= stride
    masses[-1] -= loss.infinite  # what was cut off on the right, as much as on the left
    masses[masses < 1e-250] = 0.0
    return CellLoss(losses, masses, loss.infinite)


def _bins(least: float) -> int:
    """The next power of two, or three quarters of it if that is enough."""
    power = 1 << max(math.ceil(math.log2(least)), 4)
    return power * 3 // 4 if least <= power * 3 // 4 else power


def _power(values: npt.NDArray[np.complex128], count: int) -> npt.NDArray[np.complex128]:
    """The count-th power by repeated squaring, with an error of 3 units per factor."""
    result = np.ones_like(values)
    while count:
        if count & 1:
            result = result * values
        count >>= 1
        if count:
            values = values * values
    return result
