"""What a convolution contributes to a record's gradient; see `pieces` for the two ways and for rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from matrixdp.learn.pieces import (
    TERMS,
    WIDE_CHUNK,
    Piece,
    Samples,
    gram_norm,
    in_parts,
    keep,
    roundoff,
    slow_products,
    weighted,
)

CHUNK = 1 << 26
"""The most numbers that unfolded patches may take at a time."""


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
        groups = self.layer.groups
        # Zeros around the input are zeros around its Gram matrix, where they cost no products.
        later = self.layer._reversed_padding_repeated_twice if self.layer.padding_mode == "zeros" else []
        given = self.inputs if later else self._padded()
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
            norms.append(gram_norm(patches, gradient, terms=terms))
        return torch.cat(norms).view(batch, groups).sum(1).mul_(1 + (groups + 2) * roundoff(self.inputs))

    def _places(self) -> Iterator[tuple[slice, ...]]:
        """For each entry of the kernel, which pixels it meets."""
        layer, lengths = self.layer, self.outputs.shape[2:]
        for place in itertools.product(*map(range, layer.kernel_size)):
            starts = [k * d for k, d in zip(place, layer.dilation, strict=True)]
            yield tuple(slice(a, a + s * (n - 1) + 1, s) for a, s, n in zip(starts, layer.stride, lengths, strict=True))

    def _explicit(self, *, short: bool = True) -> Samples:
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
                # If norm and sum are those of what comes out here, short factors leave the bound as it is.
                with tensor_cores(short and uses_tensor_cores(rows)):
                    if rows.is_cuda:
                        torch.bmm(rows, outputs[chosen], out=values[chosen, k])
                    else:  # slow at writing into a part
                        values[chosen, k] = torch.bmm(rows, outputs[chosen])
        values = values.view(batch, groups, layer.kernel_size[0], channels // groups, width, outputs.shape[2])
        return Samples(values, tuple(layer.weight.shape), order=(0, 4, 2, 1, 3))

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Products of unfolded patches and weighted gradients, or as in `Tokens`.

        The libraries' own backward convolutions sum over the records in the parameters' type.
        """
        layer, groups, pixels = self.layer, self.layer.groups, math.prod(self.outputs.shape[2:])
        if pixels > 16 and slow_products(self.inputs):
            step = WIDE_CHUNK // layer.weight.numel()
            for weight, part, outputs in in_parts(step, weights, self.inputs, self.outputs):
                Patches(layer, part, outputs)._explicit(short=False).add(weight, total)
            return
        inputs = self._padded().contiguous()
        channels, strides, lengths = inputs.shape[1], inputs.stride(), self.outputs.shape[2:]
        along_kernel = [d * s for d, s in zip(layer.dilation, strides[2:], strict=True)]
        along_output = [d * s for d, s in zip(layer.stride, strides[2:], strict=True)]
        step = min(TERMS, WIDE_CHUNK // (channels * math.prod(layer.kernel_size))) // pixels
        for weight, part, outputs in in_parts(step, weights, inputs, self.outputs):
            size = (channels, *layer.kernel_size, part.shape[0], *lengths)
            unfolded = part.double().as_strided(size, (strides[1], *along_kernel, strides[0], *along_output))
            patches = unfolded.reshape(groups, -1, part.shape[0] * pixels)
            gradient = weighted(weight, outputs).transpose(0, 1).reshape(groups, -1, patches.shape[2])
            total += torch.bmm(gradient, patches.transpose(1, 2)).view(total.shape)

    def masked(self, kept: Tensor) -> Patches:
        """Zeros on both sides."""
        return Patches(self.layer, keep(self.inputs, kept), keep(self.outputs, kept))
