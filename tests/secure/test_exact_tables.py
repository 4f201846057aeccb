"""Exact draws of discrete Laplace noise: what tables leave out has the rest of the law, to any number of digits."""

import itertools
import math
from decimal import localcontext

import mpmath as mp
import numpy as np
import pytest

from matrixdp.secure.discrete import Sampler, noise
from matrixdp.secure.exact_tables import exact_digits
from matrixdp.secure.tables import BASE, TOTAL

SCALES = [2.0**-10, 0.4, 1.0, 3.0, 160.0, 1000.0, 5e5, 2.0**40]


def sizes(digit):
    """P(|D| = k) for k = 0, 1, ..., from the law of the digit."""
    r = mp.exp(-mp.mpf(digit.rate.numerator) / digit.rate.denominator)
    end = r**BASE if digit.cut else mp.mpf(0)  # the law of A - B, with A and B geometric and cut
    unit, power = (1 - r) / (1 + r) / (1 - end) ** 2, mp.mpf(1)
    for k in itertools.count():
        yield (2 if k else 1) * unit * max(power - end**2 / power, 0)
        power *= r


@pytest.fixture(autouse=True)
def digits_of_mpmath():
    with mp.workdps(100):
        yield


@pytest.mark.parametrize("scale", SCALES)
def test_tables_lie_below_the_law_and_the_rest_is_what_is_missing(scale):
    found = exact_digits(scale)
    assert found.total_variation == 0
    for digit in found.remainders:
        numerators = digit.table.numerators()
        assert sum(numerators) == TOTAL
        numerators[digit.usual] -= digit.rest
        missing = [TOTAL * p - n for p, n in zip(sizes(digit), numerators, strict=False)]
        assert min(missing) >= 0
        assert max(missing) < 3
        assert 0 < digit.rest < 2**63
        left = digit.rest - mp.fsum(missing)  # beyond the table
        assert left >= -1e-40
        if digit.cut:
            assert left < 1e-40
        # and from k on, as inversion has it
        above = digit.rest
        for k in range(min(len(numerators), 50)):
            with localcontext(prec=120):
                assert abs(mp.mpf(str(digit._mass_from(k))) - above) < 1e-9 * max(above, 1e-9)
            above -= missing[k]


def inverted(digit, u):
    """The size k with T_(k+1) <= u E < T_k."""
    numerators = digit.table.numerators()
    numerators[digit.usual] -= digit.rest
    below = digit.rest - u * digit.rest  # of the mass below k
    total = mp.mpf(0)
    for k, p in enumerate(sizes(digit)):
        total += TOTAL * p - (numerators[k] if k < len(numerators) else 0)
        if total > below:
            return k
    raise AssertionError


@pytest.mark.parametrize("scale", [0.4, 3.0, 160.0, 1000.0])
def test_the_rest_is_drawn_by_inversion(scale):
    generator = np.random.default_rng(3)
    for digit in exact_digits(scale).remainders:
        for _ in range(4):
            bits = [int(word) for word in generator.integers(0, 2**64, size=4, dtype=np.uint64)]
            u = mp.fsum(mp.mpf(word) / 2 ** (64 * (i + 1)) for i, word in enumerate(bits))
            assert digit.drawn(iter(bits)) == inverted(digit, u)


@pytest.mark.parametrize("edge", [1, 2, 5])
def test_close_to_an_edge_more_bits_decide(edge):
    """The first 128 bits are those of the edge between edge - 1 and edge; the third word decides."""
    digit = exact_digits(3.0).remainders[0]
    numerators = digit.table.numerators()
    numerators[digit.usual] -= digit.rest
    from_edge = digit.rest - mp.fsum(TOTAL * p - n for p, n in zip(sizes(digit), numerators[:edge], strict=False))
    exact = int(mp.floor(from_edge / digit.rest * 2**192))
    first, second, third = exact >> 128, exact >> 64 & 2**64 - 1, exact & 2**64 - 1
    assert digit.drawn(iter([first, second, third + 1])) == edge - 1
    assert digit.drawn(iter([first, second, third - 1])) == edge


class Planted:
    """A key whose words are given: part -> word; what was asked for is kept."""

    def __init__(self, words):
        self.words, self.asked = words, []

    def stream(self):
        return self

    def fill(self, words, block, part=0):
        self.asked.append(part)
        words[:] = self.words[part]


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("scale", [3.0, 1000.0])
def test_a_tie_among_the_last_is_drawn_from_the_rest(scale, negative):
    digits = exact_digits(scale)
    for part, (digit, shift) in enumerate(zip(digits.remainders, digits.shifts, strict=True)):
        size = digit.table.packed.size
        tie = int(digit.table.packed[digit.column]) // (2 * size) * 2 * size | digit.column
        zeros = {i: int(np.flatnonzero(other.table.packed % size == 0)[0]) for i, other in enumerate(digits.remainders)}
        zeros = {i: 2**64 - 2 * size | column for i, column in zeros.items()}  # above the threshold: the alias, 0
        more = 2**40 + 12345
        for second, expected in (
            (2**64 - digit.rest, digit.drawn(iter([more, 7, 7]))),
            (2**64 - digit.rest - 1, digit.usual),
        ):
            key = Planted({**zeros, part: tie | size * negative, 64 + part: second, 128 + part: more, 192 + part: 7})
            drawn = noise((3,), 1.0, scale, key=key, exact=True)
            assert drawn.tolist() == [(-expected if negative else expected) << shift] * 3
            assert (128 + part in key.asked) == (second >= 2**64 - digit.rest)
        assert digit.drawn(iter([more, 7, 7])) != digit.usual


def test_words_of_zeros_go_on():
    """64 zero bits, then more: the noise is beyond what any one word can give."""
    digit = exact_digits(3.0).remainders[0]
    assert digit.drawn(iter([0, 1, 9])) > digit.drawn(iter([1, 0, 9])) > 3 * 127 * math.log(2) * 0.9


def test_any_scale_of_tables_is_drawn_exactly():
    assert Sampler(1.0, 2.0**40, exact=True).total_variation == 0
    spread = np.std(noise((20_000,), 1.0, 2.0**40, exact=True).astype(float))
    assert 0.9 < spread / (math.sqrt(2) * 2.0**40) < 1.1
