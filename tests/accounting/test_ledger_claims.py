"""What a ledger's statement may claim, and what no entry may hide."""

import json

import pytest

from ledgers import BUDGET, guarantee
from matrixdp.accounting.ledger import file as file_store
from matrixdp.accounting.ledger.totals import Total
from matrixdp.budget import Budget
from matrixdp.errors import BudgetExceeded, InvalidInput, LedgerError

MIXED = "cannot be added up"


def at(monkeypatch, year):
    monkeypatch.setattr(file_store, "now", lambda: f"{year}-06-01T00:00:00.000000+00:00")


def test_no_total_is_claimed_for_different_units(new, monkeypatch):
    """Also where the other unit was protected in another year."""
    ledger = new(BUDGET)
    at(monkeypatch, 2025)
    ledger.spend(guarantee(0.2))
    assert MIXED not in ledger.statement()
    at(monkeypatch, 2026)
    ledger.spend(guarantee(0.1), unit="patient")
    for year in (None, 2026):
        page, fields = (ledger.statement(year, kind) for kind in ("markdown", "json"))
        assert MIXED in page
        assert "is right in half" not in page
        assert json.loads(fields)["deployment"]["privacy_loss"]["privacy_parameters"]["epsilon"] is None


def test_a_year_is_not_said_to_have_used_what_was_charged_in_another(new, monkeypatch):
    ledger = new(BUDGET)
    at(monkeypatch, 2025)
    ledger.spend(guarantee(0.1), series="s", planned=3)
    at(monkeypatch, 2026)
    ledger.spend(guarantee(0.1), series="s")
    assert "2026 alone" not in ledger.statement(2026)
    assert json.loads(ledger.statement(2026, "json"))["matrixdp"]["spent_in_year"] is None


def test_a_ledger_of_fixed_releases_claims_nothing_about_choices(new):
    ledger = new(BUDGET, adaptive=False)
    ledger.spend(guarantee(0.1))
    assert "in view of earlier" not in ledger.statement()
    assert "adaptive" not in json.loads(ledger.statement(kind="json"))["deployment"]["accounting"]["composition"]


def test_an_entry_that_was_charged_too_little_is_found(new, monkeypatch):
    """As whoever may insert entries could write it, with a chain that is right."""
    ledger = new(BUDGET)
    with monkeypatch.context() as patch:
        patch.setattr(Total, "_charge", lambda *_: {"charged_mu": 0.0, "charged_delta": 0.0})
        patch.setattr("matrixdp.accounting.ledger.totals.is_enough", lambda *_: True)
        ledger.spend(guarantee(0.3))
    with pytest.raises(LedgerError, match="charged less"):
        new().spent()


def test_the_rest_of_a_series_is_for_the_analyst_who_was_charged(new):
    steward = new(BUDGET)
    steward.set_quota("ada", Budget(2.0, 1e-6))
    steward.set_quota("bob", Budget(0.01, 1e-6))
    new(analyst="ada").spend(guarantee(0.1), series="s", planned=10)
    with pytest.raises(InvalidInput, match="analyst must be the one who was charged"):
        new(analyst="bob").spend(guarantee(0.1), series="s")
    new(analyst="ada").spend(guarantee(0.1), series="s")


def test_what_is_reserved_is_refused_once_the_budget_is_exceeded(new):
    ledger = new(BUDGET)
    ledger.reserve("later", guarantee(0.1), count=2)
    ledger.spend(guarantee(0.1), reservation="later")
    ledger.record({"mu": 5.0}, "elsewhere", made=True, adjacency="add/remove")
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(0.1), reservation="later")
