"""Sources of rows: named columns, read batch by batch and never all at once.

No type is inferred from a cell, and no cell makes reading fail: text is read as text, dates of any range as days, and
the domain decides what an unknown value counts as. A source that cannot be read at all (a file that is not Parquet, a
damaged archive, a query that its database refuses) is an error that gives place and kind, never a cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from matrixdp.errors import InvalidInput

ROWS = 1 << 16
"""The number of rows in a batch."""


class Cells(NamedTuple):
    """A column of a batch: row i holds `values[places[i]]`, or `values[i]` where there are no places."""

    values: Sequence[Any] | npt.NDArray[Any]
    places: npt.NDArray[np.int64] | None = None

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return len(self.values if self.places is None else self.places)


Batch = list[Cells]


@runtime_checkable
class Source(Protocol):
    """Rows with named columns."""

    @property
    def names(self) -> Sequence[Any]:
        """The names of the columns, in order."""

    def batches(self, wanted: Sequence[int]) -> Iterator[Batch]:
        """The columns at these positions, some rows at a time."""


def positions(source: Source, wanted: Sequence[str]) -> list[int]:
    """Where the columns of these names are.

    Raises:
        InvalidInput: if one is absent or occurs twice. Names in the source are not shown: they may be cells.
    """
    names = list(source.names)
    for name in wanted:
        if names.count(name) != 1:
            state = "has no column" if name not in names else "has more than one column"
            raise InvalidInput(
                f"the source {state} {name!r} among its {len(names)}; names must be spelled as in the domain, "
                "and separated text needs a header, or columns="
            )
    return [names.index(name) for name in wanted]
