"""The state of a model and a loss: snapshots of everything reachable from them, and copies that can be tried out.

A record that stays behind in a parameter, a buffer, an attribute, a list or a closure is not covered by any noise. So
snapshots of all these are compared before and after a pass. They include the usual containers of the standard library:
byte arrays, queues, weak dictionaries, variables of threads and contexts, generators and caches of functions. What is
written elsewhere (files, other processes, objects of other libraries) is not seen.
"""

from __future__ import annotations

import array
import contextvars
import copy
import functools
import io
import queue
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _hooks
from torch.utils.data import DataLoader, Dataset

from matrixdp.errors import InvalidInput

# The most objects that are looked at; a model has a few dozen per layer.
MOST_OBJECTS = 200_000

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic)
# Libraries whose functions and classes hold no state of a user's model.
_LIBRARIES = frozenset({"torch", "numpy", "scipy", "opacus", "matrixdp", *sys.stdlib_module_names} - {"__main__"})
_CONTAINERS = frozenset({"builtins", "collections", "functools", "types"})
_BYTES = (bytearray, array.array)
_FILES = (io.BytesIO, io.StringIO)
_CACHE = type(functools.cache(len))
_HOLDERS = (*_BYTES, *_FILES, threading.local, contextvars.ContextVar, queue.Queue, queue.SimpleQueue,
            weakref.WeakKeyDictionary, weakref.WeakValueDictionary)  # fmt: skip
_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")

Path = tuple[str, ...]
Snapshot = dict[Path, Any]


def snapshot(**roots: Any) -> Snapshot:
    """Values of all tensors, arrays, numbers and containers that are reached from the roots, by their paths."""
    return {path: _value(found) for path, found in _walk(roots)}


def check_unchanged(before: Snapshot, **roots: Any) -> None:
    """Raises InvalidInput if anything reached from the roots has changed since the snapshot was taken."""
    after = snapshot(**roots)
    for path in (*before, *(path for path in after if path not in before)):
        if path not in before or path not in after or not _same(before[path], after[path]):
            place = ".".join(part for part in path if not part.startswith("["))  # names of attributes alone
            raise InvalidInput(
                f"the model or the loss keeps what it saw of the records, without noise, in {place}. Use layers that "
                "keep no running statistics, such as GroupNorm, and store no activations, averages or counters; what "
                "is set up on a first pass must be set up with public inputs before"
            )


def configuration(model: nn.Module, loss: Any) -> tuple[Any, ...]:
    """The parts of model and loss, their switches and hooks: what a probe found holds while this stays the same."""
    owner = getattr(loss, "__self__", loss)
    parts = [*model.modules(), *(owner.modules() if isinstance(owner, nn.Module) else [owner])]
    everywhere = tuple(tuple(getattr(_hooks, f"_global_{kind}")) for kind in _HOOKS)
    return everywhere, *(
        (
            id(part),
            type(part),
            id(vars(part).get("forward")) if isinstance(part, nn.Module) else None,
            tuple((k, v) for k, v in getattr(part, "__dict__", {}).items() if isinstance(v, (bool, str))),
            *(tuple(getattr(part, f"_{kind}", ())) for kind in _HOOKS),
        )
        for part in parts
    )


def copies(model: nn.Module, loss: Any, dtype: torch.dtype | None = None) -> tuple[nn.Module, Any] | None:
    """Copies of a model and its loss that share no state with them, closures included; None if that is impossible.

    Their floating-point numbers get another type, if one is given.
    """
    memo: dict[int, Any] = {}
    functions: list[types.FunctionType] = []
    for _, found in _walk({"model": model, "loss": loss}):
        if isinstance(found, Tensor) and type(found) in (Tensor, nn.Parameter):
            memo[id(found)] = _tensor_copy(found, dtype)
        elif isinstance(found, types.FunctionType):
            functions.append(found)
            memo[id(found)] = _with_new_cells(found)
    for function in functions:
        made = memo[id(function)]
        for old, new in zip(function.__closure__ or (), made.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                new.cell_contents = _copy_or_share(old.cell_contents, memo)
        made.__defaults__ = _copy_or_share(function.__defaults__, memo)
        made.__kwdefaults__ = _copy_or_share(function.__kwdefaults__, memo)
        made.__dict__.update(_copy_or_share(function.__dict__, memo))
    try:
        return copy.deepcopy(model, memo), memo.get(id(loss)) or copy.deepcopy(loss, memo)
    except Exception:
        return None


def _copy_or_share(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # such as an open file, or a trainer
        return value


def _with_new_cells(function: types.FunctionType) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in function.__closure__) if function.__closure__ else None
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)


def _tensor_copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    made = tensor.detach().clone()
    if dtype is not None and made.is_floating_point():
        made = made.to(dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """All objects that are reached from the roots, each once, by a path."""
    waiting: list[tuple[Path, Any]] = [((name,), root) for name, root in reversed(list(roots.items()))]
    seen: dict[int, Any] = {}  # keeps them alive, so that no other object takes the place of one
    while waiting:
        if len(seen) >= MOST_OBJECTS:
            raise InvalidInput(
                f"model and loss hold more than {MOST_OBJECTS} objects, too many to check whether they store records; "
                "keep large tables outside, or as arrays"
            )
        path, found = waiting.pop()
        if isinstance(found, _PLAIN):
            yield path, found
            continue
        if id(found) in seen or _opaque(found):
            continue
        seen[id(found)] = found
        yield path, found
        waiting.extend((path + step, inner) for step, inner in reversed(list(_inside(found))))


def _opaque(found: Any) -> bool:
    """Whether an object is not looked into: it belongs to a library, or is the data set itself."""
    if isinstance(found, (nn.Module, Tensor, np.ndarray)):
        return False
    if isinstance(found, (types.ModuleType, types.BuiltinFunctionType, Dataset, DataLoader, torch.optim.Optimizer)):
        return True
    if isinstance(found, _HOLDERS):
        return False
    if isinstance(found, (types.FunctionType, type, _CACHE)):
        return _root(getattr(found, "__module__", None)) in _LIBRARIES
    root = _root(type(found).__module__)
    return root not in _CONTAINERS and (root == "matrixdp" or root in sys.stdlib_module_names)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _inside(found: Any) -> Iterator[tuple[Path, Any]]:
    """What an object holds, by the names of attributes, or by an index in brackets."""
    if isinstance(found, np.ndarray):
        if found.dtype.hasobject:
            yield from _numbered(found.ravel().tolist())
        return
    if isinstance(found, Mapping):
        yield from _numbered(found.values())
        yield from ((("[key]", *place), key) for place, key in _numbered(found) if not isinstance(key, _PLAIN))
    elif isinstance(found, (list, tuple, set, frozenset)) or type(found).__module__ == "collections":
        yield from _numbered(found)
    if isinstance(found, types.FunctionType):
        yield from _of_function(found)
    elif isinstance(found, types.MethodType):
        yield ("__self__",), found.__self__
        yield (found.__name__,), found.__func__
    elif isinstance(found, (staticmethod, classmethod)):
        yield ("[function]",), found.__func__
    elif isinstance(found, property):
        yield from ((("[property]",), part) for part in (found.fget, found.fset) if part is not None)
    elif isinstance(found, type):
        yield from _named(vars(found), ("__dict__", "__weakref__", "__doc__", "__module__"))
        return
    elif isinstance(found, contextvars.ContextVar):
        yield ("[value]",), found.get(None)
        return
    elif isinstance(found, types.GeneratorType):
        yield from _named(found.gi_frame.f_locals if found.gi_frame is not None else {})
        return
    elif type(found).__module__ == "functools":  # partial functions, cached properties
        yield from (((name,), getattr(found, name)) for name in ("func", "args", "keywords") if hasattr(found, name))
        if isinstance(found, functools.singledispatchmethod):  # the rest is a table of types
            return
    yield from _attributes(found)


def _attributes(found: Any) -> Iterator[tuple[Path, Any]]:
    names = getattr(found, "__dict__", {})
    if isinstance(found, nn.Module):
        parts = ("_parameters", "_buffers", "_modules")
        for part in parts:
            yield from _named(names[part])
        names = {name: inner for name, inner in names.items() if name not in parts}
    if isinstance(names, dict):
        # layers of Opacus remember the size of a batch
        plain_too = _root(type(found).__module__) != "opacus"
        yield from ((step, inner) for step, inner in _named(names) if plain_too or not isinstance(inner, _PLAIN))
    if isinstance(found, Tensor) and found.is_leaf and not found.requires_grad:
        yield ("grad",), found.grad
    if isinstance(found, (Tensor, *_PLAIN)):
        return
    for kind in type(found).__mro__:
        if _root(kind.__module__) in _LIBRARIES:
            continue
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(found, name):
                yield (name,), getattr(found, name)
        yield (f"[{kind.__name__}]",), kind  # its methods may use global variables, its attributes may be lists


def _named(names: Mapping[str, Any], without: tuple[str, ...] = ()) -> Iterator[tuple[Path, Any]]:
    for name, inner in names.items():
        if name not in without:
            yield (str(name),), inner


def _of_function(found: types.FunctionType) -> Iterator[tuple[Path, Any]]:
    for name, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=True):
        try:
            yield (name,), cell.cell_contents
        except ValueError:  # empty so far
            continue
    yield ("[defaults]",), found.__defaults__
    yield ("[defaults by name]",), found.__kwdefaults__
    names = sorted(_names(found.__code__))
    for name in names:
        used = found.__globals__.get(name)
        yield (name,), used
        # a module may also be imported by the function itself
        yield from _of_module((name,), sys.modules.get(name) if used is None else used, names, set())


def _of_module(path: Path, found: Any, names: list[str], seen: set[int]) -> Iterator[tuple[Path, Any]]:
    """The objects with these names in a user's module, and in the modules in it."""
    if not isinstance(found, types.ModuleType) or _root(found.__name__) in _LIBRARIES or id(found) in seen:
        return
    seen.add(id(found))
    for name in names:
        if name in vars(found):
            yield (*path, name), vars(found)[name]
            yield from _of_module((*path, name), vars(found)[name], names, seen)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*inner)


def _numbered(values: Any) -> Iterator[tuple[Path, Any]]:
    for place, inner in enumerate(values):
        yield (f"[{place}]",), inner


def _value(found: Any) -> Any:
    """What is compared: a copy of the numbers, or the kind and the length of a container."""
    if isinstance(found, Tensor):
        plain = found.layout == torch.strided and not (found.is_meta or found.is_quantized or found.is_nested)
        return found.detach().clone() if plain else (tuple(found.shape), found._version)
    if isinstance(found, np.ndarray):
        return found.copy()
    if isinstance(found, _PLAIN):
        return found
    if isinstance(found, _BYTES):
        return bytes(found)
    if isinstance(found, _FILES):
        return None if found.closed else found.getvalue()
    if isinstance(found, queue.SimpleQueue):
        return found.qsize()
    if isinstance(found, _CACHE):
        return found.cache_info()._replace(hits=0)
    if isinstance(found, Mapping):
        return type(found), [key if isinstance(key, _PLAIN) else type(key) for key in found]
    if isinstance(found, (list, tuple, set, frozenset)) or type(found).__module__ == "collections":
        return type(found), len(found)
    return type(found)


def _same(first: Any, second: Any) -> bool:
    if type(first) is not type(second) and not isinstance(first, Tensor):
        return False
    if isinstance(first, Tensor):
        described = ("shape", "dtype", "device")
        if not isinstance(second, Tensor) or any(getattr(first, k) != getattr(second, k) for k in described):
            return False
        return bool(((first == second) | ((first != first) & (second != second))).all())
    if isinstance(first, np.ndarray):
        return bool(first.dtype == second.dtype) and first.shape == second.shape and first.tobytes() == second.tobytes()
    return bool(first == second or (first != first and second != second))
