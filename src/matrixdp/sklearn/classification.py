# mypy: allow-subclassing-any
"""Logistic regression by private steps of a majorised Newton method."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted

from matrixdp import _check, queries
from matrixdp._check import Array
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.adjacency import takes_relation
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import Spends, mu_of_each, prepare, sized_for_mu
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.guarantee import ROUNDING, GaussianProfile, Guarantee
from matrixdp.queries import Answer
from matrixdp.queries.units import answered, of_units
from matrixdp.sklearn.base import PrivateEstimator, generator, limited, records_and_target, records_of
from matrixdp.sklearn.regression import bounds_of
from matrixdp.tables.moments import bounded_moments


@takes_relation
class PrivateLogisticRegression(ClassifierMixin, PrivateEstimator):
    """Logistic regression for two classes, from one noisy second moment and a few noisy gradients.

    The loss sum_i log(1 + exp(-y_i z_i b)) has a Hessian of at most M/4, M the second moment of z = (1, u), where u has
    each feature mapped to [-1, 1]. Each step moves b by (M/4 + penalty)^-1 times the noisy gradient, which never raises
    the loss but for the noise (boehning1992multinomial). The result is the mean of the later half of the steps.

    Args:
        C: the inverse of the penalty on squared coefficients, in units of the mapped features.
        low: the least value of each feature, or one number for all; public. Smaller values count as this one.
        high: the largest value of each feature, likewise.
        classes: the two labels; public. By default those in y, which then count as public.
        steps: how many gradients are released.
        budget: the guarantee to keep; or give epsilon and delta.
        epsilon: instead of budget, with delta.
        delta: instead of budget, with epsilon.
        adjacency: which data sets are neighbours.
        mechanism: "auto", the least noise for each of the releases; there is no other yet.
        random_state: for tests only; whoever knows it can remove the noise.
        ledger: charged by every fit, unless fit is given another.

    Attributes:
        coef_: a coefficient per feature, in one row.
        intercept_: one number.
        classes_: the two labels.
        certificate_: what all releases of the fit guarantee together.

    Guarantee: `certificate_` covers the attributes. A record's gradient has norm at most sqrt(1 + features). All noise
        is fixed before the first release; its composition is exact, also for gradients that depend on earlier answers,
        and is charged to the ledger once, before anything is drawn.

    Source: boehning1992multinomial, for the step; dong2022gaussian, for the composition.
    """

    def __init__(
        self,
        C: float = 1.0,
        *,
        low: Any = None,
        high: Any = None,
        classes: Any = None,
        steps: int = 32,
        budget: Budget | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        adjacency: str = "add/remove",
        mechanism: str = "auto",
        random_state: Any = None,
        ledger: Spends | None = None,
    ) -> None:
        self.C = C
        self.low = low
        self.high = high
        self.classes = classes
        self.steps = steps
        self.budget = budget
        self.epsilon = epsilon
        self.delta = delta
        self.adjacency = adjacency
        self.mechanism = mechanism
        self.random_state = random_state
        self.ledger = ledger

    def fit(
        self, X: Any, y: Any, *, ids: Any = None, contributions: int | None = None, ledger: Spends | None = None
    ) -> PrivateLogisticRegression:
        """Releases the noisy moment and gradients, charged to the ledger together if there is one."""
        records, target = records_and_target(self, X, y)
        classes = _classes(target, self.classes)
        low, high = bounds_of(self.low, self.high, records.shape[1])
        middle, half = (low + high) / 2, (high - low) / 2
        penalty, steps = 1 / _check.positive("C", self.C), _check.count("steps", self.steps)
        _check.choice("mechanism", self.mechanism, ("auto",))
        z = np.column_stack([np.ones(len(records)), np.clip((records - middle) / half, -1.0, 1.0)])
        positive = (target == classes[1]).astype(np.float64)
        places = limited(self, np.arange(len(records)), ids, contributions)
        z, positive = z[places], positive[places]
        moment = answered(bounded_moments, records[places], low, high, adjacency=self.adjacency)
        private = _Releases(self._budget(), steps, moment, contributions)
        gradients = private.planned_gradients(z.shape[1], self.adjacency)
        private.charge(self.ledger if ledger is None else ledger, f"{type(self).__name__}.fit", self.random_state)
        ridge = np.diag([1e-9] + [penalty] * records.shape[1])
        values, vectors = np.linalg.eigh(private.moment())
        floor = private.noise_floor
        curvature = (vectors * np.maximum(values, floor)) @ vectors.T / 4 + ridge
        weights, kept = np.zeros(z.shape[1]), []
        for certificate in gradients:
            rows = (expit(z @ weights) - positive)[:, None] * z
            gradient = private.gradient(rows, certificate)
            weights = weights - np.linalg.solve(curvature, gradient + ridge @ weights)
            kept.append(weights)
        mean = np.mean(kept[len(kept) // 2 :], axis=0)
        self.classes_ = classes
        self.coef_ = (mean[1:] / half)[None, :]
        self.intercept_ = np.array([mean[0] - float(mean[1:] @ (middle / half))])
        self.certificate_ = private.composition
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
    """The two labels, in order."""
    if classes is None:
        try:
            check_classification_targets(target)
            kind = type_of_target(target)
        except Exception:
            raise InvalidInput("Unknown label type: y must hold class labels") from None
        if kind == "multiclass":
            raise InvalidInput("Only binary classification is supported. The type of the target is multiclass")
    found = np.unique(np.asarray(target if classes is None else classes))
    if len(found) != 2:
        raise InvalidInput(f"there must be two classes, got {len(found)} class; give both as classes")
    return found


class _Releases:
    """One second moment and some gradients, whose noise is fixed and charged before the first is drawn."""

    def __init__(self, budget: Budget, steps: int, moment: Answer, contributions: int | None) -> None:
        self.budget, self.steps, self._contributions = budget, steps, contributions
        self._moment = moment = self._of(moment)
        self._mu = mu_of_each(budget, steps + 1)
        self._certificates = [self._sized("optimal", moment.value.shape, moment.sensitivity)]
        self._rng: np.random.Generator | None = None
        self.composition: Composition

    def _of(self, answer: Answer) -> Answer:
        return answer if self._contributions is None else of_units(answer, self._contributions)

    def _sized(self, mechanism: str, shape: Any, sensitivity: Any) -> Certificate:
        law = calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=self.budget)
        assert isinstance(law, Gaussian)
        return sized_for_mu(law, sensitivity, self._mu)

    def planned_gradients(self, size: int, adjacency: str) -> list[Certificate]:
        """The noise of each gradient, for records of norm at most sqrt(size)."""
        self._norm, self._adjacency = math.nextafter(math.sqrt(size), math.inf), adjacency
        example = self._of(queries.sum(np.zeros((1, size)), norm=self._norm, adjacency=adjacency))
        each = self._sized("analytic", (size,), example.sensitivity)
        self._certificates += [each] * self.steps
        return [each] * self.steps

    def charge(self, ledger: Spends | None, note: str, random_state: Any) -> None:
        """Checks that the composition keeps the budget, and charges all of it at once."""
        account = Accountant()
        for certificate in self._certificates:
            account.add(certificate)
        self.composition = account.composition(self.budget)
        if not self.composition.meets(self.budget):
            raise NumericalFailure("delta is too small for the total-variation error of the samplers; use a larger one")
        self._rng = generator(random_state)
        if ledger is None:
            return
        if self._rng is not None:
            raise InvalidInput("random_state and ledger exclude each other: seeded noise is for tests only")
        mu = math.sqrt(math.fsum(float(c.mu or 0.0) ** 2 for c in self._certificates)) * (1 + ROUNDING)
        error = math.fsum(c.total_variation for c in self._certificates) * (1 + ROUNDING)
        spend: Callable[..., object] = ledger.spend
        protected = {"unit": "unit"} if self._contributions is not None and isinstance(ledger, Ledger) else {}
        spend(Guarantee(GaussianProfile(mu), self._certificates[0].adjacency, error), note=note, **protected)

    def _drawn(self, answer: Answer, certificate: Certificate) -> Array:
        prepared = prepare(*answer, self.budget, certificate.law, query=answer.query, rng=self._rng)
        found = prepared.certificate
        if not (float(found.mu or math.inf) <= self._mu and found.total_variation <= certificate.total_variation):
            raise NumericalFailure("a release would have cost more than was charged for it; use fewer steps")
        return np.asarray(prepared.release().value)

    def moment(self) -> Array:
        """The noisy second moment."""
        value = self._drawn(self._moment, self._certificates[0])
        return np.asarray((value + value.T) / 2)

    @property
    def noise_floor(self) -> float:
        """About the largest eigenvalue of the noise on the moment."""
        law = self._certificates[0].law
        return 2 * float(np.max(law.standard_error)) * math.sqrt(law.shape[0])

    def gradient(self, rows: Array, certificate: Certificate) -> Array:
        """The noisy sum of the records' gradients."""
        return self._drawn(
            self._of(answered(queries.sum, rows, norm=self._norm, adjacency=self._adjacency)), certificate
        )
