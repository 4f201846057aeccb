"""The view Compare: the error, the true guarantee and the privacy profile of every mechanism."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from matrixdp.budget import Budget
from matrixdp.comparison import Comparison, compare
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.explorer.jobs import Tell, silent
from matrixdp.explorer.snippets import Snippet, call, command, lines
from matrixdp.mechanisms import calibrate
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Sensitivity

SETS: dict[str, tuple[type[Sensitivity], str]] = {
    "counts": (Counts, "cells of a table of counts, each by 1"),
    "frobenius": (Frobenius, "any change, by its Frobenius norm"),
    "entrywise": (Entrywise, "every entry, by a bound"),
    "onerow": (OneRow, "one row, by its norm"),
    "onecolumn": (OneColumn, "one column, by its norm"),
    "rankone": (RankOne, "second moments of records, by their norm"),
}
"""The kinds of sets by their names on the command line, each with a description."""

POINTS = 25
"""How many points of a profile are computed."""

REFUTED = "r1smg"


@dataclass(frozen=True)
class Setting:
    """What is compared.

    Attributes:
        rows: of the matrix.
        columns: of the matrix.
        kind: a key of SETS.
        size: the number that the set takes; whole for counts.
        epsilon: of the budget.
        delta: of the budget.
    """

    rows: int
    columns: int
    kind: str
    size: float
    epsilon: float
    delta: float

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.rows, self.columns

    @property
    def budget(self) -> Budget:
        """The budget."""
        return Budget(self.epsilon, self.delta)

    @property
    def number(self) -> float | int:
        """The number that the set takes, whole if it counts cells."""
        if self.kind != "counts":
            return self.size
        if not float(self.size).is_integer():
            raise InvalidInput(f"counts change in a whole number of cells, got {self.size:g}")
        return int(self.size)

    @property
    def sensitivity(self) -> Sensitivity:
        """The set."""
        if self.kind not in SETS:
            raise InvalidInput(f"the set must be one of {', '.join(SETS)}, got {self.kind!r}")
        build, _ = SETS[self.kind]
        return build(self.number)  # type: ignore[call-arg]

    def snippet(self) -> Snippet:
        """Code that gives the same table."""
        name = SETS[self.kind][0].__name__
        python = lines(
            "from matrixdp import Budget, compare",
            f"from matrixdp.sensitivity import {name}",
            "",
            f"table = compare({self.shape}, {call(name, self.number)}, {call('Budget', self.epsilon, self.delta)})",
            "print(table)",
        )
        options = {
            "shape": f"{self.rows}x{self.columns}",
            "sensitivity": f"{self.kind}:{self.number!r}",
            "epsilon": repr(self.epsilon),
            "delta": repr(self.delta),
        }
        return Snippet(python, command("compare", **options) + "\n")


@dataclass(frozen=True)
class Curve:
    """The privacy profile of one mechanism: delta as a function of epsilon."""

    mechanism: str
    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]


@dataclass(frozen=True)
class Claim:
    """What R1SMG claims, and what its noise truly guarantees.

    Attributes:
        claimed: the budget.
        true_delta: at the budget's epsilon.
        true_epsilon: at the budget's delta; infinite if none holds.
        error: its expected squared error.
        least_error: the error of the best mechanism that keeps the budget.
    """

    claimed: Budget
    true_delta: float
    true_epsilon: float
    error: float
    least_error: float


@dataclass(frozen=True)
class Compared:
    """All that the view shows of a setting."""

    setting: Setting
    comparison: Comparison
    curves: tuple[Curve, ...]
    claim: Claim | None


def compared(setting: Setting, tell: Tell = silent) -> Compared:
    """Calibrates and certifies every mechanism, and then computes their profiles.

    Args:
        setting: what to compare.
        tell: called with the progress, and with the table once it is complete.
    """
    tell(0, 0)
    shape, sensitivity, budget = setting.shape, setting.sensitivity, setting.budget
    found = Compared(setting, compare(shape, sensitivity, budget), (), None)
    epsilons = tuple(2 * setting.epsilon * place / (POINTS - 1) for place in range(POINTS))
    rows = found.comparison.applicable
    for place, row in enumerate(rows):
        tell(place, len(rows), found)
        try:
            law = calibrate(row.mechanism, shape=shape, sensitivity=sensitivity, budget=budget)
            certificate = certify(law, sensitivity)
            curve = Curve(row.mechanism, epsilons, tuple(certificate.delta(epsilon) for epsilon in epsilons))
        except MatrixDPError:
            continue
        claim = _claim(certificate, found.comparison) if row.mechanism == REFUTED else found.claim
        found = replace(found, curves=(*found.curves, curve), claim=claim)
    return found


def _claim(certificate: Certificate, comparison: Comparison) -> Claim:
    row = next(row for row in comparison if row.mechanism == REFUTED)
    try:
        true_epsilon = certificate.epsilon(comparison.budget.delta)
    except MatrixDPError:
        true_epsilon = math.inf
    return Claim(comparison.budget, row.exact_delta, true_epsilon, row.expected_squared_error, comparison.least_error)
