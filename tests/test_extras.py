"""Optional dependencies: the core runs without them, and a missing one is named with the command that installs it."""

import subprocess
import sys

import pytest

BLOCKED = (
    "dask", "distributed", "duckdb", "flwr", "matplotlib", "narwhals", "opacus", "pandas", "polars", "psycopg",
    "pyarrow", "shiny", "sklearn", "torch",
)  # fmt: skip
# a process in which these packages are not installed
BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
import importlib.util, matrixdp._extras
found = importlib.util.find_spec
matrixdp._extras.find_spec = lambda name: None if name.partition(".")[0] in {BLOCKED} else found(name)
sys.meta_path.insert(0, Blocker())
"""


def run(code):
    return subprocess.run([sys.executable, "-c", BLOCKER + code], capture_output=True, text=True, timeout=600)


def test_the_core_runs_without_any_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(
        "import numpy as np\n"
        "from matrixdp import Accountant, Budget, Ledger, calibrate, certify, compare, release\n"
        "from matrixdp.queries import second_moment\n"
        f"ledger = Ledger({str(tmp_path / 'b.db')!r}, Budget(3.0, 1e-6))\n"
        "out = release(*second_moment(np.eye(3), norm=1.0), Budget(1.0, 1e-6), ledger=ledger)\n"
        "from matrixdp.tables import Boolean, Domain, Table\n"
        "open('a.csv', 'w').write('a\\n1\\n')\n"
        "Table('a.csv', Domain({'a': Boolean()})).counts('a').release(Budget(1.0, 1e-6)).to_csv('b.csv')\n"
        "from typer.testing import CliRunner\n"
        "from matrixdp.cli import app\n"
        "setting = '--shape 2x2 --sensitivity frobenius:1 --epsilon 1 --delta 1e-6'.split()\n"
        "assert CliRunner().invoke(app, ['compare', *setting]).exit_code == 0\n"
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import matrixdp.sklearn", "sklearn"),
        ("import matrixdp.learn", "learn"),
        ("import matrixdp.federated", "federated"),
        ("import matrixdp.distributed", "distributed"),
        ("import matrixdp.plots", "plots"),
        ("import matrixdp.explorer", "explorer"),
        ("from matrixdp.tables import source_of; source_of(object())", "tables"),
        (
            "from matrixdp.tables import source_of; open('a.parquet', 'wb').close(); source_of('a.parquet').names",
            "tables",
        ),
        (
            "from matrixdp.tables import sql; open('a.duckdb', 'wb').close(); sql('a.duckdb', 'SELECT 1').names",
            "tables",
        ),
        ("from matrixdp.tables import sql; sql('postgresql://host/db', 'SELECT 1').names", "postgres"),
        ("from matrixdp.queries import load; open('a.parquet', 'wb').close(); load('a.parquet')", "tables"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(code, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(code)
    assert found.returncode == 1
    assert found.stderr.rstrip().endswith(f"pip install 'matrixdp[{extra}]'"), found.stderr
