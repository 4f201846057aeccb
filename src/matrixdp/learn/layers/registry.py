"""The rule of each layer: from its input and the gradient of its output to gradients per record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from matrixdp.learn.layers.base import RecordGradients

Rule = Callable[[Any, Tensor, Tensor, frozenset[str]], dict[str, RecordGradients]]
"""(layer, input, gradient of the output, names of the trainable parameters) -> gradients by parameter name."""

_RULES: dict[type[nn.Module], Rule] = {}


def register(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Makes a function the rule of layers of exactly these types (a subclass may compute something else)."""

    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return add


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule for a layer, or None."""
    return _RULES.get(type(layer))
