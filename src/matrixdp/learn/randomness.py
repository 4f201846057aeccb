"""Secret random numbers, for dropout and augmentation; the caller's generators are restored afterwards.

Python's and numpy's global generators are made secret too: models and data sets may draw from them, and how many
numbers they draw depends on the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from matrixdp.errors import NumericalFailure
from matrixdp.secure.entropy import Key

# The state of torch's CPU generator begins with the seed; the 624 words of the Mersenne twister have this place in it.
_STATE_BYTES, _FIRST, _WORDS = 5056, 24, 624
_SEED = 8  # 64-bit words of a seed for Python's generator, and for numpy's


@contextmanager
def secret_randomness(device: torch.device, key: Key | None = None) -> Iterator[None]:
    """Gives torch a secret state: on the CPU all of it from a key (a new one by default), on a device a 63-bit seed."""
    with forked(device), python_kept():
        # a seed would have 32 secret bits only
        state = torch.default_generator.manual_seed(0).get_state()
        if state.numel() != _STATE_BYTES:
            raise NumericalFailure(
                f"the state of the generator in torch {torch.__version__} has {state.numel()} bytes, not "
                f"{_STATE_BYTES}, so that it cannot be made secret; use the torch of constraints.txt"
            )
        drawn = np.empty(_WORDS // 2 + 2 + 2 * _SEED, dtype=np.uint64)
        (Key() if key is None else key).stream().fill(drawn, 0)
        drawn, ours, numpys = np.split(drawn, [-2 * _SEED, -_SEED])
        random.seed(ours.tobytes())
        np.random.seed(numpys.view(np.uint32))  # noqa: NPY002  the generator that other code uses
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


@contextmanager
def python_kept() -> Iterator[Callable[[], bool]]:
    """On exit, Python's and numpy's global random numbers continue as if nothing had been drawn.

    Yields: a function that says whether numbers were drawn from them.
    """
    ours, numpys = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    try:
        yield lambda: (random.getstate(), str(np.random.get_state(legacy=False))) != (ours, str(numpys))  # noqa: NPY002
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002


def _seed_device(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
