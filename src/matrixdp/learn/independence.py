"""Whether a network treats each record on its own: it is run twice, and the other record of the batch is exchanged."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from matrixdp.errors import InvalidInput, NumericalFailure

# A change by less than this share of an answer is rounding: kernels may add up in another order.
ROUNDING = 1e-3
# The state of torch's generator on the processor: where the 624 words of the Mersenne twister lie in it.
_STATE_BYTES, _FIRST, _WORDS = 5056, 24, 624


def check_independent(
    network: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    layers: Iterable[nn.Module] = (),
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Tensor | None = None,
) -> bool:
    """Raises InvalidInput if the answer for a record depends on the other one, or if the network keeps what it saw.

    This finds layers that take another dimension for the records, statistics over a batch, and running averages, as far
    as the records at hand bring them to light; it proves nothing. Random numbers of torch are the same in both runs.

    Args:
        network: as it is going to be used.
        inputs: what it takes, a row for each record.
        layers: parts of the network whose inputs and outputs have a row for each record, and are compared too.
        loss: (outputs, targets) -> one value a record, to be compared in place of the outputs.
        targets: of the loss.

    Returns:
        Whether there were two different records, without numbers that are not finite, to try it with.
    """
    pair = _pair(inputs)
    if pair is None:
        return False
    runs, kept = [], dict[tuple[str, str, int], Tensor]()
    with torch.no_grad():
        for rows in (pair, [pair[0], pair[0]]):
            seen: list[Tensor] = []
            handles = [layer.register_forward_hook(_record(seen)) for layer in layers]
            try:
                with _seeded(inputs[0].device):
                    answer = network(*(t[rows] for t in inputs))
                    if loss is not None and targets is not None:
                        answer = loss(answer, targets[rows])
                    seen += _inside(answer)
            finally:
                for handle in handles:
                    handle.remove()
            runs.append([t[0].clone() for t in seen if t.shape[:1] == (2,)])
            if not kept:
                kept = {place: tensor.clone() for place, tensor in _kept(network)}
        after = dict(_kept(network))
    if any(a.shape == b.shape and _differ(a, b) for a, b in zip(*runs, strict=False)):
        raise InvalidInput(
            "model or loss mixes the records of a batch: the answer for one record changes with another. Keep the "
            "records in the first dimension (batch_first=True in attention and recurrent layers), and use no "
            "statistics over a batch; what is random must come from torch's default generator"
        )
    for (name, key, place), tensor in kept.items():
        if (name, key, place) not in after or not _same(tensor, after[name, key, place]):
            raise InvalidInput(
                f"the model keeps what it saw of the records, without noise, in {name or 'itself'} ({key.strip('_')}); "
                "use layers that keep no running statistics, such as GroupNorm, and store no activations"
            )
    return all(bool(torch.isfinite(t).all()) for t in runs[0])


def refuse_batch_statistics(network: nn.Module) -> None:
    """Raises InvalidInput for layers that normalise a record by the others."""
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) or getattr(module, "track_running_stats", False):
            raise InvalidInput(
                f"layer {name or '(the model)'} ({type(module).__name__}) mixes the records of a batch; use "
                "nn.GroupNorm instead (opacus.validators.ModuleValidator.fix(model) replaces it)"
            )


@contextmanager
def secret_randomness(device: torch.device) -> Iterator[None]:
    """Random numbers of torch, on the processor and the device, that nobody else knows, for a while."""
    with _forked(device):
        # a seed would leave 32 bits of secret here
        state = torch.default_generator.manual_seed(0).get_state()
        if state.numel() != _STATE_BYTES:
            raise NumericalFailure(
                f"the state of random numbers in torch {torch.__version__} has {state.numel()} bytes, not "
                f"{_STATE_BYTES}, so that it cannot be made secret; use the torch of constraints.txt"
            )
        words = np.frombuffer(secrets.token_bytes(4 * _WORDS), np.uint32).astype(np.int64)
        state[_FIRST : _FIRST + 8 * _WORDS].view(torch.int64).copy_(torch.from_numpy(words))
        torch.default_generator.set_state(state)
        _seed_device(device, secrets.randbits(63))
        yield


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    with _forked(device):
        torch.default_generator.manual_seed(0)
        _seed_device(device, 0)
        yield


@contextmanager
def _forked(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _seed_device(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _pair(inputs: tuple[Tensor, ...]) -> list[int] | None:
    """The first record whose numbers are finite, and the first such that differs from it."""
    rows = [t.detach().reshape(len(t), -1) for t in inputs]
    finite = torch.stack([torch.isfinite(t).all(1) for t in rows]).all(0)
    if not bool(finite.any()):
        return None
    first = int(finite.nonzero()[0])
    others = finite & torch.stack([(t != t[first]).any(1) for t in rows]).any(0)
    return [first, int(others.nonzero()[0])] if bool(others.any()) else None


def _record(seen: list[Tensor]) -> Callable[..., None]:
    def after(module: nn.Module, given: Any, output: Any) -> None:
        seen.extend(t.clone() for t in _inside((given, output)))

    return after


def _kept(network: nn.Module) -> Iterator[tuple[tuple[str, str, int], Tensor]]:
    """The numbers that a network holds: parameters, buffers and attributes."""
    for name, module in network.named_modules():
        for key, value in vars(module).items():
            for place, tensor in enumerate(_inside(value)):
                yield (name, key, place), tensor


def _inside(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a value, numbers and arrays as tensors; what has no plain numbers is left out."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not (value.is_meta or value.is_quantized or value.is_nested):
            yield value.detach()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield torch.from_numpy(np.array(value, dtype=np.float64))
    elif isinstance(value, float):
        yield torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, (list, tuple)) and depth < 4:
        for part in value:
            yield from _inside(part, depth + 1)
    elif isinstance(value, dict) and depth < 4:
        yield from _inside(list(value.values()), depth + 1)


def _differ(first: Tensor, second: Tensor) -> bool:
    if not first.is_floating_point():
        return not torch.equal(first, second)
    sizes = torch.maximum(first.abs(), second.abs())
    size = sizes[torch.isfinite(sizes)].amax() if torch.isfinite(sizes).any() else 0.0
    return bool(((first - second).abs() > ROUNDING * size).any())


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool(torch.isclose(first, second, rtol=0, atol=0, equal_nan=True).all())
