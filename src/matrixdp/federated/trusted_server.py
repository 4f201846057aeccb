"""Central differential privacy without Flower: a trusted server bounds what clients send and draws the noise once.

**Who is trusted.** The server sees every update, and the network sees who is asked. The guarantee is for the models
that the server publishes, against everyone who sees them, the other clients included. With unit "client", no client is
trusted with anything but its own privacy: whatever it sends, its contribution lies in the ball of radius `clip`,
because the server clips it. So a client that lies can waste a round; it cannot weaken the guarantee of another one. A
client is a number: one that takes part under two numbers is two clients, and its own guarantee is that of a pair.

**Rounds.** Round t publishes the noisy mean (sum_i u_i + noise) / m. The sum is over the clients that were asked and
have answered, u_i is the clipped update, and m is public: how many clients a round asks on the average. A client that
does not answer adds zero. This is within the guarantee, as zero lies in the ball, and m does not move.

**Sampled rounds.** Each client is asked with probability `sampling_rate`, by a secret coin of its own. With one client
more or less, the sum changes by norm at most `clip` in the rounds where its coin says so, and the coins of the others
stay: this is the Poisson-sampled Gaussian mechanism, which the accountant composes exactly. A client whose coin says so
but that is absent adds zero, so its probability to take part is at most the rate.

**Records.** With unit "record", every round asks all clients. A client draws a Poisson sample of its own records, by
secret coins, and sends the sum of their clipped gradients (`GradientClient`). With one record more or less, the sum of
all clients changes by norm at most `clip` in the rounds where its coin says so: DP-SGD over the records of all clients,
with the noise of one. The client samples and clips, so the guarantee of its records rests on its honesty, and on that
of no other client. What others send may depend on all published models, but not on its coins. The server refuses what
is not finite or longer than `records` gradients can be; no honest sum is, so a refusal says nothing about a record. A
record that two clients have is two records.

**Separated rounds.** The same client is asked at most `times` times, and at least `separation` rounds apart; the server
enforces both. Stack the sums as rows of a matrix: one client changes rows as `Participation` says, and noise that is
correlated over the rounds, as in `streams`, has less error in the model, which is a running sum. Who is asked depends
on who was asked before, so this compares a client with one that is asked in the same rounds and adds zero (zero-out).

**Rounding.** A norm of d numbers as computed is within (d + 4) v of the truth, relatively, v = 2^-53: hence the margin
of `clipped`. A sum of n updates of norm at most B, in any order, has an error of at most gamma_n n B in norm, gamma_n =
n v / (1-n v). One client moves the computed sum by at most clip + 2 n gamma_n B, B = clip. One record moves the sum of
its client by at most clip (1 + 2 e), e = `sum_error(records)`, and the sum of all by 2 n gamma_n B more, B = `largest`.
This is the sensitivity that is certified.

**Restarts.** A round is charged to the ledger before anyone is asked, and its noise is drawn after its replies are in,
from fresh entropy, and never stored. So a server that is killed loses the round that it was in, and no noise serves
twice. Sampled rounds are one series of the ledger: a new server under the same name has the rounds that are left.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.accounting.accountant import Accountant
from matrixdp.adjacency import ADD_REMOVE, ZERO_OUT
from matrixdp.backends.numpy import draw
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.federated.noise import line
from matrixdp.learn.layers.rounding import gamma, sum_error
from matrixdp.learn.noise import ANY_BUDGET, check_room
from matrixdp.learn.sampling import PoissonSampler
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import sized_together
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.drawing import Drawing
from matrixdp.sensitivity import Frobenius, Participation
from matrixdp.streams import Stream

_UNIT = 2.0**-53
_SLACK = 1 + 1e-6  # more than rounding adds to the norm of an honest sum
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
    """The epsilon of all published models together, for one unit of privacy: a client with all its records, or one."""

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

    Guarantee: for a client, or for a record of a client that does as it should: the models of all rounds together keep
    the budget, adjacency add/remove, or zero-out with `separation`, against everyone but the server. What holds and why
    is at the top of the file.
    Source: mcmahan2018learning, algorithm 1, with a fixed denominator, for sampled rounds; denisov2022improved and
        choquette2023amplified for separated ones; abadi2016deep, algorithm 1, for records.
    Deviates: (1) one clip for the whole update; (2) equal weights, as the number of records of a client is private; (3)
        exact composition; (4) noise on a grid, with rounding in the certificate.

    Args:
        budget: for all rounds together.
        rounds: the number of rounds.
        clients: how many clients there are at most, numbered from 0.
        clip: the largest norm of a client's update, or of a record's gradient; longer ones are shortened.
        unit: "client" or "record".
        records: with unit "record", how many records a client has at most.
        sampling_rate: the probability with which a round asks a client, or a client takes a record.
        separation: the least number of rounds from one to the next in which the same client is asked; noise is then
            correlated over the rounds, and there is no sampling.
        times: with `separation`, how often a client is asked at most; by default as often as it fits.
        mechanism: with `separation`, "auto" or the name of a mechanism over time, such as "banded" or "toeplitz".
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
        if not isinstance(self.budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {type(self.budget).__name__}")
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
        """The denominator: how many units a round has on the average, or at most where rounds are separated."""
        if self.separation is None:
            return self.sampling_rate * self.clients * (self.records or 1)
        return -(-self.clients // self.separation)

    @property
    def largest(self) -> float:
        """The largest norm of what a client adds to the sum of a round."""
        return self.clip if self.records is None else self.clip * self.records * _SLACK

    @property
    def radius(self) -> float:
        """How far one unit moves the sum of a round as computed."""
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
        """An update, of finite numbers, inside the ball, in double precision; the sum of a client as it is."""
        values = np.asarray(update, dtype=np.float64)
        if self.unit == "record":
            return values
        largest = self.clip * (1 - (values.size + 8) * 2 * _UNIT)
        norm = _check.norm(values)
        return values * (largest / norm) if norm > largest else values


class TrustedServer:
    """The server: chooses whom a round asks, bounds what they send, and publishes their mean with noise.

    Guarantee: that of `privacy`, for everything that `finish` has returned as a mean. Its reports, and who was asked,
    are for the server alone.

    Args:
        privacy: what was agreed.
        size: how many numbers an update has.
        ledger: charged for all rounds before the first asks anyone, in units of `privacy.unit`.
        note: what the ledger remembers; never data.
        series: the name of this run in the ledger. A server that is made again with the same name and settings goes on
            with the rounds that are left, from the last model that was published. Separated rounds have none.
    """

    def __init__(
        self,
        privacy: CentralPrivacy,
        size: int,
        *,
        ledger: Any = None,
        note: str = "federated rounds",
        series: str | None = None,
    ) -> None:
        if not isinstance(privacy, CentralPrivacy):
            raise InvalidInput(f"privacy must be a CentralPrivacy, got {_check.kind(privacy)}")
        if series is not None and (ledger is None or privacy.separation is not None):
            raise InvalidInput("series is for rounds that are not separated, with a ledger, which counts them")
        self.privacy, self.size, self.round = privacy, _check.count("size", size), 0
        self._ledger, self._note, self._series = ledger, note, series or secrets.token_hex(8)
        if series is not None:
            self.round = sum(entry.count for entry in ledger.history() if entry.series == series)
        self._process = os.getpid()
        self._noise: _EachRound | _OverRounds
        self._noise = (_EachRound if privacy.participation is None else _OverRounds)(privacy, self.size)
        rate = privacy.sampling_rate if privacy.unit == "client" else 1.0
        self._coins = iter(PoissonSampler(privacy.clients, rate, privacy.rounds))
        self._asked_at: dict[int, list[int]] = {}  # the rounds in which a client was asked
        self._open: set[int] | None = None  # whom this round asks
        total = Accountant()
        total.add(self.certificate, self._noise.releases, privacy.sampling_rate)
        delta, adjacency = privacy.budget.delta, str(self.certificate.adjacency)
        self.guarantees = CentralGuarantees(total.epsilon(delta), delta, privacy.rounds, adjacency, privacy.unit)

    @property
    def certificate(self) -> Certificate:
        """Of one sampled round, for the units that it has; or of all separated rounds together."""
        return self._noise.certificate

    def choose(self, available: Collection[int]) -> list[int]:
        """Begins a round; returns the clients to be asked, of those that are available.

        Raises:
            BudgetExceeded: if all rounds were used, or the ledger refuses them; nobody is asked then.
        """
        self._check_process()
        if not self.round < self.privacy.rounds:
            raise BudgetExceeded(
                f"the budget ({self.privacy.budget}) was planned for {self.privacy.rounds} rounds, and all were used"
            )
        self._charge()
        present = set(available) & set(range(self.privacy.clients))
        self.round += 1
        if self.privacy.separation is None:
            chosen = sorted(present & set(next(self._coins)))
        else:
            # those that have waited longest
            ready = sorted(filter(self._is_ready, present), key=lambda n: (self._asked_at.get(n, [0])[-1], n))
            chosen = sorted(ready[: int(self.privacy.cohort)])
            for number in chosen:
                self._asked_at.setdefault(number, []).append(self.round)
        self._open = set(chosen)
        return chosen

    def _charge(self) -> None:
        """Marks a round as used: the first charges all of them, as one block."""
        if self._ledger is None or (self.privacy.separation is not None and self.round > 0):
            return
        planned = {} if self.privacy.separation else {"series": self._series, "planned": self.privacy.rounds}
        rate, unit = self.privacy.sampling_rate, self.privacy.unit
        self._ledger.spend(self.certificate, note=self._note, sampling_rate=rate, unit=unit, **planned)

    def _is_ready(self, number: int) -> bool:
        rule, before = self.privacy.participation, self._asked_at.get(number)
        if rule is None or before is None:
            return True
        return len(before) < rule.times and self.round - before[-1] >= rule.gap

    def finish(self, updates: Mapping[int, Any]) -> tuple[Array, dict[int, str]]:
        """Ends the round: the mean update with noise, and why updates were refused; a refused one counts as zero.

        Args:
            updates: by client. What is not a vector of finite numbers, or comes from a client that was not asked in
                this round, is refused.
        """
        self._check_process()
        if self._open is None:
            raise InvalidInput("choose whom to ask before a round is finished; every round is finished once")
        asked, self._open = self._open, None
        total, refused = np.zeros(self.size), {}
        for number, update in updates.items():
            reason = self._wrong(update) if number in asked else self._uninvited(number)
            if reason:
                refused[number] = reason
            else:
                total += self.privacy.clipped(update)
        return self._noise.added(total) / self.privacy.cohort, refused

    def _check_process(self) -> None:
        """Raises InvalidInput in a forked process: it would release the rounds that are paid for once more."""
        if os.getpid() != self._process:
            raise InvalidInput(
                f"the server belongs to process {self._process} and was inherited by process {os.getpid()} through a "
                "fork, where the rounds that it has paid for would be released again; make a new TrustedServer here"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a TrustedServer cannot be copied or pickled: its rounds are paid for once; make a new one")

    def _uninvited(self, number: int) -> str:
        return "was not asked in this round" if self._is_ready(number) else "is back too early, or too often"

    def _wrong(self, update: Any) -> str:
        if not (isinstance(update, np.ndarray) and update.dtype.kind == "f" and update.shape == (self.size,)):
            return f"sent an update that is not a vector of {self.size} real numbers"
        with np.errstate(over="ignore"):  # wider numbers than doubles
            values = np.asarray(update, dtype=np.float64)
        if not np.all(np.isfinite(values)):
            return "sent an update that is not finite"
        if self.privacy.unit == "record" and not _check.norm(values) <= self.privacy.largest:
            return f"sent a sum that {self.privacy.records} clipped gradients cannot have"
        return ""


class _EachRound:
    """Noise of its own in every round."""

    def __init__(self, privacy: CentralPrivacy, size: int) -> None:
        sensitivity = Frobenius(privacy.radius, adjacency=ADD_REMOVE)
        law = calibrate("analytic", shape=(size,), sensitivity=sensitivity, budget=ANY_BUDGET)
        self.releases = privacy.rounds
        self.certificate = sized_together(law, sensitivity, privacy.budget, privacy.rounds, privacy.sampling_rate)
        self._law, self._drawing = self.certificate.law, self.certificate.drawing or Drawing()
        check_room(self._law, self._drawing, privacy.clients * (privacy.largest + privacy.radius))

    def added(self, total: Array) -> Array:
        return draw(total, self._law, self._drawing)


class _OverRounds:
    """Noise that is correlated over the rounds, from a stream in memory."""

    releases = 1

    def __init__(self, privacy: CentralPrivacy, size: int) -> None:
        assert privacy.participation is not None
        self._stream = Stream(
            steps=privacy.rounds,
            sensitivity=privacy.participation,
            budget=privacy.budget,
            shape=(size,),
            mechanism=privacy.mechanism,
        )
        certificate = self._stream.certificate
        assert isinstance(certificate, Certificate)
        assert isinstance(certificate.law, Gaussian)
        self.certificate, self._before = certificate, np.zeros(size)
        # a row of C X is no longer than X, in units of the least noise, and the stream allows each a share of the room
        norm = privacy.rounds * privacy.clients * privacy.radius
        check_room(certificate.law, certificate.drawing or Drawing(), norm)

    def added(self, total: Array) -> Array:
        """What the private running total has grown by."""
        now = self._stream.add(total).value
        step, self._before = now - self._before, now
        return step
