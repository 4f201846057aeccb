"""Central differential privacy without Flower: a trusted server clips the clients' updates and draws the noise once.

**Who is trusted.** The server sees every update, and the network sees who is asked. The guarantee is for the models
that the server publishes, against everyone who sees them, the other clients included. No client is trusted with
anything but its own privacy: whatever a client sends, its contribution lies in the ball of radius `clip`, because the
server clips it. So a client that lies can waste a round; it cannot weaken the guarantee of another one.

**Rounds.** Round t publishes the noisy mean (sum_i u_i + noise) / m. The sum is over the clients that were asked and
have answered, u_i is the clipped update, and m is public: how many clients a round asks on the average. A client that
does not answer adds zero. This is within the guarantee, as zero lies in the ball, and m does not move.

**Sampled rounds.** Each client is asked with probability `sampling_rate`, by a secret coin of its own. With one client
more or less, the sum changes by norm at most `clip` in the rounds where its coin says so, and the coins of the others
stay: this is the Poisson-sampled Gaussian mechanism, which the accountant composes exactly. A client whose coin says so
but that is absent adds zero, so its probability to take part is at most the rate.

**Separated rounds.** The same client is asked at most `times` times, and at least `separation` rounds apart; the server
enforces both. Stack the sums as rows of a matrix: one client changes rows as `Participation` says, and noise that is
correlated over the rounds, as in `streams`, has less error in the model, which is a running sum. Who is asked depends
on who was asked before, so this compares a client with one that is asked in the same rounds and adds zero (zero-out).

**Rounding.** A norm of d numbers as computed is within (d + 4) v of the truth, relatively, v = 2^-53: hence the margin
of `clipped`. A sum of n updates, in any order, has an error of at most gamma_n n clip in norm, gamma_n = n v / (1-n v);
so one client moves the computed sum by at most clip (1 + 2 n gamma_n), which is the sensitivity that is certified.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.accounting.accountant import Accountant
from matrixdp.adjacency import ADD_REMOVE, ZERO_OUT
from matrixdp.backends.numpy import draw
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.errors import BudgetExceeded, InvalidInput, StreamError
from matrixdp.federated.asked_clients import AskedClients
from matrixdp.federated.noise import line
from matrixdp.learn.layers.rounding import gamma
from matrixdp.learn.noise import ANY_BUDGET, check_room
from matrixdp.learn.sampling import PoissonSampler
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import sized_together
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.drawing import Drawing
from matrixdp.sensitivity import Frobenius, Participation
from matrixdp.streams import Stream
from matrixdp.streams.state import checked_path

_UNIT = 2.0**-53
_CHANGE: dict[str, str] = {
    ADD_REMOVE: "one client added or removed",
    ZERO_OUT: "the updates of one client replaced by zero",
}


@dataclass(frozen=True)
class CentralGuarantees:
    """The epsilon of all published models together. The unit of privacy is a client, with all of its records."""

    epsilon: float
    delta: float
    rounds: int
    adjacency: str

    def __str__(self) -> str:
        client = line(self.epsilon, self.delta, f"{self.rounds} rounds", _CHANGE[self.adjacency])
        return (
            f"client-level: {client}, for the models that the server publishes\n"
            "record-level: not stated; the unit of privacy is the client\n"
            "trusted: the server, which sees the update of each client; the network, which sees who is asked"
        )


@dataclass(frozen=True, kw_only=True)
class CentralPrivacy:
    """The privacy of rounds at a trusted server; all of it is public. The unit of privacy is a client.

    Guarantee: client-level: the models of all rounds together keep the budget, adjacency add/remove, or zero-out with
    `separation`, against everyone but the server. What holds and why is at the top of the file.
    Source: mcmahan2018learning, algorithm 1, with a fixed denominator, for sampled rounds; denisov2022improved and
        choquette2023amplified for separated ones.
    Deviates: (1) one clip for the whole update; (2) equal weights, as the number of records of a client is private; (3)
        exact composition; (4) noise on a grid, with rounding in the certificate.

    Args:
        budget: for all rounds together.
        rounds: the number of rounds.
        clients: how many clients there are at most, numbered from 0.
        clip: the largest norm of a client's update; longer ones are shortened.
        sampling_rate: the probability with which a round asks a client.
        separation: the least number of rounds from one to the next in which the same client is asked; noise is then
            correlated over the rounds, and there is no sampling.
        times: with `separation`, how often a client is asked at most; by default as often as it fits.
        mechanism: with `separation`, "auto" or the name of a mechanism over time, such as "banded" or "toeplitz".

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import CentralPrivacy
        >>> privacy = CentralPrivacy(budget=Budget(3.0, 1e-5), rounds=10, clients=200, clip=1.0, sampling_rate=0.2)
        >>> privacy.rounds
        10
    """

    budget: Budget
    rounds: int
    clients: int
    clip: float
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
        """How many clients a round asks on the average, or at most where rounds are separated: the denominator."""
        if self.separation is None:
            return self.sampling_rate * self.clients
        return -(-self.clients // self.separation)

    @property
    def radius(self) -> float:
        """How far one client moves the sum of a round as computed."""
        return self.clip * (1 + 2 * self.clients * gamma(self.clients + 1, _UNIT))

    @property
    def participation(self) -> Participation | None:
        """What one client can change over separated rounds."""
        if self.separation is None:
            return None
        fitting = -(-self.rounds // self.separation)
        times = fitting if self.times is None else min(self.times, fitting)
        return Participation(self.radius, separation=self.separation, times=times, adjacency=ZERO_OUT)

    def clipped(self, update: Array) -> Array:
        """An update, of finite numbers, inside the ball, in double precision."""
        values = np.asarray(update, dtype=np.float64)
        largest = self.clip * (1 - (values.size + 8) * 2 * _UNIT)
        norm = _check.norm(values)
        return values * (largest / norm) if norm > largest else values


class TrustedServer:
    """The server: chooses whom a round asks, clips what they send, and publishes their mean with noise.

    Guarantee: that of `privacy`, for everything that `finish` has returned as a mean. Its reports, and who was asked,
    are for the server alone. Without a state, a server that dies has used up what it was charged for.

    Args:
        privacy: what was agreed.
        size: how many numbers an update has.
        ledger: charged once, here, for all rounds, in units of "client".
        note: what the ledger remembers; never data.
        state: for separated rounds, a file, secret and on this machine. A server that is made again with it goes on
            after the last round that was finished; `published` has the means so far.
        moved: the state was moved here on purpose, and the original is gone for good.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import CentralPrivacy, TrustedServer
        >>> privacy = CentralPrivacy(budget=Budget(3.0, 1e-5), rounds=10, clients=5, clip=1.0)
        >>> server = TrustedServer(privacy, size=3)
        >>> asked = server.choose(range(5))
        >>> mean, report = server.finish({client: np.full(3, 0.1) for client in asked})
        >>> mean.shape
        (3,)
    """

    def __init__(
        self,
        privacy: CentralPrivacy,
        size: int,
        *,
        ledger: Any = None,
        note: str = "federated rounds",
        state: Any = None,
        moved: bool = False,
    ) -> None:
        if not isinstance(privacy, CentralPrivacy):
            raise InvalidInput(f"privacy must be a CentralPrivacy, got {_check.kind(privacy)}")
        if state is not None and privacy.separation is None:
            raise InvalidInput("state is for separated rounds: the noise of others is fresh in each round")
        self.privacy, self.size, self.round = privacy, _check.count("size", size), 0
        self._process = os.getpid()
        self._noise: _EachRound | _OverRounds
        if privacy.participation is None:
            self._noise = _EachRound(privacy, self.size)
        else:
            self._noise = _OverRounds(privacy, self.size, state, moved)
        self._coins = iter(PoissonSampler(privacy.clients, privacy.sampling_rate, privacy.rounds))
        self._asked_at: dict[int, list[int]] = {}  # the rounds in which a client was asked
        self._open: set[int] | None = None  # whom this round asks
        self._asked: AskedClients | None = None
        key = None if state is None else self._resume(checked_path(state), ledger, moved)
        certificate, count = self.certificate, self._noise.releases
        total = Accountant()
        total.add(certificate, count, privacy.sampling_rate)
        delta = privacy.budget.delta
        adjacency = str(certificate.adjacency)
        self.guarantees = CentralGuarantees(total.epsilon(delta), delta, privacy.rounds, adjacency)
        if ledger is not None:
            rate = privacy.sampling_rate
            ledger.spend(certificate, note=note, count=count, sampling_rate=rate, unit="client", key=key)

    def _resume(self, path: Path | None, ledger: Any, moved: bool) -> str:
        """Takes up the rounds in a state; returns the key under which they are charged, once."""
        assert path is not None
        assert isinstance(self._noise, _OverRounds)
        origin = None if ledger is None else str(getattr(ledger, "origin", type(ledger).__name__))
        setting = {"privacy": repr(self.privacy), "size": self.size}
        self._asked = AskedClients(path.with_name(f"{path.name}.asked"), setting, origin, moved=moved)
        asked, self.round = self._asked.rounds(), self._noise.rounds
        if not len(asked) >= self.round:
            raise StreamError(
                f"{path}.asked was put back: it has fewer rounds than were released; nothing was released"
            )
        for number, clients in enumerate(asked[: self.round], start=1):
            for client in clients:
                self._asked_at.setdefault(client, []).append(number)
        return f"federation-{self._asked.identity}"

    def published(self, number: int) -> Array:
        """The mean of a separated round that was finished, from 1; with a state, also by an earlier process."""
        if not isinstance(self._noise, _OverRounds) or not _check.count("number", number) <= self._noise.rounds:
            raise InvalidInput(f"number must be that of a separated round that was finished, got {number!r}")
        return self._noise.step(number) / self.privacy.cohort

    @property
    def certificate(self) -> Certificate:
        """Of one sampled round, for the clients that it asked; or of all separated rounds together."""
        return self._noise.certificate

    def choose(self, available: Collection[int]) -> list[int]:
        """Begins a round; returns the clients to be asked, of those that are available.

        Raises:
            BudgetExceeded: if all rounds were used.
        """
        self._check_process()
        if not self.round < self.privacy.rounds:
            raise BudgetExceeded(
                f"the budget ({self.privacy.budget}) was planned for {self.privacy.rounds} rounds, and all were used"
            )
        present = set(available) & set(range(self.privacy.clients))
        self.round += 1
        if self.privacy.separation is None:
            chosen = sorted(present & set(next(self._coins)))
        else:
            # those that have waited longest
            ready = sorted(filter(self._is_ready, present), key=lambda n: (self._asked_at.get(n, [0])[-1], n))
            chosen = sorted(ready[: int(self.privacy.cohort)])
            if self._asked is not None:
                self._asked.write(self.round, chosen)
            for number in chosen:
                self._asked_at.setdefault(number, []).append(self.round)
        self._open = set(chosen)
        return chosen

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
        return "" if np.all(np.isfinite(values)) else "sent an update that is not finite"


class _EachRound:
    """Noise of its own in every round."""

    def __init__(self, privacy: CentralPrivacy, size: int) -> None:
        sensitivity = Frobenius(privacy.radius, adjacency=ADD_REMOVE)
        law = calibrate("analytic", shape=(size,), sensitivity=sensitivity, budget=ANY_BUDGET)
        self.releases = privacy.rounds
        self.certificate = sized_together(law, sensitivity, privacy.budget, privacy.rounds, privacy.sampling_rate)
        self._law, self._drawing = self.certificate.law, self.certificate.drawing or Drawing()
        check_room(self._law, self._drawing, privacy.clients * privacy.radius)

    def added(self, total: Array) -> Array:
        return draw(total, self._law, self._drawing)


class _OverRounds:
    """Noise that is correlated over the rounds, from a stream in memory or in a file."""

    releases = 1

    def __init__(self, privacy: CentralPrivacy, size: int, state: Any, moved: bool) -> None:
        assert privacy.participation is not None
        self._stream = Stream(
            state=state,
            moved=moved,
            steps=privacy.rounds,
            sensitivity=privacy.participation,
            budget=privacy.budget,
            shape=(size,),
            mechanism=privacy.mechanism,
        )
        certificate = self._stream.certificate
        assert isinstance(certificate, Certificate)
        assert isinstance(certificate.law, Gaussian)
        self.certificate, self.rounds = certificate, len(self._stream)
        self._before = self._stream.answer(self.rounds).value if self.rounds else np.zeros(size)
        # a row of C X is no longer than X, in units of the least noise, and the stream allows each a share of the room
        norm = privacy.rounds * privacy.clients * privacy.radius
        check_room(certificate.law, certificate.drawing or Drawing(), norm)

    def added(self, total: Array) -> Array:
        """What the private running total has grown by."""
        now = self._stream.add(total, step=self.rounds + 1).value  # refused if another process was faster
        step, self._before, self.rounds = now - self._before, now, self.rounds + 1
        return step

    def step(self, number: int) -> Array:
        """The same of a round that was finished, from 1."""
        before = self._stream.answer(number - 1).value if number > 1 else 0.0
        return np.asarray(self._stream.answer(number).value - before)
