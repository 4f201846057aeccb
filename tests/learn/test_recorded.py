"""Records one at a time by a recorded graph: the same numbers, and no way around what the watched pass refuses."""

import functools
import random
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from independence_cases import LOSS, WIDTH, Then, numbers
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients
from matrixdp.learn.record_independence import recorded
from matrixdp.learn.record_independence.one_record import record_gradients

pytestmark = pytest.mark.usefixtures("one_thread")
INPUTS, TARGETS = numbers().tensors
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are recorded, at the first step in place of the second; None for those that cannot be."""
    found, real = [], recorded._recorded
    monkeypatch.setattr(recorded, "_TIMES", 1)
    monkeypatch.setattr(recorded, "_recorded", lambda *given: found.append(real(*given)) or found[-1])
    return found


def both(model, loss=LOSS, inputs=INPUTS, targets=TARGETS, by=None):
    """Gradients of the recorded and of the watched pass, from the same state of the generator."""
    model = model.to(DEVICE)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    given = model, loss, trained, [(inputs.to(DEVICE),)], targets.to(DEVICE)
    by, passes = by or recorded.RecordedGradients(len(INPUTS)), []
    by.begin(*given)
    for way in (by, record_gradients):
        torch.manual_seed(7)
        gradients, losses = way(*given)
        passes.append([*gradients.values(), losses])
    return passes


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x.reshape(len(x), 3, 2))[0][:, -1])


@dataclass(slots=True)
class Slotted:
    factor: float


def scaled(x, weights):
    return x * weights[0]


class Buffers(nn.Module):
    """Frozen parameters, buffers, and a counter."""

    def __init__(self):
        super().__init__()
        self.linear, self.frozen = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("shift", torch.ones(WIDTH))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.factor, self.array, self.queue = 1.0, np.ones(1), deque([1.0])
        self.settings = SimpleNamespace(inner=Slotted(1.0), weights=[1.0])
        self.scaled = functools.partial(scaled, weights=[1.0])

    def forward(self, x):
        self.counter += 1
        settings = self.settings.inner.factor * self.settings.weights[0]
        factor = self.factor * float(self.array[0]) * self.queue[0] * settings
        return self.scaled(self.linear(self.frozen(x + self.shift) * factor))


def attention():
    layers = nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 2))


MODELS = {
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(9, 2)),
    "attention": attention,
    "recurrent": Recurrent,
    "buffers": Buffers,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_watched_pass(graphs, name):
    recorded_pass, watched = both(MODELS[name]())
    assert graphs[0] is not None
    torch.testing.assert_close(recorded_pass, watched)


def test_one_graph_serves_all_sizes_up_to_its_own(graphs):
    model, by = MODELS["convolution"](), recorded.RecordedGradients(60)
    for size in (60, 59, 60, 58, 1, 2):
        torch.testing.assert_close(*both(model, inputs=INPUTS[:size], targets=TARGETS[:size], by=by))
    assert len(graphs) == 1


def test_larger_batches_take_several_passes(graphs):
    whole, parts = (hooked(MODELS["convolution"](), batch_size=size) for size in (60, 16))
    for gradients in (whole, parts):
        gradients.zero()
        gradients.accumulate(INPUTS, TARGETS)
    assert None not in graphs
    torch.testing.assert_close(whole.flat, parts.flat)


def test_a_step_that_is_taken_again_is_the_same_by_a_graph(graphs, monkeypatch):
    """Dropout draws the same numbers before and after the recording, also where a batch is padded."""
    monkeypatch.setattr(recorded, "_TIMES", 2)
    model, by = MODELS["dropout"](), recorded.RecordedGradients(40)
    watched, by_graph = (both(model, inputs=INPUTS[:33], targets=TARGETS[:33], by=by)[0] for _ in range(2))
    assert graphs[0] is not None
    assert all(torch.equal(one, other) for one, other in zip(watched, by_graph, strict=True))


WEIGHT = {"now": 1.0}


class Weighted(nn.Module):
    """Reads a number that no key follows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.linear(x * WEIGHT["now"])


def hooked(model, **given):
    """Gradients of a model that runs one record at a time, as it has a hook."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.register_forward_hook(lambda *_: None)
    gradients = ClippedGradients(model, LOSS, clip=1.0, **given)
    with pytest.warns(UserWarning, match="one at a time"):
        gradients.prepare(INPUTS, TARGETS)
    return gradients


@pytest.mark.parametrize("left_out", [0, 3])
def test_one_record_moves_no_step_by_more_than_the_clip_whatever_changes_meanwhile(left_out):
    """Which function runs does not follow from the sizes of batches, also where one of them is empty."""
    batches = [[0, 1, 2, 3], [0], [1, 2], [0, 1, 3], [], [3], [0, 1, 2, 3], [0, 3]]

    def sums(without):
        gradients = hooked(Weighted(), batch_size=4)
        for step, batch in enumerate(batches):
            WEIGHT["now"] = (-10.0) ** (step % 5 - 2)
            kept = [place for place in batch if place != without]
            gradients.zero()
            gradients.accumulate(INPUTS[kept], TARGETS[kept])
            yield gradients.flat.clone()

    for whole, fewer in zip(sums(None), sums(left_out), strict=True):
        assert float((whole - fewer).norm()) <= 1.0 + 1e-6


def train(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


CHANGES = {
    "weights": train,
    "storage of frozen weights": lambda model: setattr(model.frozen.weight, "data", model.frozen.weight.data + 1),
    "number": lambda model: setattr(model, "factor", 3.0),
    "array": lambda model: model.array.fill(3.0),
    "queue": lambda model: model.queue.appendleft(3.0),
    "number in an object": lambda model: setattr(model.settings.inner, "factor", 3.0),
    "list in an object": lambda model: model.settings.weights.insert(0, 3.0),
    "list that a function is given": lambda model: model.scaled.keywords["weights"].insert(0, 3.0),
    "buffer written into": lambda model: model.shift.mul_(2),
    "buffer replaced": lambda model: setattr(model, "shift", model.shift * 2),
    "hook": lambda model: model.linear.register_forward_hook(lambda module, given, output: output * 2),
    "layer": lambda model: setattr(model, "frozen", nn.Tanh()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_between_batches_is_seen(graphs, name):
    model, by = Buffers(), recorded.RecordedGradients(60)
    before, _ = both(model, by=by)
    CHANGES[name](model)
    after, watched = both(model, by=by)
    torch.testing.assert_close(after, watched)
    assert not torch.equal(before[-1], after[-1])
    assert None not in graphs


def test_modes_closures_and_autocast_are_seen(graphs):
    model, by, weight = MODELS["dropout"](), recorded.RecordedGradients(60), 1.0

    def loss(outputs, targets):
        return weight * LOSS(outputs, targets)

    for training in (True, False, True):
        torch.testing.assert_close(*both(model.train(training), loss, by=by))
    weight = 2.0
    torch.testing.assert_close(*both(model, loss, by=by))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        torch.testing.assert_close(*both(model, loss, by=by))
    assert len(graphs) == 4
    assert None not in graphs


COUNT = {"passes": 0}


def counting(model, x):
    COUNT["passes"] += 1
    return x * COUNT["passes"]


class Does(nn.Module):
    """A function of model and inputs, then a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, 2)
        self.register_buffer("constant", torch.ones(WIDTH))

    def forward(self, x):
        return self.linear(self.function(self, x))


LIVE = {
    "a counter": counting,
    "Python's random numbers": lambda model, x: x if random.random() < 2 else -x,
    "numpy's random numbers": lambda model, x: x if np.random.random() < 2 else -x,  # noqa: NPY002
    "a number of a parameter": lambda model, x: x * float(model.linear.weight.sum() > 100),
    "a number of a buffer": lambda model, x: x * model.constant.sum().item(),
    "a list of a buffer": lambda model, x: x * model.constant.tolist()[0],
    "a comparison of a buffer": lambda model, x: x * torch.equal(model.constant, torch.ones(WIDTH, device=DEVICE)),
}


@pytest.mark.parametrize("name", LIVE)
def test_what_a_graph_would_freeze_is_not_recorded(graphs, name):
    both(Does(LIVE[name]))
    assert graphs == [None]
    both(Does(lambda model, x: x))
    assert graphs[1] is not None


def test_a_model_with_a_tensor_that_is_no_buffer_is_not_recorded(graphs):
    model = Does(lambda model, x: x * model.plain)
    model.plain = torch.ones(WIDTH, device=DEVICE)
    torch.testing.assert_close(*both(model))
    assert graphs == [None]


def test_a_sparse_buffer_serves(graphs):
    model = Does(lambda model, x: torch.sparse.mm(model.graph, x.t()).t())
    model.register_buffer("graph", torch.eye(WIDTH).to_sparse())
    torch.testing.assert_close(*both(model))


WRITES = {
    "view of an input": (lambda given: given.view(2, 1).add_(1), False),
    "constant": (lambda given: TOTAL.add_(given), False),
    "copy": (lambda given: given.clone().add_(TOTAL), True),
}
TOTAL = torch.zeros(2)


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_only_what_the_graph_has_made(name):
    write, sound = WRITES[name]
    given = torch.ones(2)
    with recorded._Recorder([given]) as recorder:
        found = write(given) * 2
    assert (recorder.finished([found]) is not None) == sound


STASH = []


def stashing(pick):
    def function(x):
        found = x if not STASH else x + STASH[-1]
        STASH.append(pick(x))
        return found

    return function


KEPT = {
    "record": stashing(lambda x: x),
    "detached": stashing(lambda x: x.detach()),
    "data": stashing(lambda x: x.data),
    "mean": stashing(lambda x: x.mean()),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_refused_before_and_after_a_recording(graphs, monkeypatch, name):
    for times in (1, 2):
        monkeypatch.setattr(recorded, "_TIMES", times)
        STASH.clear()
        with pytest.raises(InvalidInput, match="keeps tensors"):
            both(Then(KEPT[name]))
        with pytest.raises(InvalidInput):
            both(Then(KEPT[name]))
    assert set(graphs) == {None}
    STASH.clear()


class Later(nn.Module):
    """Sound code until it is switched over from outside of the model, after its graph was recorded."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.linear.register_forward_hook(lambda *_: None)

    def forward(self, x):
        if COUNT["mixes"]:
            STASH.append(x.detach())
            x = x + STASH[0]
        return self.linear(x)


def test_code_of_the_model_does_not_run_after_the_recording(graphs, monkeypatch):
    STASH.clear()
    monkeypatch.setitem(COUNT, "mixes", False)
    gradients = hooked(Later(), batch_size=60)
    gradients.zero()
    gradients.accumulate(INPUTS, TARGETS)
    expected = gradients.flat.clone()
    monkeypatch.setitem(COUNT, "mixes", True)
    gradients.zero()
    gradients.accumulate(INPUTS, TARGETS)
    assert not STASH
    assert torch.equal(gradients.flat, expected)
    gradients.model.eval()
    with pytest.raises(InvalidInput, match="keeps tensors"):  # tried anew, and watched
        gradients.zero()


def test_rows_do_not_meet_and_padding_does_not_count(graphs):
    """Another record in the batch, or one less, leaves a row as it is; not a number in one row stays there."""
    model = MODELS["convolution"]()
    whole, _ = both(model, inputs=INPUTS[:34], targets=TARGETS[:34])
    spoiled = INPUTS[:34].clone()
    spoiled[5] = torch.nan
    fewer, _ = both(model, inputs=spoiled[:33], targets=TARGETS[:33])
    kept = [place for place in range(33) if place != 5]
    assert all(torch.equal(one[kept], other[kept]) for one, other in zip(whole, fewer, strict=True))
    assert all(row[5].isnan().any() for row in fewer)


@pytest.mark.parametrize("targets", [TARGETS[:59], TARGETS[0]], ids=["fewer", "one"])
def test_targets_without_a_row_per_record_are_not_padded(targets):
    with pytest.raises(InvalidInput):
        both(nn.Linear(WIDTH, 2), targets=targets)


def test_old_settings_are_dropped(graphs, monkeypatch):
    monkeypatch.setattr(recorded, "_MOST_SETTINGS", 2)
    model, by = Buffers(), recorded.RecordedGradients(60)
    for factor in (1.0, 2.0, 3.0, 3.0, 1.0):
        model.factor = factor
        both(model, by=by)
        assert len(by._settings) <= 2
    assert len(graphs) == 4


def test_random_numbers_of_python_and_numpy_continue_as_if_nothing_was_recorded(graphs):
    before = random.getstate(), str(np.random.get_state(legacy=False))  # noqa: NPY002
    recorded.RecordedGradients(4).begin(*drawing())
    assert graphs == [None]
    assert (random.getstate(), str(np.random.get_state(legacy=False))) == before  # noqa: NPY002


def drawing():
    model = Does(lambda model, x: x * random.random() * np.random.random())  # noqa: NPY002
    return model, LOSS, dict(model.named_parameters()), [(INPUTS[:1],)], TARGETS[:1]


def test_a_graph_that_differs_from_the_watched_pass_is_not_used(graphs, monkeypatch):
    """A planted fault: the recording takes a sum for another."""
    real = recorded._Recorder.finished

    def wrong(self, results):
        found = real(self, results)
        (node,) = (node for node in found.graph.nodes if node.target is torch.ops.aten._log_softmax.default)
        node.target = torch.ops.aten._softmax.default
        found.recompile()
        return found

    monkeypatch.setattr(recorded._Recorder, "finished", wrong)
    torch.testing.assert_close(*both(nn.Linear(WIDTH, 2)))
    assert graphs == [None]
