"""Both kinds of federated learning in Flower's simulation, in a process of its own: Ray leaves sockets and warnings."""

import json
import os
import subprocess
import sys

import pytest

from matrixdp import Ledger

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np, ray, torch
from flwr.simulation import run_simulation
from torch import nn
from matrixdp import Budget
from matrixdp.federated import ClientLevel, LocalTraining, SplitPlan, horizontal, vertical

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
x = rng.normal(size=(60, 6)).astype(np.float32)
y = (x @ np.array([1, 1, 1, 1, 1, 1]) > 0).astype(np.int64)
ray.shutdown, stop = lambda: None, ray.shutdown  # one Ray for both runs, as starting it takes longest
resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
log = {"rounds": [], "epochs": []}

def model(features=6):
    torch.manual_seed(0)
    return nn.Linear(features, 2)

privacy = ClientLevel(budget=Budget(8.0, 1e-5), rounds=2, clip=0.1, mechanism="idn", by_layer=True)
run_simulation(
    horizontal.server_app(model, clients=3, rounds=3, timeout=400, on_round=lambda r: log["rounds"].append(r.updates)),
    horizontal.client_app(
        model, lambda n: (x[n::3], y[n::3]), clients=3, training=LocalTraining(), privacy=privacy, folder=folder
    ),
    num_supernodes=3,
    backend_config=resources,
)

plan = SplitPlan(records=60, epochs=2, batch_size=30, budget=Budget(8.0, 1e-5))
run_simulation(
    vertical.server_app(
        lambda: model(6),
        lambda: y,
        plan=plan,
        evaluate=lambda outputs: {"accuracy": float((outputs.argmax(1).numpy() == y[:20]).mean())},
        on_epoch=lambda e: log["epochs"].append([e.number, len(e.metrics), e.ended]),
    ),
    vertical.client_app(
        lambda n: nn.Linear(3, 3, bias=bool(torch.manual_seed(n))),
        lambda n: (x[:, 3 * n : 3 * n + 3], x[:20, 3 * n : 3 * n + 3]),
        plan=plan,
        folder=folder,
    ),
    num_supernodes=2,
    backend_config=resources,
)
stop()
(folder / "log.json").write_text(json.dumps(log))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("simulation")
    settings = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(here / "home"), "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(here)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return here


def spends(folder):
    return [entry.note.split(", plan ")[0].split(" ", 2)[2] for entry in Ledger(folder / "budget.db").history()]


def test_three_clients(folder):
    assert json.loads((folder / "log.json").read_text())["rounds"] == [3, 3, 0]
    for number in range(3):
        assert spends(folder / f"client-{number}") == ["round 1", "round 2"]


def test_two_participants(folder):
    assert json.loads((folder / "log.json").read_text())["epochs"] == [[1, 1, ""], [2, 1, ""]]
    for number in range(2):
        expected = [f"epoch {epoch} {what}" for epoch in (0, 1) for what in ("features", "training")]
        assert spends(folder / f"participant-{number}") == expected
