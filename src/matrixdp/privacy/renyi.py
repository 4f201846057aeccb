"""Rényi divergences of noise, rounded up.

For alpha > 1, `D = log(E_Q (P/Q)^alpha) / (alpha - 1)`. x^alpha is convex, so D is an increasing function of an
f-divergence: a pair that dominates another at every real epsilon has the larger D (Blackwell). A profile is that of the
worst difference of a set at every real epsilon (`privacy.discrete`, 1. to 3.; for Gaussian noise the largest mu), and
is the same in both directions. Hence D of the profile's own pair is the largest on the set.

- Gaussian noise: alpha mu^2 / 2.
- Discrete noise: a sum of `log(E_P e^((alpha - 1) l)) / (alpha - 1)` over the entries, with losses l. For exponent 1
  there are finitely many losses. Otherwise the expectation is a series with terms e^f(x) at j = -x, where
  f(x) = -phi(x) + (alpha - 1)(phi(x + m) - phi(x)) is concave for x >= 0: phi' increases, and phi'' decreases for
  1 <= t <= 2. So the terms beyond any x add up to at most a geometric series with the ratio e^(f(x) - f(x - 1)).
- Other profiles: infinite, as no divergence is known here.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from matrixdp._check import Array
from matrixdp.privacy.cells import UNIT, cell_loss, sum_rounding
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Profile

_DEPTH = 60.0  # terms below e^-60 of the largest are bounded by the geometric series
_MOST_TERMS = 2**21


@lru_cache(maxsize=4096)
def divergence(profile: Profile, order: float) -> float:
    """The divergence of a profile at an order above 1, rounded up."""
    if isinstance(profile, GaussianProfile):
        return 0.5 * order * profile.mu**2 * (1.0 + 8.0 * UNIT)
    if isinstance(profile, DiscreteProfile):
        exponent, scale = profile.exponent, profile.scale_in_steps
        return math.fsum(cells * _of_cell(exponent, scale, shift, order) for shift, cells in profile.groups)
    return math.inf


def _of_cell(exponent: float, scale: float, shift: int, order: float) -> float:
    """The divergence of one entry with discrete noise that is shifted by this many steps."""
    more = order - 1.0
    if exponent == 1.0:
        loss = cell_loss(exponent, scale, shift)
        terms = np.log(loss.masses) + more * loss.losses
        return _log_sum(terms, more * float(loss.losses[0]) + 8.0) / more * (1.0 + 4.0 * UNIT)
    # the largest term is at more * shift or less
    reach = math.ceil(more * shift + scale * _DEPTH ** (1.0 / exponent)) + 1
    if reach + shift > _MOST_TERMS:
        return math.inf
    phi = (np.arange(reach + shift + 1.0) / scale) ** exponent
    normaliser = math.log((2.0 * float(np.sum(np.exp(-phi[1:]))) + 1.0) * (1.0 - sum_rounding(phi.size)))
    places = np.arange(-reach, shift + reach + 1)
    near, far = phi[np.abs(places)], phi[np.abs(places - shift)]
    terms = -near + more * (far - near)
    size = 16.0 * UNIT * (order * float(np.max(near + far)) + 8.0)  # more than the rounding of a term
    ratio = math.exp(min(float(terms[0] - terms[1]) + 2.0 * size, 0.0))
    if not ratio < 1.0:
        return math.inf
    rest = [
        float(terms[0]) + (math.log(ratio / (1.0 - ratio)) if ratio > 0.0 else -math.inf),
        -float(near[-1]) - math.log(-math.expm1(near[-2] - near[-1])),
    ]
    total = _log_sum(np.append(terms, rest), 0.0) + 2.0 * size - normaliser
    return max(total, 0.0) / more * (1.0 + 4.0 * UNIT) + 8.0 * UNIT


def _log_sum(terms: Array, size: float) -> float:
    """log of the sum of exponentials, rounded up; each term was rounded in proportion to `size`."""
    largest = float(np.max(terms))
    total = float(np.sum(np.exp(terms - largest))) * (1.0 + sum_rounding(terms.size) + 800.0 * 4.0 * UNIT)
    return largest + math.log(total) + 8.0 * UNIT * (abs(largest) + size + 1.0)
