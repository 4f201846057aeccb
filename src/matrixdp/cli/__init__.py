"""The command line, with one file per command; a new command needs its file and an entry in COMMANDS.

Other distributions add commands by entry points in the group `matrixdp.commands`, and noise laws and mechanisms by
modules in the group `matrixdp.plugins`, which register them when they are imported.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from click import ClickException
from typer.core import TyperGroup

from matrixdp import _check
from matrixdp.cli import ledger_rules
from matrixdp.cli.audit import audit
from matrixdp.cli.calibrate import calibrate
from matrixdp.cli.compare import compare
from matrixdp.cli.demo import demo
from matrixdp.cli.domain import domain
from matrixdp.cli.explore import explore
from matrixdp.cli.release import release
from matrixdp.cli.show import error, show_warnings
from matrixdp.cli.stream import stream
from matrixdp.cli.verify import verify
from matrixdp.errors import MatrixDPError

COMMANDS = (demo, compare, calibrate, domain, release, verify, audit, explore)


class _Commands(TyperGroup):
    """Prints every error that matrixdp raises on purpose as one line, with exit code 2, and warnings as lines.

    Of other errors only type and place are printed, with exit code 1: their text may quote a record.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            with show_warnings():
                return super().invoke(ctx)
        except MatrixDPError as problem:
            error(str(problem))
            raise typer.Exit(2) from None
        except (ClickException, typer.Abort, typer.Exit, BrokenPipeError):
            raise
        except Exception as problem:
            error(f"unexpected: {_check.origin(problem)}. Its message is withheld, as it may quote a record")
            raise typer.Exit(1) from None


# Pretty tracebacks can print local variables, and here those hold private records.
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"matrixdp {version('matrixdp')}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Release matrices under differential privacy, with an exact certificate of what each release guarantees."""


for plugin in entry_points(group="matrixdp.plugins"):
    plugin.load()
for command in (*COMMANDS, *(point.load() for point in entry_points(group="matrixdp.commands"))):
    app.command()(command)
app.add_typer(ledger_rules.ledger, name="ledger")
app.add_typer(stream, name="stream")


def main() -> None:
    """Runs the command line."""
    app()
