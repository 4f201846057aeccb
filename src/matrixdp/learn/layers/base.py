"""The gradients of one parameter for every record of a batch, explicit or factored.

A layer that is linear in its weight has, for record i, the gradient G_i = sum_t g_t a_t^T over the tokens (or patches)
t of that record: a_t is the layer's input, g_t the gradient of the loss with respect to its output. Clipping needs the
norm of G_i and then the sum of w_i G_i. `RecordGradients` gives both, in the cheaper of two ways:

    explicit   G_i is formed for every record; its norm and the weighted sum are computed from it (`ExplicitGradients`).
    factored   G_i is never formed: |G_i|^2 = sum_{s,t} <a_s, a_t> <g_s, g_t>, and the weighted sum is the ordinary
               weight gradient with w_i g_t in place of g_t (linear layers, convolutions, embeddings).

Explicit gradients are formed if they have no more numbers than the a and g that they replace; then they also take
fewer operations. Convolutions form slightly larger ones too. Rounding is accounted for: see `rounding`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from matrixdp.learn.layers import cpu_kernels
from matrixdp.learn.layers.rounding import squared_norm

WIDE_CHUNK = 1 << 24
"""The most numbers that are copied to float64 at a time."""


class RecordGradients(ABC):
    """The gradients of one parameter for every record of a batch."""

    @abstractmethod
    def explicit(self) -> Tensor:
        """Each record's gradient: (batch, *shape of the parameter), perhaps not contiguous."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """An upper bound on each record's squared norm: (batch,)."""

    @abstractmethod
    def add(self, weights: Tensor, total: Tensor) -> None:
        """Adds the weighted sum over the records to `total`, a tensor in float64 with the parameter's shape."""

    @abstractmethod
    def masked(self, kept: Tensor) -> RecordGradients:
        """The gradients for a sum where other records have weight zero, so that they add zero even if not finite."""

    def smaller(self) -> RecordGradients:
        """Explicit gradients, if they are smaller than the factors they come from."""
        return self

    def merged(self, others: Sequence[RecordGradients]) -> RecordGradients:
        """The sum with more gradients of the same parameter, if its layer ran several times or layers share it."""
        return ExplicitGradients(sum((other.explicit() for other in others), self.explicit()))


@dataclass(frozen=True)
class ExplicitGradients(RecordGradients):
    """One gradient per record; `order` permutes their dimensions after the first into those of the parameter."""

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

    def explicit(self) -> Tensor:
        """The values, in the parameter's shape."""
        return self._as_parameter(self.values)

    def squared_norm(self) -> Tensor:
        """The sum of squares."""
        return squared_norm(self.values)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """One loop for all records, as a kernel; or products of a matrix and a vector."""
        values = self.values.flatten(1)
        if (kernels := cuda_kernels(values)) is not None:
            found = kernels.weighted_sum(values.contiguous(), weights)
            total += self._as_parameter(found.view(self.values.shape[1:]))
            return
        found = total.view(-1) if self.order is None else total.new_zeros(values.shape[1])
        if values.device.type == "cpu":
            cpu_kernels.add_weighted(values, weights, found)
        else:
            for weight, part in in_parts(WIDE_CHUNK // max(1, values.shape[1]), weights, values):
                found.addmv_(part.double().t(), weight)
        if self.order is not None:
            total += self._as_parameter(found.view(self.values.shape[1:]))

    def masked(self, kept: Tensor) -> ExplicitGradients:
        """Zeros in the rows of other records; the CUDA kernels skip rows of weight zero."""
        if cuda_kernels(self.values) is not None:
            return self
        return ExplicitGradients(masked(self.values, kept), self.shape, self.order)


def cuda_kernels(values: Tensor) -> Any:
    """The kernels for numbers in float32 on a CUDA device; None for others, and without Triton."""
    return _kernels() if values.is_cuda and values.dtype == torch.float32 else None


@functools.cache
def _kernels() -> Any:
    try:
        from matrixdp.learn.layers import cuda_kernels
    except ImportError:  # PyTorch brings Triton on Linux alone
        return None
    return cuda_kernels


def masked(values: Tensor, kept: Tensor) -> Tensor:
    """The values, with zeros for records that are not kept; a weight of 0 times infinity would not be zero."""
    return torch.where(kept.view(-1, *[1] * (values.ndim - 1)), values, values.new_zeros(()))


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Each record times its weight, in float64, where products of two float32 are exact."""
    return values * weights.view(-1, *[1] * (values.ndim - 1))


def in_parts(step: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in parts of `step` records, at least one."""
    return zip(*(torch.split(tensor, max(1, step)) for tensor in tensors), strict=True)
