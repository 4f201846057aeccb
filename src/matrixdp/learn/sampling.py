"""Poisson sampling: every record joins a batch with the same probability, independently of all else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.noise.entropy import Key

_WORD = 1 << 64


class PoissonSampler(Sampler[list[int]]):
    """Batches of indices, each index in each batch with the same probability.

    Guarantee: an index joins with a probability of at most `rate`, decided by a 64-bit word of a cryptographic stream
    with a fresh key for every pass; who knows all other choices learns nothing about this one.

    Args:
        records: how many records there are.
        rate: the probability of each to join a batch.
        batches: how many batches a pass has.
        generator: for reproducible studies only; sampling then hides nothing from those who know the seed.
    """

    def __init__(self, records: int, rate: float, batches: int, generator: torch.Generator | None = None) -> None:
        self.records, self.batches = _check.count("records", records), _check.count("batches", batches)
        if not 0 < _check.number("rate", rate) <= 1:
            raise InvalidInput(f"rate must be above 0 and at most 1, got {rate!r}")
        self.rate, self.generator = float(rate), generator

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        if self.generator is not None:
            for _ in range(self.batches):
                yield _seeded(self.records, self.generator).lt(self.rate).nonzero()[:, 0].tolist()
            return
        stream, words = Key().stream(), np.empty(self.records, dtype=np.uint64)
        for batch in range(self.batches):
            stream.fill(words, batch)
            # of the 2^64 values of a word, the first floor(rate * 2^64) are chosen
            chosen = words < math.floor(self.rate * _WORD) if self.rate < 1 else np.ones(self.records, dtype=bool)
            yield np.flatnonzero(chosen).tolist()


def _seeded(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64)


def loader(data: Any, rate: float, batches: int, generator: torch.Generator | None = None) -> DataLoader[Any]:
    """A loader of Poisson batches over a data set; tensors are gathered at once, other data sets record by record."""
    sampler = PoissonSampler(len(data), rate, batches, generator)
    if type(data) is TensorDataset:  # what is derived from it may do more, and for one record
        return DataLoader(data, sampler=sampler, batch_size=None)
    from opacus.data_loader import DPDataLoader  # seconds to load, and tensors do without

    poisson = DPDataLoader(data, sample_rate=rate)  # for its collation, which gives empty batches their shape
    return DataLoader(data, batch_sampler=sampler, collate_fn=poisson.collate_fn)
