"""Certificates as JSON documents, and their verification without trust in any stored number.

A document holds the records (law, set, drawing, query, budget) and what was computed from them. Verification reads the
records, recomputes everything, writes a fresh document, and compares the two entry by entry. So a changed record shows
in what follows from it, and a changed result differs from the fresh one. To pass, the whole document must be the true
one for its records; only the file named in `released` is checked apart (`with_value`). That proves consistency, not
origin: nothing is signed.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy import records, spherical
from matrixdp.privacy.certificate import USUAL, Certificate, certify, drawn
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.drawing import Drawing, costed
from matrixdp.privacy.guarantee import Curve, GaussianProfile, Profile
from matrixdp.privacy.records import Fetch, Store, change_of, decode, digest, encode
from matrixdp.sensitivity import Sensitivity

SCHEMA = 1
"""The version of the documents that are written; older ones stay readable."""

TOLERANCE = 1e-9
"""The relative difference up to which two numbers agree, as linear algebra differs between machines."""

FAULTS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError)
"""The errors besides MatrixDPError that a document with entries of wrong kinds or sizes may raise; it is refused."""

for _kind, _record in {
    "gaussian-profile": GaussianProfile,
    "spherical-profile": spherical.Profile,
    "curve": Curve,
}.items():
    records.register(_kind, _record)
records.register("drawing", Drawing, optional=("step", "exact"))
records.register(
    "discrete-profile",
    DiscreteProfile,
    lambda *, others, **fields: DiscreteProfile(**fields, others=tuple(tuple(group) for group in others)),
)


def document_of(certificate: Certificate, store: Store | None = None) -> dict[str, Any]:
    """A certificate as a document."""
    asked, law, sensitivity = certificate.budget or USUAL, certificate.law, certificate.sensitivity
    drawing = certificate.drawing
    return {
        "matrixdp": "certificate",
        "schema": SCHEMA,
        "law": encode(law, store),
        "sensitivity": encode(sensitivity, store),
        "drawing": None if drawing is None else encode(drawing, store),
        "query": encode(certificate.query, store),
        "budget": encode(certificate.budget, store),
        "remark": certificate.remark,
        "guarantee": {
            "adjacency": str(certificate.adjacency),
            "profile": profile_record(certificate.profile, store),
            "total_variation": certificate.total_variation,
            "exact": certificate.exact,
            "mu": certificate.mu,
            "epsilon": encode(certificate.epsilon(asked.delta)),
            "at_delta": asked.delta,
            "delta": certificate.delta(asked.epsilon),
            "at_epsilon": asked.epsilon,
            "keeps_budget": None if certificate.budget is None else certificate.meets(certificate.budget),
            "covers": certificate.covers,
            "float_safe": certificate.float_safe,
        },
        "facts": {
            "shape": list(certificate.shape),
            "expected_squared_error": law.expected_squared_error(),
            "standard_error": None if (bars := certificate.standard_error_range) is None else list(bars),
            **_of_gaussian(law),
            "noise": law.describe(),
            "change": str(sensitivity),
            "extent": [encode(float(number)) for number in sensitivity.extent(law.shape)],
            "drawn_with": None if drawing is None else str(drawing),
        },
        **({"released": dict(certificate.released)} if certificate.released else {}),
    }


def _of_gaussian(law: NoiseLaw) -> dict[str, Any]:
    """Numbers that change with the noise even where no other number does."""
    if not isinstance(law, Gaussian):
        return {}
    return {"inverse_trace": law.covariance.power_trace(-1), "rounding": law.covariance.slack}


def profile_record(profile: Profile, store: Store | None = None) -> Any:
    """The profile as a record; in words if it has no JSON form, as only its author's code can recompute it."""
    return {"words": str(profile)} if records.kind_of(profile) is None else encode(profile, store)


def read_json(text: str | bytes) -> Any:
    """Parses JSON; raises ValueError if a name occurs twice in an object, as other readers may take the other entry."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return found

    return json.loads(text, object_pairs_hook=once)


def parsed(text: str | bytes) -> dict[str, Any]:
    """A JSON object of a version that this program knows."""
    try:
        content = read_json(text)
    except (ValueError, TypeError, RecursionError) as reason:
        raise InvalidInput(f"the certificate is not JSON ({type(reason).__name__})") from None
    if not isinstance(content, dict) or "matrixdp" not in content:
        raise InvalidInput(
            'the certificate must be a JSON object with an entry "matrixdp"; Certificate.to_json writes one'
        )
    if content.get("schema") not in range(1, SCHEMA + 1) or isinstance(content.get("schema"), bool):
        raise InvalidInput(f"the certificate has a schema that is not known here (up to {SCHEMA}); upgrade matrixdp")
    return content


def certificate_of(content: Mapping[str, Any], fetch: Fetch | None = None) -> Certificate:
    """The certificate in a document, with the numbers stated there; only `verified` says whether they are true."""
    try:
        stated = content["guarantee"]
        law, sensitivity = decode(content["law"], fetch), decode(content["sensitivity"], fetch)
        drawing, budget = decode(content["drawing"], fetch), decode(content["budget"], fetch)
        profile = decode(stated["profile"], fetch)
        if isinstance(profile, dict):  # a law from outside the package
            profile = certify(law, sensitivity).profile
        kinds = ((law, NoiseLaw), (sensitivity, Sensitivity), (drawing, Drawing | None), (budget, Budget | None))
        if not all(isinstance(part, kind) for part, kind in (*kinds, (content["query"], Mapping | None))):
            raise InvalidInput("the certificate has a record of the wrong kind")
        said_of_law = (getattr(law, name, "") for name in ("source", "note"))  # a law from outside may have neither
        if not all(isinstance(words, str) for words in (content["remark"], *said_of_law)):
            raise InvalidInput("source, note and remark must be text")
        certificate = Certificate(
            profile=profile,
            adjacency=stated["adjacency"],
            total_variation=stated["total_variation"],
            law=law,
            sensitivity=sensitivity,
            exact=stated["exact"],
            drawing=drawing,
            query=content["query"],
            budget=budget,
            released=content.get("released"),
            remark=content["remark"],
            document=content,
        )
    except FAULTS as reason:
        raise InvalidInput(f"the certificate lacks an entry, or has one of the wrong kind ({said(reason)})") from None
    return certificate


# --- verification ---


@dataclass(frozen=True)
class Finding:
    """One entry of a document that does not follow from law and set; in words where two numbers are not enough."""

    entry: str
    stated: Any
    computed: Any
    words: str = ""

    def __str__(self) -> str:
        if self.words:
            return f"{self.entry}: {self.words}"
        stated, computed = (  # certificates are public, so are their words
            repr(value[:80]) if isinstance(value, str) else _check.shown(value)
            for value in (self.stated, self.computed)
        )
        return f"{self.entry}: the document says {stated}, computed again it is {computed}"


@dataclass(frozen=True)
class Verification:
    """What a verification found; true as a condition if everything agrees.

    Attributes:
        compared: how many entries were compared.
        findings: the entries that do not agree.
        remarks: anything else that a reader should know.
        subject: what was verified.
    """

    compared: int
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...] = ()
    subject: str = "Certificate"

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        verdict = "verified" if self else "NOT verified"
        head = f"{self.subject} {verdict}: {self.compared} entries compared, {len(self.findings)} disagree"
        return "\n".join(
            [head, *(f"  {finding}" for finding in self.findings), *(f"  {note}" for note in self.remarks)]
        )


_NO_ORIGIN = (
    "Verification shows whether the numbers follow from the law and the set, not who wrote them: nothing is signed."
)


def verified(certificate: Certificate) -> Verification:
    """Recomputes the document from the records alone, and compares."""
    stated = certificate.document or document_of(certificate)
    try:
        fresh = document_of(recomputed(certificate))
    except (MatrixDPError, *FAULTS) as reason:
        return Verification(0, (Finding("law and sensitivity", None, None, said(reason)),), (_NO_ORIGIN,))
    findings, compared = compared_documents(stated, fresh)
    remarks = [_NO_ORIGIN]
    drawing = certificate.drawing
    if drawing is not None and drawing.third_party:
        kind = drawing.third_party
        remarks.append(f"Profile and sampler of {kind} come from outside matrixdp, which does not vouch for them.")
    if drawing is not None and drawing.reproducible:
        remarks.append("The noise is seeded: whoever knows the seed can remove it.")
    return Verification(compared, findings, tuple(remarks))


def with_value(found: Verification, released: Mapping[str, str] | None, content: bytes) -> Verification:
    """The verification, extended by whether these are the bytes of the released file."""
    stated = (released or {}).get("sha256", _ABSENT)
    wrong = Finding("released.sha256", stated, digest(content), "the file is not the one that was released")
    findings = found.findings if stated == digest(content) else (*found.findings, wrong)
    return replace(found, compared=found.compared + 1, findings=findings)


def recomputed(certificate: Certificate) -> Certificate:
    """The certificate that follows from the records alone, without any stated result."""
    law, sensitivity = certificate.law, certificate.sensitivity
    _check_query(certificate)
    fresh = certify(law, sensitivity, certificate.budget, query=certificate.query, remark=certificate.remark)
    return fresh if certificate.drawing is None else drawn(fresh, costed(certificate.drawing, law, sensitivity))


def said(reason: Exception) -> str:
    """The message of an error, with its type if it is not one of matrixdp's own."""
    return str(reason) if isinstance(reason, MatrixDPError) else f"{type(reason).__name__}: {reason}"


_ABSENT = "nothing"

_LATER_FACTS = {"standard_error"}
"""Facts that early documents of this schema do not have."""

_FORMER_WORDS = {
    r"\b1 bands\b": "1 band",
    r"\bat exactly every 1th step\b": "at every step",
    r"\bexactly every (\d+)th step\b": r"exactly every \1 steps",
}
"""Words of early documents of this schema, and what is written now."""


def _check_query(certificate: Certificate) -> None:
    query = certificate.query
    if query is None:
        return
    if {*query} != {"name", "parameters"}:
        raise InvalidInput("the query must have a name and parameters, and nothing else")
    change = change_of(str(query["name"]))
    if change is None:
        raise InvalidInput(f"query {_check.shown(query['name'])} is not one that matrixdp knows")
    try:
        asked = change(decode(query["parameters"]), certificate.shape)
    except FAULTS as reason:
        raise InvalidInput(f"the query's parameters are not those of {query['name']} ({said(reason)})") from None
    findings, _ = compared_documents(encode(certificate.sensitivity), encode(asked))
    if findings:
        raise InvalidInput(f"the query's parameters give another sensitivity set ({findings[0]})")


def compared_documents(stated: Any, computed: Any) -> tuple[tuple[Finding, ...], int]:
    """The entries that differ, and how many were compared; the entry `released` is left out."""
    entries = list(_pairs("", stated, computed))
    return tuple(Finding(name, a, b) for name, a, b in entries if not _agree(a, b)), len(entries)


def _pairs(name: str, stated: Any, computed: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(stated, Mapping) and "sha256" in stated and isinstance(computed, Mapping) and "float64" in computed:
        computed = {"shape": computed["shape"], "sha256": digest(base64.b64decode(computed["float64"]))}
    if isinstance(stated, Mapping) and isinstance(computed, Mapping):
        unknown_then = _LATER_FACTS - set(stated) if name.endswith("facts") else set()
        for key in sorted({*stated, *computed} - ({"released"} if not name else unknown_then)):
            yield from _pairs(f"{name}.{key}".lstrip("."), stated.get(key, _ABSENT), computed.get(key, _ABSENT))
    elif isinstance(stated, (list, tuple)) and isinstance(computed, (list, tuple)) and len(stated) == len(computed):
        for index, (one, other) in enumerate(zip(stated, computed, strict=True)):
            yield from _pairs(f"{name}[{index}]", one, other)
    else:
        yield name, stated, computed


def _agree(stated: Any, computed: Any) -> bool:
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (stated, computed))
    if isinstance(stated, str) and isinstance(computed, str):
        for former, now in _FORMER_WORDS.items():
            stated, computed = re.sub(former, now, stated), re.sub(former, now, computed)
    if not numbers:
        return type(stated) is type(computed) and bool(stated == computed)
    if isinstance(stated, int) and isinstance(computed, int):
        return stated == computed
    return close(stated, computed, TOLERANCE)


def close(stated: float, computed: float, tolerance: float) -> bool:
    """Whether two numbers agree, relative to the larger; signs must be equal, and an int beyond all floats is not.

    Below the least normal float no digits are left to compare. 0 agrees only with 0: a delta of 0 is another claim than
    a tiny one.
    """
    try:
        alike = math.isclose(stated, computed, rel_tol=tolerance, abs_tol=sys.float_info.min)
        return alike and (stated > 0) == (computed > 0) and (stated < 0) == (computed < 0)
    except OverflowError:
        return False


# --- files ---


def save(certificate: Certificate, path: Path) -> None:
    """Writes a certificate to a new file, and its large arrays to another file beside it."""
    text, arrays = written(certificate)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    if arrays:
        with beside(path).open("xb") as file:
            file.write(arrays)


def written(certificate: Certificate) -> tuple[str, bytes]:
    """The text of a certificate, and the content of the file of arrays beside it, empty if there is none."""
    kept: dict[str, bytes] = {}

    def store(content: bytes) -> str:
        name = digest(content)
        kept[name] = content
        return name

    text = json.dumps(document_of(certificate, store), indent=2, allow_nan=False) + "\n"
    if not kept:
        return text, b""
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **{name: np.frombuffer(kept[name], dtype="<f8") for name in kept})
    return text, packed.getvalue()


def beside(path: Path) -> Path:
    """The file of arrays beside a certificate."""
    return path.with_name(f"{path.name}.npz")


def load(path: Path) -> Certificate:
    """Reads a certificate and the arrays beside it."""
    return certificate_of(parsed(path.read_bytes()), lambda name: _array_bytes(beside(path), name))


def _array_bytes(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return bytes(np.asarray(arrays[name], dtype="<f8").tobytes())
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as reason:
        raise InvalidInput(
            f"arrays of the certificate cannot be read from {path.name} ({type(reason).__name__})"
        ) from None
