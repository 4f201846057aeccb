"""`matrixdp demo`: a demonstration on public data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matrixdp.cli import show


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the files; those of an earlier demo are replaced.")] = Path(
        "demo-output"
    ),
) -> None:
    """Run a demonstration: two releases from public data under one budget, with pictures."""
    from matrixdp.demo import run

    run(out, show.console())
