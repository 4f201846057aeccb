# mypy: allow-subclassing-any
"""What the private estimators share: a budget, one release, and the source of randomness."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_consistent_length, column_or_1d, validate_data

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.budget import Budget, checked_budget
from matrixdp.distributions import NoiseLaw
from matrixdp.errors import InvalidInput
from matrixdp.pipeline import Release, Spends, release
from matrixdp.queries import Answer, bounded
from matrixdp.queries.clipping import LARGEST
from matrixdp.queries.units import check_added, of_units


class WrongType(InvalidInput, TypeError):
    """Records of a type that cannot be used; scikit-learn expects a TypeError."""


# Errors of scikit-learn's validation, by words in their messages, and the messages raised instead: the original ones
# quote the records. Its checks of estimators look for some of these phrases.
_NOT_A_MATRIX = (
    "X must have a record in each row, got {kind}. Reshape your data either using array.reshape(-1, 1) if it has a "
    "single feature or array.reshape(1, -1) if it is a single sample"
)
_REFUSALS: dict[str, tuple[str, type[InvalidInput]]] = {
    "Expected 2D": (_NOT_A_MATRIX, InvalidInput),
    "at least 1 dimension": (_NOT_A_MATRIX, WrongType),
    "Complex data": ("Complex data not supported: X must hold real numbers", InvalidInput),
    "Sparse data": ("Sparse data was passed for X, but dense data is required; use toarray()", WrongType),
    "convert string": ("X must hold numbers, and has text in it; encode or leave out such columns", InvalidInput),
    "argument must be": (
        "X: each argument must be a real number or a string of a number; convert or leave out such cells",
        WrongType,
    ),
    "NaN": ("X contains NaN; drop or fill such records first", InvalidInput),
    "infinity": ("X contains infinity (inf), or a value too large for float64; drop such records first", InvalidInput),
    "feature names": ("the feature names of X must be those seen in fit, in the same order", InvalidInput),
}
# Messages of scikit-learn that hold counts alone.
_COUNTS = re.compile(
    r"Found array with \d+ (sample|feature)\(s\) \(shape=\([\d, ]*\)\) while a minimum of \d+ is required by \w+\."
    r"|X has \d+ features, but \w+ is expecting \d+ features as input\.?"
)


def records_of(estimator: BaseEstimator, X: Any, **options: Any) -> Array:
    """scikit-learn's validation; masked records are refused, and errors are replaced by ones that quote no record.

    Whether there is an error depends on the records and is visible to whoever sees it.
    """
    if isinstance(X, np.ma.MaskedArray):
        raise InvalidInput("X must not be a masked array: what is masked would be counted; drop or fill it first")
    try:
        with np.errstate(all="ignore"):
            return np.asarray(validate_data(estimator, X, dtype=np.float64, **options))
    except MemoryError:
        raise
    except Exception as reason:
        refusal = _refusal(str(reason), X)
    raise refusal


def limited(
    estimator: BaseEstimator, records: npt.NDArray[Any], ids: Any, contributions: int | None
) -> npt.NDArray[Any]:
    """The records that count: all, or at most `contributions` of each id, whose number is private."""
    if (ids is None) != (contributions is None):
        raise InvalidInput("ids and contributions go together: an id per record, and how many records of an id count")
    if ids is None or contributions is None:
        return records
    check_added(estimator.adjacency)
    return bounded(records, ids, contributions)


def records_and_target(estimator: BaseEstimator, X: Any, y: Any) -> tuple[Array, Any]:
    """Records and one target per record, checked in the same way."""
    if y is None:
        raise InvalidInput("requires y to be passed, but the target y is None")
    records = records_of(estimator, X)
    try:
        target = column_or_1d(y, warn=True)
        check_consistent_length(records, target)
    except Exception:
        raise InvalidInput(f"y must have one value per record, got {_check.kind(y)}") from None
    return records, target


def bounds_of(low: Any, high: Any, features: int, names: str = "low and high") -> tuple[Array, Array]:
    """Public bounds of every feature; they have no default."""
    if low is None or high is None:
        raise InvalidInput(f"{names} are missing: public bounds, to which values outside are clipped")
    lower, upper = (np.array(_check.broadcast(names, end, (features,))) for end in (low, high))
    if not np.all(lower < upper):
        raise InvalidInput(f"{names} must be two numbers, the first below the second, for every feature")
    if not np.all(np.abs([lower, upper]) <= LARGEST):  # or the distance of a value from a bound could overflow
        raise InvalidInput(f"{names} must lie between {-LARGEST} and {LARGEST}; rescale the records")
    return lower, upper


def _refusal(text: str, X: Any) -> InvalidInput:
    """The error to raise in place of one of scikit-learn's with this text."""
    if _COUNTS.fullmatch(text):
        return InvalidInput(text)
    message, error = next(
        (said for words, said in _REFUSALS.items() if words in text),
        ("X must be a matrix of real numbers, got {kind}", InvalidInput),
    )
    return error(message.format(kind=_check.kind(X)))


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateEstimator(BaseEstimator):
    """An estimator whose `fit` makes one release; its fields are the arguments of all estimators."""

    budget: Budget | None = None
    epsilon: float | None = None
    delta: float | None = None
    adjacency: str = "add/remove"
    mechanism: str = "auto"
    random_state: Any = None
    ledger: Spends | None = None

    def __sklearn_clone__(self) -> PrivateEstimator:
        """A copy that charges the same ledger: with a copy of the ledger, every clone could spend the budget again."""
        values = {name: value for name, value in self.get_params(deep=False).items() if name != "ledger"}
        return type(self)(**{name: clone(value, safe=False) for name, value in values.items()}, ledger=self.ledger)

    def _release(
        self,
        answer: Answer,
        ledger: Spends | None,
        contributions: int | None = None,
        mechanism: str | NoiseLaw | None = None,
    ) -> Release:
        """The one release of a fit, charged to this ledger or else to the estimator's own.

        Args:
            answer: the answer from the records, which are bounded if contributions are given.
            ledger: instead of the estimator's own.
            contributions: the most records of a unit.
            mechanism: instead of the estimator's own.
        """
        answer = answer if contributions is None else of_units(answer, contributions)
        released = release(
            *answer,
            self._budget(),
            self.mechanism if mechanism is None else mechanism,
            ledger=self.ledger if ledger is None else ledger,
            query=answer.query,
            note=f"{type(self).__name__}.fit",
            rng=generator(self.random_state),
        )
        self.certificate_: Any = released.certificate
        return released

    def _budget(self) -> Budget:
        if self.budget is not None:
            if self.epsilon is not None or self.delta is not None:
                raise InvalidInput("give budget, or epsilon and delta, and not both")
            checked_budget(self.budget)
            return self.budget
        if self.epsilon is None or self.delta is None:
            raise InvalidInput("budget=Budget(epsilon, delta) is missing, or epsilon and delta; there is no default")
        return Budget(self.epsilon, self.delta)


def generator(random_state: Any) -> np.random.Generator | None:
    """A numpy Generator from a scikit-learn random state; None for entropy from the operating system."""
    if random_state is None or isinstance(random_state, np.random.Generator):
        return random_state
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(2**32, size=4, dtype=np.uint32))
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError):
        kind = type(random_state).__name__
        raise InvalidInput(f"random_state must be None, a seed or a numpy generator, got {kind}") from None
