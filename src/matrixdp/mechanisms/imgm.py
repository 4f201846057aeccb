"""The improved matrix Gaussian mechanism (IMGM)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic, Kronecker
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms.base import HEADROOM, recipe
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import Sensitivity


@recipe("imgm", source="yang2021improved, Theorems 2 and 4")
def imgm(
    shape: Shape,
    sensitivity: Sensitivity,
    budget: Budget,
    *,
    rows: Any = None,
    columns: Any = None,
    releases: int = 1,
) -> Gaussian:
    """Any covariance pair, scaled until its smallest singular values satisfy Theorem 2.

    Without a pair the noise is i.i.d., the paper's optimum, which is the analytic Gaussian mechanism.

    Args:
        rows: covariance of the rows, public: a matrix, a vector of variances, or a Spectrum; scaling it has no effect.
        columns: covariance of the columns, likewise.
        releases: how many such releases share the budget; the law returned is for each of them.

    Source: yang2021improved, Theorem 2; Theorem 4 for several releases.
    Deviates: (1) B by a root solve to 1e-12 on the private side, in place of the paper's Algorithm 2, which has a
        stray division by T.
    """
    _check.count("releases", releases)
    bound = float(gaussian.mu(budget.epsilon, budget.delta)) / math.sqrt(releases)
    least = sensitivity.frobenius_radius(shape) / bound * HEADROOM
    if rows is None and columns is None:
        return Gaussian(Isotropic(shape, least))
    if len(shape) != 2:
        raise InvalidInput(f"rows and columns need a value with rows and columns, got shape {shape}")
    pair = Kronecker(
        np.ones(shape[0]) if rows is None else rows,
        np.ones(shape[1]) if columns is None else columns,
    )
    if pair.shape != shape:
        raise InvalidInput(f"rows and columns are for shape {pair.shape}, the value has {shape}")
    return Gaussian(pair.scaled(least / pair.smallest_std * (1 + pair.slack)))
