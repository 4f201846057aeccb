"""Records, sound models, and models and losses that would mix or keep records."""

import functools
import math
from collections import deque
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from matrixdp import Budget
from matrixdp.learn import PrivateSGD

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


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 2))


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


# --- by other doors ---


def overwritten(x):
    """In place: the input of the next layer, and perhaps of the next batch."""
    return x.add_(x.flip(0) * 1e-3)


def strided(x):
    """Reads a record from where its neighbour lies in memory."""
    return x + torch.as_strided(x, x.shape, x.stride(), WIDTH)


def from_storage(x):
    return x + torch.tensor(list(x.untyped_storage())[:4]).sum()


def rolled_outside(x):
    with torch._C._DisableFuncTorch():
        return x + torch.roll(x, 1, 0)


class Looking(torch.Tensor):
    """Mixes the rows of whatever it is added to."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found - found.mean(0, keepdim=True) if function is torch.Tensor.add else found


class OwnVmap(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return x - x.mean(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        return slope

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(in_dims[0], keepdim=True), in_dims[0]


class Aliased(nn.Module):
    """Reaches itself by a list, a set and an attribute, and keeps the last record in each."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.known, self.others = [self.linear], {1: (self.linear, {})}
        self.__dict__["same"] = self

    def forward(self, x):
        kept = self.others[1][1].get("last", 0.0)
        self.others[1][1]["last"] = self.same.known[0].last = x
        return self.linear(x + kept + getattr(self.known[0], "last", 0.0) - x)


def hooked_later():
    """Hooks that come after the check; the first batch has been traced by then."""
    model, calls = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2)), []

    def function(outputs, y):
        calls.append(1)
        model[1].register_forward_hook(lambda module, given, found: found - found.mean(0))
        return LOSS(outputs, y)

    return model, function


OTHER_DOORS = {
    "in place": then(overwritten),
    "neighbour in memory": then(strided),
    "storage": then(from_storage),
    "outside of vmap": then(rolled_outside),
    "tensor with functions of its own": then(lambda x: x.as_subclass(Looking).add(0.0).as_subclass(torch.Tensor)),
    "own rule for vmap": between(OwnVmap.apply),
    "cumulative, in logarithms": then(lambda x: x.logcumsumexp(0)),
    "windows over records": then(lambda x: x + functional.pad(x, (0, 0, 1, 0))[:-1]),
    "sorted by loss": loss(lambda outputs, y: LOSS(outputs, y).sort(descending=True).values.sort().values),
    "weighed by the batch's loss": loss(lambda outputs, y: LOSS(outputs, y) * LOSS(outputs, y).detach().softmax(0)),
    "data of a tensor": loss(lambda outputs, y: LOSS(outputs - outputs.data.mean(0), y)),
    "aliases": lambda: (Aliased(), LOSS),
    "hooks that come later": hooked_later,
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
