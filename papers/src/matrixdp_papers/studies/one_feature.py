"""Vertical learning with one feature from each participant, and a discriminant that is corrected for the noise.

It needs PyTorch. Noise comes from secure entropy, so runs differ slightly. Settings were chosen on a held-out tenth of
the training records.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from matrixdp.budget import Budget
from matrixdp.federated import SplitClient, SplitPlan, SplitServer
from matrixdp_papers import datasets
from matrixdp_papers.datasets import Labelled
from matrixdp_papers.studies.base import Mean, Progress, Table
from matrixdp_papers.studies.splits import Split

COLUMNS = ("training", "epsilon", "std", "true record-level epsilon", "test accuracy")
SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 1024,
    "update_share": 0.3,
    "clip": 0.1,
    "learning_rate": 60.0,
}


class Outcome(NamedTuple):
    """The std of the noise on a feature, the true record-level epsilon, and the accuracy on new records."""

    std: float
    epsilon: float
    accuracy: float


def plan_for(records: int, budget: Budget) -> SplitPlan:
    """The plan of the participants, with small batches where there are few records."""
    return SplitPlan(records=records, budget=budget, **{**SETTINGS, "batch_size": min(SETTINGS["batch_size"], records)})


def described(people: Any) -> Any:
    """Adult, with the cube root of attributes that are zero for most people and large for a few."""
    people = np.array(people, dtype=np.float32)
    for name in ("capital-gain", "capital-loss"):
        people[:, datasets.ADULT_COLUMNS[name]] **= 1 / 3
    return people


def own_network(attributes: int) -> nn.Linear:
    """A participant's network: one feature, with initial weights of zero."""
    made = nn.Linear(attributes, 1)
    with torch.no_grad():
        made.weight.zero_()
        made.bias.zero_()
    return made


def fixed_top(label: Any, plan: SplitPlan) -> nn.Linear:
    """The server's fixed network for two classes, which provides the participants' gradients."""
    top = nn.Linear(2, 2)
    with torch.no_grad():
        top.bias.copy_(torch.from_numpy(np.log(np.bincount(label, minlength=2).clip(1))))
        top.weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) / plan.feature_noise(1).law.root_mean_square)
    return top


def measured(train: Labelled, test: Labelled, parts: Sequence[slice], budget: Budget) -> Outcome:
    """One run on two classes, without Flower."""
    plan = plan_for(len(train.label), budget)
    server = SplitServer(fixed_top(train.label, plan), train.label, plan=plan, learning_rate=0.0)
    features, gradients = {}, list[Any]([None] * len(parts))
    with tempfile.TemporaryDirectory() as folder:
        clients = [
            SplitClient(own_network(own.shape[1]), own, plan=plan, folder=f"{folder}/{number}")
            for number, own in enumerate(train.records[:, part] for part in parts)
        ]
        for step in range(plan.steps):
            given = [c.answer("a", step, g)["features"] for c, g in zip(clients, gradients, strict=True)]
            gradients, features[step] = list(server.learn(step, given)), given
        for client, gradient in zip(clients, gradients, strict=True):
            client.answer("a", plan.steps, gradient)
        new = [client.evaluate("a", test.records[:, part]) for client, part in zip(clients, parts, strict=True)]
    decides = server.discriminant({step: features[step] for step in list(features)[-plan.batches :]})
    right = server.outputs(new, decides).argmax(dim=1).numpy() == test.label
    epsilon = clients[0].guarantees.record
    assert epsilon is not None
    return Outcome(plan.feature_noise(1).law.root_mean_square, epsilon, float(np.mean(right)))


def table(title: str, split: Split, budgets: Sequence[Budget], repeats: int, progress: Progress) -> Table:
    """Adult at each budget."""
    train, test = (Labelled(described(part.records), part.label) for part in (split.train, split.test))
    rows = []
    for budget in progress(budgets, "Adult, one feature"):
        found = [measured(train, test, datasets.ADULT_TWO_PARTS, budget) for _ in range(repeats)]
        score = Mean.of([one.accuracy for one in found])
        rows.append(("corrected discriminant", budget.epsilon, found[0].std, found[0].epsilon, score))
    count, note = len(train.label), f"Tested on {len(test.label):,} records. {SETTINGS['epochs']} epochs, "
    note += f"{SETTINGS['batch_size']:,} records a step; linear networks, capital gains and losses as cube roots. "
    note += f"Private training clips the gradient of a record to {SETTINGS['clip']:g} and has "
    note += f"{SETTINGS['update_share']:.0%} of the budget."
    return Table(f"Adult, {count:,} records, 1 feature of each half{title}", COLUMNS, tuple(rows), note)
