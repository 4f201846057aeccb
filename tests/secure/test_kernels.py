"""The engine: the law of what it draws, independence, the grid, refusals, streams and memory.

Statistical tests raise a false alarm with probability below 1e-6 each, and each also rejects a planted fault.
"""

import hashlib
import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from scipy import special, stats

from matrixdp._compiled import compiled
from matrixdp.errors import InvalidInput
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import COLUMNS, LIMIT, Grid, rounded_gaussian
from matrixdp.secure.kernels import BLOCK, add_noise, largest, standard, stream

ALARM = 1e-7
MANY = 10_000_000
LEVELS = [1, 2, 3]


def steps(count, levels):
    """K, many times."""
    return np.rint(standard((count,), Grid(levels)) / Grid(levels).step).astype(np.int64)


def draw_from(table, count, entropy=None):
    """K from one table, many times; for planted faults."""
    words, noise = np.empty(count, dtype=np.uint64), np.zeros(count)
    (Key().stream() if entropy is None else entropy).fill(words, 0)
    compiled(kernels._look_up)(words, table.packed, 0.0, 1.0, noise)
    return noise.astype(np.int64)


def chi_square_accepts(counts, probabilities):
    """Pearson's statistic on both sides; cells that expect fewer than 50 are put together."""
    expected = probabilities * counts.sum()
    rare = expected < 50
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    law = stats.chi2(len(counts) - 1)
    return law.isf(1 - ALARM / 2) < statistic < law.isf(ALARM / 2)


# --- the law ---


def test_one_level_has_the_probabilities_of_the_rounded_normal():
    edges = (np.arange(-COLUMNS, COLUMNS + 1) - 0.5) / 128
    probabilities = np.diff(special.ndtr(edges))

    def accepted(drawn):
        return chi_square_accepts(np.bincount(drawn + COLUMNS, minlength=2 * COLUMNS), probabilities)

    assert accepted(steps(MANY, 1))
    assert not accepted(draw_from(rounded_gaussian(127), MANY))


@pytest.mark.parametrize("levels", LEVELS)
def test_moments(levels):
    """Of order 1 to 4, with the variances 1, 2, 15 and 96 that they have under the normal."""

    def accepted(noise):
        square = noise * noise
        powers = (noise, 0, 1), (square, 1, 2), (noise * square, 0, 15), (square * square, 3, 96)
        scores = [(power.mean() - mean) / math.sqrt(variance / noise.size) for power, mean, variance in powers]
        return max(map(abs, scores)) < stats.norm.isf(ALARM / 16)  # room for the skewness of the powers

    noise = standard((MANY // 2,), Grid(levels))
    assert accepted(noise)
    assert not accepted(0.995 * noise)
    assert not accepted(noise + 0.01)


@pytest.mark.parametrize("levels", [2, 3])
def test_fine_grids_pass_for_the_continuous_normal(levels):
    """Kolmogorov and Smirnov's distance, with Massart's constant, on a million draws."""
    count = 1_000_000
    allowed = math.sqrt(math.log(2 / ALARM) / (2 * count)) + Grid(levels).step

    def distance(noise):
        below = special.ndtr(np.sort(noise))
        return max(np.max(below - np.arange(count) / count), np.max(np.arange(1, count + 1) / count - below))

    noise = standard((count,), Grid(levels))
    assert distance(noise) < allowed
    assert distance(0.97 * noise) > allowed


@pytest.mark.parametrize("levels", [2, 3])
def test_fine_grids_fill_equal_bins_equally(levels):
    edges = special.ndtri(np.arange(1, 512) / 512)

    def accepted(noise):
        return chi_square_accepts(np.bincount(np.searchsorted(edges, noise), minlength=512), np.full(512, 1 / 512))

    noise = standard((2_000_000,), Grid(levels))
    assert accepted(noise)
    assert not accepted(0.98 * noise)


@pytest.mark.parametrize(("levels", "digit"), [(2, 0), (3, 0), (3, 1)])
def test_every_fine_digit_is_uniform(levels, digit):
    def accepted(drawn):
        return chi_square_accepts(np.bincount((drawn >> (7 * digit)) & 127, minlength=128), np.full(128, 1 / 128))

    assert accepted(steps(MANY // 2, levels))
    # a remainder of a quarter of the coarse step does not hide the coarse grid
    assert not accepted(128 * steps(MANY // 2, 1) + draw_from(rounded_gaussian(32), MANY // 2) << (7 * digit))


# --- independence ---


def correlated(noise):
    """Whether entries, neighbours, squares of neighbours or blocks are correlated; 12 scores."""
    blocks = noise[: noise.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    pairs = [(noise[:-lag], noise[lag:]) for lag in (1, 2, 7, 128, BLOCK - 1, BLOCK, BLOCK + 1)]
    pairs += [((a**2 - 1) / 2, b**2 - 1) for a, b in (pairs[0], pairs[5])]
    pairs += [(blocks[0], blocks[1]), (blocks[0], blocks[-1]), (blocks[1], blocks[-1])]
    return max(abs(a @ b) / math.sqrt(a.size) for a, b in pairs) > stats.norm.isf(ALARM / 24)


@pytest.mark.parametrize("levels", LEVELS)
def test_blocks_and_neighbours_are_uncorrelated(levels):
    noise = standard((64, BLOCK), Grid(levels), threads=2).reshape(-1)
    assert not correlated(noise)
    assert correlated(noise + 0.01 * np.roll(noise, 1))
    repeated = noise.copy()
    repeated[BLOCK : 2 * BLOCK] = noise[:BLOCK]
    assert correlated(repeated)


def test_keys_give_independent_noise():
    key = Key()
    draws = [standard((1 << 20,), Grid(1), key.derive(i)) for i in range(4)] + [standard((1 << 20,), Grid(1), key)]
    products = np.corrcoef(draws)[np.triu_indices(5, 1)] * math.sqrt(1 << 20)
    assert np.max(np.abs(products)) < stats.norm.isf(ALARM / 20)
    assert not np.array_equal(standard((100,), Grid(3)), standard((100,), Grid(3)))


def test_no_number_repeats_on_the_finest_grid():
    """Without repeated words, an equal pair among 200 draws on a grid of 2^-35 has probability 1.7e-7."""
    drawn = np.concatenate([standard((50,), Grid(5)) for _ in range(4)])
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("size", [1, 1000, BLOCK, BLOCK + 1, 5 * BLOCK + 17])
def test_the_number_of_threads_does_not_change_the_result(size, levels):
    key, values = Key(), np.random.default_rng(0).normal(size=size)
    results = [add_noise(values, 0.3, Grid(levels), key.derive(0), threads=n) for n in (1, 2, 3, 7, None)]
    assert all(np.array_equal(results[0], result) for result in results[1:])
    other = add_noise(values, 0.3, Grid(levels), key.derive(1))
    assert size == 1 or not np.array_equal(results[0], other)  # one number is the same once in 454 times


@pytest.mark.parametrize(
    ("levels", "digest"),
    [
        (1, "8790e68727b88ddc"),
        (2, "21b371244ee4fc71"),
        (3, "15af687a1b15cf3f"),
        (4, "4cdc6ff9d25ac50e"),
        (5, "2bc9230db3ea173e"),
    ],
)
def test_a_key_stands_for_the_same_noise_in_every_version(levels, digest):
    noisy = add_noise(np.arange(70_000) / 7.0, 2.0, Grid(levels), Key.from_bytes(bytes(range(32))))
    assert hashlib.sha256(noisy.tobytes()).hexdigest().startswith(digest)


def test_a_forked_process_draws_its_own_noise_and_numba_waits_for_the_first_draw():
    script = """
import os, sys
import matrixdp, matrixdp.secure.kernels as kernels
from matrixdp.errors import InvalidInput
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import Grid
assert "numba" not in sys.modules
grid, key = Grid(1), Key()
kernels.standard((300000,), grid, threads=2)
child = os.fork()
if child:
    os.waitpid(child, 0)
try:
    kernels.standard((4,), grid, key)
    inherited = "used"
except InvalidInput:
    inherited = "refused"
print(inherited, kernels.standard((300000,), grid, threads=2)[-3:].tolist(), flush=True)
os._exit(0)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    child, parent = run.stdout.splitlines()
    assert child.startswith("refused")
    assert parent.startswith("used")
    assert child.split(" ", 1)[1] != parent.split(" ", 1)[1]


# --- the arithmetic ---


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("std", [1.0, 0.37, 1e-5, 12345.678])
def test_noise_is_added_to_the_rounded_value(std, levels, dtype):
    key, grid = Key(), Grid(levels)
    values = (np.random.default_rng(2).normal(size=(50, 70)) * 10 * std).astype(dtype)
    unit = std * grid.step
    result = add_noise(values, std, grid, key.derive(0))
    noise = standard((50, 70), grid, key.derive(0)) / grid.step
    assert result.dtype == dtype
    assert np.array_equal(result, (unit * (np.rint(values.astype(float) * (1 / unit)) + noise)).astype(dtype))
    wide = add_noise(values, std, grid, key.derive(0), out=np.empty((50, 70)))
    assert np.array_equal(wide.astype(dtype), result)


def test_the_noise_alone_is_what_the_key_gives_on_zeros():
    key, values, drawn = Key(), np.random.default_rng(3).normal(0, 1e6, BLOCK + 9), np.empty(BLOCK + 9)
    noisy = add_noise(values, 0.3, Grid(2), key.derive(0), threads=2, drawn=drawn)
    assert np.array_equal(drawn, add_noise(np.zeros(BLOCK + 9), 0.3, Grid(2), key.derive(0)))
    assert np.array_equal(noisy, add_noise(values, 0.3, Grid(2), key.derive(0)))


def test_every_output_is_on_the_grid_and_neighbours_reach_the_same_outputs():
    grid, std, count = Grid(1), 0.7, 2_000_000
    unit = std * grid.step
    reached = []
    for value in (0.1, 0.1 + 3.7 * unit):
        out = add_noise(np.full(count, value), std, grid)
        numbers = np.rint(out / unit)
        assert np.array_equal(unit * numbers, out)
        reached.append(set(numbers[np.abs(numbers) < 200].tolist()))
    assert reached[0] == reached[1] == set(map(float, range(-199, 200)))


def test_values_may_be_replaced_and_layouts_do_not_matter():
    key, values = Key(), np.random.default_rng(3).normal(size=(30, 40))
    expected = add_noise(values, 1.0, Grid(2), key.derive(0))
    assert np.array_equal(add_noise(np.asfortranarray(values), 1.0, Grid(2), key.derive(0)), expected)
    assert np.array_equal(add_noise(values.tolist(), 1.0, Grid(2), key.derive(0)), expected)
    frozen = values.copy()
    frozen.flags.writeable = False
    assert np.array_equal(add_noise(frozen, 1.0, Grid(2), key.derive(0)), expected)
    replaced = add_noise(values, 1.0, Grid(2), key.derive(0), out=values)
    assert replaced is values
    assert np.array_equal(values, expected)


# --- the largest value ---


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", [1, 1000, BLOCK, BLOCK + 1, 33 * BLOCK + 17])
def test_the_largest_value(size, dtype):
    rng = np.random.default_rng(12)
    values = rng.normal(size=size).astype(dtype)
    for place in (0, size // 2, -1):
        values[place] = -(9.0 + rng.uniform())
        assert largest(values) == largest(values, threads=2) == np.max(np.abs(values))
    assert largest(np.full(3, -0.0, dtype=dtype)) == 0.0
    assert largest(np.array([5e-324, -(2.0**-149)], dtype=dtype)) == dtype(2.0**-149)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("place", [0, BLOCK, -1])
def test_a_value_that_is_not_finite_is_the_largest(place, dtype):
    values = np.random.default_rng(13).normal(size=33 * BLOCK + 5).astype(dtype)
    for bad in (np.inf, -np.inf, np.nan, -np.nan):
        values[place] = bad
        assert not largest(values, threads=2) <= np.finfo(dtype).max


def test_the_largest_value_of_any_layout():
    values = np.random.default_rng(14).normal(size=(60, 70))
    frozen = values.copy()
    frozen.flags.writeable = False
    for same in (frozen, np.asfortranarray(values), values[::-1], np.repeat(values, 2, axis=1)[:, ::2]):
        assert largest(same) == np.max(np.abs(values))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_nothing_is_compiled_after_the_preparation(dtype):
    compiled.cache_clear()
    kernels.prepare(1.0, Grid(2), dtype)
    loops = [compiled(loop) for loop in (kernels._largest, kernels._look_up, kernels._add)]
    before = [len(loop.signatures) for loop in loops]
    values = np.ones(100, dtype=dtype)
    add_noise(values, 1.0, Grid(2))
    values.flags.writeable = False
    add_noise(values.reshape(10, 10), 1.0, Grid(3))
    assert [len(loop.signatures) for loop in loops] == before == [1, 1, 1]


# --- refusals ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, LIMIT / 128, -LIMIT / 128, 1e308])
@pytest.mark.parametrize("place", [0, BLOCK, -1])
def test_bad_values_are_refused_before_anything_is_drawn(bad, place):
    key, values = Key(), np.ones(3 * BLOCK + 5)
    values[place] = bad
    before = values.copy()
    with pytest.raises(InvalidInput, match="values must be finite and below"):
        add_noise(values, 1.0, Grid(1), key, out=values, threads=2)
    assert np.array_equal(values, before, equal_nan=True)
    key.stream()  # it was not used up


def test_the_refusal_of_a_large_value_does_not_show_it():
    with pytest.raises(InvalidInput, match=r"below 5\.63e\+14 grid steps") as caught:
        add_noise(np.array([3.0, -8e12]), 1.0, Grid(1))
    assert "8e+12" not in str(caught.value)
    largest = np.nextafter(LIMIT / 128, 0)
    assert abs(add_noise(np.array([largest]), 1.0, Grid(1))[0] / largest - 1) < 1e-11


@pytest.mark.parametrize(
    "bad", [np.ones(3, dtype=int), np.ones(3, dtype=complex), np.array(["a"]), np.ones((0, 3)), None]
)
def test_values_must_be_floats(bad):
    with pytest.raises(InvalidInput, match="values"):
        add_noise(bad, 1.0, Grid(1))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e-300, 1e300, "1", None, True])
def test_bad_std(bad):
    for call in (add_noise, stream):
        with pytest.raises(InvalidInput, match="std"):
            call(np.ones(3), bad, Grid(1))


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_bad_threads(bad):
    for call in (add_noise, stream):
        with pytest.raises(InvalidInput, match="threads"):
            call(np.ones(3), 1.0, Grid(1), threads=bad)


def test_bad_grid_and_shape():
    with pytest.raises(InvalidInput, match="grid"):
        add_noise(np.ones(3), 1.0, 2.0**-7)
    with pytest.raises(InvalidInput, match="shape"):
        standard((2, 0), Grid(1))


def test_float32_refuses_what_it_cannot_hold():
    with pytest.raises(InvalidInput, match="values"):
        add_noise(np.array([3e38], dtype=np.float32), 1e30, Grid(1))
    with pytest.raises(InvalidInput, match="std"):
        add_noise(np.array([1.0], dtype=np.float32), 1e37, Grid(1))


def test_bad_out():
    values = np.ones((4, 6))
    overlapping = np.ones(30)
    for bad in (np.empty((6, 4)), np.empty((4, 6), dtype=int), np.empty((4, 12))[:, ::2], [[0.0] * 6] * 4):
        with pytest.raises(InvalidInput, match="out"):
            add_noise(values, 1.0, Grid(1), out=bad)
    with pytest.raises(InvalidInput, match="share no memory"):
        add_noise(overlapping[:20], 1.0, Grid(1), out=overlapping[10:])


def test_a_key_serves_one_release():
    key = Key()
    add_noise(np.ones(3), 1.0, Grid(1), key)
    for again in (lambda: standard((3,), Grid(1), key), lambda: stream(np.ones(3), 1.0, Grid(1), key)):
        with pytest.raises(InvalidInput, match="has been used"):
            again()


# --- streams and memory ---


def test_a_stream_is_the_chunks_with_derived_keys():
    key, values = Key(), np.random.default_rng(4).normal(size=(103, 9))
    chunks = list(stream(values, 2.0, Grid(2), key, rows=20))
    assert [len(chunk) for chunk in chunks] == [20] * 5 + [3]
    for i, chunk in enumerate(chunks):
        assert np.array_equal(chunk, add_noise(values[20 * i : 20 * i + 20], 2.0, Grid(2), key.derive(i)))
    unit = 2.0 * Grid(2).step
    noise = np.array([np.rint(chunk[0] / unit) - np.rint(values[20 * i] / unit) for i, chunk in enumerate(chunks)])
    assert len(np.unique(noise, axis=0)) == 6


def peak_of(task):
    tracemalloc.start()
    try:
        task()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_stream_takes_constant_memory():
    def consume():
        total = sum(chunk.size for chunk in stream(np.broadcast_to(0.0, (20_000, 500)), 1.0, Grid(1), threads=2))
        assert total == 10**7

    assert peak_of(consume) < 32 << 20  # the noise would take 80 MB


@pytest.mark.parametrize("levels", [1, 3])
def test_memory_beyond_the_output_is_one_megabyte_per_thread(levels):
    values = np.zeros((2048, 1024))
    add_noise(values, 1.0, Grid(levels))  # compiles
    assert peak_of(lambda: add_noise(values, 1.0, Grid(levels), threads=2)) < values.nbytes + (3 << 20)
    assert peak_of(lambda: (values + 1, values[:256] + 2)) > values.nbytes + (1 << 20)
    assert peak_of(lambda: largest(values, threads=2)) < 1 << 19
