"""Means, quantiles, regressions and marginals of people's tables: right, labelled, certified, and paid for once."""

import inspect
import json
import pickle
from typing import get_type_hints

import numpy as np
import pandas
import pytest

from hospital import DIAGNOSES, REGIONS, domain, hospital
from matrixdp import REPLACE, Budget, Certificate, Counts, Ledger, compare, release
from matrixdp.errors import BudgetExceeded, InvalidInput, NotApplicable
from matrixdp.tables import Boolean, Categorical, Domain, Numeric, Ordered, Table, TableAnswer
from matrixdp.tables.logistic import LogisticAnswer
from matrixdp.tables.mean import STEPS

BUDGET = Budget(1.0, 1e-6)
PLENTY = Budget(10.0, 1e-4)
SURE = 1 - 1e-8
VISITS = hospital(150)
ASKED = {
    "mean": lambda table: table.means("cost"),
    "means": lambda table: table.means("cost", by=("region", "smoker")),
    "sums": lambda table: table.sums("cost", by=("region",)),
    "variances": lambda table: table.variances("cost", "age"),
    "correlation": lambda table: table.correlation("cost", "age", "smoker"),
    "components": lambda table: table.pca("cost", "age", "severity"),
    "quantiles": lambda table: table.quantiles("age", [0.25, 0.5, 0.75]),
    "regression": lambda table: table.regression("cost", on=("age", "sex", "smoker", "severity")),
    "marginals": lambda table: table.marginals(("region", "diagnosis"), ("age", "sex")),
    "up to two": lambda table: table.marginals(up_to=2, ordered={"severity": "ranges"}),
}


def clean(rows=4000, seed=3):
    """Rows without messes, and what their columns can say."""
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "region": rng.choice(REGIONS, rows),
            "grade": rng.choice(["a", "b", "c"], rows),
            "ok": rng.random(rows) < 0.4,
            "age": rng.uniform(0, 100, rows),
        }
    )
    shift = frame["region"].map(dict(zip(REGIONS, (0, 5, 10, 15), strict=True)))
    frame["cost"] = 20 + 0.3 * frame["age"] + 10 * frame["ok"] + 3 * frame["grade"].map(ord).sub(97) + shift
    public = {
        "region": Categorical(REGIONS), "grade": Ordered(["a", "b", "c"]), "ok": Boolean(),
        "age": Numeric(0, 100), "cost": Numeric(0, 100),
    }  # fmt: skip
    return frame, Domain(public)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("unit", [{}, {"unit": "patient_id", "contributions": 3}], ids=["rows", "units"])
def test_every_answer_is_certified_and_charged_once(asked, unit, tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    answer = pickle.loads(pickle.dumps(ASKED[asked](Table(VISITS, domain(), **unit))))
    assert "private" in repr(answer)
    out = answer.release(BUDGET, ledger=ledger, note="asked")
    certificate = Certificate.from_json(out.certificate.to_json())
    assert certificate.verify()
    assert certificate.meets(BUDGET)
    assert [(entry.note, entry.unit) for entry in ledger.history()] == [("asked", unit.get("unit", "record"))]
    for kind in ("pandas", "polars", "arrow"):
        frame = out.table(kind, simultaneous=True)
        assert len(frame) == answer.cells
    each, together = out.table(), out.table(simultaneous=True)
    assert np.all(together["low"] <= each["low"])
    assert np.all(each["low"] <= each["value"])
    assert np.all(each["value"] <= each["high"])


@pytest.mark.parametrize("asked", ASKED)
def test_a_certificate_for_fewer_rows_of_a_unit_is_not_verified(asked):
    out = ASKED[asked](Table(VISITS, domain(), unit="patient_id", contributions=3)).release(BUDGET)
    document = json.loads(out.certificate.to_json())
    assert Certificate.from_json(json.dumps(document)).verify()
    document["query"]["parameters"]["contributions"] = 4
    assert not Certificate.from_json(json.dumps(document)).verify()


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("unit", [{}, {"unit": "patient_id", "contributions": 3}], ids=["rows", "units"])
def test_one_unit_changes_no_more_than_the_set_says(asked, unit):
    """Up to three rows of each unit, so that all count; without one unit the value moves within the set's radius."""
    visits = VISITS.groupby("patient_id").head(3 if unit else 1)
    patient = visits["patient_id"].value_counts().drop("", errors="ignore").index[0]
    answers = [
        ASKED[asked](Table(part, domain(), **unit)) for part in (visits, visits[visits["patient_id"] != patient])
    ]
    moved = answers[0].value - answers[1].value
    assert np.any(moved)
    radius = answers[0].sensitivity.frobenius_radius(moved.shape)
    assert np.linalg.norm(moved) <= radius * (1 + 1e-12)


@pytest.mark.parametrize("asked", ASKED)
def test_no_rows_are_no_error(asked):
    for part in (VISITS.iloc[:0], VISITS.assign(**dict.fromkeys(VISITS.columns, None))):
        for unit in ({}, {"unit": "patient_id", "contributions": 2}):
            assert len(ASKED[asked](Table(part, domain(), **unit)).release(BUDGET).table())


def covered(frame, true, widest):
    """Whether all intervals hold the truth, with a false-alarm rate of 1e-8, and none is wide."""
    inside = (frame["low"] <= np.asarray(true)) & (np.asarray(true) <= frame["high"])
    return inside.all() and (frame["high"] - frame["low"]).max() < widest


def test_with_little_noise_the_numbers_are_right():
    frame, public = clean()
    table = Table(frame, public)
    found = table.means("age", by=("region", "ok")).release(PLENTY).table(level=SURE, simultaneous=True)
    true = frame.assign(ok=frame["ok"].map({True: "true", False: "false"})).groupby(["region", "ok"])["age"].mean()
    assert covered(found.set_index(["region", "ok"]).loc[true.index], true, 5)
    assert list(found)[2:] == ["value", "standard_error", "low", "high"]
    found = table.quantiles("age", [0.1, 0.5], bins=500).release(PLENTY).table(level=SURE, simultaneous=True)
    assert covered(found, frame["age"].quantile([0.1, 0.5]), 8)
    assert list(found) == ["quantile", "value", "low", "high"]
    asked = table.regression("cost", on=("age", "ok", "grade", "region"))
    found = asked.release(PLENTY).table(level=SURE, simultaneous=True)
    assert found["term"].tolist() == ["intercept", "age", "ok", "grade", "region=south", "region=east", "region=west"]
    assert covered(found, [20, 0.3, 10, 3, 5, 10, 15], 6)
    assert found["reliable"].all()
    found = table.means("ok").release(PLENTY).table(level=SURE)
    assert covered(found, [frame["ok"].mean()], 0.05)


def test_marginals_have_labels_and_agree():
    table = Table(VISITS, domain())
    out = table.marginals(("region", "diagnosis"), ("sex",)).release(PLENTY)
    frame = out.table(level=SURE, simultaneous=True)
    assert list(frame) == ["region", "diagnosis", "sex", "value", "standard_error", "low", "high"]
    both, sexes = frame[frame["sex"].isna()], frame[frame["sex"].notna()]
    true = table.counts("region", "diagnosis").value
    assert covered(both, true.ravel(), 30)
    assert covered(sexes, table.counts("sex").value, 30)
    assert both["region"].tolist()[:8] == ["north"] * 7 + ["south"]
    assert both["diagnosis"].tolist()[:7] == [*DIAGNOSES, "other", "missing"]
    turned = out.of("diagnosis", "region").table()
    assert np.allclose(turned["value"], both["value"].to_numpy().reshape(true.shape).T.ravel())
    assert turned["diagnosis"].tolist()[:6] == ["asthma"] * 6
    assert out.of("region").table()["value"].sum() == pytest.approx(sexes["value"].sum())
    with pytest.raises(InvalidInput, match="one table of the plan"):
        out.of("region", "sex")


# Every kind of answer that a table has; quantiles in few bins, since a plan has noise on all of them.
KINDS = ASKED | {
    "counts": lambda table: table.counts("region"),
    "cell states": lambda table: table.cell_states("age", "sex"),
    "quantiles": lambda table: table.quantiles("age", [0.5], bins=64),
    "covariance": lambda table: table.covariance("cost", "age"),
    "logistic regression": lambda table: table.logistic_regression("smoker", on=("age", "sex"), steps=4),
}
PLANNED_SLOWLY = ("mean", "means", "sums")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in PLANNED_SLOWLY)) for k in KINDS])
def test_every_answer_goes_into_plans_shared_budgets_compare_and_release(kind, tmp_path):
    answer = KINDS[kind](Table(VISITS, domain()))
    shape, sensitivity = answer.shape, answer.sensitivity
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    other = Counts(1)
    plan = Budget(1.0, 1e-6).plan([sensitivity, other], shapes=[shape, (4,)])
    for budget in (plan[0], Budget(1.0, 1e-6).shared(2)):
        out = answer.release(budget, ledger=ledger)
        assert type(out.certificate).from_json(out.certificate.to_json()).verify()
        assert np.all(np.isfinite(out.table()["value"]))
    assert len(ledger.history()) == 2
    with pytest.raises(BudgetExceeded):
        answer.release(plan[0], ledger=ledger)
    assert compare(shape, sensitivity, BUDGET).rows
    if kind == "logistic regression":  # whose releases depend on each other
        with pytest.raises(InvalidInput, match="release"):
            release(*answer, BUDGET)
    else:
        assert release(*answer, BUDGET, query=answer.query).certificate.meets(BUDGET)


def test_the_kinds_are_all_that_a_table_has():
    private = (TableAnswer, LogisticAnswer)
    methods = {name: method for name, method in inspect.getmembers(Table, inspect.isfunction) if name[0] != "_"}
    hints = {name: get_type_hints(method).get("return") for name, method in methods.items()}
    asked = {name for name, found in hints.items() if inspect.isclass(found) and issubclass(found, private)}
    used = "".join(inspect.getsource(function) for function in KINDS.values())
    assert asked
    assert all(f"table.{name}(" in used for name in asked), asked


def test_what_needs_a_delta_says_so_before_anything_is_spent(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    with pytest.raises(NotApplicable, match="delta = 0"):
        ASKED["marginals"](Table(VISITS, domain())).release(Budget(1.0, 0.0), ledger=ledger)
    assert not ledger.history()


@pytest.mark.parametrize("unit", [{}, {"unit": "patient_id", "contributions": 3}], ids=["rows", "units"])
@pytest.mark.parametrize("asked", ["regression", "components", "variances", "correlation"])
def test_moments_keep_delta_0(asked, unit):
    """Laplace noise on products, for a set that holds what a unit changes and is no larger than it must be."""
    visits = VISITS.groupby("patient_id").head(3 if unit else 1)
    patient = visits["patient_id"].value_counts().drop("", errors="ignore").index[0]
    answers = [
        ASKED[asked](Table(part, domain(), **unit)) for part in (visits, visits[visits["patient_id"] != patient])
    ]
    pure = answers[0].pure
    assert pure.sensitivity.contains(pure.value - answers[1].pure.value)
    out = answers[0].release(Budget(1.0, 0.0))
    certificate = Certificate.from_json(out.certificate.to_json())
    assert certificate.verify()
    assert certificate.meets(Budget(1.0, 0.0))
    assert out.certificate.epsilon(0.0) == pytest.approx(1.0)
    assert np.all(np.isfinite(out.table()["value"]))
    document = json.loads(out.certificate.to_json())
    if unit:
        document["query"]["parameters"]["contributions"] = 4
        assert not Certificate.from_json(json.dumps(document)).verify()


def test_sums_variances_and_components_are_those_of_the_rows():
    frame, public = clean()
    table = Table(frame, public)
    found = table.sums("cost", by=("grade",)).release(PLENTY).table(level=SURE, simultaneous=True)
    assert covered(found, [*frame.groupby("grade")["cost"].sum(), 0, 0], 2000)
    found = table.variances("age", "cost").release(PLENTY).table(level=SURE)
    assert covered(found, frame[["age", "cost"]].var(ddof=0), 60)
    numbers = frame[["age", "cost"]].assign(grade=frame["grade"].map(ord))
    values, vectors = np.linalg.eigh(np.corrcoef(numbers.T))
    truth = np.column_stack([vectors.T[::-1][:2], values[::-1][:2] / 3])
    truth[:, :3] *= np.sign(truth[np.arange(2), np.argmax(np.abs(truth[:, :3]), axis=1)])[:, None]
    found = table.pca("age", "cost", "grade").release(PLENTY).table(level=SURE)
    assert covered(found, truth.ravel(), 0.5)
    assert found["reliable"].all()


def test_units_count_with_so_many_rows():
    one, three = (Table(VISITS, domain(), unit="patient_id", contributions=k) for k in (1, 3))
    assert three.means("cost").sensitivity.radius == 3 * one.means("cost").sensitivity.radius == 3 * STEPS
    assert three.means("cost").value.sum() > one.means("cost").value.sum()
    errors = [ASKED["marginals"](table).release(BUDGET).table()["standard_error"].max() for table in (one, three)]
    assert errors[1] == pytest.approx(3 * errors[0], rel=0.01)
    laws = [ASKED["quantiles"](table).release(BUDGET).certificate.law for table in (one, three)]
    assert (laws[0].rate, laws[1].scale) == pytest.approx((3 * laws[1].rate, 3 * laws[0].scale))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda table: table.means("region"), "numeric, boolean or ordered"),
        (lambda table: table.means("csot"), "no column 'csot'"),
        (lambda table: table.means("cost", by="region"), "sequence"),
        (lambda table: table.means("cost", by=("cost",)), "twice"),
        (lambda table: table.quantiles("sex", [0.5]), "numeric for quantiles"),
        (lambda table: table.quantiles("age", [1.5]), "between 0 and 1"),
        (lambda table: table.quantiles("age", [0.5], bins=[0, 50]), "end with the upper one"),
        (lambda table: table.quantiles("age", [0.5], bins=2**20 + 1), "at most 1048576"),
        (lambda table: table.quantiles("age", [0.5], bins="all"), "whole"),
        (lambda table: table.regression("region", on=("age",)), "numeric, boolean or ordered"),
        (lambda table: table.regression("cost", on=()), "1 to 63 features"),
        (lambda table: table.regression("cost", on=("age", "cost")), "twice"),
        (lambda table: table.regression("cost", on=("age",), ridge=-1), "ridge"),
        (lambda table: table.regression("cost", on=("visit",)), "numeric, boolean or ordered"),
        (lambda table: table.marginals(), "name the tables"),
        (lambda table: table.marginals(("age",), up_to=1), "not both"),
        (lambda table: table.marginals("age"), "sequence"),
        (lambda table: table.marginals(("age", "agee")), "no column 'agee'"),
        (lambda table: table.marginals(("age",), budget=1), "not budget"),
        (lambda table: table.marginals(("age",)).release(BUDGET, "laplace"), "noise of their own"),
        (lambda table: table.marginals(("age",), weights={("age",): 2.0}).release(BUDGET.shared(2)), "whole budget"),
        (lambda table: table.pca("age", components=2), "at most as many"),
        (lambda table: table.variances("age", "age"), "twice"),
        (lambda table: table.variances(), "name 1 to"),
        (lambda table: table.covariance("region"), "numeric, boolean or ordered"),
    ],
)
def test_bad_questions_are_refused(ask, words):
    with pytest.raises(InvalidInput, match=words):
        ask(Table(VISITS, domain()))


@pytest.mark.parametrize("asked", ASKED)
def test_other_adjacencies_are_refused(asked):
    with pytest.raises(InvalidInput, match="add/remove"):
        ASKED[asked](Table(VISITS, domain(), adjacency=REPLACE))


def test_what_cannot_be_computed_is_not_paid_for(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    answer = ASKED["means"](Table(VISITS, domain()))

    def no_intervals(release, level):
        raise NotApplicable("no quantiles")

    answer.computed = no_intervals
    with pytest.raises(NotApplicable, match="no quantiles"):
        answer.release(BUDGET, ledger=ledger)
    assert ledger.history() == []


def test_a_column_with_one_label_has_no_table_of_its_own():
    frame, public = clean(50)
    one = Categorical(["x"], missing="out", unexpected="out")
    table = Table(frame.assign(one="x"), Domain({**public, "one": one}))
    assert [name for name, _ in table.marginals(up_to=1).axes] == ["region", "grade", "ok"]
