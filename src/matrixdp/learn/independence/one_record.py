"""Model and loss see one record at a time, so that they cannot mix records by any operation on tensors.

A function of one record runs under `torch.func.vmap`: every tensor that it sees has that record alone in it, with a
batch dimension of one, and PyTorch computes all records at once behind it. That leaves three ways in which a record
could reach another, and each is closed:

1. What is kept. A copy of the model and of the loss runs, and is thrown away; so whatever they assign to themselves is
   gone. Parameters and buffers are the model's own, and PyTorch refuses writes into them that depend on a record. What
   is kept elsewhere (in a global variable, a closure, a queue) would be used in a later pass: every tensor that the
   function makes is watched, and if one outlives the pass, the pass is refused.
2. What becomes a number, a string or a condition in Python. PyTorch has no single value to give under vmap, and raises.
   Printing a tensor would show it, and the size of some results (`torch.bincount`, packed sequences) depends on
   values: both are refused here. The text of an error can have the size of the batch in it: a pass in which an
   operation raised is refused, even if the model caught the error.
3. Code that reaches behind vmap: an autograd function with a `vmap` rule of its own, custom operations, dispatch modes,
   tensor subclasses, TorchScript and `torch.func.debug_unwrap` are handed the whole batch, and are refused.

Assumed: model and loss do not look at Python's frames, at the state of random generators (how far they have moved shows
the size of the batch), or at tensors through private parts of PyTorch or from other threads. No such code is found.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.autograd_function import custom_function_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode

from matrixdp.errors import InvalidInput
from matrixdp.learn.independence.rebuilt import rebuilt

# A printed record could decide what Python does next; a node of the autograd graph keeps records alive unseen.
_REFUSED = frozenset({Tensor.__repr__, Tensor.__str__, Tensor.__format__, vars(torch._C.TensorBase)["grad_fn"].__get__})


# The size of what they give, or a number, follows from values; besides those that PyTorch marks as such.
_BY_VALUE = frozenset({"aten::_pack_padded_sequence", "aten::_is_all_true", "aten::_is_any_true"})
# Seconds to wait for the thread of a device's backward pass, which lets go of its tensors after it has answered.
_PAUSES = (0.0, 0.01, 0.1, 1.0)
# How modules are copied, unless a class has its own way; that of convolutions adds what old checkpoints lack.
_USUAL = {
    "__deepcopy__": (None,),
    "__reduce_ex__": (object.__reduce_ex__,),
    "__reduce__": (object.__reduce__,),
    "__getstate__": (getattr(nn.Module, "__getstate__", None),),
    "__setstate__": (nn.Module.__setstate__, nn.Conv2d.__setstate__),
}
_PLAIN = (type(None), bool, int, float, str)
_SCRIPTED: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def record_gradients(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], parameters: dict[str, nn.Parameter], views: Any, targets: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Each record's gradient of each of these parameters, (records, *shape), and its loss, (records,).

    Args:
        model: runs as `model(*inputs)`, or `model(**inputs)`, on a batch of one record.
        loss: (outputs, targets) of one record -> one number.
        parameters: by the names that they have in the model.
        views: a list of tuples or dictionaries of the model's arguments; tensors in them, however nested, have a row
            per record. The loss of a record is the average over the list.
        targets: likewise.
    """
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    ids = {name: id(parameter) for name, parameter in parameters.items()}

    def loss_of_one(
        values: dict[str, Tensor], own_model: nn.Module, own_loss: Any, record: Any
    ) -> tuple[Tensor, Tensor]:
        given, target = trees.tree_map_only(Tensor, lambda t: t.unsqueeze(0), record)
        by_id = {ids[name]: value for name, value in values.items()}
        each = [one_each(own_loss(_call(own_model, by_id, arguments), target), 1)[0] for arguments in given]
        found = each[0] if len(each) == 1 else torch.stack(each).mean()
        return found, found.detach()

    def of_one(record: Any) -> tuple[dict[str, Tensor], Tensor]:
        own_model, own_loss = _scratch(model), _scratch(loss)
        found: tuple[dict[str, Tensor], Tensor] = torch.func.grad(loss_of_one, has_aux=True)(
            values, own_model, own_loss, record
        )
        return found

    gradients, losses = each_record(of_one, (views, targets))
    return gradients, losses


def one_each(losses: Any, batch: int) -> Tensor:
    """Losses of shape (batch,), or of a shape with as many numbers."""
    if not isinstance(losses, Tensor) or losses.numel() != batch or not losses.is_floating_point():
        shown = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidInput(
            f"loss must give one number per record, shape ({batch},), got {shown}; "
            'use reduction="none" and average over all dimensions but the first'
        )
    return losses.reshape(batch)


def record_outputs(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """The model's output for each record, one row per record, without gradients."""

    def of_one(record: Any) -> Tensor:
        arguments = trees.tree_map_only(Tensor, lambda t: t.unsqueeze(0), record)
        found = _call(_scratch(model), {}, arguments)
        if not isinstance(found, Tensor) or found.ndim < 1 or found.shape[0] != 1:
            raise InvalidInput("model must give a tensor with one row for a batch of one record")
        return found.squeeze(0)

    with torch.no_grad():
        outputs: Tensor = each_record(of_one, inputs)
    return outputs


def each_record(function: Callable[[Any], Any], records: Any) -> Any:
    """Applies a function of one record to all of them.

    Guarantee: what it gives for a record is a function of that record, of constants and of random numbers alone, for
        code that keeps to what is assumed at the top of this file.

    Raises:
        InvalidInput: if PyTorch cannot run it so, an operation raised, or something that it computed is kept.
    """
    leaves = trees.tree_leaves(records)
    if not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
        raise InvalidInput(
            "a batch must consist of tensors with one row per record; it holds something that is no tensor"
        )

    def on_copies(record: Any) -> Any:
        """The watch sees tensors that operations make; so it sees a record that is kept as it was given."""
        return function(trees.tree_map_only(Tensor, torch.clone, record))

    sizes = _KnownSizes()  # type: ignore[no-untyped-call]
    # other kernels of attention have no rule for vmap, so PyTorch would loop over the records
    attention = sdpa_kernel(SDPBackend.MATH)
    with warnings.catch_warnings(), _no_autocast_cache(), _nothing_behind(), attention, sizes, _Watch() as watch:
        warnings.filterwarnings("ignore", message="There is a performance drop")  # PyTorch loops over the records then
        try:
            found = torch.func.vmap(on_copies, randomness="different")(records)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise InvalidInput(
                "model and loss run one record at a time here, and PyTorch cannot do that: they read a value of a "
                "record into Python, write into a buffer, or use an operation that vmap does not know. Use layers such "
                "as nn.GroupNorm that keep nothing, and torch.where in place of conditions"
            ) from _without_values(error)
    if watch.raised:
        raise InvalidInput(
            "model, loss or augment catches an error of PyTorch, whose text may depend on the other records; leave out "
            "the operation that raises"
        )
    results = {id(leaf) for leaf in (*leaves, *trees.tree_leaves(found))}
    if watch.survivors(results):
        raise InvalidInput(
            "model, loss or augment keeps tensors of records after it ran, outside of itself (in a global variable, a "
            "closure, or on its class), where a later batch could meet them; keep nothing, or keep it in an attribute "
            "of its own"
        )
    return found


class _Watch(TorchFunctionMode):
    """Keeps weak references to all tensors that are made while it is entered, and sees whether an operation raised."""

    def __init__(self) -> None:
        super().__init__()
        self.raised = False
        self._made: list[weakref.ref[Tensor]] = []
        self._modes = torch._C._len_torch_dispatch_stack()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            found = self._checked(function, args, kwargs or {})
        except BaseException:
            self.raised = True
            raise
        self._made.extend(map(weakref.ref, _tensors(found)))
        return found

    def _checked(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if function in _REFUSED and _is_wrapped(args[0]):
            raise RuntimeError(f"{function.__name__} of a tensor, which holds a record, is used")
        if _behind(function, args, kwargs) or torch._C._len_torch_dispatch_stack() > self._modes:
            raise RuntimeError("a custom operation, tensor or dispatch mode would be handed the whole batch")
        return function(*args, **kwargs)

    def survivors(self, results: set[int]) -> bool:
        """Whether anything outlived the pass but its results."""
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        for pause in _PAUSES if started else (0.0,):
            if not self._alive(results):
                return False
            gc.collect()  # what only a reference cycle holds is not kept
            time.sleep(pause)
        return self._alive(results)

    def _alive(self, results: set[int]) -> bool:
        alive = (reference() for reference in self._made)
        return any(
            tensor is not None and id(tensor) not in results and not isinstance(tensor, nn.Parameter)
            and _is_wrapped(tensor)
            for tensor in alive
        )  # fmt: skip


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a value; most are a tensor or a tuple, for which `tree_leaves` would take long."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in _PLAIN:
        return []
    if type(value) in (tuple, list):
        return [tensor for part in value for tensor in _tensors(part)]
    return [leaf for leaf in trees.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast would keep the parameters that it has cast."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class _KnownSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose results have a size that depends on values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; PyTorch's guard against that takes longer than most operations."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _sized_by_values(function) and not (function._schema.name == "aten::index" and not _masked(args[1])):
            raise RuntimeError(f"the size of what {function._schema.name} gives depends on values")
        return function(*args, **kwargs) if kwargs else function(*args)


@functools.cache
def _sized_by_values(function: Any) -> bool:
    return torch.Tag.dynamic_output_shape in function.tags or function._schema.name in _BY_VALUE


def _masked(indices: Any) -> bool:
    """Whether an index picks places by a condition, and not by their numbers."""
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def _nothing_behind() -> Iterator[None]:
    """TorchScript, which no mode sees, and `torch.func.debug_unwrap` raise in here."""

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("TorchScript, or what unwraps tensors, would be handed the whole batch")

    unwrapping = torch.func.debug_unwrap.__globals__
    unwrap, calls = unwrapping["get_unwrapped"], [(kind, kind.__call__) for kind in _SCRIPTED]
    unwrapping["get_unwrapped"] = refused
    for kind in _SCRIPTED:
        kind.__call__ = refused
    try:
        yield
    finally:
        unwrapping["get_unwrapped"] = unwrap
        for kind, call in calls:
            kind.__call__ = call


def _behind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether a function has code for a whole batch: a custom operation or tensor, or an own `vmap` rule."""
    if any(type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in _tensors((args, kwargs))):
        return True
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return not str(function).startswith(("aten.", "prims."))
    if function is custom_function_call:
        return args[0].vmap is not torch.autograd.Function.vmap
    return False


def _scratch(part: Any) -> Any:
    """A copy to be thrown away, with the very parameters and buffers; functions have nothing of their own to copy."""
    if not isinstance(part, nn.Module):
        return copy.deepcopy(part)
    own = {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers())}
    return rebuilt(_copied(part, own), stacked=True)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy`, which takes longer than a small model; most of a module are numbers and empty dictionaries."""
    kind = type(module)
    usual = all(getattr(kind, name, None) in ways for name, ways in _USUAL.items())
    if id(module) in memo or not usual or any("__slots__" in vars(base) for base in kind.__mro__):
        found: nn.Module = copy.deepcopy(module, memo)
        return found
    new = memo[id(module)] = kind.__new__(kind)
    for name, value in vars(module).items():
        if name == "_compiled_call_impl":
            continue  # as `Module.__getstate__` does
        if type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value)):
            new.__dict__[name] = value
        elif name == "_modules":
            new.__dict__[name] = {key: part if part is None else _copied(part, memo) for key, part in value.items()}
        elif type(value) in (dict, OrderedDict) and not value:
            new.__dict__[name] = type(value)()
        else:
            new.__dict__[name] = copy.deepcopy(value, memo)
    return new


def _call(part: nn.Module, values: dict[int, Tensor], arguments: Any) -> Any:
    """Runs a copy with these values of parameters, by their ids.

    Buffers are copies, so that a counter that is written into is left as it was.
    """
    tensors = {name: values.get(id(p), p.detach()) for name, p in part.named_parameters()}
    buffers = {name: tensor.detach().clone() for name, tensor in part.named_buffers()}
    by_place, by_name = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    return torch.func.functional_call(part, tensors | buffers, by_place, by_name)


def _without_values(error: Exception) -> Exception | None:
    """The error of PyTorch, whose text names operations and shapes; others may quote what a record holds."""
    return error if isinstance(error, RuntimeError) else None
