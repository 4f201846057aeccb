"""Laws drawn from secure entropy: whole, and chunk by chunk."""

import numpy as np
import pytest
from scipy.stats import chi2, norm

from matrixdp.distributions import Gaussian, Spherical
from matrixdp.distributions.covariance import Diagonal, Isotropic
from matrixdp.errors import InvalidInput

LAW = Gaussian(Isotropic((1000, 30), 2.5))
FALSE_ALARM = 1e-7


def fits(noise, std):
    """Whether the sum of squares is one of a chi-square; 5 % less noise in 30,000 entries passes once in 1e13."""
    low, high = chi2.isf([1 - FALSE_ALARM / 2, FALSE_ALARM / 2], noise.size)
    return low < np.sum((noise / std) ** 2) < high


def test_chunks_are_the_law_and_never_repeat():
    chunks = list(LAW.stream(chunk_rows=128))
    assert [len(chunk) for chunk in chunks] == [128] * 7 + [104]
    noise = np.concatenate(chunks)
    assert fits(noise, 2.5)
    assert not fits(0.95 * noise, 2.5)
    assert len(np.unique(noise)) > 0.999 * noise.size
    pairs = np.sum(chunks[0] * chunks[1]) / 2.5**2 / np.sqrt(chunks[0].size)
    assert abs(pairs) < norm.isf(FALSE_ALARM / 2)
    again = np.concatenate(list(LAW.stream(chunk_rows=128)))
    assert np.mean(noise == again) < 1e-3  # on a grid of 2^-28, one entry in 1e9 is the same by chance


def test_chunks_are_added_to_values_that_need_not_fit_into_memory(tmp_path):
    stored = np.lib.format.open_memmap(tmp_path / "values.npy", mode="w+", dtype=np.float64, shape=(1000, 30))
    stored[:] = np.arange(30000.0).reshape(1000, 30)
    stored.flush()
    noisy = np.concatenate(list(LAW.stream(chunk_rows=77, values=stored)))
    assert fits(noisy - stored, 2.5)


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(InvalidInput, match=r"i\.i\.d\."):
        Gaussian(Diagonal(np.ones((3, 3)))).stream(1)
    with pytest.raises(InvalidInput, match="chunk_rows"):
        LAW.stream(0)
    with pytest.raises(InvalidInput, match="shape"):
        LAW.stream(10, values=np.zeros((3, 3)))


def test_spherical_radius_from_secure_entropy():
    """Kolmogorov-Smirnov; a radius 20 % short is told apart."""
    from scipy.stats import gengamma, kstest

    law = Spherical((4,), k=4.0, p=1.0, scale=2.0)
    radius = np.array([np.linalg.norm(law.sample()) for _ in range(1500)])
    assert kstest(radius, gengamma(4.0, 1.0, scale=2.0).cdf).pvalue > FALSE_ALARM
    assert kstest(0.8 * radius, gengamma(4.0, 1.0, scale=2.0).cdf).pvalue < FALSE_ALARM
