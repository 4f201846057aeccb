"""What is public about a table: its domain, whom it protects, and synthetic rows in place of private ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from matrixdp.distributions import QuantileSearch
from matrixdp.errors import InvalidInput
from matrixdp.explorer.snippets import call
from matrixdp.explorer.statistics import Statistic
from matrixdp.pipeline import Release
from matrixdp.privacy.certificate import Certificate
from matrixdp.tables import Boolean, Categorical, Date, Domain, Numeric, Table, TableAnswer
from matrixdp.tables.answers import PreparedTable
from matrixdp.tables.columns import Column

LEVEL = 0.95
"""The level of all error bars on the page."""

MOST_ROWS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class About:
    """What is public about a table.

    Attributes:
        domain: the TOML file of its domain.
        unit: the column of ids whose owners are protected; None protects each row by itself.
        contributions: how many rows of a unit count.
        shown: the name of the domain's file in snippets; its path by default.
    """

    domain: Path
    unit: str | None = None
    contributions: int | None = None
    shown: str = field(default="", compare=False)

    def table(self, source: Any, columns: list[str] | None = None) -> Table:
        """The table with the rows of a source."""
        return Table(
            source,
            Domain.from_toml(self.domain),
            unit=self.unit,
            contributions=self.contributions,
            columns=columns,
        )

    def made(self, rows: int) -> Table:
        """A table of this many synthetic rows, uniform over the domain, from a fixed seed: nothing in it is private.

        It has the same sets, labels and noise as the private one. Errors of means, quantiles and regressions depend on
        the rows; the private ones may have others.
        """
        if not 1 <= rows <= MOST_ROWS:
            raise InvalidInput(f"rows must be 1 to {MOST_ROWS}, a public guess of how many the table has; got {rows}")
        domain = Domain.from_toml(self.domain)
        rng = np.random.default_rng(0)
        cells = {name: _cells(column, rows, rng) for name, column in domain.items()}
        if self.unit is not None:
            each = max(1, self.contributions or 1)
            cells[self.unit] = [str(row // each) for row in range(rows)]
        array = np.empty((rows, len(cells)), dtype=object)
        for place, column in enumerate(cells.values()):
            array[:, place] = column
        return self.table(array, list(cells))

    def python(self, source: str) -> str:
        """The table in Python."""
        domain = call("Domain.from_toml", self.shown or str(self.domain))
        named = "".join(f", {name}={value!r}" for name, value in self.words().items())
        return f"table = Table({source!r}, {domain}{named})"

    def words(self) -> dict[str, Any]:
        """Unit and contributions, where they are given."""
        found = {"unit": self.unit, "contributions": self.contributions}
        return {name: value for name, value in found.items() if value is not None}


def _cells(column: Column, rows: int, rng: np.random.Generator) -> list[Any]:
    """Random cells with values that the column knows, all equally likely."""
    if isinstance(column, Categorical):
        return [column.values[place] for place in rng.integers(len(column.values), size=rows)]
    if isinstance(column, Boolean):
        return [bool(place) for place in rng.integers(2, size=rows)]
    if isinstance(column, Numeric):
        return list(rng.uniform(column.low, column.high, size=rows))
    assert isinstance(column, Date)
    start, end = (date.fromisoformat(str(day)) for day in (column.start, column.end))
    return [start + timedelta(days=int(days)) for days in rng.integers((end - start).days + 1, size=rows)]


@dataclass(frozen=True)
class ErrorBars:
    """How far the numbers of a release may be from those without noise.

    Attributes:
        numbers: how many numbers are published.
        typical: half the width of the median interval of level LEVEL.
        largest: half the width of the widest.
        unit: what the numbers are.
    """

    numbers: int
    typical: float
    largest: float
    unit: str


def error_bars(statistic: Statistic, answer: TableAnswer, prepared: PreparedTable) -> ErrorBars:
    """The error bars of a release of synthetic rows; noise is drawn only if they depend on it.

    Args:
        statistic: what is released.
        answer: its answer from synthetic rows.
        prepared: the same, prepared for a budget.
    """
    certificate: Certificate = prepared.prepared.certificate
    value = np.asarray(answer.value)
    release = Release(value.astype(float), certificate, certificate.law, on_grid=value.dtype.kind in "iu")
    searched = isinstance(certificate.law, QuantileSearch)  # it counts around the quantiles that it found
    columns = (prepared.release() if searched else prepared.outcome(release)).columns(LEVEL)
    halves = (np.asarray(columns["high"], dtype=float) - np.asarray(columns["low"], dtype=float)) / 2
    unit = "rows" if statistic.method in ("counts", "marginals") else "cells"
    if statistic.method not in ("counts", "marginals", "cell_states"):
        unit = f"of {statistic.arguments[0]}"
    return ErrorBars(len(halves), float(np.median(halves)), float(np.max(halves)), unit)
