"""Post-processing of a released matrix, which costs no privacy.

A function of a release that does not look at the data again keeps its guarantee (dwork2014algorithmic, proposition
2.1). Every other argument than the matrix must therefore be public: a range, a rank, a total, the std of the noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput


def symmetrise(matrix: Any) -> Array:
    """The nearest symmetric matrix in Frobenius norm, (A + A^T)/2: right for the release of a symmetric value.

    Example:
        >>> from matrixdp.postprocess import symmetrise
        >>> symmetrise([[1.0, 2.0], [4.0, 1.0]]).tolist()
        [[1.0, 3.0], [3.0, 1.0]]
    """
    given = _square(matrix)
    return given / 2 + given.T / 2


def clip(matrix: Any, low: Any, high: Any) -> Array:
    """Clips every entry to its known range.

    Args:
        matrix: a released vector or matrix.
        low: the least possible value, a number or an array of the matrix's shape.
        high: the largest possible value, likewise.

    Example:
        >>> from matrixdp.postprocess import clip
        >>> clip([-3.0, 0.5, 7.0], 0, 1).tolist()
        [0.0, 0.5, 1.0]
    """
    given = _check.finite("matrix", matrix)
    ends = _check.broadcast("low", low, given.shape), _check.broadcast("high", high, given.shape)
    if not np.all(ends[0] <= ends[1]):
        raise InvalidInput("low must be at most high everywhere")
    return np.clip(given, *ends)


def nearest_psd(matrix: Any) -> Array:
    """The nearest symmetric positive semidefinite matrix in Frobenius norm: right for second moments.

    Source: higham1988computing, theorem 2.1 (the negative eigenvalues of the symmetric part become 0).

    Example:
        >>> from matrixdp.postprocess import nearest_psd
        >>> nearest_psd([[2.0, 0.0], [0.0, -1.0]]).round(9).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    values, vectors = np.linalg.eigh(symmetrise(matrix))
    root = vectors * np.sqrt(np.maximum(values, 0))
    nearest: Array = root @ root.T
    return nearest


def low_rank(matrix: Any, rank: int) -> Array:
    """The nearest matrix of at most this rank in Frobenius norm.

    Source: eckart1936approximation (the smaller singular values become 0).

    Example:
        >>> from matrixdp.postprocess import low_rank
        >>> low_rank([[2.0, 0.0], [0.0, 1.0]], 1).round(9).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    given = _check.finite("matrix", matrix, ndim=2)
    if not _check.count("rank", rank) <= min(given.shape):
        raise InvalidInput(f"rank must be at most {min(given.shape)} for shape {given.shape}, got {rank}")
    left, values, right = np.linalg.svd(given, full_matrices=False)
    nearest: Array = (left[:, :rank] * values[:rank]) @ right[:rank]
    return nearest


def nonnegative(matrix: Any, total: float | None = None) -> Array:
    """The nearest matrix with entries at least 0, and of a given sum if one is public: right for histograms.

    Args:
        matrix: a released vector or matrix.
        total: the sum of all entries, if it is public; unconstrained by default.

    Source: duchi2008efficient, section 3 (one threshold is subtracted from every entry; negative results become 0).

    Example:
        >>> from matrixdp.postprocess import nonnegative
        >>> nonnegative([5.0, -2.0, 1.0]).tolist(), nonnegative([5.0, -2.0, 1.0], total=4).tolist()
        ([5.0, 0.0, 1.0], [4.0, 0.0, 0.0])
    """
    given = _check.finite("matrix", matrix)
    if total is None:
        return np.maximum(given, 0)
    amount = _check.at_least_zero("total", total)
    # Shifting all entries by the same number does not change the nearest point, and an entry that is below the largest
    # by the total or more is 0 in it. So only numbers between -total and 0 matter, which keep their digits.
    with np.errstate(over="ignore"):
        shifted = np.maximum(given - given.max(), -amount)
    falling = np.sort(shifted, axis=None)[::-1]
    thresholds = (np.cumsum(falling) - amount) / np.arange(1, falling.size + 1)
    kept = np.count_nonzero(np.logical_and.accumulate(falling > thresholds))
    if kept == 0:  # only a total of 0 keeps nothing
        return np.zeros_like(given)
    nearest: Array = np.maximum(shifted - thresholds[kept - 1], 0)
    return nearest


def nondecreasing(matrix: Any) -> Array:
    """The nearest vector whose entries do not decrease: right for running counts.

    Args:
        matrix: a released vector.

    Source: barlow1972statistical (adjacent entries that decrease are replaced by their mean until none do).

    Example:
        >>> from matrixdp.postprocess import nondecreasing
        >>> nondecreasing([1.0, 3.0, 2.0]).tolist()
        [1.0, 2.5, 2.5]
    """
    from scipy.optimize import isotonic_regression  # slow to import, and seldom needed

    return np.asarray(isotonic_regression(_check.finite("matrix", matrix, ndim=1)).x)


def whole_numbers(matrix: Any) -> Array:
    """Whole numbers, each less than 1 from its entry, whose sum is the rounded sum of the entries.

    Every entry is rounded down, and those with the largest remainders are then rounded up.

    Args:
        matrix: a released vector or matrix.

    Example:
        >>> from matrixdp.postprocess import whole_numbers
        >>> whole_numbers([1.6, 2.7, 3.8]).tolist()
        [1.0, 3.0, 4.0]
    """
    given = _check.finite("matrix", matrix)
    low = np.floor(given)
    remainders = (given - low).ravel()
    up = np.argsort(-remainders, kind="stable")[: round(float(np.sum(remainders)))]
    low.reshape(-1)[up] += 1
    return np.asarray(low)


def soft_threshold(matrix: Any, std: float, threshold: float | None = None) -> Array:
    """Moves every entry towards 0 by the threshold, but not past 0: right for a matrix that is mostly 0.

    Args:
        matrix: a released vector or matrix with Gaussian noise.
        std: the standard deviation of the noise in each entry.
        threshold: how far to move; by default std sqrt(2 ln M) for M entries, which noise alone rarely exceeds.

    Source: donoho1995denoising; balle2018improving, section 4.

    Example:
        >>> from matrixdp.postprocess import soft_threshold
        >>> soft_threshold([10.0, 1.0, 0.5], std=1.0, threshold=2.0).tolist()
        [8.0, 0.0, 0.0]
    """
    given = _check.finite("matrix", matrix)
    std = _check.positive("std", std)
    step = (
        std * math.sqrt(2 * math.log(given.size)) if threshold is None else _check.at_least_zero("threshold", threshold)
    )
    return np.sign(given) * np.maximum(np.abs(given) - step, 0)


def _square(matrix: Any) -> Array:
    given = _check.finite("matrix", matrix, ndim=2)
    if given.shape[0] != given.shape[1]:
        raise InvalidInput(f"matrix must be square, got shape {given.shape}")
    return given
