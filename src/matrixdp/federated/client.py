"""A client of horizontal federated learning and the server's average, without Flower.

There are two units of privacy, each with its own kind of uploads:

- `ClientLevel`: neighbours differ in the whole data set of a client. The update of the local epochs is clipped to a
  known box or ball. Noise calibrated to that set hides the client as a whole, and with it each of its records.
- `RecordLevel`: neighbours differ in one record of a client. The client trains by DP-SGD and sends the result without
  further noise; there is no guarantee for the client as a whole. Noise may be correlated over the client's own steps.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.adjacency import ADD_REMOVE, REPLACE, ZERO_OUT
from matrixdp.budget import Budget, checked_budget
from matrixdp.federated.local_training import LocalTraining
from matrixdp.federated.noise import line
from matrixdp.federated.participant import Arrays, Charge, Declined, Participant, Stored
from matrixdp.federated.tensors import checked_records, device_of, flat
from matrixdp.sensitivity import Entrywise, Frobenius

Vector = npt.NDArray[np.float32]

_RECORD: dict[str, str] = {
    REPLACE: "one record of one client replaced",
    ADD_REMOVE: "one record of one client added or removed",
    ZERO_OUT: "the gradients of one record of one client replaced by zero",
}


@dataclass(frozen=True)
class Guarantees:
    """The epsilon of all uploads of a client together, per unit of privacy; None where nothing is guaranteed.

    Example:
        >>> from matrixdp.federated import Guarantees
        >>> print(Guarantees(delta=1e-5, rounds=10, client=None, record=3.0))
        client-level: none (the whole data set of one client replaced)
        record-level: epsilon 3 at delta 1e-05 over 10 rounds (one record of one client replaced)
    """

    delta: float
    rounds: int
    client: float | None
    record: float | None
    adjacency: str = REPLACE

    def __str__(self) -> str:
        span = f"{self.rounds} rounds"
        client = line(self.client, self.delta, span, "the whole data set of one client replaced")
        record = line(self.record, self.delta, span, _RECORD[self.adjacency])
        return f"client-level: {client}\nrecord-level: {record}"


class Upload(Protocol):
    """How one client makes its uploads: the charge of each, and the work before and after the spend."""

    guarantees: Guarantees

    def charge(self, run: str, number: int) -> Charge:
        """The charge of one upload; the same charge again where it covers several."""

    def compute(self, parameters: Tensor, state: Arrays) -> Tensor:
        """The work before the spend, from the global model; it must not fail in a way that depends on the records."""

    def draw(self, value: Tensor) -> tuple[Tensor, Arrays]:
        """The upload, from the result of `compute`, and the state for the next upload, which is never sent."""


@dataclass(frozen=True, kw_only=True)
class UploadPrivacy(ABC):
    """The privacy of a client's uploads: ClientLevel or RecordLevel.

    Args:
        budget: for all rounds together.
        rounds: the number of uploads that share the budget.
        clip: the bound on what is clipped: the update (client-level) or the gradient of a record (record-level).
        norm: "linf" bounds every entry by `clip`, "l2" the Euclidean norm.
        mechanism: the mechanism's name.
        by_layer: draw noise for each parameter tensor as a separate matrix (weights as outputs x rest), instead of for
            all parameters as one vector.
        options: options of the mechanism.
    """

    budget: Budget
    rounds: int
    clip: float
    norm: str
    mechanism: str = "analytic"
    by_layer: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_budget(self.budget)
        _check.count("rounds", self.rounds)
        _check.length("clip", self.clip)
        _check.choice("norm", self.norm, ("linf", "l2"))

    @property
    @abstractmethod
    def adjacency(self) -> str:
        """The adjacency of the guarantee."""

    def _ball(self, radius: float) -> Entrywise | Frobenius:
        return (Entrywise if self.norm == "linf" else Frobenius)(radius, adjacency=self.adjacency)

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raises an error if these settings, or such a model, cannot work for any records."""

    @abstractmethod
    def upload(self, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor) -> Upload:
        """How a client with these records makes its uploads."""


class Client:
    """A client with its own records, network and ledger.

    Guarantee: that of `privacy`, for everything that `upload` has returned.

    Args:
        model: the network; the server must have the same.
        inputs: the client's records; refused if they are not finite.
        labels: one per record.
        training: the local training of a round.
        privacy: ClientLevel or RecordLevel.
        folder: the client's own folder, with its ledger and last replies.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import Client, LocalTraining, RecordLevel
        >>> privacy = RecordLevel(budget=Budget(3.0, 1e-5), rounds=5, clip=1.0)
        >>> records, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> here = tempfile.mkdtemp()
        >>> training = LocalTraining(epochs=1)
        >>> client = Client(nn.Linear(4, 2), records, labels, training=training, privacy=privacy, folder=here)
        >>> client.upload("first", 1, torch.zeros(10).numpy()).shape
        (10,)
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        labels: Any,
        *,
        training: LocalTraining,
        privacy: UploadPrivacy,
        folder: str | os.PathLike[str],
    ) -> None:
        self._upload = privacy.upload(model, training, *checked_records(inputs, labels, device_of(model)))
        self._size = len(flat(model))
        self.guarantees = self._upload.guarantees
        self.participant = Participant(folder, privacy.budget, adjacency=privacy.adjacency)

    def upload(self, run: str, number: int, parameters: Vector) -> Vector:
        """The noisy update of a round; the same again if the round was answered before.

        Args:
            run: the run's name.
            number: the round, from 1.
            parameters: the global model's trainable parameters.

        Raises:
            Declined: if the budget is spent, a later round was answered already, or the parameters cannot be used.
        """
        charge = self._upload.charge(run, number)

        def compute(stored: Stored) -> Tensor:
            given = torch.from_numpy(np.array(parameters, dtype=np.float32))
            if given.shape != (self._size,):
                raise Declined(
                    f"the global model has parameters of shape {tuple(given.shape)}, this client's has {self._size}: "
                    "server and clients must build the same model"
                )
            if not bool(torch.isfinite(given).all()):
                raise Declined("the global model has parameters that are not finite, so it cannot be trained further")
            return self._upload.compute(given, stored.state)

        def draw(value: Tensor) -> Stored:
            update, state = self._upload.draw(value)
            return Stored(reply={"update": update.cpu().numpy()}, state=state)

        reply: Vector = self.participant.answer(run, number, [charge], compute, draw)["update"]
        return reply


def average(parameters: Vector, updates: Sequence[Vector], *, min_replies: int = 1) -> Vector:
    """The global model after a round: moved by the mean update, or unchanged with fewer than `min_replies` updates.

    The weights are equal, so they reveal nothing about how many records a client has.

    Example:
        >>> import numpy as np
        >>> from matrixdp.federated import average
        >>> average(np.zeros(2), [np.array([1.0, 0.0]), np.array([0.0, 3.0])]).tolist()
        [0.5, 1.5]
    """
    if len(updates) < min_replies:
        return parameters
    total = np.sum(np.stack(updates), axis=0, dtype=np.float64)
    return np.asarray(parameters + total / len(updates), dtype=np.float32)
