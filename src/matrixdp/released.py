"""The result of a release: the noisy value, its certificate, and the error bars of its noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from matrixdp import _check, bootstrap, intervals
from matrixdp._check import Array
from matrixdp.distributions import NoiseLaw, Product
from matrixdp.errors import NotApplicable
from matrixdp.intervals import Interval, LinearRelease
from matrixdp.privacy.certificate import Certificate


@dataclass(frozen=True, eq=False)
class Release:
    """A noisy value that may be published, with its guarantee and the law that its noise was drawn from.

    A Dask value is a task graph that holds records and keys: publish the result of `compute()`, never the graph.

    Example:
        >>> from matrixdp import Budget, Counts, release
        >>> out = release([12, 3], Counts(1), Budget(1.0, 1e-6))
        >>> out.value.shape, out.standard_error.round(2), out.interval(0.95).level > 0.95
        ((2,), array([1.36, 1.36]), True)
    """

    value: Any
    certificate: Certificate
    noise: NoiseLaw
    on_grid: bool = False
    """Whether the true value is known to lie on the grid of discrete noise: by its type or its query, not its cells."""

    @property
    def standard_error(self) -> Array:
        """The standard deviation of the noise in every entry, in the shape of the value.

        It covers the noise alone, not how well the records represent a population. Nor does it cover putting the value
        on a grid, which `interval` does.
        """
        return intervals.standard_error(self.noise, self.certificate.drawing)

    def interval(self, level: float = 0.95, simultaneous: bool = False) -> Interval:
        """Intervals for the true value of the query, entry by entry; they include the rounding of the sampler.

        Args:
            level: the least probability, over the noise, that an entry is covered; it says nothing about a population.
            simultaneous: whether all entries are covered at once with that probability.

        Returns:
            Lower and upper ends, and the level attained. On Dask they are lazy, as the value is.

        Raises:
            NotApplicable: if the law, one from outside the package, does not know its quantiles.
        """
        drawing, on_grid = self.certificate.drawing, self.on_grid
        return intervals.interval(self.value, self.noise, drawing, level, simultaneous=simultaneous, on_grid=on_grid)

    def linear(self, weights: Any) -> LinearRelease:
        """Linear functions W vec(value), such as totals, with the covariance of their noise and intervals.

        Args:
            weights: W, of shape (functions, entries), or an array of the value's shape for each function. They must be
                public.
        """
        return intervals.linear(self.value, self.noise, self.certificate.drawing, weights, on_grid=self.on_grid)

    def bootstrap(
        self,
        function: Callable[..., Array],
        *arguments: Any,
        level: float = 0.95,
        draws: int = 999,
        rng: np.random.Generator | None = None,
        **options: Any,
    ) -> Interval:
        """Intervals for a post-processing of the true value, entry by entry, by a parametric bootstrap.

        Args:
            function: one of `matrixdp.postprocess`: symmetrise, clip, nonnegative, nearest_psd or low_rank.
            *arguments: its arguments after the matrix.
            level: the probability that an entry is covered, approximately.
            draws: how many times noise is drawn again.
            rng: a numpy Generator, for reproducible intervals; nothing private depends on it.
            **options: its arguments by name.

        Raises:
            NotApplicable: where a bootstrap is not valid: at boundaries, such as counts near 0; for other functions;
                and for values that were floored to the grid of discrete noise.
        """
        if isinstance(self.noise, Product) and not self.on_grid:
            raise NotApplicable("a bootstrap does not see that values were floored to a grid; release whole numbers")
        return bootstrap.bootstrap(
            self.value, self.noise, function, *arguments, level=level, draws=draws, rng=rng, **options
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if _check.library(self.value) == "dask":
            raise TypeError("a release on Dask has records and keys inside; pickle the value that compute() gives")
        return super().__reduce_ex__(protocol)

    def __str__(self) -> str:
        return str(self.certificate)
