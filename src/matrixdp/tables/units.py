"""The unit of privacy: whose rows a guarantee covers, and how many of them count.

A unit is everybody with the same id. At most `contributions` rows of a unit count; which, is drawn at random in secret,
each choice of rows alike. Other units' rows have no part in that draw. Rows without an id do not count: taken as units
of their own, they could be many rows of one person.

Guarantee: let D' be D without all rows of one unit. Couple the draws of both so that every other unit keeps the same
rows. Then the rows that count differ by at most `contributions` rows, all of that unit. A release that is
(epsilon, delta)-differentially private for such a difference is so for D and D', since the hockey-stick divergence is
jointly convex and the draw is independent of the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.secure.entropy import Key
from matrixdp.tables import cells
from matrixdp.tables.cells import Gap
from matrixdp.tables.sources import Cells

Ids = npt.NDArray[np.int64]

NO_UNIT = -1
"""The id of rows that are left out for want of one."""

# Rows that are kept before those that cannot count are dropped.
KEPT = 1 << 22
MOST_CONTRIBUTIONS = 1 << 20


class Numbering:
    """Numbers for the ids of units, as they come: equal texts, with no space around them, are one unit."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def numbers(self, column: Cells) -> Ids:
        """The number of each row's unit, or NO_UNIT."""
        found = np.empty(len(column.values), dtype=np.int64)
        for place, cell in enumerate(column.values):
            text = cells.text_of(cell)
            found[place] = NO_UNIT if isinstance(text, Gap) else self._known.setdefault(text, len(self._known))
        return found if column.places is None else found[column.places]


class Selection:
    """At most so many rows of each unit, drawn in secret; memory is that of the rows that can still count."""

    def __init__(self, contributions: int) -> None:
        self._contributions = contributions
        self._stream, self._block = Key().stream(), 0
        self._parts: list[tuple[Ids, npt.NDArray[np.uint64], npt.NDArray[Any]]] = []
        self._rows = 0

    def add(self, units: Ids, rows: npt.NDArray[Any]) -> None:
        """Takes rows, the first axis, of these units."""
        if not len(units):
            return
        ranks = np.empty(len(units), dtype=np.uint64)
        self._stream.fill(ranks, self._block)
        self._block += 1
        self._parts.append((units, ranks, rows))
        self._rows += len(units)
        if self._rows > KEPT:
            self._keep()

    def rows(self) -> npt.NDArray[Any] | None:
        """The rows that count, in no order that means anything; None if no row was taken."""
        self._keep()
        return self._parts[0][2] if self._parts else None

    def _keep(self) -> None:
        """The rows with the least ranks of each unit: a uniform choice, as ranks are independent and uniform."""
        if not self._parts:
            return
        units, ranks, rows = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        order = np.lexsort((ranks, units))
        units = units[order]
        starts = np.flatnonzero(np.r_[True, units[1:] != units[:-1]])
        place_in_unit = np.arange(len(units)) - np.repeat(starts, np.diff(np.r_[starts, len(units)]))
        kept = order[place_in_unit < self._contributions]
        self._parts = [(units[place_in_unit < self._contributions], ranks[kept], rows[kept])]
        self._rows = len(kept)


def bounded(records: npt.ArrayLike, ids: Sequence[Any], contributions: int) -> npt.NDArray[Any]:
    """At most so many records of each unit, for queries on records that have ids.

    Args:
        records: an array, one record per row.
        ids: whose each record is; records without one are left out.
        contributions: how many records of a unit count.

    Guarantee: without all records of one unit, the result differs by at most `contributions` records. So the set of a
        query on the result must be that of so many records: `contributions` times that of one, for a convex set. The
        number of records that are left is as private as they are.
    """
    rows = _check.array_of("records", records)
    most = checked_contributions(contributions)
    if rows.ndim == 0 or len(rows) != len(ids):
        raise InvalidInput(f"ids must be as many as the records, got {len(ids)} for {_check.kind(rows)}")
    units = Numbering().numbers(Cells(list(ids)))
    selection = Selection(most)
    selection.add(units[units != NO_UNIT], rows[units != NO_UNIT])
    found = selection.rows()
    return rows[:0] if found is None else found


def checked_contributions(contributions: Any) -> int:
    """How many rows of a unit count, if that can be."""
    most = _check.count("contributions", contributions)
    if not most <= MOST_CONTRIBUTIONS:
        raise InvalidInput(f"contributions must be at most {MOST_CONTRIBUTIONS}, got {most}")
    return most
