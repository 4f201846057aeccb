"""Spends as they are asked for: their arguments checked, and the documents that their entries name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.accounting.accountant import check_secret
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.chain import Document, canonical, hashed, sha256
from matrixdp.accounting.ledger.entries import Entry, guarantee_of, usable
from matrixdp.accounting.methods import Use, Uses
from matrixdp.accounting.pairs import check_sampling_rate, dots
from matrixdp.adjacency import Adjacency
from matrixdp.errors import InvalidInput
from matrixdp.privacy import records
from matrixdp.privacy.certificate import Certificate, refuse_unsafe_floats
from matrixdp.privacy.guarantee import Curve, Guarantee, Profile
from matrixdp.privacy.verification import document_of

LONGEST_NOTE = 1000


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

    @property
    def analyst(self) -> str | None:
        """Who asks for it."""
        return self.fields.get("analyst")

    @property
    def reservation(self) -> str | None:
        """The reservation that it uses, or makes."""
        return self.fields.get("reservation")

    @property
    def kind(self) -> str:
        """ "spend" or "reservation"."""
        return str(self.fields.get("kind", "spend"))

    def is_that_of(self, entry: Entry) -> bool:
        """Whether this entry was written for an equal spend; the plan of a series need not be repeated."""
        asked = self.record()
        open_ = {"planned"} if self.planned is None else set()
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
        words: dataset, analyst, purpose, key, reservation and kind.
    """
    if not isinstance(certificate, Guarantee):
        raise InvalidInput(f"certificate must be a Certificate, got {_check.kind(certificate)}; certify() makes one")
    check_secret(certificate)
    refuse_unsafe_floats(certificate, "charging it to a ledger")
    check_note(note)
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


def check_note(note: object) -> None:
    """Raises InvalidInput unless this is one line."""
    if not (isinstance(note, str) and note.isprintable() and len(note) <= LONGEST_NOTE):
        raise InvalidInput(f"note must be one line of at most {LONGEST_NOTE} printable characters")


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
    if records.kind_of(usable(profile)) is not None:
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
