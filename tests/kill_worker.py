"""Jobs with a state that are killed between any two of their writes, and run again, as a scheduler would.

Reads lines of JSON, [job, careless, folder]; answers each with a line: how many cuts there were and what went wrong.
Each attempt is a forked process; the last one runs to its end. All jobs of a worker have the same key, so that what
they publish can be compared with a job that was never cut.
"""

import io
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from matrixdp import Budget, Ledger, Participation
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key
from matrixdp.streams import Stream, noise, state

WRITES = ("INSERT", "UPDATE", "DELETE", "REPLACE", "COMMIT", "CREATE", "PRAGMA application_id =")
STEPS = 2


class Cut:
    """Kills this process when it is called for the n-th time."""

    def __init__(self, at):
        self.left = at

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function):
        def called(*arguments):
            self()
            result = function(*arguments)
            self()
            return result

        return called


class Watched:
    """A connection that is cut before each statement that writes, and after each transaction."""

    def __init__(self, connection, cut):
        self._connection, self._cut = connection, cut

    def execute(self, statement, *rest):
        if statement.startswith(WRITES):
            self._cut()
        result = self._connection.execute(statement, *rest)
        if statement == "COMMIT":
            self._cut()
        return result

    def __getattr__(self, name):
        return getattr(self._connection, name)


def watch(cut):
    """Cuts before and after every write to the database of a state, and to its mark."""
    connect = state.sqlite3.connect

    def watched(*arguments, **options):
        found = connect(*arguments, **options)
        return Watched(found, cut) if "isolation_level" in options and "/run.state" in str(arguments[0]) else found

    state.sqlite3.connect = watched
    for name in ("write", "fsync"):
        setattr(os, name, cut.around(getattr(os, name)))


def write(cut, path, content):
    """A file that is there as a whole or not at all."""
    part = path.with_suffix(".part")
    cut.around(part.write_bytes)(content)
    cut.around(part.replace)(path)


def publish(folder, cut, number, values):
    cut()
    with (folder / "published").open("a") as file:
        file.write(json.dumps([number, np.asarray(values).tolist()]) + "\n")
    cut()


def ledger_of(folder):
    return Ledger(folder / "ledger.db", Budget(4.0, 1e-5))


# --- jobs: what each publishes for steps 1 to STEPS must be one run, however often it is cut ---


def stream(folder, cut, careless):
    """A daily count; careless: new noise at every attempt, and answers published before they are on the disk."""
    made = Stream(
        steps=4,
        sensitivity=Participation(1.0, separation=2, times=2),
        budget=Budget(1.0, 1e-6),
        mechanism="toeplitz",
        bands=2,
        state=folder / "run.state",
        ledger=ledger_of(folder),
    )
    if careless:
        answer, add_noise = made._answer, kernels.add_noise
        kernels.add_noise = lambda white, std, grid, key: add_noise(white, std, grid)

        def told(connection, step):
            found = answer(connection, step)
            publish(folder, cut, step, found.value)
            return found

        made._answer = told
    for number in range(1, STEPS + 1):
        publish(folder, cut, number, made.add(np.array([3.0, number]), step=number).value)


def endless(folder, cut, careless):
    """Two days, two blocks of two days, and their totals; careless: the totals have new noise at every attempt."""
    noise.FIRST_PART = noise.LONGEST_PART = 2
    ledger = ledger_of(folder)
    settings = {"steps": None, "sensitivity": Participation(1.0), "budget": Budget(1.0, 1e-6)}
    made = Stream(**settings, state=folder / "run.state", ledger=ledger)
    if careless:
        key_for = made._key_for
        made._key_for = lambda purpose, number: (lambda _: Key()) if purpose == b"total" else key_for(purpose, number)
        answer = made._answer

        def told(connection, step):
            found = answer(connection, step)
            publish(folder, cut, step, found.value)
            return found

        made._answer = told
    for number in range(1, 7):
        publish(folder, cut, number, made.add(np.array([3.0, number]), step=number).value)


def training(folder, cut, careless, **changes):
    """A training that saves a checkpoint after each step; careless: new noise at every attempt."""
    import torch

    from time_cases import correlated

    torch.set_num_threads(1)
    settings = {"order": "fixed", "bands": 2, "noise": "toeplitz", "steps": STEPS, **changes}
    run = correlated(**settings, ledger=ledger_of(folder), state=folder / "run.state")
    if careless:
        Key.derive_for = lambda *given: Key()
        run.noise._released.admit = lambda *given: None
    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        run.load_state_dict(torch.load(checkpoint, weights_only=True))
    for batch in itertools.islice(run.batches(STEPS), STEPS - run.steps):
        run.step(batch)
        publish(folder, cut, run.steps, run.gradients.flat)
        saved = io.BytesIO()
        torch.save(run.state_dict(), saved)
        write(cut, checkpoint, saved.getvalue())


def redrawn(folder, cut, careless):
    """The same, where old noise is drawn again."""
    training(folder, cut, careless, noise="inverse-banded", memory="redrawn")


def rounds(folder, cut, careless):
    """Separated rounds of a trusted server; careless: new noise at every attempt, which is not stored."""
    from matrixdp.federated import CentralPrivacy, TrustedServer

    privacy = CentralPrivacy(
        budget=Budget(3.0, 1e-5), rounds=STEPS, clients=6, clip=0.5, separation=2, mechanism="toeplitz"
    )
    server = TrustedServer(privacy, 4, ledger=ledger_of(folder), state=folder / "run.state")
    if careless:
        server._noise.added = lambda total: total + np.random.default_rng().normal(size=4)
    for number in range(1, server.round + 1):
        publish(folder, cut, number, server.published(number))
    for number in range(server.round + 1, STEPS + 1):
        sent = {client: np.full(4, client / 9) for client in server.choose(range(number % 2, 6))}
        publish(folder, cut, number, server.finish(sent)[0])


JOBS = {job.__name__: job for job in (stream, endless, training, redrawn, rounds)}


# --- kills ---


def attempt(job, folder, cut, careless):
    child = os.fork()
    if child == 0:
        status = 255
        try:
            watch(cut)
            job(folder, cut, careless)
            status = 0
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def published(folder):
    file = folder / "published"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def kills(job, careless, folder):
    """Cuts at the first write, the second, and so on, until a job is not cut any more; a careless one is found once."""
    whole, wrong, cuts = folder / "whole", [], 0
    whole.mkdir()
    job(whole, Cut(0), False)  # also compiles what the others need
    expected = dict(published(whole))
    for at in range(1, 400):
        place = folder / str(at)
        place.mkdir()
        first = attempt(job, place, Cut(at), careless)
        if attempt(job, place, Cut(0), careless) != 0:
            wrong.append([at, "the job could not go on"])
        answers = {}
        for number, values in published(place):
            if answers.setdefault(number, values) != values:
                wrong.append([at, f"step {number} was released in two ways"])
        if sorted(answers) != sorted(expected):
            wrong.append([at, "a step was lost"])
        elif answers != expected:
            wrong.append([at, "another run than one that is not cut"])
        history = ledger_of(place).history()
        if len(history) != 1 or history[0].count != history[0].planned:
            wrong.append([at, "not charged once, as a whole"])
        shutil.rmtree(place)
        if first == 0 or (careless and "two ways" in str(wrong)):
            break
        cuts += 1
    return {"cuts": cuts, "wrong": wrong}


if __name__ == "__main__":
    state.secrets = SimpleNamespace(token_hex=secrets.token_hex, token_bytes=lambda count: bytes(range(count)))
    for line in sys.stdin:
        name, careless, folder = json.loads(line)
        print(json.dumps(kills(JOBS[name], careless, Path(folder))), flush=True)
