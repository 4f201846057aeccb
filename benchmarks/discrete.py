"""Discrete noise beside Gaussian noise: drawing it, and calibrating it. `python benchmarks/discrete.py`.

Drawing: a release of 2048 x 2048 counts, from the moment at which it is charged; rows take turns, and each shows its
median, and the rate as a multiple of the Gaussian's in the same run. On an l1 ball of any numbers a neighbour may
change every entry, so both kinds of noise need a finer grid, and more words. Calibration: `calibrate` on 64 counts, the
fastest of a few calls with all caches cleared before each, and from the cache; in processor time, as other programs
count less.
With `--peer PYTHON`, OpenDP and diffprivlib draw a small sample in that interpreter's environment (`peers.py`).
"""

import argparse
import statistics
import time

import numpy as np
from peers import drawn_by
from rich.console import Console
from rich.progress import track
from rich.table import Table

from matrixdp import L1, Budget, Counts, Entrywise, calibrate
from matrixdp.mechanisms.solvers import discrete_scales
from matrixdp.pipeline import prepare
from matrixdp.privacy import cell_sums, cells, discrete

SIDE = 2048
BUDGET, PURE = Budget(1.0, 1e-6), Budget(1.0, 0)
DRAWN = {
    "analytic": ("analytic", Counts(1), BUDGET),
    "laplace": ("laplace", Counts(1), BUDGET),
    "laplace, 8 cells": ("laplace", Counts(8), BUDGET),
    "analytic, l1, any numbers": ("analytic", L1(3.0), BUDGET),
    "laplace, l1, any numbers": ("laplace", L1(3.0), BUDGET),
    "discrete, 8 cells": ("discrete", Counts(8), BUDGET),
    "discrete-gaussian": ("discrete-gaussian", Counts(1), BUDGET),
    "discrete-gaussian, 32 cells": ("discrete-gaussian", Counts(32), BUDGET),
    "laplace, delta = 0 (exact)": ("laplace", Counts(1), PURE),
}
SETS = {
    **{f"Counts({k})": Counts(k) for k in (1, 2, 4, 8, 16, 32, 64)},
    "L1(3, 1, step=1)": L1(3, 1, step=1),
    "L1(8, 2, step=1)": L1(8, 2, step=1),
    "L1(7.5)": L1(7.5),
    "Counts(2, 0.3)": Counts(2, 0.3),
    "Counts(8, 0.3)": Counts(8, 0.3),
    "Entrywise(1), 10 entries": Entrywise(1.0),
}
BUDGETS = [(1.0, 1e-6), (0.5, 1e-7), (0.1, 1e-9), (3.0, 1e-5)]


def drawing(rounds, peer):
    value = np.random.default_rng(0).integers(0, 1000, (SIDE, SIDE)).astype(np.float64)
    seconds = {name: [] for name in DRAWN}
    for _ in track(range(rounds + 1), transient=True):  # the first compiles, and builds tables
        for name, (mechanism, sensitivity, budget) in DRAWN.items():
            prepared = prepare(value, sensitivity, budget, mechanism)
            start = time.perf_counter()
            prepared.release()
            seconds[name].append(time.perf_counter() - start)
    table = Table(title=f"A release of {SIDE} x {SIDE} counts, median of {rounds}")
    for heading in ("noise", "million entries/s", "x Gaussian"):
        table.add_column(heading, justify="left" if heading == "noise" else "right")
    rates = {name: value.size / statistics.median(times[1:]) / 1e6 for name, times in seconds.items()}
    for name, rate in (rates | drawn_by(peer, "laplace")).items():
        row = (rate, "") if isinstance(rate, str) else (f"{rate:.4g}", f"{rate / rates['analytic']:.3g}")
        table.add_row(name, *row)
    return table


def milliseconds(mechanism, sensitivity, budget, calls, cached=False):
    found = []
    for _ in range(calls):
        if not cached:
            for function in (
                discrete_scales._scale_for,
                discrete_scales._best_exponent,
                discrete.delta_of,
                cells.cell_loss,
                cell_sums._total,
                cell_sums._tilt,
                cell_sums._on_grid,
            ):
                function.cache_clear()
        shape = (10,) if isinstance(sensitivity, Entrywise) else (8, 8)
        start = time.process_time()
        calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=Budget(*budget))
        found.append(1e3 * (time.process_time() - start))
    return min(found)


def calibration(calls):
    title = f"Calibration, ms of processor time: fastest of {calls} calls, slowest of {len(BUDGETS)} budgets"
    table = Table(title=title)
    for heading in ("set", "laplace", "cached", "discrete", "cached"):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for mechanism in ("laplace", "discrete"):
        milliseconds(mechanism, Counts(4), BUDGETS[0], 1)  # imports
    for name, sensitivity in track(SETS.items(), transient=True):
        row = []
        for mechanism in ("laplace", "discrete"):
            for cached in (False, True):
                times = [milliseconds(mechanism, sensitivity, budget, calls, cached) for budget in BUDGETS]
                row.append(f"{max(times):.3g}")
        table.add_row(name, *row)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--peer", help="the interpreter of an environment with OpenDP and diffprivlib")
    arguments = parser.parse_args()
    console = Console(width=110)
    console.print(drawing(arguments.rounds, arguments.peer))
    console.print(calibration(arguments.calls))


if __name__ == "__main__":
    main()
