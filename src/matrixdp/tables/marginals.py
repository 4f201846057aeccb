"""Many marginal tables of the same records at once, with the least noise, consistent with each other.

    plan = plan_marginals({"age": 85, "sex": 2, "region": 12}, up_to=2, budget=Budget(1.0, 1e-6))
    plan.rmse, plan.variance(("age", "sex")), plan.certificate      # before anything is spent
    out = plan.release(codes, ledger=ledger)                        # one record per row
    out.table(("age", "sex")), out.standard_error(("age", "sex"))

Noise is added not to the tables but to their residuals (`matrixdp.residuals`): what each table adds to the smaller
ones. They are released once, as one vector; every table of the plan, and every smaller one, is computed from them. So
tables agree wherever they overlap. The product of all attributes is never formed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.solvers import marginals as solver
from matrixdp.pipeline import Spends, prepare
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.residuals import ResidualBasis, Residuals
from matrixdp.tables.counting import Counts, counter
from matrixdp.tables.families import (
    by_table,
    column_names,
    contrasts_of,
    factors,
    kinds_of,
    limits_for,
    located,
    measured,
    table_rows,
)
from matrixdp.tables.marginal_release import MarginalRelease, cell_variances, stds

Columns = Sequence[str]
"""Names of columns, in any order; () is the total."""


def plan_marginals(
    sizes: Mapping[str, int],
    *,
    budget: Budget,
    up_to: int | None = None,
    families: Iterable[Columns] | None = None,
    weights: Mapping[tuple[str, ...], float] | None = None,
    ordered: Mapping[str, str] | None = None,
    targets: Mapping[tuple[str, ...], float] | None = None,
    objective: str = "mean",
    contributions: int = 1,
    adjacency: str = ADD_REMOVE,
) -> MarginalPlan:
    """Plans the least noise for a family of marginal tables.

    Args:
        sizes: how many values each column has; public.
        budget: the guarantee to keep, for all tables together.
        up_to: all tables of at most this many columns, the total included.
        families: instead of up_to, the tables, each as names of columns; () is the total.
        weights: the weight of the variance of a cell, by table; 1 by default.
        ordered: columns whose values have an order and are used through sums: "prefix" for sums of the first values,
            "ranges" for sums over any range. They get noise that suits these sums.
        targets: the largest standard error of a cell, by table; if a column is ordered, the root of the mean variance.
        objective: what is minimized: the weighted "mean" variance over all cells; or the "largest" ratio of a table's
            variance to its squared target. In the latter case targets are 1 by default, and may be exceeded.
        contributions: how many records one person may have.
        adjacency: add/remove, or replace, where the number of records is public and gets no noise.

    Guarantee: `plan.certificate`, exact for add/remove; for replace exact if there are few pairs of cells up to
        symmetry (as for 18 columns, none of them ordered), otherwise a proven upper bound.

    Raises:
        NotApplicable: if the targets cannot be met with this budget, or delta is 0.

    Source: xiao2023optimal.
    Deviates: see `matrixdp.mechanisms.solvers.marginals`.

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import plan_marginals
        >>> sizes = {"region": 4, "age": 10, "sex": 2}
        >>> plan = plan_marginals(sizes, budget=Budget(1.0, 1e-6), up_to=2)
        >>> round(plan.variance(["region", "age"]) ** 0.5, 2)  # the standard error of a cell
        5.8
    """
    if isinstance(budget, Budget) and budget.delta == 0:
        raise NotApplicable(
            "marginals have Gaussian noise, which does not keep delta = 0; use a delta well below 1/rows, such as "
            "1e-6, or ask for the counts of one table, which take delta = 0"
        )
    names, adjacency = column_names(sizes), checked(adjacency)
    tables, kinds = table_rows(names, up_to, families), kinds_of(names, ordered)
    found = solver.incidence(tables, len(names))
    contrasts = contrasts_of(list(sizes.values()), kinds, tables)
    parameters = {
        "columns": list(sizes.items()), "up_to": up_to, "contributions": contributions, "adjacency": adjacency,
        "families": None if up_to is not None else [[names[i] for i in row if i >= 0] for row in tables.tolist()],
        "contrasts": contrasts or None,
    }  # fmt: skip
    asked = query("marginals", **parameters)
    basis = ResidualBasis(tuple(sizes.values()), measured(found.subsets, adjacency), contrasts)
    sensitivity = Residuals(basis, contributions, adjacency)
    inside, outside = zip(*(factors(basis, i, kind) for i, kind in enumerate(kinds)), strict=True)
    terms = found.coefficients(inside, outside) * by_table("weights", weights, names, tables, 1.0)[found.table]
    worst = _check.choice("objective", objective, ("mean", "largest")) == "largest"
    limits = limits_for(basis, found, names, targets, 1.0 if worst else math.inf)
    law = calibrate(
        "marginals",
        shape=(basis.length,),
        sensitivity=sensitivity,
        budget=budget,
        error=solver.aligned(basis, found, found.by_subset(terms)),
        limits=limits if targets and not worst else None,
        largest=limits if worst else None,
    )
    certificate = certify(law, sensitivity, budget, query=asked)
    return MarginalPlan(names=names, incidence=found, budget=budget, certificate=certificate)


@changes("marginals")
def change_in_marginals(
    shape: Any,
    *,
    columns: Iterable[tuple[str, int]],
    contributions: int,
    adjacency: str,
    up_to: int | None = None,
    families: Any = None,
    contrasts: Any = (),
) -> Residuals:
    """What a neighbour can change in the residuals of these tables."""
    sizes = dict(columns)
    tables = table_rows(column_names(sizes), up_to, families)
    subsets = measured(solver.incidence(tables, len(sizes)).subsets, adjacency)
    return Residuals(ResidualBasis(tuple(sizes.values()), subsets, tuple(contrasts)), contributions, adjacency)


@dataclass(frozen=True, eq=False, kw_only=True)
class MarginalPlan:
    """Which tables are released, and with what noise; nothing has been spent.

    Attributes:
        names: the columns.
        incidence: the tables, and the residuals that each is made of.
        budget: the budget of the release.
        certificate: of the noise as planned. A release is drawn on a grid, for which its noise may be larger by about a
            thousandth; the certificate and variances of the release include that.

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import plan_marginals
        >>> plan = plan_marginals({"region": 4, "age": 10}, budget=Budget(1.0, 1e-6), up_to=2)
        >>> plan.names, plan.certificate.meets(plan.budget)
        (('region', 'age'), True)
    """

    names: tuple[str, ...]
    incidence: solver.Incidence
    budget: Budget
    certificate: Certificate

    @property
    def law(self) -> Gaussian:
        """The noise on the residuals."""
        assert isinstance(self.certificate.law, Gaussian)
        return self.certificate.law

    @property
    def basis(self) -> ResidualBasis:
        """The residuals that are measured."""
        assert isinstance(self.certificate.sensitivity, Residuals)
        return self.certificate.sensitivity.basis

    @cached_property
    def rmse(self) -> float:
        """The square root of the mean variance over all cells of all tables."""
        basis, sizes, found = self.basis, self.basis.sizes, self.incidence
        spreads = [float(np.sum(basis.spread(i))) for i in range(len(sizes))]
        error = found.by_subset(found.coefficients(spreads, [1 / n for n in sizes]))
        total = float(solver.aligned(basis, found, error) @ np.square(stds(self.law)))
        return math.sqrt(total / float(np.sum(np.append(sizes, 1.0)[self.incidence.tables].prod(axis=1))))

    def variance(self, columns: Columns) -> float:
        """The variance of every cell of a table; if a column is ordered, the mean over the cells."""
        return float(np.mean(cell_variances(self, self.law, self.places(columns))))

    def answer(self, counts: Counts) -> Answer:
        """The residuals of these counts, still private, for `release(*answer, budget)`."""
        return self._measured(counts)[0]

    def release(
        self, counts: Counts, *, ledger: Spends | None = None, note: str = "", rng: np.random.Generator | None = None
    ) -> MarginalRelease:
        """Releases the tables, once.

        Args:
            counts: the records or their counts: an array of whole numbers, one record per row, with the place of its
                value in each column; or a mapping or a function from tables to arrays of counts. A record with a place
                that does not exist is left out (replace: it counts for the nearest place).
            ledger: charged before any noise is drawn.
            note: a note for the ledger; never data.
            rng: a numpy Generator, for reproducible studies; entropy from the operating system by default.

        Guarantee: `result.release.certificate`, if the counts are those of one set of records, each in one cell of
            every table. Under add/remove a record may also be missing from some of the tables.
        """
        answer, total = self._measured(counts)
        prepared = prepare(*answer, self.budget, self.law, query=answer.query, rng=rng)
        return MarginalRelease(plan=self, release=prepared.release(ledger, note), total=total)

    def _measured(self, counts: Counts) -> tuple[Answer, float]:
        """The residuals, and the number of records if it is public."""
        basis, count = self.basis, counter(counts, self.names, self.basis.sizes, self.certificate.adjacency)
        try:
            value, starts = np.empty(basis.length), basis.starts.tolist()
        except MemoryError:
            raise InvalidInput(f"the tables need {basis.length} numbers, too many for memory; ask for fewer") from None
        members = list(basis)
        for table, rows in self._sources():
            known = count(table)
            for row in rows:
                away = tuple(axis for axis, i in enumerate(table) if i not in members[row])
                residual = basis.residual(members[row], np.sum(known, axis=away, dtype=np.int64))
                value[starts[row] : starts[row + 1]] = residual.ravel()
        public = float(np.sum(known)) if self.certificate.adjacency == REPLACE else math.nan
        return Answer(value, self.certificate.sensitivity, self.certificate.query), public

    def _sources(self) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """The tables that are counted, each with the rows of the basis that are computed from it."""
        found, tables = self.incidence, self.incidence.tables
        source = np.zeros(len(found.subsets), dtype=np.int64)
        order = np.argsort(np.sum(tables >= 0, axis=1)[found.table], kind="stable")
        source[found.subset[order]] = found.table[order]  # the last, largest table wins
        chosen = solver.aligned(self.basis, found, source.astype(np.float64)).astype(np.int64)
        rows = np.argsort(chosen, kind="stable")
        for part in np.split(rows, np.flatnonzero(np.diff(chosen[rows])) + 1):
            yield tuple(i for i in tables[chosen[part[0]]].tolist() if i >= 0), part.tolist()

    @cached_property
    def rows_by_subset(self) -> dict[tuple[int, ...], int]:
        """The row of the basis for each set of columns."""
        return {subset: row for row, subset in enumerate(self.basis)}

    def places(self, columns: Columns) -> tuple[int, ...]:
        """The columns as places; raises InvalidInput unless one table of the plan contains them all."""
        places = located(columns, self.names)
        inside = tuple(sorted(places))
        if inside and inside not in self.rows_by_subset:
            raise InvalidInput(f"columns must lie in one table of the plan; no table has these {len(inside)} together")
        return places

    def __str__(self) -> str:
        return (
            f"{len(self.incidence.tables)} marginal tables of {len(self.names)} columns, root mean squared error "
            f"{self.rmse:.6g}\n{self.certificate}"
        )
