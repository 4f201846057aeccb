"""Error bars of a release: the law of the noise is public, so every released number has a standard error.

They cover the noise and the rounding that drawing it needs: how far a released number may be from the query's true
value. They do not cover how well the records represent a larger population.

Coverage. Let y be the released value, x the true value, and Z the noise, whose margins `distributions` computes. Then
|y - x| is at most the margin plus the terms below, with the probability of the margin minus the total-variation error
of the sampler, for which margins leave room.

- Gaussian noise on a grid of step h, in units of the noise. In whitened coordinates noise and value are each rounded by
  half a step, and the value by three eighths of a step more before that (`Grid.displacement`): 1.375 h in all. A linear
  function of n coordinates with standard deviation s moves by at most 1.375 h sqrt(n) s, since the squares of its
  coefficients add up to s^2. With independent entries one entry is one coordinate. Whitening a correlated value, and
  colouring it again, rounds it by at most what the certificate adds to mu for whitening two values. The rounded noise
  has the variance 1 + h^2/12 in its own units.
- Discrete noise of step g: the value was floored, which lowers every entry by less than g, unless it lies on the grid.
- The last digits of floats: four units in the last place of the released value cover its rounding, and that of the
  ends. Whole multiples of the step of discrete noise are not rounded in double precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions import Gaussian, NoiseLaw, Product
from matrixdp.distributions.margins import LinearNoise, Margin
from matrixdp.privacy.drawing import Drawing, independent, whitening_error

# Roundings of noise and value to the grid, in steps.
_ROUNDED = 1.375


@dataclass(frozen=True, eq=False)
class Interval:
    """Intervals that contain the true values with a given probability.

    Attributes:
        low: the lower ends, in the type and shape of the released value.
        high: the upper ends.
        level: the probability that an entry is covered, or that all are if simultaneous; at least the level asked for,
            and above it for discrete noise. That of a bootstrap is approximate.
        simultaneous: whether all entries are covered at once with that probability.
    """

    low: Any
    high: Any
    level: float
    simultaneous: bool


Moved = tuple[Any, Any]
"""How far the true value may be below and above the released one for other reasons than noise."""


@dataclass(frozen=True, eq=False)
class LinearRelease:
    """Linear functions of a release, one per row of weights, with the law of their noise.

    Attributes:
        value: the functions of the released value.
        noise: their noise, with the weights.
        covariance: of their noise, the rounding to the grid included.
        moved: how far putting the value on a grid may have moved them.
        last_digit: the relative rounding error of floats.
        sizes: what that error is relative to.
    """

    value: Any
    noise: LinearNoise
    covariance: Array
    moved: Moved
    last_digit: float
    sizes: Any

    @property
    def standard_error(self) -> Array:
        """The standard deviation of the noise in every function."""
        return np.sqrt(np.maximum(np.diagonal(self.covariance), 0.0))

    def interval(self, level: float = 0.95, simultaneous: bool = False) -> Interval:
        """Intervals for the functions of the true value, each by itself or simultaneous; see `Release.interval`."""
        margin = self.noise.margin(level, simultaneous=simultaneous)
        return _interval(self.value, margin, self.moved, self.last_digit, self.sizes, simultaneous)


def standard_error(law: NoiseLaw, drawing: Drawing | None) -> Array:
    """The standard deviation of the noise in every entry, its rounding to the grid included."""
    found, factor = law.standard_error, 1.0 if drawing is None else math.sqrt(drawing.variance_factor)
    repeated = tuple(slice(None) if stride else slice(1) for stride in found.strides)
    once = found[repeated]  # what repeats stays one number
    return np.broadcast_to(factor * once, found.shape)


def interval(
    value: Any, law: NoiseLaw, drawing: Drawing | None, level: float, *, simultaneous: bool, on_grid: bool
) -> Interval:
    """The intervals of a release; see `Release.interval`."""
    margin = law.margin(level, simultaneous=simultaneous)
    if isinstance(law, Gaussian):
        share = _rounded(law, drawing, 1 if independent(law.covariance) else law.covariance.rank())
        away = share * law.entry_std if share else 0.0
        moved = (away, away)
    else:
        moved = (0.0, _floored(law, drawing, on_grid))
    exact = drawing is not None and drawing.step is not None and value.dtype.itemsize == 8
    return _interval(value, margin, moved, 0.0 if exact else _last_digit(value), abs(value), simultaneous)


def linear(value: Any, law: NoiseLaw, drawing: Drawing | None, weights: Any, *, on_grid: bool) -> LinearRelease:
    """Linear functions of a release; see `Release.linear`."""
    noise = law.linear(weights)
    flat = _array(value).reshape(-1)
    if isinstance(law, Gaussian):
        if independent(law.covariance):
            away = _rounded(law, drawing, 1) * np.abs(noise.weights) @ law.standard_error.ravel()
        else:
            away = _rounded(law, drawing, law.covariance.rank()) * noise.standard_error
        moved: Moved = (away, away)
    else:
        down, up = (np.sum(np.maximum(sign * noise.weights, 0.0), axis=1) for sign in (-1, 1))
        step = _floored(law, drawing, on_grid)
        moved = (step * down, step * up)
    last_digit, sizes = _last_digit(value) + flat.size * 2.0**-52, abs(flat) @ np.abs(noise.weights).T
    covariance = noise.covariance * (1.0 if drawing is None else drawing.variance_factor)
    return LinearRelease(flat @ noise.weights.T, noise, covariance, moved, last_digit, sizes)


def _interval(value: Any, margin: Margin, moved: Moved, last_digit: float, sizes: Any, simultaneous: bool) -> Interval:
    down, up = (_like(value, (margin.size + way) * (1 + last_digit)) for way in moved)
    rounding = last_digit * sizes
    return Interval(value - down - rounding, value + up + rounding, margin.level, simultaneous)


def _rounded(law: Gaussian, drawing: Drawing | None, coordinates: int) -> float:
    """How far rounding moves a function of this many coordinates, in its standard deviations."""
    if drawing is None or drawing.grid is None:
        return 0.0
    whitening = whitening_error(law.covariance) * (drawing.largest_norm or 0.0)
    return _ROUNDED * drawing.grid.step * math.sqrt(coordinates) + whitening


def _floored(law: NoiseLaw, drawing: Drawing | None, on_grid: bool) -> float:
    """How far an entry may have been floored."""
    drawn_on_grid = drawing is not None and drawing.step is not None
    return law.step if isinstance(law, Product) and drawn_on_grid and not on_grid else 0.0


def _last_digit(value: Any) -> float:
    """Four units in the last place of a number, relative to it."""
    return 4 * 2.0 ** (-23 if value.dtype.itemsize == 4 else -52)


def _array(value: Any) -> Any:
    """A tensor as an array of doubles; all else as it is."""
    if _check.library(value) == "torch":
        return value.detach().cpu().double().numpy()
    return value


def _like(value: Any, sizes: Any) -> Any:
    """Numbers that can be added to the value."""
    if _check.library(value) == "torch":
        return value.new_tensor(sizes)
    return sizes
