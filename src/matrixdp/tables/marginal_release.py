"""Noisy marginal tables: every table of a plan, computed from one release of its residuals, with error bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import ResidualNoise
from matrixdp.distributions.gaussian import normal_quantile
from matrixdp.distributions.margins import error_rate, sidak
from matrixdp.errors import InvalidInput
from matrixdp.intervals import Interval
from matrixdp.pipeline import Release
from matrixdp.postprocess import nonnegative, whole_numbers
from matrixdp.privacy.certificate import Certificate

if TYPE_CHECKING:
    from matrixdp.tables.marginals import Columns, MarginalPlan


@dataclass(frozen=True, eq=False, kw_only=True)
class MarginalRelease:
    """Noisy residuals, and every table that follows from them.

    Attributes:
        plan: the plan of the release.
        release: the noisy residuals, with the certificate.
        total: the number of records if it is public (replace); NaN otherwise.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import plan_marginals
        >>> plan = plan_marginals({"region": 2, "age": 3}, budget=Budget(1.0, 1e-6), up_to=2)
        >>> out = plan.release(np.array([[0, 1], [1, 2], [1, 0]]))  # each record by the places of its values
        >>> out.table(["region"]).shape, out.table(["region", "age"]).shape
        ((2,), (2, 3))
    """

    plan: MarginalPlan
    release: Release
    total: float = math.nan

    @property
    def certificate(self) -> Certificate:
        """The guarantee of all tables together."""
        return self.release.certificate

    def table(self, columns: Columns, *, whole: bool = False, at_least_zero: bool = False) -> Array:
        """A table, with one axis per column in the order asked for; unbiased, and consistent with all others.

        Args:
            columns: the columns in any order; one table of the plan must contain them all.
            whole: whether to round to whole numbers, whose sum is the table's rounded total.
            at_least_zero: whether to return the nearest table without negative cells that has the noisy total. Such
                tables agree in their total, but not in other sums that they share; nor do tables of whole numbers.
        """
        places = self.plan.places(columns)
        table = self._of(dict.fromkeys(places))
        if at_least_zero:
            table = nonnegative(table.reshape(-1), max(0.0, float(self._of({})))).reshape(table.shape)
        return whole_numbers(table.reshape(-1)).reshape(table.shape) if whole else table

    def sum(self, weights: Mapping[str, Any]) -> tuple[float, float]:
        """A weighted sum of a table's cells, and its standard error.

        Args:
            weights: one weight per value for each column of the table; the weight of a cell is their product. Zeros and
                ones select ranges or sets of values.
        """
        vectors = _vectors(weights, self.plan)
        value = float(self._of(vectors))
        return value, math.sqrt(self._factor * _variance_of_sum(self.plan, self._law, vectors))

    def variance(self, columns: Columns) -> Array:
        """The variance of each cell of a table, from the noise as it was drawn."""
        return self._factor * cell_variances(self.plan, self._law, self.plan.places(columns))

    def standard_error(self, columns: Columns) -> Array:
        """The standard error of each cell of a table: of the noise, not of the sampling of people."""
        return np.sqrt(self.variance(columns))

    def interval(self, columns: Columns, level: float = 0.95, simultaneous: bool = False) -> Interval:
        """Intervals for the true counts, per cell or for a whole table; for rounding see `matrixdp.intervals`.

        Args:
            columns: the columns of the table.
            level: the coverage.
            simultaneous: whether all cells of the table are covered at once.
        """
        table, error = self.table(columns), self.standard_error(columns)
        alpha = sidak(error_rate(level), table.size if simultaneous else 1)
        coordinates = math.prod(table.shape)  # all residuals of a table have as many numbers as it has cells
        grid = self.certificate.drawing.grid if self.certificate.drawing else None
        rounding = 0.0 if grid is None else grid.displacement * math.sqrt(coordinates)
        half = (normal_quantile(alpha) + rounding) * error
        return Interval(table - half, table + half, level, simultaneous)

    @property
    def _factor(self) -> float:
        """The factor by which rounding the noise to the grid increases variances."""
        drawing = self.certificate.drawing
        return 1.0 if drawing is None else drawing.variance_factor

    @property
    def _law(self) -> Gaussian:
        assert isinstance(self.release.noise, Gaussian)
        return self.release.noise

    def _of(self, weights: Mapping[int, Array | None]) -> Array:
        """A table from its residuals, contracted with the weights of each column; None keeps a column's axis."""
        basis, starts, asked = self.plan.basis, self.plan.basis.starts, list(weights)
        result = np.zeros(tuple(basis.sizes[i] for i, vector in weights.items() if vector is None))
        for subset in _subsets_of(asked):
            row = self.plan.rows_by_subset.get(subset)
            if row is None:  # only the total is not measured, where it is public
                part = np.asarray(self.total)
            else:
                residual = self.release.value[starts[row] : starts[row + 1]].reshape(basis.dimensions(subset))
                part = np.transpose(residual, [subset.index(i) for i in asked if i in subset])
            for i, vector in weights.items():  # takes the first axis of the residual, and gives one at the end
                n = basis.sizes[i]
                if i in subset:
                    inverse = basis.inverse(i) if vector is None else vector @ basis.inverse(i)
                    part = np.tensordot(part, inverse, axes=(0, -1))
                else:
                    part = np.multiply.outer(part, np.full(n, 1 / n) if vector is None else np.mean(vector))
            result += part
        return result


def _subsets_of(places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(sorted(places), r) for r in range(len(places) + 1))


def stds(law: Gaussian) -> Array:
    """The standard deviation of the noise on each residual, in its own units."""
    assert isinstance(law.covariance, ResidualNoise)
    return law.covariance.stds


def cell_variances(plan: MarginalPlan, law: Gaussian, places: Sequence[int]) -> Array:
    """The variance of each cell: the sum over subsets A of the table of s_A^2 times spreads in A and 1/n^2 outside."""
    basis, variances = plan.basis, np.square(stds(law))
    total = np.zeros(tuple(basis.sizes[i] for i in places))
    for subset in _subsets_of(places):
        row = plan.rows_by_subset.get(subset)
        if row is not None:
            factors = [
                basis.spread(i) if i in subset else np.full(n, n**-2.0) for i in places for n in [basis.sizes[i]]
            ]
            total += reduce(np.multiply.outer, factors, np.asarray(variances[row]))
    return total


def _variance_of_sum(plan: MarginalPlan, law: Gaussian, vectors: Mapping[int, Array]) -> float:
    basis, variances = plan.basis, np.square(stds(law))
    total = 0.0
    for subset in _subsets_of(list(vectors)):
        row = plan.rows_by_subset.get(subset)
        if row is not None:
            terms = [
                float(np.sum(np.square(vector @ basis.inverse(i) * basis.units(i)))) if i in subset
                else float(np.mean(vector)) ** 2
                for i, vector in vectors.items()
            ]  # fmt: skip
            total += float(variances[row]) * math.prod(terms)
    return total


def _vectors(weights: Any, plan: MarginalPlan) -> dict[int, Array]:
    if not isinstance(weights, Mapping):
        raise InvalidInput(f"weights must map columns to one weight per value, got {_check.kind(weights)}")
    places = plan.places(tuple(weights))
    numbers = [_check.array_of("weights", vector) for vector in weights.values()]
    vectors = {
        i: _check.finite("weights", vector.astype(float) if vector.dtype == bool else vector, ndim=1)
        for i, vector in zip(places, numbers, strict=True)
    }
    if any(len(vector) != plan.basis.sizes[i] for i, vector in vectors.items()):
        raise InvalidInput("weights must have one number per value of their column")
    return vectors
