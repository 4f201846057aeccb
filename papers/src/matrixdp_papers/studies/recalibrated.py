"""Noise of the same shape, rescaled to a true guarantee, to compare mechanisms at equal guarantees."""

from __future__ import annotations

import math
from dataclasses import replace

from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, Spherical
from matrixdp.errors import NotCertifiable
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.pipeline import sized_for_mu
from matrixdp.privacy import gaussian
from matrixdp.privacy.spherical import scale_for
from matrixdp.sensitivity import Sensitivity


def recalibrated(law: NoiseLaw, sensitivity: Sensitivity, budget: Budget) -> NoiseLaw:
    """Scales noise, up or down, until its certificate keeps the budget exactly.

    Guarantee: the result keeps the budget on the set, and a scale smaller by 1e-8 would not where certificates are
    exact. Gaussian noise that is i.i.d. becomes the analytic Gaussian, whatever theorem it came from.
    """
    if isinstance(law, Spherical):
        radius = sensitivity.frobenius_radius(law.shape) * HEADROOM
        scale = scale_for(math.prod(law.shape), law.k, law.p, radius, budget.epsilon, budget.delta)
        return replace(law, scale=scale)
    if not isinstance(law, Gaussian):
        raise NotCertifiable(f"only Gaussian and spherical noise can be scaled to a budget, not {law.describe()}")
    bound = float(gaussian.mu(budget.epsilon, budget.delta))
    return sized_for_mu(law, sensitivity, bound, with_drawing=False).law
