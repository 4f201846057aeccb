"""Operations on whole batches, below `torch.func.vmap`, and the memory into which they write values of records.

Functions of PyTorch disable torch function modes while they run, but not dispatch modes: this one sees every operation,
wherever it is called from. What an operation computes from a record is in the memory of its results or of the tensors
that it writes into. So all memory with values of records is known, and can be set to zero. Memory that existed before
and is written into without a record could count the passes; it is tracked too.
"""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = (type(None), bool, int, float, str)
# Operations whose result's size, or a number, depends on values; besides those that PyTorch marks as such.
_BY_VALUE = frozenset({"aten::_pack_padded_sequence", "aten::_is_all_true", "aten::_is_any_true"})
# Seconds to wait for the thread of a device's backward pass, which frees its tensors after it has returned.
_PAUSES = (0.0, 0.01, 0.1, 1.0)


class Below(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the memory that holds values computed from records, the given leaves.

    It refuses results whose size depends on values, results in memory of other records, and random numbers that may be
    known.
    """

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.raised = False
        self._given = {_memory(leaf)._cdata: leaf for leaf in leaves if leaf is not None}
        # Weak references to storages, whose addresses are not reused meanwhile: with values of records; made without a
        # record; and made by other code, where a constant was written into.
        self._made: dict[int, Any] = {}
        self._constant: dict[int, Any] = {}
        self._touched: dict[int, Any] = {}
        self._seeds = _seeds()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; PyTorch's guard against that takes longer than most operations."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # the watch is for what users call
            return self._tracked(function, args, kwargs)

    def _tracked(self, function: Any, args: Any, kwargs: Any) -> Any:
        if _sized_by_values(function) and not (function._schema.name == "aten::index" and not _masked(args[1])):
            raise RuntimeError(f"the size of what {function._schema.name} gives depends on values")
        if _is_random(function) and self._known_numbers(args, kwargs):
            raise RuntimeError(
                "random numbers come from its own generator or seed. Those of a record depend on its position in the "
                "batch, so they must be secret: draw from torch's default generator, and do not seed it"
            )
        statistics = _moves_statistics(function)
        if statistics and all(args[place] is not None and args[place] is not False for place in statistics):
            raise RuntimeError(f"{function._schema.name} writes into running statistics")
        if "resize" in function._schema.name:
            raise RuntimeError(f"{function._schema.name} would give a record the memory of others")
        try:
            found = function(*args, **kwargs) if kwargs else function(*args)
            if "empty" in function._schema.name:
                found.zero_()  # memory that is not set may hold what other records left there
        except BaseException:
            self.raised = True
            raise
        given = tensors_in((args, kwargs) if kwargs else args)
        places = _written_places(function)
        written = tensors_in([argument(place, args, kwargs) for place in places]) if places else []
        if any(self.holds_records(tensor) for tensor in given):
            for tensor in (*tensors_in(found), *written):
                self._follow(_memory(tensor), self._made)
            return found
        for tensor in filter(_is_strided, written):
            self._follow(tensor.untyped_storage(), self._touched)
        others = {tensor.untyped_storage()._cdata for tensor in filter(_is_strided, given)}
        for tensor in filter(_is_strided, tensors_in(found)):
            if tensor.untyped_storage()._cdata not in others:  # else a view
                self._follow(tensor.untyped_storage(), self._constant)
        return found

    def _follow(self, memory: Any, memories: dict[int, Any]) -> None:
        """Adds memory to `memories`, unless it is known to hold records, or as a constant."""
        place = memory._cdata
        known = place in self._given or place in self._made
        if not known and (memories is self._made or not (place in self._constant or place in self._touched)):
            memories[place] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]

    def _known_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        own = any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values()))
        return own or _seeds() != self._seeds

    def holds_records(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor, as operations below vmap see it, has values of records."""
        if not _is_strided(tensor):
            return False  # a constant: `_memory` refuses sparse tensors of records
        place = tensor.untyped_storage()._cdata
        return place in self._made or place in self._given

    def survivors(self, results: list[Tensor]) -> bool:
        """Whether memory with records (but the results), or foreign memory that was written into, outlives the pass."""
        for result in results:
            self._made.pop(_memory(result)._cdata, None)
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        for pause in _PAUSES if started else (0.0,):
            if self._all_gone():
                return False
            gc.collect()  # what only a reference cycle holds is not kept
            time.sleep(pause)
        return not self._all_gone()

    def _all_gone(self) -> bool:
        return all(reference.expired() for reference in (*self._made.values(), *self._touched.values()))

    def forget(self) -> None:
        """Sets all remaining memory with values of records to zero, wherever it is stored."""
        for reference in self._made.values():
            memory = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if memory is not None:
                memory.fill_(0)  # type: ignore[attr-defined]


def _seeds() -> list[int]:
    """The seeds of torch's default generators."""
    on_devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [generator.initial_seed() for generator in (torch.default_generator, *on_devices)]


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _memory(tensor: Tensor) -> Any:
    if not _is_strided(tensor) or tensor.is_quantized:  # quantized records of a batch would share one scale
        raise RuntimeError("a sparse or quantized tensor of a record is made")
    return tensor.untyped_storage()


def own(result: Tensor) -> Tensor:
    """A result whose memory nothing else holds: itself, or a copy."""
    memory = _memory(result)  # which counts as one holder of itself, besides the tensor
    holders = result._use_count()  # type: ignore[attr-defined]
    alone = holders == 1 and torch._C._storage_Use_Count(memory._cdata) == 2
    return result if alone else result.clone()


@functools.cache
def _sized_by_values(function: Any) -> bool:
    return torch.Tag.dynamic_output_shape in function.tags or function._schema.name in _BY_VALUE


@functools.cache
def _is_random(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


@functools.cache
def _written_places(function: Any) -> tuple[tuple[int, str], ...]:
    """The arguments into whose memory an operation writes, by place and name; `set_` gives a tensor other memory."""
    writes = function._schema.is_mutable and function._schema.name != "aten::set_"
    arguments = function._schema.arguments if writes else ()
    return tuple((place, argument.name) for place, argument in enumerate(arguments) if argument.is_write)


@functools.cache
def _moves_statistics(function: Any) -> tuple[int, ...]:
    """The positions of the running mean and the training flag, of an operation that writes into running statistics.

    PyTorch does not mark that as a write.
    """
    arguments = {argument.name: place for place, argument in enumerate(function._schema.arguments)}
    place = arguments.get("running_mean")
    if place is None or function._schema.arguments[place].is_write or "backward" in function._schema.name:
        return ()
    return (place, arguments["training"]) if "training" in arguments else (place,)


def argument(place: tuple[int, str], args: Any, kwargs: dict[str, Any] | None) -> Any:
    """An argument by its position and name; None if it is not given."""
    return args[place[0]] if place[0] < len(args) else (kwargs or {}).get(place[1])


def without_class(value: int | float | str) -> int | float | str:
    """A number or text without the methods of its class."""
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else str.__str__(value)


def _masked(indices: Any) -> bool:
    """Whether an index is a mask, and not a list of positions."""
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value; most are a tensor or a tuple, for which `tree_leaves` would take long."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in PLAIN:
        return []
    if type(value) in (tuple, list):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [leaf for leaf in trees.tree_leaves(value) if isinstance(leaf, Tensor)]
