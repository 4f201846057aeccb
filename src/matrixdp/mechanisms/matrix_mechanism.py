"""The matrix mechanism: the least noise on a histogram for a workload of linear queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import (
    Dense,
    FullCovariance,
    Isotropic,
    Kronecker,
    Symmetric,
    SymmetricEntries,
)
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms.base import recipe, sized
from matrixdp.mechanisms.solvers import design, workloads
from matrixdp.mechanisms.solvers.workloads import MOST_CELLS, Workload
from matrixdp.sensitivity import Counts, Sensitivity

NAMED = {
    "identity": workloads.identity,
    "total": workloads.total,
    "prefix": workloads.prefix,
    "all-ranges": workloads.all_ranges,
}


@recipe("matrix-mechanism", source="li2015matrix")
def matrix_mechanism(
    shape: Shape, sensitivity: Sensitivity, budget: Budget, *, workload: Any, tolerance: float = 1e-6
) -> Gaussian:
    """The covariance with the least total squared error over the answers of a workload.

    The noise is added to the histogram itself; the workload's answers are computed from the noisy histogram.

    Args:
        workload: a Workload from matrixdp.mechanisms.solvers.workloads, whose `tensor` and `union` combine others; a
            matrix with one row per query on the cells taken row by row; or "identity", "total", "prefix" or
            "all-ranges", which act along each axis.
        tolerance: the largest relative distance from the optimal error, proven by the duality gap.

    Source: li2015matrix; the solver is matrixdp's own (design.py).
    Deviates: (1) the optimum over all covariances, not over a family of strategies; (2) when several cells change, the
        optimum for one cell is scaled to the certificate of the set.
    """
    if not isinstance(sensitivity, Counts):
        raise NotApplicable(f"matrix-mechanism needs a Counts set, got {type(sensitivity).__name__}; use 'optimal'")
    task = as_workload(workload, shape)
    covariance, gap = _solve(task, shape, tolerance)
    return sized(covariance, sensitivity, budget, f"workload {task.name}, within {gap:.1g} of the least error")


def as_workload(workload: Any, shape: Shape) -> Workload:
    """A workload on values of this shape, from an object, a name or a matrix."""
    if isinstance(workload, str):
        named = NAMED[_check.choice("workload", workload, NAMED)]
        return workloads.tensor(*(named(side) for side in shape))
    task = workload if isinstance(workload, Workload) else workloads.given(workload)
    if task.shape != shape and (task.cells,) != shape and task.shape != (math.prod(shape),):
        raise InvalidInput(f"workload is for a histogram of shape {task.shape}, the value has {shape}")
    return task


def _solve(task: Workload, shape: Shape, tolerance: float) -> tuple[FullCovariance, float]:
    """Axis by axis when the task is a product on the value's own axes, else on all cells at once."""
    if len(task.terms) == 1 and task.shape == shape:
        designs = design.solve_kronecker(task.terms[0], tolerance)
        spectra = [found.spectrum for found in designs]
        gap = design.combined_gap(designs)
        return (Kronecker(*spectra) if len(spectra) == 2 else Dense(spectra[0], shape)), gap
    if not task.cells <= MOST_CELLS:
        raise NotApplicable(
            f"matrix-mechanism needs a covariance of all {task.cells} cells for this workload, which is no product of "
            f"one workload per axis; it does so for at most {MOST_CELLS}"
        )
    if task.spectrum() is not None:
        found = workloads.solve_exchangeable(task, tolerance).dense()
    else:
        found = design.solve(task.gram(), tolerance=tolerance)
    return Dense(found.spectrum, shape), found.gap


def workload_error(workload: Any, law: NoiseLaw) -> float:
    """tr(P S): the total expected squared error over the workload's answers, computed from a value with this noise."""
    covariance = law.covariance if isinstance(law, Gaussian) else None
    shape = law.shape if covariance is None else covariance.shape  # a value of more dimensions is read as a matrix
    task = as_workload(workload, shape)
    if covariance is None or isinstance(covariance, Isotropic):
        return law.root_mean_square**2 * sum(math.prod(float(np.trace(gram)) for gram in term) for term in task.terms)
    if isinstance(covariance, (Kronecker, Symmetric, SymmetricEntries)) and task.shape == shape:
        return sum(covariance.task_error(rows, columns) for rows, columns in task.terms)
    if isinstance(covariance, FullCovariance) and covariance.independent:
        return float(task.diagonal() @ covariance.variances().ravel())
    if isinstance(covariance, Dense):
        return float(covariance.matrix.task_error(task.gram()))
    factor = np.stack([covariance.color(row.reshape(shape)).ravel() for row in np.eye(task.cells)])
    return float(np.sum((factor @ task.gram()) * factor))
