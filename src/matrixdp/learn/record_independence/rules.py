"""What each operation does to the batch dimension: a rule per operation, and no operation without one.

In a traced graph a value is *batched* (a tensor whose first dimension is the record, in the order of the batch), the
*batch size*, or public: a constant tensor, a number, a string. A rule gets an operation's arguments and raises `NoRule`
unless row i of its result follows from row i of the batched arguments and from public values alone; then the result is
batched. Operations that are not listed here have no rule. Only an operation on batched values can mix records, so a
graph in which every operation passes does not; `tests/learn/test_rules.py` plants a violation of every rule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as trees


class NoRule(Exception):
    """Raised for an operation that no rule covers, or that a rule does not allow."""


class Batched:
    """A tensor with one row per record, known by its shape alone: `meta` has no numbers in it."""

    def __init__(self, meta: Tensor) -> None:
        self.meta = meta


class BatchSize(int):
    """The number of records; only the functions in `SIZED` may take it, as part of a shape."""


Rule = Callable[..., None]
FUNCTIONS: dict[Any, Rule] = {}
MODULES: dict[type[nn.Module], Rule] = {}


def require(holds: bool, why: str) -> None:
    """Raises NoRule, for this reason, unless the condition holds."""
    if not holds:
        raise NoRule(why)


def leaves(values: Any) -> list[Any]:
    """All single arguments, including those within slices."""
    found = trees.tree_leaves(values)
    return [part for leaf in found for part in ((leaf.start, leaf.stop, leaf.step) if type(leaf) is slice else (leaf,))]


def batched(values: Any) -> list[Batched]:
    """All batched values among arguments."""
    return [leaf for leaf in leaves(values) if isinstance(leaf, Batched)]


def _constants(values: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


def _methods(*names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names]


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for functions; methods of tensors are given as `Tensor.name`."""

    def add(one: Rule) -> Rule:
        FUNCTIONS.update(dict.fromkeys(functions, one))
        return one

    return add


def module(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Registers a rule for modules of exactly these types; it gets the module and the arguments of its call."""

    def add(one: Rule) -> Rule:
        MODULES.update(dict.fromkeys(kinds, one))
        return one

    return add


# --- entry by entry ---

_ENTRYWISE = [
    *_methods("abs", "neg", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos",
              "tanh", "sigmoid", "relu", "erf", "sign", "floor", "ceil", "round", "clamp", "clamp_min", "clamp_max",
              "pow", "add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "to",
              "float", "double", "long", "bool", "type",
              "type_as", "contiguous", "clone", "detach", "lerp", "logical_and", "logical_or",
              "logical_not", "isfinite", "isnan", "nan_to_num", "maximum", "minimum"),
    torch.abs, torch.neg, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sqrt, torch.rsqrt, torch.square,
    torch.reciprocal, torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.relu, torch.erf, torch.sign, torch.clamp,
    torch.pow, torch.add, torch.sub, torch.mul, torch.div, torch.where, torch.maximum, torch.minimum, torch.lerp,
    torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.isfinite, torch.isnan, torch.nan_to_num,
    torch.logical_and, torch.logical_or, torch.logical_not, torch.clone, torch.zeros_like, torch.ones_like,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, operator.eq, operator.ne,
    operator.lt, operator.le, operator.gt, operator.ge, operator.and_, operator.or_, operator.invert,
    functional.relu, functional.relu6, functional.leaky_relu, functional.elu, functional.selu, functional.celu,
    functional.gelu, functional.silu, functional.mish, functional.softplus, functional.softsign, functional.hardtanh,
    functional.hardswish, functional.hardsigmoid, functional.logsigmoid, functional.tanhshrink, functional.softshrink,
    functional.hardshrink, functional.threshold, functional.sigmoid, functional.tanh,
    functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
    functional.dropout2d, functional.dropout3d,
]  # fmt: skip


@rule(*_ENTRYWISE)
def entrywise(*args: Any, **kwargs: Any) -> None:
    """Arguments are broadcast: rows are aligned only if all batched ones have equally many dimensions."""
    aligned(batched((args, kwargs)), _constants((args, kwargs)))


def aligned(rows: list[Batched], constants: Iterable[Tensor]) -> None:
    """Batched values have equally many dimensions, and no constant has a separate entry for each record."""
    dims = {row.meta.ndim for row in rows}
    require(len(dims) == 1, "broadcasts the records of one argument along another dimension of the other")
    (most,) = dims
    for constant in constants:
        fits = constant.ndim < most or (constant.ndim == most and constant.shape[0] == 1)
        require(fits, "has a constant with a row per record, or with more dimensions than the records")


@rule(operator.iadd, operator.isub, operator.imul, operator.itruediv)
def in_place(target: Any, *args: Any, **kwargs: Any) -> None:
    """As `entrywise`, into a batched value: a constant must not be written into."""
    require(isinstance(target, Batched), "writes into a constant")
    entrywise(target, *args, **kwargs)


# --- along other dimensions ---


def inner(dim: Any, ndim: int) -> None:
    """Dimensions are given, and none of them is the first."""
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    require(all(type(d) is int for d in dims) and bool(dims), "works along all dimensions; name them")
    require(all(d % ndim > 0 for d in dims), "works along the dimension of the records")


_REDUCING = ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "logsumexp", "softmax",
             "log_softmax", "cumsum", "var", "std", "any", "all", "squeeze", "sort")  # fmt: skip


@rule(
    *_methods(*_REDUCING),
    *(getattr(torch, name) for name in _REDUCING),
    *(functional.softmax, functional.log_softmax, functional.softmin, functional.glu),
)
def along(values: Any, *args: Any, **kwargs: Any) -> None:
    """Along named dimensions that are not the first."""
    require(isinstance(values, Batched) and not batched((args, kwargs)), "has more than one batched argument")
    inner(kwargs.get("dim", kwargs.get("axis", args[0] if args else None)), values.meta.ndim)


@rule(*_methods("flip"), torch.flip)
def flipped(values: Any, *dims: Any) -> None:
    """Dimensions that are not the first, however they are given."""
    along(values, dims[0] if len(dims) == 1 else dims)


@rule(*_methods("norm"), torch.norm, functional.normalize)
def normed(values: Any, *args: Any, **kwargs: Any) -> None:
    """As `along`; the dimension must be given by name."""
    require(isinstance(values, Batched) and not batched((args, kwargs)) and not args[1:], "needs dim= by name")
    inner(kwargs.get("dim"), values.meta.ndim)


@rule(*_methods("unsqueeze"), torch.unsqueeze)
def unsqueezed(values: Any, dim: Any) -> None:
    """A new dimension, not before the records."""
    require(isinstance(values, Batched) and type(dim) is int, "needs a dimension")
    require(dim % (values.meta.ndim + 1) > 0, "puts a dimension before that of the records")


@rule(*_methods("transpose", "swapaxes"), torch.transpose, torch.swapaxes)
def swapped(values: Any, first: Any, second: Any) -> None:
    """Two dimensions that are not the first."""
    along(values, (first, second))


@rule(*_methods("permute"), torch.permute)
def permuted(values: Any, *dims: Any) -> None:
    """The first dimension stays first."""
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    require(isinstance(values, Batched) and type(order[0]) is int and order[0] % values.meta.ndim == 0, "moves records")


@rule(*_methods("view", "reshape", "flatten", "unflatten"), torch.reshape, torch.flatten)
def reshaped(values: Any, *args: Any, **kwargs: Any) -> None:
    """The order of numbers stays; that the first dimension is still that of the records is checked on the result."""
    require(isinstance(values, Batched) and not batched((args, kwargs)), "takes a shape")


@rule(*_methods("expand"))
def expanded(values: Any, *sizes: Any) -> None:
    """A batched value keeps its rows. A constant is refused: a record could then be written into it in place."""
    shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    require(isinstance(values, Batched), "gives a constant to each record")
    require(len(shape) == values.meta.ndim, "adds a dimension before that of the records")


@rule(torch.cat, torch.concat, torch.stack)
def joined(values: Any, dim: Any = 0) -> None:
    """Batched values, side by side."""
    require(all(isinstance(value, Batched) for value in values), "joins records and constants")
    require(len({value.meta.ndim for value in values}) == 1, "joins values of several dimensions")
    require(type(dim) is int and (dim > 0 or 0 < -dim < values[0].meta.ndim), "joins along the records")


@rule(*_methods("chunk", "split", "unbind"), torch.chunk, torch.split, torch.unbind)
def parted(values: Any, *args: Any, **kwargs: Any) -> None:
    """Along a named dimension that is not the first."""
    require(isinstance(values, Batched) and "dim" in kwargs, "needs dim= by name")
    inner(kwargs["dim"], values.meta.ndim)


@rule(operator.getitem)
def indexed(values: Any, index: Any) -> None:
    """All records, at any public index in each; parts of a tuple, and of a shape, are handled by the caller."""
    require(isinstance(values, Batched), "takes rows of a constant by record")
    first, *rest = index if isinstance(index, tuple) else (index,)
    require(isinstance(first, slice) and first == slice(None), "picks records")
    require(not batched(rest) and not _constants(rest), "picks places by a tensor")


@rule(torch.zeros, torch.ones, *_methods("new_zeros", "new_ones"))
def created(*args: Any, **kwargs: Any) -> None:
    """A row of constants per record."""
    sizes = args[1:] if args and isinstance(args[0], Batched) else args
    shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    require(bool(shape) and isinstance(shape[0], BatchSize) and not batched(kwargs), "has no row per record")


SIZED = {torch.zeros, torch.ones, torch.reshape, *_methods("new_zeros", "new_ones", "view", "reshape", "expand")}
"""Functions that may take the batch size; that only the first dimension has it is checked on the result."""

ON_CONSTANTS = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.pow, operator.neg),
    *(operator.getitem, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.matmul),
    *(torch.arange, torch.linspace, torch.zeros, torch.ones, torch.full, torch.eye, torch.tril, torch.triu),
    *(torch.exp, torch.sin, torch.cos, torch.outer, torch.matmul),
    *_methods("unsqueeze", "transpose", "t", "reshape", "view", "to", "float", "long", "bool", "size", "dim", "exp"),
}
"""Functions that may run on constants alone: none that writes into them, since that could count the passes."""

# --- products, layers as functions ---


@rule(torch.matmul, torch.bmm, operator.matmul, *_methods("matmul", "bmm", "__matmul__"))
def product(left: Any, right: Any) -> None:
    """Products of two matrices of the same record, or with a constant matrix on the right."""
    if isinstance(left, Batched) and isinstance(right, Batched):
        require(left.meta.ndim == right.meta.ndim >= 3, "multiplies records with each other")
    else:
        require(isinstance(left, Batched) and left.meta.ndim >= 2 and right.ndim <= 2, "multiplies along the records")


@rule(functional.linear)
def linear(values: Any, weight: Any, bias: Any = None) -> None:
    """A constant matrix for all records."""
    require(isinstance(values, Batched) and values.meta.ndim >= 2 and not batched((weight, bias)), "has other weights")


@rule(functional.conv1d, functional.conv2d, functional.conv3d)
def convolved(values: Any, *args: Any, **kwargs: Any) -> None:
    """Constant filters, and a dimension for channels after that of the records."""
    weight = args[0] if args else kwargs["weight"]
    require(isinstance(values, Batched) and not batched((args, kwargs)), "has filters that depend on records")
    require(values.meta.ndim == weight.ndim, "has no dimension for records")


@rule(
    *(getattr(functional, f"{kind}_pool{n}d") for kind in ("avg", "max", "lp", "adaptive_avg", "adaptive_max")
      for n in (1, 2, 3)),
    *(functional.interpolate, functional.unfold, functional.pixel_shuffle, functional.group_norm),
)  # fmt: skip
def one_by_one(values: Any, *args: Any, **kwargs: Any) -> None:
    """PyTorch's own operations on a batch that treat each row separately."""
    require(isinstance(values, Batched) and not batched((args, kwargs)), "has more than one batched argument")


@rule(functional.pad)
def padded(values: Any, pad: Any, *args: Any, **kwargs: Any) -> None:
    """Not along the records: `pad` has two numbers per dimension, starting with the last."""
    one_by_one(values, pad, *args, **kwargs)
    require(len(pad) // 2 < values.meta.ndim, "adds records")


@rule(functional.layer_norm, functional.rms_norm)
def layer_normed(values: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> None:
    """Over the last dimensions, fewer than all."""
    one_by_one(values, *args, **kwargs)
    require(len(normalized_shape) < values.meta.ndim, "normalizes over the records")


@rule(functional.embedding)
def embedded(
    values: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Rows of a constant table, which is not written into."""
    require(isinstance(values, Batched) and isinstance(weight, Tensor), "looks up in records")
    require(max_norm is None and not any(args[1:]) and not kwargs.get("scale_grad_by_freq"), "writes into its table")


@rule(functional.scaled_dot_product_attention)
def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **kwargs: Any) -> None:
    """Each record attends to itself: all three are batched, with a dimension for tokens and one for features."""
    three = (query, key, value)
    require(all(isinstance(part, Batched) and part.meta.ndim >= 3 for part in three), "attends to other records")
    aligned([*three, *batched(attn_mask)], _constants(attn_mask))


# --- losses ---

_LOSSES = (functional.mse_loss, functional.l1_loss, functional.huber_loss, functional.smooth_l1_loss,
           functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits, functional.kl_div,
           functional.soft_margin_loss, functional.poisson_nll_loss,
           functional.multilabel_soft_margin_loss)  # fmt: skip


@rule(functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss)
def class_loss(values: Any, targets: Any, *args: Any, **kwargs: Any) -> None:
    """As `loss`; targets may be numbers of classes, with the dimension after the records left out."""
    index = isinstance(targets, Batched) and not targets.meta.is_floating_point()
    require(isinstance(values, Batched) and values.meta.ndim >= 2, "has no dimension for classes")
    if index and targets.meta.shape == (values.meta.shape[0], *values.meta.shape[2:]):
        targets = values
    loss(values, targets, *args, **kwargs)


@rule(*_LOSSES)
def loss(values: Any, targets: Any, *args: Any, **kwargs: Any) -> None:
    """One value per record, or per entry: reduction="none"."""
    require(isinstance(values, Batched) and isinstance(targets, Batched), "compares records with constants")
    require(kwargs.get("reduction") == "none" and not kwargs.get("size_average") and not kwargs.get("reduce"),
            'sums over the records; use reduction="none"')  # fmt: skip
    require(not batched((args, kwargs)), "has weights that depend on records")
    require(targets.meta.shape == values.meta.shape, "broadcasts targets")
    for constant in _constants((args, kwargs)):
        require(constant.ndim <= 1 < values.meta.ndim, "has a constant with a row per record")


@rule(functional.one_hot)
def one_hot(values: Any, num_classes: Any = -1) -> None:
    """The number of classes must be given: otherwise the largest class in the batch decides it."""
    require(isinstance(values, Batched) and type(num_classes) is int and num_classes > 0, "needs num_classes")
