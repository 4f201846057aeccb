"""Releases of Dask arrays, without a cluster."""

import pickle
import tracemalloc

import dask
import dask.array as da
import numpy as np
import pytest
from scipy.stats import chi2

from matrixdp import Budget, Ledger, calibrate
from matrixdp.backends import dask as noise
from matrixdp.backends.numpy import draw
from matrixdp.distributed import release
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Diagonal, Kronecker
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.pipeline import sized_for_budget
from matrixdp.privacy.certificate import certify
from matrixdp.secure import discrete, kernels
from matrixdp.secure.entropy import Key
from matrixdp.secure.kernels import add_noise
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, OneRow, RankOne

BUDGET = Budget(1.0, 1e-6)
ROTATION = np.linalg.qr(np.random.default_rng(7).normal(size=(3, 3)))[0]
VALUES = np.random.default_rng(2).normal(size=(300, 40))


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def keys(monkeypatch):
    """The release keys, in the order in which they are made."""
    made = []

    def make():
        made.append(Key())
        return made[-1]

    monkeypatch.setattr(
        noise, "Key", type("Recorded", (), {"__new__": lambda cls: make(), "from_bytes": Key.from_bytes})
    )
    return made


def blocks(array):
    """Every block's index, and its place in the array."""
    for i, rows in enumerate(da.core.slices_from_chunks(array.chunks)):
        yield tuple(int(k) for k in np.unravel_index(i, array.numblocks)), rows


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(300, 40), (12000,)])
def test_each_block_is_the_kernels_noise_under_its_derived_key(keys, shape, dtype):
    values = VALUES.reshape(shape).astype(dtype)
    array = da.from_array(values, chunks=(128, 30)[: len(shape)])
    out = release(array, Frobenius(2.0), BUDGET)
    got = out.value.compute()
    std, grid = out.noise.covariance.std, out.certificate.drawing.grid
    assert got.dtype == out.value.dtype == dtype
    for index, place in blocks(array):
        want = add_noise(values[place], std, grid, keys[0].derive(*index))
        assert np.array_equal(got[place], want)
        assert not np.array_equal(got[place], values[place])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
@pytest.mark.parametrize(
    ("budget", "mechanism"), [(BUDGET, "laplace"), (BUDGET, "discrete"), (Budget(1.0, 0), "laplace")], ids=str
)
def test_discrete_noise_is_that_of_one_machine_on_each_block(keys, budget, mechanism, dtype):
    values = np.random.default_rng(6).integers(-50, 50, (300, 40)).astype(dtype)
    values = values + np.asarray(0.5 if dtype != np.int64 else 0, dtype)  # to be floored
    array = da.from_array(values, chunks=(128, 30))
    out = release(array, Counts(2), budget, mechanism)
    got = out.value.compute()
    assert np.array_equal(got, out.value.compute())
    assert got.dtype == out.value.dtype == (np.float64 if dtype == np.int64 else dtype)
    exact = budget.delta == 0
    for index, place in blocks(array):
        noise_alone = discrete.noise(
            values[place].shape, out.noise.exponent, out.noise.scale_in_steps, keys[0].derive(*index), exact=exact
        )
        assert np.array_equal(got[place], np.floor(values[place]) + noise_alone)
    alone = release(values, Counts(2), budget, mechanism)
    assert out.certificate.to_dict() == alone.certificate.to_dict()


def test_a_block_that_does_not_fit_the_grid_of_discrete_noise_is_refused():
    for bad in (2.0**60, np.nan):
        out = release(da.full((4, 4), bad, chunks=2), Counts(1), BUDGET, "laplace")
        with pytest.raises(InvalidInput, match="stays spent"):
            out.value.compute()


WIDTHS = np.linspace(0.5, 3.0, 40)
UNEVEN = {
    "Diagonal": (Entrywise(np.outer(np.linspace(1, 2, 300), WIDTHS)), "optimal", {}),
    "Kronecker, columns": (OneRow(low=0.0, high=WIDTHS), "optimal", {}),
    "Kronecker, rows": (Frobenius(1.0), "idn", {"row_utility": np.linspace(1, 90, 300)}),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_independent_noise_is_that_of_one_machine_on_each_block(keys, monkeypatch, name, dtype):
    sensitivity, mechanism, options = UNEVEN[name]
    values = VALUES.astype(dtype)
    array = da.from_array(values, chunks=(128, 30))
    out = release(array, sensitivity, BUDGET, mechanism, accept_violation=True, **options)
    got = out.value.compute()
    assert got.dtype == out.value.dtype == dtype
    std = np.sqrt(out.noise.covariance.variances())
    assert std.max() > 1.5 * std.min()
    for index, place in blocks(array):
        # one machine, with this block as its value and the block's key as its key
        part = Gaussian(_part(out.noise.covariance, place))
        monkeypatch.setattr(kernels, "Key", lambda index=index: keys[0].derive(*index))
        want = draw(values[place].astype(np.float64), part, out.certificate.drawing)
        assert np.array_equal(got[place], want.astype(dtype))
        # noise of less than half a digit of float32 leaves an entry as it was, one in 1e9
        assert np.count_nonzero(got[place] == values[place]) <= 2
    alone = calibrate(mechanism, shape=values.shape, sensitivity=sensitivity, budget=BUDGET, **options)
    assert out.certificate.to_dict() == sized_for_budget(alone, sensitivity, BUDGET).to_dict()


def _part(covariance, place):
    if isinstance(covariance, Diagonal):
        return Diagonal(covariance.std[place])
    return Kronecker(covariance.rows.variances[place[0]], covariance.columns.variances[place[1]])


def test_uneven_noise_has_the_standard_deviations_of_its_law():
    """Chi-squared over the 40 columns of a tall matrix, false alarm 1e-6; transposed factors would fail."""
    shape = (4000, 40)
    out = release(da.zeros(shape, chunks=(1000, 15)), OneRow(low=0.0, high=WIDTHS), BUDGET, "optimal")
    noise_drawn = out.value.compute()
    variances = out.noise.covariance.variances()[0]
    low, high = chi2.ppf([1e-6 / 80, 1 - 1e-6 / 80], shape[0])
    ratio = np.sum(noise_drawn**2, axis=0) / variances
    assert np.all((low < ratio) & (ratio < high))
    swapped = np.sum(noise_drawn**2, axis=0) / variances[::-1]
    assert not np.all((low < swapped) & (swapped < high))


def test_uneven_noise_refuses_what_does_not_fit_and_empty_blocks_pass():
    values = np.zeros((6, 40))
    values[5, 2] = np.inf
    array = da.from_array(values, chunks=((3, 0, 3), (40,)))
    out = release(array, OneRow(low=0.0, high=WIDTHS), BUDGET, "optimal").value
    assert out[:3].compute().shape == (3, 40)
    with pytest.raises(InvalidInput, match=r"block \(2, 0\) of value: .*stays spent"):
        out.compute()


def test_whole_numbers_become_floats(keys):
    out = release(da.arange(1000, chunks=400), Frobenius(1.0), BUDGET)
    want = add_noise(np.arange(400.0), out.noise.covariance.std, out.certificate.drawing.grid, keys[0].derive(0))
    assert np.array_equal(out.value.compute()[:400], want)


def test_computing_twice_or_in_parts_gives_one_noise_and_two_releases_give_two():
    array = da.from_array(VALUES, chunks=(100, 40))
    first, second = (release(array, Frobenius(1.0), BUDGET).value for _ in range(2))
    once = first.compute()
    assert np.array_equal(once, first.compute())
    assert np.array_equal(once[150:210, 3], first[150:210, 3].compute())
    assert np.array_equal(once.sum(axis=0), first.rechunk((300, 7)).compute().sum(axis=0))
    assert first.name != second.name
    assert np.mean(once == second.compute()) < 1e-3  # on a grid, one entry in a million is the same by chance
    zeros = release(da.zeros((300, 40), chunks=(100, 40)), Frobenius(1.0), BUDGET).value.compute()
    assert np.mean(zeros[:100] == zeros[100:200]) < 2e-3  # nor do two blocks share theirs


def test_the_certificate_covers_what_the_workers_do():
    out = release(da.zeros((300, 40), chunks=100), OneRow(radius=2.0), BUDGET)
    certificate, sampling = out.certificate, out.certificate.drawing
    assert certificate.meets(BUDGET)
    assert sampling.total_variation >= 40 * sampling.grid.total_variation
    assert sampling.enlargement >= np.sqrt(40) * sampling.grid.displacement
    assert certificate.mu >= 2.0 / out.noise.covariance.std + sampling.enlargement
    assert certificate.to_dict() == certify(out.noise, OneRow(radius=2.0), BUDGET, sampling).to_dict()
    bare = calibrate("analytic", shape=(300, 40), sensitivity=OneRow(radius=2.0), budget=BUDGET)
    assert not certify(bare, OneRow(radius=2.0), BUDGET, sampling).meets(BUDGET)  # without room for the grid


def test_the_budget_is_spent_once_before_anything_is_computed(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(1.2, 1e-6))
    touched = []
    array = da.from_array(VALUES, chunks=100).map_blocks(lambda block: touched.append(1) or block, meta=VALUES[:0])
    out = release(array, OneRow(radius=1.0), BUDGET, ledger=ledger, note="features")
    assert (touched, len(ledger.history())) == ([], 1)
    out.value.compute()
    out.value.compute()
    assert len(ledger.history()) == 1
    with pytest.raises(BudgetExceeded):
        release(array, OneRow(radius=1.0), BUDGET, ledger=ledger)
    assert len(ledger.history()) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_block_that_does_not_fit_fails_the_release_which_stays_spent(tmp_path, bad):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    values = VALUES.copy()
    values[250, 3] = bad
    out = release(da.from_array(values, chunks=(100, 40)), OneRow(radius=1.0), BUDGET, ledger=ledger)
    with pytest.raises(InvalidInput, match=r"block \(2, 0\) of value: .*stays spent") as caught:
        out.value.compute()
    assert "e+30" not in str(caught.value)
    assert len(ledger.history()) == 1


def test_nothing_of_the_size_of_the_data_is_made_here():
    array = da.zeros((10**7, 100), chunks=(10**5, 100))  # 8 GB, if it were computed
    release(array[:1000], OneRow(radius=1.0), BUDGET)  # what is loaded once
    tracemalloc.start()
    release(array, OneRow(radius=1.0), BUDGET)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6


def test_a_key_travels_in_silence(keys):
    out = release(da.from_array(VALUES, chunks=100), Frobenius(1.0), BUDGET)
    graph = dict(out.value.__dask_graph__())
    task = graph[(out.value.name, 1, 0)]
    key = next(part for part in task if isinstance(part, noise.BlockKey))
    secret = keys[0].derive(1, 0).expose()
    assert key.open().expose() == secret
    assert secret in pickle.dumps(key)  # the search below can find it
    assert pickle.loads(pickle.dumps(key)).open().expose() == secret
    for text in (repr(key), str(key), f"{key}", repr(graph), dask.base.tokenize(key), repr(out.value), out.value.name):
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text
    other = noise.BlockKey("name", bytes(32))
    assert dask.base.tokenize(other) == dask.base.tokenize(noise.BlockKey("name", secret))  # not even hashed
    assert keys[0].expose() not in pickle.dumps(key)  # a worker learns the keys of its own blocks only


@pytest.mark.parametrize(
    ("value", "sensitivity", "options", "message"),
    [
        (da.zeros((9, 4)), Frobenius(1.0), {"rng": np.random.default_rng(0)}, "rng"),
        (da.zeros((4, 4)), RankOne(1.0), {}, "RankOne"),
        (dask.delayed(np.zeros)(4), Frobenius(1.0), {}, "must be a Dask array"),
        (da.zeros((4, 4), dtype=complex), Frobenius(1.0), {}, "real numbers"),
        (da.zeros((4, 4, 0)), Frobenius(1.0), {}, "shape"),
        (da.zeros(9)[da.zeros(9) > 0], Frobenius(1.0), {}, "known shape"),
        (da.zeros((9, 4)), Frobenius(1.0), {"mechanism": "l2", "accept_violation": True}, "block by block"),
        (
            da.zeros((3, 3)),
            Frobenius(1.0),
            {"mechanism": "udn", "row_utility": np.ones(3), "row_directions": ROTATION},
            "block by block",
        ),
    ],
)
def test_what_cannot_be_released_in_blocks_is_refused_and_costs_nothing(tmp_path, value, sensitivity, options, message):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    with pytest.raises(InvalidInput, match=message):
        release(value, sensitivity, BUDGET, ledger=ledger, **options)
    assert len(ledger.history()) == 0


def test_an_array_in_memory_goes_the_usual_way():
    out = release(VALUES, Frobenius(1.0), BUDGET)
    assert isinstance(out.value, np.ndarray)


def test_a_block_of_another_shape_than_declared_is_refused():
    wrong = da.from_delayed(dask.delayed(np.zeros)((7, 1)), shape=(2, 1), dtype=np.float64)
    out = release(wrong, Frobenius(1.0), Budget(1.0, 1e-6), "analytic")
    with pytest.raises(InvalidInput, match="was declared"):
        out.value.compute()


def test_a_release_that_holds_records_and_keys_is_not_pickled():
    out = release(da.zeros((4, 2)), Frobenius(1.0), Budget(1.0, 1e-6), "analytic")
    with pytest.raises(TypeError, match="records and keys"):
        pickle.dumps(out)
