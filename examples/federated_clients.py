"""A classifier of income that hides each client
=============================================

``MATRIXDP_DATA=folder python examples/federated_clients.py``

Of 200 clients, a trusted server asks a fifth in each round, clips their updates and adds noise to the mean. Clients and
strategy may be any of Flower's: the privacy lies in a mod of the one and a wrapper of the other.
"""

import tempfile
from pathlib import Path

import torch
from federated_adult import accuracy, adult, model, simulate
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from matrixdp import Budget, Ledger
from matrixdp.federated import CentralPrivacy, LocalTraining, central
from matrixdp.federated.tensors import flat, load


def parameters(record):
    """The vector of parameters in a record of Flower's."""
    return torch.from_numpy(record["parameters"].numpy().copy())


def apps(clients=200, rounds=20, sampling_rate=0.2, folder=None):
    """The apps of the server and of every client."""
    agreed = {"rounds": rounds, "clients": clients, "clip": 1.0, "sampling_rate": sampling_rate}
    privacy = CentralPrivacy(budget=Budget(3.0, 1e-5), **agreed)
    server = ServerApp()
    client = ClientApp(mods=[central.clipping_mod(privacy)])

    @client.train()
    def train(message, context):
        network, number = model(), context.node_config["partition-id"]
        x, y = (torch.from_numpy(part[number::clients]) for part in adult())
        load(network, parameters(message.content.array_records["arrays"]))
        training = LocalTraining(epochs=10, batch_size=len(x), learning_rate=2.0)
        training.update(network, x, y)
        arrays, metrics = ArrayRecord({"parameters": Array(flat(network).numpy())}), MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid, context):
        ledger = Ledger(Path(folder or tempfile.mkdtemp(), "server.db"), privacy.budget)
        strategy, network = central.PrivateStrategy(FedAvg(), privacy, ledger=ledger), model()
        start = ArrayRecord({"parameters": Array(flat(network).numpy())})
        load(network, parameters(strategy.start(grid, start, num_rounds=rounds).arrays))
        print(strategy.guarantees, accuracy(network))

    return server, client


server, client = apps()
if __name__ == "__main__":
    simulate("federated_clients", 200)
