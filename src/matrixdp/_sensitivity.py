"""What every sensitivity set answers; the sets themselves are in `sensitivity`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy.typing as npt

from matrixdp._check import Shape


class Sensitivity(ABC):
    """A set of differences between the query's values on neighbouring datasets."""

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
        """The most that any single entry can change."""

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
        """A vector's or matrix's own shape; how values of another number of dimensions are read, entries in order."""
        return shape if len(shape) in (1, 2) else (shape[0], math.prod(shape[1:])) if shape else (1,)

    def read_as(self, shape: Shape, other: Shape) -> Sensitivity:
        """The same set, where values of one shape are read as those of another, entries in order."""
        return self

    def extent(self, shape: Shape) -> tuple[float, ...]:
        """The size of the set in a few numbers, for a certificate; any change of the set changes one of them."""
        return self.frobenius_radius(shape), self.largest_entry(shape), self.changed_entries(shape)

    def __str__(self) -> str:
        return self.describe()
