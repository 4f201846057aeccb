"""The least Gaussian noise on second moments x x^T of records with norm at most 1, for a task that weighs entries.

Flipping the sign of a coordinate of x leaves the set and the task unchanged, so entries off the diagonal may be taken
independent, with precisions q_ij (of sqrt(2) times the entry), and the diagonal with a precision matrix K. With
y_i = x_i^2, on the simplex, the form of x x^T is y^T M y, with M_ii = K_ii and M_ij = K_ij + q_ij.

**Add/remove.** Let K_ii = 1 and q_ij = 1 - K_ij. Then M is all ones, and every unit record has the form 1. The problem

    minimise  tr(D K^-1) + sum_{i<j} p_ij/(1 - K_ij)   over positive definite K with K_ii = 1

is convex in K; D is the task's Gram matrix on the diagonal entries, p_ij the weight of sqrt(2) times an entry off it.

**Replace.** The form of x x^T - y y^T is then at most 2 (1 - min K_ij) for unit records (`privacy.suprema`), so
K_ij >= 1/2 is required as well. Such a difference has no trace, so K may be lowered to K_ij - (c_i + c_j)/2 with
c >= 0, which changes nothing for two unit records and leaves the form 1 - c.y for a single one. The problem is
convex in K and c.

**Dual.** Weights w on differences v give G = sum w v v^T and the bound f^2 = tr((P^(1/2) G P^(1/2))^(1/2))^2, as in
`design`. Records with random signs give H = E y y^T on the diagonal and 2 H_ij off it. Replacing e_i by e_j gives
(e_i - e_j)(e_i - e_j)^T on the diagonal; replacing (e_i + e_j)/sqrt(2) by (e_i - e_j)/sqrt(2) gives 2 at (i, j) off it.
At the optimum G is a multiple of S P S, whose parts are R = K^-1 D K^-1 and p_ij/q_ij^2. By stationarity they agree as
such a G requires. Every difference in G then has the form 1, so the bounds agree.

The resulting H is positive semidefinite and nonnegative. For d <= 4 every such H is a mixture of y y^T
(maxfield1962matrix), and the bound holds for all Gaussian noise. For larger d it holds for all noise whose form for one
record has a proof by sums of squares. |x|^4 minus the form of x x^T is a sum of squares exactly if some member of the
add/remove family has no more noise in any direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy

from matrixdp._check import Array

# Weights are raised by this share of their mean, so that entries unused by the task get finite noise.
_RAISED = 1e-6
# The error, in units of that at the start, where K is not positive definite.
_WALL = 1e3


class MomentDesign(NamedTuple):
    """The best noise found, for records of norm 1 and the unit budget, with the bound that shows how good it is.

    Attributes:
        precision: K, the precision of the diagonal.
        off_diagonal: the variances of the other entries.
        value: the error of the task.
        lower_bound: no noise with a sum-of-squares proof has less error; in up to four dimensions, no Gaussian noise.
        gap: value / lower_bound - 1.
    """

    precision: Array
    off_diagonal: Array
    value: float
    lower_bound: float
    gap: float


def solve(on_diagonal: Array, off_diagonal: Array, *, replaced: bool) -> MomentDesign:
    """The noise of least error, up to the proven `gap`.

    Args:
        on_diagonal: D, positive semidefinite: diag(weights) for weights on entries.
        off_diagonal: p_ij, the weight of sqrt(2) times the entry (i, j), symmetric; its diagonal is not used.
        replaced: whether a record is replaced by another one, or added or removed.
    """
    d = len(on_diagonal)
    upper = np.triu_indices(d, 1)
    pairs = len(upper[0])
    raised = _RAISED * (float(np.trace(on_diagonal)) + float(np.sum(off_diagonal[upper]))) / d
    D, p = on_diagonal + raised * np.eye(d), off_diagonal + raised

    def precision(entries: Array) -> Array:
        K = np.eye(d)
        K[upper] = entries[:pairs]
        K.T[upper] = entries[:pairs]
        return K - np.add.outer(entries[pairs:], entries[pairs:]) / 2 if replaced else K

    def error(entries: Array) -> tuple[float, Array]:
        try:
            inverse = scipy.linalg.cho_solve(scipy.linalg.cho_factor(precision(entries)), np.eye(d))
        except scipy.linalg.LinAlgError:
            return math.inf, np.zeros_like(entries)
        R = inverse @ D @ inverse
        off = p[upper] / (1 - entries[:pairs])
        slope = off / (1 - entries[:pairs]) - 2 * R[upper]
        return float(np.sum(D * inverse) + np.sum(off)), np.concatenate([slope, R.sum(axis=1)]) if replaced else slope

    start = np.concatenate([np.full(pairs, 0.5), np.zeros(d)]) if replaced else np.zeros(pairs)
    bounds = [(0.5, 1 - 1e-9)] * pairs + [(0.0, 1.0)] * d if replaced else [(-1.0, 1 - 1e-9)] * pairs
    entries = _minimised(error, start, bounds) if d > 1 else start
    K, inverse = precision(entries), np.linalg.inv(precision(entries))
    value = float(np.sum(on_diagonal * inverse) + np.sum(off_diagonal[upper] / (1 - entries[:pairs])))
    apart = np.ones((d, d))
    apart[upper] = 1 - entries[:pairs]
    apart.T[upper] = apart[upper]
    values, vectors = scipy.linalg.eigh(on_diagonal if replaced else D)
    columns = inverse @ (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1]
    lower_bound = _dual(on_diagonal, off_diagonal, columns, off_diagonal / apart**2, replaced)
    return MomentDesign(K, 0.5 / apart, value, lower_bound, value / lower_bound - 1)


def _minimised(error: Callable[[Array], tuple[float, Array]], start: Array, bounds: list[tuple[float, float]]) -> Array:
    """A quasi-Newton method within bounds; the objective is a finite constant where K is not positive definite."""
    scale = error(start)[0]

    def scaled(entries: Array) -> tuple[float, Array]:
        value, gradient = error(entries)
        return (value / scale, gradient / scale) if math.isfinite(value) else (_WALL, gradient)

    options = {"maxiter": 5000, "maxfun": 10_000, "ftol": 1e-13, "gtol": 1e-8, "maxcor": 20}
    found: Any = scipy.optimize.minimize(scaled, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)  # type: ignore[call-overload]
    return np.asarray(found.x)


def _dual(D: Array, p: Array, columns: Array, g: Array, replaced: bool) -> float:
    """The best of several lower bounds, each from dual weights that are derived from the covariance and made feasible.

    R = sum_k r_k r_k^T, with r_k the columns, gives H, with replacements of e_i by e_j where it would be negative. Or
    some r_k become replacements themselves: of a record with y = the positive part of r_k by one with its negative
    part, which have no coordinate in common. The smaller part is scaled to norm 1, and its weight lowered to match.
    """
    bounds = []
    for taken in range(len(D) + 1) if replaced else (0,):
        single, rest = columns[:, :taken], columns[:, taken:]
        R, up, down = rest @ rest.T, np.maximum(single, 0.0), np.maximum(-single, 0.0)
        sizes = np.stack([up.sum(axis=0), down.sum(axis=0)])
        more = np.divide(sizes.max(axis=0), sizes, out=np.ones_like(sizes), where=sizes > 0)
        parts = (up * more[0]) @ up.T + (down * more[1]) @ down.T
        between = np.maximum(-R, 0.0) if replaced else np.zeros_like(R)
        np.fill_diagonal(between, 0.0)
        laplacian = np.diag(between.sum(axis=1)) - between
        H = R - laplacian
        H += max(0.0, -float(H.min()))
        H += max(0.0, -float(np.linalg.eigvalsh(H)[0])) * np.eye(len(R))
        on, off = H + laplacian + parts - up @ down.T - down @ up.T, 2 * (H + parts)
        mass = np.sum(sizes.max(axis=0) ** 2) + np.sum(H) + np.sum(between) / 2
        bounds.append(_bound(D, p, on, off, float(mass), g if replaced else off))
    if replaced:
        bounds.append(_bound(D, p, *_one_against_the_rest(columns @ columns.T), g))
    return max(bounds)


def _one_against_the_rest(R: Array) -> tuple[Array, Array, float]:
    """Weights on e_i alone, i the coordinate that matters most, and on replacing e_i by records without it."""
    most = int(np.argmax(np.diagonal(R)))
    others = np.maximum(R, 0.0)
    others[most] = others[:, most] = 0.0
    others += max(0.0, -float(np.linalg.eigvalsh(others)[0])) * (np.arange(len(R)) != most) * np.eye(len(R))
    sums = others.sum(axis=1)
    on = others.copy()
    on[most] = on[:, most] = -sums
    mass = on[most, most] = max(float(R[most, most]), float(sums.sum()))
    return on, 2 * others, mass


def _bound(D: Array, p: Array, on: Array, off: Array, mass: float, wanted: Array) -> float:
    """f^2 over the mass of the weights; replacements that change one entry raise the off-diagonal part to `wanted`."""
    upper = np.triu_indices(len(D), 1)
    added = np.maximum(wanted - off, 0.0)[upper]
    values, vectors = scipy.linalg.eigh(D)
    root = np.sqrt(np.maximum(values, 0.0)) * vectors
    seen = np.maximum(np.linalg.eigvalsh(root.T @ on @ root), 0.0)
    trace = float(np.sum(np.sqrt(seen)) + np.sum(np.sqrt(p[upper] * (off[upper] + added))))
    return trace**2 / (mass + float(np.sum(added)) / 2) * (1 - 1e-9)
