"""Independent discrete noise: its variance against 40 digits, errors with weights, samples, bad input.

Statistical tests raise a false alarm with probability below 1e-6 each, and each also rejects a planted fault.
"""

import math
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from scipy import stats

from matrixdp.distributions.base import NoiseLaw
from matrixdp.distributions.product import Product, steps_probabilities, steps_variance
from matrixdp.errors import InvalidInput

ALARM = 1e-7
LAWS = [(1.0, 0.3), (1.0, 2.0), (1.0, 900.0), (1.25, 7.0), (1.7, 0.6), (2.0, 3.0), (2.0, 60.0)]


def true_variance(exponent, scale):
    with mp.workdps(40):
        if exponent == 1.0:
            q = mp.exp(-1 / mp.mpf(scale))
            return 2 * q / (1 - q) ** 2
        sizes = range(1, math.ceil(scale * 100 ** (1 / exponent)) + 2)
        weights = [2 * mp.exp(-((k / mp.mpf(scale)) ** mp.mpf(exponent))) for k in sizes]
        return mp.fsum(w * k * k for w, k in zip(weights, sizes, strict=True)) / (1 + mp.fsum(weights))


@pytest.mark.parametrize(("exponent", "scale"), LAWS)
def test_the_variance(exponent, scale):
    truth = true_variance(exponent, scale)
    assert abs(steps_variance(exponent, scale) / truth - 1) < 1e-12
    law = Product((3, 4), 0.5, exponent, 0.5 * scale)
    assert law.scale_in_steps == scale
    assert law.variance == pytest.approx(0.25 * float(truth), rel=1e-12)
    assert law.expected_squared_error() == pytest.approx(12 * law.variance, rel=1e-14)
    weights = np.arange(12.0).reshape(3, 4)
    assert law.expected_squared_error(weights) == pytest.approx(66 * law.variance, rel=1e-14)
    assert law.expected_squared_error(2.0) == pytest.approx(24 * law.variance, rel=1e-14)
    assert law.root_mean_square == pytest.approx(math.sqrt(law.variance))


@pytest.mark.parametrize(("exponent", "scale"), [(1.0, 3.0), (1.5, 4.0), (2.0, 5.0)])
def test_large_scales_tend_to_the_continuous_law(exponent, scale):
    """E X^2 = scale^2 Gamma(3/t) / Gamma(1/t)."""
    scale *= 1000
    continuous = scale**2 * math.gamma(3 / exponent) / math.gamma(1 / exponent)
    assert steps_variance(exponent, scale) == pytest.approx(continuous, rel=1e-5)


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize(("exponent", "scale"), [(1.0, 0.7), (1.0, 300.0), (1.4, 6.0), (2.0, 9.0)])
def test_samples_have_the_law(exponent, scale, secure):
    """Pearson's statistic, cells that expect fewer than 50 put together; the fault is a scale that is 5 % too small."""
    count = 400_000
    probabilities = steps_probabilities(exponent, scale)
    half = probabilities.size // 2
    if scale > 100:  # in bins of 37
        edges = np.arange(0, probabilities.size, 37)
        probabilities = np.add.reduceat(probabilities, edges)

    def accepted(law):
        drawn = law.sample(None if secure else np.random.default_rng(3)) / law.step
        assert np.array_equal(drawn, np.rint(drawn))
        places = drawn.astype(np.int64) + half
        counts = np.bincount(places // 37 if scale > 100 else places, minlength=probabilities.size)
        expected = probabilities * count
        rare = expected < 50
        statistic = ((counts - expected)[~rare] ** 2 / expected[~rare]).sum()
        statistic += (counts[rare].sum() - expected[rare].sum()) ** 2 / max(expected[rare].sum(), 1e-9)
        return statistic < stats.chi2((~rare).sum()).isf(ALARM)

    law = Product((count,), 0.25, exponent, 0.25 * scale)
    assert accepted(law)
    assert not accepted(replace(law, scale=0.95 * law.scale))


def test_a_law_describes_itself():
    law = Product((2, 3), 1.0, 1.0, 2.0, source="somebody")
    assert isinstance(law, NoiseLaw)
    assert law.describe() == "discrete Laplace, scale 2, on multiples of 1"
    assert "discrete Gaussian" in Product((2,), 1.0, 2.0, 2.0).describe()
    assert "exponent 1.25" in Product((2,), 1.0, 1.25, 2.0).describe()
    assert law.attributed_to("another").source == "another"
    assert np.array_equal(law.sample(np.random.default_rng(1)), law.sample(np.random.default_rng(1)))
    assert law.sample(np.random.default_rng(1)).shape == (2, 3)


BAD = [0.0, -1.0, math.nan, math.inf, "1", None, True, [1.0]]


@pytest.mark.parametrize("name", ["step", "exponent", "scale"])
def test_bad_input(name):
    good = {"shape": (2,), "step": 1.0, "exponent": 1.5, "scale": 2.0}
    for bad in [*(BAD if name != "exponent" else BAD[:-2]), *([0.9, 2.1] if name == "exponent" else [])]:
        with pytest.raises(InvalidInput, match=name):
            Product(**{**good, name: bad})
    for scale in (1e-5, 1e7):
        with pytest.raises(InvalidInput, match="scale_in_steps"):
            Product((2,), 1.0, 1.5, scale)
    with pytest.raises(InvalidInput, match="shape"):
        Product((0,), 1.0, 1.5, 2.0)
    with pytest.raises(InvalidInput, match="weights"):
        Product((2,), 1.0, 1.5, 2.0).expected_squared_error([1.0, -1.0])
    with pytest.raises(InvalidInput, match="rng"):
        Product((2,), 1.0, 1.5, 2.0).sample(7)
