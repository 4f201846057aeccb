"""The pictures that several studies share: curves on log scales, and bars with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matrixdp_papers.studies.base import Mean

# The colour-blind can tell them apart; in grey, their marks do.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKS = "osD^vP*X<>"


def panels(count: int, width: float = 4.6, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A figure with a row of panels."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def curves(
    panel: Axes,
    x: Sequence[float],
    series: Mapping[str, Sequence[float | Mean]],
    *,
    title: str,
    labels: tuple[str, str],
    scales: tuple[str, str] = ("log", "log"),
) -> None:
    """Draws one curve per name, with confidence intervals where there are any."""
    for index, (name, points) in enumerate(series.items()):
        heights = [point.mean if isinstance(point, Mean) else point for point in points]
        spread = [point.half_width if isinstance(point, Mean) else math.nan for point in points]
        colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
        panel.errorbar(
            x, heights, yerr=spread, label=name, color=colour, marker=mark, linewidth=1.2, markersize=4, capsize=2
        )
    panel.set(xscale=scales[0], yscale=scales[1], xlabel=labels[0], ylabel=labels[1])
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)


def bars(panel: Axes, values: Mapping[str, Mean], *, title: str, label: str, scale: str = "linear") -> None:
    """Draws one horizontal bar per name, with its confidence interval and its number."""
    for place, value in enumerate(values.values()):
        spread = None if math.isnan(value.half_width) else value.half_width
        panel.barh(place, value.mean, xerr=spread, color=COLOURS[0], height=0.7, capsize=2)
        end = value.mean + (spread or 0.0)
        panel.annotate(f" {value}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    panel.set_yticks(range(len(values)), list(values), fontsize=8)
    panel.invert_yaxis()
    least, most = (extreme(value.mean for value in values.values()) for extreme in (min, max))
    # The right third is room for the numbers; bars on a log scale start at a whole decade.
    start = 10.0 ** math.floor(math.log10(least / 2)) if scale == "log" else 0.0
    panel.set(xscale=scale, xlabel=label)
    panel.set_xlim(start, most * (most / start) ** 0.6 if scale == "log" else 1.6 * most)
    panel.set_title(title, fontsize=10)
