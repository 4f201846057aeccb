"""Whether a network and its loss treat each record on its own: they are tried on many batches, and rows are compared.

This is a probe and no proof. It finds what shows in the batches that are tried; a model that behaves for the first
passes and mixes records later is out of its reach. So certificates that rest on it say `PROBED`.

What is tried. Copies of model and loss run in float64, on a few records of the data at a time. The answers, the loss,
the inputs and outputs of all layers that are trained, the gradients that come back to them and each record's gradient
of the parameters must stay the same, up to rounding and relative to that record's own size, when

- all other records, or their targets alone, are exchanged, for each record of the batch;
- the batch comes in another order, or holds fewer or more records (where nothing is random; else without dropout, in
  evaluation mode, and for the loss alone);

for records as they are, 1000 times larger and smaller, repeated, with features exchanged among records, moved at
random, and beside records that are not finite; with targets of one kind and of many; at the parameters as they are and
at others; with fresh secret seeds.
Before the first pass and after all of them, everything that model and loss keep is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from matrixdp.errors import InvalidInput
from matrixdp.learn.kept import Picture, changed, copies, picture
from matrixdp.learn.probe_records import LARGE, SMALL, Pool, chance, moved
from matrixdp.learn.randomness import forked, seed_all

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

Found = dict[str, Tensor]
"""What comes of a batch, by name; each tensor has one row per record."""
Run = Callable[[tuple[Tensor, ...], Any], Found]
"""(inputs, targets) -> what comes of them."""


class RecordsMixed(InvalidInput):
    """What was found, told apart from errors of the model."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"model or loss mixes the records of a batch: what comes of one record changes with {reason}. Keep the "
            "records in the first dimension (batch_first=True in attention and recurrent layers), and use no "
            "statistics over a batch, neither in the loss nor in the backward pass; what is random must come from "
            "torch's default generator"
        )


def check_independent(
    network: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Any = None,
    prepare: Callable[[nn.Module, Any], Run] | None = None,
    largest: int = LARGE,
    sizes: Sequence[int] = (),
) -> bool:
    """Raises InvalidInput if what comes of a record depends on others, or if network or loss keep what they saw.

    Args:
        network: as it is going to be used. Copies of it run; it runs itself only where it cannot be copied.
        inputs: what it takes, one row per record; `POOL` of them are used at most.
        loss: (outputs, targets) -> one value per record.
        targets: of the loss; tensors in them that have a row per record go with the inputs.
        prepare: (network, loss) -> what runs them; forward passes alone if it is left out.
        largest: the size of the largest batch that is tried.
        sizes: further sizes of batches that are known to come.

    Returns:
        Whether there were different records to try it with.
    """
    prepare = prepare or _forward
    pool = Pool.of(inputs, targets)
    device = inputs[0].device
    with forked(device):
        own = copies(network, loss) or (network, loss)
        kept = picture(model=own[0], loss=own[1])
        prepare(*own)(*pool.batch(range(min(SMALL, len(pool)))))  # raises what is wrong with shapes and types
        check_kept(kept, model=own[0], loss=own[1])
        if not pool.differs:
            return False
        subject = _Subject(own, prepare, pool, device, copied=own[0] is not network)
        if subject.copied and (wide := copies(network, loss, torch.float64)) is not None:
            widened = _Subject(wide, prepare, pool.double(), device, copied=True)
            if widened.runs():
                _Trial(subject.run, subject, moves=False).on(pool, rows=2)  # in its own type of numbers too
                subject = widened
        with _default_dtype(subject.dtype):
            subject.check(largest, sizes)
    return True


def check_kept(before: Picture, **roots: Any) -> None:
    """Raises InvalidInput if anything that hangs on the roots has changed since the picture was taken."""
    place = changed(before, picture(**roots))
    if place is not None:
        raise InvalidInput(
            f"the model or the loss keeps what it saw of the records, without noise, in {place}. Use layers that keep "
            "no running statistics, such as GroupNorm, and store no activations, averages or counters; what is set up "
            "on a first pass must be set up with public inputs before"
        )


def noted(law: Any) -> Any:
    """A noise law with a note, for its certificate, that the guarantee rests on this probe."""
    return replace(law, note="; ".join(part for part in (law.note, PROBED) if part))


def refuse_batch_statistics(network: nn.Module) -> None:
    """Raises InvalidInput for layers that normalise a record by the others."""
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) or getattr(module, "track_running_stats", False):
            raise InvalidInput(
                f"layer {name or '(the model)'} ({type(module).__name__}) mixes the records of a batch; use "
                "nn.GroupNorm instead (opacus.validators.ModuleValidator.fix(model) replaces it)"
            )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What tensors that a model makes itself are of."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _NoDropout(TorchFunctionMode):
    """Calls of dropout give back what they get."""

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

    def __init__(
        self,
        subject: tuple[nn.Module, Any],
        prepare: Callable[[nn.Module, Any], Run],
        pool: Pool,
        device: torch.device,
        *,
        copied: bool,
    ) -> None:
        self.model, self.loss = subject
        self.pool, self.device, self.copied = pool, device, copied
        self.kept = picture(model=self.model, loss=self.loss)
        self.run = prepare(self.model, self.loss)
        floats = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        floats += [t.dtype for t in pool.inputs if t.is_floating_point()]
        self.dtype = floats[0] if floats else torch.get_default_dtype()
        narrow = max((torch.finfo(d).eps for d in floats), default=0.0)
        share = SHORTENED if device.type == "cuda" else ULPS * narrow
        self.rounding = ROUNDING if narrow < ROUNDING else share
        self.floor = MOVED if narrow < ROUNDING else share

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
        random = self._random()
        self._kept()
        trial = _Trial(self.run, self, moves=not random)
        trial.on(self.pool, rows=SMALL, moves=True)
        trial.on(self.pool, rows=2, size=SMALL - 1)
        for size in (largest, chance.randint(SMALL + 1, largest), *sizes):
            trial.halves(self.pool, size)
        trial.on(self.pool.few(), rows=2)
        trial.on(self.pool.moved(), rows=2, moves=True, tolerant=True)
        for pool in (self.pool.shuffled(), self.pool.scaled(1e-3), self.pool.scaled(1e3)):
            trial.on(pool, rows=2, tolerant=True)
        trial.spoiled(self.pool)
        self._loss_alone()
        self._kept()
        if self.copied:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(moved(parameter))
            trial.on(self.pool, rows=3, moves=True, tolerant=True)
            trial.on(self.pool.moved(), rows=2, tolerant=True)
            if random:
                still = _Trial(_without_dropout(self.run), self, moves=True)
                if not self._random(still.run):
                    still.on(self.pool, rows=2, moves=True, tolerant=True)
                self.model.eval()
                _Trial(self.run, self, moves=not self._random()).on(self.pool, rows=2, moves=True, tolerant=True)

    def _random(self, run: Run | None = None) -> bool:
        """Whether torch's random numbers play a part; refuses others."""
        run = run or self.run
        batch = self.pool.batch(self.pool.draw(min(SMALL, len(self.pool))))
        seeds = [chance.getrandbits(63) for _ in range(2)]
        first, again, other = (self.seeded(run, seed, batch) for seed in (seeds[0], seeds[0], seeds[1]))
        if self.differ(first, again):
            self._kept()
            raise InvalidInput(
                "the model or the loss gives something else when it runs again on the same records with the same "
                "random numbers of torch; what is random must come from torch's default generator, and no state may "
                "change from pass to pass"
            )
        return self.differ(first, other)

    def _kept(self) -> None:
        check_kept(self.kept, model=self.model, loss=self.loss)

    def _loss_alone(self) -> None:
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
            pool = pool.moved()
        trial = _Trial(run, self, moves=True)
        for size in (SMALL, SMALL + 1, LARGE):
            trial.on(pool, rows=SMALL, size=size, moves=True, tolerant=True)
            trial.on(pool.moved(), rows=2, size=size, moves=True, tolerant=True)
        trial.on(pool.scaled(10.0), rows=2, tolerant=True)

    def seeded(self, run: Run, seed: int, batch: tuple[tuple[Tensor, ...], Any]) -> Found:
        """One pass, with torch's random numbers from a seed."""
        seed_all(self.device, seed)
        return run(*batch)

    def differ(
        self, one: Found, two: Found, rows: Sequence[int] | None = None, at: Sequence[int] | None = None
    ) -> bool:
        """Whether these rows of the one are not those of the other at these places, or at the same ones."""
        for name in one.keys() & two.keys():
            first = one[name] if rows is None else one[name][list(rows)]
            second = two[name] if rows is None else two[name][list(rows if at is None else at)]
            if first.shape != second.shape:
                continue
            moved = at is not None or self.device.type != "cpu"
            if _differ(first, second, self.rounding, self.floor if moved else 0.0):
                return True
        return False


class _Trial:
    """Batches that are compared with each other."""

    def __init__(self, run: Run, subject: _Subject, *, moves: bool) -> None:
        self.run, self.subject, self.moves = run, subject, moves

    def on(self, pool: Pool, *, rows: int, size: int = SMALL, moves: bool = False, tolerant: bool = False) -> None:
        """Exchanges all others of so many rows, and then the targets of all others of one; then orders and sizes.

        Args:
            pool: where the records come from.
            rows: how many rows of the batch are looked at.
            size: how many records a batch has.
            moves: whether to try other orders and sizes too.
            tolerant: whether the records are made up, so that errors of the model tell nothing.
        """
        try:
            chosen, seed = pool.draw(size), chance.getrandbits(63)
            base = self._pass(seed, pool, chosen)
            self._exchange(pool, chosen, seed, base, rows)
            if moves and self.moves:
                self._move(pool, chosen, seed, base)
        except RecordsMixed:
            raise
        except Exception:
            if not tolerant:
                raise

    def halves(self, pool: Pool, size: int) -> None:
        """Exchanges half of a batch, and then leaves it out."""
        chosen, seed = pool.draw(size), chance.getrandbits(63)
        others, stay = pool.others(chosen), sorted(chance.sample(range(size), max(1, size // 2)))
        mixed = [chosen[place] if place in stay else others[place] for place in range(size)]
        base = self._pass(seed, pool, chosen)
        self._compare(base, self._pass(seed, pool, mixed), stay)
        if self.moves:
            alone = self._pass(seed, pool, [chosen[place] for place in stay])
            self._compare(base, alone, stay, range(len(stay)))

    def spoiled(self, pool: Pool) -> None:
        """Others that are not finite: losses that then leave out the whole batch are a way to mix records."""
        chosen, seed = pool.draw(SMALL), chance.getrandbits(63)
        base = self._pass(seed, pool, chosen)
        one = chance.randrange(SMALL)
        for row, value in [*((row, math.nan) for row in range(SMALL)), (one, math.inf), (one, 1e30)]:
            inputs, targets = pool.batch(chosen)
            others = [place for place in range(SMALL) if place != row]
            for part in inputs:
                if part.is_floating_point():
                    part[others] = value
            try:
                found = self.subject.seeded(self.run, seed, (inputs, targets))
            except Exception:  # a model may refuse such numbers
                continue
            self._compare(base, found, [row])

    def _exchange(self, pool: Pool, chosen: list[int], seed: int, base: Found, rows: int) -> None:
        size, others = len(chosen), pool.others(chosen)
        looked_at = chance.sample(range(size), min(rows, size))
        for row in looked_at:
            mixed = [*others[:row], chosen[row], *others[row + 1 :]]
            self._compare(base, self._pass(seed, pool, mixed), [row])
        if self.subject.loss is not None:
            row = looked_at[0]
            for labels in ([chosen[row]] * size, pool.unlike(chosen[row], size)):
                labels[row] = chosen[row]
                self._compare(base, self._pass(seed, pool, chosen, labels), [row])

    def _move(self, pool: Pool, chosen: list[int], seed: int, base: Found) -> None:
        size = len(chosen)
        for order in (list(range(size))[::-1], chance.sample(range(size), size)):
            found = self._pass(seed, pool, [chosen[place] for place in order])
            self._compare(base, found, order, range(size))
        for count in (2, size - 1):
            rows = chance.sample(range(size), count)
            found = self._pass(seed, pool, [chosen[row] for row in rows])
            self._compare(base, found, rows, range(count))
        more = self._pass(seed, pool, [*pool.draw(3), *chosen])
        self._compare(base, more, range(size), range(3, size + 3))
        try:  # some models take no single record
            alone = self._pass(seed, pool, chosen[:1])
        except Exception:
            return
        self._compare(base, alone, [0], [0])

    def _pass(self, seed: int, pool: Pool, places: Sequence[int], labels: Sequence[int] | None = None) -> Found:
        return self.subject.seeded(self.run, seed, pool.batch(places, labels))

    def _compare(self, base: Found, found: Found, rows: Sequence[int], at: Sequence[int] | None = None) -> None:
        if self.subject.differ(base, found, rows, at):
            raise RecordsMixed(
                "the other records" if at is None else "its place in the batch, or with how many others are"
            )


def _differ(first: Tensor, second: Tensor, rounding: float, floor: float) -> bool:
    """Whether a row has changed by more than its share, or by more than the floor."""
    if not first.is_floating_point():
        return not torch.equal(first, second)
    if torch.equal(first, second) or first.numel() == 0:
        return False
    one, two = (t.detach().reshape(len(t), -1) for t in (first, second))
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(two)):
        return True
    one, two = (torch.where(finite, t, torch.zeros_like(t)) for t in (one, two))
    sizes = torch.maximum(one.abs(), two.abs()).amax(1, keepdim=True)
    # norms count what may have underflowed, for every layer that took part
    allowed = rounding * sizes + (floor * sizes.amax().clamp(min=1.0) if floor else torch.finfo(one.dtype).tiny ** 0.5)
    return bool(((one - two).abs() > allowed).any())
