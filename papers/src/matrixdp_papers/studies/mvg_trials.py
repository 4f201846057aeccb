"""The ways to do a task of the MVG paper: its noise in several sizes, and the mechanisms that it compares with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Kronecker
from matrixdp.mechanisms import calibrate
from matrixdp.queries import Answer
from matrixdp_papers.rivals import johnson_lindenstrauss as jl
from matrixdp_papers.rivals.laplace import l1_radius, laplace
from matrixdp_papers.studies.recalibrated import recalibrated

# Relative error and failure probability of a variance estimated by the Johnson-Lindenstrauss transform.
PROJECTION_ERROR = (0.1, 0.05)


@dataclass(frozen=True)
class Trial:
    """One way to do a task: a query, its noise, and the error of the result.

    Attributes:
        name: for the table.
        answer: the query's value and set.
        law: the noise law; None for a mechanism without one, which has `draw` instead.
        score: the task's error from a noisy value.
        draw: a noisy value.
        std: of the noise, for `draw`.
        truth: epsilon, delta and verdict, for `draw`; by default pure differential privacy.
    """

    name: str
    answer: Answer
    law: NoiseLaw | None
    score: Callable[[Array], float]
    draw: Callable[[np.random.Generator], Array] | None = None
    std: float | None = None
    truth: tuple[float | None, float, str] = (None, 0.0, "pure")


def laplace_trial(answer: Answer, budget: Budget, score: Callable[[Array], float]) -> Trial:
    """Independent Laplace noise, which ignores delta."""

    def draw(rng: np.random.Generator) -> Array:
        return laplace(answer.value, answer.sensitivity, budget.epsilon, rng=rng)

    std = math.sqrt(2) * l1_radius(answer.sensitivity, answer.value.shape) / budget.epsilon
    return Trial("laplace", answer, None, score, draw, std)


def projected_trials(
    answer: Answer, distance: float, budget: Budget, score: Callable[[float], Callable[[Array], float]]
) -> list[Trial]:
    """The Johnson-Lindenstrauss transform, with the shift of its theorem and with the least valid shift.

    Args:
        answer: a second moment or covariance, one record replaced.
        distance: the largest distance between two records, in the units of the answer.
        budget: the claimed budget.
        score: the error of a noisy value, from the std that the shift alone causes on its diagonal.
    """
    rows = jl.published_rows(*PROJECTION_ERROR)
    shifts = {"": jl.published_shift(distance, budget, rows), ", rescaled": jl.exact_shift(answer, budget, rows)}
    trials = []
    for name, shift in shifts.items():
        ratio = answer.sensitivity.largest_entry(answer.value.shape) ** 0.5 / shift
        truth = jl.epsilon(budget.delta, ratio, rows), jl.delta(budget.epsilon, ratio, rows)
        draw = partial(jl.johnson_lindenstrauss, answer, shift, rows)
        caused, word = math.sqrt(2 / rows) * shift**2, "exact" if name else "loose"
        trials.append(Trial(f"JL transform{name}", answer, None, score(caused), draw, None, (*truth, word)))
    return trials


def identity_laws(answer: Answer, budget: Budget, important: list[int]) -> dict[str, NoiseLaw]:
    """Noise for the matrix of records, one per column; `important` rows get most of MVG's precision."""
    m, n = answer.value.shape
    order = [*important, *(row for row in range(m) if row not in important)]
    given: dict[str, Any] = {"shape": (m, n), "sensitivity": answer.sensitivity, "budget": budget}
    uniform = {**given, "gamma": math.sqrt(m * n)}
    binary = {**uniform, "precision": "binary", "important": len(important), "directions": np.eye(m)[:, order]}
    free = {"gamma": gamma_free((m, n), answer.sensitivity.frobenius_radius((m, n)))}
    directional = calibrate("mvg", **binary)
    assert isinstance(directional, Gaussian)
    assert isinstance(directional.covariance, Kronecker)
    return {
        "mvg, uniform": calibrate("mvg", **uniform),
        "mvg, binary": directional,
        "mvg, binary, radius": calibrate("mvg", radius="laurent-massart", **binary),
        "mvg, binary, no gamma": calibrate("mvg", **{**binary, **free}),
        "mvg, binary, radius, no gamma": calibrate("mvg", radius="laurent-massart", **{**binary, **free}),
        "mvg, binary, rescaled": recalibrated(directional, answer.sensitivity, budget),
        "imgm, columns": recalibrated(_pair(np.ones(m), n), answer.sensitivity, budget),
        "imgm, rows and columns": recalibrated(_pair(directional.covariance.rows, n), answer.sensitivity, budget),
        "classic": calibrate("classic", beyond_proof=True, **given),
        "mgm": calibrate("mgm", **given),
        "analytic": calibrate("analytic", **given),
        "optimal": calibrate("optimal", **given),
    }


def gamma_free(shape: Shape, sensitivity: float) -> float:
    """The gamma with which MVG's Theorem 3 is the condition of R1SMG's appendix C, which has no gamma.

    With D the change and Z the noise, appendix C bounds 2 tr(Psi^-1 Z^T Sigma^-1 D) + tr(Psi^-1 D^T Sigma^-1 D). By
    MVG's singular values the first is at most 2 (mn)^(1/4) H_r s z phi, as in Theorem 3, and the second H_r s^2 phi^2.
    Theorem 3 has (H_r + H_r,1/2) gamma^2 + 2 H_r gamma s in place of that H_r s^2; the two are set equal here.

    Source: ji2024less, appendix C, which leaves the constants open.
    """
    orders = np.arange(1, min(shape) + 1)
    harmonic, half = float(np.sum(1 / orders)), float(np.sum(1 / np.sqrt(orders)))
    both = harmonic + half
    return sensitivity * (math.sqrt(harmonic**2 + both * harmonic) - harmonic) / both


def _pair(rows: Any, columns: int) -> Gaussian:
    """A covariance of rows, with four times the variance for every other record: a general pair of covariances."""
    return Gaussian(Kronecker(rows, np.where(np.arange(columns) % 2, 4.0, 1.0)))
