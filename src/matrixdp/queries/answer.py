"""What a query hands to `release`: a private value, and what a neighbour can change in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from matrixdp._check import Array
from matrixdp.sensitivity import Sensitivity


class Answer(NamedTuple):
    """A query's true value, still private, and its sensitivity set; `release(*answer, budget)` adds the noise.

    Printing an answer shows the value's shape and the set, never the value.
    """

    value: Array
    sensitivity: Sensitivity

    def __repr__(self) -> str:
        return f"Answer(value: private, shape {self.value.shape}; {self.sensitivity.relation}: {self.sensitivity})"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        # rich would otherwise print the fields of a named tuple one by one
        yield "shape", self.value.shape
        yield "sensitivity", str(self.sensitivity)
        yield "relation", self.sensitivity.relation
