"""`matrixdp explore`: a page to compare, plan, release, and view a ledger."""

from __future__ import annotations

from typing import Annotated

import typer


def explore(
    port: Annotated[int, typer.Option(help="The port of 127.0.0.1 to use.", show_default="any that is free")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address and open nothing.")] = False,
    records: Annotated[str, typer.Option(help="Records that the form starts with.", show_default="none")] = "",
    domain: Annotated[str, typer.Option(help="A domain that the forms start with.", show_default="none")] = "",
    ledger: Annotated[str, typer.Option(help="A ledger that the forms start with.", show_default="none")] = "",
) -> None:
    """Open a page to compare mechanisms, plan and make releases, and view a ledger; stop it with Ctrl+C.

    It is for this machine alone. Whoever has the address that is printed can release data in your name: keep it secret.

    Example: matrixdp explore --records patients.csv --domain domain.toml --ledger budget.db
    """
    from matrixdp.explorer import Given, serve

    serve(Given(records, domain, ledger), port=port, browser=not no_browser, say=typer.echo)
