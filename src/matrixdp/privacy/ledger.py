"""A budget that outlives the process: one SQLite file with every spend, shared by all who release from the records.

A spend is on the disk before any noise is drawn, so a crash can waste budget but never lose a spend. The file is
written with a rollback journal and `synchronous = EXTRA`: at rest it is one whole file, and a commit returns only when
the data and the folder's entries have reached the disk. (A write-ahead log would flush less often, but it keeps recent
spends in a second file, easily left behind by a copy, and it needs memory shared by all processes.)

Entries form a chain: each stores the SHA-256 of the hash before it and of its own fields, and the table `ledger` stores
how many there are and the last hash. docs/ledger.md says what this finds and what it cannot.

Every operation opens a connection of its own, and none is open while the process forks.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.noise.sampler import Sampling
from matrixdp.privacy import gaussian, spherical
from matrixdp.privacy.accountant import Accountant
from matrixdp.privacy.certificate import Certificate, GaussianProfile, Profile
from matrixdp.privacy.composition import check_sampling_rate
from matrixdp.privacy.ledger_file import (
    APPLICATION,
    COLUMNS,
    INSERT,
    LONGEST_NOTE,
    PROFILE,
    SCHEMA,
    SELECT,
    LedgerError,
    connection_to,
    create,
    hashed,
    link,
    now,
    pragma,
    read_header,
    upgrade,
)
from matrixdp.sensitivity import RELATIONS

_Use = tuple[Any, ...]  # the values of PROFILE, the total variation, and the sampling rate


@dataclass(frozen=True)
class Remaining:
    """What one more Gaussian release may use: mu, and the epsilon that it may promise at the budget's delta.

    What the sampler of that release is off comes on top; for matrices of many millions of entries, stay a little below.
    """

    mu: float
    epsilon: float


@dataclass(frozen=True)
class Entry:
    """One spend: what was guaranteed, when, what for, and how often; the fields are those of its certificate."""

    number: int
    time: str
    note: str
    relation: str
    exact: bool
    profile: Profile
    total_variation: float
    sensitivity: str
    noise: str
    source: str
    shape: tuple[int, ...]
    count: int
    sampling_rate: float
    hash: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as they were hashed, and the hash."""
        return {**hashed(_record(self)), "hash": self.hash}


@dataclass(frozen=True)
class _Verified:
    """The beginning of a chain that was found whole: its length, its last hash, and how often each use was made."""

    entries: int
    head: str
    relation: str | None
    spent: Mapping[_Use, int]

    def followed_by(self, record: Mapping[str, Any], head: str) -> _Verified:
        """The same with one more entry."""
        use = _use(record)
        spent = {**self.spent, use: self.spent.get(use, 0) + record["count"]}
        return _Verified(record["number"], head, record["relation"], spent)


class Ledger:
    """A budget in a file, for any number of processes and threads.

    Guarantee: the releases charged to the ledger, taken together, keep its budget under its relation, also when later
    queries depend on earlier answers. If all are Gaussian and without sampling, so may the noise that each one gets
    (smith2022fully); otherwise the certificates, counts and rates must not. A spend that returns is on the disk.

    Args:
        path: the SQLite file; it is created if it does not exist and a budget is given.
        budget: what all spends together may use. An existing ledger keeps its own, and another one is an error.
        relation: "add/remove" or "replace"; if it is not given at creation, the first spend fixes it.
        timeout: how many seconds to wait for other processes that are writing.

    Raises:
        LedgerError: if there is no ledger and no budget to make one, or the file cannot be used or was tampered with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: Budget | None = None,
        *,
        relation: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if budget is not None and not isinstance(budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {budget!r}")
        if relation is not None:
            _check.choice("relation", relation, RELATIONS)
        self._timeout = _check.positive("timeout", timeout)
        try:
            self.path = Path(path).resolve()  # a later change of the working folder must not change the ledger
            exists = self.path.exists()
        except (TypeError, ValueError, OSError, RuntimeError) as reason:
            raise InvalidInput(f"path must name a file that can be reached, got {path!r} ({reason})") from None
        if not exists:
            if budget is None:
                raise LedgerError(f"there is no ledger {self.path}; create it with a budget (matrixdp ledger create)")
            create(self.path, budget, relation)
        with self._transaction("BEGIN", oldest=1) as connection:
            outdated = pragma(connection, "user_version") < SCHEMA
        with self._transaction("BEGIN IMMEDIATE" if outdated else "BEGIN", oldest=1) as connection:
            upgrade(connection)
            header = read_header(connection)
            self._origin = _Verified(0, header.genesis(), header.relation, {})
            self._verified = self._check_all(connection)
        self.budget = Budget(header.epsilon, header.delta)
        if budget is not None and budget != self.budget:
            raise InvalidInput(f"budget must be the ledger's own ({self.budget!r} in {self.path}), got {budget!r}")
        if relation is not None and relation != self._verified.relation:
            raise InvalidInput(f"relation must be the ledger's own, {self._verified.relation!r}, got {relation!r}")

    @property
    def relation(self) -> str | None:
        """The relation that all spends share; None until the first spend, if none was given at creation."""
        return self._current().relation

    def spend(self, certificate: Certificate, note: str = "", *, count: int = 1, sampling_rate: float = 1.0) -> Entry:
        """Charges a release to the budget. When it returns, the spend is on the disk and the noise may be drawn.

        Args:
            certificate: what the release guarantees.
            note: what to remember of it, in one line; never data.
            count: how many such releases this is.
            sampling_rate: the probability that a record takes part, where each release draws its own Poisson sample.

        Raises:
            BudgetExceeded: if the total would pass the budget; nothing is written then.
            LedgerError: if the spend could not be confirmed; nothing may be released then.
        """
        if not isinstance(certificate, Certificate):
            raise InvalidInput(f"certificate must be a Certificate, got {certificate!r}; certify() makes one")
        if certificate.sampling is not None and certificate.sampling.reproducible:
            raise InvalidInput("certificate must be of a release with secret noise; one with rng= is for tests only")
        _check.choice("the certificate's relation", certificate.relation, RELATIONS)
        if not (isinstance(note, str) and note.isprintable() and len(note) <= LONGEST_NOTE):
            raise InvalidInput(f"note must be one line of at most {LONGEST_NOTE} printable characters, got {note!r}")
        if not _check.count("count", count) < 2**63:
            raise InvalidInput(f"count must be below 2^63, got {count}")
        check_sampling_rate(sampling_rate)
        entry = Entry(
            number=0,
            time=now(),
            note=note,
            relation=certificate.relation,
            exact=bool(certificate.exact),
            profile=certificate.profile,
            total_variation=float(certificate.total_variation),
            sensitivity=certificate.sensitivity,
            noise=certificate.noise,
            source=certificate.source,
            shape=tuple(int(side) for side in certificate.shape),
            count=int(count),
            sampling_rate=float(sampling_rate),
            hash="",
        )
        record = _record(entry)
        with self._transaction("BEGIN IMMEDIATE") as connection:
            before = self._catch_up(connection)
            if before.relation not in (None, certificate.relation):
                raise InvalidInput(
                    f"certificate must hold under the ledger's relation, {before.relation!r}, got "
                    f"{certificate.relation!r}; ask the query for the ledger's, or keep a second ledger"
                )
            record["number"] = before.entries + 1
            after = before.followed_by(record, link(before.head, hashed(record)))
            accountant = _total(before)
            accountant.add(certificate, entry.count, entry.sampling_rate)
            delta = accountant.delta(self.budget.epsilon)
            if not delta <= self.budget.delta:
                raise BudgetExceeded(
                    f"after this spend, delta at epsilon {self.budget.epsilon:g} would be {delta:.3g}, above the "
                    f"budget ({self.budget}) of {self.path}; nothing was spent. What is left: "
                    "ledger.remaining(), or matrixdp ledger show"
                )
            connection.execute(INSERT, (*record.values(), after.head))
            connection.execute("UPDATE ledger SET entries = ?, head = ?", (after.entries, after.head))
            self._advance(connection, before)  # reads it back: only what verifies is committed
        self._verified = after
        return replace(entry, number=after.entries, hash=after.head)

    def spent(self) -> float:
        """The epsilon that all spends together have used, at the budget's delta."""
        return _total(self._current()).epsilon(self.budget.delta)

    def remaining(self) -> Remaining:
        """The largest Gaussian release without sampling that the ledger would still take, rounded down.

        In a ledger of such releases, mu is sqrt(B^2 - sum of mu_i^2), where B is the budget's own mu.
        """
        verified = self._current()
        low, high = 0.0, float(gaussian.mu(self.budget.epsilon, self.budget.delta))
        if not verified.entries:
            return Remaining(high, self.budget.epsilon)
        accountant = _total(verified)
        exact = all(use[0] is not None and use[-1] == 1.0 for use in verified.spent)
        for _ in range(40 if exact else 12):  # other compositions are known to a percent, and take their time
            middle = (low + high) / 2
            further = accountant.copy()
            further.add(_recorded(GaussianProfile(middle), verified.relation))
            fits = further.delta(self.budget.epsilon) <= self.budget.delta
            low, high = (middle, high) if fits else (low, middle)
        # less by 1e-9, for a release that keeps this epsilon may have a mu above ours by rounding
        return Remaining(low, float(gaussian.epsilon(low * (1 - 1e-9), self.budget.delta)))

    def history(self) -> list[Entry]:
        """All spends, oldest first; the chain is checked on the way."""
        with self._transaction("BEGIN") as connection:
            return [_entry(record, found) for record, found in self._walk(connection, self._origin)]

    def verify(self, head: str | None = None) -> str:
        """Reads the whole file again and checks it.

        Args:
            head: a hash that was kept elsewhere; the chain must contain it, so no entry up to it was changed since.

        Returns:
            The head, which is the last hash of the chain.
        """
        with self._transaction("BEGIN") as connection:
            self._catch_up(connection)  # finds a file that was put back to an earlier state since the last look
            verified = self._check_all(connection)
            known = connection.execute("SELECT 1 FROM entries WHERE hash = ?", (head,)).fetchone()
        if head not in (None, self._origin.head) and not known:
            raise LedgerError(
                f"{self.path} does not contain the hash {head}; entries were removed or rewritten since it was kept"
            )
        return verified.head

    def export(self) -> list[dict[str, Any]]:
        """What was fixed at creation, every entry, and the head: all that an outsider needs to check the chain."""
        with self._transaction("BEGIN") as connection:
            header = read_header(connection)
            entries = [_entry(record, found).to_dict() for record, found in self._walk(connection, self._origin)]
        first = {**header.fixed(), "hash": self._origin.head}
        return [first, *entries, {"entries": header.entries, "head": header.head}]

    def _current(self) -> _Verified:
        with self._transaction("BEGIN") as connection:
            return self._catch_up(connection)

    def _catch_up(self, connection: sqlite3.Connection) -> _Verified:
        """Checks what was written since the last look; what was seen before is remembered, not read again."""
        self._verified = self._advance(connection, self._verified)
        return self._verified

    def _check_all(self, connection: sqlite3.Connection) -> _Verified:
        found = pragma(connection, "quick_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(f"malformed: {found}")
        verified = self._advance(connection, self._origin)
        if connection.execute("SELECT count(*) FROM entries").fetchone()[0] != verified.entries:
            raise self._tampered("it has entries that are not part of the chain")
        return verified

    def _advance(self, connection: sqlite3.Connection, since: _Verified) -> _Verified:
        entries, head, relation, spent = since.entries, since.head, since.relation, dict(since.spent)
        for record, found in self._walk(connection, since):
            entries, head, relation = record["number"], found, record["relation"]
            use = _use(record)
            spent[use] = spent.get(use, 0) + record["count"]
        return _Verified(entries, head, relation, spent)

    def _walk(self, connection: sqlite3.Connection, since: _Verified) -> Iterator[tuple[dict[str, Any], str]]:
        """The entries after a verified beginning, and their hashes; each is checked before it is given out."""
        header, number, head = read_header(connection), since.entries, since.head
        if header.genesis() != self._origin.head:
            raise self._tampered("what was fixed at creation, such as the budget, is not what this process has read")
        for *row, found in connection.execute(SELECT, (number,)):
            number += 1
            record = dict(zip(COLUMNS, row, strict=True))
            if record["number"] != number:
                raise self._tampered(f"entry {number} is missing")
            head = link(head, hashed(record))
            if head != found:
                fixed = ", or the budget and relation before it," if number == 1 else ""
                raise self._tampered(f"entry {number}{fixed} is not what was written")
            yield record, head
        if (number, head) != (header.entries, header.head):
            raise self._tampered(f"it should have {header.entries} entries and the head {header.head}, and has not")

    def _tampered(self, finding: str) -> LedgerError:
        return LedgerError(
            f"the ledger {self.path} was changed by other means: {finding}. Release nothing on its account; restore it "
            "from a copy, and record there what was spent since"
        )

    @contextmanager
    def _transaction(self, begin: str, *, oldest: int = SCHEMA) -> Iterator[sqlite3.Connection]:
        """A transaction on the ledger's file, committed unless an error comes up inside."""
        with connection_to(self.path, self._timeout) as connection:
            if pragma(connection, "application_id") != APPLICATION:
                raise LedgerError(f"{self.path} is not a ledger, or a damaged one; it was not touched")
            if pragma(connection, "journal_mode = DELETE") != "delete":
                raise LedgerError(f"{self.path} has no rollback journal; close the other programs that have it open")
            connection.execute(begin)
            schema = pragma(connection, "user_version")
            if not oldest <= schema <= SCHEMA:
                raise LedgerError(
                    f"{self.path} has schema {schema}, and this matrixdp reads {SCHEMA}; a newer one may do"
                )
            yield connection
            connection.execute("COMMIT")


def _record(entry: Entry) -> dict[str, Any]:
    """An entry as a row, in the order of COLUMNS."""
    fields = {**vars(entry), **dict.fromkeys(PROFILE), **_parameters(entry.profile)}
    fields |= {"exact": int(entry.exact), "shape": "x".join(map(str, entry.shape))}
    return {name: fields[name] for name in COLUMNS}


def _entry(record: Mapping[str, Any], found: str) -> Entry:
    fields = {name: value for name, value in record.items() if name not in PROFILE}
    fields |= {"exact": bool(record["exact"]), "shape": tuple(int(side) for side in record["shape"].split("x") if side)}
    return Entry(**fields, profile=_profile(_use(record)), hash=found)


def _parameters(profile: Profile) -> dict[str, Any]:
    """The numbers that determine a profile."""
    if isinstance(profile, GaussianProfile):
        return {"mu": abs(_check.at_least_zero("mu", profile.mu))}  # SQLite knows no -0.0
    if isinstance(profile, spherical.Profile):
        return asdict(profile)
    raise InvalidInput(f"certificate must be that of Gaussian or spherical noise, got the profile {profile!r}")


def _profile(use: _Use) -> Profile:
    """The profile with these parameters."""
    return GaussianProfile(use[0]) if use[0] is not None else spherical.Profile(*use[1:6])


def _use(record: Mapping[str, Any]) -> _Use:
    return (*(record[name] for name in PROFILE), record["total_variation"], record["sampling_rate"])


def _total(verified: _Verified) -> Accountant:
    """An accountant who has seen all spends."""
    accountant = Accountant()
    for use, count in verified.spent.items():
        accountant.add(_recorded(_profile(use), verified.relation, use[-2]), count, use[-1])
    return accountant


def _recorded(profile: Profile, relation: str | None, total_variation: float = 0.0) -> Certificate:
    """A certificate for the accountant, who looks at nothing else."""
    sampling = Sampling(total_variation=total_variation)
    return Certificate(profile, False, relation or "", "", "", "", (), sampling=sampling)
