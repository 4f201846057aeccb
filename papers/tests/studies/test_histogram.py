"""The study of the map of pickups."""

import numpy as np
import pytest

from matrixdp_papers import datasets
from matrixdp_papers.studies import equal_guarantees, haar, histogram, uber_map
from matrixdp_papers.studies.base import Mean, Table, silent


def test_it_runs_on_a_small_map(small_map, tmp_path):
    found = histogram.run(small_map, True, silent)
    assert set(found.figures) == {"figure-4", "figure-5", "equal-guarantees"}
    verdicts = {row[0]: row[3] for row in found.tables[0].rows}
    assert verdicts == {"r1smg": "violated", "classic": "loose", "analytic": "exact", "mvg": "loose", "mgm": "loose"}
    assert "| quantity | paper | ours | why |" in found.found
    assert found.found.count("matrixdp against the best rival") == 1
    (path, *_) = histogram.STUDY.write(found, tmp_path)
    again = histogram.STUDY.remake(path)
    assert histogram.STUDY.report(again) == histogram.STUDY.report(found)
    assert histogram.STUDY.write(again, tmp_path / "again")[2:] == [tmp_path / "again" / "equal-guarantees.png"]


def test_every_group_has_the_same_number_of_variants(small_map):
    tried = equal_guarantees.methods(small_map.counts.shape, "replace").values()
    for group in equal_guarantees.GROUPS:
        assert sorted(method.block for method in tried if method.group == group) == sorted(equal_guarantees.BLOCKS * 3)


def test_a_difference_within_the_intervals_is_none():
    own, near, far = (equal_guarantees.Choice("m", "p", Mean(value, 1.0, 9)) for value in (10.0, 11.0, 20.0))
    assert histogram._verdict(own, [near, far]) == "no difference"
    assert histogram._verdict(own, [far]) == "better, x 0.50"
    assert histogram._verdict(far, [own]) == "worse, x 2.00"


def test_the_moments_of_the_loss_are_those_of_the_paper(small_map, rng):
    table, _ = histogram.accuracy(small_map, 2000, rng, silent)
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["exact kurtosis"] == pytest.approx(35 / 3)
    assert cells["exact skewness"] == pytest.approx(5 / np.sqrt(3))
    # a mean of 2000 chi-squares with one degree of freedom lies within 16 % of the truth but one time in a million
    assert cells["mean loss"] == pytest.approx(cells["exact mean"], rel=0.16)


def test_the_papers_map_is_that_of_one_base_but_its_borders_are_not_the_records(folder):
    """What the report says: its times are those of the base; on the records' own range 300 cells hold up to 221."""
    pickups = datasets.load_uber(folder)
    private = (pickups.base == uber_map.BASE) & (pickups.time < uber_map.FIRST_DAY + uber_map.DAYS)
    times = pickups.time[private]
    assert [str(time) for time in (times.min(), times.max())] == ["2014-04-01T00:11:00", "2014-04-03T23:57:00"]
    counts, *_ = np.histogram2d(pickups.latitude[private], pickups.longitude[private], bins=uber_map.CELLS)
    assert (np.sum(counts > 0), counts.max(), np.sum(~private)) == (300, 221, 560_687)
    numbers = ("300", "221", "560,687", "3,829", "3,479")
    assert all(number in histogram.DIFFERENCE for number in numbers)


def test_the_valid_cells_do_not_hang_on_the_private_records(folder):
    data = uber_map.load(folder)
    assert data.counts.shape == (89, 89)
    assert (data.counts.sum(), data.counts.max(), data.records) == (3479, 27, 3829)
    assert data.valid.sum() == 3940
    # some private records lie outside: the map was not made from them
    assert data.counts[~data.valid].sum() > 0


@pytest.mark.parametrize("adjacency", uber_map.ADJACENCIES)
def test_additive_noise_has_the_error_that_its_guarantee_needs(small_map, adjacency, rng):
    size = small_map.counts.size
    for name in ("analytic", "laplace", "discrete"):
        method = equal_guarantees.methods(small_map.counts.shape, adjacency)[name]
        errors = [np.sum((method.draw(small_map.counts, rng) - small_map.counts) ** 2) for _ in range(40)]
        # 12,960 squares: 10 % is 5 standard errors for Laplace noise and 8 for Gaussian, less than one in a million
        assert np.mean(errors) == pytest.approx(size * method.std**2, rel=0.1)
        assert np.mean(errors) != pytest.approx(size * (0.9 * method.std) ** 2, rel=0.1)
    # of pure Laplace noise, which needs a little more; delta and the discrete grid save 2 %
    pure = {"add/remove": 2 * np.sqrt(2), "replace": 4 * np.sqrt(2)}[adjacency]
    assert 0.98 * pure < method.std < pure


def test_blocks_are_added_up_and_spread_evenly(rng):
    counts = rng.poisson(3, (7, 9)).astype(float)
    blocks = equal_guarantees.together(counts, 4)
    assert blocks.shape == (2, 3)
    assert blocks[0, 0] == counts[:4, :4].sum()
    assert blocks[1, 2] == counts[4:, 8:].sum()
    marked = rng.random((7, 9)) < 0.7
    marked[0, 0] = True
    full = equal_guarantees.spread(blocks, 4, marked)
    assert np.all(full[~marked] == 0)
    assert full[0, 0] == pytest.approx(blocks[0, 0] / marked[:4, :4].sum())
    assert equal_guarantees.together(full, 4)[0, 0] == pytest.approx(blocks[0, 0])
    np.testing.assert_array_equal(equal_guarantees.spread(counts, 1, np.ones_like(marked)), counts)


def test_sums_over_rectangles(rng):
    counts = rng.random((5, 6))
    rectangles = equal_guarantees.random_rectangles(counts.shape, rng)[:50]
    slow = [counts[top:bottom, left:right].sum() for (top, bottom), (left, right) in rectangles]
    np.testing.assert_allclose(equal_guarantees.sums(counts, rectangles), slow, atol=1e-12)


def test_the_choice_is_made_on_other_maps_in_two_rounds(small_map):
    columns = ("mechanism", "x", "y")
    rows = (("a", Mean(3.0, 0, 2), Mean(2.0, 0, 2)), ("b", Mean(1.0, 0, 2), Mean(8.0, 0, 2)))
    other = Table("o", columns, rows)
    assert [each[:2] for each in equal_guarantees.finalists(other, ["a", "b"], 3)] == [
        ("b", "x"),
        ("a", "y"),
        ("a", "x"),
    ]
    assert [each[:2] for each in equal_guarantees.finalists(other, ["a"], 1)] == [("a", "y")]
    exact = equal_guarantees.Method(lambda counts, rng: counts, 1.0, "g")
    worse = equal_guarantees.Method(lambda counts, rng: counts + rng.normal(size=counts.shape), 1.0, "g")
    among = [equal_guarantees.Choice(name, "valid cells", Mean(0.0, 0, 2)) for name in ("worse", "exact")]
    tried = {"worse": worse, "exact": exact}
    for rectangles in (None, equal_guarantees.random_rectangles(small_map.counts.shape, np.random.default_rng(0))):
        found = equal_guarantees.settled(tried, among, [small_map.counts], small_map.valid, rectangles, 2, 1)
        assert found.method == "exact"


def test_post_processing_keeps_to_valid_cells_and_to_the_total(small_map, rng):
    method = equal_guarantees.methods(small_map.counts.shape, "add/remove")["laplace"]
    noisy = method.draw(small_map.counts, rng)
    for post in equal_guarantees.POSTS:
        result = equal_guarantees.finished(noisy, small_map.valid, method, post)
        if post != "as released":
            assert np.all(result[~small_map.valid] == 0)
        if post not in ("as released", "valid cells"):
            assert np.all(result >= 0)
    total = equal_guarantees.finished(noisy, small_map.valid, method, "non-negative, total")
    assert total.sum() == pytest.approx(noisy[small_map.valid].sum())


def test_haar_is_orthonormal(rng):
    square = rng.normal(size=(16, 16))
    coefficients = haar.transform(square)
    assert np.linalg.norm(coefficients) == pytest.approx(np.linalg.norm(square))
    np.testing.assert_allclose(haar.inverse(coefficients), square, atol=1e-12)
    assert coefficients[0, 0] == pytest.approx(square.sum() / 16)


def test_denoising_takes_off_noise_and_keeps_what_stands_out(rng):
    truth = np.zeros((20, 24))
    truth[5:13, 6:14] = 4.0
    truth[2, 20] = 30.0
    noisy = truth + rng.normal(size=truth.shape)
    better = haar.denoise(noisy, 1.0)
    assert np.sum((better - truth) ** 2) < 0.4 * np.sum((noisy - truth) ** 2)
    assert better[2, 20] > 20
    # with a std that is ten times too large the peak goes
    assert haar.denoise(noisy, 10.0)[2, 20] < 20
