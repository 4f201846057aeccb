"""Drawing discrete noise: the law, the kernel, floors, keys, refusals.

Statistical tests raise a false alarm with probability below 1e-6 each, and each also rejects a planted fault.
"""

import hashlib
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from matrixdp._compiled import compiled
from matrixdp.distributions.product import steps_probabilities
from matrixdp.errors import InvalidInput
from matrixdp.secure import kernels, tables
from matrixdp.secure.discrete import Sampler, add_noise, noise
from matrixdp.secure.entropy import Key
from matrixdp.secure.kernels import BLOCK

ALARM = 1e-7


# --- the law of what is drawn ---


def chi_square_accepts(counts, expected):
    """Pearson's statistic; cells that expect fewer than 50 are put together."""
    rare = expected < 50
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    law = stats.chi2(len(counts) - 1)
    return law.isf(1 - ALARM / 2) < statistic < law.isf(ALARM / 2)


@pytest.mark.parametrize(
    ("exponent", "scale", "exact"),
    [
        (1.0, 0.4, False),
        (1.0, 2.0, False),
        (1.0, 900.0, False),
        (1.28, 10.8, False),
        (1.6, 1200.0, False),
        (2.0, 16.9, False),
        (2.0, 1500.0, False),
        (1.0, 0.4, True),
        (1.0, 2.0, True),
        (1.0, 900.0, True),
    ],
)
def test_noise_has_its_law(exponent, scale, exact):
    count = 1_000_000
    law = steps_probabilities(exponent, scale)
    half, width = law.size // 2, max(1, int(scale) // 8)
    expected = count * np.add.reduceat(law, np.arange(0, law.size, width))

    def accepted(drawn):
        counts = np.bincount((np.clip(drawn, -half, half) + half) // width, minlength=expected.size)
        return chi_square_accepts(counts, expected)

    assert accepted(noise((count,), exponent, scale, exact=exact))
    assert not accepted(noise((count,), exponent, 0.95 * scale, exact=exact))


@pytest.mark.parametrize(("exponent", "scale"), [(1.0, 900.0), (2.0, 1500.0)])
def test_low_digits_hide_the_coarse_grid(exponent, scale):
    """K modulo 128 is uniform, up to 1e-6 for Laplace noise and much less for the Gaussian."""

    def accepted(drawn):
        return chi_square_accepts(np.bincount(drawn % 128, minlength=128), np.full(128, drawn.size / 128))

    drawn = noise((1_000_000,), exponent, scale)
    assert accepted(drawn)
    assert not accepted(drawn // 128 * 128 + noise((1_000_000,), 2.0, 20.0))


def test_entries_and_blocks_are_uncorrelated():
    drawn = noise((8 * BLOCK,), 1.0, 20.0, threads=2).astype(float)
    drawn /= drawn.std()

    def largest(values):
        pairs = [(values[:-lag], values[lag:]) for lag in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1)]
        return max(abs(a @ b) / math.sqrt(a.size) for a, b in pairs)

    allowed = stats.norm.isf(ALARM / 20)
    assert largest(drawn) < allowed
    assert largest(drawn + 0.02 * np.roll(drawn, 1)) > allowed


# --- the kernel ---


def test_compiled_loops_agree_with_python():
    table, words = tables.digits(1.28, 10.8).tables[0], np.empty(500, dtype=np.uint64)
    Key().stream().fill(words, 0)
    expected = []
    for word in words.tolist():
        packed = int(table.packed[word % 2048])
        size = word % 2048 if word >> 12 < packed >> 12 else packed % 4096
        expected.append(7 + 128 * (-size if word >> 11 & 1 else size))
    for loop in (kernels._look_up, compiled(kernels._look_up)):
        out = np.full(500, 7.0)
        assert loop(words, table.packed, 1.0, 128.0, out) == 0
        assert out.tolist() == expected
        assert loop(words, table.packed, 0.0, 128.0, out) == 0
        assert (out + 7).tolist() == expected


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("exponent", [1.0, 1.6])
def test_words_at_a_threshold_and_ties(exponent, negative):
    """A word below its threshold gives the column, one at it the alias unless a second word is below the tie."""
    table = tables.digits(exponent, 12.0 if exponent == 1.0 else 800.0).tables[0]
    size = table.packed.size
    columns = np.arange(size, dtype=np.uint64)
    thresholds, alias = table.packed // np.uint64(2 * size), (table.packed % np.uint64(size)).astype(np.int64)
    shared = (thresholds > 0) & (table.ties > 0)
    assert shared.sum() > 20
    sign = -1 if negative else 1
    for shift, found in ((-1, columns.astype(np.int64)), (0, alias), (1, alias)):
        words = (thresholds + np.uint64(shift % 2**64)) * np.uint64(2 * size) | columns | np.uint64(size * negative)
        words, out = words[shared], np.zeros(shared.sum())
        met = kernels._look_up(words, table.packed, 0.0, 4.0, out)
        assert met == (0 if shift else words.size)
        assert np.array_equal(out, sign * 4 * found[shared])
        if shift == 0:
            assert not table.ties_broken(words, table.ties[shared]).any()  # not below
            out += table.ties_broken(words, table.ties[shared] - np.uint64(1)) << 2
            assert np.array_equal(out, sign * 4 * columns.astype(np.int64)[shared])


class Planted:
    """A key whose words are given: part -> word."""

    def __init__(self, words):
        self.words = words

    def stream(self):
        return self

    def fill(self, words, block, part=0):
        words[:] = self.words[part]


def test_a_tie_is_broken_in_a_draw():
    table = tables.digits(1.0, 2.0).tables[0]
    column = int(np.flatnonzero((table.packed >> np.uint64(12) > 0) & (table.ties > 1))[0])
    word = int(table.packed[column]) >> 12 << 12 | column
    for second, expected in ((0, column), (2**64 - 1, int(table.packed[column]) % 2048)):
        assert noise((3,), 1.0, 2.0, key=Planted({0: word, 64: second})).tolist() == [expected] * 3


def test_exact_and_tabled_draws_have_no_and_little_error():
    assert Sampler(1.0, 3.0, exact=True).total_variation == 0.0
    assert 0 < Sampler(1.0, 3.0).total_variation < 1e-20
    with pytest.raises(InvalidInput, match="exponent 1"):
        Sampler(1.5, 3.0, exact=True)


# --- values ---


class Zero:
    """A sampler without noise."""

    total_variation = 0.0

    def draw(self, stream, block, noise, words):
        noise[:] = 0


@pytest.mark.parametrize("step", [1.0, 0.25, 2.0**-30, 8.0])
def test_values_are_floored_exactly(step):
    generator = np.random.default_rng(4)
    values = np.concatenate(
        [
            generator.normal(size=2000) * 1000 * step,
            step * generator.integers(-(2**50), 2**50, size=2000),
            np.nextafter(step * np.arange(-50.0, 50.0), -np.inf),
            [0.0, -0.0, 5e-324, -5e-324, 1e-310, -1e-310, 1e-200 * step, -1e-200 * step, 0.5 * step, -0.5 * step],
            [0.5 * step, 1.5 * step, step * (2**51 - 1), -step * (2**51 - 1)],
        ]
    )
    expected = [math.floor(Fraction(value) / Fraction(step)) for value in values.tolist()]
    assert add_noise(values, step, Zero()).tolist() == expected
    in_place = values.copy()
    assert add_noise(in_place, step, Zero(), out=in_place) is in_place
    assert in_place.tolist() == [step * whole for whole in expected]
    half_to_even = np.rint(values / step).astype(np.int64)
    assert half_to_even.tolist() != expected


def test_floors_of_neighbours_differ_by_no_more_than_the_bound():
    generator = np.random.default_rng(5)
    values = generator.normal(size=100_000) * 3
    moved = np.nextafter(values + generator.uniform(-1, 1, size=values.size), values)
    moved = np.where(np.abs(moved - values) <= 1.0, moved, values)
    difference = add_noise(values, 1.0, Zero()) - add_noise(moved, 1.0, Zero())
    assert np.abs(difference).max() == 1
    assert np.abs(np.rint([0.5, 1.5]) @ [-1, 1]) == 2  # as rounding half to even would not


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4)])
def test_noise_is_added_to_any_kind_of_values(kind, shape):
    values, key = np.arange(math.prod(shape)).reshape(shape).astype(kind), Key()
    out = add_noise(values, 1.0, Sampler(1.3, 9.0), key.derive(0))
    alone = add_noise(np.zeros(shape, dtype=np.int64), 1.0, Sampler(1.3, 9.0), key.derive(0))
    assert out.dtype == np.int64
    assert out.shape == shape
    assert np.array_equal(out - alone, values.astype(np.int64))
    assert np.array_equal(values, np.arange(math.prod(shape)).reshape(shape))  # untouched


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("step", [1.0, 0.25])
def test_a_result_in_units_of_the_value_is_that_in_steps(step, in_place):
    values, key = np.random.default_rng(0).normal(size=2 * BLOCK + 3) * 50, Key()
    steps = add_noise(values, step, Sampler(1.3, 9.0), key.derive(0))
    out = values.copy() if in_place else np.empty(values.shape)
    assert add_noise(out if in_place else values, step, Sampler(1.3, 9.0), key.derive(0), out=out) is out
    assert np.array_equal(out, steps * step)


def test_a_result_does_not_go_where_values_are_still_to_be_read():
    values = np.zeros(BLOCK + 1)
    with pytest.raises(InvalidInput, match="share no memory"):
        add_noise(values[:-1], 1.0, Sampler(1.3, 9.0), out=values[1:])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [1, 1000, BLOCK + 1, 3 * BLOCK + 17])
def test_the_number_of_threads_does_not_change_the_result(size, exact):
    key, values = Key(), np.random.default_rng(0).normal(size=size) * 50
    source = Sampler(1.0, 700.0, exact=exact)
    results = [add_noise(values, 1.0, source, key.derive(0), threads=n) for n in (1, 2, 3, None)]
    assert all(np.array_equal(results[0], result) for result in results[1:])
    assert size == 1 or not np.array_equal(results[0], add_noise(values, 1.0, source, key.derive(1)))


@pytest.mark.parametrize(
    ("exponent", "scale", "exact", "digest"),
    [
        (1.0, 2.0, False, "113f3bc3f29f89c8"),
        (1.0, 5e5, False, "d349771d6abd4a76"),
        (1.3, 12.0, False, "343c2095b5c72406"),
        (2.0, 1500.0, False, "f6e1495c4805e19d"),
        (1.0, 2.0, True, "113f3bc3f29f89c8"),
    ],
)
def test_a_key_stands_for_the_same_noise_in_every_version(exponent, scale, exact, digest):
    drawn = noise((70_000,), exponent, scale, Key.from_bytes(bytes(range(32))), exact=exact)
    assert hashlib.sha256(drawn.tobytes()).hexdigest().startswith(digest)


def test_a_key_is_used_once_and_fresh_keys_differ():
    key = Key()
    noise((5,), 1.0, 2.0, key)
    with pytest.raises(InvalidInput, match="used"):
        noise((5,), 1.0, 2.0, key)
    assert not np.array_equal(noise((100,), 1.0, 50.0), noise((100,), 1.0, 50.0))


def test_a_sampler_travels_without_its_tables():
    source = Sampler(1.3, 1500.0)
    assert source.total_variation > 0
    sent = pickle.dumps(source)
    assert len(sent) < 1000
    assert pickle.loads(sent) == source


@pytest.mark.parametrize(
    "values",
    [
        [],
        [math.nan],
        [math.inf],
        [2.0**51],
        [2**51],
        [-(2**51) - 1],
        [2**64 - 1],
        ["a"],
        [1j],
        [[1.0], [2.0, 3.0]],
        [None],
        [True],
    ],
)
def test_bad_values(values):
    with pytest.raises(InvalidInput, match="values") as caught:
        add_noise(values, 1.0, Sampler(1.0, 2.0))
    assert "2251799813685248" not in str(caught.value)


@pytest.mark.parametrize("step", [0.0, -1.0, 0.3, 3.0, math.nan, math.inf, 2.0**-1000, "1", None])
def test_bad_steps(step):
    with pytest.raises(InvalidInput, match="step"):
        add_noise([1.0], step, Sampler(1.0, 2.0))
    with pytest.raises(InvalidInput, match="step"):
        add_noise([1], 0.5, Sampler(1.0, 2.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-5, 1e15, "1", None])
def test_bad_laws(bad):
    for build in (lambda: Sampler(1.0, bad), lambda: Sampler(1.0, bad, exact=True), lambda: Sampler(1.5, bad)):
        with pytest.raises(InvalidInput, match="scale"):
            build()
    with pytest.raises(InvalidInput, match="exponent"):
        Sampler(bad, 1.0)
