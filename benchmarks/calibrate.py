"""How libraries calibrate Gaussian noise: time, accuracy and side of the truth. `python benchmarks/calibrate.py`.

Each library is asked for the std at sensitivity 1, one setting at a time, in its own documented way, and its answer is
compared with a 120-digit root. An answer has too little noise if it is strictly below that root, by however little. A
call fails if it raises, takes longer than two seconds or returns no positive number. A slow library is asked as many of
the settings as it manages. The peers are optional: `pip install matrixdp[peers]`.
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
SECONDS = 2.0  # for one call
PATIENCE = 40.0  # seconds for one library and sweep; what it has not answered by then it is not asked


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

    def measurement(std, delta):
        return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=std)), delta=delta)

    return lambda epsilon, delta: dp.binary_search_param(
        lambda std: measurement(std, delta), d_in=1.0, d_out=(epsilon, delta), T=float
    )


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
    """(seconds, std) for each setting that PATIENCE allows; std is None where the call failed."""
    answers, began = [], time.perf_counter()
    for epsilon, delta in settings:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        start = time.perf_counter()
        try:
            std = float(calibrate(epsilon, delta))
        except Exception:  # whatever a library raises, being out of time included, is a failure of that call
            std = math.nan
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        end = time.perf_counter()
        answers.append((end - start, std if 0 < std < math.inf else None))
        if end - began > PATIENCE:
            break
    return answers


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
        except ModuleNotFoundError:
            table.add_row(library, "not installed")
            continue
        except ImportError:
            table.add_row(library, "fails to import")
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
