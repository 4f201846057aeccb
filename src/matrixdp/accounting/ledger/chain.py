"""The chain of hashes of a ledger: every entry is bound to all that came before it.

The hash of an entry is the SHA-256 of the hash before it and its own fields; the first covers what creation fixed.
An entry names its documents, such as the certificate, by the SHA-256 of their text, so the chain covers them as well.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from matrixdp.budget import Budget

CHAIN = "matrixdp ledger, chain 1"
DEFAULTS = {"count": 1, "sampling_rate": 1.0, "unit": "record", "kind": "spend"}

DOCUMENTS = ("certificate", "curve", "plan", "quota")
"""The fields of an entry that name a document."""

Document = Mapping[str, Any]
"""What an entry names by the SHA-256 of its text: a certificate, a stated guarantee, a curve, a plan or a quota."""

Fields = tuple[Mapping[str, Any], Mapping[str, Document]]
"""The fields of an entry, and its documents by their SHA-256."""


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
    adaptive: int | None = None  # 0: all fixed beforehand; 1: Gaussian filter alone; 2: all filters; None: schema < 3

    def fixed(self) -> dict[str, Any]:
        """What never changes after creation."""
        fields = asdict(self)
        known = ("adaptive",) if self.adaptive is not None else ()
        names = ("id", "epsilon", "delta", "relation", "created", *known)
        return {"chain": CHAIN, **{name: fields[name] for name in names}}

    def genesis(self) -> str:
        """The hash before the first entry."""
        return link("", self.fixed())


def new_header(budget: Budget, relation: str | None, adaptive: bool) -> Header:
    """The header of a new ledger, for adaptive choices or for releases fixed beforehand."""
    return Header(secrets.token_hex(16), budget.epsilon, budget.delta, relation, now(), adaptive=2 * adaptive)


def hashed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are hashed: all that are neither empty nor at their default, as older schemas lacked some."""
    return {name: value for name, value in record.items() if value != DEFAULTS.get(name)}


def link(previous: str, fields: Mapping[str, Any]) -> str:
    """The next hash of the chain."""
    return sha256(previous + canonical(fields))


# The only way to write a record, in ASCII; a blob inserted by other means is written as its repr and does not verify.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr).encode


def sha256(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def now() -> str:
    """The current time as it is stored."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
