"""Histograms: counts of records in the cells of a public grid."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked, takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.queries.records import rows_of
from matrixdp.sensitivity import Counts

Cells = npt.NDArray[np.intp]


@takes_relation
def histogram(records: Any, *, edges: Any, columns: Any = None, adjacency: str = ADD_REMOVE) -> Answer:
    """How many records fall into each cell of a grid, in one dimension or two.

    Args:
        records: see `load`; one column, or two for a two-dimensional histogram.
        edges: the borders of the cells, increasing; a pair of such arrays for two columns. A cell includes its lower
            border but not its upper one; the last cell includes both. Records outside the grid are not counted.
        columns: which columns to use; all by default.
        adjacency: which data sets are neighbours; ADD_REMOVE, REPLACE or ZERO_OUT.

    Guarantee: a neighbour changes one cell by 1 (replace: two cells).

    Example:
        >>> from matrixdp.queries import histogram
        >>> ages = [[3], [17], [18], [44], [90]]
        >>> histogram(ages, edges=[0, 18, 65, 100])
        Answer(value: private, shape (3,); add/remove: one cell changes, by at most 1)
    """
    asked = query("histogram", columns=columns, edges=edges, adjacency=checked(adjacency))
    rows = rows_of(records, columns)
    dimensions = rows.width
    if dimensions > 2:
        raise InvalidInput(
            f"histogram counts in 1 or 2 dimensions, got {dimensions} columns; choose one or two (columns)"
        )
    borders = [_borders("edges", edges)] if dimensions == 1 else _pair(edges)
    counts, _ = rows.total(partial(_counts, borders=borders))
    asked["parameters"]["edges"] = borders
    return Answer.of(counts, asked)


def _counts(rows: Array, borders: list[Array]) -> Array:
    """How many records each cell has: whole numbers, whose sums are exact in floats."""
    shape = tuple(len(border) - 1 for border in borders)
    places, inside = cells_of(rows, borders)
    cells = np.ravel_multi_index(tuple(place[inside] for place in places), shape)
    return np.bincount(cells, minlength=int(np.prod(shape))).reshape(shape).astype(np.float64)


def cells_of(rows: Array, borders: list[Array]) -> tuple[list[Cells], npt.NDArray[np.bool_]]:
    """The cell of each record along each axis, and whether the record lies in the grid."""
    places, inside = [], np.ones(len(rows), dtype=bool)
    for entries, border in zip(rows.T, borders, strict=True):
        place = np.searchsorted(border, entries, side="right") - 1
        place[entries == border[-1]] -= 1
        inside &= (place >= 0) & (place < len(border) - 1)
        places.append(place)
    return places, inside


@changes("histogram")
def change_in_histogram(shape: Shape, *, edges: Any, adjacency: str, columns: Any = None) -> Counts:
    """One cell changes by 1 when a record is added, removed or zeroed out; two cells when it is replaced."""
    if shape != tuple(len(border) - 1 for border in edges):
        raise InvalidInput(f"edges must be those of {' x '.join(map(str, shape))} cells")
    return Counts(2 if adjacency == REPLACE else 1, adjacency=adjacency)


def grid_counts(records: Array, low: Array, high: Array, steps: int, adjacency: str) -> Answer:
    """How many records are in each step of each feature's range, one row per feature.

    Guarantee: a record changes one cell of each row by 1 (replace: two cells).
    """
    share = (np.clip(records, low, high) - low) / (high - low)
    places = np.minimum((share * steps).astype(np.int64), steps - 1)
    value = np.stack([np.bincount(column, minlength=steps) for column in places.T]).astype(np.float64)
    asked = query("grid-counts", low=low, high=high, steps=steps, adjacency=checked(adjacency))
    return Answer.of(value, asked)


@changes("grid-counts")
def change_in_grid_counts(shape: Shape, *, low: Any, high: Any, steps: int, adjacency: str) -> Counts:
    """One cell per feature; see `grid_counts`."""
    if shape != (len(low), steps):
        raise InvalidInput(f"the counts have shape {(len(low), steps)}, not {shape}")
    return Counts(len(low) * (2 if adjacency == REPLACE else 1), adjacency=adjacency)


def _borders(name: str, edges: Any) -> Array:
    if isinstance(edges, str) or not np.iterable(edges):
        raise InvalidInput(
            f"{name} must list the borders of the cells, got {_check.kind(edges)}: a number of cells or a rule would "
            "take them from the data, which reveals it; np.linspace(low, high, cells + 1) with public ends makes them"
        )
    if any(np.iterable(border) for border in edges):
        raise InvalidInput(
            f"{name} must be one list of numbers for one column of records, got a nested {type(edges).__name__}"
        )
    borders = _check.finite(name, edges, ndim=1)
    if not (len(borders) >= 2 and np.all(borders[1:] > borders[:-1])):
        falls = np.flatnonzero(~(borders[1:] > borders[:-1]))[:1]
        where = f"entry {falls[0] + 1} is not above the one before it" if len(falls) else f"got {len(borders)}"
        raise InvalidInput(f"{name} must be two or more increasing numbers; {where}")
    return borders


def _pair(edges: Any) -> list[Array]:
    if isinstance(edges, str) or not np.iterable(edges) or len(list(edges)) != 2:
        raise InvalidInput(f"edges must be a pair of lists, one for each of the 2 columns, got {_check.kind(edges)}")
    return [_borders(f"edges[{i}]", part) for i, part in enumerate(edges)]
