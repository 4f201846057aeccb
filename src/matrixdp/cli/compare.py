"""`matrixdp compare`: all mechanisms side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from matrixdp.cli import arguments, show, specs


def compare(
    shape: arguments.Shape,
    sensitivity: arguments.Sensitivity,
    epsilon: arguments.Epsilon,
    delta: arguments.Delta,
    adjacency: arguments.Adjacency = None,
    mechanism: Annotated[
        list[str] | None, typer.Option(help="Compare only this one. Repeatable.", show_default="all")
    ] = None,
    copies: Annotated[int, typer.Option(help="Also compose this many releases of each.")] = 10,
    option: arguments.Options = None,
    json: arguments.Json = False,
) -> None:
    """Compare mechanisms: the noise each would add, and what each truly guarantees.

    Example: matrixdp compare --shape 89x89 --sensitivity counts:1 --epsilon 0.5 --delta 1e-7
    """
    from matrixdp.budget import Budget
    from matrixdp.comparison import compare

    with show.working("comparing"):
        table = compare(
            specs.shape(shape),
            specs.sensitivity(sensitivity, adjacency),
            Budget(epsilon, delta),
            mechanism or None,
            copies=copies,
            **specs.mechanism_options(option or []),
        )
    if not json:
        show.console().print(table)
        return
    show.document(
        {
            "shape": list(table.shape),
            "sensitivity": table.sensitivity.describe(),
            "adjacency": table.sensitivity.adjacency,
            "budget": {"epsilon": epsilon, "delta": delta},
            "copies": copies,
            "auto": table.auto,
            "mechanisms": table.to_dicts(),
        }
    )
