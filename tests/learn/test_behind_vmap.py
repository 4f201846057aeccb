"""What reaches behind vmap, or around it, is refused."""

import functools
import warnings

import pytest
import torch
from torch import nn

from independence_cases import (
    LOSS,
    WIDTH,
    Then,
    numbers,
)
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients

pytestmark = pytest.mark.usefixtures("one_thread")

SEEN: list[float] = []


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(doubled)


class Batchwise(torch.Tensor):
    """Its dispatch would see the whole batch."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("it was handed the batch")


OWN = torch.ones(WIDTH).as_subclass(Batchwise)


def into_out(module, x):
    torch.sum(x, dim=1, out=module.kept)
    return x


def by_size(operation):
    def function(x):
        SEEN.append(operation(x))
        return x + sum(SEEN[:-1])

    return function


def packed(x):
    lengths = x[0, :1].long().clamp(1, 9)
    return float(nn.utils.rnn.pack_padded_sequence(torch.ones(9, 1, 1), lengths).data.shape[0])


BEHIND = {
    "a count of values": by_size(lambda x: float(torch.bincount(x[0].abs().long()).shape[0])),
    "the same by its name": by_size(lambda x: float(torch.ops.aten.bincount(x[0].abs().long()).shape[0])),
    "repeats": by_size(lambda x: float(torch.repeat_interleave(x[0].abs().long()).shape[0])),
    "a packed sequence": by_size(packed),
    "unwrapping": lambda x: x * torch.func.debug_unwrap(x).max(),
    "TorchScript": lambda x: x + scripted(x),
    "a tensor of its own kind": lambda x: x * OWN,
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_reaches_behind_vmap_is_refused(name):
    SEEN.clear()
    with pytest.raises(InvalidInput, match="one record at a time"):
        ClippedGradients(Then(BEHIND[name]), LOSS, clip=1.0).accumulate(*numbers().tensors)


def test_a_result_is_not_written_into_a_buffer():
    class Out(Then):
        def forward(self, x):
            return super().forward(x) + self.kept[0]

    model = Out(lambda x: x)
    model.function = functools.partial(into_out, model)
    model.register_buffer("kept", torch.zeros(1))
    with pytest.raises(InvalidInput):
        ClippedGradients(model, LOSS, clip=1.0).accumulate(*numbers().tensors)
    assert not model.kept.any()
