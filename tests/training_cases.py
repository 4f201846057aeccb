"""A small training that the tests of PrivateSGD share."""

import io
import os

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.learn import PoissonBatch, PrivateSGD
from matrixdp.learn.sampling import Turn

RECORDS, SIZE = 40, 40
BUDGET = Budget(3.0, 1e-5)
LOSS = nn.CrossEntropyLoss(reduction="none")


seeds = pytest.mark.filterwarnings("ignore:training with a generator of your own")


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, bias=True), nn.Flatten(), nn.Linear(2, 1), Pair())


class Pair(nn.Module):
    """One score as two."""

    def forward(self, scores):
        return torch.cat([scores, -scores], dim=1)


def records():
    generator = torch.Generator().manual_seed(1)
    inputs = 3 * torch.randn(RECORDS, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


DATA = records()


def trainer(model=None, data=DATA, learning_rate=0.5, **changes):
    """By default every record is in every batch, so that the accounting is in closed form, and fast."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    arguments = {"budget": BUDGET, "batch_size": len(data), "clip": 0.5, "steps": 10, **changes}
    if isinstance(arguments.get("noise"), float):
        size = sum(p.numel() for p in model.parameters())
        arguments["noise"] = Gaussian(Isotropic((size,), arguments["noise"]))
    return PrivateSGD(model, optimizer, data, arguments.pop("loss", LOSS), **arguments)


def silent(**changes):
    """Hardly any noise, to look at the rest of a step."""
    return trainer(noise=1e-9, accept_violation=True, **changes)


def seeded(seed, **changes):
    return trainer(generator=torch.Generator().manual_seed(seed), **changes)


def step(run, first=0, last=RECORDS):
    """A step with these records, as if they had been drawn."""
    run.step(PoissonBatch(*(t[first:last] for t in DATA.tensors), turn=Turn(run)))


def parameters(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def reference_gradient(model, inputs, targets, clip, norm="l2"):
    """The sum of clipped gradients, one record at a time."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for i in range(len(inputs)):
        value = LOSS(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])
        total += gradient.clamp(-clip, clip) if norm == "linf" else gradient * min(1.0, clip / float(gradient.norm()))
    return total


def saved(run):
    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_a_child(function):
    """What a forked process says."""
    pipe, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(end, said.encode())
        os._exit(0)
    os.close(end)
    os.waitpid(child, 0)
    with os.fdopen(pipe, "rb") as file:
        return file.read().decode()
