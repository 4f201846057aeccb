"""The result of an audit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from matrixdp._rounding import rounded_down

METHODS = {
    "clopper-pearson": "Clopper-Pearson bounds on how often an event occurs; assumes nothing about the mechanism",
    "gaussian": "a chi-square bound on the noise that hides the difference; holds if the noise is Gaussian",
}


@dataclass(frozen=True)
class AuditResult:
    """A claim, and the lower bounds that samples put on the truth.

    Guarantee: a true claim is rejected with probability at most 1 - confidence; with probability at least `confidence`,
    neither bound is above the truth. With the method "gaussian", only if the noise is Gaussian. A claim that is not
    rejected is not proven: these samples did not refute it.

    Attributes:
        epsilon, delta: the claim.
        epsilon_lower: a lower bound on the least epsilon that holds at the claimed delta.
        delta_lower: a lower bound on the least delta that holds at the claimed epsilon.
        statistic: the statistic by which the outputs were judged.
        samples: the number of outputs for each of the two inputs.
        confidence: the probability with which the bounds hold, at least.
        method: "clopper-pearson", which assumes nothing, or "gaussian", which assumes Gaussian noise.

    Example:
        >>> import numpy as np
        >>> from matrixdp.audit import audit_scores
        >>> rng = np.random.default_rng(0)
        >>> result = audit_scores(rng.normal(0, 1, 2000), rng.normal(4, 1, 2000), 1.0, 1e-5)
        >>> result.verdict, result.epsilon_lower > 1
        ('rejected', True)
    """

    epsilon: float
    delta: float
    epsilon_lower: float
    delta_lower: float
    statistic: str
    samples: int
    confidence: float
    method: str

    @property
    def rejected(self) -> bool:
        """Whether the claim is rejected."""
        return self.epsilon_lower > self.epsilon or self.delta_lower > self.delta

    @property
    def verdict(self) -> str:
        """ "rejected" or "not rejected"."""
        return "rejected" if self.rejected else "not rejected"

    def to_dict(self) -> dict[str, Any]:
        """All fields and the verdict, for JSON."""
        return {**asdict(self), "verdict": self.verdict}

    def lines(self) -> list[tuple[str, str]]:
        """The printed lines, as pairs of label and text."""
        meaning = "the claim is false" if self.rejected else "these samples do not refute the claim"
        return [
            ("claim", f"epsilon {self.epsilon:g}, delta {self.delta:g}"),
            ("measured", f"epsilon at least {rounded_down(self.epsilon_lower)} at delta {self.delta:g}"),
            ("", f"delta at least {rounded_down(self.delta_lower)} at epsilon {self.epsilon:g}"),
            ("from", f"{self.samples:,} outputs for each of two neighbours, judged by: {self.statistic}"),
            ("method", METHODS[self.method]),
            ("verdict", f"{self.verdict}: {meaning} (false alarms: at most {1 - self.confidence:.2g})"),
        ]

    def __str__(self) -> str:
        return "\n".join(["Audit", *(f"  {name:<10} {text}" for name, text in self.lines())])
