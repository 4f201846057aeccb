"""The audit command: what it prints, and its exit code."""

import json
import re

import pytest

from matrixdp import Budget, calibrate, certify
from matrixdp.sensitivity import Frobenius

HONEST = ("analytic", "--shape", "4x3", "--sensitivity", "frobenius:1", "--epsilon", "1", "--delta", "1e-6")
FALSE = ("r1smg", "--shape", "100", "--sensitivity", "frobenius:1", "--epsilon", "0.005", "--delta", "1e-5")


def test_an_honest_mechanism_is_not_rejected_with_exit_code_0(call):
    result = call("audit", *HONEST, "--samples", "3000")
    assert result.exit_code == 0
    for part in (
        "Audit of analytic [balle2018improving",
        "claim      epsilon 1, delta 1e-06",
        "truth      epsilon 1 at delta 1e-06",
        "3,000 outputs",
        "holds if the noise is Gaussian",
        "verdict    not rejected",
        "false alarms: at most 1e-06",
    ):
        assert " ".join(part.split()) in " ".join(result.stdout.split())
    (measured,) = re.findall(r"measured   epsilon at least (\S+)", result.stdout)
    assert 0.9 < float(measured) < 1


def test_a_false_claim_is_rejected_with_exit_code_1(call):
    result = call("audit", *FALSE, "--samples", "2000")
    assert result.exit_code == 1
    assert "verdict    rejected: the claim is false" in result.stdout
    assert "assumes nothing about the mechanism" in " ".join(result.stdout.split())


@pytest.mark.parametrize(("arguments", "code"), [(HONEST, 0), (FALSE, 1)])
def test_json(call, arguments, code):
    result = call("audit", *arguments, "--samples", "2000", "--confidence", "0.9999999", "--json")
    assert result.exit_code == code
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    shape = (4, 3) if code == 0 else (100,)
    budget = Budget(found["epsilon"], found["delta"])
    truth = certify(calibrate(arguments[0], shape=shape, sensitivity=Frobenius(1.0), budget=budget), Frobenius(1.0))
    assert found["mechanism"] == arguments[0]
    assert found["certificate"] == {
        "epsilon": truth.epsilon(budget.delta),
        "delta": truth.delta(budget.epsilon),
        "attained": True,
    }
    assert found["verdict"] == ("rejected" if code else "not rejected")
    assert (found["samples"], found["confidence"]) == (2000, 0.9999999)
    assert (found["delta_lower"] > budget.delta) == bool(code)


def test_options_and_the_method_reach_the_audit(call):
    setting = ("--shape", "4x3", "--sensitivity", "counts:1", "--epsilon", "1", "--delta", "1e-3", "--json")
    result = call("audit", "mvg", *setting, "--option", "gamma=3", "--method", "clopper-pearson", "--samples", "200")
    assert json.loads(result.stdout)["method"] == "clopper-pearson"
    assert result.exit_code == 0
    text = call("audit", "mvg", *setting[:-1], "--option", "gamma=3", "--samples", "200").stdout
    assert "delta below 1e-300 at epsilon 1" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--samples", "5"), "samples must be at least 20"),
        (("--confidence", "1"), "confidence must be at least 0.5"),
        (("--method", "best"), "method must be one of"),
        (("--epsilon", "nan"), "epsilon must be finite"),
        (("--option", "speed=3"), "'speed'"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(refused, change, message):
    for form in ([], ["--json"]):
        assert message in refused("audit", *HONEST, *change, *form)
    assert "analytic" in refused("audit", "gauss", *HONEST[1:])
