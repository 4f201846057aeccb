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
from matrixdp.learn import PrivateFeatures, PrivateSGD
from matrixdp.learn.probe.state import configuration

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
    model.constant.grad = x[0].detach().to(model.constant.dtype).clone()


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
    "gradient of a buffer": into_gradient,
    "import in a function": into_import,
    "module in a module": into_module,
}


@pytest.mark.parametrize("name", KEEPING)
def test_keeping_is_refused(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "matrixdp_test_package", PACKAGE)
    monkeypatch.setitem(sys.modules, "matrixdp_test_package.inner", PACKAGE.inner)
    with pytest.raises(InvalidInput, match="keeps what it saw"):
        trainer(Does(KEEPING[name])).probe()


def test_a_model_too_large_to_look_through_is_refused(monkeypatch):
    monkeypatch.setattr("matrixdp.learn.probe.state.MOST_OBJECTS", 500)
    model = Does()
    model.table = [(float(i),) for i in range(500)]
    with pytest.raises(InvalidInput, match="too many to check"):
        trainer(model).probe()


def divided(model, x):
    dropped = functional.dropout(x, 0.5, model.training)
    return dropped / len(x) if model.training else dropped


COUPLED = {
    "in batches larger than expected": lambda model, x: x + x.mean(0) if len(x) > 41 else x,
    "in training with dropout": divided,
}


@pytest.mark.parametrize("name", COUPLED)
def test_couplings_are_refused(name):
    with pytest.raises(InvalidInput, match="mixes the records"):
        trainer(Does(COUPLED[name])).probe()


class Balanced(nn.Module):
    def forward(self, outputs, targets):
        losses = LOSS(outputs, targets)
        return losses / losses.detach().mean() if self.training else losses


def switch(model, loss):
    model.switch = True


def hook_back(model, loss):
    model.last.register_full_backward_pre_hook(lambda module, grads: (grads[0] + grads[0].mean(0),))


@pytest.mark.parametrize("change", [switch, hook_back, lambda model, loss: loss.train()])
def test_what_is_switched_on_later_is_probed_again(change):
    model, loss = Does(lambda model, x: x + x.mean(0) if model.switch else x), Balanced().eval()
    private = trainer(model, loss)
    batches = private.batches(2)
    private.step(next(batches))
    change(model, loss)
    with pytest.raises(InvalidInput, match="mixes the records"):
        private.step(next(batches))
    assert private.steps == 1


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


def test_steps_do_not_overlap():
    inside, go_on = threading.Event(), threading.Event()

    def wait(model, x):
        inside.set()
        go_on.wait(20)

    model = Does(lambda model, x: None)
    private = trainer(model)
    private.probe()
    first, second = next(private.batches()), next(private.batches())
    model.first.register_forward_pre_hook(wait)
    private.gradients._probed.add(configuration(model, private.gradients.loss))
    thread = threading.Thread(target=private.step, args=(first,))
    thread.start()
    assert inside.wait(20)
    with pytest.raises(InvalidInput, match="under way"):
        private.step(second)
    go_on.set()
    thread.join()
    assert private.steps == 1


class AtSize(nn.Module):
    def forward(self, x):
        return x + x.mean(0) if len(x) == 476 else x


def test_a_front_is_tried_with_the_rest_that_comes_last():
    private = PrivateFeatures(nn.Sequential(nn.Linear(WIDTH, 4), AtSize(), nn.Linear(4, 2)), 2)
    with pytest.raises(InvalidInput, match="mixes the records"):
        private.release(torch.randn(1024 + 476, WIDTH), Budget(2.0, 1e-5), "analytic")


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
