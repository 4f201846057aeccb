"""The view Release."""

from __future__ import annotations

from typing import Any

from htmltools import Tag, TagChild, TagList, tags
from shiny import Session, reactive, render, ui

from matrixdp._rounding import rounded_down, rounded_up
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.explorer.charts import interval_chart
from matrixdp.explorer.jobs import Job
from matrixdp.explorer.releasing import Desk, Outcome, Preview, Request, preview
from matrixdp.explorer.snippets import without_password
from matrixdp.explorer.statistics import FORMS, statistic
from matrixdp.explorer.views.common import (
    Watched,
    about,
    budget_fields,
    card,
    chart,
    code,
    columns_of,
    facts,
    number,
    short,
    table_fields,
    view,
    watching,
    whole,
)
from matrixdp.explorer.views.plan import known_columns

MOST_SHOWN = 200
"""The most rows of a released table that the page shows; the file has all."""

MOST_BARS = 40


def page(records: str, domain: str, ledger: str) -> Tag:
    """The inputs of the view, and the places of its results."""
    controls = TagList(
        tags.h2("Records"),
        ui.input_text("release_records", "Records: a file on this machine", value=records, width="100%"),
        table_fields("release", domain),
        tags.h2("Release"),
        ui.input_text("release_statistic", "Statistic", placeholder=FORMS["counts"], width="100%"),
        tags.details(tags.summary("how to write it"), tags.ul(*(tags.li(tags.code(form)) for form in FORMS.values()))),
        budget_fields("release", "Budget of this release"),
        tags.h2("Account"),
        ui.input_text("release_ledger", "Ledger: a file, or postgresql://...", value=ledger, width="100%"),
        ui.input_text("release_dataset", "Data set (for a database)", width="100%"),
        tags.div(
            ui.input_text("release_analyst", "Analyst (optional)", width="100%"),
            ui.input_text("release_purpose", "Purpose (optional)", width="100%"),
            class_="mdp-pair",
        ),
        ui.input_numeric("release_rows", "Rows, as a public guess", value=1000, min=1, width="100%"),
        ui.input_action_button("release_preview", "Preview", class_="btn-primary"),
    )
    results = TagList(
        watching("release"),
        ui.output_ui("release_shown"),
        tags.div(ui.output_text("release_told"), role="status", aria_live="polite", class_="visually-hidden"),
        ui.output_ui("release_list"),
        ui.output_ui("release_code"),
    )
    lead = (
        "See what will be published and what it costs; then confirm. The ledger is charged before any noise is drawn."
    )
    return view("Release", lead, controls, results)


def serve(input: Any, session: Session, desk: Desk) -> None:
    """Previews and releases when asked to."""
    watched = Watched("Preparing the preview", "release")
    confirmed: reactive.Value[frozenset[str]] = reactive.Value(frozenset())

    @reactive.effect
    @reactive.event(input.release_preview)
    def _preview() -> None:
        try:
            request = _request(input)
        except MatrixDPError as problem:
            watched.refuse(problem)
            return
        watched.start(lambda tell: preview(request, tell))

    @reactive.effect
    async def _focus() -> None:
        if watched.result() is not None:
            await session.send_custom_message("mdp-focus", {"id": "release_preview_title"})

    @reactive.effect
    @reactive.event(input.release_confirm)
    def _confirm() -> None:
        found = watched.result()
        if found is not None:
            desk.confirm(found)
            confirmed.set(confirmed() | {found.key})

    @reactive.poll(lambda: [(key, job.finished, job.done) for key, (_, job) in desk.releases().items()], 0.3)
    def releases() -> dict[str, tuple[Request, Job[Outcome]]]:
        return desk.releases()

    @render.ui
    def release_columns() -> Tag | None:
        return known_columns(input, "release")

    watched.show("shown", lambda found: None if found.key in confirmed() else _preview_card(found))
    watched.show("code", lambda found: code("release", found.request.snippet()))

    @render.text
    def release_told() -> str:
        running = [job for _, job in releases().values()]
        if not running:
            return ""
        latest = running[0]
        if not latest.finished:
            return "Releasing…"
        return f"Nothing was released: {latest.message}" if latest.failed else "Released, and charged to the ledger."

    @render.ui
    def release_list() -> TagList:
        return TagList(*(_made(key, *each, first=n == 0) for n, (key, each) in enumerate(releases().items())))


def _request(input: Any) -> Request:
    records, ledger = input.release_records().strip(), input.release_ledger().strip()
    if not records:
        raise InvalidInput("records: give the path of a file, such as patients.csv")
    if not ledger:
        raise InvalidInput("ledger: give the path of one; `matrixdp ledger create budget.db` makes it")
    return Request(
        records=records,
        about=about(input, "release"),
        statistic=statistic(input.release_statistic()),
        budget=Budget(number("epsilon", input.release_epsilon()), number("delta", input.release_delta())),
        ledger=ledger,
        dataset=input.release_dataset().strip(),
        analyst=input.release_analyst().strip(),
        purpose=input.release_purpose().strip(),
        rows=whole("rows", input.release_rows()),
    )


def _preview_card(found: Preview) -> Tag:
    request, certificate, bars = found.request, found.certificate, found.bars
    axes = "; ".join(f"{name}: {_labels(labels)}" for name, labels in found.axes)
    who = "each row" if request.about.unit is None else f"each {request.about.unit}, with all of its rows"
    epsilon, delta = certificate.epsilon(request.budget.delta), request.budget.delta
    action: TagChild
    if found.fits:
        action = ui.input_action_button("release_confirm", "Publish and charge", class_="btn-danger mdp-once")
    else:
        action = tags.p(
            "The ledger has no room for this release. Ask for less, or for other noise.", class_="mdp-alert"
        )
    return card(
        "What will be published",
        facts(
            ("Statistic", request.statistic.text),
            ("Labels", axes or "none"),
            ("Numbers", f"{bars.numbers:,}, each ± {short(bars.typical)} {bars.unit} (95 %)"),
            ("Protects", who),
            ("Guarantee", f"epsilon {rounded_up(epsilon)} at delta {delta:g}, {certificate.adjacency}"),
            ("Noise", certificate.source),
        ),
        tags.h3("What it costs"),
        meter(found.spent, found.spent_after, found.budget),
        tags.p(
            f"The total in the ledger goes from epsilon {rounded_up(found.spent)} to ",
            tags.strong(rounded_up(found.spent_after)),
            f", of {found.budget.epsilon:g} at delta {found.budget.delta:g}. A release cannot be taken back.",
        ),
        *(
            tags.p(f"Quota {each.name}, {each.per or 'lifetime'}: epsilon {rounded_down(each.epsilon)} left.")
            for each in found.left[1:]
        ),
        tags.div(action, class_="mdp-actions"),
        name="release_preview_title",
    )


def meter(spent: float, after: float, budget: Budget) -> Tag:
    """The budget as a bar: what is spent, what a release adds, what is left."""
    first = min(1.0, spent / budget.epsilon)
    more = min(1.0, after / budget.epsilon) - first
    words = f"{100 * first:.0f} % spent" + (f", {100 * more:.0f} % for this release" if more > 0 else "")
    return tags.div(
        tags.span(style=f"width:{100 * first:.2f}%", class_="mdp-spent"),
        tags.span(style=f"width:{100 * more:.2f}%", class_="mdp-more"),
        class_="mdp-meter",
        role="img",
        aria_label=words,
        title=words,
    )


def _labels(labels: tuple[str, ...]) -> str:
    return ", ".join(labels) if len(labels) <= 8 else f"{', '.join(labels[:7])} and {len(labels) - 7} more"


def _made(key: str, request: Request, job: Job[Outcome], first: bool) -> Tag:
    """One release of this program."""
    title = f"{request.statistic.text}, epsilon {request.budget.epsilon:g}"
    if not job.finished:
        bar = tags.progress(value=str(job.done), max=str(max(job.total, 1)), aria_label="Releasing")
        return card(f"Releasing: {title}", tags.div(bar, tags.span("Leaving does not stop it."), class_="mdp-progress"))
    outcome = job.result
    if job.failed or outcome is None:
        return card(f"Not released: {title}", tags.p(job.message, class_="mdp-alert"))
    links = [tags.a(name, href=f"files/{key}/{name}", download=name, class_="mdp-file") for name in outcome.files]
    content: list[TagChild] = [
        tags.p(f"Entry {outcome.entry} of {without_password(request.ledger)}. ", tags.strong("Downloads:")),
        tags.p(*links, class_="mdp-files"),
    ]
    if not first:
        return tags.details(tags.summary(f"Released: {title}"), *content, class_="mdp-card")
    return card(f"Released: {title}", *content, *_table(outcome))


def _table(outcome: Outcome) -> list[TagChild]:
    columns = {name: list(part)[:MOST_SHOWN] for name, part in outcome.columns.items()}
    numbers = ("value", "standard_error", "low", "high", "reliable")
    labels = [name for name in columns if name not in numbers]
    length = len(columns["value"])
    texts = [
        ", ".join(str(columns[name][row]) for name in labels if columns[name][row] is not None) for row in range(length)
    ]
    texts = [text or "all rows" for text in texts]
    parts: list[TagChild] = []
    if length <= MOST_BARS:
        svg = interval_chart(
            texts, columns["value"], columns["low"], columns["high"], title="Released numbers with 95 % intervals"
        )
        parts.append(chart(svg))
    whole_length = len(outcome.columns["value"])
    caption = "Released numbers, with intervals of 95 % for the noise."
    if whole_length > length:
        caption += f" The first {length} of {whole_length:,}; the file has all."
    shown = [name for name in numbers if name in columns]
    rows = [[texts[row], *(_cell(columns[name][row]) for name in shown)] for row in range(length)]
    heads = [", ".join(labels) or "rows", *(name.replace("_", " ") for name in shown)]
    parts.append(columns_of(heads, rows, caption))
    return parts


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, (bool, str)) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
