"""Uploads that hide each record of a client, and not the client as a whole: the client trains by DP-SGD."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from matrixdp import _check
from matrixdp.accounting.accountant import Accountant
from matrixdp.adjacency import ADD_REMOVE
from matrixdp.errors import InvalidInput
from matrixdp.federated.client import Guarantees, Upload, UploadPrivacy
from matrixdp.federated.local_training import LocalTraining, cross_entropy
from matrixdp.federated.participant import Charge, Declined
from matrixdp.federated.tensors import check_model, device_of, flat, load, trainable
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.noise import propose
from matrixdp.learn.training import PrivateSGD
from matrixdp.mechanisms import RECIPES


@dataclass(frozen=True, kw_only=True)
class RecordLevel(UploadPrivacy):
    """Uploads that hide each record of a client: the result of local DP-SGD; the settings are those of `UploadPrivacy`.

    Guarantee: record-level, adjacency add/remove: all uploads of a client together keep the budget when one of its
    records is added or removed; the number of its records is public. Model and loss cannot mix records, by
    construction. No client-level guarantee. Model and loss must not raise errors that depend
    on a record, since the server would learn of them; those that raise for numbers that are not finite are refused.
    """

    adjacency: ClassVar[str] = ADD_REMOVE

    norm: str = "l2"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.choice("mechanism", self.mechanism, RECIPES)

    def check(self, model: nn.Module) -> None:
        """Raises what is wrong with these settings, or with such a model, as far as it shows without records."""
        check_model(model)
        gradients = ClippedGradients(model, cross_entropy, clip=self.clip, norm=self.norm)
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
            by_layer=privacy.by_layer,
            **privacy.options,
        )
        self.trainer.prepare()  # before any other pass, and before the first spend
        training.check(copy.deepcopy(model), inputs, labels)
        _check_never_raises(model, training, inputs[:1], labels[:1])
        self.steps = training.epochs * self.trainer.epoch_steps
        total = Accountant(privacy.adjacency)
        total.add(self.trainer.certificate, self.steps * privacy.rounds, self.trainer.rate)
        delta, rounds = privacy.budget.delta, privacy.rounds
        self.guarantees = Guarantees(delta, rounds, None, total.epsilon(delta), privacy.adjacency)

    def charge(self, note: str) -> Charge:
        certificate, planned = self.trainer.certificate, self.trainer.affordable
        kind = f"{certificate.profile!r} {certificate.total_variation!r} {self.trainer.rate!r} {planned}"
        # the rounds of all runs with these settings are one plan
        series = f"record-level rounds {hashlib.sha256(kind.encode()).hexdigest()[:16]}"
        return Charge(note, certificate, self.steps, self.trainer.rate, series, planned)

    def compute(self, parameters: Tensor) -> Tensor:
        self.trainer.check_process()
        if not self.trainer.steps + self.steps <= self.trainer.affordable:
            raise Declined(f"the budget ({self.trainer.budget}) is spent: all steps planned for it have been taken")
        return parameters.to(device_of(self.model))

    def draw(self, value: Tensor) -> Tensor:
        load(self.model, value)
        self.trainer.optimizer.state.clear()  # such as the momentum of the round before
        self.model.train()
        self.trainer.train(self.training.epochs)
        return flat(self.model) - value


def _check_never_raises(model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor) -> None:
    """Raises InvalidInput if model or loss raise errors for some parameters.

    The server chooses the parameters, so it could search for records that lead to an error. Noise does not hide that a
    batch failed, and one record's part in the failure cannot be bounded, so there must be no errors.
    """
    tried = copy.deepcopy(model).cpu().eval()  # after an error, a process may not be able to use its GPU any more
    for value in (math.nan, math.inf, 1e38):
        load(tried, torch.full_like(flat(tried), value))
        try:
            with torch.no_grad():
                training.loss(tried(inputs.cpu()), labels.cpu())
        except Exception as error:
            raise InvalidInput(
                f"model and loss must work with any parameters, and with {value:g} for all of them they raise "
                f"{type(error).__name__}: such an error would reveal something about the records. Use a loss without "
                "checks, such as binary_cross_entropy_with_logits instead of binary_cross_entropy"
            ) from None
