"""One forward and backward pass that gives gradients per record in place of PyTorch's sums over the batch.

While a layer runs, its parameters require no gradients; its input is kept, and a hook takes the gradient of its output
in the backward pass. From these two, the rule of the layer gives the gradients of its parameters per record. Factors in
half precision, as under autocast, are first converted to float32: gradient and norm are those of the rounded factors.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from matrixdp.errors import InvalidInput
from matrixdp.learn.layers.base import ExplicitGradients, RecordGradients
from matrixdp.learn.layers.trainable import Layer, TrainableModel


class Gradients:
    """Gradients per record of each parameter, and an upper bound on the squared norm of each record's gradient."""

    def __init__(self, trained: TrainableModel, batch: int) -> None:
        self.gradients: dict[nn.Parameter, RecordGradients] = {}
        # The underflow in a parameter's squared norm is below the smallest normal number.
        underflow = len(trained.names) * torch.finfo(trained.wide).tiny
        self.squared_norm = torch.full((batch,), underflow, dtype=trained.wide, device=trained.device)

    def add(self, parameter: nn.Parameter, gradients: RecordGradients) -> None:
        """Adds the gradients of a parameter."""
        self.gradients[parameter] = gradients
        self.squared_norm += gradients.squared_norm()


class BackwardPass(Gradients):
    """A context that puts hooks on the layers; afterwards it holds gradients and norms.

    With `explicit`, every record's gradient is formed. All gradients are multiplied by `scale`.
    """

    def __init__(
        self, trained: TrainableModel, layers: Sequence[Layer], batch: int, *, explicit: bool, scale: float = 1.0
    ) -> None:
        super().__init__(trained, batch)
        self._scale = scale
        self._trained, self._layers, self._batch, self._explicit = trained, layers, batch, explicit
        self._anchor = torch.zeros((), device=trained.device, requires_grad=True)
        # Calls of each layer that await their gradient, gradients received, and the layers that use each parameter.
        self._waiting: dict[Layer, int] = defaultdict(int)
        self._parts: dict[nn.Parameter, list[RecordGradients]] = defaultdict(list)
        self._users: dict[nn.Parameter, set[Layer]] = defaultdict(set)

    def __enter__(self) -> BackwardPass:
        self._handles = []
        for layer in self._layers:
            after = functools.partial(self._after, layer)
            self._handles.append(layer.module.register_forward_pre_hook(layer.freeze))
            self._handles.append(layer.module.register_forward_hook(after, prepend=True, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            layer.unfreeze()

    def _after(self, layer: Layer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Runs after each call of a layer: keeps its input, and hooks the gradient of its output."""
        layer.unfreeze()
        inputs = args[0] if args else next(iter(kwargs.values()))
        layer.check(inputs, output, self._batch)
        self._waiting[layer] += 1
        for parameter in layer.parameters.values():
            self._users[parameter].add(layer)
        call = _Call(layer, inputs, self._take)
        if not output.requires_grad:
            return _join(self._anchor, output.detach(), call.receive)
        output.register_hook(call.receive)
        return None

    def backward(self, losses: Tensor) -> None:
        """Runs the backward pass, in which the hooks collect gradients."""
        if not losses.requires_grad:
            raise InvalidInput("loss does not depend on any trainable parameter; check the model for no_grad or detach")
        names = self._trained.names
        found = torch.autograd.grad(losses, [self._anchor, *names], torch.ones_like(losses), allow_unused=True)
        for name, gradient in zip(names.values(), found[1:], strict=True):
            if gradient is not None:
                raise InvalidInput(
                    f"parameter {name} is used outside a call of its layer, where its gradients per record cannot be "
                    "seen; call the layer itself, leave weight decay to the optimizer, or freeze the parameter"
                )
        self.finish()

    @property
    def came(self) -> bool:
        """Whether any gradient was received."""
        return bool(self._parts or self.gradients)

    def finish(self) -> None:
        """Merges the gradients received, after the backward pass."""
        for parameter in list(self._parts):
            self._finish(parameter)

    def _take(self, layer: Layer, inputs: Tensor, gradient: Tensor) -> None:
        """Adds one call of a layer; a parameter is finished once no call of a layer that uses it is waiting."""
        wide = self._trained.wide
        # Under autocast, and for parameters in half precision, both factors are converted to float32 here.
        inputs = inputs.to(wide) if inputs.is_floating_point() else inputs
        gradient = gradient.detach().to(wide)
        gradient = gradient if self._scale == 1 else gradient * self._scale
        with torch.autocast(self._trained.device.type, enabled=False):
            for name, gradients in layer.gradients(inputs, gradient).items():
                self._parts[layer.parameters[name]].append(gradients)
            self._waiting[layer] -= 1
            for parameter in layer.parameters.values():
                if not any(self._waiting[user] for user in self._users[parameter]):
                    self._finish(parameter)

    def _finish(self, parameter: nn.Parameter) -> None:
        """Merges the gradients of a parameter and adds their norm; the factors they came from are freed."""
        first, *others = self._parts.pop(parameter)
        merged = first.merged(others) if others else first
        self.add(parameter, ExplicitGradients(merged.explicit()) if self._explicit else merged.smaller())


class _Call:
    """One call of a layer; keeps its input until the gradient of its output is received."""

    def __init__(self, layer: Layer, inputs: Tensor, take: Callable[[Layer, Tensor, Tensor], None]) -> None:
        self._layer, self._version, self._take = layer, inputs._version, take
        self._inputs: Tensor | None = inputs.detach()

    def receive(self, gradient: Tensor | None) -> None:
        """Passes on the gradient with the input, once."""
        if gradient is None or self._inputs is None:
            return
        inputs, self._inputs = self._inputs, None
        if inputs._version != self._version:
            raise InvalidInput(f"the input of {self._layer} was changed in place after it ran; change a copy instead")
        self._take(self._layer, inputs, gradient)


class _Leaf(torch.autograd.Function):
    """Makes a layer's output part of the graph if nothing before it is; its gradient goes to the layer alone."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        """The output itself, marked as changed in place: so it is no view, and the model may change it in place."""
        ctx.receive = receive
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        """Gives the gradient to the layer; the backward pass ends here."""
        ctx.receive(gradients[0])
        return None, None, None


_join: Callable[..., Any] = _Leaf.apply
