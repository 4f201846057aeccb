"""True values for tests/privacy/test_discrete_profile.py: `python tests/golden/discrete.py` writes discrete.json.

It shares nothing with the library: the definition of delta is summed in 60 digits over all atoms of the noise above
1e-60, for one to four cells by enumeration (the last two cells through their sorted sums), and for exponents 1 and 2,
whose losses lie on a lattice, by convolution. What the library is given is stored as an exact float (`float.hex`), what
is true as a decimal of 40 digits. It takes a minute.

For more cells and other exponents delta is an integral, as (1 - e^-x)_+ has the Laplace transform 1 / (z (z + 1)): with
M(z) the sum of p e^(z loss), delta is that of M(z)^k e^(-z epsilon) / (z (z + 1)) over the line Re z = c, over 2 pi i.
It is summed by the trapezoidal rule in floats, to about eight digits, with c at the saddle.
"""

import bisect
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
from mpmath import mp, mpf

mp.dps = 60
DEPTH = 140  # atoms below e^-140 are left out


def law(exponent, scale):
    """P(j), as a dictionary."""
    exponent, scale = mpf(exponent), mpf(scale)
    reach = int(mp.ceil(scale * mpf(DEPTH) ** (1 / exponent)))
    weights = {j: mp.exp(-((abs(j) / scale) ** exponent)) for j in range(-reach, reach + 1)}
    total = mp.fsum(weights.values())
    return {j: weight / total for j, weight in weights.items()}


def loss(exponent, scale, shift, j):
    """log P(j) / P(j - shift)."""
    exponent, scale = mpf(exponent), mpf(scale)
    return (abs(j - shift) / scale) ** exponent - (abs(j) / scale) ** exponent


def single(exponent, scale, shift):
    """(loss, mass) of one cell; atoms with one loss are put together."""
    if exponent == 1:
        q = mp.exp(-1 / mpf(scale))
        masses = [1 / (1 + q), *((1 - q) * q**j / (1 + q) for j in range(1, shift)), q**shift / (1 + q)]
        return [(mpf(shift - 2 * j) / mpf(scale), mass) for j, mass in enumerate(masses)]
    return [(loss(exponent, scale, shift, j), mass) for j, mass in law(exponent, scale).items()]


def pairs(one, other):
    return [(a + b, p * q) for (a, p), (b, q) in itertools.product(one, other)]


def excess(outer, inner, epsilon):
    """Sum over outer and inner atoms of p q (1 - e^(epsilon - a - b))_+, with sums of the inner ones from the top."""
    inner = sorted(inner, key=lambda atom: -atom[0])
    keys = [-float(a) for a, _ in inner]
    first = [mpf(0), *itertools.accumulate(p for _, p in inner)]
    second = [mpf(0), *itertools.accumulate(p * mp.exp(-a) for a, p in inner)]
    total = mpf(0)
    for a, p in outer:
        below = epsilon - a
        number = bisect.bisect_left(keys, -float(below))
        while number < len(inner) and inner[number][0] > below:  # floats decide only roughly
            number += 1
        while number and inner[number - 1][0] <= below:
            number -= 1
        total += p * (first[number] - mp.exp(below) * second[number])
    return total


def enumerated(exponent, scale, groups, epsilon):
    cells = [single(exponent, scale, shift) for shift, count in groups for _ in range(count)]
    if len(cells) == 1:
        return mp.fsum(p * (1 - mp.exp(epsilon - a)) for a, p in cells[0] if a > epsilon)
    outer = cells[0] if len(cells) < 4 else pairs(cells[0], cells[1])
    inner = cells[-1] if len(cells) < 3 else pairs(cells[-1], cells[-2])
    return excess(outer, inner, epsilon)


def convolved(exponent, scale, shift, cells, epsilon):
    """On the lattice of losses: multiples of 2/scale (exponent 1), or of 2 shift/scale^2 (exponent 2)."""
    atoms = [mass for _, mass in single(exponent, scale, shift)]  # their losses fall by one step each
    top, second = (single(exponent, scale, shift)[i][0] for i in (0, 1))
    masses = [mpf(1)]
    for _ in range(cells):
        found = [mpf(0)] * (len(masses) + len(atoms) - 1)
        for i, p in enumerate(masses):
            if p > mpf(10) ** -80:
                for j, q in enumerate(atoms):
                    found[i + j] += p * q
        masses = found
    sums = [cells * top - (top - second) * i for i in range(len(masses))]
    return mp.fsum(p * (1 - mp.exp(epsilon - a)) for a, p in zip(sums, masses, strict=True) if a > epsilon)


def integrated(exponent, scale, shift, cells, epsilon, highest=4_000.0, step=0.1):
    reach = math.ceil(scale * 80 ** (1 / exponent))
    places = np.arange(-reach, reach + 1)
    losses = (np.abs(places - shift) / scale) ** exponent - (np.abs(places) / scale) ** exponent
    masses = np.exp(-((np.abs(places) / scale) ** exponent))
    masses /= masses.sum()

    def slope(c):
        weights = masses * np.exp(c * losses)
        return cells * (weights @ losses) / weights.sum() - epsilon - 1 / c - 1 / (c + 1)

    low, high = 1e-3, 1e3
    for _ in range(60):
        c = math.sqrt(low * high)
        low, high = (c, high) if slope(c) < 0 else (low, c)
    tilted = masses * np.exp(c * losses)
    total = tilted.sum()
    tilted /= total
    result = 0.0
    for first in np.arange(0.0, highest, 100.0):
        y = first + step * np.arange(round(100 / step))
        values = (np.exp(1j * np.outer(y, losses)) @ tilted) ** cells * np.exp(-1j * y * epsilon)
        terms = (values / ((c + 1j * y) * (c + 1 + 1j * y))).real
        if first == 0.0:
            terms[0] /= 2
        result += terms.sum() * step / math.pi
    return result * math.exp(cells * math.log(total) - c * epsilon)


BY_INTEGRAL = [
    (1.28125, 10.7814, 1, 8, 1.0),
    (1.65625, 19.9, 1, 16, 1.0),
    (1.796875, 31.57, 1, 32, 1.0),
    (1.9, 45.0, 1, 64, 1.0),
    (1.5, 40.0, 2, 64, 2.0),
    (1.35, 6.0, 1, 12, 0.3),
]


def settings(generator):
    """(exponent, scale, groups, epsilon)."""
    for shift, cells in [(1, 1), (1, 2), (1, 5), (1, 64), (2, 1), (3, 2), (5, 4), (40, 1), (12, 3), (2, 16)]:
        for _ in range(4):
            scale = 10 ** generator.uniform(-0.3, 1.7)
            pure = shift * cells / scale
            yield 1.0, scale, ((shift, cells),), pure * generator.uniform(0, 0.999) ** 2
    yield 1.0, 1.0, ((1, 1),), 1 - 1e-9  # only a sliver of one atom counts
    yield 1.0, 7.25, ((3, 2), (1, 2)), 0.4
    for shift, cells in [(1, 1), (1, 3), (2, 2), (1, 8)]:
        for _ in range(3):
            scale = 10 ** generator.uniform(-0.2, 0.8)
            yield 2.0, scale, ((shift, cells),), generator.uniform(0, 8) * shift * cells**0.5 / scale
    yield 2.0, 0.84, ((2, 1),), 5.95
    for cells, highest in [(1, 1.5), (2, 1.0), (3, 0.8), (4, 0.45)]:
        for _ in range(5 if cells < 4 else 3):
            scale, exponent = 10 ** generator.uniform(-0.3, highest), generator.uniform(1.02, 1.98)
            shift = generator.choice([1, 1, 2])
            yield exponent, scale, ((shift, cells),), generator.uniform(0, 6) * shift * cells**0.5 / scale
    yield 1.5, 3.0, ((2, 1), (1, 1)), 1.5


def main():
    rows = []
    for exponent, scale, groups, epsilon in settings(random.Random(5)):
        if exponent in (1.0, 2.0) and len(groups) == 1:
            truth = convolved(exponent, scale, *groups[0], mpf(epsilon))
        else:
            truth = enumerated(exponent, scale, groups, mpf(epsilon))
        rows.append(
            {
                "exponent": exponent.hex(),
                "scale": scale.hex(),
                "groups": groups,
                "epsilon": epsilon.hex(),
                "true_delta": mp.nstr(truth, 40),
            }
        )
    integrals = [
        {
            "exponent": exponent.hex(),
            "scale": scale.hex(),
            "groups": [[shift, cells]],
            "epsilon": epsilon.hex(),
            "true_delta": f"{integrated(exponent, scale, shift, cells, epsilon):.12g}",
        }
        for exponent, scale, shift, cells, epsilon in BY_INTEGRAL
    ]
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps({"rows": rows, "integrals": integrals}, indent=0) + "\n")
    print(f"{len(rows)} rows and {len(integrals)} integrals in {target.name}")


if __name__ == "__main__":
    main()
