"""Records that are kept in less usual places, and couplings that show at some sizes, modes or switches alone."""

import array
import contextvars
import functools
import io
import queue
import sys
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

from matrixdp import Budget
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients, PrivateFeatures, PrivateSGD

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS, WIDTH = 120, 6
LOSS = nn.CrossEntropyLoss(reduction="none")
INPUTS = torch.randn(RECORDS, WIDTH, generator=torch.Generator().manual_seed(5))
TARGETS = torch.arange(RECORDS) % 2

LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("VARIABLE", default=None)
QUEUE, SIMPLE, FILE = queue.Queue(), queue.SimpleQueue(), io.BytesIO()
NUMBERS, BYTES = array.array("d", [0.0] * WIDTH), bytearray(8 * WIDTH)
WEAK = weakref.WeakKeyDictionary()
KEYS = {(0.0,): 1}
PACKAGE = types.ModuleType("matrixdp_test_package")
PACKAGE.inner = types.ModuleType("matrixdp_test_package.inner")
PACKAGE.inner.STATE = [0.0]


def _numbers():
    kept = []
    while True:
        kept.append((yield))


GENERATOR = _numbers()
next(GENERATOR)


@functools.cache
def cached(value):
    return value


def trainer(model, loss=LOSS, data=None, **changes):
    data = TensorDataset(INPUTS, TARGETS) if data is None else data
    options = {"budget": Budget(2.0, 1e-5), "batch_size": 40, "clip": 1.0, "steps": 6, **changes}
    return PrivateSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss, **options)


class Does(nn.Module):
    """A function of the inputs, for what it does or gives, and two linear layers."""

    def __init__(self, function=None):
        super().__init__()
        self.function, self.switch = function, False
        self.register_buffer("constant", torch.zeros(WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        given = None if self.function is None else self.function(self, x)
        return self.last(self.first(given if isinstance(given, torch.Tensor) else x))


def into_array(model, x):
    NUMBERS[0] = float(x[0, 0])


def into_bytes(model, x):
    BYTES[:] = x[0].detach().double().numpy().tobytes()


def into_keys(model, x):
    KEYS.clear()
    KEYS[tuple(x[0].tolist())] = 1


def into_weak(model, x):
    WEAK[nn.Linear] = x[0].tolist()


def into_gradient(model, x):
    if model.constant.grad is None:
        model.constant.grad = x[0].detach().clone()
    return x + model.constant.grad


def into_import(model, x):
    from matrixdp_test_package.inner import STATE

    STATE[0] = float(x[0, 0])


def into_module(model, x):
    PACKAGE.inner.STATE[0] = float(x[0, 0])


KEEPING = {
    "thread": lambda model, x: setattr(LOCAL, "kept", x[0].tolist()),
    "context": lambda model, x: VARIABLE.set(x[0].tolist()),
    "queue": lambda model, x: QUEUE.put(x[0].tolist()),
    "simple queue": lambda model, x: SIMPLE.put(x[0].tolist()),
    "file in memory": lambda model, x: FILE.write(x[0].detach().numpy().tobytes()),
    "generator": lambda model, x: GENERATOR.send(x[0].tolist()),
    "cache of a function": lambda model, x: cached(tuple(x[0].tolist())) and None,
    "array": into_array,
    "bytes": into_bytes,
    "keys": into_keys,
    "weak dictionary": into_weak,
    "import in a function": into_import,
    "module in a module": into_module,
}


@pytest.mark.parametrize("name", KEEPING)
def test_keeping_is_refused(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "matrixdp_test_package", PACKAGE)
    monkeypatch.setitem(sys.modules, "matrixdp_test_package.inner", PACKAGE.inner)
    with pytest.raises(InvalidInput, match=r"one record at a time|keeps tensors of records"):
        trainer(Does(KEEPING[name])).prepare()


def divided(model, x):
    dropped = functional.dropout(x, 0.0, model.training)
    return dropped / len(x) if model.training else dropped


COUPLED = {
    "in batches larger than expected": lambda model, x: x + x.mean(0) if len(x) > 41 else x,
    "in training with dropout": divided,
    "by the gradient of a buffer": into_gradient,
}


def sums(gradients):
    """What the first record adds to the sum, alone and among 60 others."""
    found = []
    for batch in ([0], list(range(61)), list(range(1, 61))):
        gradients.zero()
        gradients.accumulate(INPUTS[batch], TARGETS[batch])
        found.append(gradients.flat.clone())
    return found[0], found[1] - found[2]


@pytest.mark.parametrize("name", COUPLED)
def test_couplings_do_no_harm(name):
    torch.testing.assert_close(*sums(ClippedGradients(Does(COUPLED[name]), LOSS, clip=1.0)), rtol=0, atol=1e-5)


class Balanced(nn.Module):
    def forward(self, outputs, targets):
        losses = LOSS(outputs, targets)
        return losses / losses.detach().mean() if self.training else losses


def switch(model, loss):
    model.switch = True


def hook_back(model, loss):
    model.last.register_full_backward_pre_hook(lambda module, grads: (grads[0] + grads[0].mean(0),))


@pytest.mark.parametrize("change", [switch, hook_back, lambda model, loss: loss.train()])
def test_what_is_switched_on_later_does_no_harm(change):
    model, loss = Does(lambda model, x: x + x.mean(0) if model.switch else x), Balanced().eval()
    gradients = ClippedGradients(model, loss, clip=1.0)
    torch.testing.assert_close(*sums(gradients), rtol=0, atol=1e-5)
    change(model, loss)
    torch.testing.assert_close(*sums(gradients), rtol=0, atol=1e-5)


class Whole(Dataset):
    """Gives whole batches, each record twice."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return INPUTS[index], TARGETS[index]

    def __getitems__(self, indices):
        return [self[index] for index in indices] * 2


def test_data_sets_are_asked_for_one_record_at_a_time():
    private = trainer(Does(), data=Whole(), batch_size=RECORDS)
    assert len(next(private.batches()).targets) == RECORDS


class Single(Dataset):
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


REPEATED = {
    "list": lambda: [(INPUTS[i], 1) for i in range(20)] * 3,
    "list of new views": lambda: [(INPUTS[i % 20], TARGETS[i]) for i in range(60)],
    "stack": lambda: StackDataset(Subset(Single(INPUTS), [0] * 60), Single(TARGETS[:60])),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_records_are_refused(name):
    with pytest.raises(InvalidInput, match="each record once"):
        trainer(Does(), data=REPEATED[name]())


@pytest.mark.parametrize("more", [[0], [70]])
def test_data_that_grow_are_refused(more):
    data = Subset(TensorDataset(INPUTS, TARGETS), list(range(60)))
    private = trainer(Does(), data=data)
    data.indices.extend(more)
    with pytest.raises(InvalidInput, match=r"each record once|another number of records"):
        next(private.batches())


def test_a_list_of_records_is_data():
    trainer(Does(), data=[(x, int(y)) for x, y in zip(INPUTS, TARGETS, strict=True)]).train()


def test_what_was_drawn_cannot_be_written_into():
    private = trainer(Does())
    batch = next(private.batches())
    batch.drawn[0][:] = batch.drawn[0][:1].clone()
    with pytest.raises(InvalidInput, match="changed after it was drawn"):
        private.step(batch)


def test_steps_do_not_overlap(monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    private = trainer(Does())
    first, second = next(private.batches()), next(private.batches())
    real = private.gradients._pass

    def wait(*arguments):
        if not inside.is_set():  # the first step alone
            inside.set()
            go_on.wait()
        return real(*arguments)

    monkeypatch.setattr(private.gradients, "_pass", wait)
    thread = threading.Thread(target=private.step, args=(first,))
    thread.start()
    try:
        assert inside.wait(600)
        with pytest.raises(InvalidInput, match="under way"):
            private.step(second)
    finally:
        go_on.set()
        thread.join()
    assert private.steps == 1


class AtSize(nn.Module):
    def forward(self, x):
        return x + x.mean(0) if len(x) == 476 else x


def test_a_front_that_mixes_the_rest_that_comes_last_does_no_harm():
    private = PrivateFeatures(nn.Sequential(nn.Linear(WIDTH, 4), AtSize(), nn.Linear(4, 2)), 2)
    inputs = torch.randn(1024 + 476, WIDTH)
    torch.testing.assert_close(private.features(inputs)[-3:], private.features(inputs[-3:]), rtol=0, atol=1e-6)


class Properties(Does):
    """Parts of functools that have a function and no arguments."""

    @functools.cached_property
    def scale(self):
        return 2.0

    @functools.singledispatchmethod
    def act(self, x):
        return torch.relu(x)

    def forward(self, x):
        return self.act(super().forward(x))


def test_cached_properties_and_dispatched_methods_are_no_obstacle():
    trainer(Properties()).train()
