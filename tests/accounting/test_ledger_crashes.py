"""No crash, race or full disk loses a spend or lets the budget be passed, in either store."""

import json
import math
import subprocess

import pytest

from ledgers import BUDGET, ONE_THREAD, SHARED, WORKER
from matrixdp.accounting.ledger.ledger import Ledger


def test_processes_with_one_key_are_charged_once(new, scenario):
    found = scenario("retries", new.arguments(), 8, 20)
    assert found["entries"] == 20
    assert found["same"]


@pytest.mark.slow
def test_processes_together_never_pass_the_budget(new, scenario):
    if new.dataset:
        new(BUDGET)  # files are created by all at once
    found = scenario("race", new.arguments(), 8, 100, SHARED / math.sqrt(500.5))
    assert found["entries"] == sum(found["allowed"]) == 500
    assert new().spent() <= BUDGET.epsilon


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


@pytest.mark.slow
def test_killed_clients_of_a_server_lose_no_spend(tmp_path, server, scenario):
    Ledger(server.get_uri(), BUDGET, dataset="killed")
    found = scenario("crash", tmp_path, 500, True, [server.get_uri(), "killed"])
    assert found["held"]
    assert found["releases"] > 20


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
