"""The ledger, in each store: what it lets through, what it remembers, keys and the chain."""

import hashlib
import json
import math
import threading

import numpy as np
import pytest

from ledgers import BUDGET, MU, SHARED, guarantee
from matrixdp import Budget, release
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.filter import RESERVE
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import BudgetExceeded, GuaranteeViolated, InvalidInput
from matrixdp.privacy import gaussian, spherical
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.drawing import Drawing
from matrixdp.privacy.guarantee import Curve, GaussianProfile, Guarantee
from matrixdp.secure import kernels
from matrixdp.sensitivity import Counts, Frobenius

CANONICAL = {"sort_keys": True, "separators": (",", ":")}


def link(previous, fields):
    return hashlib.sha256((previous + json.dumps(fields, **CANONICAL)).encode()).hexdigest()


@pytest.mark.parametrize("adaptive", [True, False])
def test_gaussian_spends_add_up_exactly(new, adaptive):
    ledger, share = new(BUDGET, adaptive=adaptive), 1 - RESERVE if adaptive else 1.0
    assert ledger.spent() == 0.0
    for _ in range(10):
        ledger.spend(guarantee(MU / math.sqrt(10.5)))
    assert len(ledger.history()) == 10
    total = float(gaussian.epsilon(MU * math.sqrt(10 / 10.5), share * BUDGET.delta))
    assert total * (1 - 1e-12) <= ledger.spent() <= total * (1 + 1e-9)
    before = new.written()
    with pytest.raises(BudgetExceeded, match="nothing was spent"):
        ledger.spend(guarantee(MU / math.sqrt(10.5)))
    assert new.written() == before
    ledger.spend(guarantee(MU / math.sqrt(30)), "what is left is enough for a third of it")


def test_a_count_is_that_many_spends(new):
    ledger = new(BUDGET)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(MU / math.sqrt(10.5)), count=11)
    entry = ledger.spend(guarantee(MU / math.sqrt(10.5)), count=10)
    assert (entry.number, entry.count) == (1, 10)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(MU / math.sqrt(10.5)))


@pytest.mark.parametrize("adaptive", [True, False])
def test_what_remains_can_be_spent_and_no_more(new, adaptive):
    ledger, whole = new(BUDGET, adaptive=adaptive), SHARED if adaptive else MU
    assert (ledger.remaining().mu, ledger.remaining().epsilon) == (MU, BUDGET.epsilon)
    ledger.spend(guarantee(0.5))
    left = ledger.remaining()
    assert left.mu == pytest.approx(math.sqrt(whole**2 - 0.25), rel=1e-9)
    assert left.epsilon == pytest.approx(float(gaussian.epsilon(left.mu, BUDGET.delta)), rel=1e-6)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(left.mu * (1 + 1e-9)))
    ledger.spend(guarantee(left.mu))
    assert ledger.remaining().mu < 1e-4


def test_a_release_may_use_exactly_what_remains(new):
    ledger = new(BUDGET)
    ledger.spend(guarantee(0.5))
    left = Budget(ledger.remaining().epsilon, BUDGET.delta)
    release(np.zeros((3, 4)), Frobenius(1.0), left, "analytic", ledger=ledger)
    assert ledger.remaining().mu < 0.05 * MU


@pytest.mark.parametrize("mechanism", ["analytic", "classic", "optimal", "auto"])
def test_one_release_may_use_the_whole_budget(new, mechanism):
    budget = Budget(0.9, 1e-6)
    ledger = new(budget)
    released = release(np.zeros(6), Frobenius(1.0), budget, mechanism, ledger=ledger, note="all of it")
    (entry,) = ledger.history()
    assert entry.profile == entry.certificate.profile == released.certificate.profile
    assert entry == new().history()[0]
    assert entry.total_variation == entry.certificate.total_variation == released.certificate.total_variation
    assert (entry.note, entry.adjacency, entry.certificate.shape) == ("all of it", "add/remove", (6,))
    assert isinstance(entry.certificate, Certificate)
    assert entry.certificate.verify()
    assert entry.certificate.to_json() == released.certificate.to_json()
    assert entry.source == released.certificate.source
    assert not entry.stated


def test_sampled_spends_go_to_the_accountant(new):
    ledger = new(BUDGET)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(1.0), count=1000)
    ledger.spend(guarantee(1.0), "training", count=1000, sampling_rate=0.01)
    assert 2.0 < new().spent() < 3.0
    left = ledger.remaining()
    assert 0 < left.mu < MU
    ledger.spend(guarantee(left.mu))
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(0.1))


def test_the_error_of_the_sampler_counts(new):
    ledger = new(BUDGET)
    rough = guarantee(0.1, variation=1e-8)
    assert rough.meets(BUDGET)
    ledger.spend(rough, count=30)  # the laws alone would allow more: at 30 of them delta is 6e-9
    assert ledger.history()[0].total_variation == 1e-8
    with pytest.raises(BudgetExceeded):
        ledger.spend(rough)


def test_nothing_is_drawn_before_the_spend_or_without_it(new, monkeypatch):
    ledger, drawn = new(BUDGET), []

    def draw(values, *_):
        drawn.append(len(new().history()))
        return values

    monkeypatch.setattr(kernels, "add_noise", draw)
    release(np.zeros((2, 2)), Counts(1), Budget(2.0, 1e-6), "analytic", ledger=ledger)
    assert drawn == [1]  # the spend is in the ledger already, and it is one
    with pytest.raises(BudgetExceeded):
        release(np.zeros((2, 2)), Counts(1), Budget(2.9, 1e-6), "analytic", ledger=ledger)
    with pytest.raises(GuaranteeViolated):
        release(np.zeros((2, 2)), Frobenius(1.0), Budget(0.1, 1e-6), "r1smg", ledger=ledger)
    with pytest.raises(InvalidInput, match="adjacency"):
        release(np.zeros((2, 2)), Counts(1, adjacency="replace"), Budget(0.1, 1e-6), "analytic", ledger=ledger)
    assert (drawn, len(ledger.history())) == ([1], 1)


def test_one_adjacency_per_ledger(new):
    ledger = new(BUDGET)
    assert ledger.adjacency is None
    ledger.spend(guarantee(0.1, "replace"))
    assert new(adjacency="replace").adjacency == "replace"
    assert new(relation="replace").relation == "replace"
    with pytest.raises(InvalidInput, match="replace, got add/remove"):
        ledger.spend(guarantee(0.1))
    with pytest.raises(InvalidInput, match="adjacency"):
        new(adjacency="add/remove")
    given = new.other()(BUDGET, adjacency="add/remove")
    with pytest.raises(InvalidInput, match="adjacency"):
        given.spend(guarantee(0.1, "replace"))
    assert given.history() == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"note": "two\nlines"},
        {"note": "\ud800"},
        {"note": "x" * 1001},
        {"note": 3},
        {"count": 0},
        {"count": 1.5},
        {"count": 2**63},
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.1},
        {"sampling_rate": math.nan},
        {"certificate": 0.5},
        {"certificate": Guarantee("no profile", "replace")},
        {"unit": None},
        {"unit": ""},
        {"dataset": "two\nlines"},
        {"analyst": 3},
        {"purpose": "x" * 1001},
        {"key": ""},
    ],
)
def test_bad_spends_are_refused(new, arguments):
    ledger = new(BUDGET)
    with pytest.raises(InvalidInput, match=next(iter(arguments)) + "|mu must"):
        ledger.spend(**{"certificate": guarantee(0.1), **arguments})
    assert ledger.history() == []


def test_what_is_remembered_of_a_spend(new):
    ledger = new(BUDGET)
    words = {"dataset": "survey 2026", "analyst": "A. Person", "purpose": "annual report", "unit": "user"}
    entry = ledger.spend(guarantee(0.1), "table 1", key="5eed", **words)
    assert entry == new().history()[0]
    assert {name: getattr(entry, name) for name in words} == words
    plain = ledger.spend(guarantee(0.1))
    assert (plain.dataset, plain.analyst, plain.purpose, plain.unit) == (new.dataset, None, None, "record")
    assert (plain.key is None) == (new.dataset is None)  # what may be lost on its way has a key of its own


def test_a_stated_guarantee_stays_one(new):
    ledger = new(BUDGET)
    ledger.spend(guarantee(0.1, variation=1e-15))
    ledger.spend(Guarantee(spherical.Profile(6, 6.0, 1.0, 20.0, 1.0), "add/remove"))
    ledger.spend(Guarantee(Curve((0.0, 0.1, 1.0), (1e-2, 1e-9, 0.0)), "add/remove"))
    entries = new().history()
    assert all(entry.stated and type(entry.certificate) is Guarantee for entry in entries)
    assert [entry.profile for entry in entries] == [
        GaussianProfile(0.1),
        spherical.Profile(6, 6.0, 1.0, 20.0, 1.0),
        Curve((0.0, 0.1, 1.0), (1e-2, 1e-9, 0.0)),
    ]
    assert entries[0].total_variation == 1e-15


def test_equal_certificates_are_stored_once(new):
    ledger, law = new(BUDGET), Gaussian(Isotropic((2, 3), 100.0))
    for note in ("one", "two"):
        ledger.spend(certify(law, Frobenius(1.0)), note, series="plan", planned=5)
    ledger.spend(certify(law, Frobenius(1.0)), "three")
    ledger.spend(certify(law, Frobenius(2.0)), "four")
    assert [entry.certificate.sensitivity.radius for entry in new().history()] == [1.0, 1.0, 1.0, 2.0]
    assert ["documents" in line for line in ledger.export()] == [False, True, False, False, True, False]


def test_a_spend_with_the_same_key_is_charged_once(new):
    ledger = new(BUDGET)
    spend = {"note": "table", "count": 2, "dataset": "survey", "key": "5eed"}
    first = ledger.spend(guarantee(0.2), **spend)
    before = new.written()
    assert ledger.spend(guarantee(0.2), **spend) == new().spend(guarantee(0.2), **spend) == first
    assert (new.written(), len(ledger.history())) == (before, 1)
    assert ledger.spent() == new().spent()
    ledger.spend(guarantee(0.2), **{**spend, "key": "another"})
    assert len(ledger.history()) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"certificate": guarantee(0.1)},
        {"certificate": guarantee(0.2, variation=1e-20)},
        {"certificate": guarantee(0.2, "replace")},
        {"note": "other"},
        {"count": 1},
        {"sampling_rate": 0.5},
        {"series": "plan", "planned": 2},
        {"dataset": None},
        {"analyst": "somebody"},
        {"purpose": "something"},
        {"unit": "user"},
    ],
    ids=str,
)
def test_a_key_is_for_one_spend(new, change):
    ledger = new(BUDGET)
    spend = {"certificate": guarantee(0.2), "note": "table", "count": 2, "dataset": "survey", "key": "5eed"}
    ledger.spend(**spend)
    with pytest.raises(InvalidInput, match="key was used for another spend, entry 1"):
        ledger.spend(**{**spend, **change})
    assert len(ledger.history()) == 1


def test_a_part_of_a_series_can_be_repeated_after_the_plan_is_used_up(new):
    ledger = new(BUDGET)

    def part(key, planned=None):
        return ledger.spend(guarantee(0.1), series="plan", planned=planned, key=key)

    parts = [part("a", 2), part("b")]
    again = [part("a"), part("b", 2)]
    assert again == parts
    with pytest.raises(BudgetExceeded):
        part("c")


def test_an_outsider_can_check_the_chain_of_an_export(new):
    used = new(BUDGET)
    for number in range(1, 21):
        used.spend(guarantee(number / 1000), f"entry {number}")
    used.spend(guarantee(0.1), "café", count=2)
    lines = json.loads(json.dumps(used.export()))
    head = ""
    for line in lines[:-1]:
        kept = line.pop("hash")
        for name, document in line.pop("documents", {}).items():
            assert name == hashlib.sha256(json.dumps(document, **CANONICAL).encode()).hexdigest()
        head = link(head, line)
        assert head == kept
    assert lines[-1] == {"entries": 21, "releases": 22, "spent": used.spent(), "head": head}
    assert head == used.verify() == used.verify(head)
    assert (lines[-2]["note"], lines[-2]["count"]) == ("café", 2)


def test_threads_share_one_ledger(new):
    ledger, numbers = new(BUDGET), []

    def work():
        for _ in range(10):
            numbers.append(ledger.spend(guarantee(0.001)).number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 81))
    assert len(new().history()) == 80


def test_noise_that_is_no_secret_is_not_charged(new):
    with pytest.warns(UserWarning, match="generator of your own"):
        out = release(np.zeros(3), Frobenius(1.0), Budget(0.5, 1e-6), rng=np.random.default_rng(1))
    with pytest.raises(InvalidInput, match="secret noise"):
        new(BUDGET).spend(out.certificate)


def test_noise_that_is_not_floating_point_safe_is_not_charged(new):
    ledger = new(BUDGET)
    drawn = certify(Gaussian(Isotropic((2,), 10.0)), Frobenius(1.0), drawing=Drawing())
    with pytest.raises(GuaranteeViolated, match="floating-point-safe"):
        ledger.spend(drawn)
    assert ledger.history() == []


def test_rates_that_are_too_small_are_refused(new):
    with pytest.raises(InvalidInput, match="1e-100"):
        new(BUDGET).spend(guarantee(0.1), sampling_rate=1e-320)


def test_a_ledger_of_a_fixed_plan_says_so(new):
    """Every total is then that of an accountant, which the filter would not allow."""
    ledger = new(BUDGET, adaptive=False)
    for _ in range(2):
        ledger.spend(guarantee(1.0), count=500, sampling_rate=0.01)
    ledger.spend(guarantee(ledger.remaining().mu))
    accountant = Accountant()
    accountant.add(guarantee(1.0), 1000, 0.01)
    assert ledger.spent() > accountant.epsilon(1e-6)
    assert [entry.charged_mu for entry in ledger.history()] == [None] * 3
    assert not new().adaptive
    assert ledger.export()[0]["adaptive"] == 0
    with pytest.raises(InvalidInput, match="adaptive must be the ledger's own"):
        new(adaptive=True)
