"""Streams: answers, error bars, state, and what is refused."""

import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pandas
import pytest
from scipy.stats import chi2

from matrixdp import Budget, Certificate, Ledger, Participation
from matrixdp.distributions import time_workloads
from matrixdp.errors import BudgetExceeded, InvalidInput, StreamError
from matrixdp.sensitivity import Frobenius
from matrixdp.streams import Stream

WEEKLY = Participation(1.0, separation=7, times=4, adjacency="add/remove")
BUDGET = Budget(1.0, 1e-6)
SETTINGS = {"steps": 28, "sensitivity": WEEKLY, "budget": BUDGET}
QUICK = {"mechanism": "toeplitz", "bands": 3}


def begun(**others):
    return Stream(**{**SETTINGS, **QUICK, **others})


@pytest.mark.parametrize("mechanism", ["toeplitz", "inverse-banded", "banded", "binary-tree", "analytic"])
@pytest.mark.parametrize("workload", ["prefix", "window:7"])
def test_answers_have_their_standard_error(mechanism, workload):
    """Chi-square over cells that are independent; false alarm 1e-7 a day, and noise a fifth short is told apart."""
    stream = Stream(**SETTINGS, mechanism=mechanism, workload=workload)
    values = np.random.default_rng(0).uniform(0, 9, (3, 400))
    truth = time_workloads.matrix(time_workloads.coefficients(workload, 28))[:3, :3] @ values
    low, high = chi2.isf([1 - 5e-8, 5e-8], 400)
    assert not low < 0.8**2 * 400 * 0.98 < high
    for step in range(3):
        answer = stream.add(values[step])
        assert answer.step == step + 1
        assert low < np.sum(((answer.value - truth[step]) / answer.standard_error) ** 2) < high


@pytest.mark.parametrize("mechanism", ["toeplitz", "inverse-banded", "banded", "binary-tree"])
def test_days_together_have_the_law_of_the_certificate(mechanism):
    """Chi-square of the whitened errors of all days; false alarm 1e-7. Independent noise of the same size fails."""
    stream = Stream(**SETTINGS, mechanism=mechanism)
    values = np.random.default_rng(2).uniform(0, 9, (28, 40))
    totals = np.array([stream.add(row).value for row in values])
    off = np.diff(totals, axis=0, prepend=0.0) - values
    low, high = chi2.isf([1 - 5e-8, 5e-8], off.size)
    covariance = stream.certificate.law.covariance
    assert low < np.sum(covariance.whiten(off) ** 2) < high
    fresh = np.random.default_rng(3).standard_normal(off.shape) * np.sqrt(covariance.variances())
    assert not low < np.sum(covariance.whiten(fresh) ** 2) < high


def test_two_processes_do_not_release_one_day(tmp_path):
    """Two streams on one file, in turns of their own: every day is released once."""
    begun(state=tmp_path / "stream", shape=(1,))

    def work(_):
        stream = Stream.resume(tmp_path / "stream")
        return [stream.add([float(day)]).step for day in range(6)]

    with ThreadPoolExecutor(3) as pool:
        steps = [step for found in pool.map(work, range(3)) for step in found]
    assert sorted(steps) == list(range(1, 19))


def test_tables():
    frame = pandas.DataFrame({"north": [3, 4], "south": [5, 6]})
    assert begun().add(frame).value.shape == (2, 2)
    with pytest.raises(InvalidInput, match="real numbers"):
        begun().add(pandas.DataFrame({"north": ["CANARY", "4"]}))


def test_the_error_is_that_of_the_certificate():
    stream = begun()
    errors = [stream.add(0.0).standard_error for _ in range(28)]
    law = stream.certificate.law
    assert sum(error**2 for error in errors) == pytest.approx(law.expected_squared_error(workload="prefix"))
    assert stream.certificate.meets(BUDGET)
    assert stream.certificate.float_safe
    assert stream.certificate.adjacency == "add/remove"
    assert Certificate.from_json(stream.certificate.to_json()).verify()


def test_row_by_row_is_the_release_of_the_whole():
    """The rows that were put on the grid are those of C X: the noise apart, row by row and all at once agree."""
    for mechanism in ("toeplitz", "inverse-banded", "banded", "binary-tree"):
        stream = Stream(**SETTINGS, mechanism=mechanism)
        rows = 1e6 * np.random.default_rng(1).uniform(0.5, 1, (28, 2))  # the noise is lost in it
        answers = np.array([stream.add(row).value for row in rows])
        np.testing.assert_allclose(answers, np.cumsum(rows, axis=0), rtol=1e-3)


def test_intervals_and_shapes():
    stream = begun(shape=(2, 3))
    answer = stream.add(np.ones((2, 3)))
    low, high = answer.interval(0.95)
    np.testing.assert_allclose(high - low, 2 * 1.959964 * answer.standard_error, rtol=1e-6)
    assert answer.value.shape == (2, 3)
    with pytest.raises(InvalidInput, match=r"shape \(2, 3\)"):
        stream.add(np.ones(6))


def test_the_whole_stream_is_charged_once_and_first(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db", Budget(1.2, 1e-6))
    stream = begun(ledger=ledger, state=tmp_path / "stream")
    assert ledger.history() == []
    stream.add(3.0)
    stream.add(4.0)
    Stream.resume(tmp_path / "stream").add(5.0)
    begun(ledger=ledger, state=tmp_path / "stream").add(6.0)
    (entry,) = ledger.history()
    assert entry.profile.mu == stream.certificate.mu
    other = begun(ledger=ledger, state=tmp_path / "other")
    with pytest.raises(BudgetExceeded):
        other.add(1.0)
    assert len(other) == 0


def test_a_stream_goes_on_where_it_was(tmp_path):
    path = tmp_path / "stream"
    first = begun(state=path)
    answers = [first.add([float(day), 1.0]).value for day in range(3)]
    again = begun(state=path)
    assert len(again) == 3
    for step in (1, 2, 3):
        np.testing.assert_array_equal(again.answer(step).value, answers[step - 1])
        np.testing.assert_array_equal(again.add([step - 1.0, 1.0], step=step).value, answers[step - 1])
    assert again.add([3.0, 1.0]).step == 4
    assert len(first) == 4
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "stream.mark").stat().st_mode & 0o777 == 0o600


def test_a_day_is_flushed_to_the_disk_before_it_is_answered(tmp_path, monkeypatch):
    """The database by SQLite itself, at its most careful, and then the mark, which must not be ahead of it."""
    stream, done, fsync = begun(state=tmp_path / "stream", shape=(1,)), [], os.fsync
    with stream._state.transaction() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA

    def flushed(handle):
        fsync(handle)
        with closing(sqlite3.connect(tmp_path / "stream")) as connection:
            released = connection.execute("SELECT count(*) FROM days").fetchone()[0]
        done.append((released, int((tmp_path / "stream.mark").read_text().split()[1])))

    monkeypatch.setattr(os, "fsync", flushed)
    stream.add(1.0)
    assert done[-1] == (1, 1)
    assert all(marked <= released for released, marked in done)


def test_only_the_rows_that_are_needed_are_kept(tmp_path):
    path = tmp_path / "stream"
    stream = begun(state=path)
    for day in range(6):
        stream.add(np.full(900, 1234567.25 + day))  # more than a page
    with stream._state.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM carried").fetchone() == (2,)
    content = path.read_bytes()
    for day in range(6):
        assert (np.float64(1234567.25 + day).tobytes() in content) == (day >= 4)  # overwritten, not only unlinked


def test_another_value_on_a_day_that_was_released_is_refused():
    stream = begun()
    stream.add(918273.0)
    with pytest.raises(InvalidInput, match="step 1 was released with another value") as refused:
        stream.add(918274.0, step=1)
    assert "9182" not in str(refused.value)
    with pytest.raises(InvalidInput, match="step must be 2, the next day, got 4"):
        stream.add(1.0, step=4)


def test_no_more_days_than_planned():
    stream = begun(steps=2, sensitivity=Participation(1.0), bands=2)
    stream.add(1.0)
    stream.add(1.0)
    with pytest.raises(InvalidInput, match="planned, and paid for, with 2 steps"):
        stream.add(1.0)


@pytest.mark.parametrize(
    "others",
    [
        {"steps": 29},
        {"sensitivity": Participation(2.0, separation=7, times=4, adjacency="add/remove")},
        {"sensitivity": Participation(1.0, separation=7, times=3, adjacency="add/remove")},
        {"sensitivity": Participation(1.0, separation=7, times=4)},
        {"budget": Budget(1.1, 1e-6)},
        {"workload": "window:7"},
        {"bands": 4},
        {"shape": (3,)},
    ],
    ids=str,
)
def test_other_settings_are_refused(tmp_path, others):
    begun(state=tmp_path / "stream", shape=(2,)).add([1.0, 2.0])
    with pytest.raises(InvalidInput, match="other settings"):
        begun(state=tmp_path / "stream", **{"shape": (2,), **others})


def test_another_ledger_is_refused(tmp_path):
    first, second = (Ledger(tmp_path / name, Budget(2.0, 1e-6)) for name in ("a.db", "b.db"))
    begun(state=tmp_path / "stream", ledger=first)
    for ledger in (second, None):
        with pytest.raises(InvalidInput, match="ledger must be the one"):
            begun(state=tmp_path / "stream", ledger=ledger)
    assert first.history() == second.history() == []


def test_copies_and_earlier_states_are_refused(tmp_path):
    path = tmp_path / "stream"
    stream = begun(state=path)
    stream.add(1.0)
    earlier = path.read_bytes()
    stream.add(2.0)
    shutil.copy(path, tmp_path / "copy")
    with pytest.raises(StreamError, match="is a copy, or was moved"):
        Stream.resume(tmp_path / "copy")
    path.write_bytes(earlier)  # in place: the same inode
    with pytest.raises(StreamError, match="reset to an earlier state"):
        stream.add(3.0)
    with pytest.raises(StreamError, match="reset to an earlier state"):
        Stream.resume(path)


def test_a_stream_that_was_moved_on_purpose(tmp_path):
    begun(state=tmp_path / "stream").add(1.0)
    os.rename(tmp_path / "stream", tmp_path / "elsewhere")
    assert len(Stream.resume(tmp_path / "elsewhere", moved=True)) == 1
    assert len(Stream.resume(tmp_path / "elsewhere")) == 1


def test_a_copy_whose_original_exists_was_not_moved(tmp_path):
    """moved=True is a word about the past that can be checked: the file that it was begun in is still there."""
    path, copy = tmp_path / "stream", tmp_path / "copy"
    begun(state=path).add(1.0)
    shutil.copy(path, copy)
    with pytest.raises(StreamError, match="still exists"):
        Stream.resume(copy, moved=True)
    assert len(Stream.resume(path, moved=True)) == 1
    path.unlink()
    assert len(Stream.resume(copy, moved=True)) == 1


def test_an_earlier_state_that_was_moved_is_refused(tmp_path):
    """By the mark that stayed behind."""
    path, backup = tmp_path / "stream", tmp_path / "backup"
    stream = begun(state=path)
    stream.add(1.0)
    shutil.copy(path, backup)
    stream.add(2.0)
    path.unlink()
    with pytest.raises(StreamError, match="reset to an earlier state"):
        Stream.resume(backup, moved=True)
    with pytest.raises(StreamError, match="is a copy, or was moved"):
        Stream.resume(backup)


def test_a_mark_never_goes_back(tmp_path):
    """Another process releases a day after the first one has released its own, and before that writes its mark."""
    path = tmp_path / "stream"
    first = begun(state=path, shape=(1,))
    second, write_mark = Stream.resume(path), first._state._write_mark

    def late(*arguments):
        if len(second) == 1:
            second.add(2.0, step=2)
        write_mark(*arguments)

    first._state._write_mark = late
    first.add(1.0, step=1)
    assert (tmp_path / "stream.mark").read_text().split()[1] == "2"


def test_a_stream_in_memory_is_not_used_by_two_threads():
    stream = begun(shape=(1,))
    with ThreadPoolExecutor(1) as pool, pytest.raises(StreamError, match="give state="):
        pool.submit(stream.add, 1.0).result()
    assert stream.add(1.0).step == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_stream_in_memory_is_not_used_by_two_processes():
    """Each would release a day of its own, with noise of its own."""
    stream = begun(shape=(1,))
    stream.add(1.0)
    child = os.fork()
    if child == 0:
        try:
            stream.add(2.0)
        except InvalidInput as refused:
            os._exit(0 if "inherited by process" in str(refused) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stream.add(3.0).step == 2


def test_the_noise_of_a_day_that_is_done_again(tmp_path):
    """Where a rollback is not seen: the same row has the same noise, another row has other noise altogether."""
    path = tmp_path / "stream"
    stream = begun(state=path)
    stream.add(np.zeros(50))
    earlier = path.read_bytes()
    released = stream.add(np.zeros(50)).value
    found = []
    for value in (0.0, 1.0):
        path.write_bytes(earlier)
        (tmp_path / "stream.mark").unlink()
        found.append(Stream.resume(path).add(np.full(50, value)).value)
    np.testing.assert_array_equal(found[0], released)
    assert np.ptp(found[1] - released) > 1  # with the same noise, all cells would differ by 1


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "stream"
    begun(state=path)
    path.chmod(0o640)
    with pytest.raises(StreamError, match="chmod 600"):
        Stream.resume(path)
    other = tmp_path / "ledger.db"
    Ledger(other, BUDGET)
    with pytest.raises(StreamError, match="not a stream"):
        begun(state=other)
    with pytest.raises(StreamError, match="there is no stream"):
        Stream.resume(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"steps": 0}, "steps must be a whole number"),
        ({"sensitivity": Frobenius(1.0)}, "Participation"),
        ({"budget": 1.0}, "Budget"),
        ({"workload": np.triu(np.ones((28, 28)))}, "lower triangular"),
        ({"workload": "prefixes"}, "workload must be one of"),
        ({"mechanism": "laplace", "bands": None}, "Counts|no option"),
        ({"bands": 99}, "bands must be at most"),
        ({"steps": None}, "take part once"),
        ({"steps": None, "sensitivity": Participation(1.0)}, "mechanism of its own"),
        ({"state": 5}, "state must be the path"),
    ],
)
def test_bad_settings_leave_no_file(tmp_path, others, message):
    with pytest.raises(InvalidInput, match=message):
        begun(**{"state": tmp_path / "stream", **others})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [[np.nan], [np.inf], "three", [[1.0], [2.0, 3.0]], None, np.ones((2, 2, 2)), [1e300]])
def test_bad_values_release_nothing(value):
    stream = begun()
    stream.add([1.0])
    with pytest.raises(InvalidInput):
        stream.add(value)
    assert len(stream) == 1


def test_long_streams_take_large_values():
    """Rows that are added in pairs have room for them; added one after the other, 2,048 days allow 4e5."""
    settings = {"steps": 2048, "sensitivity": Participation(1.0), "budget": BUDGET}
    stream = Stream(**settings, mechanism="inverse-banded", bands=2048)
    for day in (1, 2):
        answer = stream.add(1e7)
        assert abs(answer.value - day * 1e7) < 10 * answer.standard_error
    with pytest.raises(InvalidInput, match="too large"):
        stream.add(1e8)
