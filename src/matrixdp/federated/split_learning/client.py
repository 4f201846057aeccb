"""A participant of split learning: its attributes, its network, and the noisy features that it releases."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.federated.participant import Arrays, Charge, Declined, Participant, Stored
from matrixdp.federated.split_learning.plan import SplitPlan
from matrixdp.federated.tensors import checked, device_of, flat, load, trainable
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.layers.normalization import refuse_batch_statistics
from matrixdp.learn.record_independence import outputs
from matrixdp.learn.released_steps import content_of
from matrixdp.privacy.certificate import Certificate

Features = npt.NDArray[np.float32]


class SplitClient:
    """A participant with its attributes of all records, its own network, and its ledger.

    Guarantee: that of `plan`, for everything that `answer` has returned. The network cannot mix records, by
    construction (`learn.record_independence`).

    Args:
        network: maps the attributes to one vector per record; tanh is applied to its output. It runs in evaluation
            mode, so dropout is off. Its initial parameters must not depend on the records, and every process of this
            participant must build the same network.
        inputs: the attributes, one row per record; refused if they are not finite. With unit "record" they must be
            the same, in the same order, in every process of a run.
        plan: the plan of server and participants.
        folder: the participant's own folder, with its ledger, its network and its last replies.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import SplitClient, SplitPlan
        >>> plan = SplitPlan(records=100, epochs=1, batch_size=50, budget=Budget(3.0, 1e-5))
        >>> client = SplitClient(nn.Linear(4, 3), torch.randn(100, 4), plan=plan, folder=tempfile.mkdtemp())
        >>> client.answer("first", 0, None)["features"].shape
        (50, 3)
    """

    def __init__(self, network: nn.Module, inputs: Any, *, plan: SplitPlan, folder: str | os.PathLike[str]) -> None:
        self.network, self.plan = nn.Sequential(network, nn.Tanh()).eval(), plan
        if not trainable(network):
            raise InvalidInput("network must have trainable parameters")
        refuse_batch_statistics(self.network, "evaluation")
        self.inputs = checked("inputs", inputs, device_of(network))
        if len(self.inputs) != plan.records:
            raise InvalidInput(f"inputs must have the {plan.records} records of the plan, got {len(self.inputs)}")
        features = self._features(self.inputs[:1])
        if features.ndim != 2:
            raise InvalidInput(f"network must give one vector per record, got shape {tuple(features.shape)} for one")
        self.noise = plan.feature_noise(features.shape[1])
        self.update_noise = plan.update_noise(self.network)
        self.guarantees = plan.guarantees(*self._certificates())
        if self.update_noise is not None:
            self.gradients = ClippedGradients(self.network, _inner_product, clip=plan.clip)
            self.gradients.prepare(self.inputs[:1], features)
        self.initial = flat(self.network).cpu().numpy()
        self.digest = self._digest()
        self.participant = Participant(folder, plan.budget)

    def answer(self, run: str, step: int, gradient: Features | None) -> Arrays:
        """The noisy features of a step, after training the network with the gradient of the step before.

        Args:
            run: the run's name.
            step: from 0; `plan.steps` ends the run, with no features in the reply.
            gradient: of the summed loss with respect to the features answered last; None if there is none.

        Raises:
            Declined: if the budget is spent, the step is not in the plan, a later one was answered already, the
                gradient has another shape, or the plan or the inputs are not those of the steps before.
        """
        if not step <= self.plan.steps:
            raise Declined(f"step {step} is not in the plan, which has {self.plan.steps}")

        def compute(stored: Stored) -> tuple[Stored, Tensor | None]:
            self._check_unchanged(stored.state)
            if gradient is None or not stored.reply or not self.plan.learns:
                return stored, None
            shape = stored.reply["features"].shape
            if np.shape(gradient) != shape:
                raise Declined(f"the gradient has shape {np.shape(gradient)}, its features have shape {shape}")
            return stored, torch.from_numpy(np.array(gradient, dtype=np.float32))

        def draw(computed: tuple[Stored, Tensor | None]) -> Stored:
            stored, slope = computed
            self._resume(stored)
            if slope is not None:
                self._learn(self.plan.batch(stored.step), slope)
            weights, digest = flat(self.network).cpu().numpy(), np.frombuffer(self.digest, np.uint8)
            state = {"weights": weights, "digest": digest}
            if step == self.plan.steps:
                return Stored(state=state)
            noisy = self.noise.added(self._features(self.inputs[self.plan.batch(step)]))
            return Stored(reply={"features": noisy.cpu().numpy()}, state=state)

        return self.participant.answer(run, step, self._charges(run, step), compute, draw)

    def evaluate(self, run: str, inputs: Any) -> Features:
        """Features of public records, without noise: post-processing of a network that was trained privately."""
        if self.plan.unit == "participant":
            raise Declined("with unit 'participant' the network is not private, so its features are not released")
        stored = self.participant.stored(run) or Stored()
        self._check_unchanged(stored.state)
        self._resume(stored)
        return self._features(checked("inputs", inputs, device_of(self.network))).cpu().numpy()

    def _digest(self) -> bytes:
        """A digest of what must not change during a run: division and noise, and with unit "record" the records."""
        paid = [(certificate.profile, certificate.total_variation) for certificate in self._certificates()]
        found = hashlib.sha256(f"{self.plan.digest()} {paid!r}".encode())
        if self.plan.unit == "record":
            found.update(content_of(TensorDataset(self.inputs), None))
        return found.digest()

    def _check_unchanged(self, state: Arrays) -> None:
        """Declines if any of this has changed, since a batch is learned in the step after the one that paid for it."""
        if state and not hmac.compare_digest(np.asarray(state.get("digest", ())).tobytes(), self.digest):
            raise Declined(
                "the plan, the participant's records or their order changed during the run: a record could be released "
                "more often than is paid for. Go on as before, or take part in a new run"
            )

    def _resume(self, stored: Stored) -> None:
        """Loads the network as this run left it, or its initial parameters."""
        load(self.network, torch.from_numpy(stored.state.get("weights", self.initial)))

    def _features(self, inputs: Tensor) -> Tensor:
        with _check.withheld("network"):
            return outputs(self.network, (inputs,))

    def _certificates(self) -> list[Certificate]:
        return [noise.certificate for noise in (self.noise, self.update_noise) if noise is not None]

    def _charges(self, run: str, step: int) -> list[Charge]:
        if step == self.plan.steps:
            return []
        when = f"epoch {step // self.plan.batches}" if self.plan.unit == "record" else f"step {step}"
        # with the digest, because a charge for one division of the records does not cover another
        notes = (f"run {run} {when} {name}, plan {self.plan.digest()}" for name in ("features", "training"))
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
    """One number per record; by the chain rule, its parameter gradient is that of the server's loss."""
    return (features * gradient).sum(dim=1)
