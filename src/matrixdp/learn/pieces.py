"""What each layer contributes to a record's gradient, from the layer's input and the gradient of its output.

A layer that is linear in its weight has, for record i, the gradient G_i = sum_t g_t a_t^T over the tokens (or patches)
t of that record: a_t is what went in, g_t the gradient of the loss by what came out. Clipping needs the norm of G_i and
then the sum of w_i G_i. A `Piece` gives both for one parameter, in the cheaper of two ways.

    explicit (`Samples`)   G_i is formed for every record; its norm and the weighted sum are read off.
    factored (the others)  G_i is never formed:  |G_i|^2 = sum_{s,t} <a_s, a_t> <g_s, g_t>,  and the weighted sum is
                           the ordinary weight gradient with w_i g_t in place of g_t.

Explicit gradients are formed where they hold no more numbers than the a and g that they replace; that is also where
they take fewer operations. Convolutions form them a little further.

Rounding of a record's own contribution. Every norm N_i here is an upper bound on the norm of what is added later. Let u
be the unit roundoff of the parameters' type. A sum of n products, in any order, is off by at most gamma_n(u) =
n u / (1 - n u) times the sum of their sizes; numbers too small to square are off by at most the smallest normal number
each. An explicit norm is a sum of squares, hence right up to a factor. A factored norm can cancel: its Gram matrices
are off by gamma_n |a_s| |a_t| and the like, so that it is off by some gamma S^2, where S = sum_t |a_t| |g_t|, however
small it is itself; and G_i over T tokens, where it is formed in this type, is off by gamma_(T+8) S. Both are counted:

    |G_i| <= N_i = sqrt(computed + max(gamma, k_T^2) S^2) + gamma_(T+8) S,   k_T = CANCELLATION max(1, T / TERMS).

Where PyTorch may shorten the factors of a matrix product (`torch.set_float32_matmul_precision`), that counts too.
Convolutions on a GPU shorten them to 11 significant bits unless `torch.backends.cudnn.allow_tf32` is off, and so do the
explicit gradients of convolutions here, which stay their own measure.

Rounding of the sum over the records. One record can decide how the sum of all others is rounded, so this error counts
for n records, not for one. All sums end in float64, whose unit roundoff is v = 2^-53:

    explicit      w_i G_i is added up for each entry of the parameter: one product and at most n - 1 additions.
    one token     w_i g_i a_i^T likewise: two products and at most n - 1 additions.
    several       the products of whole records are summed apart, at most max(TERMS, T) at a time; the results, at most
                  n in all, are added up.

Adding zero is exact, and a sum of n numbers, in any order, rounds each of them at most n - 1 times. Hence for the first
two, with w_i S_i = w_i |G_i| <= w_i N_i, the error is at most gamma_(n+1)(v) sum_i w_i N_i in norm. For the
last, the inner sums are off by at most h sum_i w_i N_i, h = gamma_(TERMS+2)(v) / CANCELLATION, as k_T S_i <= N_i and
gamma_(m+1)(v) / k_T <= h for m = max(TERMS, T); and the outer one by gamma_n(v) (1 + h) sum_i w_i N_i. Over all
parameters w_i N_i <= clip, and errors of parameters add up as the norms do, in squares (triangle inequality over the
records). So the whole sum is off by at most e clip in norm, with

    e = n (gamma_(n+2)(v) + h) (1 + 2^-10)       (`sum_error`),

and likewise in each entry where entries are clipped. What underflows is below 1e-150 and covered by the last factor.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TERMS = 2048
"""The most products that a matrix product sums in float64, unless a record has more tokens."""

WIDE_CHUNK = 1 << 24
"""The most numbers that are copied to float64 at a time."""

CANCELLATION = 2.0**-10
"""Norms count at least this part of S, which bounds how far the products of one record may cancel."""

# Twice the error of TF32, which may be cut off, and of bfloat16, which is rounded.
_SHORT_FACTORS = {"highest": 0.0, "high": 2.0**-9, "medium": 2.0**-7}
_WIDE = 2.0**-53  # the unit roundoff of float64


def roundoff(tensor: Tensor) -> float:
    """The relative error of one operation."""
    return float(torch.finfo(tensor.dtype).eps) / 2


def gamma(terms: int, unit: float) -> float:
    """The relative error of a sum of so many products, in any order."""
    return terms * unit / (1 - terms * unit)


def factor_roundoff(tensor: Tensor) -> float:
    """The relative error of a product's two factors in a matrix product, where it may shorten them."""
    return _SHORT_FACTORS[torch.get_float32_matmul_precision()] if tensor.dtype == torch.float32 else 0.0


def sum_error(records: int) -> float:
    """How far the computed sum of so many clipped gradients may be off, in units of clip; proved at the top.

    Leaving out one of them moves it by at most clip (1 + 2 sum_error), replacing one by at most 2 clip (1 + sum_error).
    """
    inner = gamma(TERMS + 2, _WIDE) / CANCELLATION
    return records * (gamma(records + 2, _WIDE) + inner) * (1 + 2.0**-10)


def in_parts(step: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """So many records at a time, or one."""
    return zip(*(torch.split(tensor, max(1, step)) for tensor in tensors), strict=True)


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """In float64, where products of float32 are exact."""
    return values * weights.view(-1, *[1] * (values.ndim - 1))


def slow_products(tensor: Tensor) -> bool:
    """Whether products of matrices in float64 take many times as long as in float32: on GPUs not made for computing."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return False
    return torch.cuda.get_device_capability(tensor.device) not in {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


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
        """Products of a matrix and a vector."""
        values = self.values.flatten(1)
        found = total.view(-1) if self.order is None else total.new_zeros(values.shape[1])
        most = WIDE_CHUNK if values.is_cuda else WIDE_CHUNK >> 4  # that is read again from a cache
        for weight, part in in_parts(most // max(1, values.shape[1]), weights, values):
            found.addmv_(part.double().t(), weight)
        if self.order is not None:
            total += self._as_parameter(found.view(self.values.shape[1:]))

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
        """Matrix products; where they would be slow and a record has many tokens, its gradient is formed."""
        tokens, width, height = *self.inputs.shape[1:], self.outputs.shape[2]
        if tokens > 16 and slow_products(self.inputs):
            for weight, inputs, outputs in in_parts(WIDE_CHUNK // (width * height), weights, self.inputs, self.outputs):
                Samples(Tokens(inputs, outputs).samples()).add(weight, total)
            return
        step = min(TERMS, WIDE_CHUNK // (width + height)) // max(1, tokens)
        for weight, inputs, outputs in in_parts(step, weights, self.inputs, self.outputs):
            left, right = weighted(weight, outputs).flatten(0, 1).t(), inputs.double().flatten(0, 1)
            if tokens == 1:
                total.addmm_(left, right)
            else:  # apart, as it may be much larger before it cancels
                total += left @ right

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
        """Scattered sums: over the tokens of a record that have the same index, then over the records."""
        tokens, width = self.outputs.shape[1:]
        step = WIDE_CHUNK // max(1, tokens * (tokens + width))
        for weight, indices, outputs in in_parts(step, weights, self.indices, self.outputs):
            values = weighted(weight, outputs)
            if tokens > 1:
                first = (indices.unsqueeze(1) == indices.unsqueeze(2)).byte().argmax(2)
                values = torch.zeros_like(values).scatter_add_(1, first.unsqueeze(2).expand_as(values), values)
            total.index_add_(0, indices.flatten(), values.flatten(0, 1))

    def masked(self, kept: Tensor) -> Lookup:
        """Zero gradients; the indices are whole numbers and stay."""
        return Lookup(self.indices, keep(self.outputs, kept), self.rows)


def gram_norm(inputs: Tensor, outputs: Tensor, *, terms: int) -> Tensor:
    """|sum_t g_t a_t^T|^2 from the Gram matrix of a (each entry a sum of that many terms) and g: (batch, tokens, out).

    An upper bound, also on what a weight gradient over the tokens rounds to; see the top of the file.
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
    cancellation = CANCELLATION * max(1, tokens / TERMS)
    part = max(gamma(terms + width + 16, unit) + 2.1 * factors, cancellation**2)
    wide = wide.add_(absolute.square(), alpha=part).sqrt_()
    return wide.add_(absolute, alpha=gamma(tokens + 8, unit) + factors).square_().mul_(1 + 8 * unit).to(outputs.dtype)


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
