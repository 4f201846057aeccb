"""What the views share: fields, a background computation with its progress, tables, and code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from htmltools import HTML, Tag, TagChild, TagList, tags
from shiny import reactive, render, ui
from shiny.session import require_active_session

from matrixdp.errors import InvalidInput
from matrixdp.explorer.jobs import Job, Tell
from matrixdp.explorer.snippets import Snippet
from matrixdp.explorer.tables import About

POLL = 0.2  # seconds


class Watched:
    """A computation that a view waits for. A new one replaces the last.

    Args:
        name: what it does, in words.
        prefix: the prefix of the names of all outputs of the view; see `watching`.
    """

    def __init__(self, name: str, prefix: str) -> None:
        self.name, self._prefix = name, prefix
        self.result: reactive.Value[Any] = reactive.Value(None)
        self.message: reactive.Value[str] = reactive.Value("")
        self.progress: reactive.Value[tuple[int, int, int] | None] = reactive.Value(None)
        self.running: reactive.Value[bool] = reactive.Value(False)
        self._job: reactive.Value[Job[Any] | None] = reactive.Value(None)

        @reactive.effect
        def _poll() -> None:
            job = self._job()
            if job is None:
                return
            finished = job.finished  # read first: the rest does not change once it is True
            _set(self.progress, None if finished else (job.done, job.total, int(job.seconds)))
            _set(self.running, not finished)
            _set(self.message, job.message if finished else "")
            _set(self.result, None if job.failed else job.result)
            if not finished:
                reactive.invalidate_later(POLL)

        self._output("said", render.text(self.said))
        self._output("bar", render.ui(self.bar))
        self._output("alert", render.ui(self.alert))

    def _output(self, name: str, renderer: Any) -> None:
        require_active_session(None).output(id=f"{self._prefix}_{name}")(renderer)

    def show(self, name: str, part: Callable[[Any], TagChild]) -> None:
        """Renders the result by this function, once there is one, as the output of this name."""

        def shown() -> TagChild:
            found = self.result()
            return None if found is None else part(found)

        self._output(name, render.ui(shown))

    def hint(self, title: str, text: str) -> None:
        """Shows a hint as the output "hint" until a computation is started."""

        def shown() -> Tag | None:
            begun = self.result() is not None or self.message() or self.running()
            return None if begun else card(title, tags.p(text))

        self._output("hint", render.ui(shown))

    def start(self, function: Callable[[Tell], Any]) -> None:
        """Starts a computation and cancels the one before."""
        with reactive.isolate():
            before = self._job()
        if before is not None:
            before.cancel()
        self._job.set(Job(function))

    def refuse(self, problem: Exception) -> None:
        """Shows what is wrong with the input, instead of a computation."""
        self._job.set(None)
        self.running.set(False)
        self.progress.set(None)
        self.result.set(None)
        self.message.set(str(problem))

    def bar(self) -> Tag | None:
        """The progress bar."""
        progress = self.progress()
        if progress is None:
            return None
        done, total, seconds = progress
        known = {"value": str(done), "max": str(total)} if total else {}
        waited = f", {seconds} s" if seconds >= 2 else ""
        return tags.div(
            tags.progress(aria_label=self.name, **known),
            tags.span(f"{self.name}{waited}", class_="mdp-faint"),
            class_="mdp-progress",
        )

    def alert(self) -> Tag | None:
        """The error message, if there is one."""
        message = self.message()
        return tags.p(message, role="alert", class_="mdp-alert") if message else None

    def said(self) -> str:
        """The text for screen readers: that it computes, and that it is done."""
        if self.running():
            return f"{self.name}…"
        return "" if self.result() is None else f"{self.name}: done."


def _set(value: reactive.Value[Any], new: Any) -> None:
    """Sets a value only if it changes, so that nothing is rendered again without need."""
    with reactive.isolate():
        before = value()
    if before is not new and (type(before) is not type(new) or before != new):
        value.set(new)


def watching(prefix: str) -> TagList:
    """The outputs of a watched computation: progress, errors, and the text for screen readers."""
    return TagList(
        tags.div(ui.output_text(f"{prefix}_said"), role="status", aria_live="polite", class_="visually-hidden"),
        ui.output_ui(f"{prefix}_bar"),
        ui.output_ui(f"{prefix}_alert"),
    )


def slider(name: str, label: str, values: Sequence[Any], value: Any) -> Tag:
    """A slider over these values, for mouse, keyboard and screen reader."""
    return tags.div(
        tags.div(
            tags.label(label, for_=name),
            tags.output(str(value), id=f"{name}_output", for_=name),
            class_="mdp-slider-head",
        ),
        tags.input(
            id=name,
            type="range",
            class_="mdp-range form-range",
            min="0",
            max=str(len(values) - 1),
            step="1",
            value=str(list(values).index(value)),
            data_values=json.dumps(list(values)),
            aria_valuetext=str(value),
        ),
        class_="mdp-field",
    )


def view(title: str, lead: str, controls: TagChild, results: TagChild) -> Tag:
    """A view: inputs on the left, results on the right."""
    return tags.div(
        tags.header(tags.h1(title), tags.p(lead, class_="mdp-lead"), class_="mdp-head"),
        tags.section(controls, class_="mdp-card mdp-controls", aria_label=f"{title}: what is asked for"),
        tags.div(results, class_="mdp-results"),
        class_="mdp-view",
    )


def card(title: str, *content: TagChild, name: str | None = None) -> Tag:
    """A part of a view with a heading, which can take the focus if it has a name."""
    heading = tags.h2(title, id=name, tabindex="-1") if name else tags.h2(title)
    return tags.section(heading, *content, class_="mdp-card")


def columns_of(heads: Sequence[str], rows: Sequence[Sequence[TagChild]], caption: str, text: int = 1) -> Tag:
    """A table whose first `text` columns are text and the others numbers."""

    def cell(place: int, content: TagChild) -> Tag:
        if place == 0:
            return tags.th(content, scope="row")
        return tags.td(content, class_="" if place < text else "mdp-number")

    return tags.div(
        tags.table(
            tags.caption(caption),
            tags.thead(
                tags.tr(
                    *(tags.th(h, scope="col", class_="" if n < text else "mdp-number") for n, h in enumerate(heads))
                )
            ),
            tags.tbody(*(tags.tr(*(cell(n, part) for n, part in enumerate(row))) for row in rows)),
        ),
        class_="mdp-table",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def barred(text: str, share: float, colour: str = "") -> Tag:
    """A text beside a bar of this share of the full length."""
    style = f"width:{100 * share:.1f}%" + (f";background:{colour}" if colour else "")
    return tags.span(tags.span(style=style, class_="mdp-bar"), tags.span(text), class_="mdp-barred")


def facts(*pairs: tuple[str, TagChild]) -> Tag:
    """Names and values, one below the other."""
    return tags.dl(*(TagList(tags.dt(name), tags.dd(value)) for name, value in pairs), class_="mdp-facts")


def code(prefix: str, snippet: Snippet | None) -> Tag | None:
    """The Python and the commands that do the same, with buttons that copy them."""
    if snippet is None:
        return None

    def block(kind: str, text: str) -> Tag:
        name = f"{prefix}_{kind.split()[0].lower()}"
        return tags.div(
            tags.div(
                tags.h3(kind),
                tags.button("Copy", type="button", class_="mdp-copy", data_copies=name, aria_label=f"Copy: {kind}"),
                class_="mdp-code-head",
            ),
            tags.pre(tags.code(text, id=name), tabindex="0", aria_label=kind),
        )

    return card("The same without this page", block("Python", snippet.python), block("Command line", snippet.commands))


def chart(svg: str) -> Tag:
    """A chart that fills the available width."""
    return tags.figure(HTML(svg), class_="mdp-chart")


def short(number: float) -> str:
    """A number for a table."""
    if math.isnan(number):
        return "-"
    if math.isinf(number):
        return "none"
    if 1000 <= abs(number) < 1e6:
        return f"{number:,.0f}"
    return f"{number:.3g}" if 1e-3 <= abs(number) < 1000 or number == 0 else f"{number:.2e}"


# --- the fields of a table ---


def table_fields(prefix: str, domain: str) -> TagList:
    """The fields that describe a table: its domain, and whom it protects."""
    return TagList(
        ui.input_text(f"{prefix}_domain", "Domain: a TOML file on this machine", value=domain, width="100%"),
        tags.details(
            tags.summary("or upload the domain"),
            ui.input_file(f"{prefix}_upload", "Domain as a TOML file", accept=[".toml"], width="100%"),
        ),
        ui.output_ui(f"{prefix}_columns"),
        tags.div(
            ui.input_text(f"{prefix}_unit", "Column of ids (optional)", placeholder="each row", width="100%"),
            ui.input_numeric(f"{prefix}_contributions", "Rows per id", value=1, min=1, width="100%"),
            class_="mdp-pair",
        ),
    )


def about(input: Any, prefix: str) -> About:
    """The table that the fields describe."""
    uploaded = input[f"{prefix}_upload"]()
    path = input[f"{prefix}_domain"]().strip()
    if uploaded:
        domain, shown = Path(uploaded[0]["datapath"]), Path(uploaded[0]["name"]).name
    elif path:
        domain, shown = Path(path), path
    else:
        raise InvalidInput("domain: give the path of a TOML file, or upload one; `matrixdp domain` drafts it")
    unit = input[f"{prefix}_unit"]().strip() or None
    return About(
        domain=domain,
        shown=shown,
        unit=unit,
        contributions=None if unit is None else whole("rows per id", input[f"{prefix}_contributions"]()),
    )


def budget_fields(prefix: str, what: str) -> Tag:
    """Epsilon and delta."""
    return tags.fieldset(
        tags.legend(what),
        tags.div(
            ui.input_numeric(f"{prefix}_epsilon", "Epsilon", value=1.0, min=0, step=0.1, width="100%"),
            ui.input_text(f"{prefix}_delta", "Delta", value="1e-6", width="100%"),
            class_="mdp-pair",
        ),
    )


def number(name: str, value: Any) -> float:
    """A number from a field."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} must be a number, such as 1 or 1e-6") from None


def whole(name: str, value: Any) -> int:
    """A whole number from a field."""
    found = number(name, value)
    if not found.is_integer():
        raise InvalidInput(f"{name} must be a whole number, got {found:g}")
    return int(found)
