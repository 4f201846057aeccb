"""Residuals of marginals: what is measured instead of the tables, and what one record can change in them.

Attributes i = 1, .., d have n_i values, and a record lies in one cell of their product, which is never formed. For a
set A of attributes let x_A be the marginal table of A. Its residual is r_A = (B_i for i in A) x_A, where the rows of
B_i sum to zero, so that it holds what the smaller tables do not determine. A marginal is a linear function of the
residuals of its subsets.

The B_i are whole numbers, so residuals of counts are too, and nothing is rounded before the noise is added. By default
B_i has the Helmert contrasts, row k = (1, .., 1, -k, 0, .., 0) of squared length k (k + 1). They are orthogonal, and in
units of their lengths B_i^T B_i becomes I - 1/n_i: no value of the attribute is preferred.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, checked
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import Sensitivity, Vertices

Whole = npt.NDArray[np.int64]

# Entries of contrasts, and the residuals of counts, stay below these.
LARGEST_CONTRAST, LARGEST_RESIDUAL = 2**20, 2**62
# The most pairs of cells, up to symmetry, that are examined one by one under replace.
MOST_PAIRS = 1 << 18
# The most cells of a domain whose differences are listed, to test whether one of them is among them.
MOST_LISTED = 1 << 12


@dataclass(frozen=True, eq=False)
class ResidualBasis:
    """Which residuals are measured, and by which contrasts.

    Attributes:
        sizes: n_i, the number of values of each attribute.
        subsets: one set of attributes per row, increasing, padded with -1.
        contrasts: B_i for each attribute, (n_i - 1) x n_i whole numbers; None for the Helmert contrasts. Empty if all
            attributes have these.
    """

    sizes: tuple[int, ...]
    subsets: Whole
    contrasts: tuple[Whole | None, ...] = ()
    length: int = field(init=False)
    """How many numbers all residuals have together."""

    def __post_init__(self) -> None:
        sizes = tuple(_check.count("each size", size) for size in self.sizes)
        if not sizes or min(sizes) < 2:
            raise InvalidInput(f"sizes must be 2 or above, one per attribute, got {len(sizes)} of them")
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "subsets", _subsets(self.subsets, len(sizes)))
        given = tuple(self.contrasts) or (None,) * len(sizes)
        if len(given) != len(sizes):
            raise InvalidInput(f"contrasts must have one entry per size ({len(sizes)}), got {len(given)}")
        whole = tuple(None if B is None else _contrasts(B, n) for B, n in zip(given, sizes, strict=True))
        object.__setattr__(self, "contrasts", whole)
        dimensions = self.products([n - 1.0 for n in sizes])
        if not np.sum(dimensions) < 2.0**53:
            raise InvalidInput(f"the residuals have {np.sum(dimensions):.3g} entries in all; ask for smaller tables")
        object.__setattr__(self, "length", int(np.sum(dimensions)))

    def products(self, factors: Sequence[float]) -> Array:
        """For every subset, the product of a factor per attribute."""
        return np.asarray(np.append(np.asarray(factors, dtype=np.float64), 1.0)[self.subsets].prod(axis=1))

    @cached_property
    def starts(self) -> Whole:
        """Where the residual of each subset begins in the vector of all residuals; the last entry is its length."""
        ends = np.cumsum(self.products([n - 1.0 for n in self.sizes]).astype(np.int64))
        return np.concatenate([np.zeros(1, dtype=np.int64), ends])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """The subsets, in order."""
        return (tuple(attribute for attribute in row if attribute >= 0) for row in self.subsets.tolist())

    def dimensions(self, subset: Sequence[int]) -> Shape:
        """The shape of a residual."""
        return tuple(self.sizes[i] - 1 for i in subset)

    def matrix(self, attribute: int) -> Whole:
        """B_i, the contrasts of an attribute."""
        given = self.contrasts[attribute]
        return helmert(self.sizes[attribute]) if given is None else given

    def units(self, attribute: int) -> Array:
        """The unit of each contrast, in which noise and differences are measured: its length, or 1 if it was given."""
        n = self.sizes[attribute]
        k = np.arange(1.0, n)
        return np.sqrt(k * (k + 1)) if self.contrasts[attribute] is None else np.ones(n - 1)

    def kernel(self, attribute: int) -> Array:
        """B_i^T B_i in these units: inner products of what two values of the attribute contribute."""
        given, n = self.contrasts[attribute], self.sizes[attribute]
        return np.eye(n) - 1 / n if given is None else (given.T @ given).astype(np.float64)

    def inverse(self, attribute: int) -> Array:
        """The matrix that recovers a vector of sum zero from its contrasts."""
        matrix = self.matrix(attribute).astype(np.float64)
        if self.contrasts[attribute] is None:
            return matrix.T / self.units(attribute) ** 2
        return np.asarray(np.linalg.pinv(matrix))

    def spread(self, attribute: int) -> Array:
        """The variance that each value of the attribute gets from contrasts with noise of one unit each."""
        n = self.sizes[attribute]
        if self.contrasts[attribute] is None:
            return np.full(n, 1 - 1 / n)
        return np.asarray(np.sum(self.inverse(attribute) ** 2, axis=1))

    def residual(self, subset: Sequence[int], counts: Whole) -> Whole:
        """r_A of the marginal table of A; exact.

        Raises:
            InvalidInput: if the counts are so large that 64-bit integers may not hold it.
        """
        values = counts
        reach = float(np.sum(np.abs(counts), dtype=np.float64))
        for i in subset:
            reach *= float(np.max(np.abs(self.matrix(i))))
        if not reach < LARGEST_RESIDUAL:
            raise InvalidInput("counts are too large for exact residuals; check that they are counts")
        for axis, i in enumerate(subset):
            values = np.moveaxis(np.tensordot(self.matrix(i), values, axes=(1, axis)), 0, axis)
        return values

    def is_like(self, other: ResidualBasis) -> bool:
        """Whether the other basis measures the same residuals in the same order."""
        return (
            self.sizes == other.sizes
            and np.array_equal(self.subsets, other.subsets)
            and all(np.array_equal(self.matrix(i), other.matrix(i)) for i in self._given | other._given)
        )

    @cached_property
    def _given(self) -> set[int]:
        return {i for i, B in enumerate(self.contrasts) if B is not None}


def helmert(n: int) -> Whole:
    """The n - 1 Helmert contrasts of n values, as whole numbers."""
    k = np.arange(1, n)[:, None]
    place = np.arange(n)[None, :]
    return np.where(place < k, 1, np.where(place == k, -k, 0)).astype(np.int64)


def _subsets(subsets: Any, attributes: int) -> Whole:
    given = np.asarray(subsets)
    if given.ndim != 2 or given.dtype.kind not in "iuf" or not len(given) or np.any(given != np.round(given)):
        raise InvalidInput("subsets must be a table of whole numbers, one set of attributes per row")
    rows = np.array(given, dtype=np.int64)
    left, right = rows[:, :-1], rows[:, 1:]
    if not (np.all((rows >= -1) & (rows < attributes)) and np.all((right == -1) | ((left < right) & (left >= 0)))):
        raise InvalidInput(f"each subset must hold attributes from 0 to {attributes - 1}, increasing, then only -1")
    if len(np.unique(keys(rows, attributes))) != len(rows):
        raise InvalidInput("subsets must differ from each other")
    rows.flags.writeable = False
    return rows


def keys(subsets: Whole, attributes: int) -> Whole:
    """A distinct number for each set of attributes."""
    width = subsets.shape[1]
    if attributes <= 62:
        bits = np.append(np.int64(1) << np.arange(attributes, dtype=np.int64), 0)
        return np.asarray(np.sum(bits[subsets], axis=1, dtype=np.int64))
    if not (attributes + 1) ** width < 2**62:
        raise InvalidInput(f"there are too many tables over {width} of {attributes} attributes; use fewer attributes")
    return np.asarray((subsets + 1) @ (attributes + 1) ** np.arange(width, dtype=np.int64))


def _contrasts(matrix: Any, n: int) -> Whole:
    given = _check.finite("contrasts", matrix, ndim=2)
    if given.shape != (n - 1, n) or np.any(given != np.round(given)) or np.any(np.abs(given) > LARGEST_CONTRAST):
        raise InvalidInput(
            f"contrasts of {n} values must be {n - 1} x {n} whole numbers of at most {LARGEST_CONTRAST}, got shape "
            f"{given.shape}"
        )
    if np.any(np.sum(given, axis=1) != 0) or np.linalg.matrix_rank(given) < n - 1:
        raise InvalidInput("contrasts must be linearly independent, and each must sum to zero")
    whole = given.astype(np.int64)
    whole.flags.writeable = False
    return whole


# --- what a record can change ---


@dataclass(frozen=True)
class Worst:
    """The longest difference of residuals.

    Attributes:
        square: its squared length, or a bound on it.
        exact: whether the length is attained.
        cells: the cell of the record, and under replace that of the other record; for a bound, two cells far apart.
    """

    square: float
    exact: bool
    cells: tuple[tuple[int, ...], ...]


def worst(basis: ResidualBasis, kernels: Sequence[Array], weights: Array, adjacency: str) -> Worst:
    """The longest difference when the squared length of the residual of A has the weight weights[A].

    Let K_i be the kernels. A record in cell a gives |x_a|^2 = sum_A weights[A] prod_{i in A} K_i(a_i, a_i), a sum of
    products of terms at least 0. Each attribute can be maximized by itself, since attributes vary independently, so the
    bound is attained. k records in the same cell have k times the length, and by the triangle inequality no k records
    have more.

    Under replace |x_a - x_b|^2 = sum_A weights[A] (q_A(a) + q_A(b) - 2 c_A(a, b)), products of the diagonals and of
    K_i(a_i, b_i). An attribute matters only through its triple (K(a, a), K(b, b), K(a, b)); a kernel I - 1/n has two of
    these: values equal, or not. All combinations of triples are examined if they are few. Otherwise each A is bounded
    by itself: q_A by its largest value, c_A by the smallest product of numbers from the ranges of K_i.
    """
    diagonals = [np.diag(kernel) for kernel in kernels]
    largest = basis.products([float(np.max(diagonal)) for diagonal in diagonals])
    if adjacency == ADD_REMOVE:
        cell = tuple(int(np.argmax(diagonal)) for diagonal in diagonals)
        return Worst(float(np.sum(weights * largest)), True, (cell,))
    kinds = [triples(kernel) for kernel in kernels]
    if math.prod(len(places) for _, places in kinds) <= MOST_PAIRS and 2 ** len(kernels) <= MOST_PAIRS:
        tensor = np.zeros((2,) * len(kernels))
        for row, weight in zip(basis, weights.tolist(), strict=True):
            tensor[tuple(int(i in row) for i in range(len(kernels)))] += weight
        first, second, both = (_summed(tensor, [values[:, j] for values, _ in kinds]) for j in range(3))
        squares = first + second - 2 * both
        at = np.unravel_index(int(np.argmax(squares)), squares.shape)
        pairs = [places[int(index)] for (_, places), index in zip(kinds, at, strict=True)]
        cells = tuple(int(a) for a, _ in pairs), tuple(int(b) for _, b in pairs)
        return Worst(float(squares[at]) + 1e-12 * float(np.sum(weights * largest)), True, cells)
    nonempty = np.any(basis.subsets >= 0, axis=1)
    apart = (0,) * len(kernels), (1,) * len(kernels)
    return Worst(float(np.sum((weights * separations(basis, kernels))[nonempty])), False, apart)


def separations(basis: ResidualBasis, kernels: Sequence[Array]) -> Array:
    """For every subset A, a bound on q_A(a) + q_A(b) - 2 c_A(a, b), by interval arithmetic, one factor at a time."""
    low, high = (np.append([float(pick(kernel)) for kernel in kernels], 1.0) for pick in (np.min, np.max))
    least, most = np.ones(len(basis.subsets)), np.ones(len(basis.subsets))
    for column in basis.subsets.T:
        corners = [least * low[column], least * high[column], most * low[column], most * high[column]]
        padded = column < 0
        least = np.where(padded, least, np.minimum.reduce(corners))
        most = np.where(padded, most, np.maximum.reduce(corners))
    return 2 * (basis.products([float(np.max(np.diag(kernel))) for kernel in kernels]) - least)


def triples(kernel: Array) -> tuple[Array, Whole]:
    """The distinct triples (K(a, a), K(b, b), K(a, b)), and one pair of values for each."""
    first, second = np.indices(kernel.shape).reshape(2, -1)
    found = np.stack([kernel[first, first], kernel[second, second], kernel[first, second]], axis=1)
    values, places = np.unique(found, axis=0, return_index=True)
    return values, np.stack([first, second], axis=1)[places]


def _summed(weights: Array, values: Sequence[Array]) -> Array:
    """sum_A weights[A] prod_{i in A} values_i[t_i], for all t at once: one axis after the other."""
    for axis, value in enumerate(values):
        weights = np.moveaxis(np.tensordot(np.stack([np.ones(len(value)), value], axis=1), weights, (1, axis)), 0, axis)
    return weights


@dataclass(frozen=True, eq=False)
class Residuals(Sensitivity):
    """The residuals of marginals, when a record is added, removed or replaced.

    Attributes:
        basis: which residuals.
        records: how many records of one person are added or removed at once; they may fall into one cell.
        adjacency: add/remove; or replace, with one record per person.
    """

    basis: ResidualBasis
    records: int = 1
    adjacency: str = ADD_REMOVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", _check.count("records", self.records))
        object.__setattr__(self, "adjacency", checked(self.adjacency))
        if self.adjacency not in (ADD_REMOVE, REPLACE):
            raise InvalidInput(f"adjacency must be add/remove or replace for marginals, got {self.adjacency}")
        if self.adjacency == REPLACE and self.records > 1:
            raise InvalidInput("several records per person are added or removed: use add/remove, or records=1")

    @cached_property
    def longest(self) -> Worst:
        """The longest difference that one record makes."""
        kernels = [(matrix.T @ matrix).astype(np.float64) for matrix in map(self.basis.matrix, self._attributes)]
        return worst(self.basis, kernels, np.ones(len(self.basis.subsets)), self.adjacency)

    @property
    def _attributes(self) -> range:
        return range(len(self.basis.sizes))

    def fits(self, shape: Shape) -> None:
        """Raises InvalidInput unless the shape is that of the vector of all residuals."""
        if shape != (self.basis.length,):
            raise InvalidInput(f"the residuals are a vector of {self.basis.length} numbers, got shape {shape}")

    def frobenius_radius(self, shape: Shape) -> float:
        """The length of the longest difference, or a bound on it under replace with many columns."""
        return self.records * math.sqrt(self.longest.square)

    def largest_entry(self, shape: Shape) -> float:
        """At most the largest product of contrasts; under replace twice that."""
        entries = self.basis.products([float(np.max(np.abs(self.basis.matrix(i)))) for i in self._attributes])
        return self.records * float(np.max(entries)) * (2 if self.adjacency == REPLACE else 1)

    def changed_entries(self, shape: Shape) -> int:
        """All entries: residuals are dense."""
        return self.basis.length

    def extent(self, shape: Shape) -> tuple[float, ...]:
        """As for every set, and the sizes of attributes and subsets."""
        return *super().extent(shape), *self.basis.sizes, len(self.basis.subsets)

    def difference(self, cell: Sequence[int], other: Sequence[int] | None = None) -> Array:
        """The change if a person's records are added in one cell or, under replace, one moves there from another."""

        def of(place: Sequence[int]) -> Array:
            columns = [self.basis.matrix(i)[:, value].astype(np.float64) for i, value in enumerate(place)]
            parts = (reduce(np.multiply.outer, [columns[i] for i in row], np.ones(())).ravel() for row in self.basis)
            return np.concatenate(list(parts))

        return self.records * (of(cell) if other is None else of(cell) - of(other))

    def contains(self, difference: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
        """Whether the difference is a mixture of those of single cells; only for small domains."""
        if not math.prod(self.basis.sizes) ** (2 if self.adjacency == REPLACE else 1) <= MOST_LISTED:
            raise InvalidInput(f"contains() lists the domain, and is for at most {MOST_LISTED} cells or pairs of cells")
        cells = list(np.ndindex(*self.basis.sizes))
        if self.adjacency == REPLACE:
            listed = [self.difference(a, b) for a in cells for b in cells if a < b]
        else:
            listed = [self.difference(cell) for cell in cells]
        return Vertices(*listed).contains(difference, tolerance)

    def describe(self) -> str:
        """One human-readable line."""
        sizes = self.basis.sizes
        domain = " x ".join(map(str, sizes)) if len(sizes) <= 6 else f"{len(sizes)} attributes"
        who = "one record" if self.records == 1 else f"at most {self.records} records, which may coincide,"
        how = "replaced" if self.adjacency == REPLACE else "added or removed"
        return f"{who} {how}, in {len(self.basis.subsets)} residuals of the marginals of {domain}"
