"""How fast a release is: "auto" beside the mechanism that it picks, large and small values, memory, and the import.

`python benchmarks/release.py`. Times are medians of a few rounds, in which the rows of a table take turns. What is done
for the first time is timed in a process of its own. The limits are the goals of the project. numpy's line is
`value + std * rng.standard_normal(shape)`: one thread, and insecure. The noise of a mechanism is `law.sample()`.
"""

import argparse
import statistics
import subprocess
import sys
import time
import tracemalloc
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from matrixdp import Budget, Counts, Frobenius, RankOne, release
from matrixdp.errors import MatrixDPError

BUDGET = Budget(1.0, 1e-6)
SMALL, MIDDLE, LARGE, GRADIENT = (10, 10), (256, 256), (4096, 4096), (4608, 512)
SETS = {"Counts(1)": Counts(1), "Frobenius(1)": Frobenius(1.0), "RankOne(1)": RankOne(1.0)}
SETTINGS = [(name, shape) for name in ("Counts(1)", "Frobenius(1)") for shape in (SMALL, MIDDLE, LARGE)]
SETTINGS += [("RankOne(1)", MIDDLE), ("RankOne(1)", (784, 784))]
PAPERS = {"mvg": {"gamma": 1.0}, "mgm": {}, "udn": {}, "idn": {}}
CHILDREN = 3

IMPORT = """
import time
start = time.perf_counter()
import matrixdp
print(time.perf_counter() - start)
"""
FIRST = """
import time
import numpy as np
from matrixdp import Budget, Counts, Frobenius, RankOne, release
budget, value = Budget(1.0, 1e-6), np.zeros({shape})
if {loaded}:
    release(np.zeros(2), Frobenius(1), budget, "analytic")
start = time.perf_counter()
release(value, {name}, budget, {mechanism!r})
print(time.perf_counter() - start)
"""


def value_of(name, shape):
    value = np.random.default_rng(0).normal(size=shape)
    return value + value.T if name.startswith("RankOne") else value


def clock(task):
    """The time of a call in seconds, without that of giving its memory back."""
    start = time.perf_counter()
    out = task()
    seconds = time.perf_counter() - start
    del out
    return seconds


def medians(tasks, rounds):
    """The median time of each task; quick ones are repeated for about 20 ms in a round."""
    repeats = {name: max(1, int(0.02 / max(clock(task), clock(task)))) for name, task in tasks.items()}
    times = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            times[name].append(statistics.median(clock(task) for _ in range(repeats[name])))
    return {name: statistics.median(found) for name, found in times.items()}


def in_child(script):
    """The least time of a few processes."""
    command = [sys.executable, "-c", script]
    return min(float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(CHILDREN))


def memory_beyond_output(task):
    """The most that was allocated at one time beyond the value and the output, in bytes."""
    tracemalloc.start()
    try:
        out = task()
        return tracemalloc.get_traced_memory()[1] - out.value.nbytes
    finally:
        tracemalloc.stop()


def auto_rows(rounds):
    for name, shape in SETTINGS:
        value = value_of(name, shape)
        picked = release(value, SETS[name], BUDGET).noise.source.partition(" ")[0]
        tasks = {mechanism: partial(release, value, SETS[name], BUDGET, mechanism) for mechanism in ("auto", picked)}
        warm = medians(tasks, rounds if value.size < 10**6 else max(3, rounds // 3))
        first = {m: in_child(FIRST.format(name=name, shape=shape, mechanism=m, loaded=True)) for m in tasks}
        times = [f"{1e3 * found[mechanism]:,.3g}" for found in (warm, first) for mechanism in ("auto", picked)]
        ratio, later = warm["auto"] / warm[picked], 1e3 * (first["auto"] - first[picked])
        yield name, f"{shape[0]} x {shape[1]}", picked, *times[:2], f"{ratio:.2f}", *times[2:], f"{later:+.3g}"


def large_rows(rounds):
    value, rng = value_of("", LARGE), np.random.default_rng()
    tasks = {"numpy": lambda: value + 4.2 * rng.standard_normal(LARGE)}
    for name in ("Counts(1)", "Frobenius(1)"):
        for mechanism in ("analytic", "auto"):
            tasks[f"{name}, {mechanism}"] = partial(release, value, SETS[name], BUDGET, mechanism)
    tasks["Counts(1), whole numbers"] = partial(release, value.astype(np.int64), SETS["Counts(1)"], BUDGET)
    seconds = medians(tasks, max(3, rounds // 2))
    for name, found in seconds.items():
        memory = "" if name == "numpy" else f"{memory_beyond_output(tasks[name]) / 2**20:.1f}"
        yield name, f"{value.size / found / 1e6:,.3g}", f"{seconds['numpy'] / found:.2f}", memory


def gradient_rows(rounds):
    value = value_of("", GRADIENT)
    value /= 10 * np.linalg.norm(value)
    for mechanism, options in PAPERS.items():
        task = partial(release, value, Frobenius(1.0), BUDGET, mechanism, **options)
        try:
            found = medians({"release": task, "noise": task().noise.sample}, rounds)
        except MatrixDPError as reason:
            yield mechanism, type(reason).__name__, "", ""
            continue
        times = [f"{1e3 * seconds:.3g}" for seconds in found.values()]
        yield mechanism, *times, f"{found['release'] / found['noise']:.2f}"


def table(title, headings, rows):
    shown = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if place == 0 else "right")
    for row in rows:
        shown.add_row(*row)
    return shown


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    console = Console(width=120)

    console.print(f"import matrixdp: {in_child(IMPORT):.2f} s (limit 0.4)")
    cold = in_child(FIRST.format(name="Counts(1)", shape=SMALL, mechanism="auto", loaded=False))
    console.print(f"the first release of a process, which loads numba and scipy: {cold:.2f} s")
    tasks = {name: partial(release, np.zeros(SMALL), SETS[name], BUDGET) for name in ("Counts(1)", "Frobenius(1)")}
    for name, seconds in medians(tasks, rounds).items():
        console.print(f'10 x 10, {name}, "auto": {1e3 * seconds:.2f} ms (limit 1)')

    headings = "release", "million entries/s", "x numpy (limit 1)", "MiB beyond value and output"
    console.print(table(f"{LARGE[0]} x {LARGE[1]}", headings, large_rows(rounds)))
    headings = "mechanism", "release, ms", "its noise, ms", "ratio"
    console.print(table(f"{GRADIENT[0]} x {GRADIENT[1]}, Frobenius(1), {BUDGET}", headings, gradient_rows(rounds)))
    headings = "set", "shape", "picked", "auto, ms", "picked, ms", "ratio (limit 1.2)"
    headings += "first auto, ms", "first picked, ms", "difference (limit 60)"
    console.print(table('"auto" and the mechanism that it picks, warm and at first', headings, auto_rows(rounds)))


if __name__ == "__main__":
    main()
