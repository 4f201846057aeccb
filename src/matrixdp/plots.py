"""Figures of matrices, comparisons and curves, in one style, as plain objects: no display, no state of pyplot."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matrixdp import _check, _extras

_extras.require("plots", "matplotlib")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from matrixdp.comparison import Comparison
from matrixdp.errors import InvalidInput

RESOLUTION = 150
"""Dots per inch of a saved picture."""

ROW = 0.5  # height of a line of small text, in bars

# Colour-blind readers can tell the colours apart; in grey, lightness and hatching do.
STYLES = {
    "exact": ("#0072B2", "", "exact: the claim is the truth"),
    "loose": ("#F3CE7E", "", "loose: true, but more noise than the claim needs"),
    "not float-safe": ("#999999", "xxxx", "not float-safe: refused by release"),
    "unproven": ("#CC79A7", "....", "unproven: not known to be true"),
    "violated": ("#D55E00", "////", "violated: the claim is false"),
}
"""Colour, hatching and meaning of each verdict."""

# Most are Okabe and Ito's, which colour-blind readers can tell apart; curves are named where they end besides.
COLOURS = {
    "classic": "#56B4E9",
    "analytic": "#0072B2",
    "mvg": "#CC79A7",
    "mgm": "#009E73",
    "udn": "#8C6D31",
    "idn": "#E69F00",
    "r1smg": "#D55E00",
    "matrix-mechanism": "#999999",
    "optimal": "#5E3C99",
    "laplace": "#117733",
    "discrete": "#44AA99",
    "binary-tree": "#999933",
    "banded": "#882255",
    "toeplitz": "#AA4499",
}
"""The colour of a mechanism, the same in every figure."""
OTHER = "#000000"
"""The colour of curves that are not mechanisms of the library."""


def side_by_side(
    rows: Sequence[Sequence[Any]],
    *,
    titles: Sequence[str],
    labels: Sequence[str] | None = None,
    axes: Sequence[tuple[str, str]] | None = None,
) -> Figure:
    """Draws matrices as images, one row for each query, on one colour scale in each row.

    Args:
        rows: for each row, the matrices to compare, such as (true, released); a vector is drawn as one line.
        titles: the title of each column.
        labels: what the colours of each row mean.
        axes: names of the vertical and the horizontal axis of each row.

    Example:
        >>> from matrixdp import Budget, Counts, plots, release
        >>> true = [[120, 31, 4], [77, 52, 9]]
        >>> released = release(true, Counts(1), Budget(1.0, 1e-6)).value
        >>> figure = plots.side_by_side([(true, released)], titles=["true", "released"], labels=["people"])
        >>> len(figure.axes)
        3
    """
    pictures = [[np.atleast_2d(_check.finite("matrix", matrix)) for matrix in row] for row in rows]
    if not titles or not pictures or any(len(row) != len(titles) for row in pictures):
        raise InvalidInput(f"rows must each hold one matrix for each of the {len(titles)} titles, and not be empty")
    for name, given in (("labels", labels), ("axes", axes)):
        if given is not None and len(given) != len(pictures):
            raise InvalidInput(f"{name} must have one entry for each of the {len(pictures)} rows, got {len(given)}")
    figure = figure_of(3.1 * len(titles) + 1.2, 3.4 * len(pictures) + 0.3)
    panels = figure.subplots(len(pictures), len(titles), squeeze=False)
    for index, row in enumerate(pictures):
        low, high = min(float(p.min()) for p in row), max(float(p.max()) for p in row)
        for panel, picture, title in zip(panels[index], row, titles, strict=True):
            image = panel.imshow(picture, vmin=low, vmax=high, cmap="viridis", interpolation="nearest", aspect="auto")
            panel.set_box_aspect(1)
            panel.set(xticks=[], yticks=[], title=title if index == 0 else "")
            if axes is not None:
                panel.set_xlabel(axes[index][1])
        if axes is not None:
            panels[index, 0].set_ylabel(axes[index][0])
        bar = figure.colorbar(image, ax=list(panels[index]), shrink=0.9, pad=0.02)
        if labels is not None:
            bar.set_label(labels[index])
    return figure


def comparison_chart(*comparisons: Comparison) -> Figure:
    """Draws the expected squared error of every mechanism as a bar on a log scale, coloured by verdict.

    One panel per comparison; mechanisms that propose no noise there are only named.

    Example:
        >>> from pathlib import Path
        >>> from matrixdp import Budget, Counts, compare, plots
        >>> chart = plots.comparison_chart(compare((6, 8), Counts(1), Budget(1.0, 1e-6)))
        >>> plots.save(chart, Path("mechanisms.png"))
    """
    if not comparisons:
        raise InvalidInput("comparisons must not be empty; compare() makes one")
    shown = [comparison.applicable for comparison in comparisons]
    if not all(shown):
        raise InvalidInput("every comparison needs at least one mechanism that applies")
    heights = [len(rows) + 2.0 + ROW * len(_absent(of)) for of, rows in zip(comparisons, shown, strict=True)]
    figure = figure_of(8.5, 0.42 * sum(heights) + 0.8)
    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, comparison in zip(panels, comparisons, strict=True):
        _bars(panel, comparison)
    whole = "the task" if any(comparison.of_task for comparison in comparisons) else "the whole matrix"
    panels[-1].set_xlabel(f"expected squared error of {whole} (log scale)")
    present = {row.verdict for rows in shown for row in rows}
    keys = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black", label=meaning)
        for verdict, (colour, hatch, meaning) in STYLES.items()
        if verdict in present
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _bars(panel: Axes, comparison: Comparison) -> None:
    rows, best, absent = comparison.applicable, comparison.least_error, _absent(comparison)
    errors = [row.expected_squared_error for row in rows]
    for place, (row, error) in enumerate(zip(rows, errors, strict=True)):
        colour, hatch, _ = STYLES[row.verdict]
        panel.barh(place, error, height=0.7, color=colour, hatch=hatch, edgecolor="black", linewidth=0.7)
        beside = f"{error:.4g}" if math.isnan(best) else f"{error:.4g}  ({error / best:.3g} x best)"
        panel.annotate(beside, (error, place), (5, 0), textcoords="offset points", va="center")
    # Bars on a log scale start anywhere; a whole decade keeps them comparable. The rest is room for the numbers.
    start = 10.0 ** math.floor(math.log10(min(errors) / 2))
    panel.set_xscale("log")
    panel.set_xlim(start, max(errors) * (max(errors) / start) ** 0.6)
    panel.set_yticks(range(len(rows)), [row.mechanism for row in rows])
    panel.set_ylim(len(rows) - 0.5 + ROW * len(absent), -0.6)
    panel.spines[["top", "right"]].set_visible(False)
    sides = " x ".join(str(side) for side in comparison.shape)
    title = f"{sides}, {comparison.sensitivity}; {comparison.budget}"
    panel.set_title("\n".join(textwrap.wrap(title, 80)), loc="left", fontsize=10)
    panel.annotate("\n".join(absent), (0, 0), (4, 4), xycoords="axes fraction",
                   textcoords="offset points", color="dimgray", fontsize=8)  # fmt: skip


def _absent(comparison: Comparison) -> list[str]:
    """Lines that name the mechanisms without a bar."""
    names = ", ".join(row.mechanism for row in comparison if row.note)
    return textwrap.wrap(f"not compared here: {names}", 95, break_on_hyphens=False) if names else []


def lines(x: Any, curves: Mapping[str, Any], *, names: tuple[str, str], points: Any = None) -> Figure:
    """Draws one curve per mechanism, each labelled at its right end.

    Args:
        x: the x coordinates of all curves.
        curves: values by mechanism; mechanisms of the library keep their colours in every figure.
        names: of the horizontal and the vertical axis.
        points: measured values, drawn as small dots.

    Example:
        >>> from matrixdp import plots
        >>> errors = {"analytic": [8.0, 4.0, 2.0], "laplace": [6.0, 3.0, 1.5]}
        >>> figure = plots.lines([0.5, 1, 2], errors, names=("epsilon", "std"))
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['analytic', 'laplace']
    """
    if not curves:
        raise InvalidInput("curves must not be empty")
    figure = figure_of(7.0, 4.0)
    panel = figure.subplots()
    for name, values in curves.items():
        colour, end = COLOURS.get(name, OTHER), float(np.asarray(values)[-1])
        panel.plot(x, values, color=colour, linewidth=1.5)
        panel.annotate(
            name, (1, end), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", color=colour, annotation_clip=False,
        )  # fmt: skip
    if points is not None:
        panel.plot(x, points, ".", markersize=2, color="#999999")
    panel.set(xlabel=names[0], ylabel=names[1])
    panel.set_ylim(0, None)
    panel.margins(x=0)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def figure_of(width: float, height: float) -> Figure:
    """An empty figure of this size, in inches, with a small margin.

    Example:
        >>> from matrixdp.plots import figure_of
        >>> panel = figure_of(6, 4).subplots()
    """
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG picture.

    Example:
        >>> from pathlib import Path
        >>> from matrixdp.plots import figure_of, save
        >>> figure = figure_of(6, 4)
        >>> _ = figure.subplots().plot([1, 2, 3])
        >>> save(figure, Path("line.png"))
    """
    if path.suffix != ".png":
        raise InvalidInput(f"path must end in .png, got {str(path)!r}")
    figure.savefig(path, dpi=RESOLUTION)
