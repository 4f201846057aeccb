"""The arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from matrixdp.cli.specs import FORMS

Mechanism = Annotated[str, typer.Argument(metavar="MECHANISM", help="A mechanism's name, or auto for the least error.")]
Shape = Annotated[str, typer.Option(help="Shape of the value to release: 89x89, 100 for a vector, 12x24x7, or scalar.")]
Sensitivity = Annotated[str, typer.Option(help=f"What one record can change: {FORMS}.")]
Epsilon = Annotated[float, typer.Option(help="The epsilon of the budget, above 0.")]
Delta = Annotated[float, typer.Option(help="The delta of the budget: 0, or well below 1/records.")]
Adjacency = Annotated[
    str | None,
    typer.Option(
        "--adjacency",
        "--relation",
        help="What makes two data sets neighbours: add/remove, replace or zero-out.",
        show_default="the query's or set's",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of the mechanism, key=value; a value may be a number, a comma list or a .npy file. Repeatable.",
        show_default=False,
    ),
]
Dataset = Annotated[
    str | None, typer.Option(help="The data set; a database has one ledger for each.", show_default="none")
]
Analyst = Annotated[str | None, typer.Option(help="Who asks for it.", show_default="none")]
Purpose = Annotated[str | None, typer.Option(help="What it is for.", show_default="none")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
