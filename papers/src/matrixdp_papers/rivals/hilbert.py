"""The Hilbert curve: an order of the cells of a grid in which neighbours tend to stay close."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Shape

Indices = npt.NDArray[np.intp]


def hilbert_order(shape: Shape) -> Indices:
    """The cells of a grid, numbered row by row, in the order in which the Hilbert curve visits them.

    The curve fills the smallest square of side 2^k around the grid, and cells outside the grid are skipped; without
    such cells every step goes to one of the four nearest cells.

    The curve of order k+1 is four copies of the curve of order k, joined end to start: the first transposed, the second
    and third as they are, the last transposed about the other diagonal.

    Source: hilbert1891ueber.
    """
    rows, columns = _check.shape(shape)
    row, column = np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.intp)
    side = 1
    while side < max(rows, columns):
        row, column = (
            np.concatenate([column, row, row + side, 2 * side - 1 - column]),
            np.concatenate([row, column + side, column + side, side - 1 - row]),
        )
        side *= 2
    inside = (row < rows) & (column < columns)
    return row[inside] * columns + column[inside]
