"""Counts of people's tables: right, labelled, certified, and refused before anything is spent."""

import csv
import gzip
import json
import os
import pickle
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas
import pytest

from hospital import DIAGNOSES, REGIONS, domain, hospital
from matrixdp import ADD_REMOVE, REPLACE, ZERO_OUT, Budget, Certificate, Counts, Ledger, compare, release
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.tables import Boolean, Categorical, Domain, Numeric, Table
from matrixdp.tables.columns import STATES

BUDGET = Budget(1.0, 1e-6)
VISITS = hospital(150)


def test_the_tables_of_a_hospital():
    """50,000 patients with the messes of real files; every visit has a place."""
    visits = hospital(50_000, seed=1)
    table = Table(visits, domain(), unit="patient_id", contributions=2)
    answer = table.counts("region", "diagnosis")
    texts = visits["patient_id"].str.strip()
    rows = texts[texts != ""].value_counts().clip(upper=2).sum()
    assert answer.value.sum() == rows
    assert answer.axes == (("region", (*REGIONS, "other", "missing")), ("diagnosis", (*DIAGNOSES, "other", "missing")))
    out = answer.release(BUDGET)
    covers = out.interval(1 - 1e-7, simultaneous=True)
    assert np.all((covers.low <= answer.value) & (answer.value <= covers.high))
    narrow = out.interval(0.5)  # of 42 cells, 2 or less or 40 or more with a probability of 4e-10
    assert 2 < np.sum((narrow.low <= answer.value) & (answer.value <= narrow.high)) < 40
    assert out.certificate.verify()


def test_adult_by_two_columns():
    path = Path(os.environ.get("MATRIXDP_DATA", "")) / "adult_train.csv.gz"
    if not path.is_file():
        pytest.skip("the Adult data are not there")
    with gzip.open(path, "rt") as file:
        names = file.readline().strip().split(",")
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
    sexes, classes = sorted(frame["sex"].unique()), sorted(frame["workclass"].unique())
    public = Domain(
        {
            "sex": Categorical(sexes),
            "workclass": Categorical([name for name in classes if name != "?"], missing_values=["?"]),
            "age": Numeric(17, 90, bins=[17, 25, 45, 65, 90]),
        }
    )
    assert set(public) <= set(names)
    value = Table(path, public).counts("sex", "workclass").value
    expected = pandas.crosstab(frame["sex"], frame["workclass"])
    assert np.array_equal(value[:2, :-2], expected[[name for name in classes if name != "?"]])
    assert np.array_equal(value[:2, -1], expected["?"])
    ages = Table(path, public).counts("age").value
    assert ages[:4].tolist() == np.histogram(frame["age"].astype(int), [17, 25, 45, 65, 90])[0].tolist()


@pytest.mark.parametrize("by", [(), ("region",), ("region", "smoker"), ("sex", "smoker", "severity")])
@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE, ZERO_OUT])
def test_answers_go_where_answers_go(by, adjacency):
    answer = Table(VISITS, domain(), adjacency=adjacency).counts(*by)
    cells = np.prod([len(domain()[name].labels) for name in by], dtype=int)
    assert answer.value.size == cells
    assert answer.value.sum() == len(VISITS)
    assert answer.sensitivity.cells == (2 if adjacency == REPLACE else 1)
    out = release(*answer, BUDGET, query=answer.query)
    assert Certificate.from_json(out.certificate.to_json()).verify()
    if len(by) == 1:
        assert len(compare(answer.value.shape, answer.sensitivity, BUDGET, mechanisms=["analytic"])) == 1
    again = pickle.loads(pickle.dumps(answer))
    assert (again.axes, again.query["name"]) == (answer.axes, "counts")
    assert "private" in repr(answer)


def test_the_order_of_cells_is_that_of_the_labels():
    frame = pandas.DataFrame({"a": ["x", "y", "y"], "b": ["p", "q", "q"], "c": [1, 0, 0]})
    public = Domain({"a": Categorical(["x", "y"]), "b": Categorical(["p", "q"]), "c": Boolean()})
    out = Table(frame, public).counts("a", "b", "c").release(BUDGET, "laplace")
    found = out.table()
    true = frame.assign(c=["true", "false", "false"]).value_counts().to_dict()
    cells = [tuple(row) for row in found[["a", "b", "c"]].itertuples(index=False)]
    assert len(set(cells)) == 4 * 4 * 4
    answer = Table(frame, public).counts("a", "b", "c")
    assert {cell: value for cell, value in zip(cells, answer.value.ravel(), strict=True) if value} == true


def test_no_rows_are_no_error():
    answer = Table(VISITS.iloc[:0], domain(), unit="patient_id", contributions=2).counts("region")
    assert not np.any(answer.value)
    assert Table(VISITS.iloc[:0], domain()).counts().value.tolist() == 0


def test_the_policies_stand_in_the_certificate():
    table = Table(VISITS, domain(missing="out"))
    answer = table.counts("region")
    assert answer.axes[0][1][-1] == "other"
    document = json.loads(answer.release(BUDGET).certificate.to_json())
    ((name, column),) = document["query"]["parameters"]["columns"]
    assert name == "region"
    assert column == {
        "kind": "categorical",
        "values": list(REGIONS),
        "missing": "out",
        "unexpected": "category",
        "missing_values": ["NA", "?"],
        "other": "other",
    }


def test_the_report_on_cells_is_paid_for(tmp_path):
    table = Table(VISITS, domain(), unit="patient_id", contributions=6)
    answer = table.cell_states()
    assert answer.value.shape == (8, 4)
    assert answer.sensitivity.contains(np.array([[6.0, 0, 0, 0]] * 8))
    assert answer.sensitivity.contains(np.array([[3.0, 1, 1, 1]] * 8))
    assert not answer.sensitivity.contains(np.array([[7.0, 0, 0, 0]] + [[0.0] * 4] * 7))
    alone = Table(VISITS, domain()).cell_states("age", "cost")
    texts = VISITS["age"].fillna("").str.strip()
    numbers = pandas.to_numeric(texts, errors="coerce")
    missing = texts.isin(["", "NA", "?", "NaN"])
    clipped = (numbers < 0) | (numbers > 110)
    assert alone.value[0].tolist() == [
        (~missing & ~clipped & numbers.notna()).sum(), clipped.sum(), (~missing & numbers.isna()).sum(), missing.sum()
    ]  # fmt: skip
    assert alone.axes == (("column", ("age", "cost")), ("cells", STATES))
    assert isinstance(alone.sensitivity, Counts)
    assert alone.sensitivity.cells == 2
    ledger = Ledger(tmp_path / "budget.db", Budget(1.0, 1e-6))
    out = answer.release(Budget(0.9, 1e-7), ledger=ledger)
    assert Certificate.from_json(out.certificate.to_json()).verify()
    with pytest.raises(BudgetExceeded):
        answer.release(Budget(0.9, 1e-7), ledger=ledger)


def test_rows_as_places_and_numbers():
    table = Table(VISITS, domain(), unit="patient_id", contributions=2)
    codes = table.codes("region", "smoker")
    assert len(codes) == table.counts().value
    assert np.all((codes >= 0) & (codes < [domain().sizes["region"], domain().sizes["smoker"]]))
    every = Table(VISITS, domain())
    counted = np.zeros_like(every.counts("region", "smoker").value)
    np.add.at(counted, tuple(every.codes("region", "smoker").T), 1)
    assert np.array_equal(counted, every.counts("region", "smoker").value)
    states = every.cell_states("cost").value[0]
    numbers = every.numbers("cost")
    assert len(numbers) == states[0] + states[1]
    assert np.all((numbers >= 0) & (numbers <= 5000))
    assert table.codes("region")[:0].dtype == np.int64
    assert Table(VISITS.iloc[:0], domain()).codes("region", "age").shape == (0, 2)
    for ask in (every.codes, every.numbers, lambda: Table(VISITS, domain(), adjacency=REPLACE).codes("region")):
        with pytest.raises(InvalidInput):
            ask()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda table: table.counts("regoin"), "no column 'regoin'; it has 'age'"),
        (lambda table: table.counts("region", "region"), "twice"),
        (lambda table: table.counts(["region"]), "no column list"),
        (lambda table: table.cell_states("region", "region"), "twice"),
        (lambda table: table.cell_states("x"), "no column 'x'"),
        (lambda table: Table(VISITS, {"region": Boolean()}), "domain must be a Domain"),
        (lambda table: Table(VISITS, Domain({"colour": Boolean()})), "no column 'colour'"),
        (lambda table: Table(VISITS, Domain({"age": Numeric(0, 1)})).counts("age"), "needs bins"),
        (lambda table: Table(VISITS, LARGE).counts("age", "cost"), "100002 x 100002"),
    ],
)
def test_bad_questions_are_refused_before_a_row_is_read(ask, words, monkeypatch):
    def unread(*args):
        raise AssertionError("a row was read")

    monkeypatch.setattr("matrixdp.tables.frames._pandas", unread)
    with pytest.raises(InvalidInput, match=words):
        ask(Table(VISITS, domain()))


LARGE = Domain({"age": Numeric(0, 1, bins=100_000), "cost": Numeric(0, 1, bins=100_000)})


def test_equal_cells_that_are_written_otherwise_do_not_move_others():
    domain = Domain({"v": Categorical(["1.5", "2"])})
    alone, first = ([Decimal("1.5")] * 9, [Decimal("1.50")] + [Decimal("1.5")] * 9)
    counts = [Table(pandas.DataFrame({"v": cells}), domain).counts("v").value for cells in (alone, first)]
    assert np.abs(counts[1] - counts[0]).sum() == 1


def test_a_long_quoted_cell_is_one_cell(tmp_path):
    with (tmp_path / "long.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["a", "b"], ["x", "\n".join(["y,z"] * 60_000)], *[["x", "q"]] * 10])
    assert Table(tmp_path / "long.csv", Domain({"a": Categorical(["x", "y"])})).counts("a").value.tolist() == [
        11,
        0,
        0,
        0,
    ]
