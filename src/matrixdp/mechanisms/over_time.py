"""Noise correlated over time, for values whose rows are steps: banded, Toeplitz, inverse-banded, and the binary tree.

All are for a linear workload on the steps, running sums by default, with far less error than independent noise; see
`docs/over-time.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, time_workloads
from matrixdp.distributions.covariance import OverTime
from matrixdp.distributions.covariance.over_time import MOST_STEPS
from matrixdp.errors import InvalidInput, NotApplicable, NotCertifiable
from matrixdp.mechanisms.base import recipe, sized
from matrixdp.mechanisms.solvers import over_time
from matrixdp.sensitivity import Participation, Sensitivity

# The number of bands that "banded" has by default, and up to which the others are tried; more where there is room.
USUAL_BANDS, USUAL_MOST_BANDS = 32, 64
# Room for more: bands times steps, for the time of a search; and bands times entries, for the rows that a stream keeps.
BANDED_ROOM, SEARCH_ROOM, ROWS_ROOM = 2**15, 2**24, 2**25
# The largest relative rounding error of a strategy in closed form, which grows with the entries of C and of C^-1.
MOST_ROUNDING = 1e-3


@recipe("banded", source="choquette2023amplified")
def banded(
    shape: Shape, sensitivity: Sensitivity, budget: Budget, *, bands: int | None = None, workload: Any = "prefix"
) -> Gaussian:
    """A banded strategy within a proven relative distance of the least error.

    Args:
        bands: of the strategy; at most the separation, if a record takes part more than once. By default 32, or more if
            the steps are few.
        workload: what is computed from the steps, as in matrixdp.distributions.time_workloads; running sums by default.

    Source: choquette2023amplified for banded strategies and their sensitivity; the solver is matrixdp's own.
    Deviates: (1) the norms of the columns are optimised; (2) the distance from the optimum is proven (solvers).
    """
    taken, task = _checked("banded", shape, sensitivity, workload)
    room = _room(taken, shape)
    usual = max(USUAL_BANDS, BANDED_ROOM // shape[0])
    width = min(usual, room) if bands is None else _bands(bands, shape)
    if not width <= room:
        raise InvalidInput(
            f"bands must be at most the separation, {room}, where a record takes part more than once, got {width}; use "
            "fewer, or 'toeplitz'"
        )
    _check_dense("banded", shape)
    found = over_time.banded(taken, task, width)
    return sized(
        OverTime(found.coefficients, shape),
        taken,
        budget,
        f"{_counted(width)}, within {found.gap:.2g} of the least error of any banded strategy",
    )


@recipe("toeplitz", source="mckenna2024scaling")
def toeplitz(
    shape: Shape, sensitivity: Sensitivity, budget: Budget, *, bands: int | None = None, workload: Any = "prefix"
) -> Gaussian:
    """A banded Toeplitz strategy with nearly the least error, for any number of steps.

    It is optimised for a record that takes part once, then scaled to the certificate of the set.

    Args:
        bands: of the strategy; by default the best of 1, 2, 4, ..., 64 and the separation, or more if steps are few.
        workload: what is computed from the steps, as in matrixdp.distributions.time_workloads; running sums by default.

    Source: mckenna2024scaling.
    Deviates: none.
    """
    taken, task = _checked("toeplitz", shape, sensitivity, workload)
    widths = _widths(shape, _room(taken, shape), task) if bands is None else [_bands(bands, shape)]
    return _best(
        {width: OverTime(over_time.toeplitz(task, width).coefficients, shape) for width in widths}, taken, budget, task
    )


@recipe("inverse-banded", source="kalinin2025back")
def inverse_banded(
    shape: Shape, sensitivity: Sensitivity, budget: Budget, *, bands: int | None = None, workload: Any = "prefix"
) -> Gaussian:
    """A strategy whose inverse is banded, in closed form: the first coefficients of the workload's inverse square root.

    Args:
        bands: of the inverse; by default the best of 1, 2, 4, ..., 64 and the separation, or more if steps are few.
        workload: what is computed from the steps, as in matrixdp.distributions.time_workloads; running sums by default.

    Source: kalinin2025back, for running sums; fichtenberger2023constant for the square root.
    Deviates: (1) the number of bands is chosen by the error; (2) of a matrix, the means along the diagonals are used.
    """
    taken, task = _checked("inverse-banded", shape, sensitivity, workload)
    widths = _widths(shape, _room(taken, shape), task) if bands is None else [_bands(bands, shape)]
    series = {width: over_time.square_root(task, width) for width in widths}
    strategies = {
        width: OverTime(found, shape, inverse=True) for width, found in series.items() if np.all(np.isfinite(found))
    }
    roots = {width: strategy for width, strategy in strategies.items() if strategy.slack <= MOST_ROUNDING}
    if not roots:
        raise NotApplicable(
            f"the inverse square root of this workload grows too fast for {widths[0]} bands over {shape[0]} steps, as "
            "its answers weigh earlier steps most; use fewer bands, or 'banded'"
        )
    return _best(roots, taken, budget, task)


@recipe("binary-tree", source="honaker2015efficient")
def binary_tree(shape: Shape, sensitivity: Sensitivity, budget: Budget, *, workload: Any = "prefix") -> Gaussian:
    """Sums over all dyadic intervals of steps with independent noise, combined with the least variance.

    Args:
        workload: checked, but otherwise not used: the tree is the same for all workloads.

    Source: honaker2015efficient; the tree itself is dwork2010continual and chan2011private.
    Deviates: (1) estimates use all intervals, also later ones, which is the least error of any estimate from the tree.
    """
    taken, _ = _checked("binary-tree", shape, sensitivity, workload)
    _check_dense("binary-tree", shape)
    steps = shape[0]
    place, gram = np.arange(steps), np.zeros((steps, steps))
    for level in range((steps - 1).bit_length() + 1):
        gram += (place[:, None] >> level) == (place[None, :] >> level)
    upper = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1]  # gram = upper upper^T, so C is its transpose
    coefficients = np.stack([np.append(np.zeros(j), np.diagonal(upper, j)) for j in range(steps)], axis=1)
    return sized(OverTime(coefficients, shape), taken, budget, "")


def _checked(name: str, shape: Shape, sensitivity: Sensitivity, workload: Any) -> tuple[Participation, Array]:
    """The set and the workload of a recipe over time."""
    if not isinstance(sensitivity, Participation):
        raise NotApplicable(f"{name} is for Participation sets, on values with one row per step")
    return sensitivity, time_workloads.coefficients(workload, shape[0])


def _room(sensitivity: Participation, shape: Shape) -> int:
    """The most bands for which no two steps of one record share a row of C X."""
    once = sensitivity.most_times(shape[0]) == 1
    return shape[0] if once else min(sensitivity.gap, shape[0])


def _widths(shape: Shape, room: int, task: Array) -> list[int]:
    """The numbers of bands to try: powers of two, and the separation. With a matrix, a search takes longer."""
    searched = SEARCH_ROOM // shape[0] // (shape[0] if task.ndim == 2 else 1)
    most = min(max(USUAL_MOST_BANDS, min(searched, ROWS_ROOM // shape[1])), shape[0])
    return sorted({2**power for power in range(most.bit_length())} | {min(room, most)})


def _best(strategies: dict[int, OverTime], sensitivity: Participation, budget: Budget, task: Array) -> Gaussian:
    """The law of the strategy with the least error, of several by their number of bands.

    Those are left out whose worst pattern is not known, as with more bands than the separation over many steps.
    """
    laws, reasons = [], []
    for bands, strategy in strategies.items():
        try:
            laws.append(sized(strategy, sensitivity, budget, _counted(bands)))
        except NotCertifiable as reason:
            reasons.append(reason)
    if not laws:
        raise reasons[-1]
    return min(laws, key=lambda law: law.expected_squared_error(workload=task))


def _counted(bands: int) -> str:
    return f"{bands} band{'s' if bands > 1 else ''}"


def _bands(bands: Any, shape: Shape) -> int:
    if not _check.count("bands", bands) <= shape[0]:
        raise InvalidInput(f"bands must be at most the number of steps, {shape[0]}, got {bands}")
    return int(bands)


def _check_dense(name: str, shape: Shape) -> None:
    if not shape[0] <= MOST_STEPS:
        raise NotApplicable(f"{name} is computed for at most {MOST_STEPS} steps, got {shape[0]}; use 'toeplitz'")
