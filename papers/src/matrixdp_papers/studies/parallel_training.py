"""Many networks trained at once, as the clients of federated learning or the configurations of a study.

It needs PyTorch. Studies import it only when they run, so that they can be listed without PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from matrixdp.budget import Budget
from matrixdp.distributions import NoiseLaw
from matrixdp.federated.tensors import flat, load
from matrixdp_papers.studies import training

# Records x networks in one forward pass of an evaluation.
_JUDGED = 2**16


class ParallelNetworks:
    """Networks of one architecture with different weights, evaluated in parallel.

    Weights are a tensor, groups x configurations x parameters. Each group has its own records; the configurations of a
    group share them, and differ in their weights and in additional inputs, such as noise.

    Args:
        network: on the device; its own weights are not used.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """Views of the weights by the name of the parameter."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = torch.split(weights, sizes, dim=-1)
        return {
            name: part.view(*weights.shape[:-1], *shape)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def outputs(self, parameters: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        """The outputs of one network."""
        answers: Tensor = functional_call(self.network, parameters, inputs)
        return answers

    def loss(self, parameters: dict[str, Tensor], records: Tensor, label: Tensor, *own: Tensor) -> Tensor:
        """The mean over a batch."""
        return nn.functional.cross_entropy(self.outputs(parameters, records, *own), label)

    def gradients(
        self,
        weights: Tensor,
        records: Tensor,
        label: Tensor,
        *own: Tensor,
        rule: Callable[..., dict[str, Tensor]] | None = None,
    ) -> dict[str, Tensor]:
        """By name, groups x configurations x shape.

        Args:
            weights: of all networks.
            records, label: groups x batch.
            *own: groups x configurations x batch.
            rule: (parameters, records, label, *own) -> gradients of one network; those of the loss when left out.
        """
        of_one = grad(self.loss) if rule is None else rule
        of_group = vmap(of_one, in_dims=(0, None, None, *(0 for _ in own)))
        found: dict[str, Tensor] = vmap(of_group)(self.named(weights), records, label, *own)
        return found

    def step_(self, weights: Tensor, gradients: dict[str, Tensor], learning_rate: float) -> None:
        """One step of SGD, in place."""
        for name, parameter in self.named(weights).items():
            parameter.sub_(gradients[name], alpha=learning_rate)

    def accuracy(self, weights: Tensor, records: Tensor, label: Tensor, *own: Tensor) -> Tensor:
        """The share of records classified right, for networks in a row; one that has overflowed answers class 0.

        Args:
            weights: networks x parameters.
            records, label: the same for all networks.
            *own: one for each network, the same for all records.
        """
        answer = vmap(self.outputs, in_dims=(0, None, *(0 for _ in own)))
        parameters, right = self.named(weights), torch.zeros(len(weights), device=weights.device)
        with torch.no_grad():
            for batch in torch.split(torch.arange(len(label), device=label.device), max(1, _JUDGED // len(weights))):
                answers = torch.nan_to_num(answer(parameters, records[batch], *own), nan=0.0)
                right += (answers.argmax(-1) == label[batch]).sum(-1)
        return right / len(label)


class Clients(Protocol):
    """The clients of horizontal learning, which train on their own records."""

    def updates(self, weights: Tensor, turn: int) -> Tensor:
        """The update of each client from given weights in a round.

        Args:
            weights: repeats x configurations x parameters.
            turn: the number of the round; with the repeat it determines the batches.

        Returns:
            repeats x configurations x clients x parameters.
        """

    def accuracy(self, weights: Tensor, records: Tensor, label: Tensor) -> Tensor:
        """For networks x parameters, the share of records classified right."""


def orders(count: int, seeds: Iterable[int], device: torch.device) -> Tensor:
    """A random order of `count` records for each seed."""
    made = (torch.randperm(count, generator=torch.Generator().manual_seed(seed)) for seed in seeds)
    return torch.stack(list(made)).to(device)


def seed_of(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class SideBySide(Clients):
    """Clients with small networks, all trained in parallel by plain SGD.

    Args:
        network: on the device.
        records, label: clients x records.
        epochs: passes in a round.
        lot: the size of a batch.
        learning_rate: of SGD.
    """

    def __init__(
        self, network: nn.Module, records: Tensor, label: Tensor, epochs: int, lot: int, learning_rate: float
    ) -> None:
        self.networks, self.records, self.label = ParallelNetworks(network), records, label
        self.epochs, self.lot, self.learning_rate = epochs, lot, learning_rate

    def updates(self, weights: Tensor, turn: int) -> Tensor:
        repeats, clients, count = len(weights), *self.label.shape[:2]
        trained = weights.repeat_interleave(clients, 0)
        place = torch.arange(clients, device=self.label.device).repeat(repeats)[:, None]
        for epoch in range(self.epochs):
            seeds = [seed_of(group, turn, epoch) for group in range(repeats * clients)]
            for batch in torch.split(orders(count, seeds, self.label.device), self.lot, dim=1):
                found = self.networks.gradients(trained, self.records[place, batch], self.label[place, batch])
                self.networks.step_(trained, found, self.learning_rate)
        return trained.view(repeats, clients, *weights.shape[1:]).transpose(1, 2) - weights[:, :, None]

    def accuracy(self, weights: Tensor, records: Tensor, label: Tensor) -> Tensor:
        return self.networks.accuracy(weights, records, label)


class OneByOne(Clients):
    """Clients with large networks, trained one after the other by Adam, whose state starts afresh in every round.

    The arguments are those of SideBySide.
    """

    def __init__(
        self, network: nn.Module, records: Tensor, label: Tensor, epochs: int, lot: int, learning_rate: float
    ) -> None:
        self.network, self.records, self.label = network, records, label
        self.epochs, self.lot, self.learning_rate = epochs, lot, learning_rate
        self.recorded: Any = network
        if records.is_cuda and records.is_floating_point():  # a recurrent layer has few kernels to launch
            self.recorded = torch.cuda.make_graphed_callables(nn.Sequential(network), (records[0, :lot].clone(),))

    def updates(self, weights: Tensor, turn: int) -> Tensor:
        repeats, configurations, size = weights.shape
        clients, count = self.label.shape[:2]
        found = weights.new_empty(repeats, configurations, clients, size)
        for repeat in range(repeats):
            for client in range(clients):
                seeds = [seed_of(repeat * clients + client, turn, epoch) for epoch in range(self.epochs)]
                passes = orders(count, seeds, self.label.device)
                for configuration in range(configurations):
                    start = weights[repeat, configuration]
                    load(self.network, start)
                    self._train(client, passes)
                    found[repeat, configuration, client] = flat(self.network) - start
        return found

    def _train(self, client: int, passes: Tensor) -> None:
        fused = self.records.is_cuda
        optimizer = torch.optim.Adam(self.network.parameters(), lr=self.learning_rate, fused=fused)
        for order in passes:
            for batch in torch.split(order, self.lot):
                optimizer.zero_grad()
                forward = self.recorded if len(batch) == self.lot else self.network
                outputs = forward(self.records[client, batch])
                loss: Any = nn.functional.cross_entropy(outputs, self.label[client, batch])
                loss.backward()
                optimizer.step()

    def accuracy(self, weights: Tensor, records: Tensor, label: Tensor) -> Tensor:
        right = torch.zeros(len(weights), device=weights.device)
        with torch.no_grad():
            for index, vector in enumerate(weights):
                load(self.network, vector)
                for first in range(0, len(label), 2500):
                    answers = torch.nan_to_num(self.network(records[first : first + 2500]), nan=0.0)
                    right[index] += (answers.argmax(-1) == label[first : first + 2500]).sum()
        return right / len(label)


def record_level(
    tasks: list[training.Task], budget: Budget, rounds: int, epochs: int, seeds: Iterable[int]
) -> tuple[list[float], float]:
    """DP-SGD in every client, and the mean of their models after each round.

    Guarantee: all rounds of a client together keep the budget when one of its records is added or removed. There is no
    guarantee for a client as a whole.

    Args:
        tasks: one per client, each with the same number of records.
        budget: for all rounds.
        rounds: how many there are.
        epochs: passes in a round.
        seeds: one for each repeat.

    Returns:
        The accuracy of each repeat, and the epsilon of a record.
    """
    noise: str | NoiseLaw = "analytic"
    scores, options = list[float](), dict[str, Any]()
    for seed in seeds:
        runs = []
        for client, task in enumerate(tasks):
            runs.append(training.trainer(task, noise, budget, rounds * epochs, 100 * seed + client, **options))
            # calibrated once: the other clients have the same number of records
            noise, options = runs[0].noise.law, {"accept_violation": True}
        weights = flat(runs[0].model)
        for _ in range(rounds):
            models = []
            for run in runs:
                load(run.model, weights)
                run.train(epochs)
                models.append(flat(run.model))
            weights = torch.stack(models).mean(dim=0)
        load(runs[0].model, weights)
        scores.append(training.accuracy(runs[0].model, tasks[0].test))
    return scores, runs[0].epsilon()
