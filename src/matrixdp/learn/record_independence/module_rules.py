"""Rules for PyTorch's own layers and losses, which are single nodes in a graph; see `rules`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from matrixdp.learn.record_independence.rules import Batched, Rule, class_loss, inner, loss, module, padded, require


def _only(*args: Any, **kwargs: Any) -> Batched:
    require(len(args) == 1 and isinstance(args[0], Batched) and not kwargs, "takes more than one batched argument")
    found: Batched = args[0]
    return found


@module(
    nn.Identity, nn.GroupNorm, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Softplus, nn.Softsign, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
    nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.AlphaDropout, nn.FeatureAlphaDropout, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d,
    nn.MaxPool3d, nn.LPPool1d, nn.LPPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample, nn.PixelShuffle, nn.Flatten,
)  # fmt: skip
def row_by_row(_: Any, *args: Any, **kwargs: Any) -> None:
    """PyTorch's layers that treat each row separately, or (nn.Flatten) whose result shows if they do not."""
    _only(*args, **kwargs)


@module(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ReflectionPad1d,
        nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d)  # fmt: skip
def padding(layer: Any, *args: Any, **kwargs: Any) -> None:
    """As `padded`: with a negative number on one side, padding along the records would move them."""
    padded(_only(*args, **kwargs), layer.padding)


@module(nn.Linear)
def linear_module(_: Any, *args: Any, **kwargs: Any) -> None:
    """At least a dimension for the records and one for the features."""
    require(_only(*args, **kwargs).meta.ndim >= 2, "has no dimension for records")


@module(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Without a dimension for records, the first would be that of the channels."""
    require(_only(*args, **kwargs).meta.ndim == layer.weight.ndim, "has no dimension for records")


@module(nn.LayerNorm, nn.RMSNorm)
def normalizing(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Over the last dimensions, fewer than all."""
    require(len(layer.normalized_shape) < _only(*args, **kwargs).meta.ndim, "normalizes over the records")


@module(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)
def softmax(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Not along the records, nor along PyTorch's implicit dimension."""
    inner(layer.dim, _only(*args, **kwargs).meta.ndim)


@module(nn.Embedding)
def embedding(layer: nn.Embedding, *args: Any, **kwargs: Any) -> None:
    """A constant table."""
    _only(*args, **kwargs)
    require(layer.max_norm is None, "writes into its table; leave out max_norm")
    require(not layer.scale_grad_by_freq, "mixes the records of a batch; leave out scale_grad_by_freq")


@module(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(layer: _BatchNorm, *args: Any, **kwargs: Any) -> None:
    """Frozen: in evaluation mode, with running statistics, which are then constants."""
    _only(*args, **kwargs)
    require(not layer.training and layer.running_mean is not None, "normalizes by the batch; use nn.GroupNorm")


@module(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: _InstanceNorm, *args: Any, **kwargs: Any) -> None:
    """Without running statistics that are written into."""
    _only(*args, **kwargs)
    require(not (layer.training and layer.track_running_stats), "writes into its running statistics")


@module(
    nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCELoss,
    nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.SoftMarginLoss, nn.PoissonNLLLoss,
)  # fmt: skip
def loss_module(layer: Any, *args: Any, of: Rule = loss, **kwargs: Any) -> None:
    """As the functions."""
    require(len(args) == 2 and not kwargs, "takes outputs and targets")
    weights = [w for name in ("weight", "pos_weight") if (w := getattr(layer, name, None)) is not None]
    of(*args, *weights, reduction=layer.reduction)


@module(nn.CrossEntropyLoss, nn.NLLLoss)
def class_loss_module(layer: Any, *args: Any, **kwargs: Any) -> None:
    """As the functions."""
    loss_module(layer, *args, of=class_loss, **kwargs)
