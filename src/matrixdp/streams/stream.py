"""A stream: hand in a value per day, get a private running total (or window, or any workload) with its error bar.

The value of day t is a row x_t of a matrix. Each day releases (C x)_t on the grid, with noise, where C is the strategy
of a noise law over time; answers are decoded from these rows. So the guarantee of the whole stream is the certificate
of that law, and is charged once, before the first noise. Rows may depend on earlier releases (denisov2022improved).

**Rounding.** (C x)_t is computed row by row, with at most `OverTime.row_by_row_share` of the error that the certificate
allows at its largest norm, so that norm may be larger by the inverse of this share. Each row must stay below it divided
by sqrt(steps), so that all rows together stay below it.

**Noise.** The noise of a day, or of a block's total (`noise`), is derived from a key in the state, its number, and the
row that it is added to. A repeated day with the same row gets the same noise; any other row gets independent noise, if
HMAC-SHA256 is a pseudorandom function. Nothing is released before it is on the disk.
"""

from __future__ import annotations

import hmac
import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.budget import Budget, checked_budget
from matrixdp.distributions import time_workloads
from matrixdp.errors import InvalidInput, MatrixDPError, StreamError
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.guarantee import Guarantee
from matrixdp.privacy.records import decode, encode
from matrixdp.secure.entropy import Key
from matrixdp.sensitivity import Participation
from matrixdp.streams import answers, blocks, noise, rows
from matrixdp.streams.answers import Answer
from matrixdp.streams.state import State, checked_path

_OTHER_LEDGER = "ledger must be the one that the stream was begun with; nothing was released"


class Stream:
    """A value that is released day by day.

    Guarantee: all answers together keep the budget under the set's adjacency, for records that take part as the set
    says, even if values depend on earlier answers; `certificate` has the details. A value that is too large for the
    noise's grid is refused, and this refusal is not covered by the guarantee.

    Args:
        steps: how many days there will be at most; None for a stream without an end, with records that take part once.
        sensitivity: a Participation set: the most that one record can change in a day's value, and on which days.
        budget: for the whole stream.
        workload: the answer of each day: "prefix" for running totals, "window:7" for sums over the last seven days, or
            any other of `matrixdp.distributions.time_workloads`.
        ledger: charged once for the whole stream, before the first noise.
        state: the file that keeps the stream; it must stay secret and on this machine. None: in memory only.
        shape: of a day's value; by default, that of the first.
        mechanism: "auto", or the name of a mechanism over time.
        note: stored in the ledger with the charge; never data.
        moved: the state was moved here on purpose, and the original no longer exists.
        **options: options of the mechanism.

    Raises:
        InvalidInput: if the state has other settings.
        StreamError: if the state is a copy, is older than one seen before, others can read it, or it cannot be used.

    Example:
        >>> from matrixdp import Budget, Participation
        >>> from matrixdp.streams import Stream
        >>> weekly = Participation(1.0, separation=7, times=4)
        >>> stream = Stream(steps=28, sensitivity=weekly, budget=Budget(1.0, 1e-6), workload="prefix")
        >>> for visitors in (510.0, 480.0, 530.0):
        ...     answer = stream.add(visitors)
        ...
        >>> answer.step, stream.certificate.meets(Budget(1.0, 1e-6))
        (3, True)
    """

    def __init__(
        self,
        *,
        steps: int | None,
        sensitivity: Participation,
        budget: Budget,
        workload: Any = "prefix",
        ledger: Any = None,
        state: Any = None,
        shape: Any = None,
        mechanism: str = "auto",
        note: str = "stream",
        moved: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(sensitivity, Participation):
            raise InvalidInput(f"sensitivity must be a Participation set, got {_check.kind(sensitivity)}")
        checked_budget(budget)
        if steps is None:
            if sensitivity.most_times(2**30) > 1:
                raise InvalidInput("a stream without an end is for records that take part once; give steps, or times=1")
            if not (isinstance(workload, str) and workload == "prefix") or mechanism != "auto" or options:
                raise InvalidInput("a stream without an end answers running totals, with a mechanism of its own")
        else:
            sensitivity.fits((_check.count("steps", steps), 1))
            workload = time_workloads.coefficients(workload, steps)
        settings = {
            "steps": steps,
            "sensitivity": sensitivity,
            "budget": budget,
            "workload": workload,
            "mechanism": mechanism,
            "options": options,
            "shape": None if shape is None else list(_check.shape(shape)),
            "note": note,
        }
        found = State(checked_path(state), moved=moved)
        if not found.exists:  # wrong settings are refused before a file is made
            self._take(settings)
            self._made(0, 1 if shape is None else math.prod(settings["shape"] or ()))
        self._open(found, ledger, encode(settings))

    @classmethod
    def resume(cls, state: str | Path, *, ledger: Any = None, moved: bool = False) -> Stream:
        """Opens the stream in a file, with the settings that it was begun with."""
        path = checked_path(state)
        if path is None or not path.exists():
            raise StreamError(f"there is no stream {path}; begin one with Stream(steps=..., state=...)")
        stream = cls.__new__(cls)
        stream._open(State(path, moved=moved), ledger, None)
        return stream

    def _open(self, state: State, ledger: Any, wanted: Any) -> None:
        self._state, self._ledger = state, ledger
        self._parts: dict[int, tuple[str, Certificate]] = {}
        origin = None if ledger is None else str(getattr(ledger, "origin", type(ledger).__name__))
        if wanted is not None:
            state.create(json.dumps(wanted, sort_keys=True, allow_nan=False), origin)
        with state.transaction() as connection:
            self._identity, secret, text, charged, paid = state.fixed(connection)
            self._settings = json.loads(text)
            if wanted is not None and not _same(wanted, self._settings):
                raise InvalidInput(
                    f"the stream {state.path} was begun with other settings; use those, Stream.resume(path), or "
                    "another file for another stream"
                )
            unpaid = charged is not None and not paid
            if (origin is not None and origin != charged) or (wanted is not None and origin is None and unpaid):
                raise InvalidInput(_OTHER_LEDGER)
            self._key = Key.from_bytes(bytes(secret))
            self._take(decode(self._settings))
        if wanted is not None and self.shape is not None:
            self._begin()

    def _take(self, known: Mapping[str, Any]) -> None:
        self.steps: int | None = known["steps"]
        self.sensitivity: Participation = known["sensitivity"]
        self.budget: Budget = known["budget"]
        self._workload = known["workload"]
        self._options = {"mechanism": known["mechanism"], **known["options"]}

    # --- properties ---

    @property
    def shape(self) -> Shape | None:
        """The shape of a day's value; None until it is known."""
        shape = self._settings["shape"]
        return None if shape is None else tuple(shape)

    @property
    def identity(self) -> str:
        """A unique name; a stream in a file has the same one in every process."""
        return str(self._identity)

    def __len__(self) -> int:
        """How many days were released."""
        with self._state.transaction() as connection:
            return self._state.days(connection)

    @cached_property
    def certificate(self) -> Guarantee:
        """The guarantee of the whole stream; a Certificate if it has an end. Known once the shape of a day is."""
        if self.shape is None:
            raise InvalidInput("the certificate is known when the shape of a day is: give shape=, or add a day")
        if self.steps is None:
            return noise.without_end(self.sensitivity, self.budget)
        with self._state.transaction() as connection:
            return self._part(connection, 0)

    def answer(self, step: int) -> Answer:
        """The answer of a day that was released already."""
        with self._state.transaction() as connection:
            days = self._state.days(connection)
            if not _check.count("step", step) <= days:
                raise InvalidInput(f"step must be at most {days}, the days that were released, got {step}")
            return self._answer(connection, step)

    # --- a day ---

    def add(self, value: Any, *, step: int | None = None) -> Answer:
        """Releases a day.

        Args:
            value: the day's value, a number, vector or matrix; in each cell a sum over the records of that day.
            step: the number of the day, from 1; the next one by default. Give it in a job that may run twice: a day
                that was released already gets the same answer again, without new noise, if its value is the same.

        Raises:
            InvalidInput: for a different value on a released day, a day out of order, more days than planned, or a
                value that is too large or of another shape; nothing is released then.
        """
        given = _check.array_of("value", value)
        row = _check.finite("value", given.reshape(1) if given.ndim == 0 else given)
        if step is not None:
            step = _check.count("step", step)
        if self.shape not in (None, row.shape):
            raise InvalidInput(f"value must have the shape {self.shape} of the days before, got {row.shape}")
        if self.shape is None:
            self._fix_shape(row.shape)
        self._begin()
        flat = row.ravel() + 0.0  # no negative zeros: they have other bytes
        with self._state.transaction() as connection:
            days = self._state.days(connection)
            step = days + 1 if step is None else step
            if step <= days:
                self._check_same(connection, step, flat)
                return self._answer(connection, step)
            if step > days + 1:
                raise InvalidInput(f"step must be {days + 1}, the next day, got {step}; add the days between first")
            if self.steps is not None and step > self.steps:
                raise InvalidInput(
                    f"the stream was planned, and paid for, with {self.steps} steps, and all of them are used; begin "
                    "another stream"
                )
            self._release(connection, step, flat)
            answer = self._answer(connection, step)
        return answer

    def _fix_shape(self, shape: Shape) -> None:
        """Writes the shape of all days with the first certificate, or neither if that many cells have no room."""
        before = self._settings
        try:
            with self._state.transaction() as connection:
                self._settings = json.loads(self._state.fixed(connection)[2])
                if self.shape is None:
                    self._settings["shape"] = list(shape)
                    text = json.dumps(self._settings, sort_keys=True)
                    connection.execute("UPDATE stream SET settings = ?", (text,))
                self._part(connection, 0)
        except MatrixDPError:
            self._settings = before
            raise
        if self.shape != shape:
            raise InvalidInput(f"value must have the shape {self.shape} of the days before, got {shape}")

    def _begin(self) -> None:
        """Sizes, certifies and charges the stream, once; noise comes later."""
        with self._state.transaction() as connection:
            _, _, _, charged, paid = self._state.fixed(connection)
            self._part(connection, 0)
        if paid:
            return
        if charged is not None:  # again with the same key after a crash, which is charged once
            if self._ledger is None:
                raise InvalidInput(_OTHER_LEDGER)
            self._ledger.spend(self.certificate, note=self._settings["note"], key=f"stream-{self._identity}")
        with self._state.transaction() as connection:
            connection.execute("UPDATE stream SET paid = 1")

    def _release(self, connection: sqlite3.Connection, step: int, row: Array) -> None:
        """Writes one row on the grid, with its noise, and what the next days need."""
        number, first, length, block = noise.place(self._divided(), step)
        last = number if block is None else noise.place_of_total(self._divided(), block)[0]
        for each in range(last + 1):  # all are checked before anything is drawn
            self._part(connection, each)
        stored = connection.execute("SELECT private FROM carried WHERE number > ? ORDER BY number DESC", (first,))
        before = np.array([np.frombuffer(blob) for (blob,) in stored]).reshape(-1, len(row))
        certificate = self._part(connection, number)
        noisy, kept = rows.released(certificate, step - 1 - first, row, before, self._key_for(b"noise", step))
        connection.execute("INSERT INTO days VALUES (?, ?, ?)", (step, self._fingerprint(step, row), noisy.tobytes()))
        connection.execute("INSERT INTO carried VALUES (?, ?, ?)", (step, number, kept.tobytes()))
        bands = noise.over_time(certificate).coefficients.shape[-1]
        oldest = step if step == first + length else max(first, step - bands + 1)
        connection.execute("DELETE FROM carried WHERE number <= ?", (oldest,))
        if block is not None:
            blocks.add_day(connection, row, first=step == first + 1)
            if step == first + length:
                self._release_total(connection, number, first, block)

    def _release_total(self, connection: sqlite3.Connection, number: int, first: int, block: int) -> None:
        """Releases the total of a complete block, in the transaction of its last day."""
        days = self._part(connection, number)
        estimate = answers.total(days, self._noisy(connection, first, noise.over_time(days).steps))
        part, place, length = noise.place_of_total(self._divided(), block)
        noisy, kept = rows.released(
            self._part(connection, part),
            place,
            blocks.remainder(connection, estimate, noise.largest_remainder(days)),
            blocks.carried(connection, len(estimate)),
            self._key_for(b"total", block),
        )
        blocks.write(connection, block + 1, estimate, noisy, kept, last=place == length - 1)

    def _key_for(self, purpose: bytes, number: int) -> Callable[[Array], Key]:
        return lambda white: self._key.derive_for(_content(purpose, number, white), number)

    def _fingerprint(self, step: int, row: Array) -> bytes:
        return self._key.fingerprint(_content(b"value", step, row))

    def _check_same(self, connection: sqlite3.Connection, step: int, row: Array) -> None:
        (known,) = connection.execute("SELECT fingerprint FROM days WHERE number = ?", (step,)).fetchone()
        if not hmac.compare_digest(bytes(known), self._fingerprint(step, row)):
            raise InvalidInput(f"step {step} was released with another value, and is not released again")

    # --- answers ---

    def _answer(self, connection: sqlite3.Connection, step: int) -> Answer:
        """The workload on the decoded rows; without an end, the sum of the totals of all parts and blocks so far."""
        found = []
        for number, part in enumerate(self._divided()):
            days = step - part.before
            if not days > 0:
                break
            if part.level == "days":
                released = self._noisy(connection, part.before, min(days, part.length))
                found.append(answers.answered(self._part(connection, number), self._workload, released))
            else:
                complete, days = divmod(days, part.length)
                if days:
                    released = self._noisy(connection, part.before + complete * part.length, days)
                    found.append(answers.answered(self._part(connection, number), "prefix", released))
                found += self._totals(connection, number, complete)
                break
        shape = self.shape
        assert shape is not None
        total = np.sum([value for value, _ in found], axis=0)
        return Answer(step, total.reshape(shape), math.sqrt(math.fsum(variance for _, variance in found)))

    def _totals(self, connection: sqlite3.Connection, number: int, complete: int) -> Iterator[tuple[Array, float]]:
        """The totals of the first `complete` blocks, from the parts after the one with this number."""
        for each, part in enumerate(islice(self._divided(), number + 1, None), number + 1):
            if not part.before < complete:
                return
            estimates, noisy = blocks.read(connection, part.before, min(complete - part.before, part.length))
            value, variance = answers.answered(self._part(connection, each), "prefix", noisy)
            yield value + np.sum(estimates, axis=0), variance

    def _noisy(self, connection: sqlite3.Connection, before: int, count: int) -> Array:
        """The released rows of `count` days, after the first `before` days."""
        stored = connection.execute(
            "SELECT noisy FROM days WHERE number > ? AND number <= ? ORDER BY number", (before, before + count)
        )
        return np.array([np.frombuffer(blob) for (blob,) in stored])

    # --- parts ---

    def _divided(self, size: int | None = None) -> Iterator[noise.Part]:
        """The parts in order, for days with `size` cells."""
        if self.steps is not None:
            return iter([noise.Part("days", 0, self.steps)])
        return noise.parts(math.prod(self.shape or ()) if size is None else size, self.sensitivity, self.budget)

    def _part(self, connection: sqlite3.Connection, number: int) -> Certificate:
        """The certificate of a part, read from the state; made and written on first use.

        The state is authoritative: the transaction of a refused day undoes what it had written.
        """
        found = connection.execute("SELECT certificate FROM parts WHERE number = ?", (number,)).fetchone()
        if found is None:
            assert self.shape is not None
            made = self._made(number, math.prod(self.shape))
            found = (made.to_json(),)
            connection.execute("INSERT INTO parts VALUES (?, ?)", (number, *found))
            self._parts[number] = found[0], made
        if number not in self._parts or self._parts[number][0] != found[0]:
            self._parts[number] = found[0], Certificate.from_json(found[0])
        certificate = self._parts[number][1]
        part = next(islice(self._divided(), number, None))
        if not noise.fits(certificate, part, self.sensitivity, self.budget):
            raise StreamError(
                "the stream has parts of other lengths, or with other noise, than this version of matrixdp; begin "
                "another one"
            )
        return certificate

    def _made(self, number: int, size: int) -> Certificate:
        """A new certificate: of the whole stream, or of a part of one without an end, for days with `size` cells."""
        if self.steps is None:
            part = next(islice(self._divided(size), number, None))
            return noise.of_part(part, size, self.sensitivity, self.budget)
        return noise.of_whole((self.steps, size), self.sensitivity, self.budget, self._workload, **self._options)


def _content(purpose: bytes, step: int, row: Array) -> bytes:
    return purpose + step.to_bytes(8, "big") + row.tobytes()


def _same(wanted: Any, known: Any) -> bool:
    """Whether settings agree; notes are not compared, and a shape that is left out agrees with any."""
    left_out = {"note"} if wanted["shape"] is not None else {"note", "shape"}
    if known["shape"] is None:
        left_out.add("shape")
    return all(wanted[name] == known[name] for name in wanted if name not in left_out)
