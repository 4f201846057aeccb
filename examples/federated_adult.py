"""Clients train a classifier of income together on Flower, each with its own share of Adult.

    MATRIXDP_DATA=folder python examples/federated_adult.py record    # or: client

"record" hides each record: five clients train by DP-SGD of their own, with a ledger each, and nobody is trusted.
"client" hides each of 200 clients as a whole: a trusted server samples them, clips their updates and draws the noise.
Both run in Flower's simulation, by `flwr run`, which leaves a local SuperLink running for the next run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from matrixdp import Budget, Ledger
from matrixdp.federated import CentralPrivacy, LocalTraining, RecordLevel, central, horizontal
from matrixdp.federated.tensors import flat, load
from matrixdp_papers.datasets import ADULT_COLUMNS, load_adult

CLIENTS = {"record": 5, "client": 200}
BUDGET = Budget(epsilon=3.0, delta=1e-5)
FOLDER = Path(tempfile.gettempdir()) / "federated-adult"  # in earnest: a folder that each party keeps for good
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federated-adult"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "matrixdp"

[tool.flwr.app.components]
serverapp = "federated_adult:{level}_server"
clientapp = "federated_adult:{level}_client"
"""


def model() -> nn.Module:
    """The same network for server and clients."""
    torch.manual_seed(0)
    return nn.Linear(105, 2)


def adult(test: bool = False):
    """Records, with the cube root of what is zero for most and large for a few, and incomes."""
    records, income = load_adult(test=test)
    for name in ("capital-gain", "capital-loss"):
        records[:, ADULT_COLUMNS[name]] **= 1 / 3
    return records, income


def data(client: int, clients: int):
    """The records that a client has."""
    records, income = adult()
    return records[client::clients], income[client::clients]


def accuracy(network: nn.Module) -> dict[str, float]:
    """On public records."""
    records, income = adult(test=True)
    with torch.no_grad():
        guesses = network(torch.from_numpy(records).float()).argmax(dim=1)
    return {"accuracy": float((guesses == torch.from_numpy(income)).float().mean())}


# --- record level: DP-SGD at the clients ---

record_client = horizontal.client_app(
    model,
    lambda client: data(client, CLIENTS["record"]),
    clients=CLIENTS["record"],
    training=LocalTraining(epochs=4, batch_size=512, learning_rate=4.0),
    privacy=RecordLevel(budget=BUDGET, rounds=10, clip=1.0),
    folder=FOLDER,
)
record_server = horizontal.server_app(model, clients=CLIENTS["record"], rounds=10, evaluate=accuracy)

# --- client level: any ClientApp and any strategy, with a trusted server ---

privacy = CentralPrivacy(budget=BUDGET, rounds=20, clients=CLIENTS["client"], clip=1.0, sampling_rate=0.2)
client_client = ClientApp(mods=[central.clipping_mod(privacy)])
client_server = ServerApp()


@client_client.train()
def train(message, context):
    """Any training in the clear."""
    network, (x, y) = model(), data(context.node_config["partition-id"], CLIENTS["client"])
    load(network, torch.from_numpy(message.content.array_records["arrays"]["parameters"].numpy().copy()))
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
    LocalTraining(epochs=10, batch_size=len(x), learning_rate=2.0).update(network, x, y)
    arrays = ArrayRecord({"parameters": Array(flat(network).numpy())})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(x)})}), reply_to=message)


@client_server.main()
def main(grid, context):
    """Any strategy, wrapped."""
    FOLDER.mkdir(exist_ok=True)
    strategy = central.PrivateStrategy(FedAvg(), privacy, ledger=Ledger(FOLDER / "server.db", BUDGET))
    network = model()

    def evaluate(number, arrays):
        load(network, torch.from_numpy(arrays["parameters"].numpy().copy()))
        return MetricRecord(accuracy(network))

    start = ArrayRecord({"parameters": Array(flat(network).numpy())})
    strategy.start(grid, start, num_rounds=privacy.rounds, evaluate_fn=evaluate)
    print(strategy.guarantees)


if __name__ == "__main__":
    level = sys.argv[1] if len(sys.argv) > 1 else "record"
    shutil.rmtree(FOLDER, ignore_errors=True)  # a demonstration begins anew; in earnest, spent budget stays spent
    with tempfile.TemporaryDirectory() as app:
        (Path(app) / "pyproject.toml").write_text(PROJECT.format(level=level))
        shutil.copy(__file__, app)
        nodes = f"num-supernodes={CLIENTS[level]}"
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
        command = ["flwr", "run", app, "local", "--stream", "--federation-config", nodes]
        subprocess.run(command, env=environment, check=True)
