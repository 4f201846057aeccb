"""Whether a network and its loss treat each record on its own: they run on many batches, and results are compared.

This is a probe and no proof. It finds what shows in the batches that are tried; a model that behaves for the first
passes and mixes records later is out of its reach. So certificates that rest on it say `PROBED`.

What is tried. Copies of model and loss run in float64, on a few records of the data at a time. The outputs, the loss,
the inputs and outputs of all trained layers, the gradients that come back to them and each record's gradient of the
parameters must stay the same, up to rounding and relative to that record's own size, when

- all other records, or their targets alone, are exchanged, for each record of the batch;
- the batch comes in another order, or holds fewer or more records (where nothing is random; else without dropout, in
  evaluation mode, and for the loss alone);

for records as they are, 1000 times larger and smaller, repeated, with features exchanged among records, perturbed at
random, and beside records that are not finite; with targets of one kind and of many; at the parameters as they are and
at others; with fresh secret seeds.
Before the first pass and after all of them, all state of model and loss is compared (see `state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from matrixdp.errors import InvalidInput
from matrixdp.learn.probe.records import LARGE, SMALL, Pool, chance, perturbed
from matrixdp.learn.probe.state import check_unchanged, copies, snapshot
from matrixdp.learn.probe.trials import Comparison, Found, Run, Trial
from matrixdp.learn.randomness import forked

Prepare = Callable[[nn.Module, Any], Run]
PROBED = "independence of records probed, not proved"
"""What certificates say that rest on this probe."""

# A change by less than this share of a record's own numbers is rounding: in float64, and in units of eps elsewhere.
ROUNDING, ULPS = 1e-9, 512
# On CUDA devices, products of float32 may keep 11 bits and sums have no fixed order.
SHORTENED = 2.0**-5
# At another place in a batch kernels may take another way: what that may change, as a share of the largest number.
MOVED = 1e-12

_DROPOUT = frozenset({f"{kind}dropout{end}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for end in
                      ("", "_", "1d", "2d", "3d")})  # fmt: skip


def check_independent(
    network: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Any = None,
    prepare: Prepare | None = None,
    largest: int = LARGE,
    sizes: Sequence[int] = (),
) -> bool:
    """Raises InvalidInput if results for a record depend on others, or if network or loss store what they saw.

    Args:
        network: as it is going to be used. Copies of it run; it runs itself only where it cannot be copied.
        inputs: its arguments, one row per record; `POOL` of them are used at most.
        loss: (outputs, targets) -> one value per record.
        targets: of the loss; tensors in them that have a row per record go with the inputs.
        prepare: (network, loss) -> a function that runs them; forward passes alone if it is left out.
        largest: the size of the largest batch that is tried.
        sizes: further sizes of batches that are known to come.

    Returns:
        Whether there were different records to try it with.
    """
    prepare = prepare or _forward
    pool = Pool.of(inputs, targets)
    with forked(inputs[0].device):
        own = copies(network, loss) or (network, loss)
        before = snapshot(model=own[0], loss=own[1])
        prepare(*own)(*pool.batch(range(min(SMALL, len(pool)))))  # raises what is wrong with shapes and types
        check_unchanged(before, model=own[0], loss=own[1])
        if not pool.differs:
            return False
        subject = _Subject(own, prepare, pool, copied=own[0] is not network)
        if subject.copied and (wide := copies(network, loss, torch.float64)) is not None:
            widened = _Subject(wide, prepare, pool.double(), copied=True)
            if widened.runs():
                subject.trial(deterministic=False).exchange(pool, rows=2)  # in its own type of numbers too
                subject = widened
        with _default_dtype(subject.dtype):
            subject.check(largest, sizes)
    return True


def noted(law: Any) -> Any:
    """A noise law with a note, for its certificate, that the guarantee rests on this probe."""
    return replace(law, note="; ".join(part for part in (law.note, PROBED) if part))


def _forward(network: nn.Module, loss: Any) -> Run:
    def run(inputs: tuple[Tensor, ...], targets: Any) -> Found:
        with torch.no_grad():
            outputs = network(*inputs)
        parts = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        rows = [t for t in parts if isinstance(t, Tensor) and t.shape[:1] == inputs[0].shape[:1]]
        return {str(place): t for place, t in enumerate(rows)}

    return run


class _Subject:
    """Model and loss as they are tried."""

    def __init__(self, subject: tuple[nn.Module, Any], prepare: Prepare, pool: Pool, *, copied: bool) -> None:
        self.model, self.loss = subject
        self.pool, self.copied = pool, copied
        self.before = snapshot(model=self.model, loss=self.loss)
        self.run = prepare(self.model, self.loss)
        floats = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        floats += [t.dtype for t in pool.inputs if t.is_floating_point()]
        self.dtype = floats[0] if floats else torch.get_default_dtype()
        narrow = max((torch.finfo(d).eps for d in floats), default=0.0)
        device = pool.inputs[0].device
        share = SHORTENED if device.type == "cuda" else ULPS * narrow
        self.comparison = Comparison(device, *((ROUNDING, MOVED) if narrow < ROUNDING else (share, share)))

    def trial(self, run: Run | None = None, *, deterministic: bool) -> Trial:
        """A trial of this model and loss, or of some other way to run them."""
        return Trial(run or self.run, self.comparison, targets=self.loss is not None, deterministic=deterministic)

    def runs(self) -> bool:
        """Whether it takes records of this type."""
        try:
            with _default_dtype(self.dtype):
                self.run(*self.pool.batch(range(min(SMALL, len(self.pool)))))
        except Exception:  # made for one type of numbers alone
            return False
        return True

    def check(self, largest: int, sizes: Sequence[int]) -> None:
        """Raises InvalidInput for what it finds."""
        random = self._random(self.run)
        self._check_unchanged()
        trial = self.trial(deterministic=not random)
        trial.exchange(self.pool, rows=SMALL, reorder=True)
        trial.exchange(self.pool, rows=2, size=SMALL - 1)
        for size in (largest, chance.randint(SMALL + 1, largest), *sizes):
            trial.exchange_half(self.pool, size)
        trial.exchange(self.pool.repeated(), rows=2)
        trial.exchange(self.pool.perturbed(), rows=2, reorder=True, tolerant=True)
        for pool in (self.pool.shuffled(), self.pool.scaled(1e-3), self.pool.scaled(1e3)):
            trial.exchange(pool, rows=2, tolerant=True)
        trial.not_finite(self.pool)
        self._check_loss()
        self._check_unchanged()
        if self.copied:
            self._check_other_parameters(trial, random)

    def _check_other_parameters(self, trial: Trial, random: bool) -> None:
        """With parameters perturbed; what is random is tried without dropout too, and in evaluation mode."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(perturbed(parameter))
        trial.exchange(self.pool, rows=3, reorder=True, tolerant=True)
        trial.exchange(self.pool.perturbed(), rows=2, tolerant=True)
        if random:
            still = _without_dropout(self.run)
            if not self._random(still):
                self.trial(still, deterministic=True).exchange(self.pool, rows=2, reorder=True, tolerant=True)
            self.model.eval()
            trial = self.trial(deterministic=not self._random(self.run))
            trial.exchange(self.pool, rows=2, reorder=True, tolerant=True)

    def _random(self, run: Run) -> bool:
        """Whether torch's random numbers play a part; refuses others."""
        batch = self.pool.batch(self.pool.draw(min(SMALL, len(self.pool))))
        seeds = [chance.getrandbits(63) for _ in range(2)]
        first, again, other = (self.comparison.seeded(run, seed, batch) for seed in (seeds[0], seeds[0], seeds[1]))
        if self.comparison.differ(first, again):
            self._check_unchanged()
            raise InvalidInput(
                "the model or the loss gives other results when it runs again on the same records with the same "
                "random numbers of torch; randomness must come from torch's default generator, and no state may "
                "change from pass to pass"
            )
        return self.comparison.differ(first, other)

    def _check_unchanged(self) -> None:
        check_unchanged(self.before, model=self.model, loss=self.loss)

    def _check_loss(self) -> None:
        """The loss on the model's outputs, where these have a row per record: here nothing else is random."""
        if self.loss is None:
            return
        with torch.no_grad():
            inputs, targets = self.pool.batch(range(len(self.pool)))
            outputs = self.model(*inputs)
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        if not all(isinstance(t, Tensor) and t.is_floating_point() and len(t) == len(self.pool) for t in parts):
            return

        def run(given: tuple[Tensor, ...], targets: Any) -> Found:
            leaves = tuple(t.detach().requires_grad_() for t in given)
            with torch.enable_grad():
                losses = self.loss(leaves if isinstance(outputs, tuple) else leaves[0], targets)
                slopes = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
            found = {"losses": losses.detach()}
            return found | {f"slope {place}": t for place, t in enumerate(slopes) if t is not None}

        pool = Pool(tuple(t.detach() for t in parts), targets)
        if not pool.differs:
            pool = pool.perturbed()
        trial = self.trial(run, deterministic=True)
        for size in (SMALL, SMALL + 1, LARGE):
            trial.exchange(pool, rows=SMALL, size=size, reorder=True, tolerant=True)
            trial.exchange(pool.perturbed(), rows=2, size=size, reorder=True, tolerant=True)
        trial.exchange(pool.scaled(10.0), rows=2, tolerant=True)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The type of tensors that a model makes itself."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _NoDropout(TorchFunctionMode):
    """Calls of dropout return their input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DROPOUT:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def _without_dropout(run: Run) -> Run:
    def still(inputs: tuple[Tensor, ...], targets: Any) -> Found:
        with _NoDropout():
            return run(inputs, targets)

    return still
