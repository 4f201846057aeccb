"""The page: four views in Shiny, and the files of releases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from htmltools import Tag, tags
from shiny import App, Inputs, Outputs, Session, ui
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from matrixdp.explorer.comparing import Compared, Setting
from matrixdp.explorer.releasing import Desk
from matrixdp.explorer.views import compare, ledger, plan, release

STATIC = Path(__file__).parent / "static"
KINDS = {".csv": "text/csv", ".json": "application/json", ".html": "text/html", ".png": "image/png"}


@dataclass(frozen=True)
class Given:
    """What the forms contain at first: the paths of records, a domain and a ledger."""

    records: str = ""
    domain: str = ""
    ledger: str = ""


def application(given: Given) -> Starlette:
    """The page as an ASGI application, without access control: see `access`."""
    desk = Desk()
    known: dict[Setting, Compared] = {}  # small: the sliders have few values

    def server(input: Inputs, output: Outputs, session: Session) -> None:
        compare.serve(input, known)
        plan.serve(input)
        release.serve(input, session, desk)
        ledger.serve(input)

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        content = desk.file(request.path_params["key"], name)
        if content is None:
            return PlainTextResponse("404: there is no such file\n", status_code=404)
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(content, media_type=KINDS.get(Path(name).suffix, "application/octet-stream"), headers=headers)

    shown: Any = App(_page(given), server, static_assets={"/static": STATIC})
    shown.sanitize_errors = True  # the text of an unexpected error may quote a record
    shown.sanitize_error_msg = "unexpected: its message is withheld, as it may quote a record"
    routes = [Route("/files/{key}/{name}", file), Mount("/", app=shown)]
    return Starlette(routes=routes, lifespan=lambda _: shown.starlette_app.router.lifespan_context(shown.starlette_app))


def _page(given: Given) -> Tag:
    return ui.page_navbar(
        ui.nav_panel("Compare", compare.page()),
        ui.nav_panel("Plan", plan.page(given.domain)),
        ui.nav_panel("Release", release.page(given.records, given.domain, given.ledger)),
        ui.nav_panel("Ledger", ledger.page(given.ledger)),
        ui.nav_spacer(),
        ui.nav_control(ui.input_dark_mode(id="mode")),
        title="matrixdp explore",
        id="view",
        lang="en",
        window_title="matrixdp explore",
        navbar_options=ui.navbar_options(underline=True),
        header=ui.head_content(
            tags.link(rel="stylesheet", href="static/explore.css"),
            tags.link(rel="icon", href="static/icon.svg", type="image/svg+xml"),
            tags.script(src="static/explore.js", defer=""),
        ),
    )
