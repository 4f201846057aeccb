"""Figures of released tables: readable in print and by the colour-blind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from matrixdp._check import Array
from matrixdp.errors import InvalidInput
from matrixdp.plots import figure_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from matrixdp.tables.outputs import TableRelease

# More cells than these are drawn without numbers in them; more lines than these cannot be read.
MOST_NUMBERS, MOST_LINES = 300, 200
BLUE = "#0072B2"
LABEL = 28  # characters


def figure(out: TableRelease, level: float) -> Figure:
    """Bars with intervals for one axis, a heat map for several: the last one across, the others down."""
    value = np.asarray(out.value, dtype=float).ravel()
    rows = [""]
    for _, labels in out.axes[:-1]:
        rows = [f"{row}, {label}" if row else label for row in rows for label in labels]
    name, columns = out.axes[-1] if out.axes else ("", ("all rows",))
    longest = max(len(columns), len(rows))
    if not longest <= MOST_LINES:
        raise InvalidInput(f"a figure shows at most {MOST_LINES} lines, this table has {longest}; draw a part of it")
    interval = out.interval(level)
    low, high = np.ravel(interval.low), np.ravel(interval.high)
    if len(out.axes) < 2:
        chart = _bars(value, low, high, [_short(label) for label in columns], name)
    else:
        shape = (len(rows), len(columns))
        names = (", ".join(name for name, _ in out.axes[:-1]), name)
        chart = _heat_map(value.reshape(shape), (high - low).reshape(shape) / 2, rows, columns, names)
    note = f"Intervals of {level:.0%} for the noise that protects {_who(out)}"
    chart.supxlabel(note, fontsize=8, color="dimgray")
    return chart


def _bars(value: Array, low: Array, high: Array, labels: list[str], name: str) -> Figure:
    chart = figure_of(7.0, 0.34 * len(labels) + 1.4)
    panel = chart.subplots()
    places = np.arange(len(labels))
    panel.barh(places, value, color=BLUE, alpha=0.75, height=0.72)
    panel.errorbar(value, places, xerr=[value - low, high - value], fmt="none", ecolor="black", capsize=3, linewidth=1)
    panel.set_yticks(places, labels)
    panel.invert_yaxis()
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set(xlabel="rows", ylabel=name)
    panel.spines[["top", "right"]].set_visible(False)
    return chart


def _heat_map(
    value: Array,
    margin: Array,
    rows: list[str],
    columns: tuple[str, ...],
    names: tuple[str, str],
) -> Figure:
    numbers = value.size <= MOST_NUMBERS
    widest = max(len(_short(label)) for label in columns)
    chart = figure_of(
        max(5.0, (0.95 if numbers else 0.3) * len(columns) + 0.09 * max(len(_short(row)) for row in rows) + 1.8),
        max(3.0, (0.42 if numbers else 0.24) * len(rows) + 0.08 * widest + 1.6),
    )
    panel = chart.subplots()
    image = panel.imshow(value, cmap="cividis", aspect="auto", interpolation="nearest")
    panel.set_xticks(range(len(columns)), [_short(label) for label in columns], rotation=45, ha="right")
    panel.set_yticks(range(len(rows)), [_short(row) for row in rows])
    panel.set(xlabel=names[1], ylabel=names[0])
    chart.colorbar(image, ax=panel, label="rows", shrink=0.9, pad=0.02)
    if numbers:
        _write(panel, value, margin)
    return chart


def _write(panel: Axes, value: Array, margin: Array) -> None:
    """Each cell's number and margin, dark on light cells and light on dark ones."""
    middle = (float(value.max()) + float(value.min())) / 2
    for (row, column), number in np.ndenumerate(value):
        panel.text(
            column, row, f"{round(number):,}\n± {margin[row, column]:,.3g}",
            ha="center", va="center", fontsize=7, color="black" if number > middle else "white",
        )  # fmt: skip


def _short(label: str) -> str:
    return label if len(label) <= LABEL else label[: LABEL - 1] + "…"


def _who(out: TableRelease) -> str:
    unit = out.query["parameters"].get("unit")
    return "every row" if unit is None else f"every {unit}"
