"""release: a file in, a noisy matrix and its certificate out, or nothing at all."""

import hashlib
import inspect
import json
import os
import sys
import threading

import numpy as np
import pyarrow.parquet
import pytest
from scipy.stats import chi2

import distributed
from matrixdp import Accountant, Budget, Certificate, Frobenius, Ledger, certify, queries
from matrixdp.cli import files
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy import gaussian

BUDGET = ("--epsilon", "1", "--delta", "1e-6")
QUERIES = {
    "second-moment": (("--norm", "1"), (2, 2)),
    "covariance": (("--norm", "1", "--relation", "replace"), (2, 2)),
    "mean": (("--norm", "1", "--size", "50"), (2,)),
    "sum": (("--norm", "1"), (2,)),
    "histogram": (("--edges", "0:1:4", "--edges", "0,0.5,1"), (4, 2)),
    "identity": (("--low", "0", "--high", "1"), (50, 2)),
}


def read(path):
    if path.suffix == ".csv":
        return np.loadtxt(path, delimiter=",", ndmin=1)
    if path.suffix == ".npy":
        return np.load(path)
    return pyarrow.parquet.read_table(path).to_pandas().to_numpy()


@pytest.mark.parametrize("ending", [".csv", ".npy", ".parquet"])
@pytest.mark.parametrize("query", QUERIES)
def test_every_query_to_every_format(call, people, query, ending):
    given, shape = QUERIES[query]
    output = people.with_name(f"out{ending}")
    result = call("release", people, "--query", query, *given, *BUDGET, "--output", output)
    assert result.exit_code == 0, result.stderr
    assert "Privacy certificate" in result.stdout
    value = read(output)
    assert value.size == np.prod(shape)
    assert np.isfinite(value).all()
    certificate = json.loads(people.with_name("out.certificate.json").read_text(), parse_constant=pytest.fail)
    assert certificate["query"]["name"] == query
    assert certificate["facts"]["shape"] == list(shape)
    assert certificate["released"] == {"file": output.name, "sha256": hashlib.sha256(output.read_bytes()).hexdigest()}
    assert certificate["guarantee"]["epsilon"] <= 1.0
    assert certificate["guarantee"]["at_delta"] == 1e-6
    assert "was not compared: --value" in call("verify", people.with_name("out.certificate.json")).stdout
    verified = call("verify", people.with_name("out.certificate.json"), "--value", output)
    assert "was not compared" not in verified.stdout
    assert (verified.exit_code, "verified" in verified.stdout) == (0, True), verified.stdout
    assert not [path for path in people.parent.iterdir() if path.name.startswith(".matrixdp")]


def test_every_option_of_every_query_can_be_given():
    command = set(inspect.signature(sys.modules["matrixdp.cli.release"].release).parameters)
    for name in QUERIES:
        function = getattr(queries, name.replace("-", "_"))
        assert set(inspect.signature(function).parameters) <= command, name


def test_noise_has_the_certified_scale(call, tmp_path):
    """False alarm 1e-9: the squared norm of 900 noise entries is chi-square. 2/3 and 3/2 of the scale must be seen."""
    records, output = tmp_path / "records.npy", tmp_path / "out.npy"
    np.save(records, np.full((3, 2), 0.5))
    grid = ("--edges", "0:1:30", "--edges", "0:1:30")
    call("release", records, "--query", "histogram", *grid, *BUDGET, "--mechanism", "analytic", "--output", output)
    noise = np.load(output) * gaussian.mu(1.0, 1e-6)
    noise[15, 15] -= 3 * gaussian.mu(1.0, 1e-6)

    def plausible(entries):
        return chi2.ppf(5e-10, 900) < np.sum(entries**2) < chi2.isf(5e-10, 900)

    assert plausible(noise)
    assert not plausible(noise * 2 / 3)
    assert not plausible(noise * 3 / 2)


def test_json_is_the_certificate_and_nothing_else(call, people):
    output = people.with_name("out.csv")
    result = call("release", people, "--query", "sum", "--norm", "1", *BUDGET, "--output", output, "--json")
    assert json.loads(result.stdout) == json.loads(people.with_name("out.certificate.json").read_text())


def test_columns_relation_mechanism_and_options(call, people):
    output = people.with_name("out.npy")
    result = call("release", people, "--query", "second-moment", "--norm", "1", "--columns", "income", *BUDGET,
                  "--relation", "replace", "--mechanism", "imgm", "--option", "releases=4",
                  "--output", output, "--json")  # fmt: skip
    found = json.loads(result.stdout)
    assert np.load(output).shape == (1, 1)
    assert found["guarantee"]["adjacency"] == "replace"
    assert found["law"]["source"].startswith("imgm")
    half = gaussian.mu(1.0, 1e-6) / 2
    assert half * (1 - 1e-6) <= found["guarantee"]["mu"] <= half


def test_the_rest_of_the_options(call, people):
    cases = {
        "second-moment": (("--norm", "1", "--average", "--size", "100"), 0.1),
        "covariance": (("--norm", "1", "--center", "0.5,0.5", "--size", "100"), 0.1),
        "mean": (("--low", "0,0", "--high", "1,2", "--size", "10"), None),
        "histogram": (("--columns", "1", "--edges", "0:1:10"), None),
        "identity": (("--norm", "1", "--records-are", "columns"), 2.0),
    }
    for query, (given, radius) in cases.items():
        output = people.with_name(f"{query}.npy")
        result = call("release", people, "--query", query, *given, *BUDGET, "--output", output, "--json")
        assert result.exit_code == 0, result.stderr
        if radius is not None:
            assert f"norm at most {radius:g}" in json.loads(result.stdout)["facts"]["change"]
    assert np.load(people.with_name("histogram.npy")).shape == (10,)


def test_the_certificate_says_what_was_asked(call, people):
    given = ("--columns", "age,1", "--edges", "0:1:2", "--edges", "0,0.25,1", "--relation", "replace")
    call("release", people, "--query", "histogram", *given, *BUDGET, "--output", people.with_name("out.npy"))
    certificate = json.loads(people.with_name("out.certificate.json").read_text())
    assert certificate["query"] == {
        "name": "histogram",
        "parameters": {
            "edges": [{"array": [0, 0.5, 1]}, {"array": [0, 0.25, 1]}],
            "columns": ["age", 1],
            "adjacency": "replace",
        },
    }


@pytest.mark.filterwarnings("default::UserWarning")
def test_warnings_are_one_line_and_leave_json_alone(call, people):
    output = people.with_name("out.csv")
    result = call("release", people, "--query", "sum", "--columns", "age", "--low", "0", "--high", "1", "--epsilon",
                  "1", "--delta", "0.01", "--output", output, "--json")  # fmt: skip
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: with delta 0.01")
    assert result.stderr.count("\n") == 1
    assert json.loads(result.stdout)["query"]["name"] == "sum"


def test_an_empty_list_of_columns_is_not_all_of_them(refused, people):
    output = people.with_name("out.csv")
    line = refused("release", people, "--query", "sum", "--norm", "1", "--columns", "", *BUDGET, "--output", output)
    assert "has no column ''" in line


@pytest.mark.parametrize("taken", ["out.csv", "out.certificate.json"])
def test_nothing_is_overwritten(refused, people, taken):
    people.with_name(taken).write_text("precious")
    before = sorted(path.name for path in people.parent.iterdir())
    line = refused("release", people, "--query", "sum", "--norm", "1", *BUDGET, "--output", people.with_name("out.csv"))
    assert taken in line
    assert "exists already and is not replaced" in line
    assert people.with_name(taken).read_text() == "precious"
    assert sorted(path.name for path in people.parent.iterdir()) == before


def stated(shape, std=1.0):
    return certify(Gaussian(Isotropic(shape, std)), Frobenius(1.0))


def write(output, value, std=1.0):
    with files.reserved(output, stated(value.shape, std)) as place:
        place.publish(value)


@pytest.mark.parametrize("step", ["_write_matrix", "_write_certificate"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch, step, failure):
    def fail(file, *_):
        file.write(b"half")
        raise failure

    monkeypatch.setattr(files, step, fail)
    with pytest.raises(MatrixDPError if isinstance(failure, OSError) else KeyboardInterrupt):
        write(tmp_path / "out.csv", np.zeros((2, 2)))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_one_line(refused, people, monkeypatch):
    def fail(file, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_certificate", fail)
    line = refused("release", people, "--query", "sum", "--norm", "1", *BUDGET, "--output", people.with_name("out.csv"))
    assert "No space left on device" in line
    assert [path.name for path in people.parent.iterdir()] == ["people.csv"]


@pytest.mark.parametrize("lost", [".csv", ".json"])
def test_a_name_taken_after_the_reservation_leaves_neither_file(tmp_path, lost):
    with files.reserved(tmp_path / "out.csv", stated((2, 2))) as place:
        taken = place.output if lost == ".csv" else files.certificate_path(place.output)
        taken.write_text("precious")
        with pytest.raises(MatrixDPError, match="could not be written"):
            place.publish(np.zeros((2, 2)))
    (left,) = tmp_path.iterdir()
    assert (left.suffix, left.read_text()) == (lost, "precious")


def test_a_second_rename_that_fails_takes_the_certificate_away_again(tmp_path, monkeypatch):
    replace = os.replace

    def fail(draft, target):
        if target.suffix == ".csv":
            raise OSError("the folder is gone")
        replace(draft, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(MatrixDPError, match="could not be written"):
        write(tmp_path / "out.csv", np.zeros((2, 2)))
    assert list(tmp_path.iterdir()) == []


def test_of_many_writers_one_wins_with_its_own_certificate(tmp_path):
    start = threading.Barrier(8)
    won = []

    def attempt(number):
        start.wait()
        try:
            write(tmp_path / "out.npy", np.full((2, 2), float(number)), std=number + 1.0)
        except MatrixDPError:
            return
        won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = won
    assert np.load(tmp_path / "out.npy")[0, 0] == winner
    assert Certificate.load(tmp_path / "out.certificate.json").law.root_mean_square == winner + 1.0


def test_every_digit_survives(tmp_path):
    value = np.random.default_rng(0).standard_normal((3, 4)) * 1e-7
    for ending in files.FORMATS:
        write(tmp_path / f"{ending[1:]}{ending}", value)
        np.testing.assert_array_equal(read(tmp_path / f"{ending[1:]}{ending}"), value)


@pytest.mark.parametrize(
    ("name", "message"), [("out.txt", r"\.csv, \.npy, \.parquet"), ("no/out.csv", "folder that exists")]
)
def test_bad_outputs(tmp_path, name, message):
    with pytest.raises(InvalidInput, match=message):
        files.check_free(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("a,b\n1,2\n3,nan\n", "line 3"),
        ("a,b\n1,2\n3\n4,5\n", "line 3"),
        ("a,b\n1,\n", "line 2"),
        ("a,b\n1,x\n", "line 2"),
    ],
)
def test_bad_records_are_named_by_their_line(refused, tmp_path, content, place):
    records = tmp_path / "records.csv"
    records.write_text(content)
    line = refused("release", records, "--query", "sum", "--norm", "1", *BUDGET, "--output", tmp_path / "out.csv")
    assert place in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--query", "median", "--norm", "1"), "query must be one of second-moment"),
        (("--query", "second-moment"), "needs --norm"),
        (("--query", "histogram"), "needs --edges"),
        (("--query", "histogram", "--edges", "0:1:2", "--edges", "0:1:2", "--norm", "1"), "does not take --norm"),
        (("--query", "histogram", "--edges", "0:1"), "edges must look like"),
        (("--query", "sum", "--norm", "-1"), "norm"),
        (("--query", "sum", "--norm", "1", "--columns", "height"), "height"),
        (("--query", "sum", "--norm", "1", "--relation", "swap"), "adjacency"),
        (("--query", "sum", "--norm", "1", "--mechanism", "gauss"), "mechanism must be one of"),
        (("--query", "sum", "--norm", "1", "--option", "speed=1"), "speed"),
    ],
)
def test_bad_settings_write_nothing(refused, people, arguments, message):
    assert message in refused("release", people, *arguments, *BUDGET, "--output", people.with_name("out.csv"))
    assert [path.name for path in people.parent.iterdir()] == ["people.csv"]


def test_a_missing_input_is_named(refused, tmp_path):
    line = refused(
        "release", tmp_path / "no.csv", "--query", "sum", "--norm", "1", *BUDGET, "--output", tmp_path / "o.csv"
    )
    assert "no.csv" in line


def test_options_are_those_of_mechanisms_alone(call, people):
    output = people.with_name("out.npy")
    for option in ("accept_violation=true", "note=x", "rng=1"):
        result = call("release", people, "--query", "second-moment", "--norm", "1", *BUDGET, "--mechanism", "r1smg",
                      "--option", option, "--output", output)  # fmt: skip
        assert result.exit_code == 2
        assert "no mechanism has an option" in result.stderr
        assert not output.exists()


@pytest.fixture
def folder(tmp_path):
    """Two Parquet files of 40 records each."""
    import pandas

    (tmp_path / "people").mkdir()
    records = np.random.default_rng(0).normal(size=(80, 3))
    for part in (0, 1):
        frame = pandas.DataFrame(records[40 * part : 40 * part + 40], columns=["a", "b", "c"])
        frame.to_parquet(tmp_path / "people" / f"{part}.parquet")
    return tmp_path / "people"


@pytest.mark.filterwarnings("default:with delta 0.05")
def test_a_delta_like_a_level_of_significance_is_pointed_out(call, people, tmp_path):
    for delta, told in (("0.05", True), ("1e-4", False)):
        result = call("release", people, "--query", "sum", "--norm", "1", "--epsilon", "1", "--delta", delta,
                      "--output", tmp_path / f"{delta}.csv")  # fmt: skip
        assert result.exit_code == 0, result.stderr
        assert ("one record in 20" in result.stderr) is told


def test_a_folder_of_parquet_is_read_by_dask(call, folder):
    output = folder.with_name("moment.npy")
    result = call("release", folder, "--query", "second-moment", "--norm", "1", "--epsilon", "10", "--delta", "1e-4",
                  "--output", output)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    import pandas

    from matrixdp import queries

    records = pandas.concat([pandas.read_parquet(folder / f"{part}.parquet") for part in (0, 1)]).to_numpy()
    exact = queries.second_moment(records, norm=1.0).value
    assert np.abs(np.load(output) - exact).max() < 3


def test_a_folder_cannot_be_released_record_by_record(call, folder):
    result = call(
        "release", folder, "--query", "identity", "--norm", "1", *BUDGET, "--output", folder.with_name("o.npy")
    )
    assert result.exit_code == 2
    assert "matrixdp.distributed" in result.stderr


def test_a_scheduler_that_does_not_answer_is_named(call, folder):
    result = call("release", folder, "--query", "sum", "--norm", "1", *BUDGET, "--output", folder.with_name("o.npy"),
                  "--scheduler", "nonsense://nowhere")  # fmt: skip
    assert result.exit_code == 2
    assert "nonsense://nowhere" in result.stderr
    with pytest.raises(ValueError, match="No clients found"):  # else Dask would wait for it in this process
        distributed.default_client()


def test_verify_says_no_to_another_value_and_to_a_changed_number(call, people):
    output, certificate = people.with_name("out.csv"), people.with_name("out.certificate.json")
    call("release", people, "--query", "sum", "--norm", "1", *BUDGET, "--output", output)
    assert call("verify", certificate).exit_code == 0
    told = call("verify", certificate, "--value", people)
    assert (told.exit_code, "released.sha256: the file is not the one that was released" in told.stdout) == (1, True)
    text = certificate.read_text()
    certificate.write_text(text.replace('"norm": 1.0', '"norm": 0.5'))
    told = " ".join(call("verify", certificate).stdout.split())
    assert "the query's parameters give another sensitivity set (radius: the document says 1.0" in told
    std = json.loads(text)["law"]["covariance"]["std"]
    certificate.write_text(text.replace(str(std), str(std).replace("4", "5", 1)))
    told = call("verify", certificate, "--json")
    assert (told.exit_code, json.loads(told.stdout)["verified"]) == (1, False)
    certificate.write_text("{")
    assert call("verify", certificate).exit_code == 1
    assert call("verify", people.with_name("nowhere.json")).exit_code == 2


def test_verify_reads_compositions_and_exported_ledgers(call, tmp_path):
    accountant = Accountant()
    accountant.add(stated((3,), std=9.0), 10, sampling_rate=0.1)
    composition = tmp_path / "composition.json"
    composition.write_text(accountant.composition(Budget(1.0, 1e-6)).to_json())
    assert call("verify", composition).exit_code == 0
    composition.write_text(composition.read_text().replace('"count": 10', '"count": 9'))
    assert call("verify", composition).exit_code == 1
    Ledger(tmp_path / "budget.db", Budget(1.0, 1e-6)).spend(stated((3,), std=9.0))
    exported = tmp_path / "ledger.jsonl"
    assert call("ledger", "export", tmp_path / "budget.db", "--out", exported).exit_code == 0
    assert call("verify", exported).exit_code == 0
    exported.write_text(exported.read_text().replace("9.0", "8.0"))
    assert call("verify", exported).exit_code == 1
