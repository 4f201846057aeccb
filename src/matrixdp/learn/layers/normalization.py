"""Normalization layers: rules for those that treat each record separately, and a refusal of the others."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from matrixdp.errors import InvalidInput
from matrixdp.learn.layers.base import ExplicitGradients, RecordGradients, cuda_kernels
from matrixdp.learn.layers.registry import register

Use = Literal["gradients", "evaluation", "updates"]


def refuse_batch_statistics(network: nn.Module, use: Use = "gradients") -> None:
    """Raises InvalidInput for layers that keep or mix values of records, depending on the network's use.

    Batch normalization uses statistics of the batch in training mode, and without running statistics in evaluation mode
    too. Running statistics, which instance normalization may also keep, are buffers, not parameters.

        use                                               statistics of the batch        running statistics
        gradients    gradients per record                 refused: they mix records      allowed in evaluation mode
        evaluation   a network in evaluation mode         refused: they mix records      allowed: they are constants
        updates      what a client sends as a whole       allowed: all are its own       refused: they are not sent

    An embedding with `max_norm` writes into the rows of its table that a record looks up, without noise. It is refused
    too, except for updates.
    """
    for name, module in network.named_modules():
        batch, running = isinstance(module, _BatchNorm), bool(getattr(module, "track_running_stats", False))
        if not (batch or running or isinstance(module, (nn.Embedding, nn.EmbeddingBag))):
            continue
        layer = f"layer {name or '(the model)'} ({type(module).__name__})"
        frozen = not module.training and running
        if use == "gradients" and (batch or running) and not frozen:
            raise InvalidInput(
                f"{layer} mixes the records of a batch; use nn.GroupNorm instead "
                "(opacus.validators.ModuleValidator.fix(model) replaces it), or freeze it in evaluation mode"
            )
        if use != "updates" and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise InvalidInput(f"{layer} changes its table when it looks up records; leave out max_norm")
        if use == "evaluation" and batch and module.running_mean is None:
            raise InvalidInput(
                f"{layer} has no running statistics and normalizes by the batch; the network must not mix records: "
                "use nn.GroupNorm instead"
            )
        if use == "updates" and running:
            raise InvalidInput(
                f"{layer} has running statistics, which are not parameters and are not sent; use nn.GroupNorm or "
                "nn.LayerNorm, or track_running_stats=False"
            )


@register(nn.LayerNorm, nn.RMSNorm)
def last_dimensions(layer: Any, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, RecordGradients]:
    """The rule for a weight per entry of the last dimensions."""
    dimensions = tuple(range(1, inputs.ndim - len(layer.normalized_shape)))
    found: dict[str, RecordGradients] = {}

    def total(values: Tensor) -> Tensor:
        return values.sum(dimensions) if dimensions else values

    if "weight" in names:
        normalize = functional.layer_norm if isinstance(layer, nn.LayerNorm) else functional.rms_norm
        found["weight"] = ExplicitGradients(total(normalize(inputs, layer.normalized_shape, eps=layer.eps) * outputs))
    if "bias" in names:
        found["bias"] = ExplicitGradients(total(outputs))
    return found


@register(nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def channels(layer: Any, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, RecordGradients]:
    """The rule for a weight per channel.

    PyTorch sums these gradients over the batch; so the batch is passed as one record with batch x channels channels.
    """
    batch, channels = inputs.shape[:2]
    groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else channels
    kernels = cuda_kernels(inputs)
    if kernels is not None and (both := kernels.group_gradients(inputs, outputs, groups, layer.eps)) is not None:
        by_name = zip(("weight", "bias"), both, strict=True)
        return {name: ExplicitGradients(gradient) for name, gradient in by_name if name in names}
    inputs, outputs = inputs.reshape(1, batch * channels, -1), outputs.reshape(1, batch * channels, -1)
    groups *= batch
    size = 1, batch * channels, inputs.shape[2], groups
    mean, scale = _moments(inputs, groups, layer.eps)
    ones, wanted = inputs.new_ones(batch * channels), [False, "weight" in names, "bias" in names]
    found = torch.ops.aten.native_group_norm_backward(outputs, inputs, mean, scale, ones, *size, wanted)
    by_name = zip(("weight", "bias"), found[1:], strict=True)
    return {name: ExplicitGradients(gradient.view(batch, channels)) for name, gradient in by_name if name in names}


def _moments(inputs: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of each group of an input of one record, both (1, groups)."""
    if inputs.is_cuda:
        return _moments_in_one_pass(inputs, groups, eps)
    size = *inputs.shape, groups
    _, mean, scale = torch.ops.aten.native_group_norm(inputs, None, None, *size, eps)
    return mean, scale


def _moments_in_one_pass(inputs: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """As `_moments`, without writing the normalized input, which takes most of the time on a GPU."""
    variance, mean = torch.var_mean(inputs.view(1, groups, -1), 2, correction=0)
    return mean, variance.add_(eps).rsqrt_()
