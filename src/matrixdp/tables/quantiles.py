"""Quantiles, all at once, from one noisy histogram on a public grid of bins.

    out = release_quantiles(ages, [0.25, 0.5, 0.75], edges=range(0, 101), budget=Budget(1.0, 1e-6))
    out.estimate, out.low, out.high, out.certificate

Quantiles are read off running counts, so the noise is chosen for these: correlated noise with the least error of all
prefix sums, or independent noise where few bins make that better. All quantiles, medians and ranks that are asked for
later come from the same release and cost nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE, checked
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.mechanisms.matrix_mechanism import workload_error
from matrixdp.pipeline import Release, Spends, prepare
from matrixdp.postprocess import nondecreasing
from matrixdp.privacy.certificate import Certificate
from matrixdp.queries.histograms import histogram
from matrixdp.sensitivity import L1, Counts, Sensitivity

# The most bins: the best noise for prefix sums takes seconds to find for so many.
MOST_BINS = 512
# What is compared, and for which options: noise for prefix sums, and independent noise.
CANDIDATES: dict[str, dict[str, Any]] = {
    "matrix-mechanism": {"workload": "prefix"},
    "analytic": {},
    "laplace": {},
    "discrete": {},
}


@dataclass(frozen=True, eq=False)
class Quantiles:
    """Quantiles of the records, computed from one release.

    Attributes:
        probabilities: which quantiles.
        estimate: their values, inside the intervals.
        low: the lower ends of the intervals, on edges of the grid.
        high: the upper ends.
        level: the probability with which each interval covers the quantile of the records; at least.
        release: the noisy histogram.
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
    ledger: Spends | None = None,
    note: str = "",
    rng: np.random.Generator | None = None,
) -> Quantiles:
    """Quantiles of one number per record.

    Args:
        values: one finite number per record; those outside the edges count as the nearest edge.
        probabilities: between 0 and 1; 0.5 is the median.
        edges: the borders of the bins, increasing and public; the answers are as fine as the bins.
        budget: the guarantee to keep.
        mechanism: a mechanism's name, or a noise law for the histogram; "auto" takes the least error of prefix sums.
        adjacency: which data sets are neighbours.
        level: the coverage of each interval.
        ledger: charged before any noise is drawn.
        note: what the ledger remembers of this release; never data.
        rng: a numpy Generator, for reproducible studies; entropy from the operating system by default.

    Guarantee: `result.certificate`.
    """
    borders, wanted = _edges(edges), probabilities_in(probabilities)
    _check.probability("level", level)
    inside = np.clip(_check.finite("values", values, ndim=1), borders[0], borders[-1])
    answer = histogram(inside[:, None], edges=borders, adjacency=checked(adjacency))
    law = prefix_noise(len(answer.value), answer.sensitivity, budget) if mechanism == "auto" else mechanism
    released = prepare(*answer, budget, law, query=answer.query, rng=rng).release(ledger, note)
    return quantiles(released, borders, wanted, level)


def prefix_noise(bins: int, sensitivity: Sensitivity, budget: Budget) -> NoiseLaw:
    """The noise on a histogram with the least expected error of its prefix sums.

    Args:
        bins: of the histogram.
        sensitivity: what a neighbour can change in it. For `L1(k)`, of k records, noise for prefix sums is k times that
            of one record: the worst is k in one bin, as Gaussian mu is convex.
        budget: the guarantee to keep.
    """
    if not _check.count("bins", bins) <= MOST_BINS:
        raise InvalidInput(f"at most {MOST_BINS} bins have noise for prefix sums, got {bins}; use wider bins")
    found: list[tuple[float, NoiseLaw]] = []
    for name, options in CANDIDATES.items():
        several = name == "matrix-mechanism" and isinstance(sensitivity, L1) and sensitivity.bound is None
        alone = Counts(1, adjacency=sensitivity.adjacency) if several else sensitivity
        try:
            law = calibrate(name, shape=(bins,), sensitivity=alone, budget=budget, **options)
        except NotApplicable:
            continue
        if several:
            assert isinstance(sensitivity, L1)
            assert isinstance(law, Gaussian)
            law = law.scaled(sensitivity.radius * HEADROOM)
        found.append((workload_error("prefix", law), law))
    return min(found, key=lambda pair: pair[0])[1]


def quantiles(release: Release, edges: Any, probabilities: Any, level: float = 0.95) -> Quantiles:
    """Quantiles from a released histogram of one ordered column; nothing more is spent.

    Let C_j be the number of records below edge j, n the number of records, and G_j = C_j - p n: a linear function of
    the histogram. The p-quantile lies in a bin with G <= 0 at its left edge and G >= 0 at its right one. The interval
    joins all bins for which neither is rejected, each at half of 1 - level. The bin of the quantile is among them with
    at least the level, whatever the data and the noise: margins of linear functions are exact. The estimate is where
    the noisy running counts, made nondecreasing, reach p times the last one, moved into the interval.

    Args:
        release: of the counts in the bins.
        edges: the borders of the bins.
        probabilities: which quantiles.
        level: the coverage of each interval.
    """
    borders, wanted = _edges(edges), probabilities_in(probabilities)
    counts = np.asarray(release.value, dtype=np.float64).reshape(-1)
    if len(counts) != len(borders) - 1:
        raise InvalidInput(f"edges must be one more than the {len(counts)} bins that were released, got {len(borders)}")
    running = np.maximum(nondecreasing(np.append(0.0, np.cumsum(counts))), 0.0)
    below = np.tril(np.ones((len(counts) - 1, len(counts))))  # of every inner edge
    low, high = np.empty(len(wanted)), np.empty(len(wanted))
    for index, p in enumerate(wanted.tolist()):
        left_ok, right_ok = np.ones((2, len(counts)), dtype=bool)
        if len(below):
            ends = release.linear(below - p).interval(level)
            left_ok[1:], right_ok[:-1] = ends.low <= 0, ends.high >= 0
        bins = np.flatnonzero(left_ok & right_ok)
        if not bins.size:  # only where the noise is beyond its margin somewhere
            bins = np.arange(len(counts))
        low[index], high[index] = borders[bins[0]], borders[bins[-1] + 1]
    reached = running[-1] * wanted
    estimate = np.interp(reached, running + 1e-9 * np.arange(len(running)), borders) if running[-1] > 0 else low
    return Quantiles(wanted, np.clip(estimate, low, high), low, high, float(level), release)


def _edges(edges: Any) -> Array:
    borders = _check.finite("edges", list(edges) if isinstance(edges, range) else edges, ndim=1)
    if len(borders) < 2 or not np.all(np.diff(borders) > 0):
        raise InvalidInput(f"edges must be two or more increasing numbers, got {len(borders)}")
    return borders


def probabilities_in(probabilities: Any) -> Array:
    """Which quantiles are asked for, if they are."""
    wanted = _check.finite("probabilities", probabilities, ndim=1)
    if not np.all((wanted >= 0) & (wanted <= 1)):
        raise InvalidInput("probabilities must lie between 0 and 1")
    return wanted
