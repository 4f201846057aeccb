"""The federated examples run, on made records and a grid in this process."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flower_grid import HereGrid, task  # noqa: F401
from matrixdp import Ledger

EXAMPLES = Path(__file__).parents[2] / "examples"


def made(test=False):
    """Records in the shape of Adult."""
    records = np.random.default_rng(test).uniform(size=(60, 105))
    return records, (records[:, 0] > 0.5).astype(np.int64)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(importlib.import_module("federated_adult"), "load_adult", made)
    return importlib.import_module


def play(apps, clients):
    server, client = apps
    server(HereGrid(client, clients), Context(7, 1, {}, RecordDict(), {}))


def test_clients_hide_their_records(example, tmp_path):
    play(example("federated_adult").apps(clients=2, rounds=1, folder=tmp_path), 2)
    assert [len(Ledger(tmp_path / f"client-{k}" / "budget.db").history()) for k in range(2)] == [1, 1]


def test_a_server_hides_the_clients(example, tmp_path, capsys):
    play(example("federated_clients").apps(clients=3, rounds=2, sampling_rate=1.0, folder=tmp_path), 3)
    assert "client" in capsys.readouterr().out
    entries = Ledger(tmp_path / "server.db").history()
    assert [entry.planned for entry in entries] == [2, 2]
    assert len({entry.series for entry in entries}) == 1
