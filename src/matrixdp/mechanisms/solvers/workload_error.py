"""The error of a workload under a banded strategy over time, and its gradient; the search is in `over_time`.

With workload A and a lower-triangular strategy C with few bands, the error is p = tr(A^T A (C^T C)^-1) = ||A C^-1||^2.

If A^-1 is banded too (running sums, decay, momentum, learning rates), V = C A^-1 is banded, and
Z = V^-1 V^-T, whose diagonal holds the variances of the answers, follows row by row inside the bands from V Z = V^-T.
One pass forward gives p, one backward its gradient, in n (bands)^2 operations each.
Other workloads take dense products.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from matrixdp._check import Array
from matrixdp._compiled import compiled
from matrixdp.distributions import time_workloads
from matrixdp.errors import NotApplicable

DENSE_STEPS = 1024
"""The most steps for a workload whose inverse has many bands."""

FEW_BANDS = 8
"""The most bands of a workload's inverse that counts as banded."""

Error = Callable[[Array], tuple[float, Array]]
"""p and its gradient in C, from C by rows."""


def error_of(workload: Array) -> Error:
    """p and its gradient in C, from C by rows."""
    inverse = _inverse_bands(workload)
    if inverse is not None:
        return lambda rows: _error_by_bands(rows, inverse)
    if not len(workload) <= DENSE_STEPS:
        raise NotApplicable(
            f"banded strategies for a workload whose inverse has more than {FEW_BANDS} bands are computed for at most "
            f"{DENSE_STEPS} steps, got {len(workload)}; use 'toeplitz'"
        )
    dense = time_workloads.matrix(workload)
    return lambda rows: _error_dense(rows, dense)


def _inverse_bands(workload: Array) -> Array | None:
    """A^-1 by rows, if it has few bands."""
    steps = len(workload)
    if workload.ndim == 1:
        from scipy.signal import lfilter

        found = lfilter([1.0], workload, np.eye(1, steps)[0])
        by_rows = np.tile(found[: min(FEW_BANDS, steps)], (steps, 1))
        kept, rest = by_rows, found[FEW_BANDS:]
    else:
        from scipy.linalg import solve_triangular

        full = solve_triangular(workload, np.eye(steps), lower=True)
        width = min(FEW_BANDS, steps)
        kept = np.stack([np.concatenate([np.zeros(j), np.diagonal(full, -j)]) for j in range(width)], axis=1)
        rest = np.tril(full, -width)
    size = float(np.max(np.abs(kept)))
    if rest.size and not float(np.max(np.abs(rest))) <= 1e-12 * size:
        return None
    kept = np.where(np.abs(kept) <= 1e-12 * size, 0.0, kept)
    kept = np.where(np.arange(kept.shape[1])[None, :] <= np.arange(steps)[:, None], kept, 0.0)
    return np.asarray(kept[:, : int(np.max(np.flatnonzero(np.any(kept != 0, axis=0)))) + 1])


def _error_by_bands(rows: Array, inverse: Array) -> tuple[float, Array]:
    """The error and its gradient in C, by the two passes on V = C A^-1."""
    steps, bands = rows.shape
    product = np.zeros((steps, min(bands + inverse.shape[1] - 1, steps)))
    pairs = [(i, j) for i in range(inverse.shape[1]) for j in range(bands) if i + j < steps]
    for i, j in pairs:  # C[t, t - j] A^-1[t - j, t - j - i]
        product[j:, i + j] += rows[j:, j] * inverse[: steps - j, i]
    forward, backward = compiled(_forward, fastmath=True), compiled(_backward, fastmath=True)
    inside, pulled, gradient = np.zeros_like(product), np.zeros_like(product), np.zeros_like(product)
    value = forward(product, inside)
    backward(product, inside, pulled, gradient)
    back = np.zeros_like(rows)
    for i, j in pairs:
        back[j:, j] += gradient[j:, i + j] * inverse[: steps - j, i]
    return float(value), back


def _error_dense(rows: Array, workload: Array) -> tuple[float, Array]:
    """p = ||W||^2 with W = A C^-1, and its gradient -2 W^T W C^-T on the bands, by dense products."""
    from scipy.linalg import solve_triangular

    steps, bands = rows.shape
    strategy = np.zeros((steps, steps))
    for j in range(bands):
        strategy[np.arange(j, steps), np.arange(steps - j)] = rows[j:, j]
    inverse = solve_triangular(strategy, np.eye(steps), lower=True)
    answers = workload @ inverse
    pull = -2 * (answers.T @ answers) @ inverse.T
    gradient = np.zeros_like(rows)
    for j in range(bands):
        gradient[j:, j] = np.diagonal(pull, -j)
    return float(np.sum(np.square(answers))), gradient


def dual_diagonal(rows: Array, product: Array) -> Array:
    """y, from C and the product C D on the bands: D inside the bands by substitution, then D_ii + sum_j |E_ij|."""
    inside = np.zeros_like(rows)
    compiled(_substitute, fastmath=True)(rows, product, inside)
    sizes = np.abs(inside)
    total = sizes.sum(axis=1)
    for band in range(1, rows.shape[1]):
        total[: len(rows) - band] += sizes[band:, band]
    return np.asarray(total)


def _forward(product: Array, inside: Array) -> float:
    """Z inside the bands, row by row, and the sum of its diagonal.

    With v the row t of V without its diagonal r, and a = Z v on the rows before: Z_t. = -a / r, Z_tt = (1 + v a) / r^2.
    """
    steps, wide = product.shape
    a, total = np.zeros(wide), 0.0
    for t in range(steps):
        most = min(t, wide - 1)
        for i in range(1, most + 1):
            a[i] = 0.0
        for i in range(1, most + 1):
            v, sum_i = product[t, i], inside[t - i, 0] * product[t, i]
            for j in range(i + 1, most + 1):
                z = inside[t - i, j - i]
                sum_i += z * product[t, j]
                a[j] += z * v
            a[i] += sum_i
        r, dot = product[t, 0], 0.0
        for i in range(1, most + 1):
            dot += a[i] * product[t, i]
            inside[t, i] = -a[i] / r
        inside[t, 0] = (1.0 + dot) / (r * r)
        total += inside[t, 0]
    return total


def _backward(product: Array, inside: Array, pulled: Array, gradient: Array) -> None:
    """The gradient of `_forward` with respect to V, in reverse order; `pulled` is that with respect to Z."""
    steps, wide = product.shape
    b = np.zeros(wide)
    for t in range(steps - 1, -1, -1):
        most, r, own = min(t, wide - 1), product[t, 0], pulled[t, 0] + 1.0
        share, of_r = own / (r * r), -2.0 * inside[t, 0] * own / r
        for i in range(1, most + 1):
            b[i] = product[t, i] * share - pulled[t, i] / r
            gradient[t, i] = -inside[t, i] * r * share
            of_r -= pulled[t, i] * inside[t, i] / r
        gradient[t, 0] = of_r
        for i in range(1, most + 1):
            b_i, v = b[i], product[t, i]
            pulled[t - i, 0] += b_i * v
            sum_i = inside[t - i, 0] * b_i
            for j in range(i + 1, most + 1):
                z = inside[t - i, j - i]
                sum_i += z * b[j]
                gradient[t, j] += z * b_i
                pulled[t - i, j - i] += b_i * product[t, j] + b[j] * v
            gradient[t, i] += sum_i


def _substitute(rows: Array, product: Array, inside: Array) -> None:
    """The symmetric D inside the bands, column by column, from (C D)_tj for j <= t < j + bands."""
    steps, bands = rows.shape
    for j in range(steps):
        for t in range(j, min(j + bands, steps)):
            rest = product[t, t - j]
            for s in range(max(0, t - bands + 1), t):
                rest -= rows[t, t - s] * (inside[j, j - s] if s < j else inside[s, s - j])
            inside[t, t - j] = rest / rows[t, 0]
