"""The tables against 60 digits, cell by cell, and the multi-level law against the normal, in exact arithmetic."""

import itertools
import math
import pickle
import time
from fractions import Fraction
from functools import cache

import mpmath as mp
import numpy as np
import pytest

from matrixdp._compiled import compiled
from matrixdp.errors import InvalidInput
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import COLUMNS, FINEST, LIMIT, Grid, discrete_gaussian, plan, rounded_gaussian
from matrixdp.secure.tables import AliasTable

TOTAL = 2**127
SMOOTH = Fraction(13, 8)
LAWS = {
    "rounded 128": ("rounded", 128),
    "rounded 208": ("rounded", 208),
    "discrete, first level": ("discrete", 128**2 - SMOOTH**2),
    "discrete, middle level": ("discrete", SMOOTH**2 * (128**2 - 1)),
}


def table_of(kind, parameter):
    return rounded_gaussian(parameter) if kind == "rounded" else discrete_gaussian(parameter)


@cache
def truth(kind, parameter, stretch=0):
    """P(|K| = k) for k < 2048 at 60 digits, and the mass beyond; `stretch` plants a relative error in the std."""
    with mp.workdps(60):
        factor = 1 + mp.mpf(stretch)
        if kind == "rounded":
            std = parameter * factor
            above = [mp.ncdf(-(k - mp.mpf(1) / 2) / std) for k in range(1, COLUMNS + 1)]
            return [1 - 2 * above[0], *(2 * (a - b) for a, b in itertools.pairwise(above))], 2 * above[-1]
        variance = mp.mpf(parameter.numerator) / parameter.denominator * factor**2
        weights = [mp.exp(-(k**2) / (2 * variance)) for k in range(6000)]
        normaliser = 2 * mp.fsum(weights) - 1
        return [(2 if k else 1) * w / normaliser for k, w in enumerate(weights[:COLUMNS])], (
            2 * mp.fsum(weights[COLUMNS:]) / normaliser
        )


def worst_error(table, cells, beyond):
    """The largest error of P(|K| = k), given that k < 2048, in units of 2^-127; of P(0) what all have lost is taken."""
    with mp.workdps(60):
        errors = [n - p / (1 - beyond) * TOTAL for n, p in zip(table.numerators(), cells, strict=True)]
        return max(abs(mp.fsum(errors)), *(abs(error) for error in errors[1:]))


@pytest.mark.parametrize("name", LAWS)
def test_every_cell_is_within_one_unit_of_the_truth_and_the_sum_is_exact(name):
    table = table_of(*LAWS[name])
    assert sum(table.numerators()) == TOTAL
    assert worst_error(table, *truth(*LAWS[name])) <= 1
    assert worst_error(table, *truth(*LAWS[name], stretch=1e-33)) > 1


@pytest.mark.parametrize("name", LAWS)
def test_the_stated_total_variation_is_that_of_the_table(name):
    table, (cells, beyond) = table_of(*LAWS[name]), truth(*LAWS[name])
    with mp.workdps(60):
        errors = [abs(mp.mpf(n) / TOTAL - p) for n, p in zip(table.numerators(), cells, strict=True)]
        exact = (mp.fsum(errors) + beyond) / 2
        assert exact <= table.total_variation <= exact * (1 + mp.mpf("1e-12")) + mp.mpf(2) ** -109
    assert table.total_variation < 2.0**-73


def test_numerators_are_what_the_columns_draw():
    """The packed columns, taken apart one by one in Python integers."""
    table = rounded_gaussian(128)
    totals = [0] * COLUMNS
    for column, (packed, tie) in enumerate(zip(table.packed.tolist(), table.ties.tolist(), strict=True)):
        threshold, alias = packed >> 12, packed & 4095
        assert alias < COLUMNS
        # 2^52 first words, and for the one that meets the threshold 2^64 second words
        totals[column] += threshold * 2**64 + tie
        totals[alias] += (2**52 - threshold - 1) * 2**64 + (2**64 - tie)
    assert totals == table.numerators()


def test_tables_cannot_be_changed():
    for words in (rounded_gaussian(128).packed, rounded_gaussian(128).ties):
        with pytest.raises(ValueError, match="read-only"):
            words[0] = 0


def test_tables_are_built_quickly():
    start = time.process_time()
    rounded_gaussian.__wrapped__(128)
    assert time.process_time() - start < 0.3


# --- several levels ---


def exact_probability(tables, k):
    """P(K = k) of the digits' sum as a fraction, by convolution over the coarser digits."""
    *coarse, last = tables
    numerators = last.numerators()

    def of(table_numerators, digit):
        if abs(digit) >= COLUMNS:
            return 0
        return table_numerators[abs(digit)] * (1 if digit else 2)  # in units of 2^-128, either sign alike

    if not coarse:
        return Fraction(of(numerators, k), 2 * TOTAL)
    nearest = round(Fraction(k, 128))
    reach = COLUMNS // 128 + 1
    return sum(
        exact_probability(coarse, digit) * Fraction(of(numerators, k - 128 * digit), 2 * TOTAL)
        for digit in range(nearest - reach, nearest + reach + 1)
    )


def relative_error(tables, k, step):
    """Of the exact probability against the rounded normal."""
    with mp.workdps(60):
        edges = [(k + mp.mpf(side) / 2) * step for side in (-1, 1)]
        cell = mp.ncdf(-edges[0]) - mp.ncdf(-edges[1])
        probability = exact_probability(tables, k)
        return abs(mp.mpf(probability.numerator) / probability.denominator / cell - 1)


POINTS = [0.0, 0.003, 0.4, -1.0, 1.7, 2.9]  # in standard deviations


@pytest.mark.parametrize("levels", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_sum_of_all_levels_has_the_law_of_the_rounded_normal(levels):
    """Every split may be off by 2^-73 at any point, and what a table does not serve is 2^-73 of it."""
    grid = Grid(levels)
    for point in POINTS:
        k = round(point / grid.step) + 3
        assert relative_error(grid.tables, k, mp.mpf(grid.step)) < 4 * levels * 2.0**-74


def test_that_check_sees_a_variance_that_does_not_add_up():
    tables = (discrete_gaussian(Fraction(128**2)), rounded_gaussian(208))
    assert relative_error(tables, 3, mp.mpf(128) ** -2) > 2.0**-15


def test_that_check_sees_a_remainder_that_is_too_narrow():
    narrow = Fraction(1, 2)
    tables = (discrete_gaussian(128**2 - narrow**2), rounded_gaussian(64))
    assert relative_error(tables, 0, mp.mpf(128) ** -2) > 0.01


@pytest.mark.parametrize("levels", range(1, FINEST + 1))
def test_the_variance_is_one(levels):
    """Rounding adds step^2 / 12 to it (Sheppard), up to exp(-2 pi^2 128^2); the tables err by less than 2^-60."""

    def variance(tables):
        place, total = Fraction(1), Fraction(0)
        for table in tables:
            place /= 128
            total += place**2 * sum(k * k * n for k, n in enumerate(table.numerators())) / TOTAL
        return total

    grid = Grid(levels)
    assert abs(variance(grid.tables) - 1 - Fraction(grid.step) ** 2 / 12) < Fraction(1, 2**60)
    if levels > 1:
        planted = (discrete_gaussian(Fraction(128**2)), *grid.tables[1:])
        assert abs(variance(planted) - 1) > Fraction(1, 2**20)


@pytest.mark.parametrize(("s", "c"), [(2.0, 0.5), (3.0, 0.7), (8.0, 1.0), (127.0, 0.6), (208.0, 1.2)])
def test_the_density_ratio_of_a_split_is_within_its_bound(s, c):
    """Fact 2 of the module, for g = 1: the density of D + W over that of the normal, at 40 digits."""
    with mp.workdps(40):
        s, c = mp.mpf(s), mp.mpf(c)
        weights = {k: mp.exp(-(k**2) / (2 * s**2)) for k in range(-2500, 2501)}
        normaliser = mp.fsum(weights.values())
        q = mp.exp(-2 * mp.pi**2 * s**2 * c**2 / (s**2 + c**2))
        ratios = []
        for y in [mp.mpf(i) / 8 for i in range(9)] + [s, 2 * s + mp.mpf("0.3")]:
            near = range(int(y) - 40, int(y) + 41)
            density = mp.fsum(weights[k] * mp.npdf(y, k, c) for k in near) / normaliser
            ratios.append(abs(density / mp.npdf(y, 0, mp.sqrt(s**2 + c**2)) - 1))
        assert max(ratios) <= 4 * q / (1 - q)
        assert max(ratios) >= q  # the bound is of the right size


def test_the_stated_total_variation_covers_tables_and_splits():
    v = min(float(s * SMOOTH**2 / (s + SMOOTH**2)) for s in (LAWS[name][1] for name in LAWS if "discrete" in name))
    split = 2 * math.exp(-2 * math.pi**2 * v)
    assert split < 2.0**-74
    for levels in range(1, FINEST + 1):
        grid = Grid(levels)
        least = sum(table.total_variation for table in grid.tables) + (levels - 1) * split
        assert least <= grid.total_variation <= 1.001 * least
    assert Grid(1).total_variation < 2.0**-109
    assert Grid(3).total_variation < 2.0**-71


# --- plans ---


@pytest.mark.parametrize(
    ("fineness", "levels"),
    [(10.0, 1), (0.01, 1), (2.0**-7, 1), (2.0**-7.01, 2), (1e-4, 2), (2.0**-21, 3), (1e-7, 4), (2.0**-35, 5)],
)
def test_the_plan_is_the_coarsest_grid_that_is_fine_enough(fineness, levels):
    grid = plan(fineness)
    assert grid == Grid(levels)
    assert grid.step <= fineness
    assert grid.step == 2.0 ** (-7 * levels)
    assert len(grid.tables) == levels
    assert levels == 1 or Grid(levels - 1).step > fineness


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "1", None, True, 1e-12])
def test_bad_fineness(bad):
    with pytest.raises(InvalidInput, match="fineness"):
        plan(bad)


@pytest.mark.parametrize("bad", [0, -1, 6, 1.0, True, None])
def test_bad_levels(bad):
    with pytest.raises(InvalidInput, match="levels"):
        Grid(bad)


@pytest.mark.parametrize("levels", range(1, FINEST + 1))
def test_the_displacement_covers_rounding_in_floats(levels):
    """Values near half a step and near the limit, where the float quotient errs most."""
    rng = np.random.default_rng(levels)
    grid, std = Grid(levels), 0.7310585786300049
    unit = std * grid.step
    steps = np.concatenate([rng.integers(0, int(LIMIT), 20_000) + 0.5, rng.integers(0, 1000, 20_000) + 0.5])
    values = np.nextafter(steps * unit, rng.choice([0.0, np.inf], steps.size))
    rounded = np.rint(values * (1 / unit))
    errors = [abs(Fraction(r) - Fraction(v) / Fraction(unit)) for r, v in zip(rounded[::37], values[::37], strict=True)]
    assert Fraction(1, 2) < max(errors) <= Fraction(grid.displacement / grid.step) / 2


def test_a_grid_travels_without_its_tables():
    grid = Grid(3)
    assert len(grid.tables) == 3
    sent = pickle.dumps(grid)
    assert len(sent) < 1000
    assert pickle.loads(sent) == grid


# --- drawing from the tables ---


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_compiled_loops_agree_with_python(levels):
    grid, count = Grid(levels), 500
    words, slow, fast = np.empty(count, dtype=np.uint64), np.zeros(count), np.zeros(count)
    entropy = Key().stream()
    for level, table in enumerate(grid.tables):
        entropy.fill(words, 0, level)
        for column, word in enumerate(words):
            packed, carried = int(table.packed[int(word) % COLUMNS]), 128 * slow[column]
            size = int(word) % COLUMNS if int(word) >> 12 < packed >> 12 else packed & 4095
            slow[column] = carried + (-size if int(word) >> 11 & 1 else size)
        assert compiled(kernels._look_up)(words, table.packed, 128.0, 1.0, fast) == 0
    assert np.array_equal(slow, fast)
    values = np.random.default_rng(1).normal(size=count)
    for loop in (kernels._add, compiled(kernels._add)):
        out = np.empty(count)
        loop(values, grid.step, fast, out)
        assert np.array_equal(out, grid.step * (np.rint(values / grid.step) + slow))


def test_words_at_a_threshold_fall_on_the_right_side():
    table = rounded_gaussian(128)
    columns = np.arange(COLUMNS, dtype=np.uint64)
    thresholds, alias = table.packed >> np.uint64(12), table.packed & np.uint64(4095)
    shared = thresholds > 0
    for shift, expected in ((-1, columns), (0, alias), (1, alias)):
        words = ((thresholds[shared] + np.uint64(shift % 2**64)) << np.uint64(12)) | columns[shared]
        for sign in (1.0, -1.0):
            noise = np.zeros(words.size)
            met = compiled(kernels._look_up)(words, table.packed, 0.0, 1.0, noise)
            assert met == (0 if shift else words.size)
            assert np.array_equal(noise, sign * expected[shared])
            words |= np.uint64(COLUMNS)


@pytest.mark.parametrize("negative", [False, True])
def test_a_second_word_decides_about_a_word_that_meets_its_threshold(negative):
    """In 40 columns the word meets the threshold, in the others it is one above; the second words are near the ties."""
    table, sign = rounded_gaussian(208), -1.0 if negative else 1.0
    columns = np.arange(COLUMNS, dtype=np.uint64)
    met = (columns < 40) & (table.ties > 0)
    assert met.sum() > 30
    words = (((table.packed >> np.uint64(12)) + ~met) << np.uint64(12)) | columns | np.uint64(COLUMNS * negative)
    noise = np.full(COLUMNS, 5.0)
    assert kernels._look_up(words, table.packed, 128.0, 1.0, noise) == met.sum()
    before = noise.copy()
    assert not table.ties_broken(words, table.ties).any()  # not below
    noise += table.ties_broken(words, table.ties - met)
    assert np.array_equal(noise[met], 640.0 + sign * columns[met])
    assert np.array_equal(noise[~met], before[~met])


def test_a_tie_is_broken_in_a_draw(monkeypatch):
    """All words fall into the last column and meet its threshold; every other second word is below the tie."""

    class Ones:
        def fill(self, words, block, part=0):
            words[:] = 2**64 - 1 if part < FINEST else np.arange(words.size) % 2 * np.uint64(2**63)

    class Planted:
        def stream(self):
            return Ones()

    packed = np.full(COLUMNS, (2**52 - 1) << 12 | 3, dtype=np.uint64)
    table, grid = AliasTable(packed, np.full(COLUMNS, 2**63, dtype=np.uint64), 0.0), Grid(1)
    monkeypatch.setattr("matrixdp.secure.grid._tables", lambda levels: (table,))
    drawn = np.rint(kernels.standard((1000,), grid, key=Planted()) / grid.step)
    assert np.array_equal(drawn, np.where(np.arange(1000) % 2, -3.0, -2047.0))
