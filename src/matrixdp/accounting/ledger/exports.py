"""Checks the export of a ledger, without the ledger and without trust in any number in the export.

It recomputes the chain of hashes, every certificate from its law and set, every charge from the certificates and counts
up to it, and the total. That finds any number that does not follow from the others, even if all hashes were computed
again. Entries that were left out or replaced by consistent ones, times, notes, names, the budget and stated guarantees
are protected by the chain alone: for these, compare the head with one that was kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from matrixdp import _check
from matrixdp._pages import counted
from matrixdp._rounding import rounded_up
from matrixdp.accounting.accountant import check_secret
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.chain import CHAIN, DOCUMENTS, Document, Header, canonical, hashed, link, sha256
from matrixdp.accounting.ledger.entries import BEFORE_SCHEMA_4, FIELDS, Change, Entry, event_of
from matrixdp.accounting.ledger.spends import curve_for
from matrixdp.accounting.ledger.totals import Total, before_the_first
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy.certificate import refuse_unsafe_floats
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.records import decode
from matrixdp.privacy.verification import (
    FAULTS,
    TOLERANCE,
    Finding,
    Verification,
    certificate_of,
    close,
    compared_documents,
    read_json,
    said,
    verified,
)

SEARCHED = 2e-6
"""The relative difference up to which mu and epsilon agree where they are found by bisection (to 1e-6)."""

_FAULTS = (MatrixDPError, *FAULTS)
_NAMES = {*FIELDS, *BEFORE_SCHEMA_4, *DOCUMENTS}
_NOT_COMPUTED = (
    "Times, notes, names and the budget cannot be computed again: only a head that was kept elsewhere shows whether "
    "they were changed, or entries left out or replaced."
)


@dataclass(frozen=True)
class LedgerVerification(Verification):
    """What the verification of an export found; true as a condition if everything agrees.

    Attributes:
        entries: how many entries there are.
        stated: the numbers of the entries whose guarantee is only stated.
        spent: epsilon of everything together at the budget's delta, computed again; None if it cannot be.
        budget: the budget that the export states.
        head: the last hash.
    """

    entries: int = 0
    stated: tuple[int, ...] = ()
    spent: float | None = None
    budget: Budget | None = None
    head: str = ""

    def __str__(self) -> str:
        verdict = "verified" if self else "NOT verified"
        lines = [
            f"Ledger {verdict}: {counted(self.entries, 'entry')}, {self.compared} numbers compared, "
            f"{len(self.findings)} disagree",
            *([f"  spent: epsilon {rounded_up(self.spent)} of {self.budget}"] if self.spent is not None else []),
            f"  head: {self.head}",
        ]
        return "\n".join([*lines, *(f"  {each}" for each in (*self.findings, *self.remarks))])


def verify_export(lines: Iterable[str | Mapping[str, Any]], head: str | None = None) -> LedgerVerification:
    """Recomputes everything in the export of a ledger that can be recomputed, and compares.

    Args:
        lines: the lines of the file, or what `Ledger.export` gives.
        head: a hash that was kept elsewhere; the chain must contain it, so no entry up to it was changed since.

    Raises:
        InvalidInput: if this is not the export of a ledger.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Counts, Ledger, release
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> from matrixdp.accounting.ledger import verify_export
        >>> _ = release([12, 3], Counts(1), Budget(1.0, 1e-7), ledger=ledger)
        >>> bool(verify_export(ledger.export()))
        True
    """
    if head is not None and not isinstance(head, str):
        raise InvalidInput(f"head must be a hash, a str, got {_check.kind(head)}")
    first, *entries, last = _parsed(lines)
    check = _Check()
    check.header(first)
    for number, line in enumerate(entries, 1):
        check.entry(number, line)
    return check.end(last, head)


def _parsed(lines: Iterable[str | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    try:
        found = [
            read_json(line) if isinstance(line, (str, bytes)) else line
            for line in lines
            if not isinstance(line, (str, bytes)) or line.strip()
        ]
    except (ValueError, TypeError, RecursionError) as reason:
        raise InvalidInput(f"the export of a ledger must be JSON lines ({type(reason).__name__})") from None
    if not (len(found) >= 2 and all(isinstance(line, Mapping) for line in found) and found[0].get("chain") == CHAIN):
        raise InvalidInput(
            f'the export of a ledger must begin with a line that has "chain": "{CHAIN}" and end with its head; '
            "`matrixdp ledger export` writes one"
        )
    return found


class _Check:
    """The chain and the total up to some entry, and what was found on the way."""

    def __init__(self) -> None:
        self.compared = 0
        self.findings: list[Finding] = []
        self.remarks: list[str] = []
        self.stated: list[int] = []
        self.budget: Budget | None = None
        self.adaptive: Any = None
        self.head = ""
        self.hashes: set[str] = set()
        self.keys: set[str] = set()
        self.documents: dict[str, Document] = {}
        self.certified: set[tuple[str, str | None]] = set()
        self.exact = True  # whether all releases are Gaussian and without sampling
        self.count = 0
        self.total: Total | None = None

    def found(self, entry: str, words: str, stated: Any = None, computed: Any = None) -> None:
        self.findings.append(Finding(entry, stated, computed, words))

    def agree(self, entry: str, stated: Any, computed: Any, tolerance: float = TOLERANCE) -> None:
        self.compared += 1
        numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (stated, computed))
        if numbers and isinstance(computed, float):
            same = close(stated, computed, tolerance)
        else:
            same = type(stated) is type(computed) and bool(stated == computed)
        if not same:
            words = f"the export says {_shown(stated)}, the rest of it gives {_shown(computed)}"
            self.found(entry, words, stated, computed)

    def chained(self, entry: str, fields: Mapping[str, Any], stated: Any) -> None:
        """Checks the next hash. The chain continues from the stated hash, so that one change is reported once."""
        computed = link(self.head, fields)
        self.agree(f"{entry}, hash", stated, computed)
        self.head = stated if isinstance(stated, str) else computed
        self.hashes.add(self.head)

    def header(self, line: Mapping[str, Any]) -> None:
        fields = {name: value for name, value in line.items() if name != "hash"}
        try:
            known = Header(**{name: value for name, value in fields.items() if name != "chain"})
            if fields != known.fixed() or known.adaptive not in (None, 0, 1, 2):
                raise InvalidInput("the header has a field that is not known")
            self.budget, self.adaptive = Budget(known.epsilon, known.delta), known.adaptive
            self.total = before_the_first(known)
        except _FAULTS as reason:
            self.found("header", f"cannot be read ({said(reason)})")
        self.chained("header", fields, line.get("hash"))

    def entry(self, number: int, line: Mapping[str, Any]) -> None:
        name, self.count = f"entry {number}", number
        fields = {key: value for key, value in line.items() if key not in ("hash", "documents")}
        self.chained(name, fields, line.get("hash"))
        try:
            self._take_documents(name, fields, line.get("documents", {}))
            _check_names(fields)
            entry = event_of(fields, self.head, self.documents.__getitem__)
        except _FAULTS as reason:
            self.found(name, f"cannot be read ({said(reason)})")
            self._give_up_total(name)
            return
        self.agree(f"{name}, number", entry.number, number)
        if entry.key is not None and entry.key in self.keys:
            self.found(f"{name}, key", "an earlier entry has the same idempotency key")
        self.keys.add(entry.key or "")
        if isinstance(entry, Change):
            self._change(name, entry)
            return
        if entry.plan is not None:
            self._check_plan(name, self.documents[entry.plan])
        if entry.stated:
            self.stated.append(number)
        else:
            self._check_certificate(name, entry)
        if self.total is not None:
            self._charge(name, entry, self.total)

    def _change(self, name: str, change: Change) -> None:
        """Checks a change of a quota, or the return of a reservation, which must be open."""
        total, quota = self.total, change.quota
        if total is None:
            return
        if change.kind == "return" and change.name not in total.reservations:
            self.found(name, "it gives back a reservation that is not open")
            self._give_up_total(name)
            return
        total.add(change)
        if quota is not None and not total.spent_of(quota, change.time).fits(total.adjacency or ""):
            self.found(name, "the quota is below what was spent")
        if quota is not None and quota.budget.delta == 0 and total.has_undrawn(quota, change.time):
            self.found(name, "the quota has delta = 0, and an earlier certificate does not say how the noise was drawn")

    def _take_documents(self, name: str, fields: Mapping[str, Any], documents: Mapping[str, Document]) -> None:
        """Checks the documents that come with an entry: those that it is the first to name."""
        named = {fields[each] for each in DOCUMENTS if each in fields}
        if {*documents} != named - {*self.documents}:
            self.found(f"{name}, documents", "they are not those that the entry is the first to name")
        for digest, content in documents.items():
            self.agree(f"{name}, documents", digest, sha256(canonical(content)))
            self.documents[digest] = content

    def _check_certificate(self, name: str, entry: Entry) -> None:
        """Recomputes a certificate from its law and set, and the stored curve from the certificate; each only once."""
        documents = (entry.fields["certificate"], entry.fields.get("curve"))
        if documents in self.certified:
            return
        self.certified.add(documents)
        try:
            certificate = certificate_of(entry.document)
            check_secret(certificate)
            refuse_unsafe_floats(certificate, "charging it to a ledger")
            verification = verified(certificate)
            curve = curve_for(certificate.profile, self.budget)
            stated = self.documents[documents[1]] if documents[1] else None
            differences, points = compared_documents(stated, curve)
        except _FAULTS as reason:
            self.found(name, f"its certificate cannot be verified ({said(reason)})")
            return
        self.compared += points
        self._take_findings(name, verification, name)
        for finding in differences[:1]:
            self.found(f"{name}, curve {finding.entry}", "it is not that of the certificate")
            self._give_up_total(name)

    def _check_plan(self, name: str, document: Document) -> None:
        """Recomputes a plan: every certificate in it, and their composition."""
        try:
            verification = Composition.from_dict(document).verify()
        except _FAULTS as reason:
            self.found(name, f"its plan cannot be verified ({said(reason)})")
        else:
            self._take_findings(name, verification, f"{name}, plan")

    def _take_findings(self, name: str, verification: Verification, place: str) -> None:
        """Adds the findings about one document of an entry, named by its place."""
        self.compared += verification.compared
        self.remarks += [remark for remark in verification.remarks if remark not in self.remarks]
        for finding in verification.findings:
            self.found(f"{place}, {finding.entry}", str(finding), finding.stated, finding.computed)
            self._give_up_total(name)

    def _give_up_total(self, name: str) -> None:
        """No total follows from a false entry; the chain and the other certificates are still checked."""
        if self.total is not None:
            self.total = None
            self.remarks.append(f"Charges and the total were not computed, as {name} does not verify.")

    def _charge(self, name: str, entry: Entry, total: Total) -> None:
        """Recomputes the charge of an entry from its certificate and count, and the entries before it."""
        if entry.undrawn and total.is_pure(entry.analyst):
            self.found(name, "its certificate does not say how the noise was drawn, which delta = 0 needs")
        try:
            expected = {} if entry.planned is None else total.price(entry)
        except _FAULTS as reason:
            self.found(name, said(reason))
            self._give_up_total(name)
            return
        if self.adaptive == 1 and isinstance(entry.profile, DiscreteProfile) and entry.charged_mu is not None:
            # before schema 5 discrete noise was charged by chords, which is more, and never less
            computed = expected.get("charged_mu") or 0.0
            expected |= {"charged_mu": max(computed, entry.charged_mu)} if expected else {}
        self.exact = self.exact and entry.use.gaussian and all(use.gaussian for use in entry.plan_uses)
        for field in ("planned", "charged_mu", "charged_delta"):
            tolerance = TOLERANCE if self.exact or field != "charged_mu" else SEARCHED
            self.agree(f"{name}, {field}", getattr(entry, field), expected.get(field), tolerance)
        try:
            total.add(replace(entry, **expected) if expected else entry)
        except _FAULTS as reason:
            self.found(name, said(reason))
            self._give_up_total(name)
            return
        try:
            total.check_quotas(entry.analyst, entry.time)
        except MatrixDPError as reason:
            self.found(f"{name}, quota", str(reason))

    def end(self, line: Mapping[str, Any], kept: str | None) -> LedgerVerification:
        """Compares the last line, and says what was found."""
        total, spent = self.total, None
        if {*line} != {"entries", "releases", "spent", "head"}:
            self.found("last line", "it must have entries, releases, spent and head, and nothing else")
        self.agree("last line, head", line.get("head"), self.head)
        self.agree("last line, entries", line.get("entries"), self.count)
        if total is not None:
            self.agree("last line, releases", line.get("releases"), total.releases)
            try:
                spent, fits = total.epsilon(), total.fits()
                stated = decode(line.get("spent"))
            except _FAULTS as reason:
                self.found("total", f"cannot be computed ({said(reason)})")
            else:
                self.agree("last line, spent", stated, spent, TOLERANCE if self.exact else SEARCHED)
                if not fits:
                    self.found("total", f"it passes the budget, {self.budget}")
        if kept is not None and kept not in self.hashes:
            self.found("head", "the chain does not contain the head that was kept: entries were removed or rewritten")
        if self.stated:
            some = ", ".join(map(str, self.stated[:8])) + (", ..." if len(self.stated) > 8 else "")
            self.remarks.append(
                f"Merely stated, and not computed again: {counted(len(self.stated), 'entry')} ({some})."
            )
        if kept is None:
            self.remarks.append(_NOT_COMPUTED)
        return LedgerVerification(
            compared=self.compared,
            findings=tuple(self.findings),
            remarks=tuple(self.remarks),
            entries=self.count,
            stated=tuple(self.stated),
            spent=spent,
            budget=self.budget,
            head=self.head,
        )


def _check_names(fields: Mapping[str, Any]) -> None:
    """Raises InvalidInput unless an entry has fields that are known, and in the form that is hashed."""
    if {*fields} - _NAMES or hashed(fields) != fields:
        raise InvalidInput("it has a field that is not known, or that is empty or at its default and should be missing")
    if "certificate" in fields and {*fields} & {*BEFORE_SCHEMA_4}:
        raise InvalidInput("it has a document, and fields that were used before there were documents")


def _shown(value: Any) -> str:
    """A number, or a text of at most 64 characters such as a hash; anything else by its kind."""
    return repr(value) if isinstance(value, str) and len(value) <= 64 else _check.shown(value)
