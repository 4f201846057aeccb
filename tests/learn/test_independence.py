"""Models and losses that would mix or keep records are refused or harmless, and sound ones are accepted."""

import functools
import math
import warnings
from collections import deque
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients, PoissonBatch, PrivateFeatures, PrivateSGD
from matrixdp.learn.independence import rules

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS, WIDTH = 60, 6
LOSS = nn.CrossEntropyLoss(reduction="none")


def numbers(*shape, rare=False):
    rng = torch.Generator().manual_seed(3)
    targets = (torch.arange(RECORDS) % 20 == 7).long() if rare else torch.arange(RECORDS) % 2
    return TensorDataset(torch.randn(RECORDS, *(shape or (WIDTH,)), generator=rng), targets)


def tokens():
    rng = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randint(0, 9, (RECORDS, 7), generator=rng), torch.arange(RECORDS) % 2)


def trainer(model, loss=LOSS, data=None, **changes):
    data = numbers() if data is None else data
    options = {"budget": Budget(2.0, 1e-5), "batch_size": 20, "clip": 1.0, "steps": 6, **changes}
    return PrivateSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss, **options)


class Then(nn.Module):
    """A function of the inputs, then a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.linear(self.function(x))


class Between(nn.Module):
    """A function of a hidden layer."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.function(torch.relu(self.first(x))))


def then(function):
    return lambda: (Then(function), LOSS)


def between(function):
    return lambda: (Between(function), LOSS)


def loss(function):
    return lambda: (nn.Linear(WIDTH, 2), function)


# --- forward ---


def causal_attention(x):
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def mixup(x):
    return 0.5 * x + 0.5 * x[torch.randperm(len(x))]


def smoothed(x):
    rows, state = [], torch.zeros_like(x[0])
    for row in x:
        state = 0.5 * state + 0.5 * row
        rows.append(state)
    return torch.stack(rows)


def routed(x):
    """The half with the larger first number gets through, as in routing with a capacity."""
    keep = x[:, 0].argsort(descending=True)[: math.ceil(len(x) / 2)]
    return x * torch.zeros(len(x), 1, dtype=x.dtype).index_fill(0, keep, 1.0)


def neighbour(x):
    return x + x[(x[:, 0].abs() * 1000).long() % len(x)]


def saturating(x):
    """Only where numbers are large does it look at others."""
    return torch.where(x.abs().amax() > 100, x / x.abs().amax(), x)


def dropped_by_data(x):
    """Which feature is dropped is decided by the first record."""
    kept = torch.ones(x.shape[1], dtype=x.dtype)
    kept[int(x[0, 0] > 0)] = 0.0
    return x * kept


FORWARD = {
    "mixup": then(mixup),
    "causal attention": then(causal_attention),
    "cumulative sum": then(lambda x: x.cumsum(0)),
    "cumulative maximum": then(lambda x: x.cummax(0).values),
    "differences": then(lambda x: torch.diff(x, dim=0, prepend=x[:1])),
    "smoothing": then(smoothed),
    "ranks": then(lambda x: x + x.argsort(0).argsort(0)),
    "roll": then(lambda x: x + 1e-4 * torch.roll(x, 1, 0)),
    "flip": then(lambda x: x + x.flip(0)),
    "median": then(lambda x: x - x.median(0).values),
    "median, small": between(lambda x: x - 1e-5 * x.median(0).values),
    "similarity": then(lambda x: torch.einsum("ij,kj,kl->il", x, x, x)),
    "capacity": then(routed),
    "gather": then(neighbour),
    "first record": then(lambda x: x - x[:1]),
    "last record": then(lambda x: x + 1e-6 * x[-1:]),
    "size of the batch": then(lambda x: x / len(x)),
    "position": then(lambda x: x + torch.arange(len(x))[:, None]),
    "large numbers": then(saturating),
    "dropped by data": then(dropped_by_data),
    "unique": then(lambda x: x / torch.unique((10 * x[:, 0]).round(), return_counts=True)[1].max()),
    "whitening": between(lambda x: x / (x.var(0) + 1e-5).sqrt()),
    "norm over all": between(lambda x: x / x.norm()),
    "mixed with dropout": between(lambda x: functional.dropout(x, 0.0) + 1e-3 * x.mean(0)),
    "size with dropout": between(lambda x: functional.dropout(x, 0.5, training=False) / len(x)),
    "only from nineteen records": then(lambda x: x - x.mean(0) if len(x) > 18 else x),
    "in single precision alone": then(lambda x: x - x.mean(0) if x.dtype == torch.float32 else x),
    "where some are not finite": then(lambda x: x if torch.isfinite(x).all() else 0 * x),
}


# --- losses ---


def balanced(outputs, y):
    counts = torch.bincount(y, minlength=2)
    return LOSS(outputs, y) * (len(y) / (2 * counts.clamp(min=1)))[y]


def load_balancing(outputs, y):
    shares = outputs.softmax(1)
    return LOSS(outputs, y) + 5e-4 * 2 * (shares * shares.detach().mean(0)).sum(1)


def hard_examples(outputs, y):
    each = LOSS(outputs, y)
    return each * (each >= each.detach().topk(max(1, len(each) // 2)).values[-1])


def contrastive(outputs, y):
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(y)), reduction="none")


def smoothed_labels(outputs, y):
    shares = torch.bincount(y, minlength=2) / len(y)
    return functional.cross_entropy(outputs, 0.9 * functional.one_hot(y, 2) + 0.1 * shares, reduction="none")


def mixed_labels(outputs, y):
    other = torch.randperm(len(y))
    return 0.7 * LOSS(outputs, y) + 0.3 * LOSS(outputs, y[other])


def focal_by_rank(outputs, y):
    each = LOSS(outputs, y)
    return each * (1 + each.detach().argsort().argsort() / len(each))


def skipping(each):
    return each if torch.isfinite(each).all() else torch.zeros_like(each) * each.nan_to_num()


LOSSES = {
    "balanced": loss(balanced),
    "load balancing": loss(load_balancing),
    "hard examples": loss(hard_examples),
    "contrastive": loss(contrastive),
    "labels smoothed by counts": loss(smoothed_labels),
    "labels mixed": loss(mixed_labels),
    "by rank": loss(focal_by_rank),
    "by the largest": loss(lambda outputs, y: LOSS(outputs, y) / LOSS(outputs, y).detach().max()),
    "mean over the batch": loss(lambda outputs, y: LOSS(outputs, y) / len(y)),
    "size, with dropout": lambda: (
        nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.0), nn.Linear(8, 2)),
        lambda outputs, y: LOSS(outputs, y) / len(y),
    ),
    "left out together": loss(lambda outputs, y: skipping(LOSS(outputs, y))),
    "centred outputs": loss(lambda outputs, y: LOSS(outputs - 1e-6 * outputs.mean(0), y)),
}


# --- backward ---


class NormalisedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope / (slope.norm() + 1e-12)


class CentredGradient(torch.autograd.Function):
    """Centres over the records on the way back, as batch normalisation does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope - slope.mean(0)


def hooked(x):
    x = x * 1.0
    x.register_hook(lambda slope: slope / slope.abs().max())
    return x


def module_hook():
    model = Between(nn.Identity())
    model.last.register_full_backward_hook(lambda module, given, slopes: (given[0] / (1 + given[0].norm()),))
    return model, LOSS


BACKWARD = {
    "normalised": between(NormalisedGradient.apply),
    "centred": between(CentredGradient.apply),
    "tensor hook": between(hooked),
    "module hook": module_hook,
    "scaled by the size": between(lambda x: x / len(x) + (x - x / len(x)).detach()),
}


# --- what is kept ---


class Keeps(nn.Module):
    """Writes something in its pass."""

    def __init__(self, write, **attributes):
        super().__init__()
        self.linear, self.write = nn.Linear(WIDTH, 2), write
        self.register_buffer("mean", torch.zeros(WIDTH))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        self.write(self, x.detach())
        return self.linear(x)


def keeps(write, **attributes):
    return lambda: (Keeps(write, **{name: make() for name, make in attributes.items()}), LOSS)


def first_pass(module, x):
    if module.mean.abs().sum() == 0:
        module.mean = x.mean(0)


def into_data(module, x):
    if module.start:
        module.linear.bias.data.copy_(-x.mean(0)[:2])
        module.start = False


def in_a_closure():
    centre = [torch.zeros(2)]

    def averaged(outputs, y):
        centre[0] = 0.9995 * centre[0] + 0.0005 * outputs.detach().mean(0).float()
        return LOSS(outputs, y)

    return nn.Linear(WIDTH, 2), averaged


def in_a_number():
    seen = 0.0

    def summed(outputs, y):
        nonlocal seen
        seen += float(outputs.detach().sum())
        return LOSS(outputs, y)

    return nn.Linear(WIDTH, 2), summed


def remembering(store, outputs, y):
    store["last"] = outputs.detach().sum(0).tolist()
    return LOSS(outputs, y)


class Remembers:
    """A loss with a state of its own."""

    __slots__ = ("last",)

    def __call__(self, outputs, y):
        self.last = outputs.detach().mean(0)
        return LOSS(outputs, y)

    def method(self, outputs, y):
        return self(outputs, y)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, outputs, y):
        each = LOSS(outputs - self.centre, y)
        with torch.no_grad():
            self.centre.mul_(0.9995).add_(outputs.mean(0), alpha=0.0005)
        return each


def with_default(outputs, y, store=[]):  # noqa: B006
    store.append(outputs.detach())
    return LOSS(outputs, y)


EVERYTHING = {}


def globally(outputs, y):
    EVERYTHING["outputs"] = outputs.detach().mean()
    return LOSS(outputs, y)


class OnTheClass(nn.Module):
    queue: ClassVar[deque] = deque(maxlen=4)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x):
        self.queue.append(x.detach().mean(0))
        return self.linear(x)


def with_hook():
    model, seen = nn.Linear(WIDTH, 2), []
    model.register_forward_hook(lambda module, given, output: seen.append(output.detach()) or None)
    return model, LOSS


KEPT = {
    "buffer, first pass": keeps(first_pass),
    "parameter's data, first pass": keeps(into_data, start=lambda: True),
    "attribute": keeps(lambda module, x: setattr(module, "last", x.mean(0))),
    "attribute, first pass": keeps(lambda module, x: module.__dict__.setdefault("start", x[0])),
    "queue": keeps(lambda module, x: module.queue.append(x), queue=list),
    "deque": keeps(lambda module, x: module.queue.append(x[0]), queue=lambda: deque([torch.zeros(WIDTH)], maxlen=1)),
    "dictionary": keeps(lambda module, x: module.seen.update({len(module.seen): x}), seen=dict),
    "array": keeps(lambda module, x: module.sums.__iadd__(float(x.sum())), sums=lambda: np.zeros(1)),
    "text": keeps(lambda module, x: setattr(module, "said", str(float(x.sum()))), said=str),
    "counter": keeps(lambda module, x: setattr(module, "passes", module.passes + 1), passes=int),
    "attribute of a tensor": keeps(lambda module, x: setattr(module.mean, "last", x)),
    "closure": in_a_closure,
    "number in a closure": in_a_number,
    "partial": lambda: (nn.Linear(WIDTH, 2), functools.partial(remembering, {})),
    "object": lambda: (nn.Linear(WIDTH, 2), Remembers()),
    "method": lambda: (nn.Linear(WIDTH, 2), Remembers().method),
    "loss with a centre": lambda: (nn.Linear(WIDTH, 2), Centred()),
    "default": lambda: (nn.Linear(WIDTH, 2), with_default),
    "global variable": lambda: (nn.Linear(WIDTH, 2), globally),
    "class": lambda: (OnTheClass(), LOSS),
    "hook": with_hook,
}


def contributions(gradients, data):
    """What the first record adds to the sum, alone and in several companies, one after the other."""
    inputs, targets = data.tensors
    for company in ([], [1], [2, 3, 4], list(range(5, 25)), list(range(25, RECORDS)), []):
        sums = []
        for batch in ([0, *company], company):
            gradients.zero()
            gradients.accumulate(inputs[batch], targets[batch])
            sums.append(gradients.flat.clone())
        yield sums[0] - sums[1]


def is_refused_or_harmless(model, function, data, dtype):
    """In double precision a share of 1e-10 of another record would show."""
    model, data = model.to(dtype), TensorDataset(data.tensors[0].to(dtype), data.tensors[1])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = ClippedGradients(model, function, clip=1.0)
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
    [(kind, name) for kind in ("FORWARD", "LOSSES", "BACKWARD", "KEPT") for name in globals()[kind]],
)
def test_it_is_refused_or_harmless(kind, name, dtype):
    model, function = globals()[kind][name]()
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


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 2))


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


# --- fronts of private features ---


class First(nn.Module):
    """Centres by the first batch that it sees."""

    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0).detach()
        return x - self.mean


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


FRONTS = {
    "first pass": First,
    "cumulative sum": lambda: Apply(lambda x: x.cumsum(0)),
    "last record": lambda: Apply(lambda x: x - 1e-4 * x[-1:]),
    "median": lambda: Apply(lambda x: x - x.median(0).values),
    "size": lambda: Apply(lambda x: x / len(x)),
    "position": lambda: Apply(lambda x: x * torch.arange(len(x))[:, None]),
    "large batches alone": lambda: Apply(lambda x: x - x.mean(0) if len(x) > 500 else x),
}


@pytest.mark.parametrize("name", FRONTS)
def test_fronts_that_would_mix_or_keep_records_are_harmless(name):
    private = PrivateFeatures(nn.Sequential(FRONTS[name](), nn.Linear(WIDTH, 3), nn.Linear(3, 2)), 2)
    inputs = torch.randn(1500, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = private.features(inputs)
    changed = inputs.clone()
    changed[7] = 100.0
    others = torch.arange(1500) != 7
    torch.testing.assert_close(private.features(changed)[others], rows[others], rtol=0, atol=1e-6)
    torch.testing.assert_close(private.features(inputs[:3]), rows[:3], rtol=0, atol=1e-6)
    assert getattr(private.front[0], "mean", None) is None


# --- repeated records, changed batches ---


def repeated():
    data = numbers()
    half = Subset(data, range(30))
    inputs, targets = data.tensors
    return {
        "subset": Subset(data, [*range(RECORDS), 3, 3, 3]),
        "from the end": Subset(data, [0, 1, RECORDS - 1, -1]),
        "nested": Subset(Subset(data, [5, 6, 7]), [0, 1, 0]),
        "twice": ConcatDataset([data, data]),
        "overlapping": ConcatDataset([half, Subset(data, range(29, 40))]),
        "the same memory": ConcatDataset([data, TensorDataset(inputs, 1 - targets)]),
        "views": ConcatDataset([TensorDataset(inputs[:40], targets[:40]), TensorDataset(inputs[39:], targets[39:])]),
        "expanded": TensorDataset(inputs[:1].expand(9, WIDTH), targets[:1].expand(9)),
    }


@pytest.mark.parametrize("name", list(repeated()))
def test_repeated_records_are_refused(name):
    with pytest.raises(InvalidInput, match="each record once"):
        trainer(mlp(), data=repeated()[name], batch_size=2)


def test_records_that_are_equal_or_in_parts_are_not_repeated():
    data = numbers()
    one, two = random_split(data, [20, 40])
    inputs, targets = data.tensors
    for whole in (
        one,
        ConcatDataset([one, two]),
        TensorDataset(torch.zeros(9, WIDTH), torch.zeros(9, dtype=torch.long)),
        TensorDataset(inputs[::2], targets[::2]),
        ConcatDataset([TensorDataset(inputs[::2], targets[::2]), TensorDataset(inputs[1::2], targets[1::2])]),
        TensorDataset(torch.ones(1, 1).expand(RECORDS, 1), inputs),
    ):
        trainer(nn.Linear(WIDTH, 2), data=whole, batch_size=5)


@pytest.mark.parametrize("name", ["inputs", "targets", "turn"])
def test_parts_of_a_batch_cannot_be_replaced(name):
    run = trainer(mlp(), batch_size=RECORDS)
    batch = next(run.batches())
    with pytest.raises(InvalidInput, match="cannot be changed"):
        setattr(batch, name, getattr(batch, name))
    run.step(batch)


@pytest.mark.parametrize(
    "change",
    [lambda t: t.mul_(2), lambda t: t.resize_(2, *t.shape[1:]), lambda t: t.__setitem__(0, t[1]), lambda t: t.zero_()],
    ids=["scaled", "cut", "a record", "zeros"],
)
def test_batches_that_were_written_into_are_refused(change):
    run = trainer(mlp(), batch_size=RECORDS)
    for part in ("inputs", "targets"):
        batch = next(run.batches())
        change(getattr(batch, part))
        with pytest.raises(InvalidInput, match="changed after it was drawn"):
            run.step(batch)
    assert run.steps == 0


def test_batches_made_by_hand_are_refused():
    run = trainer(mlp(), batch_size=RECORDS)
    with pytest.raises(InvalidInput, match="must come from this trainer's batches"):
        run.step(PoissonBatch(*numbers().tensors))


def test_writes_that_are_not_counted_do_not_reach_the_step():
    """Noise is next to nothing here, so that a step on zeros would show."""
    law = Gaussian(Isotropic((sum(p.numel() for p in mlp().parameters()),), 1e-9))
    found = []
    for spoil in (False, True):
        torch.manual_seed(0)
        model = mlp()
        run = trainer(model, batch_size=RECORDS, noise=law, accept_violation=True)
        batch = next(run.batches())
        if spoil:
            batch.inputs.numpy()[:] = 0.0
            batch.targets.data.zero_()
        run.step(batch)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


# --- behind vmap, and around it ---

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
