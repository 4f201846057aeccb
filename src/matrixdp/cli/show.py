"""What the commands print: human-readable text on a terminal, or JSON for programs."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from matrixdp._pages import wrapped

# Wide enough for the tables, when the output is a file or a pipe and COLUMNS is not set.
PIPE_WIDTH = 120


def document(content: Any) -> None:
    """Prints JSON and nothing else; a number that is not finite becomes null, such as an epsilon where none holds."""
    typer.echo(json.dumps(_finite(content), indent=2, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def console() -> Any:
    """A rich console on standard output, as wide as the terminal or the variable COLUMNS."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal or os.environ.get("COLUMNS") else Console(highlight=False, width=PIPE_WIDTH)


def text(content: Any, style: str | None = None) -> None:
    """Prints lines wrapped to the terminal or COLUMNS; in a pipe or a file they are not wrapped."""
    target = console()
    fits = target.is_terminal or os.environ.get("COLUMNS")
    shown = wrapped(str(content), target.width) if fits else str(content)
    target.print(shown, markup=False, soft_wrap=True, style=style)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error with the elapsed time, if that is a terminal; it shows no number of rows."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    terminal = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        bar.add_task(what, total=None)
        yield


def error(message: str) -> None:
    """Prints an error in red on standard error: one line, wrapped on a terminal."""
    _line("error", message, "red")


@contextmanager
def show_warnings() -> Iterator[None]:
    """Prints each warning raised inside as one yellow line on standard error."""

    def line(message: Warning | str, *_: Any, **__: Any) -> None:
        _line("warning", str(message), "yellow")

    with warnings.catch_warnings():
        warnings.showwarning = line
        yield


def _line(kind: str, message: str, colour: str) -> None:
    line = f"{kind}: {' '.join(message.split())}"
    if sys.stderr.isatty():
        line = wrapped(line, shutil.get_terminal_size().columns)
    typer.secho(line, fg=None if os.environ.get("NO_COLOR") else colour, err=True)
