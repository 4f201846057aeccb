"""Laws drawn from secure entropy: whole, and chunk by chunk."""

import numpy as np
import pytest
from scipy.stats import norm

from matrixdp.distributions import Gaussian, Spherical
from matrixdp.distributions.covariance import Diagonal, Isotropic
from matrixdp.errors import InvalidInput

LAW = Gaussian(Isotropic((1000, 30), 2.5))


def variance_score(noise, std):
    """Normal under the law; noise 2 % short scores beyond 1e-6 on 30,000 entries."""
    return (np.sum((noise / std) ** 2) - noise.size) / np.sqrt(2 * noise.size)


def test_chunks_are_the_law_and_never_repeat():
    chunks = list(LAW.stream(chunk_rows=128))
    assert [len(chunk) for chunk in chunks] == [128] * 7 + [104]
    noise = np.concatenate(chunks)
    threshold = norm.isf(0.5e-6)
    assert abs(variance_score(noise, 2.5)) < threshold
    assert abs(variance_score(0.96 * noise, 2.5)) > threshold
    assert len(np.unique(noise)) > 0.999 * noise.size
    pairs = np.sum(chunks[0] * chunks[1]) / 2.5**2 / np.sqrt(chunks[0].size)
    assert abs(pairs) < threshold
    assert not np.any(noise == np.concatenate(list(LAW.stream(chunk_rows=128))))


def test_chunks_are_added_to_values_that_need_not_fit_into_memory(tmp_path):
    stored = np.lib.format.open_memmap(tmp_path / "values.npy", mode="w+", dtype=np.float64, shape=(1000, 30))
    stored[:] = np.arange(30000.0).reshape(1000, 30)
    stored.flush()
    noisy = np.concatenate(list(LAW.stream(chunk_rows=77, values=stored)))
    assert abs(variance_score(noisy - stored, 2.5)) < norm.isf(0.5e-6)


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(InvalidInput, match=r"i\.i\.d\."):
        Gaussian(Diagonal(np.ones((3, 3)))).stream(1)
    with pytest.raises(InvalidInput, match="chunk_rows"):
        LAW.stream(0)
    with pytest.raises(InvalidInput, match="shape"):
        LAW.stream(10, values=np.zeros((3, 3)))


def test_spherical_radius_from_secure_entropy():
    """Kolmogorov-Smirnov at 1e-6; a radius 20 % short is told apart."""
    from scipy.stats import gengamma, kstest

    law = Spherical((4,), k=4.0, p=1.0, scale=2.0)
    radius = np.array([np.linalg.norm(law.sample()) for _ in range(1500)])
    assert kstest(radius, gengamma(4.0, 1.0, scale=2.0).cdf).pvalue > 1e-6
    assert kstest(0.8 * radius, gengamma(4.0, 1.0, scale=2.0).cdf).pvalue < 1e-6
