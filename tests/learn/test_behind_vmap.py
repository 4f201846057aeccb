"""What reaches behind vmap, or around it, is refused."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from independence_cases import (
    LOSS,
    WIDTH,
    Then,
    numbers,
    trainer,
)
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients
from matrixdp.learn.record_independence import recorded

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


class Filled(torch.autograd.Function):
    """While this runs, PyTorch has taken the modes for torch functions away."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.index_fill(1, own_place(x), 9.0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        return slope


def own_place(x):
    """In the record here, so that a test that fails does not crash; PyTorch does not check it."""
    return x[0, :1].long().clamp(0, 1)


def pooled_back(x):
    one = x[:, :1].reshape(1, 1, 1, 1)
    return aten.max_pool2d_with_indices_backward(
        one, x[:, :4].reshape(1, 1, 2, 2), [2, 2], [2, 2], [0, 0], [1, 1], False, own_place(x).reshape(1, 1, 1, 1)
    ).sum()


aten = torch.ops.aten
BEHIND = {
    "a table of the record": lambda x: F.embedding(own_place(x), torch.outer(x[0], x[0])),
    "the same by torch": lambda x: torch.embedding(torch.outer(x[0], x[0]), own_place(x)),
    "places of the record": lambda x: x.index_fill(1, own_place(x), 3.0),
    "the same by name": lambda x: torch.index_fill(torch.zeros(1, WIDTH), dim=1, index=own_place(x), value=1.0) * x,
    "the same in place": lambda x: (x * 1).index_fill_(1, own_place(x), 3.0),
    "the same unseen": Filled.apply,
    "another size": lambda x: (x * 1).resize_(1, 2 * WIDTH)[:, :WIDTH],
    "the size of another": lambda x: (x * 1).resize_as_(torch.zeros(1, 2 * WIDTH))[:, :WIDTH],
    "places in a raw backward pass": lambda x: (
        x + aten.embedding_dense_backward(x[:, :1], own_place(x), 6, -1, False)[0]
    ),
    "places in a raw pooling": lambda x: x + pooled_back(x),
    "a count of values": by_size(lambda x: float(torch.bincount(x[0].abs().long()).shape[0])),
    "the same by its name": by_size(lambda x: float(torch.ops.aten.bincount(x[0].abs().long()).shape[0])),
    "repeats": by_size(lambda x: float(torch.repeat_interleave(x[0].abs().long()).shape[0])),
    "a packed sequence": by_size(packed),
    "unwrapping": lambda x: x * torch.func.debug_unwrap(x).max(),
    "TorchScript": lambda x: x + scripted(x),
    "a tensor of its own kind": lambda x: x * OWN,
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", BEHIND)
def test_what_reaches_behind_vmap_is_refused(monkeypatch, name, times):
    monkeypatch.setattr(recorded, "_TIMES", times)
    SEEN.clear()
    with pytest.raises(InvalidInput, match="one record at a time"):
        ClippedGradients(Then(BEHIND[name]), LOSS, clip=1.0, batch_size=20).accumulate(*numbers().tensors)


def forked(x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x * torch.rand(1, WIDTH)


GENERATOR, STATE = torch.Generator(), torch.Generator().manual_seed(4).get_state()
KNOWN = {
    "seed": lambda x: x * (torch.manual_seed(3), torch.rand(1, WIDTH))[1],
    "seed of dropout": lambda x: (torch.manual_seed(3), F.dropout(x))[1],
    "seed that is taken back": forked,
    "seed of the generator": lambda x: x * (torch.default_generator.manual_seed(3), torch.rand(1, WIDTH))[1],
    "state": lambda x: x * (torch.set_rng_state(STATE), torch.rand(1, WIDTH))[1],
    "generator": lambda x: x * torch.rand(1, WIDTH, generator=GENERATOR),
    "generator in place": lambda x: (x * 1).bernoulli_(0.5, generator=GENERATOR),
}


@pytest.mark.parametrize("name", KNOWN)
def test_random_numbers_that_somebody_may_know_are_refused(name):
    """Those of a record follow from its place in the batch: without the first one, all others get other numbers."""
    torch.manual_seed(3)  # of all seeds, that of the model
    model = Then(KNOWN[name])
    model.register_forward_hook(lambda *_: None)
    run = trainer(model)
    with pytest.raises(InvalidInput) as caught:
        run.train()
    assert "must be secret" in str(caught.value.__cause__)
    assert run.steps == 0


def test_tracing_a_model_that_seeds_leaves_secret_random_numbers():
    inputs, targets = numbers().tensors
    found = []
    for seeds in (False, True):
        model = Then(lambda x, seeds=seeds: (torch.manual_seed(3) if seeds else None, x)[1])
        gradients = ClippedGradients(model, LOSS, clip=1.0)
        torch.manual_seed(5)
        gradients.accumulate(inputs, targets)
        found.append(torch.rand(()))
    assert found[0] == found[1]


EMPTY = {
    "empty": lambda x: torch.empty(1, WIDTH),
    "like": torch.empty_like,
    "new": lambda x: x.new_empty(1, WIDTH),
    "strided": lambda x: torch.empty_strided((1, WIDTH), (WIDTH, 1)),
    "permuted": lambda x: torch.empty_permuted((1, WIDTH), (0, 1)),
    "constructor": lambda x: torch.Tensor(1, WIDTH),
}


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("name", EMPTY)
def test_memory_that_is_not_set_holds_zeros(monkeypatch, name, times):
    monkeypatch.setattr(recorded, "_TIMES", times)
    x, y = numbers().tensors
    found = []
    for function in (EMPTY[name], lambda x: torch.zeros(1, WIDTH)):
        torch.manual_seed(0)
        model = Then(lambda x, function=function: x + function(x))
        named = dict(model.named_parameters())
        gradients = recorded.RecordedGradients()
        left = [torch.full(shape, 9.0) for shape in [(1, WIDTH), (len(x), 1, WIDTH)] * 50]
        del left
        for _ in range(2):
            found.append(gradients(model, LOSS, named, [(x,)], y)[1])
        assert times > 2 or all(setting.graph is not None for setting in gradients._settings.values())
    assert all(torch.equal(each, found[0]) for each in found)


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
