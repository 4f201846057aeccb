"""Entries of a ledger: as they are asked for, as rows of the file, and what a chain of them adds up to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from matrixdp import _check
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.privacy import spherical
from matrixdp.privacy.accountant import check_secret
from matrixdp.privacy.certificate import Certificate, GaussianProfile, Profile, refuse_unsafe_floats
from matrixdp.privacy.composition import check_sampling_rate
from matrixdp.privacy.filter import Charge, Spent, Use
from matrixdp.privacy.ledger_file import COLUMNS, LONGEST_NOTE, PROFILE, hashed, now
from matrixdp.sensitivity import RELATIONS


@dataclass(frozen=True)
class Entry:
    """One spend: what was guaranteed, when, what for, and how often; the other fields are those of its certificate.

    Attributes:
        count: how many such releases this entry is for.
        series: the plan that it is a part of, if any.
        planned: how many releases the whole block has, which its first entry pays for; None in entries written by
            versions that did not yet charge by blocks.
        charged_mu: what the filter was charged, together with charged_delta: the block is no worse than Gaussian noise
            with this mu that reveals everything with probability charged_delta. None where no mu is enough, or where
            there are no such charges; 0 for a part of a series that was charged before.
        charged_delta: as above.
    """

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
    series: str | None
    planned: int | None
    charged_mu: float | None
    charged_delta: float | None
    hash: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as they were hashed, and the hash."""
        return {**hashed(record_of(self)), "hash": self.hash}


@dataclass
class Series:
    """Releases that were planned, and charged, as one block: what they are, how many, and how many were made."""

    use: Use
    planned: int
    used: int = 0


@dataclass
class Verified:
    """The beginning of a chain that was found whole: its length, its last hash, and what was spent."""

    entries: int
    head: str
    relation: str | None
    spent: Spent
    series: dict[str, Series] = field(default_factory=dict)

    def followed_by(self, records: Iterable[tuple[Mapping[str, Any], str]]) -> Verified:
        """The same with more entries; each comes with its hash."""
        after = Verified(self.entries, self.head, self.relation, self.spent.copy(), dict(self.series))
        for record, head in records:
            after.entries, after.head, after.relation = record["number"], head, record["relation"]
            use, count, planned, name = use_of(record), record["count"], record["planned"], record["series"]
            begun = after.series.get(name)
            if begun is None and (planned is None or not after.spent.adaptive):
                after.spent.fixed[use] += planned or count
            elif begun is None:
                mu = math.inf if record["charged_mu"] is None else record["charged_mu"]
                after.spent.add(((use, planned),), Charge(mu, record["charged_delta"]))
            if name is not None:
                after.series[name] = Series(use, planned, (begun.used if begun else 0) + count)
        return after


def checked(
    certificate: Certificate, note: str, count: int, sampling_rate: float, series: str | None, planned: int | None
) -> Entry:
    """The entry for a spend, without its number and hash, if its arguments can be used."""
    if not isinstance(certificate, Certificate):
        raise InvalidInput(f"certificate must be a Certificate, got {_check.kind(certificate)}; certify() makes one")
    check_secret(certificate)
    refuse_unsafe_floats(certificate, "charging it to a ledger")
    _check.choice("the certificate's relation", certificate.relation, RELATIONS)
    if not (isinstance(note, str) and note.isprintable() and len(note) <= LONGEST_NOTE):
        raise InvalidInput(f"note must be one line of at most {LONGEST_NOTE} printable characters")
    if series is not None and not (
        isinstance(series, str) and series.isprintable() and 0 < len(series) <= LONGEST_NOTE
    ):
        raise InvalidInput(
            f"series must be a name of 1 to {LONGEST_NOTE} printable characters, such as secrets.token_hex(8), "
            f"got {_check.kind(series)}"
        )
    if planned is not None and series is None:
        raise InvalidInput("planned must come with a series, the name under which the planned releases are used")
    for name, value in (("count", count), ("planned", 1 if planned is None else planned)):
        if not _check.count(name, value) < 2**63:
            raise InvalidInput(f"{name} must be below 2^63, got {_check.shown(value)}")
    return Entry(
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
        sampling_rate=check_sampling_rate(sampling_rate),
        series=series,
        planned=planned,
        charged_mu=None,
        charged_delta=None,
        hash="",
    )


def planned_for(entry: Entry, begun: Series | None) -> int:
    """How many releases the block of this entry has, if the entry keeps to the plan."""
    if entry.series is None:
        return entry.count
    planned = begun.planned if begun else entry.planned
    if planned is None:
        raise InvalidInput(f"planned must be given with the first spend of a series; {entry.series!r} is new")
    if begun and entry.planned not in (None, planned):
        raise InvalidInput(
            f"planned must stay what the first spend of the series fixed, {planned}, got {entry.planned}; a longer "
            "plan is a new series"
        )
    if begun and begun.use != use_of(record_of(entry)):
        raise InvalidInput(
            f"certificate and sampling_rate must be those that the series {entry.series!r} was begun with; another "
            "kind of release is a new series"
        )
    left = planned - begun.used if begun else planned
    if not entry.count <= left:
        raise BudgetExceeded(
            f"the series {entry.series!r} was planned for {planned} releases, of which {left} are left, not "
            f"{entry.count}; nothing was spent. More of them are a new series, with a charge of its own"
        )
    return planned


def record_of(entry: Entry) -> dict[str, Any]:
    """An entry as a row, in the order of COLUMNS."""
    fields = {**vars(entry), **dict.fromkeys(PROFILE), **_parameters(entry.profile)}
    fields |= {"exact": int(entry.exact), "shape": "x".join(map(str, entry.shape))}
    return {name: fields[name] for name in COLUMNS}


def entry_of(record: Mapping[str, Any], found: str) -> Entry:
    """A row as an entry, with its hash."""
    fields = {name: value for name, value in record.items() if name not in PROFILE}
    fields |= {"exact": bool(record["exact"]), "shape": tuple(int(side) for side in record["shape"].split("x") if side)}
    return Entry(**fields, profile=use_of(record).profile, hash=found)


def _parameters(profile: Profile) -> dict[str, Any]:
    """The numbers that determine a profile."""
    if isinstance(profile, GaussianProfile):
        return {"mu": abs(_check.at_least_zero("mu", profile.mu))}  # SQLite knows no -0.0
    if isinstance(profile, spherical.Profile):
        return asdict(profile)
    raise InvalidInput(f"certificate must be that of Gaussian or spherical noise, got the profile {profile!r}")


def use_of(record: Mapping[str, Any]) -> Use:
    """What a row says about the total."""
    parameters = {name: record[name] for name in PROFILE if name != "mu"}
    profile = spherical.Profile(**parameters) if record["mu"] is None else GaussianProfile(record["mu"])
    return Use(profile, record["total_variation"], record["sampling_rate"])
