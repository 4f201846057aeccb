"""How libraries calibrate Gaussian noise: time, accuracy and side of the truth. `python benchmarks/calibrate.py`.

Each library is asked for the std at sensitivity 1, one setting at a time, in its own documented way, and its answer is
compared with a 120-digit root. An answer has too little noise if it is strictly below that root, by however little. A
call fails if it raises, takes longer than two seconds or returns no positive number. The peers are optional:
`pip install matrixdp[peers]`.
"""

import math
import runpy
import signal
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
from mpmath import mpf
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq

from matrixdp.privacy import gaussian

true_mu = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "golden" / "gaussian.py"))["true_mu"]
SECONDS = 2.0
GIVE_UP = 3  # calls over time, after which a library is not asked again


def plain_brentq():
    def excess(mu, epsilon, delta):
        a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
        return 0.5 * math.erfc(a * math.sqrt(0.5)) - 0.5 * math.exp(epsilon) * math.erfc(b * math.sqrt(0.5)) - delta

    return lambda epsilon, delta: 1 / brentq(excess, 1e-6, 1e2, args=(epsilon, delta), xtol=1e-15)


def dp_accounting():
    from dp_accounting.pld.accountant import get_smallest_gaussian_noise
    from dp_accounting.pld.common import DifferentialPrivacyParameters

    return lambda epsilon, delta: get_smallest_gaussian_noise(DifferentialPrivacyParameters(epsilon, delta))


def autodp():
    from autodp.calibrator_zoo import ana_gaussian_calibrator
    from autodp.mechanism_zoo import ExactGaussianMechanism

    calibrate = ana_gaussian_calibrator()
    return lambda epsilon, delta: calibrate(ExactGaussianMechanism, epsilon, delta).params["sigma"]


def diffprivlib():
    from diffprivlib.mechanisms import GaussianAnalytic

    return lambda epsilon, delta: GaussianAnalytic(epsilon=epsilon, delta=delta, sensitivity=1.0)._scale


def opendp():
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)

    def measurement(std):
        return dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=std))

    return lambda epsilon, delta: dp.binary_search_param(measurement, d_in=1.0, d_out=(epsilon, delta), T=float)


LIBRARIES = {
    "matrixdp": lambda: lambda epsilon, delta: 1 / gaussian.mu(epsilon, delta),
    "scipy brentq": plain_brentq,
    "dp-accounting": dp_accounting,
    "autodp": autodp,
    "diffprivlib": diffprivlib,
    "OpenDP (zCDP)": opendp,
}


def out_of_time(signum, frame):
    raise TimeoutError


def ask(calibrate, settings):
    """(seconds, std) for each setting; std is None where the call failed."""
    answers, late = [], 0
    for epsilon, delta in settings:
        if late == GIVE_UP:
            answers.append((math.inf, None))
            continue
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        start = time.perf_counter()
        try:
            std = float(calibrate(epsilon, delta))
        except TimeoutError:
            std, late = None, late + 1
        except Exception:  # whatever a library raises is a failure of that call
            std = None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = time.perf_counter() - start
        answers.append((seconds, std if std is not None and 0 < std < math.inf else None))
    return answers


def judge(answers, truths):
    """Worst relative error, settings with too little noise, failures: as text."""
    errors = [float(mpf(std) * mu - 1) for (_, std), mu in zip(answers, truths, strict=True) if std is not None]
    little = sum(mpf(std) * mu < 1 for (_, std), mu in zip(answers, truths, strict=True) if std is not None)
    worst = f"{max(errors, key=abs):+.1e}" if errors else "-"
    return worst, f"{little} of {len(errors)}", str(len(answers) - len(errors))


def sweep(generator, size, exponents):
    epsilon, delta = 10 ** generator.uniform(-3, 1, size), 10 ** generator.uniform(*exponents, size)
    settings = list(zip(epsilon.tolist(), delta.tolist(), strict=True))
    return settings, [true_mu(*setting) for setting in settings]


def vector_rate(generator, size=300_000):
    epsilon, delta = 10 ** generator.uniform(-8, 3, size), 10 ** generator.uniform(-300, math.log10(0.5), size)
    start = time.perf_counter()
    gaussian.mu(epsilon, delta)
    return size / (time.perf_counter() - start)


def main():
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, out_of_time)
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
    for library, load in LIBRARIES.items():
        try:
            calibrate = load()
        except ImportError:
            table.add_row(library, "not installed:", "", "pip install", "matrixdp\\[peers]")
            continue
        ask(calibrate, settings[:5])  # the first calls import and compile
        answers = ask(calibrate, settings)
        median = statistics.median(seconds for seconds, _ in answers)
        ours = ours or median
        row = judge(answers, truths) + judge(ask(calibrate, extreme), extreme_truths)
        table.add_row(library, f"{median * 1e6:,.0f} us", f"{median / ours:.1f}", *row)
    rate = max(vector_rate(generator) for _ in range(3))
    table.caption = (
        f"too little noise: strictly below the true root; failed: raised, took over {SECONDS:.0f} s or gave no number. "
        f"matrixdp on an array of 300,000 settings over its whole range: {rate:,.0f} a second."
    )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
