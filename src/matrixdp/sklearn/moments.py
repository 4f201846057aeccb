# mypy: allow-subclassing-any
"""Principal components and covariances of records, learned from one private release."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from matrixdp import _check, postprocess, queries
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE, checked, takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Spends
from matrixdp.queries.clipping import center_of, divisor
from matrixdp.queries.moments import full_matrix
from matrixdp.queries.units import answered
from matrixdp.sklearn.base import PrivateEstimator, limited, records_of


@takes_relation
@dataclass(eq=False, repr=False)
class PrivatePCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, PrivateEstimator):
    """Principal components from a noisy second moment about a public center.

    Args:
        n_components: how many components to keep; all by default.
        norm: the largest distance of a record from the center; records beyond it are clipped. Public.
        center: a public vector or number that is subtracted first.
        adjacency: "replace", "zero-out" or "add/remove", which needs size.
        size: a public number to divide by; the number of records by default, except under "add/remove".

    The other arguments are those of all estimators: see `matrixdp.sklearn`.

    Attributes:
        components_: orthonormal rows, the largest variance first.
        explained_variance_: the noisy second moment along each, 0 where noise made it negative.
        explained_variance_ratio_: its share of the total over all components.
        mean_: the center.
        certificate_: what the fit guarantees.

    Guarantee: `certificate_` covers the attributes. `transform` of the training records is not private: it is a
        function of those records, and reveals them.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivatePCA
        >>> fit = PrivatePCA(2, norm=2.0, epsilon=1.0, delta=1e-6).fit(records)
        >>> fit.components_.shape, round(fit.certificate_.epsilon(1e-6), 3)
        ((2, 3), 1.0)
    """

    n_components: int | None = None
    _: KW_ONLY
    norm: float | None = None
    center: Any = 0.0
    adjacency: str = "replace"
    size: int | None = None

    def fit(
        self, X: Any, y: Any = None, *, ids: Any = None, contributions: int | None = None, ledger: Spends | None = None
    ) -> PrivatePCA:
        """Releases the noisy second moment once, charged to the ledger if there is one."""
        records = limited(self, records_of(self, X), ids, contributions)
        features = records.shape[1]
        kept = features if self.n_components is None else _check.count("n_components", self.n_components)
        if not kept <= features:
            raise InvalidInput(f"n_components must be at most the number of features, {features}, got {kept}")
        center = _check.broadcast("center", self.center, (features,))
        moment = postprocess.symmetrise(released_covariance(self, records, center, ledger, contributions))
        values, vectors = np.linalg.eigh(moment)
        variances = np.maximum(values[::-1], 0.0)
        self.mean_ = np.array(center)
        self.components_: Array = np.ascontiguousarray(vectors.T[::-1][:kept])
        self.explained_variance_ = variances[:kept]
        total = float(np.sum(variances))
        self.explained_variance_ratio_ = self.explained_variance_ / total if total > 0 else np.zeros(kept)
        return self

    def transform(self, X: Any) -> Array:
        """The coordinates of records along the components. Not a private output: it depends on these records."""
        check_is_fitted(self)
        records = records_of(self, X, reset=False)
        with np.errstate(over="ignore", invalid="ignore"):
            coordinates: Array = (records - self.mean_) @ self.components_.T
        return coordinates

    def inverse_transform(self, X: Any) -> Array:
        """The points that have these coordinates."""
        check_is_fitted(self)
        coordinates = _check.finite("X", X)
        if coordinates.shape[-1] != len(self.components_):
            raise InvalidInput(f"X must have {len(self.components_)} columns, one per component, got {_check.kind(X)}")
        with np.errstate(over="ignore", invalid="ignore"):
            points: Array = coordinates @ self.components_ + self.mean_
        return points

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)


@takes_relation
@dataclass(eq=False, repr=False)
class PrivateCovariance(PrivateEstimator):
    """A noisy covariance matrix, about a public center or about the records' own mean.

    Args:
        norm: the largest distance of a record from the center, or from 0 without a center. Public.
        center: a public vector; None means the mean of the records, which costs four times the std at the same norm.
        adjacency: "replace", "zero-out" (only with a center) or "add/remove", which needs size.
        size: a public number to divide by; the number of records by default, except under "add/remove".

    The other arguments are those of all estimators: see `matrixdp.sklearn`.

    Attributes:
        covariance_: the nearest positive semidefinite matrix to the release.
        released_: the release itself.
        certificate_: what the fit guarantees.

    Guarantee: `certificate_` covers the attributes.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivateCovariance
        >>> fit = PrivateCovariance(norm=2.0, epsilon=1.0, delta=1e-6).fit(records)
        >>> fit.covariance_.shape
        (3, 3)
    """

    _: KW_ONLY
    norm: float | None = None
    center: Any = None
    adjacency: str = "replace"
    size: int | None = None

    def fit(
        self, X: Any, y: Any = None, *, ids: Any = None, contributions: int | None = None, ledger: Spends | None = None
    ) -> PrivateCovariance:
        """Releases the noisy covariance once, charged to the ledger if there is one."""
        about_mean = self.center is None and checked(self.adjacency) != ADD_REMOVE
        records = records_of(self, X, ensure_min_samples=2 if about_mean else 1)
        records = limited(self, records, ids, contributions)
        self.released_ = released_covariance(self, records, self.center, ledger, contributions)
        self.covariance_ = postprocess.nearest_psd(self.released_)
        return self


def released_covariance(
    estimator: PrivatePCA | PrivateCovariance, records: Array, center: Any, ledger: Spends | None, contributions: Any
) -> Array:
    """The noisy covariance of the records; if delta is 0, from noisy products of two entries each."""
    norm = estimator.norm
    if norm is None:  # it has no default: it must fit the records' scale, and be known without them
        raise InvalidInput("norm is missing: a public bound on a record's norm, to which longer records are clipped")
    asked: dict[str, Any] = {"norm": norm, "adjacency": estimator.adjacency}
    if estimator._budget().delta > 0:
        answer = answered(queries.covariance, records, center=center, size=estimator.size, **asked)
        return np.asarray(estimator._release(answer, ledger, contributions).value)
    if center is None:
        raise InvalidInput("center must be given where delta is 0: a public vector, or 0 for second moments")
    size = divisor(estimator.size, checked(estimator.adjacency)) or len(records)
    answer = answered(queries.moment_entries, records - center_of(center, records.shape[1:]), **asked)
    entries = estimator._release(answer, ledger, contributions).value
    return full_matrix(entries) * (norm**2 / size)
