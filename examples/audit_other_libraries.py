"""Mechanisms of other libraries, and a home-made one, audited. `python examples/audit_other_libraries.py`.

Each guarantees (1, 0.05) for one number that a record can change by 1. The libraries are optional:
`pip install matrixdp[peers]`.
"""

import numpy as np

from matrixdp import Budget, Frobenius, calibrate
from matrixdp.audit import audit

EPSILON, DELTA = 1.0, 0.05


def opendp():
    """A Gaussian measurement with the least std that OpenDP finds."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)

    def measurement(std):
        return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=std)), delta=DELTA)

    return dp.binary_search_chain(measurement, d_in=1.0, d_out=(EPSILON, DELTA), T=float)


def diffprivlib():
    """The analytic Gaussian mechanism of diffprivlib."""
    from diffprivlib.mechanisms import GaussianAnalytic

    return GaussianAnalytic(epsilon=EPSILON, delta=DELTA, sensitivity=1.0).randomise


def home_made():
    """Averages two releases, each of which spends the whole budget."""
    law = calibrate("analytic", shape=(1,), sensitivity=Frobenius(1.0), budget=Budget(EPSILON, DELTA))
    rng = np.random.default_rng()
    return lambda value: np.mean([value + law.sample(rng) for _ in range(2)])


def main():
    """Audits each and prints one line."""
    for name, build in (("OpenDP", opendp), ("diffprivlib", diffprivlib), ("home-made", home_made)):
        try:
            release = build()
        except ImportError:
            print(f"{name}: not installed; pip install matrixdp[peers]")
            continue
        result = audit(release, 0.0, 1.0, EPSILON, DELTA, samples=20_000, statistic="linear")
        print(f"{name}: {result.verdict}; epsilon is at least {result.epsilon_lower:.2f}, {EPSILON:g} is claimed")


if __name__ == "__main__":
    main()
