"""Maps at the same true guarantee: matrixdp's mechanisms and the papers' rivals, with every free post-processing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from matrixdp import postprocess
from matrixdp._check import Array, Shape
from matrixdp.distributions import NoiseLaw
from matrixdp.mechanisms import calibrate
from matrixdp_papers.rivals.dawa import dawa
from matrixdp_papers.rivals.hb import hb
from matrixdp_papers.rivals.laplace import laplace
from matrixdp_papers.studies.base import Mean, Progress, Table
from matrixdp_papers.studies.haar import denoise
from matrixdp_papers.studies.recalibrated import recalibrated
from matrixdp_papers.studies.uber_map import BUDGET, RELATIONS, Mask, on_valid

RECTANGLES = 2000
# DAWA's share of epsilon for its partition, and what a bucket costs in units of the partition's noise.
RATIO, SMOOTH_CHARGE = 0.25, 4.0

Draw = Callable[[Array, np.random.Generator], Array]
Rectangles = npt.NDArray[np.int64]


class Method(NamedTuple):
    """A way to release the map.

    Attributes:
        draw: (counts, rng) -> noisy map.
        std: of its noise where that is independent with one std, else None.
        general: whether it is one of matrixdp's mechanisms, made for no task, or a rival.
        block: how many cells along each axis are counted together; a count is then spread evenly over its cells.
    """

    draw: Draw
    std: float | None
    general: bool
    block: int = 1


def methods(shape: Shape, relation: str) -> dict[str, Method]:
    """Everything that truly keeps the budget under a relation."""
    sensitivity, epsilon = RELATIONS[relation], BUDGET.epsilon
    given: dict[str, Any] = {"shape": shape, "sensitivity": sensitivity, "budget": BUDGET}
    ranges = calibrate("matrix-mechanism", workload="all-ranges", **given)
    rank_one = recalibrated(calibrate("r1smg", **given), sensitivity, BUDGET)

    def gaussian(block: int) -> Method:
        sides = tuple(-(-side // block) for side in shape)
        law = calibrate("analytic", shape=sides, sensitivity=sensitivity, budget=BUDGET)
        return Method(adds(law), law.root_mean_square, True, block)

    def pure(block: int) -> Method:
        std = math.sqrt(2) * sensitivity.cells / epsilon
        return Method(lambda counts, rng: laplace(counts, sensitivity, epsilon, rng=rng), std, False, block)

    def adds(law: NoiseLaw) -> Draw:
        return lambda counts, rng: counts + law.sample(rng)

    def tree(block: int = 1, **options: Any) -> Method:
        def draw(counts: Array, rng: np.random.Generator) -> Array:
            return hb(counts, epsilon, relation=relation, rng=rng, **options)

        return Method(draw, None, False, block)

    def buckets(block: int = 1, **options: Any) -> Method:
        def draw(counts: Array, rng: np.random.Generator) -> Array:
            return dawa(counts, epsilon, ratio=RATIO, relation=relation, rng=rng, **options)

        return Method(draw, None, False, block)

    large = SMOOTH_CHARGE * sensitivity.cells / (RATIO * epsilon)
    return {
        "analytic": gaussian(block=1),
        "analytic, 4 x 4 blocks": gaussian(block=4),
        "analytic, 8 x 8 blocks": gaussian(block=8),
        "matrix-mechanism, all ranges": Method(adds(ranges), None, True),
        "r1smg, rescaled": Method(adds(rank_one), rank_one.root_mean_square, True),
        "laplace": pure(block=1),
        "laplace, 2 x 2 blocks": pure(block=2),
        "laplace, 4 x 4 blocks": pure(block=4),
        "H_b, gaussian": tree(noise="gaussian", delta=BUDGET.delta),
        "H_b, laplace": tree(),
        "H_b, laplace, 4 x 4 blocks": tree(block=4),
        "DAWA": buckets(),
        "DAWA, large buckets": buckets(charge=large),
        "DAWA, 2 x 2 blocks": buckets(block=2),
        "DAWA, 4 x 4 blocks": buckets(block=4),
    }


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


def _haar(noisy: Array, valid: Mask, std: float) -> Array:
    return on_valid(postprocess.nonnegative(denoise(on_valid(noisy, valid), std)), valid)


POSTS: Mapping[str, Post] = {
    "as released": lambda noisy, valid, std: noisy,
    "valid cells": lambda noisy, valid, std: on_valid(noisy, valid),
    "non-negative": lambda noisy, valid, std: postprocess.nonnegative(on_valid(noisy, valid)),
    "non-negative, total": _with_total,
    "soft threshold": _soft,
    "Haar": _haar,
}
"""Post-processings, each on valid cells (or blocks that hold any) but the first."""

NEED_STD = ("soft threshold", "Haar")
"""Those that need independent noise of a known std."""


def compare_maps(
    counts: Array, valid: Mask, relation: str, runs: int, rng: np.random.Generator, progress: Progress
) -> tuple[Table, Table]:
    """The squared error of the map, and of sums over rectangles, for every method and post-processing."""
    rectangles = random_rectangles(counts.shape, rng)
    answers = sums(counts, rectangles)
    tried = methods(counts.shape, relation)
    on_cells: list[tuple[Any, ...]] = []
    on_ranges: list[tuple[Any, ...]] = []
    for name in progress(list(tried), f"equal guarantees, {relation}"):
        method = tried[name]
        noisy = [method.draw(together(counts, method.block), rng) for _ in range(runs)]
        scores = [
            None if method.std is None and post in NEED_STD
            else [_errors(finished(one, valid, method, post), counts, rectangles, answers) for one in noisy]
            for post in POSTS
        ]  # fmt: skip
        for table, index in ((on_cells, 0), (on_ranges, 1)):
            table.append((name, *(None if found is None else Mean.of(e[index] for e in found) for found in scores)))
    columns = ("mechanism", *POSTS)
    empty = float(np.sum(counts**2)), float(np.mean(answers**2))
    titles = (
        f"Squared error of the map at a true {BUDGET}, {relation}",
        f"Mean squared error of sums over {RECTANGLES:,} random rectangles at a true {BUDGET}, {relation}",
    )
    cells, ranges = (
        Table(title, columns, tuple(rows), f"An empty map has {nothing:.4g}.")
        for title, rows, nothing in zip(titles, (on_cells, on_ranges), empty, strict=True)
    )
    return cells, ranges


def finished(noisy: Array, valid: Mask, method: Method, post: str) -> Array:
    """The map of cells after a post-processing of what was released."""
    known = together(valid.astype(np.float64), method.block) > 0
    result = POSTS[post](noisy, known, method.std or 0.0)
    return spread(result, method.block, valid if post != "as released" else np.ones_like(valid))


def _errors(result: Array, counts: Array, rectangles: Rectangles, answers: Array) -> tuple[float, float]:
    return float(np.sum((result - counts) ** 2)), float(np.mean((sums(result, rectangles) - answers) ** 2))


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


def choose(other: Table, table: Table, names: list[str]) -> Choice:
    """The method and post-processing with the least error on other data, with its error on these."""
    choices = [
        Choice(row[0], column, cell)
        for row in other.rows
        if row[0] in names
        for column, cell in zip(other.columns[1:], row[1:], strict=True)
        if isinstance(cell, Mean)
    ]
    method, post, _ = min(choices, key=lambda choice: choice.error.mean)
    row = next(row for row in table.rows if row[0] == method)
    return Choice(method, post, row[table.columns.index(post)])
