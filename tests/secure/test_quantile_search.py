"""The search for quantiles: exact weights, the guarantee by enumeration, and that what is drawn has this law."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom

from matrixdp import L1, Budget, Certificate, Counts, certify, release
from matrixdp.distributions import QuantileSearch
from matrixdp.errors import InvalidInput, NotApplicable, NotCertifiable
from matrixdp.secure import quantile_search
from matrixdp.secure.quantile_search import gaps, places_of, probes, search
from matrixdp.tables.quantile import found_by

FALSE_ALARM = 1e-6


def law_of_cuts(places, high, p, rate):
    """The exact probability of every cut from 0 to high - 1."""
    edges, weights = gaps(np.array(sorted(places), dtype=np.int64), 0, high, p, rate)
    each = [weight for weight, n in zip(weights, np.diff(edges), strict=True) for _ in range(n)]
    return [Fraction(weight, sum(each)) for weight in each]


def largest_loss(p, rate, rng, rounds=40):
    worst = 0.0
    for _ in range(rounds):
        places = rng.integers(0, 30, rng.integers(0, 12)).tolist()
        one, other = (law_of_cuts(found, 30, p, rate) for found in (places, [*places, int(rng.integers(0, 30))]))
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        worst = max(worst, math.log(max(ratios)), -math.log(min(ratios)))
    return worst


@pytest.mark.parametrize("p", [Fraction(0), Fraction(1, 10), Fraction(1, 2), Fraction(3, 4), Fraction(1)])
@pytest.mark.parametrize("rate", [0.2, 3.0, 200.0])
def test_one_record_changes_every_probability_by_at_most_the_rate(p, rate):
    rng = np.random.default_rng(7)
    exact = Fraction(rate)
    assert largest_loss(p, exact, rng) <= rate * (1 + 1e-12)
    assert largest_loss(p, 3 * exact / 2, rng, 150) > rate * (1 + 1e-12) or rate > 60  # where weights reach the floor


def test_weights_are_exponential():
    _, weights = gaps(np.arange(10, 90, 10), 0, 100, Fraction(1, 3), Fraction(1, 2))
    slope = 0.5 / (4 / 3)
    truth = [math.exp(-slope * abs(g - 8 / 3)) for g in range(9)]
    assert [weight / 2**256 for weight in weights[1:-1]] == pytest.approx(truth, rel=1e-14)


def test_what_is_drawn_has_the_law(monkeypatch):
    """Cuts of one search, by gap; with twice the rate it must show."""
    monkeypatch.setattr(quantile_search, "FRACTION_BITS", 2)
    sizes, draws, p, rate = np.array([3, 0, 1, 2]), 2000, Fraction(1, 2), Fraction(7, 10)
    rng = np.random.default_rng(5)

    def fresh(count):
        return rng.integers(0, 2**64, count, dtype=np.uint64)

    cuts = [search(places_of(sizes, fresh), 4, [p], rate, fresh)[0] for _ in range(draws)]
    found = np.bincount(np.array(cuts) >> 2, minlength=4)

    def truth(rate, rounds=400):
        other = np.random.default_rng(6)
        laws = np.zeros(4)
        for _ in range(rounds):
            places = [4 * place + int(other.integers(0, 4)) for place, n in enumerate(sizes) for _ in range(n)]
            laws += np.array([float(x) for x in law_of_cuts(places, 16, p, rate)]).reshape(4, 4).sum(axis=1) / rounds
        return laws

    def rejected(law):
        low = binom.ppf(FALSE_ALARM / 8, draws, np.maximum(law - 0.02, 0))  # the averages over places are within 0.02
        high = binom.isf(FALSE_ALARM / 8, draws, np.minimum(law + 0.02, 1))
        return bool(np.any((found < low) | (found > high)))

    assert not rejected(truth(rate))
    assert rejected(truth(4 * rate))


def test_probes_lie_around_what_was_found():
    assert probes([5], 16).tolist() == [0, 2, 4, 5, 6, 7, 9, 13, 16]
    assert probes([0, 15], 16)[[0, -1]].tolist() == [0, 16]


@pytest.mark.parametrize(
    ("sensitivity", "changes"), [(Counts(1), 1), (Counts(2, adjacency="replace"), 2), (L1(3, step=1), 3)]
)
def test_the_certificate_adds_up_levels_and_counts(sensitivity, changes):
    law = QuantileSearch((40,), (0.1, 0.5, 0.7, 0.9), 0.1, 4.0)
    certificate = certify(law, sensitivity, Budget(2.0, 0.0))
    pure = changes * (3 * 0.1 + 0.25)
    assert pure <= certificate.epsilon(0.0) <= pure * (1 + 1e-11)
    assert certificate.delta(0.0) >= (math.exp(pure) - 1) / (math.exp(pure) + 1)  # of any pure guarantee
    assert Certificate.from_json(certificate.to_json()).verify()


def test_histograms_in_rows_add_up_and_keep_apart():
    law = QuantileSearch((3, 40), (0.25, 0.5), 0.1, 4.0)
    certificate = certify(law, Counts(3), Budget(2.0, 0.0))
    pure = 3 * (2 * 0.1 + 0.25)
    assert pure <= certificate.epsilon(0.0) <= pure * (1 + 1e-11)
    assert Certificate.from_json(certificate.to_json()).verify()
    counts = np.zeros((3, 40))
    counts[[0, 1, 2], [3, 20, 33]] = 4000  # each row has all its records in one bin
    out = release(counts, Counts(3), Budget(3.0, 0.0), QuantileSearch((3, 40), (0.25, 0.5), 0.3, 3.0))
    assert np.floor(found_by(out)).tolist() == [[3, 3], [20, 20], [33, 33]]


def test_bad_searches_are_refused():
    for bad in (
        {"shape": (2, 2, 2)}, {"shape": (2**20 + 1,)}, {"shape": (2, 2**20 + 1)}, {"probabilities": ()},
        {"probabilities": (0.5, 0.5)},
        {"probabilities": (0.5, 1.5)}, {"rate": 0.0}, {"rate": math.nan}, {"scale": 0.0},
    ):  # fmt: skip
        with pytest.raises(InvalidInput):
            QuantileSearch(**{"shape": (8,), "probabilities": (0.5,), "rate": 1.0, "scale": 1.0, **bad})
    with pytest.raises(NotCertifiable):
        certify(QuantileSearch((8,), (0.5,), 2000.0, 1.0), Counts(1))
    with pytest.raises(NotApplicable):
        QuantileSearch((8,), (0.5,), 1.0, 1.0).sample()


def test_no_records_and_no_room():
    rng = np.random.default_rng(0)
    wanted = [Fraction(p) for p in (0.0, 1e-9, 0.3, 0.5, 1 - 1e-9, 1.0)]
    none = np.empty(0, dtype=np.int64)
    found = search(none, 3, wanted, Fraction(1), lambda n: rng.integers(0, 2**64, n, dtype=np.uint64))
    assert found == sorted(found)
    assert 0 <= found[0] <= found[-1] < 3 << 32
