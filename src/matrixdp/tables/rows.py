"""The rows of a table that count, read in batches from any source, with a public domain and a unit of privacy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE, checked
from matrixdp.errors import InvalidInput
from matrixdp.queries.units import NO_UNIT, Numbering, Selection, checked_contributions
from matrixdp.tables.columns import OUT, Codes, Column, States
from matrixdp.tables.domain import Domain
from matrixdp.tables.reading import source_of
from matrixdp.tables.sources import Cells, positions

Read = dict[str, tuple[States, Array]]
"""The state and the position of every cell of a batch, by column."""

Made = tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]
"""Which rows of a batch count, and what a query needs of each row."""


class Rows:
    """Rows from any source, with a public domain and a unit of privacy; `Table` adds the queries.

    Rows are read again for each query, in batches, and only the columns that it needs. It is taken as public that the
    source can be read, and what its columns are called; the number of its rows is not.
    """

    def __init__(
        self,
        source: Any,
        domain: Domain,
        *,
        unit: str | None = None,
        contributions: int | None = None,
        adjacency: str = ADD_REMOVE,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Reads the names of the columns, and no row.

        Args:
            source: see `matrixdp.tables.source_of`.
            domain: the values that the cells of each column can have, from public knowledge.
            unit: the column of ids whose owners the guarantee protects, each with all rows; without it, each row is
                protected by itself. Rows without an id do not count.
            contributions: the most rows of a unit that count; they are chosen in secret.
            adjacency: ADD_REMOVE, or REPLACE or ZERO_OUT where the number of units is public.
            columns: the names of the columns, for arrays and for separated text without a header.
        """
        if not isinstance(domain, Domain):
            raise InvalidInput(f"domain must be a Domain, got {_check.kind(domain)}; Domain.from_toml reads a file")
        if (unit is None) != (contributions is None):
            raise InvalidInput(
                "unit and contributions go together: the column of ids, and how many rows of an id count. Without a "
                "unit every row counts, and is protected by itself"
            )
        if unit is not None and (not isinstance(unit, str) or not unit.strip()):
            raise InvalidInput(f"unit must be the name of a column, got {_check.kind(unit)}")
        self.domain, self.unit = domain, unit
        self.contributions = 1 if contributions is None else checked_contributions(contributions)
        self.adjacency = checked(adjacency)
        self._source = source_of(source, columns)
        positions(self._source, [*domain, *([] if unit is None else [unit])])

    def __repr__(self) -> str:
        unit = "" if self.unit is None else f", at most {self.contributions} rows of each {self.unit}"
        return f"Table({self.domain}{unit})"

    def codes(self, *by: str) -> Codes:
        """The rows that count, as places among the labels of these columns, one per line: still private.

        For queries on places, such as marginals of `domain.sizes`, with the same `contributions`.

        Guarantee: removing the rows of one unit removes at most `contributions` lines. Only add/remove is accepted: for
            others the number of lines would have to be public, which policies and units do not allow.
        """
        chosen = self.domain.chosen(by)
        return self.collected(chosen, partial(codes_of, chosen))

    def numbers(self, *columns: str) -> Array:
        """The rows that count, as numbers within the bounds of these columns, one per line: still private.

        Rows with a missing or unexpected cell are left out, unless its policy fills it in.

        Guarantee: as for `codes`.
        """
        chosen = {name: self.domain[name] for name in columns}

        def made_of(read: Read, rows: int) -> Made:
            found = [column.numbers(*read[name]) for name, column in chosen.items()]
            return np.all([inside for inside, _ in found], axis=0), np.stack([each for _, each in found], axis=1)

        return self.collected(chosen, made_of)

    def collected(
        self, chosen: dict[str, Column], make: Callable[[Read, int], Made], width: int | None = None
    ) -> npt.NDArray[Any]:
        """The lines that count, each with `width` entries; one per column by default."""
        if self.adjacency != ADD_REMOVE:
            raise InvalidInput(f"adjacency must be add/remove for rows to be handed out, got {self.adjacency}")
        if not chosen:
            raise InvalidInput("name at least one column")
        parts = list(self.rows(list(chosen), make))
        return np.concatenate(parts) if parts else np.empty((0, width or len(chosen)), dtype=np.int64)

    def parameters(self) -> dict[str, Any]:
        """The public parameters that state whom a query on this table protects."""
        if self.unit is None:
            return {"adjacency": self.adjacency}
        return {"unit": self.unit, "contributions": self.contributions, "adjacency": self.adjacency}

    def rows(self, names: Sequence[str], make: Callable[[Read, int], Made]) -> Iterator[npt.NDArray[Any]]:
        """The rows that count, as a query needs them, in parts.

        Args:
            names: the columns that the query reads.
            make: from a batch as read and its number of rows to which rows count, and an array with one line per row.
                Each line must depend on its row alone.

        Guarantee: removing the rows of one unit removes at most `contributions` lines (see `matrixdp.queries.units`);
            without a unit, removing a row removes at most one.
        """
        wanted = list(dict.fromkeys([*names, *([] if self.unit is None else [self.unit])]))
        wanted = wanted or [next(iter(self.domain))]  # any column serves to count rows
        numbering, selection = Numbering(), Selection(self.contributions)
        for batch in self._source.batches(positions(self._source, wanted)):
            cells = dict(zip(wanted, batch, strict=True))
            read = {name: _read(self.domain[name], cells[name]) for name in names}
            inside, lines = make(read, batch[0].rows)
            if self.unit is None:
                yield lines[inside]
            else:
                ids = cells[self.unit]
                units = numbering.numbers(ids.values)
                units = units if ids.places is None else units[ids.places]
                inside = inside & (units != NO_UNIT)
                selection.add(units[inside], lines[inside])
        chosen = selection.rows()
        if chosen is not None:
            yield chosen


def codes_of(chosen: Mapping[str, Column], read: Read, rows: int) -> Made:
    """The rows that no column leaves out, and the place of each cell among the labels of its column."""
    codes = np.stack([column.codes(*read[name]) for name, column in chosen.items()], axis=1)
    return np.all(codes != OUT, axis=1), codes


def cell_of(chosen: Mapping[str, Column], read: Read, rows: int) -> Made:
    """The rows that no column leaves out, and the cell of each row in the table of all columns, in row-major order."""
    inside, cell = np.ones(rows, dtype=bool), np.zeros(rows, dtype=np.int64)
    for name, column in chosen.items():
        codes = column.codes(*read[name])
        inside &= codes != OUT
        cell = cell * len(column.labels) + codes
    return inside, cell


def _read(column: Column, given: Cells) -> tuple[States, Array]:
    states, places = column.read(given.values)
    return (states, places) if given.places is None else (states[given.places], places[given.places])
