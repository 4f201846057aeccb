"""Noise correlated over the steps of a training: which law, what it guarantees with its batches, and how it is drawn.

The sum of clipped gradients at step t is row x_t of a matrix with one row per step. With a lower-triangular strategy C,
what is released is C x + std z, and decoded step by step (`distributions.covariance.over_time`).

**Fixed order.** Batches are the same in every epoch, so a record takes part at every E-th step, E the steps per epoch:
`Participation(clip, separation=E, cyclic=True)`, under zero-out. The training is one release with that certificate.

**Cyclic Poisson sampling.** Records are put into b groups once, each independently by a secret key; step t uses those
of group t mod b, each with probability p. Let C have at most b bands. A record of group g can take part at steps g,
g + b, ..., and what it adds at one of them changes only the next b rows of C x, so no row is changed by two of them.
Given what was released, the other records and their coins, the rows that follow its k-th turn are Gaussian with a mean
that is moved, with probability p, by a vector of norm at most clip times the largest column norm of C. So each turn is
a Poisson-sampled Gaussian release at rate p whose mu is that of one participation, `Participation(clip, times=1)`, and
there are at most ceil(steps / b) turns (choquette2023amplified). Groups and coins of all records are independent, so
that leaving a record out changes nothing for the others: the adjacency is add/remove, with a public divisor.

More bands than groups, or a dense C (inverse-banded), would let two turns change the same row: those are refused.

**Drawing.** Let e_t = x^_t - x_t be the noise in what was decoded. Then

    v_t = (C x)_t + std z_t - sum over j > 0 of C[t, t-j] x^_(t-j) = C[t, t] x_t - sum C[t, t-j] e_(t-j) + std z_t,

is the released row moved by what everybody knows. Its mean m_t, the part without z_t, goes on the grid; then
x^_t = v_t / C[t, t]. So bands - 1 vectors e are kept, and not the rows of x and of x^. If instead B = C^-1 has few
bands, with r_t = v_t - m_t, the same is m_t = (x_t + sum B[t, t-j] r_(t-j)) / B[t, t] and x^_t = B[t, t] v_t.

Rounding: two neighbours with the same releases have the same v and x^. With u = 2^-53 and norms of x and x^ of at most
X and X^, m_t as computed is within (bands + 8) u S (X + X^) of the exact one, S the largest sum of |C[t, t-j]| over j.
For B, as r is C (x^ - x), it is within 2 (bands + 8) u S_B S_C (X + X^) / B[t, t] of what follows from the r before it.
Errors pass on to later rows as C does, which is S_C B[t, t] once more. Over all steps the errors of both neighbours
must stay below what the drawing of the certificate has room for (`Drawing.largest_norm`). X is known before: a step
sums so many clipped gradients. That x^ stays below X^ is checked on what is released.

**State.** The vectors e, or r, and the key are as private as the records. Whoever has them can remove the noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.adjacency import ADD_REMOVE
from matrixdp.backends.torch import add_grid_noise
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, time_workloads
from matrixdp.distributions.covariance import OverTime
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.learn.noise import ANY_BUDGET
from matrixdp.learn.sampling import CyclicPoisson, FixedOrder
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import sized_together
from matrixdp.privacy.certificate import Certificate, certify, drawn
from matrixdp.privacy.drawing import Drawing, drawing_for
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import LIMIT
from matrixdp.sensitivity import Participation

MECHANISMS = ("banded", "toeplitz", "inverse-banded")
"""Mechanisms over time that training can use."""

ORDERS = ("sampled", "fixed")
"""How batches are formed: Poisson sampling, or the same batches in every epoch."""

MOST_BANDS = 64
"""The most bands that are tried where none are given: each is a vector as large as the model."""

_UNIT = 2.0**-53
_FIXED = frozenset({"training", "law", "drawing", "certificate", "groups", "generator"})
_GROUPS, _COINS, _DROPOUT, _NOISE = 1, 2, 3, 4  # what keys are derived for


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is public of a training with noise over time.

    Attributes:
        records: how many there are.
        batch_size: the expected size of a batch, or its size in a fixed order.
        steps: how many are planned.
        size: how many parameters there are.
        change: the most that one record changes in a sum of gradients, in norm.
        order: "sampled" or "fixed".
        groups: how many groups there are; None for as many as bands. Of a fixed order, there are none.
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
        """More would be smaller than a batch."""
        return self.records // self.batch_size

    @property
    def sensitivity(self) -> Participation:
        """What a record changes: in all steps of a fixed order, or in one of its turns where it is sampled."""
        if self.order == "fixed":
            return Participation(self.change, separation=self.epoch_steps, cyclic=True)
        return Participation(self.change, adjacency=ADD_REMOVE)

    @property
    def largest_row(self) -> float:
        """The largest norm of a sum of gradients."""
        return self.change * (self.batch_size if self.order == "fixed" else self.records)

    def releases(self, groups: int, steps: int | None = None) -> tuple[int, float]:
        """As how many releases with the certificate so many steps count, all by default, and at which sampling rate."""
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
    """What the optimizer computes from the steps, as far as it is linear: running sums, or those with momentum."""
    momentum = optimizer.defaults.get("momentum", 0.0) if isinstance(optimizer, torch.optim.SGD) else 0.0
    return f"momentum:{momentum!r}" if 0 < momentum < 1 else "prefix"


def noise_over_time(
    training: Training, noise: str | NoiseLaw, budget: Budget, generator: torch.Generator | None, **options: Any
) -> CorrelatedNoise:
    """The noise of a training: a law as it is given, or what a mechanism has for the budget.

    Args:
        training: what is public of the training.
        noise: one of MECHANISMS, or a law on values of shape (steps, size).
        budget: for all steps.
        generator: for reproducible studies only.
        **options: bands= and workload=, as for `plan`.
    """
    if set(options) - {"bands", "workload"}:
        raise InvalidInput(f"options of noise over time are bands and workload, got {', '.join(options)}")
    if isinstance(noise, str):
        certificate, groups = plan(training, noise, budget, **options)
        return CorrelatedNoise(training, certificate.law, groups, drawing=certificate.drawing, generator=generator)
    if "bands" in options or noise.shape != (training.steps, training.size):
        raise InvalidInput(
            f"noise must be a mechanism's name, or a law over time on values of shape {training.steps, training.size}, "
            "which is used as it is"
        )
    return CorrelatedNoise(training, noise, groups_for(training, _covariance(noise).bands), generator=generator)


def plan(
    training: Training, mechanism: str, budget: Budget, *, bands: Any = "auto", workload: Any = "prefix"
) -> tuple[Certificate, int]:
    """The certificate of the noise that keeps the budget over all steps, and the number of groups.

    Args:
        training: what is public of it.
        mechanism: of MECHANISMS.
        budget: for all steps.
        bands: of the strategy, or "auto": the power of two with the least predicted error of the workload. One band is
            DP-SGD, so that this is never worse.
        workload: what the model is made of: running sums of the steps, or those of momentum and learning rates.
    """
    if training.order == "sampled" and mechanism == "inverse-banded":
        raise InvalidInput(
            "noise='inverse-banded' has a dense strategy, for which no sampling is proven; use 'banded' or 'toeplitz', "
            'or order="fixed"'
        )
    task = time_workloads.coefficients(workload, training.steps)
    widths = _widths(training, mechanism) if isinstance(bands, str) and bands == "auto" else [bands]
    found = [_sized(training, mechanism, budget, _check.count("bands", width), task) for width in widths]
    return min(found, key=lambda sized: _covariance(sized[0].law).workload_trace(task))


def _widths(training: Training, mechanism: str) -> list[int]:
    """Numbers of bands to try."""
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
    """The number of groups for a strategy C with so many bands.

    Raises:
        InvalidInput: if there are more bands than groups, for which the guarantee would be false.
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


class CorrelatedNoise:
    """Draws noise over time on the sums of a training, step by step, and makes its batches.

    Guarantee: `certificate` for a fixed order, and as many sampled releases with it as `releases` says otherwise; for
    rows of norm at most `training.largest_row` that are chosen in view of earlier results.

    Args:
        training: what is public of the training.
        law: the noise, on values of shape (steps, size).
        groups: how many groups are sampled in turn.
        drawing: how to draw it; worked out when it is left out.
        generator: for reproducible studies only; the noise is then drawn in floating point and is not private.

    Source: choquette2023amplified; denisov2022improved for rows chosen in view of what was released.
    Deviates: 1. groups have no fixed size: each record's is drawn; 2. the noise is drawn on a grid.
    """

    def __init__(
        self,
        training: Training,
        law: NoiseLaw,
        groups: int,
        *,
        drawing: Drawing | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        undrawn = certify(law, training.sensitivity)
        if generator is not None:
            drawing = Drawing(reproducible=True)
        elif drawing is None:
            drawing = drawing_for(law, training.sensitivity, undrawn.mu)
        self.training, self.law, self.drawing, self.groups, self.generator = training, law, drawing, groups, generator
        self.certificate = drawn(undrawn, drawing)
        self._covariance = _covariance(law)
        self._longest = _longest_estimate(self._covariance, drawing, training)
        self.step = 0
        """The steps that have their noise."""
        self._kept = self._covariance.coefficients.shape[-1] - 1
        self._history: torch.Tensor | None = None
        self._begin(Key())

    def _begin(self, key: Key) -> None:
        """The key decides all that is drawn, so that a step that is taken again is the same step."""
        self._key, training = key, self.training
        self.run = object()
        """Stands for the groups and coins in use: another object once a checkpoint has brought others."""
        words = np.empty(training.records, dtype=np.uint64)
        key.derive(_GROUPS).stream().fill(words, 0)
        if self.generator is not None:
            seeded = torch.randint(2**62, (training.records,), generator=self.generator, device=self.generator.device)
            words = seeded.cpu().numpy().astype(np.uint64)
        self._order: CyclicPoisson | FixedOrder
        if training.order == "fixed":
            self._order = FixedOrder(np.argsort(words), training.batch_size)
        else:
            self._order = CyclicPoisson((words % np.uint64(self.groups)).astype(np.int64), self.groups, self.rate)

    @property
    def sampling(self) -> str:
        """How batches are made, in words."""
        if self.training.order == "fixed":
            return f"none: the same {self.training.epoch_steps} batches in every epoch"
        return f"Poisson, {self.groups} groups in turn, each record of one with probability {self.rate:.4g}"

    def releases(self, steps: int) -> tuple[int, float]:
        """As how many releases with the certificate so many steps count, and at which sampling rate."""
        return self.training.releases(self.groups, steps)

    @property
    def rate(self) -> float:
        """The probability with which a record takes part at a turn of its group; 1 in a fixed order."""
        return self.training.releases(self.groups)[1]

    def batch(self, step: int) -> list[int]:
        """The records of one step, from 0, by their indices."""
        return self._order.batch(step, self._key.derive(_COINS, step), self.generator)

    def dropout_key(self, step: int, use: int) -> Key:
        """What random numbers of one step are made of, for each use of them."""
        return self._key.derive(_DROPOUT, step, use)

    def add_(self, flat: torch.Tensor) -> None:
        """Makes the next row of x, a contiguous vector of float64, that of x^, where it lies."""
        if not (flat.shape == (self.training.size,) and flat.is_contiguous() and flat.dtype == torch.float64):
            raise InvalidInput(f"flat must be a contiguous vector of {self.training.size} numbers in float64")
        if not self.step < self.training.steps:
            raise InvalidInput(f"the noise was planned for {self.training.steps} steps, and all of them are taken")
        if self._history is None or self._history.device != flat.device:
            kept = flat.new_zeros(self._kept, len(flat)) if self._history is None else self._history.to(flat.device)
            self._history = kept
        inverse, (first, *later) = self._covariance.inverse, self._covariance.bands_at(self.step).tolist()
        mixed = self._mixed(later, self._history)
        mean = (flat + mixed) / first if inverse else first * flat - mixed
        noisy = self._noisy(mean)
        estimate = noisy * first if inverse else noisy / first
        if not float(estimate.norm()) <= self._longest:  # released already, so this refusal tells nothing
            raise NumericalFailure("the noise of a step is beyond all bounds; this step was not taken")
        if self._kept:
            self._history[self.step % self._kept] = noisy - mean if inverse else estimate - flat
        flat.copy_(estimate)
        self.step += 1

    def _mixed(self, weights: list[float], history: torch.Tensor) -> torch.Tensor:
        """What is kept of the steps before, weighted; the latest first in the weights, and step t in row t mod kept."""
        if not self._kept:
            return history.new_zeros(())
        turned = np.zeros(self._kept)
        turned[(self.step - 1 - np.arange(len(weights))) % self._kept] = weights
        return torch.from_numpy(turned).to(history.device) @ history

    def _noisy(self, mean: torch.Tensor) -> torch.Tensor:
        std = self._covariance.std
        if self.generator is not None:
            normal = torch.randn(mean.shape, generator=self.generator, device=mean.device, dtype=mean.dtype)
            return mean + std * normal
        assert self.drawing.grid is not None
        key = None  # where sums differ in their last digits from run to run, the noise could not be the same either
        if not mean.is_cuda:
            key = self._key.derive_for(mean.numpy().tobytes(), _NOISE, self.step)
        noisy = torch.empty_like(mean)
        add_grid_noise(mean, std, self.drawing.grid, noisy, key)
        return noisy

    def warm_up(self, flat: torch.Tensor) -> None:
        """Imports and compiles the sampler, by a draw that is thrown away."""
        if self.generator is None:
            assert self.drawing.grid is not None
            add_grid_noise(flat.new_zeros(1), self._covariance.std, self.drawing.grid)

    def state_dict(self) -> dict[str, Any]:
        """All that later steps need: a key and vectors of noise, which are as private as the records."""
        seeded = self.generator is not None
        history = None if self._history is None else self._history.clone()
        kept = {"step": self.step, "history": history, "key": "" if seeded else self._key.expose().hex()}
        return kept | self._public

    @property
    def _public(self) -> dict[str, Any]:
        """What fixes the batches and the law: a step of another training, or of another strategy, does not fit in."""
        covariance = self._covariance
        values = np.append(covariance.coefficients, covariance.std).astype(np.float64).tobytes()
        others = (covariance.coefficients.shape, bool(covariance.inverse), self.groups, self.drawing.grid)
        law = hashlib.sha256(values + repr(others).encode()).hexdigest()
        return {"training": asdict(self.training), "law": law}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises InvalidInput unless `load_state_dict` can continue from there."""
        if self.step:
            raise InvalidInput(
                "a checkpoint is loaded before the first step where noise is correlated over time; make a new trainer"
            )
        if any(state.get(name) != value for name, value in self._public.items()):
            raise InvalidInput(
                f"the checkpoint is of another training than this one ({self.training}), or has noise of another law: "
                "all of it must be the same, or the guarantee would not hold; make the trainer as it was"
            )
        step, history = _check.count("step", state["step"] + 1) - 1, state["history"]
        if (history is None) != (step == 0) or not step <= self.training.steps:
            raise InvalidInput("the checkpoint is damaged: its steps and what it keeps do not agree")
        if history is not None and tuple(history.shape) != (self._kept, self.training.size):
            raise InvalidInput(f"the checkpoint keeps vectors of shape {tuple(history.shape)}, of another training")
        if self.generator is None:
            Key.from_bytes(bytes.fromhex(state["key"]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from there; only before the first step."""
        self.check_state(state)
        if self.generator is None:
            self._begin(Key.from_bytes(bytes.fromhex(state["key"])))
        history = state["history"]
        self.step, self._history = state["step"], None if history is None else history.to(torch.float64).clone()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in vars(self):
            raise InvalidInput(f"{name} is part of the guarantee and cannot be changed; make a new trainer")
        super().__setattr__(name, value)


def _covariance(law: NoiseLaw) -> OverTime:
    assert isinstance(law, Gaussian)
    assert isinstance(law.covariance, OverTime)
    return law.covariance


def _longest_estimate(covariance: OverTime, drawing: Drawing, training: Training) -> float:
    """X^: what x^ must stay below for the certificate to cover the rounding of m_t.

    Raises:
        InvalidInput: if rows may be so long, beside the noise, that this leaves no room for it.
    """
    if drawing.grid is None:
        return math.inf
    width, bands, std = covariance.coefficients.shape[-1], np.abs(covariance.coefficients), covariance.std
    entries = errors = float(np.max(np.sum(bands, axis=-1)))  # the sizes of m_t and of its error over X + X^
    if covariance.inverse:
        strategy = np.abs(covariance.column[None] if covariance.toeplitz else covariance.strategy())
        passed_on = float(np.max([np.max(np.sum(strategy, axis=axis)) for axis in (0, 1)]))
        entries *= 2 * passed_on / float(np.min(bands[..., 0]))
        errors = entries * passed_on * float(np.max(bands[..., 0]))
    room = LIMIT * drawing.grid.step * std / entries
    if drawing.largest_norm is not None:
        allowed = 2 * covariance.whitening_error() * drawing.largest_norm * std
        room = min(room, allowed / (2 * (width + 8) * _UNIT * errors * math.sqrt(covariance.steps)))
    usual = math.sqrt(training.size * covariance.variance_range()[1])
    if not room >= 2 * training.largest_row + 10 * usual:
        raise InvalidInput(
            f"sums of gradients may have a norm of {training.largest_row:.3g}, which is too much, beside noise with "
            f"standard deviation {std:.3g} and {width} bands, to be rounded safely; use more noise, fewer bands or "
            "fewer records"
        )
    return room - training.largest_row
