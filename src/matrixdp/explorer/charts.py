"""Charts as SVG: colours and lines come from the page's style, so that they follow light and dark mode.

Everything that a chart shows is also in a table beside it; a chart has a title for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from matrixdp.mechanisms import RECIPES

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 46
COLOURS = 10
"""How many colours the style has for mechanisms: --m0, --m1 and so on."""

_DASHES = ("", "7 4", "2 3")
_numbers = count()


def colour(mechanism: str) -> str:
    """The colour of a mechanism, the same in every chart and table."""
    return f"var(--m{_place(mechanism) % COLOURS})"


def dash(mechanism: str) -> str:
    """The dashes of a mechanism's line, by which mechanisms of the same colour differ."""
    return _DASHES[_place(mechanism) // COLOURS % len(_DASHES)]


def _place(mechanism: str) -> int:
    return list(RECIPES).index(mechanism) if mechanism in RECIPES else 0


@dataclass(frozen=True)
class Scale:
    """A map from numbers to coordinates of the drawing, along one axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a number; numbers outside the range are at its ends."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.start + share * (self.end - self.start)


def line_chart(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    point: tuple[float, float],
    *,
    title: str,
    names: tuple[str, str],
) -> str:
    """Decreasing curves on a logarithmic vertical axis, and one marked point.

    Args:
        lines: the mechanism, the x and the y of each curve.
        point: the x and y of the point.
        title: what the chart shows.
        names: of the horizontal and the vertical axis.
    """
    right = max(x for _, xs, _ in lines for x in xs)
    power = max(10, math.ceil(-math.log10(point[1])) + 4)
    across = Scale(0, right, LEFT, WIDTH - RIGHT)
    down = Scale(10.0**-power, 1.0, HEIGHT - BOTTOM, TOP, log=True)
    parts = [_grid_line(LEFT, down(10.0**-p), WIDTH - RIGHT, down(10.0**-p)) for p in range(0, power + 1, 2)]
    parts += [_text(LEFT - 8, down(10.0**-p) + 4, f"1e-{p}" if p else "1", "end") for p in range(0, power + 1, 2)]
    parts += [_text(across(x), HEIGHT - BOTTOM + 18, f"{x:g}", "middle") for x in ticks(right)]
    x, y = across(point[0]), down(point[1])
    parts.append(f'<path class="guide" d="M{LEFT} {y:.1f}H{x:.1f}V{HEIGHT - BOTTOM}"/>')
    for mechanism, xs, ys in lines:
        kept = _above(list(zip(xs, ys, strict=True)), 10.0**-power)
        if len(kept) > 1:
            path = "L".join(f"{across(a):.1f} {down(b):.1f}" for a, b in kept)
            parts.append(
                f'<path class="curve" style="stroke:{colour(mechanism)}" stroke-dasharray="{dash(mechanism)}" '
                f'd="M{path}"><title>{escape(mechanism)}</title></path>'
            )
    parts.append(f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
    parts.append(_text(x + 9, y - 7, "the budget", "start", "point-name"))
    return _drawing(parts, title, names)


def _above(points: Sequence[tuple[float, float]], floor: float) -> list[tuple[float, float]]:
    """The points of a decreasing curve down to the floor, with the last one interpolated as drawn."""
    kept: list[tuple[float, float]] = []
    for x, y in points:
        if y > floor:
            kept.append((x, y))
            continue
        if kept:
            a, b = kept[-1]
            share = math.log(b / floor) / math.log(b / y) if y > 0 else 1.0
            kept.append((a + share * (x - a), floor))
        break
    return kept


def step_chart(heights: Sequence[float], limit: float, *, title: str, names: tuple[str, str]) -> str:
    """Increasing steps, one per entry, and the line of a limit."""
    top = 1.08 * max(limit, *heights, 0.0)
    across, down = Scale(0, len(heights), LEFT, WIDTH - RIGHT), Scale(0, top, HEIGHT - BOTTOM, TOP)
    parts = [_grid_line(LEFT, down(y), WIDTH - RIGHT, down(y)) for y in ticks(top)]
    parts += [_text(LEFT - 8, down(y) + 4, f"{y:g}", "end") for y in ticks(top)]
    parts += [_text(across(x), HEIGHT - BOTTOM + 18, f"{x:g}", "middle") for x in ticks(len(heights)) if x == int(x)]
    path = f"M{LEFT} {down(0):.1f}"
    for place, height in enumerate(heights):
        path += f"V{down(height):.1f}H{across(place + 1):.1f}"
    parts.append(f'<path class="area" d="{path}V{down(0):.1f}Z"/><path class="curve steps" d="{path}"/>')
    parts.append(_grid_line(LEFT, down(limit), WIDTH - RIGHT, down(limit), "limit"))
    parts.append(_text(WIDTH - RIGHT, down(limit) - 6, "budget", "end", "limit-name"))
    return _drawing(parts, title, names)


def interval_chart(
    labels: Sequence[str], values: Sequence[float], lows: Sequence[float], highs: Sequence[float], *, title: str
) -> str:
    """Bars with error bars, one below the other."""
    row, left = 24, min(220, 16 + 7 * max(len(_short(label)) for label in labels))
    height = row * len(labels) + 34
    low, high = min(0.0, *lows), max(0.0, *highs)
    across = Scale(low, high if high > low else low + 1, left, WIDTH - RIGHT)
    parts = [_grid_line(across(x), 4, across(x), height - 30) for x in ticks(high, low)]
    parts += [_text(across(x), height - 12, f"{x:,g}", "middle") for x in ticks(high, low)]
    for place, (label, value, start, end) in enumerate(zip(labels, values, lows, highs, strict=True)):
        y = 6 + row * place
        x, w = sorted((across(0), across(value)))
        parts.append(_text(left - 8, y + 14, _short(label), "end"))
        parts.append(f'<rect class="bar" x="{x:.1f}" y="{y}" width="{w - x:.1f}" height="{row - 7}"/>')
        m, a, b = y + (row - 7) / 2, across(start), across(end)
        parts.append(
            f'<path class="whisker" d="M{a:.1f} {m}H{b:.1f}M{a:.1f} {m - 4}V{m + 4}M{b:.1f} {m - 4}V{m + 4}"/>'
        )
    return _svg(parts, title, height)


def ticks(high: float, low: float = 0.0) -> list[float]:
    """About five round numbers from low to high."""
    rough = (high - low) / 5
    if not rough > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each for each in (power, 2 * power, 5 * power, 10 * power) if each >= rough)
    first, last = math.ceil(low / step), math.floor(high / step + 1e-9)
    return [float(f"{place * step:.10g}") for place in range(first, last + 1)]


def _short(label: str) -> str:
    return label if len(label) <= 28 else label[:27] + "…"


def _grid_line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _drawing(parts: Iterable[str], title: str, names: tuple[str, str]) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    named = [
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, names[0], "middle", "axis-name"),
        f'<text class="axis-name" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(names[1])}</text>",
    ]
    return _svg([*parts, *named], title, HEIGHT)


def _svg(parts: Iterable[str], title: str, height: float) -> str:
    number = next(_numbers)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-labelledby="chart{number}">'
        f'<title id="chart{number}">{escape(title)}</title>{"".join(parts)}</svg>'
    )
