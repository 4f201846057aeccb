"""What an audit found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

METHODS = {
    "clopper-pearson": "Clopper-Pearson bounds on how often an event occurs; assumes nothing about the mechanism",
    "gaussian": "a chi-square bound on the noise that hides the difference; holds if the noise is Gaussian",
}


@dataclass(frozen=True)
class AuditResult:
    """A claim, and the lower bounds that samples put on the truth.

    Guarantee: if the mechanism keeps the claim, it is condemned with probability at most 1 - confidence; both bounds
    lie at or below the truth with probability at least `confidence`, together. An acquittal proves nothing: these
    samples did not refute the claim.

    Attributes:
        epsilon, delta: the claim.
        epsilon_lower: a lower bound on the least epsilon that holds at the claimed delta.
        delta_lower: a lower bound on the least delta that holds at the claimed epsilon.
        statistic: what the outputs were judged by.
        samples: outputs drawn for each of the two inputs.
        confidence: the probability that the bounds hold.
        method: "clopper-pearson", which assumes nothing, or "gaussian", which assumes Gaussian noise.
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
    def condemned(self) -> bool:
        """Whether the claim is refuted."""
        return self.epsilon_lower > self.epsilon or self.delta_lower > self.delta

    @property
    def verdict(self) -> str:
        """ "condemned" or "acquitted"."""
        return "condemned" if self.condemned else "acquitted"

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "verdict": self.verdict}

    def lines(self) -> list[tuple[str, str]]:
        """What is printed: a word and a text each."""
        meaning = "the claim is false" if self.condemned else "these samples do not refute the claim"
        return [
            ("claim", f"epsilon {self.epsilon:g}, delta {self.delta:g}"),
            ("measured", f"epsilon at least {_down(self.epsilon_lower)} at delta {self.delta:g}"),
            ("", f"delta at least {_down(self.delta_lower)} at epsilon {self.epsilon:g}"),
            ("from", f"{self.samples:,} outputs for each of two neighbours, judged by: {self.statistic}"),
            ("method", METHODS[self.method]),
            ("verdict", f"{self.verdict}: {meaning} (false alarms: at most {1 - self.confidence:.2g})"),
        ]

    def __str__(self) -> str:
        return "\n".join(["Audit", *(f"  {name:<10} {text}" for name, text in self.lines())])


def _down(value: float, digits: int = 4) -> str:
    """A number rounded down to a few digits, for a lower bound must not grow in print."""
    if not 1e-300 < value < math.inf:
        return "0" if value < 1 else f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.floor(value / unit * (1 + 1e-9)) * unit:.{digits}g}"
