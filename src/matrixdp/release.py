"""The whole way in one call: calibrate, certify, spend, draw."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import numpy as np

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.mechanisms import RECIPES, calibrate
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.noise import tensors
from matrixdp.noise.laws import Gaussian, NoiseLaw
from matrixdp.noise.sampler import Sampling, prepared, sampling_for, seeded
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import (
    Certificate,
    certify,
    check_releasable,
    refuse_unsafe_floats,
    with_sampling_error,
)
from matrixdp.sensitivity import RankOne, Sensitivity

# How far a value for a RankOne set may be from symmetric: the rounding of a sum of x x^T in single precision.
SYMMETRY = 1e-5


class Spends(Protocol):
    """Anything that can be charged for a release, such as a ledger."""

    def spend(self, certificate: Certificate, note: str = "") -> object:
        """Records the spend durably, or raises BudgetExceeded."""


@dataclass(frozen=True, eq=False)
class Release:
    """A noisy value that may be published, with what it guarantees and the law its noise was drawn from.

    A value on Dask is a recipe with the records and the keys in it: publish what comes out of `compute()`, never that.
    """

    value: Any
    certificate: Certificate
    noise: NoiseLaw

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if type(self.value).__module__.partition(".")[0] == "dask":
            raise TypeError("a release on Dask has records and keys inside; pickle the value that compute() gives")
        return super().__reduce_ex__(protocol)

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
        value: the query's value, a vector or matrix of finite numbers: an array; a PyTorch tensor, which comes back as
            a tensor on its device; or a Dask array, which comes back as one, with noise drawn on the workers.
        sensitivity: what a neighbour can change in it.
        budget: the promise to keep.
        mechanism: a mechanism's name; "auto" takes the least expected error.
        ledger: charged when all else is done that can fail, and before any noise is drawn; if it refuses, nothing is
            released.
        note: what the ledger remembers of this release; never data.
        accept_violation: release even though the noise is known not to keep the budget, or is not floating-point-safe;
            the latter has no price that a ledger could add up, and is not charged to one.
        rng: a numpy Generator, for reproducible studies; entropy from the operating system by default.
        **options: options of the mechanism.

    Guarantee: `result.certificate`, for neighbours under its relation whose values differ by a member of the set and
    both fit the grid of the noise. Values that do not (some ten million times the noise or more, as the law has it) are
    refused, and that one refusal is not hidden.

    Warns:
        UserWarning: if rng is given; such a release is marked as reproducible.

    Raises:
        GuaranteeViolated: if the mechanism's noise does not keep the budget, is not floating-point-safe ("l2" and
            "spherical" are not) or rests on a refuted theorem, and accept_violation is not set.
    """
    if type(value).__module__.partition(".")[0] == "dask":  # an extra, in a room above this one
        on_dask: Callable[..., Release] = importlib.import_module("matrixdp.distributed").release
        kept = {"ledger": ledger, "note": note, "accept_violation": accept_violation, "rng": rng}
        return on_dask(value, sensitivity, budget, mechanism, **kept, **options)
    true_value = _checked_value(value, sensitivity)
    shape = tensors.shape_of(true_value)
    law = calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=budget, **options)
    law, sampling = drawable(law, sensitivity, budget, rng)
    certificate = certify(law, sensitivity, budget, sampling)
    refuted = mechanism in RECIPES and RECIPES[mechanism].refuted
    check_releasable(certificate, budget, refuted=refuted, accept_violation=accept_violation)
    if ledger is not None:
        if rng is not None:
            raise InvalidInput("rng and ledger exclude each other: a release that can be reproduced is for tests only")
        refuse_unsafe_floats(certificate, "charging a release without a guarantee to a ledger")
    finish = _prepared(true_value, law, sampling, rng, tensor=value if tensors.is_tensor(value) else None)
    if rng is not None:
        warnings.warn("release with a generator of your own: whoever knows it can remove the noise", stacklevel=2)
    if ledger is not None:
        ledger.spend(certificate, note=note)
    return Release(value=finish(), certificate=certificate, noise=law)


def _prepared(
    value: Any, law: NoiseLaw, sampling: Sampling, rng: np.random.Generator | None, tensor: Any = None
) -> Callable[[], Any]:
    """Does all that can fail, and gives the one call that draws; the result is like the tensor, if there is one."""
    if tensors.is_tensor(value):
        if isinstance(law, Gaussian) and tensors.stays_on_device(value, law, sampling):
            return tensors.prepared(value, law, sampling)
        value = tensors.to_array(value)
    finish = prepared(value, law, sampling, rng)
    return finish if tensor is None else lambda: tensors.like(finish(), tensor)


def _checked_value(value: Any, sensitivity: Sensitivity) -> Any:
    """A finite array or tensor; a symmetric array where the set promises that, for symmetric noise hides only that."""
    checked = tensors.checked(value) if tensors.is_tensor(value) else _check.finite("value", value)
    if not isinstance(sensitivity, RankOne):
        return checked
    sensitivity.fits(tensors.shape_of(checked))
    # in double precision: averaging in single precision would move entries by more than the grid accounts for
    array = tensors.to_array(checked) if tensors.is_tensor(checked) else checked
    if not np.max(np.abs(array - array.T)) <= SYMMETRY * np.max(np.abs(array)):
        raise InvalidInput(
            "value must be symmetric for a RankOne set, which is for sums of x x^T; use Frobenius for x y^T"
        )
    return (array + array.T) / 2


def drawable(
    law: NoiseLaw, sensitivity: Sensitivity, budget: Budget, rng: np.random.Generator | None
) -> tuple[NoiseLaw, Sampling]:
    """How to draw the law, and the law inflated slightly, so that the budget covers the discretization."""
    if rng is not None:
        return law, seeded(rng)
    exact = certify(law, sensitivity)
    sampling = sampling_for(law, sensitivity, exact.mu)
    if not (isinstance(law, Gaussian) and exact.mu is not None):
        return law, sampling
    off = with_sampling_error(0.0, budget.epsilon, sampling.total_variation)
    spare = budget.delta - off
    if not spare > 0:
        raise NumericalFailure(
            f"delta {budget.delta:g} is below {off:.2g}, what the sampler can be off by at epsilon {budget.epsilon:g} "
            f"(it grows with e^epsilon) and {math.prod(law.shape)} entries; use a larger delta or a smaller epsilon"
        )
    whole = min(exact.mu, float(gaussian.mu(budget.epsilon, spare))) if exact.meets(budget) else exact.mu
    return law.scaled(exact.mu / (whole - sampling.enlargement) * HEADROOM), sampling
