"""Logistic regression of a table: against scikit-learn, the coverage of its intervals, and what it costs."""

import hashlib
import json

import numpy as np
import pandas
import pytest
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression

from hospital import domain, hospital
from matrixdp import Budget, Counts, Ledger
from matrixdp.accounting.composition import Composition
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.tables import Boolean, Categorical, Domain, Numeric, Table, logistic
from matrixdp.tables.logistic import GRADIENT, HESSIAN, MOMENT, _statistic

BUDGET = Budget(1.0, 1e-6)
FALSE_ALARM = 1e-6
ON = ("age", "cost", "sex")
PUBLIC = Domain({"age": Numeric(0, 100), "cost": Numeric(0, 5000), "sex": Categorical(["f", "m"]), "ill": Boolean()})


def people(count=5000):
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": np.clip(rng.normal(50, 20, count), 0, 100),
            "cost": np.clip(rng.gamma(3, 600, count), 0, 5000),
            "sex": rng.choice(["f", "m"], count),
        }
    )
    odds = 0.04 * (frame["age"] - 50) + 0.0005 * frame["cost"] - 0.5 * (frame["sex"] == "m") - 1
    return frame.assign(ill=rng.random(count) < 1 / (1 + np.exp(-odds)))


def fitted(frame, ridge=1.0):
    """The fit without noise, of features in their own units."""
    middle, half = np.array([50, 2500, 0.5]), np.array([50, 2500, 0.5])
    features = np.column_stack([frame["age"], frame["cost"], frame["sex"] == "m"])
    found = LogisticRegression(C=1 / ridge, tol=1e-10, max_iter=1000).fit((features - middle) / half, frame["ill"])
    coefficients = found.coef_[0] / half
    return np.append(found.intercept_[0] - coefficients @ middle, coefficients)


def test_intervals_cover_the_fit_without_noise():
    """Near the level; with a third of the standard error it must show that they do not."""
    frame, rounds = people(), 100
    answer, truth = Table(frame, PUBLIC).logistic_regression("ill", ON, steps=12), fitted(frame)
    off = []
    for _ in range(rounds):
        out = answer.release(Budget(8.0, 1e-6)).table(level=0.9)
        off.append((out["value"] - truth) / out["standard_error"])
        assert out["reliable"].all()
        assert np.allclose(out["high"] - out["low"], 2 * 1.6449 * out["standard_error"], rtol=1e-3)
    half = 1.6449
    covered = np.sum(np.abs(off) <= half, axis=0)
    least = binom.ppf(FALSE_ALARM / 4, rounds, 0.9)
    assert np.all(covered >= least)
    assert np.any(np.sum(np.abs(off) <= half / 3, axis=0) < least)  # else they are three times as wide as needed


def test_it_is_labelled_certified_and_charged_once(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    table = Table(hospital(150), domain(), unit="patient_id", contributions=3)
    answer = table.logistic_regression("smoker", on=("age", "sex", "severity"), steps=4)
    assert "private" in repr(answer)
    out = answer.release(BUDGET, ledger=ledger, note="smokers")
    assert [(entry.note, entry.unit) for entry in ledger.history()] == [("smokers", "patient_id")]
    assert out.table()["term"].tolist() == ["intercept", "age", "sex=m", "severity"]
    each, together = out.table(), out.table("polars", simultaneous=True).to_pandas()
    assert np.all((together["low"] < each["low"]) & (each["low"] < each["value"]))
    for text in (out.statement(), out.statement("html")):
        assert "a logistic regression" in text
        assert "Everybody with an entry in the column patient" in text
    assert out.plot() is not None
    out.certificate.save(tmp_path / "fit.json")
    assert hashlib.sha256((tmp_path / "fit.json").read_bytes()).hexdigest() in out.statement()
    written = out.certificate.to_json()
    found = Composition.from_json(written)
    assert found.verify()
    assert found.meets(BUDGET)
    document = json.loads(written)
    for part in document["parts"]:
        changed = json.loads(written)
        place = document["parts"].index(part)
        changed["parts"][place]["certificate"]["query"]["parameters"]["contributions"] = 4
        assert not Composition.from_json(json.dumps(changed)).verify()


def test_one_row_changes_no_more_than_the_sets_say():
    rng = np.random.default_rng(1)
    for _ in range(50):
        z = np.append(1.0, rng.choice([-1.0, 1.0, rng.uniform(-1, 1)], 3))[None]
        p = rng.random()
        for of, row in ((MOMENT, z), (GRADIENT, p * z), (HESSIAN, np.sqrt(p * (1 - p)) * z)):
            answer = _statistic(of, row, "add/remove", None)
            assert answer.sensitivity.contains(answer.value)
    widest = _statistic(HESSIAN, np.ones((1, 4)) / 2, "add/remove", None)
    assert not widest.sensitivity.contains(1.001 * widest.value)


def test_what_a_row_contributes_depends_on_that_row_alone(monkeypatch):
    """Whoever else is in the table, to the last bit: all others would otherwise change with a neighbour."""
    rng = np.random.default_rng(5)
    features, positive = rng.uniform(-1, 1, (1000, 63)), np.zeros(1000, dtype=bool)
    directions = rng.normal(size=(20, 64))

    def contributions(chosen):
        """The rows that are added up, with the same answers for all data."""
        seen = []

        def noisy(self, of, rows, rng):
            seen.append(np.array(rows))
            return 300 * directions[len(seen) % 20] if of == GRADIENT else 4 * np.eye(64)

        monkeypatch.setattr(logistic.LogisticRegression, "_noisy", noisy)
        ends = -np.ones(63), np.ones(63)
        fit = logistic.LogisticRegression(features[chosen], positive[chosen], *ends, BUDGET, penalty=1.0, steps=20)
        fit.release()
        return seen

    everybody = contributions(np.arange(1000))
    for left_out in (0, 1, 500, 999):
        others = np.delete(np.arange(1000), left_out)
        for whole, part in zip(everybody, contributions(others), strict=True):
            assert np.array_equal(whole[others], part)


def test_no_rows_are_no_error():
    out = Table(people(0), PUBLIC).logistic_regression("ill", ON, steps=2).release(BUDGET)
    assert np.all(np.isfinite(out.table()["value"]))
    assert not out.table()["reliable"].any()
    assert "may hold less often" in out.plot().get_supxlabel()


@pytest.mark.parametrize(
    ("ask", "budget", "error", "words"),
    [
        ({"target": "age", "on": ("cost",)}, BUDGET, InvalidInput, "two values"),
        ({"target": "height"}, BUDGET, InvalidInput, "height"),
        ({"on": ("ill",)}, BUDGET, InvalidInput, "twice"),
        ({"on": ()}, BUDGET, InvalidInput, "features"),
        ({"on": "age"}, BUDGET, InvalidInput, "sequence"),
        ({"ridge": 0.0}, BUDGET, InvalidInput, "ridge"),
        ({"steps": 0}, BUDGET, InvalidInput, "steps"),
        ({}, Budget(1.0, 0.0), NotApplicable, "delta = 0"),
        ({}, 1.0, InvalidInput, "budget"),
        ({}, BUDGET.shared(2, like=Counts(1)), InvalidInput, "shared reference"),
    ],
)
def test_bad_input_is_refused_before_anything_is_spent(ask, budget, error, words, tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    asked = {"target": "ill", "on": ON, **ask}
    with pytest.raises(error, match=words):
        Table(people(20), PUBLIC).logistic_regression(**asked).release(budget, ledger=ledger)
    assert not ledger.history()
