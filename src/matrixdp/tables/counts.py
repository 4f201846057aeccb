"""What a unit can change in counts of rows, from public parameters alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matrixdp._check import Shape
from matrixdp.adjacency import REPLACE
from matrixdp.errors import InvalidInput
from matrixdp.queries.answer import changes
from matrixdp.queries.units import checked_contributions
from matrixdp.sensitivity import L1, Counts, Sensitivity
from matrixdp.tables.columns import STATES, Column
from matrixdp.tables.domain import Domain

Named = Sequence[Sequence[Any]]
"""Pairs of a column's name and the column."""


def shape_of(columns: Iterable[Column]) -> Shape:
    """The shape of a table of counts: one side per column; () for the number of all rows."""
    return tuple(len(column.labels) for column in columns)


@changes("counts")
def change_in_counts(
    shape: Shape, *, columns: Named, adjacency: str, unit: str | None = None, contributions: int = 1
) -> Sensitivity:
    """Each row of a unit changes one cell by 1; several may fall into the same cell, or into different ones."""
    domain = domain_of(columns)
    expected = shape_of(domain.values())
    if shape != expected:
        raise InvalidInput(f"the columns are those of a table of shape {expected}, not {shape}")
    return _of_rows(2 if adjacency == REPLACE else 1, unit, contributions, adjacency)


@changes("cell-states")
def change_in_cell_states(
    shape: Shape, *, columns: Named, adjacency: str, unit: str | None = None, contributions: int = 1
) -> Sensitivity:
    """Each row of a unit changes one of the four numbers of each column by 1."""
    if shape != (len(domain_of(columns)), len(STATES)):
        raise InvalidInput(f"the report has {len(columns)} columns and {len(STATES)} states, not {shape}")
    return _of_rows(len(columns) * (2 if adjacency == REPLACE else 1), unit, contributions, adjacency)


def _of_rows(cells: int, unit: str | None, contributions: int, adjacency: str) -> Sensitivity:
    """The set if each row of a unit changes this many cells; several rows may change the same cells, or others."""
    rows = rows_of(unit, contributions)
    if rows == 1:
        return Counts(cells, adjacency=adjacency)
    return L1(cells * rows, rows if cells > 1 else None, adjacency, step=1)


def rows_of(unit: str | None, contributions: int) -> int:
    """How many rows a unit has at most."""
    rows = checked_contributions(contributions)
    if unit is None and rows != 1:
        raise InvalidInput("contributions are those of a unit; without one, a row is protected by itself")
    return rows


def domain_of(columns: Iterable[Any]) -> dict[str, Column]:
    """The columns by name, as a query's parameters have them."""
    found = dict(columns)
    return dict(Domain(found)) if found else {}
