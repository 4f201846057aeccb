"""One way to call the command line, shared by the tests of all commands."""

import numpy as np
import pytest
from typer.testing import CliRunner

from matrixdp.cli import app


@pytest.fixture(autouse=True)
def any_width(monkeypatch):
    """Lines are not wrapped, whatever the terminal of who runs the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def call():
    """Calls a command; the answer has exit_code, stdout and stderr."""
    runner = CliRunner()

    def invoke(*arguments):
        result = runner.invoke(app, [str(argument) for argument in arguments])
        # anything but a clean exit would have been a traceback on the screen
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        return result

    return invoke


@pytest.fixture
def refused(call):
    """Calls a command that must be refused with one line, and returns that line."""

    def invoke(*arguments):
        result = call(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        return result.stderr

    return invoke


@pytest.fixture
def people(tmp_path):
    """A CSV file of 50 records with two named columns between 0 and 1."""
    path = tmp_path / "people.csv"
    rows = np.random.default_rng(0).random((50, 2))
    np.savetxt(path, rows, delimiter=",", header="age,income", comments="")
    return path
