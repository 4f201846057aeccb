"""The task of a released matrix: weights on its entries, or linear functions W1 A W2^T of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Covariance, Kronecker
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms.directions import rows_and_columns
from matrixdp.mechanisms.matrix_mechanism import workload_error
from matrixdp.mechanisms.solvers.workloads import Workload


class Task(NamedTuple):
    """The Gram matrix P of a task, so that noise N(0, S) costs tr(P S).

    Attributes:
        weights: the diagonal of P, of the value's shape.
        grams: W1^T W1 and W2^T W2, each a matrix, or its diagonal if it is diagonal; None if P itself is diagonal.
    """

    weights: Array
    grams: tuple[Array, Array] | None = None


def task_of(shape: Shape, weights: Any = None, row_utility: Any = None, column_utility: Any = None) -> Task:
    """The task given by options: weights, or else utilities; by default all entries count alike."""
    if weights is not None:
        given = _check.broadcast("weights", weights, shape)
        if not (np.all(given >= 0) and np.any(given > 0)):
            raise InvalidInput("weights must be 0 or above everywhere and above 0 somewhere")
        return Task(given)
    if row_utility is None and column_utility is None:
        return Task(np.broadcast_to(1.0, shape))
    sides = rows_and_columns("a utility", shape)
    names = ("row_utility", "column_utility")
    rows, columns = map(_gram, names, (row_utility, column_utility), sides)
    diagonal = np.outer(*(gram if gram.ndim == 1 else np.diagonal(gram) for gram in (rows, columns)))
    if rows.ndim == columns.ndim == 1:
        return Task(diagonal)
    return Task(diagonal, (rows, columns))


def task_error(task: Task, law: NoiseLaw) -> float:
    """tr(P S): the expected squared error of the task."""
    covariance = law.covariance if isinstance(law, Gaussian) else None
    independent = not isinstance(covariance, Covariance) or getattr(covariance, "independent", False)
    if task.grams is None or independent:
        return law.expected_squared_error(task.weights.reshape(law.shape))
    if isinstance(covariance, Kronecker):
        return covariance.task_error(*task.grams)
    return workload_error(Workload(name="utilities", terms=(tuple(map(square, task.grams)),)), law)


def couples(utility: Any) -> bool:
    """Whether a utility combines several rows or columns, so that its Gram matrix is not diagonal."""
    return utility is not None and _gram("utility", utility, np.shape(utility)[-1]).ndim == 2


def _gram(name: str, utility: Any, size: int) -> Array:
    """W^T W for a matrix W, or its diagonal if it is diagonal; weights are returned as they are."""
    if utility is None:
        return np.ones(size)
    given = _check.finite(name, utility)
    if given.shape[-1] != size:
        raise InvalidInput(f"{name} must have {size} columns (or be {size} weights), got shape {given.shape}")
    gram = given if given.ndim == 1 else given.T @ given
    if not (np.all(np.diagonal(gram) >= 0 if gram.ndim == 2 else gram >= 0) and np.any(gram > 0)):
        raise InvalidInput(f"{name} must have weights of 0 or above, and one above 0")
    if gram.ndim == 2 and np.count_nonzero(gram) == np.count_nonzero(np.diagonal(gram)):
        return np.diagonal(gram).copy()
    return gram


def square(gram: Array) -> Array:
    """The full matrix of a Gram matrix that may be stored as its diagonal."""
    return np.diag(gram) if gram.ndim == 1 else gram
