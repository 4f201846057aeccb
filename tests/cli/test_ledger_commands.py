"""ledger: a budget in a file, from the command line."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from matrixdp import Budget, certify
from matrixdp.covariance import Isotropic
from matrixdp.noise.laws import Gaussian
from matrixdp.privacy.ledger import Ledger
from matrixdp.sensitivity import Frobenius

MOMENT = ("--query", "second-moment", "--norm", "1", "--delta", "1e-6", "--mechanism", "analytic")


@pytest.fixture
def file(tmp_path, call):
    path = tmp_path / "budget.db"
    result = call("ledger", "create", path, "--epsilon", "3", "--delta", "1e-6")
    assert result.exit_code == 0, result.stderr
    assert "epsilon 3, delta 1e-06" in result.stdout
    return path


def shown(call, file):
    result = call("ledger", "show", file, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_new_ledger_is_empty(call, file):
    assert Ledger(file).budget == Budget(3.0, 1e-6)
    found = shown(call, file)
    assert (found["spent"], found["entries"], found["relation"]) == (0.0, [], None)
    assert found["remaining"]["epsilon"] == 3.0
    assert "not fixed yet" in call("ledger", "show", file).stdout


def test_a_ledger_is_not_created_twice(refused, file):
    assert "exists already" in refused("ledger", "create", file, "--epsilon", "3", "--delta", "1e-6")


def test_a_relation_can_be_fixed_at_creation(call, refused, tmp_path):
    file = tmp_path / "replace.db"
    call("ledger", "create", file, "--epsilon", "1", "--delta", "1e-6", "--relation", "replace")
    assert call("ledger", "spend", file, "--mu", "0.1").exit_code == 0
    assert "relation" in refused("ledger", "spend", file, "--mu", "0.1", "--relation", "add/remove")
    assert len(Ledger(file).history()) == 1


def test_spends_by_hand(call, refused, file):
    result = call("ledger", "spend", file, "--mu", "0.5", "--relation", "add/remove", "--note", "a [bold] table")
    assert result.exit_code == 0, result.stderr
    assert "entry 1" in result.stdout
    training = ("--mu", "0.9", "--count", "300", "--sampling-rate", "0.001", "--note", "training")
    assert call("ledger", "spend", file, *training).exit_code == 0
    first, second = Ledger(file).history()
    assert (first.profile.mu, first.note, first.exact) == (0.5, "a [bold] table", False)
    assert (second.count, second.sampling_rate) == (300, 0.001)
    printed = call("ledger", "show", file).stdout
    assert "a [bold] table" in printed
    assert "2 entries" in printed
    assert "nothing was spent" in refused("ledger", "spend", file, "--mu", "0.5")
    assert len(Ledger(file).history()) == 2


def test_a_spend_from_a_certificate(call, refused, file, tmp_path):
    certificate = certify(Gaussian(Isotropic((2, 3), 4.0)), Frobenius(1.0))
    written = tmp_path / "moment.certificate.json"
    written.write_text(json.dumps(certificate.to_dict()))
    assert call("ledger", "spend", file, "--certificate", written).exit_code == 0
    (entry,) = Ledger(file).history()
    assert (entry.profile, entry.total_variation) == (certificate.profile, certificate.total_variation)
    assert (entry.exact, entry.shape, entry.noise) == (True, (2, 3), certificate.noise)
    assert "does not agree" in refused("ledger", "spend", file, "--certificate", written, "--relation", "replace")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "cannot be read"),
        ("[1]", "one JSON object"),
        ('{"mu": null, "relation": "replace"}', "has no mu"),
        ('{"mu": -1, "relation": "replace"}', "mu of certificate"),
        ('{"mu": 0.1}', "relation of certificate"),
        ('{"mu": 0.1, "relation": "replace", "shape": "2x3"}', "shape"),
        ('{"mu": 0.1, "relation": "replace", "total_variation": -1}', "total_variation"),
    ],
)
def test_bad_certificates_are_refused(refused, file, tmp_path, content, words):
    written = tmp_path / "bad.json"
    written.write_text(content)
    assert words in refused("ledger", "spend", file, "--certificate", written)
    assert Ledger(file).history() == []


@pytest.mark.parametrize(
    ("sampling", "safe", "words"),
    [("REPRODUCIBLE: from a generator", False, "seeded noise"), ("in floating point", False, "floating-point-safe")],
)
def test_certificates_that_cover_no_numbers_are_refused(refused, call, file, tmp_path, sampling, safe, words):
    written = tmp_path / "unsafe.json"
    content = {"mu": 0.1, "relation": "replace", "sampling": sampling, "float_safe": safe}
    written.write_text(json.dumps(content))
    assert words in refused("ledger", "spend", file, "--certificate", written)
    assert Ledger(file).history() == []
    written.write_text(json.dumps({**content, "sampling": "grid", "float_safe": True}))
    assert call("ledger", "spend", file, "--certificate", written).exit_code == 0


def test_a_series_is_shown_with_its_plan(call, file):
    certificate = certify(Gaussian(Isotropic((2, 3), 4.0)), Frobenius(1.0))
    for _ in range(2):
        Ledger(file).spend(certificate, "epoch", count=3, sampling_rate=0.1, series="plan", planned=7)
    assert call("ledger", "show", file).stdout.count("3 of 7") == 2
    assert [entry["planned"] for entry in shown(call, file)["entries"]] == [7, 7]
    assert "whole" in call("ledger", "verify", file).stdout


def test_bad_spends_are_refused(refused, file, tmp_path):
    assert "either --mu or --certificate" in refused("ledger", "spend", file)
    assert "relation of --mu" in refused("ledger", "spend", file, "--mu", "0.1")
    assert "mu of --mu" in refused("ledger", "spend", file, "--mu", "nan", "--relation", "replace")
    assert "cannot be read" in refused("ledger", "spend", file, "--certificate", tmp_path / "missing.json")
    for command in ("show", "verify", "export"):
        assert "there is no ledger" in refused("ledger", command, tmp_path / "missing.db")


def test_export_and_verify(call, refused, file, tmp_path):
    call("ledger", "spend", file, "--mu", "0.1", "--relation", "replace")
    lines = [json.loads(line) for line in call("ledger", "export", file).stdout.splitlines()]
    assert [len(lines), lines[0]["epsilon"], lines[1]["mu"], lines[2]["entries"]] == [3, 3.0, 0.1, 1]
    head = lines[2]["head"]
    out = tmp_path / "ledger.jsonl"
    assert call("ledger", "export", file, "--out", out).stdout == ""
    assert out.read_text().count("\n") == 3
    assert "could not be written" in refused("ledger", "export", file, "--out", out)
    call("ledger", "spend", file, "--mu", "0.1")
    assert "whole" in call("ledger", "verify", file, "--head", head).stdout
    assert "does not contain" in refused("ledger", "verify", file, "--head", "0" * 64)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE entries SET mu = 0.01 WHERE number = 1")
        connection.commit()
    assert "changed by other means" in refused("ledger", "verify", file)


def test_a_release_is_charged(call, refused, file, people, tmp_path):
    released = ("release", people, *MOMENT, "--ledger", file, "--epsilon")
    result = call(*released, "2", "--output", tmp_path / "first.npy")
    assert result.exit_code == 0, result.stderr
    (entry,) = Ledger(file).history()
    written = json.loads((tmp_path / "first.certificate.json").read_text())
    assert (entry.note, entry.profile.mu) == ("second-moment", written["mu"])
    assert np.load(tmp_path / "first.npy").shape == (2, 2)
    assert "nothing was spent" in refused(*released, "2.9", "--output", tmp_path / "second.npy")
    assert not (tmp_path / "second.npy").exists()
    assert "there is no ledger" in refused(
        "release", people, *MOMENT, "--ledger", tmp_path / "no.db", "--epsilon", "1", "--output", tmp_path / "third.npy"
    )
    assert len(Ledger(file).history()) == 1
