"""A participant's folder: its ledger and its last reply in each run, so that each reply is drawn and paid for once.

The server may ask again (a lost connection, a restart), and the participant may be killed at any moment. A reply is
made in this order, and each stage is on the disk before the next one begins:

    spend -> draw -> store the noisy reply -> send it

A stored reply may have been sent, so the same request is answered with the same bytes. A spend without a stored reply
means a crash in between: nothing was sent, so noise may be drawn again under that spend. The steps of a run only
increase, so only the last reply has to be kept.

A failure is also visible to the server, and may reveal something about the data. So the work before the spend may fail
only because of the request, and a step that fails after the spend is not tried again.
"""

from __future__ import annotations

import os
import re
import sqlite3
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp.accounting.ledger.entries import Entry
from matrixdp.accounting.ledger.file import sync_folder
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.adjacency import REPLACE
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput, LedgerError, MatrixDPError
from matrixdp.privacy.certificate import Certificate

Arrays = Mapping[str, npt.NDArray[Any]]

BEFORE = -1  # the step before the first: the run has begun, and nothing was released in it


class Declined(MatrixDPError):
    """The participant refuses this request, and nothing was released; the text says why, without any data.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import Client, Declined, LocalTraining, RecordLevel
        >>> privacy = RecordLevel(budget=Budget(3.0, 1e-5), rounds=5, clip=1.0)
        >>> records, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> here = tempfile.mkdtemp()
        >>> training = LocalTraining(epochs=1)
        >>> client = Client(nn.Linear(4, 2), records, labels, training=training, privacy=privacy, folder=here)
        >>> try:
        ...     client.upload("first", 1, torch.zeros(3).numpy())  # another model's parameters
        ... except Declined:
        ...     print("declined")
        ...
        declined
    """


@dataclass(frozen=True)
class Charge:
    """Releases to be paid for; the fields are the arguments of `Ledger.spend`.

    The note begins with "run RUN ", so that all spends of a run can be found. Releases that were planned together,
    possibly over several runs, share the name of a series and the planned number.
    """

    note: str
    certificate: Certificate
    count: int = 1
    sampling_rate: float = 1.0
    series: str | None = None
    planned: int | None = None

    def pays_for(self, entry: Entry) -> bool:
        """Whether the entry has the profile, count and sampling rate of this charge."""
        mine = (self.certificate.profile, self.certificate.total_variation, self.count, self.sampling_rate)
        return mine == (entry.profile, entry.total_variation, entry.count, entry.sampling_rate)


@dataclass(frozen=True)
class Stored:
    """What a participant has stored of a run.

    Attributes:
        step: the last step that was answered, or BEFORE.
        reply: the reply to it.
        state: the participant's own state, such as its network; never sent.
        failed: whether the step failed, in which case there is no reply.
    """

    step: int = BEFORE
    reply: Arrays = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)
    failed: bool = False


class Participant:
    """One participant, with its own folder: the ledger `budget.db` and one file per run.

    Guarantee: every noisy reply is charged to the ledger before its noise is drawn, and a charge pays for at most one
    reply per step, through crashes, retries and concurrent requests. The plans of all runs (noise, rounds and sampling
    rates) must not depend on the replies of earlier runs. The guarantee needs an intact folder: a run whose file is
    missing or damaged cannot continue, but a file restored to an earlier state is not detected.

    Args:
        folder: created if it does not exist; nobody else may write to it.
        budget: of this participant over all runs; it must be that of an existing ledger.
        adjacency: the adjacency of its certificates.
        timeout: seconds to wait while another request is being answered.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import Participant
        >>> participant = Participant(tempfile.mkdtemp(), Budget(3.0, 1e-5))
        >>> participant.ledger.history()
        []
    """

    def __init__(
        self, folder: str | os.PathLike[str], budget: Budget, *, adjacency: str = REPLACE, timeout: float = 600.0
    ) -> None:
        if not Path(folder).expanduser().is_absolute():
            raise InvalidInput(
                f"folder must be an absolute path, got {str(folder)!r}: a relative one depends on where the process "
                "starts, and another folder is another budget for the same records"
            )
        self.folder = Path(folder).expanduser().resolve()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # not adaptive: the plan of a run fixes the noise of all its steps in advance
            self.ledger = Ledger(self.folder / "budget.db", budget, adjacency=adjacency, adaptive=False)
        except InvalidInput as reason:
            raise InvalidInput(
                f"folder {self.folder} was made for another guarantee: {reason}. A folder has one budget and one unit "
                "of privacy for all runs; another folder is another budget for the same records, and both add up"
            ) from None
        self._timeout = _check.positive("timeout", timeout)

    def answer(
        self,
        run: str,
        step: int,
        charges: Sequence[Charge],
        compute: Callable[[Stored], Any],
        draw: Callable[[Any], Stored],
    ) -> Arrays:
        """The reply to a request: drawn now or, if the step was answered before, the stored one.

        Args:
            run: the run's name; letters, digits, dots and dashes.
            step: a whole number, 0 or above, that only increases within a run.
            charges: the costs of this step. A charge whose note is already in the ledger was paid by an earlier step.
            compute: computes the private value from the stored state. Nothing is spent if it fails, so whether it fails
                must not depend on the data.
            draw: adds the noise, after the spend; what it returns is stored, and its reply sent. If it fails, the spend
                is lost and the step is not tried again.

        Raises:
            Declined: if the budget is spent, a later step was answered already, or the step has failed.
        """
        path = self._file(run)
        if not (isinstance(step, int) and not isinstance(step, bool) and BEFORE < step < 2**62):
            raise InvalidInput(f"step must be a whole number, 0 or above, got {step!r}")
        with self._locked():
            stored = self.stored(run) or self._begin(run)
            if step < stored.step:
                raise Declined(f"step {step} is out of order: step {stored.step} was answered already")
            if step == stored.step and stored.failed:
                raise Declined(f"step {step} has failed and is not tried again; ask for the next one")
            if step == stored.step:
                return stored.reply
            unpaid = self._unpaid(charges)
            self._check_affordable(unpaid)
            value = compute(stored)
            for charge in unpaid:
                self._spend(charge)
            try:
                drawn = draw(value)
            except Exception:
                _write(path, Stored(step, state=stored.state, failed=True))
                raise
            _write(path, Stored(step, drawn.reply, drawn.state))
            return drawn.reply

    def stored(self, run: str) -> Stored | None:
        """What is stored of a run; None if the participant has not taken part in it."""
        path = self._file(run)
        return _read(path) if path.exists() else None

    def _begin(self, run: str) -> Stored:
        """Marks the beginning of a run before anything is spent in it, so that a lost file is detected."""
        if any(entry.note.startswith(f"run {run} ") for entry in self.ledger.history()):
            raise LedgerError(
                f"{self._file(run)} is missing, though its run is in the ledger: what was sent is unknown. Restore the "
                "folder, or take part in a new run"
            )
        _write(self._file(run), Stored())
        return Stored()

    def _unpaid(self, charges: Sequence[Charge]) -> list[Charge]:
        unpaid, paid = [], {entry.note: entry for entry in self.ledger.history()}
        for charge in charges:
            entry = paid.get(charge.note)
            if entry is None:
                unpaid.append(charge)
            elif not charge.pays_for(entry):
                raise Declined(f"{charge.note!r} was paid for another guarantee: the settings changed during the run")
        return unpaid

    def _check_affordable(self, charges: Sequence[Charge]) -> None:
        """Declines before the work if the ledger is certain to refuse; otherwise the spend decides."""
        simple = all(c.certificate.mu is not None and c.sampling_rate == 1 and c.series is None for c in charges)
        squares = sum(c.count * (c.certificate.mu or 0.0) ** 2 for c in charges)
        if simple and charges and squares > self.ledger.remaining().mu ** 2 * (1 + 1e-6):
            raise Declined(f"the budget ({self.ledger.budget}) is spent")

    def _spend(self, charge: Charge) -> None:
        try:
            self.ledger.spend(**vars(charge))
        except BudgetExceeded:
            raise Declined(f"the budget ({self.ledger.budget}) is spent") from None

    def _file(self, run: str) -> Path:
        if not (isinstance(run, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", run)):
            raise InvalidInput(f"run must consist of letters, digits, dots and dashes, got {run!r}")
        return self.folder / f"run-{run}.npz"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the folder's lock: SQLite's, as it works on all systems and is released when the process dies."""
        with closing(
            sqlite3.connect(self.folder / "lock.db", timeout=self._timeout, isolation_level=None)
        ) as connection:
            try:
                connection.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as reason:
                raise Declined(f"another request is being answered ({reason})") from None
            yield


def _write(path: Path, stored: Stored) -> None:
    """Replaces the file atomically and durably: after a crash there is either the old one or the new one."""
    named: dict[str, Any] = {f"reply.{name}": array for name, array in stored.reply.items()}
    named |= {f"state.{name}": array for name, array in stored.state.items()}
    draft = path.with_suffix(".draft")
    with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        np.savez(file, step=np.int64(stored.step), failed=np.bool_(stored.failed), **named)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)


def _read(path: Path) -> Stored:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            reply, state = (
                {name.removeprefix(part): arrays[name] for name in arrays.files if name.startswith(part)}
                for part in ("reply.", "state.")
            )
            return Stored(int(arrays["step"]), reply, state, bool(arrays["failed"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as reason:
        raise LedgerError(
            f"{path} cannot be read ({reason}): what was sent in its run is unknown. Restore the folder, or take part "
            "in a new run"
        ) from None
