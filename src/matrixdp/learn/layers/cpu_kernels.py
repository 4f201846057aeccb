"""Gradients per record in main memory: their weighted sum as one loop, which copies nothing to float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from matrixdp._compiled import compiled


def add_weighted(values: Tensor, weights: Tensor, total: Tensor) -> None:
    """Adds the rows of a matrix, each times its weight, to a contiguous vector in float64."""
    compiled(_add_rows)(values.contiguous().numpy(), weights.numpy(), total.numpy())


def _add_rows(values: Any, weights: Any, total: Any) -> None:
    """One product and one addition in float64 for each number; by parts of the rows, so that sums stay in a cache."""
    for first in range(0, total.size, 2048):
        sums = total[first : first + 2048]
        for record in range(weights.size):
            weight, row = weights[record], values[record, first : first + 2048]
            for j in range(sums.size):
                sums[j] += weight * np.float64(row[j])
