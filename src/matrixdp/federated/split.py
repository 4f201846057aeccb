"""Vertical federated learning without Flower: participants with different attributes of the same records.

Each participant turns its attributes into features between -1 and 1 (its network, then tanh) and releases those of a
batch with noise. The server joins them, trains the top network with the labels, and sends back the gradient with
respect to the features, by which each participant improves its own network.

Which records are in a batch is known to all, so sampling hides nothing: the records are divided into batches anew in
every epoch, and each record is released once in it. But a network that has been trained on a record carries it into the
features of all others, so the released rows alone do not make a record's guarantee. There are two sound ways:

- unit "record": a participant's own training is private too (clipped gradients with noise, or no training at all).
  Then one record changes one row and one gradient in an epoch, and nothing else.
- unit "participant": a participant trains as it likes, and any change of its data may change every released entry.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.covariance import FullCovariance
from matrixdp.errors import InvalidInput
from matrixdp.federated.client import records
from matrixdp.federated.participant import Arrays, Charge, Declined, Participant, Stored
from matrixdp.federated.sizing import SIZES, budget_of_each, check_total, line, mu_of_each, sized
from matrixdp.federated.updates import device_of, flat, load, trainable
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.independence import check_independent, noted
from matrixdp.learn.noise import ParameterNoise, propose
from matrixdp.learn.pieces import sum_error
from matrixdp.mechanisms import RECIPES, calibrate
from matrixdp.noise import sampler, tensors
from matrixdp.noise.grid import LIMIT
from matrixdp.noise.laws import Gaussian
from matrixdp.privacy.certificate import Certificate, certify, refuse_unsafe_floats
from matrixdp.sensitivity import Entrywise, Frobenius, OneRow, Sensitivity

UNITS = ("record", "participant")

Block = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SplitGuarantees:
    """What all that a participant sends guarantees, for either unit; None says that nothing is guaranteed."""

    delta: float
    epochs: int
    participant: float | None
    record: float | None

    def __str__(self) -> str:
        span = f"{self.epochs} epochs"
        everything = line(self.participant, self.delta, span, "all records of one participant replaced")
        record = line(self.record, self.delta, span, "the attributes of one record at one participant replaced")
        labels = "none (the server has them, and the gradients that it sends back depend on them)"
        return f"participant-level: {everything}\nrecord-level: {record}\nlabels: {labels}"


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """What server and participants agree on; all of it is public.

    Guarantee: what a participant sends keeps the budget, relation "replace", for the server, the other participants
    and whoever they talk to: at record-level when the attributes of one record at this participant are replaced, with
    unit "record"; at participant-level, and so also at record-level, with unit "participant". A person whose attributes
    change at two participants is covered by both together: mu grows by sqrt(2). Labels are not protected.
    Source: yang2023matrix, section 8.2, type II.
    Deviates: (1) its set, every entry of the batch's features, is unit "participant", counted for every batch; (2) unit
        "record" also protects what a participant's own network learns; (3) no amplification by sampling.

    Args:
        records: how many records all participants have, in the same order.
        epochs: how many times each record is released.
        batch_size: records of a batch.
        budget: of each participant, for the whole run.
        unit: "record" or "participant".
        mechanism: of the features; a mechanism's name.
        size: "exact" or "published", as for ClientLevel.
        options: options of the mechanism.
        learning_rate: of the participants' own networks.
        clip: with unit "record", the largest norm of a record's gradient in a participant's own training.
        update_share: with unit "record", the share of the budget (of mu^2) that goes to a participant's own training;
            with 0 its network stays as it was made.
        seed: of the division into batches.
    """

    records: int
    epochs: int
    batch_size: int
    budget: Budget
    unit: str = "record"
    mechanism: str = "analytic"
    size: str = "exact"
    options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.1
    clip: float = 1.0
    update_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("records", "epochs", "batch_size"):
            _check.count(name, getattr(self, name))
        if not self.batch_size <= self.records:
            raise InvalidInput(f"batch_size must be at most the number of records ({self.records})")
        _check.choice("unit", self.unit, UNITS)
        _check.choice("mechanism", self.mechanism, (*RECIPES, "auto"))
        _check.choice("size", self.size, SIZES)
        _check.positive("learning_rate", self.learning_rate)
        _check.length("clip", self.clip)
        if not 0 <= _check.number("update_share", self.update_share) < 1:
            raise InvalidInput(f"update_share must be 0 or above and below 1, got {self.update_share!r}")
        mu_of_each(self.budget, self.epochs)

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        return math.ceil(self.records / self.batch_size)

    @property
    def steps(self) -> int:
        """How many batches there are in all."""
        return self.batches * self.epochs

    @property
    def learns(self) -> bool:
        """Whether the participants' own networks are trained."""
        return self.unit == "participant" or self.update_share > 0

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """The records of a step, from 0; over an epoch each record comes once."""
        epoch, number = divmod(step, self.batches)
        return _division(self.records, self.seed, epoch)[number * self.batch_size :][: self.batch_size]

    def digest(self) -> str:
        """A short name of how the plan divides the records; what they are released with is in the certificates."""
        division = f"{self.unit} {int(self.records)} {int(self.batch_size)} {int(self.seed)} numpy {np.__version__}"
        return hashlib.sha256(division.encode()).hexdigest()[:16]

    def sensitivity(self) -> Sensitivity:
        """What a neighbour can change in the features of a batch."""
        if self.unit == "record":
            return OneRow(low=-1.0, high=1.0, relation="replace")
        return Entrywise(2.0, relation="replace")

    def feature_noise(self, features: int) -> FeatureNoise:
        """The noise of one batch of so many features a record."""
        releases = self.steps if self.unit == "participant" else self.epochs / (1 - self.update_share)
        return FeatureNoise(self, (self.batch_size, features), releases)

    def update_noise(self, network: nn.Module) -> ParameterNoise | None:
        """The noise of a participant's own training; None where it needs none."""
        if self.unit == "participant" or not self.learns:
            return None
        sensitivity = Frobenius(2 * self.clip * (1 + sum_error(self.batch_size)), relation="replace")
        law = propose("analytic", [tuple(p.shape) for p in trainable(network)], sensitivity)
        law, sampling = sized(law, sensitivity, mu_of_each(self.budget, self.epochs / self.update_share), "exact")
        return ParameterNoise(noted(law), sensitivity, self.batch_size * sensitivity.radius / 2, sampling=sampling)

    def guarantees(self, *certificates: Certificate) -> SplitGuarantees:
        """What a whole run guarantees, from the certificates of a batch: of its features, and of its training."""
        count = self.epochs if self.unit == "record" else self.steps
        total = check_total(self.mechanism, [(certificate, count) for certificate in certificates], self.budget)
        for certificate in certificates:
            refuse_unsafe_floats(certificate, "release of features")
        epsilon = total.epsilon(self.budget.delta)
        whole = epsilon if self.unit == "participant" else None
        return SplitGuarantees(self.budget.delta, self.epochs, participant=whole, record=epsilon)


@lru_cache(maxsize=2)
def _division(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


class FeatureNoise:
    """Noise for the features of a batch, worked out once for all batches."""

    def __init__(self, plan: SplitPlan, shape: tuple[int, int], releases: float) -> None:
        self.shape, sensitivity = shape, plan.sensitivity()
        largest = math.sqrt(math.prod(shape))
        options = dict(plan.options)
        if plan.mechanism in RECIPES and "gamma" in RECIPES[plan.mechanism].options:
            options.setdefault("gamma", largest)
        each = budget_of_each(plan.budget, releases)
        law = calibrate(plan.mechanism, shape=shape, sensitivity=sensitivity, budget=each, **options)
        self.law, self.sampling = sized(law, sensitivity, mu_of_each(plan.budget, releases), plan.size)
        if plan.unit == "record":
            self.law = noted(self.law)
        self.certificate = certify(self.law, sensitivity, sampling=self.sampling)
        if isinstance(self.law, Gaussian) and isinstance(self.law.covariance, FullCovariance) and self.sampling.grid:
            white = largest / self.law.covariance.smallest_std
            if not (white / self.sampling.grid.step < LIMIT and white <= self.sampling.largest_norm):
                raise InvalidInput(sampler.TOO_LARGE)

    def added(self, features: Tensor) -> Tensor:
        """Features with one draw; a batch with fewer records is filled up, and what was filled up is left out."""
        whole = torch.zeros(self.shape, dtype=features.dtype, device=features.device)
        whole[: len(features)] = torch.nan_to_num(features, nan=0.0).clamp(-1.0, 1.0)
        if isinstance(self.law, Gaussian) and tensors.stays_on_device(whole, self.law, self.sampling):
            noisy: Tensor = tensors.draw(whole, self.law, self.sampling)
        else:
            noisy = tensors.like(sampler.draw(tensors.to_array(whole), self.law, self.sampling), whole)
        return noisy[: len(features)]


class Half:
    """A participant with its attributes of all records, its own network, and its ledger.

    Guarantee: what `plan` says, for all that `answer` has returned; with unit "record", provided that the network
    treats each record on its own, which is probed and not proved.

    Args:
        network: turns the attributes into one vector a record; tanh is applied to it. It is used as in evaluation, so
            dropout is off. It must not come from the records, and every process that speaks for this participant must
            make the same one.
        inputs: its attributes; refused if they are not finite.
        plan: what all have agreed on.
        folder: the participant's own folder, with its ledger, its network and its last replies.
    """

    def __init__(self, network: nn.Module, inputs: Any, *, plan: SplitPlan, folder: str | os.PathLike[str]) -> None:
        self.network, self.plan = nn.Sequential(network, nn.Tanh()).eval(), plan
        if not trainable(network):
            raise InvalidInput("network must have trainable parameters")
        if any(isinstance(module, _BatchNorm) and module.running_mean is None for module in network.modules()):
            raise InvalidInput("network must not mix records: batch normalisation without running statistics does")
        self.inputs = self._checked(inputs)
        if len(self.inputs) != plan.records:
            raise InvalidInput(f"inputs must have the {plan.records} records of the plan, got {len(self.inputs)}")
        if plan.unit == "record":
            sizes = {plan.batch_size, plan.records % plan.batch_size} - {0}
            check_independent(self.network, (self.inputs,), sizes=sorted(sizes))  # those that come, and no others
        features = self._features(self.inputs[:1])
        if features.ndim != 2:
            raise InvalidInput(f"network must give one vector a record, got shape {tuple(features.shape)} for one")
        self.noise = plan.feature_noise(features.shape[1])
        self.update_noise = plan.update_noise(self.network)
        self.guarantees = plan.guarantees(*self._certificates())
        if self.update_noise is not None:
            self.gradients = ClippedGradients(self.network, _inner_product, clip=plan.clip)
            self.gradients.probe(self.inputs, torch.randn(len(self.inputs), features.shape[1]).to(self.inputs.device))
        self.initial = flat(self.network).cpu().numpy()
        self.participant = Participant(folder, plan.budget)

    def answer(self, run: str, step: int, gradient: Block | None) -> Arrays:
        """The noisy features of a step, after the network has learned from the step before.

        Args:
            run: the run's name.
            step: from 0; `plan.steps` ends the run, with no features in the reply.
            gradient: of the sum of the losses, with respect to the features of the step answered last; None if none.

        Raises:
            Declined: if the budget is spent, the step lies behind or is not in the plan, or the gradient has another
                shape.
        """
        if not step <= self.plan.steps:
            raise Declined(f"step {step} is not in the plan, which has {self.plan.steps}")

        def compute(stored: Stored) -> tuple[Stored, Tensor | None]:
            if gradient is None or not stored.reply or not self.plan.learns:
                return stored, None
            shape = stored.reply["features"].shape
            if np.shape(gradient) != shape:
                raise Declined(f"the gradient has shape {np.shape(gradient)}, and the features that it is of {shape}")
            return stored, torch.from_numpy(np.array(gradient, dtype=np.float32))

        def draw(computed: tuple[Stored, Tensor | None]) -> Stored:
            stored, slope = computed
            self._resume(stored)
            if slope is not None:
                self._learn(self.plan.batch(stored.step), slope)
            state = {"weights": flat(self.network).cpu().numpy()}
            if step == self.plan.steps:
                return Stored(state=state)
            noisy = self.noise.added(self._features(self.inputs[self.plan.batch(step)]))
            return Stored(reply={"features": noisy.cpu().numpy()}, state=state)

        return self.participant.answer(run, step, self._charges(run, step), compute, draw)

    def evaluate(self, run: str, inputs: Any) -> Block:
        """Features of public records, without noise: a network that has learned in private may be used on them."""
        if self.plan.unit == "participant" and self.plan.learns:
            raise Declined("with unit 'participant' the network is no public knowledge, and neither is what it says")
        self._resume(self.participant.stored(run))
        return self._features(self._checked(inputs)).cpu().numpy()

    def _checked(self, inputs: Any) -> Tensor:
        return records(inputs, np.zeros(len(inputs)), device_of(self.network))[0]

    def _resume(self, stored: Stored | None) -> None:
        """The network as it was left in this run, or as it was made."""
        weights = {} if stored is None else stored.state
        load(self.network, torch.from_numpy(weights.get("weights", self.initial)))

    def _features(self, inputs: Tensor) -> Tensor:
        with torch.no_grad(), _check.withheld("network"):
            return torch.as_tensor(self.network(inputs))

    def _certificates(self) -> list[Certificate]:
        return [noise.certificate for noise in (self.noise, self.update_noise) if noise is not None]

    def _charges(self, run: str, step: int) -> list[Charge]:
        if step == self.plan.steps:
            return []
        when = f"epoch {step // self.plan.batches}" if self.plan.unit == "record" else f"step {step}"
        names = ("features", "training")
        # a plan that divides the records otherwise is not paid for by what was paid under this one
        plan = self.plan.digest()
        notes = (f"run {run} {when} {name}, plan {plan}" for name in names)
        return [Charge(note, certificate) for note, certificate in zip(notes, self._certificates(), strict=False)]

    def _learn(self, batch: npt.NDArray[np.int64], gradient: Tensor) -> None:
        """One step of SGD on the participant's own network."""
        inputs, gradient = self.inputs[torch.from_numpy(batch)], gradient.to(device_of(self.network))
        if self.update_noise is not None:
            self.gradients.zero()
            self.gradients.accumulate(inputs, gradient)
            self.update_noise.add_(self.gradients.flat)
            step = self.gradients.flat
        else:
            total = _inner_product(self.network(inputs), gradient).sum()
            step = torch.cat([g.reshape(-1) for g in torch.autograd.grad(total, trainable(self.network))])
            step = torch.nan_to_num(step)
        load(self.network, flat(self.network) - self.plan.learning_rate / self.plan.batch_size * step)


def _inner_product(features: Tensor, gradient: Tensor) -> Tensor:
    """For each record; its gradient with respect to the network is the chain rule's."""
    return (features * gradient).sum(dim=1)


class Top:
    """The server: the labels, and the network on top of all features.

    Args:
        network: takes the features of all participants, joined in their order.
        labels: one for each record, in the common order.
        plan: what all have agreed on.
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
        self.labels, _ = records(labels, labels, device_of(network))
        if len(self.labels) != plan.records:
            raise InvalidInput(f"labels must be as many as the plan's records, {plan.records}, got {len(self.labels)}")

    def learn(self, step: int, blocks: list[Block]) -> list[Block]:
        """Trains on the noisy features of a step; the gradient of the summed loss for each participant."""
        parts = [self._block(block).requires_grad_() for block in blocks]
        labels = self.labels[torch.from_numpy(self.plan.batch(step))]
        if any(len(part) != len(labels) for part in parts):
            raise InvalidInput(
                f"blocks must have the {len(labels)} records of step {step}, got {[len(part) for part in parts]}: all "
                "must have the same plan"
            )
        with _check.withheld("network or loss"):
            loss = self.loss(self.network(torch.cat(parts, dim=1)), labels)
        parameters = trainable(self.network)
        gradients = torch.autograd.grad(loss, [*parameters, *parts])
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=False):
                parameter.sub_(gradient, alpha=self.learning_rate)
        return [(gradient * len(labels)).cpu().numpy() for gradient in gradients[len(parameters) :]]

    def outputs(self, blocks: list[Block]) -> Tensor:
        """What the network says of joined features."""
        with torch.no_grad():
            return torch.as_tensor(self.network(torch.cat([self._block(block) for block in blocks], dim=1)))

    def _block(self, block: Block) -> Tensor:
        return torch.from_numpy(np.array(block, dtype=np.float32)).to(device_of(self.network))
