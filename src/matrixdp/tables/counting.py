"""Marginal counts of records, for any table of columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp.adjacency import REPLACE
from matrixdp.errors import InvalidInput
from matrixdp.residuals import Whole

Counts: TypeAlias = npt.NDArray[Any] | Mapping[tuple[str, ...], Any] | Callable[[tuple[str, ...]], Any]
"""Records by the places of their values, or counts by table: see `MarginalPlan.release`."""


def counter(
    counts: Counts, names: Sequence[str], sizes: Sequence[int], adjacency: str
) -> Callable[[tuple[int, ...]], Whole]:
    """A function from a table, given as places in the names, to its counts."""
    if isinstance(counts, Mapping):
        return lambda table: _table(_listed(counts, [names[i] for i in table]), [sizes[i] for i in table])
    if callable(counts):
        return lambda table: _table(counts(tuple(names[i] for i in table)), [sizes[i] for i in table])
    codes = _codes(counts, sizes, adjacency)
    return lambda table: _counted(codes, table, sizes)


def _codes(records: Any, sizes: Sequence[int], adjacency: str) -> list[Whole]:
    """The columns of the records; one with a place that does not exist is left out (replace: moved to the nearest)."""
    codes = _check.array_of("counts", records)
    if codes.ndim != 2 or codes.shape[1] != len(sizes) or codes.dtype.kind not in "iu":
        raise InvalidInput(
            f"counts must be whole numbers with one column per column of the plan ({len(sizes)}), or counts by table, "
            f"got {_check.kind(records)}"
        )
    top = np.array(sizes) - 1
    nearest = np.clip(codes, 0, top)
    codes = nearest if adjacency == REPLACE else codes[np.all(nearest == codes, axis=1)]
    return [np.ascontiguousarray(column, dtype=np.int64) for column in codes.T]


def _counted(codes: Sequence[Whole], table: Sequence[int], sizes: Sequence[int]) -> Whole:
    shape = [sizes[i] for i in table]
    place = np.zeros(len(codes[0]), dtype=np.int64)
    for i in table:
        place = place * sizes[i] + codes[i]
    return np.bincount(place, minlength=int(np.prod(shape, dtype=np.int64))).reshape(shape)


def _listed(counts: Mapping[tuple[str, ...], Any], columns: list[str]) -> Any:
    """The counts of a table, from an entry with its columns in any order, or with more columns."""
    for key, value in counts.items():
        if set(columns) <= set(key):
            array = np.asarray(value)
            if array.ndim != len(key):
                break
            kept = np.sum(array, axis=tuple(axis for axis, name in enumerate(key) if name not in columns))
            left = [name for name in key if name in columns]
            return np.transpose(kept, [left.index(name) for name in columns])
    raise InvalidInput(f"counts must have an entry with one axis per column for every table ({len(columns)} columns)")


def _table(counts: Any, shape: Sequence[int]) -> Whole:
    array = _check.array_of("counts", counts)
    if array.shape != tuple(shape) or array.dtype.kind not in "iu":
        raise InvalidInput(
            f"counts of this table must be whole numbers of shape {tuple(shape)}, got {_check.kind(counts)}"
        )
    return array.astype(np.int64)
