"""True values for tests/privacy/test_gaussian.py: `python tests/golden/gaussian.py` writes gaussian.json (a minute).

It shares nothing with the library: delta is the textbook formula in enough digits to cancel in, mu and epsilon are
Newton roots of it, each confirmed by a change of sign within 1e-50. What the library is given is stored as an exact
float (`float.hex`), what is true as a decimal of 50 digits.
"""

import json
import math
import random
from pathlib import Path

from mpmath import mp, mpf

CLOSE = mpf("1e-50")
mp.dps = 120


def true_delta(mu, epsilon):
    mu, epsilon = mpf(mu), mpf(epsilon)
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    return (mp.erfc(a / mp.sqrt(2)) - mp.exp(epsilon) * mp.erfc(b / mp.sqrt(2))) / 2


def newton(residual, slope, x):
    """The root of a concave residual, from the side where it is negative: every step stays on that side."""
    for _ in range(300):
        step = residual(x) / slope(x)
        x -= step
        if abs(step) < CLOSE**2 * abs(x):
            return x
    raise ArithmeticError(f"Newton's iteration has not settled at {x}")


def true_mu(epsilon, delta):
    """In ln mu, from below: Phi(-z) <= delta <= mu / sqrt(2 pi)."""
    epsilon, delta = mpf(epsilon), mpf(delta)
    z = mp.sqrt(-2 * mp.log(delta))
    start = max(2 * epsilon / (z + mp.sqrt(z * z + 2 * epsilon)), delta * mp.sqrt(2 * mp.pi))
    mu = mp.exp(
        newton(
            lambda x: mp.log(true_delta(mp.exp(x), epsilon) / delta),
            lambda x: mp.exp(x) * mp.npdf(epsilon / mp.exp(x) - mp.exp(x) / 2) / true_delta(mp.exp(x), epsilon),
            mp.log(start),
        )
    )
    if not true_delta(mu * (1 - CLOSE), epsilon) < delta < true_delta(mu * (1 + CLOSE), epsilon):
        raise ArithmeticError(f"no mu for epsilon {epsilon}, delta {delta}")
    return mu


def true_epsilon(mu, delta):
    """From above: delta <= Phi(-z); 0 if even that is private enough."""
    mu, delta = mpf(mu), mpf(delta)
    if true_delta(mu, 0) <= delta:
        return mpf(0)
    epsilon = newton(
        lambda x: mp.log(true_delta(mu, x) / delta),
        lambda x: -mp.exp(x) * mp.erfc((x / mu + mu / 2) / mp.sqrt(2)) / 2 / true_delta(mu, x),
        mu * (mp.sqrt(-2 * mp.log(delta)) + mu / 2),
    )
    if not true_delta(mu, epsilon * (1 - CLOSE)) > delta > true_delta(mu, epsilon * (1 + CLOSE)):
        raise ArithmeticError(f"no epsilon for mu {mu}, delta {delta}")
    return epsilon


def settings(generator):
    """(epsilon, delta): a grid over the whole range, random sweeps, and where the library changes formula."""
    for delta in (1e-300, 1e-200, 1e-100, 1e-30, 1e-12, 1e-6, 1e-3, 0.1, 0.5):
        yield from ((10.0**exponent, delta) for exponent in range(-8, 4))
    for _ in range(60):
        yield 10 ** generator.uniform(-8, 3), 10 ** generator.uniform(-300, math.log10(0.5))
        yield 10 ** generator.uniform(-8, 3), 10 ** generator.uniform(-20, math.log10(0.5))
    places = []
    for _ in range(60):  # epsilon far below mu, where delta hardly depends on it
        places.append((10 ** generator.uniform(-5, math.log10(1.3)), 10 ** generator.uniform(-8, 0)))
    for _ in range(12):
        near = generator.uniform(0.98, 1.02)
        c = 10 ** generator.uniform(-1, 1.5)
        places.append((0.1 * (1 + c) * near, c))
        places.append((10 ** generator.uniform(-8, -1), 5 * near))
        places.append((10 ** generator.uniform(-6, 0.3), near))
        places.append((2 * near, generator.uniform(0.6, 3)))
        places.append((10 ** generator.uniform(-6, 0.3), generator.uniform(0.45, 0.85)))
    for mu, c in places:
        if mu * c >= 1e-8:
            yield mu * c, float(true_delta(mu, mu * c))


# outside the range that the library promises digits for
BEYOND = [
    *((e, d) for e in (0.0, 1e-300, 1e-100, 1e-30, 1e-12, 1.0, 1e4, 1e6) for d in (5e-324, 1e-310, 1e-250, 1e-20, 0.3)),
    *((e, d) for e in (0.0, 1e-12, 1e-3, 1.0, 30.0, 1e3, 1e5) for d in (0.6, 0.9, 0.999, 1 - 1e-9, 1 - 2.0**-53)),
]


def row(epsilon, delta):
    """All that is true of one setting; delta and epsilon start from the root rounded to a float."""
    mu = true_mu(epsilon, delta)
    rounded = float(mu)
    return {
        "epsilon": epsilon.hex(),
        "delta": delta.hex(),
        "mu": rounded.hex(),
        "true_mu": mp.nstr(mu, 50),
        "true_delta": mp.nstr(true_delta(rounded, epsilon), 50),
        "true_epsilon": mp.nstr(true_epsilon(rounded, delta), 50),
    }


def main():
    rows = [row(epsilon, delta) for epsilon, delta in settings(random.Random(20))]
    beyond = []
    for epsilon, delta in BEYOND:
        with mp.workdps(120 - int(3 * math.log10(min(delta, epsilon or 1.0)))):  # digits that cancel, and then some
            beyond.append(row(epsilon, delta))
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps({"rows": rows, "beyond": beyond}, indent=0) + "\n")
    print(f"{len(rows)} rows inside the range, {len(beyond)} beyond it, in {target.name}")


if __name__ == "__main__":
    main()
