"""Marginals of a table: many tables of counts from one release, with labels. Only add/remove is accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matrixdp._check import Shape
from matrixdp.budget import Allotment, Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import ResidualNoise
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Release
from matrixdp.privacy.certificate import Certificate
from matrixdp.queries.answer import changes
from matrixdp.residuals import Residuals
from matrixdp.tables.answers import PreparedTable, TableAnswer
from matrixdp.tables.counts import Named, domain_of, rows_of
from matrixdp.tables.domain import MOST_CELLS
from matrixdp.tables.estimates import added
from matrixdp.tables.marginal_release import MarginalRelease
from matrixdp.tables.marginals import MarginalPlan, change_in_marginals, plan_marginals
from matrixdp.tables.outputs import NUMBERS, Axes, Labelled


@changes("table-marginals")
def change_in_table_marginals(
    shape: Shape,
    *,
    columns: Named,
    adjacency: str,
    unit: str | None = None,
    contributions: int = 1,
    up_to: int | None = None,
    families: Any = None,
    contrasts: Any = (),
) -> Residuals:
    """Each row of a unit is in one cell of every table; see `matrixdp.residuals`."""
    sizes = [(name, len(column.labels)) for name, column in domain_of(columns).items()]
    terms = {"contributions": rows_of(unit, contributions), "adjacency": added(adjacency), "contrasts": contrasts}
    return change_in_marginals(shape, columns=sizes, up_to=up_to, families=families, **terms)


@dataclass(frozen=True, eq=False, repr=False)
class TableMarginals(Labelled):
    """Marginal tables of one release, which agree wherever they overlap, with labels and error bars.

    Attributes:
        marginals: the same without labels; it also gives weighted sums and tables without negative cells.
        axes: the labels of the columns.
        tables: the tables that are written out, each by its columns; () is the total.

    Example:
        >>> import pandas
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import Categorical, Domain, Numeric, Table
        >>> frame = pandas.DataFrame({"region": ["north", "south", "north"], "age": [31, 45, 28]})
        >>> ages = Numeric(0, 100, bins=[0, 18, 65, 100])
        >>> table = Table(frame, Domain({"region": Categorical(["north", "south"]), "age": ages}))
        >>> out = table.marginals(up_to=2).release(Budget(1.0, 1e-6))
        >>> out.of("region", "age").table().columns.tolist()
        ['region', 'age', 'value', 'standard_error', 'low', 'high']
    """

    marginals: MarginalRelease
    axes: Axes
    tables: tuple[tuple[str, ...], ...]

    @property
    def certificate(self) -> Certificate:
        """The guarantee of all tables together."""
        return self.marginals.certificate

    def certified(self, certificate: Certificate) -> TableMarginals:
        """The same with this certificate."""
        released = replace(self.marginals.release, certificate=certificate)
        return replace(self, marginals=replace(self.marginals, release=released))

    def of(self, *columns: str) -> TableMarginals:
        """A single table, of columns that one table of the release contains."""
        self.marginals.plan.variance(columns)
        return replace(self, axes=tuple((name, dict(self.axes)[name]) for name in columns), tables=(columns,))

    def _numbers(self, level: float) -> dict[str, Any]:
        """All tables, one below the other; a label is None where a table sums over its column."""
        parts = self.parts(level)
        return {name: np.concatenate([part[name] for _, part in parts]) for name in NUMBERS}

    @property
    def _tables(self) -> tuple[tuple[str, ...], ...]:
        return self.tables

    def parts(self, level: float = 0.95) -> list[tuple[Axes, dict[str, Any]]]:
        """Each table by itself."""
        found, labels = list[tuple[Axes, dict[str, Any]]](), dict(self.axes)
        for table in self.tables:
            ends = self.marginals.interval(table, level)
            numbers = (self.marginals.table(table), self.marginals.standard_error(table), ends.low, ends.high)
            columns = {name: np.asarray(part).reshape(-1) for name, part in zip(NUMBERS, numbers, strict=True)}
            found.append((tuple((name, labels[name]) for name in table), columns))
        return found


@dataclass(frozen=True, eq=False)
class PlanOf:
    """How marginals are planned, apart from the budget: their sizes, which tables, and the weights of errors."""

    sizes: Mapping[str, int]
    tables: Mapping[str, Any]
    options: Mapping[str, Any]

    def __call__(self, budget: Budget) -> MarginalPlan:
        """The plan for a budget."""
        return plan_marginals(self.sizes, budget=budget, **self.tables, **self.options)

    def structure(self) -> MarginalPlan:
        """A plan with the same residuals and set; these do not depend on the budget or the weights of errors."""
        unknown = set(self.options) - {"weights", "targets", "objective"}
        if unknown:
            raise InvalidInput(f"marginals take weights, targets and objective, not {', '.join(sorted(unknown))}")
        return plan_marginals(self.sizes, budget=Budget(1.0, 1e-6), **self.tables)


class MarginalsAnswer(TableAnswer):
    """Residuals of marginal tables, still private.

    Attributes:
        plan: how they are planned for a budget.
        tables: the tables that are written out, each by its columns.
    """

    plan: PlanOf
    tables: tuple[tuple[str, ...], ...]

    @property
    def cells(self) -> int:
        """How many numbers the tables have."""
        return cells_in(self.axes, self.tables)

    def prepare(self, budget: Budget, mechanism: str | NoiseLaw = "auto", **options: Any) -> PreparedTable:
        """All steps of `release` before the ledger is charged."""
        if mechanism != "auto" or options:
            raise InvalidInput("marginals have noise of their own: leave mechanism and its options out")
        planned = isinstance(budget, Allotment)
        if planned and self.plan.options:
            raise InvalidInput("weights, targets and objective need a whole budget; a plan has fixed the noise already")
        plan = self.plan.structure() if planned else self.plan(budget)

        def outcome(out: Release) -> Labelled:
            return TableMarginals(MarginalRelease(plan=plan, release=out), self.axes, self.tables)

        prepared = super().prepare(budget, "auto" if planned else plan.law)
        law = prepared.prepared.certificate.law
        if not (isinstance(law, Gaussian) and isinstance(law.covariance, ResidualNoise)):
            raise InvalidInput("the plan has no noise for marginals; plan with shapes: budget.plan(sets, shapes=...)")
        return replace(prepared, outcome=outcome)


def cells_in(axes: Axes, tables: tuple[tuple[str, ...], ...]) -> int:
    """How many numbers the tables have; raises InvalidInput if there are too many to write out."""
    sizes = {name: len(labels) for name, labels in axes}
    cells = sum(math.prod(sizes[name] for name in table) for table in tables)
    if not cells <= MOST_CELLS:
        raise InvalidInput(
            f"the tables would have {cells} cells, more than {MOST_CELLS}; ask for fewer, or of fewer columns"
        )
    return cells
