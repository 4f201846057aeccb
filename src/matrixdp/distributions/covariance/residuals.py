"""Independent noise on the residuals of marginals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions.covariance.base import FullCovariance
from matrixdp.distributions.covariance.independent import _Independent
from matrixdp.distributions.covariance.spectrum import unit
from matrixdp.errors import InvalidInput
from matrixdp.residuals import ResidualBasis


@dataclass(frozen=True, eq=False)
class ResidualNoise(_Independent):
    """Noise of one standard deviation per residual, in the units of its contrasts; see `matrixdp.residuals`.

    An entry of the residual of A has the standard deviation stds[A] times the product of the units of its contrasts.

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import plan_marginals
        >>> plan = plan_marginals({"region": 2, "age": 3}, budget=Budget(1.0, 1e-6), up_to=2)
        >>> type(plan.law.covariance).__name__
        'ResidualNoise'
    """

    basis: ResidualBasis
    stds: Array
    shape: Shape = field(init=False)

    slack = 1e-12  # entries of `std` are rounded products of a few factors

    def __post_init__(self) -> None:
        if not isinstance(self.basis, ResidualBasis):
            raise InvalidInput(f"basis must be a ResidualBasis, got {_check.kind(self.basis)}")
        stds = _check.lengths("stds", _check.finite("stds", self.stds, ndim=1))
        if len(stds) != len(self.basis.subsets):
            raise InvalidInput(f"stds must have one entry per subset ({len(self.basis.subsets)}), got {len(stds)}")
        object.__setattr__(self, "stds", stds)
        object.__setattr__(self, "shape", (self.basis.length,))

    @cached_property
    def _units(self) -> list[Array]:
        return [self.basis.units(i) for i in range(len(self.basis.sizes))]

    def _parts(self) -> Iterator[tuple[slice, Array]]:
        """The place of each residual, and the standard deviations of its entries."""
        starts = self.basis.starts.tolist()
        for row, std, start, end in zip(self.basis, self.stds.tolist(), starts, starts[1:], strict=False):
            yield slice(start, end), reduce(np.multiply.outer, [self._units[i] for i in row], np.asarray(std)).ravel()

    @property
    def std(self) -> Array:
        """The standard deviation of every entry."""
        return self.color(np.ones(self.shape))

    def color(self, normal: Array) -> Array:
        """Works on one residual at a time, so that no vector of all standard deviations is formed."""
        noise = np.array(normal, dtype=np.float64)
        for place, std in self._parts():
            noise[place] *= std
        return noise

    def whiten(self, difference: Array) -> Array:
        """Works on one residual at a time, as `color`."""
        white = np.array(difference, dtype=np.float64)
        for place, std in self._parts():
            white[place] /= std
        return white

    @property
    def smallest_std(self) -> float:
        return float(np.min(self.stds * self.basis.products([float(np.min(units)) for units in self._units])))

    @property
    def _largest_std(self) -> float:
        return float(np.max(self.stds * self.basis.products([float(np.max(units)) for units in self._units])))

    def variance_range(self) -> tuple[float, float]:
        return self.smallest_std**2, self._largest_std**2

    def condition(self) -> float:
        return self._largest_std / self.smallest_std

    def power_trace(self, power: int) -> float:
        sums = self.basis.products([float(np.sum(units ** (2 * power))) for units in self._units])
        return math.fsum((self.stds ** (2 * power) * sums).tolist())

    def scaled(self, factor: float) -> ResidualNoise:
        return ResidualNoise(self.basis, self.stds * factor)

    def describe(self) -> str:
        return (
            f"independent Gaussian on {len(self.stds)} residuals of marginals, std {self.stds.min():.6g} to "
            f"{self.stds.max():.6g} of a contrast"
        )

    def least_noise_direction(self) -> Array:
        return unit(self.shape, (int(np.argmin(self.std)),))

    def lines(self, axis: int) -> Iterator[tuple[int, FullCovariance]]:
        """A vector has none."""
        raise InvalidInput("residuals have no rows or columns; use a set for vectors, such as Residuals")
