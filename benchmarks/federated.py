"""Federated learning at equal true guarantees, beside Flower's own: MATRIXDP_DATA=folder python benchmarks/federated.py

Every row trains in this process with Flower's messages and strategies, and prints the accuracy on the test records:

    record level   five clients train by DP-SGD of their own; nobody is trusted; sampled, or in a fixed order
    client level   100 or 1,000 clients, and a trusted server that draws the noise: sampled rounds, or separated ones
    vertical       two participants with halves of Adult's attributes, epsilon 8

Flower's DifferentialPrivacyServerSideFixedClipping asks all clients in every round, with the noise multiplier at which
this keeps the same budget when one client's update is replaced by zero. (Its denominator is the number of replies, so
with one client fewer the mean can move twice as far; this is not held against it.) It knows no other unit than the
client, so beside the record level it has the five clients as they are.

Models are linear. Pictures are described by histograms of edge directions, which learn nothing from data; capital gains
and losses by their cube roots. Settings were chosen on a tenth of the training records that was held back, with few
tries; Flower's rows have those of separated rounds. All are in this file. Noise is secure, so no two runs agree in the
last digits. `--only` takes a part of a row's name.
"""

import argparse
import logging
import math
import tempfile
import time
from uuid import uuid4

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from torch import nn

from matrixdp import Budget
from matrixdp.federated import (
    CentralPrivacy,
    LocalTraining,
    RecordLevel,
    central,
    horizontal,
    vertical,
)
from matrixdp.privacy import gaussian
from matrixdp_papers import datasets
from matrixdp_papers.studies import one_feature

try:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = 1  # what Flower's processes set
except ModuleNotFoundError:  # Flower before 1.41 needs none
    pass

DELTA = 1e-5
BUDGET = Budget(3.0, DELTA)
FLOWER = "Flower's server-side clipping"
# rounds, and epochs, batch size, learning rate and clip of the local DP-SGD
RECORD_LEVEL = {"Adult": (10, 4, 512, 4.0, 1.0), "MNIST": (10, 3, 1024, 32.0, 1.0)}
# the same without sampling, where each client has its batches in a fixed order
FIXED_ORDER = {"independent noise": {"bands": 1}, "noise over time": {"bands": "auto"}}
# learning rate and steps of a client; rounds, clip and the choice of clients
CLIENT_LEVEL = {
    "Adult": {
        "sampled": (2.0, 10, 60, 1.0, {"sampling_rate": 0.2}),
        "separated": (2.0, 10, 30, 1.0, {"separation": 6}),
        FLOWER: (2.0, 10, 30, 1.0, {}),
    },
    "MNIST": {
        "sampled": (8.0, 10, 60, 1.0, {"sampling_rate": 0.2}),
        "separated": (8.0, 10, 30, 1.0, {"separation": 6}),
        FLOWER: (8.0, 10, 30, 1.0, {}),
    },
}


class HereGrid(Grid):
    """Nodes that answer at once, in this process."""

    def __init__(self, app, nodes):
        self.app, self.nodes, self.replies = app, nodes, {}

    def push_messages(self, messages):
        names = [str(uuid4()) for _ in messages]
        for name, message in zip(names, messages, strict=True):
            message.metadata.__dict__["_message_id"] = name
            node = message.metadata.dst_node_id
            settings = {"partition-id": node, "num-partitions": self.nodes}
            self.replies[name] = self.app(message, Context(1, node, settings, RecordDict(), {}))
        return names

    def pull_messages(self, message_ids):
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(list(messages)))

    def get_node_ids(self):
        return list(range(self.nodes))

    def set_run(self, run): ...

    def run(self): ...

    def create_message(self, *_): ...


def edges(pictures):
    """Eight directions of edges in 7 x 7 cells, of norm 1."""
    x = torch.from_numpy(np.asarray(pictures, dtype=np.float32)).reshape(-1, 1, 28, 28)
    x = nn.functional.avg_pool2d(nn.functional.pad(x, (1, 1, 1, 1)), 3, 1)
    wide, high = nn.functional.pad(x, (1, 1, 0, 0))[:, 0], nn.functional.pad(x, (0, 0, 1, 1))[:, 0]
    right, down = wide[:, :, 2:] - wide[:, :, :-2], high[:, 2:] - high[:, :-2]
    size, angle = torch.hypot(right, down), torch.atan2(down, right)
    channels = torch.stack([size * torch.cos(angle - math.pi * k / 4).clamp(min=0) ** 4 for k in range(8)], 1)
    cells = nn.functional.avg_pool2d(nn.functional.pad(channels, (1, 1, 1, 1)), 6, 4).flatten(1).sqrt()
    return (cells / (cells.norm(dim=1, keepdim=True) + 1e-6)).numpy()


def load(name):
    read, features = (datasets.load_adult, one_feature.described) if name == "Adult" else (datasets.load_mnist, edges)
    return [(features(records), label) for records, label in (read(test=test) for test in (False, True))]


def model(features, classes):
    made = nn.Linear(features, classes)
    with torch.no_grad():
        made.weight.zero_()
        made.bias.zero_()
    return made


def initial(features, classes):
    return ArrayRecord({"parameters": Array(np.zeros((features + 1) * classes, np.float32))})


def accuracy(vector, records, label):
    """Of a linear model: weights of all classes, then biases, as torch has them."""
    classes = len(vector) // (records.shape[1] + 1)
    weight, bias = vector[:-classes].reshape(classes, -1), vector[-classes:]
    return float(np.mean(np.argmax(records @ weight.T + bias, axis=1) == label))


def started(strategy, app, clients, arrays, rounds):
    """The mean of the models of the later half of the rounds, which is post-processing."""
    kept = []
    strategy.start(
        HereGrid(app, clients),
        arrays,
        num_rounds=rounds,
        evaluate_fn=lambda number, now: kept.append(now["parameters"].numpy().copy()),
    )
    return np.mean(kept[1 + rounds // 2 :], axis=0)


def record_level(name, clients=5, **noise):
    (records, label), test = load(name)
    rounds, epochs, batch, rate, clip = RECORD_LEVEL[name]
    sizes = records.shape[1], int(label.max()) + 1
    with tempfile.TemporaryDirectory() as folder:
        app = horizontal.client_app(
            lambda: model(*sizes),
            lambda number: (records[number::clients], label[number::clients]),
            clients=clients,
            training=LocalTraining(epochs=epochs, batch_size=batch, learning_rate=rate),
            privacy=RecordLevel(budget=BUDGET, rounds=rounds, clip=clip, **noise),
            folder=folder,
        )
        found = started(horizontal.CheckedStrategy(FedAvg()), app, clients, initial(*sizes), rounds)
    return accuracy(found, *test)


def client_app(records, label, clients, classes, rate, steps, mods):
    """Gradient descent on a client's own records."""
    app = ClientApp(mods=mods)
    wide, targets = np.hstack([records, np.ones((len(records), 1), np.float32)]), np.eye(classes, dtype=np.float32)

    @app.train()
    def train(message, context):
        own = slice(context.node_config["partition-id"], None, clients)
        x, y = wide[own], targets[label[own]]
        flat = message.content.array_records["arrays"]["parameters"].numpy()
        weight = np.hstack([flat[:-classes].reshape(classes, -1), flat[-classes:, None]]).T
        for _ in range(steps):
            scores = np.exp((z := x @ weight) - z.max(axis=1, keepdims=True))
            weight = weight - rate / len(x) * (x.T @ (scores / scores.sum(axis=1, keepdims=True) - y))
        moved = np.concatenate([weight[:-1].T.ravel(), weight[-1]]).astype(np.float32)
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord({"parameters": Array(moved)}), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def client_level(name, clients, way):
    (records, label), test = load(name)
    classes = int(label.max()) + 1
    rate, steps, rounds, clip, choice = CLIENT_LEVEL[name][way]
    if way == FLOWER:
        multiplier = math.sqrt(rounds) / float(gaussian.mu(BUDGET.epsilon, DELTA))
        strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), multiplier, clip, clients)
        mods = []
    else:
        privacy = CentralPrivacy(budget=BUDGET, rounds=rounds, clients=clients, clip=clip, **choice)
        strategy, mods = central.PrivateStrategy(FedAvg(), privacy), [central.clipping_mod(privacy)]
    app = client_app(records, label, clients, classes, rate, steps, mods)
    return accuracy(started(strategy, app, clients, initial(records.shape[1], classes), rounds), *test)


def by_halves():
    """One feature per participant; the server's network stays as it is, and a corrected discriminant decides."""
    (records, label), (new, truth) = load("Adult")
    plan, ends = one_feature.plan_for(len(label), Budget(8.0, DELTA)), []
    with tempfile.TemporaryDirectory() as folder:
        app = vertical.client_app(
            lambda number: one_feature.own_network(records[:, datasets.ADULT_HALVES[number]].shape[1]),
            lambda number: tuple(people[:, datasets.ADULT_HALVES[number]] for people in (records, new)),
            plan=plan,
            folder=folder,
        )
        server = vertical.server_app(
            lambda: one_feature.fixed_top(label, plan),
            lambda: label,
            plan=plan,
            learning_rate=0.0,
            discriminant=True,
            evaluate=lambda outputs: {"accuracy": float(np.mean(outputs.argmax(dim=1).numpy() == truth))},
            on_epoch=ends.append,
        )
        server(HereGrid(app, 2), Context(1, 1, {}, RecordDict(), {}))
    return ends[-1].metrics["accuracy"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a part of a row's name")
    only = parser.parse_args().only
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = {}
    for name in ("Adult", "MNIST"):
        rows[f"{name}, record level, 5 clients, local DP-SGD"] = (3, lambda name=name: record_level(name))
        for way, options in FIXED_ORDER.items():
            row = f"{name}, record level, 5 clients, fixed order, {way}"
            noise = {"mechanism": "toeplitz", "order": "fixed", "options": options}
            rows[row] = (3, lambda name=name, noise=noise: record_level(name, **noise))
        rows[f"{name}, record level, 5 clients, {FLOWER}"] = (3, lambda name=name: client_level(name, 5, FLOWER))
        for clients in (100, 1000):
            for way in CLIENT_LEVEL[name]:
                row = f"{name}, client level, {clients} clients, {way}"
                rows[row] = (3, lambda name=name, clients=clients, way=way: client_level(name, clients, way))
    rows["Adult, vertical, record level, 2 participants"] = (8, by_halves)
    print(f"{'':<72} {'epsilon':>7} {'accuracy':>9} {'seconds':>8}")
    for row, (epsilon, task) in rows.items():
        if only in row:
            began = time.perf_counter()
            found = task()
            print(f"{row:<72} {epsilon:>7} {found:>9.4f} {time.perf_counter() - began:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
