"""Files that earlier versions have written open, with their hashes and totals."""

import math
import os

import pytest

from ledgers import BUDGET, GOLDEN, guarantee, sql
from matrixdp import Budget
from matrixdp.accounting.filter import RESERVE_ALONE
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.ledger import Ledger, LedgerError
from matrixdp.errors import BudgetExceeded
from matrixdp.privacy import gaussian, spherical
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

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


def test_what_a_file_of_schema_5_holds(path):
    path.write_bytes((GOLDEN / "ledger-schema-5.db").read_bytes())
    ledger = Ledger(path)
    head = "0dd2514a8e36733f75fa86cfdafb03f56c89ac2f32cdede416c932857b86335b"
    assert ledger.verify() == head
    assert [(entry.note, entry.series, entry.analyst, entry.key, entry.kind) for entry in ledger.history()] == [
        ("matrix", None, "A. Person", "5eed", "spend"),
        ("part 1", "plan", None, None, "spend"),
        ("part 2", "plan", None, None, "spend"),
        ("stated", None, None, None, "spend"),
    ]
    assert ledger.spent() == pytest.approx(2.724689234120203, rel=1e-9)
    assert ledger.remaining().mu == pytest.approx(0.25706829870527176, rel=1e-9)
    ledger.spend(guarantee(0.2), "part 3", series="plan")  # the plan goes on where it was left
    ledger.set_quota("ada", Budget(1.0, 1e-6))
    ledger.spend(guarantee(0.1), analyst="ada")
    assert verify_export(ledger.export(), head)


def test_an_older_file_that_was_tampered_with_stays_as_it_is(path):
    path.write_bytes((GOLDEN / "ledger-schema-1.db").read_bytes())
    sql(path, "UPDATE entries SET mu = 0.1 WHERE number = 2")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="entry 2 is not what was written"):
        Ledger(path)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(path):
    used = Ledger(path, BUDGET)
    sql(used.path, "PRAGMA user_version = 7")
    before = used.path.read_bytes()
    for call in (lambda: Ledger(used.path), lambda: used.spend(guarantee(0.001))):
        with pytest.raises(LedgerError, match="schema 7"):
            call()
    assert used.path.read_bytes() == before


def test_an_older_file_with_hard_links_is_refused(path):
    path.write_bytes((GOLDEN / "ledger-schema-2.db").read_bytes())
    os.link(path, path.with_name("other.db"))
    with pytest.raises(LedgerError, match="not known which"):
        Ledger(path)
    path.with_name("other.db").unlink()
    assert len(Ledger(path).history()) == 4
