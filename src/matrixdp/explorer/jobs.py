"""Background computations of the page, each in its own thread, so that no view waits for another.

Error messages contain no private data: they are those of errors that matrixdp raises on purpose, or else the type and
place of the error, as its text may quote a record.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from matrixdp import _check
from matrixdp.errors import MatrixDPError

T = TypeVar("T")
Tell = Callable[..., None]
"""Called with how much is done, of how much, and optionally the result so far."""


def silent(done: int, total: int, partial: Any = None) -> None:
    """Ignores the progress."""


class Cancelled(MatrixDPError):
    """Another computation has replaced this one."""


class Job(Generic[T]):
    """A computation that was started. Every attribute may be read at any time, from any thread.

    Attributes:
        result: the result, perhaps a partial one while it runs; None before.
        message: the error message; empty unless it failed.
        done: how much is done, of `total`, which is 0 if not known.
        finished: whether it has ended, with a result or an error.
    """

    def __init__(self, function: Callable[[Tell], T]) -> None:
        self.result: T | None = None
        self.message = ""
        self.done, self.total = 0, 0
        self.finished = False
        self._cancelled = False
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether it ended without a result."""
        return self.finished and bool(self.message)

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._began

    def cancel(self) -> None:
        """Stops it when it next reports its progress; for computations whose result is no longer needed."""
        self._cancelled = True

    def wait(self, seconds: float = 600.0) -> None:
        """Waits for its end."""
        self._thread.join(seconds)

    def _tell(self, done: int, total: int, partial: Any = None) -> None:
        if self._cancelled:
            raise Cancelled("cancelled")
        self.done, self.total = done, total
        if partial is not None:
            self.result = partial

    def _run(self, function: Callable[[Tell], T]) -> None:
        try:
            self.result = function(self._tell)
        except MatrixDPError as problem:
            self.message = str(problem) or type(problem).__name__
        except Exception as problem:
            self.message = f"unexpected: {_check.origin(problem)}. Its message is withheld, as it may quote a record"
        finally:
            self.finished = True
