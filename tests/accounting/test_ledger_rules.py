"""Quotas, reservations and releases made elsewhere, in each store."""

import math
import threading
from contextlib import suppress
from datetime import UTC, datetime

import numpy as np
import pytest
from dp_accounting import dp_event as dp

from ledgers import BUDGET, MU, SHARED, guarantee
from matrixdp import Accountant, Budget, Ledger
from matrixdp.accounting.composition import Composition, Part
from matrixdp.accounting.ledger import file as file_store
from matrixdp.accounting.ledger.elsewhere import parts_of
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.renyi import Concentrated, divergences
from matrixdp.accounting.stated import by_budget
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

ONE = Budget(1.0, 1e-6)
ONE_SHARED = float(gaussian.mu(1.0, 0.85e-6))


def at(monkeypatch, *time):
    """Sets the clock of this machine."""
    monkeypatch.setattr(file_store, "now", lambda: datetime(*time, tzinfo=UTC).isoformat(timespec="microseconds"))


# --- quotas ---


def test_a_quota_bounds_its_members_and_the_total_bounds_all(new):
    steward = new(BUDGET)
    steward.set_quota("ada", ONE)
    steward.set_quota("others", BUDGET, members=["ben", "cy"])
    ada, ben, cy = (new(analyst=name) for name in ("ada", "ben", "cy"))
    ada.spend(guarantee(0.6 * ONE_SHARED))
    with pytest.raises(BudgetExceeded, match=r"quota 'ada'.*nothing was spent"):
        ada.spend(guarantee(0.81 * ONE_SHARED))
    ada.spend(guarantee(0.79 * ONE_SHARED))
    ben.spend(guarantee(0.7 * SHARED))
    for analyst in (ben, cy):  # who share a quota, and what ada has used is gone for them too
        with pytest.raises(BudgetExceeded, match="budget of"):
            analyst.spend(guarantee(math.sqrt(SHARED**2 * 0.51 - 0.9 * ONE_SHARED**2)))
    left = {row.name: row for row in steward.left(guarantee(0.01))}
    assert [*left] == ["total", "ada", "others"]
    assert left["ada"].releases == 0 or left["ada"].mu > 0.01
    assert ada.remaining().mu == left["ada"].mu < ben.remaining().mu
    assert steward.remaining().mu == left["total"].mu
    assert {*steward.analysts()} == {"ada", "ben"}
    assert steward.spent("ada") <= 1.0 < steward.spent("ben") < steward.spent() <= 3.0
    assert verify_export(steward.export())


def test_once_there_is_a_quota_every_analyst_needs_one(new):
    ledger = new(BUDGET)
    ledger.spend(guarantee(0.01))
    ledger.set_quota("ada", ONE)
    for analyst in (None, "Ada"):
        with pytest.raises(InvalidInput, match="analyst must be named, and have a quota"):
            ledger.spend(guarantee(0.01), analyst=analyst)
    ledger.spend(guarantee(0.01), analyst="ada")
    ledger.remove_quota("ada")
    ledger.spend(guarantee(0.01))
    assert [change.kind for change in ledger.changes()] == ["quota", "quota"]
    assert ledger.quotas() == []
    with pytest.raises(InvalidInput, match="that of a quota"):
        ledger.remove_quota("ada")
    with pytest.raises(InvalidInput, match="name must"):
        ledger.remove_quota(["ada"])


def test_a_quota_below_what_is_spent_is_refused(new):
    ledger = new(BUDGET, analyst="ada")
    ledger.spend(guarantee(0.5))
    before = new.written()
    with pytest.raises(InvalidInput, match=r"at least what the members of 'ada' have spent already.*not changed"):
        ledger.set_quota("ada", ONE)
    assert new.written() == before
    ledger.set_quota("ada", BUDGET)


def test_periods_begin_anew_and_the_total_does_not(new, monkeypatch):
    if new.dataset:
        pytest.skip("the server has the clock")
    ledger = new(BUDGET, analyst="ada")
    at(monkeypatch, 2026, 11, 1)
    ledger.set_quota("ada", ONE, per="year")
    for year in (2026, 2027):
        at(monkeypatch, year, 12, 31, 23)
        ledger.spend(guarantee(0.9 * ONE_SHARED))
        with pytest.raises(BudgetExceeded, match="per year"):
            ledger.spend(guarantee(0.5 * ONE_SHARED))
    total, quota = ledger.left()
    assert (quota.per, quota.since) == ("year", "2027-01")
    assert quota.spent < 1.0 < total.spent
    assert "does not restore" in ledger.statement(2027)
    # a clock that is put back opens no room: what was spent later counts as well
    at(monkeypatch, 2025, 1, 1)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(0.1))
    at(monkeypatch, 2028, 1, 1)
    ledger.spend(guarantee(0.1))
    assert [entry.number for entry in ledger.history()] == [2, 3, 4]
    assert verify_export(ledger.export())


@pytest.mark.parametrize(("per", "since"), [("year", "2026-01"), ("quarter", "2026-10"), ("month", "2026-12")])
def test_periods_are_those_of_the_calendar(path, monkeypatch, per, since):
    from matrixdp import Ledger

    at(monkeypatch, 2026, 12, 31)
    ledger = Ledger(path, BUDGET, analyst="ada")
    ledger.set_quota("ada", ONE, per=per)
    assert ledger.left()[1].since == since


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": ""}, "name must"),
        ({"name": "two\nlines"}, "name must"),
        ({"budget": 1.0}, "budget must"),
        ({"per": "week"}, "per must"),
        ({"members": "ada"}, "members must|name must"),
        ({"members": ["ada", ""]}, "members must"),
    ],
)
def test_bad_quotas_are_refused(new, arguments, words):
    ledger = new(BUDGET)
    with pytest.raises(InvalidInput, match=words):
        ledger.set_quota(**{"name": "ada", "budget": ONE, **arguments})
    assert ledger.changes() == []


def test_threads_never_pass_a_quota(new):
    new(BUDGET).set_quota("ada", ONE)
    ledger, allowed = new(analyst="ada"), []

    def work():
        for _ in range(8):
            with suppress(BudgetExceeded):
                allowed.append(ledger.spend(guarantee(ONE_SHARED / math.sqrt(10.5))).number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allowed) == len(ledger.history()) == 10
    assert verify_export(ledger.export())


def test_a_quota_that_was_passed_is_found_in_an_export(path, monkeypatch):
    """Also where all hashes fit: the spends themselves are held against the quota."""
    from matrixdp import Ledger
    from matrixdp.accounting.ledger.totals import Total

    ledger = Ledger(path, BUDGET, analyst="ada")
    ledger.set_quota("ada", ONE)
    with monkeypatch.context() as patch:
        patch.setattr(Total, "check_quotas", lambda *_: None)
        ledger.spend(guarantee(0.5))
    found = verify_export(ledger.export())
    assert not found
    assert "quota" in str(found.findings[0])


# --- reservations ---


def test_what_is_reserved_is_used_step_by_step_and_given_back(new):
    ledger = new(BUDGET, analyst="ada")
    held = ledger.reserve("weekly", guarantee(0.1), count=30)
    full = ledger.left()[0]
    assert (held.count, held.left, held.analyst) == (30, 30, "ada")
    assert full.spent == full.reserved == ledger.spent()
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(0.4))  # it is kept free
    before = ledger.spent()
    for mu in (0.1, 0.05):
        entry = ledger.spend(guarantee(mu, variation=1e-20), reservation="weekly", count=2)
        assert (entry.charged_mu, entry.reservation) == (0.0, "weekly")
    assert ledger.spent() == before
    with pytest.raises(BudgetExceeded, match="26 of 30 left, not 27"):
        ledger.spend(guarantee(0.1), reservation="weekly", count=27)
    assert [each.left for each in new().reservations()] == [26]
    assert ledger.give_back("weekly") == 26
    assert ledger.reservations() == []
    # what was drawn is charged, and nothing else
    alone = new.other()(BUDGET, analyst="ada")
    for _ in range(4):
        alone.spend(guarantee(0.1, variation=1e-15))
    assert ledger.spent() == pytest.approx(alone.spent(), rel=1e-12)
    ledger.spend(guarantee(0.4))
    assert verify_export(ledger.export())
    assert new().verify() == ledger.verify()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"certificate": guarantee(0.2)}, "lie under it"),
        ({"certificate": guarantee(0.1, variation=1e-10)}, "lie under it"),
        ({"sampling_rate": 0.5}, "lie under it"),
        ({"series": "plan", "planned": 2}, "lie under it"),
        ({"analyst": "ben"}, "analyst must be the one"),
        ({"reservation": "other"}, "no open reservation"),
    ],
)
def test_a_reservation_is_for_what_was_reserved(new, arguments, words):
    ledger = new(BUDGET)
    ledger.reserve("weekly", guarantee(0.1), count=3)
    with pytest.raises(InvalidInput, match=words):
        ledger.spend(**{"certificate": guarantee(0.1), "reservation": "weekly", **arguments})
    assert ledger.history() == []
    with pytest.raises(InvalidInput, match="name must be new"):
        ledger.reserve("weekly", guarantee(0.1))


def test_a_training_and_a_plan_are_reserved_as_a_whole(new):
    ledger = new(BUDGET, reservation="training")
    reserved = guarantee(1.0, variation=1e-15)
    ledger.reserve("training", reserved, planned=500, sampling_rate=0.01)
    before = ledger.spent()
    part = {"count": 100, "sampling_rate": 0.01, "series": "5eed", "planned": 500}
    with pytest.raises(InvalidInput, match="one plan"):
        ledger.spend(reserved, **{**part, "planned": 400})
    for _ in range(2):
        ledger.spend(reserved, **part)
    assert ledger.spent() == before
    with pytest.raises(InvalidInput, match="no open reservation"):
        ledger.give_back("training")  # it was begun: where it is broken off may depend on the answers
    plan = Composition((Part(guarantee(0.01)), Part(guarantee(0.02), 2)))
    ledger.reserve("plan", plan=plan)
    ledger.spend(guarantee(0.02), series="p", plan=plan, reservation="plan")
    ledger.reserve("never", reserved, planned=100, sampling_rate=0.01)
    assert ledger.give_back("never") == 1
    assert ledger.reservations() == []
    assert verify_export(ledger.export())


def test_a_reservation_counts_for_the_quota(new):
    new(BUDGET).set_quota("ada", ONE)
    ada = new(analyst="ada")
    ada.reserve("weekly", guarantee(0.9 * ONE_SHARED / 3), count=9)
    with pytest.raises(BudgetExceeded, match="quota 'ada'"):
        ada.spend(guarantee(0.5 * ONE_SHARED))
    ada.spend(guarantee(0.9 * ONE_SHARED / 3), reservation="weekly", count=9)
    with pytest.raises(BudgetExceeded):
        ada.reserve("more", guarantee(0.5 * ONE_SHARED))
    assert ada.reservations() == []


def test_threads_use_a_reservation_up_and_no_more(new):
    ledger, allowed = new(BUDGET), []
    ledger.reserve("weekly", guarantee(0.01), count=10)

    def work():
        for _ in range(4):
            with suppress(BudgetExceeded, InvalidInput):
                allowed.append(ledger.spend(guarantee(0.01), reservation="weekly"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allowed) == len(ledger.history()) == 10


def test_a_ledger_of_a_fixed_plan_reserves_nothing(new):
    with pytest.raises(InvalidInput, match="takes no reservations"):
        new(BUDGET, adaptive=False).reserve("weekly", guarantee(0.1))


def test_so_many_releases_like_this_one(new):
    ledger, like = new(BUDGET), guarantee(SHARED / math.sqrt(20.5))
    (total,) = ledger.left(like)
    assert total.releases == 20
    for _ in range(20):
        ledger.spend(like)
    assert ledger.left(like)[0].releases == 0
    with pytest.raises(BudgetExceeded):
        ledger.spend(like)
    with pytest.raises(InvalidInput, match="like must"):
        ledger.left(0.1)


# --- releases made elsewhere ---


def profile_of(what):
    (part,) = parts_of(what, "add/remove")
    return part.certificate.profile


def test_the_forms_in_which_a_release_is_known():
    assert profile_of({"mu": 0.2}) == GaussianProfile(0.2)
    assert profile_of({"rho": 0.02}) == Concentrated(0.02)
    worst = profile_of(Budget(0.5, 1e-9))
    assert worst == profile_of({"epsilon": 0.5, "delta": 1e-9}) == by_budget(Budget(0.5, 1e-9))
    # randomized response that reveals everything with probability delta: P = (d, 0, (1-d) p, (1-d)(1-p))
    p, d = math.exp(0.5) / (1 + math.exp(0.5)), 1e-9
    for epsilon in (0.0, 0.2, 0.4999, 0.5, 2.0):
        true = d + (1 - d) * p * max(-math.expm1(epsilon - 0.5), 0.0)
        assert true * (1 - 1e-15) <= worst.delta(epsilon) <= true * (1 + 1e-9) + 1e-15
    laplace = profile_of(dp.LaplaceDpEvent(4.0))
    for epsilon in np.linspace(0, 0.25, 50):
        true = -math.expm1((epsilon - 0.25) / 2)
        assert true <= laplace.delta(epsilon) <= true * (1 + 1e-5) + 1e-9
    assert profile_of(dp.GaussianDpEvent(5.0)).mu == pytest.approx(0.2)
    assert profile_of(dp.DiscreteLaplaceDpEvent(0.25, 2)).pure_epsilon == pytest.approx(0.5)


def test_concentrated_privacy_is_above_gaussian_noise_and_adds_up():
    """Gaussian noise with mu is mu^2/2-concentrated, and so a release that is no worse than the profile says."""
    for mu in (0.05, 0.3, 1.0):
        profile = Concentrated(mu**2 / 2)
        for epsilon in (0.0, 0.1, 0.5, 2.0, 5.0):
            assert gaussian.delta(mu, epsilon) <= profile.delta(epsilon)
        assert gaussian.epsilon(mu, 1e-6) <= profile.epsilon(1e-6) <= 1.3 * gaussian.epsilon(mu, 1e-6)
        assert profile.delta(profile.epsilon(1e-6)) <= 1e-6 * (1 + 1e-6)
    accountant = Accountant()
    accountant.add(Guarantee(Concentrated(0.01), "add/remove"), 4)
    assert accountant.epsilon(1e-6) == pytest.approx(Concentrated(0.04).epsilon(1e-6), rel=1e-9)


def test_the_divergence_of_a_pure_statement_is_that_of_randomized_response():
    profile = by_budget(Budget(0.7, 0.0))
    p = math.exp(0.7) / (1 + math.exp(0.7))
    for order in (2.0, 5.0, 40.0):
        true = math.log(p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order)) / (order - 1)
        (found,) = divergences({(profile, 1.0): 1}, "add/remove", (order,))
        assert true * (1 - 1e-13) <= found <= true * (1 + 1e-9)


@pytest.mark.parametrize(
    ("what", "fewest"),
    [
        (Budget(0.5, 0.0), 6),
        (Budget(0.05, 0.0), 100),  # basic composition admits 60
        (Budget(0.5, 1e-9), 6),  # as many as basic composition admits
        ({"rho": 0.01}, 13),
        ({"mu": 0.2}, 10),
    ],
    ids=str,
)
def test_what_is_recorded_is_added_up(path, what, fewest):
    from matrixdp import Ledger

    ledger = Ledger(path, BUDGET, adjacency="add/remove")
    with suppress(BudgetExceeded):
        for _ in range(100):
            ledger.record(what, "elsewhere")
    assert fewest <= len(ledger.history())
    assert ledger.spent() <= 3.0 * (1 + 1e-12)
    assert verify_export(ledger.export())


def test_an_event_of_several_releases_is_one_block(new):
    event = dp.ComposedDpEvent(
        [dp.GaussianDpEvent(5.0), dp.SelfComposedDpEvent(dp.GaussianDpEvent(10.0), 3), dp.ZCDpEvent(0.001)]
    )
    ledger = new(BUDGET, adjacency="add/remove", analyst="ada")
    entries = ledger.record(event, "elsewhere", key="5eed")
    assert [(entry.count, entry.charged_mu == 0.0) for entry in entries] == [(1, False), (3, True), (1, True)]
    assert ledger.record(event, "elsewhere", key="5eed") != []
    assert verify_export(ledger.export())


def test_a_record_needs_an_adjacency_unless_its_certificate_has_one(path):
    ledger = Ledger(path, BUDGET)
    with pytest.raises(InvalidInput, match="adjacency is missing"):
        ledger.record({"mu": 0.1})
    ledger.record(guarantee(0.1, "replace"))
    assert ledger.adjacency == "replace"
    ledger.record({"mu": 0.1})
    with pytest.raises(InvalidInput, match="adjacency must be that of the certificate, replace, got add/remove"):
        ledger.record(guarantee(0.1, "replace"), adjacency="add/remove")
    assert len(ledger.history()) == 2


@pytest.mark.parametrize(
    "what",
    [
        {"rho": -1.0},
        {"mu": math.nan},
        {"epsilon": 1.0, "mu": 1.0},
        {},
        0.5,
        dp.NonPrivateDpEvent(),
        dp.ZCDpEvent(0.1, 0.1),
        dp.PoissonSampledDpEvent(0.1, dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), 2)),
    ],
    ids=str,
)
def test_forms_that_say_nothing_are_refused(path, what):
    from matrixdp import Ledger

    ledger = Ledger(path, BUDGET, adjacency="add/remove")
    with pytest.raises(InvalidInput, match=r"what must|rho|mu"):
        ledger.record(what)
    assert ledger.history() == []


def test_what_was_made_already_is_written_and_ends_the_budget(new):
    ledger = new(BUDGET, adjacency="add/remove")
    with pytest.raises(BudgetExceeded):
        ledger.record({"mu": 2 * MU})
    assert ledger.history() == []
    ledger.record({"mu": 2 * MU}, made=True)
    assert ledger.spent() > 3.0
    assert "EXCEEDED" in ledger.statement()
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(1e-6))
    assert not verify_export(ledger.export())
