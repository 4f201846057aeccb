"""Small synthetic data, shaped like the real."""

import os

import numpy as np
import pytest

from matrixdp_papers import datasets
from matrixdp_papers.studies import mvg, pca, uber_map


@pytest.fixture
def folder():
    found = os.environ.get(datasets.VARIABLE)
    if not found:
        pytest.skip(f"NO DATA: set {datasets.VARIABLE} to the folder with the public data sets to run this test")
    return found


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def small_mvg(rng):
    tests = rng.random((60, 3))
    liver = np.c_[tests, tests.mean(axis=1)]
    return mvg.Data(liver, rng.uniform(-1, 1, (50, 4)) * [1, 0.5, 0.2, 0.2], rng.random((40, 6)))


@pytest.fixture
def small_map(rng):
    rows, columns = np.mgrid[:18, :18]
    intensity = 8 * np.exp(-((rows - 6) ** 2 + (columns - 9) ** 2) / 12)
    counts, *other = (rng.poisson(intensity).astype(float) for _ in range(3))
    return uber_map.Data(counts, tuple(other), intensity > 0.001, int(counts.sum()))


@pytest.fixture
def small_tasks(rng):
    label = np.arange(300) % 3
    records = rng.normal(size=(300, 24)) * np.linspace(1, 0.1, 24) + 3 * np.eye(24)[label]
    return [pca.Task("synthetic", records, label)]
