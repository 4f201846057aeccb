"""What many releases guarantee together, as a record that is written as JSON, read back, and verified without trust.

A composition may account for releases that were made, or be a plan of releases to come.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from matrixdp import _check
from matrixdp._rounding import rounded_up
from matrixdp.accounting import methods
from matrixdp.accounting.losses import Steps
from matrixdp.accounting.methods import Use, Uses
from matrixdp.accounting.pairs import check_profile, check_sampling_rate
from matrixdp.adjacency import ADD_REMOVE, Adjacency
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy.certificate import USUAL, Certificate
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee
from matrixdp.privacy.records import decode, encode
from matrixdp.privacy.verification import (
    FAULTS,
    SCHEMA,
    Finding,
    Verification,
    certificate_of,
    compared_documents,
    parsed,
    recomputed,
    said,
    verified,
    written,
)

KIND = "composition"
"""The value of the entry "matrixdp" in a document of this kind."""

LOSSES_TOLERANCE = 1e-6
"""The relative difference up to which two totals by privacy-loss distributions agree.

The computation is deterministic, but the last digits of exponentials, Fourier transforms and dot products differ
between machines, and epsilon is bisected to 1e-7. The recomputed total is itself a proven bound, so a stated epsilon or
delta that passes is below the truth by at most this relative difference.
"""

_NO_ORIGIN = (
    "A verified composition proves that the total follows from its parts, not that these were the releases, "
    "nor who wrote it."
)


@dataclass(frozen=True)
class Part:
    """Some releases with the same certificate.

    Attributes:
        certificate: the certificate of one release, on the records that it used; or a guarantee that is only stated.
        count: how many such releases.
        sampling_rate: the probability with which each record is used, independently of the others and anew for each
            release. This is Poisson sampling; shuffling and batches of a fixed size are not covered. Neither the noise
            nor a divisor may depend on how many records were drawn. Where the certificate protects units, such as
            users, each unit must be sampled as a whole, with all its rows.
    """

    certificate: Guarantee
    count: int = 1
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.certificate, Guarantee):
            kind = _check.kind(self.certificate)
            raise InvalidInput(f"certificate must be a Certificate or a Guarantee, got {kind}; use certify()")
        check_profile(self.certificate.profile)
        object.__setattr__(self, "count", _check.count("count", self.count))
        if not self.count < 2**63:
            raise InvalidInput(f"count must be below 2^63, got {_check.shown(self.count)}")
        object.__setattr__(self, "sampling_rate", check_sampling_rate(self.sampling_rate))

    @property
    def use(self) -> Use:
        """One of the releases, as far as a total depends on it."""
        return Use(self.certificate.profile, self.certificate.total_variation, self.sampling_rate)

    def __str__(self) -> str:
        sampled = "" if self.sampling_rate == 1.0 else f", each record sampled with probability {self.sampling_rate:g}"
        if isinstance(self.certificate, Certificate):
            return f"{self.count} x {self.certificate.in_short}{sampled}"
        return f"{self.count} x {self.certificate.profile}{sampled}, stated without a law"


@dataclass(frozen=True, eq=False)
class Composition:
    """What many releases guarantee together.

    Guarantee: for all neighbours under `adjacency`, all releases together are (epsilon(delta), delta)-differentially
    private, also when a query depends on earlier answers. The certificates, counts and rates must not depend on them;
    where they do, keep a Ledger, whose budget holds then as well. Answers are never below the truth, and within about
    1 % of the best that the certificates allow. Profiles of spherical noise, of sampled discrete noise and of laws from
    outside the package are used down to a delta of 1e-30 per release; where that is not enough, epsilon is infinite.
    Source: dong2022gaussian, Corollary 3.3, without sampling; zhu2022optimal and doroshenko2022connect, Algorithm 1,
        otherwise; mironov2019renyi for method "renyi".
    Deviates: 1. exact curves in place of densities; 2. the tilt; 3. replace with sampling, see `pairs.Pair`.

    Attributes:
        parts: the releases.
        budget: the budget that was asked for, if any.
        document: the JSON that this composition was read from; `verify` compares everything in it.
        released: the name and the SHA-256 of the file with what was computed from the releases, if it was written.
    """

    parts: tuple[Part, ...]
    budget: Budget | None = None
    document: Mapping[str, Any] | None = field(default=None, repr=False)
    released: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not all(isinstance(part, Part) for part in self.parts):
            raise InvalidInput("parts must be of the class Part; an Accountant collects them")
        if not isinstance(self.budget, Budget | None):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta) or None, got {_check.kind(self.budget)}")
        if self.budget is not None:
            self.budget.whole("a composition")
        if len({part.certificate.adjacency for part in self.parts}) > 1:
            raise InvalidInput("parts must share one adjacency: guarantees about different neighbours do not add up")

    @property
    def adjacency(self) -> Adjacency | None:
        """The adjacency of every part; None if there is no part."""
        return self.parts[0].certificate.adjacency if self.parts else None

    @cached_property
    def uses(self) -> Uses:
        """How often each kind of release occurs."""
        counts: Counter[Use] = Counter()
        for part in self.parts:
            counts[part.use] += part.count
        return counts

    def epsilon(self, delta: float, method: str = "auto") -> float:
        """The least epsilon that is proven at this delta.

        Args:
            delta: below 1. At delta = 0 pure epsilons add up; for all other noise the answer is infinite.
            method: "exact" (a closed form: without sampling, a single release, Gaussian noise, or discrete noise of one
                exponent and scale), "pld" (privacy-loss distributions, for all noise), "renyi" (looser; for Gaussian,
                discrete and stated noise), or "auto": "exact" if it applies, else "pld", improved by "renyi" where
                the grid of "pld" has not converged.
        """
        if _check.number("delta", delta) != 0:
            delta = _check.probability("delta", delta)
        return methods.epsilon(self.uses, self.adjacency or ADD_REMOVE, delta, method)

    def delta(self, epsilon: float, method: str = "auto") -> float:
        """The least delta that is proven at this epsilon (0 or above); `method` as for `epsilon`."""
        epsilon = _check.at_least_zero("epsilon", epsilon)
        return methods.delta(self.uses, self.adjacency or ADD_REMOVE, epsilon, method)

    def meets(self, budget: Budget) -> bool:
        """Whether the releases together keep this budget; never true if noise was drawn in unsafe floats."""
        unsafe = any(each.unsafe_floats for each in self._certificates)
        return not unsafe and self.delta(budget.epsilon) <= budget.delta

    @property
    def _certificates(self) -> list[Certificate]:
        return [part.certificate for part in self.parts if isinstance(part.certificate, Certificate)]

    @property
    def _steps(self) -> Steps:
        return methods.merged(self.uses)

    @property
    def closed_form(self) -> bool:
        """Whether the total has a closed form; else privacy-loss distributions are needed."""
        return not self._steps or methods.closed_form(self._steps) is not None

    @property
    def mu(self) -> float | None:
        """The Gaussian differential privacy parameter of the total; None if it is not that of Gaussian noise."""
        if not self._steps:
            return 0.0
        profile = methods.closed_form(self._steps)
        return profile.mu if isinstance(profile, GaussianProfile) else None

    @property
    def float_safe(self) -> bool:
        """Whether the guarantee covers the floating-point numbers that every part released."""
        return len(self._certificates) == len(self.parts) and all(each.float_safe for each in self._certificates)

    # --- JSON ---

    def to_dict(self) -> dict[str, Any]:
        """The composition as a JSON object."""
        return copy.deepcopy(self._written)  # callers must not change the cached one

    @cached_property
    def _written(self) -> dict[str, Any]:
        asked = self.budget or USUAL
        return {
            "matrixdp": KIND,
            "schema": SCHEMA,
            "parts": [_part_document(part, asked) for part in self.parts],
            "budget": encode(self.budget),
            "guarantee": {
                "adjacency": encode(self.adjacency),
                "epsilon": encode(self.epsilon(asked.delta)),
                "at_delta": asked.delta,
                "delta": self.delta(asked.epsilon),
                "at_epsilon": asked.epsilon,
                "keeps_budget": None if self.budget is None else self.meets(self.budget),
                "mu": encode(self.mu),
                "closed_form": self.closed_form,
                "float_safe": self.float_safe,
            },
            "facts": {
                "releases": sum(part.count for part in self.parts),
                "expected_uses_per_record": math.fsum(part.count * part.sampling_rate for part in self.parts),
            },
            **({"released": dict(self.released)} if self.released else {}),
        }

    def to_json(self) -> str:
        """The composition as one self-contained JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Writes the composition to a new file."""
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(saved(self)[0])

    @classmethod
    def from_json(cls, text: str | bytes) -> Composition:
        """Reads what `to_json` wrote; `verify` says whether its numbers are true."""
        return cls.from_dict(parsed(text))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Composition:
        """Reads what `to_dict` gives."""
        if content["matrixdp"] != KIND:
            raise InvalidInput(f'the document is not a composition: its entry "matrixdp" must be "{KIND}"')
        try:
            if not (isinstance(content["parts"], list) and isinstance(content["guarantee"], dict)):
                raise InvalidInput("the composition must have a list of parts and an object with the guarantee")
            parts = tuple(_part_of(part) for part in content["parts"])
            return cls(parts, decode(content["budget"]), content, content.get("released"))
        except FAULTS as reason:
            raise InvalidInput(
                f"the composition lacks an entry, or has one of the wrong kind ({said(reason)})"
            ) from None

    def verify(self) -> Verification:
        """Verifies every part, computes the total again from laws and sets, and compares it with what is stated.

        Returns:
            What was compared; true as a condition if all of it agrees. Remarks name the parts that are only stated,
            and whatever else was not proved.
        """
        stated, computed = self.document or self.to_dict(), []
        compared, findings, remarks = 0, list[Finding](), [_NO_ORIGIN]
        for number, part in enumerate(self.parts):
            certificate = part.certificate
            if not isinstance(certificate, Certificate):
                remarks.append(f"parts[{number}] states a guarantee without a law; it was taken as it stands.")
                computed.append(part)
                continue
            found, place = verified(certificate), f"parts[{number}].certificate"
            compared += found.compared
            findings += [replace(finding, entry=f"{place}.{finding.entry}") for finding in found.findings]
            remarks += [remark for remark in found.remarks if remark not in remarks]
            if found.compared:  # else nothing could be computed from law and set
                computed.append(replace(part, certificate=recomputed(certificate)))
        if len(computed) == len(self.parts):
            differing, more = _compared_totals(stated, computed, self.budget)
            findings, compared = [*findings, *differing], compared + more
        return Verification(compared, tuple(findings), tuple(remarks), "Composition")

    # --- print ---

    def __str__(self) -> str:
        delta = self.budget.delta if self.budget else USUAL.delta
        how = "closed form" if self.closed_form else "privacy-loss distributions"
        said = {each.neighbours for each in self._certificates} if self.float_safe else set()
        words = said.pop() if len(said) == 1 else self.adjacency and self.adjacency.neighbours
        lines = [("adjacency", f"{self.adjacency} ({words})" if self.adjacency else "any")]
        lines += [("" if number else "releases", str(part)) for number, part in enumerate(self.parts)]
        lines += [
            ("guarantee", f"epsilon = {rounded_up(self.epsilon(delta))} at delta = {rounded_up(delta, 6)} ({how})")
        ]
        if self.budget:
            lines += [("asked for", f"{self.budget}: {'kept' if self.meets(self.budget) else 'NOT kept'}")]
        if not self.float_safe:
            lines += [("covers", "the laws of the noise; not, in every part, the floating-point numbers released")]
        return "\n".join(["Privacy of a composition", *(f"  {name:<10} {text}" for name, text in lines)])


def saved(certificate: Certificate | Composition) -> tuple[str, bytes]:
    """The text of a certificate or a composition as saved, and the content of its file of arrays, empty if none."""
    return written(certificate) if isinstance(certificate, Certificate) else (certificate.to_json() + "\n", b"")


def _part_document(part: Part, asked: Budget) -> dict[str, Any]:
    """A part with its certificate; or with its stated guarantee and numbers that follow from it."""
    given = part.certificate
    counted = {"count": part.count, "sampling_rate": part.sampling_rate}
    if isinstance(given, Certificate):
        return {"certificate": given.to_dict(), **counted}
    return {
        "stated": {
            "profile": encode(given.profile),
            "adjacency": encode(given.adjacency),
            "total_variation": given.total_variation,
            "mu": encode(given.mu),
            "epsilon": encode(given.epsilon(asked.delta)),
            "at_delta": asked.delta,
            "delta": given.delta(asked.epsilon),
            "at_epsilon": asked.epsilon,
        },
        **counted,
    }


def _part_of(content: Mapping[str, Any]) -> Part:
    """The part in a document, with the numbers stated there."""
    guarantee: Guarantee
    if "certificate" in content:
        guarantee = certificate_of(content["certificate"])
    else:
        stated = content["stated"]
        guarantee = Guarantee(decode(stated["profile"]), stated["adjacency"], stated["total_variation"])
    return Part(guarantee, content["count"], content["sampling_rate"])


def _compared_totals(
    stated: Mapping[str, Any], parts: list[Part], budget: Budget | None
) -> tuple[tuple[Finding, ...], int]:
    """The differences between a document and these parts, without the certificates, and the number of comparisons."""
    try:
        computed = Composition(tuple(parts), budget)
        fresh = computed.to_dict()
    except (MatrixDPError, *FAULTS) as reason:
        return (Finding("guarantee", None, None, said(reason)),), 1
    total, again = stated["guarantee"], fresh["guarantee"]
    for name in ("epsilon", "delta"):
        numbers = isinstance(total.get(name), float) and isinstance(again[name], float)
        if numbers and not computed.closed_form and math.isclose(total[name], again[name], rel_tol=LOSSES_TOLERANCE):
            again[name] = total[name]
    return compared_documents(_without_certificates(stated), _without_certificates(fresh))


def _without_certificates(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without the certificates of its parts, which are verified by themselves."""
    parts = [{**part, "certificate": {}} if "certificate" in part else part for part in document["parts"]]
    return {**document, "parts": parts}
