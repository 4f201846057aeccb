"""`matrixdp stream`: a private running total for a daily job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matrixdp.cli import arguments, show, specs
from matrixdp.errors import InvalidInput, MatrixDPError

if TYPE_CHECKING:
    from matrixdp.streams import Answer, Stream

State = Annotated[
    Path, typer.Argument(metavar="STATE", help="The file of the stream; keep it secret.", show_default=False)
]
Ledger = Annotated[str | None, typer.Option(help="Charge the whole stream to this ledger, once.", show_default="none")]
Moved = Annotated[bool, typer.Option("--moved", help="STATE was moved here, and the original no longer exists.")]

stream = typer.Typer(no_args_is_help=True, help="Release a total or a window every day, with state in a file.")


@stream.command()
def init(
    state: State,
    steps: Annotated[str, typer.Option(help="How many days there will be at most, or 'unbounded'.")],
    sensitivity: Annotated[
        str,
        typer.Option(help="What one record can change: participation:CLIP, or participation:CLIP,SEPARATION,TIMES."),
    ],
    epsilon: arguments.Epsilon,
    delta: arguments.Delta,
    shape: Annotated[
        str | None, typer.Option(help="Shape of a day's value: 10, or 4x6.", show_default="that of the first day")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="prefix, window:DAYS, decay:FACTOR, or a .npy file of coefficients or a matrix.")
    ] = "prefix",
    mechanism: Annotated[str, typer.Option(help="A mechanism over time, or auto for the least error.")] = "auto",
    option: arguments.Options = None,
    adjacency: arguments.Adjacency = None,
    ledger: Ledger = None,
    dataset: arguments.Dataset = None,
    analyst: arguments.Analyst = None,
) -> None:
    """Begin a stream. It is charged as a whole, before its first day is released.

    Example: matrixdp stream init visits.stream --steps 365 --sensitivity participation:1,7,52 --epsilon 1 --delta 1e-6
    """
    from matrixdp.budget import Budget
    from matrixdp.streams import Stream

    if state.exists() or state.is_symlink():
        raise InvalidInput(f"file {str(state)!r} exists already and is not replaced; choose another name")
    days: Any = None
    if steps != "unbounded":
        days, *more = specs.numbers("steps", steps)
        if more:
            raise InvalidInput(f"steps must be one number, or 'unbounded', got {steps!r}")
    change: Any = specs.sensitivity(sensitivity, adjacency)  # the stream says which numbers and sets it takes
    with show.working("sizing the noise"):
        begun = Stream(
            steps=days,
            sensitivity=change,
            budget=Budget(epsilon, delta),
            workload=specs.array_file("workload", workload) if workload.endswith(".npy") else workload,
            ledger=_ledger(ledger, dataset, analyst),
            state=state,
            shape=None if shape is None else specs.shape(shape),
            mechanism=mechanism,
            **specs.mechanism_options(option or []),
        )
    _show_guarantee(begun)
    show.text(f"Created: {state}, {begun.budget}")


@stream.command()
def add(
    state: State,
    value: Annotated[
        Path, typer.Argument(metavar="INPUT", help="The day's value, a table of numbers: CSV, NPY or Parquet.")
    ],
    step: Annotated[
        int | None,
        typer.Option(help="The number of the day, from 1; a job that may run twice gives it.", show_default="the next"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "--out", help="A new .npy or .csv file for the answer.", show_default="standard output"
        ),
    ] = None,
    ledger: Ledger = None,
    dataset: arguments.Dataset = None,
    analyst: arguments.Analyst = None,
    moved: Moved = False,
    json: arguments.Json = False,
) -> None:
    """Release a day: the private answer, with its standard error.

    A day that was released already is answered again, if its value is the same.

    Example: matrixdp stream add visits.stream today.csv --step 12 --json
    """
    from matrixdp.queries import records
    from matrixdp.streams import Stream

    if output is not None and (output.suffix not in (".npy", ".csv") or output.exists() or output.is_symlink()):
        raise InvalidInput(f"output must be a new .npy or .csv file, got {str(output)!r}")
    opened = Stream.resume(state, ledger=_ledger(ledger, dataset, analyst), moved=moved)
    table = records.load(value)
    flat = opened.shape is not None and len(opened.shape) == 1 and 1 in table.shape
    answer = opened.add(table.ravel() if flat else table, step=step)
    if output is not None:
        _write(output, answer)
    _show(answer, json, with_value=output is None)


@stream.command(name="show")
def display(
    state: State,
    step: Annotated[int | None, typer.Option(help="The number of a day, from 1.", show_default="the last")] = None,
    json: arguments.Json = False,
) -> None:
    """Show what a stream guarantees, how far it is, and the answer of a day; no noise is drawn."""
    from matrixdp.streams import Stream

    opened = Stream.resume(state)
    days = len(opened)
    answer = opened.answer(days if step is None else step) if days or step is not None else None
    if json:
        guarantee = None if opened.shape is None else _guarantee(opened)
        found = None if answer is None else _document(answer)
        show.document({"steps": opened.steps, "released": days, "certificate": guarantee, "answer": found})
        return
    _show_guarantee(opened)
    planned = "without an end" if opened.steps is None else f"of {opened.steps}"
    show.text(f"Days released: {days}, {planned}")
    if answer is not None:
        _show(answer, json=False)


def _ledger(place: str | None, dataset: str | None, analyst: str | None) -> Any:
    from matrixdp.accounting.ledger.ledger import Ledger

    return None if place is None else Ledger(place, dataset=dataset, analyst=analyst)


def _guarantee(opened: Stream) -> dict[str, Any]:
    """The certificate as a document; without an end, the numbers of the guarantee."""
    from matrixdp.privacy.certificate import Certificate

    found = opened.certificate
    if isinstance(found, Certificate):
        return found.to_dict()
    return {"adjacency": str(found.adjacency), "mu": found.mu, "total_variation": found.total_variation}


def _show_guarantee(opened: Stream) -> None:
    if opened.shape is None:
        return
    if opened.steps is not None:
        show.text(opened.certificate)
        return
    found = opened.certificate
    show.text(f"adjacency  {found.adjacency}\nchange     {opened.sensitivity}")
    show.text(f"guarantee  {found.profile}, for all days together\nasked for  {opened.budget}")


def _document(answer: Answer) -> dict[str, Any]:
    return {"step": answer.step, "value": answer.value.tolist(), "standard_error": answer.standard_error}


def _show(answer: Answer, json: bool, with_value: bool = True) -> None:
    if json:
        show.document(_document(answer))
        return
    show.text(f"Day {answer.step}, standard error {answer.standard_error:.6g} in every cell")
    if with_value:
        import numpy as np

        width = min(show.console().width, 100)
        show.text(np.array2string(answer.value, precision=6, suppress_small=True, max_line_width=width))


def _write(output: Path, answer: Answer) -> None:
    import numpy as np

    try:
        with output.open("xb") as file:
            if output.suffix == ".npy":
                np.save(file, answer.value, allow_pickle=False)
            else:
                np.savetxt(file, np.atleast_2d(answer.value), delimiter=",", fmt="%.17g")
    except OSError as reason:
        raise MatrixDPError(
            f"output {str(output)!r} could not be written ({reason.strerror}); the day is released, and the same "
            "command with another output answers it again"
        ) from None
