"""Model and loss see one record at a time, so that they cannot mix records by any operation on tensors.

A function of one record runs under `torch.func.vmap`: every tensor that it sees contains that record alone, with a
batch dimension of one, while PyTorch computes all records at once. That leaves four ways in which a record could affect
another, and each is closed:

1. Stored values. A copy of the model and of the loss runs, and is discarded; so whatever they assign to themselves is
   lost. Parameters are shared with the model, buffers are copied for the pass, and PyTorch refuses writes into either
   that depend on a record. Values stored elsewhere (in a global variable, a closure, a queue) could be used in a later
   pass. So `Below` tracks all memory into which an operation writes something from a record; if any of it but the
   results outlives the pass, the pass is refused. So is one that writes into parameters, or other tensors that it did
   not make, which could count the passes. If a pass ends with an error, memory with values of its records is zeroed.
2. Values in Python: a number, a string or a condition. Under vmap PyTorch has no single value to give, and raises.
   Printing a tensor would show it, and the size of some results (`torch.bincount`, packed sequences) depends on
   values: both are refused here. The text of an error may contain the size of the batch: a pass in which an operation
   raised is refused, even if the model caught the error.
3. Code that bypasses vmap: an autograd function with its own `vmap` rule, custom operations, `torch.ops`, modes of
   users, TorchScript and `torch.func.debug_unwrap` would get the whole batch, and are refused. So is a tensor of the
   whole batch, wherever the model found it. Functions of PyTorch disable the watch while they run, and may call code of
   their arguments: so these are plain values, or functions, which are watched; objects of other classes, and tensor
   subclasses, are refused. Functions of others that take part in PyTorch's protocol for overrides are refused too.
4. Operations whose vmap rules access other records: an embedding whose table depends on the record, `index_fill` whose
   index does, `resize_`, `unsafe=True`, offsets of `embedding_bag` and quantized tensors are refused. Uninitialized
   memory (`torch.empty`) may hold values of other records, and is set to zero. Random numbers of a record depend on its
   position in the batch, and so on how many records are before it: numbers from the model's own generator or seed,
   which somebody may know, are refused.

Assumed: model and loss do not inspect Python's frames, the state of random generators (how far it has advanced shows
the size of the batch), storages, memory that is not PyTorch's, or tensors through private parts of PyTorch, from other
threads, or in code that the garbage collector or a warning calls. Nor do they count in a global variable how often they
run: an empty batch takes no pass, a large one several. Such code is not detected.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, _tensor_str, nn
from torch._functorch.autograd_function import custom_function_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as trees

from matrixdp.errors import InvalidInput
from matrixdp.learn.record_independence.below import PLAIN, Below, argument, own, tensors_in, without_class
from matrixdp.learn.record_independence.modes import is_of_torch, refuse_modes_of_users
from matrixdp.learn.record_independence.rebuilt import rebuilt

# A node of the autograd graph gives access to the tensors that it has saved.
_NODE = vars(torch._C.TensorBase)["grad_fn"].__get__
# PyTorch runs these on one table of all records, without checking that an index is in the record's own part. Values are
# the position and name of the argument that must not depend on the record.
_UNCHECKED = {
    F.embedding: (1, "weight"), torch.embedding: (0, "weight"), torch.index_fill: (2, "index"),
    Tensor.index_fill: (2, "index"), Tensor.index_fill_: (2, "index"),
}  # fmt: skip
# PyTorch does not check offsets: unsorted ones give numbers of other records, or of memory that is not set.
_OFFSETS = (F.embedding_bag, torch.embedding_bag)
# How modules are copied, unless a class overrides it; that of convolutions adds what old checkpoints lack.
_USUAL = {
    "__deepcopy__": (None,),
    "__reduce_ex__": (object.__reduce_ex__,),
    "__reduce__": (object.__reduce__,),
    "__getstate__": (getattr(nn.Module, "__getstate__", None),),
    "__setstate__": (nn.Module.__setstate__, nn.Conv2d.__setstate__),
}
# The methods of an autograd function that users write.
_OF_USERS = ("forward", "setup_context", "backward", "jvp")
_SCRIPTED: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
# Types of arguments that have no code of users, and types of the classes among them.
_DATA = frozenset(
    {*PLAIN, complex, bytes, bytearray, range, type(...), torch.Size, torch.dtype, torch.device,
     torch.layout, torch.memory_format, torch.Generator, np.ndarray, *np.sctypeDict.values()}
)  # fmt: skip
_CLASSES = (type, type(Tensor), type(torch.FloatTensor), type(torch.autograd.Function))
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def record_gradients(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    parameters: dict[str, nn.Parameter],
    views: Any,
    targets: Any,
    *,
    values: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Each record's gradient of each of these parameters, (records, *shape), and its loss, (records,).

    Args:
        model: runs as `model(*inputs)`, or `model(**inputs)`, on a batch of one record.
        loss: (outputs, targets) of one record -> one number.
        parameters: by the names that they have in the model.
        views: a list of tuples or dictionaries of the model's arguments; tensors in them, however nested, have a row
            per record. The loss of a record is the average over the list.
        targets: what the loss takes; tensors in it have a row per record too.
        values: values for the parameters, by the same names; by default their own.
    """
    if values is None:
        values = {name: parameter.detach() for name, parameter in parameters.items()}
    ids = {name: id(parameter) for name, parameter in parameters.items()}

    def loss_of_one(
        values: dict[str, Tensor], own_model: nn.Module, own_loss: Any, record: Any
    ) -> tuple[Tensor, Tensor]:
        given, target = trees.tree_map_only(Tensor, lambda t: t.unsqueeze(0), record)
        by_id = {ids[name]: value for name, value in values.items()}
        outputs = [_call(own_model, by_id, arguments) for arguments in given]
        each = [one_each(_call(own_loss, by_id, (output, target)), 1)[0] for output in outputs]
        found = each[0] if len(each) == 1 else torch.stack(each).mean()
        return found, found

    def of_one(record: Any) -> tuple[dict[str, Tensor], Tensor]:
        own_model, own_loss = _scratch(model), _scratch(loss)
        found: tuple[dict[str, Tensor], Tensor] = torch.func.grad(loss_of_one, has_aux=True)(
            values, own_model, own_loss, record
        )
        return found

    gradients, losses = each_record(of_one, (views, targets))
    return gradients, losses


def one_each(losses: Any, batch: int) -> Tensor:
    """The losses in the shape (batch,); InvalidInput unless there is one number per record."""
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
    """Applies a function of one record to all records.

    Guarantee: the result for a record is a function of that record, of constants and of random numbers alone, for code
        that satisfies the assumptions at the top of this file.

    Raises:
        InvalidInput: if it cannot run under vmap, an operation raised, or something that it computed is kept.
    """
    leaves = trees.tree_leaves(records)
    if not all(leaf is None or (isinstance(leaf, Tensor) and leaf.layout is torch.strided) for leaf in leaves):
        raise InvalidInput(
            "a batch must consist of tensors with one row per record; one part is no tensor, or is sparse"
        )

    below = Below(leaves)
    try:
        return _watched(function, records, below)
    except BaseException:
        below.forget()  # or a later pass could use what was stored until here
        raise


def _watched(function: Callable[[Any], Any], records: Any, below: Below) -> Any:
    refuse_modes_of_users()
    # other kernels of attention have no rule for vmap, so PyTorch would loop over the records
    attention = sdpa_kernel(SDPBackend.MATH)
    quiet = torch.autograd.set_detect_anomaly(False)  # which raises where the gradient of a record is not finite
    with warnings.catch_warnings(), _no_autocast_cache(), _nothing_behind(), attention, quiet, below:
        warnings.filterwarnings("ignore", message="There is a performance drop")  # PyTorch loops over the records then
        watch = _Watch(below)

        def watched(record: Any) -> Any:
            """On copies: results of operations are tracked, so a record that is stored unchanged is found too."""
            with watch:
                return function(trees.tree_map_only(Tensor, torch.clone, record))

        try:
            found = torch.func.vmap(watched, randomness="different")(records)
        except InvalidInput:  # such as a loss of another shape
            raise
        except (RuntimeError, ValueError, NotImplementedError) as error:
            # errors of PyTorch that are raised outside operations name functions and shapes; others may quote a record
            raise InvalidInput(
                "model and loss run one record at a time here, and PyTorch cannot do that: they read a value of a "
                "record into Python, write into a buffer, or use an operation that vmap does not know. Use layers such "
                "as nn.GroupNorm that keep nothing, and torch.where in place of conditions"
            ) from (error if isinstance(error, RuntimeError) and not below.raised else None)
    refuse_modes_of_users()  # which the function has entered and not left
    found = trees.tree_map_only(Tensor, own, found)
    if watch.raised or below.raised:
        raise InvalidInput(
            "model, loss or augment catches an error of PyTorch, whose text may depend on the other records; leave out "
            "the operation that raises"
        )
    if any(tensor.requires_grad for tensor in tensors_in(found)):
        raise InvalidInput(
            "model or loss uses a tensor that requires gradients from outside of itself, such as a parameter of the "
            "model in a closure, whose gradient would be lost; use attributes of the module, detach() the tensor, and "
            "leave weight decay to the optimizer"
        )
    if below.survivors(tensors_in(found)):
        raise InvalidInput(
            "model, loss or augment keeps tensors of records after it ran, or writes into parameters or into other "
            "tensors, outside of itself (in a global variable, a closure, or on its class), where a later batch could "
            "use them; keep nothing, or only in its own attributes"
        )
    return found


class _Watch(TorchFunctionMode):
    """Refuses functions that bypass vmap, and notes whether one raised.

    PyTorch disables this mode while a function runs; if that function calls the user's code, it is enabled again.
    """

    def __init__(self, below: Below) -> None:
        super().__init__()
        self.raised = False
        self._below = below
        self._modes = torch._C._len_torch_dispatch_stack()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            with self:  # arguments of classes of users may run code as soon as they are compared
                args, kwargs = self._checked(function, args, kwargs or {})
            return function(*args, **kwargs)
        except BaseException:
            self.raised = True
            raise

    def _checked(self, function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with which a function may run; RuntimeError if there are none."""
        if function is not custom_function_call and not is_of_torch(function):
            raise RuntimeError("a function that is not PyTorch's, or one of torch.ops, would get the whole batch")
        if function == _NODE and _is_wrapped(args[0]):
            raise RuntimeError("grad_fn of a tensor, which holds a record, is used")
        own_rule = function is custom_function_call and args[0].vmap is not torch.autograd.Function.vmap
        if own_rule or torch._C._len_torch_dispatch_stack() > self._modes:
            raise RuntimeError("the vmap rule of an autograd function, or a dispatch mode, would get the whole batch")
        offsets = argument((2, "offsets"), args, kwargs) if function in _OFFSETS else None
        if kwargs.get("unsafe") or offsets is not None:
            raise RuntimeError("unsafe=True and offsets of embedding_bag are not checked: give a matrix of indices")
        if function is Tensor.__deepcopy__ and vars(args[0]):
            raise RuntimeError("attributes of a tensor are copied, by code that is not watched")
        if function in _UNCHECKED and _batched(function, args, kwargs):
            raise RuntimeError(
                f"{function.__name__} with a table or an index of the record's own does not keep to the record; use "
                "table[index], torch.gather or torch.scatter"
            )
        named = {str.__str__(name): self._again(value) for name, value in kwargs.items()}
        return [self._again(value) for value in args], named

    def _again(self, value: Any) -> Any:
        """An argument that runs no unwatched code of users, as functions of PyTorch call some of their arguments.

        Functions are wrapped, so that they are watched when they run. Numbers and containers of a class of their own
        become plain ones; other objects are refused.
        """
        kind = type(value)
        if kind in (Tensor, nn.Parameter):
            with torch._C.DisableTorchFunction():
                if not _is_wrapped(value) and self._below.holds_records(value):
                    raise RuntimeError("a tensor of the whole batch is used, from outside of vmap")
            return value
        if kind in _DATA or (kind is dict and all(type(key) in PLAIN for key in value)):
            return value
        if isinstance(value, (int, float, str)):
            return without_class(value)
        if isinstance(value, (list, tuple)):
            base: Any = list if isinstance(value, list) else tuple
            return base(self._again(part) for part in base.__iter__(value))
        if isinstance(value, slice):
            return slice(*(self._again(part) for part in (value.start, value.stop, value.step)))
        if isinstance(value, type) and kind in _CLASSES:
            if not issubclass(value, torch.autograd.Function):
                return value
            own: dict[str, Any] = {name: staticmethod(self._again(getattr(value, name))) for name in _OF_USERS}
            own["generate_vmap_rule"] = bool(value.generate_vmap_rule)
            return type(value.__name__, (torch.autograd.Function,), own)  # so that nothing else of the class is called
        if isinstance(value, (type, Tensor)) or not callable(value):
            raise RuntimeError(f"an argument is of the type {kind.__name__}, whose code would get the whole batch")

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return watched


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Disables the cache of autocast, which would keep parameters that it has cast."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def _nothing_behind() -> Iterator[None]:
    """Makes TorchScript, which no mode sees, `torch.func.debug_unwrap` and printing a tensor of records raise."""

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("TorchScript, or a function that unwraps tensors, would get the whole batch")

    def printed(tensor: Any, *, tensor_contents: Any = None) -> Any:
        if _is_wrapped(tensor):
            raise RuntimeError("a tensor, which holds a record, is printed")
        return show(tensor, tensor_contents=tensor_contents)  # type: ignore[no-untyped-call]

    unwrapping = torch.func.debug_unwrap.__globals__
    unwrap, show, calls = unwrapping["get_unwrapped"], _tensor_str._str, [(kind, kind.__call__) for kind in _SCRIPTED]
    unwrapping["get_unwrapped"], _tensor_str._str = refused, printed
    for kind in _SCRIPTED:
        kind.__call__ = refused
    try:
        yield
    finally:
        unwrapping["get_unwrapped"], _tensor_str._str = unwrap, show
        for kind, call in calls:
            kind.__call__ = call


def _batched(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    value = argument(_UNCHECKED[function], args, kwargs)
    while isinstance(value, Tensor) and _is_wrapped(value):
        if torch._C._functorch.is_batchedtensor(value):
            return True
        value = torch._C._functorch.get_unwrapped(value)
    return False


def _scratch(part: Any) -> Any:
    """A copy to be discarded, which shares parameters and buffers; of functions, `deepcopy` copies nothing."""
    if not isinstance(part, nn.Module):
        return copy.deepcopy(part)
    own = {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers())}
    return rebuilt(_copied(part, own), stacked=True)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A fast `copy.deepcopy` of a module, most of whose attributes are numbers or empty dictionaries."""
    kind = type(module)
    usual = all(getattr(kind, name, None) in ways for name, ways in _USUAL.items())
    if id(module) in memo or not usual or any("__slots__" in vars(base) for base in kind.__mro__):
        found: nn.Module = copy.deepcopy(module, memo)
        return found
    new, hooks = kind.__new__(kind), module._forward_pre_hooks.values()
    memo[id(module)] = new
    for name, value in vars(module).items():
        if name == "_compiled_call_impl":
            continue  # as `Module.__getstate__` does
        if type(value) in PLAIN or (type(value) is tuple and all(type(part) in PLAIN for part in value)):
            new.__dict__[name] = value
        elif name == "_modules":
            new.__dict__[name] = {key: part if part is None else _copied(part, memo) for key, part in value.items()}
        elif isinstance(value, Tensor) and any(getattr(h, "name", None) == name for h in hooks):
            new.__dict__[name] = value.detach()  # as by `nn.utils.weight_norm`, which computes it before each call
        elif type(value) in (dict, OrderedDict) and not value:
            new.__dict__[name] = type(value)()
        else:
            new.__dict__[name] = copy.deepcopy(value, memo)
    return new


def _call(part: Any, values: dict[int, Tensor], arguments: Any) -> Any:
    """Runs a copy of a module with these values of parameters, by their ids; or a function as it is.

    Buffers are copied, so that the model's own stay unchanged, such as counters.
    """
    if not isinstance(part, nn.Module):
        return part(*arguments)
    tensors = {name: values[id(p)] if id(p) in values else p.detach() for name, p in part.named_parameters()}
    buffers = {name: tensor.detach().clone() for name, tensor in part.named_buffers()}
    by_place, by_name = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    if not (tensors or buffers):
        return part(*by_place, **by_name)
    return torch.func.functional_call(part, tensors | buffers, by_place, by_name)
