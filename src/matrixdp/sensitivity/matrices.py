"""Sensitivity sets of matrices: one changed row or column, second moments, and listed differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, ZERO_OUT, checked, takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity.entries import Sensitivity, checked_widths, span


@takes_relation
@dataclass(frozen=True, eq=False, init=False)
class _OneLine(Sensitivity):
    """One record, stored as a line (row or column) of the value, changes: by norm, or inside a box."""

    radius: float | None
    width: Any
    adjacency: str

    axis: ClassVar[int]
    line: ClassVar[str]

    def __init__(
        self,
        *bounds: Any,
        radius: float | None = None,
        low: Any = None,
        high: Any = None,
        adjacency: str = REPLACE,
    ) -> None:
        name = type(self).__name__
        if len(bounds) == 1 and radius is None:
            (radius,) = bounds
        elif len(bounds) == 2 and low is None and high is None:
            low, high = bounds
        elif bounds:
            raise InvalidInput(f"{name} takes a radius, or low and high, got {len(bounds)} bounds")
        if (radius is None) == (low is None and high is None):
            raise InvalidInput(f"{name} needs either a radius, or low and high, and not both")
        object.__setattr__(self, "adjacency", checked(adjacency))
        object.__setattr__(self, "radius", None if radius is None else _check.length("radius", radius))
        object.__setattr__(self, "width", None if radius is not None else _box(name, low, high, self.adjacency))

    def fits(self, shape: Shape) -> None:
        """Needs two dimensions or more, and lines with as many entries as the box."""
        if len(shape) < 2:
            raise InvalidInput(f"{type(self).__name__} needs a value with rows and columns, got shape {shape}")
        if self.width is not None:
            self.widths(shape)

    def widths(self, shape: Shape) -> Array:
        """The largest change of each entry of the changed line (box form)."""
        return _check.broadcast("high - low", self.width, (self.matrix_shape(shape)[1 - self.axis],))

    def frobenius_radius(self, shape: Shape) -> float:
        self.fits(shape)
        return self.radius if self.radius is not None else _check.norm(self.widths(shape))

    def largest_entry(self, shape: Shape) -> float:
        self.fits(shape)
        return self.radius if self.radius is not None else float(np.max(self.widths(shape)))

    def changed_entries(self, shape: Shape) -> int:
        return self.matrix_shape(shape)[1 - self.axis]

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        change = _check.finite("difference", difference, ndim=None)
        change = change.reshape(self.matrix_shape(change.shape))
        lines = np.moveaxis(change, self.axis, 0)
        changed = lines[np.any(lines != 0, axis=1)]
        if len(changed) != 1:
            return len(changed) == 0
        if self.radius is not None:
            return bool(np.linalg.norm(changed) <= self.radius * (1 + tolerance))
        return bool(np.all(np.abs(changed[0]) <= self.widths(change.shape) * (1 + tolerance)))

    def describe(self) -> str:
        if self.radius is not None:
            return f"one {self.line} changes, by norm at most {self.radius:g}"
        return f"one {self.line} changes, each of its entries by at most {span(self.width)}"


class OneColumn(_OneLine):
    """One column changes: `OneColumn(radius)` by norm, or `OneColumn(low, high)` anywhere inside a box.

    Example:
        >>> from matrixdp import OneColumn
        >>> OneColumn([0.0, 0.0], [3.0, 4.0]).frobenius_radius((2, 100))
        5.0
    """

    axis = 1
    line = "column"

    def matrix_shape(self, shape: Shape) -> Shape:
        """The last axis counts the columns."""
        return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 2 else super().matrix_shape(shape)


class OneRow(_OneLine):
    """One row changes: `OneRow(radius)` by norm, or `OneRow(low, high)` anywhere inside a box.

    Example:
        >>> from matrixdp import OneRow
        >>> OneRow(1.0).adjacency
        <Adjacency.REPLACE: 'replace'>
    """

    axis = 0
    line = "row"


def _box(name: str, low: Any, high: Any, adjacency: str) -> Any:
    """The largest change of each entry when a record in a box is replaced, or becomes zero."""
    ends = []
    for side, value in (("low", low), ("high", high)):
        scalar = _check.array_of(side, value).ndim == 0
        ends.append(np.asarray(_check.number(side, value)) if scalar else _check.finite(side, value, ndim=1))
    if ends[0].ndim and ends[1].ndim and ends[0].shape != ends[1].shape:
        raise InvalidInput(f"low and high must have one shape, got {ends[0].shape} and {ends[1].shape}")
    if not np.all(ends[1] > ends[0]):
        raise InvalidInput("high must be above low in every entry")
    if adjacency == ADD_REMOVE:
        raise InvalidInput(
            f"{name}(low, high) is for replacing a record inside the box; a record that is added or removed changes "
            "more than the width of the box: give a radius instead"
        )
    if adjacency == ZERO_OUT:
        return checked_widths("max(|low|, |high|)", np.maximum(np.abs(ends[0]), np.abs(ends[1])))
    return checked_widths("high - low", ends[1] - ends[0])


@takes_relation
@dataclass(frozen=True, eq=False)
class RankOne(Sensitivity):
    """Second moments of records x with norm at most the radius; values are symmetric (x y^T needs Frobenius).

    Add/remove and zero-out: V = x x^T or its negative. Replace: V = x x^T - y y^T, of Frobenius norm at most
    sqrt(2) radius^2.

    Example:
        >>> from matrixdp import RankOne
        >>> RankOne(2.0).frobenius_radius((5, 5))
        4.0
    """

    radius: float
    adjacency: str = ADD_REMOVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", _check.length("radius", self.radius))
        object.__setattr__(self, "adjacency", checked(self.adjacency))

    def fits(self, shape: Shape) -> None:
        if len(shape) != 2 or shape[0] != shape[1]:
            raise InvalidInput(f"RankOne needs a square matrix, got shape {shape}; use Frobenius for other values")

    def frobenius_radius(self, shape: Shape) -> float:
        """The square of the radius, times sqrt(2) when two records can be orthogonal."""
        self.fits(shape)
        both = self.adjacency == REPLACE and shape[0] > 1
        return self.radius**2 * (math.sqrt(2) if both else 1.0)

    def largest_entry(self, shape: Shape) -> float:
        """The square of the radius, on the diagonal."""
        self.fits(shape)
        return self.radius**2

    def changed_entries(self, shape: Shape) -> int:
        return math.prod(shape)

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether it is symmetric, with at most one nonzero eigenvalue (replace: one per sign), up to radius^2."""
        change = _check.finite("difference", difference)
        slack = tolerance * self.radius**2
        if not np.allclose(change, change.T, rtol=0, atol=slack):
            return False
        values = np.linalg.eigvalsh(change)
        up, down = int(np.sum(values > slack)), int(np.sum(values < -slack))
        few = up <= 1 and down <= 1 and (self.adjacency == REPLACE or up + down <= 1)
        return few and bool(np.max(np.abs(values)) <= self.radius**2 + slack)

    def describe(self) -> str:
        records = "x x^T - y y^T" if self.adjacency == REPLACE else "x x^T"
        return f"{records}, with records of norm at most {self.radius:g}"


@takes_relation
@dataclass(frozen=True, eq=False, init=False)
class Vertices(Sensitivity):
    """The convex hull of the listed differences and their negatives.

    Example:
        >>> from matrixdp import Vertices
        >>> Vertices([[[1.0, 0.0]], [[0.0, 2.0]]]).frobenius_radius((1, 2))
        2.0
    """

    differences: tuple[Array, ...]
    adjacency: str

    def __init__(self, *differences: Any, adjacency: str = ADD_REMOVE) -> None:
        listed: Sequence[Any] = differences
        if len(differences) == 1 and (
            isinstance(differences[0], (list, tuple)) or getattr(differences[0], "ndim", 0) == 3
        ):
            listed = list(differences[0])
        if not listed:
            raise InvalidInput("Vertices needs at least one difference, got none")
        arrays = tuple(_check.finite(f"difference {i}", v, ndim=None) for i, v in enumerate(listed))
        for i, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise InvalidInput(f"difference {i} has shape {array.shape}, the first has {arrays[0].shape}")
        if not any(np.any(array) for array in arrays):
            raise InvalidInput("Vertices needs at least one difference that is not zero")
        for array in arrays:
            array.flags.writeable = False
            if np.any(array):
                _check.length("the norm of a difference", _check.norm(array))
        object.__setattr__(self, "differences", arrays)
        object.__setattr__(self, "adjacency", checked(adjacency))

    def fits(self, shape: Shape) -> None:
        if self.differences[0].shape != shape:
            raise InvalidInput(f"the vertices have shape {self.differences[0].shape}, the value has {shape}")

    def read_as(self, shape: Shape, other: Shape) -> Sensitivity:
        return Vertices([v.reshape(other) for v in self.differences], adjacency=self.adjacency)

    def frobenius_radius(self, shape: Shape) -> float:
        self.fits(shape)
        return max(_check.norm(v) for v in self.differences)

    def extent(self, shape: Shape) -> tuple[float, ...]:
        """As for every set, plus the norm of each vertex."""
        return *super().extent(shape), *(_check.norm(v) for v in self.differences)

    def largest_entry(self, shape: Shape) -> float:
        self.fits(shape)
        return max(float(np.max(np.abs(v))) for v in self.differences)

    def changed_entries(self, shape: Shape) -> int:
        """The entries that any vertex changes, since a convex combination can change all of them."""
        return int(np.count_nonzero(np.any(np.stack(self.differences) != 0, axis=0)))

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether it is a combination of the vertices with weights of absolute sum at most 1."""
        from scipy.optimize import linprog  # here, because it is slow to import and seldom needed

        vertices = np.stack([v.ravel() for v in self.differences], axis=1)
        found = linprog(
            np.ones(2 * vertices.shape[1]),
            A_eq=np.hstack([vertices, -vertices]),
            b_eq=_check.finite("difference", difference, ndim=None).ravel(),
        )
        return bool(found.success and np.sum(np.asarray(found.x)) <= 1 + tolerance)

    def describe(self) -> str:
        return f"the convex hull of {len(self.differences)} listed changes"
