"""Poisson sampling: every record joins a batch with the same probability, independently of all else.

A record must be in the data once: sampling and clipping bound what one index of the data set changes. Where repetitions
can be seen, by indices of subsets or by rows that lie at the same place in memory, they are refused; copies of a record
that are stored elsewhere cannot be told from other records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.probe_records import POOL, chance
from matrixdp.learn.randomness import secret_randomness
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
    return DataLoader(_OneByOne(data), batch_sampler=sampler, collate_fn=poisson.collate_fn)


class _OneByOne(Dataset[Any]):
    """A data set without `__getitems__`, which makes a whole batch and so may mix or repeat records."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class Turn:
    """The place of a batch among those of its trainer."""

    def __init__(self, trainer: Any, before: Turn | None = None) -> None:
        self.trainer, self.before, self.used = trainer, before, False

    def take(self) -> None:
        """Marks it as used."""
        self.used, self.before = True, None


class PoissonBatch:
    """Records drawn for one step by `PrivateSGD.batches`, to be used as they are.

    A batch that is cut, doubled, filled up or made by hand is no Poisson sample, and is refused: change records in the
    data set, one at a time, or in the model.
    """

    def __init__(self, inputs: Any, targets: Any, *, turn: Turn | None = None) -> None:
        self.drawn = inputs, targets
        """What the step uses; others see copies, so that whatever is done to those, the step is that of the draw."""
        self._versions = _version(inputs), _version(targets)
        self.turn = Turn(None) if turn is None else turn
        self._shown: dict[str, tuple[Any, int]] = {}

    @property
    def inputs(self) -> Any:
        """A copy of what the model takes, one row per record."""
        return self._copy("inputs", self.drawn[0])

    @property
    def targets(self) -> Any:
        """A copy of what the loss takes beside the model's output."""
        return self._copy("targets", self.drawn[1])

    def _copy(self, name: str, part: Any) -> Any:
        if name not in self._shown:
            copied = part.clone()
            self._shown[name] = copied, copied._version
        return self._shown[name][0]

    @property
    def unchanged(self) -> bool:
        """Whether nothing was written into it, as far as PyTorch counts writes."""
        drawn = (_version(self.drawn[0]), _version(self.drawn[1]))
        return drawn == self._versions and all(copied._version == was for copied, was in self._shown.values())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name in ("inputs", "targets"):
            raise InvalidInput(
                f"{name} of a batch cannot be changed: the guarantee rests on batches as they were drawn. Change "
                "records in the data set, one at a time, or in the model; largest_batch= saves memory"
            )
        super().__setattr__(name, value)


def _version(part: Any) -> int | None:
    """How often was written into a tensor, where that is counted."""
    return part._version if isinstance(part, torch.Tensor) and not part.is_inference() else None


def count_records(data: Any) -> int:
    """How many records a data set has; refuses one that cannot be sampled, or repeats records."""
    if isinstance(data, DataLoader):
        raise InvalidInput(
            "data must be a data set, got a DataLoader: its sampler is not Poisson sampling, and the guarantee rests "
            "on that; pass loader.dataset and batch_size, and PrivateSGD draws the batches"
        )
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InvalidInput(f"data must be a data set with a length and records by index, got {type(data).__name__}")
    records = _check.count("the number of records", len(data))
    places = _places(data)
    if len(np.unique(places, axis=0)) < len(places):
        raise InvalidInput(
            "data must hold each record once: indices of a Subset, parts of a ConcatDataset or items of a list repeat "
            "some, and a "
            "record that is there k times changes a step k times as much as is paid for. Leave repetitions out; for "
            "rare classes use weights in the loss that are public constants"
        )
    return records


def _places(data: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each record which data set it comes from, or which memory, and where it is there."""
    if isinstance(data, Subset):
        inner = _places(data.dataset)
        return inner[np.asarray([int(index) for index in data.indices], dtype=np.int64)]
    if isinstance(data, ConcatDataset):
        return np.concatenate([_places(part) for part in data.datasets])
    if isinstance(data, StackDataset):
        return _places(next(iter(data.datasets.values() if isinstance(data.datasets, dict) else data.datasets)))
    if isinstance(data, (list, tuple)):
        return np.array([_item_place(item) for item in data], dtype=np.int64).reshape(-1, 2)
    source, where = id(data), np.arange(len(data), dtype=np.int64)
    if isinstance(data, TensorDataset):
        # the first tensor whose rows differ; if none does, all records are one
        rows = next((t for t in data.tensors if len(t) < 2 or t.stride(0) != 0), data.tensors[0])
        if rows.layout == torch.strided and rows.numel():
            source = rows.untyped_storage().data_ptr()
            where = (int(rows.storage_offset()) + int(rows.stride(0)) * where) * rows.element_size()
    return np.stack([np.full(len(where), source, dtype=np.int64), where], axis=1)


def _item_place(item: Any) -> tuple[int, int]:
    """The memory of the first tensor in an item and where it is there; the item itself if it has none."""
    parts = item if isinstance(item, (list, tuple)) else [item]
    rows = next((t for t in parts if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.numel()), None)
    if rows is None:
        return id(item), 0
    return rows.untyped_storage().data_ptr(), int(rows.storage_offset()) * rows.element_size()


def some_records(data: Any, device: torch.device) -> tuple[Any, Any]:
    """A few records for a probe, with many different targets, whatever batches will be drawn."""
    everywhere = range(len(data))
    chosen = chance.sample(everywhere, min(POOL, len(data)))
    if type(data) is TensorDataset:
        targets = data.tensors[-1]
        if targets.ndim == 1 and not targets.is_floating_point():
            values, kinds = torch.unique(targets, return_inverse=True)
            one_of_each = [chance.choice((kinds == kind).nonzero()[:, 0].tolist()) for kind in range(len(values[:32]))]
            chosen = list(dict.fromkeys([*one_of_each, *chosen]))[:POOL]
        found = data[chosen]
    else:
        with secret_randomness(device):
            found = default_collate([data[index] for index in chosen])
    inputs, targets = (part.to(device) for part in found)
    return inputs, targets
