"""What a release may spend."""

from dataclasses import dataclass

from matrixdp import _check
from matrixdp.errors import InvalidInput


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) budget, with epsilon above 0, and delta from 0 and below 1.

    delta = 0 is pure differential privacy. Discrete Laplace noise keeps it ("laplace"); Gaussian noise cannot.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _check.positive("epsilon", self.epsilon))
        if not 0 <= _check.number("delta", self.delta) < 1:
            raise InvalidInput(
                f"delta must be 0 (pure differential privacy) or above, and below 1, got {_check.shown(self.delta)}; "
                "1e-6 is a common choice"
            )
        object.__setattr__(self, "delta", abs(float(self.delta)))  # -0.0 is 0

    def with_delta(self, what: str) -> "Budget":
        """The budget itself, if its delta is above 0.

        Args:
            what: what needs that, for the message.

        Raises:
            InvalidInput: if delta is 0.
        """
        if not self.delta > 0:
            raise InvalidInput(
                f"{what} needs a budget with delta above 0, got {self}: delta = 0 is kept by single releases of "
                "discrete Laplace noise, mechanism 'laplace'"
            )
        return self

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g}, delta {self.delta:g}"
