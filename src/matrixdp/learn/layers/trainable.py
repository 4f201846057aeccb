"""The trainable part of a model: its layers and parameters, checked."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from matrixdp.errors import InvalidInput
from matrixdp.learn.layers import rule_for
from matrixdp.learn.layers.base import RecordGradients
from matrixdp.learn.layers.normalization import refuse_batch_statistics


class TrainableModel:
    """A model whose trainable parameters have one type and device; their gradients form one vector."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        refuse_batch_statistics(model)
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        kinds = {(p.dtype, p.device) for p in self.names}
        if len(kinds) != 1:
            raise InvalidInput(f"model must have trainable parameters of one type on one device, got {kinds or 'none'}")
        ((self.dtype, self.device),) = kinds
        if not self.dtype.is_floating_point:
            raise InvalidInput(f"model must have floating-point parameters, got {self.dtype}; call model.float()")
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        """The type of norms and gradients per record: float32, or float64 for parameters in float64."""

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """A vector with an entry for each trainable number."""
        return torch.zeros(sum(p.numel() for p in self.names), dtype=dtype, device=self.device)

    def split(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter, and its part of the vector."""
        for parameter, part in zip(self.names, torch.split(flat, [p.numel() for p in self.names]), strict=True):
            yield parameter, part.view(parameter.shape)

    def check_unchanged(self) -> None:
        """Raises InvalidInput if parameters, their type or device, or batch statistics of the model have changed."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if len(trainable) != len(self.names) or not all(p in self.names for p in trainable):
            raise InvalidInput("the model's trainable parameters have changed; make a new ClippedGradients for it")
        if not all(p.device == self.device and p.dtype == self.dtype for p in trainable):
            raise InvalidInput("the model has moved to another device or type; make a new ClippedGradients for it")
        refuse_batch_statistics(self.model)


def trained_layers(model: nn.Module, trained: Container[nn.Parameter]) -> list[Layer] | None:
    """The layers that hold trained parameters; None if one of them has no rule for gradients per record."""
    layers = [
        Layer(name, module, {key: p for key, p in module._parameters.items() if p is not None and p in trained})
        for name, module in model.named_modules()
    ]
    holding = [layer for layer in layers if layer.parameters]
    return holding if all(layer.has_rule() for layer in holding) else None


@dataclass(eq=False, frozen=True)
class Layer:
    """A layer with trainable parameters."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]

    def __str__(self) -> str:
        return f"layer {self.name or '(the model)'} ({type(self.module).__name__})"

    def has_rule(self) -> bool:
        """Whether a rule covers all its parameters; one that PyTorch reparametrizes has another name, and no rule."""
        names = {"weight", "bias"} if type(self.module).__module__.startswith("torch.") else set(self.parameters)
        return rule_for(self.module) is not None and set(self.parameters) <= names

    def freeze(self, *_: object) -> None:
        """Before the layer runs: autograd computes no gradients of its parameters."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)

    def unfreeze(self) -> None:
        """After the layer has run: autograd computes them again, so that any other use is detected."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def gradients(self, inputs: Tensor, gradient: Tensor) -> dict[str, RecordGradients]:
        """What one call of the layer adds to the gradients of its parameters, from the gradient of its output."""
        rule = rule_for(self.module)
        if rule is None:
            raise InvalidInput(f"{self} has changed since it was checked; make a new ClippedGradients for the model")
        return rule(self.module, inputs, gradient, frozenset(self.parameters))

    def check(self, inputs: Tensor, output: Tensor, batch: int) -> None:
        """Raises InvalidInput unless both tensors have one row per record."""
        for word, tensor in (("input", inputs), ("output", output)):
            if not isinstance(tensor, Tensor) or tensor.ndim < 1 or tensor.shape[0] != batch:
                shown = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InvalidInput(
                    f"the {word} of {self} must have a row for each of the {batch} records, got {shown}; keep the "
                    "records in the first dimension (batch_first=True; do not merge other dimensions into it)"
                )
