"""Uploads that hide a client as a whole: the clipped update of plain local training, with noise."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from matrixdp import _check
from matrixdp.adjacency import REPLACE
from matrixdp.federated.client import Guarantees, Upload, UploadPrivacy
from matrixdp.federated.local_training import LocalTraining
from matrixdp.federated.noise import SIZES, budget_of_each, check_total, sized, with_norm_bound
from matrixdp.federated.participant import Arrays, Charge
from matrixdp.federated.tensors import check_model, flat, load, trainable
from matrixdp.learn.noise import ParameterNoise, propose
from matrixdp.pipeline import mu_of_each
from matrixdp.privacy.certificate import refuse_unsafe_floats
from matrixdp.sensitivity import Sensitivity


@dataclass(frozen=True, kw_only=True)
class ClientLevel(UploadPrivacy):
    """Uploads that hide the client as a whole; the settings are those of `UploadPrivacy`, and `size`.

    Guarantee: client-level, adjacency replace: all uploads of a client together keep the budget, for any two data sets
    of that client. It holds at record-level with the same numbers, as replacing a record replaces the data set.
    Copies of its records at other clients are covered only by the guarantees of those clients.
    Source: yang2023matrix, section 8.2, type I: clipping of the accumulated update by its l-infinity norm.
    Deviates: (1) exact composition over the rounds instead of a theorem for any mechanism, and no amplification by
        sampling, as sampling local batches does not hide a whole data set; (2) noise of any law in the registry.

    Args:
        size: "exact" sizes Gaussian noise by its certificate; "published" as the mechanism's theorem states, which may
            be much more.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import Client, LocalTraining, ClientLevel
        >>> privacy = ClientLevel(budget=Budget(3.0, 1e-5), rounds=5, clip=0.1)
        >>> records, labels = torch.randn(100, 4), torch.randint(2, (100,))
        >>> here = tempfile.mkdtemp()
        >>> training = LocalTraining(epochs=1)
        >>> client = Client(nn.Linear(4, 2), records, labels, training=training, privacy=privacy, folder=here)
        >>> round(client.guarantees.client, 3)
        3.0
    """

    norm: str = "linf"
    size: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.choice("size", self.size, SIZES)
        # updates are in single precision, so the bound that holds is the rounded one
        object.__setattr__(self, "clip", float(np.float32(self.clip)))

    @property
    def adjacency(self) -> str:
        """Replace: the whole data set of a client is replaced."""
        return REPLACE

    @property
    def sensitivity(self) -> Sensitivity:
        """The differences between the clipped updates of two data sets."""
        return self._ball(2 * self.clip)

    def noise(self, model: nn.Module) -> ParameterNoise:
        """The noise of one upload, sized so that all rounds keep the budget.

        Args:
            model: the network; only the shapes of its trainable parameters matter.

        Raises:
            GuaranteeViolated: if the mechanism does not keep the budget over all rounds.
        """
        check_model(model)
        shapes = [tuple(p.shape) for p in trainable(model)]
        # with linf each layer has its own box, so the layers compose; an l2 norm is shared by all layers
        parts = len(shapes) if self.by_layer and self.norm == "linf" else 1
        each = budget_of_each(self.budget, self.rounds * parts)
        norm = self.clip * (math.sqrt(sum(p.numel() for p in trainable(model))) if self.norm == "linf" else 1.0)
        options = with_norm_bound(self.mechanism, self.options, norm)  # of a layer as well
        law = propose(self.mechanism, shapes, self.sensitivity, each, by_layer=self.by_layer, **options)
        law, drawing = sized(law, self.sensitivity, mu_of_each(self.budget, self.rounds), self.size)
        noise = ParameterNoise(law, self.sensitivity, norm, drawing=drawing)
        check_total(self.mechanism, [(noise.certificate, self.rounds)], self.budget)
        refuse_unsafe_floats(noise.certificate, "upload")
        return noise

    def clipped(self, update: Tensor) -> Tensor:
        """The update clipped to its box or ball; NaN becomes zero, and with l2 any update that is not finite."""
        if self.norm == "linf":
            return torch.nan_to_num(update, nan=0.0).clamp(-self.clip, self.clip)
        largest = self.clip * (1 - 1e-6)  # the share exceeds what rounding to single precision adds
        precise = update.double()
        norm = float(torch.linalg.vector_norm(precise))
        if not norm < float("inf"):  # NaN or infinite: there is no direction to keep
            return torch.zeros_like(update)
        return (precise * min(1.0, largest / norm) if norm > 0 else precise).to(update.dtype)

    def check(self, model: nn.Module) -> None:
        """Raises the errors of `noise`."""
        self.noise(model)

    def upload(self, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor) -> Upload:
        """Uploads of the clipped update with noise."""
        return _ClippedUpload(self, model, training, inputs, labels)


class _ClippedUpload:
    """Trains without noise, clips the update, and adds noise to it."""

    def __init__(
        self, privacy: ClientLevel, model: nn.Module, training: LocalTraining, inputs: Tensor, labels: Tensor
    ) -> None:
        self.privacy, self.model, self.training, self.inputs, self.labels = privacy, model, training, inputs, labels
        self.noise = privacy.noise(model)
        total = check_total(privacy.mechanism, [(self.noise.certificate, privacy.rounds)], privacy.budget)
        epsilon = total.epsilon(privacy.budget.delta)
        self.guarantees = Guarantees(privacy.budget.delta, privacy.rounds, client=epsilon, record=epsilon)
        training.check(model, inputs, labels)

    def charge(self, run: str, number: int) -> Charge:
        return Charge(f"run {run} round {number}", self.noise.certificate)

    def compute(self, parameters: Tensor, state: Arrays) -> Tensor:
        load(self.model, parameters)
        try:
            update = self.training.update(self.model, self.inputs, self.labels)
        except Exception as error:
            # whether it fails may depend on the records, and no noise would hide that: the update counts as zero
            logging.getLogger(__name__).error("local training failed (%s); noise alone is sent", _check.origin(error))
            update = torch.zeros_like(flat(self.model))
        return self.privacy.clipped(update)

    def draw(self, value: Tensor) -> tuple[Tensor, Arrays]:
        self.noise.add_(value)
        return value, {}
