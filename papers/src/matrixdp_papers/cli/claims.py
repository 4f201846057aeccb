"""`matrixdp claims`: tests the papers' claims on their own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def claims(
    out: Annotated[
        Path | None, typer.Option(help="Folder for claims.md, claims.json and claims.png.", show_default="none")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Test the papers' claims: what each mechanism claims on the papers' own settings, and what is true."""
    from rich.progress import track

    from matrixdp.cli import show  # which loads this module in turn
    from matrixdp_papers.claims import examine

    console = show.console()
    found = examine(lambda settings: iter(track(settings, "examining", console=console, transient=True, disable=json)))
    if json:
        show.document({"claims": found.to_dicts()})
    else:
        console.print(found)
    if out is not None:
        from json import dumps

        from matrixdp import plots
        from matrixdp_papers.claims_chart import claims_chart

        out.mkdir(parents=True, exist_ok=True)
        (out / "claims.md").write_text(found.to_markdown(), encoding="utf-8")
        (out / "claims.json").write_text(dumps(found.to_dicts(), indent=1) + "\n", encoding="utf-8")
        plots.save(claims_chart(found), out / "claims.png")
