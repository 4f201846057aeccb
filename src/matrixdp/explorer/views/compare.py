"""The view Compare."""

from __future__ import annotations

import math
from typing import Any

from htmltools import Tag, TagChild, TagList, tags
from shiny import reactive, render, ui

from matrixdp._rounding import rounded_up
from matrixdp.comparison import COPIES, Row
from matrixdp.errors import MatrixDPError
from matrixdp.explorer.charts import colour, dash, line_chart
from matrixdp.explorer.comparing import SETS, Claim, Compared, Curve, Setting, compared
from matrixdp.explorer.snippets import Snippet
from matrixdp.explorer.views.common import (
    Watched,
    barred,
    card,
    chart,
    code,
    columns_of,
    facts,
    short,
    slider,
    view,
    watching,
)

SIDES = (1, 2, 3, 5, 8, 10, 15, 20, 30, 40, 64, 89, 100, 150, 200, 300)
SIZES = (1, 2, 3, 4, 5, 8, 10, 20, 50, 100)
EPSILONS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
MEANING = {
    "exact": "The claim is the truth.",
    "loose": "The claim holds, with more noise than it needs.",
    "violated": "The claim is false.",
    "unproven": "The claim is not known to be true.",
    "not float-safe": "The ideal law keeps the claim; release refuses it.",
}


def page() -> Tag:
    """The inputs of the view, and the places of its results."""
    controls = TagList(
        tags.h2("Setting"),
        slider("compare_rows", "Rows of the matrix", SIDES, 20),
        slider("compare_columns", "Columns of the matrix", SIDES, 20),
        ui.input_select(
            "compare_kind",
            "What one record can change",
            {name: f"{kind.__name__}: {words}" for name, (kind, words) in SETS.items()},
            width="100%",
        ),
        slider("compare_size", "By how much", SIZES, 1),
        slider("compare_epsilon", "Epsilon", EPSILONS, 1.0),
        slider("compare_delta", "Delta", DELTAS, 1e-6),
        tags.p("No data is needed here, and nothing is spent.", class_="mdp-faint"),
    )
    results = TagList(
        watching("compare"),
        ui.output_ui("compare_claim"),
        ui.output_ui("compare_table"),
        ui.output_ui("compare_curves"),
        ui.output_ui("compare_code"),
    )
    lead = "The noise that every mechanism would add for the same claim, and what it truly guarantees."
    return view("Compare mechanisms", lead, controls, results)


def serve(input: Any, known: dict[Setting, Compared]) -> None:
    """Computes again whenever an input has changed.

    Args:
        input: the inputs of the page.
        known: a cache of results, shared by all tabs.
    """
    watched = Watched("Comparing mechanisms", "compare")

    @reactive.calc
    def setting() -> Setting:
        return Setting(
            int(input.compare_rows()),
            int(input.compare_columns()),
            str(input.compare_kind()),
            float(input.compare_size()),
            float(input.compare_epsilon()),
            float(input.compare_delta()),
        )

    @reactive.effect
    def _start() -> None:
        asked = setting()
        watched.start(lambda tell: known.get(asked) or known.setdefault(asked, compared(asked, tell)))

    watched.show("claim", lambda found: _claim(found.claim) if found.claim else None)
    watched.show("table", _table)
    watched.show("curves", lambda found: _curves(found) if found.curves else None)

    @render.ui
    def compare_code() -> Tag | None:
        try:
            snippet: Snippet | None = setting().snippet()
        except MatrixDPError:  # the computation reports it
            snippet = None
        return code("compare", snippet)


def _claim(claim: Claim) -> Tag:
    broken = claim.true_delta > claim.claimed.delta
    verdict = "The claim is false here." if broken else "The claim holds here."
    epsilon = rounded_up(claim.true_epsilon, 3) if claim.true_epsilon < math.inf else "none"
    return card(
        "R1SMG beside its claim",
        tags.p(tags.strong(verdict), " Its noise has rank one, so all other directions have none."),
        tags.div(
            facts(("Claimed (epsilon, delta)", f"({claim.claimed.epsilon:g}, {claim.claimed.delta:g})")),
            facts(("True delta at that epsilon", rounded_up(claim.true_delta, 3))),
            facts(("True epsilon at that delta", epsilon)),
            facts(("Error, and the least that keeps it", f"{short(claim.error)} / {short(claim.least_error)}")),
            class_="mdp-tiles",
        ),
    )


def _table(found: Compared) -> Tag:
    rows, best = found.comparison.applicable, found.comparison.least_error
    sizes = [math.log10(row.expected_squared_error) for row in rows]
    low, high = math.floor(min(sizes, default=0.0) - 0.3), max(sizes, default=1.0)
    lines = [_row(row, best, (size - low) / max(high - low, 1e-9)) for row, size in zip(rows, sizes, strict=True)]
    heads = ("Mechanism", "Verdict", "Expected squared error", "times best", "True delta", f"{COPIES} planned")
    absent = [row for row in found.comparison if row.note]
    notes = tags.details(
        tags.summary(f"{len(absent)} mechanisms have nothing to propose here"),
        tags.ul(*(tags.li(tags.strong(row.mechanism), f": {row.note}") for row in absent)),
    )
    auto = found.comparison.auto
    chosen = (
        None if auto is None else tags.p("Automatic choice: ", tags.strong(auto), ", the least error that is safe.")
    )
    caption = "Bars are on a logarithmic scale. The last column is the epsilon of ten such releases, planned together."
    return card("Error and true guarantee", chosen, columns_of(heads, lines, caption, text=2), notes)


def _row(row: Row, best: float, share: float) -> list[TagChild]:
    planned = row.planned_epsilon
    return [
        row.mechanism,
        badge(row.verdict),
        barred(short(row.expected_squared_error), share, colour(row.mechanism)),
        short(row.expected_squared_error / best),
        rounded_up(row.exact_delta, 3) if row.exact_delta >= 1e-300 else "< 1e-300",
        rounded_up(planned, 3) if planned == planned else "-",
    ]


def badge(verdict: str) -> Tag:
    """A verdict, with its meaning."""
    return tags.span(verdict, title=MEANING[verdict], class_=f"mdp-badge mdp-{verdict.replace(' ', '-')}")


def _curves(found: Compared) -> Tag:
    groups = grouped(found.curves)
    lines = [(names[0], curve.epsilons, curve.deltas) for names, curve in reversed(groups)]  # the best one on top
    budget = found.comparison.budget
    svg = line_chart(
        lines,
        (budget.epsilon, budget.delta),
        title="The true delta of each mechanism for every epsilon. Numbers at the budget are in the table.",
        names=("epsilon", "true delta"),
    )
    legend = tags.ul(
        *(
            tags.li(
                tags.span(
                    style=f"border-top:3px {'dashed' if dash(names[0]) else 'solid'} {colour(names[0])}",
                    class_="mdp-swatch",
                ),
                ", ".join(names),
            )
            for names, _ in groups
        ),
        class_="mdp-legend",
    )
    text = (
        "A curve above the marked point breaks the claim; one that passes through it keeps it with no noise to spare."
    )
    return card("Privacy profiles", tags.p(text), chart(svg), legend)


def grouped(curves: tuple[Curve, ...]) -> list[tuple[list[str], Curve]]:
    """Merges curves that are indistinguishable in the chart into one, with all their names."""
    found: list[tuple[list[str], Curve]] = []
    for curve in curves:
        for names, known in found:
            pairs = zip(known.deltas, curve.deltas, strict=True)
            if all(math.isclose(a, b, rel_tol=0.02, abs_tol=1e-20) for a, b in pairs):
                names.append(curve.mechanism)
                break
        else:
            found.append(([curve.mechanism], curve))
    return found
