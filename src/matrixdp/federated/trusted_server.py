"""Central differential privacy without Flower: a trusted server bounds what clients send and draws the noise once.

**Who is trusted.** The server sees every update, and the network sees who is asked. The guarantee is for the models
that the server publishes, against everyone who sees them, including the other clients. With unit "client", no client
has to be trusted: whatever it sends, its contribution is in the ball of radius `clip`, because the server clips it. So
a dishonest client can spoil a round, but cannot weaken the guarantee of another client. Clients are identified by
numbers: one that takes part under two numbers counts as two clients, and its guarantee is that of a group of two.

**Rounds.** Round t publishes the noisy mean (sum_i u_i + noise) / m. The sum is over the clients that were asked and
have answered, u_i is the clipped update, and m is public (`CentralPrivacy.cohort`). A client that does not answer adds
zero. The guarantee covers this, as zero is in the ball, and m does not change.

**Sampled rounds.** Each client is asked with probability `sampling_rate`, by its own secret coin. With one client more
or less, the sum changes by norm at most `clip` in the rounds where its coin selects it, and the coins of the others
stay the same. This is the Poisson-subsampled Gaussian mechanism, which the accountant composes exactly. A selected
client that is absent adds zero, so its probability to take part is at most the rate.

**Records.** With unit "record", every round asks all clients. A client draws a Poisson sample of its own records, by
secret coins, and sends the sum of their clipped gradients (`GradientClient`). With one record more or less, the sum of
all clients changes by norm at most `clip` in the rounds where the record's coin selects it. This is DP-SGD over the
records of all clients, with noise added once. The client samples and clips, so the guarantee of its records depends on
its honesty, and on no other client's. What others send may depend on all published models, but not on its coins. The
server refuses sums that are not finite or longer than `records` clipped gradients can be. No honest sum is refused, so
a refusal reveals nothing about an honest client's records. A record held by two clients counts as two records.

**Separated rounds.** The same client is asked at most `times` times, and at least `separation` rounds apart; the server
enforces both. Stack the sums as rows of a matrix: one client changes rows as `Participation` says. Noise that is
correlated over the rounds, as in `streams`, has less error in the model, which is a running sum. Who is asked depends
on who was asked before, so this compares a client with one that is asked in the same rounds and adds zero (zero-out).
A round that was begun and not finished has no row: the next one takes its number, so that distances between rounds are
distances between rows.

**Rounding.** A norm of d numbers as computed is within (d + 4) v of the truth, relatively, v = 2^-53: hence the margin
of `clipped`. A sum of n updates of norm at most B, in any order, has an error of at most gamma_n n B in norm, gamma_n =
n v / (1-n v). One client moves the computed sum by at most clip + 2 n gamma_n B, B = clip. One record moves the sum of
its client by at most clip (1 + 2 e), e = `sum_error(records)`, and the sum of all by 2 n gamma_n B more, B = `largest`.
This is the sensitivity that is certified.

**Restarts.** A round is charged to the ledger before anyone is asked, and its noise is drawn after its replies are in,
from fresh entropy, and never stored. So a server that is killed loses the current round, and no noise is used twice.
Sampled rounds are one series of the ledger: a new server under the same name has the rounds that are left.
Separated rounds with a state have two files: FILE with the key of the noise, under whose identity they are charged, and
FILE.asked, which is made later and names that identity. So if FILE is lost, no new one is made, and the rounds do not
start again under the old charge. If FILE.asked is lost after a round, it is unknown who may be asked, and nothing more
is released.
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
from matrixdp.streams.state import State, checked_path


class TrustedServer:
    """The server: chooses the clients of a round, bounds their updates, and publishes the noisy mean.

    Guarantee: that of `privacy`, for all means that `finish` has returned. The reports, and who was asked, must stay on
    the server.

    Args:
        privacy: the agreed settings.
        size: the number of entries of an update.
        ledger: charged for all rounds before the first asks anyone, in units of `privacy.unit`.
        note: a note for the ledger; never data.
        series: the name of this run in the ledger. A new server with the same name and settings continues with the
            rounds that are left, from the last published model. Separated rounds use `state` instead.
        state: for separated rounds, a secret file on this machine. A new server with it continues after the last
            finished round; `published` returns the means so far.
        moved: the state was moved here on purpose, and the original no longer exists.

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
        path = checked_path(state)
        asked_path = path and path.with_name(f"{path.name}.asked")
        if path and asked_path and asked_path.exists() and not State(path).exists:
            raise StreamError(
                f"{path} is lost, and {asked_path.name} is there: its rounds are charged, and new noise would release "
                "them again. Restore the file, or use another state for new rounds"
            )
        self._noise: _EachRound | _OverRounds
        if privacy.participation is None:
            self._noise = _EachRound(privacy, self.size)
        else:
            self._noise = _OverRounds(privacy, self.size, path, moved)
        rate = privacy.sampling_rate if privacy.unit == "client" else 1.0
        self._coins = iter(PoissonSampler(privacy.clients, rate, privacy.rounds))
        self._asked_at: dict[int, list[int]] = {}  # the finished rounds in which a client was asked
        self._open: set[int] | None = None  # whom this round asks
        self._asked: AskedClients | None = None
        key = None if asked_path is None else self._resume(asked_path, ledger, moved)
        total = Accountant()
        total.add(self.certificate, self._noise.releases, privacy.sampling_rate)
        delta, adjacency = privacy.budget.delta, str(self.certificate.adjacency)
        self.guarantees = CentralGuarantees(total.epsilon(delta), delta, privacy.rounds, adjacency, privacy.unit)
        if ledger is not None and privacy.separation is not None:
            ledger.spend(self.certificate, note=note, unit=privacy.unit, key=key)

    def _resume(self, path: Path, ledger: Any, moved: bool) -> str:
        """Restores the rounds of a state, whose clients are in this file; returns the key of their one charge."""
        assert isinstance(self._noise, _OverRounds)
        origin = None if ledger is None else str(getattr(ledger, "origin", type(ledger).__name__))
        identity, self.round = self._noise.identity, self._noise.rounds
        setting = {"privacy": repr(self.privacy), "size": self.size, "stream": identity}
        asked: list[list[int]] = []
        if path.exists() or not self.round:
            self._asked = AskedClients(path, setting, origin, moved=moved)
            asked = self._asked.rounds()
        if not len(asked) >= self.round:
            raise StreamError(
                f"{path} is lost or an older state: it has fewer rounds than were released; nothing was released"
            )
        for number, clients in enumerate(asked[: self.round], start=1):
            for client in clients:
                self._asked_at.setdefault(client, []).append(number)
        return f"federation-{identity}"

    def published(self, number: int) -> Array:
        """The mean of a finished separated round, numbered from 1; with a state, also of an earlier process."""
        if not isinstance(self._noise, _OverRounds) or not _check.count("number", number) <= self._noise.rounds:
            raise InvalidInput(f"number must be that of a separated round that was finished, got {number!r}")
        return self._noise.step(number) / self.privacy.cohort

    @property
    def certificate(self) -> Certificate:
        """The certificate of one sampled round, without amplification by sampling, or of all separated rounds."""
        return self._noise.certificate

    def choose(self, available: Collection[int]) -> list[int]:
        """Begins a round; returns which of the available clients to ask.

        A round that was begun and not finished has released nothing. A sampled round is used up nevertheless; a
        separated round is begun again.

        Raises:
            BudgetExceeded: if all rounds were used, or the ledger refuses them; nobody is asked then.
        """
        self._check_process()
        if isinstance(self._noise, _OverRounds):
            self.round = self._noise.rounds  # a round that was not finished is begun again
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
            # clients that have waited longest come first
            ready = sorted(filter(self._is_ready, present), key=lambda n: (self._asked_at.get(n, [0])[-1], n))
            chosen = sorted(ready[: int(self.privacy.cohort)])
            if self._asked is not None:
                self._asked.write(self.round, chosen)
        self._open = set(chosen)
        return chosen

    def _charge(self) -> None:
        """Marks a sampled round as used; the first charges all of them. Separated ones were charged at the start."""
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
        """Ends the round: the noisy mean update, and why updates were refused; a refused update counts as zero.

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
        for number in asked if self.privacy.separation is not None else ():
            self._asked_at.setdefault(number, []).append(self.round)
        return self._noise.added(total) / self.privacy.cohort, refused

    def _check_process(self) -> None:
        """Raises InvalidInput in a forked process, which would release again rounds that are paid for once."""
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
    """Independent noise in every round."""

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
        """The increase of the private running total."""
        now = self._stream.add(total, step=self.rounds + 1).value  # refused if another process was faster
        step, self._before, self.rounds = now - self._before, now, self.rounds + 1
        return step

    def step(self, number: int) -> Array:
        """The increase in a finished round, numbered from 1."""
        before = self._stream.answer(number - 1).value if number > 1 else 0.0
        return np.asarray(self._stream.answer(number).value - before)
