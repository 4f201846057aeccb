"""The server of split learning: the labels, and the network on top of all features.

A network that is trained on noisy features is underconfident on clean ones. Noise of variance s^2 shrinks the weight of
a feature of variance v by about v / (v + s^2). `discriminant` corrects for it. Class means are unbiased under noise.
The covariance within classes is that of the clean features plus s^2 I, which is known and subtracted. All of this is
post-processing of what the participants have sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.federated.split_learning.client import Features
from matrixdp.federated.split_learning.plan import SplitPlan
from matrixdp.federated.tensors import checked, device_of, trainable


class SplitServer:
    """The server: it trains the top network on the participants' noisy features.

    Args:
        network: takes the features of all participants, joined in the order of their numbers.
        labels: one per record, in the common order.
        plan: the plan of server and participants.
        loss: (outputs, labels) -> the mean loss of a batch.
        learning_rate: of SGD; with 0 the network keeps its initial parameters.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import SplitClient, SplitPlan, SplitServer
        >>> plan = SplitPlan(records=100, epochs=1, batch_size=50, budget=Budget(3.0, 1e-5))
        >>> client = SplitClient(nn.Linear(4, 3), torch.randn(100, 4), plan=plan, folder=tempfile.mkdtemp())
        >>> server = SplitServer(nn.Linear(3, 2), torch.randint(2, (100,)), plan=plan)
        >>> noisy = client.answer("first", 0, None)["features"]
        >>> (gradient,) = server.learn(0, [noisy])
        >>> client.answer("first", 1, gradient)["features"].shape
        (50, 3)
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
        self.learning_rate = _check.at_least_zero("learning_rate", learning_rate)
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

    def discriminant(self, features: Mapping[int, Sequence[Features]]) -> nn.Linear:
        """A linear discriminant for clean features, estimated from noisy ones; it does not use the top network.

        Args:
            features: the features of all participants, by step; usually those of the last epoch.
        """
        if not features:
            raise InvalidInput("features must have at least one step")
        joined = np.concatenate([np.concatenate(blocks, axis=1) for blocks in features.values()]).astype(np.float64)
        labels = self.labels.cpu().numpy()[np.concatenate([self.plan.batch(step) for step in features])]
        with _check.withheld("network"):
            outputs = self.outputs([np.zeros((1, joined.shape[1]), dtype=np.float32)]).shape[-1]
        std = self.check_discriminant(next(iter(features.values()))[0].shape[1])
        if len(labels) != len(joined) or not np.all(labels < outputs):
            raise InvalidInput(
                "features must be those of all records of their steps, and labels the numbers of the network's outputs"
            )
        classes, place = np.unique(labels, return_inverse=True)
        means = np.stack([joined[place == number].mean(axis=0) for number in range(len(classes))])
        within = joined - means[place]
        values, vectors = np.linalg.eigh(within.T @ within / len(joined) - std**2 * np.eye(joined.shape[1]))
        floor = 1e-3 * max(float(values[-1]), 1e-3)  # anything below is noise
        weights = means @ (vectors / np.maximum(values, floor)) @ vectors.T
        biases = np.log(np.bincount(place) / len(place)) - 0.5 * np.sum(weights * means, axis=1)
        top = nn.Linear(joined.shape[1], outputs)
        with torch.no_grad():
            top.weight.zero_()
            top.bias.fill_(-1e9)  # a class without records
            top.weight[classes] = torch.from_numpy(weights.astype(np.float32))
            top.bias[classes] = torch.from_numpy(biases.astype(np.float32))
        return top.to(device_of(self.network))

    @staticmethod
    def standardized(gradient: Features) -> Features:
        """A participant's gradient, shifted and scaled to mean 0 and mean square 1 for each feature.

        A nonzero mean would shift a feature until tanh saturates and it learns no more; a discriminant needs no offset.
        With a fixed scale, `clip` means the same for every network.

        Args:
            gradient: of one participant, from `learn`.
        """
        centred = gradient - gradient.mean(axis=0)
        size = np.sqrt(np.mean(centred**2, axis=0))
        found: Features = centred / np.where(size > 0, size, np.float32(1.0))
        return found

    def check_discriminant(self, features: int = 1) -> float:
        """The std of the noise on this many features; raises InvalidInput if `discriminant` cannot work."""
        labels = self.labels.cpu().numpy()
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or np.any(labels < 0):
            raise InvalidInput("labels must be classes, numbered from 0, for a discriminant; use discriminant=False")
        law = self.plan.feature_noise(features).law
        if not (isinstance(law, Gaussian) and isinstance(law.covariance, Isotropic)):
            raise InvalidInput(
                "mechanism must add the same noise to all features, as 'analytic' does, for a discriminant; use "
                "discriminant=False"
            )
        return law.covariance.std

    def outputs(self, features: list[Features], network: nn.Module | None = None) -> Tensor:
        """The outputs of the network, or of another one, for the joined features."""
        joined = torch.cat([self._tensor(block) for block in features], dim=1)
        with torch.no_grad():
            return torch.as_tensor((network or self.network)(joined))

    def _tensor(self, block: Features) -> Tensor:
        return torch.from_numpy(np.array(block, dtype=np.float32)).to(device_of(self.network))
