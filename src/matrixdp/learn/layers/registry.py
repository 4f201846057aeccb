"""Which rule serves which layer: from its input and the gradient of its output to gradients per record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from matrixdp.learn.layers.base import ExplicitGradients, RecordGradients

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
    """The rule for a layer, or None; Opacus's rules serve the layers that it adds and those registered with it."""
    kind = type(layer)
    if kind in _RULES:
        return _RULES[kind]
    if kind is nn.EmbeddingBag:  # Opacus's rule counts an index once that a bag holds twice
        return None
    try:
        from opacus.grad_sample import GradSampleModule
        from opacus.layers.dp_rnn import RNNLinear
    except ImportError:
        return None
    if kind is RNNLinear:
        return _RULES[nn.Linear]
    sampler = GradSampleModule.GRAD_SAMPLERS.get(kind)
    return None if sampler is None else _opacus_rule(sampler)


def _opacus_rule(sampler: Callable[..., dict[nn.Parameter, Tensor]]) -> Rule:
    def rule(layer: nn.Module, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, RecordGradients]:
        samples = sampler(layer, [inputs], outputs)
        return {name: ExplicitGradients(samples[layer.get_parameter(name)]) for name in names}

    return rule
