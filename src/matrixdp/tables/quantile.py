"""Quantiles, all at once, of records in the bins of a public grid.

    out = release_quantiles(ages, [0.25, 0.5, 0.75], edges=range(0, 101), budget=Budget(1.0, 1e-6))
    out.estimate, out.low, out.high, out.certificate

Most of the budget goes to a search: the exponential mechanism picks values near the right ranks
(`matrixdp.secure.quantile_search`). Its error in ranks hardly depends on the number of bins, so bins may be fine. The
rest goes to noisy counts around the values found, from which the intervals are computed.

With a mechanism, or a part of a plan, the histogram gets additive noise instead, and quantiles are computed from
running counts. That is better only for hundreds of quantiles, with some hundred bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, checked
from matrixdp.budget import Allotment, Budget, checked_budget
from matrixdp.distributions import NoiseLaw, Product, QuantileSearch
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Release, Spends, prepare
from matrixdp.postprocess import nondecreasing
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.laws import steps_changed
from matrixdp.queries.histograms import histogram
from matrixdp.secure.quantile_search import MOST_BINS as LARGEST_GRID
from matrixdp.secure.quantile_search import probes, probes_of
from matrixdp.sensitivity import Sensitivity

INTERVALS = 0.1
"""The default share of epsilon for the counts from which intervals are computed."""

# The most edges of a histogram with additive noise that are tested for intervals.
TESTED = 256


@dataclass(frozen=True, eq=False)
class Quantiles:
    """Quantiles of the records, computed from one release.

    Attributes:
        probabilities: which quantiles.
        estimate: their values, inside the intervals.
        low: the lower ends of the intervals, on edges of the grid.
        high: the upper ends.
        level: the least probability with which each interval covers the quantile of the records.
        release: the result of the search, or the noisy histogram.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import release_quantiles
        >>> ages = np.arange(1000) % 100
        >>> median = release_quantiles(ages, [0.5], edges=range(101), budget=Budget(1.0, 1e-6))
        >>> bool(median.low[0] <= median.estimate[0] <= median.high[0])
        True
    """

    probabilities: Array
    estimate: Array
    low: Array
    high: Array
    level: float
    release: Release

    @property
    def certificate(self) -> Certificate:
        """What the release guarantees."""
        return self.release.certificate


def release_quantiles(
    values: Any,
    probabilities: Any,
    *,
    edges: Any,
    budget: Budget,
    mechanism: str | NoiseLaw = "auto",
    adjacency: str = ADD_REMOVE,
    level: float = 0.95,
    intervals: float = INTERVALS,
    ledger: Spends | None = None,
    note: str = "",
    rng: np.random.Generator | None = None,
) -> Quantiles:
    """Quantiles of one number per record.

    Args:
        values: one finite number per record; those outside the edges are clipped to the nearest edge.
        probabilities: between 0 and 1; 0.5 is the median.
        edges: the borders of the bins, increasing and public; the answers are as fine as the bins.
        budget: the guarantee to keep.
        mechanism: "auto" for the search; a mechanism's name or a noise law for a noisy histogram.
        adjacency: which data sets are neighbours.
        level: the coverage of each interval.
        intervals: see `search_law`.
        ledger: charged before any noise is drawn.
        note: a note for the ledger; never data.
        rng: a numpy Generator, for reproducible studies; entropy from the operating system by default.

    Guarantee: `result.certificate`.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import release_quantiles
        >>> ages, quartiles = np.arange(1000) % 100, [0.25, 0.5, 0.75]
        >>> release_quantiles(ages, quartiles, edges=range(101), budget=Budget(1.0, 1e-6)).estimate.shape
        (3,)
    """
    borders, wanted = _edges(edges), probabilities_in(probabilities)
    _check.probability("level", level)
    if not len(borders) - 1 <= LARGEST_GRID:
        raise InvalidInput(f"edges must be those of at most {LARGEST_GRID} bins, got {len(borders)}")
    inside = np.clip(_check.finite("values", values, ndim=1), borders[0], borders[-1])
    answer = histogram(inside[:, None], edges=borders, adjacency=checked(adjacency))
    searches = mechanism == "auto" and not isinstance(budget, Allotment)
    law = search_law(answer.shape, wanted, answer.sensitivity, budget, intervals) if searches else mechanism
    released = prepare(*answer, budget, law, query=answer.query, rng=rng).release(ledger, note)
    return quantiles(released, borders, wanted, level)


def search_law(
    shape: Shape, probabilities: Any, sensitivity: Sensitivity, budget: Budget, intervals: float = INTERVALS
) -> QuantileSearch:
    """The search for these quantiles that uses all of epsilon; it keeps delta = 0.

    Args:
        shape: of the histogram, or of several histograms, one per row.
        probabilities: which quantiles.
        sensitivity: what a neighbour can change in it.
        budget: the guarantee to keep.
        intervals: the share of epsilon for the counts from which intervals are computed. The error of the quantiles, in
            ranks, is proportional to 1/(1 - intervals), the width of the intervals to 1/intervals.
    """
    checked_budget(budget)
    share = _check.probability("intervals", intervals)
    groups, _ = steps_changed(sensitivity, shape, 1.0)
    epsilon = budget.epsilon / sum(steps * entries for steps, entries in groups) * (1 - 1e-11)
    wanted = tuple(np.unique(probabilities_in(probabilities)).tolist())
    rate, scale = (1 - share) * epsilon / len(wanted).bit_length(), 1 / (share * epsilon)
    return QuantileSearch(shape, wanted, rate, scale, source="exponential mechanism")


def found_by(release: Release) -> Array:
    """The quantiles that a search found in several histograms, in bins: one row per histogram."""
    law, left, found = release.noise, np.asarray(release.value), []
    assert isinstance(law, QuantileSearch)
    for _ in range(law.shape[0]):
        found.append(left[: len(law.probabilities)])
        left = left[len(found[-1]) + len(probes(found[-1].astype(np.int64).tolist(), law.shape[1])) - 1 :]
    return np.array(found)


def quantiles(release: Release, edges: Any, probabilities: Any, level: float = 0.95) -> Quantiles:
    """Quantiles from a release of one ordered column; nothing more is spent.

    Let C_j be the number of records below edge j, n the number of records, and G_j = C_j - p n: a linear function of
    the counts between edges. The p-quantile is in a bin with G <= 0 at its left edge and G >= 0 at its right one. The
    interval joins all bins for which neither is rejected, each tested at half of 1 - level. It contains the bin of the
    quantile with at least the level, whatever the data and the noise, since margins of linear functions are exact. That
    holds for any bins whose edges do not depend on the noise of the counts, such as those between the probes of a
    search.

    The estimate is what the search found; otherwise it is where the noisy running counts, made nondecreasing, reach p
    times the last one. An interval that does not contain the estimate is widened: the search is more precise than the
    counts.

    Args:
        release: of the counts in the bins, or of a search.
        edges: the borders of the bins.
        probabilities: which quantiles.
        level: the coverage of each interval.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget, release
        >>> from matrixdp.queries import histogram
        >>> from matrixdp.tables import quantiles
        >>> ages, edges = np.arange(1000) % 100, np.arange(101.0)
        >>> out = release(*histogram(ages, edges=edges), Budget(1.0, 1e-6))
        >>> quantiles(out, edges, [0.25, 0.75]).estimate.shape
        (2,)
    """
    borders, wanted = _edges(edges), probabilities_in(probabilities)
    _check.probability("level", level)
    (bins,) = release.certificate.shape
    if bins != len(borders) - 1:
        raise InvalidInput(f"edges must be one more than the {bins} bins that were released, got {len(borders)}")
    given, law, found, counted = release, release.noise, dict[float, float](), np.arange(bins + 1)
    if isinstance(law, QuantileSearch):
        cuts = np.asarray(release.value[: len(law.probabilities)])
        counted = probes(cuts.astype(np.int64).tolist(), bins)
        noise = Product((len(counted) - 1,), 1.0, 1.0, law.scale)
        release = replace(release, value=release.value[len(cuts) :], noise=noise, on_grid=True)
        found = dict(zip(law.probabilities, cuts.tolist(), strict=True))
    counts = np.asarray(release.value, dtype=np.float64).reshape(-1)
    running = np.maximum(nondecreasing(np.append(0.0, np.cumsum(counts))), 0.0)
    reached = running + 1e-9 * np.arange(len(running))
    estimate, low, high = np.empty((3, len(wanted)))
    for index, p in enumerate(wanted.tolist()):
        if p in found:
            place = found[p]
            near = probes_of(int(place), bins, len(found))
            tested = np.searchsorted(counted, sorted(set(near) - {0, bins}))
        else:
            place = float(np.interp(p * reached[-1], reached, counted))
            tested = np.unique(np.linspace(0, len(counts), min(TESTED, len(counts)) + 1).astype(int))[1:-1]
        first, last = _not_rejected(release, tested, p, level)
        low[index] = borders[min(counted[first], math.floor(place))]
        high[index] = borders[max(counted[last], math.ceil(place))]
        estimate[index] = np.interp(place, np.arange(bins + 1), borders)
    return Quantiles(wanted, estimate, low, high, float(level), given)


def _not_rejected(release: Release, tested: Any, p: float, level: float) -> tuple[int, int]:
    """The first and last edge of the bins between tested edges that may hold the p-quantile."""
    cells = np.size(release.value)
    edges = np.concatenate([[0], tested, [cells]])
    left_ok, right_ok = np.ones((2, len(edges) - 1), dtype=bool)
    if len(tested):
        ends = release.linear((np.arange(cells) < tested[:, None]) - p).interval(level)
        left_ok[1:], right_ok[:-1] = ends.low <= 0, ends.high >= 0
    bins = np.flatnonzero(left_ok & right_ok)
    if not bins.size:  # only if the noise exceeds its margin somewhere
        return 0, cells
    return int(edges[bins[0]]), int(edges[bins[-1] + 1])


def grid(low: float, high: float, bins: Any) -> Array:
    """The borders of bins between two bounds.

    Args:
        low: the lower bound.
        high: the upper one.
        bins: a number of bins of equal width; borders; or "whole", a bin around each whole number.
    """
    if isinstance(bins, str):
        _check.choice("bins", bins, ("whole",))
        if not (low.is_integer() and high.is_integer()):
            raise InvalidInput(f"the bounds must be whole for bins of whole numbers, got {low!r} and {high!r}")
        if not high - low < LARGEST_GRID:
            raise InvalidInput(
                f"bins must be at most {LARGEST_GRID}, and there are more whole numbers from {low:g} to {high:g}"
            )
        return np.arange(low, high + 2) - 0.5
    if isinstance(bins, int):
        if not _check.count("bins", bins) <= LARGEST_GRID:
            raise InvalidInput(f"bins must be at most {LARGEST_GRID}, got {bins}")
        return _edges(np.linspace(low, high, bins + 1))
    borders = _edges(bins)
    if not (borders[0] == low and borders[-1] == high):
        raise InvalidInput(f"bins must begin with the lower bound ({low:g}) and end with the upper one ({high:g})")
    return borders


def in_bins(values: Array, edges: Array) -> npt.NDArray[np.int64]:
    """How many values each bin has; a bin includes its lower border, the last one both."""
    places = np.searchsorted(edges, values, side="right") - 1
    return np.bincount(np.clip(places, 0, len(edges) - 2), minlength=len(edges) - 1).astype(np.int64)


def _edges(edges: Any) -> Array:
    borders = _check.finite("edges", list(edges) if isinstance(edges, range) else edges, ndim=1)
    if len(borders) < 2 or not np.all(np.diff(borders) > 0):
        raise InvalidInput(f"edges must be two or more increasing numbers, got {len(borders)}")
    return borders


def probabilities_in(probabilities: Any) -> Array:
    """The probabilities as an array; raises InvalidInput unless all are between 0 and 1."""
    wanted = _check.finite("probabilities", probabilities, ndim=1)
    if not np.all((wanted >= 0) & (wanted <= 1)):
        raise InvalidInput(
            f"probabilities must lie between 0 and 1, got {float(wanted[(wanted < 0) | (wanted > 1)][0]):g}"
        )
    return wanted
