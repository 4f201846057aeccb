"""size -> certify -> charge -> draw: the only way from a value to a release, on every backend.

A mechanism proposes a noise law, which is sized for the budget, the cost of drawing it included. `certify` states what
it then guarantees. A ledger is charged, durably, and only then does a backend draw the noise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np

from matrixdp import _check
from matrixdp.backends import Backend
from matrixdp.budget import Allotment, Budget, checked_budget
from matrixdp.distributions import Gaussian, NoiseLaw, Product, Spherical
from matrixdp.errors import InvalidInput, NotCertifiable, NumericalFailure
from matrixdp.mechanisms import RECIPES, calibrate
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate, certify, check_releasable, drawn, refuse_unsafe_floats
from matrixdp.privacy.drawing import Drawing, drawing_for, seeded
from matrixdp.privacy.guarantee import ROUNDING, Guarantee, with_total_variation
from matrixdp.released import Release as Release
from matrixdp.sensitivity import Sensitivity

# Noise is inflated by up to this share, so that mu stays what it was in spite of the cost of drawing.
SMALL = 0.02
# Shares of delta tried in turn for the total-variation error of the samplers, where several releases share a budget.
SAMPLER_SHARES = (0.01, 0.2, 0.5)
# The share of delta where no shares are tried; that error grows with e^epsilon.
SAMPLER_SHARE, SAMPLER_SHARE_ABOVE, LARGE_EPSILON = 1e-3, 0.5, 16.0


class Spends(Protocol):
    """Anything that can be charged for a release, such as a ledger."""

    def spend(self, certificate: Guarantee, note: str = "") -> object:
        """Records the spend durably, or raises BudgetExceeded. Releases of a plan also pass `series` and `plan`."""


def release(
    value: Any,
    sensitivity: Sensitivity,
    budget: Budget,
    mechanism: str | NoiseLaw = "auto",
    *,
    ledger: Spends | None = None,
    note: str = "",
    query: Mapping[str, Any] | None = None,
    accept_violation: bool = False,
    rng: np.random.Generator | None = None,
    **options: Any,
) -> Release:
    """Adds noise to a value so that the budget is kept, and certifies it.

    Args:
        value: the query's value, finite numbers in any number of dimensions: an array or a number; a PyTorch tensor,
            released as a tensor on its device; or a Dask array, released as one, with noise drawn on the workers.
        sensitivity: what a neighbour can change in it.
        budget: the guarantee to keep; or a part of a plan or a shared budget, which fixes the noise.
        mechanism: a mechanism's name, or a noise law; "auto" takes the least expected error.
        ledger: charged after everything else that can fail, and before any noise is drawn; if it refuses, nothing is
            released.
        note: a note for the ledger; never data.
        query: the query's name and public parameters, for the certificate: `{"name": ..., "parameters": {...}}`.
        accept_violation: release even though the noise is known not to keep the budget, or is not floating-point-safe.
            The latter has no guarantee that a ledger could add up, and is refused together with a ledger.
        rng: a numpy Generator, for reproducible studies without a ledger; entropy from the operating system by default.
        **options: options of the mechanism.

    Guarantee: `result.certificate`, for neighbours under its adjacency whose values differ by a member of the set and
    both fit the grid of the noise. Larger values are refused, and that refusal can be seen. The limit is public: 2^14
    to 2^42 standard deviations of Gaussian noise, lower for smaller budgets and more entries.

    Warns:
        UserWarning: if rng is given; such a release is marked as reproducible.

    Raises:
        GuaranteeViolated: if the mechanism's noise does not keep the budget, is not floating-point-safe ("l2" and
            "spherical" are not) or comes from a mechanism whose theorem is false, and accept_violation is not set.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget, release
        >>> from matrixdp.queries import second_moment
        >>> records = np.random.default_rng(0).normal(size=(100, 3))
        >>> out = release(*second_moment(records, norm=1.0), Budget(1.0, 1e-6))
        >>> out.value.shape, round(out.certificate.epsilon(1e-6), 3)
        ((3, 3), 1.0)
    """
    prepared = prepare(
        value, sensitivity, budget, mechanism, query=query, accept_violation=accept_violation, rng=rng, **options
    )
    return prepared.release(ledger, note)


def prepare(
    value: Any,
    sensitivity: Sensitivity,
    budget: Budget,
    mechanism: str | NoiseLaw = "auto",
    *,
    query: Mapping[str, Any] | None = None,
    accept_violation: bool = False,
    rng: np.random.Generator | None = None,
    **options: Any,
) -> Prepared:
    """All steps of `release` before the ledger is charged: its certificate is known, and nothing is drawn yet."""
    backend = _backend_of(value)
    checked = backend.checked(value, sensitivity)
    shape = tuple(int(side) for side in checked.shape)
    law = proposed(mechanism, shape, sensitivity, budget, options)
    planned = budget if isinstance(budget, Allotment) else None
    if planned is not None:
        budget = planned.alone
    certificate = sized_for_budget(law, sensitivity, budget, rng, query)
    if planned is not None and rng is None:  # seeded noise is not charged to a ledger
        planned.check(certificate)
    refuted = isinstance(mechanism, str) and mechanism in RECIPES and RECIPES[mechanism].refuted
    check_releasable(certificate, budget, refuted=refuted, accept_violation=accept_violation)
    assert certificate.drawing is not None
    draw = backend.prepared(checked, certificate.law, certificate.drawing, rng, value)
    terms = {} if planned is None else planned.terms()
    return Prepared(certificate, draw, terms, _is_on_grid(value, certificate.law, query))


class Prepared:
    """A release that still has to be charged and drawn, once. Until then the value must not be changed."""

    def __init__(
        self, certificate: Certificate, draw: Callable[[], Any], terms: Mapping[str, Any], on_grid: bool
    ) -> None:
        self.certificate, self._terms, self._on_grid = certificate, terms, on_grid
        self._draw: Callable[[], Any] | None = draw

    def release(self, ledger: Spends | None = None, note: str = "") -> Release:
        """Charges the ledger, if there is one, and then draws the noise."""
        draw, self._draw = self._draw, None
        if draw is None:
            raise InvalidInput("this release was drawn already, and is paid for once; prepare another")
        assert self.certificate.drawing is not None
        seeded = self.certificate.drawing.reproducible
        if seeded and ledger is not None:
            raise InvalidInput("rng and ledger exclude each other: a release that can be reproduced is for tests only")
        if seeded:
            warnings.warn("release with a generator of your own: whoever knows it can remove the noise", stacklevel=3)
        if ledger is not None:
            refuse_unsafe_floats(self.certificate, "charging a release without a guarantee to a ledger")
            unit = self.certificate.unit
            protected = {"unit": unit} if unit is not None and _takes_units(ledger) else {}
            _check.spend_of(ledger)(self.certificate, note=note, **self._terms, **protected)
        return Release(draw(), self.certificate, self.certificate.law, self._on_grid)


def _backend_of(value: Any) -> Backend:
    """The backend for a value, by the library that it comes from."""
    library = _check.library(value)
    if library == "torch" and hasattr(value, "detach"):
        from matrixdp.backends import torch

        return cast(Backend, torch)
    if library == "dask":
        from matrixdp.backends import dask

        return cast(Backend, dask)
    from matrixdp.backends import numpy

    return cast(Backend, numpy)


def _takes_units(ledger: Spends) -> bool:
    from matrixdp.accounting.ledger.ledger import Ledger  # when it is needed

    return isinstance(ledger, Ledger)


def _is_on_grid(value: Any, law: NoiseLaw, query: Mapping[str, Any] | None) -> bool:
    """Whether the value is known to lie on the grid of discrete noise, from what is public: its type and its query."""
    kind = getattr(getattr(value, "dtype", None), "kind", None)  # a list has none: its numbers are cells
    whole = kind in ("i", "u") or (query or {}).get("name") == "histogram"
    return isinstance(law, Product) and law.step <= 1 and whole


def proposed(
    mechanism: str | NoiseLaw, shape: Any, sensitivity: Sensitivity, budget: Budget, options: Mapping[str, Any]
) -> NoiseLaw:
    """The law that a mechanism proposes, or the law that was given in its place."""
    if not isinstance(mechanism, NoiseLaw):
        return calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=budget, **options)
    if options:
        raise InvalidInput(f"options ({', '.join(options)}) go with a mechanism's name; a law is used as it is")
    checked_budget(budget)
    if isinstance(budget, Allotment):
        raise InvalidInput("mechanism is fixed by the plan that the budget is a part of; leave it out")
    if mechanism.shape != shape:
        raise InvalidInput(f"mechanism is a law for values of shape {mechanism.shape}, got a value of shape {shape}")
    return mechanism


# --- size ---

# Cached, since many releases have the same budget.
_mu: Callable[[float, float], float] = lru_cache(maxsize=256)(gaussian.mu)


def sized_for_budget(
    law: NoiseLaw,
    sensitivity: Sensitivity,
    budget: Budget,
    rng: np.random.Generator | None = None,
    query: Mapping[str, Any] | None = None,
) -> Certificate:
    """The certificate of one release: the law as proposed, inflated slightly if the cost of drawing it needs that.

    A law that does not keep the budget, or is not Gaussian, keeps its size.
    """
    undrawn = certify(law, sensitivity, budget, query=query)
    if rng is not None:
        return drawn(undrawn, seeded(rng))
    if not isinstance(law, Gaussian) or undrawn.mu is None:
        return drawn(undrawn, drawing_for(law, sensitivity, None, pure=budget.delta == 0))
    if budget.delta == 0:  # no Gaussian noise keeps it
        return drawn(undrawn, drawing_for(law, sensitivity, undrawn.mu))
    whole = _mu(budget.epsilon, budget.delta)
    drawing = drawing_for(law, sensitivity, max(undrawn.mu, whole))
    if not undrawn.meets(budget):
        return drawn(undrawn, drawing)
    error = with_total_variation(0.0, budget.epsilon, drawing.total_variation)
    spare = budget.delta - error
    if not spare > 0:
        raise NumericalFailure(
            f"delta {budget.delta:g} is below {error:.2g}, the total-variation error of the sampler at epsilon "
            f"{budget.epsilon:g} (it grows with e^epsilon) and {math.prod(law.shape)} entries; use a larger delta or a "
            "smaller epsilon"
        )
    allowed = _mu(budget.epsilon, spare)
    if drawing.enlargement <= SMALL * undrawn.mu:
        allowed = min(allowed, undrawn.mu)  # a recipe may have left room for other releases, which is not to be used up
    return _with_room(undrawn, drawing, allowed)


def sized_for_mu(
    law: Gaussian,
    sensitivity: Sensitivity,
    mu: float,
    *,
    may_shrink: bool = True,
    with_drawing: bool = True,
    query: Mapping[str, Any] | None = None,
) -> Certificate:
    """The certificate of Gaussian noise scaled to this mu, drawing included.

    Args:
        law: the noise, in any size.
        sensitivity: what a neighbour can change.
        mu: the mu that one release may have.
        may_shrink: whether noise that is larger than needed is reduced; otherwise only noise that is too small changes.
        with_drawing: False for the law alone, without the cost of drawing it.
        query: the query's name and public parameters.
    """
    undrawn = certify(law, sensitivity, query=query)
    drawing = drawing_for(law, sensitivity, mu) if with_drawing else None
    return _with_room(undrawn, drawing, mu, may_shrink=may_shrink)


def _with_room(undrawn: Certificate, drawing: Drawing | None, mu: float, *, may_shrink: bool = False) -> Certificate:
    """The certificate of the law, scaled so that its mu plus what drawing adds is at most the allowed mu."""
    assert isinstance(undrawn.law, Gaussian)
    assert undrawn.mu is not None
    cost = 0.0 if drawing is None else drawing.enlargement
    if may_shrink or not (undrawn.mu + cost) * (1 + ROUNDING) <= mu:
        factor = undrawn.mu / (mu - cost) * HEADROOM
        undrawn = certify(undrawn.law.scaled(factor), undrawn.sensitivity, undrawn.budget, query=undrawn.query)
    return undrawn if drawing is None else drawn(undrawn, drawing)


def mu_of_each(budget: Budget, releases: float, sampling_rate: float = 1.0, share: float | None = None) -> float:
    """The mu of each of several Gaussian releases that keep the budget together.

    Args:
        budget: the budget of all of them together.
        releases: how many releases use the same record. It need not be whole where other releases use the rest of the
            budget; with subsampling it must be.
        sampling_rate: the probability with which each release uses a record.
        share: the share of delta kept for the total-variation error of the samplers.
    """
    checked_budget(budget)
    if share is None:
        share = SAMPLER_SHARE if budget.epsilon <= LARGE_EPSILON else SAMPLER_SHARE_ABOVE
    delta = budget.with_delta("noise for several releases").delta * (1 - share)
    if sampling_rate == 1.0:
        mu = _mu(budget.epsilon, delta) / math.sqrt(releases)
    else:
        from matrixdp.accounting.accountant import noise_multiplier_for  # when it is needed

        mu = 1 / noise_multiplier_for(budget.epsilon, delta, sampling_rate, int(releases))
    return mu * (1 - 1e-12)  # slightly less, since composition rounds up


def sized_together(
    law: NoiseLaw, sensitivity: Sensitivity, budget: Budget, releases: int, sampling_rate: float = 1.0
) -> Certificate:
    """The certificate of each of several releases with equal noise that keep the budget together.

    Guarantee: all of them together keep the budget, as computed by an Accountant.
    """
    from matrixdp.accounting.accountant import Accountant  # when it is needed

    def fits(certificate: Certificate) -> bool:
        total = Accountant()
        total.add(certificate, releases, sampling_rate)
        return total.delta(budget.epsilon) <= budget.delta

    if isinstance(law, Spherical):
        guess = 1 / mu_of_each(budget, releases, sampling_rate, 0.0) * sensitivity.frobenius_radius(law.shape)
        return _least_spherical(law, sensitivity, law.scale * guess / law.root_mean_square, fits)
    if not isinstance(law, Gaussian):
        raise NotCertifiable(f"only Gaussian and spherical noise can be sized for a budget, not {law.describe()}")
    for share in SAMPLER_SHARES:
        certificate = sized_for_mu(law, sensitivity, mu_of_each(budget, releases, sampling_rate, share))
        if fits(certificate):
            return certificate
    raise NumericalFailure(
        f"delta {budget.delta:g} is too small for the total-variation error of the sampler on {math.prod(law.shape)} "
        f"entries in {releases} releases; use a larger delta, a smaller epsilon, fewer releases or fewer entries"
    )


def _least_spherical(
    law: Spherical, sensitivity: Sensitivity, scale: float, fits: Callable[[Certificate], bool]
) -> Certificate:
    """The smallest spherical noise that fits, to within a percent; the search starts at this scale."""

    def at(scale: float) -> Certificate:
        return certify(replace(law, scale=scale), sensitivity)

    high = scale
    while not fits(at(high)):
        high *= 1.1
    low = 0.9 * high
    while fits(at(low)):
        low, high = 0.9 * low, low
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(at(middle)) else (middle, high)
    return at(high)
