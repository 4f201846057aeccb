"""Units of several records: a person with all their rows, a site with all its patients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from matrixdp.errors import InvalidInput
from matrixdp.queries.units import NO_UNIT, Numbering, Selection, checked_contributions, listed
from matrixdp.secure.entropy import Key


class Units:
    """Which records count for which unit: at most `contributions` per unit, chosen in secret (`queries.units`).

    Guarantee: batches are drawn by units, so a unit takes part with all its records that count, or with none. Leaving
    out one unit removes at most `contributions` records from a batch, each within the clip; so the sum of gradients
    changes by at most `contributions` times what one record changes.

    Units are numbered by the first position of their id in the data, whichever records count. So with the same data and
    ids, a unit has the same number in every process, and takes part at its own steps alone.

    Args:
        ids: the unit of each record; records without an id do not count.
        contributions: the most records of a unit that count.
        records: how many records there are.
    """

    def __init__(self, ids: Sequence[Any] | Tensor, contributions: int, records: int) -> None:
        places = listed(ids)
        if len(places) != records:
            raise InvalidInput("ids must be a sequence with one id per record of the data, in the same order")
        self.numbers = Numbering().numbers(places)
        self.contributions = contributions
        self.choose(Key())

    def choose(self, key: Key) -> None:
        """Draws which records count; the same key gives the same records."""
        known, selection = np.flatnonzero(self.numbers != NO_UNIT), Selection(self.contributions, key)
        selection.add(self.numbers[known], known)
        found = selection.rows()
        rows = np.sort(known if found is None else found)
        owners = self.numbers[rows]
        order = np.argsort(owners, kind="stable")
        starts = np.flatnonzero(np.diff(owners[order], prepend=-1))
        self._rows = [part.tolist() for part in np.split(rows[order], starts[1:])] if len(rows) else []

    @classmethod
    def of(cls, ids: Sequence[Any] | Tensor | None, contributions: int, records: int) -> Units | None:
        """The units of these ids; None if every record is its own unit."""
        if ids is not None:
            return cls(ids, checked_contributions(contributions), records)
        if contributions != 1:
            raise InvalidInput("contributions are those of a unit: give ids=, one per record, or leave both out")
        return None

    @property
    def remark(self) -> str:
        """For the certificate: neighbours differ in one unit, not in one record."""
        return f"a record stands for a unit: all records of one id, of which {self.contributions} count"

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, units: Sequence[int]) -> list[int]:
        """The records that count for these units."""
        return [row for unit in units for row in self._rows[unit]]


class UnitSampler(Sampler[list[int]]):
    """Batches of records, from a sampler of units."""

    def __init__(self, units: Units, sampler: Sampler[list[int]]) -> None:
        self._units, self._sampler = units, sampler

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._units.rows, self._sampler)
