"""`matrixdp ledger`: who may spend what, what is reserved, what is left, and the statement of a year."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matrixdp.cli import arguments, files, show
from matrixdp.cli.ledger import Note, Place, described, ledger, opened_at, room
from matrixdp.errors import InvalidInput

__all__ = ["ledger"]

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name.", show_default=False)]


@ledger.command()
def quota(
    place: Place,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The analyst, or the team.", show_default=False)],
    epsilon: Annotated[float | None, typer.Option(help="The epsilon of the quota.", show_default=False)] = None,
    delta: Annotated[float | None, typer.Option(help="Its delta.", show_default="the ledger's")] = None,
    per: Annotated[str | None, typer.Option(help="year, quarter or month.", show_default="the lifetime")] = None,
    member: Annotated[
        list[str] | None, typer.Option(help="An analyst in the team. Repeatable.", show_default="NAME")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the quota.")] = False,
    note: Note = "",
    dataset: arguments.Dataset = None,
) -> None:
    """Set what an analyst or a team may spend of the budget. From then on every analyst needs a quota.

    Example: matrixdp ledger quota budget.db ada --epsilon 1 --per year

    Example: matrixdp ledger quota budget.db surveys --epsilon 2 --member ada --member ben
    """
    from matrixdp.budget import Budget

    opened = opened_at(place, dataset)
    if remove == (epsilon is not None):
        raise InvalidInput("give either --epsilon or --remove")
    if epsilon is None:
        opened.remove_quota(name, note)
        show.text(f"Removed: the quota {name}")
        return
    budget = Budget(epsilon, opened.budget.delta if delta is None else delta)
    found = opened.set_quota(name, budget, per=per, members=member or (), note=note)
    show.text(f"Set: {name}, {found}, for {', '.join(found.members)}")


@ledger.command()
def reserve(
    place: Place,
    name: Name,
    mu: Annotated[float, typer.Option(help="The mu of each release, or more.")],
    count: Annotated[int, typer.Option(help="How many releases.")] = 1,
    adjacency: arguments.Adjacency = None,
    note: Note = "",
    dataset: arguments.Dataset = None,
    analyst: arguments.Analyst = None,
    purpose: arguments.Purpose = None,
) -> None:
    """Keep a part of the budget free for Gaussian releases, which use it with `release --reservation NAME`.

    Example: matrixdp ledger reserve budget.db weekly --mu 0.05 --count 52 --analyst ada
    """
    from matrixdp import _check
    from matrixdp._pages import counted
    from matrixdp.adjacency import checked
    from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

    opened = opened_at(place, dataset)
    relation = checked(adjacency or opened.adjacency, "--adjacency")
    asked = Guarantee(GaussianProfile(_check.positive("--mu", mu)), relation)
    found = opened.reserve(name, asked, count=count, note=note, analyst=analyst, purpose=purpose)
    show.text(f"Reserved: {name}, {counted(found.count, 'release')}")


@ledger.command(name="give-back")
def give_back(
    place: Place, name: Name, note: Note = "", dataset: arguments.Dataset = None, analyst: arguments.Analyst = None
) -> None:
    """Give back what is left of a reservation: the releases that were never drawn."""
    number = opened_at(place, dataset, analyst=analyst).give_back(name, note)
    show.text(f"Given back: {number} of {name}")


@ledger.command()
def history(
    place: Place,
    dataset: arguments.Dataset = None,
    analyst: Annotated[str | None, typer.Option(help="Only this analyst's.", show_default="all")] = None,
    json: arguments.Json = False,
) -> None:
    """Show every spend, quota and reservation, in the order of the chain."""
    opened = opened_at(place, dataset)
    entries = sorted([*opened.history(), *opened.changes()], key=lambda event: event.number)
    chosen = [event for event in entries if analyst is None or event.analyst == analyst]
    if json:
        show.document([event.to_dict() for event in chosen])
        return
    for event in chosen:
        show.text(described(event))
    if not chosen:
        show.text("No entries." if analyst is None else f"No entries of {analyst}.")


@ledger.command()
def left(
    place: Place,
    mu: Annotated[
        float | None, typer.Option(help="Also: how many more Gaussian releases with this mu.", show_default="none")
    ] = None,
    dataset: arguments.Dataset = None,
    analyst: Annotated[str | None, typer.Option(help="Whose quotas.", show_default="all")] = None,
    json: arguments.Json = False,
) -> None:
    """Show what is left: of the total, which is for the lifetime of the ledger, and of each quota.

    Example: matrixdp ledger left budget.db --analyst ada --mu 0.05
    """
    from dataclasses import asdict

    from matrixdp._rounding import rounded_up
    from matrixdp.adjacency import ADD_REMOVE, checked
    from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

    opened = opened_at(place, dataset)
    like = None if mu is None else Guarantee(GaussianProfile(mu), checked(opened.adjacency or ADD_REMOVE))
    rows = opened.left(like, analyst)
    if json:
        show.document([asdict(row) for row in rows])
        return
    for row in rows:
        since = f" (since {row.since})" if row.since else ""
        kept = f", of which {rounded_up(row.reserved)} is reserved" if row.reserved else ""
        number = "" if row.releases is None else f"; {row.releases} releases with mu {mu:g}"
        budget = f"{row.budget}{f' per {row.per}' if row.per else ''}"
        line = (
            f"{row.name}: {budget}; spent{since}: epsilon {rounded_up(row.spent)}{kept}; left: "
            f"{room(row, row.budget)}{number}"
        )
        show.text(line)


@ledger.command()
def statement(
    place: Place,
    year: Annotated[int | None, typer.Option(help="The year (UTC).", show_default="all years")] = None,
    format: Annotated[
        str | None, typer.Option(help="markdown, html or json.", show_default="as --out ends; markdown")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new file for it.", show_default="standard output")] = None,
    dataset: arguments.Dataset = None,
) -> None:
    """Write one page in plain language: what was released, to whom it applies, the exact total, and the risk.

    Example: matrixdp ledger statement budget.db --year 2026 --out 2026.html
    """
    from matrixdp import _check

    kinds = {".html": "html", ".json": "json"}
    kind = format or ("markdown" if out is None else kinds.get(out.suffix, "markdown"))
    _check.choice("--format", kind, ("markdown", "html", "json"))
    text = opened_at(place, dataset).statement(year, kind)
    if out is None:
        typer.echo(text, nl=False)
    else:
        files.write_new(out, text)
        show.text(f"Written: {out}")


@ledger.command()
def grant(
    place: Place,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="A role of the database.", show_default=False)],
    dataset: arguments.Dataset = None,
    may: Annotated[str, typer.Option(help="spend, or read.")] = "spend",
) -> None:
    """Let a role of a PostgreSQL database spend from its ledgers, or read them; nobody may change an entry."""
    opened_at(place, dataset).grant(role, may)
    show.text(f"Granted: {role} may {may}")
