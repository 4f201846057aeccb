"""Banded strategies beside jax_privacy's optimiser, and Toeplitz ones for 100,000 steps: python benchmarks/over_time.py

jax_privacy needs an environment of its own; give its interpreter, and it runs in the same session:

    python -m venv peer && peer/bin/pip install jax_privacy==2.0.0
    python benchmarks/over_time.py --peer peer/bin/python

Both minimise the error of running sums over strategies with so many bands, for records that take part once: the sum of
the variances of all answers at mu = 1. "gap" is how far the value can be from the optimum, as proven. Times are
processor seconds of one run and wall-clock seconds, after compilation for matrixdp, with it for jax_privacy.
"""

import argparse
import json
import subprocess
import time

import numpy as np

from matrixdp import Budget, Participation, calibrate, certify
from matrixdp.mechanisms.solvers import over_time

SIZES = ((1024, 32), (2048, 32))
PEER = """
import json, sys, time
import jax.numpy as jnp
import numpy as np
from jax_privacy.matrix_factorization import banded
steps, bands = int(sys.argv[1]), int(sys.argv[2])
cpu, wall = time.process_time(), time.perf_counter()
found = banded.optimize(steps, bands=bands)
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
strategy = np.asarray(found.materialize(), dtype=np.float64)
print(json.dumps([cpu, wall, strategy.tolist()]))
"""


def timed(task):
    cpu, wall = time.process_time(), time.perf_counter()
    found = task()
    return time.process_time() - cpu, time.perf_counter() - wall, found


def value_of(strategy):
    """The largest squared column norm times the error of running sums, in double precision."""
    answers = np.cumsum(np.linalg.inv(strategy), axis=0)
    return np.max(np.sum(strategy**2, axis=0)) * np.sum(answers**2)


def row(name, cpu, wall, value, gap=""):
    print(f"{name:<34} {cpu:>9.2f} s {wall:>9.2f} s {value:>18.8g} {gap:>9}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", help="the interpreter of an environment with jax_privacy")
    peer = parser.parse_args().peer
    over_time.banded(Participation(1.0), np.ones(64), 4)  # compiles
    print(f"{'':<34} {'processor':>11} {'wall':>11} {'error at mu = 1':>18} {'gap':>9}")
    for steps, bands in SIZES:
        cpu, wall, found = timed(lambda n=steps, b=bands: over_time.banded(Participation(1.0), np.ones(n), b))
        row(f"matrixdp banded ({steps}, {bands})", cpu, wall, found.value, f"{found.gap:.1e}")
        if peer is not None:
            output = subprocess.run(
                [peer, "-c", PEER, str(steps), str(bands)], capture_output=True, text=True, check=True
            ).stdout
            cpu, wall, strategy = json.loads(output.splitlines()[-1])
            row(f"jax_privacy banded ({steps}, {bands})", cpu, wall, value_of(np.array(strategy)))
    for separation, times in ((32, 32), (128, 8)):
        sensitivity = Participation(1.0, separation=separation, times=times)
        cpu, wall, found = timed(lambda s=sensitivity: over_time.banded(s, np.ones(1024), 32))
        row(f"banded (1024, 32), {times} x, {separation} apart", cpu, wall, found.value, f"{found.gap:.1e}")
    sensitivity, budget = Participation(1.0, separation=1000, times=100), Budget(1.0, 1e-6)
    cpu, wall, law = timed(
        lambda: calibrate("toeplitz", shape=(100_000, 1), sensitivity=sensitivity, budget=budget, bands=64)
    )
    mu = certify(law, sensitivity).mu
    row("toeplitz (100000, 64), 100 x", cpu, wall, law.expected_squared_error(workload="prefix") * mu**2)


if __name__ == "__main__":
    main()
