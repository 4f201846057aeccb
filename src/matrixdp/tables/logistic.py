"""Logistic regression from one noisy second moment, a few noisy gradients, and one noisy Hessian.

The loss sum_i log(1 + exp(-y_i z_i b)) has a Hessian of at most M/4, M the second moment of z = (1, u), where u has
each feature mapped to [-1, 1]. Each step moves b by (M/4 + penalty)^-1 times the noisy gradient, which without noise
never increases the loss. Let b and g be the means of the points and of the noisy gradients over the later half of the
steps, and H the noisy Hessian at b. The result is b - H^-1 g, a Newton step from b.

Error bars: near the minimum a gradient is H times the distance from it, so the error of the result is H^-1 times the
mean of the gradients' noise, to first order. That is Gaussian with a known standard deviation. Coverage is measured in
the tests, not proven. `reliable` is false if the noise is not small compared with the Hessian.

Guarantee: a record's gradient is (p - y) z, of norm at most r = sqrt(1 + features). It contributes z z^T to M, and to
    the Hessian w w^T with w = sqrt(p (1 - p)) z, |w| <= r/2. All noise is fixed before the first release. The
    composition is exact, also for queries that depend on earlier answers, and charged once, before anything is drawn.

Source: boehning1992multinomial, for the steps; dong2022gaussian, Corollary 3.3, for the composition.
Deviates: (1) the mean of the later half, and a Newton step from it, in place of the last point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import scipy

from matrixdp import _check, queries
from matrixdp._check import Array, Shape
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.adjacency import ADD_REMOVE, checked
from matrixdp.budget import Allotment, Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.gaussian import normal_quantile
from matrixdp.distributions.margins import error_rate
from matrixdp.errors import InvalidInput, NotApplicable, NumericalFailure
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import Spends, mu_of_each, prepare, sized_for_mu
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.guarantee import ROUNDING, GaussianProfile, Guarantee
from matrixdp.queries import Answer
from matrixdp.queries.answer import changes, query
from matrixdp.queries.clipping import centred
from matrixdp.queries.units import of_units
from matrixdp.sensitivity import Frobenius, Sensitivity
from matrixdp.tables.answers import PreparedTable, Releasable
from matrixdp.tables.columns import Column
from matrixdp.tables.counts import Named, domain_of, rows_of
from matrixdp.tables.estimates import added, features_of
from matrixdp.tables.kinds import Boolean, Categorical
from matrixdp.tables.outputs import NUMBERS, Axes, Labelled

STEPS = 32
"""How many gradients are released."""

MOMENT, GRADIENT, HESSIAN = "moment", "gradient", "hessian"


@dataclass(frozen=True, eq=False)
class LogisticFit:
    """The coefficients of a logistic regression: the intercept first, then one per feature.

    Attributes:
        value: the coefficients.
        standard_error: of the noise, to first order.
        reliable: whether the noise is small compared with the Hessian, so that error bars hold.
        certificate: what all releases guarantee together.
    """

    value: Array
    standard_error: Array
    reliable: bool
    certificate: Composition

    def numbers(self, level: float) -> dict[str, Array]:
        """Values, standard errors, and intervals of this level, from the normal distribution."""
        half = normal_quantile(error_rate(level)) * self.standard_error
        parts = (self.value, self.standard_error, self.value - half, self.value + half)
        return dict(zip(NUMBERS, parts, strict=True))


class LogisticRegression:
    """A logistic regression whose noise is sized; it still has to be charged and drawn, once."""

    def __init__(
        self,
        features: Array,
        positive: Array,
        low: Any,
        high: Any,
        budget: Budget,
        *,
        penalty: float,
        steps: int = STEPS,
        adjacency: str = ADD_REMOVE,
        contributions: int | None = None,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        """Sizes the noise, and checks that the composition keeps the budget.

        Args:
            features: one record per row; private.
            positive: whether each record is in the second class; private.
            low: the least value of each feature, public; smaller values are clipped to it.
            high: the largest value of each feature, likewise.
            budget: the guarantee to keep.
            penalty: half of this is added to the loss for each squared coefficient of u, except for the intercept.
            steps: how many gradients are released.
            adjacency: which data sets are neighbours.
            contributions: the most records of a unit, if units are protected.
            asked: for a table, the query of `change_in_logistic_regression` without `of`.
        """
        self._middle, self._half = (np.asarray(high) + low) / 2, (np.asarray(high) - low) / 2
        u = centred(features, low, high)
        z = np.column_stack([np.ones(len(u)), u])
        self._z, self._positive = np.asfortranarray(z), np.asarray(positive, dtype=np.float64)
        if not len(u):  # a record of zeros adds nothing to any sum
            self._z, self._positive = np.zeros((1, u.shape[1] + 1)), np.zeros(1)
        self._ridge = np.diag([1e-9] + [_check.positive("penalty", penalty)] * u.shape[1])
        self._steps, self._asked = _check.count("steps", steps), asked
        self._adjacency, self._contributions = adjacency, contributions
        if isinstance(budget, Budget) and budget.delta == 0:
            raise NotApplicable(
                "logistic regressions have Gaussian noise, which does not keep delta = 0; use a delta well below "
                "1/rows, such as 1e-6"
            )
        planned = budget if isinstance(budget, Allotment) else None
        self._terms = {} if planned is None else planned.terms()
        self._budget = budget = budget if planned is None else planned.alone
        if planned is None:
            self._mu = mu_of_each(budget, self._steps + 2)
        else:
            shape, together = planned_as(self._z.shape[1], self._steps, adjacency)
            whole = certify(planned.law(shape, together), together).mu
            if whole is None:
                raise InvalidInput("the plan has no Gaussian noise for this part, which a logistic regression needs")
            self._mu = whole / math.sqrt(self._steps + 2) * (1 - 1e-9)
        self._certificates = {of: self._sized(of) for of in (MOMENT, GRADIENT, HESSIAN)}
        account = Accountant()
        for of, certificate in self._certificates.items():
            account.add(certificate, self._steps if of == GRADIENT else 1)
        self.certificate = account.composition(budget)
        if not self.certificate.meets(budget):
            raise NumericalFailure("delta is too small for the total-variation error of the samplers; use a larger one")
        mu, parts = self.certificate.mu, self.certificate.parts
        assert mu is not None
        error = math.fsum(part.count * part.certificate.total_variation for part in parts) * (1 + ROUNDING)
        self._total = Guarantee(GaussianProfile(mu * (1 + ROUNDING)), parts[0].certificate.adjacency, error)
        if planned is not None:
            planned.check(self._total)
        self._drawn = False

    def release(
        self, ledger: Spends | None = None, note: str = "", rng: np.random.Generator | None = None
    ) -> LogisticFit:
        """Charges the ledger, if there is one, and then draws all noise.

        Args:
            ledger: charged once, for the composition.
            note: a note for the ledger; never data.
            rng: a numpy Generator, for tests only; not with a ledger.
        """
        if self._drawn:
            raise InvalidInput("this regression was drawn already, and is paid for once; prepare another")
        if ledger is not None and rng is not None:
            raise InvalidInput("random_state and ledger exclude each other: seeded noise is for tests only")
        if ledger is not None:
            self._charge(ledger, note)
        self._drawn = True
        curvature = self._curvature(MOMENT, self._z, rng)[0] / 4 + self._ridge
        b, points, gradients = np.zeros(len(self._ridge)), [], []
        for _ in range(self._steps):
            rows = (self._probabilities(b) - self._positive)[:, None] * self._z
            gradient = self._noisy(GRADIENT, rows, rng) + self._ridge @ b
            points.append(b)
            gradients.append(gradient)
            b = b - np.linalg.solve(curvature, gradient)
        later = slice(self._steps // 2, None)
        b, gradient = np.mean(points[later], axis=0), np.mean(gradients[later], axis=0)
        p = self._probabilities(b)
        hessian, reliable = self._curvature(HESSIAN, np.sqrt(p * (1 - p))[:, None] * self._z, rng)
        inverse = np.linalg.inv(hessian + self._ridge)
        spread = float(np.max(self._certificates[GRADIENT].law.standard_error)) / math.sqrt(len(points[later]))
        units = np.diag(np.append(1.0, 1 / self._half))  # from (1, u) to (1, x)
        units[0, 1:] = -self._middle / self._half
        return LogisticFit(
            value=units @ (b - inverse @ gradient),
            standard_error=spread * np.linalg.norm(units @ inverse, axis=1),
            reliable=reliable,
            certificate=self.certificate,
        )

    def _sized(self, of: str) -> Certificate:
        size = self._z.shape[1]
        example = _statistic(of, np.zeros((1, size)), self._adjacency, self._contributions)
        asked = example.query
        if self._asked is not None:
            asked = query(self._asked["name"], of=of, **self._asked["parameters"])
        law = calibrate(
            "analytic" if of == GRADIENT else "optimal",
            shape=example.value.shape,
            sensitivity=example.sensitivity,
            budget=self._budget,
        )
        assert isinstance(law, Gaussian)
        return sized_for_mu(law, example.sensitivity, self._mu, query=asked)

    def _charge(self, ledger: Spends, note: str) -> None:
        spend = _check.spend_of(ledger)
        unit = self._certificates[MOMENT].unit
        protected = {"unit": unit} if unit is not None and isinstance(ledger, Ledger) else {}
        spend(self._total, note=note, **self._terms, **protected)

    def _noisy(self, of: str, rows: Array, rng: np.random.Generator | None) -> Array:
        """One of the releases that were charged."""
        planned, answer = self._certificates[of], _statistic(of, rows, self._adjacency, self._contributions)
        prepared = prepare(*answer, self._budget, planned.law, query=planned.query, rng=rng)
        found = prepared.certificate
        if not (float(found.mu or math.inf) <= self._mu and found.total_variation <= planned.total_variation):
            raise NumericalFailure("a release would have cost more than was charged for it; use fewer steps")
        return np.asarray(prepared.release().value)

    def _probabilities(self, b: Array) -> Array:
        """The probability of the second class for each record, which depends on that record alone to the last bit.

        In a matrix product the rounding may depend on the number of records and on a record's place.
        """
        scores = np.zeros(len(self._z))
        for column, weight in zip(self._z.T, b, strict=True):
            scores += column * weight
        return np.asarray(scipy.special.expit(scores))

    def _curvature(self, of: str, rows: Array, rng: np.random.Generator | None) -> tuple[Array, bool]:
        """A noisy second moment, its eigenvalues raised to at least its noise, and whether they were well above."""
        value = self._noisy(of, rows, rng)
        law = self._certificates[of].law
        floor = 2 * float(np.max(law.standard_error)) * math.sqrt(law.shape[0])
        values, vectors = np.linalg.eigh((value + value.T) / 2)
        return (vectors * np.maximum(values, floor)) @ vectors.T, bool(values[0] > 4 * floor)


def planned_as(terms: int, steps: int, adjacency: str) -> tuple[Shape, Frobenius]:
    """The shape and the set by which all releases of a fit are planned: one vector of all their numbers.

    Guarantee: scaled by its sensitivity, each release changes by at most 1 in length, and all of them together by at
        most sqrt(steps + 2). Gaussian noise of standard deviation s on the vector has mu = sqrt(steps + 2)/s. So do
        steps + 2 Gaussian releases of mu = 1/s each, also if later ones depend on earlier answers.
    """
    return (terms * (2 * terms + steps),), Frobenius(math.sqrt(steps + 2) * (1 + 1e-15), checked(adjacency))


def _statistic(of: str, rows: Array, adjacency: str, contributions: int | None) -> Answer:
    """The sum of the records' gradients, or the second moment of their rows."""
    longest = math.nextafter(math.sqrt(rows.shape[1]), math.inf)
    if of == GRADIENT:
        answer = queries.sum(rows, norm=longest, adjacency=adjacency)
    else:
        answer = queries.second_moment(rows, norm=longest if of == MOMENT else longest / 2, adjacency=adjacency)
    return answer if contributions is None else of_units(answer, contributions)


# --- of a table ---


@changes("logistic-regression")
def change_in_logistic_regression(
    shape: Shape,
    *,
    of: str,
    target: str,
    columns: Named,
    adjacency: str,
    unit: str | None = None,
    contributions: int = 1,
) -> Sensitivity:
    """What a unit can change in one of the releases."""
    _check.choice("of", of, (MOMENT, GRADIENT, HESSIAN))
    domain = domain_of(columns)
    check_two_classes(target, domain[target])
    features = len(features_of({name: column for name, column in domain.items() if name != target})[2])
    rows = None if unit is None else rows_of(unit, contributions)
    example = _statistic(of, np.zeros((1, features + 1)), added(adjacency), rows)
    if shape != example.value.shape:
        raise InvalidInput(f"the {of} has shape {example.value.shape}, not {shape}")
    return example.sensitivity


def check_two_classes(name: str, column: Column) -> None:
    """Raises InvalidInput unless a column has two values."""
    if not (isinstance(column, Boolean) or (isinstance(column, Categorical) and len(column.values) == 2)):
        raise InvalidInput(
            f"column {name!r} must be boolean, or categorical with two values, for a logistic regression"
        )


@dataclass(frozen=True, eq=False, repr=False)
class LogisticRelease(Labelled):
    """Coefficients of a logistic regression, with labels and error bars.

    Attributes:
        fit: the same without labels.
        axes: the names of the terms.
        asked: the name and the public parameters of the query.
    """

    fit: LogisticFit
    axes: Axes
    asked: Mapping[str, Any]

    @property
    def query(self) -> Mapping[str, Any]:
        """The name and the public parameters of the query."""
        return self.asked

    @property
    def certificate(self) -> Any:
        """What all releases of the fit guarantee together."""
        return self.fit.certificate

    def certified(self, certificate: Any) -> LogisticRelease:
        """The same with this certificate."""
        return replace(self, fit=replace(self.fit, certificate=certificate))

    def _numbers(self, level: float) -> dict[str, Any]:
        return {**self.fit.numbers(level), "reliable": np.full(len(self.fit.value), self.fit.reliable)}


@dataclass(frozen=True, eq=False, repr=False)
class LogisticAnswer(Releasable):
    """The rows of a logistic regression, still private; `release` fits it.

    `compare` and plans use its `shape` and `sensitivity`, which are those of all its releases together: see
    `planned_as`. Since later releases depend on earlier answers, it is not a pair of a value and a set.
    """

    rows: Array
    low: tuple[float, ...]
    high: tuple[float, ...]
    ridge: float
    steps: int
    query: Mapping[str, Any]
    axes: Axes

    def __repr__(self) -> str:
        return f"LogisticAnswer(rows: private; {', '.join(self.axes[0][1])})"

    def __iter__(self) -> NoReturn:
        raise InvalidInput("a logistic regression is several releases, each after the last: use answer.release(budget)")

    @property
    def shape(self) -> Shape:
        """How many numbers are released in all."""
        return planned_as(self.cells, self.steps, ADD_REMOVE)[0]

    @property
    def sensitivity(self) -> Sensitivity:
        """What a unit can change in them, each release scaled by its sensitivity."""
        return planned_as(self.cells, self.steps, ADD_REMOVE)[1]

    @property
    def cells(self) -> int:
        """How many coefficients there are."""
        return len(self.low) + 1

    def prepare(self, budget: Budget, mechanism: str | NoiseLaw = "auto", **options: Any) -> PreparedTable:
        """All steps of `release` before the ledger is charged."""
        if mechanism != "auto" or options:
            raise InvalidInput("a logistic regression has noise of its own: leave mechanism and its options out")
        prepared = LogisticRegression(
            self.rows[:, 1:], self.rows[:, 0], self.low, self.high, budget, penalty=self.ridge, steps=self.steps,
            contributions=self.query["parameters"].get("contributions"), asked=self.query,
        )  # fmt: skip
        return PreparedTable(prepared, lambda fit: LogisticRelease(fit, self.axes, self.query))
