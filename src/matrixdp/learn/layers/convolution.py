"""Convolutions: linear layers on the patches of an input, with two algorithms for norms and two for sums.

    norm   `form_gradients`     explicit: patches are unfolded, and every record's gradient is formed
           `gram_norm_of`       factored: by the Gram matrices of pixels
    sum    `ExplicitGradients`  explicit: of the gradients formed for the norm, or formed again in parts
           `add_unfolded`       factored: patches of many records are unfolded, for one matrix product

`ConvolutionGradients` chooses: `smaller` for norm and sum, `add` for the sum where the norm was factored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from matrixdp.learn.layers.base import (
    WIDE_CHUNK,
    ExplicitGradients,
    RecordGradients,
    cuda_kernels,
    in_parts,
    masked,
    weighted,
)
from matrixdp.learn.layers.registry import register
from matrixdp.learn.layers.rounding import TERMS, gram_norm, roundoff, slow_products

CHUNK = 1 << 26
"""The most numbers that unfolded patches may take at a time."""


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(layer: Any, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, RecordGradients]:
    """The rule; inputs and gradients of outputs are (batch, channels, *pixels)."""
    found: dict[str, RecordGradients] = {}
    if "weight" in names:
        found["weight"] = ConvolutionGradients(layer, inputs, outputs)
    if "bias" in names:
        found["bias"] = ExplicitGradients(outputs.flatten(2).sum(2))
    return found


@dataclass(frozen=True)
class ConvolutionGradients(RecordGradients):
    """The weight: the input and the gradient of the output, both (batch, channels, *pixels)."""

    layer: Any
    inputs: Tensor
    outputs: Tensor

    def smaller(self) -> RecordGradients:
        """Explicit, if the weight is no larger than a record's input and output, or slightly larger but faster.

        Both ways take about as many operations; they differ in memory traffic. Explicit gradients are written once and
        read twice, a Gram matrix is read for each entry of the kernel and a few times more.
        """
        record = (self.inputs.numel() + self.outputs.numel()) // self.inputs.shape[0]
        weight, entries = self.layer.weight.numel(), math.prod(self.layer.kernel_size)
        gram = self.layer.groups * math.prod(self.outputs.shape[2:]) ** 2
        explicit = weight <= record or (weight <= 3 * record and 3 * weight <= (entries + 5) * gram)
        if explicit:
            return form_gradients(self.layer, self.inputs, self.outputs)
        kernels = _kernels(self.layer, self.inputs)
        if kernels is None or math.prod(self.outputs.shape[2:]) > kernels.MOST_PIXELS:
            return self
        return ShortenedGradients(self.layer, kernels.shortened(self.inputs), kernels.shortened(self.outputs))

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Products of unfolded patches and weighted gradients; explicit gradients if products in float64 are slow."""
        if math.prod(self.outputs.shape[2:]) > 16 and slow_products(self.inputs):
            step = WIDE_CHUNK // self.layer.weight.numel()
            for weight, inputs, outputs in in_parts(step, weights, self.inputs, self.outputs):
                form_gradients(self.layer, inputs, outputs, short=False).add(weight, total)
        else:
            add_unfolded(self.layer, self.inputs, self.outputs, weights, total)

    def explicit(self) -> Tensor:
        """(batch, out channels, in channels / groups, *kernel)."""
        return form_gradients(self.layer, self.inputs, self.outputs).explicit()

    def squared_norm(self) -> Tensor:
        """By Gram matrices."""
        return gram_norm_of(self.layer, self.inputs, self.outputs)

    def masked(self, kept: Tensor) -> ConvolutionGradients:
        """Zeros in both factors."""
        return ConvolutionGradients(self.layer, masked(self.inputs, kept), masked(self.outputs, kept))


class ShortenedGradients(ConvolutionGradients):
    """Factors with 11 significant bits on a CUDA device; norm and sum are those of the gradient of these factors."""

    def smaller(self) -> RecordGradients:
        """Itself: the choice was made."""
        return self

    def squared_norm(self) -> Tensor:
        """By Gram matrices."""
        norms: Tensor = cuda_kernels(self.inputs).convolution_norms(self.layer, self.inputs, self.outputs)
        return norms

    def add(self, weights: Tensor, total: Tensor) -> None:
        """A kernel forms each record's gradient and adds it, without writing it to memory."""
        total += cuda_kernels(self.inputs).convolution_sum(self.layer, self.inputs, self.outputs, weights)

    def masked(self, kept: Tensor) -> ShortenedGradients:
        """Itself: the kernel skips records of weight zero."""
        return self


def _kernels(layer: Any, inputs: Tensor) -> Any:
    """The CUDA kernels, if they support this convolution and PyTorch allows TF32 in convolutions; else None."""
    plain = isinstance(layer.padding, tuple) and (layer.padding_mode == "zeros" or not any(layer.padding))
    if not (type(layer) is nn.Conv2d and layer.groups == 1 and plain and torch.backends.cudnn.allow_tf32):
        return None
    return cuda_kernels(inputs)


def form_gradients(layer: Any, inputs: Tensor, outputs: Tensor, *, short: bool = True) -> ExplicitGradients:
    """Each record's gradient; with short=True on tensor cores, if PyTorch's convolutions may use them.

    Patches are unfolded along all dimensions but the first; along that, one matrix product is taken per entry of the
    kernel. With stride 1, the rows for an entry are contiguous in memory, so they need no copy.
    """
    if short and (kernels := _kernels(layer, inputs)) is not None:
        values = kernels.convolution_gradients(layer, inputs, outputs)
        return ExplicitGradients(values, tuple(layer.weight.shape), order=(2, 3, 0, 1))
    inputs = _padded(layer, inputs).contiguous()
    batch, channels = inputs.shape[:2]
    (height, *lengths), groups = outputs.shape[2:], layer.groups
    outputs = outputs.reshape(batch * groups, -1, height * math.prod(lengths)).transpose(1, 2)
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
        # Norm and sum are both those of this gradient, so short factors do not weaken the bound.
        with _tensor_cores(short and inputs.is_cuda and inputs.dtype == torch.float32):
            for k in range(layer.kernel_size[0]):
                first = k * layer.dilation[0]
                rows = unfolded[:, :, first : first + layer.stride[0] * (height - 1) + 1 : layer.stride[0]].flatten(2)
                if rows.is_cuda:
                    torch.bmm(rows, outputs[chosen], out=values[chosen, k])
                else:  # slow at writing into a part
                    values[chosen, k] = torch.bmm(rows, outputs[chosen])
    values = values.view(batch, groups, layer.kernel_size[0], channels // groups, width, outputs.shape[2])
    return ExplicitGradients(values, tuple(layer.weight.shape), order=(0, 4, 2, 1, 3))


def gram_norm_of(layer: Any, inputs: Tensor, outputs: Tensor) -> Tensor:
    """Squared norms from two Gram matrices; that of the patches is a sum of shifted Gram matrices of pixels."""
    groups = layer.groups
    # Zeros around the input are zeros around its Gram matrix, where they cost no products.
    later = layer._reversed_padding_repeated_twice if layer.padding_mode == "zeros" else []
    inputs = inputs if later else _padded(layer, inputs)
    (batch, _, *pixels), lengths = inputs.shape, outputs.shape[2:]
    inputs = inputs.reshape(batch * groups, -1, math.prod(pixels))
    outputs = outputs.reshape(batch * groups, -1, math.prod(lengths)).transpose(1, 2)
    # A sum over the channels, then over the kernel.
    terms = inputs.shape[1] + math.prod(layer.kernel_size)
    norms = []
    step = max(1, CHUNK // (2 * inputs.shape[2] ** 2))  # in memory with and without its zeros
    for part, gradient in in_parts(step, inputs, outputs):
        gram = torch.bmm(part.transpose(1, 2), part).view(-1, *pixels, *pixels)
        gram = functional.pad(gram, [*later, *later]) if any(later) else gram
        first, *others = (gram[(slice(None), *place, *place)] for place in _places(layer, lengths))
        patches = first.clone(memory_format=torch.contiguous_format)
        for other in others:
            patches += other
        norms.append(gram_norm(patches.view(-1, *[outputs.shape[1]] * 2), gradient, terms=terms))
    return torch.cat(norms).view(batch, groups).sum(1).mul_(1 + (groups + 2) * roundoff(inputs))


def _places(layer: Any, lengths: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """For each entry of the kernel, the pixels that it is multiplied with."""
    for place in itertools.product(*map(range, layer.kernel_size)):
        starts = [k * d for k, d in zip(place, layer.dilation, strict=True)]
        yield tuple(slice(a, a + s * (n - 1) + 1, s) for a, s, n in zip(starts, layer.stride, lengths, strict=True))


def add_unfolded(layer: Any, inputs: Tensor, outputs: Tensor, weights: Tensor, total: Tensor) -> None:
    """Adds the weighted sum: patches in float64, unfolded for many records at a time, times weighted gradients.

    PyTorch's own backward convolutions would sum over the records in the parameters' type.
    """
    inputs = _padded(layer, inputs).contiguous()
    channels, strides, lengths = inputs.shape[1], inputs.stride(), outputs.shape[2:]
    pixels = math.prod(lengths)
    along_kernel = [d * s for d, s in zip(layer.dilation, strides[2:], strict=True)]
    along_output = [d * s for d, s in zip(layer.stride, strides[2:], strict=True)]
    step = min(TERMS, WIDE_CHUNK // (channels * math.prod(layer.kernel_size))) // pixels
    for weight, part, gradient in in_parts(step, weights, inputs, outputs):
        size = (channels, *layer.kernel_size, part.shape[0], *lengths)
        unfolded = part.double().as_strided(size, (strides[1], *along_kernel, strides[0], *along_output))
        patches = unfolded.reshape(layer.groups, -1, part.shape[0] * pixels)
        left = weighted(weight, gradient).transpose(0, 1).reshape(layer.groups, -1, patches.shape[2])
        total += torch.bmm(left, patches.transpose(1, 2)).view(total.shape)


def _padded(layer: Any, inputs: Tensor) -> Tensor:
    padding, mode = layer._reversed_padding_repeated_twice, layer.padding_mode
    if not any(padding):
        return inputs
    return functional.pad(inputs, padding, mode="constant" if mode == "zeros" else mode)


@contextmanager
def _tensor_cores(allowed: bool) -> Iterator[None]:
    """Lets matrix products shorten float32 to 11 significant bits (TF32), if PyTorch's convolutions may."""
    if not (allowed and torch.backends.cudnn.allow_tf32):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
