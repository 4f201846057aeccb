"""The view Ledger."""

from __future__ import annotations

from typing import Any

from htmltools import Tag, TagChild, TagList, tags
from shiny import reactive, ui

from matrixdp._rounding import rounded_down, rounded_up
from matrixdp.errors import InvalidInput
from matrixdp.explorer.charts import step_chart
from matrixdp.explorer.ledgers import Line, Shown, shown
from matrixdp.explorer.views.common import Watched, card, chart, code, columns_of, facts, view, watching
from matrixdp.explorer.views.release import meter


def page(ledger: str) -> Tag:
    """The inputs of the view, and the places of its results."""
    controls = TagList(
        tags.h2("Ledger"),
        ui.input_text("ledger_path", "Ledger: a file, or postgresql://...", value=ledger, width="100%"),
        ui.input_text("ledger_dataset", "Data set (for a database)", width="100%"),
        ui.input_text("ledger_head", "A hash that you kept (optional)", width="100%"),
        ui.input_action_button("ledger_open", "Show and verify", class_="btn-primary"),
        tags.p("With a hash, it is also checked that no entry up to it was changed since.", class_="mdp-faint"),
    )
    results = TagList(
        watching("ledger"),
        ui.output_ui("ledger_left"),
        ui.output_ui("ledger_course"),
        ui.output_ui("ledger_history"),
        ui.output_ui("ledger_code"),
        ui.output_ui("ledger_hint"),
    )
    lead = "What was spent, by whom, what is left, and whether its chain of hashes is intact."
    return view("Ledger", lead, controls, results)


def serve(input: Any) -> None:
    """Reads the ledger when asked to."""
    watched = Watched("Reading the ledger", "ledger")

    @reactive.effect
    @reactive.event(input.ledger_open)
    def _start() -> None:
        path, head = input.ledger_path().strip(), input.ledger_head().strip() or None
        if not path:
            watched.refuse(InvalidInput("ledger: give the path of one; `matrixdp ledger create budget.db` makes it"))
            return
        dataset = input.ledger_dataset().strip() or None
        watched.start(lambda tell: shown(path, head, dataset, tell))

    watched.hint("No ledger shown yet", "Name the file of a ledger.")
    watched.show("left", _left)
    watched.show("course", lambda found: _course(found) if found.lines else None)
    watched.show("history", _history)
    watched.show("code", lambda found: code("ledger", found.snippet()))


def _left(found: Shown) -> Tag:
    kept = " It contains the hash that you kept." if found.kept else ""
    return card(
        "What is left",
        meter(found.spent, found.spent, found.budget),
        tags.div(
            facts(("Budget", str(found.budget))),
            facts(("Spent", f"epsilon {rounded_up(found.spent)}")),
            facts(("Left for one Gaussian release", f"epsilon {rounded_down(found.left_epsilon)}")),
            facts(("Adjacency", found.adjacency or "not fixed yet")),
            class_="mdp-tiles",
        ),
        tags.p("The chain of hashes is intact.", tags.span(kept), " Head: ", tags.code(found.head), class_="mdp-hash"),
    )


def _course(found: Shown) -> Tag:
    svg = step_chart(
        [line.spent for line in found.lines],
        found.budget.epsilon,
        title="The epsilon spent after each entry, below the budget. The numbers are in the table of entries.",
        names=("entries", "epsilon spent"),
    )
    return card("Spent over time", chart(svg))


def _history(found: Shown) -> TagList:
    people: list[list[TagChild]] = [
        [name or "nobody named", str(spends), rounded_up(epsilon)] for name, (spends, epsilon) in found.analysts.items()
    ]
    entries = [_entry(line) for line in reversed(found.lines)]
    heads = (
        "Entry",
        "Time (UTC)",
        "Note",
        "Analyst",
        "Purpose",
        "Protects",
        "Releases",
        "Epsilon each",
        "Total epsilon",
    )
    who = "Epsilon of each one's own spends, if there were no others. These do not add up to the total."
    return TagList(
        card("Who spent what", columns_of(("Analyst", "Entries", "Epsilon"), people, who)) if people else None,
        _quotas(found) if found.left[1:] else None,
        _reservations(found) if found.reservations else None,
        card("History", columns_of(heads, entries, "All entries, the latest first.", text=6)),
    )


def _entry(line: Line) -> list[TagChild]:
    entry = line.entry
    names = [entry.note, entry.analyst or "-", entry.purpose or "-", entry.unit]
    numbers = [str(entry.count), rounded_up(line.epsilon), rounded_up(line.spent)]
    return [str(entry.number), entry.time[:16].replace("T", " "), *names, *numbers]


def _quotas(found: Shown) -> Tag:
    rows: list[list[TagChild]] = [
        [each.name, each.per or "lifetime", str(each.budget), rounded_up(each.spent), rounded_down(each.epsilon)]
        for each in found.left[1:]
    ]
    heads = ("Quota", "Period", "Budget", "Spent", "Left")
    text = "A new period does not restore the guarantee of the same records: the total above is for the lifetime."
    return card("Quotas", columns_of(heads, rows, text, text=3))


def _reservations(found: Shown) -> Tag:
    rows: list[list[TagChild]] = [
        [each.name, each.analyst or "-", each.purpose or "-", str(each.count), str(each.left)]
        for each in found.reservations
    ]
    heads = ("Reservation", "Analyst", "Purpose", "Releases", "Left")
    return card("Reservations", columns_of(heads, rows, "What is kept free, and charged already.", text=3))
