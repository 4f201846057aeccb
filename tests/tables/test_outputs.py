"""What comes out: labelled frames and files, figures, and a statement whose numbers are those of the certificate."""

import hashlib
import io
import math
import re

import numpy as np
import pandas
import polars
import pyarrow.parquet
import pytest
from matplotlib.cbook import is_math_text
from matplotlib.text import Text

from hospital import domain, hospital
from matrixdp import REPLACE, Budget, plots
from matrixdp.errors import InvalidInput
from matrixdp.tables import Boolean, Categorical, Domain, Numeric, Table, figures
from matrixdp.tables.statement import COUNTED

BUDGET = Budget(1.0, 1e-6)
VISITS = hospital(200)


@pytest.fixture(scope="module")
def out():
    return Table(VISITS, domain(), unit="patient_id", contributions=2).counts("region", "smoker").release(BUDGET)


def test_frames_of_every_kind(out):
    frame = out.table()
    assert list(frame) == ["region", "smoker", "value", "standard_error", "low", "high"]
    assert frame["value"].tolist() == out.value.ravel().tolist()
    assert frame["region"].tolist() == [label for label in out.axes[0][1] for _ in out.axes[1][1]]
    assert frame["smoker"].tolist() == list(out.axes[1][1]) * len(out.axes[0][1])
    assert np.all((frame["low"] < frame["value"]) & (frame["value"] < frame["high"]))
    assert frame["standard_error"].to_numpy() == pytest.approx(math.sqrt(out.noise.variance), rel=1e-6)
    assert (frame["high"] - frame["value"]).to_numpy() == pytest.approx(out.noise.half_width(0.95).ravel())
    assert out.table("polars").equals(polars.from_pandas(frame))
    assert out.table("arrow").to_pandas()["low"].tolist() == frame["low"].tolist()
    wider = out.table(level=0.95, simultaneous=True)
    assert np.all(wider["low"] < frame["low"])
    with pytest.raises(InvalidInput, match="kind"):
        out.table("excel")


def test_whole_numbers_stay_whole():
    out = Table(VISITS, domain()).counts("region").release(BUDGET, "laplace")
    assert np.array_equal(out.value, np.round(out.value))
    interval = out.interval()
    assert interval.high - out.value == pytest.approx(out.value - interval.low, rel=1e-9)  # no flooring to be counted


def test_it_prints_as_a_table_with_its_certificate(out):
    table, _, certificate = str(out).partition("\n\n")
    header, *rows, more, intervals = table.split("\n")
    frame = out.table()
    assert header.split() == list(frame)
    assert more == "... and 4 more rows"
    for row, (region, smoker, value, error, low, high) in zip(rows, frame[:20].itertuples(index=False), strict=True):
        assert row.startswith(region)
        assert smoker in row
        assert row.split()[-4:] == [f"{value:.0f}", f"{error:.1f}", f"{low:.0f}", f"{high:.0f}"]
    assert intervals == "Intervals from low to high hold with 95 %."
    assert certificate == str(out.certificate)
    assert repr(out) == str(out)


@pytest.mark.parametrize("ask", [
    lambda table: table.means("cost", by=("region",)),
    lambda table: table.quantiles("age", [0.25, 0.5]),
    lambda table: table.marginals(("region", "smoker")),
])  # fmt: skip
def test_answers_of_every_kind_print_as_a_table(ask):
    found = ask(Table(VISITS, domain())).release(BUDGET)
    printed, cells = str(found).split("\n"), found.columns()
    assert printed[0].split() == list(cells)
    rows = printed[: 1 + min(20, len(cells["value"]))]
    assert len({len(row) for row in rows}) == 1  # numbers are aligned
    for line, low, high in zip(rows[1:], cells["low"], cells["high"], strict=False):
        width, (*_, first, last) = high - low, line.split()
        assert float(first) == pytest.approx(low, abs=0.01 * width)
        assert float(last) == pytest.approx(high, abs=0.01 * width)


def test_files(out, tmp_path):
    out.to_csv(tmp_path / "table.csv")
    out.to_parquet(tmp_path / "table.parquet")
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "table.csv"), out.table())
    assert pyarrow.parquet.read_table(tmp_path / "table.parquet").equals(out.table("arrow"))
    for write, name in ((out.to_csv, "table.csv"), (out.to_parquet, "table.parquet")):
        with pytest.raises(FileExistsError):
            write(tmp_path / name)
    stream = io.StringIO()
    out.to_csv(stream)
    assert stream.getvalue() == (tmp_path / "table.csv").read_text()


def test_labels_that_look_like_something_else(tmp_path):
    public = Domain({"value": Categorical(['a "quoted", one', "=cmd()", "two\nlines", "é"])})
    frame = pandas.DataFrame({"value": ["é"]})
    table = Table(frame, public).counts("value").release(BUDGET)
    assert list(table.table()) == ["value_", "value", "standard_error", "low", "high"]
    table.to_csv(tmp_path / "table.csv")
    assert pandas.read_csv(tmp_path / "table.csv")["value_"].tolist() == list(table.axes[0][1])


def test_figures_are_drawn(out, tmp_path):
    pytest.importorskip("matplotlib")
    table = Table(VISITS, domain())
    for by in ((), ("region",), ("region", "diagnosis"), ("sex", "smoker", "visit")):
        chart = table.counts(*by).release(BUDGET).plot()
        texts = [text.get_text() for text in chart.findobj(lambda part: hasattr(part, "get_text"))]
        for name in by:
            assert any(label in text for label in domain()[name].labels for text in texts)
        assert any("95 % for the noise that protects every row" in text for text in texts)
        chart.savefig(tmp_path / "chart.png")
    (panel, _) = out.plot().axes
    assert len(panel.texts) == out.value.size
    large = Domain({"age": Numeric(0, 110, bins=500)})
    with pytest.raises(InvalidInput, match="at most 200"):
        Table(VISITS, large).counts("age").release(BUDGET).plot()


ASKED = {
    "counts": (lambda t: t.counts("region"), "How many rows there are, by region."),
    "cell states": (lambda t: t.cell_states("age", "sex"), "How many cells of each column"),
    "sums": (lambda t: t.sums("cost", ("region",)), "The sum of cost, for each region."),
    "mean": (lambda t: t.means("cost"), "The mean of cost. 1 number in all."),
    "means": (lambda t: t.means("cost", ("region", "sex")), "The mean of cost, for each region and sex."),
    "variances": (lambda t: t.variances("cost", "age"), "The variances of cost and age."),
    "covariance": (lambda t: t.covariance("cost", "age"), "The covariances of cost and age."),
    "correlation": (lambda t: t.correlation("cost", "age"), "The correlations of cost and age."),
    "components": (lambda t: t.pca("cost", "age"), "The principal components of cost and age."),
    "quantiles": (lambda t: t.quantiles("cost", [0.25, 0.5]), "share of the rows lies: 0.25, 0.5."),
    "regression": (lambda t: t.regression("cost", ("age", "sex")), "How cost changes with age and sex"),
    "marginals": (lambda t: t.marginals(("region", "sex"), ("age",), ()), "in 3 tables that agree with each other"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_every_answer_has_a_figure_and_a_statement(asked, tmp_path):
    pytest.importorskip("matplotlib")
    ask, words = ASKED[asked]
    out = ask(Table(VISITS, domain(), unit="patient_id", contributions=2)).release(BUDGET)
    chart = out.plot()
    chart.savefig(tmp_path / "chart.png")
    texts = [text.get_text() for text in chart.findobj(lambda part: hasattr(part, "get_text"))]
    shown = [label for name, labels in out.axes for label in (name, *labels)]
    assert all(any(label in text for text in texts) for label in shown)
    for kind in ("markdown", "html"):
        text = out.statement(kind)
        assert words in text
        assert "moved to the nearer end" in text or "cost" not in text
        assert ("missing values are not counted" in text) == (out.query["name"] not in COUNTED)
    out.certificate.save(tmp_path / "certificate.json")
    assert hashlib.sha256((tmp_path / "certificate.json").read_bytes()).hexdigest() in text


@pytest.mark.parametrize(("rows", "words"), [(1, "One row of each patient_id was"), (2, "At most 2 rows of each")])
def test_a_statement_says_that_rows_were_left_out(rows, words):
    out = Table(VISITS, domain(), unit="patient_id", contributions=rows).counts("region").release(BUDGET)
    assert words in out.statement("html")
    assert "rows that were left out" in out.statement()


def test_quantiles_share_one_scale():
    pytest.importorskip("matplotlib")
    out = Table(VISITS, domain()).quantiles("cost", [0.25, 0.5]).release(BUDGET)
    numbers = {"value": [2.0, 3.0], "low": [1.9999, 2.0], "high": [2.0001, 5.0]}
    figure = plots.figure_of(6, 3)
    figures._lines(figure.subfigures(1), out.axes, numbers, "cost", bars=False)
    assert len(figure.axes) == 1


def test_too_many_tables_for_a_figure():
    out = Table(VISITS, domain()).marginals(up_to=2).release(BUDGET)
    with pytest.raises(InvalidInput, match="at most 12 tables"):
        out.plot()
    assert out.of("region").plot()


def test_a_statement_says_what_the_certificate_says(out, tmp_path):
    out.certificate.save(tmp_path / "certificate.json")
    saved = hashlib.sha256((tmp_path / "certificate.json").read_bytes()).hexdigest()
    guess = (1 + out.certificate.delta(0.0)) / 2
    for kind in ("markdown", "html"):
        text = out.statement(kind)
        plain = text.replace("\\_", "_")
        assert saved in text
        assert "At most 2 rows of each patient_id" in plain
        assert "all rows of any one patient_id were left out" in plain
        shares = [float(share) for share in re.findall(r"at most ([\d.]+) %", plain)]
        assert shares
        assert all(guess <= share / 100 <= guess + 0.001 for share in shares)
        factor = float(re.search(r"at most ([\d.]+) times", plain)[1])
        assert math.exp(out.certificate.epsilon(1e-6)) <= factor * (1 + 1e-9) <= math.e * 1.001
        for words in (
            "What was released",
            "About whom",
            "What is guaranteed",
            "What is not guaranteed",
            "region",
            "smoker",
        ):
            assert words in plain
    assert "<svg" in out.statement("html")
    assert "data:image/svg+xml;base64," in out.statement("markdown")
    with pytest.raises(InvalidInput, match="kind"):
        out.statement("pdf")


def test_a_statement_never_says_that_an_interval_always_holds(out):
    assert "in 99.9 % of cases" in out.statement(level=0.999)
    assert "in 95 % of cases" in out.statement()
    assert "plus 0.000001," in out.statement()  # no exponents for readers who are not specialists


def test_statements_escape_names_and_name_other_settings():
    public = Domain({"<b>*x*": Categorical(["a"], missing={"fill": "a"}), "cost": Numeric(0, 9, missing="out")})
    frame = pandas.DataFrame({"<b>*x*": ["a"], "cost": [1]})
    table = Table(frame, public, adjacency=REPLACE)
    out = table.counts("<b>*x*").release(BUDGET, "laplace")
    assert "&lt;b&gt;*x*" in out.statement("html")
    assert "\\<b\\>\\*x\\*" in out.statement()
    assert "missing values become a" in out.statement()
    assert "replaced by others" in out.statement()
    assert "Every row of the data is protected by itself" in out.statement()
    report = table.cell_states().release(BUDGET).statement()
    assert "How many cells of each column" in report
    assert "from 0 to 9; values outside are moved to the nearer end; missing values are not counted" in report
    assert "How many rows there are. 1 number in all" in table.counts().release(BUDGET).statement()


def test_a_label_with_dollars_is_drawn_as_it_is():
    """matplotlib would set "$50-$100" as a formula without dollars, and fail on some labels after the charge."""
    labels, name = ["$50-$100", r"$\x$", "none"], "paid $a$"
    frame = pandas.DataFrame({name: labels, "unit $u$": ["a", "b", "c"], "late": [True, False, True]})
    table = Table(frame, Domain({name: Categorical(labels), "late": Boolean()}), unit="unit $u$", contributions=1)
    for by in ((name,), (name, "late"), ("late", name)):
        chart = table.counts(*by).release(Budget(1.0, 1e-6)).plot()
        chart.savefig(io.BytesIO(), format="png")
        texts = [text.get_text() for text in chart.findobj(Text)]
        assert any("50-" in text for text in texts)
        assert not any(is_math_text(text) for text in texts)
