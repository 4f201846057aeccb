"""Independent parts of one vector, each with its own covariance, such as the layers of a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.distributions.covariance.base import FullCovariance
from matrixdp.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Blocks(FullCovariance):
    """A vector of consecutive parts, read as matrices or vectors, with independent noise.

    Example:
        >>> from matrixdp.distributions.covariance import Blocks, Isotropic
        >>> Blocks((Isotropic((2, 3), std=1.0), Isotropic((4,), std=2.0))).shape
        (10,)
    """

    parts: tuple[FullCovariance, ...]
    shape: Shape = field(init=False)
    places: tuple[slice, ...] = field(init=False)

    def __post_init__(self) -> None:
        parts = tuple(self.parts)
        if not parts or not all(isinstance(part, FullCovariance) for part in parts):
            raise InvalidInput(f"parts must be covariances on all entries, one or more, got {len(parts)} parts")
        ends = np.cumsum([math.prod(part.shape) for part in parts]).tolist()
        places = tuple(slice(first, last) for first, last in zip([0, *ends], ends, strict=False))
        for name, value in (("parts", parts), ("shape", (ends[-1],)), ("places", places)):
            object.__setattr__(self, name, value)

    def _each(self, vector: Array, apply: Callable[[FullCovariance, Array], Array]) -> Array:
        """Applies a function to each part of a vector, and joins the results."""
        pieces = (
            apply(part, vector[place].reshape(part.shape)) for part, place in zip(self.parts, self.places, strict=True)
        )
        return np.concatenate([piece.ravel() for piece in pieces])

    @property
    def independent(self) -> bool:
        return all(part.independent for part in self.parts)

    @property
    def slack(self) -> float:
        """The largest slack of a part, since the squared norm is a sum over the parts."""
        return max(part.slack for part in self.parts)

    @property
    def smallest_std(self) -> float:
        return min(part.smallest_std for part in self.parts)

    def color(self, normal: Array) -> Array:
        return self._each(normal, lambda part, piece: part.color(piece))

    def whiten(self, difference: Array) -> Array:
        return self._each(difference, lambda part, piece: part.whiten(piece))

    def times(self, array: Array) -> Array:
        return self._each(array, lambda part, piece: part.times(piece))

    def whitening_error(self) -> float:
        return max(part.whitening_error() for part in self.parts)

    def variances(self) -> Array:
        return np.concatenate([part.variances().ravel() for part in self.parts])

    def variance_range(self) -> tuple[float, float]:
        ranges = [part.variance_range() for part in self.parts]
        return min(least for least, _ in ranges), max(largest for _, largest in ranges)

    def power_trace(self, power: int) -> float:
        return math.fsum(part.power_trace(power) for part in self.parts)

    def condition(self) -> float:
        """The largest over the smallest standard deviation; a part's largest is its condition times its smallest."""
        return max(part.condition() * part.smallest_std for part in self.parts) / self.smallest_std

    def scaled(self, factor: float) -> Blocks:
        return Blocks(tuple(part.scaled(factor) for part in self.parts))

    def describe(self) -> str:
        stds = [math.sqrt(part.trace() / math.prod(part.shape)) for part in self.parts]
        return f"independent Gaussian noise in {len(stds)} parts, std {min(stds):.6g} to {max(stds):.6g} (mean of each)"

    def least_noise_direction(self) -> Array:
        weakest = min(range(len(self.parts)), key=lambda index: self.parts[index].smallest_std)
        direction = np.zeros(self.shape)
        direction[self.places[weakest]] = self.parts[weakest].least_noise_direction().ravel()
        return direction

    def precision(self, difference: Array) -> Array:
        return self._each(difference, lambda part, piece: part.precision(piece))

    def precision_diagonal(self) -> Array:
        return np.concatenate([part.precision_diagonal().ravel() for part in self.parts])

    def absolute_precision(self, bounds: Array) -> Array:
        return self._each(bounds, lambda part, piece: part.absolute_precision(piece))

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """A vector has none."""
        raise InvalidInput("a vector in parts has no rows or columns; use a set for vectors, such as Frobenius")
