"""The view Release: what will be published and what it costs; then, once confirmed, the release itself.

Every preview has a key. Confirming it twice, by a double click or after a reload, has no further effect: `Desk` starts
one release per key, and no noise is drawn for a key that the ledger knows. A release continues if its page is closed.
Its files are kept in memory, for every tab, until the program ends.
"""

from __future__ import annotations

import io
import secrets
import shlex
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.accounting.ledger.left import Left
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.explorer.jobs import Job, Tell, silent
from matrixdp.explorer.snippets import Snippet, call, command, lines, without_password
from matrixdp.explorer.statistics import Statistic
from matrixdp.explorer.tables import LEVEL, About, ErrorBars, error_bars
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.guarantee import Guarantee
from matrixdp.privacy.records import digest
from matrixdp.privacy.verification import written
from matrixdp.tables.outputs import Labelled

TABLE = "table.csv"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be released.

    Attributes:
        records: the file of the records.
        about: the table.
        statistic: what to release.
        budget: the budget of the release.
        ledger: the ledger that it is charged to: a file, or the address of a database.
        dataset: which data set it is from; may be empty, except for a database.
        analyst: who asks for it; may be empty.
        purpose: what it is for; may be empty.
        rows: a public guess of the number of rows, for error bars.
    """

    records: str
    about: About
    statistic: Statistic
    budget: Budget
    ledger: str
    dataset: str = ""
    analyst: str = ""
    purpose: str = ""
    rows: int = 1000

    @property
    def names(self) -> dict[str, Any]:
        """Data set, analyst and purpose, where they are given."""
        found = {"dataset": self.dataset, "analyst": self.analyst, "purpose": self.purpose}
        return {name: value for name, value in found.items() if value}

    def snippet(self) -> Snippet:
        """Code that makes the same release."""
        sizing = {"epsilon": repr(self.budget.epsilon), "delta": repr(self.budget.delta)}
        about: dict[str, Any] = {"domain": self.about.shown or self.about.domain, **self.about.words()}
        ledger = without_password(self.ledger)
        released = command("release", self.records, **about, **sizing, ledger=ledger, **self.names, out=TABLE)
        counts = self.statistic.method in ("counts", "cell_states")
        also = " --statement statement.html --figure figure.png" if counts else ""
        python = lines(
            "from matrixdp import Budget, Ledger",
            "from matrixdp.tables import Domain, Table",
            "",
            self.about.python(self.records),
            f"ledger = {call('Ledger', ledger, named=self.names)}",
            f"budget = Budget({self.budget.epsilon!r}, {self.budget.delta!r})",
            f"out = {self.statistic.python()}.release(budget, ledger=ledger, note={note_of(self.statistic)!r})",
            f"out.to_csv({TABLE!r})",
        )
        return Snippet(python, lines(f"{released} {shlex.join(self.statistic.options)}{also}"))


def note_of(statistic: Statistic) -> str:
    """The note of a release in the ledger: the name of its query, as on the command line."""
    names = {"cell_states": "cell-states", "marginals": "table-marginals"}
    return names.get(statistic.method, statistic.method)


@dataclass(frozen=True)
class Preview:
    """What will be released and what it costs. Nothing in it depends on a record.

    Attributes:
        key: the idempotency key of the release.
        request: what was asked for.
        certificate: what it will guarantee.
        axes: the names and the labels of its axes.
        bars: its error bars.
        budget: the budget of the ledger.
        spent: epsilon spent before it, at the ledger's delta.
        spent_after: epsilon spent after it.
        left: what is left of the total, and of each quota of the analyst.
    """

    key: str
    request: Request
    certificate: Certificate
    axes: Sequence[tuple[str, tuple[str, ...]]]
    bars: ErrorBars
    budget: Budget
    spent: float
    spent_after: float
    left: Sequence[Left]

    @property
    def fits(self) -> bool:
        """Whether the ledger has room for it, as far as that is known now."""
        return self.spent_after <= self.budget.epsilon


def preview(request: Request, tell: Tell = silent) -> Preview:
    """Computes a preview from the domain alone; of the records only the names of the columns are read."""
    tell(0, 3)
    ledger = Ledger(request.ledger, **request.names)
    request.about.table(request.records)
    answer = request.statistic.answer(request.about.made(request.rows))
    tell(1, 3)
    prepared = answer.prepare(request.budget)
    certificate = prepared.prepared.certificate
    if ledger.adjacency not in (None, certificate.adjacency):
        raise InvalidInput(f"the ledger has the adjacency {ledger.adjacency}, and tables here need add/remove")
    tell(2, 3)
    return Preview(
        key=secrets.token_hex(16),
        request=request,
        certificate=certificate,
        axes=answer.axes,
        bars=error_bars(request.statistic, answer, prepared),
        budget=ledger.budget,
        spent=ledger.spent(),
        spent_after=ledger.spent_with(certificate),
        left=ledger.left(),
    )


@dataclass(frozen=True)
class Outcome:
    """A release that was made and charged.

    Attributes:
        request: what was asked for.
        certificate: what it guarantees.
        columns: the columns of the labelled table, with error bars.
        files: what can be downloaded, by name.
        entry: the number of its entry in the ledger.
    """

    request: Request
    certificate: Certificate
    columns: Mapping[str, Sequence[Any]]
    files: Mapping[str, bytes]
    entry: int


@dataclass
class _Charge:
    """Charges a ledger under a key, once, and remembers the entry.

    A key pays for one draw of noise. If the ledger knows the key, noise may have been drawn, and none is drawn again.
    """

    ledger: Ledger
    words: Mapping[str, Any]
    entry: int = 0

    def spend(self, certificate: Guarantee, note: str = "") -> object:
        if any(entry.key == self.words["key"] for entry in self.ledger.history()):
            raise InvalidInput("this preview was released already, and is paid for once; make another preview")
        self.entry = self.ledger.spend(certificate, note, **self.words).number
        return self.entry


def released(request: Request, key: str, tell: Tell = silent) -> Outcome:
    """Reads the records, charges the ledger under the key, draws the noise, and writes the files.

    What can fail is done before the charge, except for the figure and the statement: if one cannot be made, the table
    and its certificate are released without it.
    """
    tell(0, 4)
    ledger = Ledger(request.ledger, **request.names)
    answer = request.statistic.answer(request.about.table(request.records))
    tell(1, 4)
    prepared = answer.prepare(request.budget)
    tell(2, 4)
    unit = prepared.prepared.certificate.unit
    charge = _Charge(ledger, {"key": key} if unit is None else {"key": key, "unit": unit})
    out = prepared.release(charge, note_of(request.statistic))
    tell(3, 4)
    text = io.StringIO()
    out.to_csv(text)
    content = text.getvalue().encode()
    certificate = replace(out.certificate, released={"file": TABLE, "sha256": digest(content)})
    written_down, arrays = written(certificate)
    files = {TABLE: content, "table.certificate.json": written_down.encode()}
    files |= ({"table.certificate.json.npz": arrays} if arrays else {}) | _pages(out.certified(certificate))
    columns = {name: np.asarray(part).tolist() for name, part in out.columns(LEVEL).items()}
    return Outcome(request, certificate, columns, files, charge.entry)


def _pages(out: Labelled) -> dict[str, bytes]:
    """The statement and the figure, if they can be made; the table, which is charged, is released without them too."""

    def statement() -> bytes:
        return out.statement("html").encode()

    def figure() -> bytes:
        picture = io.BytesIO()
        out.plot().savefig(picture, format="png", dpi=150)
        return picture.getvalue()

    found = {}
    for name, make in {"statement.html": statement, "figure.png": figure}.items():
        with suppress(Exception):  # such as too many lines for a figure, or no memory for it
            found[name] = make()
    return found


class Desk:
    """The releases of this program: one per key, however often it is confirmed, by whichever tab."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[Request, Job[Outcome]]] = {}
        self._lock = threading.Lock()

    def confirm(self, found: Preview) -> Job[Outcome]:
        """Starts the release of a preview, or returns the one that was started."""
        request, key = found.request, found.key
        with self._lock:
            if key not in self._jobs:
                self._jobs[key] = request, Job(lambda tell: released(request, key, tell))
            return self._jobs[key][1]

    def releases(self) -> dict[str, tuple[Request, Job[Outcome]]]:
        """All releases by key, the latest first."""
        with self._lock:
            return dict(reversed(self._jobs.items()))

    def file(self, key: str, name: str) -> bytes | None:
        """A file of a release, if there is one."""
        with self._lock:
            _, job = self._jobs.get(key, (None, None))
        outcome = None if job is None or not job.finished else job.result
        return None if outcome is None else outcome.files.get(name)
