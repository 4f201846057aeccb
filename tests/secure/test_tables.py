"""Tables of discrete laws against 60 digits, cell by cell, and splits of large scales in exact arithmetic."""

from fractions import Fraction
from functools import cache

import mpmath as mp
import numpy as np
import pytest

from matrixdp.errors import InvalidInput
from matrixdp.secure import tables
from matrixdp.secure.discrete import Sampler

TOTAL = 2**127


@cache
def truth(kind, parameter, columns, stretch=0):
    """P(|K| = k) at 60 digits for k below the number of columns, and the mass beyond; `stretch` plants an error."""
    with mp.workdps(60):
        factor, number = 1 + mp.mpf(stretch), 6 * columns
        if kind == "digit":
            r = mp.exp(-mp.mpf(parameter) * factor)
            weights = [r**d - r ** (2 * columns - d) for d in range(columns)]
        else:
            exponent, scale = parameter
            weights = [mp.exp(-((k / (mp.mpf(scale) * factor)) ** mp.mpf(exponent))) for k in range(number)]
        both = [(2 if k else 1) * weight for k, weight in enumerate(weights)]
        total = mp.fsum(both)
        return [weight / total for weight in both[:columns]], mp.fsum(both[columns:]) / total


LAWS = {
    "Laplace": ("law", (1.0, 2.5), lambda: tables.digits(1.0, 2.5).tables[0]),
    "wide Laplace": ("law", (1.0, 40.0), lambda: tables.digits(1.0, 40.0).tables[0]),
    "low digit": ("digit", 2.0**-10, lambda: tables.digits(1.0, 1024.0).tables[0]),
    "generalised": ("law", (1.296875, 10.75), lambda: tables._generalised(1.296875, 10.75, Fraction(43, 4))),
    "wide generalised": ("law", (1.7, 150.0), lambda: tables._generalised(1.7, 150.0, Fraction(150))),
    "narrow generalised": ("law", (1.5, 0.25), lambda: tables._generalised(1.5, 0.25, Fraction(1, 4))),
    "Gaussian": ("law", (2.0, 20.0), lambda: tables._gaussian(Fraction(400))),
}


def worst_error(table, cells, beyond):
    """The largest error of P(|K| = k), given that k is served, in units of 2^-127; of P(0) what all have lost."""
    with mp.workdps(60):
        errors = [n - p / (1 - beyond) * TOTAL for n, p in zip(table.numerators(), cells, strict=True)]
        return max(abs(mp.fsum(errors)), *(abs(error) for error in errors[1:]))


@pytest.mark.parametrize("name", LAWS)
def test_every_cell_is_within_one_unit_of_the_truth_and_the_sum_is_exact(name):
    kind, parameter, build = LAWS[name]
    table = build()
    columns = table.packed.size
    assert sum(table.numerators()) == TOTAL
    assert worst_error(table, *truth(kind, parameter, columns)) <= 1
    assert worst_error(table, *truth(kind, parameter, columns, stretch=1e-33)) > 1


@pytest.mark.parametrize("name", LAWS)
def test_the_stated_total_variation_is_that_of_the_table(name):
    kind, parameter, build = LAWS[name]
    table = build()
    cells, beyond = truth(kind, parameter, table.packed.size)
    with mp.workdps(60):
        errors = [abs(mp.mpf(n) / TOTAL - p) for n, p in zip(table.numerators(), cells, strict=True)]
        exact = (mp.fsum(errors) + beyond) / 2
        assert exact <= table.total_variation <= exact * (1 + mp.mpf("1e-6")) + mp.mpf(2) ** -109
    assert table.total_variation < 2.0**-70


@pytest.mark.parametrize("bits", [11, 13, 16])
def test_numerators_are_what_the_columns_draw(bits):
    """The packed columns, taken apart one by one in Python integers."""
    generator = np.random.default_rng(bits)
    parts = [int(part) for part in generator.integers(0, 2**62, size=2**bits)]
    whole = sum(parts)
    parts = [part * TOTAL // whole for part in parts]
    parts[0] += TOTAL - sum(parts)
    table = tables.AliasTable(*tables.alias(parts), 0.0)
    totals = [0] * 2**bits
    for column, (packed, tie) in enumerate(zip(table.packed.tolist(), table.ties.tolist(), strict=True)):
        threshold, alias = packed >> bits + 1, packed % 2 ** (bits + 1)
        assert alias < 2**bits
        # 2^(63 - bits) first words, and for the one that meets the threshold 2^64 second words
        totals[column] += threshold * 2**64 + tie
        totals[alias] += (2 ** (63 - bits) - threshold - 1) * 2**64 + (2**64 - tie)
    assert totals == parts == table.numerators()


def test_an_alias_table_can_hold_one_outcome_and_all_outcomes():
    for numerators in ([TOTAL] + [0] * 2047, [2**116] * 2048):
        assert tables.AliasTable(*tables.alias(numerators), 0.0).numerators() == numerators


def test_tables_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        tables.digits(1.0, 2.0).tables[0].packed[0] = 0


# --- splits ---


def probabilities(digits, points):
    """P(K = k) of the sum of the digits, as floats of 60 digits, at some points."""
    with mp.workdps(60):

        def of(table, value):
            found = table.numerators()[abs(value)] if abs(value) < table.packed.size else 0
            return mp.mpf(found * (1 if value else 2)) / (2 * TOTAL)

        if len(digits.tables) == 1:
            return [of(digits.tables[0], k) for k in points]
        (low, high), shifts = digits.tables, digits.shifts
        if shifts[0] > shifts[1]:
            low, high, shifts = high, low, shifts[::-1]
        lows, base = low.numerators(), 2 ** (shifts[1] - shifts[0])
        highs = high.numerators()

        def one(numerators, value):
            return numerators[abs(value)] * (1 if value else 2) if abs(value) < len(numerators) else 0

        reach = low.packed.size // base + 1
        return [
            mp.mpf(
                sum(one(highs, h) * one(lows, k - base * h) for h in range(k // base - reach, k // base + reach + 2))
            )
            / (2 * TOTAL) ** 2
            for k in points
        ]


POINTS = [0, 1, 2, 700, 2047, 2048, 2049, 5000, -4096, -12345]


def relative_errors(digits, exponent, scale):
    with mp.workdps(60):
        points = [k for k in POINTS if abs(k) < 5 * scale]
        weights = [mp.exp(-((abs(k) / mp.mpf(scale)) ** exponent)) for k in points]
        if exponent == 1:
            q = mp.exp(-1 / mp.mpf(scale))
            normaliser = (1 + q) / (1 - q)
        else:
            normaliser = mp.sqrt(mp.pi) * scale  # up to exp(-pi^2 scale^2)
        return [abs(p * normaliser / w - 1) for p, w in zip(probabilities(digits, points), weights, strict=True)]


@pytest.mark.parametrize("scale", [500.0, 3000.5])
def test_digits_of_a_geometric_variable_make_discrete_laplace(scale):
    found = tables.digits(1.0, scale)
    assert len(found.tables) == 2
    assert max(relative_errors(found, 1, scale)) < 2.0**-60
    wrong = tables.Digits((found.tables[0], tables.digits(1.0, scale * 1.0001).tables[1]), found.shifts, 0.0)
    assert max(relative_errors(wrong, 1, scale)) > 1e-5
    alike = tables.Digits((tables.digits(1.0, 40.0).tables[0], found.tables[1]), found.shifts, 0.0)
    assert max(relative_errors(alike, 1, scale)) > 1e-2


@pytest.mark.parametrize("scale", [1500.0, 20_000.0])
def test_a_split_discrete_gaussian(scale):
    found = tables.digits(2.0, scale)
    assert len(found.tables) == 2
    assert max(relative_errors(found, 2, scale)) < 2.0**-68
    assert found.total_variation < 2.0**-68
    fine = 2 * Fraction(13, 8) ** 2 * 128**2
    wrong = tables._gaussian(Fraction(scale) ** 2 / 128**2), tables._gaussian(fine)
    assert max(relative_errors(tables.Digits(wrong, found.shifts, 0.0), 2, scale)) > 1e-5


@pytest.mark.parametrize(
    ("exponent", "scale", "count"),
    [(1.0, 0.01, 1), (1.0, 160.0, 1), (1.0, 3e5, 2), (1.0, 1e8, 3), (1.0, 1e12, 4), (1.5, 4000.0, 1), (2.0, 6e4, 2)],
)
def test_any_scale_of_laplace_and_gaussian_has_tables(exponent, scale, count):
    found = Sampler(exponent, scale)
    assert len(found.digits.tables) == count
    assert 0 < found.total_variation < 2.0**-68


def test_a_scale_without_tables_is_refused():
    with pytest.raises(InvalidInput, match=r"scale must lie .* coarser grid"):
        tables.digits(1.5, 6000.0)
