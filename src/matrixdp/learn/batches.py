"""The batches of a training: drawn in secret, in order, each for one step."""

from __future__ import annotations

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
    """How many units of privacy there are, and the expected size of a batch, which is at most that."""
    count, whose = (records, "records") if units is None else (len(units), "units")
    if not _check.count("batch_size", batch_size) <= count:
        raise InvalidInput(f"batch_size must be at most the number of {whose}, {count}, got {batch_size}")
    return count, batch_size


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Where the batches of a training come from.

    Attributes:
        data: the data set.
        collate: makes a batch of a list of one record; None for PyTorch's own.
        records: how many records there were in the data when the trainer was made.
        units: whose they are, where a unit has several; None for one record per unit.
        rate: the probability of a record, or a unit, to join a batch, where batches are independent.
        noise: has the batches where the noise is correlated over the steps.
        device: where the model is.
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
        """How batches are made, in words."""
        words = f"Poisson, each record with probability {self.rate:.4g}"
        if isinstance(self.noise, CorrelatedNoise):
            words = self.noise.sampling
            if not (self.noise.recorded and type(self.data) is TensorDataset):  # no file has a fingerprint of them
                words += "; when resumed, the same records in the same order are assumed"
        return words if self.units is None else f"{words}; by units of {self.units.contributions} records"

    def draw(self, trainer: Any, steps: int) -> Iterator[tuple[Any, Turn]]:
        """Batches on the device, in the structure of the data, with the turn of each."""
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
                "alone. Draw batches anew"
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
        """Secret dropout masks: leaving a record out moves the masks of the others, so they must not be known."""
        if self.generator is not None:
            return nullcontext()
        key = None
        if isinstance(self.noise, CorrelatedNoise) and step is not None:
            key = self.noise.dropout_key(step, use)
        return secret_randomness(self.device, key)

    def _secret_items(self, step: int | None) -> AbstractContextManager[None]:
        """Secret random numbers for data sets that may change their records at random."""
        return nullcontext() if type(self.data) is TensorDataset else self.secret_dropout(step, use=1)


def in_parts(batch: Any, most: int | None) -> Iterator[Any]:
    """A batch, at most so many records at a time."""
    records = len(trees.tree_leaves(batch)[0])
    stride = most or max(records, 1)
    for first in range(0, records, stride):
        yield trees.tree_map_only(torch.Tensor, operator.itemgetter(slice(first, first + stride)), batch)
