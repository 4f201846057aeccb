"""Queries and releases on a real cluster of two worker processes, some of which are killed."""

import base64
import math
import os
import signal
import subprocess
import sys

import cloudpickle
import dask.array as da
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distributed import Client, LocalCluster, wait
from matrixdp import Budget, Ledger, queries
from matrixdp.accounting.filter import RESERVE
from matrixdp.backends import dask as noise
from matrixdp.distributed import histogram, release, second_moment
from matrixdp.distributed import sum as sum_query
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.privacy import gaussian
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import Grid
from matrixdp.secure.kernels import add_noise
from matrixdp.sensitivity import Frobenius

BUDGET = Budget(1.0, 1e-6)
VALUES = np.random.default_rng(3).normal(size=(400, 50))
# Workers cannot import this file, so functions in it travel as code.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow  # a real cluster


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, memory_limit="800MiB", dashboard_address=None
    ) as started:
        yield started


@pytest.fixture
def client(cluster):
    with Client(cluster) as connected:
        connected.wait_for_workers(2)
        yield connected


def dies_once(block, marker, block_id=None):
    """Gives the block; but the first worker that comes to the third block is killed."""
    if block_id[0] == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return block


def deadly(marker):
    return da.from_array(VALUES, chunks=(100, 50)).map_blocks(dies_once, marker, meta=VALUES[:0])


def test_blocks_are_those_of_one_machine_under_the_same_key(client):
    key, grid, covariance = Key(), Grid(3), Isotropic(VALUES.shape, 2.0)
    got = noise.add_block_noise(da.from_array(VALUES, chunks=(128, 30)), covariance, grid, key).compute()
    for index, place in [((0, 0), np.s_[:128, :30]), ((3, 1), np.s_[384:, 30:])]:
        assert np.array_equal(got[place], add_noise(VALUES[place], 2.0, grid, key.derive(*index)))


def test_a_folder_is_queried_on_the_workers(client, tmp_path):
    frame = pd.DataFrame(VALUES[:, :4].copy(), columns=list("abcd"))
    for number in range(4):
        table = pa.Table.from_pandas(frame[100 * number : 100 * number + 100])
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=50)
    got = second_moment(tmp_path, norm=1.0)
    assert np.allclose(got.value, queries.second_moment(frame, norm=1.0).value, rtol=1e-12)
    got = histogram(tmp_path, edges=[-1, 0, 1], columns=["b"])
    assert np.array_equal(got.value, queries.histogram(frame, edges=[-1, 0, 1], columns=["b"]).value)
    frame.loc[399, "c"] = np.nan
    pq.write_table(pa.Table.from_pandas(frame[300:]), tmp_path / "3.parquet", row_group_size=50)
    with pytest.raises(InvalidInput, match=r"3\.parquet, row group 1: records, row 49, column 2: missing"):
        sum_query(tmp_path, norm=1.0)


def test_a_query_survives_a_worker(client, tmp_path):
    marker = tmp_path / "killed"
    got = second_moment(deadly(marker), norm=1.0)
    assert marker.exists()
    assert np.allclose(got.value, queries.second_moment(VALUES, norm=1.0).value, rtol=1e-12)


def test_a_release_survives_a_worker_with_the_same_noise(client, tmp_path):
    marker = tmp_path / "killed"
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    out = release(deadly(marker), Frobenius(1.0), BUDGET, ledger=ledger)
    held = out.value.persist()
    wait(held)
    assert marker.exists()
    before = held.compute()
    client.wait_for_workers(2)
    owners = client.who_has(held)
    victim = next(iter(owners.values()))[0]
    os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
    assert np.array_equal(held.compute(), before)  # the lost blocks were drawn again
    assert np.array_equal(out.value.compute(), before)
    assert not np.array_equal(before, release(deadly(marker), Frobenius(1.0), BUDGET).value.compute())
    assert len(ledger.history()) == 1


CLIENT = """
import sys
import dask.array as da
from distributed import Client
from matrixdp import Budget, Ledger
from matrixdp.distributed import release
from matrixdp.errors import BudgetExceeded
from matrixdp.sensitivity import OneRow

value, change, budget = da.ones((100, 10), chunks=50), OneRow(radius=1.0), Budget(0.5, 1e-6)
with Client(sys.argv[1]):
    for done in range(100):
        try:
            out = release(value, change, budget, ledger=Ledger(sys.argv[2]))
        except BudgetExceeded:
            break
        out.value.sum().compute()
print(done)
"""


def test_two_clients_together_never_pass_the_budget(cluster, tmp_path):
    path, total = tmp_path / "budget.db", Budget(2.0, 1e-6)
    ledger = Ledger(path, total)
    command = [sys.executable, "-c", CLIENT, cluster.scheduler_address, str(path)]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    released = [int(client.communicate(timeout=600)[0]) for client in clients]
    assert [client.returncode for client in clients] == [0, 0]
    assert sum(released) == len(ledger.history())
    each = [entry.profile.mu for entry in ledger.history()]
    most = float(gaussian.mu(total.epsilon, (1 - RESERVE) * total.delta))
    assert math.hypot(*each) <= most < math.hypot(*each, each[0])  # and the next would not have fitted
    assert len(each) > 2


def shown(client):
    """Everything that the cluster tells people: logs, names of tasks, their print-outs, and events."""
    tasks = client.run_on_scheduler(
        lambda dask_scheduler: repr([(t, t.run_spec) for t in dask_scheduler.tasks.values()])
    )
    stories = client.run(lambda dask_worker: repr(list(dask_worker.state.log)) + repr(dask_worker.state.tasks))
    return repr([client.get_scheduler_logs(), client.get_worker_logs(), client.get_events(), tasks, stories])


def forms(secret):
    """How bytes may look in text."""
    return secret.hex(), repr(secret)[2:-1], base64.b64encode(secret).decode()


def test_no_secret_is_shown_by_the_cluster(client, monkeypatch):
    made = []
    monkeypatch.setattr(noise, "Key", lambda: made.append(Key()) or made[-1])
    values = VALUES.copy()
    values[399, 0] = np.nan
    out = release(da.from_array(values, chunks=(100, 50)), Frobenius(1.0), BUDGET)
    held = out.value.persist()
    wait(held)
    with pytest.raises(InvalidInput, match=r"block \(3, 0\)"):
        held.compute()
    planted = os.urandom(32)
    client.run(lambda: __import__("logging").getLogger("distributed.worker").warning("%s", planted.hex()))
    text = shown(client)
    assert out.value.name in text
    assert planted.hex() in text  # so the search would find one
    secrets = [made[0].expose(), *(made[0].derive(i, 0).expose() for i in range(4))]
    graph = repr(dict(out.value.__dask_graph__()))
    for form in (form for secret in secrets for form in forms(secret)):
        assert form not in text
        assert form not in graph


def test_the_command_line_reads_a_folder_on_the_workers(cluster, tmp_path):
    from typer.testing import CliRunner

    from matrixdp.cli import app

    (tmp_path / "people").mkdir()
    for part in (0, 1):
        rows = pd.DataFrame(VALUES[200 * part : 200 * part + 200, :3], columns=["a", "b", "c"])
        pq.write_table(pa.Table.from_pandas(rows), tmp_path / "people" / f"{part}.parquet")
    output = tmp_path / "sum.npy"
    result = CliRunner().invoke(
        app,
        ["release", str(tmp_path / "people"), "--query", "sum", "--norm", "1", "--epsilon", "10", "--delta", "1e-4",
         "--scheduler", cluster.scheduler_address, "--output", str(output)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    exact = queries.sum(VALUES[:, :3], norm=1.0).value
    assert np.abs(np.load(output) - exact).max() < 5
