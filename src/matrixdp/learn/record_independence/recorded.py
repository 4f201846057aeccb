"""One record at a time, recorded as a graph, so that batches run without the model's own code.

`one_record` watches every call that model and loss make, in every pass. That takes as much time as a small model. Here
the operations that a pass runs below `vmap` are recorded once per setting, and later batches run that graph.

The graph treats each record separately, because what was watched is what runs:

1. It is recorded while `one_record` watches, so its operations are those by which `vmap` runs a function of one record
   on a batch. Which operations these are depends on shapes and types, and never on values.
2. Model and loss see made-up records while it is recorded: no tensor or number in the graph can come from a record.
   They do not run at all afterwards, so they can neither mix nor keep records.
3. It is a pure function of parameters, buffers, other constants, the records, and torch's random numbers: each
   operation is one of PyTorch's own, and writes at most into tensors that the graph itself has made.
4. It takes exactly as many records as it was recorded for. A smaller batch is padded with zeros, whose rows are cut
   off from the result: they count as if they were not there. Watched passes are padded too, so that a repeated step,
   by a graph or not, draws the same random numbers and gives the same sum.

Which function of a record runs does not depend on the batch. There is one size, which is public. `begin` decides at the
start of each step, before its batch is seen, even if that is empty: whether a graph or a watched pass runs, and whether
a graph is recorded. So a global variable that changes between steps affects both of two neighbours at the same steps.

Some code cannot be recorded and keeps running one record at a time: code that reads a number of a tensor, writes into a
tensor it did not make, or draws global random numbers of Python or numpy; and models with tensors that are neither
parameters nor buffers, which each pass copies. After recording, the graph is compared with a watched pass on other
made-up records and parameters; if they differ, it is not used.

A graph is recorded again if modes, hooks, autocast, or attributes of the modules (numbers, functions, tensors, and
objects with such parts) have changed. Limitation: changes of global variables and class attributes that model or loss
reads are not noticed; their values at the recording stay in use. So do numbers from a generator that is not torch's.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from matrixdp.learn.randomness import forked, python_kept
from matrixdp.learn.record_independence.one_record import record_gradients
from matrixdp.learn.record_independence.traced import GLOBAL_HOOKS, autocast

Loss = Callable[[Any, Any], Tensor]
Found = tuple[dict[str, Tensor], Tensor]

# A setting is recorded at its second step; one that changes at every step is not worth it.
_TIMES = 2
_MOST_SETTINGS = 8
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
# Types of arguments that operations may have; not generators and storages.
_ARGUMENTS = (*_PLAIN, Tensor, complex, torch.layout, torch.memory_format)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
# Operations that may return their argument unchanged, and are left out of the graph then.
_aten = torch.ops.aten
_VIEWS = frozenset(
    {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default, _aten.permute.default,
     _aten.expand.default, _aten.transpose.int, _aten.slice.Tensor}
)  # fmt: skip


class RecordedGradients:
    """`one_record.record_gradients`, by a graph once the same setting has occurred before.

    Args:
        size: how many records a pass has at most; public, so it depends on no batch. None: nothing is recorded.

    Guarantee: as there; row i of the result depends on record i, parameters, constants and random numbers alone, by a
        function that is fixed by the calls of `begin` and not by the batches between them.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self._settings: dict[Any, _Setting] = {}
        self._graph: fx.GraphModule | None = None
        self._serves: Any = None

    def begin(
        self, model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], views: Any, targets: Any
    ) -> None:
        """Decides how the passes of a step run, before its batch is seen.

        Of views and targets, only shapes and types are used.
        """
        if self.size is None:
            return
        leaves, structure = trees.tree_flatten((views, targets))
        held: list[Any] = []
        key = _kinds(leaves, structure), _key(model, loss, parameters, held)
        if key not in self._settings:
            if len(self._settings) == _MOST_SETTINGS:
                del self._settings[next(iter(self._settings))]
            self._settings[key] = _Setting(held)
        setting = self._settings[key]
        setting.times += 1
        if setting.times == _TIMES:
            rows = [leaf.new_zeros(self.size, *leaf.shape[1:]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            setting.graph = _recorded(model, loss, parameters, rows, structure)
        self._graph, self._serves = setting.graph, (_kinds(leaves, structure), _switches(model, loss))

    def __call__(
        self, model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], views: Any, targets: Any
    ) -> Found:
        """Each record's gradient of each of these parameters, and its loss."""
        leaves, structure = trees.tree_flatten((views, targets))
        counts = {leaf.shape[:1] for leaf in leaves if isinstance(leaf, Tensor)}
        if self.size is None or len(counts) != 1 or counts == {()}:  # no row per record, which is refused
            return record_gradients(model, loss, parameters, views, targets)
        ((count,),) = counts
        leaves = [_padded(leaf, self.size) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if self._graph is not None and self._serves == (_kinds(leaves, structure), _switches(model, loss)):
            gradients, losses = _run(self._graph, {name: p.detach() for name, p in parameters.items()}, leaves)
        else:
            gradients, losses = record_gradients(model, loss, parameters, *trees.tree_unflatten(leaves, structure))
        return {name: gradient[:count] for name, gradient in gradients.items()}, losses[:count]


@dataclass
class _Setting:
    held: list[Any]  # objects that the key names by address, kept alive so that no other takes it
    times: int = 0
    graph: fx.GraphModule | None = None


def _kinds(leaves: list[Any], structure: Any) -> Any:
    """The structure of records, and the shapes, types and devices of their tensors."""
    return str(structure), tuple(
        (leaf.shape[1:], leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None for leaf in leaves
    )


def _switches(model: nn.Module, loss: Loss) -> Any:
    """Modes and defaults that could change between `begin` and a pass."""
    parts = [part for part in (model, loss) if isinstance(part, nn.Module)]
    modes = tuple(module.training for part in parts for module in part.modules())
    return modes, autocast(), torch.get_default_dtype(), torch.get_default_device()


def _key(model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], held: list[Any]) -> tuple[Any, ...]:
    """Everything that the operations and constants of a pass depend on, besides the kinds of records."""
    trained = tuple((name, p.shape, p.stride(), p.dtype, p.device) for name, p in parameters.items())
    hooks = [getattr(modules, name, None) for name in GLOBAL_HOOKS]
    found: list[Any] = []
    known = {id(parameter) for parameter in parameters.values()}
    for value in (model, loss, *hooks):
        _identify(value, found, held, known)
    return trained, _switches(model, loss), tuple(found)


def _identify(value: Any, found: list[Any], held: list[Any], known: set[int]) -> None:
    """Appends the parts of a value to `found`, numbers as they are and objects by id; and these objects to `held`."""
    if type(value) in _PLAIN:
        found.append(value)
        return
    found.append(id(value))
    if id(value) in known:
        return
    known.add(id(value))
    held.append(value)
    if isinstance(value, (nn.Module, dict)):
        for name, part in (vars(value) if isinstance(value, nn.Module) else value).items():
            found.append(name if type(name) in _PLAIN else id(name))
            if type(part) in _PLAIN:
                found.append(part)
            elif not (isinstance(part, dict) and not part):  # as most of a module's are
                _identify(part, found, held, known)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for part in value:
            _identify(part, found, held, known)
    elif isinstance(value, Tensor):
        found.append(None if _is_wrapped(value) or value.layout is not torch.strided else value.data_ptr())
    elif isinstance(value, np.ndarray):
        found.append(value.tobytes())
    elif not isinstance(value, (type, ModuleType)):
        for part in _parts(value):
            _identify(part, found, held, known)


def _parts(value: Any) -> Iterator[Any]:
    """What a method, a function or any other object holds; of a function, not the global variables that it reads."""
    if isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield cell.cell_contents
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    else:
        yield from getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            yield from (getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots))


def _run(graph: fx.GraphModule, values: dict[str, Tensor], leaves: list[Any]) -> Found:
    device = next(iter(values.values())).device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        *gradients, losses = graph(*values.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
    return dict(zip(values, gradients, strict=True)), losses


def _padded(rows: Tensor, size: int) -> Tensor:
    if len(rows) == size:
        return rows.contiguous()
    if len(rows) > size:
        raise ValueError(f"a pass has at most {size} records")
    found = rows.new_zeros(size, *rows.shape[1:])
    found[: len(rows)] = rows
    return found


def _recorded(
    model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], leaves: list[Any], structure: Any
) -> fx.GraphModule | None:
    """The graph of a pass over a batch, of which only shapes and types are used; None if that is not possible."""
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    others = {name: value * 1.25 for name, value in values.items()}
    device = next(iter(values.values())).device
    try:
        with forked(device), python_kept() as moved:
            first, second = _made_up(leaves), _made_up(leaves)
            graph = _record(model, loss, parameters, values, first, structure)
            if graph is None or moved():
                return None
            with forked(device):
                ours = _run(graph, others, second)
            given = trees.tree_unflatten(second, structure)
            watched = record_gradients(model, loss, parameters, *given, values=others)
    except Exception:  # whatever model and loss raise; a pass over the records will say why, if it fails too
        return None
    return graph if _close(ours, watched) else None


def _made_up(leaves: list[Any]) -> list[Any]:
    """Made-up records: uniform numbers, and zeros for integers."""

    def made(leaf: Tensor) -> Tensor:
        zeros = torch.zeros_like(leaf)
        return zeros.uniform_() if leaf.is_floating_point() else zeros

    return [made(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _close(ours: Found, watched: Found) -> bool:
    """Whether both are equal up to rounding, which differs if the device adds in another order."""
    pairs = [(ours[1], watched[1]), *((ours[0][name], watched[0][name]) for name in ours[0])]
    return all(
        torch.allclose(one, other, rtol=0, equal_nan=True, atol=torch.finfo(one.dtype).eps ** 0.5 * _largest(other))
        for one, other in pairs
    )


def _largest(values: Tensor) -> float:
    return float(values.abs().nan_to_num(0, 0, 0).max())


def _record(
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, nn.Parameter],
    values: dict[str, Tensor],
    leaves: list[Any],
    structure: Any,
) -> fx.GraphModule | None:
    inputs = [*values.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    views, targets = trees.tree_unflatten(leaves, structure)
    recorder, reads = _Recorder(inputs), _Reads()
    with recorder, reads:
        gradients, losses = record_gradients(model, loss, parameters, views, targets, values=values)
    return None if reads.came else recorder.finished([*gradients.values(), losses])


class _Reads(TorchFunctionMode):
    """Notes whether numbers of a tensor were read by a function that is not an operation."""

    came = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.came |= function in (Tensor.tolist, Tensor.numpy, Tensor.__array__)
        return function(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run in this context."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph, self._constants = fx.Graph(), dict[str, Tensor]()
        self._nodes = WeakTensorKeyDictionary()
        self._outside, self._written = {_memory(tensor) for tensor in inputs}, set[int]()
        self._refused = False
        self._own: set[fx.Node] = set()  # whose memory the graph itself makes
        for place, tensor in enumerate(inputs):
            self._nodes[tensor] = self._graph.placeholder(f"input_{place}")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tuple(args), kwargs or {}
        given = trees.tree_leaves((args, kwargs))
        usual = str(function).startswith(("aten.", "prims.")) and all(isinstance(value, _ARGUMENTS) for value in given)
        found = function(*args, **kwargs)
        numbers = any(type(value) in (bool, int, float, complex) for value in trees.tree_leaves(found))
        self._refused |= not usual or numbers  # Python code may depend on numbers
        if self._refused:
            return found
        if function in _VIEWS and _layout(found) == _layout(args[0]):
            self._nodes[found] = self._node(args[0])
            return found
        node = self._graph.call_function(function, *trees.tree_map_only(Tensor, self._node, (args, kwargs)))
        for place, argument in enumerate(function._schema.arguments):
            if argument.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                self._written |= {_memory(tensor) for tensor in trees.tree_leaves(value) if isinstance(tensor, Tensor)}
        if isinstance(found, Tensor):
            self._keep(found, node)
        elif isinstance(found, (list, tuple)):
            for place, part in enumerate(found):
                if isinstance(part, Tensor):
                    self._keep(part, self._graph.call_function(operator.getitem, (node, place)))
        return found

    def _keep(self, tensor: Tensor, node: fx.Node) -> None:
        if tensor not in self._nodes:  # else it was written into
            self._nodes[tensor] = node
            if _memory(tensor) not in self._outside:
                self._own.add(node)

    def _node(self, tensor: Tensor) -> fx.Node:
        """The node that made a tensor; a tensor that no recorded operation made is a constant."""
        if tensor not in self._nodes:
            name = f"constant_{len(self._constants)}"
            self._constants[name] = tensor
            self._outside.add(_memory(tensor))
            self._nodes[tensor] = self._graph.get_attr(name)
        found: fx.Node = self._nodes[tensor]
        return found

    def finished(self, results: list[Tensor]) -> fx.GraphModule | None:
        """The graph that gives these results; None if something that ran cannot be part of a graph."""
        if self._refused or self._written & self._outside or any(tensor not in self._nodes for tensor in results):
            return None
        copies = set(itertools.takewhile(lambda n: n.target is _aten.clone.default, reversed(self._graph.nodes)))
        given = [self._nodes[tensor] for tensor in results]
        # A watched pass ends by copying results that other code may hold; a graph's results are held by nobody else.
        self._graph.output(tuple(n.args[0] if n in copies and n.args[0] in self._own else n for n in given))
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._constants, self._graph)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return _memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
