"""The result of a query on a table: an answer with labels, and its release."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from matrixdp.budget import Budget
from matrixdp.distributions import NoiseLaw
from matrixdp.pipeline import Release, Spends, prepare
from matrixdp.queries import Answer
from matrixdp.tables.outputs import Axes, TableRelease


@dataclass(frozen=True)
class PreparedTable:
    """A labelled release that still has to be charged and drawn, once."""

    prepared: Any
    """A `Prepared`, or another object with its `certificate` and `release`."""

    outcome: Callable[[Any], Any]

    def release(self, ledger: Spends | None = None, note: str = "") -> Any:
        """Charges the ledger, if there is one, and then draws the noise."""
        return self.outcome(self.prepared.release(ledger, note))


class Releasable(ABC):
    """What can be released once its noise is sized."""

    @abstractmethod
    def prepare(self, budget: Budget, mechanism: str | NoiseLaw = "auto", **options: Any) -> PreparedTable:
        """All steps of `release` before the ledger is charged."""

    def release(
        self,
        budget: Budget,
        mechanism: str | NoiseLaw = "auto",
        *,
        ledger: Spends | None = None,
        note: str = "",
        **options: Any,
    ) -> Any:
        """Adds noise so that the budget is kept, and certifies it; see `matrixdp.release`.

        Args:
            budget: the guarantee to keep; or a part of a plan or a shared budget, which fixes the noise.
            mechanism: a mechanism's name or a noise law; "auto" takes the least expected error.
            ledger: charged once, before any noise is drawn.
            note: a note for the ledger; never data.
            **options: of the mechanism.
        """
        return self.prepare(budget, mechanism, **options).release(ledger, note)


class TableAnswer(Releasable, Answer):
    """A query's true value, still private, with its sensitivity set and the labels of its cells.

    `answer.release(budget, ledger=ledger)` gives a labelled release. Like every answer it also works with
    `release(*answer, budget, query=answer.query)`, `compare(answer.shape, answer.sensitivity, budget)` and plans.

    Example:
        >>> import pandas
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import Categorical, Domain, Numeric, Table
        >>> frame = pandas.DataFrame({"region": ["north", "south", "north"], "age": [31, 45, 28]})
        >>> ages = Numeric(0, 100, bins=[0, 18, 65, 100])
        >>> table = Table(frame, Domain({"region": Categorical(["north", "south"]), "age": ages}))
        >>> answer = table.counts("region", "age")
        >>> answer.sensitivity
        Counts(cells=1, bound=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
        >>> answer.release(Budget(1.0, 1e-6)).table().columns.tolist()
        ['region', 'age', 'value', 'standard_error', 'low', 'high']
    """

    axes: Axes = ()

    @property
    def cells(self) -> int:
        """How many numbers are released."""
        return math.prod(len(labels) for _, labels in self.axes)

    def prepare(self, budget: Budget, mechanism: str | NoiseLaw = "auto", **options: Any) -> PreparedTable:
        """All steps of `release` before the ledger is charged."""
        prepared = prepare(self.value, self.sensitivity, budget, mechanism, query=self.query, **options)
        return PreparedTable(prepared, self.outcome)

    def outcome(self, out: Release) -> Any:
        """The labelled form of a release of this answer."""
        return TableRelease(**{field.name: getattr(out, field.name) for field in fields(out)}, axes=self.axes)
