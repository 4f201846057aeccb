"""The file of a ledger: opening it, what was changed or damaged in it, locks and links."""

import os
import random
import sqlite3
import stat
from contextlib import closing

import pytest

from ledgers import BUDGET, guarantee, sql
from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger, LedgerError
from matrixdp.errors import InvalidInput


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


def test_a_damaged_file_is_found_or_says_the_same(used):
    expected, content, found = used.export(), used.path.read_bytes(), 0
    for damage in damaged(content):
        used.path.write_bytes(damage)
        try:
            assert Ledger(used.path).export() == expected
        except LedgerError:
            found += damage != content
    assert found > 60  # the rest fell on unused bytes


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
