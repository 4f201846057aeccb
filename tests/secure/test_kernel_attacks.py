"""Attacks on floating-point noise and on timing, which the engine must withstand.

Statistical tests raise a false alarm with probability below 1e-6 each, and each also rejects a planted fault.
"""

import math
import time
from functools import partial

import numba
import numpy as np
import pytest
from scipy import special, stats

from matrixdp._compiled import compiled
from matrixdp.privacy import gaussian
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import LIMIT, Grid, rounded_gaussian
from matrixdp.secure.kernels import BLOCK, add_noise

ALARM = 1e-7
LEVELS = [1, 2, 3]


# --- attacks ---


def delta_shown(mechanism, event, epsilon, count=400_000):
    """A lower confidence bound (error 1e-6) on delta = P_0(event) - e^epsilon P_1(event), for the values 0 and 1."""
    hits = [int(event(mechanism(np.full(count, value))).sum()) for value in (0.0, 1.0)]
    low = stats.beta.ppf(ALARM / 2, hits[0], count - hits[0] + 1) if hits[0] else 0.0
    high = stats.beta.isf(ALARM / 2, hits[1] + 1, count - hits[1]) if hits[1] < count else 1.0
    return low - math.exp(epsilon) * high


@pytest.mark.parametrize("std", [1.0, 0.7])
def test_the_least_significant_bits_give_floating_point_noise_away_but_not_ours(std):
    """Mironov's attack: 1 + z is always a multiple of 2^-53, and z near 0 seldom is, so one look tells the two apart.

    Above z = -1/2 the sum is rounded to that multiple, below it z itself is one.
    """
    epsilon = 5.0
    promised = gaussian.delta(1 / std, epsilon)
    rng = np.random.default_rng(5)

    def naive(value):
        return value + std * rng.standard_normal(value.shape)

    def finer_than_one_can_reach(out):
        return np.rint(out * 2.0**53) != out * 2.0**53

    assert not finer_than_one_can_reach(naive(np.ones(100_000))).any()
    assert delta_shown(naive, finer_than_one_can_reach, epsilon) > 0.1 > 10 * promised
    for grid in map(Grid, LEVELS):
        ours = partial(add_noise, std=std, grid=grid)
        assert delta_shown(ours, finer_than_one_can_reach, epsilon) <= promised


def test_inverting_a_uniform_float_gives_away_which_noise_was_possible_but_not_ours():
    """A sampler with 2^20 uniform inputs reaches as many noises; hardly an output is possible for both values."""
    std, epsilon, bits = 1.0, 5.0, 20
    promised = gaussian.delta(1 / std, epsilon)
    possible = np.sort(std * special.ndtri((np.arange(1 << bits) + 0.5) / (1 << bits)))
    rng = np.random.default_rng(6)

    def naive(value):
        return value + rng.choice(possible, value.shape)

    def impossible_for_one(out):
        noise = out - 1.0
        nearest = possible[np.minimum(np.searchsorted(possible, noise - 1e-13), possible.size - 1)]
        return np.abs(nearest - noise) > 1e-13

    assert delta_shown(naive, impossible_for_one, epsilon) > 0.9
    assert delta_shown(partial(add_noise, std=std, grid=Grid(1)), impossible_for_one, epsilon) <= promised


# --- time ---

VALUES = {
    "zero": np.zeros(BLOCK),
    "small": np.random.default_rng(7).normal(size=BLOCK),
    "negative": -np.abs(np.random.default_rng(8).normal(size=BLOCK)),
    "large": np.random.default_rng(9).uniform(-1, 1, size=BLOCK) * LIMIT / 128,
    "subnormal": np.random.default_rng(10).uniform(0, 1e-310, size=BLOCK),
    "halves": np.full(BLOCK, 0.5 / 128),
}


def time_differs(task, inputs, rounds=120):
    """Whether the time of a task depends on which of two inputs lies in its buffer.

    Rounds are paired and interleaved. An alarm takes both a difference of 15 % in the medians and a sign test at the
    false-alarm rate of one in a million: if the time is the same for both, each pair is a fair coin.
    """
    buffer = np.empty_like(inputs[0])
    times = np.empty((rounds, 2))
    rng = np.random.default_rng(11)
    for turn in range(-5, rounds):  # the first few are not counted
        for which in rng.permutation(2):
            buffer[:] = inputs[which]
            task(buffer)
            start = time.perf_counter_ns()
            for _ in range(4):
                task(buffer)
            times[turn, which] = time.perf_counter_ns() - start
    medians = np.median(times, axis=0)
    first_slower = int((times[:, 0] > times[:, 1]).sum())
    unlikely = stats.binomtest(first_slower, rounds).pvalue < ALARM
    return bool(unlikely and medians.max() > 1.15 * medians.min())


@pytest.mark.parametrize("name", [name for name in VALUES if name != "small"])
def test_time_does_not_depend_on_the_values(name):
    noise, out = np.zeros(BLOCK), np.empty(BLOCK)
    add, largest = compiled(kernels._add), compiled(kernels._largest)
    pair = [VALUES["small"], VALUES[name]]
    assert not time_differs(lambda values: add(values, 1 / 128, noise, out), pair)
    assert not time_differs(lambda values: largest(values.view(np.int64), np.int64(2**63 - 1)), pair)


def test_time_does_not_depend_on_the_noise():
    words, noise = np.empty(64 * BLOCK, dtype=np.uint64), np.zeros(64 * BLOCK)
    Key().stream().fill(words, 0)
    look_up, packed = compiled(kernels._look_up), rounded_gaussian(128).packed
    look_up(words, packed, 0.0, 1.0, noise)
    sizes, out = np.abs(noise), np.zeros(BLOCK)
    mixed = words[:BLOCK]
    for chosen in (sizes < 20, sizes > 200, noise > 0, noise < 0):
        assert not time_differs(lambda w: look_up(w, packed, 0.0, 1.0, out), [mixed, words[chosen][:BLOCK]])


def test_the_clock_sees_a_loop_that_depends_on_values():
    def leaky(values, out):
        for j in range(values.size):
            rest, turns = abs(values[j]), 0
            while rest > 0.5:
                rest, turns = 0.5 * rest, turns + 1
            out[j] = turns

    leaking = numba.njit(leaky)
    some = {name: values[: BLOCK // 16] for name, values in VALUES.items()}
    out = np.empty_like(some["small"])
    assert time_differs(lambda values: leaking(values, out), [some["small"], some["zero"]])
    assert time_differs(lambda values: leaking(values, out), [some["small"], some["large"]])
