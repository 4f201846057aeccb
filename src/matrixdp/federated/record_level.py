"""Uploads that hide each record of a client, but not the client as a whole: the client trains by DP-SGD.

**Noise over time.** The steps of a client in all its rounds form one training, and its uploads are sums of them. So
noise may be correlated over the steps (`learn.correlated_noise`). Only the client's own steps count: a round in which
it is not asked has none, and each round has whole epochs. So a record takes part as in a training on one machine: in a
fixed order at every E-th step, E the steps per epoch, or sampled in groups (`learn.time_plan`). The server chooses the
parameters at which a round begins, which may depend on earlier releases; the certificate allows that. All rounds are
charged together, before the first. The key and the noise of the last steps are stored with each reply, since a process
may end after a round. So is a digest of the records: the steps of a record follow from its position, so all rounds need
the same records in the same order.
"""

from __future__ import annotations

import hashlib
import hmac
import io
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from matrixdp import _check
from matrixdp.accounting.accountant import Accountant
from matrixdp.adjacency import ADD_REMOVE, ZERO_OUT
from matrixdp.errors import InvalidInput
from matrixdp.federated.client import Guarantees, Upload, UploadPrivacy
from matrixdp.federated.local_training import LocalTraining, cross_entropy
from matrixdp.federated.participant import Arrays, Charge, Declined
from matrixdp.federated.record_checks import check_never_raises
from matrixdp.federated.tensors import check_model, device_of, flat, load, trainable
from matrixdp.learn.correlated_noise import CorrelatedNoise
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.noise import propose
from matrixdp.learn.released_steps import content_of
from matrixdp.learn.time_plan import ORDERS, is_over_time
from matrixdp.learn.training import PrivateSGD
from matrixdp.mechanisms import RECIPES


@dataclass(frozen=True, kw_only=True)
class RecordLevel(UploadPrivacy):
    """Uploads that hide each record of a client: the result of local DP-SGD; the settings are those of `UploadPrivacy`.

    Guarantee: record-level, adjacency add/remove, or zero-out in a fixed order. All uploads of a client together keep
    the budget when one of its records is added or removed, or when its gradients are replaced by zero. The number of
    its records is public. There is no client-level guarantee. Model and loss cannot mix records, by construction. They
    must not raise errors that depend on a record, since the server would see them; those that raise for numbers that
    are not finite are refused.

    Args:
        order: "sampled" (Poisson sampling), or "fixed" for a mechanism over time ("banded", "toeplitz",
            "inverse-banded"): the client has the same batches in every epoch. With a mechanism over time, its records
            must be the same, in the same order, in every process of a run.

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
        >>> client.guarantees.record <= 3.0, client.guarantees.client
        (True, None)
    """

    norm: str = "l2"
    order: str = "sampled"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.choice("mechanism", self.mechanism, RECIPES)
        _check.choice("order", self.order, ORDERS)
        over_time = is_over_time(self.mechanism)
        if self.order == "fixed" and not over_time:
            raise InvalidInput(f"order='fixed' needs a mechanism over time, such as 'banded', got {self.mechanism!r}")
        if over_time and (self.norm != "l2" or self.by_layer):
            raise InvalidInput("a mechanism over time needs norm='l2', and by_layer left out")

    @property
    def adjacency(self) -> str:
        """Add/remove where records are sampled, zero-out in a fixed order."""
        return ZERO_OUT if self.order == "fixed" else ADD_REMOVE

    def check(self, model: nn.Module) -> None:
        """Raises an error if these settings or such a model cannot work, as far as can be checked without records."""
        check_model(model)
        gradients = ClippedGradients(model, cross_entropy, clip=self.clip, norm=self.norm)
        if is_over_time(self.mechanism):  # its size depends on the number of steps, which the client knows
            if unknown := set(self.options) - {"bands", "workload", "groups"}:
                raise InvalidInput(f"{self.mechanism} has no option {sorted(unknown)[0]!r}")
            return
        shapes = [tuple(p.shape) for p in trainable(model)]
        propose(self.mechanism, shapes, self._ball(gradients.clip), by_layer=self.by_layer, **self.options)

    def upload(self, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor) -> Upload:
        """Uploads of the result of DP-SGD."""
        return _PrivateUpload(self, model, training, inputs, labels)


class _PrivateUpload:
    """Trains by DP-SGD after the spend, and uploads the result."""

    def __init__(
        self, privacy: RecordLevel, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor
    ) -> None:
        check_model(model)
        self.model, self.training = model.train(), training
        made = training.optimizer or (
            lambda parameters: torch.optim.SGD(parameters, lr=training.learning_rate, momentum=training.momentum)
        )
        self.trainer = PrivateSGD(
            model,
            made(trainable(model)),
            TensorDataset(inputs, labels),
            training.loss,
            budget=privacy.budget,
            batch_size=min(training.batch_size, len(inputs)),
            clip=privacy.clip,
            epochs=privacy.rounds * training.epochs,
            clipping=privacy.norm,
            noise=privacy.mechanism,
            order=privacy.order,
            by_layer=privacy.by_layer,
            **privacy.options,
        )
        self.trainer.prepare()  # before any other pass, and before the first spend
        check_never_raises(model, training.loss, inputs[: training.batch_size], labels[: training.batch_size])
        self.steps = training.epochs * self.trainer.epoch_steps
        total = Accountant(privacy.adjacency)
        noise, planned = self.trainer.noise, self.steps * privacy.rounds
        self.over_time = noise.releases(planned) if isinstance(noise, CorrelatedNoise) else None
        self.content = content_of(self.trainer.data, None) if self.over_time is not None else b""
        total.add(self.trainer.certificate, *(self.over_time or (planned, self.trainer.rate)))
        delta, rounds = privacy.budget.delta, privacy.rounds
        self.guarantees = Guarantees(delta, rounds, None, total.epsilon(delta), privacy.adjacency)

    def charge(self, run: str, number: int) -> Charge:
        certificate, planned = self.trainer.certificate, self.trainer.affordable
        if self.over_time is not None:
            return Charge(f"run {run} all rounds", certificate, *self.over_time)
        kind = f"{certificate.profile!r} {certificate.total_variation!r} {self.trainer.rate!r} {planned}"
        # the rounds of all runs with these settings are one plan
        series = f"record-level rounds {hashlib.sha256(kind.encode()).hexdigest()[:16]}"
        return Charge(f"run {run} round {number}", certificate, self.steps, self.trainer.rate, series, planned)

    def compute(self, parameters: Tensor, state: Arrays) -> Tensor:
        self.trainer.check_process()
        if self.over_time is not None:
            self._resume(state)
        if not self.trainer.steps + self.steps <= self.trainer.affordable:
            raise Declined(f"the budget ({self.trainer.budget}) is spent: all steps planned for it have been taken")
        return parameters.to(device_of(self.model))

    def _resume(self, state: Arrays) -> None:
        """Continues from the stored step; declines if this process is at another step, which is not paid for."""
        taken = int(state.get("steps", 0))
        if taken and not hmac.compare_digest(np.asarray(state.get("content", ())).tobytes(), self.content):
            raise Declined(
                "the client has other records than in the rounds before, or another order of them: a record could take "
                "part more often than is paid for. Use the same ones, or take part in a new run"
            )
        if taken and not self.trainer.steps:
            stored = io.BytesIO(np.asarray(state["training"]).tobytes())
            self.trainer.load_state_dict(torch.load(stored, weights_only=True))
        if taken != self.trainer.steps:
            raise Declined(
                f"the client has stored {taken} steps and this process has taken {self.trainer.steps}: a round has "
                "failed here, another process has answered one, or this is another run; restart the client"
            )

    def draw(self, value: Tensor) -> tuple[Tensor, Arrays]:
        load(self.model, value)
        self.trainer.optimizer.state.clear()  # such as the momentum of the round before
        self.model.train()
        self.trainer.train(self.training.epochs)
        update = flat(self.model) - value
        if self.over_time is None:
            return update, {}
        stored = io.BytesIO()
        torch.save(self.trainer.state_dict(), stored)
        return update, {
            "steps": np.array(self.trainer.steps),
            "training": np.frombuffer(stored.getvalue(), np.uint8),
            "content": np.frombuffer(self.content, np.uint8),
        }
