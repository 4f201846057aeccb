"""One record at a time: code that would get behind `vmap`, or keep what it saw, is refused."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from matrixdp.errors import InvalidInput
from matrixdp.learn.independence.one_record import each_record, record_outputs

RECORDS = torch.arange(12.0).reshape(4, 3)
KEPT, TOTAL = [], torch.zeros(1, 3)


@torch.library.custom_op("matrixdp_tests::centre", mutates_args=())
def centre(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@centre.register_vmap
def _(info, dims, x):
    return x - x.mean(0), 0


class Whole(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def with_own_rule(x):
    """The class is made in the pass, so that nothing can look for it before."""

    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, slope):
            return slope

        @staticmethod
        def vmap(info, dims, x):
            return x - x.mean(0), 0

    return Centred.apply(x)


def in_a_mode(x):
    with Whole():
        return x * 2


def keeping(pick):
    def function(x):
        KEPT.append(pick(x))
        return x

    return function


def reading(read):
    return lambda x: (read(x), x)[1]


def by_error_text(x):
    """The text has the size of the whole batch in it."""
    try:
        torch.ones(3, 3).copysign_(x)
    except RuntimeError as error:
        return x * len(str(error))
    return x


BEHIND = {
    "text of an error": by_error_text,
    "vmap rule": with_own_rule,
    "custom operation": centre,
    "dispatch mode": in_a_mode,
    "record kept": keeping(lambda x: x),
    "base of a view": keeping(lambda x: x._base if x._base is not None else x),
    "data": keeping(lambda x: x.data),
    "part": keeping(lambda x: x[0]),
    "iterator": keeping(iter),
    "bound method": keeping(lambda x: x.sum),
    "node": reading(lambda x: (x.requires_grad_() * 2).grad_fn),
    "number": reading(lambda x: float(x.sum())),
    "condition": lambda x: x if x.sum() > 3 else -x,
    "print": reading(str),
    "numpy": reading(lambda x: x.detach().numpy()),
    "list": reading(lambda x: x.tolist()),
    "unique": lambda x: x + len(torch.unique(x)),
    "storage": reading(lambda x: x.untyped_storage()),
    "into a constant": lambda x: TOTAL.add_(x),
}


@pytest.mark.parametrize("what", BEHIND)
def test_what_gets_behind_or_keeps_is_refused(what):
    KEPT.clear()
    with pytest.raises(InvalidInput):
        each_record(lambda x: BEHIND[what](x[None]), RECORDS)
    KEPT.clear()


SOUND = {
    "mean of all": lambda x: x - x.mean(0),
    "constant kept": lambda x: (KEPT.append(torch.ones(3)), x + KEPT[-1])[1],
    "size": lambda x: x / len(x),
}


@pytest.mark.parametrize("what", SOUND)
def test_what_is_sound_runs_and_sees_one_record(what):
    found = each_record(lambda x: SOUND[what](x[None]), RECORDS)
    for place, row in enumerate(found):
        assert torch.equal(row, each_record(lambda x: SOUND[what](x[None]), RECORDS[place : place + 1])[0])


def test_tensors_in_a_reference_cycle_are_not_kept():
    def function(x):
        cycle = [x]
        cycle.append(cycle)
        return x * 2

    assert torch.equal(each_record(function, RECORDS), RECORDS * 2)


def test_attributes_that_a_model_sets_are_gone_afterwards():
    class Keeps(nn.Module):
        last = None

        def forward(self, x):
            self.last = x
            return x

    model = Keeps()
    record_outputs(model, (RECORDS,))
    assert model.last is None
