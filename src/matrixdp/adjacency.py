"""Which data sets are neighbours: what a guarantee compares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

from matrixdp import _check
from matrixdp.errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])


class Adjacency(StrEnum):
    """How two neighbouring data sets differ. Guarantees for different adjacencies do not add up.

    Example:
        >>> from matrixdp import REPLACE, Counts
        >>> Counts(2, adjacency=REPLACE).adjacency == "replace"
        True
    """

    ADD_REMOVE = "add/remove"
    """One record is added or removed."""

    REPLACE = "replace"
    """One record is replaced by another; the number of records is public."""

    ZERO_OUT = "zero-out"
    """The contribution of one record is zero; its place, and the number and order of the records, are public."""

    @property
    def neighbours(self) -> str:
        """How two neighbours differ, in words."""
        return {
            Adjacency.ADD_REMOVE: "one record added or removed",
            Adjacency.REPLACE: "one record replaced",
            Adjacency.ZERO_OUT: "one record zeroed out",
        }[self]


ADD_REMOVE, REPLACE, ZERO_OUT = Adjacency


def checked(value: Any, name: str = "adjacency") -> Adjacency:
    """An Adjacency, from itself or from its name, such as "add/remove"."""
    return Adjacency(_check.choice(name, value, tuple(Adjacency)))


def takes_relation(callee: F) -> F:
    """Lets a function or class take `relation=`, the argument's earlier name, in place of `adjacency=`."""
    function: Callable[..., Any] = callee.__init__ if isinstance(callee, type) else callee  # type: ignore[misc]

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "relation" in kwargs:
            if "adjacency" in kwargs:
                raise InvalidInput("adjacency and relation are two names of one argument; give adjacency alone")
            kwargs["adjacency"] = kwargs.pop("relation")
        return function(*args, **kwargs)

    if isinstance(callee, type):
        callee.__init__ = renamed  # type: ignore[misc]
        return callee
    return renamed  # type: ignore[return-value]
