"""What the reports of horizontal and vertical learning share: rows by mechanism and epsilon, and the figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from matrixdp.plots import figure_of
from matrixdp_papers.studies import figures
from matrixdp_papers.studies.base import NO_NOISE, Mean, Table, beaten

CONSTANT = "most frequent class"
PER_ELEMENT, ADDED_UP = "gaussian, per element", "gaussian, added up"
BY_RECORD = "DP-SGD, hides a record only"

Series = Mapping[str, Mapping[float, Mapping[str, Any]]]
"""Rows by mechanism and epsilon."""


class Found(NamedTuple):
    """The tables of one dataset, from stored results.

    Attributes:
        name: of the data set.
        without: the accuracy without noise.
        least: the share of the most frequent class.
        claimed, true: rows under the paper's accounting, and at equal true guarantees.
        records: the accuracy of record-level DP-SGD by epsilon, where it was run.
    """

    name: str
    without: Mean
    least: float
    claimed: Series
    true: Series
    records: Mapping[float, Mean]

    @classmethod
    def read(cls, claimed: Table, true: Table, records: Mapping[float, Mean] | None = None) -> Found:
        """From the two tables; the name is the first word of a title."""
        accuracy = claimed["test accuracy"]
        return cls(
            claimed.title.split(",")[0],
            accuracy[NO_NOISE],
            accuracy[CONSTANT].mean,
            _series(claimed),
            _series(true),
            records or {},
        )

    def learned(self, row: Mapping[str, Any]) -> bool:
        """Whether at least half of what can be learned was learned."""
        return bool(row["test accuracy"].mean >= (self.without.mean + self.least) / 2)

    def least_epsilon(self, at: Mapping[float, Mapping[str, Any]]) -> str:
        """The least epsilon of those tried at which the task is learned."""
        good = [epsilon for epsilon, row in at.items() if self.learned(row)]
        return f"{min(good):g}" if good else "none"

    def learners(self, series: Series) -> str:
        """The mechanisms that learn at least half, at some epsilon."""
        return ", ".join(name for name, at in series.items() if any(map(self.learned, at.values()))) or "none"

    def flag(self) -> list[tuple[str, str, str, str]]:
        """A row of the report that warns if training without noise is not an upper bound."""
        scores = ((name, row["test accuracy"]) for name, at in self.claimed.items() for row in at.values())
        better = beaten(self.without, scores)
        ours, why = f"{self.without}, below {better}", "its learning rate was not tuned: no upper bound"
        return [(f"{self.name}: training without noise", "the upper bound", ours, why)] if better else []


def _series(table: Table) -> Series:
    found: dict[str, dict[float, dict[str, Any]]] = {}
    name, epsilon = table.columns[:2]
    for row in table.records():
        if row[name] not in (NO_NOISE, CONSTANT):
            found.setdefault(row[name], {})[row[epsilon]] = row
    return found


def picture(measured: Sequence[Found], *, of: str = "", absent: Iterable[str] = ()) -> Figure:
    """Accuracy against the claimed epsilon (left) and the true one (right), one row for each data set.

    Args:
        measured: the results.
        of: whose epsilon it is, such as " of a client".
        absent: datasets that did not run.
    """
    figure = figure_of(9.6, 3.6 * len(measured) + 0.8)
    grid = figure.subplots(len(measured), 2, squeeze=False, sharey=True)
    names = [name for found in measured for series in (found.claimed, found.true) for name in series]
    style = figures.styles(dict.fromkeys((NO_NOISE, *names, BY_RECORD)))
    for row, found in zip(grid, measured, strict=True):
        for panel, series, word in zip(row, (found.claimed, found.true), ("claimed", "true"), strict=True):
            x = sorted({epsilon for at in series.values() for epsilon in at} | set(found.records))
            curves: dict[str, list[float | Mean]] = {NO_NOISE: [found.without] * len(x)}
            for name, at in series.items():
                curves[name] = [at[epsilon]["test accuracy"] if epsilon in at else math.nan for epsilon in x]
            if word == "true" and found.records:
                curves[BY_RECORD] = [found.records.get(epsilon, math.nan) for epsilon in x]
            labels = (f"{word} epsilon{of}", "test accuracy")
            figures.curves(panel, x, curves, title=found.name, labels=labels, scales=("log", "linear"), style=style)
            figures.mark_constant(panel, found.least)
    missing = ", ".join(absent)
    figures.legend_below(figure, grid.flat, columns=4, title=f"did not run: {missing}" if missing else None)
    return figure
