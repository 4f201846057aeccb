"""Sums of sparse records, such as what each person bought or how often: bounded in l1, in whole multiples of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked, takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.queries.records import load
from matrixdp.sensitivity import L1

# The most steps in the radius, so that 2^32 records add up in 64 bits.
_MOST_STEPS = 2.0**31


@takes_relation
def sparse_sum(
    records: Any,
    *,
    radius: float,
    largest_entry: float | None = None,
    step: float = 1.0,
    columns: Any = None,
    adjacency: str = ADD_REMOVE,
) -> Answer:
    """The sum of the records, each clipped in l1 and rounded towards zero: a vector with one entry per column.

    Args:
        records: see `load`.
        radius: the most that the entries of a record may add up to, in absolute value; longer records are scaled down.
        largest_entry: the largest absolute value of an entry; larger entries are clipped first. The radius by default.
        step: entries are rounded towards zero to whole multiples of this power of two; 1 for counts.
        columns: which columns to use; all by default.
        adjacency: which data sets are neighbours; ADD_REMOVE, REPLACE or ZERO_OUT.

    Guarantee: a neighbour changes the sum by at most `radius` in l1 and `largest_entry` in each entry (replace: twice
        that), by whole multiples of the step. Sums are exact, so discrete noise needs no allowance for rounding.

    Example:
        >>> from matrixdp.queries import sparse_sum
        >>> baskets = [[2, 0, 1], [0, 9, 0]]  # bought by one person each
        >>> sparse_sum(baskets, radius=4).sensitivity
        L1(radius=4.0, bound=None, step=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    asked = query(
        "sparse_sum",
        columns=columns,
        radius=radius,
        largest_entry=largest_entry,
        step=step,
        adjacency=checked(adjacency),
    )
    rows = load(records, columns)
    change = change_in_sparse_sum(rows.shape[1:], **asked["parameters"])
    one = L1(radius, largest_entry, step=step)
    return Answer(np.sum(_clipped(rows, one, float(step)), axis=0) * float(step), change, asked)


@changes("sparse_sum")
def change_in_sparse_sum(
    shape: Shape, *, radius: Any, adjacency: str, step: Any, largest_entry: Any = None, columns: Any = None
) -> L1:
    """The l1 ball of one record; twice its size under replace."""
    one, records = L1(radius, largest_entry, adjacency, step=step), 2.0 if adjacency == REPLACE else 1.0
    if not one.radius / step <= _MOST_STEPS:
        raise InvalidInput(f"radius must be at most 2^31 steps, got {one.radius:g} and step {step:g}; use larger steps")
    return L1(records * one.radius, None if one.bound is None else records * one.bound, adjacency, step=step)


def _clipped(rows: Array, one: L1, step: float) -> npt.NDArray[np.int64]:
    """Each record in whole steps, as integers that obey the bound on each entry and on their sum."""
    sizes = np.abs(rows) if one.bound is None else np.minimum(np.abs(rows), one.bound)
    with np.errstate(over="ignore"):  # what overflows is too long
        too_long = np.sum(sizes, axis=1) > one.radius
    relative = sizes[too_long] / np.max(sizes[too_long], axis=1, keepdims=True, initial=0.0)
    sizes[too_long] = np.minimum(sizes[too_long], relative * (one.radius / np.sum(relative, axis=1, keepdims=True)))
    steps = np.floor(sizes / step).astype(np.int64)
    most = int(one.radius / step)
    while len(long := np.flatnonzero(np.sum(steps, axis=1) > most)):  # by rounding alone
        steps[long, np.argmax(steps[long], axis=1)] -= 1
    return np.where(rows < 0, -steps, steps)
