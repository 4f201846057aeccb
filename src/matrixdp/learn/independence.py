"""Whether a network treats each record on its own: it is run twice, and the other record of the batch is exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from matrixdp.errors import InvalidInput

# A change by less than this share of an answer is rounding: kernels may add up in another order.
ROUNDING = 1e-3


def check_independent(
    network: nn.Module, arguments: tuple[Tensor, ...], answer: Callable[..., Any] | None = None
) -> None:
    """Raises InvalidInput if the answer for a record depends on the other one, or if the network keeps what it saw.

    This finds layers that take another dimension for the records, statistics over a batch, and running averages, as far
    as the records at hand bring them to light; it proves nothing. Random numbers of torch are the same in both runs.

    Args:
        network: as it is going to be used.
        arguments: its inputs for two records or more, a row for each.
        answer: what is made of the arguments; the network itself when left out.
    """
    both = tuple(t[:2].detach() for t in arguments)
    one = tuple(t[:1].expand_as(t) for t in both)
    answers, kept = [], []
    with torch.no_grad():
        for rows in (both, one):
            with seeded(both[0].device, 0):
                answers.append(list(_inside((answer or network)(*(t.clone() for t in rows)))))
            kept.append(
                {
                    (name, key, place): tensor.clone()
                    for name, module in network.named_modules()
                    for key, value in vars(module).items()
                    for place, tensor in enumerate(_inside(value))
                }
            )
    for with_other, alone in zip(*answers, strict=True):
        if with_other.shape[:1] == (2,) and _differ(with_other[0], alone[0]):
            raise InvalidInput(
                "model or loss mixes the records of a batch: the answer for one record changes with another. Keep the "
                "records in the first dimension (batch_first=True in attention and recurrent layers), and use no "
                "statistics over a batch; what is random must come from torch"
            )
    for (name, key, _), tensor in kept[0].items():
        if (name, key, _) not in kept[1] or not _same(tensor, kept[1][name, key, _]):
            raise InvalidInput(
                f"the model keeps what it saw of the records, without noise, in {name or 'itself'} ({key.strip('_')}); "
                "use layers that keep no running statistics, such as GroupNorm, and store no activations"
            )


def refuse_batch_statistics(network: nn.Module) -> None:
    """Raises InvalidInput for layers that normalise a record by the others."""
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) or getattr(module, "track_running_stats", False):
            raise InvalidInput(
                f"layer {name or '(the model)'} ({type(module).__name__}) mixes the records of a batch; use "
                "nn.GroupNorm instead (opacus.validators.ModuleValidator.fix(model) replaces it)"
            )


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers of torch on the processor and the device from this seed for a while."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _inside(value: Any) -> Iterator[Tensor]:
    """The tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _inside(part)
    elif isinstance(value, dict):
        yield from _inside(list(value.values()))


def _differ(first: Tensor, second: Tensor) -> bool:
    if not first.is_floating_point():
        return not torch.equal(first, second)
    size = torch.maximum(first.abs(), second.abs()).nan_to_num(0.0, math.inf).amax() if first.numel() else 0.0
    return bool(((first - second).abs() > ROUNDING * size).any())


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool(torch.isclose(first, second, rtol=0, atol=0, equal_nan=True).all())
