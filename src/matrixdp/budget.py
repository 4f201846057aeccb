"""What a release may spend, and how a budget is divided among several."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from matrixdp import _check
from matrixdp._rounding import rounded_up
from matrixdp.errors import InvalidInput

# Each named part is this much smaller, so that rounding cannot make the parts add up to more than the whole.
_ROUNDING = 2.0**-48


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) budget, with epsilon above 0, and delta at least 0 and below 1.

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
        object.__setattr__(self, "delta", _check.delta(self.delta))

    def whole(self, what: str) -> Budget:
        """The budget itself; a part of a plan raises InvalidInput, whose message says that `what` needs a whole one."""
        return self

    def with_delta(self, what: str) -> Budget:
        """The budget itself, if it is a whole one and its delta is above 0.

        Args:
            what: what needs such a budget, for the message.

        Raises:
            InvalidInput: if delta is 0, or the budget is a part of a plan.
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
            weights: how much the squared error of each release counts; equally by default.
            shapes: the shape of each released value, or None where it is not known yet. With a shape the errors of all
                entries are added up, and the noise may differ from entry to entry. Without one, only the error of one
                entry counts.

        Returns:
            A plan with one part per set: `release(value, set, plan[i], ledger=ledger)`. A ledger ensures that each part
            is used once.
        """
        return _planners["plan"](self, sets, weights, shapes)

    def shared(self, releases: int, like: Any = None) -> Any:
        """A budget for each of several releases that share this one; see `matrixdp.planning.Shared`.

        Args:
            releases: how many there are at most; only a ledger counts them.
            like: the sensitivity set of a typical release, for which the noise is optimized. The privacy profile of
                every release must lie below that of this noise at every epsilon. Without it, the noise is Gaussian. For
                delta = 0, each release gets an equal share of epsilon, whatever its set; `like` only gives the
                adjacency.
        """
        return _planners["shared"](self, releases, like)

    def split(self, **weights: float) -> dict[str, Budget]:
        """Named parts of the budget, each a Budget, in proportion to the weights.

        Guarantee: releases that each keep their part together keep the whole budget: epsilons and deltas add up.
        """
        if not weights:
            raise InvalidInput("split needs the names and weights of its parts, such as tables=3, model=1")
        sizes = {name: _check.positive(name, weight) for name, weight in weights.items()}
        whole = math.fsum(sizes.values()) * (1.0 + _ROUNDING)
        return {name: Budget(self.epsilon * (w / whole), self.delta * (w / whole)) for name, w in sizes.items()}

    def __str__(self) -> str:
        return f"epsilon {rounded_up(self.epsilon, 6)}, delta {rounded_up(self.delta, 6)}"


def checked_budget(budget: Any) -> Budget:
    """The budget; raises InvalidInput for anything else, such as a number."""
    if not isinstance(budget, Budget):
        raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {_check.kind(budget)}")
    return budget


class Allotment(Budget):
    """A budget for one of several releases that were planned together; it fixes the noise of that release.

    Its epsilon and delta are the guarantee of that release alone. They do not say what all releases guarantee together,
    so no other noise may be sized for them.
    """

    @property
    def alone(self) -> Budget:
        """The epsilon and delta of one release."""
        return Budget(self.epsilon, self.delta)

    def whole(self, what: str) -> NoReturn:
        """Raises InvalidInput: a part of a plan is not a whole budget."""
        raise InvalidInput(f"{what} needs a whole budget, not a part of a plan, got {self}")

    def split(self, **weights: float) -> NoReturn:
        """Raises InvalidInput: no other noise may be sized for a part of a plan."""
        raise InvalidInput("a part of a plan has its noise and cannot be split; split the whole budget before planning")

    @abstractmethod
    def law(self, shape: tuple[int, ...], sensitivity: Any) -> Any:
        """The noise law of a release; raises InvalidInput if the plan has none for it."""

    @abstractmethod
    def check(self, certificate: Any) -> None:
        """Raises InvalidInput unless the certificate of a release is within what was planned."""

    @abstractmethod
    def terms(self) -> Mapping[str, Any]:
        """What a ledger needs to know of the plan, as keyword arguments of `Ledger.spend`."""


# Registered by the package, since planning imports mechanisms and accountants, which import this module.
_planners: dict[str, Callable[..., Any]] = {}


def register_planners(**planners: Callable[..., Any]) -> None:
    """Sets the functions behind `Budget.plan` and `Budget.shared`."""
    _planners.update(planners)
