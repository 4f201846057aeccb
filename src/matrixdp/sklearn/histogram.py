# mypy: allow-subclassing-any
"""Density estimation from a private histogram."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from sklearn.base import DensityMixin
from sklearn.utils.validation import check_is_fitted

from matrixdp import _check, postprocess, queries
from matrixdp._check import Array
from matrixdp.adjacency import takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Spends
from matrixdp.queries.histograms import cells_of
from matrixdp.queries.units import answered
from matrixdp.sklearn.base import PrivateEstimator, limited, records_of


@takes_relation
@dataclass(eq=False, repr=False)
class PrivateHistogram(DensityMixin, PrivateEstimator):
    """Noisy counts of records in the cells of a public grid, in one dimension or two.

    Args:
        edges: the borders of the cells; a pair of such lists for two columns. Public.
        columns: which columns to count, by position; all by default.

    The other arguments are those of all estimators: see `matrixdp.sklearn`.

    Attributes:
        counts_: the noisy counts, none below 0.
        released_: the noisy counts as released.
        certificate_: what the fit guarantees.

    Guarantee: `certificate_` covers the attributes. `score_samples` and `score` depend on the records given to them.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivateHistogram
        >>> fit = PrivateHistogram([-1, 0, 1], columns=[0], epsilon=1.0, delta=1e-6).fit(records)
        >>> fit.counts_.shape
        (2,)
    """

    edges: Any = None
    _: KW_ONLY
    columns: Any = None

    def fit(
        self, X: Any, y: Any = None, *, ids: Any = None, contributions: int | None = None, ledger: Spends | None = None
    ) -> PrivateHistogram:
        """Releases the noisy counts once, charged to the ledger if there is one."""
        records = limited(self, records_of(self, X), ids, contributions)
        if self.edges is None:
            raise InvalidInput("edges are missing: the borders of the cells, known without the records")
        answer = answered(queries.histogram, records, edges=self.edges, columns=self.columns, adjacency=self.adjacency)
        self.released_ = self._release(answer, ledger, contributions).value
        self.counts_ = postprocess.nonnegative(self.released_)
        return self

    def score_samples(self, X: Any) -> Array:
        """The logarithm of the density at each record: -inf outside the grid and in empty cells."""
        check_is_fitted(self)
        records = records_of(self, X, reset=False)
        chosen = queries.load(records, self.columns)
        borders = [_check.finite("edges", e) for e in (self.edges if self.counts_.ndim == 2 else [self.edges])]
        density = self.counts_ / max(float(np.sum(self.counts_)), np.finfo(np.float64).tiny)
        for axis, border in enumerate(borders):
            density = density / np.expand_dims(np.diff(border), [a for a in range(density.ndim) if a != axis])
        places, inside = cells_of(chosen, borders)
        found = np.zeros(len(chosen))
        found[inside] = density[tuple(place[inside] for place in places)]
        logarithms: Array = np.log(found, out=np.full(len(found), -np.inf), where=found > 0)
        return logarithms

    def score(self, X: Any, y: Any = None) -> float:
        """The sum of the logarithms of the density."""
        return float(np.sum(self.score_samples(X)))
