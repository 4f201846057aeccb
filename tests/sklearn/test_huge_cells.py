"""One huge cell changes no error and no warning."""

import warnings

import numpy as np
import pytest

from matrixdp import Budget
from matrixdp.errors import InvalidInput
from matrixdp.sklearn import (
    PrivateCovariance,
    PrivateKBins,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePCA,
    PrivateStandardScaler,
)
from matrixdp.tables import release_means, release_moments

APPROXIMATE, PURE = Budget(1.0, 1e-6), Budget(1.0, 0.0)
BOUNDS = {"low": 0.0, "high": 0.1}
FITS = {
    "scaler": lambda x, budget: PrivateStandardScaler(**BOUNDS, budget=budget).fit(x),
    "bins": lambda x, budget: PrivateKBins(**BOUNDS, budget=budget).fit(x),
    "feature": lambda x, budget: PrivateLinearRegression(
        **BOUNDS, target_low=0.0, target_high=0.1, budget=budget
    ).fit(x[:, 1:], x[:, 0]),
    "target": lambda x, budget: PrivateLinearRegression(
        **BOUNDS, target_low=0.0, target_high=0.1, budget=budget
    ).fit(x[:, :1], x[:, 1]),
    "classes": lambda x, budget: PrivateLogisticRegression(**BOUNDS, classes=[0, 1], budget=budget).fit(
        x, np.arange(len(x)) % 2
    ),
    "components": lambda x, budget: PrivatePCA(1, norm=1.0, center=-1e29, budget=budget).fit(x),
    "covariance": lambda x, budget: PrivateCovariance(norm=1.0, center=-1e29, budget=budget).fit(x),
}  # fmt: skip


def heard(fit, records, budget):
    """The warnings and the error, if there is one."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            fit(records, budget)
        except InvalidInput as error:
            return sorted({str(one.message) for one in found}), str(error)
    return sorted({str(one.message) for one in found}), None


@pytest.mark.parametrize("budget", [APPROXIMATE, PURE], ids=["approximate", "pure"])
@pytest.mark.parametrize("name", FITS)
def test_a_huge_cell_is_clipped_in_silence(name, budget):
    records = np.random.default_rng(0).random((60, 2)) * 0.1
    huge = records.copy()
    huge[7, 1] = 1.7e308
    assert heard(FITS[name], huge, budget) == heard(FITS[name], records, budget)


def test_bounds_too_far_apart_are_refused_whatever_the_records_are():
    for cell in (0.0, 1e308):
        with pytest.raises(InvalidInput, match="low and high must lie between"):
            PrivateKBins(low=-1e308, high=1e308, budget=APPROXIMATE).fit(np.full((60, 2), cell))
        with pytest.raises(InvalidInput, match="finite"):
            release_means(np.full(60, cell), -1e308, 1e308, budget=APPROXIMATE)
        with pytest.raises(InvalidInput, match="finite"):
            release_moments(np.full((60, 2), cell), -1e308, 1e308, budget=APPROXIMATE)


@pytest.mark.parametrize("budget", [APPROXIMATE, PURE], ids=["approximate", "pure"])
def test_a_center_far_off_is_refused_whatever_the_records_are(budget):
    for cell in (0.5, 1.7e308):
        with pytest.raises(InvalidInput, match="center must lie within"):
            PrivateCovariance(norm=1.0, center=-1e307, budget=budget).fit(np.full((60, 2), cell))


def test_a_label_that_cannot_be_compared_is_not_quoted():
    class Label:
        def __eq__(self, other):
            raise RuntimeError("Canary-7")

        __hash__ = None

    labels = np.array([Label()] * 20, dtype=object)
    model = PrivateLogisticRegression(low=-1, high=1, classes=[0, 1], epsilon=1.0, delta=1e-6)
    with pytest.raises(InvalidInput, match="comparing y with the classes") as refused:
        model.fit(np.zeros((20, 2)), labels)
    assert "Canary-7" not in str(refused.value)
