"""What a client of horizontal federated learning uploads, and what that guarantees. Nothing here knows Flower.

Two units of privacy are kept apart and never mixed up:

- *client-level*: the client's whole data set is replaced. The accumulated update of the local epochs is clipped, so
  whatever the data are it lies in a known box or ball; noise for that box hides the client as a whole, and with it
  each of its records.
- *record-level*: one record of the client changes. Local training by DP-SGD gives this, and its result may be sent as
  it is; it says nothing about the client as a whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.federated.participant import Charge
from matrixdp.federated.sizing import SIZES, budget_of_each, check_total, line, mu_of_each, sized
from matrixdp.learn.noise import ParameterNoise, propose
from matrixdp.mechanisms import RECIPES
from matrixdp.privacy.certificate import Certificate, refuse_unsafe_floats
from matrixdp.sensitivity import Entrywise, Frobenius, Sensitivity

NORMS = ("linf", "l2")
# An update in the l2 ball is made shorter by this share, which is more than rounding to single precision adds.
ROUNDING = 1e-6

Loss = Callable[[Tensor, Tensor], Tensor]

LOG = logging.getLogger(__name__)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of a classifier, one value a record."""
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


@dataclass(frozen=True)
class LocalTraining:
    """SGD on a client's own records.

    Args:
        loss: (outputs, labels) -> one value a record.
        epochs: passes over the client's records in a round.
        batch_size: records of a batch, drawn without replacement.
        learning_rate: of SGD.
        momentum: of SGD; it starts at zero in every round.
    """

    loss: Loss = cross_entropy
    epochs: int = 1
    batch_size: int = 64
    learning_rate: float = 0.1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            _check.count(name, getattr(self, name))
        _check.positive("learning_rate", self.learning_rate)
        _check.at_least_zero("momentum", self.momentum)

    def update(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        """Trains the model where it is; new minus old parameters, as one vector."""
        before, parameters = flat(model), trainable(model)
        velocities = [torch.zeros_like(p) for p in parameters]
        model.train()
        for _ in range(self.epochs):
            for batch in torch.split(torch.randperm(len(inputs), device=inputs.device), self.batch_size):
                loss = self.loss(model(inputs[batch]), labels[batch]).mean()
                gradients = torch.autograd.grad(loss, parameters)
                # not torch.optim, whose import takes longer than a round of a small model, in a process for each
                with torch.no_grad():
                    for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                        velocity.mul_(self.momentum).add_(gradient)
                        parameter.sub_(velocity, alpha=self.learning_rate)
        return flat(model) - before

    @_check.withheld("model or loss")
    def check(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        """Raises what makes training impossible from the start, such as labels that the loss does not know.

        A client does this before it hears from the server, for later it keeps quiet about such errors.
        """
        batches = torch.split(torch.arange(len(inputs), device=inputs.device), self.batch_size)
        model.train()
        with torch.no_grad():
            for batch in {batches[0], batches[-1]}:  # the last one may have another size
                losses = self.loss(model(inputs[batch]), labels[batch])
                if losses.shape != batch.shape:
                    raise InvalidInput(
                        f"loss must give one value a record, got shape {tuple(losses.shape)} for {len(batch)} records; "
                        'use reduction="none"'
                    )


@dataclass(frozen=True)
class Guarantees:
    """What all uploads of a client guarantee together, for either unit; None says that nothing is guaranteed."""

    delta: float
    rounds: int
    client: float | None
    record: float | None
    relation: str = "replace"

    def __str__(self) -> str:
        change = {"replace": "replaced", "add/remove": "added or removed"}[self.relation]
        span = f"{self.rounds} rounds"
        client = line(self.client, self.delta, span, "the whole data set of one client replaced")
        record = line(self.record, self.delta, span, f"one record of one client {change}")
        return f"client-level: {client}\nrecord-level: {record}"


class Upload(Protocol):
    """How a client makes its uploads: what each costs, and the work to do before and after it is paid."""

    guarantees: Guarantees

    def charge(self, note: str) -> Charge:
        """The cost of one upload."""

    def compute(self, parameters: Tensor) -> Tensor:
        """What can be done before the spend, from the global model; it does not fail, whatever the records are."""

    def draw(self, value: Tensor) -> Tensor:
        """What is uploaded, from what `compute` gave."""


@dataclass(frozen=True, kw_only=True)
class ClientLevel:
    """Uploads that hide the client as a whole: the clipped update of plain local training, with noise.

    Guarantee: client-level, relation "replace": all uploads of a client together keep the budget, for any two data
    sets of that client; hence record-level with the same numbers, for a replaced record is a replaced data set.
    Others who hold copies of the client's records are clients of their own.
    Source: yang2023matrix, section 8.2, type I: clipping of the accumulated update by its l-infinity norm.
    Deviates: (1) exact composition over the rounds instead of a theorem for any mechanism, and no amplification by
        sampling, for the local batches hide nothing of a whole data set; (2) noise of any law in the registry.

    Args:
        budget: for all rounds together.
        rounds: how many uploads the budget is divided by.
        clip: with "linf", every entry of the update is clipped to [-clip, clip]; with "l2", its norm to clip.
        norm: "linf" or "l2".
        mechanism: a mechanism's name.
        by_layer: draw noise for each parameter tensor as a matrix of its own (weights as out x rest), not for the
            whole update as one vector.
        size: "exact" sizes Gaussian noise by its certificate; "published" as the mechanism's theorem has it, which may
            be much more.
        options: options of the mechanism.
    """

    relation: ClassVar[str] = "replace"

    budget: Budget
    rounds: int
    clip: float
    norm: str = "linf"
    mechanism: str = "analytic"
    by_layer: bool = False
    size: str = "exact"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {type(self.budget).__name__}")
        _check.count("rounds", self.rounds)
        # what single precision makes of it is the bound that holds
        object.__setattr__(self, "clip", float(np.float32(_check.length("clip", self.clip))))
        _check.choice("norm", self.norm, NORMS)
        _check.choice("size", self.size, SIZES)

    @property
    def sensitivity(self) -> Sensitivity:
        """How far the clipped updates of two data sets can be apart."""
        if self.norm == "linf":
            return Entrywise(2 * self.clip, relation=self.relation)
        return Frobenius(2 * self.clip, relation=self.relation)

    def noise(self, model: nn.Module) -> ParameterNoise:
        """The noise of one upload, sized so that all rounds keep the budget.

        Args:
            model: the network; only the shapes of its trainable parameters count.

        Raises:
            GuaranteeViolated: if the mechanism does not keep the budget over all rounds.
        """
        check_model(model)
        shapes = [tuple(p.shape) for p in trainable(model)]
        # bounds on the entries add up over the layers, one norm for all is shared by them
        parts = len(shapes) if self.by_layer and self.norm == "linf" else 1
        each = budget_of_each(self.budget, self.rounds * parts)
        norm = self.clip * (math.sqrt(sum(p.numel() for p in trainable(model))) if self.norm == "linf" else 1.0)
        options = dict(self.options)
        if self.mechanism in RECIPES and "gamma" in RECIPES[self.mechanism].options:
            options.setdefault("gamma", norm)  # of a layer even more so
        law = propose(self.mechanism, shapes, self.sensitivity, each, by_layer=self.by_layer, **options)
        law, sampling = sized(law, self.sensitivity, mu_of_each(self.budget, self.rounds), self.size)
        noise = ParameterNoise(law, self.sensitivity, norm, sampling=sampling)
        check_total(self.mechanism, [(noise.certificate, self.rounds)], self.budget)
        refuse_unsafe_floats(noise.certificate, "upload")
        return noise

    def check(self, model: nn.Module) -> None:
        """Raises what is wrong with these settings, or with such a model."""
        self.noise(model)

    def clipped(self, update: Tensor) -> Tensor:
        """The update inside its box or ball, whatever it was: entries that are not numbers become zero."""
        if self.norm == "linf":
            return torch.nan_to_num(update, nan=0.0).clamp(-self.clip, self.clip)
        largest = self.clip * (1 - ROUNDING)
        precise = update.double()
        norm = float(torch.linalg.vector_norm(precise))
        if not norm < float("inf"):  # not a number, or infinite: no direction to keep
            return torch.zeros_like(update)
        return (precise * min(1.0, largest / norm) if norm > 0 else precise).to(update.dtype)

    def guarantees(self, model: nn.Module) -> Guarantees:
        """What all rounds guarantee together, for uploads of such a model."""
        return self._guarantees(self.noise(model).certificate)

    def _guarantees(self, certificate: Certificate) -> Guarantees:
        epsilon = check_total(self.mechanism, [(certificate, self.rounds)], self.budget).epsilon(self.budget.delta)
        return Guarantees(self.budget.delta, self.rounds, client=epsilon, record=epsilon)

    def upload(self, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor) -> Upload:
        """How a client with these records makes its uploads."""
        return _ClippedUpload(self, model, training, inputs, labels)


class _ClippedUpload:
    """Trains in the clear, clips the update, and adds noise to it."""

    def __init__(
        self, privacy: ClientLevel, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor
    ) -> None:
        self.privacy, self.model, self.training, self.inputs, self.labels = privacy, model, training, inputs, labels
        self.noise = privacy.noise(model)
        self.guarantees = privacy._guarantees(self.noise.certificate)
        training.check(model, inputs, labels)

    def charge(self, note: str) -> Charge:
        return Charge(note, self.noise.certificate)

    def compute(self, parameters: Tensor) -> Tensor:
        load(self.model, parameters)
        try:
            update = self.training.update(self.model, self.inputs, self.labels)
        except Exception as error:
            # whether it fails may depend on the records, and no noise would hide that: it counts as no update
            LOG.error("local training has failed (%s), and the upload will be noise alone", _check.origin(error))
            update = torch.zeros_like(flat(self.model))
        return self.privacy.clipped(update)

    def draw(self, value: Tensor) -> Tensor:
        self.noise.add_(value)
        return value


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained and sent; frozen ones stay as the model was made."""
    return [p for p in model.parameters() if p.requires_grad]


def flat(model: nn.Module) -> Tensor:
    """A copy of the trainable parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in trainable(model)]).clone()


def device_of(model: nn.Module) -> torch.device:
    """Where the model is."""
    return next(model.parameters()).device


def load(model: nn.Module, vector: Tensor) -> None:
    """Writes a vector into the trainable parameters."""
    parameters = trainable(model)
    size = sum(p.numel() for p in parameters)
    if vector.shape != (size,):
        raise InvalidInput(
            f"the vector must have the {size} trainable parameters of the model, got shape {tuple(vector.shape)}; "
            "server and clients must build the same model"
        )
    with torch.no_grad():
        for parameter, part in zip(parameters, torch.split(vector, [p.numel() for p in parameters]), strict=True):
            parameter.copy_(part.reshape(parameter.shape))


def check_model(model: nn.Module) -> None:
    """Only parameters are sent: a model that needs statistics of the data besides them cannot be put together again."""
    if not trainable(model):
        raise InvalidInput("the model has no trainable parameters")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise InvalidInput(
                f"{name or 'the model'} is a {type(module).__name__} with running statistics, which are no parameters "
                "and are not sent; use GroupNorm or LayerNorm, or track_running_stats=False"
            )
    if any(p.dtype != torch.float32 for p in trainable(model)):
        raise InvalidInput("the model must be in single precision (float32); use model.float()")
