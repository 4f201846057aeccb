"""The plan of a training with noise over time: its public settings, batches, number of bands, and noise law.

The sum of clipped gradients at step t is row x_t of a matrix with one row per step. With a lower-triangular strategy C,
the release is C x + std z (`distributions.covariance.over_time`).

**Fixed order.** Batches are the same in every epoch, so a record takes part at every E-th step, E the steps per epoch:
`Participation(clip, separation=E, cyclic=True)`, under zero-out. The training is one release with that certificate.

**Cyclic Poisson sampling.** Each record is assigned once to one of b groups, independently, by a secret key; step t
samples the records of group t mod b, each with probability p. Let C have at most b bands. A record of group g can take
part at steps g, g + b, ...; what it adds at step t changes only rows t to t + b - 1 of C x, so no row is changed by two
of its turns. Given what was released, the other records and their coins, the rows from its k-th turn to the next are
Gaussian with a mean that is shifted, with probability p, by a vector of norm at most clip times the largest column norm
of C. So each turn is a Poisson-sampled Gaussian release at rate p with the mu of one participation,
`Participation(clip, times=1)`, and there are at most ceil(steps / b) turns (choquette2023amplified). Groups and coins
of all records are independent, so leaving out a record changes nothing for the others: the adjacency is add/remove,
with a public divisor.

More bands than groups, or a dense C (inverse-banded), would let two turns change the same row: those are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, time_workloads
from matrixdp.distributions.covariance import OverTime
from matrixdp.errors import InvalidInput
from matrixdp.learn.noise import ANY_BUDGET
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import sized_together
from matrixdp.privacy.certificate import Certificate
from matrixdp.sensitivity import Participation

MECHANISMS = ("banded", "toeplitz", "inverse-banded")
"""Mechanisms over time that training can use."""

ORDERS = ("sampled", "fixed")
"""How batches are formed: Poisson sampling, or the same batches in every epoch."""

MOST_BANDS = 64
"""The most bands that bands="auto" tries: each takes a vector as large as the model."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The public settings of a training with noise over time.

    Attributes:
        records: how many records, or units, there are.
        batch_size: the expected size of a batch, or its size in a fixed order.
        steps: how many are planned.
        size: how many parameters there are.
        change: the largest norm of the change by one record in a sum of gradients.
        order: "sampled" or "fixed".
        groups: how many groups there are; None for as many as bands, and in a fixed order.
    """

    records: int
    batch_size: int
    steps: int
    size: int
    change: float
    order: str
    groups: int | None = None

    def __post_init__(self) -> None:
        _check.choice("order", self.order, ORDERS)
        if self.groups is None:
            return
        if self.order == "fixed":
            raise InvalidInput('groups are for order="sampled"; in a fixed order nothing is sampled')
        if not _check.count("groups", self.groups) <= self.most_groups:
            raise InvalidInput(
                f"groups must be at most {self.most_groups}, records over batch_size, got {self.groups}: a batch is "
                "drawn from one group"
            )

    @property
    def epoch_steps(self) -> int:
        """The steps of one pass over the records."""
        return math.ceil(self.records / self.batch_size)

    @property
    def most_groups(self) -> int:
        """The most groups; with more, a group would be smaller than a batch."""
        return self.records // self.batch_size

    @property
    def sensitivity(self) -> Participation:
        """The change by one record: in all steps of a fixed order, or in one of its turns with sampling."""
        if self.order == "fixed":
            return Participation(self.change, separation=self.epoch_steps, cyclic=True)
        return Participation(self.change, adjacency=ADD_REMOVE)

    @property
    def largest_row(self) -> float:
        """The largest norm of a sum of gradients."""
        return self.change * (self.batch_size if self.order == "fixed" else self.records)

    def releases(self, groups: int, steps: int | None = None) -> tuple[int, float]:
        """How many releases with the certificate these steps (by default all) count as, and their sampling rate."""
        steps = self.steps if steps is None else steps
        if self.order == "fixed":
            return min(steps, 1), 1.0
        return math.ceil(steps / groups), groups * self.batch_size / self.records


def is_over_time(noise: Any) -> bool:
    """Whether a mechanism's name, or a law, is that of noise over time."""
    if isinstance(noise, str):
        return noise in MECHANISMS
    return isinstance(noise, Gaussian) and isinstance(noise.covariance, OverTime)


def momentum_workload(optimizer: torch.optim.Optimizer) -> str:
    """The linear part of what the optimizer computes from the steps: running sums, with momentum for SGD."""
    momentum = optimizer.defaults.get("momentum", 0.0) if isinstance(optimizer, torch.optim.SGD) else 0.0
    return f"momentum:{momentum!r}" if 0 < momentum < 1 else "prefix"


def plan(
    training: Training, mechanism: str, budget: Budget, *, bands: Any = "auto", workload: Any = "prefix"
) -> tuple[Certificate, int]:
    """The certificate of the noise that keeps the budget over all steps, and the number of groups.

    Args:
        training: its public settings.
        mechanism: one of MECHANISMS.
        budget: for all steps.
        bands: of the strategy, or "auto": the power of two with the least predicted error of the workload. One band is
            DP-SGD with the same order and groups, so the predicted error is never above that.
        workload: what the optimizer computes from the steps: running sums, with momentum or learning rates.
    """
    if training.order == "sampled" and mechanism == "inverse-banded":
        raise InvalidInput(
            "noise='inverse-banded' has a dense strategy, for which no sampling is proven; use 'banded' or 'toeplitz', "
            'or order="fixed"'
        )
    task = time_workloads.coefficients(workload, training.steps)
    widths = _widths(training, mechanism) if isinstance(bands, str) and bands == "auto" else [bands]
    found = [_sized(training, mechanism, budget, _check.count("bands", width), task) for width in widths]
    return min(found, key=lambda sized: covariance_of(sized[0].law).workload_trace(task))


def _widths(training: Training, mechanism: str) -> list[int]:
    """The numbers of bands that "auto" tries."""
    if training.order == "sampled":
        most = training.groups or training.most_groups
    else:
        most = training.epoch_steps if mechanism == "banded" else training.steps
    most = min(most, training.steps, MOST_BANDS)
    return [2**power for power in range(most.bit_length())]


def _sized(training: Training, mechanism: str, budget: Budget, bands: int, task: Array) -> tuple[Certificate, int]:
    groups = groups_for(training, bands)
    shape, sensitivity = (training.steps, training.size), training.sensitivity
    law = calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=ANY_BUDGET, bands=bands, workload=task)
    return sized_together(law, sensitivity, budget, *training.releases(groups)), groups


def groups_for(training: Training, bands: int) -> int:
    """The number of groups for a strategy C with this many bands.

    Raises:
        InvalidInput: if there are more bands than groups, where the guarantee would not hold.
    """
    if training.order == "fixed":
        return 1
    most = training.groups or training.most_groups
    if not bands <= most:
        whose = "groups" if training.groups else "records over batch_size"
        raise InvalidInput(
            f"bands must be at most {most}, the {whose}, where batches are sampled, got {bands}: else two batches with "
            "the same record share a row of the noise. Use fewer bands or smaller batches"
        )
    return training.groups or bands


def covariance_of(law: NoiseLaw) -> OverTime:
    """The covariance of a law over time."""
    assert isinstance(law, Gaussian)
    assert isinstance(law.covariance, OverTime)
    return law.covariance
