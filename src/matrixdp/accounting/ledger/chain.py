"""The chain of hashes of a ledger: every entry is bound to all that came before it.

Each entry has the SHA-256 of the hash before it and of its own fields; the first hash covers what is fixed at creation.
An entry names its documents, such as the certificate, by the SHA-256 of their text, so the chain covers them as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

CHAIN = "matrixdp ledger, chain 1"
DEFAULTS = {"count": 1, "sampling_rate": 1.0, "unit": "record", "kind": "spend"}

DOCUMENTS = ("certificate", "curve", "plan", "quota")
"""The fields of an entry that name a document."""

Document = Mapping[str, Any]
"""What an entry names by the SHA-256 of its text: a certificate, a stated guarantee, a curve."""


@dataclass(frozen=True)
class Header:
    """What a ledger knows besides its entries."""

    id: str
    epsilon: float
    delta: float
    relation: str | None
    created: str
    entries: int = 0
    head: str = ""
    adaptive: int | None = None  # empty before schema 3; 1, the Gaussian filter alone, before schema 5

    def fixed(self) -> dict[str, Any]:
        """What never changes after creation."""
        fields = asdict(self)
        known = ("adaptive",) if self.adaptive is not None else ()
        names = ("id", "epsilon", "delta", "relation", "created", *known)
        return {"chain": CHAIN, **{name: fields[name] for name in names}}

    def genesis(self) -> str:
        """The hash before the first entry."""
        return link("", self.fixed())


def hashed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are hashed: not those that are empty or at their default, as older schemas lacked some."""
    return {name: value for name, value in record.items() if value != DEFAULTS.get(name)}


def link(previous: str, fields: Mapping[str, Any]) -> str:
    """The next hash of the chain."""
    return sha256(previous + canonical(fields))


# One way to write a record, in ASCII; a blob that somebody put in is written as its repr, and so does not verify.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr).encode


def sha256(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def now() -> str:
    """The time as it is stored."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
