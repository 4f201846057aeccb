"""ledger: a budget in a file, from the command line."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from matrixdp import Budget, Certificate, calibrate, certify
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.privacy import spherical
from matrixdp.privacy.drawing import Drawing
from matrixdp.privacy.guarantee import Guarantee
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
    assert (found["spent"], found["entries"], found["adjacency"]) == (0.0, [], None)
    assert found["remaining"]["epsilon"] == 3.0
    assert "not fixed yet" in call("ledger", "show", file).stdout


def test_a_ledger_is_not_created_twice(refused, file):
    assert "exists already" in refused("ledger", "create", file, "--epsilon", "3", "--delta", "1e-6")


def test_an_adjacency_can_be_fixed_at_creation(call, refused, tmp_path):
    file = tmp_path / "replace.db"
    call("ledger", "create", file, "--epsilon", "1", "--delta", "1e-6", "--adjacency", "replace")
    assert call("ledger", "spend", file, "--mu", "0.1").exit_code == 0
    assert "adjacency" in refused("ledger", "spend", file, "--mu", "0.1", "--relation", "add/remove")
    assert len(Ledger(file).history()) == 1


@pytest.mark.slow
def test_spends_by_hand(call, refused, file):
    result = call("ledger", "spend", file, "--mu", "0.5", "--adjacency", "add/remove", "--note", "a [bold] table")
    assert result.exit_code == 0, result.stderr
    assert "entry 1" in result.stdout
    training = ("--mu", "0.9", "--count", "300", "--sampling-rate", "0.001", "--note", "training")
    assert call("ledger", "spend", file, *training).exit_code == 0
    first, second = Ledger(file).history()
    assert (first.profile.mu, first.note, first.stated) == (0.5, "a [bold] table", True)
    assert (second.count, second.sampling_rate) == (300, 0.001)
    printed = call("ledger", "show", file).stdout
    assert "a [bold] table" in printed
    assert "2 entries" in printed
    assert "nothing was spent" in refused("ledger", "spend", file, "--mu", "0.5")
    assert len(Ledger(file).history()) == 2


def test_a_spend_from_a_certificate(call, refused, file, tmp_path):
    certificate = certify(Gaussian(Isotropic((2, 3), 4.0)), Frobenius(1.0))
    written = tmp_path / "moment.certificate.json"
    certificate.save(written)
    assert call("ledger", "spend", file, "--certificate", written).exit_code == 0
    (entry,) = Ledger(file).history()
    assert (entry.profile, entry.total_variation) == (certificate.profile, certificate.total_variation)
    assert entry.certificate.to_json() == certificate.to_json()
    assert entry.certificate.verify()
    assert "must be that of the certificate" in refused(
        "ledger", "spend", file, "--certificate", written, "--relation", "replace"
    )


def test_a_spend_from_a_certificate_of_noise_that_is_not_gaussian(call, file, tmp_path):
    certificate = certify(
        calibrate("spherical", shape=(6,), sensitivity=Frobenius(1.0), budget=Budget(0.5, 1e-6)), Frobenius(1.0)
    )
    certificate.save(tmp_path / "spherical.json")
    assert call("ledger", "spend", file, "--certificate", tmp_path / "spherical.json").exit_code == 0
    assert Ledger(file).history()[0].profile == certificate.profile


@pytest.mark.parametrize("field", ["mu", "total_variation", "delta", "epsilon"])
def test_a_certificate_that_is_not_true_is_refused(refused, file, tmp_path, field):
    content = json.loads(certify(Gaussian(Isotropic((2, 3), 4.0)), Frobenius(1.0)).to_json())
    content["guarantee"][field] = content["guarantee"][field] * 0.9 if content["guarantee"][field] else 1e-9
    written = tmp_path / "changed.json"
    written.write_text(json.dumps(content))
    assert "does not verify" in refused("ledger", "spend", file, "--certificate", written)
    assert Ledger(file).history() == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "not JSON"),
        ("[1]", "JSON object"),
        ('{"mu": 0.1, "adjacency": "replace"}', "JSON object with an entry"),
        ('{"matrixdp": "certificate", "schema": 99}', "upgrade matrixdp"),
        ('{"matrixdp": "certificate", "schema": 1}', "lacks an entry"),
    ],
)
def test_bad_certificates_are_refused(refused, file, tmp_path, content, words):
    written = tmp_path / "bad.json"
    written.write_text(content)
    assert words in refused("ledger", "spend", file, "--certificate", written)
    assert Ledger(file).history() == []


@pytest.mark.parametrize(
    ("drawing", "words"),
    [(Drawing(reproducible=True), "seeded noise"), (Drawing(), "floating-point-safe")],
)
def test_certificates_that_cover_no_numbers_are_refused(refused, file, tmp_path, drawing, words):
    written = tmp_path / "unsafe.json"
    certify(Gaussian(Isotropic((2, 3), 4.0)), Frobenius(1.0), drawing=drawing).save(written)
    assert words in refused("ledger", "spend", file, "--certificate", written)
    assert Ledger(file).history() == []


def test_names_and_a_key(call, refused, file):
    words = ("--dataset", "survey", "--analyst", "A. Person", "--purpose", "report", "--unit", "user", "--key", "5eed")
    spend = ("ledger", "spend", file, "--mu", "0.1", "--adjacency", "add/remove", *words)
    assert call(*spend).stdout == call(*spend).stdout  # the second time nothing is charged
    (entry,) = Ledger(file).history()
    assert (entry.dataset, entry.analyst, entry.purpose, entry.unit) == ("survey", "A. Person", "report", "user")
    assert "another spend" in refused(*spend, "--count", "2")
    printed = " ".join(call("ledger", "show", file).stdout.split())
    assert "survey" in printed
    assert "stated" in printed


@pytest.mark.slow
def test_everything_is_shown_within_80_columns(call, file):
    ledger = Ledger(file)
    certificate = certify(
        Gaussian(Isotropic((2, 3), 50.0), source="analytic [balle2018improving, Theorem 8]"), Frobenius(1.0)
    )
    words = {"dataset": "patients of the year 2026", "analyst": "A. Person", "purpose": "x" * 90}
    ledger.spend(certificate, "a note " * 20, **words)
    ledger.spend(certificate, "training", count=10000, sampling_rate=1 / 234, series="s", planned=70200)
    ledger.spend(Guarantee(spherical.Profile(6, 6.0, 1.0, 200.0, 1.0), "add/remove"))
    printed = call("ledger", "show", file).stdout
    assert max(len(line) for line in printed.splitlines()) <= 80
    for shown in ("10000 of 70200", "balle2018improving", "year 2026", "rate 0.00427", "stated"):
        assert shown in printed
    assert printed.count("x") == 90


def test_a_series_is_shown_with_its_plan(call, file):
    certificate = certify(Gaussian(Isotropic((2, 3), 4.0)), Frobenius(1.0))
    for _ in range(2):
        Ledger(file).spend(certificate, "epoch", count=3, sampling_rate=0.1, series="plan", planned=7)
    assert call("ledger", "show", file).stdout.count("3 of 7") == 2
    assert [entry["planned"] for entry in shown(call, file)["entries"]] == [7, 7]
    assert "intact" in call("ledger", "verify", file).stdout


def test_bad_spends_are_refused(refused, file, tmp_path):
    assert "one of --mu, --rho, --epsilon" in refused("ledger", "spend", file)
    assert "adjacency is missing" in refused("ledger", "spend", file, "--mu", "0.1")
    assert "--mu must be" in refused("ledger", "spend", file, "--mu", "nan", "--adjacency", "replace")
    assert "cannot be read" in refused("ledger", "spend", file, "--certificate", tmp_path / "missing.json")
    for command in ("show", "verify", "export"):
        assert "there is no ledger" in refused("ledger", command, tmp_path / "missing.db")


def test_export_and_verify(call, refused, file, tmp_path):
    call("ledger", "spend", file, "--mu", "0.1", "--adjacency", "replace")
    lines = [json.loads(line) for line in call("ledger", "export", file).stdout.splitlines()]
    assert [len(lines), lines[0]["epsilon"], lines[1]["charged_mu"], lines[2]["entries"]] == [3, 3.0, 0.1, 1]
    head = lines[2]["head"]
    out = tmp_path / "ledger.jsonl"
    assert "Written:" in call("ledger", "export", file, "--out", out).stdout
    assert out.read_text().count("\n") == 3
    assert verify_export(out.read_text().splitlines(), head)
    assert "exists already" in refused("ledger", "export", file, "--out", out)
    call("ledger", "spend", file, "--mu", "0.1")
    assert "intact" in call("ledger", "verify", file, "--head", head).stdout
    assert "does not contain" in refused("ledger", "verify", file, "--head", "0" * 64)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE documents SET content = replace(content, '0.1', '0.01')")
        connection.commit()
    assert "changed by other means" in refused("ledger", "verify", file)


def test_a_release_is_charged(call, refused, file, people, tmp_path):
    released = ("release", people, *MOMENT, "--ledger", file, "--epsilon")
    result = call(*released, "2", "--output", tmp_path / "first.npy")
    assert result.exit_code == 0, result.stderr
    (entry,) = Ledger(file).history()
    written = Certificate.load(tmp_path / "first.certificate.json")
    assert (entry.note, entry.profile) == ("second-moment", written.profile)
    assert entry.certificate.verify()
    assert np.load(tmp_path / "first.npy").shape == (2, 2)
    assert "nothing was spent" in refused(*released, "2.9", "--output", tmp_path / "second.npy")
    assert not (tmp_path / "second.npy").exists()
    assert "there is no ledger" in refused(
        "release", people, *MOMENT, "--ledger", tmp_path / "no.db", "--epsilon", "1", "--output", tmp_path / "third.npy"
    )
    assert len(Ledger(file).history()) == 1


def test_quotas_reservations_and_what_is_left(call, refused, file):
    record = ("ledger", "record", file, "--adjacency", "add/remove", "--analyst", "ada")
    assert call("ledger", "quota", file, "ada", "--epsilon", "1", "--per", "year").exit_code == 0
    assert call(*record, "--epsilon", "0.2", "--note", "elsewhere").exit_code == 0
    assert call("ledger", "reserve", file, "weekly", "--mu", "0.02", "--count", "5", "--analyst", "ada").exit_code == 0
    rows = json.loads(call("ledger", "left", file, "--mu", "0.01", "--json").stdout)
    assert [row["name"] for row in rows] == ["total", "ada"]
    assert rows[0]["releases"] > rows[1]["releases"] > 0
    printed = call("ledger", "left", file, "--analyst", "ada").stdout
    assert "per year" in printed
    assert "is reserved" in printed
    assert "with delta 0" in " ".join(printed.split())
    assert "5 of weekly" in call("ledger", "give-back", file, "weekly").stdout
    history = call("ledger", "history", file).stdout
    for words in ("quota ada: epsilon 1", "elsewhere", "reservation weekly", "given back: weekly"):
        assert words in history
    assert [each["number"] for each in json.loads(call("ledger", "history", file, "--json").stdout)] == [1, 2, 3, 4]
    assert "quota 'ada'" in refused(*record, "--mu", "0.3")
    assert "have spent already" in refused("ledger", "quota", file, "ada", "--epsilon", "0.1")
    assert "either --epsilon or --remove" in refused("ledger", "quota", file, "ada")
    assert "this one has no quota" in refused(*record[:-1], "eve", "--rho", "0.001")
    assert call("ledger", "quota", file, "ada", "--remove").exit_code == 0
    assert "ledger (none), got 'ada'" in refused("ledger", "quota", file, "ada", "--remove")
    assert call("ledger", "history", file, "--analyst", "eve").stdout == "No entries of eve.\n"
    assert "PostgreSQL" in refused("ledger", "grant", file, "somebody")
    assert verify_export(Ledger(file).export())


@pytest.mark.parametrize(
    ("name", "start"), [("page.html", "<!"), ("page.json", "{"), ("page.md", "# "), ("page", "# ")]
)
def test_a_statement_has_the_format_that_its_file_is_named_for(call, file, tmp_path, name, start):
    Ledger(file).record({"mu": 0.1}, adjacency="add/remove")
    assert "Written:" in call("ledger", "statement", file, "--out", tmp_path / name).stdout
    assert (tmp_path / name).read_text().startswith(start)


@pytest.mark.parametrize("form", ["markdown", "html", "json"])
def test_a_statement_of_a_year(call, refused, file, tmp_path, form):
    Ledger(file).record({"mu": 0.1}, "table <3>", adjacency="add/remove", analyst="ada", purpose="report")
    year, out = Ledger(file).history()[0].time[:4], tmp_path / "page"
    assert call("ledger", "statement", file, "--year", year, "--format", form, "--out", out).exit_code == 0
    text = out.read_text()
    assert Ledger(file).verify() in text
    assert "ada" in text
    assert ("&lt;3&gt;" in text) == (form == "html")
    if form == "json":
        found = json.loads(text)["deployment"]["privacy_loss"]["privacy_parameters"]
        assert found == {"epsilon": Ledger(file).spent(), "delta": 1e-6}
    else:
        assert "right in half of all cases by chance" in text
    assert "table" not in call("ledger", "statement", file, "--year", "1999", "--format", form).stdout
    assert "--format must" in refused("ledger", "statement", file, "--format", "pdf")


def test_a_release_carries_names(call, refused, file, people, tmp_path):
    Ledger(file).set_quota("ada", Budget(1.0, 1e-6))
    release = ("release", people, *MOMENT, "--epsilon", "0.5", "--ledger", file)
    assert "--analyst NAME" in refused(*release, "--output", tmp_path / "a.csv")
    names = ("--analyst", "ada", "--purpose", "report")
    assert call(*release, *names, "--output", tmp_path / "a.csv").exit_code == 0
    (entry,) = Ledger(file).history()
    assert (entry.analyst, entry.purpose) == ("ada", "report")
    assert "for a --ledger" in refused(*release[:-2], *names, "--output", tmp_path / "b.csv")
