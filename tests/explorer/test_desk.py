"""Releases beside the page: one per confirmed preview, however often; errors without private data."""

import threading
import time
from pathlib import Path

import pytest

from canaries import TEXT, leak
from matrixdp import Budget, Ledger
from matrixdp.errors import InvalidInput
from matrixdp.explorer import releasing
from matrixdp.explorer.jobs import Job
from matrixdp.explorer.statistics import statistic
from matrixdp.explorer.tables import About


@pytest.fixture
def found(folder):
    request = releasing.Request(
        records="patients.csv",
        about=About(domain=Path("domain.toml")),
        statistic=statistic("counts by sex"),
        budget=Budget(1.6, 1e-6),
        ledger="budget.db",
    )
    return releasing.preview(request)


def test_confirming_many_times_at_once_is_one_release(found):
    desk, jobs = releasing.Desk(), []
    threads = [threading.Thread(target=lambda: jobs.append(desk.confirm(found))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:
        job.wait()
    assert len({id(job) for job in jobs}) == 1
    assert jobs[0].result.entry == 1
    assert len(Ledger("budget.db").history()) == 1
    assert desk.file(found.key, "table.csv") == jobs[0].result.files["table.csv"]


def test_for_a_key_that_has_paid_no_noise_is_drawn_again(found):
    """Two draws are two releases, and a key pays for one."""
    releasing.Desk().confirm(found).wait()
    again = releasing.Desk().confirm(found)
    again.wait()
    assert "paid for once" in again.message
    assert [entry.key for entry in Ledger("budget.db").history()] == [found.key]


def test_two_previews_that_do_not_fit_together_are_one_release(found):
    desk, other = releasing.Desk(), releasing.preview(found.request)
    assert other.key != found.key
    jobs = [desk.confirm(each) for each in (found, other)]
    for job in jobs:
        job.wait()
    assert sorted(job.failed for job in jobs) == [False, True]
    assert len(Ledger("budget.db").history()) == 1


def test_there_is_no_file_of_what_was_not_released(found):
    desk = releasing.Desk()
    assert desk.file(found.key, "table.csv") is None
    desk.confirm(found).wait()
    assert desk.file(found.key, "../budget.db") is None
    assert desk.file("other", "table.csv") is None


def test_an_error_of_other_software_is_told_without_its_text():
    def fails(tell):
        raise ValueError(f"could not read {TEXT}")

    job = Job(fails)
    job.wait()
    assert job.failed
    assert "ValueError" in job.message
    assert leak(job.message) is None


def test_an_error_on_purpose_is_told_in_its_words():
    def refuses(tell):
        raise InvalidInput("epsilon must be above 0")

    job = Job(refuses)
    job.wait()
    assert job.message == "epsilon must be above 0"


def test_records_are_in_no_message_and_no_preview(folder):
    """A file whose cells are canaries, under a domain that does not know them."""
    Path("canaries.csv").write_text(f"sex,{TEXT}\n{TEXT},1\n" * 50)
    Path("d.toml").write_text('[columns.sex]\nkind = "categorical"\nvalues = ["f", "m"]\n')
    for line in ("counts by sex", "mean of sex", "counts by other"):
        request = releasing.Request(
            records="canaries.csv", about=About(domain=Path("d.toml")), statistic=statistic(line),
            budget=Budget(1.0, 1e-6), ledger="budget.db",
        )  # fmt: skip
        job = Job(lambda tell, request=request: releasing.preview(request, tell))
        job.wait()
        assert leak(job.message + repr(job.result)) is None
        job = Job(lambda tell, request=request: releasing.released(request, "key", tell))
        job.wait()
        assert leak(job.message + repr(job.result)) is None


def test_a_computation_that_nobody_waits_for_stops():
    passed = []

    def slow(tell):
        for place in range(1000):
            tell(place, 1000)
            passed.append(place)
            time.sleep(0.01)

    job = Job(slow)
    job.cancel()
    job.wait()
    assert job.finished
    assert len(passed) < 1000
