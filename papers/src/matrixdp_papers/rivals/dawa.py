"""DAWA: a private partition of a histogram into nearly uniform buckets, then counts of the buckets for a workload.

The first stage spends a share of epsilon on where the data are nearly uniform, the second the rest on the counts; a
bucket's count is spread evenly over its cells. In two dimensions the cells are taken along the Hilbert curve.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions import generator
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.mechanisms.matrix_mechanism import as_workload
from matrixdp.mechanisms.solvers.workloads import Workload
from matrixdp_papers.rivals.counts import moves, whole_counts
from matrixdp_papers.rivals.greedy import greedy_hierarchy
from matrixdp_papers.rivals.hilbert import hilbert_order

Indices = npt.NDArray[np.intp]

# Windows are processed in blocks of about this many entries.
_BLOCK = 2**22


def dawa(
    counts: Any,
    epsilon: float,
    *,
    workload: Any = None,
    ratio: float = 0.25,
    charge: float | None = None,
    adjacency: str = "add/remove",
    rng: np.random.Generator | None = None,
) -> Array:
    """A private histogram whose noise adapts to the data.

    Args:
        counts: the histogram, with one or two axes.
        epsilon: the guarantee to keep.
        workload: what the histogram is for: a Workload, a matrix with one row per query, or a name such as
            "all-ranges", as for the matrix mechanism; every cell by default.
        ratio: the share of epsilon that the partition gets.
        charge: the cost of a bucket in addition to its deviation; by default 1/epsilon_2, with epsilon_2 for the
            counts, which is the mean absolute noise of a count.
        adjacency: "add/remove" one record, or "replace" one.
        rng: a numpy Generator, for reproducible studies.

    Guarantee: pure epsilon-DP. The partition takes ratio * epsilon, see `private_partition`. Given it, a record is in
        one bucket, and the counts take the rest: of independent Laplace noise, or of weighted counts, see
        `greedy_hierarchy`. Spreading is post-processing. Replacing a record is removing one and adding one, so that
        each takes half of epsilon. The charge must not depend on the data.

    Note: the noise of the partition is of the size 4/(ratio epsilon), and every bucket has its own: the least cost is
        found among many small buckets that are low by chance, even in uniform data. A charge of about that size gives
        far larger buckets and suits smooth data; it hides peaks below that size.

    Source: li2014data.
    Deviates: (1) the noise of a bucket's cost follows its length; (2) the workload is taken to the buckets exactly, in
        two dimensions too.
    """
    true_counts = whole_counts(counts)
    if not true_counts.sum() * true_counts.size <= 2**52:
        raise InvalidInput("counts must hold at most 2^52 records times cells, or deviations are no longer exact")
    step = _check.positive("epsilon", epsilon) / moves(adjacency)
    first = _check.probability("ratio", ratio) * step
    second = step - first
    price = 1 / second if charge is None else _check.at_least_zero("charge", charge)
    scale = _check.positive("noise scale", HEADROOM / second)
    task = None if workload is None else as_workload(workload, true_counts.shape)
    randomness = generator(rng)

    order = hilbert_order(true_counts.shape) if true_counts.ndim == 2 else np.arange(true_counts.size)
    line = true_counts.ravel()[order]
    borders = private_partition(line, first, price, rng=randomness)
    sizes = np.diff(borders)
    totals = np.add.reduceat(line, borders[:-1])
    if task is None:
        noisy = totals + randomness.laplace(scale=scale, size=len(totals))
    else:
        noisy = greedy_hierarchy(_bucket_gram(task, order, borders)).estimate(totals, scale, randomness)
    cells = np.empty_like(line)
    cells[order] = np.repeat(noisy / sizes, sizes)
    return cells.reshape(true_counts.shape)


def private_partition(line: Array, epsilon: float, charge: float, *, rng: np.random.Generator | None = None) -> Indices:
    """The partition into buckets of 1, 2, 4, .. cells with the least noisy cost, as the borders 0 = b_0 < .. < b_k = n.

    A bucket costs its deviation, sum |x_i - mean|, plus the charge, plus Laplace noise.

    Guarantee: pure epsilon-DP when a record is added or removed. It changes one cell j by 1. A bucket with j and m
        cells changes its deviation by at most D_m = 2(1 - 1/m): the mean moves by 1/m, so the term of j moves by at
        most 1 - 1/m, and each of the m - 1 others by at most 1/m. Other buckets do not change. Every partition has one
        bucket with j. Fix a partition P, with b its bucket of m cells with j, and all noise but that of b. Partitions
        that share b with P have no other bucket with j, so how they compare with P is not changed. All others cost up
        to D_max more or less. So P costs least if the noise of b lies below a threshold, which moves by at most
        D_m + D_max. With noise of scale (D_m + D_max)/epsilon the probability of that changes by a factor of at most
        e^epsilon.

        Two shortcuts would be wrong. Single cells need noise, although their deviation is always 0: otherwise j would
        be a bucket by itself whenever all larger buckets with j are costly. A record changes each of these, and their
        losses add up to 1.3 epsilon with four cells, and to more with more cells. Nor may noisy costs be raised to the
        charge, although deviations are not negative: the threshold could fall below it and make P impossible, so that
        the proof would fail.

    Source: li2014data, private partition with intervals of power-of-two length.
    Deviates: (1) scale (D_m + D_max)/epsilon, at most the 2 D/epsilon with D = 2 for all buckets.
    """
    randomness = generator(rng)
    deviations = bucket_deviations(line)
    largest = _deviation_sensitivity(len(deviations) - 1)
    costs = []
    for k, deviation in enumerate(deviations):
        scale = (_deviation_sensitivity(k) + largest) / epsilon * HEADROOM
        costs.append(deviation + charge + randomness.laplace(scale=scale, size=len(deviation)))
    return least_cost_partition(costs)


def bucket_deviations(line: Array) -> list[Array]:
    """Entry k holds sum |x_i - mean| over the 2^k cells from each start; exact, as division by 2^k does not round."""
    deviations = []
    for length in (2**k for k in range(len(line).bit_length())):
        windows = np.lib.stride_tricks.sliding_window_view(line, length)
        rows = max(1, _BLOCK // length)
        blocks = (windows[start : start + rows] for start in range(0, len(windows), rows))
        deviations.append(np.concatenate([np.abs(b - b.mean(axis=1, keepdims=True)).sum(axis=1) for b in blocks]))
    return deviations


def least_cost_partition(costs: list[Array]) -> Indices:
    """The borders of the partition with the least sum of costs; costs[k][i] is that of the bucket [i, i + 2^k)."""
    n = len(costs[0])
    lengths = 2 ** np.arange(len(costs))
    ending = np.full((n + 1, len(costs)), np.inf)
    for k, cost in enumerate(costs):
        ending[lengths[k] :, k] = cost
    least = np.zeros(n + 1)
    before = np.zeros(n + 1, dtype=np.intp)
    for end in range(1, n + 1):
        starts = end - lengths[: end.bit_length()]
        totals = least[starts] + ending[end, : len(starts)]
        chosen = int(np.argmin(totals))
        least[end], before[end] = totals[chosen], starts[chosen]
    borders = [n]
    while borders[-1] > 0:
        borders.append(int(before[borders[-1]]))
    return np.array(borders[::-1], dtype=np.intp)


def _deviation_sensitivity(k: int) -> float:
    """The most that one record changes the deviation of 2^k cells."""
    return 2 * (1 - 2.0**-k)


def _bucket_gram(task: Workload, order: Indices, borders: Indices) -> Array:
    """The workload's Gram matrix on the buckets, for a count that is spread evenly over its cells."""
    gram = np.empty((len(borders) - 1, len(borders) - 1))
    sizes = np.diff(borders)
    for bucket, size in enumerate(sizes):
        cells = np.unravel_index(order[borders[bucket] : borders[bucket + 1]], task.shape)
        seen = np.zeros(task.cells)
        for term in task.terms:
            # Sums over the bucket of products of columns, the last axis by a matrix product.
            columns = np.ones((1, size))
            for factor, places in zip(term[:-1], cells[:-1], strict=True):
                columns = (columns[:, None, :] * factor[:, places]).reshape(-1, size)
            seen += (columns @ term[-1][:, cells[-1]].T).ravel()
        gram[bucket] = np.add.reduceat(seen[order], borders[:-1]) / sizes / size
    return (gram + gram.T) / 2
