"""Whether one release is no worse than another at every epsilon, and so may take its place in a plan.

Guarantee: if `lies_under(use, reference)`, then a composition stays within its guarantee when `use` takes the place of
    `reference` in it, also in both directions, for what dominates at every epsilon dominates in a product
    (zhu2022optimal).

Write A and R for the curves `H(epsilon)` of the two profiles. Profiles are the same in both directions, and then
H(-x) = 1 - e^-x + e^-x H(x); so A <= R at every epsilon >= 0 is enough. One of these is shown:

1. Gaussian noise: mu is not larger.
2. Discrete noise of one exponent and scale: every entry that changes has a partner in the reference that changes by as
   many steps or more (`privacy.discrete`, 1. and 2.). For exponent 1 the scale may also be larger: such noise is that
   of the smaller scale plus independent noise.
3. Noise with a pure epsilon E, beyond which A is 0: on points 0 = e_0 < e_1 < ... < e_n = E, A(e_i) <= R(e_(i+1)).
   Both curves fall, so A(e) <= A(e_i) <= R(e_(i+1)) <= R(e) between two points. A is rounded up; R is lowered by more
   than its error.

4. The reference is discrete Laplace noise in one entry that changes by one step, with pure epsilon E. It is randomized
   response with E, which dominates all noise with a pure epsilon up to E (kairouz2017composition).

Everything else is refused. So 3. refuses noise that lies under the reference by less than the distance of two points.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np

from matrixdp.accounting.methods import Use, exact_pure_epsilon
from matrixdp.privacy import gaussian
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Profile

_POINTS = 512
_GAUSSIAN_ERROR, _DISCRETE_ERROR = 1e-9, 1e-3  # more than the relative errors of the two profiles
_LEAST_EPSILON = 1e-8  # from which the former holds
_FEWEST, _MOST_DISCRETE = 1e-200, 64  # delta and entries up to which the latter holds


def lies_under(use: Use, reference: Use) -> bool:
    """Whether a release is shown to be no worse than the reference at every epsilon, its sampler included."""
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
    """4. above."""
    if not isinstance(reference, DiscreteProfile) or reference != DiscreteProfile(1.0, reference.scale_in_steps):
        return False
    own, most = exact_pure_epsilon(profile), exact_pure_epsilon(reference)
    return own is not None and most is not None and own <= most


def _entries(profile: DiscreteProfile, reference: DiscreteProfile) -> bool:
    """2. above."""
    scales = profile.scale_in_steps, reference.scale_in_steps
    if profile.exponent != reference.exponent or scales[0] < scales[1]:
        return False
    if scales[0] > scales[1] and profile.exponent > 1.0:
        return False
    groups, larger = (dict(((each.shift, each.cells), *each.others)) for each in (profile, reference))
    return all(
        sum(cells for size, cells in groups.items() if size >= shift)
        <= sum(cells for size, cells in larger.items() if size >= shift)
        for shift in groups
    )


def _on_points(profile: Profile, reference: Profile) -> bool:
    """3. above."""
    end = float(getattr(profile, "pure_epsilon", math.inf))
    if not 0.0 < end <= float(getattr(reference, "pure_epsilon", math.inf)) or not isinstance(
        reference, (GaussianProfile, DiscreteProfile)
    ):
        return False
    if (
        isinstance(reference, DiscreteProfile)
        and reference.cells + sum(n for _, n in reference.others) > _MOST_DISCRETE
    ):
        return False
    if end == getattr(reference, "pure_epsilon", math.inf):
        return False
    epsilons = np.linspace(0.0, end, _POINTS + 1)
    error = _GAUSSIAN_ERROR if isinstance(reference, GaussianProfile) else _DISCRETE_ERROR
    if not epsilons[1] >= _LEAST_EPSILON:
        return False
    for low, high in itertools.pairwise(epsilons):
        if isinstance(reference, GaussianProfile):
            allowed = float(gaussian.delta(reference.mu, high))
        else:
            allowed = reference.delta(float(high))
        if not (allowed >= _FEWEST and profile.delta(float(low)) <= allowed * (1.0 - error)):
            return False
    return True
