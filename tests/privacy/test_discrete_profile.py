"""Profiles of discrete noise: against 40 digits, the claims about worst differences, bad input."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

from matrixdp.distributions.product import steps_probabilities
from matrixdp.errors import InvalidInput
from matrixdp.privacy import cell_sums, cells, discrete
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import Profile

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden", "discrete.json").read_text())


def compared(part, stretch=1.0):
    """(exact, got, truth) for every golden row; `stretch` plants an error in the scale."""
    for row in GOLDEN[part]:
        exponent, scale, epsilon = (float.fromhex(row[name]) for name in ("exponent", "scale", "epsilon"))
        (shift, count), *others = (tuple(group) for group in row["groups"])
        profile = DiscreteProfile(exponent, scale * stretch, shift, count, tuple(others))
        exact = exponent in (1.0, 2.0) or count + sum(more for _, more in others) <= 3
        yield exact, Fraction(profile.delta(epsilon)), Fraction(row["true_delta"])


def test_the_truth_is_met_from_above():
    """1e-15 is what the last digit of epsilon is worth."""
    rows = list(compared("rows"))
    assert len(rows) > 70
    for exact, got, truth in rows:
        assert truth <= got <= truth * (1 + Fraction(1, 10**9 if exact else 10**4)) + Fraction(1, 10**15)


def test_a_scale_that_is_off_by_a_billionth_is_seen():
    assert any(got < truth for _, got, truth in compared("rows", stretch=1 + 1e-9))


def forget():
    caches = (cells.cell_loss, discrete.delta_of, cell_sums._total, cell_sums._tilt, cell_sums._on_grid)
    for function in caches:
        function.cache_clear()


def test_a_missing_margin_for_rounding_is_seen(monkeypatch):
    for module in (cells, cell_sums, discrete):
        monkeypatch.setattr(module, "UNIT", 0.0)
    forget()
    try:
        assert sum(got < truth for _, got, truth in compared("rows")) > 10
    finally:
        forget()


def test_many_cells_within_a_ten_thousandth():
    """The integrals are good for about eight digits."""
    for _, got, truth in compared("integrals"):
        assert -1e-7 < float(got / truth - 1) < 1e-4
    assert any(got < truth for _, got, truth in compared("integrals", stretch=1 + 1e-5))


def transformed(loss, count, epsilon, tolerance):
    return cell_sums._transformed(cell_sums._Total((loss,), (count,)), epsilon, tolerance, settle=False)


@pytest.mark.parametrize(
    ("exponent", "scale", "shift", "count", "epsilon"),
    [(1.0, 9.0, 3, 20, 1.9), (2.0, 12.0, 2, 9, 2.0), (2.0, 3.0, 1, 3, 4.0), (1.0, 0.5, 1, 4, 7.0)],
)
def test_transforms_and_convolutions_on_a_lattice_agree(exponent, scale, shift, count, epsilon):
    loss = cells.cell_loss(exponent, scale, shift)
    length = count * (loss.losses.size - 1) + 1
    direct = cell_sums._convolved([loss], [count], epsilon, length)
    assert transformed(loss, count, epsilon, 1e-9) == pytest.approx(direct, rel=1e-9)
    # only the sums above epsilon count
    above = math.ceil((count * loss.losses[0] - epsilon) / loss.spacing) + 1
    assert above < length
    assert cell_sums._convolved([loss], [count], epsilon, above) == pytest.approx(direct, rel=1e-12)
    if above > 2:
        assert cell_sums._convolved([loss], [count], epsilon, above - 2) < direct * (1 - 1e-12)


@pytest.mark.parametrize(
    ("exponent", "scale", "shift", "count", "epsilon"),
    [(1.0, 500.0, 100, 60, 3.0), (1.0, 50.0, 5, 1000, 9.0), (2.0, 300.0, 1, 16, 0.1)],
)
def test_long_lattices(monkeypatch, exponent, scale, shift, count, epsilon):
    profile = DiscreteProfile(exponent, scale, shift, count)
    found = profile.delta(epsilon)
    monkeypatch.setattr(cell_sums, "_DIRECT", 10**6)
    forget()
    assert found == pytest.approx(profile.delta(epsilon), rel=2e-9)


def test_transforms_and_enumerations_agree():
    loss = cells.cell_loss(1.4, 6.0, 1)
    ratio = transformed(loss, 3, 0.8, 1e-8) / cell_sums._enumerated([loss] * 3, 0.8)
    assert 1 - 1e-12 < ratio < 1 + 1e-7


def test_a_coarse_grid_gives_a_larger_delta():
    loss = cells.cell_loss(1.4, 6.0, 1)
    found = [transformed(loss, 8, 1.0, tolerance) for tolerance in (1e-1, 1e-2, 1e-4, 1e-7)]
    assert found == sorted(found, reverse=True)
    assert found[0] < 1.2 * found[-1]


@pytest.mark.parametrize(
    ("scale", "shift", "epsilon"), [(9.347934908833874, 2, 4.2879e-4), (37.99756412846789, 2, 0.5267034)]
)
def test_a_large_atom_near_epsilon_calls_for_a_finer_grid(scale, shift, epsilon):
    """With exponent 1.000001 the sums are almost on a lattice; a grid that suffices elsewhere errs by 0.2 % here."""
    near, there = (DiscreteProfile(exponent, scale, shift, 16).delta(epsilon) for exponent in (1.000001, 1.0))
    assert there * (1 - 1e-4) < near < there * (1 + 2e-4)
    rough = transformed(cells.cell_loss(1.000001, scale, shift), 16, epsilon, 3e-5)
    assert rough > there * (1 + 3e-4)


# --- the worst difference ---


def divergence(law, difference, epsilon):
    """H_v by enumeration, for a law on the whole numbers -n, ..., n given as an array; the rest has no mass."""
    size = law.size
    first = second = np.ones(1)
    for shift in difference:
        room = np.zeros(size + 2 * abs(shift))
        here = room.copy()
        here[abs(shift) : abs(shift) + size] = law
        first, second = np.multiply.outer(first, here), np.multiply.outer(second, np.roll(here, shift))
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


def log_concave(generator):
    """A random symmetric law with a convex potential."""
    steps = np.cumsum(generator.exponential(size=5) * generator.choice([0.05, 0.3, 1.0], size=5))
    half = np.exp(-np.cumsum(steps))
    law = np.concatenate([half[::-1], [1.0], half])
    return law / law.sum()


GAP = np.array([0.2, 0.1, 0.4, 0.1, 0.2])  # not log-concave


def worst_cases(generator):
    """For every claim two differences, the second at least as bad as the first."""
    a, b = sorted(generator.integers(0, 4, size=2))
    yield "a longer shift is worse", (a,), (b,)
    yield "also in a product", (a, 1), (b, 1)
    yield "signs do not matter", (a, 2), (-b, 2)
    yield "a step from a smaller entry to a larger is worse", (b, max(a, 1)), (b + 1, max(a, 1) - 1)
    yield "also beside a third", (a, b + 1, 1), (a, b + 2, 0)


def violations(draw, generator, rounds):
    """By how much each claim fails, at most."""
    worst = {}
    for _ in range(rounds):
        law, epsilon = draw(), generator.uniform(-1, 3)
        for claim, less, more in worst_cases(generator):
            if claim.startswith("a step") and less[1] > less[0]:
                continue
            excess = divergence(law, less, epsilon) - divergence(law, more, epsilon)
            worst[claim] = max(worst.get(claim, 0.0), excess)
    return worst


def test_the_worst_difference_on_random_log_concave_laws():
    generator = np.random.default_rng(1)
    found = violations(lambda: log_concave(generator), generator, 200)
    assert len(found) == 5
    assert max(found.values()) < 1e-12


def test_that_check_sees_a_law_that_is_not_log_concave():
    found = violations(lambda: GAP, np.random.default_rng(1), 40)
    assert len(found) == 5
    assert min(found.values()) > 0.003


@pytest.mark.parametrize("exponent", [1.0, 1.3, 2.0])
def test_no_difference_in_the_sets_is_worse_than_the_profile(exponent):
    """Counts(2, 3): two entries by up to 3; the l1 ball of radius 4; the same with |v_i| <= 3; Entrywise (3, 1)."""
    scale, generator = 2.5, np.random.default_rng(2)
    law = steps_probabilities(exponent, scale)
    law = law[law > 1e-9]
    for epsilon in (0.0, 0.4, 1.3):
        counts = DiscreteProfile(exponent, scale, 3, 2).delta(epsilon)
        ball = DiscreteProfile(exponent, scale, 4, 1).delta(epsilon)
        capped = DiscreteProfile(exponent, scale, 3, 1, ((1, 1),)).delta(epsilon)
        for _ in range(12):
            v = generator.integers(-3, 4, size=2)
            found = divergence(law, v, epsilon) - 1e-7
            assert found <= counts
            if np.abs(v).sum() <= 4:
                assert found <= capped <= ball
        assert divergence(law, (3, 3), epsilon) == pytest.approx(counts, rel=1e-5, abs=1e-7)
        assert divergence(law, (3, 1), epsilon) == pytest.approx(capped, rel=1e-5, abs=1e-7)
        assert divergence(law, (4,), epsilon) == pytest.approx(ball, rel=1e-5, abs=1e-7)


# --- losses for composition ---


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("floor", [1e-12, 1e-40])
def test_losses_of_one_cell(exponent, floor):
    profile = DiscreteProfile(exponent, 4.0, 2, 3, ((1, 2),))
    found = profile.losses(floor)
    assert [count for _, count in found] == [3, 2]
    assert sum(count * loss.infinite for loss, count in found) <= floor
    for loss, _ in found:
        assert np.all(np.diff(loss.losses) <= 0)
        assert 1.0 <= loss.masses.sum() + loss.infinite < 1 + 1e-12
        assert np.sum(loss.masses * np.exp(-loss.losses)) == pytest.approx(1.0, rel=1e-9)  # the second law
        on_grid = loss.on_grid(2.0**-6)
        assert on_grid.masses.sum() == pytest.approx(1.0, rel=1e-12)
        assert np.sum(on_grid.masses * np.exp(-on_grid.losses)) == pytest.approx(1.0, rel=1e-9)
        for epsilon in (0.0, 0.3, 1.0):
            excess = cell_sums._excess(loss.losses, loss.masses, epsilon)
            assert excess <= cell_sums._excess(on_grid.losses, on_grid.masses, epsilon) * (1 + 1e-14)


def test_losses_that_cannot_be_cut_are_refused():
    with pytest.raises(InvalidInput, match="floor"):
        DiscreteProfile(1.5, 4.0).losses(0.0)


# --- the profile ---


def test_a_profile_is_one():
    profile = DiscreteProfile(1.5, 4.0, 1, 2)
    assert isinstance(profile, Profile)
    assert hash(profile) == hash(DiscreteProfile(1.5, 4.0, 1, 2))
    assert "at epsilon 1" in str(profile)


@pytest.mark.parametrize(
    "profile",
    [
        DiscreteProfile(1.0, 3.0, 1, 4),
        DiscreteProfile(1.0, 3.0, 5, 2),
        DiscreteProfile(1.3, 3.0, 1, 2),
        DiscreteProfile(1.6, 9.0, 2, 6),
        DiscreteProfile(2.0, 9.0, 1, 40),
    ],
)
def test_epsilon_undoes_delta(profile):
    deltas = [profile.delta(epsilon) for epsilon in np.linspace(0.0, 3.0, 13)]
    assert deltas == sorted(deltas, reverse=True)
    for delta in (1e-9, 1e-5, 1e-2):
        epsilon = profile.epsilon(delta)
        assert profile.delta(epsilon) <= delta
        assert epsilon == 0.0 or profile.delta(epsilon * (1 - 1e-4)) > delta
    assert profile.epsilon(0.999) == 0.0


@pytest.mark.parametrize("less", [1e-5, 1e-8, 1e-11, 1e-13, 3e-16])
@pytest.mark.parametrize(
    "profile",
    [DiscreteProfile(2.0, 3.0), DiscreteProfile(1.0, 10.0, 1, 3), DiscreteProfile(1.99, 1.0, 1, 5)],
)
def test_a_delta_just_below_that_at_epsilon_0(monkeypatch, profile, less):
    """The root is closer to 0 than searches look, and the rough delta at 0 may even be below the exact one."""
    calls, delta_of = itertools.count(), discrete.delta_of

    def counted(*arguments):
        assert next(calls) < 200
        return delta_of(*arguments)

    monkeypatch.setattr(discrete, "delta_of", counted)
    delta = profile.delta(0.0) * (1 - less)
    epsilon = profile.epsilon(delta)
    assert epsilon < 40 * less + 1e-11
    assert profile.delta(epsilon) <= delta * (1 + 2**-52)


def test_pure_epsilon():
    profile = DiscreteProfile(1.0, 7.0, 2, 3, ((1, 1),))
    assert 1.0 <= profile.pure_epsilon < 1 + 1e-14
    assert profile.delta(profile.pure_epsilon) == 0.0 < profile.delta(1 - 1e-6)
    assert profile.epsilon(0.0) == profile.pure_epsilon
    assert DiscreteProfile(1.1, 7.0).pure_epsilon == DiscreteProfile(1.1, 7.0).epsilon(0.0) == math.inf


def test_two_directions_are_equal():
    law = steps_probabilities(1.4, 3.0)
    for difference in [(2,), (2, 1)]:
        ahead, back = (divergence(law, np.array(difference) * sign, 0.7) for sign in (1, -1))
        assert ahead == pytest.approx(back, rel=1e-12)


# --- one entry, in closed form ---


@pytest.mark.parametrize("seed", range(8))
def test_one_entry_never_below_the_truth(seed):
    """Discrete Laplace and any shift, with 50 digits: the best of all events {K <= c} next to the best real c."""
    rng = np.random.default_rng(seed)
    with mp.workdps(50):
        for _ in range(60):
            shift = int(rng.choice([1, 2, 3, 7, 1025, 10**6, 3 * 10**8]))
            scale = float(shift * np.exp(rng.uniform(-3, 4)))
            share = float(rng.choice([rng.uniform(0, 1), 1 - 10 ** rng.uniform(-12, -1), 10 ** rng.uniform(-9, 0)]))
            if not 2.0**-10 <= scale <= 2.0**40:
                continue
            epsilon = shift / scale * share
            if rng.random() < 0.3 and shift > 2:  # where two events are equally good
                epsilon = (shift - 2 * int(rng.integers(1, min(shift // 2 + 1, 1000)))) / scale
            q = mp.exp(-1 / mp.mpf(scale))
            middle = int(mp.floor((shift - mp.mpf(epsilon) * mp.mpf(scale)) / 2))
            truth = max(
                (1 + q - q ** (c + 1) - mp.exp(mp.mpf(epsilon)) * q ** (shift - c)) / (1 + q)
                for c in range(max(middle - 2, 0), min(middle + 3, shift))
            )
            found = DiscreteProfile(1.0, scale, shift).delta(epsilon)
            assert truth <= found, (scale, shift, epsilon)
            lower = mp.mpf(epsilon) * (1 - mp.mpf("1e-14"))
            nearby = max(
                (1 + q - q ** (c + 1) - mp.exp(lower) * q ** (shift - c)) / (1 + q)
                for c in range(max(middle - 2, 0), min(middle + 3, shift))
            )
            assert found <= nearby * (1 + mp.mpf("1e-12")) + mp.mpf("1e-300")


# --- many entries ---


@pytest.mark.parametrize(("count", "scale", "epsilon"), [(600, 80.0, 1.0), (5000, 300.0, 0.4), (10_000, 250.0, 2.5)])
def test_binomial_sums_of_many_cells(count, scale, epsilon):
    """Against the closed sum in 40 digits."""
    with mp.workdps(40):
        rate = 1 / mp.mpf(scale)
        up, excess = 1 / (1 + mp.exp(-rate)), lambda b: 1 - mp.exp(epsilon - rate * (2 * b - count))
        first = math.floor((count + epsilon * scale) / 2) + 1
        term = mp.binomial(count, first) * up**first * (1 - up) ** (count - first)
        total = mp.mpf(0)
        for b in range(first, count + 1):
            total += term * excess(b)
            term *= mp.mpf(count - b) / (b + 1) * up / (1 - up)
        got = mp.mpf(DiscreteProfile(1.0, scale, 1, count).delta(epsilon))
        assert total <= got <= total * (1 + mp.mpf("1e-9"))


def test_a_binomial_sum_of_many_cells_tends_to_the_gaussian():
    """With 10,000 cells, by the central limit theorem."""
    from matrixdp.privacy import gaussian

    profile = DiscreteProfile(1.0, 250.0, 1, 10_000)
    for epsilon in (0.5, 1.0, 1.5):
        assert profile.delta(epsilon) == pytest.approx(float(gaussian.delta(0.4, epsilon)), rel=0.03)


BAD = [0, -1, math.nan, math.inf, "1", None, [1], np.array([1.0, 2.0])]


@pytest.mark.parametrize(("place", "name"), list(enumerate(["exponent", "scale_in_steps", "shift", "cells"])))
def test_bad_profiles(place, name):
    for bad in [*BAD, *([0.5, 2.5] if name == "exponent" else []), *([1.5, True] if place > 1 else [])]:
        arguments = [1.5, 4.0, 1, 1]
        arguments[place] = bad
        with pytest.raises(InvalidInput, match=name):
            DiscreteProfile(*arguments)


def test_bad_questions():
    profile = DiscreteProfile(1.5, 4.0)
    for bad in [-1.0, math.nan, "1", None]:
        with pytest.raises(InvalidInput, match="epsilon"):
            profile.delta(bad)
        with pytest.raises(InvalidInput, match="delta"):
            profile.epsilon(bad)


def test_groups_come_in_any_order():
    groups = [(3, 2), (1, 1)]
    deltas = [
        DiscreteProfile(1.4, 5.0, *first, (second,)).delta(0.9) for first, second in itertools.permutations(groups)
    ]
    assert deltas[0] == pytest.approx(deltas[1], rel=1e-9)
