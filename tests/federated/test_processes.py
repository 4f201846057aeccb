"""Horizontal learning between real processes on this machine, one of which is killed in the middle of a round."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from matrixdp import Ledger

CLIENTS, ROUNDS, VICTIM = 3, 3, 0

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "tiny"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "tiny:server"
clientapp = "tiny:client"
"""

# The victim stops between its spend and its draw, in the first round after one is complete, and waits to be killed.
APP = """
import os, time
from pathlib import Path
import numpy as np, torch
from torch import nn
from matrixdp import Budget
from matrixdp.federated import ClientLevel, LocalTraining, horizontal
from matrixdp.learn.noise import ParameterNoise

FOLDER = Path({folder!r})

class SlowNoise(ParameterNoise):
    def add_(self, flat):
        if os.environ.get("VICTIM") and (FOLDER / "rounds").exists():
            (FOLDER / "draft").write_text(str(os.getpid()))
            (FOLDER / "draft").rename(FOLDER / "victim")
            time.sleep(600)
        super().add_(flat)

class Slow(ClientLevel):
    def noise(self, model, generator=None):
        made = super().noise(model, generator)
        made.__class__ = SlowNoise
        return made

def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)

def data(number):
    x = np.random.default_rng(number).normal(size=(200, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)

def on_round(done):
    with (FOLDER / "rounds").open("a") as file:
        file.write(f"{{done}}\\n")

privacy = Slow(budget=Budget(8.0, 1e-5), rounds={rounds}, clip=0.1)
client = horizontal.client_app(
    model, data, clients={clients}, training=LocalTraining(), privacy=privacy, folder=FOLDER / "clients"
)
server = horizontal.server_app(
    model, clients={clients}, rounds={rounds}, min_replies=2, timeout=300, patience=6, wait=120, on_round=on_round,
    on_end=lambda network: np.save(FOLDER / "weights.npy", network.weight.detach().numpy()),
)
"""


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def until(condition, seconds, processes, logs):
    """Waits, and shows the logs where it was in vain."""
    end = time.monotonic() + seconds
    while not condition():
        ended = [process.args[0] for process in processes if process.poll() is not None]
        if time.monotonic() > end or ended:
            tails = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(logs.glob("*.log")))
            pytest.fail(f"in vain for {seconds} s; ended: {ended}\n{tails}")
        time.sleep(0.2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    for name in ("app", "home"):
        (folder / name).mkdir()
    (folder / "app" / "pyproject.toml").write_text(PROJECT)
    (folder / "app" / "tiny.py").write_text(APP.format(folder=str(folder), rounds=ROUNDS, clients=CLIENTS))
    link, *ports = free_ports(CLIENTS + 1)
    address = f"127.0.0.1:{link}"
    (folder / "home" / "config.toml").write_text(f'[superlink.here]\naddress = "{address}"\ninsecure = true\n')
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",  # Flower starts its own programs by name
    }
    processes = []

    def start(name, *command, **more):
        with (folder / f"{name}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [str(programs / command[0]), *command[1:]],
                    env={**environment, **more},
                    cwd=folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return processes[-1]

    try:
        start(
            "link", "flower-superlink", "--insecure", "--port", str(link), "--disable-runtime-dependency-installation"
        )
        nodes = [
            start(
                f"node-{number}",
                "flower-supernode",
                "--insecure",
                *("--superlink", address, "--port", str(port)),
                *("--node-config", f"partition-id={number} num-partitions={CLIENTS}"),
                **({"VICTIM": "1"} if number == VICTIM else {}),
            )
            for number, port in enumerate(ports)
        ]
        until(lambda: "running on" in (folder / "link.log").read_text().lower(), 60, processes, folder)
        command = [programs / "flwr", "run", "app", "here", "--format", "json"]
        started = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
        assert started.returncode == 0, started.stdout + started.stderr
        until((folder / "victim").exists, 300, processes, folder)
        os.kill(int((folder / "victim").read_text()), signal.SIGKILL)
        nodes[VICTIM].kill()
        nodes[VICTIM].wait()
        processes.remove(nodes[VICTIM])
        until((folder / "weights.npy").exists, 300, processes, folder)
        yield folder
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def spends(folder, number):
    return [
        entry.note.split(" ", 2)[2] for entry in Ledger(folder / "clients" / f"client-{number}" / "budget.db").history()
    ]


def test_the_run_goes_on_without_the_killed_client(run):
    rounds = (run / "rounds").read_text().splitlines()
    assert len(rounds) == ROUNDS
    assert all(int(line.split()[2]) >= 2 for line in rounds)
    assert np.all(np.isfinite(np.load(run / "weights.npy")))


def test_the_others_have_paid_once_for_every_round(run):
    for number in set(range(CLIENTS)) - {VICTIM}:
        assert spends(run, number) == [f"round {n}" for n in range(1, ROUNDS + 1)]


def test_the_killed_client_has_paid_for_the_round_in_which_it_was_killed_and_sent_nothing_in_it(run):
    paid = spends(run, VICTIM)
    assert len(set(paid)) == len(paid) > 0
    (file,) = (run / "clients" / f"client-{VICTIM}").glob("run-*.npz")
    with np.load(file) as stored:
        assert int(stored["step"]) < int(paid[-1].split()[1])
    assert json.dumps(paid) == json.dumps(sorted(paid))
