"""The picture of the claims: every mechanism on every setting of the papers."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from matrixdp.plots import STYLES, figure_of
from matrixdp_papers.claims import Claims


def claims_chart(claims: Claims) -> Figure:
    """Draws, for every setting, the error of each mechanism as a multiple of the analytic Gaussian's."""
    settings = [(name, [row for row in rows if row.ratio == row.ratio]) for name, rows in claims.settings()]
    settings = [(name, rows) for name, rows in settings if rows]
    figure = figure_of(9.5, 0.34 * len(settings) + 1.6)
    panel = figure.subplots()
    mechanisms = list(dict.fromkeys(row.mechanism for _, rows in settings for row in rows))
    for mechanism, marker in zip(mechanisms, "osPD^v<>X", strict=False):
        for verdict, (colour, _, _) in STYLES.items():
            points = [
                (row.ratio, place)
                for place, (_, rows) in enumerate(settings)
                for row in rows
                if row.mechanism == mechanism and row.verdict == verdict
            ]
            if points:
                x, y = zip(*points, strict=True)
                top = 4 if verdict == "violated" else 3  # what fails is not hidden behind what holds
                panel.scatter(x, y, marker=marker, c=colour, edgecolors="black", linewidths=0.6, s=42, zorder=top)
        panel.scatter([], [], marker=marker, c="white", edgecolors="black", label=mechanism)
    panel.set_xscale("log")
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_yticks(range(len(settings)), [f"{first.paper}: {first.setting}" for first, _ in settings])
    panel.invert_yaxis()
    panel.grid(axis="x", alpha=0.3)
    panel.set_xlabel("expected squared error, multiples of the analytic Gaussian (log scale)")
    verdicts = [Patch(facecolor=STYLES[v][0], edgecolor="black", label=v) for v in ("exact", "loose", "violated")]
    marks = panel.legend(loc="upper right", fontsize=8, title="mechanism")
    panel.add_artist(marks)
    panel.legend(handles=verdicts, loc="lower right", fontsize=8, title="verdict")
    return figure
