"""Whether one release "lies under" another: is dominated by it at every epsilon, so that it may replace it in a plan.

Guarantee: if `lies_under(use, reference)`, then the guarantee of a composition still holds, in both directions, when
    `use` replaces `reference` in it. Domination at every epsilon carries over to products (zhu2022optimal).

Write A and R for the curves `H(epsilon)` of the two profiles. Profiles are the same in both directions, so that
H(-x) = 1 - e^-x + e^-x H(x), and A <= R at every epsilon >= 0 is enough. One of four cases must hold:

1. Gaussian noise: mu is not larger.
2. Discrete noise of equal exponent and scale: every entry that changes has a partner in the reference that changes by
   as many steps or more (`privacy.discrete`, 1. and 2.). For exponent 1 the scale may also be larger than that of the
   reference: such noise is noise of the smaller scale plus independent noise.
3. Noise with a pure epsilon E, beyond which A is 0: on points 0 = e_0 < e_1 < ... < e_n = E, A(e_i) <= R(e_(i+1)).
   Both curves fall, so A(e) <= A(e_i) <= R(e_(i+1)) <= R(e) between two points. A is rounded up; R is lowered by more
   than its error.
4. The reference is discrete Laplace noise on one entry that changes by one step, with pure epsilon E. It is randomized
   response with E, which dominates all noise with a pure epsilon up to E (kairouz2017composition).

All other releases are refused, even if they are dominated: case 3, for one, needs some distance between the curves.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np

from matrixdp.accounting.methods import Use, exact_pure_epsilon
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Profile

_POINTS = 512
_GAUSSIAN_ERROR, _DISCRETE_ERROR = 1e-9, 1e-3  # more than the relative errors of the two profiles
_LEAST_EPSILON = 1e-8  # the least epsilon for which the former holds
_FEWEST, _MOST_DISCRETE = 1e-200, 64  # the least delta, and the most entries, for which the latter holds


def lies_under(use: Use, reference: Use) -> bool:
    """Whether a release is proven to be dominated by the reference at every epsilon, sampler error included."""
    same_rate = use.sampling_rate == reference.sampling_rate
    return same_rate and use.total_variation <= reference.total_variation and _under(use.profile, reference.profile)


@lru_cache(maxsize=1024)
def _under(profile: Profile, reference: Profile) -> bool:
    if profile == reference:
        return True
    if isinstance(profile, GaussianProfile):
        return isinstance(reference, GaussianProfile) and profile.mu <= reference.mu
    if isinstance(profile, DiscreteProfile) and isinstance(reference, DiscreteProfile) and _entries(profile, reference):
        return True
    return _on_points(profile, reference) or _pure(profile, reference)


def _pure(profile: Profile, reference: Profile) -> bool:
    """Case 4 above."""
    if not isinstance(reference, DiscreteProfile) or reference != DiscreteProfile(1.0, reference.scale_in_steps):
        return False
    own, most = exact_pure_epsilon(profile), exact_pure_epsilon(reference)
    return own is not None and most is not None and own <= most


def _entries(profile: DiscreteProfile, reference: DiscreteProfile) -> bool:
    """Case 2 above."""
    scales = profile.scale_in_steps, reference.scale_in_steps
    if profile.exponent != reference.exponent or scales[0] < scales[1]:
        return False
    if scales[0] > scales[1] and profile.exponent > 1.0:
        return False
    groups, larger = (dict(each.groups) for each in (profile, reference))
    return all(
        sum(cells for size, cells in groups.items() if size >= shift)
        <= sum(cells for size, cells in larger.items() if size >= shift)
        for shift in groups
    )


def _on_points(profile: Profile, reference: Profile) -> bool:
    """Case 3 above."""
    end, last = (float(getattr(each, "pure_epsilon", math.inf)) for each in (profile, reference))
    if not (0.0 < end < last and end / _POINTS >= _LEAST_EPSILON):
        return False
    if isinstance(reference, GaussianProfile):
        error = _GAUSSIAN_ERROR
    elif isinstance(reference, DiscreteProfile) and sum(cells for _, cells in reference.groups) <= _MOST_DISCRETE:
        error = _DISCRETE_ERROR
    else:
        return False
    for low, high in itertools.pairwise(np.linspace(0.0, end, _POINTS + 1)):
        allowed = reference.delta(float(high))
        if not (allowed >= _FEWEST and profile.delta(float(low)) <= allowed * (1.0 - error)):
            return False
    return True
