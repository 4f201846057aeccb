"""Flower's own processes on this machine: a SuperLink, SuperNodes, and apps that are started by `flwr run`."""

import itertools
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from matrixdp import Ledger

VICTIM = 1  # the node that knows that it will be killed

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "{name}:server"
clientapp = "{name}:client"
"""

# Flower takes a minute to notice that a process of an app is gone, and here half of it, which is also the time that it
# has to start. A node that is gone stays in the list. An idle node looks for work every 3 s, and here more often.
HURRY = """
import os, time
from flwr.common import constant
constant.HEARTBEAT_CALL_TIMEOUT, constant.HEARTBEAT_PATIENCE = 25, 1 if "VICTIM" in os.environ else 10_000
sleep = time.sleep
time.sleep = lambda seconds: sleep(0.2 if seconds == 3 else seconds)
"""


# Before Flower 1.41, each API has an address of its own.
ONE_PORT = tuple(map(int, version("flwr").split(".")[:2])) >= (1, 41)


class Link:
    """A SuperLink and its SuperNodes, each a process; with "--simulation", nodes are simulated by Ray."""

    def __init__(self, folder, *options):
        self.folder, self.processes, self.programs = folder, [], Path(sys.executable).parent
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",  # Flower starts its own programs by name
        }
        self.address = control = f"127.0.0.1:{free_port()}"
        if ONE_PORT:
            places = ("--port", control.split(":")[1], "--disable-runtime-dependency-installation")
        else:
            control, apps = (f"127.0.0.1:{free_port()}" for _ in range(2))
            places = ("--fleet-api-address", self.address, "--control-api-address", control)
            places += ("--serverappio-api-address", apps)
        (folder / "config.toml").write_text(f'[superlink.here]\naddress = "{control}"\ninsecure = true\n')
        (folder / "sitecustomize.py").write_text(HURRY)
        self._start("link", "flower-superlink", *places, *options)

    def start_node(self, number):
        port = str(free_port())
        own = ("--port", port) if ONE_PORT else ("--clientappio-api-address", f"127.0.0.1:{port}")
        place = ("--superlink", self.address, *own)
        partition = ("--node-config", f"partition-id={number}")
        victim = str(int(number == VICTIM))
        return self._start(f"node-{number}", "flower-supernode", *place, *partition, VICTIM=victim)

    def _start(self, name, program, *options, **environment):
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [self.programs / program, "--insecure", *options],
                env={**self.environment, **environment},
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def install(self, name, code, **settings):
        """An app in a folder, which is also where it leaves what the tests look at."""
        app = self.folder / name
        app.mkdir()
        (app / "pyproject.toml").write_text(PROJECT.format(name=name))
        (app / f"{name}.py").write_text(code.format(folder=str(app), **settings))
        return app

    def run(self, app, *options):
        ready = "running on" if ONE_PORT else "starting control api"
        self.wait(lambda: ready in (self.folder / "link.log").read_text().lower())
        command = [self.programs / "flwr", "run", app, "here", "--format", "json", *options]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def wait(self, condition, seconds=600):
        """Waits, and shows the logs where it was in vain."""
        end = time.monotonic() + seconds
        while not condition():
            ended = [process.args[0].name for process in self.processes if process.poll() is not None]
            if time.monotonic() > end or ended:
                logs = sorted(self.folder.glob("*.log"))
                tails = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in logs)
                pytest.fail(f"in vain for {seconds} s; ended: {ended}\n{tails}")
            time.sleep(0.2)

    def kill(self, process):
        process.kill()
        process.wait()
        self.processes.remove(process)

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# Below the ports that the system gives to connections, which could take one before Flower listens there. Other workers
# with tests, started at about the same time, begin elsewhere.
PORTS = itertools.count(20_000 + 16 * (os.getpid() % 750))


def free_port():
    for port in PORTS:
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def spends(folder):
    return [entry.note.split(", plan ")[0].split(" ", 2)[2] for entry in Ledger(folder / "budget.db").history()]
