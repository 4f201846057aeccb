"""`matrixdp release`: from a file of records to a noisy matrix and its certificate."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matrixdp import _extras
from matrixdp.cli import arguments, files, show, specs
from matrixdp.cli.specs import FORMS
from matrixdp.errors import InvalidInput

if TYPE_CHECKING:
    from matrixdp.budget import Budget
    from matrixdp.planning import Plan

# From this delta on, a warning says what delta means: it may have been mistaken for a significance level.
LARGE_DELTA = 1e-3
QUERIES = ("second-moment", "covariance", "mean", "sum", "histogram", "identity")
# Options under headings of their own in the help.
OfMatrix = partial(typer.Option, rich_help_panel="A matrix of numbers, by --query")
OfTable = partial(typer.Option, rich_help_panel="A table of people's data, by --domain")
OfBudget = partial(typer.Option, rich_help_panel="Budget and ledger")


def release(
    records: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="Records, one per row: CSV, NPY, Parquet, or a folder of Parquet files; with --domain also a "
            "database, or - for CSV from a pipe.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "--out", help="A new file (.csv, .npy, .parquet); the certificate is written next to it."
        ),
    ],
    query: Annotated[
        str | None, OfMatrix(help=f"What to release: {', '.join(QUERIES)}.", show_default="with --domain, counts")
    ] = None,
    epsilon: Annotated[float | None, OfBudget(help="The epsilon to keep, above 0.", show_default=False)] = None,
    delta: Annotated[
        float | None,
        OfBudget(help="The delta to keep: 0, or well below 1/records.", show_default=False),
    ] = None,
    plan: Annotated[
        Path | None,
        OfBudget(
            help="In place of --epsilon and --delta: a plan that `matrixdp ledger plan` wrote; needs --ledger.",
            show_default="none",
        ),
    ] = None,
    shared: Annotated[
        int | None,
        OfBudget(help="Share --epsilon and --delta among this many releases; needs --ledger.", show_default="none"),
    ] = None,
    like: Annotated[
        str | None,
        OfBudget(help=f"With --shared: a typical change, {FORMS}.", show_default="Gaussian noise"),
    ] = None,
    norm: Annotated[float | None, OfMatrix(help="Clip every record to this norm.")] = None,
    low: Annotated[str | None, OfMatrix(help="Clip entries from below: a number, or one per column.")] = None,
    high: Annotated[str | None, OfMatrix(help="Clip entries from above: a number, or one per column.")] = None,
    edges: Annotated[
        list[str] | None,
        OfMatrix(help="Bin edges: start:stop:count, or a comma list. Give it twice for two columns."),
    ] = None,
    columns: Annotated[
        str | None, OfMatrix(help="Use only these columns: names, or positions from 0, separated by commas.")
    ] = None,
    adjacency: arguments.Adjacency = None,
    average: Annotated[bool, OfMatrix("--average", help="Divide by --size, or by the number of records.")] = False,
    size: Annotated[int | None, OfMatrix(help="A public number to divide by; add/remove needs it.")] = None,
    center: Annotated[str | None, OfMatrix(help="A public center for the covariance, per column.")] = None,
    records_are: Annotated[str | None, OfMatrix(help="For identity: rows or columns.")] = None,
    mechanism: Annotated[str, typer.Option(help="A mechanism's name, or auto for the least error.")] = "auto",
    option: arguments.Options = None,
    ledger: Annotated[
        str | None, OfBudget(help="Charge the release to this ledger, or release nothing.", show_default="none")
    ] = None,
    dataset: arguments.Dataset = None,
    analyst: arguments.Analyst = None,
    purpose: arguments.Purpose = None,
    reservation: Annotated[str | None, OfBudget(help="The reservation it uses.", show_default="none")] = None,
    scheduler: Annotated[
        str | None, OfMatrix(help="Read Parquet on the workers of this Dask scheduler.", show_default="none")
    ] = None,
    domain: Annotated[
        Path | None,
        OfTable(help="A TOML file with what each column can hold; `matrixdp domain` drafts it.", show_default="none"),
    ] = None,
    by: Annotated[str | None, OfTable(help="Count rows by these columns, separated by commas.")] = None,
    cell_states: Annotated[
        bool, OfTable("--cell-states", help="Instead of counts: how many cells were clipped, unexpected, missing.")
    ] = False,
    marginals: Annotated[
        str | None,
        OfTable(
            help="Tables of counts together: a,b;c,d for tables by a and b and by c and d, or a number for all tables "
            "of up to that many columns."
        ),
    ] = None,
    mean: Annotated[str | None, OfTable(help="The mean of this column, in groups with --by.")] = None,
    total: Annotated[str | None, OfTable("--sum", help="The sum of this column, in groups with --by.")] = None,
    weights: Annotated[
        str | None, OfTable(help="With --marginals: weights of the tables' errors, such as region,sex=2;age=0.5.")
    ] = None,
    quantiles: Annotated[str | None, OfTable(help="Quantiles of a column: age:0.25,0.5,0.75.")] = None,
    bins: Annotated[
        str | None,
        OfTable(help="With --quantiles: a number of bins, whole for whole numbers, or edges.", show_default="65536"),
    ] = None,
    regress: Annotated[str | None, OfTable(help="Least squares of a column on others: cost~age+sex.")] = None,
    classify: Annotated[
        str | None, OfTable(help="Logistic regression of a column of two values: smoker~age+sex.")
    ] = None,
    ridge: Annotated[
        float | None, OfTable(help="With --regress or --classify: the penalty on squared coefficients.")
    ] = None,
    unit: Annotated[str | None, OfTable(help="The column of ids whose owners are protected.")] = None,
    contributions: Annotated[int | None, OfTable(help="How many rows of a unit count.")] = None,
    sql: Annotated[str | None, OfTable(help="The SELECT whose rows are used, for a database.")] = None,
    separator: Annotated[str | None, OfTable(help="The separator of cells, for text.", show_default=",")] = None,
    statement: Annotated[Path | None, OfTable(help="Also write one page in plain language (.html, .md).")] = None,
    figure: Annotated[Path | None, OfTable(help="Also draw the table (.png).")] = None,
    json: arguments.Json = False,
) -> None:
    """Release a query on records, and next to it the certificate of what it guarantees.

    With --query a noisy matrix of numbers; with --domain a labelled table of people's data, with error bars.

    Bounds, edges, sizes and domains are published with the release: choose them without looking at the records.

    Example: matrixdp release people.csv --query second-moment --norm 1 --epsilon 1 --delta 1e-6 --output moment.csv

    Example: matrixdp release patients.csv --domain domain.toml --by region --epsilon 1 --delta 1e-6 --out table.csv
    """
    from matrixdp.accounting.ledger.ledger import Ledger
    from matrixdp.pipeline import prepare
    from matrixdp.planning import Plan

    files.check_free(output)
    names: dict[str, Any] = {"dataset": dataset, "analyst": analyst, "purpose": purpose, "reservation": reservation}
    if ledger is None and any(names.values()):
        raise InvalidInput("--dataset, --analyst, --purpose and --reservation are for a --ledger")
    account = None if ledger is None else Ledger(ledger, **names)
    if account is None and (plan is not None or shared is not None):
        raise InvalidInput("--plan and --shared need --ledger: without one, nothing counts the releases")
    budget = _budget(epsilon, delta, plan, shared, like)
    if delta is not None and delta >= LARGE_DELTA:
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
    chosen_options = specs.mechanism_options(option or [])

    def budget_for(answer: Any) -> Budget:
        return _part(budget, answer) if isinstance(budget, Plan) else budget

    about_tables: dict[str, Any] = {
        "by": by, "cell_states": cell_states or None, "marginals": marginals, "mean": mean, "sum": total,
        "quantiles": quantiles, "regress": regress, "classify": classify, "weights": weights, "bins": bins,
        "ridge": ridge, "unit": unit, "contributions": contributions, "sql": sql, "separator": separator,
        "statement": statement, "figure": figure,
    }  # fmt: skip
    wanted = {name: value for name, value in about_tables.items() if value is not None}
    if domain is not None:
        unused = [name for name in chosen if name != "adjacency"]
        unused += [name for name, value in (("query", query), ("scheduler", scheduler)) if value is not None]
        if unused:
            raise InvalidInput(f"a table with --domain does not take {', '.join(map(_flag, unused))}")
        from matrixdp.cli.tables import release_table

        certificate, also, notes = release_table(
            records, domain, output, budget_for, account, mechanism, chosen_options, adjacency=adjacency, **wanted
        )
    else:
        if wanted:
            raise InvalidInput(f"{', '.join(map(_flag, wanted))}: for tables of people's data, which need --domain")
        if query is None:
            raise InvalidInput("say what to release: --query for a matrix, or --domain for a table of people's data")
        place_of_records = Path(records)
        with show.working("reading records and sizing the noise"), _cluster(scheduler):
            on_dask = place_of_records.is_dir() or scheduler is not None
            answer = _query(query, chosen, on_dask=on_dask)(place_of_records, **chosen)
            prepared = prepare(
                answer.value, answer.sensitivity, budget_for(answer), mechanism, query=answer.query, **chosen_options
            )
        with files.reserved(output, prepared.certificate) as place:
            certificate = place.publish(prepared.release(account, note=query).value)
        also, notes = [], []
    if json:
        show.document(certificate.to_dict())
        return
    show.text(certificate)
    for note in notes:
        show.text(note)
    written = ", ".join(str(path) for path in (output, files.certificate_path(output), *also))
    show.text(f"Written: {written}")


def _budget(
    epsilon: float | None, delta: float | None, plan: Path | None, shared: int | None, like: str | None
) -> Budget | Plan:
    """The budget that was asked for: whole, shared, or a plan."""
    from matrixdp.budget import Budget
    from matrixdp.planning import Plan

    if plan is not None:
        if not (epsilon is None and delta is None and shared is None and like is None):
            raise InvalidInput("--plan fixes the budget; leave --epsilon, --delta, --shared and --like out")
        try:
            return Plan.from_json(plan.read_bytes())
        except OSError as reason:
            raise InvalidInput(f"plan {str(plan)!r} cannot be read ({type(reason).__name__})") from None
        except InvalidInput as reason:
            raise InvalidInput(f"plan {str(plan)!r} was not written by `matrixdp ledger plan`: {reason}") from None
    if epsilon is None or delta is None:
        raise InvalidInput("give --epsilon and --delta, or a --plan")
    if shared is None:
        if like is not None:
            raise InvalidInput("--like goes with --shared")
        return Budget(epsilon, delta)
    found: Budget = Budget(epsilon, delta).shared(shared, None if like is None else specs.sensitivity(like))
    return found


def _part(plan: Plan, answer: Any) -> Budget:
    """The part of a plan that fits an answer; of equal parts the ledger counts how many were used."""
    from matrixdp.privacy.records import encode

    shape, sensitivity, fitting = answer.shape, answer.sensitivity, []
    for part in plan:
        planned = part.sensitivity
        alike = type(planned) is type(sensitivity) and planned.adjacency == sensitivity.adjacency
        if alike and part.noise.shape == shape and planned.extent(shape) == sensitivity.extent(shape):
            fitting.append(part)
    if fitting:  # bounds in another order have the same extent
        wanted = encode(sensitivity)
        return next((part for part in fitting if encode(part.sensitivity) == wanted), fitting[0])
    raise InvalidInput(
        f"the plan has no release of shape {'x'.join(map(str, shape))} where {sensitivity} ({sensitivity.adjacency})"
    )


def _cluster(scheduler: str | None) -> AbstractContextManager[object]:
    """A client of the scheduler, closed at the end; without a scheduler, a null context."""
    if scheduler is None:
        return nullcontext()
    _extras.require("distributed", "distributed")
    import distributed

    try:
        client: AbstractContextManager[object] = distributed.Client(scheduler, timeout="10s")
    except (OSError, ValueError) as reason:
        with suppress(ValueError):  # with a wrong address, a client that never connects stays the default of Dask
            distributed.default_client().close()
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
