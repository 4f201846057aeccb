"""`matrixdp ledger`: a budget in a file, and all that was spent of it."""

from __future__ import annotations

from json import JSONDecodeError, dumps, loads
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matrixdp.cli import arguments, show
from matrixdp.errors import InvalidInput, MatrixDPError

if TYPE_CHECKING:
    from matrixdp.privacy.certificate import Certificate

File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger.", show_default=False)]
Relation = Annotated[
    str | None, typer.Option(help="add/remove or replace.", show_default="the ledger's, or that of the first spend")
]

ledger = typer.Typer(no_args_is_help=True, help="Keep a budget in a file: every spend is on the disk before a release.")


@ledger.command()
def create(
    file: File,
    epsilon: arguments.Epsilon,
    delta: arguments.Delta,
    relation: Relation = None,
) -> None:
    """Create a ledger with this budget.

    Example: matrixdp ledger create budget.db --epsilon 3 --delta 1e-6
    """
    from matrixdp.budget import Budget
    from matrixdp.privacy.ledger import Ledger

    if file.exists() or file.is_symlink():
        raise InvalidInput(f"file {str(file)!r} exists already and is not replaced; choose another name")
    created = Ledger(file, Budget(epsilon, delta), relation=relation)
    show.console().print(f"Created: {file}, {created.budget}", markup=False, soft_wrap=True)


@ledger.command(name="show")
def display(file: File, json: arguments.Json = False) -> None:
    """Show the budget, what is left of it, and every spend."""
    from matrixdp.privacy.ledger import Ledger

    opened = Ledger(file)
    spent, remaining, entries = opened.spent(), opened.remaining(), opened.history()
    if json:
        show.document(
            {
                "budget": {"epsilon": opened.budget.epsilon, "delta": opened.budget.delta},
                "relation": opened.relation,
                "spent": spent,
                "remaining": {"mu": remaining.mu, "epsilon": remaining.epsilon},
                "entries": [entry.to_dict() for entry in entries],
            }
        )
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "time", "note", "guarantee", "uses", "rate", "source"):
        table.add_column(column)
    for entry in entries:
        cells = (
            str(entry.number),
            entry.time[:19],
            entry.note,
            str(entry.profile),
            str(entry.count) if entry.series is None else f"{entry.count} of {entry.planned}",
            f"{entry.sampling_rate:g}",
            entry.source,
        )
        table.add_row(*map(Text, cells))
    console = show.console()
    console.print(f"Budget: {opened.budget}, relation {opened.relation or 'not fixed yet'}", markup=False)
    # rounded to the private side: what was spent up, what is left down
    used, mu, epsilon = ceil(spent * 1e4) / 1e4, floor(remaining.mu * 1e4) / 1e4, floor(remaining.epsilon * 1e4) / 1e4
    console.print(f"Spent: epsilon {used} at delta {opened.budget.delta:g}, in {len(entries)} entries")
    console.print(f"Left for one Gaussian release: mu {mu}, which is epsilon {epsilon}")
    if entries:
        console.print(table)


@ledger.command()
def spend(
    file: File,
    mu: Annotated[float | None, typer.Option(help="What a Gaussian release outside matrixdp used.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="The certificate of a release, as `matrixdp release` writes it.")
    ] = None,
    note: Annotated[str, typer.Option(help="What to remember of it; never data.")] = "",
    count: Annotated[int, typer.Option(help="How many such releases.")] = 1,
    sampling_rate: Annotated[float, typer.Option(help="The rate, if each drew its own Poisson sample.")] = 1.0,
    relation: Relation = None,
) -> None:
    """Record a spend that was, or will be, made elsewhere.

    Example: matrixdp ledger spend budget.db --mu 0.2 --relation add/remove --note "histogram for the annual report"
    """
    from matrixdp.privacy.ledger import Ledger

    if (mu is None) == (certificate is None):
        raise InvalidInput("give either --mu or --certificate")
    opened = Ledger(file)
    if certificate is not None:
        found = _read(certificate)
    else:
        found = _by_hand({"mu": mu, "relation": relation or opened.relation, "source": "recorded by hand"}, "--mu")
    if relation not in (None, found.relation):
        raise InvalidInput(f"--relation {relation} does not agree with the certificate, which says {found.relation}")
    entry = opened.spend(found, note, count=count, sampling_rate=sampling_rate)
    show.console().print(f"Spent: entry {entry.number}, hash {entry.hash}", markup=False, soft_wrap=True)


@ledger.command()
def verify(
    file: File,
    head: Annotated[
        str | None, typer.Option(help="A head that was kept elsewhere; the chain must contain it.", show_default="none")
    ] = None,
) -> None:
    """Check that no entry was changed, moved or removed."""
    from matrixdp.privacy.ledger import Ledger

    found = Ledger(file).verify(head)
    show.console().print(f"The chain is whole. Head: {found}", markup=False, soft_wrap=True)


@ledger.command()
def export(
    file: File,
    out: Annotated[Path | None, typer.Option(help="A new file for it.", show_default="standard output")] = None,
) -> None:
    """Export everything as JSON lines: the budget, each entry with its hash, and the head, which is worth keeping."""
    from matrixdp.privacy.ledger import Ledger

    lines = "".join(f"{dumps(line)}\n" for line in Ledger(file).export())
    if out is None:
        typer.echo(lines, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as target:
            target.write(lines)
    except OSError as reason:
        raise MatrixDPError(f"out {str(out)!r} could not be written ({reason}); choose another name") from None


def _read(path: Path) -> Certificate:
    """The certificate in a file; only Gaussian ones can be rebuilt from what is printed there."""
    try:
        content = loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, JSONDecodeError) as reason:
        raise InvalidInput(f"certificate {str(path)!r} cannot be read ({type(reason).__name__})") from None
    if not isinstance(content, dict):
        raise InvalidInput(f"certificate {str(path)!r} must hold one JSON object")
    if content.get("mu") is None:
        raise InvalidInput(
            f"certificate {str(path)!r} has no mu, so its noise is not Gaussian and what it uses cannot be read from "
            "the file; charge such a release when it is made, with `matrixdp release --ledger`"
        )
    return _by_hand(content, f"certificate {str(path)!r}")


def _by_hand(content: dict[str, Any], name: str) -> Certificate:
    """A Gaussian certificate from the words and numbers that stand for it."""
    from matrixdp import _check
    from matrixdp.noise.sampler import Sampling
    from matrixdp.privacy.certificate import Certificate, GaussianProfile
    from matrixdp.sensitivity import RELATIONS

    shape, variation = content.get("shape", []), content.get("total_variation", 0.0)
    drawn = content.get("sampling") is not None
    return Certificate(
        profile=GaussianProfile(_check.positive(f"mu of {name}", content.get("mu"))),
        exact=content.get("exact") is True,
        relation=_check.choice(f"relation of {name}", content.get("relation"), RELATIONS),
        sensitivity=str(content.get("sensitivity", "")),
        noise=str(content.get("noise", "Gaussian")),
        source=str(content.get("source", "")),
        shape=_check.shape(shape) if shape else (),
        sampling=Sampling(
            total_variation=_check.at_least_zero(f"total_variation of {name}", variation),
            float_safe=not drawn or content.get("float_safe") is True,
            reproducible=str(content.get("sampling")).startswith("REPRODUCIBLE"),
        ),
    )
