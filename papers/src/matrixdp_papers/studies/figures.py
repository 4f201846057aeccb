"""The pictures that several studies share: curves on log scales, and bars with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matrixdp import plots
from matrixdp_papers.studies.base import Mean

# Colours by number, for bars and histograms.
COLOURS = (plots.COLOURS["analytic"], plots.COLOURS["r1smg"])
# Series that are not named for a mechanism; those of one study use the colours in OTHERS in turn.
NAMED = {"no noise": plots.OTHER, "gaussian": "#8FBC3F", "dp-sgd": "#01665E", "i.i.d.": plots.COLOURS["analytic"],
         "over time": "#B2182B", "imgm": "#B2182B", "jl": "#A6761D", "exponential": "#35978F", "spherical": "#4D4D4D",
         "matrixdp": plots.COLOURS["optimal"], "dawa": "#A6761D", "h_b": "#35978F"}  # fmt: skip
MARKS = {"no noise": "o", "gaussian": "s", "dp-sgd": "h", "over time": "p", "classic": "v", "analytic": "s", "mvg": "*",
         "mgm": "D", "udn": "^", "idn": "P", "r1smg": "X", "matrix-mechanism": "<", "optimal": ">",
         "imgm": "p"}  # fmt: skip
OTHERS = (("#B2182B", "p"), ("#35978F", "h"), ("#A6761D", "d"), ("#3288BD", "H"), ("#666666", "8"), ("#1B7837", "<"),
          ("#762A83", ">"))  # fmt: skip
UNNAMED = "#BBBBBB"
Line = str | tuple[float, tuple[float, ...]]
Style = tuple[str, str, Line]
LINES: tuple[Line, ...] = ("-", "--", ":", "-.", (0.0, (3.0, 1.0, 1.0, 1.0, 1.0, 1.0)))
# Up to this many values on a log axis have a tick each.
FEW = 7


def mechanism(name: str) -> str:
    """The part of a label that has a colour of its own, such as "mvg" in "mvg, binary"; else its first part."""
    parts = name.lower().split(", ")
    known = (part for part in (*parts, parts[0].split()[0]) if part in NAMED or part in plots.COLOURS)
    return next(known, parts[0])


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Colour, mark and line of each series; variants of a mechanism, "idn, composed", differ by their lines."""
    found: dict[str, Style] = {}
    seen: dict[str, int] = {}
    others: dict[str, tuple[str, str]] = {}
    for name in names:
        key = mechanism(name)
        variant = seen.setdefault(key, 0)
        known = NAMED.get(key) or plots.COLOURS.get(key)
        if known is None:
            colour, mark = others.setdefault(key, OTHERS[len(others) % len(OTHERS)])
        else:
            colour, mark = known, MARKS.get(key, "o")
        found[name], seen[key] = (colour, mark, LINES[variant % len(LINES)]), variant + 1
    return found


def panels(count: int, width: float = 4.8, height: float = 3.6, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, `columns` in each row."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = plots.figure_of(width * columns, height * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in grid[count:]:
        unused.set_axis_off()
    return figure, grid[:count]


def curves(
    panel: Axes,
    x: Sequence[float],
    series: Mapping[str, Sequence[float | Mean]],
    *,
    title: str,
    labels: tuple[str, str],
    scales: tuple[str, str] = ("log", "log"),
    style: Mapping[str, Style] | None = None,
) -> None:
    """Draws one curve per name, with confidence intervals where there are any.

    Later curves are thinner, so that overlapping ones can all be seen. `style` is for all panels together, where one
    panel has variants of a mechanism that another lacks.
    """
    style = style or styles(series)
    for order, (name, points) in enumerate(series.items()):
        heights = [point.mean if isinstance(point, Mean) else point for point in points]
        spread = [point.half_width if isinstance(point, Mean) else math.nan for point in points]
        colour, mark, line = style[name]
        thick = 1 - order / len(series)
        panel.errorbar(x, heights, yerr=spread, label=name, color=colour, marker=mark, linestyle=line,
                       linewidth=1.0 + 2 * thick, markersize=4.5 + 4 * thick, elinewidth=1.0, capsize=2)  # fmt: skip
    panel.set(xscale=scales[0], yscale=scales[1], xlabel=labels[0], ylabel=labels[1])
    if scales[0] == "log" and len(x) <= FEW:
        panel.set_xticks(x, [f"{value:g}" if value < 1e4 else f"{value:.2g}".replace("e+0", "e") for value in x])
        panel.set_xticks([], minor=True)
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)


def bars(panel: Axes, values: Mapping[str, Mean], *, title: str, label: str, scale: str = "linear") -> None:
    """Draws one horizontal bar per name in its mechanism's colour, with its confidence interval and its number."""
    for place, (name, value) in enumerate(values.items()):
        key = mechanism(name)
        colour = NAMED.get(key) or plots.COLOURS.get(key, UNNAMED)
        spread = None if math.isnan(value.half_width) else value.half_width
        panel.barh(place, value.mean, xerr=spread, color=colour, height=0.7, capsize=2)
        end = value.mean + (spread or 0.0)
        panel.annotate(f" {value}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    panel.set_yticks(range(len(values)), list(values), fontsize=9)
    panel.invert_yaxis()
    least, most = (extreme(value.mean for value in values.values()) for extreme in (min, max))
    # The right third is room for the numbers; bars on a log scale start at a whole decade.
    start = 10.0 ** math.floor(math.log10(least / 2)) if scale == "log" else 0.0
    panel.set(xscale=scale, xlabel=label)
    panel.set_xlim(start, most * (most / start) ** 0.6 if scale == "log" else 1.6 * most)
    panel.minorticks_off()
    panel.set_xticks([tick for tick in panel.get_xticks() if 0.99 * start <= tick <= 1.1 * most])
    panel.set_title(title, fontsize=10)


def legend_below(figure: Figure, panels: Iterable[Axes], *, columns: int, title: str | None = None) -> None:
    """One legend for all panels, below them and off the data; its lines are long enough to show their dashes."""
    handles: dict[str, Artist] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, fontsize=9,
                  title=title, handlelength=4)  # fmt: skip


def mark_constant(panel: Axes, least: float) -> None:
    """A dotted line at the accuracy of the most frequent class, and the accuracy from 0 to 1."""
    panel.axhline(least, color="#999999", linestyle=":", linewidth=1, label="most frequent class")
    panel.set_ylim(0, 1)
