"""`matrixdp ledger`: a budget in a file, and every spend from it."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from matrixdp.cli import arguments, show
from matrixdp.errors import InvalidInput, MatrixDPError

if TYPE_CHECKING:
    from matrixdp.accounting.ledger.entries import Entry
    from matrixdp.privacy.certificate import Certificate
    from matrixdp.privacy.guarantee import Guarantee

File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger.", show_default=False)]
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

ledger = typer.Typer(no_args_is_help=True, help="Keep a budget in a file: every spend is on disk before a release.")


@ledger.command()
def create(
    file: File,
    epsilon: arguments.Epsilon,
    delta: arguments.Delta,
    adjacency: Adjacency = None,
) -> None:
    """Create a ledger with this budget.

    Example: matrixdp ledger create budget.db --epsilon 3 --delta 1e-6
    """
    from matrixdp.accounting.ledger.ledger import Ledger
    from matrixdp.budget import Budget

    if file.exists() or file.is_symlink():
        raise InvalidInput(f"file {str(file)!r} exists already and is not replaced; choose another name")
    created = Ledger(file, Budget(epsilon, delta), adjacency=adjacency)
    show.console().print(f"Created: {file}, {created.budget}", markup=False, soft_wrap=True)


@ledger.command(name="show")
def display(file: File, json: arguments.Json = False) -> None:
    """Show the budget, what is left of it, and every spend."""
    from matrixdp.accounting.ledger.ledger import Ledger

    opened = Ledger(file)
    spent, remaining, entries = opened.spent(), opened.remaining(), opened.history()
    if json:
        show.document(
            {
                "budget": {"epsilon": opened.budget.epsilon, "delta": opened.budget.delta},
                "adjacency": opened.adjacency,
                "spent": spent,
                "remaining": {"mu": remaining.mu, "epsilon": remaining.epsilon},
                "entries": [entry.to_dict() for entry in entries],
            }
        )
        return
    from matrixdp._rounding import rounded_down, rounded_up

    console = show.console()
    console.print(f"Budget: {opened.budget}, adjacency {opened.adjacency or 'not fixed yet'}", markup=False)
    # rounded to the private side: what was spent up, what is left down
    number = f"{len(entries)} entr{'y' if len(entries) == 1 else 'ies'}"
    console.print(f"Spent: epsilon {rounded_up(spent)} at delta {opened.budget.delta:g}, in {number}", markup=False)
    console.print(
        f"Left for one Gaussian release: mu {rounded_down(remaining.mu)}, "
        f"which is epsilon {rounded_down(remaining.epsilon)}",
        markup=False,
    )
    for entry in entries:
        console.print(_described(entry), markup=False, soft_wrap=True)


@ledger.command()
def spend(
    file: File,
    mu: Annotated[float | None, typer.Option(help="The mu of a Gaussian release made outside matrixdp.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="The certificate of a release, as `matrixdp release` writes it.")
    ] = None,
    note: Annotated[str, typer.Option(help="A note for the ledger; never data.")] = "",
    count: Annotated[int, typer.Option(help="How many such releases.")] = 1,
    sampling_rate: Annotated[float, typer.Option(help="The rate, if each drew its own Poisson sample.")] = 1.0,
    adjacency: Adjacency = None,
    dataset: Annotated[str | None, typer.Option(help="The data set it was made from.", show_default="none")] = None,
    analyst: Annotated[str | None, typer.Option(help="Who asked for it.", show_default="none")] = None,
    purpose: Annotated[str | None, typer.Option(help="What it is for.", show_default="none")] = None,
    unit: Annotated[str, typer.Option(help="Whom the guarantee protects: record, user, ...")] = "record",
    key: Annotated[
        str | None,
        typer.Option(help="An idempotency key: the same spend is charged once, however often.", show_default="none"),
    ] = None,
) -> None:
    """Record a spend that was, or will be, made elsewhere.

    Example: matrixdp ledger spend budget.db --mu 0.2 --adjacency add/remove --note "histogram for the annual report"
    """
    from matrixdp.accounting.ledger.ledger import Ledger

    if (mu is None) == (certificate is None):
        raise InvalidInput("give either --mu or --certificate")
    opened = Ledger(file)
    found: Guarantee
    if certificate is not None:
        found = _read(certificate)
    else:
        assert mu is not None
        found = _by_hand(mu, adjacency or opened.adjacency)
    if adjacency not in (None, found.adjacency):
        raise InvalidInput(f"--adjacency {adjacency} does not agree with the certificate, which says {found.adjacency}")
    entry = opened.spend(
        found,
        note,
        count=count,
        sampling_rate=sampling_rate,
        dataset=dataset,
        analyst=analyst,
        purpose=purpose,
        unit=unit,
        key=key,
    )
    show.console().print(f"Spent: entry {entry.number}, hash {entry.hash}", markup=False, soft_wrap=True)


@ledger.command()
def verify(
    file: File,
    head: Annotated[
        str | None, typer.Option(help="A head that was kept elsewhere; the chain must contain it.", show_default="none")
    ] = None,
) -> None:
    """Check that no entry was changed, moved or removed."""
    from matrixdp.accounting.ledger.ledger import Ledger

    found = Ledger(file).verify(head)
    show.console().print(f"The chain is whole. Head: {found}", markup=False, soft_wrap=True)


@ledger.command()
def export(
    file: File,
    out: Annotated[Path | None, typer.Option(help="A new file for it.", show_default="standard output")] = None,
) -> None:
    """Export everything as JSON lines: the budget, each entry with its certificate, and the head; keep it elsewhere.

    `matrixdp verify FILE.jsonl` computes everything in it again, without the ledger.
    """
    from matrixdp.accounting.ledger.ledger import Ledger

    lines = "".join(f"{dumps(line)}\n" for line in Ledger(file).export())
    if out is None:
        typer.echo(lines, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as target:
            target.write(lines)
    except OSError as reason:
        raise MatrixDPError(f"out {str(out)!r} could not be written ({reason}); choose another name") from None


def _described(entry: Entry) -> str:
    """An entry in lines of at most 80 characters: what it was for, what it guarantees, and what that rests on."""
    releases = f"{entry.count} releases" if entry.count > 1 else ""
    uses = releases if entry.series is None else f"{entry.count} of {entry.planned} releases"
    rate = f"each on a sample at rate {entry.sampling_rate:g}" if entry.sampling_rate < 1 else ""
    names = {"data set": entry.dataset, "analyst": entry.analyst, "purpose": entry.purpose, "unit": entry.unit}
    given = ", ".join(f"{name} {value}" for name, value in names.items() if value not in (None, "record"))
    origin = entry.source or ("stated" if entry.stated else "by a law that is not known here")
    guarantee = ", ".join(part for part in (str(entry.profile), uses, rate) if part)
    first = f"{entry.number:>4}  {entry.time[:10]}  {entry.note}"
    lines = [first, *(f"      {line}" for line in (given, guarantee, origin) if line)]
    return "\n".join(fill(line, WIDTH, subsequent_indent=" " * 8) for line in lines)


def _read(path: Path) -> Certificate:
    """The certificate in a file, if it is true."""
    from matrixdp.privacy.certificate import Certificate

    try:
        found = Certificate.load(path)
    except OSError as reason:
        raise InvalidInput(f"certificate {str(path)!r} cannot be read ({type(reason).__name__})") from None
    verification = found.verify()
    if not verification:
        raise InvalidInput(f"certificate {str(path)!r} is not true: {verification.findings[0]}")
    return found


def _by_hand(mu: float, adjacency: str | None) -> Guarantee:
    """A guarantee stated on the command line."""
    from matrixdp import _check
    from matrixdp.adjacency import checked
    from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

    return Guarantee(GaussianProfile(_check.positive("--mu", mu)), checked(adjacency, "--adjacency"))
