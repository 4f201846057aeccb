# mypy: allow-subclassing-any
"""Linear regression from one private matrix of second moments."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Spends
from matrixdp.queries.units import answered
from matrixdp.sklearn.base import PrivateEstimator, bounds_of, limited, records_and_target, records_of
from matrixdp.tables.moments import Moments, bounded_moments, bounded_products


@takes_relation
@dataclass(eq=False, repr=False)
class PrivateLinearRegression(RegressorMixin, PrivateEstimator):
    """Least squares from noisy second moments of features and target.

    Args:
        low: the least value of each feature, or one number for all; public. Smaller values count as this one.
        high: the largest value of each feature, likewise.
        target_low: the least value of the target; public.
        target_high: the largest value of the target; public.
        level: the coverage of the intervals.

    The other arguments are those of all estimators: see `matrixdp.sklearn`.

    Attributes:
        coef_: one coefficient per feature.
        intercept_: the value at 0.
        standard_errors_: of the intercept and the coefficients, to first order in the noise.
        intervals_: lower and upper ends, of the intercept and the coefficients.
        reliable_: whether the noise is small compared with the spread of the features, so that intervals hold.
        certificate_: what the fit guarantees.

    Guarantee: `certificate_` covers the attributes. `predict` and `score` depend on the records given to them.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivateLinearRegression
        >>> model = PrivateLinearRegression(low=-1, high=1, target_low=-1, target_high=1, epsilon=1.0, delta=1e-6)
        >>> model.fit(records[:, :2], records[:, 2]).coef_.shape
        (2,)
        >>> model.certificate_.float_safe
        True
    """

    _: KW_ONLY
    low: Any = None
    high: Any = None
    target_low: float | None = None
    target_high: float | None = None
    level: float = 0.95

    def fit(
        self, X: Any, y: Any, *, ids: Any = None, contributions: int | None = None, ledger: Spends | None = None
    ) -> PrivateLinearRegression:
        """Releases the noisy moments once, charged to the ledger if there is one."""
        records, target = records_and_target(self, X, y)
        target = _check.finite("y", numbers_of(target), ndim=1)
        low, high = bounds_of(self.low, self.high, records.shape[1])
        ends = bounds_of(self.target_low, self.target_high, 1, "target_low and target_high")
        low, high = np.append(low, ends[0]), np.append(high, ends[1])
        penalty, level = self._penalty(), _check.probability("level", self.level)
        rows = limited(self, np.column_stack([records, target]), ids, contributions)
        asked = bounded_products if self._budget().delta == 0 else bounded_moments
        answer = answered(asked, rows, low, high, adjacency=self.adjacency)
        moments = Moments(self._release(answer, ledger, contributions), low, high)
        found = moments.regression(records.shape[1], ridge=penalty, level=level)
        self.intercept_, self.coef_ = float(found.value[0]), found.value[1:]
        self.standard_errors_, self.intervals_ = found.standard_error, np.stack([found.low, found.high])
        self.reliable_ = moments.reliable(records.shape[1])
        return self

    def predict(self, X: Any) -> Array:
        """The target predicted for each record."""
        check_is_fitted(self)
        predicted: Array = records_of(self, X, reset=False) @ self.coef_ + self.intercept_
        return predicted

    def _penalty(self) -> float:
        return 0.0

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # on the few records of scikit-learn's checks noise is all there is
        return tags


@takes_relation
@dataclass(eq=False, repr=False)
class PrivateRidge(PrivateLinearRegression):
    """Ridge regression from noisy second moments of features and target.

    Args:
        alpha: this times each squared coefficient, except the intercept, is added to the sum of squares.

    All other arguments, and the attributes, are those of `PrivateLinearRegression`.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivateRidge
        >>> model = PrivateRidge(10.0, low=-1, high=1, target_low=-1, target_high=1, epsilon=1.0, delta=1e-6)
        >>> model.fit(records[:, :2], records[:, 2]).intervals_.shape
        (2, 3)
    """

    alpha: float = 1.0

    def _penalty(self) -> float:
        return _check.at_least_zero("alpha", self.alpha)


def numbers_of(target: Any) -> Any:
    """The target as numbers; scikit-learn passes some targets as objects."""
    try:
        return np.asarray(target).astype(np.float64)
    except Exception:
        raise InvalidInput(f"Unknown label type: y must hold numbers, got {_check.kind(target)}") from None
