"""Five clients train a classifier of income together, each with its own share of Adult and its own privacy ledger.

    MATRIXDP_DATA=folder python examples/federated_adult.py record    # or: client

"record" hides each record (local DP-SGD), "client" hides each client as a whole, which takes far more noise: five
clients are few to hide one among.
"""

import os
import sys
import tempfile

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import torch
from flwr.simulation import run_simulation
from torch import nn

from matrixdp import Budget
from matrixdp.federated import Client, ClientLevel, LocalTraining, RecordLevel, horizontal
from matrixdp_papers.datasets import load_adult

CLIENTS, ROUNDS = 5, 5
LEVEL = sys.argv[1] if len(sys.argv) > 1 else "record"
BUDGET = Budget(epsilon=3.0, delta=1e-5)

training = LocalTraining(epochs=2, batch_size=256, learning_rate=1.0)
privacy = {
    "record": RecordLevel(budget=BUDGET, rounds=ROUNDS, clip=1.0),
    "client": ClientLevel(budget=BUDGET, rounds=ROUNDS, clip=1.0, norm="l2", mechanism="analytic"),
}[LEVEL]


def model() -> nn.Module:
    """The same network for server and clients."""
    torch.manual_seed(0)
    return nn.Linear(105, 2)


def data(client: int):
    """The records that a client has."""
    records, income = load_adult()
    return records[client::CLIENTS], income[client::CLIENTS]


def accuracy(network: nn.Module) -> dict[str, float]:
    """On public records."""
    records, income = load_adult(test=True)
    guesses = network(torch.from_numpy(records).float()).argmax(dim=1)
    return {"accuracy": float((guesses == torch.from_numpy(income)).float().mean())}


if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="federated-adult-")  # in earnest: a folder that each client keeps
    client = horizontal.client_app(model, data, clients=CLIENTS, training=training, privacy=privacy, folder=folder)
    server = horizontal.server_app(model, clients=CLIENTS, rounds=ROUNDS, evaluate=accuracy)  # logs every round
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config={"client_resources": {"num_cpus": 1}})
    first = Client(model(), *data(0), training=training, privacy=privacy, folder=f"{folder}/client-0")
    print(f"{first.guarantees}\nin its ledger: {len(first.participant.ledger.history())} uploads")
