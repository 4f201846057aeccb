"""The server of split learning: the labels, and the network on top of all features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.split_learning.client import Features
from matrixdp.federated.split_learning.plan import SplitPlan
from matrixdp.federated.tensors import checked, device_of, trainable


class SplitServer:
    """The server: it trains the top network on the participants' noisy features.

    Args:
        network: takes the features of all participants, joined in their order.
        labels: one per record, in the common order.
        plan: what server and participants agreed on.
        loss: (outputs, labels) -> the mean loss of a batch.
        learning_rate: of SGD.
    """

    def __init__(
        self,
        network: nn.Module,
        labels: Any,
        *,
        plan: SplitPlan,
        loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
        learning_rate: float = 0.1,
    ) -> None:
        self.network, self.plan, self.loss = network, plan, loss
        self.learning_rate = _check.positive("learning_rate", learning_rate)
        self.labels = checked("labels", labels, device_of(network))
        if len(self.labels) != plan.records:
            raise InvalidInput(f"labels must have the {plan.records} records of the plan, got {len(self.labels)}")

    def learn(self, step: int, features: list[Features]) -> list[Features]:
        """Trains on the noisy features of a step; returns the gradient of the summed loss for each participant."""
        blocks = [self._tensor(block).requires_grad_() for block in features]
        labels = self.labels[torch.from_numpy(self.plan.batch(step))]
        if any(len(block) != len(labels) for block in blocks):
            raise InvalidInput(
                f"features must have the {len(labels)} records of step {step}, got {[len(block) for block in blocks]}: "
                "server and participants must have the same plan"
            )
        with _check.withheld("network or loss"):
            loss = self.loss(self.network(torch.cat(blocks, dim=1)), labels)
        parameters = trainable(self.network)
        gradients = torch.autograd.grad(loss, [*parameters, *blocks])
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=False):
                parameter.sub_(gradient, alpha=self.learning_rate)
        return [(gradient * len(labels)).cpu().numpy() for gradient in gradients[len(parameters) :]]

    def outputs(self, features: list[Features]) -> Tensor:
        """The network's outputs for the joined features."""
        with torch.no_grad():
            return torch.as_tensor(self.network(torch.cat([self._tensor(block) for block in features], dim=1)))

    def _tensor(self, block: Features) -> Tensor:
        return torch.from_numpy(np.array(block, dtype=np.float32)).to(device_of(self.network))
