"""The public plan of split learning: batches, budget, and the resulting noise."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from matrixdp import _check
from matrixdp.adjacency import REPLACE
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.federated.noise import SIZES, budget_of_each, check_total, line, sized, with_norm_bound
from matrixdp.federated.split_learning.noise import FeatureNoise
from matrixdp.federated.tensors import trainable
from matrixdp.learn.layers.rounding import sum_error
from matrixdp.learn.noise import ParameterNoise, propose
from matrixdp.mechanisms import RECIPES, calibrate_gaussian
from matrixdp.pipeline import mu_of_each
from matrixdp.privacy.certificate import Certificate, refuse_unsafe_floats
from matrixdp.sensitivity import Entrywise, Frobenius, OneRow, Sensitivity


@dataclass(frozen=True)
class SplitGuarantees:
    """The epsilon of everything that a participant sends, per unit of privacy; None where nothing is guaranteed."""

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

    Guarantee: everything that a participant sends keeps the budget, adjacency replace, against the server, the other
    participants and anyone they share it with. With unit "record" this is record-level: the attributes of one record at
    this participant are replaced. With unit "participant" it is participant-level, and so also record-level. If a
    person's attributes change at two participants, both releases compose: mu grows by sqrt(2). Labels are not
    protected.
    Source: yang2023matrix, section 8.2, type II.
    Deviates: (1) its set, every entry of the batch's features, is unit "participant", composed over all batches; (2)
        unit "record" also protects what a participant's own network learns; (3) no amplification by sampling.

    Args:
        records: the number of records, which all participants have in the same order.
        epochs: how many times each record is released.
        batch_size: records per batch.
        budget: of each participant, for the whole run.
        unit: "record" or "participant".
        mechanism: the name of the mechanism for the features.
        size: "exact" or "published", as for ClientLevel.
        options: options of the mechanism.
        learning_rate: of the participants' own networks; with unit "record" a step is at most this times `clip`, before
            noise. The defaults of learning_rate, clip and update_share were chosen on held-out records of Adult, at
            epsilon 8, with one feature per participant and standardized gradients (`SplitServer.standardized`).
        clip: with unit "record", the largest norm of a record's gradient in a participant's own training.
        update_share: with unit "record", the share of the budget (of mu^2) that goes to a participant's own training;
            with 0 its network keeps its initial parameters.
        seed: of the division into batches, which is public.

    Example:
        >>> from matrixdp import Budget
        >>> from matrixdp.federated import SplitPlan
        >>> plan = SplitPlan(records=100, epochs=2, batch_size=50, budget=Budget(3.0, 1e-5))
        >>> plan.steps, len(plan.batch(0))
        (4, 50)
    """

    records: int
    epochs: int
    batch_size: int
    budget: Budget
    unit: str = "record"
    mechanism: str = "analytic"
    size: str = "exact"
    options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 6.0
    clip: float = 2.0
    update_share: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("records", "epochs", "batch_size"):
            _check.count(name, getattr(self, name))
        if not self.batch_size <= self.records:
            raise InvalidInput(f"batch_size must be at most the number of records ({self.records})")
        _check.choice("unit", self.unit, ("record", "participant"))
        _check.choice("mechanism", self.mechanism, (*RECIPES, "auto"))
        _check.choice("size", self.size, SIZES)
        _check.positive("learning_rate", self.learning_rate)
        _check.length("clip", self.clip)
        if not 0 <= _check.number("update_share", self.update_share) < 1:
            raise InvalidInput(f"update_share must be 0 or above and below 1, got {self.update_share!r}")
        mu_of_each(self.budget, self.epochs)

    @property
    def batches(self) -> int:
        """The number of batches per epoch."""
        return math.ceil(self.records / self.batch_size)

    @property
    def steps(self) -> int:
        """The number of batches in all."""
        return self.batches * self.epochs

    @property
    def learns(self) -> bool:
        """Whether the participants' own networks are trained."""
        return self.unit == "participant" or self.update_share > 0

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """The records of a step, from 0; each record is in one batch per epoch."""
        epoch, number = divmod(step, self.batches)
        return _order(self.records, self.seed, epoch)[number * self.batch_size :][: self.batch_size]

    def digest(self) -> str:
        """A short digest of how the plan divides the records; the noise is in the certificates."""
        division = f"{self.unit} {int(self.records)} {int(self.batch_size)} {int(self.seed)} numpy {np.__version__}"
        return hashlib.sha256(division.encode()).hexdigest()[:16]

    def sensitivity(self) -> Sensitivity:
        """The sensitivity set of the features of a batch."""
        if self.unit == "record":
            return OneRow(low=-1.0, high=1.0, adjacency=REPLACE)
        return Entrywise(2.0, adjacency=REPLACE)

    def feature_noise(self, features: int) -> FeatureNoise:
        """The noise of one batch with this number of features per record."""
        shape, sensitivity = (self.batch_size, features), self.sensitivity()
        releases = self.steps if self.unit == "participant" else self.epochs / (1 - self.update_share)
        options = with_norm_bound(self.mechanism, self.options, math.sqrt(math.prod(shape)))
        each = budget_of_each(self.budget, releases)
        law = calibrate_gaussian(self.mechanism, shape=shape, sensitivity=sensitivity, budget=each, **options)
        law, drawing = sized(law, sensitivity, mu_of_each(self.budget, releases), self.size)
        return FeatureNoise(law, sensitivity, drawing)

    def update_noise(self, network: nn.Module) -> ParameterNoise | None:
        """The noise of a participant's own training; None if it needs none."""
        if self.unit == "participant" or not self.learns:
            return None
        sensitivity = Frobenius(2 * self.clip * (1 + sum_error(self.batch_size)), adjacency=REPLACE)
        law = propose("analytic", [tuple(p.shape) for p in trainable(network)], sensitivity)
        law, drawing = sized(law, sensitivity, mu_of_each(self.budget, self.epochs / self.update_share), "exact")
        return ParameterNoise(law, sensitivity, self.batch_size * sensitivity.radius / 2, drawing=drawing)

    def guarantees(self, *certificates: Certificate) -> SplitGuarantees:
        """The guarantee of a whole run, from the certificates of a batch: of its features, and of its training."""
        count = self.epochs if self.unit == "record" else self.steps
        total = check_total(self.mechanism, [(certificate, count) for certificate in certificates], self.budget)
        for certificate in certificates:
            refuse_unsafe_floats(certificate, "release of features")
        epsilon, whole = total.epsilon(self.budget.delta), self.unit == "participant"
        return SplitGuarantees(self.budget.delta, self.epochs, epsilon if whole else None, epsilon)


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)
