# mypy: allow-subclassing-any
"""Linear regression from one private matrix of second moments."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import takes_relation
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Spends
from matrixdp.queries.units import answered
from matrixdp.sklearn.base import PrivateEstimator, limited, records_and_target, records_of
from matrixdp.tables.moments import Moments, bounded_moments, bounded_products


@takes_relation
class PrivateLinearRegression(RegressorMixin, PrivateEstimator):
    """Least squares from noisy second moments of features and target.

    Args:
        low: the least value of each feature, or one number for all; public. Smaller values count as this one.
        high: the largest value of each feature, likewise.
        target_low: the least value of the target; public.
        target_high: the largest value of the target; public.
        budget: the guarantee to keep; or give epsilon and delta.
        epsilon: instead of budget, with delta.
        delta: instead of budget, with epsilon.
        level: the coverage of the intervals.
        adjacency: which data sets are neighbours.
        mechanism: a mechanism's name; "auto" takes the least expected error.
        random_state: for tests only; whoever knows it can remove the noise.
        ledger: charged by every fit, unless fit is given another.

    Attributes:
        coef_: a coefficient per feature.
        intercept_: the value at 0.
        standard_errors_: of the intercept and the coefficients, to first order in the noise.
        intervals_: lower and upper ends, of the intercept and the coefficients.
        reliable_: whether the noise is small beside the spread of the features, so that intervals hold.
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

    def __init__(
        self,
        *,
        low: Any = None,
        high: Any = None,
        target_low: float | None = None,
        target_high: float | None = None,
        budget: Budget | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        level: float = 0.95,
        adjacency: str = "add/remove",
        mechanism: str = "auto",
        random_state: Any = None,
        ledger: Spends | None = None,
    ) -> None:
        self.low = low
        self.high = high
        self.target_low = target_low
        self.target_high = target_high
        self.budget = budget
        self.epsilon = epsilon
        self.delta = delta
        self.level = level
        self.adjacency = adjacency
        self.mechanism = mechanism
        self.random_state = random_state
        self.ledger = ledger

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
        self.certificate_ = moments.certificate
        return self

    def predict(self, X: Any) -> Array:
        """The values that the line gives to records."""
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
class PrivateRidge(PrivateLinearRegression):
    """Ridge regression from noisy second moments of features and target.

    Args:
        alpha: added to the sum of squares for each squared coefficient, but for the intercept.
        low: see `PrivateLinearRegression`, also for all other arguments and the attributes.
        high: likewise.
        target_low: likewise.
        target_high: likewise.
        budget: likewise.
        epsilon: likewise.
        delta: likewise.
        level: likewise.
        adjacency: likewise.
        mechanism: likewise.
        random_state: likewise.
        ledger: likewise.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivateRidge
        >>> model = PrivateRidge(10.0, low=-1, high=1, target_low=-1, target_high=1, epsilon=1.0, delta=1e-6)
        >>> model.fit(records[:, :2], records[:, 2]).intervals_.shape
        (2, 3)
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        low: Any = None,
        high: Any = None,
        target_low: float | None = None,
        target_high: float | None = None,
        budget: Budget | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        level: float = 0.95,
        adjacency: str = "add/remove",
        mechanism: str = "auto",
        random_state: Any = None,
        ledger: Spends | None = None,
    ) -> None:
        self.alpha = alpha
        super().__init__(
            low=low, high=high, target_low=target_low, target_high=target_high, budget=budget, epsilon=epsilon,
            delta=delta, level=level, adjacency=adjacency, mechanism=mechanism, random_state=random_state,
            ledger=ledger,
        )  # fmt: skip

    def _penalty(self) -> float:
        return _check.at_least_zero("alpha", self.alpha)


def numbers_of(target: Any) -> Any:
    """The target as numbers; scikit-learn hands out some of them as objects."""
    try:
        return np.asarray(target).astype(np.float64)
    except Exception:
        raise InvalidInput(f"Unknown label type: y must hold numbers, got {_check.kind(target)}") from None


def bounds_of(low: Any, high: Any, features: int, names: str = "low and high") -> tuple[Array, Array]:
    """Public bounds of every feature; they have no default."""
    if low is None or high is None:
        raise InvalidInput(f"{names} are missing: public bounds, to which values are moved that lie outside")
    lower, upper = (np.array(_check.broadcast(names, end, (features,))) for end in (low, high))
    if not np.all(lower < upper):
        raise InvalidInput(f"{names} must be two numbers, the first below the second, for every feature")
    return lower, upper
