"""The best strategies over time: banded, with a proven distance from the optimum, and banded Toeplitz, without one.

With workload A, M = A^T A and a lower-triangular strategy C with b bands, X = C^T C has b bands too. If records take
part at least b steps apart, mu^2 is s(X) = max over patterns of the sum of X_ii, in units of (clip/std)^2, and the
error of the answers is p(X) = tr(M X^-1) std^2. So the task is to minimise s(X) p(X) over banded X, which is convex.

**The bound.** Let D = X^-1 M X^-1 for any banded X. Write E for its entries off the diagonal but inside the
bands, which are 0 at the optimum, y_i = D_ii + sum_j |E_ij|, and D' = D - E + diag(sum_j |E_ij|). Then D' >= D, because
a symmetric matrix with a dominant diagonal is positive semidefinite. For any t > 0 let T = diag(t) and F = T D' T.
Inside the bands F is diag(t^2 y), so for every feasible banded X~ (s(X~) <= 1), by the weak duality of the program,

    tr(M X~^-1)  >=  (tr (A F A^T)^(1/2))^2 / cover(t^2 y),    cover(z) = max of sum z_i x_i over x >= 0, s(x) <= 1,

and tr (A F A^T)^(1/2) >= tr (A T D T A^T)^(1/2), the nuclear norm of A T X^-1 A^T, which is at least its trace,
sum t_i q_i with q_i = (X^-1 M)_ii. All of this follows from the gradient of p. At the optimum, with t = 1, both sides
are equal. The best t is q_i / (y_i x_i), where x minimises sum_i q_i^2 / (y_i x_i) over diagonals with s(x) <= 1.

**cover.** Patterns with at most k steps, b apart, are the corners of {z >= 0: sum z <= k, sums over windows of b
consecutive steps <= 1}, because such a matrix of intervals is totally unimodular. Hence s(x) <= 1 exactly if
x <= sum over windows w of u_w 1_w + v with u, v >= 0 and sum u + k v <= 1, and cover(z) is the larger of sum z / k and
the largest sum of z over a window. Of cyclic patterns, one per residue, it is the sum over residues of the largest z.

Source: mckenna2024scaling for column-normalised banded strategies and banded Toeplitz ones.
Deviates: (1) the diagonal of X is optimised too; (2) the bound, which needs no eigenvalues; (3) the gradient, which is
    in `workload_error`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from matrixdp._check import Array
from matrixdp.mechanisms.solvers.workload_error import Error, dual_diagonal, error_of
from matrixdp.sensitivity import Participation


@dataclass(frozen=True, eq=False)
class Strategy:
    """A banded strategy for sets with clip 1 and noise with standard deviation 1.

    Attributes:
        coefficients: C by its bands, as in `OverTime`: a row per step, or a vector if it is Toeplitz.
        value: s(X) p(X), the error of this strategy at mu = 1.
        lower_bound: no strategy with as many bands has less error; 0 if no bound is known.
    """

    coefficients: Array
    value: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """value / lower_bound - 1; the true distance from the optimum is no larger."""
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else math.inf


# --- banded ---


def banded(sensitivity: Participation, workload: Array, bands: int, tolerance: float = 0.005) -> Strategy:
    """The best banded strategy, to the tolerance or as far as 300 iterations go.

    L-BFGS on log p, over the directions of the columns of C and their squared norms: a number per block of `separation`
    steps, with blocks counted from the first step and, if the last one is shorter, also from the last step; and, if a
    record can take part in k blocks of more, a number v for all steps. The numbers of all blocks and k v add up to 1,
    so no pattern has more. The best norms within a block are not exactly equal, but nearly; the bound covers unequal
    ones too.

    Args:
        sensitivity: when a record takes part: at least `bands` steps apart, if more than once.
        workload: as `time_workloads.coefficients` gives it.
        bands: of C.
        tolerance: the proven relative distance from the optimum at which the search ends.
    """
    from scipy.optimize import minimize  # here, because it is slow to import

    steps, error = len(workload), error_of(workload)
    most = sensitivity.most_times(steps)
    block = np.arange(steps) // (sensitivity.gap if most > 1 else steps)
    shared = np.eye(block[-1] + 1)[block]  # what each share adds to the squared norm of each column
    if most < shared.shape[1]:
        shared = np.column_stack([shared, np.full(steps, 1.0 / most)])
    if block[-1] and steps % sensitivity.gap:
        shared = np.column_stack([shared, np.eye(block[-1] + 1)[block[::-1]]])
    count = shared.shape[1]
    start = _columns(np.tile(_root(np.ones(bands), 0.5), (steps, 1)))
    used = start != 0

    def unpacked(flat: Array) -> tuple[Array, Array, Array, Array]:
        free = np.zeros_like(start)
        free[used] = flat[:-count]
        shares = np.exp(np.maximum(flat[-count:] - np.max(flat[-count:]), -200.0))  # never 0, however far a step goes
        shares /= np.sum(shares)
        norms = np.sqrt(np.sum(np.square(free), axis=1, keepdims=True))
        return free / norms, norms, shares, np.sqrt(shared @ shares)[:, None]

    def objective(flat: Array) -> tuple[float, Array]:
        units, norms, shares, roots = unpacked(flat)
        value, gradient = error(_rows(roots * units))
        pull = roots * _columns(gradient)
        along = np.sum(pull * units, axis=1, keepdims=True)
        by_share = shares * (shared.T @ (along / np.square(roots))[:, 0]) / 2
        pull = (pull - units * along) / norms
        return math.log(value), np.concatenate([pull[used], by_share - shares * np.sum(by_share)]) / value

    def found(flat: Array) -> Strategy:
        units, _, _, roots = unpacked(flat)
        return _with_bound(sensitivity, roots * units, error)

    best, seen = found(x0 := np.concatenate([start[used], np.zeros(count)])), 0

    def look(intermediate_result: Any) -> None:
        nonlocal best, seen
        seen += 1
        if seen % 20 == 0:
            best = _better(best, found(intermediate_result.x))
            if best.gap <= tolerance:
                raise StopIteration

    options = {"maxiter": 300, "maxfun": 600, "ftol": 1e-15, "gtol": 1e-10}
    with ThreadpoolController().limit(limits=1):  # more threads would mostly wait for each other
        last = minimize(objective, x0, jac=True, method="L-BFGS-B", callback=look, options=options)  # type: ignore[call-overload]
    return _better(best, found(last.x))


def _better(one: Strategy, other: Strategy) -> Strategy:
    """The strategy with the smaller value, and the larger of the bounds, which hold for both."""
    least = min((one, other), key=lambda strategy: strategy.value)
    return Strategy(least.coefficients, least.value, max(one.lower_bound, other.lower_bound))


def _with_bound(sensitivity: Participation, columns: Array, error: Error) -> Strategy:
    """A strategy, its value, and the bound that follows from its gradient."""
    rows = _rows(columns)
    value, gradient = error(rows)
    largest, _ = sensitivity.heaviest(np.sum(np.square(columns), axis=1))
    q = -np.sum(_columns(gradient) * columns, axis=1) / 2
    weights = np.square(q) / dual_diagonal(rows, -gradient / 2)
    t = 1 / _balanced(sensitivity, weights)  # without the factor q_i / y_i, which is in `weights`
    bound = float(np.sum(weights * t)) ** 2 / cover(sensitivity, weights * np.square(t))
    upright = rows * np.where(rows[:, :1] < 0, -1.0, 1.0)  # the signs of rows change neither X nor the error
    return Strategy(upright, value * largest, bound * (1 - 1e-9))  # for rounding


def cover(sensitivity: Participation, z: Array) -> float:
    """The largest sum of z_i x_i over diagonals x >= 0 with s(x) <= 1."""
    steps, gap = len(z), sensitivity.gap
    if sensitivity.cyclic:
        padded = np.concatenate([z, np.zeros(-steps % gap)]).reshape(-1, gap)
        return float(np.sum(np.max(padded, axis=0)))
    return max(float(np.max(_window_sums(z, gap))), float(np.sum(z)) / sensitivity.most_times(steps))


def _window_sums(z: Array, gap: int) -> Array:
    """Sums over all windows of `gap` consecutive steps; one sum if there are no more steps than that."""
    sums = np.concatenate([[0.0], np.cumsum(z)])
    width = min(gap, len(z))
    return np.asarray(sums[width:] - sums[:-width])


def _balanced(sensitivity: Participation, weights: Array) -> Array:
    """The diagonal x, s(x) <= 1, with nearly the least sum of weights_i / x_i.

    In closed form for cyclic patterns, where each residue has a separate constraint. Otherwise x is a sum of windows
    and a constant, whose sizes are multiplied by the roots of their derivatives, the usual iteration for such designs.
    """
    steps, gap, most = len(weights), sensitivity.gap, sensitivity.most_times(len(weights))
    if most == 1:
        return np.ones(steps)
    if sensitivity.cyclic:
        roots = np.concatenate([np.sqrt(weights), np.zeros(-steps % gap)]).reshape(-1, gap)
        return np.asarray((roots / np.sum(roots, axis=0)).ravel()[:steps])
    starts = steps - gap + 1
    sizes, place = np.full(starts + 1, 1.0 / (starts + 1)), np.arange(steps)
    diagonal = np.zeros(steps)
    for _ in range(300):
        sums = np.concatenate([[0.0], np.cumsum(sizes[:starts])])
        diagonal = sums[np.minimum(place + 1, starts)] - sums[np.clip(place - gap + 1, 0, starts)] + sizes[-1] / most
        derivative = weights / np.square(diagonal)
        sizes = sizes * np.sqrt(np.append(_window_sums(derivative, gap), np.sum(derivative) / most))
        sizes /= np.sum(sizes)
    return diagonal


def _rows(columns: Array) -> Array:
    """C by rows, C[t, t - j] at (t, j), from C by columns, C[i + j, i] at (i, j)."""
    rows = np.zeros_like(columns)
    for band in range(columns.shape[1]):
        rows[band:, band] = columns[: len(columns) - band, band]
    return rows


def _columns(rows: Array) -> Array:
    """C by columns, from C by rows; entries below the last step are dropped."""
    columns = np.zeros_like(rows)
    for band in range(rows.shape[1]):
        columns[: len(rows) - band, band] = rows[band:, band]
    return columns


# --- Toeplitz ---


def toeplitz(workload: Array, bands: int) -> Strategy:
    """The best banded Toeplitz strategy for a workload, for records that take part once.

    For a workload with coefficients the error is sum_j (n - j) w_j^2 with w = a / c as power series, and its derivative
    in c_j is -2 times the inner product of (n - t) w_t and w / c, j steps later. The search takes the norm of c for mu,
    as if no column were cut off at the last step. It begins at the root of the workload or, if that is worse, at one
    band: where an answer weighs earlier steps most, the inverse of the root grows with the steps.
    """
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    error, left = error_of(workload) if workload.ndim == 2 else None, np.arange(len(workload), 0.0, -1.0)

    def by_series(c: Array) -> tuple[float, Array]:
        w = lfilter([1.0], c, workload)
        later, weighted = lfilter([1.0], c, w), left * w
        pull = np.array([weighted[j:] @ later[: len(later) - j] for j in range(1, bands)])
        return float(weighted @ w), -2 * pull

    def by_rows(c: Array) -> tuple[float, Array]:
        assert error is not None
        value, gradient = error(_rows(_columns(np.tile(c, (len(workload), 1)))))
        return value, np.sum(gradient, axis=0)[1:]

    @np.errstate(over="ignore", invalid="ignore")
    def objective(free: Array) -> tuple[float, Array]:
        c = np.concatenate([[1.0], free])
        value, slope = by_series(c) if error is None else by_rows(c)
        square = float(c @ c)
        if not math.isfinite(value * square + np.sum(slope)):
            return 1e300, np.zeros(bands - 1)
        return math.log(value) + math.log(square), slope / value + 2 * free / square

    start = min(_root(series(workload)[:bands], 0.5)[1:], np.zeros(bands - 1), key=lambda free: objective(free)[0])
    if bands > 1:
        start = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 200, "ftol": 1e-10}).x
    value, _ = objective(start)
    return Strategy(np.concatenate([[1.0], start]), math.exp(value), 0.0)


def series(workload: Array) -> Array:
    """The coefficients of a workload, the first being 1; for a matrix, the means along its diagonals."""
    if workload.ndim == 2:
        workload = np.array([np.mean(np.diagonal(workload, -lag)) for lag in range(len(workload))])
    return np.asarray(workload / workload[0])


def square_root(workload: Array, bands: int) -> Array:
    """The first coefficients of C^-1 = A^(-1/2), by the `series` of the workload: for running sums, of sqrt(1 - x)."""
    taken = series(workload)[:bands]
    if np.all(taken == 1):
        place = np.arange(1.0, bands)
        return np.cumprod(np.concatenate([[1.0], (place - 1.5) / place]))
    return _root(taken, -0.5)


@np.errstate(over="ignore", invalid="ignore")
def _root(series: Array, power: float) -> Array:
    """The power of a series that begins with 1: from f' s = power f s', coefficient by coefficient.

    Coefficients that grow beyond all floats become infinite or NaN.
    """
    found = np.zeros(len(series))
    found[0] = 1.0
    for n in range(1, len(series)):
        j = np.arange(1, n + 1)
        found[n] = float(np.sum((power * j - (n - j)) * series[1 : n + 1] * found[n - 1 :: -1][:n])) / n
    return found
