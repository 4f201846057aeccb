"""What each layer contributes to a record's gradient, from the layer's input and the gradient of its output.

A layer that is linear in its weight has, for record i, the gradient G_i = sum_t g_t a_t^T over the tokens (or patches)
t of that record: a_t is what went in, g_t the gradient of the loss by what came out. Clipping needs the norm of G_i and
then the sum of w_i G_i. A `Piece` gives both for one parameter, in the cheaper of two ways.

    explicit (`Samples`)   G_i is formed for every record; its norm and the weighted sum are read off.
    factored (the others)  G_i is never formed:  |G_i|^2 = sum_{s,t} <a_s, a_t> <g_s, g_t>,  and the weighted sum is
                           the ordinary weight gradient with w_i g_t in place of g_t.

Explicit gradients are formed where they hold no more numbers than the a and g that they replace; that is also where
they take fewer operations. Convolutions form them a little further.

Rounding. Every norm here is an upper bound on the norm of what is added later. Let u be the unit roundoff. A sum of n
products, in any order, is off by at most gamma_n = n u / (1 - n u) times the sum of their sizes; numbers too small to
square are off by at most the smallest normal number each. An explicit norm is a sum of squares, hence right up to a
factor. A factored norm can cancel: its Gram matrices are off by gamma_n |a_s| |a_t| and the like, so that it is off by
some gamma S^2, where S = sum_t |a_t| |g_t|, however small it is itself; and the weight gradient over T tokens that is
added in the end is off by gamma_(T+8) S. Both are counted:

    |G_i| <= sqrt(computed + gamma S^2) + gamma_(T+8) S.

Where PyTorch may shorten the factors of a matrix product (`torch.set_float32_matmul_precision`), that counts too.

Tensor cores. On a GPU, PyTorch's convolutions shorten their factors to 11 significant bits unless
`torch.backends.cudnn.allow_tf32` is off, and so do the weight gradients of convolutions here. Explicit gradients stay
their own measure. Else a and w_i g_t are rounded before the product, so that the hardware has nothing left to round:
the norm is that of the rounded a; the rounding of w_i g_t adds 2^-11 S; and as tensor cores may cut sums off where
others round, gamma_(T+8) is taken with 4 u.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 1 << 26
"""The most numbers that unfolded patches may take at a time."""

# Twice the error of TF32, which may be cut off, and of bfloat16, which is rounded.
_SHORT_FACTORS = {"highest": 0.0, "high": 2.0**-9, "medium": 2.0**-7}


def roundoff(tensor: Tensor) -> float:
    """The relative error of one operation."""
    return float(torch.finfo(tensor.dtype).eps) / 2


def gamma(terms: int, unit: float) -> float:
    """The relative error of a sum of so many products, in any order."""
    return terms * unit / (1 - terms * unit)


def factor_roundoff(tensor: Tensor) -> float:
    """The relative error of a product's two factors in a matrix product, where it may shorten them."""
    return _SHORT_FACTORS[torch.get_float32_matmul_precision()] if tensor.dtype == torch.float32 else 0.0


def uses_tensor_cores(tensor: Tensor) -> bool:
    """Whether PyTorch's own convolutions would shorten these numbers to TF32, 11 significant bits."""
    return tensor.is_cuda and tensor.dtype == torch.float32 and torch.backends.cudnn.allow_tf32


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Lets matrix products run on tensor cores, as PyTorch's convolutions do."""
    before = torch.get_float32_matmul_precision()
    if allowed:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if allowed:
            torch.set_float32_matmul_precision(before)


def shortened(values: Tensor) -> Tensor:
    """Rounded to the nearest with 11 significant bits, which tensor cores take as they are, whichever way they round.

    Numbers that are not finite, or above 1e34, become NaN or infinite.
    """
    shifted = values * 8193.0  # 2^13 + 1
    return torch.sub(shifted, shifted - values)


@functools.cache
def _block(entries: int) -> int | None:
    """A length of at most 4096 that divides a long row, if there is one of at least 64."""
    return next((entries // n for n in range(-(-entries // 4096), entries // 64 + 1) if entries % n == 0), None)


def squared_norm(values: Tensor) -> Tensor:
    """An upper bound on the sum of squares of each row, over all dimensions but the first."""
    rows = values.flatten(1)
    entries, info = rows.shape[1], torch.finfo(values.dtype)
    # Long sums end in float64, or the error of each operation would count; only the ends, as a wide copy takes long.
    if entries <= 1 << 14 or values.dtype == torch.float64:
        total, terms = torch.linalg.vector_norm(rows, dim=1).square_(), entries
    elif block := _block(entries):
        blocks = torch.linalg.vector_norm(rows.view(rows.shape[0], -1, block), dim=2).square_()
        total, terms = blocks.sum(1, dtype=torch.float64).to(values.dtype), block
    else:
        total, terms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_().to(values.dtype), 0
    return torch.add(entries * info.tiny, total, alpha=1 + gamma(terms + 8, info.eps / 2))


class Piece(ABC):
    """The gradients of one parameter for every record of a batch."""

    @abstractmethod
    def samples(self) -> Tensor:
        """Each record's gradient: (batch, *shape of the parameter), perhaps not contiguous."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """An upper bound on each record's squared norm: (batch,)."""

    @abstractmethod
    def add(self, weights: Tensor, total: Tensor) -> None:
        """Adds the weighted sum over the records to the total, which has the parameter's shape."""

    @abstractmethod
    def masked(self, kept: Tensor) -> Piece:
        """The same with zeros for the records that are not kept, whatever was there."""

    def smaller(self) -> Piece:
        """This piece with explicit gradients, if they are smaller than what they come from."""
        return self


def keep(values: Tensor, kept: Tensor) -> Tensor:
    """The values with zeros in the records that are not kept; 0 times infinity would not be zero."""
    return torch.where(kept.view(-1, *[1] * (values.ndim - 1)), values, values.new_zeros(()))


@dataclass(frozen=True)
class Samples(Piece):
    """Explicit gradients; `order` permutes their dimensions after the first into those of the parameter."""

    values: Tensor
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def _as_parameter(self, values: Tensor) -> Tensor:
        """Values with any leading dimensions, in the parameter's shape."""
        if self.shape is None or self.order is None:
            return values
        leading = values.ndim - (self.values.ndim - 1)
        moved = values.permute(*range(leading), *(leading + axis for axis in self.order))
        return moved.reshape(*values.shape[:leading], *self.shape)

    def samples(self) -> Tensor:
        """The gradients themselves."""
        return self._as_parameter(self.values)

    def squared_norm(self) -> Tensor:
        """The sum of squares."""
        return squared_norm(self.values)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """One product of a matrix and a vector."""
        flat = self.values.flatten(1).t()
        if self.order is None and total.is_contiguous():
            total.view(-1).addmv_(flat, weights)
        else:
            total += self._as_parameter((flat @ weights).view(self.values.shape[1:]))

    def masked(self, kept: Tensor) -> Samples:
        """Zeros for the others."""
        return Samples(keep(self.values, kept), self.shape, self.order)


@dataclass(frozen=True)
class Tokens(Piece):
    """The weight of a linear layer: inputs (batch, tokens, in), gradients of outputs (batch, tokens, out)."""

    inputs: Tensor
    outputs: Tensor

    def samples(self) -> Tensor:
        """(batch, out, in)."""
        return torch.bmm(self.outputs.transpose(1, 2), self.inputs)

    def smaller(self) -> Piece:
        """Explicit, if in x out is at most tokens x (in + out)."""
        tokens, width, height = *self.inputs.shape[1:], self.outputs.shape[2]
        return Samples(self.samples()) if width * height <= tokens * (width + height) and tokens > 1 else self

    def squared_norm(self) -> Tensor:
        """|a|^2 |g|^2 for one token, the product of two Gram matrices for several."""
        if self.inputs.shape[1] == 1:
            # The product rounds, and so do the factors of the sum later.
            slack = 1 + 2 * factor_roundoff(self.inputs) + 16 * roundoff(self.inputs)
            return squared_norm(self.inputs).mul_(squared_norm(self.outputs)).mul_(slack)
        gram = torch.bmm(self.inputs, self.inputs.transpose(1, 2))
        return gram_norm(gram, self.outputs, terms=self.inputs.shape[2])

    def add(self, weights: Tensor, total: Tensor) -> None:
        """One matrix product."""
        weighted = self.outputs * weights.view(-1, 1, 1)
        total.addmm_(weighted.flatten(0, 1).t(), self.inputs.flatten(0, 1))

    def masked(self, kept: Tensor) -> Tokens:
        """Zeros on both sides."""
        return Tokens(keep(self.inputs, kept), keep(self.outputs, kept))


@dataclass(frozen=True)
class Lookup(Piece):
    """The weight of an embedding: indices (batch, tokens), gradients of outputs (batch, tokens, dimension)."""

    indices: Tensor
    outputs: Tensor
    rows: int

    def samples(self) -> Tensor:
        """(batch, rows, dimension)."""
        batch, _, dimension = self.outputs.shape
        index = self.indices.unsqueeze(-1).expand(-1, -1, dimension)
        return self.outputs.new_zeros(batch, self.rows, dimension).scatter_add_(1, index, self.outputs)

    def smaller(self) -> Piece:
        """Explicit, if the table has no more rows than the record has tokens."""
        return Samples(self.samples()) if self.rows <= self.indices.shape[1] else self

    def squared_norm(self) -> Tensor:
        """Tokens with the same index add up, others are orthogonal."""
        same = self.indices.unsqueeze(1) == self.indices.unsqueeze(2)
        return gram_norm(same.to(self.outputs.dtype), self.outputs, terms=1)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """One scattered sum."""
        total.index_add_(0, self.indices.flatten(), (self.outputs * weights.view(-1, 1, 1)).flatten(0, 1))

    def masked(self, kept: Tensor) -> Lookup:
        """Zero gradients; the indices are whole numbers and stay."""
        return Lookup(self.indices, keep(self.outputs, kept), self.rows)


def gram_norm(inputs: Tensor, outputs: Tensor, *, terms: int, short: bool = False) -> Tensor:
    """|sum_t g_t a_t^T|^2 from the Gram matrix of a (each entry a sum of that many terms) and g: (batch, tokens, out).

    An upper bound, also on what a weight gradient over the tokens rounds to; see the top of the file. `short`: that a
    has 11 significant bits, that w_i g will be rounded to them, and that tensor cores form the weight gradient.
    """
    tokens, width = outputs.shape[1:]
    factors, tiny = factor_roundoff(outputs), torch.finfo(outputs.dtype).tiny
    unit = roundoff(outputs) * (4 if factors else 1)  # where factors are short, sums may be cut off
    gram = torch.bmm(outputs, outputs.transpose(1, 2))
    # The diagonals may have rounded down, and what underflowed anywhere must count even after a factor of unit.
    sizes = inputs.diagonal(dim1=1, dim2=2).mul(1 + gamma(terms, unit) + factors).add_(terms * tiny / unit)
    sizes = sizes * gram.diagonal(dim1=1, dim2=2).mul(1 + gamma(width, unit) + factors).add_(width * tiny / unit)
    absolute = sizes.sqrt_().sum(1).mul_(1 + gamma(tokens + 4, unit))
    wide = gram.mul_(inputs).sum((1, 2), dtype=torch.float64).clamp_(min=0)
    wide = wide.add_(absolute.square(), alpha=gamma(terms + width + 16, unit) + 2.1 * factors).sqrt_()
    later = 2.0**-11 + 1.001 * gamma(tokens + 8, 4 * roundoff(outputs)) if short else gamma(tokens + 8, unit) + factors
    return wide.add_(absolute, alpha=later).square_().mul_(1 + 8 * unit).to(outputs.dtype)


@dataclass(frozen=True)
class Patches(Piece):
    """The weight of a convolution: the input and the gradient of the output, both (batch, channels, ...)."""

    layer: Any
    inputs: Tensor
    outputs: Tensor

    def _padded(self) -> Tensor:
        padding, mode = self.layer._reversed_padding_repeated_twice, self.layer.padding_mode
        if not any(padding):
            return self.inputs
        return functional.pad(self.inputs, padding, mode="constant" if mode == "zeros" else mode)

    def samples(self) -> Tensor:
        """(batch, out channels, in channels / groups, *kernel)."""
        return self._explicit().samples()

    def smaller(self) -> Piece:
        """Explicit, if the weight is no larger than the record's input and output, or not much and quicker to handle.

        Both ways take about as many operations; what differs is how often they go through memory. Explicit gradients
        are written once and read twice, a Gram matrix is read for each entry of the kernel and a few times more.
        """
        record = (self.inputs.numel() + self.outputs.numel()) // self.inputs.shape[0]
        weight, entries = self.layer.weight.numel(), math.prod(self.layer.kernel_size)
        gram = self.layer.groups * math.prod(self.outputs.shape[2:]) ** 2
        explicit = weight <= record or (weight <= 3 * record and 3 * weight <= (entries + 5) * gram)
        return self._explicit() if explicit else self

    def squared_norm(self) -> Tensor:
        """The product of two Gram matrices, that of the patches being a sum over the kernel of shifted ones."""
        short, groups = uses_tensor_cores(self.inputs), self.layer.groups
        # Zeros around the input are zeros around its Gram matrix, where they cost no products.
        later = self.layer._reversed_padding_repeated_twice if self.layer.padding_mode == "zeros" else []
        given = self.inputs if later else self._padded()
        given = shortened(given) if short else given
        batch, pixels = given.shape[0], given.shape[2:]
        inputs = given.reshape(batch * groups, -1, math.prod(pixels))
        outputs = self.outputs.reshape(batch * groups, -1, math.prod(self.outputs.shape[2:])).transpose(1, 2)
        # A sum over the channels, then over the kernel.
        terms = inputs.shape[1] + math.prod(self.layer.kernel_size)
        norms = []
        step = max(1, CHUNK // (2 * inputs.shape[2] ** 2))  # the matrix is held with and without its zeros
        for part, gradient in zip(torch.split(inputs, step), torch.split(outputs, step), strict=True):
            gram = torch.bmm(part.transpose(1, 2), part).view(-1, *pixels, *pixels)
            gram = functional.pad(gram, [*later, *later]) if any(later) else gram
            first, *others = (gram[(slice(None), *place, *place)] for place in self._places())
            patches = first.clone(memory_format=torch.contiguous_format)
            for other in others:
                patches += other
            patches = patches.view(-1, *[outputs.shape[1]] * 2)
            norms.append(gram_norm(patches, gradient, terms=terms, short=short))
        return torch.cat(norms).view(batch, groups).sum(1).mul_(1 + (groups + 2) * roundoff(self.inputs))

    def _places(self) -> Iterator[tuple[slice, ...]]:
        """For each entry of the kernel, which pixels it meets."""
        layer, lengths = self.layer, self.outputs.shape[2:]
        for place in itertools.product(*map(range, layer.kernel_size)):
            starts = [k * d for k, d in zip(place, layer.dilation, strict=True)]
            yield tuple(slice(a, a + s * (n - 1) + 1, s) for a, s, n in zip(starts, layer.stride, lengths, strict=True))

    def _explicit(self) -> Samples:
        """Patches are unfolded along all dimensions but the first, along which products of matrices slide.

        With stride 1 the rows that an entry of the kernel meets lie together in memory, so they need no copy.
        """
        layer, inputs = self.layer, self._padded().contiguous()
        batch, channels = inputs.shape[:2]
        (height, *lengths), groups = self.outputs.shape[2:], self.layer.groups
        outputs = self.outputs.reshape(batch * groups, -1, height * math.prod(lengths)).transpose(1, 2)
        strides, width = inputs.stride()[3:], math.prod(layer.kernel_size[1:])
        size = (channels, *layer.kernel_size[1:], inputs.shape[2], *lengths)
        stride = (
            *(d * s for d, s in zip(layer.dilation[1:], strides, strict=True)),
            inputs.stride(2),
            *(d * s for d, s in zip(layer.stride[1:], strides, strict=True)),
        )
        values = inputs.new_empty(batch * groups, layer.kernel_size[0], channels // groups * width, outputs.shape[2])
        step = max(1, CHUNK // math.prod(size))
        for start in range(0, batch, step):
            part = inputs[start : start + step]
            chosen = slice(start * groups, (start + part.shape[0]) * groups)
            unfolded = part.as_strided((part.shape[0], *size), (*part.stride()[:2], *stride)).contiguous()
            unfolded = unfolded.view(part.shape[0] * groups, channels // groups * width, inputs.shape[2], -1)
            for k in range(layer.kernel_size[0]):
                first = k * layer.dilation[0]
                rows = unfolded[:, :, first : first + layer.stride[0] * (height - 1) + 1 : layer.stride[0]].flatten(2)
                # Norm and sum are those of what comes out here, so that short factors leave the bound as it is.
                with tensor_cores(uses_tensor_cores(rows)):
                    if rows.is_cuda:
                        torch.bmm(rows, outputs[chosen], out=values[chosen, k])
                    else:  # slow at writing into a part
                        values[chosen, k] = torch.bmm(rows, outputs[chosen])
        values = values.view(batch, groups, layer.kernel_size[0], channels // groups, width, outputs.shape[2])
        return Samples(values, tuple(layer.weight.shape), order=(0, 4, 2, 1, 3))

    def add(self, weights: Tensor, total: Tensor) -> None:
        """One backward convolution; on a GPU matrix products instead.

        The libraries there may take Winograd's or Fourier's way through a convolution, whose errors are not counted.
        """
        layer, zeros = self.layer, [0] * (self.outputs.ndim - 2)
        weighted = self.outputs * weights.view(-1, *[1] * (self.outputs.ndim - 1))
        if weighted.is_cuda:
            return self._add_products(weighted, total)
        pads = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        inputs, padding = (self.inputs, list(layer.padding)) if pads else (self._padded(), zeros)
        settings = (list(layer.stride), padding, list(layer.dilation), False, zeros, layer.groups)
        total += torch.ops.aten.convolution_backward(weighted, inputs, total, None, *settings, [False, True, False])[1]

    def _add_products(self, weighted: Tensor, total: Tensor) -> None:
        """The sum over the records as products of unfolded patches and weighted gradients."""
        layer, groups, short = self.layer, self.layer.groups, uses_tensor_cores(weighted)
        inputs = self._padded().contiguous()
        if short:
            inputs, weighted = shortened(inputs), shortened(weighted)
        channels, strides, lengths = inputs.shape[1], inputs.stride(), weighted.shape[2:]
        along_kernel = [d * s for d, s in zip(layer.dilation, strides[2:], strict=True)]
        along_output = [d * s for d, s in zip(layer.stride, strides[2:], strict=True)]
        step = max(1, CHUNK // (channels * math.prod(layer.kernel_size) * math.prod(lengths)))
        for part, gradient in zip(torch.split(inputs, step), torch.split(weighted, step), strict=True):
            patches = part.as_strided(
                (channels, *layer.kernel_size, part.shape[0], *lengths),
                (strides[1], *along_kernel, strides[0], *along_output),
            ).reshape(groups, -1, part.shape[0] * math.prod(lengths))
            gradient = gradient.transpose(0, 1).reshape(groups, -1, patches.shape[2])
            with tensor_cores(short):
                total.view(groups, gradient.shape[1], -1).baddbmm_(gradient, patches.transpose(1, 2))

    def masked(self, kept: Tensor) -> Patches:
        """Zeros on both sides."""
        return Patches(self.layer, keep(self.inputs, kept), keep(self.outputs, kept))


def merged(pieces: Sequence[Piece]) -> Piece:
    """The sum of several pieces of one parameter: of a layer that ran several times, or of layers that share it."""
    if len(pieces) == 1:
        return pieces[0]
    tokens = [piece for piece in pieces if isinstance(piece, Tokens)]
    if len(tokens) == len(pieces):
        return Tokens(torch.cat([p.inputs for p in tokens], 1), torch.cat([p.outputs for p in tokens], 1))
    total = pieces[0].samples()
    for piece in pieces[1:]:
        total = total + piece.samples()
    return Samples(total)
