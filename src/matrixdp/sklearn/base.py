# mypy: allow-subclassing-any
"""What the private estimators share: a budget, one release, and the noise's randomness."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from matrixdp._check import Array
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.queries import Answer
from matrixdp.release import Release, Spends, release


def records_of(estimator: BaseEstimator, X: Any, **options: Any) -> Array:
    """scikit-learn's validation, without masked records and without quoting a cell."""
    if isinstance(X, np.ma.MaskedArray):
        raise InvalidInput("X must not be a masked array: what is masked would be counted; drop or fill it first")
    try:
        return np.asarray(validate_data(estimator, X, dtype=np.float64, **options))
    except ValueError as reason:
        if "could not convert string" in str(reason):
            raise InvalidInput("X must hold numbers, and has text in it; encode or leave out such columns") from None
        raise


class PrivateEstimator(BaseEstimator):
    """An estimator whose `fit` makes one release; subclasses take budget or epsilon and delta, and a mechanism."""

    budget: Budget | None
    epsilon: float | None
    delta: float | None
    mechanism: str
    random_state: Any

    def _release(self, answer: Answer, ledger: Spends | None) -> Release:
        """The one release of a fit; its certificate becomes `certificate_`."""
        released = release(
            *answer,
            self._budget(),
            self.mechanism,
            ledger=ledger,
            note=f"{type(self).__name__}.fit",
            rng=generator(self.random_state),
        )
        # A certificate finds its worst difference when asked, by a closure; estimators must be picklable, so ask now.
        worst = partial(np.array, released.certificate.witness)
        self.certificate_ = replace(released.certificate, _witness=worst)
        return released

    def _budget(self) -> Budget:
        if self.budget is not None:
            if self.epsilon is not None or self.delta is not None:
                raise InvalidInput("give budget, or epsilon and delta, and not both")
            return self.budget
        if self.epsilon is None or self.delta is None:
            raise InvalidInput("budget=Budget(epsilon, delta) is missing, or epsilon and delta; there is no default")
        return Budget(self.epsilon, self.delta)


def generator(random_state: Any) -> np.random.Generator | None:
    """A numpy Generator from what scikit-learn calls a random state; None leaves it to the operating system."""
    if random_state is None or isinstance(random_state, np.random.Generator):
        return random_state
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(2**32, size=4, dtype=np.uint32))
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError):
        raise InvalidInput(f"random_state must be None, a seed or a numpy generator, got {random_state!r}") from None
