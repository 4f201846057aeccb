"""stream: a daily job, from the command line."""

import json

import numpy as np
import pytest

from matrixdp.accounting.ledger.ledger import Ledger

RATES = ("--epsilon", "1", "--delta", "1e-6")
WEEKLY = ("--steps", "28", "--sensitivity", "participation:1,7,4", "--adjacency", "add/remove")
QUICK = ("--mechanism", "toeplitz", "--option", "bands=3")


@pytest.fixture
def begun(tmp_path, call):
    path = tmp_path / "visits.stream"
    result = call("stream", "init", path, *WEEKLY, *RATES, *QUICK, "--shape", "3")
    assert result.exit_code == 0, result.stderr
    assert "Privacy certificate" in result.stdout
    return path


def day(tmp_path, numbers, name="today.csv"):
    path = tmp_path / name
    path.write_text(",".join(map(str, numbers)) + "\n")
    return path


def test_a_daily_job(tmp_path, call, begun):
    first = call("stream", "add", begun, day(tmp_path, [5, 6, 7]), "--step", "1", "--json")
    assert first.exit_code == 0, first.stderr
    answer = json.loads(first.stdout)
    assert answer["step"] == 1
    assert len(answer["value"]) == 3
    again = call("stream", "add", begun, day(tmp_path, [5, 6, 7]), "--step", "1", "--json")
    assert json.loads(again.stdout) == answer
    second = call("stream", "add", begun, day(tmp_path, [1, 1, 1]), "--output", tmp_path / "total.npy")
    assert second.exit_code == 0, second.stderr
    assert "Day 2, standard error" in second.stdout
    found = json.loads(call("stream", "show", begun, "--json").stdout)
    assert (found["steps"], found["released"]) == (28, 2)
    assert found["certificate"]["guarantee"]["keeps_budget"]
    np.testing.assert_array_equal(np.load(tmp_path / "total.npy"), found["answer"]["value"])
    assert json.loads(call("stream", "show", begun, "--step", "1", "--json").stdout)["answer"] == answer
    assert "Days released: 2, of 28" in call("stream", "show", begun).stdout


def test_numbers_of_days(tmp_path, call, begun):
    refused = call("stream", "init", tmp_path / "s", "--steps", "28,7", "--sensitivity", "participation:1", *RATES)
    assert refused.exit_code == 2
    assert "steps must be one number" in refused.stderr
    call("stream", "add", begun, day(tmp_path, [5, 6, 7]))
    for step in ("0", "2"):
        refused = call("stream", "show", begun, "--step", step)
        assert refused.exit_code == 2
        assert "step must be" in refused.stderr


def test_a_stream_with_a_ledger_and_no_end(tmp_path, call):
    call("ledger", "create", tmp_path / "budget.db", "--epsilon", "2", "--delta", "1e-6")
    path = tmp_path / "s"
    once = ("--steps", "unbounded", "--sensitivity", "participation:1", "--ledger", tmp_path / "budget.db")
    assert call("stream", "init", path, *once, *RATES).exit_code == 0
    assert "Days released: 0, without an end" in call("stream", "show", path).stdout
    refused = call("stream", "add", path, day(tmp_path, [3]))
    assert refused.exit_code == 2
    assert "ledger must be the one" in refused.stderr
    result = call("stream", "add", path, day(tmp_path, [3]), "--ledger", tmp_path / "budget.db", "--json")
    assert result.exit_code == 0, result.stderr
    assert len(Ledger(tmp_path / "budget.db").history()) == 1
    shown = call("stream", "show", path).stdout
    assert "guarantee  mu = 0.23669" in shown
    assert "Guarantee(" not in shown
    stated = json.loads(call("stream", "show", path, "--json").stdout)["certificate"]
    assert (stated["adjacency"], round(stated["mu"], 4)) == ("zero-out", 0.2367)
    assert call("stream", "add", path, day(tmp_path, [3]), "--json").exit_code == 0


def test_refusals(tmp_path, refused, begun):
    today = day(tmp_path, [918273, 6, 7])
    assert "exists already" in refused("stream", "init", begun, *WEEKLY, *RATES)
    assert "no stream" in refused("stream", "add", tmp_path / "none", today)
    assert "step must be 1" in refused("stream", "add", begun, today, "--step", "3")
    wrong = refused("stream", "add", begun, day(tmp_path, [918273, 6], "short.csv"))
    assert "shape (3,)" in wrong
    assert "918273" not in wrong
    assert "new .npy or .csv" in refused("stream", "add", begun, today, "--output", today)
    other = ("--steps", "28", "--sensitivity", "frobenius:1")
    assert "Participation" in refused("stream", "init", tmp_path / "s", *other, *RATES)
    assert "steps must be" in refused("stream", "init", tmp_path / "s", *WEEKLY[2:], "--steps", "2.5", *RATES)
    assert "workload must be" in refused("stream", "init", tmp_path / "s", *WEEKLY, *RATES, "--workload", "all")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("text", ["n/a\n", "nan\n", "1e\n", "n/a\n6\n7\n", "n/a,6,7\n", "a,b,c\n"])
def test_a_damaged_value_is_not_taken_for_a_header(tmp_path, call, refused, begun, text):
    today = tmp_path / "today.csv"
    today.write_text(text)
    refused("stream", "add", begun, today)
    assert "Days released: 0" in call("stream", "show", begun).stdout
