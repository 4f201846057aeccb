"""Exact draws of quantiles from a histogram, by the exponential mechanism; and noisy counts around the quantiles found.

Every record gets a secret uniform place inside its bin, which splits ties at random. For each of several probabilities
p, a cut between records is then drawn at random: a cut with g of the n records below it has the weight

    exp(-rate |g - p n| / span),        span = 2 max(p, 1 - p), or 1 for p = 0 and p = 1.

The middle probability goes first, on all records. Its cut splits the records in two, and the other probabilities
search in their own part, with p relative to those already found: the part between cuts for p' < p'' takes
(p - p')/(p'' - p'). So every record takes part in one search per level, and m probabilities need m.bit_length() levels.
Around each cut there are probes at doubling distances; noise is added to the counts between neighbouring probes. Each
of several histograms has its own searches.

Guarantee: one record added to a histogram, or removed, costs a pure epsilon of levels * rate + 1/scale; k such changes,
in one histogram or in several, cost k times that.

1. *One search.* With one record more at v, g - p n changes by 1 - p for cuts above v, by -p for others. So each
   |g - p n| changes by at most max(p, 1 - p). For p = 0 it is g, which changes by 0 or 1, and likewise for p = 1. The
   logarithms of the weights thus change by values in a range of length rate, so that of a probability changes by at
   most rate. Weights are raised to a negligible common floor, which makes no change of a logarithm larger.
2. *Levels.* Parts of a level are disjoint, and given earlier cuts a record is in one of them. Its part costs rate;
   the others see the same records. Adaptive composition adds these costs up.
3. *Places.* They are drawn for each record independently. Given all places the loss is bounded as above, hence also
   after averaging over them. Knowing only the sizes of the bins changes nothing.
4. *Counts.* Probes follow from the cuts. A record is in one count; discrete Laplace noise is drawn exactly.
5. *Arithmetic.* Weights are whole numbers with a relative error below 2^-120, and a cut is picked by 128 random bits
   more than the sum of weights has. Both change a probability by less than 2^-100, relative; the law adds that.

Source: mcsherry2007mechanism and smith2011privacy, for one quantile; kaplan2022differentially, for splitting.
Deviates: (1) whole-number weights and places inside bins, in place of real numbers; (2) ties are split at random, since
    splitting by values would give all ties of a cut to one side; (3) add/remove, where n is not public.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from matrixdp.secure import discrete
from matrixdp.secure.entropy import Key, Words

Places = npt.NDArray[np.int64]

MOST_BINS = 1 << 20
"""The most bins: a place inside a bin has 32 bits, and bin and place together must be exact as a float."""

FRACTION_BITS = 32
_WEIGHT_BITS, _FLOOR_BITS, _SPARE_BITS = 256, 96, 128
_DIGITS = Context(prec=90)

Fresh = Callable[[int], Words]
"""Returns this many new random words."""


def prepared(
    counts: npt.NDArray[np.float64],
    probabilities: Sequence[float],
    rate: float,
    scale: float,
    rng: np.random.Generator | None,
) -> Callable[[], npt.NDArray[np.float64]]:
    """Does everything that can fail, and returns a function that draws: the cuts, in bins, and then noisy counts.

    Args:
        counts: the histogram, or one in each row; the results of the rows follow one another. Counts below 0 are taken
            as 0, and others are floored, as `steps_changed` counts them.
        probabilities: increasing, between 0 and 1.
        rate: the pure epsilon of each level, above 0.
        scale: the scale of the noise on the counts.
        rng: a numpy Generator, for reproducible studies only; by default secure entropy.
    """
    sizes = np.floor(np.maximum(counts, 0.0)).astype(np.int64)
    laplace = discrete.Sampler(1.0, scale, exact=True)
    discrete.add_noise(np.zeros(1, dtype=np.int64), 1.0, laplace)  # compiles its kernels, before anything is spent
    fresh, key = (_secret(), Key()) if rng is None else (_seeded(rng), Key.from_bytes(rng.bytes(32)))
    rows = [(row, places_of(row, fresh)) for row in np.atleast_2d(sizes)]  # takes the most memory

    def draw() -> npt.NDArray[np.float64]:
        found, counted = list[list[int]](), []
        for row, places in rows:
            cuts = search(places, len(row), [Fraction(p) for p in probabilities], Fraction(rate), fresh)
            below = np.append(0, np.cumsum(row))
            found.append(cuts)
            counted.append(np.diff(below[probes([cut >> FRACTION_BITS for cut in cuts], len(row))]))
        noisy = discrete.add_noise(np.concatenate(counted), 1.0, laplace, key).astype(np.float64)
        between = np.split(noisy, np.cumsum([len(part) for part in counted])[:-1])
        parts = zip(found, between, strict=True)
        return np.concatenate(
            [part for cuts, counts in parts for part in (np.array(cuts) / 2.0**FRACTION_BITS, counts)]
        )

    return draw


def probes(bins_found: Sequence[int], bins: int) -> Places:
    """The edges between which records are counted: those of the bins found, and others at growing distances.

    Distances double, and grow faster from eight quantiles on.
    """
    edges = {0, bins}
    for found in bins_found:
        edges.update(probes_of(found, bins, len(bins_found)))
    return np.array(sorted(edges), dtype=np.int64)


def probes_of(found: int, bins: int, quantiles: int) -> list[int]:
    """The edges around one bin found."""
    exponents = range(0, bins.bit_length() + 1, max(1, quantiles.bit_length() - 2))
    around = [edge for k in exponents for edge in (found + 1 - (1 << k), found + (1 << k))]
    return [edge for edge in around if 0 <= edge <= bins]


def places_of(sizes: Places, fresh: Fresh) -> Places:
    """A place for each record of a histogram, sorted: the bin times 2^32, plus a random place inside it."""
    places = np.repeat(np.arange(len(sizes), dtype=np.int64) << FRACTION_BITS, sizes)
    places += (fresh(len(places)) >> np.uint64(64 - FRACTION_BITS)).astype(np.int64)
    places.sort()
    return places


def search(places: Places, bins: int, probabilities: Sequence[Fraction], rate: Fraction, fresh: Fresh) -> list[int]:
    """A cut for each probability."""
    cuts = [0] * len(probabilities)

    def level(first: int, last: int, low: int, high: int, p_low: Fraction, p_high: Fraction) -> None:
        """Draws the cuts of the probabilities from first to last - 1, which are between low and high."""
        if first >= last:
            return
        middle = (first + last) // 2
        p = probabilities[middle]
        inside = places[np.searchsorted(places, low) : np.searchsorted(places, high)]
        cut = _picked(inside, low, high, (p - p_low) / (p_high - p_low), rate, fresh) if high > low else low
        cuts[middle] = cut
        level(first, middle, low, cut, p_low, p)
        level(middle + 1, last, cut, high, p, p_high)

    level(0, len(probabilities), 0, bins << FRACTION_BITS, Fraction(0), Fraction(1))
    return cuts


def _picked(places: Places, low: int, high: int, p: Fraction, rate: Fraction, fresh: Fresh) -> int:
    """A random cut from low to high - 1."""
    edges, weights = gaps(places, low, high, p, rate)
    sizes = (weight * (end - start) for weight, (start, end) in zip(weights, pairwise(edges), strict=True))
    sums = list(accumulate(sizes, initial=0))
    found = _below(sums[-1], fresh)
    gap = bisect_right(sums, found) - 1
    return edges[gap] + (found - sums[gap]) // weights[gap]


def gaps(places: Places, low: int, high: int, p: Fraction, rate: Fraction) -> tuple[list[int], list[int]]:
    """Cuts grouped by weight: each cut from edges[i] to edges[i + 1] - 1 has the weight weights[i].

    Cuts with equally many places below them have the same weight.
    """
    n, target = len(places), p * len(places)
    slope = rate / (2 * max(p, 1 - p) if 0 < p < 1 else 1)
    reach = math.ceil(_FLOOR_BITS * math.log(2) / slope) + 2  # beyond, weights would be below the floor
    first, last = max(math.ceil(target) - reach, 0), min(math.floor(target) + reach, n)
    near = np.concatenate([[low], places + 1, [high]])[first : last + 2].tolist()  # where 0, 1, ..., n places are below
    edges = [low, *near, high]
    floor = 1 << (_WEIGHT_BITS - _FLOOR_BITS)
    return edges, [floor, *(max(weight, floor) for weight in _weights(first, last, target, slope)), floor]


def _weights(first: int, last: int, target: Fraction, slope: Fraction) -> list[int]:
    """2^256 exp(-slope |g - target|) for g = first to last, as whole numbers."""
    ratio = _exponential(slope)
    down, up = math.floor(target), math.floor(target) + 1
    below, above = [_exponential(slope * (target - down))], [_exponential(slope * (up - target))]
    for _ in range(down - first):
        below.append(below[-1] * ratio >> _WEIGHT_BITS)
    for _ in range(last - up):
        above.append(above[-1] * ratio >> _WEIGHT_BITS)
    return below[: down - first + 1][::-1] + above[: max(last - up + 1, 0)]


def _exponential(x: Fraction) -> int:
    """2^256 e^-x as a whole number, with an error of e^-x below 10^-76."""
    power = _DIGITS.exp(_DIGITS.divide(Decimal(-x.numerator), Decimal(x.denominator)))
    return int(_DIGITS.multiply(power, Decimal(1 << _WEIGHT_BITS)))


def _below(total: int, fresh: Fresh) -> int:
    """A random whole number below the total, uniform up to a relative error of 2^-128."""
    words = -(-(total.bit_length() + _SPARE_BITS) // 64)
    return int.from_bytes(fresh(words).tobytes(), "little") * total >> (64 * words)


def _secret() -> Fresh:
    stream, block = Key().stream(), 0

    def fresh(count: int) -> Words:
        nonlocal block
        words = np.empty(count, dtype=np.uint64)
        stream.fill(words, block)
        block += 1
        return words

    return fresh


def _seeded(rng: np.random.Generator) -> Fresh:
    return lambda count: rng.integers(0, 1 << 64, count, dtype=np.uint64)
