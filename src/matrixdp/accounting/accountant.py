"""The accountant, which adds up certificates, with or without sampling of the records; and the noise for a budget."""

from __future__ import annotations

import math
from functools import cache

import scipy

from matrixdp import _check
from matrixdp.accounting.composition import Composition, Part
from matrixdp.accounting.losses import MOST_STEPS, DeltaAt, EpsilonAt, Question
from matrixdp.accounting.methods import Use, answer, merged
from matrixdp.accounting.pairs import check_sampling_rate
from matrixdp.adjacency import ADD_REMOVE, Adjacency, checked, takes_relation
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.privacy import gaussian
from matrixdp.privacy.cells import UNIT
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

_LEAST_NOISE = 0.01  # where the search of noise_multiplier_for ends


def check_secret(certificate: Guarantee) -> None:
    """Raises InvalidInput for the certificate of a seeded release: seeded noise is not private."""
    if isinstance(certificate, Certificate) and certificate.drawing is not None and certificate.drawing.reproducible:
        raise InvalidInput(
            "certificate must be that of a release with secret noise: seeded noise (rng=, generator=) is not private; "
            "leave the seed out. In a study, Accountant(reproducible=True) accounts for it"
        )


class Accountant:
    """Adds up certificates: what do all these releases guarantee together? `composition` is the answer as a record.

    Example:
        >>> from matrixdp import Accountant, Budget, Frobenius, calibrate, certify
        >>> noise = calibrate("analytic", shape=(8, 8), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6))
        >>> accountant = Accountant()
        >>> accountant.add(certify(noise, Frobenius(1.0)), count=10)
        >>> round(accountant.epsilon(delta=1e-6), 2)
        3.52
    """

    @takes_relation
    def __init__(self, adjacency: str | None = None, *, reproducible: bool = False) -> None:
        """Starts with nothing spent.

        Args:
            adjacency: the adjacency of all certificates; by default, that of the first.
            reproducible: for studies only: also takes certificates of seeded releases, which are not private. The
                answers are those for secret noise of the same law.
        """
        self._adjacency = None if adjacency is None else checked(adjacency)
        self._reproducible = reproducible
        self._history: list[Part] = []

    @property
    def adjacency(self) -> Adjacency | None:
        """The adjacency of every certificate; None before the first, if none was given."""
        return self._adjacency

    @property
    def relation(self) -> Adjacency | None:
        """Another name of `adjacency`."""
        return self._adjacency

    @property
    def history(self) -> tuple[Part, ...]:
        """What was added, in order."""
        return tuple(self._history)

    def copy(self) -> Accountant:
        """An accountant with the same history, to try something out."""
        other = Accountant(self._adjacency, reproducible=self._reproducible)
        other._history = list(self._history)
        return other

    def add(self, certificate: Guarantee, count: int = 1, sampling_rate: float = 1.0) -> None:
        """Adds `count` releases with this certificate.

        Args:
            certificate: the certificate of one release, on the records that it used.
            count: how many such releases.
            sampling_rate: the probability with which each record was used; see `Part`.
        """
        part = Part(certificate, count, sampling_rate)
        if not self._reproducible:
            check_secret(certificate)
        if self._adjacency not in (None, certificate.adjacency):
            raise InvalidInput(
                f"certificate must have the adjacency {self._adjacency} like the others, got {certificate.adjacency}: "
                "guarantees about different neighbours do not add up; certify every release for the same adjacency"
            )
        self._adjacency = checked(certificate.adjacency)
        self._history.append(part)

    def composition(self, budget: Budget | None = None) -> Composition:
        """The releases added so far, as a record that can be written, read and verified.

        Args:
            budget: the budget that the releases should keep together, if any.
        """
        return Composition(self.history, budget)

    def epsilon(self, delta: float, method: str = "auto") -> float:
        """The least epsilon that is proven at this delta; see `Composition.epsilon`."""
        return self.composition().epsilon(delta, method)

    def delta(self, epsilon: float, method: str = "auto") -> float:
        """The least delta that is proven at this epsilon (0 or above); see `Composition.epsilon`."""
        return self.composition().delta(epsilon, method)


@takes_relation
def noise_multiplier_for(
    epsilon: float, delta: float, sampling_rate: float, steps: int, adjacency: str = ADD_REMOVE
) -> float:
    """The standard deviation of Gaussian noise, in units of the sensitivity, at which `steps` releases keep a budget.

    Guarantee: with it, an Accountant answers at most `epsilon` at `delta`, and at most `delta` at `epsilon`. It is at
    most 1 % above the least such multiplier, and without sampling only by a rounding error. With sampling, the search
    ends at 0.01.

    Args:
        epsilon: above 0.
        delta: strictly between 0 and 1.
        sampling_rate: as for `Accountant.add`.
        steps: how many releases.
        adjacency: which data sets are neighbours; the sensitivity is that of the query without sampling.
    """
    budget, rate = Budget(epsilon, delta).with_delta("Gaussian noise"), check_sampling_rate(sampling_rate)
    steps, adjacency = _check.count("steps", steps), checked(adjacency)
    if rate < 1.0 and not steps <= MOST_STEPS:
        raise InvalidInput(f"steps must be at most {MOST_STEPS} with sampling, got {steps}")

    def at(multiplier: float, question: Question) -> float:
        noise = GaussianProfile((1.0 + 4.0 * UNIT) / multiplier)
        return answer(merged({Use(noise, sampling_rate=rate): steps}), adjacency, question)

    @cache
    def excess(multiplier: float) -> float:
        return math.log(max(at(multiplier, EpsilonAt(budget.delta)), 1e-300) / budget.epsilon)

    def keeps_budget(multiplier: float) -> bool:
        found = at(multiplier, EpsilonAt(budget.delta))
        return found <= budget.epsilon and at(multiplier, DeltaAt(budget.epsilon)) <= budget.delta

    unsampled = math.sqrt(steps) / float(gaussian.mu(budget.epsilon, budget.delta)) * (1.0 + 32.0 * UNIT)
    if rate == 1.0:
        return unsampled
    high = max(rate * unsampled, _LEAST_NOISE)
    while excess(high) > 0.0:
        high *= 2.0
    low = 0.5 * high
    while low > _LEAST_NOISE and not excess(low) > 0.0:
        low, high = 0.5 * low, low
    found = scipy.optimize.brentq(excess, low, high, rtol=5e-4) if low > _LEAST_NOISE else high
    while not keeps_budget(found):
        found *= 1.002
    return float(found)
