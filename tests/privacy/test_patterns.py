"""Participation over time: mu against brute force over all patterns and signs."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest

from matrixdp import Certificate, certify
from matrixdp.adjacency import ADD_REMOVE, ZERO_OUT
from matrixdp.cli import specs
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import OverTime
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy import patterns
from matrixdp.sensitivity import Participation

STEPS = 7


def all_patterns(sensitivity, steps):
    if sensitivity.cyclic:
        return [list(range(r, steps, sensitivity.gap)) for r in range(min(sensitivity.gap, steps))]
    sizes = range(1, min(sensitivity.times, steps) + 1)
    chosen = (list(c) for size in sizes for c in combinations(range(steps), size))
    return [c for c in chosen if all(b - a >= sensitivity.gap for a, b in pairwise(c))]


def truth(sensitivity, gram):
    """The largest mu of a record in one column: over all patterns and signs."""
    found = 0.0
    for pattern in all_patterns(sensitivity, len(gram)):
        part = gram[np.ix_(pattern, pattern)]
        for signs in product([1.0, -1.0], repeat=len(pattern) - 1):
            vector = np.array([1.0, *signs])
            found = max(found, float(vector @ part @ vector))
    return sensitivity.clip * np.sqrt(found)


def absolute(sensitivity, gram):
    """The bound that holds in any number of columns."""
    sums = [np.abs(gram[np.ix_(p, p)]).sum() for p in all_patterns(sensitivity, len(gram))]
    return sensitivity.clip * np.sqrt(max(sums))


def random_bands(width, negative, seed):
    rng = np.random.default_rng(seed)
    bands = rng.uniform(-1 if negative else 0.05, 1, (STEPS, width))
    bands[:, 0] = rng.uniform(0.5, 2, STEPS)
    return np.array([[bands[t, j] if j <= t else 0.0 for j in range(width)] for t in range(STEPS)])


ROOT = np.cumprod([1.0, *((j - 1.5) / j for j in range(1, STEPS))])  # of 1 - x
STRATEGIES = {
    "toeplitz": (np.array([1.0, 0.5, 0.3]), False),
    "toeplitz, rising": (np.array([1.0, 1.5, 0.2]), False),
    "toeplitz, negative": (np.array([1.0, -0.4]), False),
    "banded": (random_bands(2, False, 0), False),
    "banded, negative": (random_bands(2, True, 1), False),
    "banded, wide": (random_bands(4, False, 2), False),
    "dense": (random_bands(STEPS, False, 3), False),
    "dense, negative": (random_bands(STEPS, True, 4), False),
    "inverse-banded": (ROOT[:3], True),
    "inverse, all bands": (ROOT, True),
    "inverse, rising": (np.array([1.0, -1.5]), True),
    "inverse, not convex": (np.array([1.0, -0.1, -0.8]), True),
    "inverse, alternating": (np.array([1.0, 0.5]), True),
    "inverse of a banded one": (random_bands(2, True, 5), True),
}
SETS = {
    "once": Participation(1.5),
    "separated": Participation(1.5, separation=2, times=3),
    "far apart": Participation(0.5, separation=4, times=2),
    "anywhere": Participation(2.0, times=3),
    "always": Participation(2.0, times=STEPS),
    "cyclic": Participation(1.0, separation=3, cyclic=True),
    "cyclic, once": Participation(1.0, separation=9, cyclic=True),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("sensitivity", SETS.values(), ids=SETS)
@pytest.mark.parametrize("columns", [1, 3])
def test_mu_is_never_below_the_truth_and_exact_where_it_says_so(name, sensitivity, columns):
    coefficients, inverse = STRATEGIES[name]
    covariance = OverTime(coefficients, (STEPS, columns), 0.7, inverse)
    gram = covariance.gram() / 0.7**2
    least, most = truth(sensitivity, gram), absolute(sensitivity, gram)
    got = certify(Gaussian(covariance), sensitivity)
    assert got.mu >= least
    assert sensitivity.contains(got.witness)
    assert np.linalg.norm(covariance.whiten(got.witness)) <= got.mu
    if got.exact:
        assert got.mu <= least * (1 + 1e-9)
        assert np.linalg.norm(covariance.whiten(got.witness)) >= got.mu * (1 - 1e-9)
    assert got.mu <= 1.6 * most
    if np.all(gram >= 0) and (sensitivity.cyclic or name in ("toeplitz", "inverse-banded", "inverse, all bands")):
        assert got.exact


@pytest.mark.parametrize("sensitivity", SETS.values(), ids=SETS)
def test_few_bands_make_every_certificate_exact(sensitivity):
    for name in ("banded", "banded, negative", "toeplitz, negative"):
        covariance = OverTime(STRATEGIES[name][0], (STEPS, 2))
        if covariance.bands <= sensitivity.gap:
            assert certify(Gaussian(covariance), sensitivity).exact


@pytest.mark.parametrize("seed", range(30))
def test_the_heaviest_pattern(seed):
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0, 1, STEPS) if seed % 3 else np.sort(rng.uniform(0, 1, STEPS))[::-1]
    for sensitivity in SETS.values():
        total, pattern = sensitivity.heaviest(weights)
        assert total == pytest.approx(max(weights[p].sum() for p in all_patterns(sensitivity, STEPS)))
        assert total == pytest.approx(weights[pattern].sum())
        assert pattern.tolist() in all_patterns(sensitivity, STEPS)


def test_the_bound_where_signs_disagree():
    """Three steps that pull apart: 5.4 by absolute values, 4.2 by eigenvalues, 3.8 in one column."""
    gram = np.eye(3) - 0.4 * (np.ones((3, 3)) - np.eye(3))
    sensitivity = Participation(1.0, separation=1, cyclic=True)
    square, _ = patterns.worst_pattern(sensitivity, gram)
    assert 4.2 <= square <= 4.2 * (1 + 1e-9)
    assert truth(sensitivity, gram) ** 2 == pytest.approx(3.8)


def test_many_steps_need_no_matrix():
    """Toeplitz strategies of 100,000 steps, the pattern 0, b, 2b, ... by arithmetic."""
    steps, sensitivity = 100_000, Participation(1.0, separation=1000, times=100)
    few = certify(Gaussian(OverTime(np.array([1.0, 0.5, 0.25]), (steps, 1))), sensitivity)
    assert few.exact
    assert few.mu == pytest.approx(np.sqrt(100 * (1 + 0.25 + 0.0625)))
    assert np.flatnonzero(few.witness).tolist() == list(range(0, steps, 1000))
    many = certify(Gaussian(OverTime(ROOT[:3], (steps, 1), inverse=True)), sensitivity)
    assert many.exact
    assert many.mu > few.mu
    with pytest.raises(NotCertifiable, match="at most 2 bands"):
        certify(Gaussian(OverTime(np.array([1.0, 0.5, 0.7]), (steps, 1))), Participation(1.0, separation=2, times=3))


@pytest.mark.parametrize("sensitivity", SETS.values(), ids=SETS)
@pytest.mark.parametrize("inverse", [False, True])
def test_strategies_that_overflow_are_not_certified(sensitivity, inverse):
    """2^2000 in C or in its inverse; 2^6 is certified, if not exactly."""
    with pytest.raises(NotCertifiable, match="grows too fast"):
        certify(Gaussian(OverTime([1.0, 2.0], (2001, 1), inverse=inverse)), sensitivity)
    assert certify(Gaussian(OverTime([1.0, 2.0], (STEPS, 1), inverse=inverse)), sensitivity).mu > 0


def test_certificates_go_to_json_and_verify():
    for coefficients, inverse in STRATEGIES.values():
        got = certify(Gaussian(OverTime(coefficients, (STEPS, 2), 0.7, inverse)), SETS["separated"])
        assert got.adjacency == ZERO_OUT
        again = Certificate.from_json(got.to_json())
        assert again.verify()
        assert again.mu == got.mu
    changed = got.to_json().replace('"times": 3', '"times": 2')
    assert not Certificate.from_json(changed).verify()
    changed = got.to_json().replace('"separation": 2', '"separation": 1')
    assert not Certificate.from_json(changed).verify()


def test_documents_with_former_words_verify():
    """One band was "1 bands", and every third step "every 3th step"; other numbers are not forgiven."""
    law = Gaussian(OverTime(np.array([1.0]), (STEPS, 2), 0.7), note="1 bands, as a recipe wrote it")
    got = certify(law, SETS["cyclic"])
    assert got.sensitivity.describe() == "rows of norm at most 1, at exactly every 3 steps"
    assert Participation(1.0, separation=1, cyclic=True).describe() == "rows of norm at most 1, at every step"
    former = got.to_json().replace("1 band)", "1 bands)").replace("every 3 steps", "every 3th step")
    assert former.count("1 bands)") == former.count("3th step") == 1
    assert Certificate.from_json(former).verify()
    for one, other in (("1 bands)", "2 bands)"), ("1 bands)", "31 bands)"), ("3th step", "4th step")):
        assert not Certificate.from_json(former.replace(one, other)).verify()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip": 0}, "clip must be above 0"),
        ({"clip": float("nan")}, "clip must be finite"),
        ({"clip": 1, "separation": 0}, "separation must be a whole number"),
        ({"clip": 1, "separation": 2.5}, "separation must be a whole number"),
        ({"clip": 1, "times": 0}, "times must be a whole number"),
        ({"clip": 1, "cyclic": True}, "needs a separation"),
        ({"clip": 1, "cyclic": "yes"}, "cyclic must be True or False"),
        ({"clip": 1, "adjacency": "replace"}, "zero-out or add/remove"),
    ],
)
def test_bad_participation(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        Participation(**arguments)


def test_shapes():
    with pytest.raises(InvalidInput, match="one row per step"):
        Participation(1.0).fits((5,))
    with pytest.raises(InvalidInput, match="times must be left out"):
        Participation(1.0, separation=2, times=2, cyclic=True).fits((9, 1))
    Participation(1.0, separation=2, times=5, cyclic=True).fits((9, 1))


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ([0.0, 1.0], "above 0 in the first band"),
        ([1.0] * 4, "at most 3 bands"),
        (np.ones((2, 2)), "one row per step"),
        (np.ones((3, 2)), "before the first step"),
        ([1.0, float("inf")], "must be finite"),
    ],
)
def test_bad_strategies(coefficients, message):
    with pytest.raises(InvalidInput, match=message):
        OverTime(np.array(coefficients), (3, 1))


def test_the_command_line_writes_participation():
    found = specs.sensitivity("participation:1.5,128,8", "add/remove")
    assert (found.clip, found.separation, found.times, found.adjacency) == (1.5, 128, 8, ADD_REMOVE)
    assert specs.sensitivity("participation:2").times == 1
    cyclic = specs.sensitivity("cyclic:1.5,128")
    assert (cyclic.clip, cyclic.separation, cyclic.cyclic) == (1.5, 128, True)
    with pytest.raises(InvalidInput, match="separation must be a whole number"):
        specs.sensitivity("participation:1,2.5,3")
