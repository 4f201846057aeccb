# mypy: allow-subclassing-any
"""Scaling and binning of features, learned from one private release."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from matrixdp import _check, postprocess, queries
from matrixdp._check import Array
from matrixdp.adjacency import REPLACE, checked, takes_relation
from matrixdp.budget import Allotment
from matrixdp.distributions import NoiseLaw, QuantileSearch
from matrixdp.pipeline import Spends
from matrixdp.queries.clipping import centred
from matrixdp.queries.histograms import grid_counts
from matrixdp.queries.units import answered, of_units
from matrixdp.sklearn.base import PrivateEstimator, bounds_of, limited, records_of
from matrixdp.tables.quantile import found_by, search_law

# The share of epsilon for intervals, which are not used here.
_FOR_INTERVALS = 1e-3
# The share of a feature's range below which a standard deviation is not trusted.
LEAST_SCALE = 1e-3


@takes_relation
@dataclass(eq=False, repr=False)
class PrivateStandardScaler(OneToOneFeatureMixin, TransformerMixin, PrivateEstimator):
    """Subtracts noisy means and divides by noisy standard deviations, from sums of the features and their squares.

    Args:
        low: the least value of each feature, or one number for all; public. Smaller values count as this one.
        high: the largest value of each feature, likewise.

    The other arguments are those of all estimators: see `matrixdp.sklearn`.

    Attributes:
        mean_: the noisy mean of each feature.
        scale_: the noisy standard deviation, at least a thousandth of the range.
        var_: its square.
        certificate_: what the fit guarantees.

    Guarantee: `certificate_` covers the attributes. `transform` is a function of the records given to it.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivateStandardScaler
        >>> scaler = PrivateStandardScaler(low=-1, high=1, epsilon=1.0, delta=1e-6).fit(records)
        >>> scaler.transform(records).shape
        (2000, 3)
    """

    _: KW_ONLY
    low: Any = None
    high: Any = None

    def fit(
        self, X: Any, y: Any = None, *, ids: Any = None, contributions: int | None = None, ledger: Spends | None = None
    ) -> PrivateStandardScaler:
        """Releases the noisy sums once, charged to the ledger if there is one."""
        records = limited(self, records_of(self, X), ids, contributions)
        features = records.shape[1]
        low, high = bounds_of(self.low, self.high, features)
        middle, half = (low + high) / 2, (high - low) / 2
        u = centred(records, low, high)
        parts, top = [u, u**2 - 0.5], [np.ones(features), np.full(features, 0.5)]
        if checked(self.adjacency) != REPLACE:
            parts, top = [np.ones((len(u), 1)), *parts], [np.ones(1), *top]
        ends = np.concatenate(top)
        answer = answered(queries.sum, np.column_stack(parts), low=-ends, high=ends, adjacency=self.adjacency)
        sums = self._release(answer, ledger, contributions).value
        count = float(len(u)) if len(sums) == 2 * features else max(1.0, float(sums[0]))
        mean = np.clip(sums[-2 * features : -features] / count, -1.0, 1.0)
        variance = sums[-features:] / count + 0.5 - mean**2
        self.mean_ = middle + half * mean
        self.scale_ = half * np.sqrt(np.clip(variance, (2 * LEAST_SCALE) ** 2, 1.0))
        self.var_ = self.scale_**2
        return self

    def transform(self, X: Any) -> Array:
        """The records minus the means, divided by the standard deviations. Not a private output."""
        check_is_fitted(self)
        scaled: Array = (records_of(self, X, reset=False) - self.mean_) / self.scale_
        return scaled

    def inverse_transform(self, X: Any) -> Array:
        """The records that have these scaled features."""
        check_is_fitted(self)
        return np.asarray(_check.finite("X", X, ndim=2) * self.scale_ + self.mean_)


@takes_relation
@dataclass(eq=False, repr=False)
class PrivateKBins(OneToOneFeatureMixin, TransformerMixin, PrivateEstimator):
    """Puts each feature into bins with about the same number of records, by noisy quantiles on a public grid.

    The quantiles are found by a search (see `matrixdp.tables.quantile`), which keeps delta = 0; each feature gets an
    equal share of epsilon.

    Args:
        n_bins: how many bins per feature.
        low: the least value of each feature, or one number for all; public. Smaller values count as this one.
        high: the largest value of each feature, likewise.
        grid: how many steps of equal width the range of a feature has.
        mechanism: "auto" for the search; a mechanism's name for noise on the counts of all steps, of which 64 suffice.

    The other arguments are those of all estimators: see `matrixdp.sklearn`.

    Attributes:
        bin_edges_: the borders of each feature's bins, nondecreasing.
        n_bins_: how many bins each feature has.
        certificate_: what the fit guarantees.

    Guarantee: `certificate_` covers the attributes. `transform` is a function of the records given to it.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivateKBins
        >>> fit = PrivateKBins(4, low=-1, high=1, epsilon=1.0, delta=1e-6).fit(records)
        >>> fit.transform(records).shape, [len(edges) for edges in fit.bin_edges_]
        ((2000, 3), [5, 5, 5])
    """

    n_bins: int = 5
    _: KW_ONLY
    low: Any = None
    high: Any = None
    grid: int = 4096

    def fit(
        self, X: Any, y: Any = None, *, ids: Any = None, contributions: int | None = None, ledger: Spends | None = None
    ) -> PrivateKBins:
        """Searches the borders of all features in one release, charged to the ledger if there is one."""
        records = limited(self, records_of(self, X), ids, contributions)
        bins, steps = _check.count("n_bins", self.n_bins), _check.count("grid", self.grid)
        low, high = bounds_of(self.low, self.high, records.shape[1])
        wanted = np.arange(1, bins) / bins
        answer = grid_counts(records, low, high, steps, self.adjacency)
        if contributions is not None:
            answer = of_units(answer, contributions)
        mechanism: str | NoiseLaw = self.mechanism
        if mechanism == "auto" and bins > 1 and not isinstance(self._budget(), Allotment):
            mechanism = search_law(answer.shape, wanted, answer.sensitivity, self._budget(), _FOR_INTERVALS)
        released = self._release(answer, ledger, mechanism=mechanism)
        if isinstance(released.noise, QuantileSearch):
            places = found_by(released)
        else:
            running = [np.append(0.0, np.cumsum(row)) for row in released.value]
            counts = [np.maximum(postprocess.nondecreasing(each), 0.0) for each in running]
            places = np.array([np.searchsorted(each, each[-1] * wanted) for each in counts])
        width = (high - low) / steps
        self.bin_edges_: list[Array] = [
            np.concatenate([[low[i]], np.clip(low[i] + width[i] * row, low[i], high[i]), [high[i]]])
            for i, row in enumerate(places)
        ]
        self.n_bins_ = np.full(len(low), bins)
        return self

    def transform(self, X: Any) -> Array:
        """The number of each value's bin, from 0. Not a private output."""
        check_is_fitted(self)
        records = records_of(self, X, reset=False)
        pairs = zip(self.bin_edges_, records.T, strict=True)
        places = [np.searchsorted(edges[1:-1], column, side="right") for edges, column in pairs]
        return np.stack(places, axis=1).astype(np.float64)
