"""Entries of a ledger, as they are read back.

What an entry guarantees is a document: a certificate, or a stated guarantee. Documents are kept apart from the entries,
by the SHA-256 of their text, so all releases with equal certificates share one. A law from outside the package may have
a profile without a JSON form. Then its curve is stored as well, and the curve is what is added up: so the total is the
same where the law is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from matrixdp import _check
from matrixdp._rounding import rounded_up
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.chain import DEFAULTS, Document, hashed
from matrixdp.accounting.ledger.rules import Quota, quota_of
from matrixdp.accounting.methods import Use, Uses
from matrixdp.accounting.pairs import check_sampling_rate
from matrixdp.adjacency import Adjacency
from matrixdp.errors import InvalidInput
from matrixdp.privacy import records, spherical
from matrixdp.privacy.certificate import USUAL, Certificate
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee, Profile
from matrixdp.privacy.verification import SCHEMA as CERTIFICATES
from matrixdp.privacy.verification import certificate_of

FIELDS = (
    *("number", "time", "note", "count", "sampling_rate", "series", "planned", "charged_mu", "charged_delta"),
    *("dataset", "analyst", "purpose", "unit", "key", "kind", "reservation"),
)
"""The fields in the row of an entry; the guarantee is in a document."""

BEFORE_SCHEMA_4 = (
    *("relation", "exact", "mu", "dimension", "k", "p", "scale", "radius", "total_variation"),
    *("sensitivity", "noise", "source", "shape"),
)
"""The fields that were in the row before there were documents: the guarantee in numbers, its reasons in words."""


@dataclass(frozen=True)
class Entry:
    """One spend or reservation: what was guaranteed, when, for what, and how often.

    Attributes:
        guarantee: profile, adjacency and total-variation error, as they are added up.
        count: how many such releases this entry is for.
        series: the plan that it is a part of, if any.
        planned: how many releases the whole block has, which its first entry pays for; None in entries written by
            versions that did not yet charge by blocks.
        charged_mu: the charge, together with charged_delta: the block is no worse than Gaussian noise with this mu that
            reveals everything with probability charged_delta. None if no mu is enough, or if there are no such charges;
            0 for a later part of a series, and for a spend that uses a reservation.
        charged_delta: as above.
        dataset: which data set the release was made from.
        analyst: who asked for it.
        purpose: what it is for.
        unit: whom the guarantee protects, such as "record" or "user".
        key: the idempotency key of the spend.
        kind: "spend", or "reservation" for releases that are reserved and not made yet.
        reservation: the reservation that the spend uses, or the name of this one.
        fields: all fields as they were hashed.
        document: the certificate or the stated guarantee, as JSON; empty before schema 4.
        plan_uses: the releases of the plan that the entry begins, if it begins one.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Counts, Ledger, release
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> _ = release([12, 3], Counts(1), Budget(1.0, 1e-7), ledger=ledger, note="two counts")
        >>> (entry,) = ledger.history()
        >>> entry.number, entry.note, entry.count
        (1, 'two counts', 1)
    """

    number: int
    time: str
    note: str
    guarantee: Guarantee = field(compare=False)
    count: int
    sampling_rate: float
    series: str | None
    planned: int | None
    charged_mu: float | None
    charged_delta: float | None
    dataset: str | None
    analyst: str | None
    purpose: str | None
    unit: str
    key: str | None
    kind: str
    reservation: str | None
    hash: str
    fields: Mapping[str, Any] = field(repr=False, compare=False)
    document: Document = field(repr=False, compare=False)
    plan_uses: Uses = field(default_factory=dict, repr=False, compare=False)

    @property
    def profile(self) -> Profile:
        """The profile that is added up: delta for every epsilon."""
        return self.guarantee.profile

    @property
    def total_variation(self) -> float:
        """The total-variation error of the sampler."""
        return self.guarantee.total_variation

    @property
    def adjacency(self) -> Adjacency:
        """Which data sets are neighbours."""
        return self.guarantee.adjacency

    @property
    def relation(self) -> Adjacency:
        """Another name of `adjacency`."""
        return self.adjacency

    @cached_property
    def certificate(self) -> Guarantee:
        """The certificate; a plain Guarantee if it was only stated, or if its law is not known here."""
        if self.stated:
            return self.guarantee
        try:
            return certificate_of(self.document)
        except InvalidInput:
            if "curve" in self.fields:  # the certificate can be read once the law is registered
                return self.guarantee
            raise

    @property
    def stated(self) -> bool:
        """Whether the guarantee was only stated: nothing in the entry says what it follows from."""
        return self.document.get("matrixdp") != "certificate"

    @property
    def undrawn(self) -> bool:
        """Whether this spend has the certificate of a law that has not been drawn.

        Such a certificate has no total-variation error, and names no exact sampler. For a law from outside the package,
        its author vouches for the sampler.
        """
        drawing = self.document.get("drawing")
        exact = isinstance(drawing, Mapping) and (drawing.get("exact") or drawing.get("third_party"))
        return self.kind == "spend" and not self.stated and self.total_variation == 0.0 and not exact

    @property
    def source(self) -> str:
        """Who proposed the noise, if the entry says so."""
        certificate = self.certificate
        return certificate.source if isinstance(certificate, Certificate) else str(self.fields.get("source", ""))

    @property
    def in_words(self) -> str:
        """What each release guarantees, its sampler included: mu, or epsilon at the delta that was asked for."""
        if not isinstance(self.profile, DiscreteProfile):
            return str(self.profile)
        certificate = self.certificate
        asked = certificate.budget if isinstance(certificate, Certificate) else None
        delta = USUAL.delta if asked is None else asked.delta
        return f"epsilon {rounded_up(self.guarantee.epsilon(delta))} at delta {delta:g}"

    @property
    def use(self) -> Use:
        """What the entry adds to a total."""
        return Use(self.profile, self.total_variation, self.sampling_rate)

    @property
    def plan(self) -> str | None:
        """The SHA-256 of the document of the plan that the entry begins, if it begins one."""
        return self.fields.get("plan")

    def to_dict(self) -> dict[str, Any]:
        """The fields as they were hashed, the hash, and the document."""
        return {**self.fields, "hash": self.hash, "document": dict(self.document)}


@dataclass(frozen=True)
class Change:
    """An entry that releases nothing: a quota that was set or removed, or a reservation that was given back.

    Attributes:
        kind: "quota" or "return".
        name: of the quota or the reservation.
        quota: the quota as it is from now on; None where it was removed.
        analyst: who gave the reservation back.
        fields: all fields as they were hashed.

    Example:
        >>> import tempfile
        >>> from matrixdp import Budget, Ledger
        >>> ledger = Ledger(f"{tempfile.mkdtemp()}/budget.db", Budget(3.0, 1e-6))
        >>> _ = ledger.set_quota("statistics", Budget(1.0, 1e-6), members=["ann"])
        >>> [(change.kind, change.name) for change in ledger.changes()]
        [('quota', 'statistics')]
    """

    number: int
    time: str
    note: str
    kind: str
    name: str
    quota: Quota | None
    analyst: str | None
    key: str | None
    hash: str
    fields: Mapping[str, Any] = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The fields as they were hashed, the hash, and the quota."""
        return {**self.fields, "hash": self.hash, "document": self.quota.to_dict() if self.quota else {}}


def event_of(record: Mapping[str, Any], found: str, read: Callable[[str], Document]) -> Entry | Change:
    """An entry of any kind from its row; arguments as for `entry_of`.

    Raises:
        InvalidInput: if a field is of the wrong kind or out of range, whoever wrote it.
    """
    fields = hashed(record)
    _check_fields(fields)
    kind = fields.get("kind", "spend")
    if kind in ("spend", "reservation"):
        return entry_of(fields, found, read)
    document = read(fields["quota"]) if kind == "quota" else {}
    if kind not in ("quota", "return"):
        raise InvalidInput("an entry is of a kind that is not known here; upgrade matrixdp")
    return Change(
        number=fields["number"],
        time=fields["time"],
        note=fields.get("note", ""),
        kind=kind,
        name=document["name"] if kind == "quota" else fields["reservation"],
        quota=quota_of(document) if kind == "quota" else None,
        analyst=fields.get("analyst"),
        key=fields.get("key"),
        hash=found,
        fields=fields,
    )


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raises InvalidInput unless the fields of an entry are of the right kind, and the time is one in UTC."""
    for name in ("number", "count", "planned"):
        value = fields.get(name, 1)
        if not (type(value) is int and 0 < value < 2**63):
            raise InvalidInput(f"{name} must be a whole number from 1 to below 2^63")
    if "sampling_rate" in fields:
        check_sampling_rate(fields["sampling_rate"])
    for name in ("time", "note", "series", "dataset", "analyst", "purpose", "unit", "key", "kind", "reservation"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidInput(f"{name} must be a text")
    if datetime.fromisoformat(fields["time"]).utcoffset() != timedelta(0):
        raise InvalidInput("time must be in UTC")


def entry_of(record: Mapping[str, Any], found: str, read: Callable[[str], Document]) -> Entry:
    """An entry from its row.

    Args:
        record: the fields of the row; those that are empty may be missing.
        found: the hash.
        read: gives the document with this SHA-256.
    """
    fields = hashed(record)
    values = {name: fields.get(name, DEFAULTS.get(name)) for name in FIELDS}
    if "certificate" not in fields:
        return Entry(**values, guarantee=_before_schema_4(fields), hash=found, fields=fields, document={})
    document = read(fields["certificate"])
    curve = read(fields["curve"]) if "curve" in fields else None
    uses = Composition.from_dict(read(fields["plan"])).uses if "plan" in fields else {}
    return Entry(
        **values,
        guarantee=guarantee_of(document, curve),
        hash=found,
        fields=fields,
        document=document,
        plan_uses=uses,
    )


def guarantee_of(document: Document, curve: Document | None = None) -> Guarantee:
    """The guarantee in a document, with the profile that is added up."""
    kinds = {"certificate": CERTIFICATES, "guarantee": 1}
    if not 1 <= document["schema"] <= kinds.get(document["matrixdp"], 0):
        raise InvalidInput("a document is of a kind or schema that is not known here; upgrade matrixdp")
    stated = document["guarantee"] if document["matrixdp"] == "certificate" else document
    profile = records.decode(stated["profile"] if curve is None else dict(curve))
    if not isinstance(profile, Profile):
        raise InvalidInput(f"the profile of a guarantee cannot be read, got {_check.kind(profile)}")
    return Guarantee(profile, stated["adjacency"], stated["total_variation"])


def _before_schema_4(fields: Mapping[str, Any]) -> Guarantee:
    profile: Profile
    if "mu" in fields:
        profile = GaussianProfile(fields["mu"])
    else:
        profile = spherical.Profile(**{name: fields[name] for name in ("dimension", "k", "p", "scale", "radius")})
    return Guarantee(profile, fields["relation"], fields["total_variation"])
