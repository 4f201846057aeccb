"""What a release may spend, and how a budget is divided among several."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from matrixdp import _check
from matrixdp.errors import InvalidInput

# Each named part is this much smaller, so that rounding cannot make the parts add up to more than the whole.
_ROUNDING = 2.0**-48


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) budget, with epsilon above 0, and delta from 0 and below 1.

    delta = 0 is pure differential privacy. Discrete Laplace noise keeps it ("laplace"); Gaussian noise cannot.

    Example:
        >>> from matrixdp import Budget
        >>> print(Budget(epsilon=1.0, delta=1e-6))
        epsilon 1, delta 1e-06
        >>> [round(part.epsilon, 3) for part in Budget(1.0, 1e-6).split(tables=3, model=1).values()]
        [0.75, 0.25]
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

    def whole(self, what: str) -> Budget:
        """The budget itself, unless it is a part of a plan; `what` needs that, for the message."""
        return self

    def with_delta(self, what: str) -> Budget:
        """The budget itself, if it is a whole one and its delta is above 0.

        Args:
            what: what needs that, for the message.

        Raises:
            InvalidInput: if delta is 0.
        """
        if not self.whole(what).delta > 0:
            raise InvalidInput(
                f"{what} needs a budget with delta above 0, got {self}: delta = 0 is kept by discrete Laplace noise "
                "alone, mechanism 'laplace'"
            )
        return self

    def plan(self, sets: Sequence[Any], weights: Sequence[float] | None = None, shapes: Any = None) -> Any:
        """Fixes the noise of several releases at once, for the least total error; see `matrixdp.planning.Plan`.

        Args:
            sets: the sensitivity set of each release.
            weights: how much the squared error of each release counts; all alike by default.
            shapes: the shape of each released value, or None where it is not known yet. With a shape the errors of all
                entries are added up, and the noise may differ from entry to entry; without one, one entry counts.

        Returns:
            A plan with one part per set: `release(value, set, plan[i], ledger=ledger)`. A ledger sees to it that each
            part is used once.
        """
        return _planners["plan"](self, sets, weights, shapes)

    def shared(self, releases: int, like: Any = None) -> Any:
        """A budget for each of so many releases that share this one; see `matrixdp.planning.Shared`.

        Args:
            releases: how many there are at most; only a ledger counts them.
            like: the sensitivity set of a typical release, for which the noise is best. Every release must lie under
                that noise at every epsilon. Without it, the noise is Gaussian. For delta = 0, each release has its part
                of epsilon, whatever its set; `like` says the adjacency alone.
        """
        return _planners["shared"](self, releases, like)

    def split(self, **weights: float) -> dict[str, Budget]:
        """Named parts of the budget, each a Budget of its own, in proportion to the weights.

        Guarantee: what keeps each part keeps, together, the whole: epsilons and deltas add up.
        """
        if not weights:
            raise InvalidInput("split needs the names and weights of its parts, such as tables=3, model=1")
        sizes = {name: _check.positive(name, weight) for name, weight in weights.items()}
        whole = math.fsum(sizes.values()) * (1.0 + _ROUNDING)
        return {name: Budget(self.epsilon * (w / whole), self.delta * (w / whole)) for name, w in sizes.items()}

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g}, delta {self.delta:g}"


class Allotment(Budget):
    """A budget for one of several releases that were planned together: it says which noise that release has.

    Its epsilon and delta are what the release has alone. They do not say what it has together with the others, so no
    other noise may be sized for them.
    """

    @property
    def alone(self) -> Budget:
        """The epsilon and delta of one release."""
        return Budget(self.epsilon, self.delta)

    def whole(self, what: str) -> NoReturn:
        """Refused, and so is whatever needs the budget of several releases."""
        raise InvalidInput(f"{what} needs a whole budget, not a part of a plan, got {self}")

    def split(self, **weights: float) -> NoReturn:
        """Refused: other noise may not be sized for a part."""
        raise InvalidInput("a part of a plan has its noise and cannot be split; split the whole budget before planning")

    @abstractmethod
    def law(self, shape: tuple[int, ...], sensitivity: Any) -> Any:
        """The noise law of a release; raises InvalidInput if the plan has none for it."""

    @abstractmethod
    def check(self, certificate: Any) -> None:
        """Raises InvalidInput unless the certificate of a release is within what was planned."""

    @abstractmethod
    def terms(self) -> Mapping[str, Any]:
        """What a ledger has to know, as keyword arguments of `Ledger.spend`."""


# Filled by the package, whose planning lies above mechanisms and accountants.
_planners: dict[str, Callable[..., Any]] = {}


def register_planners(**planners: Callable[..., Any]) -> None:
    """Says what `Budget.plan` and `Budget.shared` do."""
    _planners.update(planners)
