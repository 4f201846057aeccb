# mypy: allow-subclassing-any
"""Logistic regression for two classes, learned from private gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Spends
from matrixdp.sklearn.base import PrivateEstimator, bounds_of, generator, limited, records_and_target, records_of
from matrixdp.tables.logistic import LogisticRegression


@takes_relation
@dataclass(eq=False, repr=False)
class PrivateLogisticRegression(ClassifierMixin, PrivateEstimator):
    """Logistic regression for two classes, from noisy gradients and Hessians: see `matrixdp.tables.logistic`.

    Args:
        C: the inverse of the penalty on squared coefficients, of features mapped to [-1, 1].
        low: the least value of each feature, or one number for all; public. Smaller values count as this one.
        high: the largest value of each feature, likewise.
        classes: the two labels; public. A record with another label counts as the first of them, in sorted order. With
            "from y", the labels in y, which then count as public.
        steps: how many gradients are released.
        mechanism: "auto", the least noise for each of the releases; no other is implemented.

    The other arguments are those of all estimators: see `matrixdp.sklearn`.

    Attributes:
        coef_: one coefficient per feature, in one row.
        intercept_: one number.
        classes_: the two labels.
        standard_errors_: of the intercept and the coefficients, to first order in the noise.
        reliable_: whether the noise is small enough for standard errors to hold.
        certificate_: what all releases of the fit guarantee together.

    Guarantee: `certificate_` covers the attributes; it is charged to the ledger once, before anything is drawn.

    Example:
        >>> import numpy as np
        >>> records = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
        >>> from matrixdp.sklearn import PrivateLogisticRegression
        >>> model = PrivateLogisticRegression(low=-1, high=1, classes=[0, 1], epsilon=3.0, delta=1e-6)
        >>> model.fit(records[:, :2], (records[:, 0] > 0).astype(int)).predict([[0.9, 0.0], [-0.9, 0.0]]).tolist()
        [1, 0]
    """

    C: float = 1.0
    _: KW_ONLY
    low: Any = None
    high: Any = None
    classes: Any = None
    steps: int = 32

    def fit(
        self, X: Any, y: Any, *, ids: Any = None, contributions: int | None = None, ledger: Spends | None = None
    ) -> PrivateLogisticRegression:
        """Releases the noisy moment, gradients and Hessian, charged to the ledger together if there is one."""
        records, target = records_and_target(self, X, y)
        classes = _classes(target, self.classes)
        low, high = bounds_of(self.low, self.high, records.shape[1])
        _check.choice("mechanism", self.mechanism, ("auto",))
        places = limited(self, np.arange(len(records)), ids, contributions)
        with _check.withheld("comparing y with the classes"):
            positive = np.asarray(target == classes[1], dtype=bool)
        prepared = LogisticRegression(
            records[places],
            positive[places],
            low,
            high,
            self._budget(),
            penalty=1 / _check.positive("C", self.C),
            steps=self.steps,
            adjacency=self.adjacency,
            contributions=contributions,
        )
        account = self.ledger if ledger is None else ledger
        found = prepared.release(account, f"{type(self).__name__}.fit", generator(self.random_state))
        self.classes_ = classes
        self.coef_, self.intercept_ = found.value[None, 1:], found.value[:1]
        self.standard_errors_, self.reliable_ = found.standard_error, found.reliable
        self.certificate_ = found.certificate
        return self

    def decision_function(self, X: Any) -> Array:
        """The logarithm of the odds of the second class."""
        check_is_fitted(self)
        scores: Array = records_of(self, X, reset=False) @ self.coef_[0] + self.intercept_[0]
        return scores

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class."""
        second = expit(self.decision_function(X))
        return np.stack([1 - second, second], axis=1)

    def predict(self, X: Any) -> Any:
        """The more probable class."""
        second = self.decision_function(X) > 0
        return self.classes_[second.astype(int)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # on the few records of scikit-learn's checks noise is all there is
        tags.classifier_tags.multi_class = False
        return tags


def _classes(target: Any, classes: Any) -> Any:
    """The two labels, sorted; errors depend on the target only if its labels were asked for."""
    if classes is None:
        raise InvalidInput('classes are missing: the two labels, which are public; "from y" makes those in y public')
    if isinstance(classes, str):
        _check.choice("classes", classes, ("from y",))
        try:
            check_classification_targets(target)
            kind = type_of_target(target)
        except Exception:
            raise InvalidInput("Unknown label type: y must hold class labels") from None
        if kind == "multiclass":
            raise InvalidInput("Only binary classification is supported. The type of the target is multiclass")
        classes = target
    found = np.unique(np.asarray(classes))
    if len(found) != 2:
        raise InvalidInput(f"there must be two classes, got {len(found)} class; give both as classes")
    return found
