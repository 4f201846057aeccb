"""A daily job that is killed between any two of its writes, and run again, as a scheduler would.

Reads lines of JSON, [scenario, folder]; answers each with a line: how many cuts there were and what went wrong. Each
attempt is a forked process; the last one runs to its end.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from matrixdp import Budget, Ledger, Participation
from matrixdp.secure import kernels
from matrixdp.streams import Stream, state

DAYS = [np.array([3.0, 1.0]), np.array([0.0, 2.0])]
SETTINGS = {
    "steps": 4,
    "sensitivity": Participation(1.0, separation=2, times=2),
    "budget": Budget(1.0, 1e-6),
    "mechanism": "toeplitz",
    "bands": 2,
}


class Cut:
    """Kills this process at its n-th write."""

    def __init__(self, at):
        self.left = at

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Watched:
    """A connection that is cut before each statement, and after each that writes."""

    def __init__(self, connection, cut):
        self._connection, self._cut = connection, cut

    def execute(self, statement, *rest):
        writes = statement.split()[0] in ("INSERT", "UPDATE", "DELETE", "COMMIT", "CREATE")
        if writes:
            self._cut()
        result = self._connection.execute(statement, *rest)
        if statement == "COMMIT":
            self._cut()
        return result

    def __getattr__(self, name):
        return getattr(self._connection, name)


def watch(cut):
    """Cuts before and after every write of a stream: to its database, and to its mark."""
    connect = state.sqlite3.connect

    def watched(*arguments, **options):
        found = connect(*arguments, **options)
        return Watched(found, cut) if "isolation_level" in options and "/stream" in str(arguments[0]) else found

    state.sqlite3.connect = watched
    for name in ("write", "fsync"):
        setattr(os, name, _cut_around(getattr(os, name), cut))


def _cut_around(function, cut):
    def called(*arguments):
        cut()
        result = function(*arguments)
        cut()
        return result

    return called


def job(folder, careless):
    """One run of the job for all days: what it publishes is in the file `published`."""
    ledger = Ledger(folder / "ledger.db", Budget(2.0, 1e-6))
    stream = Stream(**SETTINGS, state=folder / "stream", ledger=ledger)
    if careless:  # new noise at every attempt, and answers that are published before they are on the disk
        answer, add_noise = stream._answer, kernels.add_noise
        kernels.add_noise = lambda white, std, grid, key: add_noise(white, std, grid)
        stream._answer = lambda connection, step: publish(folder, answer(connection, step))
    for number, value in enumerate(DAYS, start=1):
        publish(folder, stream.add(value, step=number))


def publish(folder, answer):
    with (folder / "published").open("a") as file:
        file.write(json.dumps([answer.step, answer.value.tolist()]) + "\n")
    return answer


def attempt(folder, cut, careless):
    child = os.fork()
    if child == 0:
        status = 255
        try:
            watch(cut)
            job(folder, careless)
            status = 0
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kills(folder, careless=False):
    """Cuts at the first write, the second, and so on, until a job is not cut any more."""
    wrong, cuts = [], 0
    for at in range(1, 400):
        place = Path(folder) / str(at)
        place.mkdir()
        first = attempt(place, Cut(at), careless)
        last = attempt(place, Cut(0), careless)
        if last != 0:
            wrong.append([at, "the job could not go on"])
        lines = [json.loads(line) for line in (place / "published").read_text().splitlines()]
        answers = {}
        for number, value in lines:
            if answers.setdefault(number, value) != value:
                wrong.append([at, f"day {number} was answered in two ways"])
        if sorted(answers) != [1, 2]:
            wrong.append([at, "a day was lost"])
        if len(Ledger(place / "ledger.db").history()) != 1:
            wrong.append([at, "the stream was not charged once"])
        shutil.rmtree(place)
        if first == 0:
            break
        cuts += 1
    return {"cuts": cuts, "wrong": wrong}


if __name__ == "__main__":
    Stream(**SETTINGS).add(DAYS[0])  # compiles what it needs
    for line in sys.stdin:
        scenario, folder = json.loads(line)
        print(json.dumps(kills(folder, careless=scenario == "careless")), flush=True)
