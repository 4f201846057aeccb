"""The view Plan."""

from __future__ import annotations

from typing import Any

from htmltools import Tag, TagChild, TagList, tags
from shiny import reactive, render, ui

from matrixdp._rounding import rounded_up
from matrixdp.budget import Budget
from matrixdp.errors import MatrixDPError
from matrixdp.explorer.planning import Part, Planned, Request, planned
from matrixdp.explorer.statistics import FORMS, statistics
from matrixdp.explorer.views.common import (
    Watched,
    about,
    barred,
    budget_fields,
    card,
    code,
    columns_of,
    number,
    short,
    table_fields,
    view,
    watching,
    whole,
)
from matrixdp.tables import Domain


def page(domain: str) -> Tag:
    """The inputs of the view, and the places of its results."""
    controls = TagList(
        tags.h2("Table"),
        table_fields("plan", domain),
        tags.h2("Wanted"),
        ui.input_text_area(
            "plan_statistics", "Statistics, one per line", rows=5, width="100%", placeholder=FORMS["counts"]
        ),
        tags.details(
            tags.summary("how to write them"),
            tags.ul(*(tags.li(tags.code(form)) for form in FORMS.values())),
            tags.p(tags.code("weight 2: "), "before a line doubles how much its error counts."),
        ),
        budget_fields("plan", "Budget for all of them together"),
        ui.input_numeric("plan_rows", "Rows, as a public guess", value=1000, min=1, width="100%"),
        ui.input_action_button("plan_start", "Show the error bars", class_="btn-primary"),
    )
    results = TagList(
        watching("plan"), ui.output_ui("plan_table"), ui.output_ui("plan_code"), ui.output_ui("plan_hint")
    )
    lead = "Error bars before anything is spent. No record is read: the domain and the budget say it all."
    return view("Plan releases", lead, controls, results)


def serve(input: Any) -> None:
    """Plans when asked to."""
    watched = Watched("Planning", "plan")

    @reactive.effect
    @reactive.event(input.plan_start)
    def _start() -> None:
        try:
            request = Request(
                about=about(input, "plan"),
                statistics=statistics(input.plan_statistics()),
                budget=Budget(number("epsilon", input.plan_epsilon()), number("delta", input.plan_delta())),
                rows=whole("rows", input.plan_rows()),
            )
        except MatrixDPError as problem:
            watched.refuse(problem)
            return
        watched.start(lambda tell: planned(request, tell))

    @render.ui
    def plan_columns() -> Tag | None:
        return known_columns(input, "plan")

    watched.hint("Nothing planned yet", "Name a domain and what you want to know from the table.")
    watched.show("table", _table)
    watched.show("code", lambda found: code("plan", found.snippet))


def known_columns(input: Any, prefix: str) -> Tag | None:
    """The columns of the domain that the fields name, or what is wrong with it."""
    if not input[f"{prefix}_upload"]() and not input[f"{prefix}_domain"]().strip():
        return None
    try:
        domain = Domain.from_toml(about(input, prefix).domain)
    except MatrixDPError as problem:
        return tags.p(str(problem), class_="mdp-alert")
    sizes = domain.sizes
    words = [f"{name} ({sizes[name]} labels)" if name in sizes else f"{name} (numbers)" for name in domain]
    return tags.p(tags.strong("Columns: "), ", ".join(words), class_="mdp-faint")


def _table(found: Planned) -> Tag:
    together = sum(part.epsilon for part in found.parts)
    heads = ("Statistic", "Noise", "Epsilon alone", "Numbers", "Typical error", "Largest error")
    rows = [_row(part, part.epsilon / together) for part in found.parts]
    budget = found.request.budget
    total = tags.p(
        "All together: epsilon ",
        tags.strong(rounded_up(found.epsilon)),
        f" at delta {budget.delta:g}, of {budget.epsilon:g}.",
    )
    caption = (
        "Errors are half the width of a 95 % interval. Those of means, quantiles and regressions are for "
        f"{found.request.rows:,} synthetic rows, spread evenly over the domain."
    )
    return card("Error bars", total, columns_of(heads, rows, caption, text=2))


def _row(part: Part, share: float) -> list[TagChild]:
    bars = part.bars
    errors = (f"± {short(bars.typical)} {bars.unit}", f"± {short(bars.largest)} {bars.unit}")
    return [part.statistic.text, part.noise, barred(rounded_up(part.epsilon, 3), share), f"{bars.numbers:,}", *errors]
