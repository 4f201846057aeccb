"""Certificates: what a noise law guarantees on a sensitivity set. Only they, and compositions of them, claim privacy.

A certificate is data: it holds law, set, drawing, query and budget as records, from which anyone can recompute the
guarantee (`verification`). It also says what the guarantee covers: the floating-point numbers that were released, or
only the ideal law of the noise. Noise that was drawn without a proof about its floating-point numbers keeps no budget,
and `check_releasable` and `refuse_unsafe_floats` refuse it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from matrixdp._check import Array, Shape
from matrixdp._rounding import rounded_up
from matrixdp.adjacency import Adjacency
from matrixdp.budget import Budget
from matrixdp.distributions import NoiseLaw
from matrixdp.errors import GuaranteeViolated, InvalidInput, NotApplicable
from matrixdp.privacy.drawing import Drawing, has_safe_sampler
from matrixdp.privacy.guarantee import ROUNDING, GaussianProfile, Guarantee
from matrixdp.privacy.laws import added_law, claim, is_known
from matrixdp.sensitivity import Sensitivity
from matrixdp.sensitivity.entries import checked_set

if TYPE_CHECKING:
    from matrixdp.privacy.verification import Verification

# The budget for which a certificate is written and printed if none was asked for.
USUAL = Budget(1.0, 1e-6)

_UNSAFE = (
    "is not floating-point-safe: its guarantee is that of the ideal law, and which floating-point numbers come out can "
    "reveal the true value, whatever epsilon is"
)
_INSTEAD = "Use the mechanism 'auto', or another with Gaussian noise"


@dataclass(frozen=True, eq=False, kw_only=True)
class Certificate(Guarantee):
    """A guarantee, with everything that it follows from.

    Attributes:
        law: the noise law.
        sensitivity: what a neighbour can change.
        exact: True if a difference in the set attains the profile, False if the profile is a proven upper bound; about
            what `covers` names.
        drawing: how the release was drawn; None for a law that has not been drawn. The guarantee includes the cost of
            drawing: the grid in the profile, the total-variation error of the sampler in delta and epsilon.
        query: the name and the public parameters of the query, if it is known.
        budget: the budget that was asked for, if any.
        released: the name and the SHA-256 of the file with the released value, if it was written.
        remark: anything else that a reader should know, such as what was tested and not proved.

    Example:
        >>> from matrixdp import Budget, Certificate, Counts, release
        >>> certificate = release([12, 3], Counts(1), Budget(1.0, 1e-6)).certificate
        >>> bool(Certificate.from_json(certificate.to_json()).verify())
        True
    """

    law: NoiseLaw
    sensitivity: Sensitivity
    exact: bool
    drawing: Drawing | None = None
    query: Mapping[str, Any] | None = None
    budget: Budget | None = None
    released: Mapping[str, str] | None = None
    remark: str = ""
    document: Mapping[str, Any] | None = field(default=None, repr=False)
    """The JSON that this certificate was read from; `verify` compares everything in it."""

    @property
    def shape(self) -> Shape:
        """The shape of the released value."""
        return self.law.shape

    @property
    def source(self) -> str:
        """Who proposed the noise."""
        return "; ".join(part for part in (self.law.source, self.law.note, self.remark) if part)

    @cached_property
    def witness(self) -> Array:
        """A worst-case difference in the set; it attains mu when the certificate is exact."""
        return claim(self.law, self.sensitivity).witness()

    @property
    def float_safe(self) -> bool:
        """Whether the guarantee covers the floating-point numbers that were released."""
        return self.drawing is not None and self.drawing.float_safe

    @property
    def unsafe_floats(self) -> bool:
        """Whether the noise was drawn in floating point, from secure entropy, without a proof about the numbers."""
        return self.drawing is not None and not self.drawing.float_safe and not self.drawing.reproducible

    @property
    def covers(self) -> str:
        """What the guarantee is about, in words: the floating-point numbers released, or only the ideal law."""
        if self.float_safe:
            return "the floating-point numbers released"
        if self.drawing is None:
            unsafe = "the ideal law only; no floating-point-safe sampler is known for it"
            return unsafe if self._covers_law_only else "the law of the noise, which has not been drawn"
        if self.drawing.reproducible:
            return "the ideal law only; seeded noise is not private"
        return "the ideal law only, not the floating-point numbers released"

    @property
    def unit(self) -> str | None:
        """The column of ids, such as users, that are protected with all of their rows; None for single records."""
        found: str | None = ((self.query or {}).get("parameters") or {}).get("unit")
        return found

    @property
    def neighbours(self) -> str:
        """How neighbouring data sets differ, in words: by one record, or by all rows of one unit."""
        words = self.adjacency.neighbours
        return words if self.unit is None else words.replace("one record", f"all rows of one {self.unit}")

    @property
    def standard_error_range(self) -> tuple[float, float] | None:
        """The least and the largest standard deviation of the noise in an entry, as drawn; None if not known."""
        factor = 1.0 if self.drawing is None else math.sqrt(self.drawing.variance_factor)
        try:
            least, largest = self.law.standard_error_range
        except NotApplicable:  # a law from outside the package that does not define it
            return None
        return factor * least, factor * largest

    def meets(self, budget: Budget) -> bool:
        """Whether the release, or a law that has not been drawn, keeps this budget; never true of unsafe floats."""
        return not self.unsafe_floats and super().meets(budget)

    # --- JSON ---

    def to_dict(self) -> dict[str, Any]:
        """The certificate as a JSON object; docs/certificates.md describes every field."""
        from matrixdp.privacy.verification import document_of

        return document_of(self)

    def to_json(self) -> str:
        """The certificate as one self-contained JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Certificate:
        """Reads what `to_json` wrote; `verify` says whether its numbers are true."""
        from matrixdp.privacy.verification import certificate_of, parsed

        return certificate_of(parsed(text))

    def save(self, path: str | Path) -> None:
        """Writes the certificate to a new file; large arrays go to PATH.npz beside it, bound by their SHA-256."""
        from matrixdp.privacy.verification import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Certificate:
        """Reads what `save` wrote."""
        from matrixdp.privacy.verification import load

        return load(Path(path))

    def verify(self) -> Verification:
        """Recomputes everything from law and set, and compares it with what the certificate says.

        Returns:
            What was compared; true as a condition if all of it agrees. That proves that the numbers follow from law and
            set, not who wrote them.
        """
        from matrixdp.privacy.verification import verified

        return verified(self)

    # --- print ---

    @property
    def _covers_law_only(self) -> bool:
        """Whether the guarantee does not cover the numbers released, or would not if the law were drawn."""
        if self.drawing is None:
            return self.mu is None and not has_safe_sampler(self.law, None)
        return not self.drawing.float_safe

    def _tightness(self) -> str:
        tight = "exact" if self.exact else "an upper bound"
        if self._covers_law_only:
            return f"{tight} for the ideal law only"
        return f"{tight}, grid included" if self.exact and self.drawing and self.drawing.enlargement else tight

    @property
    def in_short(self) -> str:
        """The guarantee in a few words: mu, or delta at the epsilon asked for if the noise is not Gaussian."""
        if self.mu is not None:
            return str(self.profile)
        epsilon = self.budget.epsilon if self.budget else USUAL.epsilon
        return f"delta {rounded_up(self.delta(epsilon))} at epsilon {rounded_up(epsilon, 6)}"

    def _printed(self, epsilon: float) -> str:
        """An epsilon rounded up; with more digits if four would make it look larger than the one asked for."""
        short = rounded_up(epsilon)
        kept = self.budget is not None and epsilon * (1 - 1e-9) <= self.budget.epsilon < float(short)
        return rounded_up(epsilon, 6) if kept else short

    def __str__(self) -> str:
        delta = self.budget.delta if self.budget else USUAL.delta
        pure = "" if delta else ", pure differential privacy"
        added, bars = added_law(self.law), self.standard_error_range
        lines = [
            ("adjacency", f"{self.adjacency} ({self.neighbours})"),
            ("change", str(self.sensitivity)),
            ("guarantee", f"{self.in_short} ({self._tightness()})"),
            ("", f"epsilon = {self._printed(self.epsilon(delta))} at delta = {rounded_up(delta, 6)}{pure}"),
            *([("asked for", str(self.budget))] if self.budget else []),
            *([("covers", self.covers)] if self._covers_law_only else []),
            *([("proved by", f"the author of {added.kind}; matrixdp does not vouch for it")] if added else []),
            ("noise", f"{self.law.describe()}, on {' x '.join(map(str, self.shape)) or 'one number'}"),
            *([("std error", between(*bars))] if bars else []),
            ("source", self.source),
            *([("drawn with", str(self.drawing))] if self.drawing else []),
        ]
        return "\n".join(["Privacy certificate", *(f"  {name:<10} {text}" for name, text in lines)])


def between(least: float, largest: float) -> str:
    """A range of standard errors in words, or one number if all entries have the same."""
    low, high = f"{least:.6g}", f"{largest:.6g}"
    return f"{low} in every entry" if low == high else f"{low} to {high}, by entry"


def certify(
    noise: NoiseLaw,
    sensitivity: Sensitivity,
    budget: Budget | None = None,
    drawing: Drawing | None = None,
    *,
    query: Mapping[str, Any] | None = None,
    remark: str = "",
) -> Certificate:
    """Computes what a noise law guarantees on a sensitivity set.

    Guarantee: for every pair of neighbours whose values differ by a member of the set, and every epsilon, the release
    `value + noise` is (epsilon, certificate.delta(epsilon))-differentially private. `Certificate.covers` says whether
    that is about the floating-point numbers released, or about noise drawn exactly from the law.

    Args:
        noise: the law that the noise is drawn from.
        sensitivity: what a neighbour can change.
        budget: the budget that was asked for; it changes how the certificate prints, not what it guarantees.
        drawing: how the noise is drawn, for the certificate of a release.
        query: the name and the public parameters of the query.
        remark: anything else that a reader should know.

    Source: yang2021improved, Lemma 1 and Theorem 2; balle2018improving, Theorem 5.

    Raises:
        NotCertifiable: if the noise cannot hide some difference in the set at all.

    Example:
        >>> from matrixdp import Budget, Frobenius, calibrate, certify
        >>> noise = calibrate("classic", shape=(6, 8), sensitivity=Frobenius(1.0), budget=Budget(0.5, 1e-6))
        >>> certify(noise, Frobenius(1.0)).delta(0.5) < 1e-8
        True
    """
    if not is_known(noise):
        raise InvalidInput(f"noise must be a noise law, got {type(noise).__name__}; calibrate() makes one")
    checked_set("sensitivity", sensitivity).fits(noise.shape)
    found = claim(noise, sensitivity)
    undrawn = Certificate(
        profile=found.profile,
        adjacency=cast(Adjacency, sensitivity.adjacency),  # a Guarantee checks it
        law=noise,
        sensitivity=sensitivity,
        exact=found.exact,
        query=query,
        budget=budget,
        remark=remark,
    )
    return undrawn if drawing is None else drawn(undrawn, drawing)


def drawn(certificate: Certificate, drawing: Drawing) -> Certificate:
    """The certificate of a release that is drawn this way, from the certificate of its law."""
    profile = certificate.profile
    if isinstance(profile, GaussianProfile):
        profile = GaussianProfile((profile.mu + drawing.enlargement) * (1 + ROUNDING))
    return replace(certificate, profile=profile, total_variation=drawing.total_variation, drawing=drawing)


def check_releasable(
    certificate: Certificate, budget: Budget, *, refuted: bool = False, accept_violation: bool = False
) -> None:
    """Raises GuaranteeViolated unless the noise keeps the budget, or the caller accepts that it does not.

    Args:
        certificate: the certificate of the noise as it will be drawn.
        budget: the guarantee to keep.
        refuted: whether the theorem behind the noise is false; the noise is then refused even if it keeps the budget.
        accept_violation: only True accepts noise without the guarantee.
    """
    if accept_violation is True or (certificate.meets(budget) and not refuted):
        return
    if certificate.unsafe_floats and not refuted:
        reason = _UNSAFE
    else:
        delta, bound = certificate.delta(budget.epsilon), "" if certificate.exact else " (an upper bound)"
        reason = f"does not keep {budget}"
        if refuted:
            holds = ", although this noise happens to keep the budget" if delta <= budget.delta else ""
            reason = f"rests on a theorem that is false{holds}"
        reason += f": at epsilon {budget.epsilon:g} its delta is {rounded_up(delta, 3)}{bound}"
    raise GuaranteeViolated(
        f"{certificate.source} {reason}; nothing was released. {_INSTEAD}; in Python, accept_violation=True releases "
        "without the guarantee"
    )


def refuse_unsafe_floats(certificate: Guarantee, what: str) -> None:
    """Raises GuaranteeViolated for noise drawn in floating point without a proof about the numbers that come out.

    A law that has not been drawn passes, and so does seeded noise, whose certificate says that it is reproducible.

    Args:
        certificate: the certificate of the noise; a stated guarantee passes.
        what: what is refused, for the message.

    Source: mironov2012significance.
    """
    if isinstance(certificate, Certificate) and certificate.unsafe_floats:
        raise GuaranteeViolated(f"{what} refused: the noise of {certificate.source} {_UNSAFE}. {_INSTEAD}")
