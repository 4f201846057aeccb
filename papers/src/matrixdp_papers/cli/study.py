"""`matrixdp study`: the papers' experiments, run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matrixdp.errors import InvalidInput


def study(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which study; --list names them.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the studies and stop.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the data sets.", show_default="the variable MATRIXDP_DATA")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json, report.md and pictures.", show_default="none")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            help="A stored results.json: remake its report and pictures; given again, add those of another run.",
            show_default="run the study",
        ),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few runs only: seconds, to see that it works.")] = False,
) -> None:
    """Run an experiment of the papers again: what they say, what comes out, and what is true.

    Example: matrixdp study histogram --data data --out results
    """
    from collections.abc import Iterable, Sequence

    from rich.progress import track

    from matrixdp.cli import show  # which loads this module in turn
    from matrixdp_papers.studies import STUDIES
    from matrixdp_papers.studies.base import Item

    console = show.console()
    if list_all:
        for entry in STUDIES.values():
            needs = "" if entry.load is None else " (needs data)"
            show.text(f"{entry.name:<10} {entry.title}{needs}")
        return
    if name is None:
        raise InvalidInput(f"NAME is missing: one of {', '.join(STUDIES)}; matrixdp study --list describes them")
    if name not in STUDIES:
        raise InvalidInput(f"NAME must be one of {', '.join(STUDIES)}, got {name!r}; see matrixdp study --list")
    chosen = STUDIES[name]

    def progress(steps: Sequence[Item], label: str) -> Iterable[Item]:
        return track(steps, label, console=console, transient=True, disable=not console.is_terminal)

    if results:
        found = chosen.remake(*results)
    else:
        loaded = None if chosen.load is None else chosen.load(data)
        found = chosen.run(loaded, smoke, progress)
    console.rule(chosen.title)
    for table in found.tables:
        console.print(table)
    if out is not None:
        for path in chosen.write(found, out):
            show.text(path)
