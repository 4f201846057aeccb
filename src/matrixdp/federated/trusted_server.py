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
Separated rounds with a state have two files, and are charged under the identity of the one that has the key of the
noise. FILE.asked names that identity. So if FILE is lost, the rounds do not begin anew under the charge for the first
ones; if FILE.asked is lost after a round, who may be asked is not known, and nothing more is released.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.accounting.accountant import Accountant
from matrixdp.adjacency import ADD_REMOVE
from matrixdp.backends.numpy import draw
from matrixdp.distributions import Gaussian
from matrixdp.errors import BudgetExceeded, InvalidInput, StreamError
from matrixdp.federated.asked_clients import AskedClients
from matrixdp.federated.central_privacy import CentralGuarantees, CentralPrivacy
from matrixdp.learn.noise import ANY_BUDGET, check_room
from matrixdp.learn.sampling import PoissonSampler
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import sized_together
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.drawing import Drawing
from matrixdp.sensitivity import Frobenius
from matrixdp.streams import Stream
from matrixdp.streams.state import checked_path


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
            with the rounds that are left, from the last model that was published. Separated rounds: `state`.
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
        series: str | None = None,
        state: Any = None,
        moved: bool = False,
    ) -> None:
        if not isinstance(privacy, CentralPrivacy):
            raise InvalidInput(f"privacy must be a CentralPrivacy, got {_check.kind(privacy)}")
        if series is not None and (ledger is None or privacy.separation is not None):
            raise InvalidInput("series is for rounds that are not separated, with a ledger, which counts them")
        if state is not None and privacy.separation is None:
            raise InvalidInput("state is for separated rounds: the noise of others is fresh in each round")
        self.privacy, self.size, self.round = privacy, _check.count("size", size), 0
        self._ledger, self._note, self._series = ledger, note, series or secrets.token_hex(8)
        if series is not None:
            self.round = sum(entry.count for entry in ledger.history() if entry.series == series)
        self._process = os.getpid()
        self._noise: _EachRound | _OverRounds
        if privacy.participation is None:
            self._noise = _EachRound(privacy, self.size)
        else:
            self._noise = _OverRounds(privacy, self.size, state, moved)
        rate = privacy.sampling_rate if privacy.unit == "client" else 1.0
        self._coins = iter(PoissonSampler(privacy.clients, rate, privacy.rounds))
        self._asked_at: dict[int, list[int]] = {}  # the rounds in which a client was asked
        self._open: set[int] | None = None  # whom this round asks
        self._asked: AskedClients | None = None
        key = None if state is None else self._resume(checked_path(state), ledger, moved)
        total = Accountant()
        total.add(self.certificate, self._noise.releases, privacy.sampling_rate)
        delta, adjacency = privacy.budget.delta, str(self.certificate.adjacency)
        self.guarantees = CentralGuarantees(total.epsilon(delta), delta, privacy.rounds, adjacency, privacy.unit)
        if ledger is not None and privacy.separation is not None:
            ledger.spend(self.certificate, note=note, unit=privacy.unit, key=key)

    def _resume(self, path: Path | None, ledger: Any, moved: bool) -> str:
        """Takes up the rounds in a state; returns the key under which they are charged, once."""
        assert path is not None
        assert isinstance(self._noise, _OverRounds)
        origin = None if ledger is None else str(getattr(ledger, "origin", type(ledger).__name__))
        identity = self._noise.identity
        setting = {"privacy": repr(self.privacy), "size": self.size, "stream": identity}
        self._asked = AskedClients(path.with_name(f"{path.name}.asked"), setting, origin, moved=moved)
        asked, self.round = self._asked.rounds(), self._noise.rounds
        if not len(asked) >= self.round:
            raise StreamError(
                f"{path}.asked was put back: it has fewer rounds than were released; nothing was released"
            )
        for number, clients in enumerate(asked[: self.round], start=1):
            for client in clients:
                self._asked_at.setdefault(client, []).append(number)
        return f"federation-{identity}"

    def published(self, number: int) -> Array:
        """The mean of a separated round that was finished, from 1; with a state, also by an earlier process."""
        if not isinstance(self._noise, _OverRounds) or not _check.count("number", number) <= self._noise.rounds:
            raise InvalidInput(f"number must be that of a separated round that was finished, got {number!r}")
        return self._noise.step(number) / self.privacy.cohort

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
            if self._asked is not None:
                self._asked.write(self.round, chosen)
            for number in chosen:
                self._asked_at.setdefault(number, []).append(self.round)
        self._open = set(chosen)
        return chosen

    def _charge(self) -> None:
        """Marks a round as used; the first charges all of them as one block. Separated ones were charged before."""
        if self._ledger is not None and self.privacy.separation is None:
            self._ledger.spend(
                self.certificate,
                note=self._note,
                sampling_rate=self.privacy.sampling_rate,
                unit=self.privacy.unit,
                series=self._series,
                planned=self.privacy.rounds,
            )

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
        self.certificate, self.rounds, self.identity = certificate, len(self._stream), self._stream.identity
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
