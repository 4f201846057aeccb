"""release --domain and domain: people's tables on the command line."""

import hashlib
import itertools
import json
import sqlite3

import pandas
import polars
import pytest
from typer.testing import CliRunner

from hospital import domain, hospital
from matrixdp import Budget, Counts, Ledger
from matrixdp.cli import app
from matrixdp.tables import Domain, Numeric, Table

BUDGET = ("--epsilon", "1", "--delta", "1e-6")
CANARY = "Canary-Zq7"


@pytest.fixture
def files(tmp_path):
    """A hospital's visits and its domain."""
    hospital(80).to_csv(tmp_path / "visits.csv", index=False)
    (tmp_path / "domain.toml").write_text(domain().to_toml(), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_with_all_that_goes_with_it(call, files, ending):
    Ledger(files / "budget.db", Budget(3.0, 1e-6))
    output = files / f"table{ending}"
    result = call(
        "release", files / "visits.csv", "--domain", files / "domain.toml", "--by", "region, diagnosis", *BUDGET,
        "--unit", "patient_id", "--contributions", "3", "--out", output, "--ledger", files / "budget.db",
        "--statement", files / "table.html", "--figure", files / "table.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "all rows of one patient_id added or removed" in result.stdout
    frame = pandas.read_csv(output) if ending == ".csv" else pandas.read_parquet(output)
    assert list(frame) == ["region", "diagnosis", "value", "standard_error", "low", "high"]
    assert len(frame) == 6 * 7
    certificate = files / "table.certificate.json"
    assert call("verify", certificate, "--value", output).exit_code == 0
    assert hashlib.sha256(certificate.read_bytes()).hexdigest() in (files / "table.html").read_text()
    assert (files / "table.png").read_bytes().startswith(b"\x89PNG")
    (entry,) = Ledger(files / "budget.db").history()
    assert (entry.unit, entry.note) == ("patient_id", "counts")
    left = {path.name for path in files.iterdir()}
    assert not [name for name in left if name.startswith(".matrixdp")]


def test_other_sources_and_the_report(call, files):
    visits = hospital(80)
    visits.to_csv(files / "visits.txt", index=False, sep=";")
    with sqlite3.connect(files / "visits.db") as connection:
        visits.to_sql("visits", connection, index=False)
    connection.close()
    asked = ("--domain", files / "domain.toml", *BUDGET)
    for place, (source, *options) in enumerate(
        [
            (files / "visits.txt", "--separator", ";", "--by", "sex"),
            (files / "visits.db", "--sql", "SELECT * FROM visits", "--by", "sex"),
            (files / "visits.csv", "--cell-states", "--adjacency", "replace", "--json"),
        ]
    ):
        result = call("release", source, *asked, *options, "--out", files / f"{place}.csv")
        assert result.exit_code == 0, result.stderr
        assert pandas.read_csv(files / f"{place}.csv")["value"].notna().all()
    assert json.loads(result.stdout)["query"]["name"] == "cell-states"


@pytest.mark.parametrize(
    ("options", "name", "labels", "rows"),
    [
        (("--marginals", "region, diagnosis; age,sex"), "table-marginals", ["region", "diagnosis", "age", "sex"], 70),
        (("--marginals", "1"), "table-marginals", list(domain()), 1 + sum(domain().sizes.values())),
        (("--mean", "cost"), "means", ["mean"], 1),
        (("--mean", "cost", "--by", "region,sex"), "means", ["region", "sex"], 24),
        (("--sum", "cost", "--by", "sex"), "sums", ["sex"], 4),
        (("--quantiles", "age:0.5", "--bins", "whole"), "quantiles", ["quantile"], 1),
        (("--regress", "cost~age", "--ridge", "10"), "regression", ["term"], 2),
        (("--marginals", "sex;smoker", "--weights", "sex=4"), "table-marginals", ["sex", "smoker"], 8),
        (("--marginals", "sex;smoker", "--shared", "2"), "table-marginals", ["sex", "smoker"], 8),
        (("--quantiles", "age:0.25,0.5,0.75"), "quantiles", ["quantile"], 3),
        (("--regress", "cost ~ age + sex"), "regression", ["term"], 3),
        (("--classify", "smoker~age+sex"), "logistic-regression", ["term"], 3),
        (("--classify", "smoker ~ age", "--ridge", "2", "--shared", "2"), "logistic-regression", ["term"], 2),
        (("--by", "sex,smoker,severity"), "counts", ["sex", "smoker", "severity"], 80),
    ],
)
@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_other_questions(call, files, ending, options, name, labels, rows):
    Ledger(files / "budget.db", Budget(3.0, 1e-6))
    output = files / f"out{ending}"
    result = call(
        "release", files / "visits.csv", "--domain", files / "domain.toml", *BUDGET, *options, "--unit", "patient_id",
        "--contributions", "3", "--out", output, "--ledger", files / "budget.db", "--statement", files / "page.md",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    saved = hashlib.sha256((files / "out.certificate.json").read_bytes()).hexdigest()
    assert saved in (files / "page.md").read_text()
    assert "all rows of one patient_id added or removed" in result.stdout
    frame = pandas.read_csv(output) if ending == ".csv" else pandas.read_parquet(output)
    assert list(frame)[: len(labels) + 1] == [*labels, "value"]
    assert len(frame) == rows
    assert (frame["low"] <= frame["value"]).all()
    assert call("verify", files / "out.certificate.json", "--value", output).exit_code == 0
    (entry,) = Ledger(files / "budget.db").history()
    assert (entry.unit, entry.note) == ("patient_id", name)


def test_notes_about_the_numbers(call, files):
    """Fractions of columns that may be whole, and fits that the noise has drowned, are said on the terminal."""
    asked = ("release", files / "visits.csv", "--domain", files / "domain.toml", "--delta", "1e-6", "--epsilon")
    places = (files / f"{place}.csv" for place in itertools.count())

    def said(epsilon, *options):
        place = next(places)
        result = call(*asked, epsilon, *options, "--out", place)
        assert result.exit_code == 0, result.stderr
        text, found = " ".join(result.stdout.split()), pandas.read_csv(place)  # lines are wrapped at COLUMNS
        assert ("may hold less often" in text) == ("reliable" in found and not found["reliable"].all())
        return text

    assert "If age holds whole numbers alone, use --bins whole" in said("1", "--quantiles", "age:0.5")
    assert "--bins" not in said("1", "--quantiles", "age:0.5", "--bins", "whole")
    for option in ("--regress=cost~age", "--classify=smoker~age"):
        assert any("may hold less often" in said("0.1", option) for _ in range(20))  # by chance some fits look sound
        assert not all("may hold less often" in said("20", option) for _ in range(20))
    assert "may hold less often" not in said("0.1", "--by", "sex")


def test_a_table_from_a_pipe(files):
    asked = ["release", "-", "--domain", files / "domain.toml", "--by", "sex", *BUDGET, "--out", files / "pipe.csv"]
    result = CliRunner().invoke(app, [str(part) for part in asked], input=(files / "visits.csv").read_bytes())
    assert result.exit_code == 0, result.stderr
    assert len(pandas.read_csv(files / "pipe.csv")) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--by", "regoin"), "no column 'regoin'"),
        (("--by", "region", "--unit", "id", "--contributions", "1"), "no column 'id'"),
        (("--by", "region", "--unit", "patient_id"), "go together"),
        ((), "--by"),
        (("--by", "region", "--cell-states"), "--by"),
        (("--by", "region", "--norm", "1"), "--norm"),
        (("--by", "region", "--query", "sum"), "--query"),
        (("--by", "region", "--statement", "visits.csv"), "--statement must end in .html"),
        (("--quantiles", "age:0.5", "--bins", "-3"), "--bins must be"),
        (("--quantiles", "age:0.5,2"), "between 0 and 1, got 2"),
        (("--by", "region", "--statement", "no/page.html"), "folder"),
        (("--by", "region", "--sql", "SELECT 1"), "database must be"),
        (("--by", "region", "--separator", ";;"), "separator"),
        (("--by", "region", "--marginals", "2"), "say one thing"),
        (("--mean", "cost", "--quantiles", "age:0.5"), "say one thing"),
        (("--mean", "region"), "numeric, boolean or ordered"),
        (("--mean", "cost", "--by", "regoin"), "no column 'regoin'"),
        (("--mean", "cost", "--ridge", "1"), "--ridge goes with --regress"),
        (("--by", "sex", "--bins", "9"), "--bins goes with --quantiles"),
        (("--by", "sex", "--weights", "sex=2"), "--weights goes with --marginals"),
        (("--marginals", "1", "--weights", "sex"), "such as region,sex=2"),
        (("--quantiles", "age:0.5", "--bins", "0,9"), "begin with the lower bound"),
        (("--regress", "cost~age", "--ridge", "-1"), "ridge"),
        (("--mean", "cost", "--adjacency", "replace"), "add/remove"),
        (("--marginals", "9"), "up_to"),
        (("--marginals", "region,;sex"), "no column ''"),
        (("--marginals", "1", "--mechanism", "laplace"), "noise of their own"),
        (("--marginals", "1", "--shared", "2", "--weights", "sex=2"), "whole budget"),
        (("--quantiles", "age"), "such as age:0.25"),
        (("--quantiles", "age:half"), "such as age:0.25"),
        (("--quantiles", "age:2"), "between 0 and 1"),
        (("--regress", "cost"), "such as cost~age+sex"),
        (("--regress", "cost~csot"), "no column 'csot'"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_spent(refused, files, monkeypatch, options, words):
    monkeypatch.chdir(files)
    ledger = Ledger(files / "budget.db", Budget(3.0, 1e-6))
    asked = ("release", "visits.csv", "--domain", "domain.toml", *BUDGET, "--out", "t.csv", "--ledger", "budget.db")
    assert words in refused(*asked, *options)
    assert ledger.history() == []
    assert not (files / "t.csv").exists()


def test_names_that_are_taken_and_modes_that_do_not_mix(refused, files):
    table = ("release", files / "visits.csv", "--domain", files / "domain.toml", "--by", "sex", *BUDGET)
    (files / "page.md").write_text("mine")
    assert "exists already" in refused(*table, "--out", files / "t.csv", "--statement", files / "page.md")
    assert ".csv or .parquet" in refused(*table, "--out", files / "t.npy")
    assert "--domain" in refused("release", files / "visits.csv", "--by", "sex", *BUDGET, "--out", files / "t.csv")
    assert "--query" in refused("release", files / "visits.csv", *BUDGET, "--out", files / "t.csv")
    assert (files / "page.md").read_text() == "mine"


def test_nothing_is_charged_for_a_figure_that_cannot_be_drawn(call, refused, files):
    Ledger(files / "budget.db", Budget(3.0, 1e-6))
    wide = Domain({**Domain.from_toml(files / "domain.toml"), "age": Numeric(0, 110, bins=300)})
    asked = ("release", files / "visits.csv", *BUDGET, "--ledger", files / "budget.db", "--out", files / "t.csv")
    (files / "wide.toml").write_text(wide.to_toml())
    drawn = ("--figure", files / "t.png", "--statement", files / "t.html")
    line = refused(*asked, "--domain", files / "wide.toml", "--by", "age", *drawn)
    assert "--figure: a figure shows at most 200 lines" in line
    assert "at most 12 tables" in refused(*asked, "--domain", files / "domain.toml", "--marginals", "3", *drawn)
    assert not Ledger(files / "budget.db").history()
    assert not list(files.glob("t.*"))


def test_a_page_that_cannot_be_written_does_not_hide_the_release(refused, files, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matrixdp.plots.save", full)
    asked = ("release", files / "visits.csv", "--domain", files / "domain.toml", *BUDGET, "--by", "region")
    line = refused(*asked, "--out", files / "t.csv", "--figure", files / "t.png")
    assert "were released and charged" in line
    assert "No space left" in line
    assert (files / "t.csv").exists()


# --- drafts ---


def test_a_draft_has_names_and_no_values(call, refused, tmp_path):
    (tmp_path / "a.csv").write_text(f"name,age\n{CANARY},41\n")
    assert "--header" in refused("domain", tmp_path / "a.csv")
    text = call("domain", tmp_path / "a.csv", "--header").stdout
    assert CANARY not in text
    assert "41" not in text
    assert '[columns."name"]' in text
    assert text.count('kind = "FILL IN"') == 2
    (tmp_path / "draft.toml").write_text(text)
    assert "fill it in, or remove the column" in _refusal(tmp_path / "draft.toml")


def test_what_is_no_csv_is_not_drafted(refused, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    assert "is it a CSV file" in refused("domain", tmp_path / "picture.png", "--header")
    assert "there is no file" in refused("domain", tmp_path / "none.csv")
    for database in (tmp_path / "visits.db", "postgresql://reader@db/hospital"):
        assert "needs --sql" in refused("domain", database, "--header")


def test_a_draft_from_declared_types(call, refused, tmp_path):
    frame = polars.DataFrame(
        {"who": [CANARY], "age": [41], "weight": [70.5], "day": ["2026-01-01"], "ok": [True], "list": [[1]]}
    ).with_columns(polars.col("day").str.to_date(), polars.col("who").cast(polars.Categorical))
    frame.write_parquet(tmp_path / "a.parquet")
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute('CREATE TABLE t (who VARCHAR(9), age INT, weight REAL, day DATE, ok BOOLEAN, "list" BLOB)')
        connection.execute("INSERT INTO t VALUES (?, 41, 70.5, '2026-01-01', 1, NULL)", [CANARY])
    connection.close()
    for source in ((tmp_path / "a.parquet",), (tmp_path / "a.db", "--sql", "SELECT * FROM t")):
        output = tmp_path / f"{source[0].suffix[1:]}.toml"
        result = call("domain", *source, "--out", output)
        assert result.exit_code == 0, result.stderr
        text = output.read_text()
        assert CANARY not in text
        assert "41" not in text
        kinds = [line.split('"')[1] for line in text.splitlines() if line.startswith("kind")]
        assert kinds == ["categorical", "numeric", "numeric", "date", "boolean", "FILL IN"]
        assert "column 'who': values" in _refusal(output)
        assert "exists already" in refused("domain", *source, "--out", output)


def _refusal(path):
    with pytest.raises(ValueError, match="column") as caught:
        Domain.from_toml(path)
    return str(caught.value)


def test_marginals_as_a_part_of_a_plan(call, files):
    """The plan fixes their noise, and the ledger charges all of it once."""
    answer = Table(files / "visits.csv", domain()).marginals(("sex",), ("smoker",))
    plan = Budget(1.0, 1e-6).plan([answer.sensitivity, Counts(1)], shapes=[answer.value.shape, (4,)])
    (files / "plan.json").write_text(plan.to_json())
    Ledger(files / "budget.db", Budget(3.0, 1e-5))
    result = call(
        "release", files / "visits.csv", "--domain", files / "domain.toml", "--marginals", "sex;smoker", "--plan",
        files / "plan.json", "--ledger", files / "budget.db", "--out", files / "t.csv",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert len(pandas.read_csv(files / "t.csv")) == 8
    assert len(Ledger(files / "budget.db").history()) == 1
