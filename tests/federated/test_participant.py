"""Every noisy reply is paid for, once, whatever happens in between."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from matrixdp import Budget, calibrate, certify
from matrixdp.errors import InvalidInput, LedgerError
from matrixdp.federated import participant as module
from matrixdp.federated.participant import Charge, Declined, Participant, Stored
from matrixdp.sensitivity import Frobenius

BUDGET = Budget(3.0, 1e-5)
CERTIFICATE = certify(
    calibrate("analytic", shape=(3,), sensitivity=Frobenius(1.0, "replace"), budget=Budget(1.0, 1e-6)),
    Frobenius(1.0, "replace"),
)


class Crash(BaseException):
    """The process dies; nothing catches that."""


def charge(step, certificate=CERTIFICATE):
    return Charge(f"run a round {step}", certificate)


def ask(participant, step=1, *, certificate=CERTIFICATE, compute=lambda stored: stored, crash=None):
    """One request; the reply is fresh randomness, so that two draws are never the same."""

    def draw(value):
        if crash == "before the draw":
            raise Crash
        noise = np.frombuffer(os.urandom(8), dtype=np.uint8)
        if crash == "after the draw":
            raise Crash
        return Stored(reply={"noise": noise}, state={"kept": np.array([step])})

    return participant.answer("a", step, [charge(step, certificate)], compute, draw)["noise"].tolist()


def notes(participant):
    return [entry.note for entry in participant.ledger.history()]


def test_the_same_request_gets_the_same_reply_and_is_paid_once(tmp_path):
    first = ask(Participant(tmp_path, BUDGET))
    again = Participant(tmp_path, BUDGET)
    assert ask(again) == first
    assert notes(again) == ["run a round 1"]
    assert ask(again, step=2) != first
    assert again.stored("a").step == 2
    assert again.stored("a").state["kept"].tolist() == [2]


def failing(*_, **__):
    raise Crash


@pytest.mark.parametrize("point", ["compute", "spend", "before the draw", "after the draw", "write", "replace", "sent"])
def test_after_a_crash_at_any_point_the_round_is_answered_and_paid_once(tmp_path, monkeypatch, point):
    crashed = Participant(tmp_path, BUDGET)
    lost = None
    with monkeypatch.context() as patch:
        if point == "spend":
            patch.setattr(crashed, "_spend", failing)
        if point in ("write", "replace"):
            module._write(crashed._file("a"), Stored())  # the mark of the run's beginning is there already
            patch.setattr(
                module.np if point == "write" else module.os, "savez" if point == "write" else "replace", failing
            )
        if point == "sent":
            lost = ask(crashed)
        else:
            with pytest.raises(Crash):
                ask(crashed, compute=failing if point == "compute" else lambda s: s, crash=point)
    assert notes(crashed) == ([] if point in ("compute", "spend") else ["run a round 1"])
    after = Participant(tmp_path, BUDGET)
    reply = ask(after)
    assert notes(after) == ["run a round 1"]
    assert lost is None or reply == lost
    assert ask(Participant(tmp_path, BUDGET)) == reply


SCRIPT = """
import os, signal, sys
from pathlib import Path
import numpy as np
from matrixdp.federated import participant as module
from test_participant import BUDGET, Participant, ask

assert not {"flwr", "ray"} & set(sys.modules)  # the privacy logic is for machines without them, too

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def after(function, condition=lambda *_: True):
    return lambda *given: (function(*given), condition(*given) and die())

def half_written(file, **arrays):
    save(file, **arrays)
    if int(arrays["step"]) == 1:
        file.truncate(20)
        file.flush()
        die()

for number in range(4):
    if not os.fork():  # not a new process, which would have to load everything again
        reply = ask(Participant(Path(sys.argv[1], "together"), BUDGET))
        Path(sys.argv[1], f"reply-{number}").write_text(str(reply))
        os._exit(0)
for number in range(4):
    os.wait()
save = np.savez
for point in sys.argv[2:]:
    if os.fork():
        os.wait()
        continue
    made = Participant(Path(sys.argv[1], point), BUDGET)
    if point == "spent":
        module.Participant._spend = after(module.Participant._spend)
    if point == "half written":
        np.savez = half_written
    if point == "stored":
        os.replace = after(os.replace, lambda draft, path: module._read(path).step == 1)
    ask(made)
    Path(sys.argv[1], point, "survived").touch()
    os._exit(0)
"""
POINTS = ["spent", "half written", "stored"]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder), *POINTS], env=environment, check=True, timeout=300)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_process_has_neither_paid_twice_nor_sent_twice(processes, point):
    assert not (processes / point / "survived").exists()
    after = Participant(processes / point, BUDGET)
    assert notes(after) == ["run a round 1"]
    stored = after.stored("a")
    assert stored.step == (1 if point == "stored" else -1)
    reply = ask(after)
    if point == "stored":
        assert reply == stored.reply["noise"].tolist()
    assert notes(after) == ["run a round 1"]


def test_processes_that_ask_at_the_same_time_get_one_reply(processes):
    assert len({path.read_text() for path in processes.glob("reply-*")}) == 1
    assert len(list(processes.glob("reply-*"))) == 4
    assert notes(Participant(processes / "together", BUDGET)) == ["run a round 1"]


def test_threads_that_ask_at_the_same_time_get_one_reply(tmp_path):
    Participant(tmp_path, BUDGET)
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: ask(Participant(tmp_path, BUDGET)), range(8)))
    assert len({tuple(reply) for reply in replies}) == 1
    assert notes(Participant(tmp_path, BUDGET)) == ["run a round 1"]


def test_steps_go_forward_only(tmp_path):
    made = Participant(tmp_path, BUDGET)
    ask(made, step=3)
    with pytest.raises(Declined, match="out of order"):
        ask(made, step=2)
    assert notes(made) == ["run a round 3"]


def test_a_spent_budget_is_declined_before_the_work(tmp_path):
    made = Participant(tmp_path, Budget(1.2, 1e-6))
    ask(made, step=1)
    with pytest.raises(Declined, match="is spent"):
        ask(made, step=2, compute=failing)
    assert notes(made) == ["run a round 1"]


def test_a_spend_pays_for_the_guarantee_it_was_made_for_and_no_weaker_one(tmp_path):
    made = Participant(tmp_path, BUDGET)
    with pytest.raises(Crash):
        ask(made, crash="before the draw")
    law = calibrate("analytic", shape=(3,), sensitivity=Frobenius(1.0, "replace"), budget=Budget(2.0, 1e-6))
    with pytest.raises(Declined, match="another guarantee"):
        ask(made, certificate=certify(law, Frobenius(1.0, "replace")))


def test_a_step_that_fails_after_its_spend_is_over(tmp_path):
    """Or whoever asks again, with other parameters, would learn for which of them it fails."""
    made = Participant(tmp_path, BUDGET)
    ask(made, step=1)

    def broken(_):
        raise ValueError("for a reason in the data")

    with pytest.raises(ValueError, match="in the data"):
        made.answer("a", 2, [charge(2)], lambda stored: stored, broken)
    for again in (made, Participant(tmp_path, BUDGET)):
        with pytest.raises(Declined, match="step 2 has failed"):
            ask(again, step=2)
    assert made.stored("a").state["kept"].tolist() == [1]
    ask(made, step=3)
    assert notes(made) == ["run a round 1", "run a round 2", "run a round 3"]


def test_a_run_whose_file_is_gone_is_not_drawn_again(tmp_path):
    made = Participant(tmp_path, BUDGET)
    ask(made)
    made._file("a").unlink()
    with pytest.raises(LedgerError, match="is missing"):
        ask(made)
    with pytest.raises(LedgerError, match="is missing"):
        ask(made, step=2)


def test_a_damaged_file_is_no_reason_to_draw_again(tmp_path):
    made = Participant(tmp_path, BUDGET)
    ask(made)
    whole = made._file("a").read_bytes()
    for damaged in (b"", whole[:50], whole[:-30]):
        made._file("a").write_bytes(damaged)
        with pytest.raises(LedgerError, match="cannot be read"):
            ask(made, step=2)


def test_runs_do_not_share_their_spends(tmp_path):
    """Also when one name begins like the other."""
    made = Participant(tmp_path, BUDGET)
    made.answer("11", 1, [Charge("run 11 round 1", CERTIFICATE)], lambda s: s, lambda s: s)
    made.answer("1", 1, [Charge("run 1 round 1", CERTIFICATE)], lambda s: s, lambda s: s)
    assert notes(made) == ["run 11 round 1", "run 1 round 1"]


@pytest.mark.parametrize("run", ["", "../a", "a b", ".hidden", 3, "a/b"])
def test_names_of_runs_stay_inside_the_folder(tmp_path, run):
    with pytest.raises(InvalidInput, match="run must consist"):
        Participant(tmp_path, BUDGET).answer(run, 1, [], lambda s: s, lambda s: s)


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", 2**62])
def test_steps_are_whole_numbers(tmp_path, step):
    with pytest.raises(InvalidInput, match="step must be"):
        Participant(tmp_path, BUDGET).answer("a", step, [], lambda s: s, lambda s: s)


def test_nothing_in_the_folder_is_more_than_arrays(tmp_path):
    ask(Participant(tmp_path, BUDGET))
    with np.load(tmp_path / "run-a.npz", allow_pickle=False) as file:
        assert sorted(file.files) == ["failed", "reply.noise", "state.kept", "step"]
    assert json.dumps(sorted(p.name for p in tmp_path.iterdir())) == '["budget.db", "lock.db", "run-a.npz"]'


def test_a_folder_that_depends_on_where_a_process_starts_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="absolute path"):
        Participant("mine", Budget(1.0, 1e-5))
    assert not list(tmp_path.iterdir())
