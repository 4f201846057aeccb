"""The interface of sensitivity sets, and the sets for which the arrangement of the entries does not matter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, checked, takes_relation
from matrixdp.errors import InvalidInput, NotCertifiable


class Sensitivity(ABC):
    """A set of differences between the query's values on neighbouring data sets."""

    adjacency: str
    """Which data sets are neighbours."""

    @property
    def relation(self) -> str:
        """Another name of `adjacency`."""
        return self.adjacency

    @abstractmethod
    def fits(self, shape: Shape) -> None:
        """Raises InvalidInput unless the set makes sense for values of this shape."""

    @abstractmethod
    def frobenius_radius(self, shape: Shape) -> float:
        """The largest Frobenius norm in the set: the l2 sensitivity."""

    @abstractmethod
    def largest_entry(self, shape: Shape) -> float:
        """The largest change of a single entry."""

    @abstractmethod
    def changed_entries(self, shape: Shape) -> int:
        """The most entries that a neighbour can change at once."""

    @abstractmethod
    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether a difference lies in the set, up to a relative tolerance."""

    @abstractmethod
    def describe(self) -> str:
        """One human-readable line."""

    def matrix_shape(self, shape: Shape) -> Shape:
        """The shape as which a value is read, entries in order: unchanged for vectors and matrices."""
        return shape if len(shape) in (1, 2) else (shape[0], math.prod(shape[1:])) if shape else (1,)

    def read_as(self, shape: Shape, other: Shape) -> Sensitivity:
        """The same set for values of another shape, with the entries in the same order.

        Raises:
            NotCertifiable: if the set depends on how the entries are arranged, and the other shape is not
                `matrix_shape(shape)`.
        """
        if other != self.matrix_shape(shape):
            raise NotCertifiable(
                f"{type(self).__name__} reads values of shape {shape} as {self.matrix_shape(shape)}; the noise has "
                f"{other}"
            )
        return self

    def extent(self, shape: Shape) -> tuple[float, ...]:
        """A few numbers that measure the set, for a certificate; different sets may have the same ones."""
        return self.frobenius_radius(shape), self.largest_entry(shape), self.changed_entries(shape)

    def __str__(self) -> str:
        return self.describe()


class _AnyArrangement(Sensitivity):
    """A set that is the same for every shape with as many entries."""

    def fits(self, shape: Shape) -> None:
        """Any shape."""

    def read_as(self, shape: Shape, other: Shape) -> Sensitivity:
        return self


@takes_relation
@dataclass(frozen=True, eq=False)
class Frobenius(_AnyArrangement):
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
        object.__setattr__(self, "bound", checked_widths("bound", self.bound))
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
        return f"every entry may change, each by at most {span(self.bound)}"


@takes_relation
@dataclass(frozen=True, eq=False)
class Counts(_AnyArrangement):
    """At most `cells` entries change, each by at most `bound`: for a histogram 1 under add/remove, 2 under replace.

    Discrete noise takes the differences as exact, as those of counts are. For sums of fractions, which floats round,
    use Entrywise or L1, or a slightly larger bound.

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

    def frobenius_radius(self, shape: Shape) -> float:
        """If `cells` exceeds the number of entries, all of them may change."""
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
class L1(_AnyArrangement):
    """All differences with l1 norm at most the radius: sum |V_ij| <= radius.

    Attributes:
        radius: the largest l1 norm of a difference.
        bound: the largest change of one entry, the argument `largest_entry`; None for the radius.
        step: a power of two of which the query's values are whole multiples on every data set, such as 1 for counts;
            None for arbitrary values. Discrete noise is drawn on a grid. Arbitrary values are floored to it, which can
            lengthen the difference by up to two steps per entry, and so costs more noise.

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
        radius = _check.length("radius", radius)
        bound = None if largest_entry is None else _check.length("largest_entry", largest_entry)
        if step is not None:
            if math.frexp(_check.length("step", step))[0] != 0.5:
                raise InvalidInput(f"step must be a power of two, such as 1 for counts, got {_check.shown(step)}")
            step = float(step)
            for name, length in (("radius", radius), ("largest_entry", bound)):
                if length is not None and not ((length / step).is_integer() and length / step < 2.0**53):
                    raise InvalidInput(
                        f"{name} must be a whole multiple of step, {step:g}, and below 2^53 of it, got "
                        f"{_check.shown(length)}; differences are such multiples, so round it down"
                    )
        object.__setattr__(self, "radius", radius)
        object.__setattr__(self, "bound", bound)
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "adjacency", checked(adjacency))

    def frobenius_radius(self, shape: Shape) -> float:
        """The norm of `worst`: as many largest entries as the radius allows, and one entry with the rest."""
        largest, whole, rest = self.worst(shape)
        return math.hypot(math.sqrt(whole) * largest, rest)

    def worst(self, shape: Shape) -> tuple[float, int, float]:
        """The worst difference: its largest absolute entry, how many entries have it, and the size of one more, or 0.

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
        """All entries; with a step, at most as many as there are steps in the radius."""
        entries = math.prod(shape)
        return entries if self.step is None else min(entries, int(self.radius / self.step))

    def extent(self, shape: Shape) -> tuple[float, ...]:
        """As for every set, plus the radius and the step."""
        return *super().extent(shape), self.radius, self.step or 0.0

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        """Checks the sum and the largest entry, not whether entries are multiples of the step."""
        change = np.abs(_check.finite("difference", difference, ndim=None))
        with np.errstate(over="ignore"):
            total = float(np.sum(change))
        largest = self.largest_entry(change.shape)
        return bool(total <= self.radius * (1 + tolerance) and np.max(change) <= largest * (1 + tolerance))

    def describe(self) -> str:
        each = "" if self.bound is None else f", each by at most {self.bound:g}"
        grid = "" if self.step is None else f", in whole multiples of {self.step:g}"
        return f"entries change by at most {self.radius:g} in all{each}{grid}"


def checked_set(name: str, value: Any) -> Sensitivity:
    """The set; raises InvalidInput for anything else, such as a number."""
    if not isinstance(value, Sensitivity):
        raise InvalidInput(
            f"{name} must be a set from matrixdp.sensitivity, such as Counts(1), got {_check.kind(value)}"
        )
    return value


def checked_widths(name: str, value: Any) -> Any:
    """A positive number, or an array of numbers at least 0 that are not all 0."""
    if _check.array_of(name, value).ndim == 0:
        return _check.length(name, value)
    array = _check.finite(name, value, ndim=None)
    if not (np.all(array >= 0) and np.any(array > 0)):
        raise InvalidInput(f"{name} must be 0 or above everywhere and above 0 somewhere")
    _check.lengths(name, array[array > 0])
    array.flags.writeable = False
    return array


def span(values: Any) -> str:
    """The number, or the range of the numbers, as text."""
    low, high = float(np.min(values)), float(np.max(values))
    return f"{high:g}" if low == high else f"{low:g} to {high:g}"
