"""The view Ledger: every spend, who made it, what was spent over time, and whether the chain is intact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from matrixdp.accounting.ledger.entries import Entry
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.accounting.ledger.left import Left
from matrixdp.accounting.ledger.rules import Reservation
from matrixdp.budget import Budget
from matrixdp.explorer.jobs import Tell, silent
from matrixdp.explorer.snippets import Snippet, call, command, lines, without_password


@dataclass(frozen=True)
class Line:
    """One spend, as it is shown.

    Attributes:
        entry: the entry in the ledger.
        epsilon: of this spend alone, at the budget's delta; of each of its releases, if there are several.
        spent: epsilon of all spends up to this one, at the budget's delta.
    """

    entry: Entry
    epsilon: float
    spent: float


@dataclass(frozen=True)
class Shown:
    """All that the view shows of a ledger.

    Attributes:
        path: its file.
        budget: the budget of all spends together.
        adjacency: which data sets are neighbours; empty if no spend has fixed that yet.
        spent: epsilon of all spends, at the budget's delta.
        left_mu: the mu that one more Gaussian release may have.
        left_epsilon: the epsilon of such a release.
        lines: all spends, oldest first.
        analysts: epsilon of the spends of each analyst alone, with their number.
        head: the last hash of the chain, which was checked.
        left: what is left of the total, and of every quota.
        reservations: those that are open.
        dataset: which data set it is for, in a database.
        kept: a hash that was kept elsewhere, and that the chain contains.
    """

    path: str
    budget: Budget
    adjacency: str
    spent: float
    left_mu: float
    left_epsilon: float
    lines: tuple[Line, ...]
    analysts: dict[str, tuple[int, float]]
    head: str
    left: Sequence[Left]
    reservations: Sequence[Reservation]
    dataset: str | None = None
    kept: str | None = None

    def snippet(self) -> Snippet:
        """Code that shows the same."""
        path, named = without_password(self.path), {"dataset": self.dataset}
        python = lines(
            "from matrixdp import Ledger",
            "",
            f"ledger = {call('Ledger', path, named=named)}",
            "print(ledger.budget, ledger.spent(), ledger.remaining())",
            "for entry, spent in zip(ledger.history(), ledger.spent_over_time()):",
            "    print(entry.number, entry.time, entry.note, entry.analyst, entry.in_words, spent)",
            f"print(ledger.verify({'' if self.kept is None else repr(self.kept)}))",
        )
        commands = (
            command("ledger", "show", path, **named),
            command("ledger", "verify", path, **named, head=self.kept),
        )
        return Snippet(python, lines(commands))


def shown(path: str, kept: str | None = None, dataset: str | None = None, tell: Tell = silent) -> Shown:
    """Reads a ledger and checks its chain, which must contain the hash that was kept, if one is given."""
    tell(0, 4)
    ledger = Ledger(path, dataset=dataset)
    entries, remaining = ledger.history(), ledger.remaining()
    tell(1, 4)
    spent = ledger.spent_over_time()
    tell(2, 4)
    delta = ledger.budget.delta
    found = tuple(Line(entry, entry.profile.epsilon(delta), total) for entry, total in zip(entries, spent, strict=True))
    numbers = Counter(entry.analyst or "" for entry in entries)
    analysts = {name: (numbers[name], epsilon) for name, epsilon in sorted(ledger.analysts().items())}
    tell(3, 4)
    head = ledger.verify(kept)
    return Shown(
        path=path,
        budget=ledger.budget,
        adjacency=str(ledger.adjacency or ""),
        spent=ledger.spent(),
        left_mu=remaining.mu,
        left_epsilon=remaining.epsilon,
        lines=found,
        analysts=analysts,
        head=head,
        left=ledger.left(),
        reservations=ledger.reservations(),
        dataset=dataset,
        kept=kept,
    )
