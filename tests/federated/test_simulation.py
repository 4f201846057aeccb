"""The apps in Flower's simulation, as `flwr run` starts it: a SuperLink of its own, and nodes that Ray simulates."""

import json

import pytest

from flower_link import Link, spends
from matrixdp import Ledger

pytestmark = pytest.mark.slow

APP = """
import json
from pathlib import Path
import numpy as np, torch
from torch import nn
from matrixdp import Budget
from matrixdp.federated import ClientLevel, LocalTraining, SplitPlan, horizontal, vertical

FOLDER = Path({folder!r})
rng = np.random.default_rng(0)
x = rng.normal(size=(60, 6)).astype(np.float32)
y = (x.sum(axis=1) > 0).astype(np.int64)
log = []

def model():
    torch.manual_seed(0)
    return nn.Linear(6, 2)

def network(number):
    torch.manual_seed(number)
    return nn.Linear(3, 3)

def end(_):
    (FOLDER / "draft").write_text(json.dumps(log))
    (FOLDER / "draft").rename(FOLDER / "log.json")

"""

CLIENTS = """
privacy = ClientLevel(budget=Budget(8.0, 1e-5), rounds=2, clip=0.1, mechanism="idn", by_layer=True)
client = horizontal.client_app(
    model, lambda n: (x[n::3], y[n::3]), clients=3, training=LocalTraining(), privacy=privacy, folder=FOLDER
)
server = horizontal.server_app(
    model, clients=3, rounds=3, timeout=400, on_round=lambda done: log.append(done.updates), on_end=end
)
"""

PARTICIPANTS = """
plan = SplitPlan(records=60, epochs=2, batch_size=30, budget=Budget(8.0, 1e-5))
client = vertical.client_app(
    network, lambda n: (x[:, 3 * n : 3 * n + 3], x[:20, 3 * n : 3 * n + 3]), plan=plan, folder=FOLDER
)
server = vertical.server_app(
    model, lambda: y, plan=plan, timeout=400, on_end=end,
    evaluate=lambda outputs: {{"accuracy": float((outputs.argmax(1).numpy() == y[:20]).mean())}},
    on_epoch=lambda done: log.append([done.number, len(done.metrics), done.ended]),
)
"""

RECORDS = """
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvgM
from matrixdp import Ledger
from matrixdp.federated import CentralPrivacy, central
from matrixdp.federated.tensors import flat

privacy = CentralPrivacy(
    budget=Budget(8.0, 1e-5), rounds=2, clients=3, clip=1.0, unit="record", records=20, sampling_rate=0.5
)
client = central.gradient_app(model, lambda n: (x[n::3], y[n::3]), privacy=privacy)
server = ServerApp()

@server.main()
def main(grid, context):
    ledger = Ledger(FOLDER / "budget.db", privacy.budget)
    inner = FedAvgM(server_learning_rate=0.5, min_train_nodes=3, min_available_nodes=3)
    strategy = central.PrivateStrategy(inner, privacy, ledger=ledger, on_round=lambda done: log.append(done.updates))
    strategy.start(grid, ArrayRecord({{"parameters": Array(flat(model()).numpy())}}), num_rounds=2)
    end(None)
"""


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    made = Link(tmp_path_factory.mktemp("simulation"), "--simulation")
    made.environment["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        yield made
    finally:
        made.stop()


def log_of(link, name, code, nodes):
    """What an app has logged, and its folder."""
    app = link.install(name, APP + code)
    settings = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus=1"
    link.run(app, "--federation-config", settings)
    link.wait((app / "log.json").exists)
    return json.loads((app / "log.json").read_text()), app


def test_three_clients(link):
    log, folder = log_of(link, "clients", CLIENTS, 3)
    assert log == [3, 3, 0]
    for number in range(3):
        assert spends(folder / f"client-{number}") == ["round 1", "round 2"]


def test_two_participants(link):
    log, folder = log_of(link, "participants", PARTICIPANTS, 2)
    assert log == [[1, 1, ""], [2, 1, ""]]
    for number in range(2):
        expected = [f"epoch {epoch} {what}" for epoch in (0, 1) for what in ("features", "training")]
        assert spends(folder / f"participant-{number}") == expected


def test_records_at_a_trusted_server(link):
    log, folder = log_of(link, "records", RECORDS, 3)
    assert log == [3, 3]
    entries = Ledger(folder / "budget.db").history()
    assert [(entry.unit, entry.planned) for entry in entries] == [("record", 2)] * 2
