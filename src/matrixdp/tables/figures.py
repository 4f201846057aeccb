"""Figures of released tables, readable in print and by the colour-blind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixdp._check import Array
from matrixdp._pages import covered
from matrixdp.errors import InvalidInput
from matrixdp.plots import figure_of
from matrixdp.tables.statement import COUNTED, are_reliable

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure, SubFigure

    from matrixdp.tables.outputs import Axes, Labelled

# Tables of more cells are drawn without numbers; more lines or tables would not be readable.
MOST_NUMBERS, MOST_LINES, MOST_TABLES = 300, 200, 12
# If widths of intervals differ by more than this factor, each has its own scale, up to this many.
SCALES, MOST_SCALES = 20.0, 40
BLUE = "#0072B2"
LABEL = 28  # characters


def figure(out: Labelled, level: float) -> Figure:
    """Bars or points with intervals for one axis, a heat map for several: the last axis across, the others down."""
    parts = out.parts(level)
    sizes = sizes_of([axes for axes, _ in parts])
    chart = figure_of(max(width for width, _ in sizes), sum(height for _, height in sizes) + 0.3)
    rows = chart.subfigures(len(parts), height_ratios=[height for _, height in sizes], squeeze=False)[:, 0]
    for place, (axes, numbers) in zip(rows, parts, strict=True):
        if len(axes) > 1:
            _heat_map(place, axes, numbers, measure(out))
        else:
            _lines(place, axes, numbers, measure(out), bars=out.query["name"] in COUNTED)
    note = f"Intervals of {covered(level)} for the noise that protects {_who(out)}"
    if not are_reliable(parts):
        note += "\nThe noise is large here: these intervals may hold less often"
    chart.supxlabel(note, fontsize=8, color="dimgray")
    return chart


def sizes_of(tables: Sequence[Axes]) -> list[tuple[float, float]]:
    """Inches across and down of each table in a figure, from its axes alone.

    Raises:
        InvalidInput: if there is more than a figure can show.
    """
    if not len(tables) <= MOST_TABLES:
        raise InvalidInput(f"a figure shows at most {MOST_TABLES} tables, got {len(tables)}; draw one with of(...)")
    return [_size(axes) for axes in tables]


def measure(out: Labelled) -> str:
    """What the numbers are, as a label for an axis."""
    name, asked = out.query["name"], out.query["parameters"]
    if name in COUNTED:
        return "rows"
    if name in ("means", "sums"):
        return f"{name.removesuffix('s')} of {asked['of']}"
    if name == "quantiles":
        return str(asked["columns"][0][0])
    if name in ("regression", "logistic-regression"):
        return "coefficient"
    of = str(asked.get("of", "value"))
    return "loading" if of == "components" else of


def _size(axes: Axes) -> tuple[float, float]:
    """Inches across and down."""
    lines = [len(labels) for _, labels in axes]
    rows, columns = int(np.prod(lines[:-1], dtype=int)), lines[-1] if lines else 1
    if not max(rows, columns) <= MOST_LINES:
        raise InvalidInput(
            f"a figure shows at most {MOST_LINES} lines, this table has {max(rows, columns)}; draw a part of it"
        )
    if len(axes) < 2:
        return 7.0, 0.34 * columns + 1.4
    numbers = rows * columns <= MOST_NUMBERS
    across = 0.09 * max(len(row) for row in _rows(axes)) + 1.8
    widest = max(len(_short(label)) for label in axes[-1][1])
    return (
        max(5.0, (0.95 if numbers else 0.3) * columns + across),
        max(3.0, (0.42 if numbers else 0.24) * rows + 0.08 * widest + 1.6),
    )


def _rows(axes: Axes) -> list[str]:
    """The labels of all axes but the last, together."""
    rows = [""]
    for _, labels in axes[:-1]:
        rows = [f"{row}, {label}" if row else label for row in rows for label in labels]
    return [_short(row) for row in rows]


def _lines(place: SubFigure, axes: Axes, numbers: dict[str, Any], label: str, *, bars: bool) -> None:
    """One line per number; if intervals differ too much for one scale, each has its own, except for quantiles."""
    name, labels = axes[0] if axes else ("", ("all rows",))
    value, low, high = (np.asarray(numbers[key], dtype=float) for key in ("value", "low", "high"))
    spans = (high - low)[high > low]
    apart = not bars and name != "quantile" and 1 < len(value) <= MOST_SCALES
    apart = apart and spans.size > 1 and spans.max() > SCALES * spans.min()
    shown = [[row] for row in range(len(value))] if apart else [list(range(len(value)))]
    panels = place.subplots(len(shown), squeeze=False)[:, 0]
    for panel, chosen in zip(panels, shown, strict=True):
        y = np.arange(len(chosen))
        if bars:
            panel.barh(y, value[chosen], color=BLUE, alpha=0.75, height=0.72)
        else:
            panel.plot(value[chosen], y, "o", color=BLUE, markersize=5)
        ends = np.maximum([(value - low)[chosen], (high - value)[chosen]], 0.0)
        panel.errorbar(value[chosen], y, xerr=ends, fmt="none", ecolor="black", capsize=3, linewidth=1)
        panel.set_yticks(y, [_short(labels[row]) for row in chosen])
        panel.set_ylim(len(chosen) - 0.5, -0.5)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8 if apart else 10)
    if bars:
        panels[0].axvline(0, color="black", linewidth=0.8)
    panels[-1].set_xlabel(_plain(f"{label}, each on its own scale" if apart else label))
    place.supylabel(_plain(name), fontsize=10)


def _heat_map(place: SubFigure, axes: Axes, numbers: dict[str, Any], label: str) -> None:
    rows, (name, columns) = _rows(axes), axes[-1]
    value, low, high = (np.reshape(numbers[key], (len(rows), len(columns))) for key in ("value", "low", "high"))
    panel = place.subplots()
    image = panel.imshow(value, cmap="cividis", aspect="auto", interpolation="nearest")
    panel.set_xticks(range(len(columns)), [_short(each) for each in columns], rotation=45, ha="right")
    panel.set_yticks(range(len(rows)), rows)
    panel.set(xlabel=_plain(name), ylabel=_plain(", ".join(each for each, _ in axes[:-1])))
    place.colorbar(image, ax=panel, label=_plain(label), shrink=0.9, pad=0.02)
    if value.size <= MOST_NUMBERS:
        _write(panel, value, (high - low) / 2, whole=label == "rows")


def _write(panel: Panel, value: Array, margin: Array, *, whole: bool) -> None:
    """Each cell's number and margin, dark on light cells and light on dark ones."""
    middle = (float(value.max()) + float(value.min())) / 2
    for (row, column), number in np.ndenumerate(value):
        text = f"{round(number):,}" if whole else _digits(number, 4)
        panel.text(
            column, row, f"{text}\n± {_digits(float(margin[row, column]), 3)}",
            ha="center", va="center", fontsize=7, color="black" if number > middle else "white",
        )  # fmt: skip


def _digits(number: float, digits: int) -> str:
    """The number with this many digits, and no exponent for large ones."""
    return f"{number:,.0f}" if 10.0**digits <= abs(number) < 1e15 else f"{number:,.{digits}g}"


def _short(label: str) -> str:
    return _plain(label if len(label) <= LABEL else label[: LABEL - 1] + "…")


def _plain(text: str) -> str:
    """The text as it is: matplotlib takes what is between two dollars for a formula."""
    return text.replace("$", r"\$")


def _who(out: Labelled) -> str:
    unit = out.query["parameters"].get("unit")
    return "every row" if unit is None else f"every {_plain(unit)}"
