"""A client of central record-level privacy, without Flower: it sums the clipped gradients of a secret sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from matrixdp.errors import InvalidInput
from matrixdp.federated.central_privacy import CentralPrivacy
from matrixdp.federated.local_training import cross_entropy
from matrixdp.federated.record_checks import check_never_raises
from matrixdp.federated.tensors import check_model, checked_records, device_of, load
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.randomness import secret_randomness
from matrixdp.learn.sampling import PoissonSampler


class GradientClient:
    """A client that sends a trusted server, in every round, the sum of clipped gradients of a sample of its records.

    Guarantee: none for the sum itself, which has no noise: the server must be trusted with it. With one record more or
    less, the sum changes by norm at most `clip` (1 + 2 e), e = `sum_error(records)`, and only in rounds that sample the
    record. Each round samples it, in secret, with a probability of at most `sampling_rate`. Model and loss cannot mix
    records, by construction. They must not raise errors that depend on a record, as such an error would drop all other
    records from the round; those that raise for numbers that are not finite are refused.

    Args:
        model: the network; the server must have the same.
        inputs: the client's records; refused if they are not finite.
        labels: one per record.
        privacy: the agreed settings, with unit "record".
        loss: (outputs, labels) -> one value per record.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import CentralPrivacy, GradientClient
        >>> settings = {"rounds": 10, "clients": 5, "clip": 1.0, "records": 100, "sampling_rate": 0.2}
        >>> privacy = CentralPrivacy(budget=Budget(3.0, 1e-5), unit="record", **settings)
        >>> client = GradientClient(nn.Linear(4, 2), torch.randn(100, 4), torch.randint(2, (100,)), privacy=privacy)
        >>> client.update(torch.zeros(10).numpy()).shape
        (10,)
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        labels: Any,
        *,
        privacy: CentralPrivacy,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    ) -> None:
        if not (isinstance(privacy, CentralPrivacy) and privacy.records is not None):
            raise InvalidInput("privacy must be a CentralPrivacy with unit='record'")
        check_model(model)
        self.model, self.privacy = model.train(), privacy
        self.inputs, self.labels = checked_records(inputs, labels, device_of(model))
        if not len(self.inputs) <= privacy.records:
            raise InvalidInput(f"inputs must have at most the {privacy.records} records that were agreed on")
        self._gradients = ClippedGradients(model, loss, clip=privacy.clip)
        self._gradients.prepare(self.inputs[:1], self.labels[:1])  # before any other pass
        check_never_raises(model, loss, self.inputs[:64], self.labels[:64])

    def update(self, parameters: Any) -> npt.NDArray[np.float64]:
        """Minus the sum of the clipped gradients of a new sample, at these parameters of the global model."""
        load(self.model, torch.from_numpy(np.array(parameters, dtype=np.float32)))
        (sample,) = PoissonSampler(len(self.inputs), self.privacy.sampling_rate, 1)
        self._gradients.zero()
        with secret_randomness(self._gradients.flat.device):  # for dropout
            self._gradients.accumulate(self.inputs[sample], self.labels[sample])
        return -self._gradients.flat.cpu().numpy()
