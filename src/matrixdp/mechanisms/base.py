"""A mechanism: a recipe that proposes a noise law, and claims nothing about privacy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Covariance
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.privacy import gaussian
from matrixdp.privacy.suprema import supremum
from matrixdp.sensitivity import Sensitivity

# Tight recipes inflate the noise by this factor, because the certificate rounds mu up.
HEADROOM = 1 + 4e-12


@dataclass(frozen=True)
class Recipe:
    """A named mechanism.

    Attributes:
        name: how users ask for it.
        source: the paper and the theorem it follows.
        propose: (shape, sensitivity, budget, **options) -> noise law; raises NotApplicable where no theorem covers it.
        slow: takes seconds, so "auto" and a comparison of all mechanisms leave it out unless it is asked for by name.
        refuted: its theorem is false; `release` refuses it even where its noise happens to suffice.
        pure: it can keep a budget with delta = 0.

    Example:
        >>> from matrixdp.mechanisms import RECIPES
        >>> RECIPES["analytic"].source, RECIPES["r1smg"].refuted
        ('balle2018improving, Theorem 8', True)
    """

    name: str
    source: str
    propose: Callable[..., NoiseLaw]
    slow: bool = False
    refuted: bool = False
    pure: bool = False

    @cached_property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The options that the recipe takes, by name."""
        parameters = inspect.signature(self.propose).parameters
        return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def missing(self, options: Mapping[str, Any]) -> list[str]:
        """The names of required options that were not given."""
        return [name for name, p in self.options.items() if p.default is p.empty and name not in options]

    def known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The given options that the recipe takes."""
        return {name: value for name, value in options.items() if name in self.options}

    def calibrate(self, shape: Shape, sensitivity: Sensitivity, budget: Budget, **options: Any) -> NoiseLaw:
        """The noise that the recipe proposes."""
        for name in options:
            if name not in self.options:
                known = ", ".join(self.options) or "none"
                raise InvalidInput(f"{self.name} has no option {name!r}; its options: {known}")
        for name in self.missing(options):
            raise InvalidInput(f"{self.name} needs the option {name!r}: {_summary(self.propose, name)}")
        if budget.delta == 0 and not self.pure:
            raise NotApplicable(
                f"{self.name} is not for delta = 0, pure differential privacy; use 'laplace', or a delta above 0"
            )
        return self.propose(shape, sensitivity, budget, **options).attributed_to(f"{self.name} [{self.source}]")


def recipe(
    name: str, *, source: str, slow: bool = False, refuted: bool = False, pure: bool = False
) -> Callable[[Callable[..., NoiseLaw]], Recipe]:
    """A decorator that turns a function into a Recipe; the arguments are the attributes of `Recipe`.

    Example:
        >>> from matrixdp import Budget, Frobenius, calibrate
        >>> from matrixdp.mechanisms import recipe
        >>> @recipe("cautious", source="an example: half the epsilon")
        ... def cautious(shape, sensitivity, budget):
        ...     half = Budget(budget.epsilon / 2, budget.delta)
        ...     return calibrate("analytic", shape=shape, sensitivity=sensitivity, budget=half)
        ...
        >>> cautious.calibrate((3,), Frobenius(1.0), Budget(1.0, 1e-6)).describe()
        'i.i.d. Gaussian, std 8.05762'
    """
    return lambda propose: Recipe(name, source, propose, slow, refuted, pure)


def sized(covariance: Covariance, sensitivity: Sensitivity, budget: Budget, note: str = "") -> Gaussian:
    """Gaussian noise with this covariance, scaled so that it just keeps the budget."""
    mu = supremum(sensitivity, covariance).mu * (1 + covariance.slack)
    bound = float(gaussian.mu(budget.epsilon, budget.delta))
    return Gaussian(covariance.scaled(mu / bound * HEADROOM), note=note)


def _summary(function: Callable[..., Any], argument: str) -> str:
    """The description of an argument in a docstring's Args section, on one line."""
    lines = (inspect.getdoc(function) or "").splitlines()
    for place, line in enumerate(lines):
        name, colon, text = line.strip().partition(":")
        if colon and name == argument:
            depth = len(line) - len(line.lstrip())
            ends = (n for n, other in enumerate(lines) if n > place and not other.startswith(" " * (depth + 1)))
            return " ".join([text.strip(), *map(str.strip, lines[place + 1 : next(ends, None)])])
    return "see its documentation"
