"""Values of any number of dimensions, and scalars: the same noise as for a vector or matrix of the same entries."""

import math

import numpy as np
import pytest

from matrixdp import (
    Budget,
    Certificate,
    Counts,
    Entrywise,
    Frobenius,
    OneColumn,
    OneRow,
    Participation,
    RankOne,
    Vertices,
    calibrate,
    certify,
    compare,
    release,
)
from matrixdp.audit import audit_law
from matrixdp.cli import files, specs
from matrixdp.distributions import Gaussian, Product
from matrixdp.distributions.covariance import Diagonal, Isotropic, Kronecker
from matrixdp.errors import InvalidInput, NotCertifiable

BUDGET = Budget(1.0, 1e-6)
SHAPE = (3, 4, 5)
BOUNDS = np.linspace(0.1, 1.0, 60).reshape(SHAPE)
# each set, and the matrix as which it reads a value of this shape
SETS = {
    "frobenius": (Frobenius(1.0), (3, 20), Frobenius(1.0)),
    "counts": (Counts(2), (3, 20), Counts(2)),
    "entrywise": (Entrywise(BOUNDS), (3, 20), Entrywise(BOUNDS.reshape(3, 20))),
    "row": (OneRow(1.0), (3, 20), OneRow(1.0)),
    "row in a box": (OneRow(0.0, np.arange(1.0, 21.0)), (3, 20), OneRow(0.0, np.arange(1.0, 21.0))),
    "column in a box": (OneColumn(0.0, np.arange(1.0, 13.0)), (12, 5), OneColumn(0.0, np.arange(1.0, 13.0))),
    "vertices": (Vertices([BOUNDS]), (3, 20), Vertices(BOUNDS.reshape(3, 20))),
}


@pytest.mark.parametrize(
    "sensitivity", [Participation(1.0, times=6), Participation(1.0, separation=2, cyclic=True), OneRow(1.0)]
)
@pytest.mark.parametrize(
    "covariance", [Isotropic((2, 12), 1.0), Kronecker(np.ones(4), np.ones(6)), Diagonal(np.ones(24))]
)
def test_noise_arranged_in_other_rows_is_refused_where_rows_count(sensitivity, covariance):
    """Six steps of a record are not the two rows of the noise: the norm would be sqrt(2), where it is sqrt(6)."""
    with pytest.raises(NotCertifiable, match="reads values of shape"):
        certify(Gaussian(covariance).reshaped((6, 4)), sensitivity)


@pytest.mark.parametrize("name", SETS)
def test_the_guarantee_is_that_of_the_matrix_of_the_same_entries(name):
    sensitivity, matrix, same = SETS[name]
    law = calibrate("auto", shape=SHAPE, sensitivity=sensitivity, budget=BUDGET)
    flat = calibrate("auto", shape=matrix, sensitivity=same, budget=BUDGET)
    assert law.shape == SHAPE
    certificate, other = certify(law, sensitivity), certify(flat, same)
    assert (certificate.mu, certificate.exact) == (other.mu, other.exact)
    np.testing.assert_array_equal(law.standard_error.ravel(), flat.standard_error.ravel())
    assert sensitivity.contains(certificate.witness)
    assert not sensitivity.contains(1.01 * certificate.witness)
    np.testing.assert_array_equal(certificate.witness.ravel(), other.witness.ravel())
    for found in ("frobenius_radius", "largest_entry", "changed_entries"):
        assert getattr(sensitivity, found)(SHAPE) == getattr(same, found)(matrix)


@pytest.mark.parametrize("name", SETS)
def test_releases_and_certificates_keep_the_shape(name):
    sensitivity, _, _ = SETS[name]
    value = np.arange(60.0).reshape(SHAPE)
    out = release(value, sensitivity, BUDGET)
    assert out.value.shape == out.standard_error.shape == out.interval(0.9).low.shape == SHAPE
    near = out.interval(1 - 1e-9, simultaneous=True)
    assert np.all((near.low <= value) & (value <= near.high))
    back = Certificate.from_json(out.certificate.to_json())
    assert back.shape == SHAPE
    assert back.verify()
    assert "on 3 x 4 x 5" in str(back)
    assert out.linear(np.ones(SHAPE)).value == pytest.approx(np.sum(out.value))


def test_entries_stay_in_their_place():
    stds = np.geomspace(1e-3, 1e3, 24)
    law = Gaussian(Diagonal(stds.reshape(4, 6)), value_shape=(2, 2, 6))
    value = np.arange(24.0).reshape(2, 2, 6)
    out = release(value, Frobenius(1e-7), BUDGET, law)
    assert np.all(np.abs(out.value - value) < 9 * stds.reshape(2, 2, 6))
    assert np.any(np.abs(out.value - value) > stds[12])
    np.testing.assert_array_equal(law.standard_error.ravel(), stds)
    assert law.expected_squared_error(np.eye(1, 24).reshape(2, 2, 6)) == pytest.approx(stds[0] ** 2)
    assert law.sample(np.random.default_rng(1)).shape == law.sample().shape == (2, 2, 6)


@pytest.mark.parametrize("mechanism", ["analytic", "laplace", "discrete", "imgm", "idn", "l2", "matrix-mechanism"])
@pytest.mark.parametrize("shape", [(), (2, 3, 2), (1, 1, 1, 4)])
def test_every_mechanism_proposes_noise_of_the_shape(mechanism, shape):
    if mechanism == "idn" and not shape:
        pytest.skip("idn is for matrices")
    options = {"workload": np.eye(math.prod(shape))} if mechanism == "matrix-mechanism" else {}
    law = calibrate(mechanism, shape=shape, sensitivity=Counts(1), budget=BUDGET, **options)
    assert law.shape == law.sample().shape == law.standard_error.shape == shape
    certificate = certify(law, Counts(1))
    assert certificate.meets(BUDGET)
    assert certificate.witness.shape == shape
    assert Certificate.from_json(certificate.to_json()).verify()


@pytest.mark.parametrize("value", [7.0, 7, np.float64(7.0), np.array(7)])
@pytest.mark.parametrize("mechanism", ["auto", "laplace"])
def test_a_scalar_is_a_value(value, mechanism):
    out = release(value, Counts(1), BUDGET, mechanism)
    assert np.shape(out.value) == out.certificate.shape == ()
    assert abs(float(out.value) - 7) < 60
    found = out.interval(1 - 1e-9)
    assert float(found.low) <= 7 <= float(found.high)
    assert Certificate.from_json(out.certificate.to_json()).verify()
    assert "on one number" in str(out.certificate)


def test_weights_of_the_value_s_shape_are_read_with_it():
    weights = np.linspace(1.0, 2.0, 60).reshape(SHAPE)
    law = calibrate("optimal", shape=SHAPE, sensitivity=Frobenius(1.0), budget=BUDGET, weights=weights)
    flat = calibrate("optimal", shape=(60,), sensitivity=Frobenius(1.0), budget=BUDGET, weights=weights.ravel())
    np.testing.assert_allclose(law.standard_error.ravel(), flat.standard_error, rtol=1e-9)
    rows = compare(SHAPE, Counts(1), BUDGET, mechanisms=["analytic", "laplace"])
    assert rows.rows[0].expected_squared_error == pytest.approx(60 * rows.rows[0].root_mean_square ** 2)


def test_tensors_and_dask_arrays():
    torch, array = pytest.importorskip("torch"), pytest.importorskip("dask.array")
    value = np.arange(24.0).reshape(2, 3, 4)
    covariance = Kronecker(np.eye(2) + 0.5, np.eye(12) + 0.5)
    out = release(torch.tensor(value), Frobenius(0.1), BUDGET, Gaussian(covariance, value_shape=(2, 3, 4)))
    assert tuple(out.value.shape) == (2, 3, 4)
    assert release(torch.tensor(3.0), Counts(1), BUDGET).value.ndim == 0
    blocks = array.from_array(value, chunks=(1, 3, 2))
    spread = release(blocks, Frobenius(1.0), BUDGET).value.compute() - value
    assert spread.shape == (2, 3, 4)
    assert 0.1 < np.std(spread) / 4.2 < 3
    assert np.shape(release(array.from_array(np.array(3.0)), Counts(1), BUDGET).value.compute()) == ()
    with pytest.raises(InvalidInput, match="reshape"):
        release(blocks, Frobenius(0.1), BUDGET, Gaussian(Diagonal(np.linspace(1, 2, 24)), value_shape=(2, 3, 4)))


def test_audits_see_the_same_noise():
    law = Gaussian(Isotropic((6,), 1.0), value_shape=(1, 2, 3))
    assert audit_law(law, Frobenius(2.0), BUDGET, samples=2000, rng=np.random.default_rng(1)).rejected


def test_what_does_not_fit_is_refused():
    flat = Gaussian(Isotropic((60,), 100.0), value_shape=SHAPE)
    with pytest.raises(NotCertifiable, match=r"reads values of shape \(3, 4, 5\) as \(3, 20\)"):
        certify(flat, OneRow(1.0))
    with pytest.raises(InvalidInput, match="rows and columns"):
        certify(Product((), 1.0, 1.0, 1.0), OneRow(1.0))
    with pytest.raises(InvalidInput, match="square"):
        release(np.zeros((2, 2, 2)), RankOne(1.0), BUDGET)
    with pytest.raises(InvalidInput, match="value_shape must have 60 entries"):
        Gaussian(Isotropic((60,), 1.0), value_shape=(3, 4))
    with pytest.raises(InvalidInput, match="bound must have shape"):
        release(np.zeros((3, 5, 4)), Entrywise(BOUNDS), BUDGET)
    with pytest.raises(InvalidInput, match="empty"):
        release(np.zeros((3, 0, 4)), Counts(1), BUDGET)
    with pytest.raises(InvalidInput, match="shape"):
        calibrate("analytic", shape=7, sensitivity=Counts(1), budget=BUDGET)
    with pytest.raises(InvalidInput, match="1 or above"):
        calibrate("analytic", shape=(2, 0, 2), sensitivity=Counts(1), budget=BUDGET)


def test_a_changed_shape_does_not_verify():
    out = release(np.zeros((2, 3, 4)), OneRow(1.0), BUDGET)
    document = out.certificate.to_dict()
    assert document["law"]["value_shape"] == [2, 3, 4]
    text = out.certificate.to_json()
    compact = text.replace(" ", "").replace("\n", "")
    changed = Certificate.from_json(compact.replace('"value_shape":[2,3,4]', '"value_shape":[2,4,3]'))
    assert not changed.verify()
    assert "value_shape" not in release(np.zeros((2, 3)), OneRow(1.0), BUDGET).certificate.to_dict()["law"]


def test_the_command_line_knows_shapes_and_writes_npy(tmp_path):
    assert specs.shape("3x4x5") == SHAPE
    assert specs.shape("scalar") == ()
    out = release(np.zeros(SHAPE), Counts(1), BUDGET)
    with pytest.raises(InvalidInput, match=r"must end in \.npy"), files.reserved(tmp_path / "a.csv", out.certificate):
        pass
    with files.reserved(tmp_path / "a.npy", out.certificate) as place:
        certificate = place.publish(out.value)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), out.value)
    assert certificate.verify()
