"""Reported faults of other libraries, found again
===============================================

Two faults of sensitivity, found by a search over neighbours, and two of floating point, found in the last digits.
Each is written here as its library's issue tracker reports it. ``python examples/audit_other_libraries.py [SAMPLES]``
"""

import sys

import numpy as np

from matrixdp import Budget, Counts, release
from matrixdp.audit import audit

EPSILON = 1.0
rng = np.random.default_rng()


def tree_of_sums(leaves):
    """OpenDP's b-ary tree with one layer above four leaves; its l2 map claims height times the input distance."""
    return np.concatenate([[leaves.sum()], leaves])


def laplace(value):
    """diffprivlib's Laplace noise from four uniform numbers, added in double precision."""
    u = rng.random(4)
    return value + (np.log(1 - u[0]) * np.cos(np.pi * u[1]) + np.log(1 - u[2]) * np.cos(np.pi * u[3])) / EPSILON


def gaussian(value):
    """Opacus' secure mode: four normal numbers halved, added to a sum of gradients in single precision."""
    return np.float32(value) + np.float32(4.3) * rng.standard_normal(4, dtype=np.float32).sum() / np.float32(2)


def main(samples=20_000):
    """Prints one line for each fault, and one for matrixdp, which has none of them."""
    changes = rng.integers(1, 3, size=(2000, 4)) * rng.choice([-1.0, 1.0], size=(2000, 4))
    found = max(np.linalg.norm(tree_of_sums(d)) / np.linalg.norm(d) for d in changes)
    print(f"OpenDP, tree of sums: l2 sensitivity 2 is claimed, {found:.3f} was found")

    records = rng.random(100)  # smartnoise's covariance clipped them to [0, 1], and then used the ones before clipping
    found = max(abs(np.append(records[1:], x).var() - records.var()) for x in np.linspace(-100, 100, 201))
    print(f"smartnoise, variance: sensitivity {1 / len(records):g} is claimed, {found:.3g} was found")

    for name, mechanism, bits in (
        ("diffprivlib, Laplace", laplace, 53),
        ("Opacus, Gaussian", gaussian, 24),
        ("matrixdp", lambda value: release(np.array([value]), Counts(1), Budget(1.0, 1e-6)).value, 53),
    ):
        # whether an output lies on the grid of floats near 1; those near 0 are finer
        grid = lambda outputs, bits=bits: (np.ravel(outputs) * 2.0**bits % 1 == 0).astype(float)  # noqa: E731
        found = audit(mechanism, 0.0, 1.0, EPSILON, 1e-6, samples=samples, statistic=grid)
        print(f"{name}: {found.verdict}; epsilon is at least {found.epsilon_lower:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
