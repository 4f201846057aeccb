"""Plans and shared budgets on the command line: only with a ledger, which counts."""

import json
from types import SimpleNamespace

import pytest

from matrixdp import Budget, Entrywise
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.cli.release import _part

GRID = ("--edges", "0:1:4", "--edges", "0:1:3")


@pytest.fixture
def file(tmp_path, call):
    path = tmp_path / "budget.db"
    assert call("ledger", "create", path, "--epsilon", "1", "--delta", "1e-6").exit_code == 0
    return path


def test_a_plan_is_written_verified_and_carried_out_once(call, refused, file, people, tmp_path):
    plan = tmp_path / "plan.json"
    parts = ("--release", "4x3 of counts:1", "--release", "2x2 of rankone:1")
    result = call("ledger", "plan", file, *parts, "--weight", "1", "--weight", "2", "--out", plan)
    assert result.exit_code == 0, result.stderr
    assert "kept" in result.stdout
    assert call("verify", plan).exit_code == 0
    assert "exists already" in refused("ledger", "plan", file, *parts, "--out", plan)
    planned = ("--plan", plan, "--ledger", file, "--output")
    histogram = ("release", people, "--query", "histogram", *GRID, *planned)
    assert call(*histogram, tmp_path / "1.csv").exit_code == 0
    spent = Ledger(file).spent()
    assert "was planned for" in refused(*histogram, tmp_path / "2.csv")
    assert (
        call("release", people, "--query", "second-moment", "--norm", "1", *planned, tmp_path / "3.csv").exit_code == 0
    )
    assert Ledger(file).spent() == spent
    assert "charged before, with its plan" not in call("ledger", "show", file).stdout.splitlines()[3]
    assert "has no release of shape" in refused(
        "release", people, "--query", "histogram", "--edges", "0:1:4", "--columns", "0", *planned, tmp_path / "4.csv"
    )


def test_a_shared_budget_is_counted(call, refused, file, people, tmp_path):
    given = ("release", people, "--query", "histogram", *GRID, "--epsilon", "1", "--delta", "1e-6")
    shared = (*given, "--shared", "2", "--like", "counts:1", "--ledger", file, "--output")
    for name in ("1.csv", "2.csv"):
        result = call(*shared, tmp_path / name)
        assert result.exit_code == 0, result.stderr
    assert "planned for 2 releases" in refused(*shared, tmp_path / "3.csv")
    assert "charged" in call("ledger", "show", file).stdout
    assert "need --ledger" in refused(*given, "--shared", "2", "--output", tmp_path / "4.csv")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give --epsilon and --delta, or a --plan"),
        (("--epsilon", "1"), "give --epsilon and --delta, or a --plan"),
        (("--epsilon", "1", "--delta", "1e-6", "--like", "counts:1"), "goes with --shared"),
        (("--plan", "nothing.json"), "need --ledger"),
    ],
)
def test_budgets_that_are_not_whole_are_refused(refused, people, tmp_path, options, words):
    assert words in refused("release", people, "--query", "histogram", *GRID, *options, "--output", tmp_path / "1.csv")


def test_a_plan_that_is_not_one_is_refused(call, refused, file, people, tmp_path):
    plan = tmp_path / "plan.json"
    assert "must look like" in refused("ledger", "plan", file, "--release", "counts:1", "--out", plan)
    assert call("ledger", "plan", file, "--release", "4x3 of counts:1", "--out", plan).exit_code == 0
    release = ("release", people, "--query", "histogram", *GRID, "--ledger", file, "--output", tmp_path / "1.csv")
    assert "fixes the budget" in refused(*release, "--plan", plan, "--epsilon", "1")
    assert "cannot be read" in refused(*release, "--plan", tmp_path / "none.json")
    content = json.loads(plan.read_text())
    content["parts"][0]["count"] = 2
    plan.write_text(json.dumps(content))
    assert "does not verify" in refused(*release, "--plan", plan)
    assert not Ledger(file).history()


def test_an_answer_takes_the_part_with_its_own_bounds():
    sets = Entrywise([1.0, 8.0]), Entrywise([8.0, 1.0])
    plan = Budget(1.0, 1e-6).plan(sets, shapes=[(2,), (2,)])
    for part, sensitivity in zip(plan, sets, strict=True):
        assert _part(plan, SimpleNamespace(shape=(2,), sensitivity=sensitivity)) is part
