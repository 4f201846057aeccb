"""A participant's folder: its ledger, and the last reply it gave in each run, so that no reply is ever given twice.

The server may ask again (a lost connection, a restart), and the participant may be killed at any moment. Replies go out
in this order, and each step is on the disk before the next one begins:

    spend -> draw -> store the noisy reply -> send it

A stored reply may have left the machine, so the same request is answered with the same bytes. A spend without a stored
reply is a crash in between: nothing has left, so noise may be drawn anew under that spend. Steps of a run only go
forward, hence the last reply is all that has to be kept.

That a request fails is an answer too, and may tell of the data. So what is done before the spend fails for what is in
the request alone, and a step that fails after it is over.
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
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput, MatrixDPError
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.ledger import Ledger
from matrixdp.privacy.ledger_entries import Entry
from matrixdp.privacy.ledger_file import LedgerError, sync_folder

Arrays = Mapping[str, npt.NDArray[Any]]

# The step before the first: the run is known, and nothing was released in it.
BEFORE = -1


class Declined(MatrixDPError):
    """The participant does not answer this request; nothing was released. The text says why and holds no data."""


@dataclass(frozen=True)
class Charge:
    """Releases to be paid for: what each guarantees, and under which note the ledger remembers them.

    The note begins with "run RUN ", so that all that a run has spent can be found. Releases that are planned as one
    block, whatever runs they are made in, have the name of a series, and how many were planned.
    """

    note: str
    certificate: Certificate
    count: int = 1
    sampling_rate: float = 1.0
    series: str | None = None
    planned: int | None = None

    def pays_for(self, entry: Entry) -> bool:
        """Whether this is what a spend was made for."""
        mine = (self.certificate.profile, self.certificate.total_variation, self.count, self.sampling_rate)
        return mine == (entry.profile, entry.total_variation, entry.count, entry.sampling_rate)


@dataclass(frozen=True)
class Stored:
    """Where a participant stands in a run.

    Attributes:
        step: the last step that was answered, or BEFORE.
        reply: what was sent then.
        state: what the participant keeps for itself, such as its own network; never sent.
        failed: whether it failed, and nothing but that was said.
    """

    step: int = BEFORE
    reply: Arrays = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)
    failed: bool = False


class Participant:
    """One participant: a folder of its own, with the ledger `budget.db` and a file for each run.

    Guarantee: every noisy reply that leaves is charged to the ledger before its noise is drawn, and a charge pays for
    one reply a step at most, through crashes, retries and concurrent requests. The plans of all runs (noise, rounds and
    sampling rates) must not depend on what earlier runs have replied. The folder is part of the guarantee: a run whose
    file is gone or damaged is over, but a file put back to an earlier state would be believed.

    Args:
        folder: made if it does not exist; nobody else may write to it.
        budget: what this participant may spend in all, over all runs; an existing ledger keeps its own.
        relation: the relation of its certificates.
        timeout: how many seconds to wait for another request that is being answered.
    """

    def __init__(
        self, folder: str | os.PathLike[str], budget: Budget, *, relation: str = "replace", timeout: float = 600.0
    ) -> None:
        if not Path(folder).expanduser().is_absolute():
            raise InvalidInput(
                f"folder must be an absolute path, got {str(folder)!r}: a relative one is another folder, with another "
                "budget for the same records, wherever the process starts"
            )
        self.folder = Path(folder).expanduser().resolve()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # the noise of all steps is fixed by the plan of a run, which is sized for the whole budget
            self.ledger = Ledger(self.folder / "budget.db", budget, relation=relation, adaptive=False)
        except InvalidInput as reason:
            raise InvalidInput(
                f"folder {self.folder} was made for another guarantee: {reason}. A folder has one budget for all runs, "
                "and one unit of privacy; another folder is another budget for the same records, and both add up"
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
        """The reply to a request, made now or, if it was answered before, as it was then.

        Args:
            run: the run's name; letters, digits, dots and dashes.
            step: a whole number, 0 or above, that only grows within a run.
            charges: what this step costs. A charge whose note is in the ledger has been paid by an earlier step.
            compute: the private value, from where the participant stands. Nothing is spent if it fails, so whether it
                does must not depend on the data.
            draw: adds the noise, once it is paid for: the new state of the run, whose reply goes out. If it fails, the
                step is over, and its spend is lost.

        Raises:
            Declined: if the budget is spent, or the step lies behind or has failed.
        """
        path = self._file(run)
        if not (isinstance(step, int) and not isinstance(step, bool) and BEFORE < step < 2**62):
            raise InvalidInput(f"step must be a whole number, 0 or above, got {step!r}")
        with self._alone():
            stored = self.stored(run)
            if stored is None:
                stored = self._begin(run)
            if step == stored.step and not stored.failed:
                return stored.reply
            if step == stored.step:
                raise Declined(f"step {step} has failed and is not tried again; the next one may be asked for")
            if step < stored.step:
                raise Declined(f"step {step} lies behind: step {stored.step} was answered already")
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
        """Where this participant stands in a run; None if it has not taken part."""
        path = self._file(run)
        return _read(path) if path.exists() else None

    def _begin(self, run: str) -> Stored:
        """Marks the beginning of a run, before anything is spent in it; a spend without this mark is a lost file."""
        if any(entry.note.startswith(f"run {run} ") for entry in self.ledger.history()):
            raise LedgerError(
                f"{self._file(run)} is missing, though its run is in the ledger: what was sent is not known. Restore "
                "the folder, or take part in a new run"
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
        """Declines before the work where the ledger is sure to refuse; its own answer at the spend is what counts."""
        simple = (c.certificate.mu is not None and c.sampling_rate == 1 and c.series is None for c in charges)
        if not charges or not all(simple):
            return
        squares = sum(charge.count * (charge.certificate.mu or 0.0) ** 2 for charge in charges)
        if squares > self.ledger.remaining().mu ** 2 * (1 + 1e-6):
            raise Declined(f"the budget ({self.ledger.budget}) is spent")

    def _spend(self, charge: Charge) -> None:
        try:
            self.ledger.spend(
                charge.certificate,
                charge.note,
                count=charge.count,
                sampling_rate=charge.sampling_rate,
                series=charge.series,
                planned=charge.planned,
            )
        except BudgetExceeded:
            raise Declined(f"the budget ({self.ledger.budget}) is spent") from None

    def _file(self, run: str) -> Path:
        if not (isinstance(run, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", run)):
            raise InvalidInput(f"run must consist of letters, digits, dots and dashes, got {run!r}")
        return self.folder / f"run-{run}.npz"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the folder's lock. It is SQLite's, so it works everywhere and is dropped when the process dies."""
        with closing(sqlite3.connect(self.folder / "lock.db", self._timeout, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as reason:
                raise Declined(f"another request is being answered ({reason})") from None
            yield


def _write(path: Path, stored: Stored) -> None:
    """Puts a file in place as a whole: after a crash there is the old one or the new one, and it is on the disk."""
    named: dict[str, Any] = {f"reply.{name}": array for name, array in stored.reply.items()}
    named |= {f"state.{name}": array for name, array in stored.state.items()}
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        np.savez(file, step=np.int64(stored.step), failed=np.bool_(stored.failed), **named)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)


def _read(path: Path) -> Stored:
    parts: dict[str, dict[str, npt.NDArray[Any]]] = {"reply": {}, "state": {}}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for name in arrays.files:
                part, dot, rest = name.partition(".")
                if dot:
                    parts[part][rest] = arrays[name]
            return Stored(int(arrays["step"]), parts["reply"], parts["state"], bool(arrays["failed"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as reason:
        raise LedgerError(
            f"{path} cannot be read ({reason}): what was sent in its run is not known. Restore the folder, or take "
            "part in a new run"
        ) from None
