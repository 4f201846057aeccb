"""A classifier of income from clients that trust nobody
=====================================================

``MATRIXDP_DATA=folder python examples/federated_adult.py``

Five clients with a share of Adult each train by DP-SGD of their own, in Flower's simulation. Each keeps a ledger, and
what is hidden is each of its records. ``federated_clients.py`` hides each client as a whole.
"""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from flwr.simulation import run_simulation
from torch import nn

from matrixdp import Budget
from matrixdp.federated import LocalTraining, RecordLevel, horizontal
from matrixdp_papers.datasets import ADULT_COLUMNS, load_adult

FOLDER = Path(tempfile.gettempdir()) / "federated-adult"  # in earnest: a folder that each party keeps for good


def model() -> nn.Module:
    """The same network for server and clients."""
    torch.manual_seed(0)
    return nn.Linear(105, 2)


@cache
def adult(test: bool = False):
    """Records, with the cube root of what is zero for most and large for a few, and incomes."""
    records, income = load_adult(test=test)
    for name in ("capital-gain", "capital-loss"):
        records[:, ADULT_COLUMNS[name]] **= 1 / 3
    return records, income


def accuracy(network: nn.Module) -> dict[str, float]:
    """On public records."""
    records, income = adult(test=True)
    with torch.no_grad():
        guesses = network(torch.from_numpy(records).float()).argmax(dim=1)
    return {"accuracy": float((guesses == torch.from_numpy(income)).float().mean())}


def apps(clients=5, rounds=10, folder=FOLDER):
    """The apps of the server and of every client."""
    privacy = RecordLevel(budget=Budget(3.0, 1e-5), rounds=rounds, clip=1.0)
    training = LocalTraining(epochs=4, batch_size=512, learning_rate=4.0)
    shares = lambda client: [part[client::clients] for part in adult()]  # noqa: E731
    client = horizontal.client_app(model, shares, clients=clients, training=training, privacy=privacy, folder=folder)
    return horizontal.server_app(model, clients=clients, rounds=rounds, evaluate=accuracy), client


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)  # a demonstration begins anew; in earnest, spent budget stays spent
    run_simulation(*apps(), num_supernodes=5)
