"""The parts of streams without an end: how long they are, and what has room."""

import math
from itertools import islice, pairwise

import numpy as np
import pytest

from matrixdp import Budget, Participation
from matrixdp.errors import NumericalFailure
from matrixdp.streams import noise, rows

BUDGET = Budget(1.0, 1e-6)
ONCE = Participation(1.0)


@pytest.mark.parametrize(
    ("budget", "size"),
    [(BUDGET, 1), (BUDGET, 1000), (Budget(0.1, 1e-9), 1), (Budget(0.1, 1e-9), 10**6), (Budget(8.0, 1e-5), 1)],
    ids=str,
)
def test_a_stream_without_an_end_has_none(budget, size):
    """Parts double until rounding, or the grid, sets a limit; then come blocks, and parts of totals that double too."""
    whole = noise.without_end(ONCE, budget)
    found = list(islice(noise.parts(size, ONCE, budget), 30))
    kinds = [part.level for part in found]
    assert kinds == ["days"] * kinds.count("days") + ["block"] + ["totals"] * kinds.count("totals")
    assert found[kinds.index("block")].before == sum(part.length for part in found if part.level == "days")
    for level in ("days", "totals"):
        chain = [part for part in found if part.level == level]
        assert chain[0].before == 0
        assert all(part.before + part.length == later.before for part, later in pairwise(chain))
        grown = [later.length / part.length for part, later in pairwise(chain)]
        assert grown == sorted(grown, reverse=True)
        assert set(grown) == ({2.0} if level == "days" else {1.0, 2.0})
    largest = {}
    for level in noise.SHARES:
        for length in sorted({part.length for part in found if part.level == level}):
            made = noise.of_part(noise.Part(level, 0, length), size, ONCE, budget)
            assert made.float_safe
            assert made.law.shape == (length, size)
            mu, error = largest.get(level, (0.0, 0.0))
            largest[level] = max(mu, made.mu), max(error, made.total_variation)
    (days, days_error), (block, block_error), (totals, totals_error) = largest.values()
    assert max(days, math.hypot(block, totals)) <= whole.mu
    assert max(days_error, block_error + totals_error) <= whole.total_variation
    assert math.hypot(block, totals) > 0.99 * whole.mu


@pytest.mark.parametrize(
    ("budget", "size"), [(Budget(0.001, 1e-9), 1), (Budget(0.01, 1e-9), 10**6), (Budget(0.01, 1e-12), 10**4)], ids=str
)
def test_budgets_without_room_for_blocks_have_parts_of_one_length(budget, size):
    """By the norm, by the grid, and by the samplers' error."""
    found = list(islice(noise.parts(size, ONCE, budget), 20))
    assert {(part.level, part.length) for part in found} == {("days", 32)}
    assert [part.before for part in found] == list(range(0, 640, 32))


def test_both_levels_share_the_error_of_the_samplers():
    """Blocks and totals that have more than half of it each, as those of this budget, are refused."""
    budget, size = Budget(0.01, 1e-12), 10**4
    whole = noise.without_end(ONCE, budget)
    for level in ("block", "totals"):
        made = noise._square_root(level, 32, size, ONCE, budget)
        assert made.mu <= whole.mu * math.sqrt(0.5)
        assert whole.total_variation / 2 < made.total_variation < whole.total_variation
        with pytest.raises(NumericalFailure, match="do not fit the guarantee"):
            noise.of_part(noise.Part(level, 0, 32), size, ONCE, budget)


def test_blocks_whose_totals_have_no_room_are_none(planted):
    planted("_takes", lambda certificate, remainder: False)
    found = list(islice(noise.parts(1, ONCE, BUDGET), 20))
    assert [part.length for part in found] == [32, 64, 128, 256, 512, 1024, *[2048] * 14]
    assert {part.level for part in found} == {"days"}
    assert found[-1].before == sum(part.length for part in found[:-1])


def test_totals_of_blocks_count_the_rounding_of_sums():
    part = noise.Part("totals", 0, 32)
    made = noise.of_part(part, 1, Participation(3.0, adjacency="add/remove"), BUDGET)
    assert made.sensitivity.clip == 3.0 * (1 + 2.0**-30)
    assert made.adjacency == "add/remove"
    assert made.mu <= noise.without_end(ONCE, BUDGET).mu * math.sqrt(0.5)


def test_blocks_whose_sums_are_not_exact_enough_have_no_room(planted):
    planted("SUM_ROUNDING", 1e-16)
    lengths = [part.length for part in islice(noise.parts(1, ONCE, BUDGET), 9) if part.level == "block"]
    assert lengths
    assert lengths[0] < 2048
    for length in (lengths[0], 2 * lengths[0]):
        made = noise.of_part(noise.Part("block", 0, length), 1, ONCE, BUDGET)
        assert (noise._sum_error(made) <= 1e-16) == (length == lengths[0])


@pytest.mark.parametrize("size", [1, 3])
def test_no_block_fails_at_its_end(size):
    """The largest remainders, one after the other, fit; a thousand times larger ones have no room."""
    made = {part.level: part for part in islice(noise.parts(size, ONCE, BUDGET), 10)}
    days = noise.of_part(made["block"], size, ONCE, BUDGET)
    totals = noise.of_part(made["totals"], size, ONCE, BUDGET)
    largest, before = noise.largest_remainder(days), np.zeros((0, size))
    assert noise._takes(totals, largest)
    assert not noise._takes(totals, 1e6 * largest)
    for place in range(made["totals"].length):
        _, kept = rows.released(totals, place, np.full(size, largest), before, lambda white: None)
        before = np.vstack([kept, before])


@pytest.mark.parametrize(("size", "length"), [(1, 2048), (200, 1024), (300, 2048)])
def test_days_that_fit_the_parts_before_fit_blocks(size, length):
    """For 200 cells, blocks as long as the longest part would need a finer grid, with room for smaller days only."""
    made = list(islice(noise.parts(size, ONCE, BUDGET), 10))
    days = max((part for part in made if part.level == "days"), key=lambda part: part.length)
    (block,) = [part for part in made if part.level == "block"]
    assert block.length == length
    largest = [noise._largest_rows(noise.of_part(part, size, ONCE, BUDGET)) for part in (days, block)]
    for before, after in zip(*largest, strict=True):
        assert after >= 0.999 * before
