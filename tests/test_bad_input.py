"""One table of bad input, applied to every public constructor and function that takes a number or an array."""

import numpy as np
import pytest

from matrixdp import Budget, calibrate
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Dense, Diagonal, Isotropic, Kronecker, OverTime, Symmetric
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import (
    L1,
    Counts,
    Entrywise,
    Frobenius,
    OneColumn,
    OneRow,
    Participation,
    RankOne,
    Vertices,
)

BAD_NUMBERS = [np.nan, np.inf, -np.inf, -1.0, 0.0, "1", None, True, 1j, [1.0, np.nan], [], {}, np.array([[None]])]
POSITIVE = {
    "Budget epsilon": lambda x: Budget(x, 1e-6),
    "Budget delta": lambda x: Budget(1.0, x).with_delta("this test"),
    "Frobenius": Frobenius,
    "Entrywise": Entrywise,
    "OneColumn": OneColumn,
    "OneRow": lambda x: OneRow(radius=x),
    "OneRow box": lambda x: OneRow(low=0.0, high=x),
    "Counts cells": Counts,
    "Counts bound": lambda x: Counts(1, x),
    "L1": L1,
    "L1 step": lambda x: L1(1.0, step=x if x is not None else "1"),
    "RankOne": RankOne,
    "Participation clip": Participation,
    "Participation times": lambda x: Participation(1.0, times=x),
    "Participation separation": lambda x: Participation(1.0, separation=0 if x is None else x),
    "OverTime std": lambda x: OverTime(np.ones(2), (3, 1), x),
    "Isotropic": lambda x: Isotropic((2, 2), x),
    "Symmetric": lambda x: Symmetric(3, x),
    "Symmetric dimension": lambda x: Symmetric(x, 1.0),
}


@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", POSITIVE)
def test_numbers(name, bad):
    with pytest.raises(InvalidInput) as caught:
        POSITIVE[name](bad)
    assert str(caught.value)


@pytest.mark.parametrize("bad", [1.0, 2.0, 1.5])
def test_delta_is_below_one(bad):
    with pytest.raises(InvalidInput, match="delta"):
        Budget(1.0, bad)


BAD_ARRAYS = [
    np.array([[1.0, np.nan]]),
    np.array([[1.0, np.inf]]),
    np.zeros((0, 2)),
    np.zeros((2, 2, 2)),
    np.array([["a", "b"]]),
    np.array([[object(), object()]]),
    np.array([[1j, 2]]),
    np.array([[True, False]]),
    "matrix",
    None,
]
ARRAYS = {
    "Diagonal": Diagonal,
    "Dense": Dense,
    "Kronecker rows": lambda a: Kronecker(a, np.ones(2)),
    "Kronecker columns": lambda a: Kronecker(np.ones(2), a),
    "Spectrum variances": Spectrum,
    "Spectrum directions": lambda a: Spectrum(np.ones(2), np.zeros((2, 2)) if a is None else a),
    "Vertices": Vertices,
    "OverTime": lambda a: OverTime(a, (2, 1)),
    "workload": lambda a: Gaussian(Isotropic((1, 2), 1.0)).expected_squared_error(workload="x" if a is None else a),
    "weights": lambda a: Gaussian(Isotropic((1, 2), 1.0)).expected_squared_error("x" if a is None else a),
}


@pytest.mark.parametrize("bad", BAD_ARRAYS, ids=lambda a: repr(a)[:30].partition(" at 0x")[0])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name, bad):
    with pytest.raises(InvalidInput):
        ARRAYS[name](bad)


@pytest.mark.parametrize("bad", [(0, 2), (2, -1), (2.0, 2), (1, 2, 0), "22", None, 4, (True, 2), (np.nan, 2)])
def test_shapes(bad):
    with pytest.raises(InvalidInput, match="shape"):
        calibrate("analytic", shape=bad, sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6))


@pytest.mark.parametrize(
    "arguments",
    [{"sensitivity": 1.0}, {"budget": (1.0, 1e-6)}, {"budget": 1.0}, {"sensitivity": None}, {"budget": None}],
)
def test_wrong_kinds_of_object(arguments):
    given = {"shape": (2, 2), "sensitivity": Frobenius(1.0), "budget": Budget(1.0, 1e-6)} | arguments
    with pytest.raises(InvalidInput, match=next(iter(arguments))):
        calibrate("analytic", **given)


def test_a_law_needs_a_covariance():
    with pytest.raises(InvalidInput, match="covariance"):
        Gaussian(np.eye(2))


@pytest.mark.parametrize("bad", [np.nan, -1.0, "1", None, np.array([0.5, np.nan])], ids=repr)
def test_gaussian_profile(bad):
    for call in (
        lambda: gaussian.delta(bad, 1.0),
        lambda: gaussian.delta(1.0, bad),
        lambda: gaussian.epsilon(bad, 1e-6),
        lambda: gaussian.epsilon(1.0, bad),
        lambda: gaussian.mu(bad, 1e-6),
        lambda: gaussian.mu(1.0, bad),
    ):
        with pytest.raises(InvalidInput):
            call()


def test_every_error_is_a_matrixdp_error():
    import matrixdp.errors as errors

    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, MatrixDPError), name
