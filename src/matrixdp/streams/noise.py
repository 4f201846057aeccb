"""The noise of a stream: one law for the whole, or one law per part for a stream without an end.

**Without an end.** `steps=None` works in parts of 32, 64, 128, ... days, each with the square-root strategy at the same
mu. A record takes part once, hence in one part; given what was released before, the other parts have the same
distribution with and without it. So the guarantee of the stream is that of its worst part. The total of day t contains
the noise of at most log2(1 + t/32) + 1 parts, each with a standard deviation of about log(t)/pi + 1 units: its error
grows as log(t)^(3/2).

Rounding limits the length of parts: the error of a whole part in double precision, and on the grid, grows with its
length, and must stay far below its mu. After the longest part that this allows (2,048 days at epsilon 1 and delta 1e-6,
8,192 at most), days come in blocks of equal length, and a second level adds up the blocks:

1. The days of each block are one part, at mu_b ("block").
2. At the end of a block, its total minus a released estimate of it becomes one row of a stream over blocks, which has
   parts of 32, 64, ... blocks, at mu_t ("totals").

A day's answer is the sum of the first parts, the completed blocks, and the days of the current block. Of its error, the
share of the first parts is constant, that of the blocks grows as log(t)^(3/2), and that of the days is bounded. The
stream over blocks has no end either: once its parts are as long as rounding allows, they all have that length. This is
after 8 million days at epsilon 1 and delta 1e-6, and after 500 thousand at (0.1, 1e-9); from then on the error grows as
the root of the number of such parts. Where half of the guarantee has no room for blocks at all (epsilon 0.001 with
delta 1e-9), parts of days continue with equal length.

*Guarantee.* A record that takes part in a block changes one day, by d with ||d|| <= clip: hence rows of one block, and
one row x_j of the stream over blocks. Let b_i be the total of block i, and e_i its estimate from the noisy days of the
block, which are released. Then x_i is b_i - e_i with each cell clamped to [-w, w]; clamping never moves two numbers
apart. So, given all that was released before, every other day and row is the same with and without the record. The rows
of its block differ by a column of C_b times d over std_b, those of the stream over blocks by a column of C_t times at
most d over std_t, and the noise of each row is fresh. Together this is one Gaussian release, of rows that may depend on
what was released before (denisov2022improved), whose difference has a squared length of at most
mu_b^2 + mu_t^2 <= mu^2. The samplers' total-variation errors add up, and each level may have half of what is allowed.
Each level has half of mu^2: at 10^4, 10^5 and 10^6 days, no other split lowers the error by more than a tenth.

*Size.* b_i - e_i is the noise of a block's days, and w is 16 of its standard deviations; a cell exceeds it with
probability 2^-188. A part of the stream over blocks is only used if rows of this size fit its grid and norm. So no
block can fail at its end, whatever its days were. Blocks are only used if days of equal size that fit the longest part
of days fit them too.

*Rounding.* b_i - e_i is summed with a second float that collects rounding errors: for n + 1 numbers p, the error is at
most 2^-53 of the result plus g^2 sum |p|, g = n 2^-53 / (1 - n 2^-53) (ogita2005accurate, proposition 4.5). The first
term is one rounding of a row before its product with C, for which `OverTime.row_by_row_share` has room: with it, and
the quotient by std, log2(bands) + 5 roundings are used of log2(bands) + 8. The second term is at most 2^-30 clip for
two neighbours together (`_sum_error`; longer blocks are not used); the clip of the stream over blocks is increased by
this much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from matrixdp._check import Shape
from matrixdp.adjacency import Adjacency
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, time_workloads
from matrixdp.distributions.covariance import Isotropic, OverTime
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.mechanisms import RECIPES, calibrate
from matrixdp.pipeline import SAMPLER_SHARE, sized_for_budget, sized_for_mu
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate, check_releasable
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee
from matrixdp.secure import kernels
from matrixdp.sensitivity import Participation

FIRST_PART = 32
"""Days of the first part of a stream without an end; each part is twice as long as the one before, up to a limit."""

LONGEST_PART = 8192
"""The most days of a part: the work per day grows with its length."""

SHARES = {"days": (1.0, 1.0), "block": (0.5 * (1 - 1e-12), 0.5), "totals": (0.5 * (1 - 1e-12), 0.5)}
"""The shares of mu squared (slightly below a half, for rounding) and of the samplers' error that each level may use."""

SUM_ROUNDING = 2.0**-30
"""The relative increase of the clip in totals of blocks, for the rounding of sums."""

LARGEST_REMAINDER = 16.0
"""The bound w on the error of a block's estimated total, in standard deviations."""

LARGEST_NOISE = 17.0
"""Above every draw, in standard deviations: |K| < 2048 in steps of 1/128, 1/128^2, ... (`secure.grid`)."""


@dataclass(frozen=True)
class Part:
    """Rows with one strategy: days, the days of every block, or totals of blocks.

    Attributes:
        level: one of SHARES.
        before: how many days come before it, or before the first block; for totals, how many blocks.
        length: how many rows.
    """

    level: str
    before: int
    length: int


def of_whole(
    shape: Shape, sensitivity: Participation, budget: Budget, workload: Any, *, mechanism: str, **options: Any
) -> Certificate:
    """The certificate of a stream with values of shape (steps, size)."""
    if mechanism == "auto" or (mechanism in RECIPES and "workload" in RECIPES[mechanism].options):
        options = {**options, "workload": workload}
    law: Any = calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=budget, **options)
    if isinstance(law, Gaussian) and isinstance(law.covariance, Isotropic):  # noise over time with one band
        law = Gaussian(OverTime(np.ones(1), law.shape, law.covariance.std), law.source, law.note)
    if not isinstance(law, Gaussian) or not isinstance(law.covariance, OverTime):
        raise InvalidInput(f"mechanism must be one over time, such as 'toeplitz', got noise of {law.source}")
    certificate = sized_for_budget(law, sensitivity, budget)
    check_releasable(certificate, budget)
    return certificate


def parts(size: int, sensitivity: Participation, budget: Budget) -> Iterator[Part]:
    """The parts of a stream without an end: of days, then the one that all blocks share, then of totals of blocks."""
    limits = size, sensitivity.clip, budget.epsilon, budget.delta
    for last in _in_turn("days", 0, limits):
        yield last
    *_, block = [0, *(part.length for part in _in_turn("block", last.length, limits))]
    if block and _has_room("totals", FIRST_PART, block, *limits):
        yield Part("block", last.before + last.length, block)
        for last in _in_turn("totals", block, limits):
            yield last
    yield from (replace(last, before=before) for before in count(last.before + last.length, last.length))


def _in_turn(level: str, below: int, limits: tuple[int, float, float, float]) -> Iterator[Part]:
    """Parts of doubling length while there is room; the first part of days always, as `of_part` may refuse it."""
    before, length = 0, FIRST_PART
    begins = level == "days"
    while length <= LONGEST_PART and (begins or _has_room(level, length, below, *limits)):
        yield Part(level, before, length)
        before, length, begins = before + length, 2 * length, False


def place(parts: Iterator[Part], step: int) -> tuple[int, int, int, int | None]:
    """Of a day: its part's number, the days before the part or the day's block, its length, and the block, from 0."""
    for number, part in enumerate(parts):
        if part.level == "block":
            block = (step - 1 - part.before) // part.length
            return number, part.before + block * part.length, part.length, block
        if step <= part.before + part.length:
            break
    return number, part.before, part.length, None


def place_of_total(parts: Iterator[Part], block: int) -> tuple[int, int, int]:
    """The number of the part that has the total of a block, the position in it, and its length."""
    found = ((number, part) for number, part in enumerate(parts) if part.level == "totals")
    return next(
        (number, block - part.before, part.length) for number, part in found if block < part.before + part.length
    )


@lru_cache(maxsize=256)
def _has_room(level: str, length: int, below: int, size: int, clip: float, epsilon: float, delta: float) -> bool:
    """Whether a part of this length keeps its share of the guarantee, and can take any row of the level below it.

    Args:
        level: one of SHARES.
        length: how many rows.
        below: for a block, the length of the longest part of days; for totals, the days of a block; 0 for days.
        size: the cells of a row.
        clip: of the Participation set.
        epsilon: of the budget.
        delta: of the budget.
    """
    sensitivity, budget = Participation(clip), Budget(epsilon, delta)
    try:
        certificate = _square_root(level, length, size, sensitivity, budget)
    except NumericalFailure:  # no grid is fine enough
        return False
    if level == "block":
        days = _largest_rows(_below("days", below, size, clip, epsilon, delta))
        smaller = any(mine < 0.999 * other for mine, other in zip(_largest_rows(certificate), days, strict=True))
        if smaller or not _sum_error(certificate) <= SUM_ROUNDING * clip:
            return False
    if level == "totals":
        remainder = largest_remainder(_below("block", below, size, clip, epsilon, delta))
        if not _takes(certificate, remainder):
            return False
    return certificate.float_safe and _is_within(certificate, level, without_end(sensitivity, budget))


@lru_cache(maxsize=8)
def _below(level: str, length: int, size: int, clip: float, epsilon: float, delta: float) -> Certificate:
    """The certificate of a part that has room, cached while parts of the next level are tried."""
    return _square_root(level, length, size, Participation(clip), Budget(epsilon, delta))


def _square_root(level: str, length: int, size: int, sensitivity: Participation, budget: Budget) -> Certificate:
    whole = without_end(sensitivity, budget)
    if level == "totals":
        sensitivity = replace(sensitivity, clip=sensitivity.clip * (1 + SUM_ROUNDING))
    law = calibrate("inverse-banded", shape=(length, size), sensitivity=sensitivity, budget=budget, bands=length)
    assert isinstance(law, Gaussian)
    assert whole.mu is not None
    return sized_for_mu(law, sensitivity, whole.mu * math.sqrt(SHARES[level][0]))


def _is_within(certificate: Certificate, level: str, whole: Guarantee) -> bool:
    """Whether a part keeps the share of its level."""
    assert certificate.mu is not None
    assert whole.mu is not None
    of_mu, of_error = SHARES[level]
    return (
        certificate.mu <= whole.mu * math.sqrt(of_mu)
        and certificate.total_variation <= whole.total_variation * of_error
    )


def longest_row(certificate: Certificate) -> float:
    """The largest norm of a row of C x / std.

    It is an equal share of the norm that the certificate allows for all rows, which are more exact than it assumes.
    """
    covariance, drawing = over_time(certificate), certificate.drawing
    assert drawing is not None
    norm = math.inf if drawing.largest_norm is None else drawing.largest_norm / covariance.row_by_row_share
    return norm / math.sqrt(covariance.steps)


def largest_remainder(certificate: Certificate) -> float:
    """The bound w on each cell of a block's total minus its estimate."""
    return LARGEST_REMAINDER * math.sqrt(float(over_time(certificate).answer_variances("prefix")[-1]))


def _largest_rows(certificate: Certificate) -> tuple[float, float]:
    """The largest norm and the largest cell of rows that always fit a part, if no row exceeds them."""
    covariance, drawing = over_time(certificate), certificate.drawing
    assert drawing is not None
    assert drawing.grid is not None
    unit = covariance.std / float(np.sum(np.abs(covariance.column)))
    return longest_row(certificate) * unit, kernels.limit(1.0, drawing.grid, np.dtype(float)) * unit


def _takes(certificate: Certificate, remainder: float) -> bool:
    """Whether rows with cells up to `remainder` always fit a part; with a factor of two, for rounding."""
    norm, cell = _largest_rows(certificate)
    return 2 * remainder * math.sqrt(over_time(certificate).shape[1]) <= norm and 2 * remainder <= cell


def _sum_error(certificate: Certificate) -> float:
    """The second-order error 2 g^2 sum |p| of two neighbours' block totals minus the same estimate.

    Rows of C x / std have at most the norm `longest_row`. So rows of x have at most that times std and the sum of
    |C^-1|, and the estimate is computed from rows that are longer by their noise. Doubling n in g covers higher orders.
    """
    covariance, longest = over_time(certificate), longest_row(certificate)
    weights = time_workloads.applied(np.ones(covariance.steps), covariance.decoder)
    days = covariance.steps * longest * float(np.sum(np.abs(covariance.decoder)))
    estimate = float(np.sum(np.abs(weights))) * (longest + LARGEST_NOISE * math.sqrt(covariance.shape[1]))
    g = 2 * covariance.steps * 2.0**-53
    return 2 * g**2 * covariance.std * (days + estimate)


def of_part(part: Part, size: int, sensitivity: Participation, budget: Budget) -> Certificate:
    """The certificate of one part of a stream without an end."""
    certificate = _square_root(part.level, part.length, size, sensitivity, budget)
    if not _is_within(certificate, part.level, without_end(sensitivity, budget)):
        raise NumericalFailure(
            f"{part.length} days of {size} cells do not fit the guarantee; use fewer, or give steps="
        )
    check_releasable(certificate, budget)
    return certificate


def fits(certificate: Certificate, part: Part, sensitivity: Participation, budget: Budget) -> bool:
    """Whether a certificate from a state fits this part."""
    if part.level != "days" and not _is_within(certificate, part.level, without_end(sensitivity, budget)):
        return False
    return over_time(certificate).steps == part.length


def without_end(sensitivity: Participation, budget: Budget) -> Guarantee:
    """The guarantee of a stream without an end: one mu, and a share of delta for the samplers' error."""
    share = budget.delta * SAMPLER_SHARE
    mu = float(gaussian.mu(budget.epsilon, budget.delta - share)) * (1 - 1e-9)
    error = share / (1 + math.exp(budget.epsilon)) / 2
    return Guarantee(GaussianProfile(mu), Adjacency(sensitivity.adjacency), error)


def over_time(certificate: Certificate) -> OverTime:
    """The covariance of a stream's law."""
    assert isinstance(certificate.law, Gaussian)
    assert isinstance(certificate.law.covariance, OverTime)
    return certificate.law.covariance
