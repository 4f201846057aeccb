"""The worst pattern of participation: the steps at which one record is protected least by noise over time.

With G the precision of the rows (C^T C / std^2 for a strategy C), a record with rows v_i of norm at most `clip` at the
steps of a pattern p has mu^2 = sum over i, j in p of G_ij <v_i, v_j>, hence

    mu <= clip * sqrt(max over p of sum over i, j in p of |G_ij|),

with equality if signs s_i exist on the worst pattern with s_i s_j G_ij = |G_ij|, as for G >= 0. Another bound, for each
pattern p, is clip * sqrt(|p| * largest eigenvalue of G on p). The maximum over patterns, b the separation:

1. If G_ij = 0 wherever |i - j| >= b, as for a strategy with at most b bands, only the diagonal counts, and a dynamic
   program finds the heaviest pattern.
2. Cyclic patterns are few: all are tried.
3. If |G_ij|, i <= j, does not fall as i grows, and does not grow along a diagonal, the worst pattern is 0, b, 2b, ...:
   take any pattern p_1 < p_2 < ... and q_a = (a - 1) b. For a < a', the lag of the q's is at most that of the p's, and
   q_a' <= p_a'. Raise the smaller index of the pair (p_a, p_a') until it has the lag of the q's, then move along the
   diagonal to (q_a, q_a'): |G| does not fall on the way. More steps add terms that are 0 or above.
   A Toeplitz C with coefficients c_0 >= c_1 >= ... >= 0 is such: G_ij = sum over u <= n-1-j of c_u c_(u + j - i).
   So is C = B^-1 for a Toeplitz B with b_j <= 0 for j > 0 whose partial sums P_0, P_1, ... are above 0 and log-convex:
   c_t = (1_(t=0) - sum_j b_j c_(t-j)) / b_0 >= 0, and as B(x) = (1 - x) P(x), the differences of c are the coefficients
   of 1 / P(x), which are 0 or below after the first (kaluza1928koeffizienten). Beyond the last band P is constant.
4. Otherwise a bound: the sum over i of a pattern of sum_j |G_ij| is at most that of w_i = |G_ii| + the largest sum of
   |G_ij| over other steps, and both are dynamic programs over single steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from matrixdp._check import Array
from matrixdp.sensitivity.participation import Participation, Steps


def worst_pattern(sensitivity: Participation, gram: Array) -> tuple[float, Steps]:
    """An upper bound on the squared mu of a record with clip 1, and the worst pattern found.

    Args:
        sensitivity: which patterns are possible.
        gram: G.
    """
    sizes, gap, steps = np.abs(gram), sensitivity.gap, len(gram)
    # each entry of G may be off by n 2^-52 of sqrt(G_ii G_jj); over a pattern, by that times its steps, relative
    rounding = 1 + sensitivity.most_times(steps) * steps * 2.0**-51
    if not np.any(np.triu(sizes, gap)):
        square, pattern = sensitivity.heaviest(np.diagonal(sizes))
        return square * rounding, pattern
    if sensitivity.cyclic:
        patterns = sensitivity.cycles(steps)
        bounds = [_bound(gram[np.ix_(each, each)]) for each in patterns]
        worst = int(np.argmax(bounds))
        return bounds[worst] * rounding, patterns[worst]
    if _falls(sizes):
        pattern = sensitivity.first_pattern(steps)
        square = float(np.sum(sizes[np.ix_(pattern, pattern)]))
        if np.all(gram >= 0):  # then the bound is attained
            return square * rounding, pattern
    else:
        square, pattern = _by_single_steps(sensitivity, sizes)
    ball = sensitivity.most_times(steps) * float(np.linalg.eigvalsh(gram)[-1])
    return min(square, ball) * rounding, pattern


def _bound(gram: Array) -> float:
    """The bound for one pattern."""
    return min(float(np.sum(np.abs(gram))), len(gram) * float(np.linalg.eigvalsh(gram)[-1]))


def _falls(sizes: Array) -> bool:
    """Whether case 3 holds."""
    upper = np.triu_indices(len(sizes), 1)
    return bool(np.all(sizes[upper[0] + 1, upper[1]] >= sizes[upper]) and np.all(sizes[1:, 1:] <= sizes[:-1, :-1]))


def _by_single_steps(sensitivity: Participation, sizes: Array) -> tuple[float, Steps]:
    """The bound of case 4, and the pattern that attains it in the last dynamic program."""
    place = np.arange(len(sizes))
    others = np.where(np.abs(place[:, None] - place[None, :]) >= sensitivity.gap, sizes, 0.0)
    most = sensitivity.most_times(len(sizes))
    return sensitivity.heaviest(np.diagonal(sizes) + sensitivity.heaviest_sums(others, most - 1))


def signs(gram: Array) -> Array:
    """Signs that make the sum of s_i s_j G_ij large: an ascent from the signs that reinforce the first step."""
    return ascended(np.where(gram[0] < 0, -1.0, 1.0), np.ones(len(gram)), lambda corner: gram @ corner)


def ascended(corner: Array, bounds: Array, gradient: Callable[[Array], Array]) -> Array:
    """Moves from a corner of the box with these bounds along the gradient, until no step improves it (at most 50)."""
    for _ in range(50):
        better = np.where(gradient(corner) < 0, -bounds, bounds)
        if np.array_equal(better, corner):
            break
        corner = better
    return corner
