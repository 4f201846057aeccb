"""Denoising of a noisy map in the Haar basis, as post-processing without privacy cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array

HALF = math.sqrt(0.5)


def denoise(matrix: Any, std: float, *, threshold: float = 3.0, shifts: int = 4) -> Array:
    """Keeps the Haar coefficients above a threshold, averaged over shifts.

    A coefficient is a sum of entries with orthonormal weights, so independent noise of equal std has that std in every
    coefficient too. The mean over shifted grids removes the block artefacts of a single grid.

    Args:
        matrix: a released matrix with independent noise.
        std: the standard deviation of the noise in each entry.
        threshold: coefficients below this many std become 0; the overall mean is kept.
        shifts: the number of shifts along each axis.

    Source: donoho1994ideal (hard thresholding); coifman1995translation (the mean over shifts).
    """
    given = _check.finite("matrix", matrix, ndim=2)
    side = 2 ** math.ceil(math.log2(max(given.shape)))
    square = np.zeros((side, side))
    square[: given.shape[0], : given.shape[1]] = given
    # Odd steps, so that the grids differ at every scale down to the finest.
    steps = [(side // shifts + 1) * index for index in range(shifts)]
    total = np.zeros_like(square)
    for down in steps:
        for right in steps:
            coefficients = transform(np.roll(square, (down, right), (0, 1)))
            kept = np.where(np.abs(coefficients) > threshold * std, coefficients, 0.0)
            kept[0, 0] = coefficients[0, 0]
            total += np.roll(inverse(kept), (-down, -right), (0, 1))
    return total[: given.shape[0], : given.shape[1]] / len(steps) ** 2


def transform(square: Array) -> Array:
    """The orthonormal two-dimensional Haar coefficients of a matrix whose side is a power of two."""
    coefficients = square.copy()
    side = len(square)
    while side > 1:
        block = coefficients[:side, :side]
        block = np.vstack([block[::2] + block[1::2], block[::2] - block[1::2]]) * HALF
        coefficients[:side, :side] = np.hstack([block[:, ::2] + block[:, 1::2], block[:, ::2] - block[:, 1::2]]) * HALF
        side //= 2
    return coefficients


def inverse(coefficients: Array) -> Array:
    """The matrix that has these Haar coefficients."""
    square = coefficients.copy()
    side = 2
    while side <= len(square):
        half = side // 2
        columns = np.empty((side, side))
        left, right = square[:side, :half], square[:side, half:side]
        columns[:, ::2], columns[:, 1::2] = (left + right) * HALF, (left - right) * HALF
        rows = np.empty((side, side))
        rows[::2], rows[1::2] = (columns[:half] + columns[half:]) * HALF, (columns[:half] - columns[half:]) * HALF
        square[:side, :side] = rows
        side *= 2
    return square
