"""Batches that differ in all records but one, or in order and size; the results for that one are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from matrixdp.errors import InvalidInput
from matrixdp.learn.probe.records import SMALL, Pool, chance
from matrixdp.learn.randomness import seed_all

Found = dict[str, Tensor]
"""The results of a batch, by name; each tensor has one row per record."""
Run = Callable[[tuple[Tensor, ...], Any], Found]
"""(inputs, targets) -> results."""

Rows = Sequence[int]


class RecordsMixed(InvalidInput):
    """What a trial found, distinguished from errors of the model."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"model or loss mixes the records of a batch: the results for one record change with {reason}. Keep the "
            "records in the first dimension (batch_first=True in attention and recurrent layers), and use no "
            "statistics over a batch, neither in the loss nor in the backward pass; randomness must come from torch's "
            "default generator"
        )


@dataclass(frozen=True)
class Comparison:
    """When two results count as different: how large rounding errors may be on this device.

    `rounding` is a share of a record's own numbers; `floor` a share of the batch's largest number, for a record at
    another place, where kernels may take another way.
    """

    device: torch.device
    rounding: float
    floor: float

    def seeded(self, run: Run, seed: int, batch: tuple[tuple[Tensor, ...], Any]) -> Found:
        """One pass, with torch's random numbers from a seed."""
        seed_all(self.device, seed)
        return run(*batch)

    def differ(self, one: Found, two: Found, rows: Rows | None = None, at: Rows | None = None) -> bool:
        """Whether these rows of the one are not those of the other at these places, or at the same ones."""
        floor = self.floor if at is not None or self.device.type != "cpu" else 0.0
        for name in one.keys() & two.keys():
            first = one[name] if rows is None else one[name][list(rows)]
            second = two[name] if rows is None else two[name][list(rows if at is None else at)]
            if first.shape == second.shape and _differ(first, second, self.rounding, floor):
                return True
        return False


@dataclass(frozen=True)
class Trial:
    """One way to run model and loss, tried on many batches; every method raises RecordsMixed."""

    run: Run
    comparison: Comparison
    targets: bool  # whether they matter, so that those of other records are exchanged too
    deterministic: bool  # so that other orders and sizes can be tried too

    def exchange(
        self, pool: Pool, *, rows: int, size: int = SMALL, reorder: bool = False, tolerant: bool = False
    ) -> None:
        """Exchanges all other records, for so many rows in turn, then all other targets, for one row.

        Args:
            pool: the records to choose from.
            rows: how many rows of the batch are looked at.
            size: how many records a batch has.
            reorder: whether to try other orders and sizes too.
            tolerant: whether the records are made up, so that errors of the model tell nothing.
        """
        try:
            chosen, seed = pool.draw(size), chance.getrandbits(63)
            base = self._pass(seed, pool, chosen)
            self._exchange(pool, chosen, seed, base, rows)
            if reorder and self.deterministic:
                self._reorder(pool, chosen, seed, base)
        except Exception as error:
            if isinstance(error, RecordsMixed) or not tolerant:
                raise

    def exchange_half(self, pool: Pool, size: int) -> None:
        """Exchanges half of a batch, and then leaves it out."""
        chosen, seed = pool.draw(size), chance.getrandbits(63)
        others, stay = pool.others(chosen), sorted(chance.sample(range(size), max(1, size // 2)))
        mixed = [chosen[place] if place in stay else others[place] for place in range(size)]
        base = self._pass(seed, pool, chosen)
        self._compare(base, self._pass(seed, pool, mixed), stay)
        if self.deterministic:
            alone = self._pass(seed, pool, [chosen[place] for place in stay])
            self._compare(base, alone, stay, range(len(stay)))

    def not_finite(self, pool: Pool) -> None:
        """Makes all other records not finite: a loss that then leaves out the whole batch mixes records."""
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
                found = self.comparison.seeded(self.run, seed, (inputs, targets))
            except Exception:  # a model may refuse such numbers
                continue
            self._compare(base, found, [row])

    def _exchange(self, pool: Pool, chosen: list[int], seed: int, base: Found, rows: int) -> None:
        size, others = len(chosen), pool.others(chosen)
        looked_at = chance.sample(range(size), min(rows, size))
        for row in looked_at:
            mixed = [*others[:row], chosen[row], *others[row + 1 :]]
            self._compare(base, self._pass(seed, pool, mixed), [row])
        if self.targets:
            row = looked_at[0]
            for labels in ([chosen[row]] * size, pool.unlike(chosen[row], size)):
                labels[row] = chosen[row]
                self._compare(base, self._pass(seed, pool, chosen, labels), [row])

    def _reorder(self, pool: Pool, chosen: list[int], seed: int, base: Found) -> None:
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

    def _pass(self, seed: int, pool: Pool, places: Rows, labels: Rows | None = None) -> Found:
        return self.comparison.seeded(self.run, seed, pool.batch(places, labels))

    def _compare(self, base: Found, found: Found, rows: Rows, at: Rows | None = None) -> None:
        if self.comparison.differ(base, found, rows, at):
            raise RecordsMixed("the other records" if at is None else "its place in the batch, or the number of others")


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
