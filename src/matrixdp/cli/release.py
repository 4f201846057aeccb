"""`matrixdp release`: from a file of records to a noisy matrix and its certificate."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from matrixdp import _extras
from matrixdp.cli import arguments, files, show, specs
from matrixdp.errors import InvalidInput

# From this delta on, a warning says what delta means: it may have been taken for a significance level.
LARGE_DELTA = 1e-3
QUERIES = ("second-moment", "covariance", "mean", "sum", "histogram", "identity")


def release(
    records: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Records, one per row: CSV, NPY, Parquet, or a folder of it.")
    ],
    query: Annotated[str, typer.Option(help=f"What to release: {', '.join(QUERIES)}.")],
    epsilon: arguments.Epsilon,
    delta: arguments.Delta,
    output: Annotated[
        Path, typer.Option(help="Where the noisy matrix goes (.csv, .npy, .parquet); the certificate lies next to it.")
    ],
    norm: Annotated[float | None, typer.Option(help="Clip every record to this norm.")] = None,
    low: Annotated[str | None, typer.Option(help="Clip entries from below: a number, or one per column.")] = None,
    high: Annotated[str | None, typer.Option(help="Clip entries from above: a number, or one per column.")] = None,
    edges: Annotated[
        list[str] | None,
        typer.Option(help="Bin edges: start:stop:count, or a comma list. Give it twice for two columns."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Use only these columns: names, or positions from 0, separated by commas.")
    ] = None,
    adjacency: arguments.Adjacency = None,
    average: Annotated[bool, typer.Option("--average", help="Divide by --size, or by the number of records.")] = False,
    size: Annotated[int | None, typer.Option(help="A public number to divide by; add/remove needs it.")] = None,
    center: Annotated[str | None, typer.Option(help="A public center for the covariance, per column.")] = None,
    records_are: Annotated[str | None, typer.Option(help="For identity: rows or columns.")] = None,
    mechanism: Annotated[str, typer.Option(help="A mechanism's name, or auto for the least error.")] = "auto",
    option: arguments.Options = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Charge the release to this ledger, or release nothing.", show_default="none")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Read Parquet on the workers of this Dask scheduler.", show_default="none")
    ] = None,
    json: arguments.Json = False,
) -> None:
    """Release a query on a file of records: a noisy matrix, and next to it the certificate of what it guarantees.

    The bounds, edges and sizes given here are published with the release: choose them without looking at the records.

    Example: matrixdp release people.csv --query second-moment --norm 1 --epsilon 1 --delta 1e-6 --output moment.csv
    """
    from matrixdp.accounting.ledger.ledger import Ledger
    from matrixdp.budget import Budget
    from matrixdp.pipeline import prepare

    files.check_free(output)
    account = None if ledger is None else Ledger(ledger)
    budget = Budget(epsilon, delta)
    if delta >= LARGE_DELTA:
        warnings.warn(
            f"with delta {delta:g}, one record in {1 / delta:.0f} may be revealed; choose it well below 1/records",
            stacklevel=2,
        )
    given = {
        "norm": norm,
        "low": specs.bounds("low", low),
        "high": specs.bounds("high", high),
        "edges": _grid(edges) if edges else None,
        "columns": None if columns is None else specs.columns(columns),
        "adjacency": adjacency,
        "average": average or None,
        "size": size,
        "center": specs.bounds("center", center),
        "records_are": records_are,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    with _cluster(scheduler):
        answer = _query(query, chosen, on_dask=records.is_dir() or scheduler is not None)(records, **chosen)
    chosen_options = specs.mechanism_options(option or [])
    prepared = prepare(answer.value, answer.sensitivity, budget, mechanism, query=answer.query, **chosen_options)
    with files.reserved(output, prepared.certificate) as place:
        certificate = place.publish(prepared.release(account, note=query).value)
    if json:
        show.document(certificate.to_dict())
        return
    console = show.console()
    console.print(str(certificate), markup=False, soft_wrap=True)
    console.print(f"Written: {output} and {files.certificate_path(output)}", markup=False, soft_wrap=True)


def _cluster(scheduler: str | None) -> AbstractContextManager[object]:
    """A client of the scheduler, closed at the end; without a scheduler, nothing."""
    if scheduler is None:
        return nullcontext()
    _extras.require("distributed", "distributed")
    import distributed

    try:
        client: AbstractContextManager[object] = distributed.Client(scheduler, timeout="10s")
    except (OSError, ValueError) as reason:
        raise InvalidInput(f"no Dask scheduler answers at {scheduler!r} ({reason}); start one first") from None
    return client


def _query(name: str, given: dict[str, Any], on_dask: bool) -> Callable[..., Any]:
    """The query's function, after a check that it knows every option given and that none is missing."""
    from matrixdp import _check, queries

    _check.choice("query", name, QUERIES)
    if on_dask and name == "identity":
        raise InvalidInput(
            "identity gives a matrix as large as the data; for a folder use matrixdp.distributed in Python"
        )
    room: Any = queries
    if on_dask:
        from matrixdp import distributed as room
    function: Callable[..., Any] = getattr(room, name.replace("-", "_"))
    known = {n: p for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    takes = ", ".join(map(_flag, known))
    for option in given:
        if option not in known:
            raise InvalidInput(f"the query {name} does not take {_flag(option)}; its options: {takes}")
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in given:
            raise InvalidInput(f"the query {name} needs {_flag(option)}; its options: {takes}")
    return function


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _grid(texts: list[str]) -> Any:
    """The edges of one column, or the list of those of several."""
    found = [specs.edges(text) for text in texts]
    return found[0] if len(found) == 1 else found
