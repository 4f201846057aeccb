"""The public settings of clients and a trusted server, and their guarantee; `trusted_server` has the proof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE, ZERO_OUT
from matrixdp.budget import Budget, checked_budget
from matrixdp.errors import InvalidInput
from matrixdp.federated.noise import line
from matrixdp.learn.layers.rounding import gamma, sum_error
from matrixdp.sensitivity import Participation

_UNIT = 2.0**-53
_SLACK = 1 + 1e-6  # exceeds what rounding adds to the norm of an honest sum
_CHANGE: dict[str, str] = {
    ADD_REMOVE: "one {unit} added or removed",
    ZERO_OUT: "the updates of one {unit} replaced by zero",
}
_TRUSTED = {
    "client": "the server, which sees the update of each client; the network, which sees who is asked",
    "record": "the server and the network, which see the sum of each client; each client with its own records",
}


@dataclass(frozen=True)
class CentralGuarantees:
    """The epsilon of all published models together, per unit of privacy: a client with all its records, or a record."""

    epsilon: float
    delta: float
    rounds: int
    adjacency: str
    unit: str = "client"

    def __str__(self) -> str:
        change = _CHANGE[self.adjacency].format(unit=self.unit)
        stated = line(self.epsilon, self.delta, f"{self.rounds} rounds", change)
        other = "record" if self.unit == "client" else "client"
        return (
            f"{self.unit}-level: {stated}, for the models that the server publishes\n"
            f"{other}-level: not stated; the unit of privacy is the {self.unit}\n"
            f"trusted: {_TRUSTED[self.unit]}"
        )


@dataclass(frozen=True, kw_only=True)
class CentralPrivacy:
    """The privacy of rounds at a trusted server; all of it is public. The unit of privacy is a client, or a record.

    Guarantee: the models of all rounds together keep the budget for each client, or each record of an honest client,
    against everyone but the server and the network. The adjacency is add/remove, or zero-out with `separation`. The
    proof is at the top of `trusted_server`.
    Source: mcmahan2018learning, algorithm 1, with a fixed denominator, for sampled rounds; denisov2022improved and
        choquette2023amplified for separated ones; abadi2016deep, algorithm 1, for records.
    Deviates: (1) one clip for the whole update; (2) equal weights, as the number of records of a client is private; (3)
        exact composition; (4) noise on a grid, with rounding in the certificate.

    Args:
        budget: for all rounds together.
        rounds: the number of rounds.
        clients: the largest number of clients, numbered from 0.
        clip: the largest norm of a client's update, or of a record's gradient; longer ones are shortened.
        unit: "client" or "record".
        records: with unit "record", the largest number of records of a client.
        sampling_rate: the probability with which a round asks a client, or a client takes a record.
        separation: the least distance between two rounds that ask the same client; noise is then correlated over the
            rounds, and there is no sampling.
        times: with `separation`, the most rounds that ask one client; by default as many as `separation` allows.
        mechanism: with `separation`, "auto" or the name of a mechanism over time, such as "banded" or "toeplitz".

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import CentralPrivacy
        >>> privacy = CentralPrivacy(budget=Budget(3.0, 1e-5), rounds=10, clients=200, clip=1.0, sampling_rate=0.2)
        >>> privacy.cohort
        40.0
    """

    budget: Budget
    rounds: int
    clients: int
    clip: float
    unit: str = "client"
    records: int | None = None
    sampling_rate: float = 1.0
    separation: int | None = None
    times: int | None = None
    mechanism: str = "auto"

    def __post_init__(self) -> None:
        checked_budget(self.budget)
        _check.count("rounds", self.rounds)
        _check.count("clients", self.clients)
        _check.length("clip", self.clip)
        if not 0 < _check.number("sampling_rate", self.sampling_rate) <= 1:
            raise InvalidInput(f"sampling_rate must be above 0 and at most 1, got {self.sampling_rate!r}")
        _check.choice("unit", self.unit, tuple(_TRUSTED))
        if (self.records is None) != (self.unit == "client"):
            raise InvalidInput("records, how many a client has at most, is for unit='record', which needs it")
        if self.records is not None:
            _check.count("records", self.records)
            if self.separation is not None:
                raise InvalidInput("separation is for unit='client'; records are sampled")
        if self.separation is None:
            if self.times is not None or self.mechanism != "auto":
                raise InvalidInput("times and mechanism are for separated rounds; give separation=")
            return
        if not _check.count("separation", self.separation) <= self.rounds:
            raise InvalidInput(
                f"separation must be at most the number of rounds ({self.rounds}), got {self.separation}"
            )
        if self.sampling_rate != 1.0:
            raise InvalidInput("sampling_rate and separation exclude each other: separated rounds are not sampled")
        if self.times is not None:
            _check.count("times", self.times)

    @property
    def cohort(self) -> float:
        """The denominator of the mean: the expected number of units per round; in separated rounds the largest."""
        if self.separation is None:
            return self.sampling_rate * self.clients * (self.records or 1)
        return -(-self.clients // self.separation)

    @property
    def largest(self) -> float:
        """The largest norm of a client's contribution to the sum of a round."""
        return self.clip if self.records is None else self.clip * self.records * _SLACK

    @property
    def radius(self) -> float:
        """The l2 sensitivity of the computed sum of a round to one unit, rounding included."""
        own = 1.0 if self.records is None else 1 + 2 * sum_error(self.records)
        return self.clip * own + 2 * self.clients * gamma(self.clients + 1, _UNIT) * self.largest

    @property
    def participation(self) -> Participation | None:
        """What one client can change over separated rounds."""
        if self.separation is None:
            return None
        fitting = -(-self.rounds // self.separation)
        times = fitting if self.times is None else min(self.times, fitting)
        return Participation(self.radius, separation=self.separation, times=times, adjacency=ZERO_OUT)

    def clipped(self, update: Array) -> Array:
        """A finite update clipped to the ball, in double precision; with unit "record", a client's sum unchanged."""
        values = np.asarray(update, dtype=np.float64)
        if self.unit == "record":
            return values
        largest = self.clip * (1 - (values.size + 8) * 2 * _UNIT)
        norm = _check.norm(values)
        return values * (largest / norm) if norm > largest else values
