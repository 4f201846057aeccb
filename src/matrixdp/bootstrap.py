"""A parametric bootstrap: intervals of post-processed releases, where post-processing is smooth.

Let x be the true value, y the released one and f the post-processing. Noise Z of the known law is drawn again on top of
y, and the distribution of f(y + Z) - f(y) approximates that of f(y) - f(x). This is valid where f is nearly linear over
the range of the noise. It fails at boundaries and for maxima: the largest of many equal entries is never covered. So
every draw is checked, and if one leaves the smooth piece of f that contains y, no interval is given.

The level is approximate for `low_rank`, whose pieces are curved. In one run (25 releases, 199 draws each) 92 to 96 % of
the entries were covered at 95 %; the gaps of singular values were at least 3.8 times the norm of the noise. For the
others, which are linear on their pieces, it is exact up to the finite number of draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from matrixdp import _check, postprocess
from matrixdp._check import Array
from matrixdp.distributions import NoiseLaw, generator
from matrixdp.distributions.margins import error_rate
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.intervals import Interval

# The smallest gap between kept and dropped singular values, in norms of the noise.
GAP = 3.0
# The most numbers that are held in memory.
MOST = 1 << 26

Draws = Sequence[Array]


def _always(value: Array, draws: Draws) -> bool:
    return True


def _inside(value: Array, draws: Draws, low: Any, high: Any) -> bool:
    return all(np.all((each > low) & (each < high)) for each in draws)


def _above_zero(value: Array, draws: Draws, total: float | None = None) -> bool:
    return all(np.min(postprocess.nonnegative(each, total)) > 0 for each in draws)


def _definite(value: Array, draws: Draws) -> bool:
    return all(np.linalg.eigvalsh(postprocess.symmetrise(each))[0] > 0 for each in draws)


def _apart(value: Array, draws: Draws, rank: int) -> bool:
    values = np.append(np.linalg.svd(value, compute_uv=False), 0.0)
    return bool(values[rank - 1] - values[rank] >= GAP * max(np.linalg.norm(each - value, 2) for each in draws))


SMOOTH: dict[Callable[..., Array], tuple[Callable[..., bool], str]] = {
    postprocess.symmetrise: (_always, ""),
    postprocess.clip: (_inside, "entries reach the ends of their range"),
    postprocess.nonnegative: (_above_zero, "entries reach 0"),
    postprocess.nearest_psd: (_definite, "eigenvalues reach 0"),
    postprocess.low_rank: (_apart, "the singular values that are kept and dropped are not far enough apart"),
}
"""The post-processings that have a bootstrap, each with a test of its validity and what is wrong where that fails."""


def bootstrap(
    value: Any,
    law: NoiseLaw,
    function: Callable[..., Array],
    *arguments: Any,
    level: float = 0.95,
    draws: int = 999,
    rng: np.random.Generator | None = None,
    **options: Any,
) -> Interval:
    """Intervals of a post-processed release; see `Release.bootstrap`."""
    alpha, draws, rng = error_rate(level), _check.count("draws", draws), generator(rng)
    if function not in SMOOTH:
        known = ", ".join(each.__name__ for each in SMOOTH)
        raise NotApplicable(f"a bootstrap is known for these functions of matrixdp.postprocess: {known}")
    released = _check.finite("value", value, ndim=None)
    tail = math.floor((draws + 1) * alpha / 2 * (1 + 1e-6))  # level 0.95 has 2.5 % on each side, not slightly less
    if not tail >= 1:
        raise InvalidInput(f"draws must be at least {math.ceil(2 / alpha)} for level {level:g}, got {draws}")
    if not draws * released.size <= MOST:
        raise InvalidInput(f"draws times entries must be at most {MOST}, got {draws} times {released.size}")
    again = [released + law.sample(rng) for _ in range(draws)]
    smooth, otherwise = SMOOTH[function]
    best = function(released, *arguments, **options)
    if not smooth(released, [released, *again], *arguments, **options):
        raise NotApplicable(
            f"{function.__name__} has no valid bootstrap here: {otherwise} within the reach of the noise. Use "
            "Release.interval, whose ends may be post-processed where the function keeps their order"
        )
    moved = np.sort(np.stack([function(each, *arguments, **options) for each in again]) - best, axis=0)
    return Interval(best - moved[draws - tail], best - moved[tail - 1], float(level), False)
