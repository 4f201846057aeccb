"""A table as the page is told of it: its domain, whom it protects, and rows that stand in for private ones."""

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
        unit: the column of ids whose owners are protected; none protects each row.
        contributions: how many rows of a unit count.
        shown: the name under which snippets have the domain; its own by default.
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
        """A table of so many made rows, spread evenly over the domain by a fixed generator: nothing in it is private.

        It has the same sets, labels and noise as the private one. Errors of means, quantiles and regressions depend on
        the rows, and are then those for such rows.
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
    """Cells that a column knows, each as likely as the others."""
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
    """How far the numbers of a release lie from those without noise.

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
    """The error bars of a release of made rows, without noise where that is not needed to find them.

    Args:
        statistic: what is released.
        answer: its answer from made rows.
        prepared: the same, prepared for a budget.
    """
    certificate: Certificate = prepared.prepared.certificate
    value = np.asarray(answer.value)
    release = Release(value.astype(float), certificate, certificate.law, on_grid=value.dtype.kind in "iu")
    searched = isinstance(certificate.law, QuantileSearch)  # whose counts are those around what was found
    columns = (prepared.release() if searched else prepared.outcome(release)).columns(LEVEL)
    halves = (np.asarray(columns["high"], dtype=float) - np.asarray(columns["low"], dtype=float)) / 2
    unit = "rows" if statistic.method in ("counts", "marginals") else "cells"
    if statistic.method not in ("counts", "marginals", "cell_states"):
        unit = f"of {statistic.arguments[0]}"
    return ErrorBars(len(halves), float(np.median(halves)), float(np.max(halves)), unit)
