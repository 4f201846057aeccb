"""The graph of a model and its loss, checked from the records to their losses by the rules of `rules`.

The checked graph is what runs. It is traced from a copy of the model. Its layers are then made anew (`_fresh`): they
share parameters and buffers with the model, and nothing else, and no other code holds them. So nothing that the model
does while it is traced, or later (hooks, methods, attributes), affects them. A condition that depends on a record
cannot be traced, and an operation without a rule is not accepted: then `one_record` is used.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as modules
from torch.utils import _pytree as trees

from matrixdp.learn.record_independence import module_rules  # noqa: F401  fills MODULES
from matrixdp.learn.record_independence.below import PLAIN, without_class
from matrixdp.learn.record_independence.rebuilt import rebuilt
from matrixdp.learn.record_independence.rules import (
    FUNCTIONS,
    MODULES,
    ON_CONSTANTS,
    SIZED,
    Batched,
    BatchSize,
    NoRule,
    batched,
    leaves,
    require,
)

# The batch size in shapes while a graph is checked: a prime, so that no other dimension is mistaken for the first.
_SIZE = 1_000_003
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = [f"_global{name}" for name in _HOOKS]
# Types of the functions that a graph may call, and of arguments besides numbers and texts.
_KINDS = {FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType}
_OF_TORCH = {torch.dtype, torch.device, torch.layout, torch.memory_format, type(...), range}
# What a model may ask of a batched tensor without seeing its numbers.
_PUBLIC = {"dtype", "device", "ndim", "requires_grad", "is_cuda", "layout"}


class TracedModel:
    """Model and loss as one checked graph.

    Guarantee: row i of the result depends on row i of its arguments, parameters, buffers and random numbers alone.

    Args:
        model: runs as `model(*inputs)`, or as `model(**inputs)` for a dictionary.
        loss: (outputs, targets) -> one value per record; None for the outputs alone.
        inputs: a batch, of which only shapes and types are used.
        targets: tensors in tuples, lists and dictionaries, or None; only shapes and types are used.

    Raises:
        NoRule: if it cannot be traced, or an operation has no rule; the text says which.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any] | None, inputs: Any, targets: Any) -> None:
        rows, structure = trees.tree_flatten((inputs, targets))
        require(
            all(leaf is None or type(leaf) is Tensor for leaf in rows),
            "the batch holds something that is no plain tensor",
        )
        _refuse_hooks(model, loss)
        whole = _Whole(_shared_copy(model), _shared_copy(loss) if isinstance(loss, nn.Module) else loss, structure)
        try:
            with torch.enable_grad():
                graph = _anew(_Tracer().trace(whole))
        except NoRule:
            raise
        except Exception as error:  # whatever a model raises when it is given a proxy in place of a tensor
            raise NoRule(f"it cannot be traced: {type(error).__name__}") from None
        parts = _parts(graph, whole, {id(p) for p in model.parameters() if p.requires_grad})
        self.row = _follow(graph, parts, rows)
        """The shape of the result for one record."""
        self.module = fx.GraphModule(parts, graph)
        """What runs, with the layers that it calls."""

    def __call__(self, inputs: Any, targets: Any = None) -> Tensor:
        """One value, or one row, per record."""
        found: Tensor = self.module(trees.tree_leaves((inputs, targets)))
        return found


class _Whole(nn.Module):
    """Model and loss as one module whose argument is the list of all tensors of a batch."""

    def __init__(self, model: nn.Module, loss: Any, structure: Any) -> None:
        super().__init__()
        self.model, self.loss, self.structure = model, loss, structure

    def forward(self, records: Any) -> Any:
        """The losses; the outputs if there is no loss."""
        leaves = [records[place] for place in range(self.structure.num_leaves)]
        inputs, targets = trees.tree_unflatten(leaves, self.structure)
        outputs = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        return outputs if self.loss is None else self.loss(outputs, targets)


class _Tracer(fx.Tracer):
    """Modules with a rule become single nodes; all others are traced through."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self._autocast = autocast()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in MODULES and not any(hasattr(type(m), name) for name in vars(m))  # an overridden method

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses contexts and custom autograd functions, which run without grad: a graph cannot contain them."""
        require(torch.is_grad_enabled(), "it has a part under no_grad, or a custom autograd function")
        require(autocast() == self._autocast, "it has an autocast of its own")
        return super().create_proxy(*args, **kwargs)

    def path_of_module(self, mod: nn.Module) -> str:
        """A module from outside model and loss, such as a loss in a global variable, is copied into the graph."""
        try:
            return super().path_of_module(mod)
        except NameError:
            _refuse_hooks(mod)
            name = f"outside_{id(mod)}"
            self.root.add_module(name, _shared_copy(mod))
            return name


def autocast() -> tuple[Any, ...]:
    """The current state of autocast; a graph runs under that of its caller."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def has_global_hooks() -> bool:
    """Whether there are hooks that run in every module, including those of graphs traced before."""
    return any(getattr(modules, name, None) for name in GLOBAL_HOOKS)


def _refuse_hooks(*parts: Any) -> None:
    """Raises NoRule if there are hooks: a graph would not contain their code, so records run one at a time."""
    require(not has_global_hooks(), "a global hook runs in every module")
    owned = (module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    require(not any(getattr(module, name) for module in owned for name in _HOOKS), "a module has hooks")


def _shared_copy(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters and buffers of the module, and nothing else."""
    tensors = [*module.parameters(), *module.buffers()]
    plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    require(plain, "a parameter or buffer is of a custom tensor type")
    try:
        found = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    except Exception as error:
        raise NoRule(f"it cannot be copied: {type(error).__name__}") from None
    require({*map(id, found.modules())}.isdisjoint(map(id, module.modules())), "a module is not copied by deepcopy")
    whole: nn.Module = rebuilt(found, stacked=False)
    return whole


def _anew(traced: fx.Graph) -> fx.Graph:
    """The same graph, of plain values alone.

    It will be written as code, with the texts of its arguments: those of a class of its own could be any code.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.nodes:
        kind, target = _plain(node.op), node.target
        target = target if kind == "call_function" else _plain(target)
        require(kind != "call_function" or type(target) in _KINDS, "it calls an object that is no function")
        made[node] = graph.create_node(kind, target, _argument(node.args, made), _argument(node.kwargs, made))
    return graph


def _argument(value: Any, made: dict[fx.Node, fx.Node]) -> Any:
    """An argument of a node in the new graph."""
    if type(value) is fx.Node:
        return made[value]
    if isinstance(value, (tuple, list)):
        base: Any = list if isinstance(value, list) else tuple
        return base(_argument(part, made) for part in base.__iter__(value))
    if isinstance(value, dict):
        return {_plain(key): _argument(part, made) for key, part in dict.items(value)}
    if type(value) is slice:
        return slice(*(_argument(part, made) for part in (value.start, value.stop, value.step)))
    return value if type(value) in _OF_TORCH else _plain(value)


def _parts(graph: fx.Graph, whole: _Whole, trained: set[int]) -> dict[str, Any]:
    """The layers and constants of a graph, by name."""
    known = {id(tensor) for tensor in (*whole.parameters(), *whole.buffers())}
    parts: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        with _named(node):
            owner, _, last = node.target.rpartition(".")
            found = getattr(whole.get_submodule(owner), last)
            if node.op == "get_attr":
                require(id(found) in known, "was made outside the graph, perhaps at random")
                require(id(found) not in trained, "is a trained parameter used outside a layer with a rule")
                parts[node.target] = found
                continue
            outside = not node.target.startswith("model.") and node.target != "model"
            own = {id(p) for p in found.parameters()} & trained
            require(not (outside and own), "is a trained layer that is called outside the model")
            parts[node.target] = _fresh(found)
    return parts


def _fresh(layer: nn.Module) -> nn.Module:
    """A layer that no other code holds: of a type with a rule, with the tensors of this one, numbers and texts."""
    kind, names = type(layer), vars(layer)
    require(kind in MODULES or kind is nn.ModuleList, "is of another type than when it was traced")
    require(not any(hasattr(kind, name) for name in names), "has a method of its own")
    require(not any(names[name] for name in _HOOKS), "has hooks")
    found = kind.__new__(kind)
    nn.Module.__init__(found)
    for name, value in names.items():
        if name in ("_parameters", "_buffers"):
            require(all(t is None or type(t) in (Tensor, nn.Parameter) for t in value.values()), "has custom tensors")
            found.__dict__[name] = dict(value)
        elif name == "_modules":
            found.__dict__[name] = {key: _fresh(part) for key, part in value.items()}
        elif name == "training" or name not in vars(found):
            found.__dict__[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return _plain(value.item())
    if type(value) in (tuple, list, torch.Size):
        return type(value)(_plain(part) for part in value)
    if type(value) in PLAIN:
        return value
    require(isinstance(value, (int, float, str)), "has an attribute or argument that is neither number nor text")
    return without_class(value)


@contextmanager
def _named(node: fx.Node) -> Iterator[None]:
    """Names the operation in the reason why it is refused."""
    try:
        yield
    except Exception as refusal:  # a rule that gets arguments it does not know has not allowed them
        where = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        why = str(refusal) if isinstance(refusal, NoRule) else "has no rule for these arguments"
        raise NoRule(f"{where} {why}") from None


def _follow(graph: fx.Graph, parts: dict[str, Any], rows: list[Tensor | None]) -> torch.Size:
    """Checks the graph on shapes alone, and gives the result's shape; NoRule if an operation has no rule."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        args = fx.map_arg(node.args, values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        with _named(node):
            if node.op == "placeholder":
                values[node] = [row if row is None else Batched(_empty(row, _SIZE)) for row in rows]
            elif node.op == "get_attr":
                values[node] = _empty(parts[node.target])
            elif node.op == "call_module":
                values[node] = _call_module(_without_numbers(parts[node.target]), args, kwargs)
            elif node.op == "output":
                require(isinstance(args[0], Batched), "has no row per record")
                return torch.Size(args[0].meta.shape[1:])
            else:
                function = getattr(Tensor, node.target) if node.op == "call_method" else node.target
                values[node] = _call(function, args, kwargs)
    raise NoRule("the graph has no output")


def _without_numbers(layer: nn.Module) -> nn.Module:
    """A copy of a layer whose tensors have shapes and types alone."""
    return copy.deepcopy(layer, {id(t): _empty(t) for t in (*layer.parameters(), *layer.buffers())})


def _call_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = batched((args, kwargs))
    require(bool(rows), "runs on constants")
    MODULES[type(module)](module, *args, **kwargs)
    return _computed(module, args, kwargs)


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sized = any(isinstance(leaf, BatchSize) for leaf in leaves((args, kwargs)))
    require("out" not in kwargs, "writes into another tensor")
    if args and isinstance(args[0], Batched) and function in (getattr, Tensor.size, Tensor.dim):
        return _asked(args[0].meta, function, args[1:], kwargs)
    if args and isinstance(args[0], (list, tuple)) and function is operator.getitem:
        return args[0][args[1]]  # a part of the batch, of a shape, or of what an operation gave
    require(not sized or function in SIZED, "computes with the batch size")
    if not sized and not batched((args, kwargs)):
        require(function in ON_CONSTANTS, "has no rule for constants")
        return function(*args, **kwargs)
    require(function in FUNCTIONS, "has no rule for the batch dimension")
    FUNCTIONS[function](*args, **kwargs)
    return _computed(function, args, kwargs)


def _asked(meta: Tensor, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The public properties of a batched tensor: its shape, with the batch size marked, type and device."""
    shape = (BatchSize(_SIZE), *meta.shape[1:])
    if function is Tensor.dim:
        return meta.ndim
    if function is Tensor.size:
        dim = kwargs.get("dim", args[0] if args else None)
        return shape if dim is None else shape[dim]
    require(args[0] == "shape" or args[0] in _PUBLIC, f"asks for {args[0]}")
    return shape if args[0] == "shape" else getattr(meta, args[0])


def _computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result on shapes alone; its first dimension must be that of the records."""
    plain = trees.tree_map_only(
        Batched, lambda value: value.meta, (args, kwargs), is_leaf=lambda v: isinstance(v, Batched)
    )
    found = function(*plain[0], **plain[1])

    def row(value: Any) -> Batched | None:
        if value is None:
            return None
        require(isinstance(value, Tensor), "gives something that is no tensor")
        require(value.ndim > 0 and value.shape[0] == _SIZE, "does not keep the records in the first dimension")
        require(all(d % _SIZE for d in value.shape[1:]), "has a dimension for records besides the first")
        return Batched(value)

    return trees.tree_map(row, tuple(found) if isinstance(found, (list, tuple)) else found)


def _empty(tensor: Tensor, size: int | None = None) -> Tensor:
    """The same shape and type without numbers; with another number of rows if a size is given."""
    shape = tensor.shape if size is None else (size, *tensor.shape[1:])
    found = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
