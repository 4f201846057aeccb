"""Models and losses that would mix or keep records are refused or harmless, and sound ones are accepted."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from independence_cases import (
    BACKWARD,
    EVERYTHING,
    FORWARD,
    KEPT,
    LOSS,
    LOSSES,
    OTHER_DOORS,
    RECORDS,
    WIDTH,
    Keeps,
    OnTheClass,
    contributions,
    first_pass,
    mlp,
    numbers,
    tokens,
    trainer,
)
from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients
from matrixdp.learn.record_independence import recorded, rules

pytestmark = pytest.mark.usefixtures("one_thread")


MIXING = {"FORWARD": FORWARD, "LOSSES": LOSSES, "OTHER_DOORS": OTHER_DOORS, "BACKWARD": BACKWARD, "KEPT": KEPT}


def is_refused_or_harmless(model, function, data, dtype):
    """In double precision a share of 1e-10 of another record would show."""
    model, data = model.to(dtype), TensorDataset(data.tensors[0].to(dtype), data.tensors[1])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = ClippedGradients(model, function, clip=1.0, batch_size=len(data))
    try:
        first, *others = contributions(gradients, data)
    except InvalidInput:
        return "refused"
    assert float(first.norm()) <= 1.0 + 1e-6
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-11 if dtype == torch.float64 else 1e-5)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)  # no record is left behind
    return "harmless"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, cases in MIXING.items() for name in cases],
)
def test_it_is_refused_or_harmless(monkeypatch, kind, name, dtype):
    torch.manual_seed(0)  # of the weights: with some, hidden numbers are so small that their norm is hardly determined
    if dtype == torch.float64:
        monkeypatch.setattr(recorded, "_TIMES", 1)  # graphs are recorded at once
    model, function = MIXING[kind][name]()
    is_refused_or_harmless(model, function, numbers(rare="balanced" in name), dtype)
    EVERYTHING.clear()
    OnTheClass.queue.clear()


def test_a_rule_that_is_planted_away_is_found(monkeypatch):
    monkeypatch.setitem(rules.FUNCTIONS, torch.Tensor.flip, lambda *args, **kwargs: None)
    with pytest.raises(AssertionError):
        is_refused_or_harmless(*FORWARD["flip"](), numbers(), torch.float64)


# --- sound models ---


def convolutional():
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout2d(0.3)),
        *(nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5), nn.Linear(54, 2)),
    )
    return model, LOSS, numbers(1, 12, 12)


class Attends(nn.Module):
    def __init__(self):
        from opacus.layers import DPMultiheadAttention

        super().__init__()
        self.embed, self.attend = nn.Embedding(9, 8), DPMultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.norm, self.top = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x):
        rows = self.embed(x)
        return self.top(self.norm(rows + self.attend(rows, rows, rows, need_weights=False)[0]).mean(1))


class Recurrent(nn.Module):
    """Its answer has a part whose first dimension is not the record."""

    def __init__(self, kind, **options):
        from opacus import layers

        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.cell = getattr(layers, kind)(4, 5, batch_first=True, **options)
        self.top = nn.Linear(10 if options.get("bidirectional") else 5, 2)

    def forward(self, x):
        rows, hidden = self.cell(self.embed(x))
        return self.top(rows[:, -1]), hidden


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.embed(x))).mean(1))


class Single(nn.Module):
    """For numbers of single precision alone, and for batches of two and more."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.linear(x.float()).squeeze()


class Noisy(nn.Module):
    """Random numbers, one mask for all records, and a drop path."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.relu(self.first(x)) * (torch.rand(1, 8) > 0.2)
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        return self.last(hidden * (torch.rand(len(x), 1) > 0.1))


class Experts(nn.Module):
    """An expert runs only if some record wants it."""

    def __init__(self):
        super().__init__()
        self.experts, self.router = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        shares = self.router(x).softmax(1)
        total = 0.0 * shares[:, :2]
        for number, expert in enumerate(self.experts):
            wanted = shares.argmax(1) == number
            if wanted.any():
                total = total + torch.where(wanted[:, None], shares[:, number : number + 1] * expert(x), 0.0)
        return total


def weighted():
    weights = torch.tensor([1.0, 5.0])
    return lambda outputs, y: functional.cross_entropy(outputs, y, weight=weights, reduction="none")


def first(outputs, y):
    return LOSS(outputs[0], y)


class Doubles(Dataset):
    """Records made one at a time, at random."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return numbers()[index][0] + torch.randn(WIDTH), index % 2


SOUND = {
    "convolutions, dropout": convolutional,
    "attention": lambda: (Attends(), LOSS, tokens()),
    "lstm": lambda: (Recurrent("DPLSTM"), first, tokens()),
    "gru, both ways": lambda: (Recurrent("DPGRU", bidirectional=True, num_layers=2), first, tokens()),
    "layer norm": lambda: (mlp(), LOSS, numbers()),
    "tied": lambda: (Tied(), LOSS, tokens()),
    "single precision": lambda: (Single(), lambda o, y: (o.reshape(-1) - y) ** 2, numbers()),
    "noise": lambda: (Noisy(), LOSS, numbers()),
    "public weights": lambda: (mlp(), weighted(), numbers()),
    "zero head": lambda: (nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), zeros(nn.Linear(4, 2))), LOSS, numbers()),
    "saturated": lambda: (nn.Linear(WIDTH, 2), lambda o, y: LOSS(200 * o, y), numbers()),
    "random data": lambda: (mlp(), LOSS, Doubles()),
    "one record": lambda: (mlp(), LOSS, TensorDataset(torch.ones(1, WIDTH), torch.zeros(1, dtype=torch.long))),
    "records alike": lambda: (mlp(), LOSS, TensorDataset(torch.zeros(9, WIDTH), torch.zeros(9, dtype=torch.long))),
    "a record that is not finite": lambda: (mlp(), LOSS, broken()),
}


def zeros(layer):
    nn.init.zeros_(layer.weight)
    return layer


def broken():
    data = numbers()
    data.tensors[0][:30, 2] = math.nan
    return data


FAST = {"convolutions, dropout", "layer norm", "tied", "zero head", "saturated", "random data", "one record",
        "records alike", "a record that is not finite"}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_models_are_accepted(name):
    model, function, data = SOUND[name]()
    run = trainer(model, function, data, batch_size=min(20, len(data)))
    run.train(1)
    assert run.steps > 0
    assert (run.gradients.slow_because is None) == (name in FAST)


OTHERS = {"convolutions, dropout", "attention", "noise", "random data", "one record", "a record that is not finite"}


@pytest.mark.parametrize("name", sorted(set(SOUND) - OTHERS))
def test_a_record_of_a_sound_model_adds_the_same_in_any_company(name):
    model, function, data = SOUND[name]()
    if len(data) == RECORDS and name != "single precision":
        gradients = ClippedGradients(model, function, clip=1.0)
        first, *others = contributions(gradients, data)
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=1e-5)


def test_targets_of_several_parts_go_with_their_records():
    def weighed(outputs, targets):
        classes, more = targets
        return LOSS(outputs, classes) * more["weights"]

    def by_the_largest(outputs, targets):
        return weighed(outputs, targets) / targets[1]["weights"].max()

    inputs, classes = numbers().tensors
    targets = classes, {"weights": torch.rand(RECORDS) + 0.5}
    for function, fast in ((weighed, True), (by_the_largest, False)):
        gradients = ClippedGradients(mlp(), function, clip=1.0)
        gradients.accumulate(inputs, targets)
        assert (gradients.slow_because is None) == fast
    with pytest.raises(InvalidInput, match="no tensor"):
        ClippedGradients(mlp(), weighed, clip=1.0).accumulate(inputs, (classes, {**targets[1], "names": ["a", "b"]}))


def test_what_is_changed_in_the_model_later_is_not_in_the_graph():
    """A trained graph is a copy: another layer, forward or hook of the model itself does not run."""
    for change in (
        lambda layer: setattr(layer, "forward", lambda x: x - x.mean(0)),
        lambda layer: layer.register_forward_hook(lambda module, given, output: output - output.mean(0)),
    ):
        model = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, 2))
        gradients = ClippedGradients(model, LOSS, clip=1.0)
        first, *_ = contributions(gradients, numbers())
        change(model[0])
        for other in contributions(gradients, numbers()):
            torch.testing.assert_close(other, first, rtol=0, atol=1e-6)


def test_another_mode_is_traced_again():
    class Mean(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if self.training else x

    model = nn.Sequential(Mean(), nn.Linear(WIDTH, 2)).eval()
    gradients = ClippedGradients(model, LOSS, clip=1.0)
    gradients.accumulate(*numbers().tensors)
    assert gradients.slow_because is None
    model.train()
    first, *others = contributions(gradients, numbers())
    assert gradients.slow_because is not None
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-6)


def test_what_is_set_up_with_public_inputs_before_is_no_record():
    model = Keeps(first_pass)
    model(torch.ones(3, WIDTH))
    trainer(model).train(1)


def test_the_slow_way_is_said_once_with_its_reason():
    gradients = ClippedGradients(nn.Sequential(nn.Linear(WIDTH, 2), nn.PReLU()), LOSS, clip=1.0)
    with pytest.warns(UserWarning, match=r"one at a time.*is a trained parameter used outside a layer"):
        gradients.accumulate(*numbers().tensors)
    gradients.accumulate(*numbers().tensors)  # a second warning would be an error


# --- what is refused ---


REFUSED = {  # what cannot run one record at a time, and what keeps records where a later batch could meet them
    **{name: KEPT[name] for name in ("number in a closure", "partial", "global variable", "class", "hook")},
    **{name: KEPT[name] for name in ("closure", "array", "text", "parameter's data, first pass")},
    **{name: FORWARD[name] for name in ("dropped by data", "where some are not finite")},
    "left out together": LOSSES["left out together"],
    "an expert that runs if it is wanted": lambda: (Experts(), LOSS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_cost_nothing(tmp_path, name):
    ledger = Ledger(tmp_path / "budget.db", Budget(2.0, 1e-5))
    model, function = REFUSED[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run = trainer(model, function, ledger=ledger)
    with pytest.raises(InvalidInput, match=r"one record at a time|keeps tensors of records"):
        run.train(1)
    assert ledger.history() == []
    assert run.steps == 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    EVERYTHING.clear()
    OnTheClass.queue.clear()


def test_a_global_hook_does_not_see_a_batch_of_a_graph_that_was_traced_before():
    """Modules of the graph would run it; so records run one at a time from then on."""
    model, seen = nn.Sequential(nn.Linear(WIDTH, 2)), []
    gradients = ClippedGradients(model, LOSS, clip=1.0)
    inputs, targets = numbers().tensors
    assert gradients.prepare(inputs, targets)

    def hook(module, given, output):
        seen.append(len(given[0]))
        return output - output.mean(0)

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        with pytest.warns(UserWarning, match="a global hook"):
            gradients.accumulate(inputs, targets)
    finally:
        handle.remove()
    assert set(seen) == {1}
    assert not gradients.flat.any()
    gradients.accumulate(inputs, targets)
    assert gradients.flat.any()


@pytest.mark.parametrize("slow", [False, True])
def test_a_gradient_that_is_not_finite_does_not_raise_in_anomaly_mode(slow):
    """Or the error would show that such a record is there."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2))
    if slow:
        model.register_forward_hook(lambda *_: None)
    inputs, targets = numbers().tensors
    inputs = inputs.clone()
    inputs[3] = torch.nan
    gradients = ClippedGradients(model, LOSS, clip=1.0)
    with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
        assert gradients.accumulate(inputs, targets) == 1
