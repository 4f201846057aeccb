"""What the histogram methods share: checked counts, and the cells that a neighbour changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import REPLACE, checked
from matrixdp.errors import InvalidInput

# Whole numbers up to here, and all their sums, are exact in floating point.
MOST_RECORDS = 2**53


def whole_counts(value: Any) -> Array:
    """A histogram with one or two axes: whole numbers, 0 or above, whose sums are exact.

    The guarantees of the histogram methods need this: every record is in one cell, and changes it by 1.
    """
    counts = _check.finite("counts", value)
    if not np.all((counts >= 0) & (counts == np.floor(counts))):
        raise InvalidInput(
            "counts must be whole numbers, 0 or above; give the histogram itself, without noise or scale"
        )
    if not counts.sum() <= MOST_RECORDS:
        raise InvalidInput(f"counts must hold at most 2^53 records, got {counts.sum():g}")
    return counts


def moves(adjacency: str) -> int:
    """The number of cells that a neighbour changes by 1: one under add/remove, two under replace."""
    return 2 if checked(adjacency) == REPLACE else 1
