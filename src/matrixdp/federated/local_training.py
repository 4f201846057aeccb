"""The local training of a client in horizontal federated learning: SGD, or any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.tensors import flat, trainable

if TYPE_CHECKING:
    from torch.optim import Optimizer


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of a classifier, one value per record."""
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


@dataclass(frozen=True)
class LocalTraining:
    """Training on a client's own records.

    Args:
        loss: (outputs, labels) -> one value per record.
        epochs: passes over the client's records per round.
        batch_size: records per batch, drawn without replacement.
        learning_rate: of SGD.
        momentum: of SGD; it starts at zero in every round.
        optimizer: (parameters) -> an optimizer of torch, in place of SGD; its state starts afresh in every round.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp.federated import LocalTraining
        >>> training = LocalTraining(epochs=2, batch_size=32, learning_rate=0.5)
        >>> training.update(nn.Linear(4, 2), torch.randn(100, 4), torch.randint(2, (100,))).shape
        torch.Size([10])
    """

    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    epochs: int = 1
    batch_size: int = 64
    learning_rate: float = 0.1
    momentum: float = 0.0
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            _check.count(name, getattr(self, name))
        _check.positive("learning_rate", self.learning_rate)
        _check.at_least_zero("momentum", self.momentum)

    def update(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        """Trains the model in place; returns new minus old parameters, as one vector."""
        before, parameters = flat(model), trainable(model)
        optimizer = None if self.optimizer is None else self.optimizer(parameters)
        velocities = [torch.zeros_like(p) for p in parameters]
        model.train()
        for _ in range(self.epochs):
            for batch in torch.split(torch.randperm(len(inputs), device=inputs.device), self.batch_size):
                loss = self.loss(model(inputs[batch]), labels[batch]).mean()
                gradients = torch.autograd.grad(loss, parameters)
                if optimizer is not None:
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient
                    optimizer.step()
                    continue
                # not torch.optim: Flower starts a process per round, and importing it takes longer than a small round
                with torch.no_grad():
                    for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                        velocity.mul_(self.momentum).add_(gradient)
                        parameter.sub_(velocity, alpha=self.learning_rate)
        return flat(model) - before

    @_check.withheld("model or loss")
    def check(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        """Raises InvalidInput if training cannot work at all, such as for labels that the loss does not know.

        Call it before the first request: later, errors of training are hidden from the server.
        """
        batches = torch.split(torch.arange(len(inputs), device=inputs.device), self.batch_size)
        model.train()
        with torch.no_grad():
            for batch in {batches[0], batches[-1]}:  # the last one may be smaller
                losses = self.loss(model(inputs[batch]), labels[batch])
                if losses.shape != batch.shape:
                    raise InvalidInput(
                        f"loss must give one value per record, got shape {tuple(losses.shape)} for {len(batch)} "
                        'records; use reduction="none"'
                    )
