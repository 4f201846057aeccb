"""Maps at the same true guarantee: matrixdp's mechanisms and the papers' rivals, with every free post-processing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from matrixdp import postprocess
from matrixdp._check import Array, Shape
from matrixdp.distributions import NoiseLaw
from matrixdp.mechanisms import calibrate
from matrixdp.privacy import gaussian
from matrixdp_papers.rivals.dawa import dawa
from matrixdp_papers.rivals.hb import best_branching, hb, height
from matrixdp_papers.studies.base import Mean, Progress, Table
from matrixdp_papers.studies.haar import denoise
from matrixdp_papers.studies.recalibrated import recalibrated
from matrixdp_papers.studies.uber_map import ADJACENCIES, BUDGET, Mask, on_valid

RECTANGLES = 2000
BLOCKS = (1, 2, 4, 8)
# DAWA's share of epsilon for its partition.
RATIO = 0.25

Draw = Callable[[Array, np.random.Generator], Array]
Rectangles = npt.NDArray[np.int64]


class Method(NamedTuple):
    """A way to release the map.

    Attributes:
        draw: (counts, rng) -> noisy map.
        std: of the noise on a count; for DAWA and H_b that of the counts from which the map is computed.
        group: the group in which the method is chosen, by its error on other days.
        block: the side of blocks of cells that are counted together; a count is then spread evenly over its cells.
    """

    draw: Draw
    std: float
    group: str
    block: int = 1


OWN, DAWA, TREE, REFERENCE = "matrixdp", "DAWA", "H_b", "for reference"
GROUPS = (OWN, DAWA, TREE)
"""The groups compared: each has three variants, on blocks of four sizes, with the same post-processings."""


def methods(shape: Shape, adjacency: str) -> dict[str, Method]:
    """All methods that truly keep the budget under an adjacency."""
    sensitivity, epsilon = ADJACENCIES[adjacency], BUDGET.epsilon
    given: dict[str, Any] = {"sensitivity": sensitivity, "budget": BUDGET}
    found: dict[str, Method] = {}
    for block in BLOCKS:
        sides = tuple(-(-side // block) for side in shape)
        where = "" if block == 1 else f", {block} x {block} blocks"
        for name in ("analytic", "laplace", "discrete"):
            law = calibrate(name, shape=sides, **given)
            found[name + where] = Method(_adds(law), law.root_mean_square, OWN, block)
        # the charge per bucket: the mean noise of its count, as published, and more, which makes buckets larger
        std = math.sqrt(2) * sensitivity.cells / ((1 - RATIO) * epsilon)
        for name, charge in (("", 1.0), (", charge x 4", 4.0), (", charge x 12", 12.0)):
            price = charge * sensitivity.cells / ((1 - RATIO) * epsilon)
            buckets = partial(dawa, epsilon=epsilon, ratio=RATIO, adjacency=adjacency, charge=price)
            found["DAWA" + name + where] = Method(_calls(buckets), std, DAWA, block)
        for name, noise, branching in ((", laplace", "laplace", None), (", gaussian", "gaussian", None),
                                       (", laplace, b = 4", "laplace", 4)):  # fmt: skip
            levels = height(sides, branching or best_branching(sides, noise))
            private: dict[str, Any] = {"noise": noise, "delta": BUDGET.delta if noise == "gaussian" else None}
            tree = partial(hb, epsilon=epsilon, adjacency=adjacency, branching=branching, **private)
            if noise == "laplace":
                std = math.sqrt(2) * sensitivity.cells * levels / epsilon
            else:
                std = math.sqrt(sensitivity.cells * levels) / float(gaussian.mu(epsilon, BUDGET.delta))
            found["H_b" + name + where] = Method(_calls(tree), std, TREE, block)
    ranges = calibrate("matrix-mechanism", shape=shape, workload="all-ranges", **given)
    rank_one = recalibrated(calibrate("r1smg", shape=shape, **given), sensitivity, BUDGET)
    found["matrix-mechanism, all ranges"] = Method(_adds(ranges), ranges.root_mean_square, REFERENCE)
    found["r1smg, rescaled"] = Method(_adds(rank_one), rank_one.root_mean_square, REFERENCE)
    return found


def _adds(law: NoiseLaw) -> Draw:
    return lambda counts, rng: counts + law.sample(rng)


def _calls(mechanism: Callable[..., Array]) -> Draw:
    return lambda counts, rng: mechanism(counts, rng=rng)


def together(counts: Array, block: int) -> Array:
    """The sums over blocks of cells; those at the end may be smaller."""
    for axis, side in enumerate(counts.shape):
        counts = np.add.reduceat(counts, np.arange(0, side, block), axis=axis)
    return counts


def spread(blocks: Array, block: int, cells: Mask) -> Array:
    """Each block's count, evenly over those of its cells that are marked."""
    marked = together(cells.astype(np.float64), block)
    each = np.divide(blocks, marked, out=np.zeros_like(blocks), where=marked > 0)
    full = np.repeat(np.repeat(each, block, axis=0), block, axis=1)[: cells.shape[0], : cells.shape[1]]
    return np.where(cells, full, 0.0)


Post = Callable[[Array, Mask, float], Array]


def _with_total(noisy: Array, valid: Mask, std: float) -> Array:
    """Non-negative, with the sum that the noisy valid cells have themselves."""
    result = np.zeros_like(noisy)
    result[valid] = postprocess.nonnegative(noisy[valid], total=max(float(np.sum(noisy[valid])), 0.0))
    return result


def _soft(noisy: Array, valid: Mask, std: float) -> Array:
    return postprocess.nonnegative(postprocess.soft_threshold(on_valid(noisy, valid), std))


def _haar(threshold: float) -> Post:
    def post(noisy: Array, valid: Mask, std: float) -> Array:
        smooth = denoise(on_valid(noisy, valid), std, threshold=threshold)
        return on_valid(postprocess.nonnegative(smooth), valid)

    return post


POSTS: Mapping[str, Post] = {
    "as released": lambda noisy, valid, std: noisy,
    "valid cells": lambda noisy, valid, std: on_valid(noisy, valid),
    "non-negative": lambda noisy, valid, std: postprocess.nonnegative(on_valid(noisy, valid)),
    "non-negative, total": _with_total,
    "soft threshold": _soft,
    "Haar 2": _haar(2.0),
    "Haar 3": _haar(3.0),
    "Haar 4": _haar(4.0),
}
"""Post-processings, each on valid cells (or blocks that hold any) but the first."""


def compare_maps(
    maps: Sequence[Array], valid: Mask, adjacency: str, runs: int, rng: np.random.Generator, progress: Progress
) -> tuple[Table, Table]:
    """Squared errors of maps and of sums over rectangles, for every method and post-processing; `runs` on each map."""
    rectangles = random_rectangles(valid.shape, rng)
    tried = methods(valid.shape, adjacency)
    on_cells: list[tuple[Any, ...]] = []
    on_ranges: list[tuple[Any, ...]] = []
    for name in progress(list(tried), f"equal guarantees, {adjacency}"):
        method = tried[name]
        noisy = [(counts, method.draw(together(counts, method.block), rng)) for counts in maps for _ in range(runs)]
        scores = [
            [_errors(finished(one, valid, method, post), counts, rectangles) for counts, one in noisy] for post in POSTS
        ]
        for table, index in ((on_cells, 0), (on_ranges, 1)):
            table.append((name, *(Mean.of(error[index] for error in found) for found in scores)))
    columns = ("mechanism", *POSTS)
    empty = [_errors(np.zeros_like(counts), counts, rectangles) for counts in maps]
    titles = (
        f"Squared error of the map at a true {BUDGET}, {adjacency}",
        f"Mean squared error of sums over {RECTANGLES:,} random rectangles at a true {BUDGET}, {adjacency}",
    )
    cells, ranges = (
        Table(title, columns, tuple(rows), f"An empty map has {np.mean([error[index] for error in empty]):.4g}.")
        for title, rows, index in zip(titles, (on_cells, on_ranges), (0, 1), strict=True)
    )
    return cells, ranges


def finished(noisy: Array, valid: Mask, method: Method, post: str) -> Array:
    """The map of cells after a post-processing of what was released."""
    known = together(valid.astype(np.float64), method.block) > 0
    result = POSTS[post](noisy, known, method.std)
    return spread(result, method.block, valid if post != "as released" else np.ones_like(valid))


def _errors(result: Array, counts: Array, rectangles: Rectangles) -> tuple[float, float]:
    return float(np.sum((result - counts) ** 2)), float(np.mean(sums(result - counts, rectangles) ** 2))


def random_rectangles(shape: Shape, rng: np.random.Generator) -> Rectangles:
    """Rectangles by their first and last border along each axis."""
    return np.stack([np.sort(rng.integers(0, side + 1, (RECTANGLES, 2)), axis=1) for side in shape], axis=1)


def sums(counts: Array, rectangles: Rectangles) -> Array:
    """The sum of the counts in each rectangle."""
    table = np.zeros((counts.shape[0] + 1, counts.shape[1] + 1))
    table[1:, 1:] = counts.cumsum(axis=0).cumsum(axis=1)
    (top, bottom), (left, right) = rectangles[:, 0].T, rectangles[:, 1].T
    answers: Array = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
    return answers


class Choice(NamedTuple):
    """A method with a post-processing, and its error."""

    method: str
    post: str
    error: Mean

    def __str__(self) -> str:
        return f"{self.method} ({self.post}), {self.error}"


def repeated(
    choice: Choice,
    method: Method,
    counts: Array,
    valid: Mask,
    rectangles: Rectangles | None,
    runs: int,
    rng: np.random.Generator,
) -> Choice:
    """The same choice with its error on fresh draws: of sums over rectangles, or of the map where there are none."""
    noisy = (method.draw(together(counts, method.block), rng) for _ in range(runs))
    errors = (_error(finished(one, valid, method, choice.post) - counts, rectangles) for one in noisy)
    return choice._replace(error=Mean.of(errors))


def finalists(other: Table, names: list[str], count: int) -> list[Choice]:
    """The methods and post-processings with the least errors on other data."""
    choices = [
        Choice(row[0], column, cell)
        for row in other.rows
        if row[0] in names
        for column, cell in zip(other.columns[1:], row[1:], strict=True)
    ]
    return sorted(choices, key=lambda choice: choice.error.mean)[:count]


def settled(
    tried: Mapping[str, Method],
    among: Sequence[Choice],
    maps: Sequence[Array],
    valid: Mask,
    rectangles: Rectangles | None,
    runs: int,
    seed: int,
) -> Choice:
    """The finalist with the least error over more runs on other maps.

    All methods have the same seed, and post-processings of one method the same noise, so their difference is measured
    more precisely than their errors.
    """
    errors = dict.fromkeys(among, 0.0)
    for name in dict.fromkeys(choice.method for choice in among):
        rng, method = np.random.default_rng(seed), tried[name]
        of_method = [choice for choice in among if choice.method == name]
        for counts in maps:
            for _ in range(runs):
                noisy = method.draw(together(counts, method.block), rng)
                for choice in of_method:
                    errors[choice] += _error(finished(noisy, valid, method, choice.post) - counts, rectangles)
    return min(among, key=errors.__getitem__)


def _error(difference: Array, rectangles: Rectangles | None) -> float:
    """Of sums over rectangles, or of the map where there are none."""
    return float(np.sum(difference**2) if rectangles is None else np.mean(sums(difference, rectangles) ** 2))
