"""The arguments of a model: tensors with one row per record, positional or by keyword, however nested."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as trees

from matrixdp.errors import InvalidInput

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]


def as_tensors(inputs: Any) -> tuple[Any, ...] | dict[str, Any]:
    """The model's positional or keyword arguments, as plain tensors with equally many rows, however nested."""
    several = isinstance(inputs, dict) or (isinstance(inputs, tuple) and not hasattr(inputs, "_fields"))
    given = inputs if several else (inputs,)
    leaves = trees.tree_leaves(given)
    if not leaves or not all(isinstance(t, Tensor) and t.ndim > 0 for t in leaves):
        raise InvalidInput(
            f"inputs must be a tensor with one row per record, or a tuple or dictionary of them, got {type(inputs)}"
        )
    if len({t.shape[0] for t in leaves}) > 1:
        raise InvalidInput(f"inputs must have equally many rows, got {[t.shape[0] for t in leaves]}")
    found: tuple[Any, ...] | dict[str, Any] = trees.tree_map(lambda t: t.detach().as_subclass(Tensor), given)
    return found


def count_rows(arguments: Any) -> int:
    """How many records these arguments have."""
    return int(trees.tree_leaves(arguments)[0].shape[0])


def kinds_of(arguments: Any) -> list[Any]:
    """Shapes and types of the tensors of one record."""
    return [(t.shape[1:], t.dtype) for t in trees.tree_leaves(arguments)]
