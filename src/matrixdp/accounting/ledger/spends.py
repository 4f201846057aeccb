"""Checks the arguments of spends, and makes the fields and documents of their entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.accounting.accountant import check_secret
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.chain import Fields, canonical, sha256
from matrixdp.accounting.ledger.entries import Entry
from matrixdp.accounting.ledger.rules import LONGEST_NAME, check_name
from matrixdp.accounting.pairs import check_sampling_rate, curve_points
from matrixdp.accounting.stated import StatedCurve
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.privacy import records
from matrixdp.privacy.certificate import Certificate, refuse_unsafe_floats
from matrixdp.privacy.guarantee import Curve, Guarantee, Profile
from matrixdp.privacy.verification import document_of, profile_record


def spend_fields(
    certificate: Guarantee,
    budget: Budget,
    *,
    note: str,
    count: int,
    sampling_rate: float,
    series: str | None,
    planned: int | None = None,
    plan: Composition | None = None,
    unit: str = "record",
    **words: str | None,
) -> Fields:
    """The fields and documents of the entry of a spend or a reservation, without number, time and charge.

    The arguments are those of `Ledger.spend`, and are checked here. `words` are dataset, analyst, purpose, key,
    reservation and kind. `budget` is the ledger's; a stored curve is exact at its epsilon.
    """
    if not isinstance(certificate, Guarantee):
        raise InvalidInput(f"certificate must be a Certificate, got {_check.kind(certificate)}; certify() makes one")
    check_secret(certificate)
    refuse_unsafe_floats(certificate, "charging it to a ledger")
    check_note(note)
    for name, value in {**words, "unit": unit, "series": series}.items():
        if value is not None or name == "unit":
            check_name(name, value)
    if planned is not None and series is None:
        raise InvalidInput("planned must come with a series, the name under which the planned releases are used")
    for name, number in (("count", count), ("planned", 1 if planned is None else planned)):
        if not _check.count(name, number) < 2**63:
            raise InvalidInput(f"{name} must be below 2^63, got {_check.shown(number)}")
    if plan is not None:
        if not isinstance(plan, Composition) or series is None or planned is not None:
            raise InvalidInput("plan must be a Composition, and come with a series and without a number planned")
        planned = sum(plan.uses.values())
    found = {
        "certificate": _document_for(certificate),
        "curve": curve_for(certificate.profile, budget),
        "plan": None if plan is None else plan.to_dict(),
    }
    documents = {name: each for name, each in found.items() if each is not None}
    digests = {name: sha256(canonical(each)) for name, each in documents.items()}
    fields = {
        "note": note,
        "unit": unit,
        **words,
        "count": int(count),
        "sampling_rate": check_sampling_rate(sampling_rate),
        "series": series,
        "planned": None if planned is None else int(planned),
        **digests,
    }
    return fields, {digests[name]: each for name, each in documents.items()}


def is_for(entry: Entry, spend: Entry) -> bool:
    """Whether an entry was written for this spend; the plan of a series need not be repeated."""
    names = {*entry.fields, *spend.fields} - {"number", "time", "charged_mu", "charged_delta", "plan"}
    if spend.planned is None:
        names -= {"planned"}
    return all(entry.fields.get(name) == spend.fields.get(name) for name in names)


def refuse_undrawn(spend: Entry) -> None:
    """Raises InvalidInput for a law that has not been drawn, for a ledger or a quota with delta = 0.

    The law may have delta = 0 while draws from it do not: `law.sample()` uses tables with a tiny error.
    """
    if spend.undrawn:
        raise InvalidInput(
            "certificate must say how the noise was drawn, and that it was exact, as the ledger or a quota has "
            "delta = 0. Use release(..., ledger=), or state Budget(epsilon, 0) with record(); nothing was spent"
        )


def check_note(note: object) -> None:
    """Raises InvalidInput unless this is one line."""
    if not (isinstance(note, str) and note.isprintable() and len(note) <= LONGEST_NAME):
        raise InvalidInput(f"note must be one line of at most {LONGEST_NAME} printable characters")


def _document_for(certificate: Guarantee) -> dict[str, Any]:
    """The document of a certificate, or of a stated guarantee."""
    if isinstance(certificate, Certificate):
        return document_of(certificate)
    return {
        "matrixdp": "guarantee",
        "schema": 1,
        "profile": profile_record(certificate.profile),
        "adjacency": str(certificate.adjacency),
        "total_variation": certificate.total_variation,
    }


def curve_for(profile: Profile, budget: Budget | None) -> dict[str, Any] | None:
    """The curve to store for a profile without a JSON form, exact at the budget's epsilon; None for other profiles."""
    if not isinstance(profile, Profile):
        raise InvalidInput(
            f"certificate must have a profile with delta(epsilon) and epsilon(delta), got {_check.kind(profile)}"
        )
    if records.kind_of(profile) is not None:
        return None
    epsilons, deltas = _points(profile, math.inf if budget is None else budget.epsilon)
    # A pure epsilon counts that the profile itself names, not one where a tiny delta was rounded to 0.
    pure = float(getattr(profile, "pure_epsilon", math.inf)) <= epsilons[-1] and deltas[-1] == 0
    found: dict[str, Any] = records.encode((StatedCurve if pure else Curve)(epsilons, deltas))
    return found


def _points(profile: Profile, epsilon: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Some points of a profile, including this epsilon, so that a release may use the whole of a budget."""
    epsilons, deltas = curve_points(profile)
    if epsilon < epsilons[-1]:
        place = int(np.searchsorted(epsilons, epsilon))
        if epsilons[place] != epsilon:
            epsilons = np.insert(epsilons, place, epsilon)
            deltas = np.insert(deltas, place, profile.delta(epsilon))
    falling = np.maximum.accumulate(deltas[::-1])[::-1]  # raised where a later delta was rounded above it
    return tuple(epsilons.tolist()), tuple(falling.tolist())
