"""The rule of each layer: from its input and the gradient of its output to a piece for each of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from matrixdp.learn.patches import Patches
from matrixdp.learn.pieces import Lookup, Piece, Samples, Tokens

Rule = Callable[[Any, Tensor, Tensor, frozenset[str]], dict[str, Piece]]
"""(layer, input, gradient of the output, names of the trainable parameters) -> one piece a parameter."""


def _linear(layer: nn.Linear, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, Piece]:
    inputs, outputs = (t.reshape(t.shape[0], math.prod(t.shape[1:-1]), t.shape[-1]) for t in (inputs, outputs))
    pieces: dict[str, Piece] = {}
    if "weight" in names:
        pieces["weight"] = Tokens(inputs, outputs)
    if "bias" in names:
        pieces["bias"] = Samples(outputs.squeeze(1) if outputs.shape[1] == 1 else outputs.sum(1))
    return pieces


def _convolution(layer: Any, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, Piece]:
    pieces: dict[str, Piece] = {}
    if "weight" in names:
        pieces["weight"] = Patches(layer, inputs, outputs)
    if "bias" in names:
        pieces["bias"] = Samples(outputs.flatten(2).sum(2))
    return pieces


def _embedding(layer: nn.Embedding, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, Piece]:
    indices = inputs.reshape(inputs.shape[0], -1).long()
    outputs = outputs.reshape(*indices.shape, -1)
    if layer.padding_idx is not None:
        outputs = outputs.masked_fill((indices == layer.padding_idx).unsqueeze(-1), 0.0)
    return {"weight": Lookup(indices, outputs, layer.num_embeddings)} if "weight" in names else {}


def _last_dimensions(layer: Any, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, Piece]:
    """Layer and RMS norms: a weight for each entry of the last dimensions."""
    dimensions = tuple(range(1, inputs.ndim - len(layer.normalized_shape)))
    pieces: dict[str, Piece] = {}

    def total(values: Tensor) -> Tensor:
        return values.sum(dimensions) if dimensions else values

    if "weight" in names:
        normalise = functional.layer_norm if isinstance(layer, nn.LayerNorm) else functional.rms_norm
        pieces["weight"] = Samples(total(normalise(inputs, layer.normalized_shape, eps=layer.eps) * outputs))
    if "bias" in names:
        pieces["bias"] = Samples(total(outputs))
    return pieces


def _moments(inputs: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of each group of an input of one record, both (1, groups)."""
    if inputs.is_cuda:
        return _moments_in_one_pass(inputs, groups, eps)
    size = *inputs.shape, groups
    _, mean, scale = torch.ops.aten.native_group_norm(inputs, None, None, *size, eps)
    return mean, scale


def _moments_in_one_pass(inputs: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """The same without writing the normalised input, which takes most of the time except on a CPU."""
    variance, mean = torch.var_mean(inputs.view(1, groups, -1), 2, correction=0)
    return mean, variance.add_(eps).rsqrt_()


def _channels(layer: Any, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, Piece]:
    """Group and instance norms: a weight for each channel.

    PyTorch sums their gradients over the batch; so the batch is taken as one record with batch x channels channels.
    """
    batch, channels = inputs.shape[:2]
    inputs, outputs = inputs.reshape(1, batch * channels, -1), outputs.reshape(1, batch * channels, -1)
    groups = batch * (layer.num_groups if isinstance(layer, nn.GroupNorm) else channels)
    size = 1, batch * channels, inputs.shape[2], groups
    mean, scale = _moments(inputs, groups, layer.eps)
    ones, wanted = inputs.new_ones(batch * channels), [False, "weight" in names, "bias" in names]
    found = torch.ops.aten.native_group_norm_backward(outputs, inputs, mean, scale, ones, *size, wanted)
    by_name = zip(("weight", "bias"), found[1:], strict=True)
    return {name: Samples(gradient.view(batch, channels)) for name, gradient in by_name if name in names}


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    nn.Embedding: _embedding,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _last_dimensions),
    **dict.fromkeys((nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _channels),
}


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule for a layer of exactly this type (a subclass may compute something else), or None.

    Opacus's own rules serve the layers that it adds and those that users registered with it.
    """
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
        return _linear
    sampler = GradSampleModule.GRAD_SAMPLERS.get(kind)
    return None if sampler is None else _opacus_rule(sampler)


def _opacus_rule(sampler: Callable[..., dict[nn.Parameter, Tensor]]) -> Rule:
    def rule(layer: nn.Module, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, Piece]:
        samples = sampler(layer, [inputs], outputs)
        return {name: Samples(samples[layer.get_parameter(name)]) for name in names}

    return rule
