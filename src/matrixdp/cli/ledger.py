"""`matrixdp ledger`: a budget in a file or a database, and every spend from it; `ledger_rules` has more commands."""

from __future__ import annotations

import math
from json import dumps
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matrixdp import _check
from matrixdp.cli import arguments, files, show, specs
from matrixdp.cli.specs import FORMS
from matrixdp.errors import InvalidInput

if TYPE_CHECKING:
    from matrixdp._check import Shape
    from matrixdp.accounting.ledger.entries import Change, Entry
    from matrixdp.accounting.ledger.ledger import Ledger
    from matrixdp.accounting.ledger.left import Left, Remaining
    from matrixdp.budget import Budget
    from matrixdp.privacy.certificate import Certificate
    from matrixdp.sensitivity import Sensitivity

Place = Annotated[
    str,
    typer.Argument(metavar="LEDGER", help="A file, or postgresql://user@host/database.", show_default=False),
]
Note = Annotated[str, typer.Option(help="A note for the ledger; never data.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for others that write, or for a server.")]
Adjacency = Annotated[
    str | None,
    typer.Option(
        "--adjacency",
        "--relation",
        help="add/remove, replace or zero-out.",
        show_default="the ledger's, or that of the first spend",
    ),
]

WIDTH = 80
"""The longest line that is printed of an entry."""

ledger = typer.Typer(
    no_args_is_help=True, help="Keep a budget in a file or a database: every spend is on disk before a release."
)


def opened_at(place: str, dataset: str | None = None, timeout: float = 60.0, **options: Any) -> Ledger:
    """The ledger at a place."""
    from matrixdp.accounting.ledger.ledger import Ledger

    return Ledger(place, dataset=dataset, timeout=timeout, **options)


@ledger.command()
def create(
    place: Place,
    epsilon: arguments.Epsilon,
    delta: arguments.Delta,
    adjacency: Adjacency = None,
    dataset: arguments.Dataset = None,
    timeout: Timeout = 60.0,
) -> None:
    """Create a ledger with this budget.

    Example: matrixdp ledger create budget.db --epsilon 3 --delta 1e-6

    Example: matrixdp ledger create postgresql://steward@db/budgets --dataset patients --epsilon 3 --delta 1e-6
    """
    from matrixdp.budget import Budget

    if Path(place).exists() or Path(place).is_symlink():
        raise InvalidInput(f"file {place!r} exists already and is not replaced; choose another name")
    created = opened_at(place, dataset, timeout, budget=Budget(epsilon, delta), adjacency=adjacency)
    show.text(f"Created: {created.name}, {created.budget}")


@ledger.command(name="show")
def display(
    place: Place, dataset: arguments.Dataset = None, json: arguments.Json = False, timeout: Timeout = 60.0
) -> None:
    """Show the budget, what is left of it, and every spend."""
    opened = opened_at(place, dataset, timeout)
    spent, remaining, entries = opened.spent(), opened.remaining(), opened.history()
    if json:
        show.document(
            {
                "budget": {"epsilon": opened.budget.epsilon, "delta": opened.budget.delta},
                "adjacency": opened.adjacency,
                "spent": spent,
                "remaining": {"mu": remaining.mu, "epsilon": remaining.epsilon, "pure": remaining.pure},
                "entries": [entry.to_dict() for entry in entries],
            }
        )
        return
    from matrixdp._pages import counted
    from matrixdp._rounding import rounded_up

    show.text(f"Budget: {opened.budget}, adjacency {opened.adjacency or 'not fixed yet'}")
    # rounded to the private side: what was spent up, what is left down
    number = counted(len(entries), "entry")
    show.text(f"Spent: epsilon {rounded_up(spent)} at delta {opened.budget.delta:g}, in {number}")
    show.text(f"Left for one release: {room(remaining, opened.budget)}")
    for entry in entries:
        show.text(described(entry))


@ledger.command(name="record")
@ledger.command(short_help="The same as record.")
def spend(
    place: Place,
    mu: Annotated[float | None, typer.Option(help="The mu of a Gaussian release made outside matrixdp.")] = None,
    rho: Annotated[float | None, typer.Option(help="Its rho (zCDP).")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Its epsilon, with --delta.")] = None,
    delta: Annotated[float, typer.Option(help="Its delta.")] = 0.0,
    certificate: Annotated[
        Path | None, typer.Option(help="The certificate of a release, as `matrixdp release` writes it.")
    ] = None,
    made: Annotated[
        bool, typer.Option("--made", help="It was made already: write it even if the budget does not allow it.")
    ] = False,
    note: Note = "",
    count: Annotated[int, typer.Option(help="How many such releases.")] = 1,
    sampling_rate: Annotated[float, typer.Option(help="The rate, if each drew its own Poisson sample.")] = 1.0,
    adjacency: Adjacency = None,
    dataset: arguments.Dataset = None,
    analyst: arguments.Analyst = None,
    purpose: arguments.Purpose = None,
    unit: Annotated[str, typer.Option(help="Whom the guarantee protects: record, user, ...")] = "record",
    key: Annotated[
        str | None,
        typer.Option(help="An idempotency key: the same spend is charged once.", show_default="none"),
    ] = None,
) -> None:
    """Record a spend that was, or will be, made elsewhere: by its mu, rho, epsilon and delta, or certificate.

    Example: matrixdp ledger record budget.db --mu 0.2 --adjacency add/remove --note "histogram for the annual report"

    Example: matrixdp ledger record budget.db --epsilon 0.5 --delta 1e-9 --made --analyst ada
    """
    numbers = {"mu": mu, "rho": rho, "epsilon": epsilon}
    given = {name: value for name, value in numbers.items() if value is not None}
    if len(given) + (certificate is not None) != 1:
        raise InvalidInput("give one of --mu, --rho, --epsilon (with --delta) or --certificate")
    opened = opened_at(place, dataset)
    found = {**given, "delta": delta} if epsilon is not None else given or _read(certificate)
    for name, value in given.items():
        _check.positive(f"--{name}", value)
    (entry,) = opened.record(
        found,
        note,
        made=made,
        count=count,
        sampling_rate=sampling_rate,
        adjacency=adjacency,
        analyst=analyst,
        purpose=purpose,
        unit=unit,
        key=key,
    )
    show.text(f"Spent: entry {entry.number}, hash {entry.hash}")


@ledger.command()
def plan(
    place: Place,
    release: Annotated[
        list[str],
        typer.Option(help=f"A release: SHAPE of CHANGE, as in '89x89 of counts:1'; CHANGE is {FORMS}. Repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="A new file for the plan.")],
    weight: Annotated[
        list[float] | None,
        typer.Option(help="How much the error of each release counts, in order.", show_default="all alike"),
    ] = None,
    adjacency: Adjacency = None,
    dataset: arguments.Dataset = None,
) -> None:
    """Plan releases for the whole budget: their noise is fixed at once, for the least total error.

    `matrixdp release --plan OUT --ledger LEDGER` makes them. The first pays for all, and each is made once.

    Example: matrixdp ledger plan budget.db --release "89x89 of counts:1" --release "64x64 of rankone:1" --out plan.json
    """
    opened = opened_at(place, dataset)
    given = [_planned(text, adjacency or opened.adjacency) for text in release]
    with show.working("planning"):
        planned = opened.plan([each for _, each in given], weight or None, [shape for shape, _ in given])
    files.write_new(out, planned.to_json() + "\n")
    show.text(planned)
    show.text(f"Written: {out}")


@ledger.command()
def verify(
    place: Place,
    head: Annotated[
        str | None, typer.Option(help="A head that was kept elsewhere; the chain must contain it.", show_default="none")
    ] = None,
    dataset: arguments.Dataset = None,
) -> None:
    """Check the chain of hashes: no entry was changed, moved or removed, as far as the chain shows.

    Without --head, entries that were removed at the end, or rewritten with all hashes after them, are not found.
    """
    with show.working("verifying"):
        found = opened_at(place, dataset).verify(head)
    show.text(f"The chain of hashes is intact. Head: {found}")


@ledger.command()
def export(
    place: Place,
    out: Annotated[Path | None, typer.Option(help="A new file for it.", show_default="standard output")] = None,
    dataset: arguments.Dataset = None,
) -> None:
    """Export everything as JSON lines: the budget, each entry with its certificate, and the head; keep it elsewhere.

    `matrixdp verify FILE.jsonl` computes everything in it again, without the ledger.
    """
    lines = "".join(f"{dumps(line)}\n" for line in opened_at(place, dataset).export())
    if out is None:
        typer.echo(lines, nl=False)
    else:
        files.write_new(out, lines)
        show.text(f"Written: {out}")


def _planned(text: str, adjacency: str | None) -> tuple[Shape, Sensitivity]:
    """The shape and the set of a release that is planned."""
    shape, of, change = text.partition(" of ")
    if not of:
        raise InvalidInput(f"release must look like '89x89 of counts:1', got {text!r}")
    return specs.shape(shape.strip()), specs.sensitivity(change.strip(), adjacency)


def room(left: Remaining | Left, budget: Budget) -> str:
    """What is left for one more release, rounded down: Gaussian noise, or a release with delta = 0."""
    from matrixdp._rounding import rounded_down

    if budget.delta == 0:
        return f"epsilon {rounded_down(left.epsilon)}"
    pure = f"; or epsilon {rounded_down(left.pure)} with delta 0" if left.pure > 1e-6 else ""
    return f"Gaussian noise of mu {rounded_down(left.mu)}, which is epsilon {rounded_down(left.epsilon)}{pure}"


def described(entry: Entry | Change) -> str:
    """An entry in lines of at most 80 characters: what it was for, what it guarantees, and by which mechanism."""
    from matrixdp.accounting.ledger.entries import Change

    first = f"{entry.number:>4}  {entry.time[:10]}  {entry.note}"
    if isinstance(entry, Change):
        what = "given back: " if entry.kind == "return" else "quota "
        rule = f": {entry.quota or 'removed'}" if entry.kind == "quota" else ""
        return "\n".join(fill(line, WIDTH) for line in (first, f"      {what}{entry.name}{rule}"))
    releases = f"{entry.count} releases" if entry.count > 1 else ""
    uses = releases if entry.series is None else f"{entry.count} of {entry.planned} releases"
    rate = f"each on a sample at rate {entry.sampling_rate:g}" if entry.sampling_rate < 1 else ""
    names = {"data set": entry.dataset, "analyst": entry.analyst, "purpose": entry.purpose, "unit": entry.unit}
    given = ", ".join(f"{name} {value}" for name, value in names.items() if value not in (None, "record"))
    origin = entry.source or ("stated" if entry.stated else "by a law that is not known here")
    guarantee = ", ".join(part for part in (entry.in_words, uses, rate) if part)
    held = "" if entry.reservation is None else f"reservation {entry.reservation}"
    lines = [first, *(f"      {line}" for line in (given, held, guarantee, _charged(entry), origin) if line)]
    return "\n".join(fill(line, WIDTH, subsequent_indent=" " * 8) for line in lines)


def _charged(entry: Entry) -> str:
    """What the filters were charged, if the guarantee does not say it: pure epsilon, or mu of Gaussian noise."""
    from matrixdp._rounding import rounded_up
    from matrixdp.accounting.methods import pure_epsilon

    if entry.charged_delta is None or (entry.use.gaussian and not entry.plan_uses):
        return ""
    if (entry.charged_mu, entry.charged_delta) == (0.0, 0.0):
        return "charged before, with its plan"
    pure = pure_epsilon(entry.plan_uses or {entry.use: entry.planned or entry.count})
    found = [f"pure epsilon {rounded_up(pure)}"] if pure < math.inf else []
    found += [] if entry.charged_mu is None else [f"mu = {rounded_up(entry.charged_mu)}"]
    return f"charged as {' or '.join(found)}, whichever is less" if found else ""


def _read(path: Path | None) -> Certificate:
    """The certificate in a file; raises InvalidInput unless it verifies."""
    from matrixdp.privacy.certificate import Certificate

    assert path is not None
    try:
        found = Certificate.load(path)
    except OSError as reason:
        raise InvalidInput(f"certificate {str(path)!r} cannot be read ({type(reason).__name__})") from None
    verification = found.verify()
    if not verification:
        raise InvalidInput(f"certificate {str(path)!r} does not verify: {verification.findings[0]}")
    return found
