"""One client of horizontal federated learning, and the server's average; both without Flower."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.participant import Declined, Participant, Stored
from matrixdp.federated.record_level import RecordLevel
from matrixdp.federated.updates import ClientLevel, LocalTraining, device_of, flat

Vector = npt.NDArray[np.float32]


class Client:
    """A client with its own records, network and ledger.

    Guarantee: what `privacy` says, for everything that `upload` has returned.

    Args:
        model: the network; the server must have the same.
        inputs: the client's records; refused if they are not finite.
        labels: one for each record.
        training: what the client does with them in a round.
        privacy: what it uploads.
        folder: the client's own folder, with its ledger and last replies.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        labels: Any,
        *,
        training: LocalTraining,
        privacy: ClientLevel | RecordLevel,
        folder: str | os.PathLike[str],
    ) -> None:
        self._upload = privacy.upload(model, training, *records(inputs, labels, device_of(model)))
        self._size = len(flat(model))
        self.guarantees = self._upload.guarantees
        self.participant = Participant(folder, privacy.budget, relation=privacy.relation)

    def upload(self, run: str, number: int, parameters: Vector) -> Vector:
        """The noisy update of a round; the same again if the round was answered before.

        Args:
            run: the run's name.
            number: the round, from 1.
            parameters: the global model's trainable parameters.

        Raises:
            Declined: if the budget is spent, the round lies behind, or there is no training from these parameters.
        """
        charge = self._upload.charge(f"run {run} round {number}")

        def compute(_: Stored) -> Tensor:
            given = torch.from_numpy(np.array(parameters, dtype=np.float32))
            if given.shape != (self._size,):
                raise Declined(
                    f"the global model has parameters of shape {tuple(given.shape)}, this client's has {self._size}: "
                    "server and clients must build the same model"
                )
            if not bool(torch.isfinite(given).all()):
                raise Declined("the global model has parameters that are not finite; nothing can be learned from there")
            return self._upload.compute(given)

        def draw(value: Tensor) -> Stored:
            return Stored(reply={"update": self._upload.draw(value).cpu().numpy()})

        reply: Vector = self.participant.answer(run, number, [charge], compute, draw)["update"]
        return reply


def average(parameters: Vector, updates: Sequence[Vector], *, min_replies: int = 1) -> Vector:
    """The global model after a round: plus the mean of the updates, or as it was if fewer than `min_replies` came in.

    The weights are equal, hence public; how many records a client has is its own business.
    """
    if len(updates) < min_replies:
        return parameters
    total = np.sum(np.stack(updates), axis=0, dtype=np.float64)
    return np.asarray(parameters + total / len(updates), dtype=np.float32)


def records(inputs: Any, labels: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and labels as tensors on a device; single precision for the inputs if they are real numbers."""
    with _check.withheld("reading inputs and labels as tensors"):
        x, y = (v if isinstance(v, Tensor) else torch.from_numpy(np.array(v)) for v in (inputs, labels))
    if x.dtype == torch.float64:
        x = x.float()
    if not len(x) > 0 or len(x) != len(y):
        raise InvalidInput(f"inputs and labels must be as many, and not none, got {len(x)} and {len(y)}")
    for name, values in (("inputs", x), ("labels", y)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise InvalidInput(f"{name} must be finite; drop or fill the records that are not")
    return x.to(device), y.to(device)
