"""Ledgers with delta = 0: pure epsilons add up, to the last digit, in each store; all else is refused."""

import json
import math

import pytest

from matrixdp import Budget, Counts, release
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.errors import BudgetExceeded

PURE, TENTH = Budget(1.0, 0), Budget(0.1, 0)


def tenth(ledger, **options):
    return release([3, 4], Counts(1), TENTH, ledger=ledger, **options)


@pytest.mark.parametrize("adaptive", [True, False])
def test_ten_tenths_fit_and_an_eleventh_does_not(new, adaptive):
    ledger = new(PURE, adaptive=adaptive)
    out = tenth(ledger, note="first")
    assert ledger.left(like=out.certificate)[0].releases == 9
    ledger.spend(out.certificate, count=4)
    ledger.record({"epsilon": 0.25, "delta": 0}, adjacency="add/remove", made=True)
    assert 0.25 - 1e-15 < ledger.remaining().epsilon <= 0.25
    assert ledger.remaining().mu == 0
    release([3], Counts(1), Budget(0.25, 0), ledger=ledger)
    assert ledger.spent() == 1.0
    assert ledger.remaining().epsilon == 0
    for budget in (Budget(1e-6, 0), Budget(1e-6, 1e-9)):
        with pytest.raises(BudgetExceeded):
            release([3], Counts(1), budget, "laplace", ledger=ledger)
    again = new()
    assert again.spent() == 1.0
    assert [entry.in_words for entry in again.history()][:2] == ["epsilon 0.1 at delta 0"] * 2
    assert verify_export([json.dumps(line) for line in again.export()])


def test_an_export_that_claims_less_is_found_out(new):
    ledger = new(PURE)
    tenth(ledger)
    lines = ledger.export()
    lines[-1]["spent"] = 0.05
    assert not verify_export([json.dumps(line) for line in lines])


def test_quotas_and_reservations_of_pure_releases(new):
    steward = new(PURE)
    steward.set_quota("ada", Budget(0.4, 0))
    ada = new(analyst="ada")
    certificate = tenth(None).certificate
    ada.reserve("march", certificate, count=3)
    tenth(ada)
    assert [row.epsilon for row in ada.left()][1] < 1e-15
    with pytest.raises(BudgetExceeded, match="quota"):
        tenth(ada)
    ada.give_back("march")
    tenth(ada)
    assert steward.spent() == pytest.approx(0.2)
    steward.set_quota("ben", Budget(0.3, 1e-9))  # pure releases keep any delta
    tenth(new(analyst="ben"))


def test_a_statement_says_that_delta_is_0(new):
    ledger = new(PURE)
    tenth(ledger, note="two counts")
    page = ledger.statement()
    assert "two counts; epsilon 0.1 at delta 0" in page
    assert "epsilon 1, delta 0" in page
    found = json.loads(ledger.statement(kind="json"))
    assert found["deployment"]["dp_flavor"]["name"] == "Pure DP"
    assert found["deployment"]["privacy_loss"]["privacy_parameters"] == {"epsilon": 0.1, "delta": 0.0}
    assert found["matrixdp"]["guess"] == pytest.approx((1 + math.tanh(0.05)) / 2)


def test_an_entry_of_tables_says_what_it_guarantees_with_its_sampler(new):
    ledger = new(Budget(3.0, 1e-6))
    release([3, 4], Counts(1), Budget(0.5, 1e-7), "laplace", ledger=ledger)
    release([3, 4], Counts(2), Budget(0.5, 1e-7), "discrete-gaussian", ledger=ledger)
    assert [entry.in_words for entry in ledger.history()] == ["epsilon 0.5 at delta 1e-07"] * 2
