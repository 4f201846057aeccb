"""Models, and gradients by a loop over single records, that the tests of gradients share."""

import opacus.layers
import torch
from torch import nn

BATCH = 5


def squares(outputs, targets):
    """A loss for any output; the weights keep the gradients of tokens from being alike."""
    return ((outputs.flatten(1) - targets.unsqueeze(1)) ** 2).sum(1)


def record_gradients(model, inputs, targets, loss=squares):
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(inputs)):
        value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def clipped_sum(rows, clip, norm):
    if norm == "linf":
        return rows.clamp(-clip, clip).sum(0)
    return (rows * (clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


class Block(nn.Module):
    """One ReLU used twice in place, one convolution used twice, and a residual added in place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.twice, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.GroupNorm(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.norm1(self.first(x)))
        y = self.relu(self.norm2(self.twice(x)))
        y = self.twice(y)
        y += x
        return self.relu(y)


class InPlaceFirst(nn.Module):
    """The first layers' outputs are changed in place at once, also through a view."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        y = self.one(x).relu_()
        z = self.two(x)
        z.view(-1)[::2].mul_(2.0)
        return z.add_(y)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(7, 4), kind(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.cell(self.embed(x))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.embed(x))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.norm = opacus.layers.DPMultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x + self.attend(x, x, x, need_weights=False)[0])


def lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def integers(*shape):
    return torch.randint(0, 7, (BATCH, *shape))


def numbers(*shape):
    return torch.randn(BATCH, *shape)


CONVOLUTIONS = {
    "plain": {},
    "same": {"padding": "same", "dilation": 2},
    "same, even kernel": {"padding": "same", "kernel_size": 2},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": 2, "stride": 2, "bias": False},
    "groups": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4, "stride": 2},
    "circular": {"padding": 1, "padding_mode": "circular"},
}


def convolution(dimensions, **options):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    return kind(4, 8, **{"kernel_size": 3, **options})


CASES = {
    "linear": lambda: (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), numbers(6)),
    "linear, tokens": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), numbers(7, 3)),
    "linear, few tokens": lambda: (nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 20)), numbers(3, 30)),
    "linear, four dimensions": lambda: (nn.Linear(20, 20), numbers(2, 2, 20)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), integers(4)),
    "embedding, many tokens": lambda: (nn.Embedding(7, 3, padding_idx=2), integers(3, 5)),
    "embedding, one token": lambda: (nn.Embedding(7, 3), integers()),
    "layer norm": lambda: (nn.Sequential(nn.LayerNorm(3), nn.Tanh(), nn.LayerNorm((4, 3))), numbers(4, 3)),
    "layer norm, no bias": lambda: (nn.LayerNorm(3, bias=False), numbers(3)),
    "rms norm": lambda: (nn.RMSNorm(3), numbers(4, 3)),
    "group norm": lambda: (nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.GroupNorm(3, 12)), numbers(4, 3)),
    "instance norm": lambda: (nn.InstanceNorm2d(3, affine=True), numbers(3, 4, 4)),
    "block": lambda: (Block(), numbers(2, 6, 6)),
    "in place": lambda: (InPlaceFirst(), numbers(6)),
    "in place, tokens": lambda: (InPlaceFirst(), numbers(3, 6)),
    "DPLSTM": lambda: (Recurrent(opacus.layers.DPLSTM), integers(4)),
    "DPGRU": lambda: (Recurrent(opacus.layers.DPGRU), integers(4)),
    "attention": lambda: (Attention(), numbers(3, 4)),
    "tied": lambda: (Tied(), integers(4)),
    "lenet": lambda: (lenet(), numbers(1, 28, 28)),
    "frozen": lambda: (frozen(lenet(), "0.weight", "3.bias", "7.weight"), numbers(1, 28, 28)),
    "frozen first layer": lambda: (frozen(lenet(), "0.weight", "0.bias"), numbers(1, 28, 28)),
} | {
    f"convolution {d}d, {name}": lambda d=d, options=options: (convolution(d, **options), numbers(4, *[7] * d))
    for d in (1, 2, 3)
    for name, options in CONVOLUTIONS.items()
}
