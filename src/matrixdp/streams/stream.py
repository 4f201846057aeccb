"""A stream: hand in a value per day, get a private running total (or window, or any workload) with its error bar.

The value of day t is a row x_t of a matrix. What is released is (C x)_t on the grid, with noise, for the strategy C of
a law over time, and decoded from there on; so the guarantee of the whole stream is the certificate of that law, and is
charged once, before the first noise. Rows may be chosen in view of what was released (denisov2022improved). Rounding:
(C x)_t is computed from the same products, row by row, that `OverTime.whitening_error` bounds, and each row must stay
below the largest norm over sqrt(steps), so that all of them together stay below it.

**Noise.** The noise of a day comes from a key in the state, the day, and the row that it is added to: the same row gets
the same noise when a day is done again, and any other row gets noise that is independent of it, as far as HMAC-SHA256
is a pseudorandom function. Nothing is released before the day is on the disk.
"""

from __future__ import annotations

import hmac
import json
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.backends.numpy import TOO_LARGE
from matrixdp.budget import Budget
from matrixdp.distributions import time_workloads
from matrixdp.errors import InvalidInput, StreamError
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.guarantee import Guarantee
from matrixdp.privacy.records import decode, encode
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key
from matrixdp.sensitivity import Participation
from matrixdp.streams import noise
from matrixdp.streams.noise import FIRST_PART
from matrixdp.streams.state import State, checked_path

_OTHER_LEDGER = "ledger must be the one that the stream was begun with; nothing was released"


@dataclass(frozen=True, eq=False)
class Answer:
    """What a stream says on one day.

    Attributes:
        step: the day, from 1.
        value: the private answer of the workload, in the shape of the day's value.
        standard_error: of the noise, the same in every cell.

    Example:
        >>> from matrixdp import Budget, Participation
        >>> from matrixdp.streams import Stream
        >>> stream = Stream(steps=30, sensitivity=Participation(1.0), budget=Budget(1.0, 1e-6))
        >>> answer = stream.add(500.0)
        >>> answer.step, answer.value.shape
        (1, (1,))
    """

    step: int
    value: Array
    standard_error: float

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """An interval for the true answer in each cell, by the law of the noise alone."""
        from scipy.stats import norm  # here, because it is slow to import

        half = float(norm.ppf((1 + _check.probability("level", level)) / 2)) * self.standard_error
        return self.value - half, self.value + half


class Stream:
    """A value that is released day by day.

    Guarantee: all answers together keep the budget under the set's adjacency, for records that take part as the set
    says, also when values are chosen in view of earlier answers; `certificate` has the details. Values that do not fit
    the grid of the noise are refused, and that one refusal is not hidden.

    Args:
        steps: how many days there will be at most; None for a stream without an end, with records that take part once.
        sensitivity: a Participation set: the most that one record can change in a day's value, and on which days.
        budget: what the whole stream may use.
        workload: what is answered each day: "prefix" for running totals, "window:7" for the last seven days, or any
            other of `matrixdp.distributions.time_workloads`.
        ledger: charged once for the whole stream, before the first noise.
        state: the file that keeps the stream, secret and on this machine; in memory only without one.
        shape: of a day's value; by default, that of the first.
        mechanism: "auto", or the name of a mechanism over time.
        note: what the ledger remembers; never data.
        moved: the state was moved here on purpose, and the original is gone for good.
        **options: of the mechanism.

    Raises:
        InvalidInput: if the state has other settings.
        StreamError: if the state is a copy, was put back, is readable by others, or cannot be used.

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
        if not isinstance(budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {_check.kind(budget)}")
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
        if not found.exists:  # whatever is wrong with the settings comes out before there is a file
            self._take(settings)
            self._made(0, 1 if shape is None else math.prod(settings["shape"] or ()))
        self._open(found, ledger, encode(settings))

    @classmethod
    def resume(cls, state: str | Path, *, ledger: Any = None, moved: bool = False) -> Stream:
        """The stream in a file, with the settings that it was begun with."""
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

    # --- what a stream says of itself ---

    @property
    def shape(self) -> Shape | None:
        """The shape of a day's value; None until it is known."""
        shape = self._settings["shape"]
        return None if shape is None else tuple(shape)

    @property
    def identity(self) -> str:
        """A name that no other stream has; of one in a file, the same in every process."""
        return str(self._identity)

    def __len__(self) -> int:
        """How many days were released."""
        with self._state.transaction() as connection:
            return self._state.days(connection)

    @cached_property
    def certificate(self) -> Guarantee:
        """What the whole stream guarantees; a Certificate if it has an end. Known once the shape of a day is."""
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
            step: the number of the day, from 1; the next one by default. A job that may be run twice gives it: a day
                that was released already is answered again, without noise of its own, if its value is the same.

        Raises:
            InvalidInput: for another value on a day that was released, a day out of turn, more days than planned, or a
                value of another shape or too large; nothing is released then.
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
        with self._state.transaction() as connection:
            _, _, text, _, _ = self._state.fixed(connection)
            settings = json.loads(text)
            if settings["shape"] is None:
                settings["shape"] = list(shape)
                connection.execute("UPDATE stream SET settings = ?", (json.dumps(settings, sort_keys=True),))
        self._settings = settings
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
        """One row on the grid, with its noise, written with all that the next days need."""
        number, first, length = self._part_of(step)
        certificate = self._part(connection, number)
        covariance, drawing = noise.over_time(certificate), certificate.drawing
        assert drawing is not None
        assert drawing.grid is not None
        kernels.prepare(1.0, drawing.grid)
        place, size = step - 1 - first, len(row)
        stored = connection.execute("SELECT private FROM carried WHERE part = ? ORDER BY number DESC", (number,))
        before = np.array([np.frombuffer(blob) for (blob,) in stored]).reshape(-1, size)
        encoded = covariance.encode_next(place, row, before)
        white = encoded / covariance.std
        longest = math.inf if drawing.largest_norm is None else drawing.largest_norm / math.sqrt(length)
        if not _check.norm(white) <= longest or not kernels.largest(white) < kernels.limit(
            1.0, drawing.grid, white.dtype
        ):
            raise InvalidInput(TOO_LARGE)
        noisy = kernels.add_noise(white, 1.0, drawing.grid, self._key.derive_for(_content(b"noise", step, white), step))
        connection.execute("INSERT INTO days VALUES (?, ?, ?)", (step, self._fingerprint(step, row), noisy.tobytes()))
        kept = encoded if covariance.inverse else row
        connection.execute("INSERT INTO carried VALUES (?, ?, ?)", (step, number, kept.tobytes()))
        oldest = step - covariance.coefficients.shape[-1] + 1
        connection.execute("DELETE FROM carried WHERE number <= ? OR part < ?", (oldest, number))

    def _fingerprint(self, step: int, row: Array) -> bytes:
        return self._key.fingerprint(_content(b"value", step, row))

    def _check_same(self, connection: sqlite3.Connection, step: int, row: Array) -> None:
        (known,) = connection.execute("SELECT fingerprint FROM days WHERE number = ?", (step,)).fetchone()
        if not hmac.compare_digest(bytes(known), self._fingerprint(step, row)):
            raise InvalidInput(f"step {step} was released with another value, and is not released again")

    # --- answers ---

    def _answer(self, connection: sqlite3.Connection, step: int) -> Answer:
        """The workload on the decoded rows; of a stream without an end, the totals of the parts before come on top."""
        number, first, _ = self._part_of(step)
        total, variance = self._within(connection, number, step - 1 - first)
        for part in range(number):
            before, more = self._within(connection, part, FIRST_PART * 2**part - 1)
            total, variance = total + before, variance + more
        shape = self.shape
        assert shape is not None
        return Answer(step, total.reshape(shape), math.sqrt(variance))

    def _within(self, connection: sqlite3.Connection, number: int, place: int) -> tuple[Array, float]:
        """The answer at one place of a part, and its variance."""
        certificate = self._part(connection, number)
        covariance = noise.over_time(certificate)
        first = 0 if self.steps is not None else FIRST_PART * (2**number - 1)
        stored = connection.execute(
            "SELECT noisy FROM days WHERE number > ? AND number <= ? ORDER BY number", (first, first + place + 1)
        )
        noisy = np.zeros(covariance.shape)
        noisy[: place + 1] = [np.frombuffer(blob) for (blob,) in stored]
        task = time_workloads.coefficients(self._workload, covariance.steps)
        variance = float(covariance.answer_variances(task)[place])
        return time_workloads.answer(task, place, covariance.color(noisy)), variance

    def _part_of(self, step: int) -> tuple[int, int, int]:
        """The part of a day, the days before it, and its length."""
        if self.steps is not None:
            return 0, 0, self.steps
        number = ((step - 1) // FIRST_PART + 1).bit_length() - 1
        return number, FIRST_PART * (2**number - 1), FIRST_PART * 2**number

    def _part(self, connection: sqlite3.Connection, number: int) -> Certificate:
        """The certificate of a part, as the state has it; made and written when it is first asked for.

        The state decides, also after a day that was refused: its transaction took back what it had written.
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
        return self._parts[number][1]

    def _made(self, number: int, size: int) -> Certificate:
        """The certificate of the whole stream, or of a part of one without an end, for days with so many cells."""
        if self.steps is None:
            return noise.of_part(number, size, self.sensitivity, self.budget)
        return noise.of_whole((self.steps, size), self.sensitivity, self.budget, self._workload, **self._options)


def _content(purpose: bytes, step: int, row: Array) -> bytes:
    return purpose + step.to_bytes(8, "big") + row.tobytes()


def _same(wanted: Any, known: Any) -> bool:
    """Whether settings agree; a shape or a note that is left out agrees with any."""
    left_out = {"note"} if wanted["shape"] is not None else {"note", "shape"}
    if known["shape"] is None:
        left_out.add("shape")
    return all(wanted[name] == known[name] for name in wanted if name not in left_out)
