"""Secret random numbers from torch, for dropout; the caller's generators are restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from matrixdp.errors import NumericalFailure
from matrixdp.secure.entropy import Key

# The state of torch's CPU generator begins with the seed; the 624 words of the Mersenne twister have this place in it.
_STATE_BYTES, _FIRST, _WORDS = 5056, 24, 624


@contextmanager
def secret_randomness(device: torch.device, key: Key | None = None) -> Iterator[None]:
    """Gives torch a secret state: on the CPU all of it from a key (a new one by default), on a device a 63-bit seed."""
    with forked(device):
        # a seed would have 32 secret bits only
        state = torch.default_generator.manual_seed(0).get_state()
        if state.numel() != _STATE_BYTES:
            raise NumericalFailure(
                f"the state of the generator in torch {torch.__version__} has {state.numel()} bytes, not "
                f"{_STATE_BYTES}, so that it cannot be made secret; use the torch of constraints.txt"
            )
        drawn = np.empty(_WORDS // 2 + 2, dtype=np.uint64)
        (Key() if key is None else key).stream().fill(drawn, 0)
        words = drawn[: _WORDS // 2].view(np.uint32).astype(np.int64)
        state[_FIRST : _FIRST + 8 * _WORDS].view(torch.int64).copy_(torch.from_numpy(words))
        # nothing is computed from the seed; `record_independence.below` compares it to see whether the model has seeded
        state[:8].view(torch.int64).fill_(int(drawn[-1] >> 1))
        torch.default_generator.set_state(state)
        _seed_device(device, int(drawn[_WORDS // 2] >> 1))
        yield


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """On exit, torch's random numbers continue as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _seed_device(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
