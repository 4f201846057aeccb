"""How fast the design solver is, and how much noise it saves: python benchmarks/design.py [--program CELLS]

Each row is one solve at the given relative gap. "of i.i.d." is the expected squared error over that of i.i.d. noise
with the same budget. Times are the best of a few runs; the solver itself keeps to one thread.
"""

import argparse
import math
import time

import cvxpy
import numpy as np

from matrixdp.mechanisms.solvers import design, workloads


def best_time(task, runs):
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        result = task()
        times.append(time.perf_counter() - start)
    return min(times), result


def row(name, seconds, gap, value, iid, iterations="-"):
    share = value / iid
    print(
        f"{name:<34} {seconds * 1e3:>10.1f} ms {iterations!s:>11} {gap:>10.1e} {value:>16.8g} {share:>12.6f}",
        flush=True,
    )


def one_axis(workload, tolerance, runs):
    gram = workload.gram()
    seconds, found = best_time(lambda: design.solve(gram, tolerance=tolerance), runs)
    row(f"{workload.name} at {tolerance:g}", seconds, found.gap, found.value, np.trace(gram), found.iterations)


def semidefinite_program(workload):
    gram = workload.gram()
    precision = cvxpy.Variable(gram.shape, PSD=True)
    program = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.matrix_frac(np.linalg.cholesky(gram), precision)), [cvxpy.diag(precision) <= 1]
    )
    seconds, value = best_time(lambda: program.solve(solver=cvxpy.CLARABEL), 1)
    found = design.solve(gram)
    row(f"{workload.name} by cvxpy and Clarabel", seconds, abs(value / found.lower_bound - 1), value, np.trace(gram))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=int, default=32, metavar="CELLS", help="cells for the semidefinite program")
    arguments = parser.parse_args()

    print(f"{'task':<34} {'time':>13} {'iterations':>11} {'gap':>10} {'error':>16} {'of i.i.d.':>12}")
    design.solve(np.eye(2))  # looks up the thread pools, once
    for cells, runs in ((64, 20), (256, 5), (400, 5), (1024, 2)):
        one_axis(workloads.prefix(cells), 1e-6, runs)
    one_axis(workloads.prefix(1024), 1e-4, 2)
    for cells, runs in ((64, 20), (400, 5)):
        one_axis(workloads.all_ranges(cells), 1e-6, runs)
    rng = np.random.default_rng(0)
    one_axis(workloads.given((rng.random((30, 400)) < 0.3).astype(float)), 1e-6, 3)

    counts = np.array(list(np.ndindex((2,) * 9)), dtype=float)
    seconds, found = best_time(lambda: design.solve(np.eye(9), counts), 5)
    row("9 counts, 512 vertices", seconds, found.gap, found.value, 9 * 9, found.iterations)

    plane = workloads.tensor(workloads.prefix(256), workloads.prefix(256))
    seconds, designs = best_time(lambda: design.solve_kronecker(plane.terms[0]), 2)
    value, iid = math.prod(d.value for d in designs), math.prod(np.trace(factor) for factor in plane.terms[0])
    row("prefix(256) x prefix(256)", seconds, design.combined_gap(designs), value, iid)

    table = workloads.marginals((100,) * 6, [1, 2, 3])
    seconds, found = best_time(lambda: workloads.solve_exchangeable(table), 5)
    row("marginals of 100^6, orders 1 to 3", seconds, found.gap, found.value, 41 * 100.0**6)

    semidefinite_program(workloads.prefix(arguments.program))


if __name__ == "__main__":
    main()
