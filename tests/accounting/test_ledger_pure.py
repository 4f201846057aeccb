"""Ledgers with delta = 0: pure epsilons add up, to the last digit, in each store; all else is refused."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest

from matrixdp import Budget, Counts, Ledger, certify, release
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.totals import Total
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.privacy.drawing import Drawing, costed
from matrixdp.privacy.guarantee import Guarantee

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


def test_a_stated_pure_guarantee_is_reserved_as_it_is(new):
    """A release that keeps delta = 0 is drawn exactly, so no error of a sampler is reserved with it."""
    ledger = new(PURE)
    profile = release([3, 4], Counts(1), TENTH).certificate.profile
    ledger.reserve("later", Guarantee(profile, "add/remove"), count=2)
    assert ledger.spent() == pytest.approx(0.2)
    tenth(new(reservation="later"))
    assert ledger.spent() == pytest.approx(0.2)
    assert ledger.give_back("later") == 1


def test_a_law_that_was_not_drawn_is_refused(new):
    """Its own delta is 0; that of what `law.sample()` draws from tables is not."""
    ledger, drawn = new(PURE), tenth(None)
    undrawn = certify(drawn.noise, Counts(1))
    assert undrawn.delta(0.1) == 0 < costed(Drawing(), drawn.noise, Counts(1)).total_variation
    for charge in (ledger.spend, partial(ledger.record, adjacency="add/remove")):
        with pytest.raises(InvalidInput, match="how the noise was drawn"):
            charge(undrawn)
    assert ledger.history() == []
    ledger.reserve("march", undrawn)  # releases nothing
    with pytest.raises(InvalidInput, match="how the noise was drawn"):
        ledger.spend(undrawn, reservation="march")
    ledger.spend(drawn.certificate, reservation="march")
    ledger.spend(Guarantee(undrawn.profile, undrawn.adjacency))  # a statement, which the caller answers for


def forged(law):
    """A certificate whose drawing counts no error, and does not say why."""
    return replace(certify(law, Counts(1)), drawing=Drawing(step=law.step, float_safe=True))


@pytest.mark.parametrize("make", [lambda law: certify(law, Counts(1)), forged])
def test_a_quota_with_delta_0_refuses_a_law_that_was_not_drawn(new, make):
    steward, drawn = new(Budget(3.0, 1e-6)), tenth(None)
    undrawn = make(drawn.noise)
    steward.set_quota("team", PURE, members=["ada", "ben"])
    steward.set_quota("cem", Budget(1.0, 1e-9))
    ada = new(analyst="ada")
    ada.reserve("march", undrawn)
    ada.reserve("april", drawn.certificate)
    before = steward.export()
    for options in ({}, {"reservation": "march"}, {"reservation": "april"}, {"series": "may", "planned": 2}):
        with pytest.raises(InvalidInput, match="how the noise was drawn"):
            ada.spend(undrawn, **options)
    with pytest.raises(InvalidInput, match="how the noise was drawn"):
        ada.record(undrawn, adjacency="add/remove", made=True)
    assert steward.export() == before
    ada.spend(drawn.certificate, reservation="march")
    ada.spend(Guarantee(undrawn.profile, undrawn.adjacency))
    new(analyst="cem").spend(undrawn)
    found = verify_export([json.dumps(line) for line in steward.export()])
    assert bool(found) is (make is not forged)  # an export computes the error of a drawing again


def test_a_quota_with_delta_0_is_not_set_after_a_law_that_was_not_drawn(new):
    steward = new(Budget(3.0, 1e-6))
    undrawn = certify(tenth(None).noise, Counts(1))
    steward.set_quota("ada", Budget(1.0, 1e-9))
    new(analyst="ada").spend(undrawn)
    for options in ({}, {"per": "month"}, {"per": "year"}):
        with pytest.raises(InvalidInput, match="delta above 0"):
            new().set_quota("team", PURE, members=["ben", "ada"], **options)
    assert [quota.name for quota in steward.quotas()] == ["ada"]
    steward.set_quota("ben", PURE)


def test_a_month_ends_what_a_law_that_was_not_drawn_forbids(path, monkeypatch):
    days = ["2026-10-31"]
    monkeypatch.setattr("matrixdp.accounting.ledger.file.now", lambda: f"{days[-1]}T12:00:00.000000+00:00")
    ledger = Ledger(path, Budget(3.0, 1e-6), analyst="ada")
    ledger.spend(certify(tenth(None).noise, Counts(1)))
    days.append("2026-11-01")
    with pytest.raises(InvalidInput, match="delta above 0"):
        ledger.set_quota("ada", PURE, per="quarter")
    ledger.set_quota("ada", PURE, per="month")
    tenth(ledger)
    assert verify_export([json.dumps(line) for line in ledger.export()])


def test_an_export_with_a_law_that_was_not_drawn_under_a_quota_is_found_out(new, monkeypatch):
    monkeypatch.setattr(Total, "is_pure", lambda total, analyst: False)
    monkeypatch.setattr(Total, "has_undrawn", lambda total, quota, time: False)
    ledger = new(Budget(3.0, 1e-6), analyst="ada")
    ledger.spend(certify(tenth(None).noise, Counts(1)))
    ledger.set_quota("ada", PURE)
    ledger.spend(certify(tenth(None).noise, Counts(1)))
    lines = [json.dumps(line) for line in ledger.export()]
    monkeypatch.undo()
    assert [str(finding) for finding in verify_export(lines).findings] == [
        "entry 2: the quota has delta = 0, and an earlier certificate does not say how the noise was drawn",
        "entry 3: its certificate does not say how the noise was drawn, which delta = 0 needs",
    ]


def test_a_ledger_with_delta_0_refuses_a_drawing_without_error_that_is_not_exact(new):
    with pytest.raises(InvalidInput, match="how the noise was drawn"):
        new(PURE).spend(forged(tenth(None).noise))


def test_an_export_with_a_law_that_was_not_drawn_is_found_out(new, monkeypatch):
    monkeypatch.setattr("matrixdp.accounting.ledger.ledger.refuse_undrawn", lambda spend: None)
    ledger = new(PURE)
    undrawn = certify(tenth(ledger).noise, Counts(1))
    ledger.reserve("march", undrawn)
    assert verify_export([json.dumps(line) for line in ledger.export()])
    ledger.spend(undrawn, reservation="march")
    found = verify_export([json.dumps(line) for line in ledger.export()])
    assert [str(finding) for finding in found.findings] == [
        "entry 3: its certificate does not say how the noise was drawn, which delta = 0 needs"
    ]


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
