"""A classifier of income from clients that trust nobody
=====================================================

``MATRIXDP_DATA=folder python examples/federated_adult.py``

Five clients with a share of Adult each train by DP-SGD of their own, in Flower's simulation. Each keeps a ledger, and
what is hidden is each of its records. ``federated_clients.py`` hides each client as a whole.
"""

import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path

import torch

from matrixdp import Budget
from matrixdp.federated import LocalTraining, RecordLevel, horizontal
from matrixdp_papers.datasets import load_adult
from matrixdp_papers.studies.one_feature import described

FOLDER = Path(tempfile.gettempdir()) / "federated-adult"  # in practice: a folder that each party keeps for good
model = partial(torch.nn.Linear, 105, 2)  # the same for server and clients


@cache
def adult(test=False):
    """Records, with the cube roots of capital gains and losses, and incomes."""
    records, income = load_adult(test=test)
    return described(records), income


def accuracy(network):
    """On public records."""
    records, income = map(torch.from_numpy, adult(test=True))
    return {"accuracy": float((network(records).argmax(dim=1) == income).float().mean())}


def apps(clients=5, rounds=10, folder=FOLDER):
    """The apps of the server and of every client."""
    privacy = RecordLevel(budget=Budget(3.0, 1e-5), rounds=rounds, clip=1.0)
    training = LocalTraining(epochs=4, batch_size=512, learning_rate=4.0)
    shares = lambda client: [part[client::clients] for part in adult()]  # noqa: E731
    client = horizontal.client_app(model, shares, clients=clients, training=training, privacy=privacy, folder=folder)
    server = horizontal.server_app(model, clients=clients, rounds=rounds, evaluate=accuracy)
    return server, client


def simulate(module, clients):
    """Starts the apps of a module by `flwr run`, which wants them in a folder with a pyproject.toml."""
    here = Path(shutil.copytree(Path(__file__).parent, tempfile.mkdtemp(), dirs_exist_ok=True))
    (here / "pyproject.toml").write_text((here / "federated.toml").read_text().replace("MODULE", module))
    subprocess.run(["flwr", "run", here, "--stream", f"--federation-config=num-supernodes={clients}"], check=True)


server, client = apps()
if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)  # a demonstration begins anew; in practice, spent budget stays spent
    simulate("federated_adult", 5)
