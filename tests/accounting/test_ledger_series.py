"""Series: a plan is charged once, by its first spend, and no part of it is ever used twice."""

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from matrixdp import Budget
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

BUDGET = Budget(3.0, 1e-6)
PLAN = {"sampling_rate": 0.01, "series": "5eed", "planned": 500}
WORKER = [sys.executable, str(Path(__file__).with_name("ledger_worker.py"))]


def guarantee(mu, adjacency="add/remove", variation=0.0):
    return Guarantee(GaussianProfile(mu), adjacency, variation)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "budget.db", BUDGET)


def scenario(*arguments):
    line, one_thread = json.dumps(arguments, default=str), {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(WORKER, input=line, stdout=subprocess.PIPE, text=True, env=one_thread, check=True)
    return json.loads(done.stdout) or pytest.fail("the scenario failed, see above")


def test_the_first_spend_pays_for_the_whole_plan(ledger):
    accountant = Accountant()
    accountant.add(guarantee(1.0), 500, 0.01)
    first = ledger.spend(guarantee(1.0), "epoch 1", count=100, **PLAN)
    assert ledger.spent() == accountant.epsilon(1e-6)
    assert (first.count, first.planned, first.series) == (100, 500, "5eed")
    assert 0 < first.charged_mu < 1
    assert 0 < first.charged_delta < 1e-7
    left = ledger.remaining()
    rest = [ledger.spend(guarantee(1.0), f"epoch {number}", count=100, **PLAN) for number in (2, 3)]
    again = Ledger(ledger.path)  # another process goes on; what is planned is known
    rest += [
        again.spend(guarantee(1.0), f"epoch {number}", count=100, **{**PLAN, "planned": None}) for number in (4, 5)
    ]
    assert [(entry.planned, entry.charged_mu, entry.charged_delta) for entry in rest] == [(500, 0.0, 0.0)] * 4
    assert ledger.spent() == accountant.epsilon(1e-6)
    assert ledger.remaining() == left
    assert [entry.note for entry in ledger.history()] == [f"epoch {number}" for number in range(1, 6)]
    assert ledger.history()[1:] == rest
    assert ledger.verify() == rest[-1].hash
    assert [line.get("planned") for line in ledger.export()] == [None, *[500] * 5, None]


def test_more_than_was_planned_is_refused(ledger):
    ledger.spend(guarantee(1.0), count=450, **PLAN)
    before = ledger.path.read_bytes()
    with pytest.raises(BudgetExceeded, match="500 releases, of which 50 are left, not 51"):
        ledger.spend(guarantee(1.0), count=51, **PLAN)
    assert ledger.path.read_bytes() == before
    ledger.spend(guarantee(1.0), count=50, **PLAN)
    with pytest.raises(BudgetExceeded, match="0 are left"):
        Ledger(ledger.path).spend(guarantee(1.0), **PLAN)
    with pytest.raises(BudgetExceeded, match="of which 3 are left"):
        ledger.spend(guarantee(0.01), count=4, series="another", planned=3)
    assert len(ledger.history()) == 2


def test_a_plan_that_does_not_fit_is_refused_at_its_first_spend(ledger):
    with pytest.raises(BudgetExceeded, match="nothing was spent"):
        ledger.spend(guarantee(1.0), count=1, **{**PLAN, "planned": 50000})
    assert ledger.history() == []
    ledger.spend(guarantee(1.0), count=1, **PLAN)  # the name is free still


@pytest.mark.parametrize(
    "change",
    [
        {"certificate": guarantee(0.5)},
        {"certificate": guarantee(1.0, variation=1e-30)},
        {"sampling_rate": 0.005},
        {"sampling_rate": 1.0},
        {"planned": 501},
        {"planned": 499},
    ],
    ids=str,
)
def test_a_series_stays_what_it_was(ledger, change):
    ledger.spend(guarantee(1.0), count=1, **PLAN)
    with pytest.raises(InvalidInput, match="a new series"):
        ledger.spend(**{"certificate": guarantee(1.0), **PLAN, **change})
    assert len(ledger.history()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"planned": 5}, "planned must come with a series"),
        ({"series": "a"}, "planned must be given with the first spend"),
        ({"series": "", "planned": 5}, "series must be a name"),
        ({"series": "two\nlines", "planned": 5}, "series must be a name"),
        ({"series": 7, "planned": 5}, "series must be a name"),
        ({"series": "a", "planned": 0}, "planned"),
        ({"series": "a", "planned": 1.5}, "planned"),
        ({"series": "a", "planned": 2**63}, "planned must be below"),
    ],
)
def test_bad_series_are_refused(ledger, arguments, words):
    with pytest.raises(InvalidInput, match=words):
        ledger.spend(guarantee(0.1), **arguments)
    assert ledger.history() == []


def test_gaussian_series_are_charged_what_they_are(ledger):
    ledger.spend(guarantee(0.1), count=1, series="days", planned=25)
    ledger.spend(guarantee(0.1))
    assert ledger.history()[0].charged_mu == pytest.approx(0.5, rel=1e-12)
    assert ledger.history()[0].charged_delta == 0.0
    for _ in range(24):
        ledger.spend(guarantee(0.1), series="days")
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(0.1), series="days")


def test_threads_use_a_plan_up_and_no_more(ledger):
    allowed, spent = [], []

    def work():
        for _ in range(20):
            try:
                ledger.spend(guarantee(1.0), count=5, **PLAN)
                allowed.append(5)
            except BudgetExceeded:
                spent.append(5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sum(allowed), sum(spent)) == (500, 300)
    assert sum(entry.count for entry in ledger.history()) == 500


def test_processes_use_a_plan_up_and_no_more(tmp_path):
    found = scenario("share", tmp_path / "budget.db", 6, 40, 150)
    assert sum(found["allowed"]) == found["used"] == 150
    assert found["charges"] == 1


def test_kills_never_let_a_step_be_used_twice(tmp_path):
    found = scenario("broken_off", tmp_path, 60, 400)
    assert found["released"] <= found["used"] <= 400
    assert found["released"] > 0  # how many depends on the load of the machine
    assert found["charges"] == 1
    ledger = Ledger(tmp_path / "ledger.db")
    assert ledger.history()[0].charged_mu == pytest.approx(0.001 * math.sqrt(400))
    ledger.verify()
