"""The common structure of the networks: features, then a top, and no layer that mixes the records of a batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from torch import nn

Activation = Callable[[], nn.Module]
"""Makes an activation: nn.ReLU, or nn.Tanh, which bounds the features."""

SPLIT = 1
"""Where the papers cut their networks: `network[:SPLIT]` makes the features, `network[SPLIT:]` classifies them."""


def network(features: Iterable[nn.Module], top: Iterable[nn.Module]) -> nn.Sequential:
    """The layers that make the features, then those that classify them, as two named parts."""
    return nn.Sequential(OrderedDict(features=nn.Sequential(*features), top=nn.Sequential(*top)))


def as_tensorflow(model: nn.Sequential) -> nn.Sequential:
    """The model with TensorFlow's default initialisation: Glorot's uniform weights, and biases of zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
