"""The batches of a training, drawn in secret; each is used in order, for one step."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as trees
from torch.utils.data import Sampler, TensorDataset

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.correlated_noise import CorrelatedNoise
from matrixdp.learn.noise import ParameterNoise
from matrixdp.learn.randomness import secret_randomness
from matrixdp.learn.sampling import Collate, PoissonSampler, StepSampler, Turn, count_records, loader_of
from matrixdp.learn.units import Units, UnitSampler


def checked_sizes(records: int, units: Units | None, batch_size: int) -> tuple[int, int]:
    """The number of records or units, and the expected size of a batch, which must be at most that."""
    count, whose = (records, "records") if units is None else (len(units), "units")
    if not _check.count("batch_size", batch_size) <= count:
        raise InvalidInput(f"batch_size must be at most the number of {whose}, {count}, got {batch_size}")
    return count, batch_size


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Where the batches of a training come from.

    Attributes:
        data: the data set.
        collate: makes a batch of a list of one record; None for PyTorch's default.
        records: how many records the data had when the trainer was made.
        units: the units of the records; None if each record is its own unit.
        rate: the probability that a record, or a unit, joins a batch, if batches are independent.
        noise: noise correlated over the steps determines the batches too.
        device: that of the model.
        generator: for reproducible studies; nothing is secret then.
    """

    data: Any
    collate: Collate | None
    records: int
    units: Units | None
    rate: float
    noise: ParameterNoise | CorrelatedNoise
    device: torch.device
    generator: torch.Generator | None

    @property
    def sampling(self) -> str:
        """A readable description of how batches are made."""
        words = f"Poisson, each record with probability {self.rate:.4g}"
        if isinstance(self.noise, CorrelatedNoise):
            words = self.noise.sampling
            if not (self.noise.recorded and type(self.data) is TensorDataset):  # no file has their fingerprint
                words += "; when resumed, the same records in the same order are assumed"
        return words if self.units is None else f"{words}; by units of {self.units.contributions} records"

    def draw(self, trainer: Any, steps: int) -> Iterator[tuple[Any, Turn]]:
        """Batches on the device, in the structure of the data, with the turn of each batch."""
        trainer.check_process()
        if count_records(self.data) != self.records:
            raise InvalidInput("data has another number of records than when the trainer was made; make a new one")
        step, run = (self.noise.step, self.noise.run) if isinstance(self.noise, CorrelatedNoise) else (None, None)
        with self._secret_items(None), _check.withheld("data"):
            drawn = iter(loader_of(self.data, self._sampler(steps), self.collate))
        turn = None
        while True:
            trainer.check_process()
            with self._secret_items(step), _check.withheld("data"):
                found = next(drawn, None)
            if found is None:
                return
            turn = Turn(trainer, turn, step, run)
            step = None if step is None else step + 1
            yield trees.tree_map_only(torch.Tensor, lambda part: part.to(self.device, non_blocking=True), found), turn

    def check_turn(self, turn: Turn) -> None:
        """Raises InvalidInput if a batch is not the next one."""
        if turn.before is not None and not turn.before.used:
            raise InvalidInput(
                "the batch before this one was left out. Take a step with each batch, also with an empty one: whether "
                "there is a step must not depend on the records. To stop early, leave the loop"
            )
        if isinstance(self.noise, CorrelatedNoise) and (turn.step, turn.run) != (self.noise.step, self.noise.run):
            raise InvalidInput(
                f"the batch was drawn for another step than the next one, {self.noise.step + 1}, or before a "
                "checkpoint was loaded: where noise is correlated over time, a record takes part at its own steps "
                "alone. Draw new batches"
            )

    def _sampler(self, steps: int) -> Sampler[list[int]]:
        sampler: Sampler[list[int]]
        if isinstance(self.noise, CorrelatedNoise):
            sampler = StepSampler(self.noise.batch, self.noise.step, steps)
            if self.units is not None:
                self.units.choose(self.noise.unit_key())
        else:
            count = self.records if self.units is None else len(self.units)
            sampler = PoissonSampler(count, self.rate, steps, self.generator)
        return sampler if self.units is None else UnitSampler(self.units, sampler)

    def secret_dropout(self, step: int | None, use: int = 0) -> AbstractContextManager[None]:
        """Secret dropout masks: leaving out a record shifts the masks of the others, so they must not be known."""
        if self.generator is not None:
            return nullcontext()
        key = None
        if isinstance(self.noise, CorrelatedNoise) and step is not None:
            key = self.noise.dropout_key(step, use)
        return secret_randomness(self.device, key)

    def _secret_items(self, step: int | None) -> AbstractContextManager[None]:
        """Secret random numbers for data sets that may augment records at random."""
        return nullcontext() if type(self.data) is TensorDataset else self.secret_dropout(step, use=1)


def likely_size(expected: float, most: int | None) -> int:
    """A size that few Poisson samples exceed: three standard deviations above the expected one, or the most allowed."""
    size = math.ceil(expected + 3 * math.sqrt(expected))
    return size if most is None else min(size, most)


def in_parts(batch: Any, most: int | None) -> Iterator[Any]:
    """A batch in parts of at most `most` records."""
    records = len(trees.tree_leaves(batch)[0])
    stride = most or max(records, 1)
    for first in range(0, records, stride):
        yield trees.tree_map_only(torch.Tensor, operator.itemgetter(slice(first, first + stride)), batch)
