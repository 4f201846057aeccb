"""Pages in plain language, as Markdown or HTML; sentences that statements of privacy share; wrapping of lines."""

from __future__ import annotations

import base64
import html
import math
import textwrap
from decimal import Decimal

from matrixdp._rounding import rounded_up

Part = tuple[str, list[str]]
"""A heading and its points."""

NOT_ABOUT_GROUPS = "That nothing can be learnt about groups of people: that is what the numbers are for."
NOT_FOR_SEVERAL = "As much for several people together, such as a family, as for each of them: their losses add up too."
NOT_SIGNED = "Who wrote this page: nothing is signed."

_STYLE = (
    "body{font:10.5pt/1.4 Georgia,serif;max-width:44em;margin:1.5em auto;padding:0 1em;color:#111}"
    "h1{font-size:16pt;margin:0 0 .4em}h2{font-size:12pt;margin:.8em 0 .2em}ul{margin:0;padding-left:1.2em}"
    "figure{margin:.8em 0}p{font-size:8.5pt;overflow-wrap:anywhere}@page{margin:1.5cm}"
)


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most this width; no word, path or hash is broken.

    Lines with a name and a text, as in certificates, continue below the text; others are indented by two.
    """
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.splitlines():
        named = line.startswith("  ") and line[12:13] == " " and not line[2].isupper()  # a sentence is not a name
        indent = 13 if named else len(line) - len(line.lstrip()) + 2
        wrapper.subsequent_indent = " " * indent
        lines += wrapper.wrap(line) if len(line) > width else [line]
    return "\n".join(lines)


def page(title: str, parts: list[Part], closing: str, kind: str, picture: str) -> str:
    """A page of some parts, a picture (SVG) and a last paragraph; kind is "html", or anything else for Markdown."""
    if kind == "html":
        body = "".join(
            f"<h2>{html.escape(head)}</h2><ul>{''.join(f'<li>{html.escape(point)}</li>' for point in points)}</ul>"
            for head, points in parts
        )
        name = html.escape(title)
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
            f"</head><body><h1>{name}</h1>{body}<figure>{picture}</figure><p>{html.escape(closing)}</p></body></html>\n"
        )
    encoded = base64.b64encode(picture.encode()).decode()
    lines = [f"# {markdown(title)}", ""]
    for head, points in parts:
        lines += [f"## {head}", "", *(f"- {markdown(point)}" for point in points), ""]
    alt = "How often a guess whether a person's rows were used can be right"
    return "\n".join([*lines, f"![{alt}](data:image/svg+xml;base64,{encoded})", "", markdown(closing), ""])


def in_numbers(epsilon: float, delta: float) -> str:
    """What an epsilon and a delta mean, in a sentence."""
    factor = rounded_up(math.exp(epsilon)) if epsilon < 700 else "infinitely many"
    plain = f"{Decimal(repr(delta)):f}" if delta >= 1e-12 else f"{delta:g}"
    return (
        f"In numbers, this is differential privacy: the probability of any outcome is at most {factor} times what it "
        f"would be then{f', plus {plain}' if delta > 0 else ''}, and the other way round "
        f"(epsilon {rounded_up(epsilon)}, delta {delta:g})."
    )


def guess(who: str, share: float, what: str) -> str:
    """How often a guess whether a person's rows were used can be right, in two sentences."""
    was = "was" if who.startswith("any one") else "were"
    return (
        f"Somebody who guesses whether {who} {was} used is right in half of all cases by chance, and in at most "
        f"{percent(share)} with {what}. That holds whatever else the guesser knows, today or later."
    )


def guess_picture(share: float, label: str) -> str:
    """Three bars: by chance, with the release at most, and with the data themselves."""
    rows = (("by chance", 0.5, "#999999"), (label, share, "#0072B2"), ("with the data", 1.0, "#D55E00"))
    parts = [
        '<text x="0" y="14" font-weight="bold">How often a guess whether a person\'s rows were used is right</text>'
    ]
    for place, (words, part, colour) in enumerate(rows):
        y = 26 + 26 * place
        parts.append(
            f'<text x="0" y="{y + 14}">{words}</text>'
            f'<rect x="180" y="{y}" width="{330 * part:.1f}" height="20" fill="{colour}"/>'
            f'<text x="{188 + 330 * part:.1f}" y="{y + 14}">{percent(part)}</text>'
        )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 580 108" width="580" height="108" '
        f'font-family="Helvetica,Arial,sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def percent(share: float) -> str:
    """A share in percent, rounded up to a tenth."""
    return f"{math.ceil(share * 1000 - 1e-9) / 10:g} %"


def covered(level: float) -> str:
    """The level of an interval in percent, with all its digits."""
    return f"{100 * level:.10g} %"


def counted(number: int, thing: str) -> str:
    """A number of things, in the singular or the plural: 1 entry, 2 entries."""
    several = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number} {thing if number == 1 else several}"


def listed(names: list[str]) -> str:
    """Names joined as in a sentence: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def markdown(text: str) -> str:
    """A text with the special characters of Markdown escaped."""
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>#|" else letter for letter in text)
