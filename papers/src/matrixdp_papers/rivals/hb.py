"""H_b: a histogram from noisy counts at every level of a tree with a well-chosen branching factor.

The cells are the leaves. A node b times as wide (in two dimensions b x b as large) holds the count of its children, up
to the level below the root; the root itself is not counted. Every level gets the same noise, and the best consistent
estimate of the leaves is computed from all of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.budget import Budget
from matrixdp.distributions import generator
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.privacy import gaussian
from matrixdp_papers.rivals.counts import moves, whole_counts

NOISES = ("laplace", "gaussian")


def hb(
    counts: Any,
    epsilon: float,
    *,
    delta: float | None = None,
    noise: str = "laplace",
    adjacency: str = "add/remove",
    branching: int | None = None,
    rng: np.random.Generator | None = None,
) -> Array:
    """A private histogram for sums over ranges (in two dimensions, over rectangles).

    Args:
        counts: the histogram, with one or two axes.
        epsilon: the guarantee to keep.
        delta: for Gaussian noise.
        noise: "laplace", or "gaussian" for a comparison at an equal (epsilon, delta).
        adjacency: "add/remove" one record, or "replace" one.
        branching: children of a node along each axis; `best_branching` by default.
        rng: a numpy Generator, for reproducible studies.

    Returns:
        The leaves, possibly negative. The estimate of any other node, or of any range, is the sum of its leaves.

    Guarantee: "laplace" is pure epsilon-DP. A record is in one node of each of the h levels, so adding or removing it
        changes all counts together by h in l1 norm. The noise has scale h/epsilon; replacing it doubles both.
        "gaussian" is (epsilon, delta)-DP with equality: the l2 norm is sqrt(h), or sqrt(2h), and the noise has standard
        deviation sqrt(h)/mu, or sqrt(2h)/mu, with mu = mu(epsilon, delta). Inference is post-processing.

    Source: qardaji2013understanding, H_b; hay2010boosting for the inference.
    Deviates: (1) Gaussian noise, for which the best branching factor is smaller; (2) sides that are not a power of b:
        the last nodes of a level are smaller, and inference weights every node by its variance.
    """
    true_counts = whole_counts(counts)
    b = best_branching(true_counts.shape, noise) if branching is None else _checked_branching(branching)
    h = height(true_counts.shape, b)
    changed, randomness = moves(adjacency), generator(rng)

    levels = [true_counts]
    while len(levels) < h:
        levels.append(_aggregate(levels[-1], b))
    if _check.choice("noise", noise, NOISES) == "laplace":
        if delta is not None:
            raise InvalidInput(f"delta={delta!r} does not go with Laplace noise, which is pure; set noise='gaussian'")
        scale = _check.positive("noise scale", changed * h / _check.positive("epsilon", epsilon) * HEADROOM)
        noisy = [level + randomness.laplace(scale=scale, size=level.shape) for level in levels]
    else:
        if delta is None:
            raise InvalidInput("delta is missing; Gaussian noise needs one, such as 1e-6")
        budget = Budget(epsilon, delta)
        std = math.sqrt(changed * h) / float(gaussian.mu(budget.epsilon, budget.delta)) * HEADROOM
        noisy = [level + std * randomness.standard_normal(level.shape) for level in levels]
    return consistent(noisy, b)


def consistent(levels: list[Array], branching: int) -> Array:
    """The least-squares estimate of the leaves from noisy counts of equal variance, the leaves' own level first.

    Upwards, a node's own count and the sum of its children's estimates are averaged, weighted by inverse variances;
    subtrees are independent, so this is the best estimate from below. Downwards, the difference between a parent's best
    estimate and the sum of its children is shared among them in proportion to their variances.

    Source: hay2010boosting, the closed form for hierarchical counts.
    Deviates: (1) weights from the variances of the nodes themselves, which in a full tree are the published ones.
    """
    estimates, variances = [levels[0]], [np.ones_like(levels[0])]
    sums, spreads = [], []
    for level in levels[1:]:
        sums.append(_aggregate(estimates[-1], branching))
        spreads.append(_aggregate(variances[-1], branching))
        estimates.append((level * spreads[-1] + sums[-1]) / (1 + spreads[-1]))
        variances.append(spreads[-1] / (1 + spreads[-1]))
    best = estimates.pop()
    for estimate, variance in zip(estimates[::-1], variances[-2::-1], strict=True):
        share = _spread((best - sums.pop()) / spreads.pop(), branching, estimate.shape)
        best = estimate + variance * share
    return best


def best_branching(shape: Shape, noise: str = "laplace") -> int:
    """The branching factor with the least `range_variance` among the least factors of each height.

    With Laplace noise in two dimensions that is a single level, plain noise on the cells, up to grids of some 300 cells
    per side. The rule does not count what inference gains: at 89 x 89 that leaves a tree with b = 10 at 0.41 of its
    `range_variance`, which is 0.79 of plain noise.

    Source: qardaji2013understanding, equation 3 and the search over branching factors.
    """
    side = max(_check.shape(shape))
    least = {_least_branching(side, h) for h in range(1, max(side - 1, 1).bit_length() + 1)}
    return min(sorted(least), key=lambda b: range_variance(shape, b, noise))


def range_variance(shape: Shape, branching: int, noise: str = "laplace") -> float:
    """The mean variance of all ranges (rectangles), each added up from the fewest nodes, before inference.

    In units of the variance that one count has when it is released alone with the whole budget. A level of h has h^2
    times that with Laplace noise, h times with Gaussian noise. The rest is the mean number of nodes: those inside a
    random range, less the children of such nodes. A range has its ends in n(n+1)/2 places, and contains a node [s, e)
    in (s+1)(n-e+1) of them; for rectangles the axes multiply.

    In one dimension, with n = b^h, that number tends to (b-1)h - 2(b+1)/3, and the variance to the published
    (b-1)h^3 - 2(b+1)h^2/3: a range whose ends part at the top has (b-2)/3 whole nodes there on average, and (b-1)/2 for
    each end on each level below; it parts at the top with probability 1 - 1/b, and otherwise is a range of height h-1.

    Source: qardaji2013understanding, equation 3.
    Deviates: (1) the exact number on the tree itself, in one dimension or two.
    """
    sides, b = _check.shape(shape), _checked_branching(branching)
    h = height(sides, b)
    nodes = 0.0
    for width in (b**k for k in range(h)):
        inside = math.prod(_contained(side, width, 1) for side in sides)
        covered = math.prod(_contained(side, width * b, b) for side in sides) if width * b < b**h else 0.0
        nodes += inside - covered
    return nodes * h ** (2 if _check.choice("noise", noise, NOISES) == "laplace" else 1)


def height(shape: Shape, branching: int) -> int:
    """The number of levels below the root: the least h with b^h at least the longest side."""
    h = 1
    while branching**h < max(shape):
        h += 1
    return h


def _contained(side: int, width: int, parts: int) -> float:
    """The mean number of nodes of this width inside a random range, each counted as its number of parts."""
    start = np.arange(0, side, width, dtype=np.float64)
    end = np.minimum(start + width, side)
    children = np.ceil((end - start) / (width // parts))
    return float(np.sum((start + 1) * (side - end + 1) * children)) / (side * (side + 1) / 2)


def _least_branching(side: int, h: int) -> int:
    b: int = max(2, math.floor(float(side) ** (1 / h)) - 1)
    while b**h < side:
        b += 1
    return b


def _aggregate(level: Array, b: int) -> Array:
    """The sums over blocks of b along every axis; the last block may be smaller."""
    for axis in range(level.ndim):
        level = np.add.reduceat(level, np.arange(0, level.shape[axis], b), axis=axis)
    return level


def _spread(parents: Array, b: int, shape: Shape) -> Array:
    """Copies each parent's number to all its children."""
    for axis, side in enumerate(shape):
        parents = np.repeat(parents, b, axis=axis).take(range(side), axis=axis)
    return parents


def _checked_branching(branching: Any) -> int:
    if not _check.count("branching", branching) >= 2:
        raise InvalidInput(f"branching must be 2 or above, got {branching!r}")
    return int(branching)
