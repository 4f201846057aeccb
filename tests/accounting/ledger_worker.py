"""Scenarios for the ledger that need processes of their own.

Reads lines of JSON, [scenario, *arguments], and answers each with a line, null for a failure. matrixdp is imported
once, and every process is forked from there, which takes milliseconds instead of a second.
"""

import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger, LedgerError
from matrixdp.errors import BudgetExceeded
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

BUDGET = Budget(3.0, 1e-6)


def guarantee(mu):
    return Guarantee(GaussianProfile(mu), "add/remove")


def at(place, budget=None, **options):
    """The ledger at a place: a file, or an address and the name of a data set."""
    if isinstance(place, list):
        return Ledger(place[0], budget, dataset=place[1], **options)
    return Ledger(place, budget, **options)


def fork(work, *arguments):
    """Runs the function in a child, whose exit status is its answer; the child's own children and output end there."""
    child = os.fork()
    if child == 0:
        status = 255
        try:
            status = work(*arguments) or 0
        finally:
            os._exit(status)
    return child


def status(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def together(workers, work):
    """The answers of children that all begin at once."""
    gate, opened = os.pipe()

    def waiting():
        os.close(opened)
        os.read(gate, 1)  # returns when the parent closes its end
        return work()

    children = [fork(waiting) for _ in range(workers)]
    os.close(opened)
    return [status(child) for child in children]


def race(place, workers, spends, mu):
    """All create the ledger and spend from it at once; each answers how often it was allowed to."""

    def work():
        ledger, allowed = at(place, BUDGET), 0
        for _ in range(spends):
            try:
                ledger.spend(guarantee(mu))
                allowed += 1
            except BudgetExceeded:
                pass
        return allowed

    return {"allowed": together(workers, work), "entries": len(at(place).history())}


def share(place, workers, spends, planned):
    """All use up one series at once; each answers how many of its releases it was allowed."""

    def work():
        ledger, allowed = at(place, BUDGET), 0
        for _ in range(spends):
            try:
                ledger.spend(guarantee(0.001), series="shared", planned=planned)
                allowed += 1
            except BudgetExceeded:
                pass
        return allowed

    allowed, entries = together(workers, work), at(place).history()
    return {
        "allowed": allowed,
        "used": sum(e.count for e in entries),
        "charges": sum(e.charged_mu > 0 for e in entries),
    }


def retries(place, workers, keys):
    """All spend under the same keys at once; each checks that it got the entries that are in the ledger."""

    def work():
        ledger = at(place, BUDGET)
        entries = [ledger.spend(guarantee(0.001), f"spend {number}", key=f"key {number}") for number in range(keys)]
        return int({entry.hash for entry in entries} != {entry.hash for entry in ledger.history()})

    same = together(workers, work) == [0] * workers
    return {"same": same, "entries": len(at(place).history())}


def broken_off(folder, rounds, planned):
    """Kills a worker that carries out a plan, again and again: what was released, and what the ledger knows."""
    path, output = Path(folder, "ledger.db"), Path(folder, "output")
    Ledger(path, BUDGET)
    output.touch()

    def work(steps=10**6):
        ledger = Ledger(path)
        with output.open("a") as released:
            for _ in range(steps):
                try:
                    entry = ledger.spend(guarantee(0.001), series="plan", planned=planned)
                except BudgetExceeded:
                    return
                released.write(f"{entry.hash}\n")
                released.flush()
                os.fsync(released.fileno())

    start = time.perf_counter()
    assert status(fork(work, 2)) == 0
    longest, moments = time.perf_counter() - start, random.Random(2)
    for _ in range(rounds):
        killed(work, longest, moments)
    entries, lines = Ledger(path).history(), output.read_text().splitlines()
    assert {entry.hash for entry in entries}.issuperset(lines)
    assert len(set(lines)) == len(lines)
    return {"released": len(lines), "used": len(entries), "charges": sum(entry.charged_mu > 0 for entry in entries)}


def killed(work, longest, moments):
    """Runs the function in a child and kills it after a random time, at most the longest."""
    child = fork(work)
    time.sleep(moments.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    return status(child)


def crash(folder, rounds, spend_first, place=None):
    """Kills a worker that spends and releases, again and again, and looks at what is left each time.

    The longest time that it has follows the load of the machine: about half of all workers come to a release.
    """
    path, output = Path(folder, "ledger.db"), Path(folder, "output")
    place = place or str(path)
    watching = at(place, BUDGET)
    output.touch()

    def work(steps=10**6):
        ledger = at(place)
        with output.open("a") as released:

            def release(text):
                released.write(f"{text}\n")
                released.flush()
                os.fsync(released.fileno())

            for _ in range(steps):
                if spend_first:
                    release(ledger.spend(guarantee(1e-4)).hash)
                else:
                    release("too early")
                    ledger.spend(guarantee(1e-4))

    start = time.perf_counter()
    assert status(fork(work, 2)) == 0
    longest, moments = time.perf_counter() - start, random.Random(1)
    journals, before, told = 0, 0, 2
    for _ in range(rounds):
        killed(work, longest, moments)
        journals += path.with_name("ledger.db-journal").exists()
        spent = [entry.hash for entry in (watching if isinstance(place, list) else at(place)).history()]
        lines = output.read_text().splitlines()
        unspent, lost = len(lines) - len(spent), spend_first and not set(spent).issuperset(lines)
        if unspent > 0 or lost or len(spent) < before:
            return {"held": False, "unspent": unspent}
        longest *= 1 / 1.1 if len(lines) > told else 1.1
        before, told = len(spent), len(lines)
    return {"held": True, "spends": len(spent), "releases": len(lines), "journals": journals}


def creation(folder, rounds):
    """Kills a worker that creates a ledger: afterwards there is none, or a whole one.

    The longest time that it has follows the load of the machine: about half of all ledgers are made.
    """
    start = time.perf_counter()
    Ledger(Path(folder, "warm up.db"), BUDGET)
    longest, moments, made = 1.5 * (time.perf_counter() - start), random.Random(1), 0
    for number in range(rounds):
        path = Path(folder, f"{number}.db")
        killed(lambda path=path: Ledger(path, BUDGET) and None, longest, moments)
        longest *= 1 / 1.3 if path.exists() else 1.3
        made += path.exists()
        Ledger(path, BUDGET).spend(guarantee(0.1))
    return {"made": made}


def attempt(ledger):
    """The number of entries before and after a spend that must fail, and the failure."""
    before = len(ledger.history())
    try:
        ledger.spend(guarantee(1e-4), "x" * 900)
    except LedgerError as failure:
        return {"before": before, "failure": str(failure), "after": len(Ledger(ledger.path).history())}
    return {"before": before, "failure": None}


def full(folder):
    """On a small file system: fills it up, tries to spend, and makes room again."""
    ledger, filler = Ledger(Path(folder, "ledger.db"), BUDGET), Path(folder, "filler")
    ledger.spend(guarantee(1e-4))
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass
    try:
        Ledger(Path(folder, "second.db"), BUDGET)
        second = None
    except LedgerError as failure:
        second = str(failure)
    found = attempt(ledger)
    filler.unlink()
    ledger.spend(guarantee(1e-4))
    return {**found, "then": len(ledger.history()), "second": second, "files": sorted(os.listdir(folder))}


def limit(folder):
    """No file may grow any more: spends until one fails, and then again without the limit."""
    ledger = Ledger(Path(folder, "ledger.db"), BUDGET)
    ledger.spend(guarantee(1e-4))
    resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.path.stat().st_size + 8192, resource.RLIM_INFINITY))
    found = {"failure": None}
    for _ in range(100):
        found = attempt(ledger)
        if found["failure"]:
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ledger.spend(guarantee(1e-4))
    return {**found, "then": len(Ledger(ledger.path).history())}


def readonly():
    """A file, and then a folder, that may not be written; in a temporary folder, as a user who is not root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Ledger(folder / "warm up.db", BUDGET).spend(guarantee(1e-4))
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        ledger = Ledger(folder / "ledger.db", BUDGET)
        ledger.spend(guarantee(1e-4))
        ledger.path.chmod(0o400)
        file = attempt(ledger)
        ledger.path.chmod(0o600)
        moved = folder / "moved.db"
        moved.write_bytes(ledger.path.read_bytes())
        moved.chmod(0o400)
        read = len(Ledger(moved).history())  # under another name, and only to be read
        folder.chmod(0o500)
        found = {"file": file, "folder": attempt(ledger), "read": read}
        try:
            Ledger(folder / "new.db", BUDGET)
        except LedgerError as failure:
            found["creation"] = str(failure)
        folder.chmod(0o700)
        ledger.path.chmod(0o000)
        try:
            Ledger(ledger.path)
        except LedgerError as failure:
            found["hidden"] = str(failure)
        return found


def forks(folder, children):
    """Forks while another thread spends; every child spends once, with the ledger object that it inherited."""
    ledger = Ledger(Path(folder, "ledger.db"), BUDGET, timeout=300.0)
    ended, spends = threading.Event(), 0

    def work():
        nonlocal spends
        while not ended.is_set():
            ledger.spend(guarantee(1e-4))
            spends += 1

    thread = threading.Thread(target=work)
    thread.start()
    started = []
    for _ in range(children):
        started.append(fork(lambda: ledger.spend(guarantee(1e-4)) and None))
        time.sleep(0.002)
    statuses = [status(child) for child in started]
    ended.set()
    thread.join()
    return {"statuses": statuses, "thread": spends, "entries": len(Ledger(ledger.path).history())}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (race, share, retries, broken_off, crash, creation, full, limit, readonly, forks)
}


def answer(name, *arguments):
    signal.alarm(600)
    print(json.dumps(SCENARIOS[name](*arguments)), flush=True)


def warm_up():
    """Loads what the first spend of a process needs, so that no fork has to."""
    with tempfile.TemporaryDirectory() as folder:
        Ledger(Path(folder, "ledger.db"), BUDGET).spend(guarantee(1e-4))


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        if status(fork(answer, *json.loads(line))) != 0:
            print("null", flush=True)
