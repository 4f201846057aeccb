"""compare, calibrate, and what all commands share: help, version, errors."""

import json
import math
import re
import subprocess
import sys
from importlib.metadata import entry_points

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from matrixdp import Budget, calibrate, certify, compare, mechanisms
from matrixdp.cli import COMMANDS, _Commands, show
from matrixdp.errors import MatrixDPError
from matrixdp.sensitivity import Counts, Frobenius

HISTOGRAM = ("--shape", "89x89", "--sensitivity", "counts:1", "--epsilon", "0.5", "--delta", "1e-7")


@pytest.mark.parametrize("command", [[]] + [[command.__name__] for command in COMMANDS])
def test_help(call, command):
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_the_help_of_release_groups_its_options(call):
    """Those of tables are refused with --query, and those of matrices with --domain: so they have headings."""
    parts = re.split("╭─ ", call("release", "--help").stdout)
    (matrix,) = (part for part in parts if part.startswith("A matrix of numbers, by --query"))
    (table,) = (part for part in parts if part.startswith("A table of people's data, by --domain"))
    assert "--norm" in matrix
    assert "--norm" not in table
    assert "--contributions" in table
    assert "--contributions" not in matrix


def test_version(call):
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("matrixdp ")
    as_a_module = subprocess.run([sys.executable, "-m", "matrixdp", "--version"], capture_output=True, text=True)
    assert as_a_module.stdout == result.stdout


def test_unknown_options_commands_and_missing_ones_are_refused(call):
    for arguments in (
        ["--bad"],
        ["bad"],
        ["compare", *HISTOGRAM, "--bad", "1"],
        ["compare"],
        ["calibrate", *HISTOGRAM],
    ):
        result = call(*arguments)
        assert result.exit_code == 2
        assert result.stderr


def test_compare_prints_every_row_of_the_comparison(call):
    result = call("compare", *HISTOGRAM)
    assert result.exit_code == 0
    for row in compare((89, 89), Counts(1), Budget(0.5, 1e-7)):
        assert row.mechanism in result.stdout


PURE = ("--shape", "4", "--sensitivity", "l1:3,1,1", "--epsilon", "0.5", "--delta", "0")


def test_delta_0_is_pure_differential_privacy(call, people):
    found = json.loads(call("calibrate", "laplace", *PURE, "--json").stdout, parse_constant=pytest.fail)
    assert found["keeps_budget"]
    assert found["certificate"]["guarantee"]["delta"] == 0.0
    assert found["certificate"]["sensitivity"]["kind"] == "l1"
    refused = call("calibrate", "analytic", *PURE)
    assert refused.exit_code != 0
    assert "is not for delta = 0" in refused.stderr
    assert "laplace" in call("compare", *PURE).stdout
    assert "not rejected" in call("audit", "laplace", *PURE, "--samples", "2000").stdout
    given = ("--query", "histogram", "--edges", "0:1:4", "--columns", "0", "--mechanism", "laplace", *PURE[-4:])
    output = people.with_name("pure.csv")
    result = call("release", people, *given, "--output", output)
    assert result.exit_code == 0, result.stderr
    assert "pure differential privacy" in result.stdout
    assert call("verify", people.with_name("pure.certificate.json")).exit_code == 0
    ledger = people.with_name("budget.db")
    assert call("ledger", "create", ledger, *PURE[-4:]).exit_code == 0
    assert call("release", people, *given, "--output", people.with_name("again.csv"), "--ledger", ledger).exit_code == 0
    text = call("ledger", "show", ledger).stdout
    assert "epsilon 0.5 at delta 0" in text
    assert "Left for one release: epsilon 0" in text
    gaussian = ("--query", "histogram", "--edges", "0:1:4", "--columns", "0", "--epsilon", "0.1", "--delta", "1e-9")
    refused = call("release", people, *gaussian, "--output", people.with_name("no.csv"), "--ledger", ledger)
    assert refused.exit_code != 0
    assert "must be pure and drawn exactly" in refused.stderr


def test_guarantees_are_printed_rounded_up(call):
    """R1SMG's true delta here is 0.61804..., and three or four digits to the nearest would be below it."""
    budget, found = Budget(0.5, 1e-7), []
    comparison = compare((30,), Frobenius(1.0), budget, mechanisms=["r1smg"])
    true = comparison.rows[0].exact_delta
    assert float(f"{true:.3g}") < true
    assert float(f"{true:.4g}") < true
    setting = ("r1smg", "--shape", "30", "--sensitivity", "frobenius:1", "--epsilon", "0.5", "--delta", "1e-7")
    found.append(call("compare", "--mechanism", *setting).stdout.split("violated")[1].split()[2])
    for command, before in (("calibrate",), "epsilon its delta is "), (("audit", "--samples", "1000"), "1e-07, delta "):
        said = " ".join(call(*command, *setting).stdout.split())  # wherever lines are wrapped
        found.append(said.split(before)[1].split()[0].rstrip("."))
    assert all(float(number) >= true for number in found), (found, true)


def test_compare_as_json(call):
    result = call("compare", *HISTOGRAM, "--relation", "replace", "--json")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["adjacency"] == "replace"
    assert found["budget"] == {"epsilon": 0.5, "delta": 1e-7}
    assert found["shape"] == [89, 89]
    expected = compare((89, 89), Counts(1, relation="replace"), Budget(0.5, 1e-7)).to_dicts()
    assert found["mechanisms"] == json.loads(json.dumps(expected))


def test_compare_only_some_with_an_option(call):
    result = call(
        "compare", *HISTOGRAM, "--mechanism", "imgm", "--mechanism", "analytic", "--option", "releases=4", "--json"
    )
    rows = {row["mechanism"]: row for row in json.loads(result.stdout)["mechanisms"]}
    assert set(rows) == {"imgm", "analytic"}
    assert rows["imgm"]["root_mean_square"] == pytest.approx(2 * rows["analytic"]["root_mean_square"])


def test_calibrate_prints_noise_and_certificate(call):
    result = call("calibrate", "analytic", "--shape", "6x248", "--sensitivity", "frobenius:2.449",
                  "--epsilon", "1", "--delta", "1e-6")  # fmt: skip
    budget = Budget(1, 1e-6)
    law = calibrate("analytic", shape=(6, 248), sensitivity=Frobenius(2.449), budget=budget)
    assert result.exit_code == 0
    assert str(certify(law, Frobenius(2.449), budget)) in result.stdout
    assert f"std error  {law.standard_error[0, 0]:.6g} in every entry" in result.stdout
    assert f"95 % of the noise lies within +-{law.half_width()[0, 0]:.6g} in every entry" in result.stdout


def test_calibrate_prints_the_error_of_a_task(call):
    asked = ("--shape", "8", "--sensitivity", "counts:1", "--epsilon", "1", "--delta", "1e-6")
    least = compare((8,), Counts(1), Budget(1.0, 1e-6), workload="prefix").least_error
    told = call("calibrate", "auto", *asked, "--option", "workload=prefix").stdout
    assert f"expected squared error of the task: {least:.6g}" in told
    assert "of the task" not in call("calibrate", "auto", *asked).stdout


def test_calibrate_as_json(call):
    result = call("calibrate", "auto", *HISTOGRAM, "--json")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    law = calibrate("auto", shape=(89, 89), sensitivity=Counts(1), budget=Budget(0.5, 1e-7))
    assert found["standard_error"] == [law.root_mean_square] * 2
    assert found["half_width_95"] == [float(law.half_width(0.95)[0, 0])] * 2
    assert found["root_mean_square"] == law.root_mean_square
    assert found["expected_squared_error"] == law.expected_squared_error()
    assert found["keeps_budget"] is True
    assert found["certificate"] == certify(law, Counts(1), Budget(0.5, 1e-7)).to_dict()


def test_calibrate_says_when_the_noise_does_not_keep_the_budget(call, monkeypatch):
    stingy = mechanisms.base.recipe("stingy", source="nobody")(
        lambda shape, sensitivity, budget: mechanisms.analytic.propose(
            shape, sensitivity, Budget(2 * budget.epsilon, 1e-7)
        )
    )
    monkeypatch.setitem(mechanisms.RECIPES, "stingy", stingy)
    assert "does not keep epsilon 0.5" in call("calibrate", "stingy", *HISTOGRAM).stdout
    assert json.loads(call("calibrate", "stingy", *HISTOGRAM, "--json").stdout)["keeps_budget"] is False


def test_json_has_null_where_there_is_no_finite_number(capsys):
    show.document({"epsilon": math.inf, "rows": [{"std": math.nan}, 1.5, "inf"]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "epsilon": None,
        "rows": [{"std": None}, 1.5, "inf"],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--epsilon", "0"), "epsilon must be above 0"),
        (("--epsilon", "nan"), "epsilon must be finite"),
        (("--delta", "1"), "delta must be 0 (pure differential privacy) or above, and below 1"),
        (("--shape", "3x"), "shape must look like"),
        (("--shape", "999999999x99999999"), "shape must have at most 1e+09 entries"),
        (("--shape", "0x3"), "1 or above"),
        (("--sensitivity", "count:1"), "sensitivity must start with one of frobenius"),
        (("--sensitivity", "rankone:1", "--shape", "3x2"), "square"),
        (("--relation", "swap"), "add/remove, replace"),
        (("--option", "speed=3"), "'speed'"),
        (("--option", "speed"), "key=value"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(refused, change, message):
    for command in (["compare"], ["calibrate", "auto"]):
        for form in ([], ["--json"]):
            assert message in refused(*command, *HISTOGRAM, *change, *form)


def test_unknown_mechanisms_are_refused_with_the_known_ones(refused):
    for line in (refused("calibrate", "gauss", *HISTOGRAM), refused("compare", *HISTOGRAM, "--mechanism", "gauss")):
        assert "analytic" in line


def test_any_command_prints_its_errors_as_one_line_without_markup():
    app = typer.Typer(cls=_Commands)
    app.callback()(lambda: None)

    @app.command()
    def fail() -> None:
        raise MatrixDPError("first [bold]line[/bold],\nsecond line " + "x" * 300)

    result = CliRunner().invoke(app, ["fail"])
    assert result.exit_code == 2
    assert result.stderr == "error: first [bold]line[/bold], second line " + "x" * 300 + "\n"


def test_heavy_libraries_stay_out_of_help_and_compare():
    script = (
        "import sys\n"
        "from matrixdp.cli import app\n"
        f"for arguments in (['--help'], ['compare', *{HISTOGRAM!r}, '--json']):\n"
        "    try:\n"
        "        app(arguments)\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "heavy = {'pandas', 'matplotlib', 'sklearn', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_is_installed():
    (entry,) = entry_points(group="console_scripts", name="matrixdp")
    assert entry.value == "matrixdp.cli:main"
    assert callable(entry.load())


def test_array_options_reach_the_mechanism(call, tmp_path):
    weights = tmp_path / "weights.npy"
    np.save(weights, np.array([[1.0, 100.0]]))
    setting = ("--shape", "1x2", "--sensitivity", "entrywise:1", "--epsilon", "1", "--delta", "1e-6", "--json")
    plain, weighted = (
        json.loads(call("calibrate", "optimal", *setting, *option).stdout)["certificate"]["facts"]["noise"]
        for option in ((), ("--option", f"weights={weights}"))
    )
    assert plain != weighted


def test_what_is_missing_is_named_with_what_it_may_be(refused):
    assert '"all-ranges"' in refused("calibrate", "matrix-mechanism", *HISTOGRAM)


def test_calibrate_says_that_release_refuses_noise_that_is_not_floating_point_safe(call):
    setting = ("--shape", "3", "--sensitivity", "frobenius:1", "--epsilon", "1", "--delta", "1e-6")
    for mechanism, safe in (("l2", False), ("analytic", True)):
        text = " ".join(call("calibrate", mechanism, *setting).stdout.split())
        assert ("refuses this noise" in text) is not safe
        assert ("for the ideal law only" in text) is not safe
        found = json.loads(call("calibrate", mechanism, *setting, "--json").stdout)
        assert found["has_float_safe_sampler"] is safe
        assert ("ideal law only" in found["certificate"]["guarantee"]["covers"]) is not safe
