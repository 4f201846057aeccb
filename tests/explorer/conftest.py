"""A made hospital, its domain and a ledger, in a folder of their own; and how the code that a view shows is run."""

import io
import shlex
from contextlib import redirect_stdout

import pytest
from typer.testing import CliRunner

import hospital
from matrixdp import Budget, Ledger
from matrixdp.cli import app


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder: patients.csv, domain.toml, and budget.db with epsilon 3."""
    monkeypatch.chdir(tmp_path)
    hospital.hospital(300).to_csv("patients.csv", index=False)
    (tmp_path / "domain.toml").write_text(hospital.domain(missing="out").to_toml())
    Ledger("budget.db", Budget(3.0, 1e-6))
    return tmp_path


@pytest.fixture
def run_python():
    """Runs a program; gives its names and what it printed."""

    def run(text):
        names, printed = {}, io.StringIO()
        with redirect_stdout(printed):
            exec(text, names)
        return names, printed.getvalue()

    return run


@pytest.fixture
def run_commands():
    """Runs lines for a shell, each with these options more; gives what the last one printed."""

    def run(text, *more):
        for line in text.splitlines():
            name, *words = shlex.split(line)
            assert name == "matrixdp"
            result = CliRunner().invoke(app, [*words, *more])
            assert result.exit_code == 0, result.output
        return result.output

    return run
