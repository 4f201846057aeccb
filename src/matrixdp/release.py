"""The whole way in one call: calibrate, certify, spend, draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.budget import Budget
from matrixdp.errors import GuaranteeViolated
from matrixdp.mechanisms import RECIPES, calibrate
from matrixdp.noise.laws import NoiseLaw, generator
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.sensitivity import Sensitivity


class Spends(Protocol):
    """Anything that can be charged for a release, such as a ledger."""

    def spend(self, certificate: Certificate, note: str = "") -> object:
        """Records the spend durably, or raises BudgetExceeded."""


@dataclass(frozen=True, eq=False)
class Release:
    """A noisy value that may be published, with what it guarantees and the law its noise was drawn from."""

    value: Array
    certificate: Certificate
    noise: NoiseLaw

    def __str__(self) -> str:
        return str(self.certificate)


def release(
    value: Any,
    sensitivity: Sensitivity,
    budget: Budget,
    mechanism: str = "auto",
    *,
    ledger: Spends | None = None,
    note: str = "",
    accept_violation: bool = False,
    rng: np.random.Generator | None = None,
    **options: Any,
) -> Release:
    """Adds noise to a value so that the budget is kept, and certifies it.

    Args:
        value: the query's value, a vector or matrix of finite numbers.
        sensitivity: what a neighbour can change in it.
        budget: the promise to keep.
        mechanism: a mechanism's name; "auto" takes the least expected error.
        ledger: charged before any noise is drawn; if it refuses, nothing is released.
        note: what the ledger remembers of this release; never data.
        accept_violation: release even though the noise is known not to keep the budget.
        rng: a numpy Generator, for reproducible studies; entropy from the operating system by default.
        **options: options of the mechanism.

    Guarantee: `result.certificate`, for neighbours under its relation whose values differ by a member of the set.

    Raises:
        GuaranteeViolated: if the mechanism's noise does not keep the budget or its theorem is refuted, and
            accept_violation is not set.
    """
    true_value = _check.finite("value", value)
    randomness = generator(rng)
    law = calibrate(mechanism, shape=true_value.shape, sensitivity=sensitivity, budget=budget, **options)
    certificate = certify(law, sensitivity, budget)
    refuted = mechanism in RECIPES and RECIPES[mechanism].refuted
    if (refuted or not certificate.meets(budget)) and accept_violation is not True:
        reason = "rests on a theorem that is false" if refuted else f"does not keep {budget}"
        raise GuaranteeViolated(
            f"{law.source} {reason}: at epsilon {budget.epsilon:g} its delta is "
            f"{certificate.delta(budget.epsilon):.3g}{'' if certificate.exact else ' (an upper bound)'}; nothing was "
            "released. Use mechanism='auto', or accept_violation=True to release without the guarantee"
        )
    if ledger is not None:
        ledger.spend(certificate, note=note)
    return Release(value=true_value + law.sample(randomness), certificate=certificate, noise=law)
