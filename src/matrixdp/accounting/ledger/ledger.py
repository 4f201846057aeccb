"""A budget that outlives the process: a file or a database with every spend, shared by all who release from a data set.

A spend is on the disk before any noise is drawn, so a crash can waste budget but never lose a spend. Entries form a
chain of hashes (`chain`), and the store knows their number and the last hash. docs/ledger.md says what tampering this
detects and what it cannot. `exports` checks what `export` writes, without the ledger.

Every operation on a file opens its own connection, and none is open while the process forks. Connections to PostgreSQL
are kept for the next operation; a forked process opens new ones.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from matrixdp import _check
from matrixdp._rounding import rounded_up
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.account import Account
from matrixdp.accounting.ledger.book import Book
from matrixdp.accounting.ledger.chain import Document, Fields, sha256
from matrixdp.accounting.ledger.elsewhere import adjacency_of, parts_of
from matrixdp.accounting.ledger.entries import Change, Entry, entry_of, event_of
from matrixdp.accounting.ledger.rules import Quota, Reservation, check_name, quota_document, quota_fields
from matrixdp.accounting.ledger.spends import is_for, refuse_undrawn, spend_fields
from matrixdp.accounting.ledger.store import Session, store_of
from matrixdp.accounting.ledger.totals import Total
from matrixdp.adjacency import checked, takes_relation
from matrixdp.budget import Budget, checked_budget
from matrixdp.errors import InvalidInput, LedgerError
from matrixdp.privacy.guarantee import Guarantee

SAMPLER_ERROR = 1e-15
"""The total-variation error of the sampler that is reserved with a stated guarantee that has none."""


class Ledger(Account):
    """A budget in a file or a database, for any number of processes and threads.

    Guarantee: the releases charged to the ledger together keep its budget under its adjacency, also when queries,
    noise, counts and sampling rates are chosen in view of earlier answers. With `adaptive=False`, only the queries may
    be chosen so. (Entries of files from before schema 3 count as fixed beforehand.) Releases recorded with `made=True`
    may exceed the budget. When a spend returns, it is on the disk.
    Source: smith2022fully for Gaussian noise; proofs for the rest are in `accounting.filter` and `limits`, and for
    quotas and reservations in `rules`.

    Args:
        path: a SQLite file, or the address of a PostgreSQL database, "postgresql://host/name", which needs `dataset`.
            The ledger is created if it does not exist and a budget is given. Leave passwords to the driver (~/.pgpass).
        budget: what all spends together may use. It is fixed at creation; another one later is an error.
        adjacency: which data sets are neighbours; if it is not given at creation, the first spend fixes it.
        adaptive: False, at creation, states that the noise, counts and sampling rates of all releases are fixed
            before the first answer. Then no share of delta is held back, and the total is that of an Accountant.
        timeout: how many seconds to wait for other processes that are writing, or for a server that cannot be reached.
        dataset: which data set the releases are made from; a database has one ledger for each.
        analyst: who asks for the releases; like the data set, the default of every spend.
        purpose: the default of what spends are for.
        reservation: the default of the reservation that spends use.

    Raises:
        LedgerError: if there is no ledger and no budget to create one, or it cannot be used or was tampered with.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Counts, Ledger, release
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> out = release([12, 3], Counts(1), Budget(1.0, 1e-7), ledger=ledger, note="two counts")
        >>> [entry.note for entry in ledger.history()], ledger.remaining().epsilon < 3
        (['two counts'], True)
    """

    @takes_relation
    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: Budget | None = None,
        *,
        adjacency: str | None = None,
        adaptive: bool | None = None,
        timeout: float = 60.0,
        dataset: str | None = None,
        analyst: str | None = None,
        purpose: str | None = None,
        reservation: str | None = None,
    ) -> None:
        if budget is not None:
            checked_budget(budget).whole("a ledger")
        adjacency = None if adjacency is None else checked(adjacency)
        if adaptive is not None and not isinstance(adaptive, bool):
            raise InvalidInput(f"adaptive must be True, False or None, got {_check.kind(adaptive)}")
        given = {"dataset": dataset, "analyst": analyst, "purpose": purpose, "reservation": reservation}
        names = {name: value and check_name(name, value) for name, value in given.items()}
        store = store_of(path, dataset, _check.positive("timeout", timeout))
        if not store.exists():
            if budget is None:
                raise LedgerError(f"there is no ledger {store.name}; create it with a budget (matrixdp ledger create)")
            store.create(budget, adjacency, adaptive is not False)
        super().__init__(Book(store), names)
        fixed = self._book.verified.adjacency
        if budget is not None and budget != self.budget:
            raise InvalidInput(f"budget must be the ledger's own ({self.budget!r} in {self.name}), got {budget!r}")
        if adaptive is not None and self._book.header.adaptive is not None and adaptive is not self.adaptive:
            raise InvalidInput(f"adaptive must be the ledger's own, {self.adaptive}, got {adaptive!r}")
        if adjacency is not None and adjacency != fixed:
            raise InvalidInput(f"adjacency must be the ledger's own, {fixed}, got {adjacency}")

    def spend(
        self,
        certificate: Guarantee,
        note: str = "",
        *,
        count: int = 1,
        sampling_rate: float = 1.0,
        series: str | None = None,
        planned: int | None = None,
        plan: Composition | None = None,
        dataset: str | None = None,
        analyst: str | None = None,
        purpose: str | None = None,
        unit: str = "record",
        key: str | None = None,
        reservation: str | None = None,
    ) -> Entry:
        """Charges a release to the budget. When it returns, the spend is on the disk and the noise may be drawn.

        A series is a plan that is carried out in parts, such as training by epochs. Its first spend charges all
        `planned` releases as one block; the later ones use them up and cost nothing more. Unused releases stay charged:
        whether a plan was stopped early may depend on the answers. A reservation can be given back; see `reserve`.

        Args:
            certificate: what the release guarantees: a Certificate, or a stated Guarantee.
            note: a remark of one line; never data.
            count: how many such releases this is.
            sampling_rate: the probability that a record takes part, where each release draws its own Poisson sample.
            series: a name for the plan that this spend is a part of, unique in this ledger, such as
                `secrets.token_hex(8)`. Without `plan`, certificate and sampling rate must be the same for all parts.
            planned: how many releases the whole series has; fixed by its first spend.
            plan: for a series of several kinds of releases, all of them, in place of `planned`; see `Budget.plan`. Each
                spend uses up one that has the same guarantee, or that dominates it at every epsilon.
            dataset: which data set the release is made from; like the next two, the ledger's own by default.
            analyst: who asks for it.
            purpose: what it is for.
            unit: whom the guarantee protects, such as "record" or "user".
            key: an idempotency key, unique in this ledger. A spend that is repeated with the same key, because its
                answer was lost, is charged once and returns the entry that was written. A key pays for the noise of
                one release: if that noise may have been drawn already, use another key.
            reservation: the name of the reservation that it uses, if any.

        Raises:
            BudgetExceeded: if the total would exceed the budget or a quota, or a series its plan; nothing is written.
            InvalidInput: if an argument is invalid, or the key was used for something else.
            LedgerError: if the spend could not be confirmed; nothing may be released then.
        """
        asked = self._fields(
            certificate,
            note,
            key,
            count=count,
            sampling_rate=sampling_rate,
            series=series,
            planned=planned,
            plan=plan,
            unit=unit,
            dataset=dataset,
            analyst=analyst,
            purpose=purpose,
            reservation=reservation,
        )
        return self._spend(*asked)

    def record(
        self,
        what: Any,
        note: str = "",
        *,
        made: bool = False,
        count: int = 1,
        sampling_rate: float = 1.0,
        adjacency: str | None = None,
        **names: str | None,
    ) -> list[Entry]:
        """Charges a release made outside matrixdp, by its stated guarantee; see `elsewhere`.

        Args:
            what: a Certificate or Guarantee; a Budget(epsilon, delta); {"mu": ...}, {"rho": ...} or {"epsilon": ...,
                "delta": ...}; or a DpEvent of dp-accounting. State a mu or a rho if one is known: it is tighter.
            note: as for `spend`.
            made: whether it was made already. Then it is written even if it exceeds the budget or a quota. From then
                on, a ledger over its budget refuses every new charge, and every spend from a reservation.
            count: how many such releases.
            sampling_rate: as for `spend`.
            adjacency: which data sets are neighbours; by default that of the certificate, or the ledger's own.
            names: dataset, analyst, purpose, unit and key, as for `spend`.
        """
        if unknown := {*names} - {"dataset", "analyst", "purpose", "unit", "key"}:
            raise InvalidInput(f"record takes no {sorted(unknown)[0]!r}")
        parts = parts_of(what, adjacency_of(what, adjacency, self.adjacency))
        whole = Composition(tuple(parts)) if len(parts) > 1 else None
        if whole is not None and (count, sampling_rate) != (1, 1.0):
            raise InvalidInput("count and sampling_rate must be 1 for an event of several releases: put them into it")
        key = names.pop("key", None)
        series = secrets.token_hex(8) if key is None else sha256(str(key))[:16]  # the same where it is repeated
        names["unit"] = names.get("unit") or "record"
        spends = [
            self._fields(
                part.certificate,
                note,
                key if number == 0 or key is None else f"{key} {number + 1}",
                count=part.count * count,
                sampling_rate=part.sampling_rate * sampling_rate,
                series=None if whole is None else series,
                plan=whole,
                **names,
            )
            for number, part in enumerate(parts)
        ]
        return [self._spend(*asked, made=made) for asked in spends]

    def _fields(self, certificate: Guarantee, note: str, key: str | None = None, **arguments: Any) -> Fields:
        """The fields of a spend with these arguments, and the ledger's own names as defaults."""
        for name, value in self._names.items():
            if arguments.get(name) is None:
                arguments[name] = value
        if key is None and self._book.store.loses_answers:
            key = secrets.token_hex(16)
        return spend_fields(certificate, self.budget, note=note, key=key, **arguments)

    def _spend(self, fields: Mapping[str, Any], documents: Mapping[str, Document], *, made: bool = False) -> Entry:
        """Writes a spend or a reservation, if the budget and the quotas allow it, or if it is `made` already."""
        spend = entry_of(fields, "", documents.__getitem__)

        def work(session: Session, before: Total) -> tuple[Entry, Total]:
            written = None if spend.key is None else session.row_with_key(spend.key)
            if written is not None:
                entry = event_of(*written, session.document)
                if not (isinstance(entry, Entry) and is_for(entry, spend)):
                    raise InvalidInput(f"key was used for another spend, entry {entry.number}; nothing was spent")
                return entry, before
            if before.adjacency not in (None, spend.adjacency):
                raise InvalidInput(
                    f"certificate must hold under the ledger's adjacency, {before.adjacency}, got "
                    f"{spend.adjacency}; ask the query for the ledger's, or keep a second ledger"
                )
            begun = before.begun(spend) if spend.kind == "spend" else None
            named = spend.plan if begun is None else None  # the later parts of a plan do not name it
            record = {**fields, "plan": named, **before.price(spend)}
            held = spend.kind == "spend" and spend.reservation is not None

            def check(after: Total, entry: Entry | Change) -> None:
                before.quotas_of(spend.analyst)
                if before.is_pure(spend.analyst):
                    refuse_undrawn(spend)
                if begun is not None or made:
                    return
                after.check_budget(self.budget, self.name)  # also if held: one made elsewhere may have exceeded it
                if not held:
                    after.check_quotas(spend.analyst, entry.time)

            found, after = self._book.append(session, before, record, documents, check)
            assert isinstance(found, Entry)
            return found, after

        return self._book.write(work)

    def set_quota(
        self, name: str, budget: Budget, *, per: str | None = None, members: Sequence[str] = (), note: str = ""
    ) -> Quota:
        """Sets how much of the ledger's budget an analyst or a team may spend, from now on; see `rules`.

        Once a ledger has a quota, every spend must be by an analyst whom a quota covers. A spend must fit into each
        quota of its analyst and into the total.

        Args:
            name: the analyst or the team; a quota with this name is replaced.
            budget: what the members may spend together.
            per: "year", "quarter" or "month" of the calendar, in UTC; by default the lifetime of the ledger. A new
                period does not restore the guarantee of the same records: the lifetime total does not end.
            members: the analysts in a team; by default the analyst with this name.
            note: a remark of one line.

        Raises:
            InvalidInput: if the members have already spent more; or, for delta = 0, if they have spent the certificate
                of a law that has not been drawn. Nothing is changed then.
        """
        if isinstance(members, str):
            raise InvalidInput("members must be a list of analysts, not one name")
        quota = Quota(name, budget, per, tuple(members))

        def prepare(before: Total, time: str) -> Fields:
            spent = before.spent_of(quota, time)
            if not spent.fits(before.adjacency or ""):
                raise InvalidInput(
                    f"budget must be at least what the members of {name!r} have spent already, epsilon "
                    f"{rounded_up(spent.epsilon(before.adjacency or ''))} at delta {budget.delta:g}, got {budget}; the "
                    "quota was not changed"
                )
            if budget.delta == 0 and before.has_undrawn(quota, time):
                raise InvalidInput(
                    f"budget must have a delta above 0: a member of {name!r} has spent the certificate of a law that "
                    "has not been drawn, and drawing may have an error; the quota was not changed"
                )
            return quota_fields(quota.to_dict())

        self._book.change("quota", note, prepare)
        return quota

    def remove_quota(self, name: str, note: str = "") -> None:
        """Removes a quota; what its members have spent stays in the total."""

        def prepare(before: Total, time: str) -> Fields:
            if check_name("name", name) not in before.quotas:
                known = ", ".join(map(repr, before.quotas)) or "none"
                raise InvalidInput(f"name must be that of a quota of the ledger ({known}), got {name!r}")
            return quota_fields(quota_document(name))

        self._book.change("quota", note, prepare)

    def reserve(
        self,
        name: str,
        certificate: Guarantee | None = None,
        *,
        count: int = 1,
        sampling_rate: float = 1.0,
        planned: int | None = None,
        plan: Composition | None = None,
        note: str = "",
        analyst: str | None = None,
        purpose: str | None = None,
    ) -> Reservation:
        """Reserves a part of the budget, which `spend(..., reservation=name)` uses and `give_back` returns.

        It reserves `count` single releases, used one by one or several at a time, by spends that have this guarantee or
        are dominated by it. With `planned` or `plan` it reserves one training or plan, which the first spend of its
        series uses as a whole. Each single release is a separate block; for sampled noise that costs more than one
        training.

        Args:
            name: a name that no open reservation has.
            certificate: what each release guarantees; needed unless a plan is given. For single releases, a stated
                Guarantee without a sampler error is reserved with an error of 1e-15, enough for a million entries;
                not so in a ledger with delta = 0, where releases are drawn exactly.
            count: how many single releases.
            sampling_rate: as for `spend`.
            planned: how many releases the training has.
            plan: all releases of a plan; see `Budget.plan`.
            note: a remark of one line.
            analyst: who may use it; as for `spend`, the ledger's own by default.
            purpose: what it is for.
        """
        check_name("name", name)
        if plan is not None and certificate is None and isinstance(plan, Composition):
            certificate, sampling_rate = plan.parts[0].certificate, plan.parts[0].sampling_rate
        single = planned is None and plan is None
        if certificate is None or not (single or count == 1):
            raise InvalidInput("reserve needs a certificate or a plan, and count only for single releases")
        drawn = single and type(certificate) is Guarantee and self.budget.delta > 0  # with delta = 0, exactly
        if drawn and certificate.total_variation == 0.0:
            certificate = Guarantee(certificate.profile, certificate.adjacency, SAMPLER_ERROR)
        asked = self._fields(
            certificate,
            note,
            count=count,
            sampling_rate=sampling_rate,
            series=None if single else name,
            planned=planned,
            plan=plan,
            analyst=analyst,
            purpose=purpose,
            reservation=name,
            kind="reservation",
        )
        self._spend(*asked)
        return self._book.verified.reservations[name]

    def give_back(self, name: str, note: str = "") -> int:
        """Gives back what is left of a reservation; returns how many releases, or plans, that is."""
        given: list[int] = []

        def prepare(before: Total, time: str) -> Fields:
            held = before.reserved(check_name("name", name))
            given.append(held.left)
            return {"reservation": name, "analyst": self._names["analyst"]}, {}

        self._book.change("return", note, prepare)
        return given[-1]

    def plan(self, sets: Sequence[Any], weights: Sequence[float] | None = None, shapes: Any = None) -> Any:
        """Plans releases for the whole budget; see `Budget.plan`. The first release is charged for all of them.

        Raises:
            BudgetExceeded: if the plan does not fit beside what was spent; `budget.split` gives a part to plan for.
        """
        planned = self.budget.plan(sets, weights, shapes)
        after = self._with(planned.composition.uses, str(planned.composition.adjacency))
        after.check_budget(self.budget, self.name)
        return planned

    def grant(self, role: str, may: str = "spend") -> None:
        """Lets a role of the database "read" all its ledgers, or "spend" from them; it can never change an entry."""
        self._book.store.grant(role, may)
