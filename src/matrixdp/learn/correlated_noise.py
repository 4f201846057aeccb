"""Noise correlated over the steps of a training, drawn step by step. `time_plan` has the law, bands and batches.

**Drawing.** Let e_t = x^_t - x_t be the noise of the decoded row. Then

    v_t = (C x)_t + std z_t - sum over j > 0 of C[t, t-j] x^_(t-j) = C[t, t] x_t - sum C[t, t-j] e_(t-j) + std z_t,

is the released row shifted by public values. Its mean m_t, the part without z_t, is rounded to the grid; then
x^_t = v_t / C[t, t]. So bands - 1 vectors e are kept, and not the rows of x and of x^. If instead B = C^-1 has few
bands, with r_t the noise that was drawn at step t, the same is m_t = (x_t + sum B[t, t-j] r_(t-j)) / B[t, t] and
x^_t = B[t, t] v_t.

**Memory.** r_t follows from a key of 32 bytes. So with an inverse-banded C, bands - 1 vectors r are kept. Or none is
kept, and each is drawn again when it is needed, at bands - 1 more draws per step: `memory="redrawn"`, with the same
results in every bit. For a banded C this would take the noise of all steps before, as its inverse is dense.

**Rounding.** Two neighbours with the same releases have the same v and x^. Let u = 2^-53, and let X and X^ bound the
norms of x and x^. The computed m_t is within (bands + 8) u S (X + X^) of the exact one, where S is the largest sum of
|C[t, t-j]| over j. For B, as r is C (x^ - x), it is within 2 (bands + 8) u S_B S_C (X + X^) / B[t, t] of the exact
value for the earlier r. Errors propagate to later rows through C, which is a factor S_C B[t, t] once more. Over all
steps the errors of both neighbours must stay below what the drawing of the certificate allows (`Drawing.largest_norm`).
X is known in advance, as it bounds a sum of clipped gradients. That x^ stays below X^ is checked on the released rows.

**Grid.** With e, later steps subtract the rounding of m_t to the grid too, as e = x^ - x. With r they do not: the
release is C (x + diag(B) h) + r, where h is the rounding of each row. So it also propagates through C, and the drawing
of a law with `inverse` counts it ||C diag(B)|| times (`privacy.drawing`).

**State.** The vectors e, or r, and the keys are as private as the records. Whoever has them can remove the noise.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch

from matrixdp import _check
from matrixdp.backends.torch import add_grid_noise
from matrixdp.budget import Budget
from matrixdp.distributions import NoiseLaw
from matrixdp.distributions.covariance import OverTime
from matrixdp.errors import InvalidInput, NumericalFailure, StreamError
from matrixdp.learn.released_steps import ReleasedSteps
from matrixdp.learn.sampling import CyclicPoisson, FixedOrder
from matrixdp.learn.time_plan import Training, covariance_of, groups_for, plan
from matrixdp.privacy.certificate import certify, drawn
from matrixdp.privacy.drawing import Drawing, drawing_for
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import LIMIT

MEMORIES = ("kept", "redrawn")
"""Whether old noise is kept, or drawn again from its key."""

_UNIT = 2.0**-53
_FIXED = frozenset({"training", "law", "drawing", "certificate", "groups", "generator", "memory"})
_GROUPS, _COINS, _DROPOUT, _NOISE, _UNITS = 1, 2, 3, 4, 5  # what keys are derived for


def noise_over_time(
    training: Training, noise: str | NoiseLaw, budget: Budget, generator: torch.Generator | None, **options: Any
) -> CorrelatedNoise:
    """The noise of a training: a given law, used as it is, or the one that a mechanism plans for the budget.

    Args:
        training: the public settings of the training.
        noise: one of MECHANISMS, or a law on values of shape (steps, size).
        budget: for all steps.
        generator: for reproducible studies only.
        **options: memory= as for `CorrelatedNoise`; bands= and workload= as for `plan`.
    """
    memory = options.pop("memory", "kept")
    if set(options) - {"bands", "workload"}:
        raise InvalidInput(f"options of noise over time are bands, workload and memory, got {', '.join(options)}")
    if isinstance(noise, str):
        certificate, groups = plan(training, noise, budget, **options)
        law, drawing = certificate.law, certificate.drawing
        return CorrelatedNoise(training, law, groups, drawing=drawing, generator=generator, memory=memory)
    if "bands" in options or noise.shape != (training.steps, training.size):
        raise InvalidInput(
            f"noise must be a mechanism's name, or a law over time on values of shape {training.steps, training.size}, "
            "which is used as it is"
        )
    groups = groups_for(training, covariance_of(noise).bands)
    return CorrelatedNoise(training, noise, groups, generator=generator, memory=memory)


class CorrelatedNoise:
    """Adds noise over time to the sums of a training, step by step, and makes its batches.

    Guarantee: `certificate` for a fixed order; otherwise the composition of as many sampled releases with it as
    `releases` says. Rows have norm at most `training.largest_row`, and may depend on earlier results.

    Args:
        training: the public settings of the training.
        law: the noise, on values of shape (steps, size).
        groups: how many groups are sampled in turn.
        drawing: how to draw it; by default computed from the law.
        generator: for reproducible studies only; the noise is then drawn in floating point and is not private.
        memory: "kept", or "redrawn" for a strategy with a banded inverse: no old noise in memory, but bands - 1 more
            draws per step. The results are the same.

    Source: choquette2023amplified; denisov2022improved for rows that depend on earlier releases.
    Deviates: 1. groups have no fixed size: the group of each record is drawn; 2. the noise is drawn on a grid.
    """

    def __init__(
        self,
        training: Training,
        law: NoiseLaw,
        groups: int,
        *,
        drawing: Drawing | None = None,
        generator: torch.Generator | None = None,
        memory: str = "kept",
    ) -> None:
        _check.choice("memory", memory, MEMORIES)
        if memory == "redrawn" and (generator is not None or not covariance_of(law).inverse):
            raise InvalidInput(
                "memory='redrawn' is for noise='inverse-banded', without a generator: other strategies would need the "
                "noise of all earlier steps, drawn again in each step"
            )
        undrawn = certify(law, training.sensitivity)
        if generator is not None:
            drawing = Drawing(reproducible=True)
        elif drawing is None:
            drawing = drawing_for(law, training.sensitivity, undrawn.mu)
        self.training, self.law, self.drawing, self.groups, self.generator = training, law, drawing, groups, generator
        self.certificate = drawn(undrawn, drawing)
        self._covariance = covariance_of(law)
        self._longest = _longest_estimate(self._covariance, drawing, training)
        self.step = 0
        """How many steps have had their noise."""
        self._kept = self._covariance.coefficients.shape[-1] - 1
        self.memory, self._history = memory, cast(torch.Tensor | None, None)
        self._secrets: deque[bytes] = deque(maxlen=self._kept)  # the keys of old noise, where it is drawn again
        self._released: ReleasedSteps | None = None
        self._begin(Key())

    def _begin(self, key: Key) -> None:
        """The key determines batches, dropout and noise (but see `_noisy` for CUDA), so that a step can be repeated."""
        self._key, training = key, self.training
        self.run = object()
        """Identifies the groups and coins in use: another object once a checkpoint with others is loaded."""
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
        """A readable description of how batches are made."""
        if self.training.order == "fixed":
            return f"none: the same {self.training.epoch_steps} batches in every epoch"
        return f"Poisson, {self.groups} groups in turn, each record of one with probability {self.rate:.4g}"

    def releases(self, steps: int) -> tuple[int, float]:
        """How many releases with the certificate these steps count as, and their sampling rate."""
        return self.training.releases(self.groups, steps)

    @property
    def rate(self) -> float:
        """The probability that a record takes part when it is its group's turn; 1 in a fixed order."""
        return self.training.releases(self.groups)[1]

    def batch(self, step: int) -> list[int]:
        """The indices of the records of one step, from 0."""
        return self._order.batch(step, self._key.derive(_COINS, step), self.generator)

    def dropout_key(self, step: int, use: int) -> Key:
        """The key of one step's random numbers, for each use of them."""
        return self._key.derive(_DROPOUT, step, use)

    def unit_key(self) -> Key:
        """The key that decides which records of a unit count, in all steps."""
        return self._key.derive(_UNITS)

    def add_(self, flat: torch.Tensor) -> None:
        """Replaces the next row of x, a contiguous vector of float64, by that of x^, in place."""
        if not (flat.shape == (self.training.size,) and flat.is_contiguous() and flat.dtype == torch.float64):
            raise InvalidInput(f"flat must be a contiguous vector of {self.training.size} numbers in float64")
        if not self.step < self.training.steps:
            raise InvalidInput(f"the noise was planned for {self.training.steps} steps, and all of them are taken")
        if self.memory == "kept" and (self._history is None or self._history.device != flat.device):
            kept = flat.new_zeros(self._kept, len(flat)) if self._history is None else self._history.to(flat.device)
            self._history = kept
        inverse, (first, *later) = self._covariance.inverse, self._covariance.bands_at(self.step).tolist()
        mean = self._with_old_noise(flat, later).div_(first) if inverse else self._without_old_error(flat, first, later)
        drawn = torch.empty_like(flat) if inverse and self._history is not None else None
        noisy, secret = self._noisy(mean, drawn)
        estimate = noisy.mul_(first) if inverse else noisy.div_(first)
        if not float(estimate.norm()) <= self._longest:  # post-processing of the noisy row
            raise NumericalFailure("the noisy sum of a step is too large to be rounded safely; this step was not taken")
        if self._history is None:
            self._secrets.append(secret)
        elif self._kept:
            row = self._history[self.step % self._kept]
            torch.sub(estimate, flat, out=row) if drawn is None else row.copy_(drawn)
        flat.copy_(estimate)
        self.step += 1

    def _without_old_error(self, flat: torch.Tensor, first: float, weights: list[float]) -> torch.Tensor:
        """C[t, t] x_t minus the weighted errors e of earlier steps; that of step t is in row t mod kept."""
        assert self._history is not None
        turned = np.zeros(self._kept)
        turned[(self.step - 1 - np.arange(len(weights))) % max(self._kept, 1)] = weights
        weighted = torch.from_numpy(turned).to(flat.device)
        return torch.addmv(flat, self._history.T, weighted, beta=first, alpha=-1)

    def _with_old_noise(self, flat: torch.Tensor, weights: list[float]) -> torch.Tensor:
        """x_t plus the weighted noise r of earlier steps, in one order: the same sum for kept and redrawn noise."""
        total, row = flat.clone(), torch.empty_like(flat)
        for back, weight in enumerate(weights, start=1):
            if self._history is None:
                self._draw_again(self._secrets[-back], row)
            else:
                row = self._history[(self.step - back) % self._kept]
            total.add_(row, alpha=weight)
        return total

    def _noisy(self, mean: torch.Tensor, drawn: torch.Tensor | None) -> tuple[torch.Tensor, bytes]:
        """The mean on the grid with the noise of this step, and its key; `drawn` gets the noise alone."""
        std = self._covariance.std
        if self.generator is not None:
            noise = torch.randn(mean.shape, generator=self.generator, device=mean.device, dtype=mean.dtype).mul_(std)
            if drawn is not None:
                drawn.copy_(noise)
            return mean + noise, b""
        assert self.drawing.grid is not None
        if mean.is_cuda and self._released is None:
            key = Key()  # sums differ in their last digits from run to run, so the noise would too
        else:
            key = self._key.derive_for(mean.cpu().numpy().tobytes(), _NOISE, self.step)
        if self._released is not None:
            self._released.admit(self.step, key.fingerprint(b"released"))
        noisy = torch.empty_like(mean)
        add_grid_noise(mean, std, self.drawing.grid, noisy, key, drawn)
        return noisy, key.expose()

    def _draw_again(self, secret: bytes, out: torch.Tensor) -> None:
        """Writes the noise that was drawn from a secret to `out`, without a mean."""
        assert self.drawing.grid is not None
        add_grid_noise(out.zero_(), self._covariance.std, self.drawing.grid, None, Key.from_bytes(secret))

    def warm_up(self, flat: torch.Tensor) -> None:
        """Imports and compiles the sampler, by a draw that is discarded."""
        if self.generator is None:
            assert self.drawing.grid is not None
            add_grid_noise(flat.new_zeros(1), self._covariance.std, self.drawing.grid)

    def record_in(self, path: Any, origin: str | None, content: bytes = b"", *, moved: bool = False) -> str:
        """Keeps key and steps in a file, so that the training is one run however often it is resumed.

        Args:
            path: the file, as for `ReleasedSteps`.
            origin: of the ledger.
            content: a digest of the data (`content_of`); it must stay the same.
            moved: the file was moved here on purpose.

        Returns:
            The identity of the run.
        """
        self._released = ReleasedSteps(path, self._public, origin, content, moved=moved)
        self._begin(self._released.key())
        return self._released.identity

    @property
    def recorded(self) -> bool:
        """Whether a file has the steps that were released."""
        return self._released is not None

    @property
    def _has_key(self) -> bool:
        """Whether checkpoints contain the key: not for seeded noise, nor if a file has it."""
        return self.generator is None and self._released is None

    def state_dict(self) -> dict[str, Any]:
        """What later steps need: the key, unless a file has it, and the last noise; both as private as the records."""
        return {
            "step": self.step,
            "history": None if self._history is None else self._history.clone(),
            "secrets": [secret.hex() for secret in self._secrets],
            "key": self._key.expose().hex() if self._has_key else "",
            "run": None if self._released is None else self._released.identity,
            **self._public,
        }

    @property
    def _public(self) -> dict[str, Any]:
        """The settings that fix the batches and the law; a checkpoint with others is refused."""
        covariance = self._covariance
        values = np.append(covariance.coefficients, covariance.std).astype(np.float64).tobytes()
        others = (covariance.coefficients.shape, bool(covariance.inverse), self.groups, self.drawing.grid)
        law = hashlib.sha256(values + repr(others).encode()).hexdigest()
        return {"training": asdict(self.training), "law": law, "memory": self.memory}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises InvalidInput unless `load_state_dict` can continue from this state."""
        if self.step:
            raise InvalidInput(
                "a checkpoint is loaded before the first step where noise is correlated over time; make a new trainer"
            )
        if any(state.get(name) != value for name, value in self._public.items()):
            raise InvalidInput(
                f"the checkpoint is of another training than this one ({self.training}), or has noise of another law: "
                "all of it must be the same, or the guarantee would not hold; make the trainer as it was"
            )
        run = None if self._released is None else self._released.identity
        if state.get("run") != run:
            raise InvalidInput("the checkpoint belongs to another run; give state=, the file that it was made with")
        step, history = _check.count("step", state["step"] + 1) - 1, state["history"]
        if self._released is not None and not step <= len(self._released):
            raise StreamError("the state of the training is an older one: it has fewer steps than the checkpoint")
        secrets = [bytes.fromhex(secret) for secret in state["secrets"]]
        drawn_again = min(step, self._kept) if self.memory == "redrawn" else 0
        kept = step > 0 and self.memory == "kept"
        if (history is not None) != kept or len(secrets) != drawn_again or not step <= self.training.steps:
            raise InvalidInput("the checkpoint is damaged: its steps and what it keeps do not agree")
        if history is not None and tuple(history.shape) != (self._kept, self.training.size):
            raise InvalidInput(f"the checkpoint keeps vectors of shape {tuple(history.shape)}, of another training")
        for secret in (*secrets, *([bytes.fromhex(state["key"])] if self._has_key else [])):
            Key.from_bytes(secret)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from this state; only before the first step."""
        self.check_state(state)
        if self._has_key:
            self._begin(Key.from_bytes(bytes.fromhex(state["key"])))
        history = state["history"]
        self.step, self._history = state["step"], None if history is None else history.to(torch.float64).clone()
        self._secrets.extend(bytes.fromhex(secret) for secret in state["secrets"])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in vars(self):
            raise InvalidInput(f"{name} is part of the guarantee and cannot be changed; make a new trainer")
        super().__setattr__(name, value)


def _longest_estimate(covariance: OverTime, drawing: Drawing, training: Training) -> float:
    """X^: the norm that x^ must stay below for the certificate to cover the rounding of m_t.

    Raises:
        InvalidInput: if rows may be so long that this leaves no room for the noise.
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
            f"sums of gradients may have a norm of {training.largest_row:.3g}, too large to be rounded safely with "
            f"noise of standard deviation {std:.3g} and {width} bands; use more noise, fewer bands or fewer records"
        )
    return room - training.largest_row
