"""What a release may spend."""

from dataclasses import dataclass

from matrixdp import _check


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) budget, with epsilon above 0 and delta strictly between 0 and 1."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _check.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", _check.probability("delta", self.delta))

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g}, delta {self.delta:g}"
