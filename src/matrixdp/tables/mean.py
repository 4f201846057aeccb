"""Means of a column with public bounds, by group, from one release, with intervals.

    out = release_means(costs, 0, 5000, groups=regions, group_count=12, budget=Budget(1.0, 1e-6))
    out.value, out.low, out.high

Values outside their bounds are clipped. Intervals cover the noise, not the sampling from a larger population.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Isotropic
from matrixdp.distributions.gaussian import normal_quantile
from matrixdp.distributions.margins import error_rate
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Release, Spends, prepare
from matrixdp.privacy.certificate import Certificate
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.sensitivity import L1

# Steps between the bounds of a column; each value is rounded to one for a mean, so that totals are whole numbers.
STEPS = 1 << 16


@dataclass(frozen=True, eq=False)
class Estimate:
    """Numbers computed from a release.

    Attributes:
        value: the numbers.
        standard_error: of the noise, to first order.
        low: lower ends of intervals.
        high: upper ends.
        level: the nominal coverage of each interval; `method` says whether it is proven.
        method: how the intervals were computed.
        certificate: what the release guarantees.

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import release_means
        >>> estimate = release_means([31.0, 45.0, 28.0], 0, 100, budget=Budget(1.0, 1e-6))
        >>> estimate.value.shape, bool((estimate.low <= estimate.value).all())
        ((1,), True)
    """

    value: Array
    standard_error: Array
    low: Array
    high: Array
    level: float
    method: str
    certificate: Certificate


def bounded_totals(
    values: Any,
    low: float,
    high: float,
    *,
    groups: Any = None,
    group_count: int = 1,
    contributions: int = 1,
    adjacency: str = ADD_REMOVE,
) -> Answer:
    """For each group, the sum of the distances of the values from the lower bound, and that from the upper one.

    A value x counts as a = (x - low)/(high - low) in the first sum and as 1 - a in the second, in whole multiples of
    1/STEPS. Both together are the number of records, and a record changes it by 1, whatever its value. So one record
    moves the pair by at most 1 in length, whereas it could move a sum and a count by sqrt(2).

    Args:
        values: one finite number per record.
        low: the least value, public.
        high: the largest value, public.
        groups: the number of each record's group, from 0; a record whose group does not exist is left out.
        group_count: how many groups there are; public.
        contributions: how many records one person may have; more than one needs add/remove.
        adjacency: which data sets are neighbours.

    Guarantee: the value has one row per group, of whole numbers in units of 1/STEPS. Add/remove changes one row by k
        and STEPS - k, STEPS in all; the records of one person change at most `contributions` times that. Replace
        changes two rows in this way, or one by j and -j: at most 2 STEPS in all, and no entry by more than STEPS.
    """
    lower, upper = _interval(low, high)
    rows = _check.finite("values", values, ndim=1)
    count = _check.count("group_count", group_count)
    places = np.zeros(len(rows), dtype=np.int64) if groups is None else _check.array_of("groups", groups)
    if places.shape != rows.shape or places.dtype.kind not in "iu":
        raise InvalidInput(f"groups must be one whole number per value, got {_check.kind(groups)}")
    known = (places >= 0) & (places < count)
    above = np.round((np.clip(rows, lower, upper) - lower) / (upper - lower) * STEPS)[known]
    totals = [np.bincount(places[known], part, count) for part in (above, STEPS - above)]
    asked = query(
        "bounded-totals", low=lower, high=upper, group_count=count, **people(contributions, checked(adjacency))
    )
    value = np.stack(totals, axis=1).astype(np.float64)
    return Answer(value, change_in_bounded_totals(value.shape, **asked["parameters"]), asked)


@changes("bounded-totals")
def change_in_bounded_totals(
    shape: Shape, *, low: float, high: float, group_count: int, contributions: int, adjacency: str
) -> L1:
    """What a neighbour can change in the totals; see `bounded_totals`."""
    if shape != (group_count, 2):
        raise InvalidInput(f"the totals have shape {(group_count, 2)}, not {shape}")
    people(contributions, adjacency)
    if adjacency == REPLACE:
        return L1(2 * STEPS, STEPS, adjacency, step=1)
    return L1(STEPS * contributions, adjacency=adjacency, step=1)


def people(contributions: Any, adjacency: str) -> dict[str, Any]:
    """How many records one person may have, and the adjacency; several records need add/remove."""
    if _check.count("contributions", contributions) > 1 and adjacency != ADD_REMOVE:
        raise InvalidInput(
            "contributions must be 1 unless all records of a person are added or removed; use add/remove"
        )
    return {"contributions": int(contributions), "adjacency": adjacency}


def release_means(
    values: Any,
    low: float,
    high: float,
    *,
    budget: Budget,
    groups: Any = None,
    group_count: int = 1,
    contributions: int = 1,
    adjacency: str = ADD_REMOVE,
    mechanism: str | NoiseLaw = "auto",
    level: float = 0.95,
    ledger: Spends | None = None,
    note: str = "",
    rng: np.random.Generator | None = None,
) -> Estimate:
    """The mean of a column, in each group; see `bounded_totals` and `means` for the arguments.

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import release_means
        >>> ages, regions = [31.0, 45.0, 28.0], [0, 1, 0]
        >>> release_means(ages, 0, 100, budget=Budget(1.0, 1e-6), groups=regions, group_count=2).value.shape
        (2,)
    """
    _check.probability("level", level)
    answer = bounded_totals(
        values,
        low,
        high,
        groups=groups,
        group_count=group_count,
        contributions=contributions,
        adjacency=adjacency,
    )
    prepared = prepare(*answer, budget, mechanism, query=answer.query, rng=rng)
    return means(prepared.release(ledger, note), low, high, level)


def means(release: Release, low: float, high: float, level: float = 0.95) -> Estimate:
    """Means from released totals.

    With totals a and b the mean is low + (high - low) r, r = a/(a + b). Fieller's interval contains every r for which
    (1 - r) a - r b, of mean 0 at the true r, is within its margin. For i.i.d. Gaussian noise that is a quadratic
    inequality. For other noise both totals are covered at once, and the interval contains all their ratios. Both cover
    with at least the level, whatever the counts. A group whose count is lost in the noise gets the whole range.

    Args:
        release: of `bounded_totals`.
        low: the least value.
        high: the largest value.
        level: the coverage of each interval.

    Example:
        >>> from matrixdp import Budget, release
        >>> from matrixdp.tables import means
        >>> from matrixdp.tables.mean import bounded_totals
        >>> out = release(*bounded_totals([31.0, 45.0, 28.0], 0, 100), Budget(1.0, 1e-6))
        >>> means(out, 0, 100).value.shape
        (1,)
    """
    lower, upper = _interval(low, high)
    above, below = (np.asarray(release.value, dtype=np.float64) / STEPS).T
    count = above + below
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(count > 0, np.clip(above / count, 0, 1), 0.5)
    law = release.noise
    if isinstance(law, Gaussian) and isinstance(law.covariance, Isotropic):
        std = law.covariance.std / STEPS
        drawing = release.certificate.drawing
        rounding = 0.0 if drawing is None or drawing.grid is None else 2 * drawing.grid.displacement
        margin = (normal_quantile(error_rate(level)) + rounding) * std
        ends, method = _fieller(above, count, margin), "Fieller, covers at least the level"
        error = std * np.sqrt((1 - ratio) ** 2 + ratio**2)
    else:
        both = release.interval(math.sqrt(level))  # independent; correlated Gaussians cover more (Sidak)
        least, most = (np.maximum(np.asarray(side) / STEPS, 0.0).T for side in (both.low, both.high))
        with np.errstate(divide="ignore", invalid="ignore"):
            bottom, top = least[0] / (least[0] + most[1]), most[0] / (most[0] + least[1])
        ends = np.where(np.isnan(bottom), 0.0, bottom), np.where(np.isnan(top), 1.0, top)
        method = "ratios of both totals' intervals, covers at least the level"
        errors = np.asarray(release.standard_error) / STEPS
        error = np.sqrt(((1 - ratio) * errors[:, 0]) ** 2 + (ratio * errors[:, 1]) ** 2)
    with np.errstate(divide="ignore"):
        error = np.where(count > 0, error / np.maximum(count, 1e-300), math.inf)
    width, rounded = upper - lower, 0.5 / STEPS
    least_mean, largest_mean = (lower + width * np.clip(end, 0, 1) for end in (ends[0] - rounded, ends[1] + rounded))
    return Estimate(
        value=np.clip(lower + width * ratio, least_mean, largest_mean),
        standard_error=width * error,
        low=least_mean,
        high=largest_mean,
        level=level,
        method=method,
        certificate=release.certificate,
    )


def sums(release: Release, low: float, high: float, level: float = 0.95) -> Estimate:
    """Sums of the values from released totals: high a + low b.

    The interval follows from those of both totals, which together hold with at least the level: each gets half of
    1 - level, or nearly all of it if the other has no weight. Each value was rounded by at most half of 1/STEPS of the
    range; the interval allows for that with the largest plausible number of records.

    Args:
        release: of `bounded_totals`.
        low: the least value.
        high: the largest value.
        level: the coverage of each interval.
    """
    lower, upper = _interval(low, high)
    shares = (0.99, 0.01) if lower == 0 else (0.01, 0.99) if upper == 0 else (0.5, 0.5)
    alpha, ends = 1 - _check.probability("level", level), []
    for place, share in enumerate(shares):
        found = release.interval(1 - share * alpha)
        ends.append([np.asarray(end)[:, place] / STEPS for end in (found.low, found.high)])
    rounded = 0.5 * (upper - lower) / STEPS * np.maximum(ends[0][1] + ends[1][1], 0.0)
    parts = [np.sort([end * weight for end in both], axis=0) for both, weight in zip(ends, (upper, lower), strict=True)]
    weights, totals = np.array([upper, lower]), np.asarray(release.value, dtype=np.float64) / STEPS
    return Estimate(
        value=totals @ weights,
        standard_error=np.sqrt(np.square(np.asarray(release.standard_error) / STEPS) @ np.square(weights)),
        low=parts[0][0] + parts[1][0] - rounded,
        high=parts[0][1] + parts[1][1] + rounded,
        level=level,
        method="from both totals' intervals, covers at least the level",
        certificate=release.certificate,
    )


def _fieller(above: Array, count: Array, margin: float) -> tuple[Array, Array]:
    """All r between 0 and 1 with (above - r count)^2 <= margin^2 (1 - 2 r + 2 r^2)."""
    square, linear, constant = count**2 - 2 * margin**2, above * count - margin**2, above**2 - margin**2
    root = np.sqrt(np.maximum(linear**2 - square * constant, 0.0))
    proper = (square > 0) & (count > 0)
    divisor = np.where(proper, square, 1.0)
    low, high = np.where(proper, (linear - root) / divisor, 0.0), np.where(proper, (linear + root) / divisor, 1.0)
    return low, high


def _interval(low: float, high: float) -> tuple[float, float]:
    lower, upper = _check.number("low", low), _check.number("high", high)
    if not 0 < upper - lower < math.inf:  # an infinite width would make some values NaN
        raise InvalidInput(f"low must be below high, by a finite number, got {lower!r} and {upper!r}")
    return lower, upper
