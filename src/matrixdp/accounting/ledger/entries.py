"""Entries of a ledger: as they are asked for, and as they are read back.

What an entry guarantees is a document: a certificate, or a guarantee that is merely stated. Documents are kept apart
from the entries, by the SHA-256 of their text, so the later parts of a series, and all releases with equal
certificates, share one. A profile without a JSON form, that of a law from outside the package, is stored as a curve
besides, and that curve is what is added up: so the total is the same where the law is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.accounting.accountant import check_secret
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.chain import DEFAULTS, Document, canonical, hashed, now, sha256
from matrixdp.accounting.methods import Use, Uses
from matrixdp.accounting.pairs import check_sampling_rate, dots
from matrixdp.adjacency import Adjacency
from matrixdp.errors import InvalidInput
from matrixdp.privacy import records, spherical
from matrixdp.privacy.certificate import Certificate, refuse_unsafe_floats
from matrixdp.privacy.guarantee import Curve, GaussianProfile, Guarantee, Profile
from matrixdp.privacy.verification import SCHEMA as CERTIFICATES
from matrixdp.privacy.verification import certificate_of, document_of

LONGEST_NOTE = 1000
FIELDS = (
    *("number", "time", "note", "count", "sampling_rate", "series", "planned", "charged_mu", "charged_delta"),
    *("dataset", "analyst", "purpose", "unit", "key"),
)
"""The fields of an entry that stand in its row; the guarantee is in a document."""

BEFORE_SCHEMA_4 = (
    *("relation", "exact", "mu", "dimension", "k", "p", "scale", "radius", "total_variation"),
    *("sensitivity", "noise", "source", "shape"),
)
"""What stood in the row in place of the document: the guarantee in numbers, its reasons in words."""


@dataclass(frozen=True)
class Entry:
    """One spend: what was guaranteed, when, what for, and how often.

    Attributes:
        guarantee: profile, adjacency and total-variation error, as they are added up.
        count: how many such releases this entry is for.
        series: the plan that it is a part of, if any.
        planned: how many releases the whole block has, which its first entry pays for; None in entries written by
            versions that did not yet charge by blocks.
        charged_mu: what the filter was charged, together with charged_delta: the block is no worse than Gaussian noise
            with this mu that reveals everything with probability charged_delta. None where no mu is enough, or where
            there are no such charges; 0 for a part of a series that was charged before.
        charged_delta: as above.
        dataset: which data set the release was made from.
        analyst: who asked for it.
        purpose: what it is for.
        unit: whom the guarantee protects, such as "record" or "user".
        key: the idempotency key of the spend.
        fields: all of this as it was hashed.
        document: the certificate or the stated guarantee, as JSON knows it; empty before schema 4.
        plan_uses: the releases of the plan that the entry begins, if it begins one.
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
    hash: str
    fields: Mapping[str, Any] = field(repr=False, compare=False)
    document: Document = field(repr=False, compare=False)
    plan_uses: Uses = field(default_factory=dict, repr=False, compare=False)

    @property
    def profile(self) -> Profile:
        """delta for every epsilon, as it is added up."""
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
        """The certificate; a plain Guarantee if that was merely stated, or rests on a law that is not known here."""
        if self.stated:
            return self.guarantee
        try:
            return certificate_of(self.document)
        except InvalidInput:
            if "curve" in self.fields:  # whoever registers the law can read it
                return self.guarantee
            raise

    @property
    def stated(self) -> bool:
        """Whether the guarantee was merely stated: nothing in the entry says what it follows from."""
        return self.document.get("matrixdp") != "certificate"

    @property
    def source(self) -> str:
        """Who proposed the noise, as far as the entry says."""
        certificate = self.certificate
        return certificate.source if isinstance(certificate, Certificate) else str(self.fields.get("source", ""))

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
    return Guarantee(_usable(profile), stated["adjacency"], stated["total_variation"])


def _before_schema_4(fields: Mapping[str, Any]) -> Guarantee:
    profile: Profile
    if "mu" in fields:
        profile = GaussianProfile(fields["mu"])
    else:
        profile = spherical.Profile(**{name: fields[name] for name in ("dimension", "k", "p", "scale", "radius")})
    return Guarantee(_usable(profile), fields["relation"], fields["total_variation"])


def _usable(profile: Profile) -> Profile:
    if isinstance(profile, GaussianProfile):
        _check.at_least_zero("mu", profile.mu)
    return profile


# --- what is asked for ---


@dataclass(frozen=True)
class Spend:
    """A spend that was asked for, if its arguments can be used.

    Attributes:
        guarantee: as it is added up.
        count: how many such releases it is for.
        sampling_rate: the probability that a record takes part.
        series: the plan that it is a part of, if any.
        planned: how many releases the plan has, if that was given.
        plan: the SHA-256 of the document of the plan, if it has one.
        plan_uses: the releases of that plan.
        fields: the words of its entry, and the names of its documents.
        documents: those that it needs, by the SHA-256 of their text.
    """

    guarantee: Guarantee
    count: int
    sampling_rate: float
    series: str | None
    planned: int | None
    plan: str | None
    plan_uses: Uses
    fields: Mapping[str, Any]
    documents: Mapping[str, Document]

    @property
    def adjacency(self) -> Adjacency:
        """Which data sets are neighbours."""
        return self.guarantee.adjacency

    @property
    def use(self) -> Use:
        """What the spend adds to a total."""
        return Use(self.guarantee.profile, self.guarantee.total_variation, self.sampling_rate)

    def record(self) -> dict[str, Any]:
        """The row of the entry, but for its number and charge."""
        numbers = {"count": self.count, "sampling_rate": self.sampling_rate}
        return {**self.fields, **numbers, "series": self.series, "planned": self.planned}

    def is_that_of(self, entry: Entry) -> bool:
        """Whether this entry was written for an equal spend; the plan of a series need not be repeated."""
        asked = self.record()
        open_ = {"time"} | ({"planned"} if self.planned is None else set())
        return all(entry.fields.get(name) == hashed(asked).get(name) for name in asked if name not in open_)


def checked(
    certificate: Guarantee,
    epsilon: float,
    *,
    note: str,
    count: int,
    sampling_rate: float,
    series: str | None,
    planned: int | None,
    plan: Composition | None,
    unit: str,
    **words: str | None,
) -> Spend:
    """The spend with these arguments, if they can be used.

    Args:
        certificate: what the release guarantees.
        epsilon: that of the ledger's budget; a curve is exact there.
        note: as for `Ledger.spend`, like the rest.
        count: as above.
        sampling_rate: as above.
        series: as above.
        planned: as above.
        plan: as above.
        unit: as above.
        words: dataset, analyst, purpose and key.
    """
    if not isinstance(certificate, Guarantee):
        raise InvalidInput(f"certificate must be a Certificate, got {_check.kind(certificate)}; certify() makes one")
    check_secret(certificate)
    refuse_unsafe_floats(certificate, "charging it to a ledger")
    if not (isinstance(note, str) and note.isprintable() and len(note) <= LONGEST_NOTE):
        raise InvalidInput(f"note must be one line of at most {LONGEST_NOTE} printable characters")
    for name, value in {**words, "unit": unit, "series": series}.items():
        usable = isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST_NOTE
        if not usable and (value is not None or name == "unit"):
            raise InvalidInput(
                f"{name} must be a name of 1 to {LONGEST_NOTE} printable characters"
                f"{', such as secrets.token_hex(8)' if name in ('series', 'key') else ''}, got {_check.kind(value)}"
            )
    if planned is not None and series is None:
        raise InvalidInput("planned must come with a series, the name under which the planned releases are used")
    for name, number in (("count", count), ("planned", 1 if planned is None else planned)):
        if not _check.count(name, number) < 2**63:
            raise InvalidInput(f"{name} must be below 2^63, got {_check.shown(number)}")
    if plan is not None:
        if not isinstance(plan, Composition) or series is None or planned is not None:
            raise InvalidInput("plan must be a Composition, and come with a series and without a number planned")
        planned = sum(plan.uses.values())
    curve, document = curve_for(certificate.profile, epsilon), _document_for(certificate)
    documents = {sha256(canonical(each)): each for each in (document, curve) if each is not None}
    named, *curves = documents
    whole = None if plan is None else plan.to_dict()
    digest = None if whole is None else sha256(canonical(whole))
    if whole is not None and digest is not None:
        documents[digest] = whole
    fields = {
        "time": now(),
        "note": note,
        "certificate": named,
        "curve": curves[0] if curves else None,
        "unit": unit,
        **words,
    }
    return Spend(
        guarantee_of(document, curve),
        int(count),
        check_sampling_rate(sampling_rate),
        series,
        None if planned is None else int(planned),
        digest,
        {} if plan is None else plan.uses,
        fields,
        documents,
    )


def _document_for(certificate: Guarantee) -> dict[str, Any]:
    """The document of a certificate, or of a guarantee that is merely stated."""
    if isinstance(certificate, Certificate):
        return document_of(certificate)
    profile = certificate.profile
    known = records.kind_of(profile) is not None
    return {
        "matrixdp": "guarantee",
        "schema": 1,
        "profile": records.encode(profile) if known else {"words": str(profile)},
        "adjacency": str(certificate.adjacency),
        "total_variation": certificate.total_variation,
    }


def curve_for(profile: Profile, epsilon: float) -> dict[str, Any] | None:
    """The curve that is stored of a profile without a JSON form, exact at this epsilon."""
    if not isinstance(profile, Profile):
        raise InvalidInput(
            f"certificate must have a profile with delta(epsilon) and epsilon(delta), got {_check.kind(profile)}"
        )
    if records.kind_of(_usable(profile)) is not None:
        return None
    found: dict[str, Any] = records.encode(_curve_of(profile, epsilon))
    return found


def _curve_of(profile: Profile, epsilon: float) -> Curve:
    """A profile at some points, this epsilon among them, so that a release may use the whole of a budget."""
    epsilons, deltas = dots(profile)
    if epsilon < epsilons[-1]:
        place = int(np.searchsorted(epsilons, epsilon))
        if epsilons[place] != epsilon:
            epsilons = np.insert(epsilons, place, epsilon)
            deltas = np.insert(deltas, place, profile.delta(epsilon))
    falling = np.maximum.accumulate(deltas[::-1])[::-1]  # rounded up where a later one was
    return Curve(tuple(epsilons.tolist()), tuple(falling.tolist()))
