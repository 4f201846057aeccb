"""What other libraries take to calibrate and to draw noise; run with the interpreter of their environment.

`calibrate.py`, `noise.py` and `discrete.py` start it, with their `--peer`:

    python -m venv peer
    peer/bin/pip install 'opendp[polars]==0.16.0' diffprivlib==0.6.6 autodp 'scikit-learn<1.8' pandas
    peer/bin/python benchmarks/peers.py calibrate < settings.json
    peer/bin/python benchmarks/peers.py gaussian    # or: laplace

Each library is asked in its own documented way. Prints one line of JSON: answers by library, or why there are none.
"""

import json
import math
import signal
import subprocess
import sys
import time
import warnings

SECONDS = 2.0  # for one call
PATIENCE = 20.0  # seconds for one library and sweep; what it has not answered by then it is not asked
SAMPLE, ROUNDS = 10_000, 5


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


def opendp_gaussian():
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
    measurement, zeros = dp.m.make_gaussian(*space, scale=1.0), [0.0] * SAMPLE
    return lambda: measurement(zeros)


def opendp_laplace():
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l1_distance(T=int)
    measurement, zeros = dp.m.make_laplace(*space, scale=1.0), [0] * SAMPLE
    return lambda: measurement(zeros)


def diffprivlib_gaussian():
    from diffprivlib.mechanisms import GaussianAnalytic

    mechanism = GaussianAnalytic(epsilon=1.0, delta=1e-6, sensitivity=1.0)
    return lambda: [mechanism.randomise(0.0) for _ in range(SAMPLE)]


def diffprivlib_geometric():
    from diffprivlib.mechanisms import Geometric

    mechanism = Geometric(epsilon=1.0, sensitivity=1)
    return lambda: [mechanism.randomise(0) for _ in range(SAMPLE)]


CALIBRATE = {"autodp": autodp, "diffprivlib": diffprivlib, "OpenDP (zCDP)": opendp}
DRAW = {
    "gaussian": {"OpenDP Gaussian": opendp_gaussian, "diffprivlib GaussianAnalytic": diffprivlib_gaussian},
    "laplace": {"OpenDP Laplace on integers": opendp_laplace, "diffprivlib Geometric": diffprivlib_geometric},
}


def drawn_by(peer, noise):
    """Million entries per second by library, or why there are none; nothing without a peer's interpreter."""
    return {} if peer is None else answer(peer, noise)


def answer(peer, task, given=None):
    """What this file prints when the peer's interpreter runs it."""
    done = subprocess.run(
        [peer, __file__, task], input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def out_of_time(signum, frame):
    raise TimeoutError


def ask(calibrate, settings):
    """(seconds, std) for each setting that PATIENCE allows; std is None where the call failed."""
    signal.signal(signal.SIGALRM, out_of_time)
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


def asked(calibrate, sweeps):
    """The answers to each sweep, after a few calls that import and compile."""
    ask(calibrate, sweeps[0][:5])
    return [ask(calibrate, settings) for settings in sweeps]


def rate(draw):
    """Million entries per second, by the median of a few rounds."""
    draw()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        draw()
        times.append(time.perf_counter() - start)
    return SAMPLE / sorted(times)[ROUNDS // 2] / 1e6


def each(libraries, measure):
    found = {}
    for name, load in libraries.items():
        try:
            found[name] = measure(load())
        except ModuleNotFoundError:
            found[name] = "not installed"
        except ImportError:
            found[name] = "fails to import"
    return found


def main():
    warnings.simplefilter("ignore")
    task = sys.argv[1]
    if task == "calibrate":
        sweeps = json.load(sys.stdin)
        print(json.dumps(each(CALIBRATE, lambda calibrate: asked(calibrate, sweeps))))
    else:
        print(json.dumps(each(DRAW[task], rate)))


if __name__ == "__main__":
    main()
