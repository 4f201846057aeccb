"""The result of a query, for `release`: a private value, and what a neighbour can change in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeVar

from matrixdp._check import Array, Shape
from matrixdp.privacy.records import QUERIES
from matrixdp.sensitivity import Sensitivity

C = TypeVar("C", bound=Callable[..., Sensitivity])


class _Pair(NamedTuple):
    value: Array
    sensitivity: Sensitivity


class Answer(_Pair):
    """A query's true value, still private, and its sensitivity set; `release(*answer, budget)` adds the noise.

    `query` has the query's name and public parameters; `release(..., query=answer.query)` puts them into the
    certificate, and verifying it computes the set from them again. Printing an answer shows the value's shape and the
    set, never the value.

    Example:
        >>> from matrixdp import Budget, queries, release
        >>> answer = queries.sum([[1.0, 2.0], [3.0, 4.0]], low=0, high=5)
        >>> answer
        Answer(value: private, shape (2,); add/remove: every entry may change, each by at most 5)
        >>> release(*answer, Budget(1.0, 1e-6), query=answer.query).value.shape
        (2,)
    """

    query: Mapping[str, Any] | None

    def __new__(cls, value: Any, sensitivity: Sensitivity, query: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """The pair of value and set; `query` and the attributes of a subclass (`more`) are stored beside it."""
        answer = super().__new__(cls, value, sensitivity)
        answer.__dict__.update(more, query=query)
        return answer

    @classmethod
    def of(cls, value: Any, query: Mapping[str, Any], **more: Any) -> Self:
        """The answer to a registered query, with its set computed as verifying does; `more` are other attributes."""
        return cls(value, QUERIES[query["name"]](query["parameters"], value.shape), query, **more)

    @property
    def shape(self) -> Shape:
        """The shape of the value, which is public."""
        return tuple(self.value.shape)

    def __repr__(self) -> str:
        return f"Answer(value: private, shape {self.value.shape}; {self.sensitivity.adjacency}: {self.sensitivity})"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        # rich would otherwise print the fields of a named tuple one by one
        yield "shape", self.value.shape
        yield "sensitivity", str(self.sensitivity)
        yield "adjacency", str(self.sensitivity.adjacency)


def query(name: str, **parameters: Any) -> dict[str, Any]:
    """A query's name and its public parameters, without those that are None."""
    return {"name": name, "parameters": {key: value for key, value in parameters.items() if value is not None}}


def with_columns(asked: Mapping[str, Any] | None, columns: Any) -> dict[str, Any]:
    """The query as asked, with the columns that were selected before it ran."""
    assert asked is not None
    return query(asked["name"], **{**asked["parameters"], "columns": columns})


def changes(name: str) -> Callable[[C], C]:
    """Registers the function that computes a query's set from the shape of its value and its public parameters."""

    def register(change: C) -> C:
        knows_units = "contributions" in inspect.signature(change).parameters

        def from_parameters(parameters: Mapping[str, Any], shape: Shape) -> Sensitivity:
            if knows_units or "contributions" not in parameters:
                return change(shape, **parameters)
            from matrixdp.queries.units import several

            one = {key: value for key, value in parameters.items() if key not in ("unit", "contributions")}
            return several(change(shape, **one), parameters["contributions"])

        QUERIES[name] = from_parameters
        return change

    return register
