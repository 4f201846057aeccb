"""Code that would run unwatched: of objects that PyTorch calls, of layers in a graph, and on the whole batch."""

import copy
import enum
import gc
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from independence_cases import LOSS, WIDTH, Then, contributions, numbers
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients
from matrixdp.learn.record_independence.one_record import each_record

pytestmark = pytest.mark.usefixtures("one_thread")

TENSOR, GIVEN = torch.zeros(1), []


@torch.library.custom_op("matrixdp_tests::whole", mutates_args=())
def whole(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@whole.register_vmap
def _(info, dims, x):
    return x - x.mean(0), 0


class Duck:
    """PyTorch calls `__torch_function__` of an argument that is no tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return whole(args[0])


class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return whole(args[0].as_subclass(torch.Tensor))


OWN = torch.ones(WIDTH).as_subclass(Own)


class Acts:
    """An index, a sequence or an attribute, whose code gives the result."""

    def __init__(self, x):
        self.x = x

    def __index__(self):
        self.result = whole(self.x)
        return 1

    def __len__(self):
        return 1

    def __getitem__(self, place):
        return self if place == 0 else [][place]

    def __deepcopy__(self, memo):
        GIVEN.append(whole(self.x))


class Many(list):
    def __iter__(self):
        self.result = whole(self[0])
        return super().__iter__()


def by(use):
    def function(x):
        actor = Acts(x)
        use(x, actor)
        return actor.result

    return function


def by_attribute(x):
    TENSOR.actor = Acts(x)
    try:
        copy.deepcopy(TENSOR)
    finally:
        del TENSOR.actor
    return GIVEN.pop()


ACTORS = {
    "torch function": lambda x: torch.add(x, Duck()),
    "subclass": lambda x: x.as_subclass(Own) * 2,
    "constant of a subclass": lambda x: torch.mul(x, OWN),
    "index": by(lambda x, actor: x[:, actor]),
    "part of a slice": by(lambda x, actor: x[:, actor:]),
    "sequence": by(lambda x, actor: x[[actor]]),
    "attribute": by_attribute,
}


@pytest.mark.parametrize("name", ACTORS)
def test_objects_whose_code_pytorch_would_call_are_refused(name):
    model = Then(ACTORS[name])
    with pytest.raises(InvalidInput, match="one record at a time"):
        ClippedGradients(model, LOSS, clip=1.0).accumulate(*numbers().tensors)
    GIVEN.clear()


class Reduction(enum.StrEnum):
    NONE = "none"

    def __eq__(self, other):
        raise AssertionError("code of an argument runs")

    __hash__ = str.__hash__


class Number(int):
    def __index__(self):
        raise AssertionError("code of an argument runs")


PLAIN = {
    "text": lambda x: torch.einsum("bi->bi", x) + F.mse_loss(x, 2 * x, reduction=Reduction.NONE),
    "number": lambda x: x + x.narrow(1, Number(1), 1),
    "list": lambda x: torch.stack(Many([x, x])).mean(0),
    "scalar of numpy": lambda x: x * np.float64(2) + x[:, np.int64(1) : np.int64(2)],
    "vmap within": lambda x: torch.func.vmap(lambda row: row * row.sum(), in_dims=1, out_dims=1)(x),
    "array": lambda x: x[:, np.arange(WIDTH)] + x[..., list(range(WIDTH))] + x[:, range(WIDTH)],
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_sound_runs_numbers_and_lists_of_other_classes_as_plain_ones(name):
    data = numbers()
    gradients = ClippedGradients(Then(PLAIN[name]), LOSS, clip=1.0)
    first, *others = contributions(gradients, data)
    assert gradients.slow_because is not None
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-6)


def found_by_the_collector(x):
    whole = [o for o in gc.get_objects() if type(o) is torch.Tensor and id(o) == PLACE[0]]
    return x * whole[0].sum()


def unwrapped(x):
    return x * torch._C._functorch.get_unwrapped(x).sum()


def in_frames(x):
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("records"), torch.Tensor):
        frame = frame.f_back
    return x * frame.f_locals["records"].sum()


PLACE: list[int] = []
OTHERS = {
    "frames": in_frames,
    "garbage collector": found_by_the_collector,
    "unwrapping": unwrapped,
    "one scale for a batch": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize(),
    "offsets": lambda x: F.embedding_bag((3 * x).long(), x[:, None], torch.tensor([0, 4, 1]), mode="sum"),
    "offsets of the record": lambda x: F.embedding_bag(
        (3 * x).long(), x[:, None], offsets=(x[:3] * 0).long() + torch.tensor([0, 4, 1]), mode="sum"
    ),
    "no checks": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([2 * WIDTH]), unsafe=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_would_give_a_record_numbers_of_others_is_refused(name):
    records = torch.rand(5, WIDTH)
    PLACE[:] = [id(records)]
    with pytest.raises(InvalidInput, match="one record at a time"):
        each_record(OTHERS[name], records)


LEAKED: list[nn.Module] = []


def mixing(layer, given, output):
    return output * output.detach().sum()


def overridden(layer):
    layer.__dict__["forward"] = lambda x: x[:, :4] * x.detach().sum()


class Counting(dict):
    """Weights that change whenever they are looked up."""

    def __getitem__(self, name):
        LEAKED.append(name)
        return super().__getitem__(name) * len(LEAKED)


def replaced(layer):
    layer._parameters = Counting(layer._parameters)


CHANGES = {
    "hook": lambda layer: layer.register_forward_hook(mixing),
    "method": overridden,
    "leak": LEAKED.append,
    "parameters": replaced,
}


class WhileTraced(nn.Module):
    """Changes a layer after it was called, which a tracer sees as a single operation."""

    def __init__(self, change):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(WIDTH, 4), nn.Linear(4, 2), change

    def forward(self, x):
        hidden = self.first(x)
        self.change(self.first)
        return self.last(hidden)


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_model_does_while_it_is_traced_is_not_in_the_graph(name):
    LEAKED.clear()
    gradients = ClippedGradients(WhileTraced(CHANGES[name]), LOSS, clip=1.0)
    gradients.prepare(*numbers().tensors)
    for layer in LEAKED:
        if isinstance(layer, nn.Module):
            layer.register_forward_hook(mixing)
    first, *others = contributions(gradients, numbers())
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-6)
