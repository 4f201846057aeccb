"""Margins that noise, or linear functions of it, stay within with a given probability.

A margin of level `1 - alpha` is a number m, entry by entry, with P(|Z_i| <= m_i) >= 1 - alpha. For all n at once:

- Gaussian noise, and independent entries: each has the level (1 - alpha)^(1/n). Any Gaussian vector with mean zero is
  at least as likely to lie in a box about 0 as independent entries of the same variances (sidak1967rectangular).
- otherwise each has the level 1 - alpha/n (Bonferroni).

Alpha is reduced by a billionth of itself, which covers rounding here and the total-variation error of samplers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.errors import InvalidInput

if TYPE_CHECKING:
    from matrixdp.distributions.base import NoiseLaw

SPARE = 1e-9
"""The share of alpha that is kept back."""


class Margin(NamedTuple):
    """Margins of entries or functions, or one for all, and a lower bound on the probability that they attain."""

    size: Any
    level: float


def error_rate(level: Any) -> float:
    """Alpha, slightly less than 1 - level."""
    if not 0 < _check.number("level", level) < 1:
        raise InvalidInput(f"level must lie strictly between 0 and 1, such as 0.95, got {_check.shown(level)}")
    return (1 - float(level)) * (1 - SPARE)


def sidak(alpha: float, count: int) -> float:
    """The failure probability of each of `count` independent events, if any of them fails with probability alpha."""
    return -math.expm1(math.log1p(-alpha) / count)


def attained(level: float, computed: float) -> float:
    """A lower bound on a computed probability that is known to be at least the requested level."""
    return max(float(level), computed - 1e-12)


@dataclass(frozen=True, eq=False)
class LinearNoise:
    """The noise W vec(Z) of linear functions of a release, one per row of W.

    Attributes:
        law: the law of Z.
        weights: W, of shape (functions, entries).
        covariance: of the functions.
    """

    law: NoiseLaw
    weights: Array
    covariance: Array

    @property
    def standard_error(self) -> Array:
        """The standard deviation of the noise in every function."""
        return np.sqrt(np.diagonal(self.covariance))

    def margin(self, level: float = 0.95, *, simultaneous: bool = False) -> Margin:
        """The margin of every function, and the probability that it attains; for all at once if simultaneous."""
        return self.law.linear_margin(self.weights, level, simultaneous=simultaneous)

    def half_width(self, level: float = 0.95, *, simultaneous: bool = False) -> Array:
        """The margin of each function at this probability: half the width of its interval."""
        return np.asarray(self.margin(level, simultaneous=simultaneous).size)


def as_weights(weights: Any, shape: Shape) -> Array:
    """Weights of linear functions as (functions, entries); one function may have the shape of the value."""
    array = _check.finite("weights", weights, ndim=None)
    entries = math.prod(shape)
    if array.shape in (shape, (entries,)):
        return array.reshape(1, entries)
    if array.ndim and array.shape[1:] in (shape, (entries,)):
        return array.reshape(len(array), entries)
    raise InvalidInput(
        f"weights must have one row of {entries} numbers per linear function, or one array of shape {shape} each, got "
        f"shape {array.shape}"
    )
