"""The ledger: what it lets through, what it finds, and that no crash, race or full disk loses a spend."""

import hashlib
import json
import math
import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from matrixdp import Budget, release
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.filter import RESERVE, RESERVE_ALONE
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.ledger import Ledger, LedgerError
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import BudgetExceeded, GuaranteeViolated, InvalidInput
from matrixdp.privacy import gaussian, spherical
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.drawing import Drawing
from matrixdp.privacy.guarantee import Curve, GaussianProfile, Guarantee
from matrixdp.secure import kernels
from matrixdp.sensitivity import Counts, Frobenius

BUDGET = Budget(3.0, 1e-6)
MU = float(gaussian.mu(BUDGET.epsilon, BUDGET.delta))
SHARED = float(gaussian.mu(BUDGET.epsilon, (1 - RESERVE) * BUDGET.delta))  # what several releases may use together
GOLDEN = Path(__file__).parents[1] / "golden"


def guarantee(mu, adjacency="add/remove", variation=0.0):
    return Guarantee(GaussianProfile(mu), adjacency, variation)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget.db"


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    """The bytes of a ledger with twenty entries."""
    path = tmp_path_factory.mktemp("twenty") / "budget.db"
    ledger = Ledger(path, BUDGET)
    for number in range(1, 21):
        ledger.spend(guarantee(number / 1000), f"entry {number}")
    return path.read_bytes()


@pytest.fixture
def used(path, twenty):
    """A ledger with twenty entries."""
    path.write_bytes(twenty)
    return Ledger(path)


WORKER = [sys.executable, str(Path(__file__).with_name("ledger_worker.py"))]
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def scenario():
    """Runs one of ledger_worker's scenarios."""
    with subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ONE_THREAD) as worker:

        def run(*arguments):
            print(json.dumps(arguments, default=str), file=worker.stdin, flush=True)
            return json.loads(worker.stdout.readline()) or pytest.fail("the scenario failed, see above")

        yield run


def sql(path, *statements):
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


# --- what it lets through ---


@pytest.mark.parametrize("adaptive", [True, False])
def test_gaussian_spends_add_up_exactly(path, adaptive):
    ledger, share = Ledger(path, BUDGET, adaptive=adaptive), 1 - RESERVE if adaptive else 1.0
    assert ledger.spent() == 0.0
    for _ in range(10):
        ledger.spend(guarantee(MU / math.sqrt(10.5)))
    assert len(ledger.history()) == 10
    total = float(gaussian.epsilon(MU * math.sqrt(10 / 10.5), share * BUDGET.delta))
    assert total * (1 - 1e-12) <= ledger.spent() <= total * (1 + 1e-9)
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match="nothing was spent"):
        ledger.spend(guarantee(MU / math.sqrt(10.5)))
    assert path.read_bytes() == before
    ledger.spend(guarantee(MU / math.sqrt(30)), "what is left is enough for a third of it")


def test_a_count_is_that_many_spends(path):
    ledger = Ledger(path, BUDGET)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(MU / math.sqrt(10.5)), count=11)
    entry = ledger.spend(guarantee(MU / math.sqrt(10.5)), count=10)
    assert (entry.number, entry.count) == (1, 10)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(MU / math.sqrt(10.5)))


@pytest.mark.parametrize("adaptive", [True, False])
def test_what_remains_can_be_spent_and_no_more(path, adaptive):
    ledger, whole = Ledger(path, BUDGET, adaptive=adaptive), SHARED if adaptive else MU
    assert (ledger.remaining().mu, ledger.remaining().epsilon) == (MU, BUDGET.epsilon)
    ledger.spend(guarantee(0.5))
    left = ledger.remaining()
    assert left.mu == pytest.approx(math.sqrt(whole**2 - 0.25), rel=1e-9)
    assert left.epsilon == pytest.approx(float(gaussian.epsilon(left.mu, BUDGET.delta)), rel=1e-6)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(left.mu * (1 + 1e-9)))
    ledger.spend(guarantee(left.mu))
    assert ledger.remaining().mu < 1e-4


def test_a_release_may_use_exactly_what_remains(path):
    ledger = Ledger(path, BUDGET)
    ledger.spend(guarantee(0.5))
    left = Budget(ledger.remaining().epsilon, BUDGET.delta)
    release(np.zeros((3, 4)), Frobenius(1.0), left, "analytic", ledger=ledger)
    assert ledger.remaining().mu < 0.05 * MU


@pytest.mark.parametrize("mechanism", ["analytic", "classic", "optimal", "auto"])
def test_one_release_may_use_the_whole_budget(path, mechanism):
    budget = Budget(0.9, 1e-6)
    ledger = Ledger(path, budget)
    released = release(np.zeros(6), Frobenius(1.0), budget, mechanism, ledger=ledger, note="all of it")
    (entry,) = ledger.history()
    assert entry.profile == entry.certificate.profile == released.certificate.profile
    assert entry == Ledger(path).history()[0]
    assert entry.total_variation == entry.certificate.total_variation == released.certificate.total_variation
    assert (entry.note, entry.adjacency, entry.certificate.shape) == ("all of it", "add/remove", (6,))
    assert isinstance(entry.certificate, Certificate)
    assert entry.certificate.verify()
    assert entry.certificate.to_json() == released.certificate.to_json()
    assert entry.source == released.certificate.source
    assert not entry.stated


def test_sampled_spends_go_to_the_accountant(path):
    ledger = Ledger(path, BUDGET)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(1.0), count=1000)
    ledger.spend(guarantee(1.0), "training", count=1000, sampling_rate=0.01)
    assert 2.0 < Ledger(path).spent() < 3.0
    left = ledger.remaining()
    assert 0 < left.mu < MU
    ledger.spend(guarantee(left.mu))
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(0.1))


def test_the_error_of_the_sampler_counts(path):
    ledger = Ledger(path, BUDGET)
    rough = guarantee(0.1, variation=1e-8)
    assert rough.meets(BUDGET)
    ledger.spend(rough, count=30)  # the laws alone would allow more: at 30 of them delta is 6e-9
    assert ledger.history()[0].total_variation == 1e-8
    with pytest.raises(BudgetExceeded):
        ledger.spend(rough)


def test_nothing_is_drawn_before_the_spend_or_without_it(path, monkeypatch):
    ledger, drawn = Ledger(path, BUDGET), []

    def draw(values, *_):
        with closing(sqlite3.connect(path)) as connection:
            drawn.append(connection.execute("SELECT count(*) FROM entries").fetchone()[0])
        return values

    monkeypatch.setattr(kernels, "add_noise", draw)
    release(np.zeros((2, 2)), Counts(1), Budget(2.0, 1e-6), "analytic", ledger=ledger)
    assert drawn == [1]  # the spend is in the file already, and it is one
    with pytest.raises(BudgetExceeded):
        release(np.zeros((2, 2)), Counts(1), Budget(2.9, 1e-6), "analytic", ledger=ledger)
    with pytest.raises(GuaranteeViolated):
        release(np.zeros((2, 2)), Frobenius(1.0), Budget(0.1, 1e-6), "r1smg", ledger=ledger)
    with pytest.raises(InvalidInput, match="adjacency"):
        release(np.zeros((2, 2)), Counts(1, adjacency="replace"), Budget(0.1, 1e-6), "analytic", ledger=ledger)
    assert (drawn, len(ledger.history())) == ([1], 1)


def test_one_adjacency_per_ledger(path):
    ledger = Ledger(path, BUDGET)
    assert ledger.adjacency is None
    ledger.spend(guarantee(0.1, "replace"))
    assert Ledger(path, adjacency="replace").adjacency == "replace"
    assert Ledger(path, relation="replace").relation == "replace"
    with pytest.raises(InvalidInput, match="replace, got add/remove"):
        ledger.spend(guarantee(0.1))
    with pytest.raises(InvalidInput, match="adjacency"):
        Ledger(path, adjacency="add/remove")
    given = Ledger(path.with_name("given.db"), BUDGET, adjacency="add/remove")
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
def test_bad_spends_are_refused(path, arguments):
    ledger = Ledger(path, BUDGET)
    with pytest.raises(InvalidInput, match=next(iter(arguments)) + "|mu must"):
        ledger.spend(**{"certificate": guarantee(0.1), **arguments})
    assert ledger.history() == []


def test_what_is_remembered_of_a_spend(path):
    ledger = Ledger(path, BUDGET)
    words = {"dataset": "survey 2026", "analyst": "A. Person", "purpose": "annual report", "unit": "user"}
    entry = ledger.spend(guarantee(0.1), "table 1", key="5eed", **words)
    assert entry == Ledger(path).history()[0]
    assert {name: getattr(entry, name) for name in words} == words
    plain = ledger.spend(guarantee(0.1))
    assert (plain.dataset, plain.analyst, plain.purpose, plain.unit, plain.key) == (None, None, None, "record", None)


def test_a_stated_guarantee_stays_one(path):
    ledger = Ledger(path, BUDGET)
    ledger.spend(guarantee(0.1, variation=1e-15))
    ledger.spend(Guarantee(spherical.Profile(6, 6.0, 1.0, 20.0, 1.0), "add/remove"))
    ledger.spend(Guarantee(Curve((0.0, 0.1, 1.0), (1e-2, 1e-9, 0.0)), "add/remove"))
    entries = Ledger(path).history()
    assert all(entry.stated and type(entry.certificate) is Guarantee for entry in entries)
    assert [entry.profile for entry in entries] == [
        GaussianProfile(0.1),
        spherical.Profile(6, 6.0, 1.0, 20.0, 1.0),
        Curve((0.0, 0.1, 1.0), (1e-2, 1e-9, 0.0)),
    ]
    assert entries[0].total_variation == 1e-15


def test_equal_certificates_are_stored_once(path):
    ledger, law = Ledger(path, BUDGET), Gaussian(Isotropic((2, 3), 100.0))
    for note in ("one", "two"):
        ledger.spend(certify(law, Frobenius(1.0)), note, series="plan", planned=5)
    ledger.spend(certify(law, Frobenius(1.0)), "three")
    ledger.spend(certify(law, Frobenius(2.0)), "four")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM documents").fetchone() == (2,)
    assert [entry.certificate.sensitivity.radius for entry in Ledger(path).history()] == [1.0, 1.0, 1.0, 2.0]
    assert ["documents" in line for line in ledger.export()] == [False, True, False, False, True, False]


# --- idempotency keys ---


def test_a_spend_with_the_same_key_is_charged_once(path):
    ledger = Ledger(path, BUDGET)
    spend = {"note": "table", "count": 2, "dataset": "survey", "key": "5eed"}
    first = ledger.spend(guarantee(0.2), **spend)
    before = path.read_bytes()
    assert ledger.spend(guarantee(0.2), **spend) == Ledger(path).spend(guarantee(0.2), **spend) == first
    assert (path.read_bytes(), len(ledger.history())) == (before, 1)
    assert ledger.spent() == Ledger(path).spent()
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
def test_a_key_is_for_one_spend(path, change):
    ledger = Ledger(path, BUDGET)
    spend = {"certificate": guarantee(0.2), "note": "table", "count": 2, "dataset": "survey", "key": "5eed"}
    ledger.spend(**spend)
    with pytest.raises(InvalidInput, match="key has paid for another spend, entry 1"):
        ledger.spend(**{**spend, **change})
    assert len(ledger.history()) == 1


def test_a_part_of_a_series_can_be_repeated_after_the_plan_is_used_up(path):
    ledger = Ledger(path, BUDGET)

    def part(key, planned=None):
        return ledger.spend(guarantee(0.1), series="plan", planned=planned, key=key)

    parts = [part("a", 2), part("b")]
    again = [part("a"), part("b", 2)]
    assert again == parts
    with pytest.raises(BudgetExceeded):
        part("c")


def test_processes_with_one_key_are_charged_once(path, scenario):
    found = scenario("retries", path, 8, 20)
    assert found["entries"] == 20
    assert found["same"]


# --- opening ---


def test_opening_again(path):
    with pytest.raises(LedgerError, match="create it with a budget"):
        Ledger(path)
    Ledger(path, BUDGET).spend(guarantee(0.1), "first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    assert Ledger(str(path)).budget == BUDGET
    assert [entry.note for entry in Ledger(path, BUDGET).history()] == ["first"]
    for other in (Budget(3.0, 2e-6), Budget(4.0, 1e-6)):
        with pytest.raises(InvalidInput, match="budget must be the ledger's own"):
            Ledger(path, other)


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger("budget.db", BUDGET)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ledger.spend(guarantee(0.1))
    assert len(Ledger(tmp_path / "budget.db").history()) == 1


def test_files_that_are_no_ledgers_are_not_touched(tmp_path):
    empty, text, other = tmp_path / "empty", tmp_path / "text", tmp_path / "other"
    empty.touch()
    text.write_text("no database at all\n" * 100)
    sql(other, "PRAGMA journal_mode = WAL", "CREATE TABLE t (x)")
    for path in (empty, text, other):
        before = path.read_bytes()
        with pytest.raises(LedgerError, match=r"not a ledger|not a database"):
            Ledger(path, BUDGET)
        assert path.read_bytes() == before
    with pytest.raises(LedgerError, match="unable to open"):
        Ledger(tmp_path, BUDGET)
    with pytest.raises(LedgerError, match="folder must exist"):
        Ledger(tmp_path / "missing" / "budget.db", BUDGET)


@pytest.mark.parametrize(
    "arguments", [(3, BUDGET), ("a\0b", BUDGET), ("ok.db", (3.0, 1e-6)), ("ok.db", 3.0), ("ok.db", "3")]
)
def test_bad_arguments_are_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"path|budget"):
        Ledger(*arguments)
    assert os.listdir(tmp_path) == []


def test_every_flush_is_on_and_a_write_ahead_log_is_undone(used):
    sql(used.path, "PRAGMA journal_mode = WAL")
    with used._book.store.transaction() as session:
        assert session.connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert session.connection.execute("PRAGMA synchronous").fetchone() == (3,)
    assert os.listdir(used.path.parent) == [used.path.name]


# --- the chain ---

CANONICAL = {"sort_keys": True, "separators": (",", ":")}


def link(previous, fields):
    return hashlib.sha256((previous + json.dumps(fields, **CANONICAL)).encode()).hexdigest()


def test_an_outsider_can_check_the_chain_of_an_export(used):
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


TAMPERING = {
    "smaller mu": ["UPDATE documents SET content = replace(content, '\"mu\":0.007', '\"mu\":0.0035')"],
    "another certificate": ["UPDATE entries SET certificate = (SELECT min(sha256) FROM documents) WHERE number = 7"],
    "no certificate": ["UPDATE entries SET certificate = NULL WHERE number = 7"],
    "no document": ["DELETE FROM documents WHERE content LIKE '%0.02}%'"],
    "empty document": ["UPDATE documents SET content = NULL WHERE content LIKE '%0.02}%'"],
    "one document more": ["INSERT INTO documents VALUES ('00', '{}')"],
    "curve": ["UPDATE entries SET curve = certificate WHERE number = 3"],
    "mu as of old": ["ALTER TABLE entries ADD COLUMN mu REAL", "UPDATE entries SET mu = 0 WHERE number = 20"],
    "note": ["UPDATE entries SET note = 'another' WHERE number = 1"],
    "blob": ["UPDATE entries SET note = x'00ff' WHERE number = 3"],
    "bad text": ["UPDATE entries SET note = CAST(x'ff' AS TEXT) WHERE number = 3"],
    "count": ["UPDATE entries SET count = 2 WHERE number = 3"],
    "rate": ["UPDATE entries SET sampling_rate = 0.01 WHERE number = 3"],
    "dataset": ["UPDATE entries SET dataset = 'x' WHERE number = 3"],
    "analyst": ["UPDATE entries SET analyst = 'x' WHERE number = 3"],
    "purpose": ["UPDATE entries SET purpose = 'x' WHERE number = 3"],
    "unit": ["UPDATE entries SET unit = 'x' WHERE number = 3"],
    "key": ["UPDATE entries SET key = 'x' WHERE number = 3"],
    "hash": ["UPDATE entries SET hash = '00' WHERE number = 3"],
    "first gone": ["DELETE FROM entries WHERE number = 1"],
    "middle gone": ["DELETE FROM entries WHERE number = 10"],
    "last gone": ["DELETE FROM entries WHERE number = 20"],
    "last gone, and counted": ["DELETE FROM entries WHERE number = 20", "UPDATE ledger SET entries = 19"],
    "all gone": ["DELETE FROM entries"],
    "swapped": [
        "UPDATE entries SET number = 99 WHERE number = 4",
        "UPDATE entries SET number = 4 WHERE number = 5",
        "UPDATE entries SET number = 5 WHERE number = 99",
    ],
    "closed up": ["DELETE FROM entries WHERE number = 19", "UPDATE entries SET number = 19 WHERE number = 20"],
    "one more": ["INSERT INTO entries (number, hash) VALUES (21, '00')"],
    "negative": ["INSERT INTO entries (number, hash) VALUES (-1, '00')"],
    "series": ["UPDATE entries SET series = 'x' WHERE number = 3"],
    "planned": ["UPDATE entries SET planned = NULL WHERE number = 3"],
    "charge": ["UPDATE entries SET charged_mu = 0 WHERE number = 3"],
    "budget": ["UPDATE ledger SET epsilon = 30.0"],
    "no budget": ["UPDATE ledger SET epsilon = NULL"],
    "adaptive": ["UPDATE ledger SET adaptive = 0"],
    "adjacency": ["UPDATE ledger SET relation = 'replace'"],
    "head": ["UPDATE ledger SET head = '00'"],
    "no header": ["DELETE FROM ledger"],
    "two headers": ["INSERT INTO ledger SELECT * FROM ledger"],
    "no table": ["DROP TABLE entries"],
    "no documents": ["DROP TABLE documents"],
    "no column": ["ALTER TABLE entries DROP COLUMN certificate"],
    "no hashes": ["ALTER TABLE entries DROP COLUMN hash"],
    "schema": ["PRAGMA user_version = 1"],
    "last schema": ["PRAGMA user_version = 3"],
    "no schema": ["PRAGMA user_version = 0"],
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_is_found(used, name):
    sql(used.path, *TAMPERING[name])
    with pytest.raises(LedgerError):
        Ledger(used.path)
    with pytest.raises(LedgerError):
        used.verify()


def test_a_changed_budget_is_found_in_an_empty_ledger(path):
    Ledger(path, BUDGET)
    sql(path, "UPDATE ledger SET epsilon = 30.0")
    with pytest.raises(LedgerError, match="changed by other means"):
        Ledger(path)


def test_a_consistent_truncation_is_found_with_a_head_that_was_kept(used):
    old, kept = used.history()[18].hash, used.verify()
    sql(
        used.path,
        "DELETE FROM documents WHERE sha256 = (SELECT certificate FROM entries WHERE number = 20)",
        "DELETE FROM entries WHERE number = 20",
        f"UPDATE ledger SET entries = 19, head = '{old}'",
    )
    shorter = Ledger(used.path)  # the file alone cannot tell
    assert shorter.verify(old) == old
    with pytest.raises(LedgerError, match="does not contain"):
        shorter.verify(kept)
    with pytest.raises(LedgerError, match="changed by other means"):
        used.spend(guarantee(0.001))  # this object has seen more


def test_an_old_copy_or_another_ledger_in_its_place_is_found(used, tmp_path):
    copy = used.path.read_bytes()
    used.spend(guarantee(0.001))
    used.path.write_bytes(copy)
    with pytest.raises(LedgerError, match="changed by other means"):
        used.spend(guarantee(0.001))
    used.path.unlink()
    with pytest.raises(LedgerError, match="unable to open"):
        used.spend(guarantee(0.001))
    Ledger(used.path, BUDGET)
    with pytest.raises(LedgerError, match="fixed at creation"):
        used.spend(guarantee(0.001))


def damaged(content):
    """The file with a part zeroed, cut off, or one bit flipped."""
    moments = random.Random(2)
    for start in range(0, len(content), 128):
        yield content[:start] + bytes(128) + content[start + 128 :]
    for length in range(0, len(content), 512):
        yield content[:length]
    for _ in range(150):
        place = moments.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ 1 << moments.randrange(8)]) + content[place + 1 :]


def test_a_damaged_file_is_found_or_says_the_same(used):
    expected, content, found = used.export(), used.path.read_bytes(), 0
    for damage in damaged(content):
        used.path.write_bytes(damage)
        try:
            assert Ledger(used.path).export() == expected
        except LedgerError:
            found += damage != content
    assert found > 60  # the rest fell on unused bytes


# --- older schemas ---

# files that earlier versions have written: how many entries they have, their heads, and what those versions answered
OLDER = {
    1: (3, "250d321b9eb2da35019e95e51042cb6902abd2960758d04daddcd95d9f4090b8", 1.509771),
    2: (4, "d74476c13f3b87f1995eec8e7000e566d034a906e2255eb104d2f64c543a8154", 1.180538),
    3: (5, "057a7f27390888cb7b235e804a3cda45354586fe65f6c257d79a841c5ae9a6f7", 1.6255163506842454),
}


@pytest.mark.slow
@pytest.mark.parametrize("schema", OLDER)
def test_an_older_file_keeps_its_hashes_and_its_total(path, schema):
    path.write_bytes((GOLDEN / f"ledger-schema-{schema}.db").read_bytes())
    entries, head, spent = OLDER[schema]
    ledger = Ledger(path, BUDGET)
    assert ledger.verify(head) == head
    assert len(ledger.history()) == entries
    assert all(entry.stated and type(entry.certificate) is Guarantee for entry in ledger.history())
    if schema < 3:  # as one block, fixed beforehand
        assert all(entry.planned is entry.series is entry.charged_mu is None for entry in ledger.history())
    assert ledger.spent() == pytest.approx(spent, rel=1e-4)
    left = ledger.remaining().mu
    spend = ledger.spend(guarantee(0.2), count=3, dataset="survey")
    again = Ledger(path)
    assert again.history()[-1] == spend
    assert (again.history()[-1].planned, again.history()[-1].dataset) == (3, "survey")
    assert spent < again.spent() <= BUDGET.epsilon
    assert again.remaining().mu == pytest.approx(math.sqrt(left**2 - 3 * 0.2**2), rel=1e-9)
    assert again.verify(head) != head
    assert verify_export(again.export(), head)


def test_what_older_files_hold(path):
    path.write_bytes((GOLDEN / "ledger-schema-1.db").read_bytes())
    assert {(entry.profile, entry.count, entry.sampling_rate) for entry in Ledger(path).history()} == {
        (GaussianProfile(0.2), 1, 1.0)
    }
    alone = float(gaussian.mu(BUDGET.epsilon, (1 - RESERVE_ALONE) * BUDGET.delta))  # the filter that it was begun with
    assert Ledger(path).remaining().mu == pytest.approx(math.sqrt(alone**2 - 3 * 0.04), rel=1e-9)
    path.write_bytes((GOLDEN / "ledger-schema-2.db").read_bytes())
    ledger = Ledger(path)
    assert [(entry.count, entry.sampling_rate) for entry in ledger.history()] == [
        *[(1, 1.0), (100, 0.01), (100, 0.01)],
        (2, 1.0),
    ]
    assert ledger.history()[3].profile == spherical.Profile(6, 6.0, 1.0, 20.0, 1.0)
    assert ledger.history()[0].total_variation == 1e-15
    assert 0.95 * 0.5922 < ledger.remaining().mu < 0.5922  # what is left when everything counted as fixed beforehand


def test_what_a_file_of_schema_3_holds(path):
    path.write_bytes((GOLDEN / "ledger-schema-3.db").read_bytes())
    ledger = Ledger(path)
    entries = ledger.history()
    assert [(entry.note, entry.count, entry.sampling_rate, entry.series, entry.planned) for entry in entries] == [
        ("matrix", 1, 1.0, None, 1),
        ("training, epoch 1", 100, 0.01, "5eed", 300),
        ("training, epoch 2", 100, 0.01, "5eed", 300),
        ("spherical, not drawn", 2, 1.0, None, 2),
        ("one sampled step", 1, 0.001, None, 1),
    ]
    assert [(entry.charged_mu, entry.charged_delta) for entry in entries] == [
        (0.12410614902978208, 1.3536363984694086e-20),
        (0.2511270046234131, 1.800286953183151e-08),
        (0.0, 0.0),
        (0.24136042594909668, 1.0799999999999999e-08),
        (0.010151244699954987, 6.480000953519895e-09),
    ]
    law = spherical.Profile(6, 5.975368169859642, 1.0145118560330122, 2.5675905578277005, 1.000000000001)
    training = GaussianProfile(0.9)
    assert [entry.profile for entry in entries] == [
        GaussianProfile(0.12410614902978208),
        training,
        training,
        law,
        training,
    ]
    assert [entry.total_variation for entry in entries] == [2.8653734622178398e-21, 1e-15, 1e-15, 0.0, 1e-15]
    assert entries[0].source == "analytic [balle2018improving, Theorem 8]"
    assert (entries[0].fields["shape"], entries[0].unit, entries[0].key) == ("3x4", "record", None)
    assert ledger.spent() == pytest.approx(1.6255163506842454, rel=1e-9)
    assert ledger.remaining().mu == pytest.approx(0.5300464131845963, rel=1e-9)
    assert ledger.remaining().epsilon == pytest.approx(2.403503152590569, rel=1e-9)
    # the series goes on where it was left
    before = ledger.spent()
    part = ledger.spend(guarantee(0.9, variation=1e-15), "epoch 3", count=100, sampling_rate=0.01, series="5eed")
    assert (part.planned, part.charged_mu, ledger.spent()) == (300, 0.0, before)
    with pytest.raises(BudgetExceeded, match="0 are left"):
        ledger.spend(guarantee(0.9, variation=1e-15), sampling_rate=0.01, series="5eed")


def test_what_a_file_of_schema_4_holds(path):
    path.write_bytes((GOLDEN / "ledger-schema-4.db").read_bytes())
    ledger = Ledger(path)
    head = "86c89c3f1fc116b701655bba97725afa75c330520f56cbd101dd375d38aff900"
    assert ledger.verify() == head
    assert [(entry.note, entry.planned, entry.plan) for entry in ledger.history()] == [
        ("matrix", 1, None),
        ("counts", 1, None),
        ("training, epoch 1", 300, None),
    ]
    assert ledger.spent() == pytest.approx(2.9531217992327234, rel=1e-9)  # by the one filter that it was begun with
    assert ledger.remaining().mu == pytest.approx(0.10812879581545196, rel=1e-9)
    assert verify_export(ledger.export(), head)
    ledger.spend(guarantee(0.1))
    assert verify_export(ledger.export(), head)
    with pytest.raises(BudgetExceeded):
        ledger.spend(guarantee(0.1))


def test_an_older_file_that_was_tampered_with_stays_as_it_is(path):
    path.write_bytes((GOLDEN / "ledger-schema-1.db").read_bytes())
    sql(path, "UPDATE entries SET mu = 0.1 WHERE number = 2")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="entry 2 is not what was written"):
        Ledger(path)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(used):
    sql(used.path, "PRAGMA user_version = 7")
    before = used.path.read_bytes()
    for call in (lambda: Ledger(used.path), lambda: used.spend(guarantee(0.001))):
        with pytest.raises(LedgerError, match="schema 7"):
            call()
    assert used.path.read_bytes() == before


# --- many at once, crashes, disks ---


def test_processes_together_never_pass_the_budget(path, scenario):
    found = scenario("race", path, 8, 100, SHARED / math.sqrt(500.5))
    assert found["entries"] == sum(found["allowed"]) == 500
    assert Ledger(path).spent() <= BUDGET.epsilon


def test_threads_share_one_ledger(path):
    ledger, numbers = Ledger(path, BUDGET), []

    def work():
        for _ in range(10):
            numbers.append(ledger.spend(guarantee(0.001)).number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 81))
    assert len(Ledger(path).history()) == 80


def test_forks_while_another_thread_spends(tmp_path, scenario):
    found = scenario("forks", tmp_path, 40)
    assert found["statuses"] == [0] * 40
    assert found["entries"] == found["thread"] + 40


@pytest.mark.slow
def test_kills_lose_no_spend_and_release_nothing_without_one(tmp_path, scenario):
    found = scenario("crash", tmp_path, 200, True)
    assert found["held"]
    assert found["releases"] > 20  # the workers got somewhere,
    assert found["journals"] > 10  # and were killed inside a transaction, too


def test_the_kills_do_find_a_release_before_its_spend(tmp_path, scenario):
    found = scenario("crash", tmp_path, 200, False)
    assert not found["held"]
    assert found["unspent"] > 0


def test_kills_leave_no_half_made_ledger(tmp_path, scenario):
    assert 0 < scenario("creation", tmp_path, 40)["made"] < 40


def test_files_that_cannot_grow(tmp_path, scenario):
    found = scenario("limit", tmp_path)
    assert "release nothing" in found["failure"]
    assert found["before"] == found["after"] == found["then"] - 1


def test_full_disk(tmp_path):
    inside = 'mount -t tmpfs -o size=128k tmpfs "$0" && exec "$@"'
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c", inside, str(tmp_path)]
    try:
        subprocess.run([*private, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no small file system can be mounted here")
    line = json.dumps(["full", str(tmp_path)])
    done = subprocess.run([*private, *WORKER], input=line, stdout=subprocess.PIPE, text=True, env=ONE_THREAD)
    found = json.loads(done.stdout)
    assert "full" in found["failure"]
    assert "full" in found["second"]
    assert (found["before"], found["after"], found["then"]) == (1, 1, 2)
    assert found["files"] == [".second.db.lock", "ledger.db"]  # all who try again must wait for the same lock


def test_read_only_files_and_folders(scenario):
    found = scenario("readonly")
    for place in ("file", "folder"):
        assert "readonly" in found[place]["failure"]
        assert (found[place]["before"], found[place]["after"]) == (1, 1)
    assert found["read"] == 1
    assert "writable" in found["creation"]
    assert "unable to open" in found["hidden"]
    for failure in (found["file"]["failure"], found["folder"]["failure"], found["hidden"]):
        assert "this account may not read and write" in failure


def test_a_lock_that_is_never_given_back(used):
    impatient = Ledger(used.path, timeout=0.1)
    with closing(sqlite3.connect(used.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked"):
            impatient.spend(guarantee(0.001))
        assert len(impatient.history()) == 20
    impatient.spend(guarantee(0.001))


def test_a_backup_by_hard_link_does_no_harm_and_is_refused_itself(path):
    """SQLite looks for what a crash has left beside the name it was given, so only one name may be used."""
    ledger = Ledger(path, BUDGET)
    ledger.spend(guarantee(0.1))
    (path.parent / "backups").mkdir()
    others = path.with_name("other.db"), path.parent / "backups" / path.name
    for other in others:
        os.link(path, other)
    ledger.spend(guarantee(0.1))
    assert len(Ledger(path).history()) == 2
    for other in others:
        with pytest.raises(LedgerError, match=r"more than one hard link.*copy the file"):
            Ledger(other)
    # a copy is a ledger of its own; and when the other names are gone, the file may have another name
    others[0].unlink()
    others[0].write_bytes(path.read_bytes())
    assert len(Ledger(others[0]).history()) == 2
    path.unlink()
    moved = Ledger(others[1])
    moved.spend(guarantee(0.1))
    os.link(others[1], path)
    moved.spend(guarantee(0.1))
    with pytest.raises(LedgerError, match="not the name"):
        Ledger(path)
    with pytest.raises(LedgerError, match="not the name"):
        ledger.spend(guarantee(0.1))


def test_an_older_file_with_hard_links_is_refused(path):
    path.write_bytes((GOLDEN / "ledger-schema-2.db").read_bytes())
    os.link(path, path.with_name("other.db"))
    with pytest.raises(LedgerError, match="not known which"):
        Ledger(path)
    path.with_name("other.db").unlink()
    assert len(Ledger(path).history()) == 4


def test_no_hard_links_are_needed(path, monkeypatch):
    def missing(*_, **__):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", missing)
    Ledger(path, BUDGET).spend(guarantee(0.1))
    assert os.listdir(path.parent) == [path.name]


def test_what_a_killed_creator_has_left_is_no_obstacle(path):
    for end in ("lock", "draft", "draft-journal"):
        path.with_name(f".{path.name}.{end}").write_bytes(b"" if end == "lock" else b"half a ledger")
    Ledger(path, BUDGET).spend(guarantee(0.1))
    assert os.listdir(path.parent) == [path.name]


def test_noise_that_is_no_secret_is_not_charged(path):
    with pytest.warns(UserWarning, match="generator of your own"):
        out = release(np.zeros(3), Frobenius(1.0), Budget(0.5, 1e-6), rng=np.random.default_rng(1))
    with pytest.raises(InvalidInput, match="secret noise"):
        Ledger(path, BUDGET).spend(out.certificate)


def test_noise_that_is_not_floating_point_safe_is_not_charged(path):
    ledger = Ledger(path, BUDGET)
    drawn = certify(Gaussian(Isotropic((2,), 10.0)), Frobenius(1.0), drawing=Drawing())
    with pytest.raises(GuaranteeViolated, match="floating-point-safe"):
        ledger.spend(drawn)
    assert ledger.history() == []


def test_rates_that_are_too_small_are_refused(path):
    with pytest.raises(InvalidInput, match="1e-100"):
        Ledger(path, BUDGET).spend(guarantee(0.1), sampling_rate=1e-320)


def test_a_ledger_of_a_fixed_plan_says_so(path):
    """Every total is then that of an accountant, which the filter would not allow."""
    ledger = Ledger(path, BUDGET, adaptive=False)
    for _ in range(2):
        ledger.spend(guarantee(1.0), count=500, sampling_rate=0.01)
    ledger.spend(guarantee(ledger.remaining().mu))
    accountant = Accountant()
    accountant.add(guarantee(1.0), 1000, 0.01)
    assert ledger.spent() > accountant.epsilon(1e-6)
    assert [entry.charged_mu for entry in ledger.history()] == [None] * 3
    assert not Ledger(path).adaptive
    assert ledger.export()[0]["adaptive"] == 0
    with pytest.raises(InvalidInput, match="adaptive must be the ledger's own"):
        Ledger(path, adaptive=True)
    sql(path, "UPDATE ledger SET adaptive = 1")
    with pytest.raises(LedgerError, match="changed by other means"):
        Ledger(path)
