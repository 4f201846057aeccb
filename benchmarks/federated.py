"""Federated learning at equal true guarantees, beside Flower's own: MATRIXDP_DATA=folder python benchmarks/federated.py

Every run trains with Flower's messages and strategies, in a process of this machine, and ends in the accuracy on the
test records. One table, with the mean and the range of the runs. With two processes it takes about twenty minutes;
`--jobs 16 --runs 5` is how the table of docs/federated.md was made.

    record level   five clients: each trains by DP-SGD of its own and nobody is trusted (sampled, or in a fixed order);
                   or each sums clipped gradients of a sample, and a trusted server draws the noise
    client level   100 or 1,000 clients, and a trusted server that draws the noise: sampled rounds, or separated ones
    vertical       two participants with halves of Adult's attributes, epsilon 8

Flower's own is DifferentialPrivacyServerSideFixedClipping: all clients in every round, or a fifth of them. Its noise
multiplier is the one that our accountant finds for as many rounds at the same sampling rate. It is given the benefit of
two doubts: its rounds have a fixed number of clients, which Poisson sampling does not cover, and it divides by the
number of replies, so that with one client fewer the mean can move twice as far. It knows no other unit than the client,
so beside the record level it has the five clients as they are.

Models are linear. Pictures are described by histograms of edge directions, which learn nothing from data; capital gains
and losses by their cube roots. Settings were chosen on a tenth of the training records that was held back, with few
tries; Flower's rows have those of separated rounds, or of sampled ones. All are in this file. Noise is secure, so no
two runs agree in the last digits. `--only` takes a part of a row's name. `--choose-vertical` prints what the defaults
of `SplitPlan` were chosen from: a grid of settings, on held-back training records.
"""

import argparse
import itertools
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, FedAvgM
from torch import nn

from matrixdp import Budget
from matrixdp.federated import (
    CentralPrivacy,
    LocalTraining,
    RecordLevel,
    SplitPlan,
    TrustedServer,
    central,
    horizontal,
    vertical,
)
from matrixdp_papers import datasets
from matrixdp_papers.studies import one_feature

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from flower_grid import HereGrid, identify

DELTA = 1e-5
BUDGET = Budget(3.0, DELTA)
FLOWER, FLOWER_SAMPLED = "Flower's own", "Flower's own, a fifth of the clients"
# rounds, and epochs, batch size, learning rate and clip of the local DP-SGD
RECORD_LEVEL = {"Adult": (10, 4, 512, 4.0, 1.0), "MNIST": (10, 3, 1024, 32.0, 1.0)}
# the same in a fixed order, without sampling
FIXED_ORDER = {"independent noise": {"bands": 1}, "noise over time": {"bands": "auto"}}
# rounds, sampling rate of the records, and learning rate, momentum and clip of the trusted server
CENTRAL_RECORDS = {"Adult": (120, 0.1, 4.0, 0.9, 1.0), "MNIST": (300, 0.05, 16.0, 0.9, 1.0)}
# learning rate of a client, which takes ten steps; rounds, and the choice of clients; the clip is 1
CLIENT_RATE, CLIENT_STEPS = {"Adult": 2.0, "MNIST": 8.0}, 10
CLIENT_LEVEL = {
    "sampled": (60, {"sampling_rate": 0.2}),
    "separated": (30, {"separation": 6}),
    FLOWER: (30, {}),
    FLOWER_SAMPLED: (60, {"sampling_rate": 0.2}),
}
# vertical: what the default settings were chosen from, with five runs each
VERTICAL = Budget(8.0, DELTA)
CHOICES = {
    "learning_rate": (3.0, 6.0, 12.0),
    "clip": (1.0, 2.0, 4.0),
    "update_share": (0.1, 0.3),
    "discriminant": (True, False),
}


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


@cache
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


def central_records(name, clients=5):
    (records, label), test = load(name)
    rounds, sampling_rate, rate, momentum, clip = CENTRAL_RECORDS[name]
    sizes = records.shape[1], int(label.max()) + 1
    privacy = CentralPrivacy(
        budget=BUDGET,
        rounds=rounds,
        clients=clients,
        clip=clip,
        unit="record",
        records=-(-len(label) // clients),
        sampling_rate=sampling_rate,
    )
    app = central.gradient_app(
        lambda: model(*sizes), lambda number: (records[number::clients], label[number::clients]), privacy=privacy
    )
    strategy = central.PrivateStrategy(FedAvgM(server_learning_rate=rate, server_momentum=momentum), privacy)
    return accuracy(started(strategy, app, clients, initial(*sizes), rounds), *test)


def client_app(records, label, clients, classes, rate, mods):
    """Gradient descent on a client's own records."""
    app = ClientApp(mods=mods)
    wide, targets = np.hstack([records, np.ones((len(records), 1), np.float32)]), np.eye(classes, dtype=np.float32)

    @app.train()
    def train(message, context):
        own = slice(context.node_config["partition-id"], None, clients)
        x, y = wide[own], targets[label[own]]
        flat = message.content.array_records["arrays"]["parameters"].numpy()
        weight = np.hstack([flat[:-classes].reshape(classes, -1), flat[-classes:, None]]).T
        for _ in range(CLIENT_STEPS):
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
    rounds, choice = CLIENT_LEVEL[way]
    privacy = CentralPrivacy(budget=BUDGET, rounds=rounds, clients=clients, clip=1.0, **choice)
    if way in (FLOWER, FLOWER_SAMPLED):
        multiplier = TrustedServer(privacy, 1).certificate.law.covariance.std
        inner = FedAvg(fraction_train=privacy.sampling_rate, fraction_evaluate=0.0)
        strategy = DifferentialPrivacyServerSideFixedClipping(inner, multiplier, 1.0, int(privacy.cohort))
        mods = []
    else:
        strategy, mods = central.PrivateStrategy(FedAvg(), privacy), [central.clipping_mod(privacy)]
    app = client_app(records, label, clients, classes, CLIENT_RATE[name], mods)
    return accuracy(started(strategy, app, clients, initial(records.shape[1], classes), rounds), *test)


def vertical_tuned():
    """The study's settings, without Flower: the server's network stays as it was made."""
    train, test = (datasets.Labelled(*part) for part in load("Adult"))
    return one_feature.measured(train, test, datasets.ADULT_TWO_PARTS, VERTICAL).accuracy


def vertical_by_default(train, new, discriminant=True, **settings):
    """The accuracy on new records, with networks as torch makes them and default settings but for those given."""
    (records, label), (unseen, truth), ends = train, new, []
    plan = SplitPlan(records=len(label), epochs=2, batch_size=1024, budget=VERTICAL, **settings)
    with tempfile.TemporaryDirectory() as folder:
        app = vertical.client_app(
            lambda number: nn.Linear(records[:, datasets.ADULT_TWO_PARTS[number]].shape[1], 1),
            lambda number: tuple(people[:, datasets.ADULT_TWO_PARTS[number]] for people in (records, unseen)),
            plan=plan,
            folder=folder,
        )
        server = vertical.server_app(
            lambda: nn.Linear(2, 2),
            lambda: label,
            plan=plan,
            discriminant=discriminant,
            evaluate=lambda outputs: {"accuracy": float(np.mean(outputs.argmax(dim=1).numpy() == truth))},
            on_epoch=ends.append,
        )
        server(HereGrid(app, 2), Context(1, 1, {}, RecordDict(), {}))
    return ends[-1].metrics["accuracy"]


def vertical_frozen():
    """The default settings, on test records."""
    return vertical_by_default(*load("Adult"))


def held_back(settings):
    """Accuracy on a tenth of the training records, of a training on the others."""
    (records, label), _ = load("Adult")
    order = np.random.default_rng(0).permutation(len(label))
    new, own = np.split(order, [len(order) // 10])
    return vertical_by_default((records[own], label[own]), (records[new], label[new]), **settings)


def choices():
    """A row for each setting of the grid, on held-back training records."""
    for values in itertools.product(*CHOICES.values()):
        settings = dict(zip(CHOICES, values, strict=True))
        name = ", ".join(f"{name} {value}" for name, value in settings.items())
        yield name, 8, 5, partial(held_back, settings)


def rows():
    """The name, epsilon, number of runs and task of each row."""
    for name, runs in (("Adult", 3), ("MNIST", 1)):
        record = f"{name}, record level, 5 clients"
        yield f"{record}, noise at the clients", 3, runs, partial(record_level, name)
        if name == "Adult":
            for way, options in FIXED_ORDER.items():
                noise = {"mechanism": "toeplitz", "order": "fixed", "options": options}
                yield f"{record}, fixed order, {way}", 3, runs, partial(record_level, name, **noise)
        yield f"{record}, noise at the server", 3, runs, partial(central_records, name)
        yield f"{record}, {FLOWER}", 3, runs, partial(client_level, name, 5, FLOWER)
        for clients in (100, 1000):
            of, repeats = f"{name}, client level, {clients} clients", 1 if clients == 1000 else runs
            for way in CLIENT_LEVEL:
                yield f"{of}, {way}", 3, repeats, partial(client_level, name, clients, way)
    vertically = "Adult, vertical, record level, 2 participants"
    yield f"{vertically}, default settings", 8, 10, vertical_frozen
    yield f"{vertically}, tuned settings", 8, 3, vertical_tuned


def timed(task, seed):
    torch.manual_seed(seed)
    began = time.perf_counter()
    return task(), time.perf_counter() - began


def prepare():
    """What each process of the pool needs."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    identify()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a part of a row's name")
    parser.add_argument("--choose-vertical", action="store_true", help="held-back accuracy for a grid of settings")
    parser.add_argument("--jobs", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--runs", type=int, default=1, help="the least number of runs per row")
    given = parser.parse_args()
    chosen = [row for row in (choices() if given.choose_vertical else rows()) if given.only in row[0]]
    if not chosen:
        parser.error(f"no row's name has {given.only!r} in it")
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{'':<72} {'epsilon':>7} {'accuracy':>8}   {'of runs':<15} {'seconds each':>12}")
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn"), prepare) as pool:
        found = [
            [pool.submit(timed, task, seed) for seed in range(max(runs, given.runs))] for _, _, runs, task in chosen
        ]
        for (row, epsilon, _, _), waiting in zip(chosen, found, strict=True):
            accuracies, seconds = zip(*(future.result() for future in waiting), strict=True)
            spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}" if len(accuracies) > 1 else "one"
            print(
                f"{row:<72} {epsilon:>7} {np.mean(accuracies):>8.4f}   {spread:<15} {np.mean(seconds):>12.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
