"""Poisson sampling: every record joins a batch with the same probability, independently of all others.

Each record must be in the data once: sampling and clipping bound the change by one index of the data set. Duplicates
that share an index of a subset, or the same place in memory, are refused; copies of a record that are stored elsewhere
cannot be distinguished from other records.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as trees
from torch.utils import data as datasets

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.randomness import secret_randomness
from matrixdp.secure.entropy import Key

_WORD = 1 << 64
Collate = Callable[[list[Any]], Any]
Indices = np.ndarray[Any, np.dtype[np.int64]]


class PoissonSampler(datasets.Sampler[list[int]]):
    """Batches of indices; each index joins each batch with the same probability.

    Guarantee: an index joins with a probability of at most `rate`, decided by a 64-bit word of a cryptographic stream
    with a fresh key for every pass, independently of all other choices.

    Args:
        records: how many records there are.
        rate: the probability that a record joins a batch.
        batches: how many batches a pass has.
        generator: for reproducible studies only; seeded sampling is not private.

    Example:
        >>> from matrixdp.learn import PoissonSampler
        >>> sampler = PoissonSampler(records=1000, rate=0.05, batches=3)
        >>> len(list(sampler))
        3
    """

    def __init__(self, records: int, rate: float, batches: int, generator: torch.Generator | None = None) -> None:
        self.records, self.batches = _check.count("records", records), _check.count("batches", batches)
        if not 0 < _check.number("rate", rate) <= 1:
            raise InvalidInput(f"rate must be above 0 and at most 1, got {rate!r}")
        self.rate, self.generator = float(rate), generator

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        return (chosen.tolist() for chosen in self.drawn(Key()))

    def drawn(self, key: Key) -> Iterator[Indices]:
        """The batches that a key determines; the key can be used once."""
        if (seeded := self.generator) is not None:
            for _ in range(self.batches):
                uniform = torch.rand(self.records, generator=seeded, device=seeded.device, dtype=torch.float64)
                yield uniform.lt(self.rate).nonzero()[:, 0].cpu().numpy()
            return
        stream, words = key.stream(), np.empty(self.records, dtype=np.uint64)
        for batch in range(self.batches):
            stream.fill(words, batch)
            # a record joins for the first floor(rate * 2^64) of the 2^64 values of a word
            chosen = words < math.floor(self.rate * _WORD) if self.rate < 1 else np.ones(self.records, dtype=bool)
            yield np.flatnonzero(chosen)


class CyclicPoisson:
    """Poisson sampling from groups in turn: step t samples the records of group t mod groups.

    Args:
        group: the group of each record.
        groups: how many groups there are.
        rate: the probability that a record joins a batch of its group.
    """

    def __init__(self, group: Indices, groups: int, rate: float) -> None:
        self._members, self._rate = [np.flatnonzero(group == number) for number in range(groups)], rate

    def batch(self, step: int, key: Key, generator: torch.Generator | None) -> list[int]:
        """The indices of one step's records; `key` can be used once."""
        members = self._members[step % len(self._members)]
        if not len(members):
            return []
        (chosen,) = PoissonSampler(len(members), self._rate, 1, generator).drawn(key)
        return [int(index) for index in members[chosen]]


class FixedOrder:
    """The same batches in every epoch.

    Args:
        order: the indices of all records.
        size: of a batch; the last batch may be smaller.
    """

    def __init__(self, order: Indices, size: int) -> None:
        self._batches = [[int(index) for index in order[first : first + size]] for first in range(0, len(order), size)]

    def batch(self, step: int, key: Key, generator: torch.Generator | None) -> list[int]:
        """The indices of one step's records."""
        return self._batches[step % len(self._batches)]


class StepSampler(datasets.Sampler[list[int]]):
    """The batches of consecutive steps.

    Args:
        batch: gives the indices of the records of a step.
        first: the first step, from 0.
        batches: how many steps.
    """

    def __init__(self, batch: Callable[[int], list[int]], first: int, batches: int) -> None:
        self.batch, self.first, self.batches = batch, first, batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.batch, range(self.first, self.first + self.batches))


def loader(
    data: Any, rate: float, batches: int, generator: torch.Generator | None = None, collate: Collate | None = None
) -> datasets.DataLoader[Any]:
    """A loader of Poisson batches over a data set."""
    return loader_of(data, PoissonSampler(len(data), rate, batches, generator), collate)


def loader_of(
    data: Any, sampler: datasets.Sampler[list[int]], collate: Collate | None = None
) -> datasets.DataLoader[Any]:
    """A loader of the batches of a sampler; tensors are indexed as a whole, other data sets record by record."""
    if type(data) is datasets.TensorDataset and collate is None:  # a subclass may change records
        return datasets.DataLoader(data, sampler=sampler, batch_size=None)
    return datasets.DataLoader(_OneByOne(data), batch_sampler=sampler, collate_fn=_Collation(data, collate))


class _OneByOne(datasets.Dataset[Any]):
    """Hides `__getitems__` of a data set: it makes a whole batch, and so may mix or repeat records."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class _Collation:
    """Makes a batch of records; any function but PyTorch's default sees one record at a time, so it cannot mix them.

    An empty batch has the usual structure and shapes, with no rows.
    """

    def __init__(self, data: Any, collate: Collate | None) -> None:
        self._data = data
        self._collate = None if collate is datasets.default_collate else collate

    def __call__(self, records: list[Any]) -> Any:
        if not records:
            return trees.tree_map_only(Tensor, lambda t: t[:0], self([self._data[0]]))
        if self._collate is None:
            return datasets.default_collate(records)
        each = [trees.tree_flatten(self._collate([record])) for record in records]
        columns = zip(*(leaves for leaves, _ in each), strict=True)
        return trees.tree_unflatten([torch.cat(column) for column in columns], each[0][1])


def split(batch: Any, model: nn.Module) -> tuple[Any, Any]:
    """Splits a batch into the model's inputs and what the loss takes besides the model's outputs.

    Of a tuple or list, the last part is the target; several inputs are passed as positional arguments, unless `forward`
    takes them as one. Of a dictionary, the model gets the entries that `forward` names as keyword arguments, and the
    loss gets the whole dictionary. A single tensor is both.
    """
    if not all(isinstance(leaf, Tensor) for leaf in trees.tree_leaves(batch)):
        raise InvalidInput("data must give tensors and numbers, in tuples and dictionaries; drop texts and other items")
    if isinstance(batch, dict):
        names = inspect.signature(model.forward).parameters
        everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
        inputs = {name: part for name, part in batch.items() if everything or name in names}
        if not inputs:
            raise InvalidInput("the model's forward must take an entry of the records by name, and takes none")
        return inputs, batch
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        given = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        several = isinstance(given, list) and _takes(model, *given) and not _takes(model, given)
        return tuple(given) if several else given, batch[-1]
    return (batch[0], batch[0]) if isinstance(batch, (tuple, list)) else (batch, batch)


def _takes(model: nn.Module, *arguments: Any) -> bool:
    try:
        inspect.signature(model.forward).bind(*arguments)
    except TypeError:
        return False
    return True


class Turn:
    """The position of a batch among those of its trainer."""

    def __init__(self, trainer: Any, before: Turn | None = None, step: int | None = None, run: object = None) -> None:
        self.trainer, self.before, self.used = trainer, before, False
        self.step, self.run = step, run
        """For noise over time: the step that the batch was drawn for, from 0, and the run whose coins drew it."""

    def take(self) -> None:
        """Marks it as used."""
        self.used, self.before = True, None


class PoissonBatch:
    """Records drawn for one step by `PrivateSGD.batches`, to be used as they are.

    A batch that is truncated, repeated, padded or made by hand is not a Poisson sample, and is refused: change records
    in the data set, one at a time, or in the model.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from matrixdp import Budget
        >>> from matrixdp.learn import PrivateSGD
        >>> data = TensorDataset(torch.randn(200, 4), torch.randint(2, (200,)))
        >>> model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss(reduction="none")
        >>> optimizer, budget = torch.optim.SGD(model.parameters(), lr=0.1), Budget(3.0, 1e-5)
        >>> trainer = PrivateSGD(model, optimizer, data, loss, budget=budget, batch_size=20, clip=1.0, epochs=1)
        >>> for batch in trainer.batches():
        ...     trainer.step(batch)
        ...
        >>> type(batch).__name__
        'PoissonBatch'
    """

    def __init__(self, inputs: Any, targets: Any, *, turn: Turn | None = None) -> None:
        self.drawn = inputs, targets
        """What the step uses; callers see copies, so that nothing they do to those changes the step."""
        self._versions = _version(inputs), _version(targets)
        self.turn = Turn(None) if turn is None else turn
        self._shown: dict[str, tuple[Any, list[int | None]]] = {}

    @property
    def inputs(self) -> Any:
        """A copy of what the model takes, one row per record."""
        return self._copy("inputs", self.drawn[0])

    @property
    def targets(self) -> Any:
        """A copy of what the loss takes besides the model's output."""
        return self._copy("targets", self.drawn[1])

    def _copy(self, name: str, part: Any) -> Any:
        if name not in self._shown:
            copied = trees.tree_map_only(Tensor, torch.clone, part)
            self._shown[name] = copied, _version(copied)
        return self._shown[name][0]

    @property
    def unchanged(self) -> bool:
        """Whether nothing was written into its tensors, as far as PyTorch counts writes."""
        drawn = (_version(self.drawn[0]), _version(self.drawn[1]))
        return drawn == self._versions and all(_version(copied) == was for copied, was in self._shown.values())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name in ("inputs", "targets"):
            raise InvalidInput(
                f"{name} of a batch cannot be changed: the guarantee rests on batches as they were drawn. Change "
                "records in the data set, one at a time, or in the model; largest_batch= saves memory"
            )
        super().__setattr__(name, value)


def check_batch(batch: Any, trainer: Any) -> None:
    """Raises InvalidInput unless this is an unchanged batch of this trainer that was not used for a step yet."""
    if not isinstance(batch, PoissonBatch) or batch.turn.used or batch.turn.trainer is not trainer:
        raise InvalidInput(
            "batch must come from this trainer's batches(), and serves one step: a sampler that shuffles, or gives "
            "batches of a fixed size, is not Poisson sampling, and the guarantee would not hold. Write `for batch "
            "in trainer.batches(): trainer.step(batch)`"
        )
    if not batch.unchanged:
        raise InvalidInput(
            "the batch was changed after it was drawn; change records in the data set, one at a time, or in the "
            "model: what is done to a batch as a whole is not covered by the guarantee"
        )


def _version(part: Any) -> list[int | None]:
    """How many writes into each tensor PyTorch has counted."""
    leaves = [leaf for leaf in trees.tree_leaves(part) if isinstance(leaf, Tensor)]
    return [None if leaf.is_inference() else leaf._version for leaf in leaves]


def count_records(data: Any) -> int:
    """How many records a data set has; refuses one that cannot be sampled, or holds duplicates."""
    if isinstance(data, datasets.DataLoader):
        raise InvalidInput(
            "data must be a data set, got a DataLoader: its sampler is not Poisson sampling, and the guarantee rests "
            "on that; use make_private(model, optimizer, loader, ...), or pass loader.dataset and batch_size"
        )
    if isinstance(data, datasets.IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InvalidInput(f"data must be a data set with a length and records by index, got {type(data).__name__}")
    records = _check.count("the number of records", len(data))
    places = _places(data)
    if len(np.unique(places, axis=0)) < len(places):
        raise InvalidInput(
            "data must hold each record once: indices of a Subset, parts of a ConcatDataset or items of a list repeat "
            "some, and a record with k copies changes a step k times as much as is accounted for. Remove duplicates; "
            "for rare classes use weights in the loss that are public constants"
        )
    return records


def _places(data: Any) -> Indices:
    """For each record, the data set or memory that it is in, and its position there."""
    if isinstance(data, datasets.Subset):
        inner = _places(data.dataset)
        return inner[np.asarray([int(index) for index in data.indices], dtype=np.int64)]
    if isinstance(data, datasets.ConcatDataset):
        return np.concatenate([_places(part) for part in data.datasets])
    if isinstance(data, datasets.StackDataset):
        return _places(next(iter(data.datasets.values() if isinstance(data.datasets, dict) else data.datasets)))
    if isinstance(data, (list, tuple)):
        return np.array([_item_place(item) for item in data], dtype=np.int64).reshape(-1, 2)
    source, where = id(data), np.arange(len(data), dtype=np.int64)
    if isinstance(data, datasets.TensorDataset):
        # the first tensor whose rows differ; if none does, all records are one
        rows = next((t for t in data.tensors if len(t) < 2 or t.stride(0) != 0), data.tensors[0])
        if rows.layout == torch.strided and rows.numel():
            source = rows.untyped_storage().data_ptr()
            where = (int(rows.storage_offset()) + int(rows.stride(0)) * where) * rows.element_size()
    return np.stack([np.full(len(where), source, dtype=np.int64), where], axis=1)


def _item_place(item: Any) -> tuple[int, int]:
    """The memory of the first tensor in an item and its position there; the item itself if it has no tensor."""
    parts = item if isinstance(item, (list, tuple)) else [item]
    rows = next((t for t in parts if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.numel()), None)
    if rows is None:
        return id(item), 0
    return rows.untyped_storage().data_ptr(), int(rows.storage_offset()) * rows.element_size()


def example(data: Any, device: torch.device, collate: Collate | None = None) -> Any:
    """A batch of one record with the structure, shapes and types of the data, and zeros in place of its numbers."""
    if type(data) is datasets.TensorDataset and collate is None:
        found: Any = tuple(tensor[:1] for tensor in data.tensors)
    else:
        with secret_randomness(device):
            found = _Collation(data, collate)([data[0]])
    return trees.tree_map_only(Tensor, lambda t: torch.zeros_like(t, device=device), found)
