"""Linear workloads A on the steps of a stream, lower triangular because no answer uses later steps.

A workload is written as

    "prefix"            running sums, the default of everything over time
    "window:7"          sums over the last 7 steps
    "decay:0.9"         running sums in which the weight of a step is multiplied by 0.9 at each later one
    "momentum:0.9"      running sums with heavy-ball momentum: the iterates of SGD with momentum
    [a_0, a_1, ...]     answer t is a_0 x_t + a_1 x_(t-1) + ..., coefficients beyond the last are 0
    a matrix            one row per answer and one column per step; zero above the diagonal, nonzero on it

and `schedule(rates, momentum)` gives the matrix of training with a learning rate per step. A workload acts along the
rows of a value, on every column alike.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput

NAMED = ("prefix", "window:STEPS", "decay:FACTOR", "momentum:FACTOR")


def coefficients(workload: Any, steps: int) -> Array:
    """The workload on this many steps: its coefficients (one per step), or its matrix.

    Raises:
        InvalidInput: if it has none of the forms above, uses later steps, or answer t does not use step t.
    """
    if isinstance(workload, str):
        return _named(workload, steps)
    array = _check.finite("workload", workload)
    if array.ndim == 1:
        if not len(array) <= steps:
            raise InvalidInput(f"workload has {len(array)} coefficients, and there are {steps} steps; give fewer")
        if not array[0] != 0:
            raise InvalidInput("workload must not have 0 as its first coefficient: answer t must use step t")
        return np.concatenate([array, np.zeros(steps - len(array))])
    if array.shape != (steps, steps):
        raise InvalidInput(f"workload must have one row and one column per step, {steps}, got shape {array.shape}")
    if np.any(np.triu(array, 1)):
        raise InvalidInput("workload must be lower triangular: an answer must not use later steps; sort its rows")
    if not np.all(np.diagonal(array) != 0):
        raise InvalidInput("workload must not have 0 on its diagonal: answer t must use step t")
    return array


def _named(text: str, steps: int) -> Array:
    name, colon, number = text.partition(":")
    if name == "prefix" and not colon:
        return np.ones(steps)
    try:
        parameter = float(number)
    except ValueError:
        parameter = math.nan
    place = np.arange(float(steps))
    if name == "window" and parameter >= 1 and parameter.is_integer():
        return np.where(place < parameter, 1.0, 0.0)
    if name == "decay" and 0 <= parameter <= 1:
        return np.asarray(parameter**place)
    if name == "momentum" and 0 <= parameter < 1:
        return np.asarray(np.cumsum(parameter**place))
    raise InvalidInput(
        f"workload must be one of {', '.join(NAMED)}, coefficients or a matrix, got "
        f"{repr(text) if len(text) <= 40 else 'a longer text'}; a window has 1 step or more, factors lie from 0 to 1"
    )


def schedule(rates: Any, momentum: float = 0.0) -> Array:
    """The workload of training with a learning rate per step: row t has the weights of the steps in iterate t.

    Args:
        rates: the learning rates, above 0, one per step.
        momentum: the factor of heavy-ball momentum, from 0 to below 1.
    """
    given = _check.finite("rates", rates, ndim=1)
    if not np.all(given > 0):
        raise InvalidInput("rates must be above 0 at every step")
    if not 0 <= _check.number("momentum", momentum) < 1:
        raise InvalidInput(f"momentum must lie from 0 to below 1, got {_check.shown(momentum)}")
    place = np.arange(len(given))
    lag = place[:, None] - place[None, :]
    velocity = np.where(lag >= 0, float(momentum) ** np.maximum(lag, 0), 0.0)
    return np.asarray(np.cumsum(given[:, None] * velocity, axis=0))


def applied(workload: Array, rows: Array) -> Array:
    """A times rows, for a workload as `coefficients` gives it."""
    if workload.ndim == 2:
        return np.asarray(workload @ rows)
    if np.all(workload == 1):
        return np.asarray(np.cumsum(rows, axis=0))
    from scipy.signal import fftconvolve  # here, because it is slow to import

    taps = workload[: int(np.flatnonzero(workload)[-1]) + 1]
    return np.asarray(fftconvolve(rows, taps.reshape(-1, *[1] * (rows.ndim - 1)), axes=0)[: len(rows)])


def matrix(workload: Array) -> Array:
    """The workload as a dense matrix."""
    if workload.ndim == 2:
        return workload
    place = np.arange(len(workload))
    lag = place[:, None] - place[None, :]
    return np.where(lag >= 0, workload[np.maximum(lag, 0)], 0.0)


def column_squares(workload: Array) -> Array:
    """The squared norms of the columns of A: the weight of each step in the summed squared error of all answers."""
    if workload.ndim == 2:
        return np.asarray(np.sum(np.square(workload), axis=0))
    return np.cumsum(np.square(workload))[::-1]


def answer(workload: Array, step: int, rows: Array) -> Array:
    """The answer at one step, from the rows of all steps up to it."""
    used = workload[step, : step + 1] if workload.ndim == 2 else workload[: step + 1][::-1]
    return np.asarray(used @ rows[: step + 1])
