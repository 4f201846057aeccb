"""The matrix mechanism: the least noise on a histogram for a workload of linear queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import (
    Dense,
    FullCovariance,
    Isotropic,
    Kronecker,
    Spectrum,
    Symmetric,
    SymmetricEntries,
)
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms.base import HEADROOM, recipe
from matrixdp.mechanisms.solvers import design, workloads
from matrixdp.mechanisms.solvers.workloads import MOST_CELLS, Workload
from matrixdp.privacy import gaussian
from matrixdp.privacy.suprema import supremum
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

    The law is noise for the histogram itself; the workload's answers are computed from the noisy histogram.

    Args:
        workload: a Workload from matrixdp.mechanisms.solvers.workloads, a matrix with one row per query on the cells
            taken row by row, or "identity", "total", "prefix", "all-ranges", which act along each axis.
        tolerance: the largest relative distance from the least error there is, as the duality gap proves it.

    Source: li2015matrix; the solver is matrixdp's own (design.py).
    Deviates: (1) the optimum over all covariances, not over a family of strategies; (2) when several cells change, the
        optimum for one cell is scaled to the certificate of the set.
    """
    if not isinstance(sensitivity, Counts):
        raise NotApplicable(f"matrix-mechanism needs a Counts set, got {type(sensitivity).__name__}; use 'optimal'")
    task = as_workload(workload, shape)
    covariance, gap = _solve(task, shape, tolerance)
    bound = float(gaussian.mu(budget.epsilon, budget.delta))
    mu = supremum(sensitivity, covariance).mu * (1 + covariance.slack)
    return Gaussian(
        covariance.scaled(mu / bound * HEADROOM), note=f"workload {task.name}, within {gap:.1g} of the least error"
    )


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
        spectra = [Spectrum(found.variances, found.directions) for found in designs]
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
    return Dense(Spectrum(found.variances, found.directions), shape), found.gap


def workload_error(workload: Any, law: NoiseLaw) -> float:
    """tr(P S): the total expected squared error over the workload's answers, computed from a value with this noise."""
    covariance = law.covariance if isinstance(law, Gaussian) else None
    shape = law.shape if covariance is None else covariance.shape  # a value of more dimensions is read as a matrix
    task = as_workload(workload, shape)
    if covariance is None or isinstance(covariance, Isotropic):
        return law.root_mean_square**2 * sum(math.prod(float(np.trace(gram)) for gram in term) for term in task.terms)
    if isinstance(covariance, Kronecker) and task.shape == shape:
        return sum(
            trace_product(rows, covariance.rows) * trace_product(columns, covariance.columns)
            for rows, columns in task.terms
        )
    if isinstance(covariance, Symmetric) and task.shape == shape:
        return sum(_symmetric_error(rows, columns, covariance) for rows, columns in task.terms)
    if isinstance(covariance, SymmetricEntries) and task.shape == shape:
        return sum(covariance.task_error(rows, columns) for rows, columns in task.terms)
    if isinstance(covariance, FullCovariance) and covariance.independent:
        return float(task.diagonal() @ covariance.variances().ravel())
    if isinstance(covariance, Dense):
        return trace_product(task.gram(), covariance.matrix)
    factor = np.stack([covariance.color(row.reshape(shape)).ravel() for row in np.eye(task.cells)])
    return float(np.sum((factor @ task.gram()) * factor))


def trace_product(gram: Array, covariance: Spectrum) -> float:
    """tr(P S) for S by its spectrum, and P a matrix or the diagonal of a diagonal one."""
    if gram.ndim == 1:
        return float(gram @ covariance.diagonal(covariance.variances))
    if covariance.directions is None:
        return float(np.diag(gram) @ covariance.variances)
    return float(np.sum(covariance.directions * (gram @ covariance.directions), axis=0) @ covariance.variances)


def _symmetric_error(rows: Array, columns: Array, covariance: Symmetric) -> float:
    """tr(P S) for P = rows (x) columns and S = std^2 (I + T)/2 + (trace_std^2 - std^2) e e^T.

    T is the transposition, with tr(P T) = <rows, columns>, and e the direction of the identity, with
    e^T P e = <rows, columns>/d.
    """
    both, inner = float(np.trace(rows)) * float(np.trace(columns)), float(np.sum(rows * columns))
    on_trace = (covariance.trace_std**2 - covariance.std**2) / covariance.dimension
    return float(covariance.std**2 * (both + inner) / 2 + on_trace * inner)
