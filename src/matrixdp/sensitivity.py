"""What a neighbour can change: the sets of differences V = f(X) - f(X') that a query allows.

A set carries the adjacency that it was derived for. All sets are symmetric (V and -V together) and contain every
shorter multiple of their members, so only their extreme points matter.

Values may have any number of dimensions. Frobenius, Entrywise, Counts and Vertices are about their entries, wherever
they lie. OneRow reads a value as a matrix of its first axis by all others, OneColumn as all others by its last axis.
RankOne is for square matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp._sensitivity import Sensitivity as Sensitivity
from matrixdp.adjacency import ADD_REMOVE, REPLACE, ZERO_OUT, checked, takes_relation
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.participation import Participation as Participation


@takes_relation
@dataclass(frozen=True, eq=False)
class Frobenius(Sensitivity):
    """All differences with Frobenius norm at most the radius.

    Example:
        >>> from matrixdp import Frobenius
        >>> Frobenius(2.0).contains([[1.0, 1.0], [1.0, 1.0]])
        True
    """

    radius: float
    adjacency: str = ADD_REMOVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", _check.length("radius", self.radius))
        object.__setattr__(self, "adjacency", checked(self.adjacency))

    def fits(self, shape: Shape) -> None:
        """Any shape."""

    def frobenius_radius(self, shape: Shape) -> float:
        return self.radius

    def largest_entry(self, shape: Shape) -> float:
        return self.radius

    def changed_entries(self, shape: Shape) -> int:
        return math.prod(shape)

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        with np.errstate(over="ignore"):  # a norm that overflows is too large
            size = _check.norm(_check.finite("difference", difference, ndim=None))
        return bool(size <= self.radius * (1 + tolerance))

    def describe(self) -> str:
        return f"any change of Frobenius norm at most {self.radius:g}"


@takes_relation
@dataclass(frozen=True, eq=False)
class Entrywise(Sensitivity):
    """All differences with |V_ij| <= bound_ij; the bound is one number or an array of the value's shape.

    Example:
        >>> from matrixdp import Entrywise
        >>> Entrywise([3.0, 4.0]).frobenius_radius((2,))
        5.0
    """

    bound: Any
    adjacency: str = ADD_REMOVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", _widths("bound", self.bound))
        object.__setattr__(self, "adjacency", checked(self.adjacency))

    def fits(self, shape: Shape) -> None:
        """The bound is a number or has the value's shape."""
        self.bounds(shape)

    def bounds(self, shape: Shape) -> Array:
        """The bound of every entry, as an array of this shape."""
        return _check.broadcast("bound", self.bound, shape)

    def read_as(self, shape: Shape, other: Shape) -> Sensitivity:
        return self if np.ndim(self.bound) == 0 else Entrywise(np.reshape(self.bound, other), self.adjacency)

    def frobenius_radius(self, shape: Shape) -> float:
        return _check.norm(self.bounds(shape))

    def largest_entry(self, shape: Shape) -> float:
        return float(np.max(self.bounds(shape)))

    def changed_entries(self, shape: Shape) -> int:
        return int(np.count_nonzero(self.bounds(shape)))

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        change = np.abs(_check.finite("difference", difference, ndim=None))
        return bool(np.all(change <= self.bounds(change.shape) * (1 + tolerance)))

    def describe(self) -> str:
        return f"every entry may change, each by at most {_span(self.bound)}"


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
        """Two dimensions or more, and lines as long as the box has entries."""
        if len(shape) < 2:
            raise InvalidInput(f"{type(self).__name__} needs a value with rows and columns, got shape {shape}")
        if self.width is not None:
            self.widths(shape)

    def widths(self, shape: Shape) -> Array:
        """How far each entry of the changed line may move (box form)."""
        return _check.broadcast("high - low", self.width, (self.matrix_shape(shape)[1 - self.axis],))

    def read_as(self, shape: Shape, other: Shape) -> Sensitivity:
        if other != self.matrix_shape(shape):
            raise NotCertifiable(
                f"{type(self).__name__} reads values of shape {shape} as {self.matrix_shape(shape)}; the noise has "
                f"{other}"
            )
        return self

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
        return f"one {self.line} changes, each of its entries by at most {_span(self.width)}"


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
        """The last axis is that of the columns."""
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


@takes_relation
@dataclass(frozen=True, eq=False)
class Counts(Sensitivity):
    """At most `cells` entries change, each by at most `bound`: a histogram (1 to add or remove, 2 to replace).

    Example:
        >>> from matrixdp import Counts
        >>> round(Counts(2).frobenius_radius((10, 10)), 4)
        1.4142
    """

    cells: int
    bound: float = 1.0
    adjacency: str = ADD_REMOVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", _check.count("cells", self.cells))
        object.__setattr__(self, "bound", _check.length("bound", self.bound))
        object.__setattr__(self, "adjacency", checked(self.adjacency))

    def fits(self, shape: Shape) -> None:
        """Any shape; more cells than there are means all of them."""

    def frobenius_radius(self, shape: Shape) -> float:
        return self.bound * math.sqrt(min(self.cells, math.prod(shape)))

    def largest_entry(self, shape: Shape) -> float:
        return self.bound

    def changed_entries(self, shape: Shape) -> int:
        return min(self.cells, math.prod(shape))

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        change = np.abs(_check.finite("difference", difference, ndim=None))
        return bool(np.count_nonzero(change) <= self.cells and np.all(change <= self.bound * (1 + tolerance)))

    def describe(self) -> str:
        cells = "one cell changes" if self.cells == 1 else f"at most {self.cells} cells change"
        return f"{cells}, by at most {self.bound:g}" + (" each" if self.cells > 1 else "")


@takes_relation
@dataclass(frozen=True, eq=False, init=False)
class L1(Sensitivity):
    """All differences whose entries add up, in absolute value, to at most the radius: sum |V_ij| <= radius.

    Attributes:
        radius: the most that all entries together can change.
        bound: the most that one entry can change, the argument `largest_entry`; None for the radius.
        step: a power of two of which the query's values are whole multiples on every data set, such as 1 for counts;
            None for values that may be any numbers. Discrete noise is drawn on a grid: other values are floored to it,
            which can lengthen the difference by a step in every entry, and so costs more noise.

    Example:
        >>> from matrixdp import Budget, L1, calibrate
        >>> calibrate("laplace", shape=(4,), sensitivity=L1(3, step=1), budget=Budget(1.0, 0)).describe()
        'discrete Laplace, scale 3, on multiples of 1'
    """

    radius: float
    bound: float | None
    step: float | None
    adjacency: str

    def __init__(
        self,
        radius: float,
        largest_entry: float | None = None,
        adjacency: str = ADD_REMOVE,
        *,
        step: float | None = None,
    ) -> None:
        found = {"radius": _check.length("radius", radius)}
        if largest_entry is not None:
            found["bound"] = _check.length("largest_entry", largest_entry)
        if step is not None:
            if math.frexp(_check.length("step", step))[0] != 0.5:
                raise InvalidInput(f"step must be a power of two, such as 1 for counts, got {_check.shown(step)}")
            for name, length in found.items():
                if not (length / step).is_integer() or not length / step < 2.0**53:
                    argument = "largest_entry" if name == "bound" else name
                    raise InvalidInput(
                        f"{argument} must be a whole multiple of step, {step:g}, and below 2^53 of it, got "
                        f"{_check.shown(length)}; differences are such multiples, so round it down"
                    )
            step = float(step)
        object.__setattr__(self, "radius", found["radius"])
        object.__setattr__(self, "bound", found.get("bound"))
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "adjacency", checked(adjacency))

    def fits(self, shape: Shape) -> None:
        """Any shape."""

    def frobenius_radius(self, shape: Shape) -> float:
        """The norm of as many entries of the largest size as the radius allows, and one of what is left."""
        largest, whole, rest = self.worst(shape)
        return math.hypot(math.sqrt(whole) * largest, rest)

    def worst(self, shape: Shape) -> tuple[float, int, float]:
        """The worst differences: the largest size of an entry, how many have it, and the size of one more, or 0.

        Every difference in the set, with its entries sorted by size, is majorised by this one.
        """
        largest, entries = self.largest_entry(shape), math.prod(shape)
        whole = int(Fraction(self.radius) // Fraction(largest))
        if whole >= entries:
            return largest, entries, 0.0
        left = Fraction(self.radius) - whole * Fraction(largest)
        rest = float(left)
        return largest, whole, rest if Fraction(rest) >= left else math.nextafter(rest, math.inf)

    def largest_entry(self, shape: Shape) -> float:
        return self.radius if self.bound is None else min(self.radius, self.bound)

    def changed_entries(self, shape: Shape) -> int:
        """All of them; at most so many as the radius has steps, if values are multiples of a step."""
        entries = math.prod(shape)
        return entries if self.step is None else min(entries, int(self.radius / self.step))

    def extent(self, shape: Shape) -> tuple[float, ...]:
        """As for every set, and the radius and the step."""
        return *super().extent(shape), self.radius, self.step or 0.0

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        """By the sum and the largest entry; whether it is a multiple of the step is not looked at."""
        change = np.abs(_check.finite("difference", difference, ndim=None))
        with np.errstate(over="ignore"):
            total = float(np.sum(change))
        largest = self.largest_entry(change.shape)
        return bool(total <= self.radius * (1 + tolerance) and np.max(change) <= largest * (1 + tolerance))

    def describe(self) -> str:
        each = "" if self.bound is None else f", each by at most {self.bound:g}"
        grid = "" if self.step is None else f", in whole multiples of {self.step:g}"
        return f"entries change by at most {self.radius:g} in all{each}{grid}"


@takes_relation
@dataclass(frozen=True, eq=False)
class RankOne(Sensitivity):
    """Second moments of records x with norm at most the radius; values are symmetric (x y^T needs Frobenius).

    Add/remove: V = x x^T or its negative. Replace: V = x x^T - y y^T, of Frobenius norm at most sqrt(2) radius^2.

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
        """Symmetric, with one eigenvalue of each sign at most (add/remove: one in all), each at most radius^2."""
        change = _check.finite("difference", difference)
        slack = tolerance * self.radius**2
        if not np.allclose(change, change.T, rtol=0, atol=slack):
            return False
        values = np.linalg.eigvalsh(change)
        up, down = int(np.sum(values > slack)), int(np.sum(values < -slack))
        few = up <= 1 and down <= 1 and (self.adjacency == REPLACE or up + down <= 1)
        return few and bool(np.max(np.abs(values)) <= self.radius**2 + slack)

    def describe(self) -> str:
        records = "x x^T" if self.adjacency == ADD_REMOVE else "x x^T - y y^T"
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
        """As for every set, and the norm of each vertex."""
        return *super().extent(shape), *(_check.norm(v) for v in self.differences)

    def largest_entry(self, shape: Shape) -> float:
        self.fits(shape)
        return max(float(np.max(np.abs(v))) for v in self.differences)

    def changed_entries(self, shape: Shape) -> int:
        """Those that any vertex changes, for a mixture can change them all."""
        return int(np.count_nonzero(np.any(np.stack(self.differences) != 0, axis=0)))

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        """The difference is a combination of the vertices whose weights have absolute sum at most 1."""
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


def _box(name: str, low: Any, high: Any, adjacency: str) -> Any:
    """How far a record inside a box can move when it is replaced, or when it becomes zero."""
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
        return _widths("max(|low|, |high|)", np.maximum(np.abs(ends[0]), np.abs(ends[1])))
    return _widths("high - low", ends[1] - ends[0])


def _widths(name: str, value: Any) -> Any:
    """A positive number, or an array of numbers at least 0 that are not all 0."""
    if _check.array_of(name, value).ndim == 0:
        return _check.length(name, value)
    array = _check.finite(name, value, ndim=None)
    if not (np.all(array >= 0) and np.any(array > 0)):
        raise InvalidInput(f"{name} must be 0 or above everywhere and above 0 somewhere")
    _check.lengths(name, array[array > 0])
    array.flags.writeable = False
    return array


def _span(values: Any) -> str:
    low, high = float(np.min(values)), float(np.max(values))
    return f"{high:g}" if low == high else f"{low:g} to {high:g}"
