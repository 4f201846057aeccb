"""How libraries calibrate Gaussian noise: time, accuracy and side of the truth. `python benchmarks/calibrate.py`.

Each library is asked for the std at sensitivity 1, one setting at a time, in its own documented way, and its answer is
compared with a 120-digit root. An answer has too little noise if it is strictly below that root, by however little. A
call fails if it raises, takes longer than two seconds or returns no positive number. A slow library is asked as many of
the settings as it manages. With `--peer PYTHON`, libraries in that interpreter's environment are asked too: see
`peers.py`.
"""

import argparse
import math
import runpy
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
from mpmath import mpf
from peers import SECONDS, answer, asked
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq

from matrixdp.privacy import gaussian

true_mu = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "golden" / "gaussian.py"))["true_mu"]


def plain_brentq():
    def excess(mu, epsilon, delta):
        a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
        return 0.5 * math.erfc(a * math.sqrt(0.5)) - 0.5 * math.exp(epsilon) * math.erfc(b * math.sqrt(0.5)) - delta

    return lambda epsilon, delta: 1 / brentq(excess, 1e-6, 1e2, args=(epsilon, delta), xtol=1e-15)


def dp_accounting():
    from dp_accounting.pld.accountant import get_smallest_gaussian_noise
    from dp_accounting.pld.common import DifferentialPrivacyParameters

    return lambda epsilon, delta: get_smallest_gaussian_noise(DifferentialPrivacyParameters(epsilon, delta))


LIBRARIES = {
    "matrixdp": lambda: lambda epsilon, delta: 1 / gaussian.mu(epsilon, delta),
    "scipy brentq": plain_brentq,
    "dp-accounting": dp_accounting,
}


def judge(answers, truths):
    """Worst relative error, settings with too little noise, failures: as text."""
    products = [mpf(std) * mu for (_, std), mu in zip(answers, truths, strict=False) if std is not None]
    worst = max((float(product - 1) for product in products), key=abs, default=math.nan)
    little = sum(product < 1 for product in products)
    return f"{worst:+.1e}", f"{little} of {len(products)}", f"{len(answers) - len(products)} of {len(answers)}"


def sweep(generator, size, exponents):
    epsilon, delta = 10 ** generator.uniform(-3, 1, size), 10 ** generator.uniform(*exponents, size)
    settings = list(zip(epsilon.tolist(), delta.tolist(), strict=True))
    return settings, [true_mu(*setting) for setting in settings]


def vector_rate(generator, size=300_000):
    epsilon, delta = 10 ** generator.uniform(-8, 3, size), 10 ** generator.uniform(-300, math.log10(0.5), size)
    start = time.perf_counter()
    gaussian.mu(epsilon, delta)
    return size / (time.perf_counter() - start)


def answers_of(sweeps, peer):
    """By library, its answers to each sweep, or why there are none."""
    yield from ((library, asked(load(), sweeps)) for library, load in LIBRARIES.items())
    if peer is not None:
        yield from answer(peer, "calibrate", sweeps).items()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="the interpreter of an environment with the other libraries")
    peer = parser.parse_args().peer
    warnings.simplefilter("ignore")
    generator = np.random.default_rng(7)
    (settings, truths), (extreme, extreme_truths) = sweep(generator, 300, (-12, -2)), sweep(generator, 30, (-300, -20))
    table = Table(
        title="Std of Gaussian noise at sensitivity 1; epsilon 1e-3 to 10, delta 1e-12 to 1e-2 (tiny: 1e-300 to 1e-20)"
    )
    table.add_column("library")
    for heading in ("median time", "x matrixdp", "worst error", "too little noise", "failed"):
        table.add_column(heading, justify="right")
    for heading in ("worst error", "too little noise", "failed"):
        table.add_column(f"tiny delta:\n{heading}", justify="right")
    ours = None
    for library, found in answers_of([settings, extreme], peer):
        if isinstance(found, str):
            table.add_row(library, found)
            continue
        usual, tiny = found
        median = statistics.median(seconds for seconds, _ in usual)
        ours = ours or median
        row = judge(usual, truths) + judge(tiny, extreme_truths)
        table.add_row(library, f"{median * 1e6:,.0f} us", f"{median / ours:.1f}", *row)
    rate = max(vector_rate(generator) for _ in range(3))
    table.caption = (
        f"too little noise: strictly below the true root; failed: raised, took over {SECONDS:.0f} s or gave no number. "
        f"matrixdp on an array of 300,000 settings over its whole range: {rate:,.0f} per second."
    )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
