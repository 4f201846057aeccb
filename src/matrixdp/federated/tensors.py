"""Networks and records as tensors: trainable parameters as one vector, and checked inputs and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.layers.normalization import refuse_batch_statistics


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained and sent; frozen ones keep their initial values."""
    return [p for p in model.parameters() if p.requires_grad]


def flat(model: nn.Module) -> Tensor:
    """A copy of the trainable parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in trainable(model)]).clone()


def load(model: nn.Module, vector: Tensor) -> None:
    """Writes a vector into the trainable parameters."""
    parameters = trainable(model)
    size = sum(p.numel() for p in parameters)
    if vector.shape != (size,):
        raise InvalidInput(
            f"the vector must have the {size} trainable parameters of the model, got shape {tuple(vector.shape)}; "
            "server and clients must build the same model"
        )
    with torch.no_grad():
        for parameter, part in zip(parameters, torch.split(vector, [p.numel() for p in parameters]), strict=True):
            parameter.copy_(part.reshape(parameter.shape))


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters."""
    return next(model.parameters()).device


def check_model(model: nn.Module) -> None:
    """Raises InvalidInput unless the trainable parameters, which are all that is sent, determine the model."""
    if not trainable(model):
        raise InvalidInput("the model has no trainable parameters")
    refuse_batch_statistics(model, "updates")
    if any(p.dtype != torch.float32 for p in trainable(model)):
        raise InvalidInput("the model must be in single precision (float32); use model.float()")


def checked(name: str, values: Any, device: torch.device) -> Tensor:
    """Inputs or labels as a tensor on a device: not empty, finite, and in single precision if they are real numbers."""
    with _check.withheld(f"reading {name} as a tensor"):
        tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    if not (tensor.ndim > 0 and len(tensor) > 0):
        raise InvalidInput(f"{name} must have one entry per record, and at least one record")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise InvalidInput(f"{name} must be finite; drop or fill the records that are not")
    return tensor.to(device)


def checked_records(inputs: Any, labels: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """The checked records and labels of a client, of equal length."""
    x, y = checked("inputs", inputs, device), checked("labels", labels, device)
    if len(x) != len(y):
        raise InvalidInput(f"inputs and labels must be of equal length, got {len(x)} and {len(y)}")
    return x, y
