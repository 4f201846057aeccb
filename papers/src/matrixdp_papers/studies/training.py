"""What the studies of training share: networks and records on a device, SGD with and without privacy, and accuracy.

It needs PyTorch. Studies import it only when they run, so that they can be listed without PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixdp.budget import Budget
from matrixdp.distributions import NoiseLaw
from matrixdp.errors import InvalidInput
from matrixdp_papers.datasets import Labelled

try:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from matrixdp.learn import PrivateSGD
    from matrixdp_papers.networks import GCN
except ImportError as reason:
    raise InvalidInput(f"this study needs PyTorch: pip install 'matrixdp[learn]' ({reason})") from None

# Records in one forward pass of an evaluation.
CHUNK = 512


def pick_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def affordable(epochs: int, repeats: int, least: int) -> tuple[int, int]:
    """Epochs and repeats of a run: all on a GPU; on a CPU a tenth of the epochs, but at least `least`."""
    return (epochs, repeats) if torch.cuda.is_available() else (max(least, epochs // 10), max(1, repeats // 3 * 2))


def on_device(data: Labelled) -> TensorDataset:
    """Records and classes as tensors; numbers in single precision, codes and indices as they are."""
    records = torch.from_numpy(np.ascontiguousarray(data.records))
    if records.is_floating_point():
        records = records.float()
    return TensorDataset(records.to(pick_device()), torch.from_numpy(data.label).to(pick_device()))


@dataclass(frozen=True, eq=False)
class Task:
    """A network to train.

    Attributes:
        name: of the data set.
        network: makes the network.
        train, test: on the device.
        lot: the size of a batch; of a Poisson batch, the expected size.
        learning_rate: of SGD, with noise or without.
        clip: the largest norm of a record's gradient.
    """

    name: str
    network: Callable[[], nn.Module]
    train: TensorDataset
    test: TensorDataset
    lot: int
    learning_rate: float
    clip: float = 1.0

    @property
    def sampling_rate(self) -> float:
        """The probability that a record is in a batch."""
        return self.lot / len(self.train)

    def steps(self, epochs: int) -> int:
        """The number of batches in a number of epochs."""
        return epochs * -(-len(self.train) // self.lot)

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters."""
        return [tuple(parameter.shape) for parameter in self.network().parameters()]


def seeded_network(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network on the device whose initial weights depend on the seed; other random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(pick_device())


def generator(seed: int) -> torch.Generator:
    """Random numbers on the device."""
    return torch.Generator(pick_device()).manual_seed(seed)


def accuracy(network: nn.Module, data: TensorDataset) -> float:
    """The share of records that are classified right; a network whose numbers have overflowed answers class 0."""
    records, label = data.tensors
    network.eval()
    with torch.no_grad():
        right = [
            (network(records[first : first + CHUNK]).argmax(1) == label[first : first + CHUNK]).sum()
            for first in range(0, len(label), CHUNK)
        ]
    network.train()
    return int(torch.stack(right).sum()) / len(label)


def by_epoch(networks: Iterable[nn.Module], *parts: TensorDataset) -> list[list[float]]:
    """The accuracy of a network after each pass, on each part of the data."""
    return [[accuracy(network, part) for part in parts] for network in networks]


def at_end(networks: Iterable[nn.Module], data: TensorDataset) -> float:
    """The accuracy of a network after the last pass."""
    *_, network = networks
    return accuracy(network, data)


def passes(
    network: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, *, epochs: int, lot: int, seed: int
) -> Iterator[nn.Module]:
    """Trains without noise on batches of shuffled records, and yields the network after each pass.

    The batches of a pass are of one size, up to a record: a small last batch would sway the network just before it is
    tested.
    """
    loss, random = nn.CrossEntropyLoss(), generator(seed)
    records, label = data.tensors
    for _ in range(epochs):
        order = torch.randperm(len(label), generator=random, device=label.device)
        for batch in torch.tensor_split(order, -(-len(label) // lot)):
            optimizer.zero_grad()
            loss(network(records[batch]), label[batch]).backward()
            optimizer.step()
        yield network


def without_noise(task: Task, epochs: int, seed: int, learning_rate: float | None = None) -> Iterator[nn.Module]:
    """Trains the task's network with plain SGD, without clipping or noise, at the task's rate or another."""
    network = seeded_network(task.network, seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate or task.learning_rate)
    return passes(network, optimizer, task.train, epochs=epochs, lot=task.lot, seed=seed)


def trainer(task: Task, noise: str | NoiseLaw, budget: Budget, planned: int, seed: int, **options: Any) -> PrivateSGD:
    """Private SGD with seeded, and so not private, randomness, planned for a number of epochs."""
    network = seeded_network(task.network, seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=task.learning_rate)
    loss = nn.CrossEntropyLoss(reduction="none")
    captured = torch.cuda.is_available() and not isinstance(network, GCN)  # a GCN is not captured
    options = {"batch_size": task.lot, "clip": task.clip, "epochs": planned, "generator": generator(seed), **options}
    options["capture"] = captured
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "training with a generator of your own", UserWarning)
        return PrivateSGD(network, optimizer, task.train, loss, budget=budget, noise=noise, **options)


def with_noise(
    task: Task, law: NoiseLaw, budget: Budget, planned: int, seed: int, *, epochs: int | None = None
) -> Iterator[nn.Module]:
    """Trains the task's network with this noise, whether or not it keeps the budget; yields it after each epoch.

    Args:
        task: what to train.
        law: the noise of a step.
        budget: the claimed budget.
        planned: the epochs that the claim covers.
        seed: of weights, batches and noise.
        epochs: stop after this many.
    """
    private = trainer(task, law, budget, planned, seed, accept_violation=True)
    for _ in range(epochs or planned):
        private.train()
        yield private.model
