"""Uploads of a client that trains by DP-SGD: they hide each record, and not the client as a whole."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.federated.participant import Charge, Declined
from matrixdp.federated.updates import (
    NORMS,
    Guarantees,
    LocalTraining,
    Upload,
    check_model,
    cross_entropy,
    device_of,
    flat,
    load,
    trainable,
)
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.noise import propose
from matrixdp.learn.training import PrivateSGD
from matrixdp.mechanisms import RECIPES
from matrixdp.privacy.accountant import Accountant
from matrixdp.sensitivity import Entrywise, Frobenius


@dataclass(frozen=True, kw_only=True)
class RecordLevel:
    """Uploads that hide each record of a client: local training is DP-SGD, and its result is sent as it is.

    Guarantee: record-level, relation "add/remove": all uploads of a client together keep the budget when one of its
    records is added or removed; how many it has is public. Provided that model and loss treat each record on its own,
    which is probed and not proved. No client-level guarantee. Model and loss must not raise
    errors for what is in a record, since the server would learn that they did; those that do so for numbers that are
    not finite are refused.

    Args:
        budget: for all rounds together.
        rounds: how many rounds the noise is planned for.
        clip: of the gradient of a record.
        norm: "l2" or "linf", of that gradient.
        mechanism: a mechanism's name.
        by_layer: draw noise for each parameter tensor as a matrix of its own.
        options: options of the mechanism.
    """

    relation: ClassVar[str] = "add/remove"

    budget: Budget
    rounds: int
    clip: float
    norm: str = "l2"
    mechanism: str = "analytic"
    by_layer: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {type(self.budget).__name__}")
        _check.count("rounds", self.rounds)
        _check.length("clip", self.clip)
        _check.choice("norm", self.norm, NORMS)
        _check.choice("mechanism", self.mechanism, RECIPES)

    def check(self, model: nn.Module) -> None:
        """Raises what is wrong with these settings, or with such a model, whatever the records are."""
        check_model(model)
        gradients = ClippedGradients(model, cross_entropy, clip=self.clip, norm=self.norm)
        shapes = [tuple(p.shape) for p in trainable(model)]
        change = Frobenius(gradients.clip) if self.norm == "l2" else Entrywise(gradients.clip)
        propose(self.mechanism, shapes, change, by_layer=self.by_layer, **self.options)

    def upload(self, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor) -> Upload:
        """How a client with these records makes its uploads."""
        return _PrivateUpload(self, model, training, inputs, labels)


class _PrivateUpload:
    """Trains in private, after the spend; the update is what came out."""

    def __init__(
        self, privacy: RecordLevel, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor
    ) -> None:
        check_model(model)
        self.model, self.training = model.train(), training
        self.trainer = PrivateSGD(
            model,
            torch.optim.SGD(trainable(model), lr=training.learning_rate, momentum=training.momentum),
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
        self.trainer.probe()  # now, before any other pass, and not after the first spend
        training.check(copy.deepcopy(model), inputs, labels)
        _check_quiet(model, training, inputs[:1], labels[:1])
        self.steps = training.epochs * self.trainer.epoch_steps
        total = Accountant(privacy.relation)
        total.add(self.trainer.certificate, self.steps * privacy.rounds, self.trainer.rate)
        self.guarantees = Guarantees(
            privacy.budget.delta,
            privacy.rounds,
            client=None,
            record=total.epsilon(privacy.budget.delta),
            relation=privacy.relation,
        )

    def charge(self, note: str) -> Charge:
        certificate, planned = self.trainer.certificate, self.trainer.affordable
        kind = f"{certificate.profile!r} {certificate.total_variation!r} {self.trainer.rate!r} {planned}"
        # rounds of all runs with these settings are one plan
        series = f"record-level rounds {hashlib.sha256(kind.encode()).hexdigest()[:16]}"
        return Charge(note, certificate, self.steps, self.trainer.rate, series, planned)

    def compute(self, parameters: Tensor) -> Tensor:
        self.trainer.check_process()
        if not self.trainer.steps + self.steps <= self.trainer.affordable:
            raise Declined(f"the budget ({self.trainer.budget}) is spent: all steps that it was planned for are taken")
        return parameters.to(device_of(self.model))

    def draw(self, value: Tensor) -> Tensor:
        load(self.model, value)
        self.trainer.optimizer.state.clear()  # the momentum of the round before
        self.model.train()
        self.trainer.train(self.training.epochs)
        return flat(self.model) - value


def _check_quiet(model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor) -> None:
    """The server sends the parameters: where some records lead to an error from there, it could look for such records.

    No noise hides that a batch has failed, and a record's part in that cannot be taken out. So errors must be excluded.
    """
    tried = copy.deepcopy(model).cpu().eval()  # a GPU may be of no use to its process after an error
    for value in (math.nan, math.inf, 1e38):
        load(tried, torch.full_like(flat(tried), value))
        try:
            with torch.no_grad():
                training.loss(tried(inputs.cpu()), labels.cpu())
        except Exception as error:
            raise InvalidInput(
                f"model and loss must work with any parameters, and with {value:g} for all of them they raise "
                f"{type(error).__name__}: whether that happens would tell of the records. Use a loss without checks, "
                "such as binary_cross_entropy_with_logits in place of binary_cross_entropy"
            ) from None
