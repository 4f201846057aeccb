"""Quantiles: error, coverage, and what is refused."""

import numpy as np
import pytest
from scipy.stats import binom

from matrixdp import Budget, Certificate, Ledger
from matrixdp.distributions import QuantileSearch
from matrixdp.errors import InvalidInput
from matrixdp.postprocess import nondecreasing
from matrixdp.tables import Domain, Numeric, Table, quantiles, release_quantiles

BUDGET = Budget(1.0, 1e-6)
FALSE_ALARM = 1e-6


def ages(count=2000, seed=0):
    return np.random.default_rng(seed).gamma(4.0, 10.0, count)


@pytest.mark.parametrize("mechanism", ["auto", "laplace", "analytic"])
@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
def test_quantiles_are_near_the_truth_and_verify(mechanism, adjacency):
    values, wanted = ages(10_000), [0.0, 0.1, 0.5, 0.9, 1.0]
    out = release_quantiles(
        values, wanted, edges=range(0, 121, 2), budget=BUDGET, mechanism=mechanism, adjacency=adjacency
    )
    assert np.all(np.diff(out.estimate) >= 0)
    assert np.all((out.low <= out.estimate) & (out.estimate <= out.high))
    assert out.estimate[1:4] == pytest.approx(np.quantile(values, wanted[1:4]), abs=8)
    assert out.certificate.meets(BUDGET)
    assert Certificate.from_json(out.certificate.to_json()).verify()


@pytest.mark.parametrize("mechanism", ["auto", "laplace"])
def test_intervals_cover_the_quantile_of_the_records(mechanism):
    """At least the level; for intervals a hundredth as wide, which cover 0.2, it must show that they do not."""
    values, wanted, rounds = ages(300), np.array([0.5, 0.9]), 60
    edges = np.linspace(0, 120, 481 if mechanism == "auto" else 41)
    truth = np.quantile(values, wanted, method="inverted_cdf")
    covered, widths = np.zeros(2), np.zeros(2)
    narrow = np.zeros(2)
    for _ in range(rounds):
        out = release_quantiles(values, wanted, edges=edges, budget=BUDGET, mechanism=mechanism, level=0.9)
        covered += (out.low <= truth) & (truth <= out.high)
        widths += (out.high - out.low) / rounds
        low, high = (out.estimate + (end - out.estimate) / 100 for end in (out.low, out.high))
        narrow += (low <= truth) & (truth <= high)
    least = binom.ppf(FALSE_ALARM / 3, rounds, 0.9)
    assert np.all(covered >= least)
    assert np.all(widths < 100)  # of 120
    assert np.any(narrow < least)


def test_a_ledger_is_charged_in_one_call(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(2.0, 1e-5))
    edges = range(0, 60, 3)
    out = release_quantiles(ages(), [0.5], edges=edges, budget=BUDGET, ledger=ledger, note="median age")
    assert isinstance(out.release.noise, QuantileSearch)
    assert [entry.note for entry in ledger.history()] == ["median age"]


def test_values_outside_count_as_the_nearest_edge():
    values = np.concatenate([np.full(500, -1e9), np.full(500, 1e9)])
    out = release_quantiles(values, [0.2, 0.8], edges=[0, 1, 2, 3], budget=BUDGET)
    assert out.high[0] == 1
    assert out.low[1] == 2


def test_no_records_and_one_bin():
    out = release_quantiles(np.array([3.0]), [0.5], edges=[0, 10], budget=Budget(0.01, 1e-6))
    assert (out.low[0], out.high[0]) == (0, 10)
    assert 0 <= out.estimate[0] <= 10


def test_running_counts_do_not_fall():
    assert nondecreasing([0, 3, 1, 2, 5]) == pytest.approx([0, 2, 2, 2, 5])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"edges": [1, 0]}, "edges"),
        ({"edges": [1]}, "edges"),
        ({"edges": [0, np.nan]}, "edges"),
        ({"edges": np.arange(2**20 + 2)}, "at most 1048576"),
        ({"probabilities": [1.5]}, "probabilities"),
        ({"probabilities": []}, "probabilities"),
        ({"probabilities": [np.nan]}, "probabilities"),
        ({"level": 1.0}, "level"),
        ({"values": [["a"]]}, "values"),
        ({"budget": 1.0}, "budget|Budget"),
    ],
)
def test_bad_input_is_refused(change, words):
    arguments = {"values": ages(10), "probabilities": [0.5], "edges": range(0, 101, 10), "budget": BUDGET, **change}
    with pytest.raises(InvalidInput, match=words):
        release_quantiles(arguments.pop("values"), arguments.pop("probabilities"), **arguments)


def test_edges_must_fit_the_release():
    out = release_quantiles(ages(), [0.5], edges=range(0, 101, 10), budget=BUDGET)
    with pytest.raises(InvalidInput, match="one more"):
        quantiles(out.release, range(5), [0.5])


def test_the_error_in_ranks_is_that_of_the_exponential_mechanism():
    """Not that of a histogram, which is ten times that here; half the rate would show.

    Of 100 searches, the mean error is outside once in 1e9, and with half the rate inside once in a million. The mean
    square has longer tails.
    """
    wanted, edges = np.array([0.25, 0.5, 0.75]), np.linspace(0, 150, 2**12 + 1)
    off = []
    for seed in range(100):
        values = np.sort(ages(1000, seed))
        out = release_quantiles(values, wanted, edges=edges, budget=Budget(1.0, 0.0))
        off.append(np.searchsorted(values, out.estimate) - wanted * len(values))
    rate = 0.9 / 2
    # the mean size of Laplace noise of scale 1/rate; quartiles have half of the median's error besides their own
    expected = (1 + 2 * (1 + 0.5 + 0.25) / 1.5) / 3 / rate
    assert 0.6 * expected < np.mean(np.abs(off)) < 1.5 * expected


def test_ties_are_split_and_whole_numbers_are_found():
    """Most values are one; a quantile above them must not be drawn to it, as it is if all ties go to one side."""
    values = np.concatenate([np.zeros(12000), np.arange(1, 8001) % 50 + 1])
    table = Table(values[:, None], Domain({"gain": Numeric(0, 60)}), columns=["gain"])
    wanted = [0.1, 0.3, 0.5, 0.8, 0.9]
    found = table.quantiles("gain", wanted, bins="whole").release(Budget(5.0, 0.0)).table(level=1 - 1e-7)
    truth = np.quantile(values, wanted, method="inverted_cdf")
    assert np.all(np.abs(found["value"] - truth) <= 1)
    assert np.all((found["low"] <= truth) & (truth <= found["high"]))
    assert np.all(found["high"] - found["low"] <= 10)
    assert np.all(found["value"] == np.round(found["value"]))


def test_a_release_also_has_intervals_for_other_quantiles():
    values = ages(5000)
    out = release_quantiles(values, [0.25, 0.75], edges=np.linspace(0, 150, 3001), budget=Budget(2.0, 0.0))
    more = quantiles(out.release, np.linspace(0, 150, 3001), [0.5, 0.75], level=1 - 1e-7)
    truth = np.quantile(values, [0.5, 0.75])
    assert np.all((more.low <= truth) & (truth <= more.high))
    assert np.all((more.low <= more.estimate) & (more.estimate <= more.high))
