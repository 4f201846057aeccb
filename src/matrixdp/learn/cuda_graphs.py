"""Clipped gradients as CUDA graphs: the many kernels of a small network are recorded once, and then replayed.

A graph has a fixed size, a Poisson batch has not. So a batch is padded to the next of a few sizes, and a graph is
recorded for each. Padding is treated like dropped records: its contribution is exactly zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from matrixdp.errors import InvalidInput
from matrixdp.learn.gradients import ClippedGradients

_WARM_UP = 3  # passes before the recording, in which libraries choose their kernels
_SMALLEST = 32


class CapturedGradients:
    """`ClippedGradients.accumulate` on a CUDA device, by a graph that is recorded once per padded size.

    The model must run the same kernels for every batch of a size, and must not synchronize with the device.
    """

    def __init__(self, gradients: ClippedGradients) -> None:
        if not gradients.flat.is_cuda:
            raise InvalidInput("capture is for models on a CUDA device; leave it out, or move the model there first")
        if gradients.augmented:
            raise InvalidInput(
                "capture and augment exclude each other: a recorded pass would repeat its random choices"
            )
        self.gradients = gradients
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one at a time, so they share memory

    def accumulate(self, inputs: Tensor, targets: Tensor) -> int | Tensor:
        """As in ClippedGradients; the number of dropped records stays on the device."""
        if len(targets) == 0:
            return 0
        return self.prepare(inputs, targets).accumulate(inputs, targets)

    def prepare(self, inputs: Tensor, targets: Tensor) -> _Graph:
        """Records a pass for batches of this size, unless there is one already; the sum stays as it is."""
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            raise InvalidInput("capture is for records of one input and one target; leave it out")
        size = _padded_size(len(targets))
        memory = tuple(p.data_ptr() for p in self.gradients.model.parameters())
        key = (size, inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype, memory)
        if not self.gradients.prepare(inputs, targets):
            raise InvalidInput(
                f"capture is for models whose graph can be traced; here {self.gradients.slow_because}. Leave it out"
            )
        if key not in self._graphs:
            so_far = self.gradients.flat.clone()
            self.gradients.accumulate(inputs[:1], targets[:1])  # makes all its checks
            self.gradients.flat.copy_(so_far)
            self._graphs[key] = _Graph(self.gradients, inputs, targets, size, self._pool)
        return self._graphs[key]


class _Graph:
    """A recorded pass over a fixed number of records."""

    def __init__(self, gradients: ClippedGradients, inputs: Tensor, targets: Tensor, size: int, pool: Any) -> None:
        self.inputs = inputs.new_zeros(size, *inputs.shape[1:])
        self.targets = targets.new_zeros(size, *targets.shape[1:])
        self.order = torch.arange(size, device=inputs.device)
        self.present = torch.zeros(size, dtype=torch.bool, device=inputs.device)
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):  # no record is present, so nothing is added
                gradients.add_present((self.inputs,), self.targets, self.present)
        current.wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.dropped = gradients.add_present((self.inputs,), self.targets, self.present)

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Copies the batch in and replays the pass."""
        self.inputs[: len(inputs)].copy_(inputs)
        self.targets[: len(targets)].copy_(targets)
        torch.lt(self.order, len(targets), out=self.present)
        self.graph.replay()
        return self.dropped


def _padded_size(records: int) -> int:
    """The smallest allowed size that is large enough; sizes are at most a quarter (or 32) apart."""
    step = max(_SMALLEST, 1 << max(0, records.bit_length() - 3))
    return -(-records // step) * step
