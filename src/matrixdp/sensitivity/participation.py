"""The sensitivity set for values whose rows are steps in time: a record changes rows by bounded norm, at some steps.

Stack the steps of a training run or a stream as the rows of a matrix. A record takes part at the steps of a *pattern*,
and changes those rows by norm at most `clip` each. The patterns that are possible are public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import REPLACE, ZERO_OUT, checked, takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity.entries import Sensitivity

Steps = npt.NDArray[np.intp]


@takes_relation
@dataclass(frozen=True, eq=False)
class Participation(Sensitivity):
    """One record changes the rows of the steps where it takes part, each by norm at most `clip`.

    Attributes:
        clip: the largest norm of a record's contribution to one step.
        separation: two steps of one record are at least this far apart; None for no such rule.
        times: the most steps of one record.
        cyclic: a record takes part at exactly every `separation`-th step, so that `times` follows from the steps.
        adjacency: zero-out, where steps are batches in a fixed order; add/remove, where they are public periods such as
            days, so that no record's presence affects the steps of another record.

    Example:
        >>> from matrixdp import Participation
        >>> Participation(1.0, separation=7, times=4).frobenius_radius((365, 1))
        2.0
    """

    clip: float
    separation: int | None = None
    times: int = 1
    cyclic: bool = False
    adjacency: str = ZERO_OUT

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", _check.length("clip", self.clip))
        object.__setattr__(self, "times", _check.count("times", self.times))
        object.__setattr__(self, "adjacency", checked(self.adjacency))
        if self.separation is not None:
            object.__setattr__(self, "separation", _check.count("separation", self.separation))
        if not isinstance(self.cyclic, (bool, np.bool_)):
            raise InvalidInput(f"cyclic must be True or False, got {_check.shown(self.cyclic)}")
        if self.cyclic and self.separation is None:
            raise InvalidInput("cyclic participation needs a separation: every how many steps a record takes part")
        if self.adjacency == REPLACE:
            raise InvalidInput(
                "Participation compares a record with none (zero-out or add/remove): one that is replaced may take "
                "part at other steps, and changes up to twice as many rows"
            )

    @property
    def gap(self) -> int:
        """The least distance between two steps of one record."""
        return self.separation or 1

    def most_times(self, steps: int) -> int:
        """The most steps of one record, out of `steps`."""
        fitting = -(-steps // self.gap)
        return fitting if self.cyclic else min(self.times, fitting)

    def fits(self, shape: Shape) -> None:
        """A matrix with one row per step."""
        if len(shape) != 2:
            raise InvalidInput(f"Participation needs a value with one row per step, got shape {shape}; use (steps, 1)")
        fitting = -(-shape[0] // self.gap)
        if self.cyclic and 1 < self.times < fitting:
            raise InvalidInput(
                f"times must be left out for cyclic participation, or be {fitting} for {shape[0]} steps with "
                f"separation {self.separation}, got {self.times}"
            )

    def frobenius_radius(self, shape: Shape) -> float:
        self.fits(shape)
        return self.clip * math.sqrt(self.most_times(shape[0]))

    def largest_entry(self, shape: Shape) -> float:
        return self.clip

    def changed_entries(self, shape: Shape) -> int:
        self.fits(shape)
        return self.most_times(shape[0]) * shape[1]

    def extent(self, shape: Shape) -> tuple[float, ...]:
        """As for every set, plus the rule for the patterns."""
        return *super().extent(shape), self.gap, self.most_times(shape[0]), self.cyclic

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        change = _check.finite("difference", difference)
        self.fits(change.shape)
        with np.errstate(over="ignore"):  # a norm that overflows is too large
            norms = np.sqrt(np.sum(np.square(change), axis=1))
        (steps,) = np.nonzero(norms)
        apart = np.diff(steps)
        rule = np.all(apart % self.gap == 0) if self.cyclic else np.all(apart >= self.gap)
        few = len(steps) <= self.most_times(len(norms))
        return bool(rule and few and np.all(norms <= self.clip * (1 + tolerance)))

    def describe(self) -> str:
        rows = f"rows of norm at most {self.clip:g}"
        if self.cyclic:
            return f"{rows}, at {f'exactly every {self.gap} steps' if self.gap > 1 else 'every step'}"
        if self.times == 1:
            return f"one row of norm at most {self.clip:g}"
        apart = f", at least {self.separation} apart" if self.gap > 1 else ""
        return f"{rows}, at most {self.times} steps{apart}"

    def first_pattern(self, steps: int) -> Steps:
        """The steps 0, b, 2b, ...: the earliest and closest pattern, b the separation."""
        return np.arange(self.most_times(steps)) * self.gap

    def cycles(self, steps: int) -> list[Steps]:
        """All cyclic patterns: every b-th step, from each of the first b steps on."""
        return [np.arange(first, steps, self.gap) for first in range(min(self.gap, steps))]

    def heaviest(self, weights: Array) -> tuple[float, Steps]:
        """The largest sum of weights, 0 or above, over the steps of a pattern, and that pattern.

        The best of at most j steps up to t is that up to t - 1, or w_t plus the best of j - 1 steps up to t - b.
        """
        steps, most, gap = len(weights), self.most_times(len(weights)), self.gap
        if np.all(np.diff(weights) <= 0):  # moving all steps earlier and closer together never lowers the sum
            pattern = self.first_pattern(steps)
        elif self.cyclic:
            pattern = max(self.cycles(steps), key=lambda cycle: weights[cycle].sum())
        else:
            ending = [weights]  # the best pattern of at most j + 1 steps whose last step is t
            for _ in range(1, most):
                ending.append(weights + _earlier(ending[-1], gap))
            found, last = [], steps
            for best in reversed(ending):
                if last <= 0:
                    break
                found.append(int(np.argmax(best[:last])))
                last = found[-1] - gap + 1
            pattern = np.array(found[::-1], dtype=np.intp)
        return float(np.sum(weights[pattern])), pattern

    def heaviest_sums(self, weights: Array, times: int) -> Array:
        """For each column of weights, 0 or above, an upper bound on the sum over `times` steps, `separation` apart."""
        best = np.zeros_like(weights)
        for _ in range(min(times, -(-len(weights) // self.gap))):
            best = np.maximum.accumulate(weights + _earlier(best, self.gap), axis=0)
        return np.asarray(best[-1])


def _earlier(best: Array, gap: int) -> Array:
    """The best up to step t - gap, for every t; 0 before the first step."""
    before = np.zeros_like(best)
    if gap < len(best):
        before[gap:] = np.maximum.accumulate(best, axis=0)[:-gap]
    return before
