"""A ledger on PostgreSQL: rights, tampering, secrets, schemas, and what is lost in mid-spend."""

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from ledgers import BUDGET, guarantee
from matrixdp import Ledger
from matrixdp.accounting.ledger import postgres
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.cli import app
from matrixdp.errors import InvalidInput, LedgerError

CANARY = "Canary-Zq7"


@pytest.fixture
def place(server):
    """An address and the name of a data set with a ledger of three entries."""
    found = {"path": server.get_uri(), "dataset": secrets.token_hex(16)}
    ledger = Ledger(**found, budget=BUDGET)
    for number in range(1, 4):
        ledger.spend(guarantee(number / 1000), f"entry {number}")
    return found


@pytest.fixture
def admin(server):
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        yield connection


@pytest.fixture
def role(server, admin):
    """A new role, and its address."""
    name = f"role_{secrets.token_hex(16)}"
    admin.execute(f"CREATE ROLE {name} LOGIN")
    return name, server.get_uri().replace("postgres:@", f"{name}@")


# --- rights ---


def test_a_role_that_may_spend_may_do_nothing_else(place, role, admin):
    name, address = role
    with pytest.raises(LedgerError, match="may not"):
        Ledger(address, dataset=place["dataset"])
    Ledger(**place).grant(name, "read")
    reader = Ledger(address, dataset=place["dataset"])
    assert len(reader.history()) == 3
    with pytest.raises(LedgerError, match="matrixdp ledger grant"):
        reader.spend(guarantee(0.01))
    Ledger(**place).grant(name)
    spender = Ledger(address, dataset=place["dataset"])
    spender.spend(guarantee(0.01))
    with pytest.raises(LedgerError, match="may not"):
        spender.set_quota("ada", BUDGET)
    with pytest.raises(LedgerError, match="may not"):
        Ledger(address, BUDGET, dataset=secrets.token_hex(16))
    statements = [
        *(f"UPDATE matrixdp.entries SET {column} = {column}" for column in ("number", "key", "fields", "hash")),
        *(f"DELETE FROM matrixdp.{table}" for table in ("entries", "documents", "ledgers", "versions")),
        *(f"TRUNCATE matrixdp.{table} CASCADE" for table in ("entries", "documents", "ledgers")),
        "UPDATE matrixdp.ledgers SET header = header",
        "UPDATE matrixdp.documents SET content = content",
        "ALTER TABLE matrixdp.entries DISABLE TRIGGER ALL",
        "DROP TABLE matrixdp.entries",
        "CREATE TABLE matrixdp.more (x INT)",
    ]
    with psycopg.connect(address, autocommit=True) as connection:
        for statement in statements:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
    for statement in statements[:-3]:  # the owner would have to remove the triggers first
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            admin.execute(statement.replace("DELETE FROM matrixdp.versions", "DELETE FROM matrixdp.entries"))
    assert len(Ledger(**place).history()) == 4


def test_the_server_refuses_entries_that_are_not_the_next(place, admin):
    last = Ledger(**place).history()[-1]
    fields = json.dumps({"number": 4, "time": last.time})
    wrong = [(4, fields, "00"), (3, fields, last.hash), (6, fields, "00"), (4, json.dumps({"number": 5}), "00")]
    for number, text, found in wrong:
        row = (place["dataset"], number, None, text, found)
        with pytest.raises((psycopg.errors.CheckViolation, psycopg.errors.SerializationFailure)):
            admin.execute("INSERT INTO matrixdp.entries VALUES (%s, %s, %s, %s, %s)", row)
    with pytest.raises(psycopg.errors.CheckViolation):
        admin.execute("INSERT INTO matrixdp.documents VALUES (%s, '00', '{}')", (place["dataset"],))
    Ledger(**place).verify()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE matrixdp.entries SET fields = replace(fields, 'entry 2', 'entry 9') WHERE dataset = %s",
        "UPDATE matrixdp.entries SET fields = 'x' WHERE number = 2 AND dataset = %s",
        "UPDATE matrixdp.entries SET hash = '00' WHERE number = 2 AND dataset = %s",
        "UPDATE matrixdp.ledgers SET header = replace(header, '3.0', '30.0') WHERE dataset = %s",
        "UPDATE matrixdp.ledgers SET header = '{}' WHERE dataset = %s",
        "DELETE FROM matrixdp.entries WHERE number = 2 AND dataset = %s",
        "DELETE FROM matrixdp.entries WHERE number = 3 AND dataset = %s",
        "DELETE FROM matrixdp.documents WHERE content LIKE '%%0.002%%' AND dataset = %s",
    ],
)
def test_what_the_owner_changes_is_found(place, admin, statement):
    opened = Ledger(**place)
    tables = ("ledgers", "entries", "documents")
    for table in tables:
        admin.execute(f"ALTER TABLE matrixdp.{table} DISABLE TRIGGER USER")
    try:
        admin.execute(statement, (place["dataset"],))
    finally:
        for table in tables:
            admin.execute(f"ALTER TABLE matrixdp.{table} ENABLE TRIGGER USER")
    with pytest.raises(LedgerError, match="changed by other means"):
        opened.verify()
    with pytest.raises(LedgerError, match="changed by other means"):
        Ledger(**place).verify()


def test_one_database_has_many_ledgers(place):
    other = Ledger(place["path"], BUDGET, dataset=secrets.token_hex(16))
    assert other.history() == []
    assert len(Ledger(**place).history()) == 3
    assert verify_export(Ledger(**place).export())
    with pytest.raises(InvalidInput, match="dataset must be given"):
        Ledger(place["path"])
    with pytest.raises(LedgerError, match="create it with a budget"):
        Ledger(place["path"], dataset="missing")


# --- secrets, and what cannot be reached ---


@pytest.fixture
def locked(server, admin):
    """The address of a role that needs a password."""
    hosts = server.pgdata / "pg_hba.conf"
    text = hosts.read_text()
    if "ledger_keeper" not in text:
        hosts.write_text("local all ledger_keeper scram-sha-256\n" + text)
        admin.execute("SELECT pg_reload_conf()")
        admin.execute(f"CREATE ROLE ledger_keeper LOGIN PASSWORD 'right-{CANARY}'")
    return server.get_uri().replace("postgres:@", f"ledger_keeper:wrong-{CANARY}@")


def addresses(locked):
    host = "/nowhere"
    yield locked, "password is wrong"
    yield locked.replace(f":wrong-{CANARY}@", "@"), "password"
    yield f"postgresql://user:{CANARY}@localhost:1/db?connect_timeout=2", "server cannot be reached"
    yield f"postgresql://user:{CANARY}@/db?host={host}", "server cannot be reached"
    yield f"postgresql://user:{CANARY}@localhost:{CANARY}/db", "cannot be read|server cannot be reached"
    yield f"postgresql://user:{CANARY}@[localhost/db", "cannot be read|server cannot be reached"
    yield locked.replace("/postgres?", f"/{CANARY}?").replace("ledger_keeper:wrong-", "postgres:"), "no such database"


def test_no_secret_is_in_an_error_or_a_log(locked, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    from typer.testing import CliRunner

    for address, words in addresses(locked):
        with pytest.raises(LedgerError, match=words) as found:
            Ledger(address, BUDGET, dataset="patients", timeout=0.3)
        told = "".join(traceback.format_exception(found.value, chain=True)) + repr(found.value.__context__)
        result = CliRunner().invoke(app, ["ledger", "show", address, "--dataset", "patients", "--timeout", "0.3"])
        assert result.exit_code == 2
        for text in (told, result.output, result.stderr, caplog.text, *capfd.readouterr()):
            assert CANARY not in text
    opened = Ledger(locked.replace("ledger_keeper:wrong-", "postgres:"), BUDGET, dataset="canary")
    assert CANARY not in repr(opened) + opened.name + repr(opened._book.store)


# --- schemas ---


def test_tables_that_another_process_has_just_made_are_found(place, monkeypatch):
    """A connection that waited for its turn may still remember that there were no tables, and tries again."""
    stale, version = [0, 0], postgres._version
    monkeypatch.setattr(postgres, "_version", lambda found: stale.pop() if stale else version(found))
    assert Ledger(place["path"], BUDGET, dataset=secrets.token_hex(16)).history() == []
    assert stale == []


def test_an_older_schema_is_brought_up_to_date_and_a_newer_one_refused(place, admin, role, monkeypatch):
    opened = Ledger(**place)
    opened.grant(role[0])
    later = {**postgres.MIGRATIONS, 2: ("ALTER TABLE matrixdp.versions ADD COLUMN note TEXT",)}
    monkeypatch.setattr(postgres, "MIGRATIONS", later)
    with pytest.raises(LedgerError, match="may not"):
        Ledger(role[1], dataset=place["dataset"])  # it is for the owner to do
    try:
        assert len(Ledger(**place).history()) == 3
        assert len(Ledger(role[1], dataset=place["dataset"]).history()) == 3
        monkeypatch.undo()
        for call in (lambda: Ledger(**place), lambda: opened.spend(guarantee(0.01))):
            with pytest.raises(LedgerError, match="schema 2"):
                call()
    finally:
        admin.execute("DELETE FROM matrixdp.versions WHERE version = 2")
        admin.execute("ALTER TABLE matrixdp.versions DROP COLUMN note")
    assert len(opened.history()) == 3


# --- what is lost in mid-spend ---


class Proxy(threading.Thread):
    """Stands between a client and the server, and cuts connections around the first COMMIT that it sees.

    Args:
        target: the socket of the server.
        path: the socket to listen at.
        after: whether the COMMIT is handed on before the cut.
    """

    def __init__(self, target, path, after):
        super().__init__(daemon=True)
        self.target, self.after, self.cuts = str(target), after, 1
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()

    def run(self):
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        server = socket.socket(socket.AF_UNIX)
        server.connect(self.target)
        answers = threading.Thread(target=self.copy, args=(server, client), daemon=True)
        answers.start()
        with suppress(OSError):
            while data := client.recv(65536):
                if b"COMMIT\0" in data and b"INSERT" not in data and self.armed and self.cuts:
                    self.cuts -= 1
                    client.shutdown(socket.SHUT_RDWR)
                    if self.after:
                        server.sendall(data)
                        time.sleep(0.2)
                    break
                server.sendall(data)
        for each in (server, client):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    armed = False

    @staticmethod
    def copy(source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)


@pytest.mark.parametrize("after", [True, False])
def test_a_connection_that_is_cut_around_its_commit(place, after):
    folder = Path(place["path"].rpartition("host=")[2])
    with tempfile.TemporaryDirectory(prefix="mdp") as name:  # the name of a socket is short
        other = Path(name)
        proxy = Proxy(folder / ".s.PGSQL.5432", other / ".s.PGSQL.5432", after)
        proxy.start()
        ledger = Ledger(place["path"].replace(str(folder), str(other)), dataset=place["dataset"])
        for armed in (False, True):
            proxy.armed = armed
            before = len(Ledger(**place).history())
            entry = ledger.spend(guarantee(0.01), "cut")
            assert len(Ledger(**place).history()) == before + 1
            assert Ledger(**place).history()[-1].hash == entry.hash
        assert proxy.cuts == 0  # it did happen
        proxy.listener.close()
    assert verify_export(Ledger(**place).export())


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_in_mid_spend(own_server):
    server = own_server
    place = {"path": server.get_uri(), "dataset": "patients"}
    ledger, told, ended = Ledger(**place, budget=BUDGET, timeout=300.0), [], threading.Event()

    def work():
        while not ended.is_set():
            told.append(ledger.spend(guarantee(1e-4)).hash)

    def spending():
        """Returns in mid-spend, after a few that went through, however long these take on this machine."""
        wanted, end = len(told) + 6, time.monotonic() + 300
        while len(told) < wanted and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        spending()
        os.kill(server.get_pid(), signal.SIGKILL)
        _start_again(server)
    spending()
    ended.set()
    for thread in threads:
        thread.join()
    entries = [entry.hash for entry in Ledger(**place).history()]
    assert len(told) == len(set(told)) > 20
    assert sorted(told) == sorted(entries)  # no spend was lost, and none was charged twice
    assert verify_export(Ledger(**place).export())


def _start_again(server):
    """Starts a killed server, as soon as its processes have noticed that and are gone."""
    time.sleep(1.0)
    for _ in range(40):
        (server.pgdata / "postmaster.pid").unlink(missing_ok=True)  # nobody may reap the process that it names
        try:
            server.ensure_postgres_running()
            return
        except (RuntimeError, OSError, subprocess.SubprocessError):
            time.sleep(0.25)
    pytest.fail("the server did not start again")
