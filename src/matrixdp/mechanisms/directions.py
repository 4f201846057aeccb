"""What the directional mechanisms share: a bound on the norm of the noise, and weights of directions for a task."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.errors import InvalidInput, NotApplicable

# The share of the error that noise in directions unused by the task may cost; more noise there allows less elsewhere.
UNSEEN_SHARE = 1e-3


def squared_radius(size: int, delta: float) -> float:
    """z^2 with P(||N||^2 <= z^2) >= 1 - delta for `size` standard normal entries.

    Source: laurent2000adaptive, Lemma 1.
    """
    log = -math.log(delta)
    return 2 * math.sqrt(size * log) + 2 * log + size


def largest_root(a: float, b: float, epsilon: float) -> float:
    """The positive root of a x^2 + b x = 2 epsilon, without cancellation."""
    return 4 * epsilon / (b + math.sqrt(b**2 + 8 * a * epsilon))


def rows_and_columns(mechanism: str, shape: Shape) -> tuple[int, int]:
    """The two sides of a matrix value."""
    if len(shape) != 2:
        raise NotApplicable(f"{mechanism} needs a value with rows and columns, got shape {shape}; use 'analytic'")
    return shape[0], shape[1]


def utility(name: str, task: Any, directions: Array | None, size: int) -> Array:
    """The weight P_i of each noise direction for a task: columns of W times the directions, squared and summed.

    The task is a matrix W with one column per entry, or the weights themselves; None weighs all alike. It must be
    public. Weights of 0 are raised slightly, since the optimal noise would be infinite there.
    """
    if task is None:
        return np.ones(size)
    given = _check.finite(name, task)
    if given.shape[-1] != size:
        raise InvalidInput(f"{name} must have {size} columns (or be {size} weights), got shape {given.shape}")
    if given.ndim == 1:
        weights = given
    else:
        seen = given if directions is None else given @ directions
        weights = np.sum(np.square(seen), axis=0)
        # what rounding leaves of a direction that the task does not use
        rounding = (size * np.finfo(np.float64).eps) ** 2 * np.sum(np.square(given))
        weights = np.where(weights > rounding, weights, 0.0)
    if not (np.all(weights >= 0) and np.any(weights > 0)):
        raise InvalidInput(f"{name} must have weights of 0 or above, and one above 0")
    return np.square(roots_of(weights, np.ones(size)))


def roots_of(weights: Array, bounds: Array) -> Array:
    """Roots of the weights; weights of 0 are raised so that together they cost a share UNSEEN_SHARE of the error.

    Works along the last axis; each index of the other axes is a separate task.
    """
    roots, unseen = np.sqrt(weights), (weights == 0) & (bounds > 0)
    if not np.any(unseen):
        return roots
    spent, hidden = (np.sum(bounds * part, axis=-1, keepdims=True) for part in (roots, unseen))
    level = UNSEEN_SHARE * np.divide(spent, hidden, out=np.zeros_like(spent), where=hidden > 0)
    return np.where(unseen, level, roots)
