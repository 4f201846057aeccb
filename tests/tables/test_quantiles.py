"""Quantiles from prefix sums: error, coverage, and what is refused."""

import numpy as np
import pytest
from scipy.stats import binom

from matrixdp import Budget, Certificate, Counts, Ledger
from matrixdp.distributions import Gaussian, Product
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.matrix_mechanism import workload_error
from matrixdp.postprocess import nondecreasing
from matrixdp.tables import quantiles, release_quantiles
from matrixdp.tables.quantiles import CANDIDATES, prefix_noise

BUDGET = Budget(1.0, 1e-6)
FALSE_ALARM = 1e-6


def ages(count=2000, seed=0):
    return np.random.default_rng(seed).gamma(4.0, 10.0, count)


@pytest.mark.parametrize(("bins", "kind"), [(16, Product), (200, Gaussian)])
def test_the_noise_is_the_best_of_the_library_for_prefix_sums(bins, kind):
    law = prefix_noise(bins, Counts(1), BUDGET)
    assert isinstance(law, kind)
    for name, options in CANDIDATES.items():
        other = calibrate(name, shape=(bins,), sensitivity=Counts(1), budget=BUDGET, **options)
        assert workload_error("prefix", law) <= workload_error("prefix", other) * (1 + 1e-9)


@pytest.mark.parametrize("mechanism", ["auto", "laplace", "analytic"])
@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
def test_quantiles_are_near_the_truth_and_verify(mechanism, adjacency):
    values, wanted = ages(), [0.0, 0.1, 0.5, 0.9, 1.0]
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
    """At least the level; with half of the margin it must show that they do not."""
    values, wanted, rounds = ages(300), np.array([0.5, 0.9]), 60
    edges = np.arange(0, 121, 3)
    law = prefix_noise(40, Counts(1), BUDGET) if mechanism == "auto" else mechanism
    truth = np.quantile(values, wanted, method="inverted_cdf")
    covered, widths = np.zeros(2), np.zeros(2)
    narrow = np.zeros(2)
    for _ in range(rounds):
        out = release_quantiles(values, wanted, edges=edges, budget=BUDGET, mechanism=law, level=0.9)
        covered += (out.low <= truth) & (truth <= out.high)
        widths += (out.high - out.low) / rounds
        weak = quantiles(out.release, edges, wanted, level=0.05)
        narrow += (weak.low <= truth) & (truth <= weak.high)
    least = binom.ppf(FALSE_ALARM / 3, rounds, 0.9)
    assert np.all(covered >= least)
    assert np.all(widths < 60)
    assert np.any(narrow < least)


def test_a_ledger_is_charged_in_one_call(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(2.0, 1e-5))
    edges = range(0, 60, 3)
    out = release_quantiles(ages(), [0.5], edges=edges, budget=BUDGET, ledger=ledger, note="median age")
    assert type(out.release.noise) is type(prefix_noise(len(edges) - 1, Counts(1), BUDGET))
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
        ({"edges": np.arange(1000)}, "at most 512"),
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
