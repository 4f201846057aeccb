"""Gram matrices against explicit queries, and the closed form for exchangeable tasks against the solver."""

import itertools
import math

import numpy as np
import pytest

from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Dense, Diagonal, Isotropic, Kronecker, Symmetric
from matrixdp.errors import InvalidInput, NotApplicable, NumericalFailure
from matrixdp.mechanisms.matrix_mechanism import workload_error
from matrixdp.mechanisms.solvers import workloads
from matrixdp.mechanisms.solvers.design import solve
from matrixdp.mechanisms.solvers.workloads import (
    Workload,
    all_ranges,
    given,
    identity,
    marginals,
    prefix,
    solve_exchangeable,
    tensor,
    total,
    union,
)


def gram(rows):
    return np.asarray(rows).T @ np.asarray(rows)


def prefix_rows(n):
    return np.tril(np.ones((n, n)))


def range_rows(n):
    return [[low <= i <= high for i in range(n)] for low in range(n) for high in range(low, n)]


def marginal_rows(shape, orders):
    """One query for each marginal and each of its cells, written out on the flattened histogram."""
    cells = list(itertools.product(*map(range, shape)))
    rows = []
    for order in orders:
        for margin in itertools.combinations(range(len(shape)), order):
            for values in itertools.product(*(range(shape[axis]) for axis in margin)):
                rows.append([all(cell[a] == v for a, v in zip(margin, values, strict=True)) for cell in cells])
    return np.array(rows, dtype=float)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_one_axis(n):
    np.testing.assert_array_equal(identity(n).gram(), np.eye(n))
    np.testing.assert_array_equal(total(n).gram(), np.ones((n, n)))
    np.testing.assert_array_equal(prefix(n).gram(), gram(prefix_rows(n)))
    np.testing.assert_array_equal(all_ranges(n).gram(), gram(np.array(range_rows(n), dtype=float)))
    rows = np.random.default_rng(0).normal(size=(3, n))
    np.testing.assert_allclose(given(rows).gram(), gram(rows))


def test_products_and_unions():
    rows, columns = prefix(3), all_ranges(4)
    both = tensor(rows, columns)
    assert (both.shape, both.cells, len(both.terms)) == ((3, 4), 12, 1)
    np.testing.assert_array_equal(both.gram(), gram(np.kron(prefix_rows(3), np.array(range_rows(4), dtype=float))))
    either = union(both, tensor(total(3), identity(4)))
    np.testing.assert_array_equal(either.gram(), both.gram() + np.kron(np.ones((3, 3)), np.eye(4)))
    cube = tensor(either, total(2))  # a product of sums is a sum of products
    np.testing.assert_array_equal(cube.gram(), np.kron(either.gram(), np.ones((2, 2))))


@pytest.mark.parametrize(
    ("shape", "orders"), [((4,), [1]), ((3, 4), [1]), ((3, 4), [0, 2]), ((2, 3, 4), [1, 2]), ((2, 1, 3), [0, 1, 2, 3])]
)
def test_marginals(shape, orders):
    workload = marginals(shape, orders)
    np.testing.assert_array_equal(workload.gram(), gram(marginal_rows(shape, orders)))
    multiplicity = [
        math.prod(side - 1 if varies else 1 for side, varies in zip(shape, space, strict=True))
        for space in np.ndindex((2,) * len(shape))
    ]
    spectrum = np.sort(np.repeat(workload.spectrum().ravel(), multiplicity))
    np.testing.assert_allclose(spectrum, np.linalg.eigvalsh(workload.gram()), atol=1e-12)


def test_one_order_may_be_given_alone():
    np.testing.assert_array_equal(marginals((2, 3), 1).gram(), marginals((2, 3), [1]).gram())


EXCHANGEABLE = [
    identity(6),
    total(6),
    union(identity(5), total(5)),
    marginals((3, 4), 1),
    marginals((3, 4), [0, 1, 2]),
    marginals((2, 3, 4), 2),
    marginals((3, 1, 2), [1, 2]),
    tensor(identity(3), total(4)),
]


@pytest.mark.parametrize("workload", EXCHANGEABLE, ids=lambda workload: workload.name)
def test_exchangeable_closed_form(workload):
    found, P = solve_exchangeable(workload), workload.gram()
    singular_value_bound = np.sum(np.sqrt(np.maximum(np.linalg.eigvalsh(P), 0))) ** 2 / workload.cells
    assert found.lower_bound == pytest.approx(singular_value_bound, rel=1e-6)
    assert 0 < found.gap <= 1e-6
    assert found.gap == found.value / found.lower_bound - 1
    other = solve(P)
    assert found.lower_bound <= other.value
    assert other.lower_bound <= found.value
    assert other.iterations == 1  # the uniform start is optimal

    dense = found.dense()
    np.testing.assert_allclose(dense.directions.T @ dense.directions, np.eye(workload.cells), atol=1e-14)
    forms = dense.directions**2 @ (1 / dense.variances)
    assert np.max(forms) <= 1
    assert np.min(forms) >= 1 - 1e-9  # every cell uses the whole budget
    values, vectors = np.linalg.eigh(P)
    task = np.sqrt(np.where(values > 1e-12 * values[-1], values, 0))[:, None] * vectors.T
    assert np.sum((task @ dense.directions) ** 2 @ dense.variances) == pytest.approx(found.value, rel=1e-9)


def test_identity_and_total_in_numbers():
    assert solve_exchangeable(identity(10)).value == pytest.approx(10, rel=1e-9)
    assert solve_exchangeable(total(10)).value == pytest.approx(1, rel=1e-6)
    # one-way marginals of an n x n table: P has eigenvalues 2n once, n 2(n-1) times, else 0
    n = 16
    best = (math.sqrt(2 * n) + 2 * (n - 1) * math.sqrt(n)) ** 2 / n**2
    assert solve_exchangeable(marginals((n, n), 1)).value == pytest.approx(best, rel=1e-6)


def test_a_histogram_of_a_million_million_cells():
    found = solve_exchangeable(marginals((100,) * 6, [0, 1, 2, 3]))
    assert found.gap <= 1e-6
    assert found.variances.shape == (2,) * 6
    # the i.i.d. strategy costs tr(P): every query with its number of cells, which is the number of cells of the table
    assert found.value < 1e-3 * 100.0**6 * sum(math.comb(6, order) for order in range(4))


def test_a_looser_tolerance_spares_the_unseen():
    tight, loose = (solve_exchangeable(total(8), tolerance=tolerance) for tolerance in (1e-6, 1e-2))
    assert loose.variances.max() < 1e-3 * tight.variances.max()
    assert loose.gap <= 1e-2
    with pytest.raises(NumericalFailure, match="tolerance"):
        solve_exchangeable(total(8), tolerance=1e-11)


def test_expected_squared_error():
    rng = np.random.default_rng(0)
    covariances = [gram(rng.normal(size=(side + 1, side))) for side in (2, 3)]
    workload = union(tensor(prefix(2), identity(3)), marginals((2, 3), 1))
    exact = np.sum(workload.gram() * np.kron(*covariances))
    assert workload_error(workload, Gaussian(Kronecker(*covariances))) == pytest.approx(exact, rel=1e-12)
    std = rng.uniform(1, 2, (2, 3))
    exact = np.diag(workload.gram()) @ std.ravel() ** 2
    assert workload_error(workload, Gaussian(Diagonal(std))) == pytest.approx(exact, rel=1e-12)
    found = solve(prefix(5).gram())
    assert workload_error(prefix(5), Gaussian(Dense(found.spectrum))) == pytest.approx(found.value, rel=1e-9)
    for other in (Kronecker(*covariances[::-1]), Dense(covariances[0])):
        with pytest.raises(InvalidInput, match=r"histogram of shape \(2, 3\)"):
            workload_error(workload, Gaussian(other))


def test_expected_squared_error_of_symmetric_noise():
    """Against its covariance written out, which takes as many rows as the value has entries."""
    noise = Symmetric(4, 1.3, 0.4)
    workload = union(tensor(prefix(4), all_ranges(4)), marginals((4, 4), 1))
    factor = np.stack([noise.color(row.reshape(4, 4)).ravel() for row in np.eye(16)], axis=1)
    exact = np.sum(workload.gram() * (factor @ factor.T))
    assert workload_error(workload, Gaussian(noise)) == pytest.approx(exact, rel=1e-12)
    assert workload_error(given(np.eye(16)), Gaussian(noise)) == pytest.approx(noise.trace(), rel=1e-12)
    large = workload_error(tensor(prefix(300), prefix(300)), Gaussian(Symmetric(300, 1.0)))
    assert 0 < large < workload_error(tensor(prefix(300), prefix(300)), Gaussian(Isotropic((300, 300), 1.0)))


def test_other_tasks_have_no_closed_form():
    for workload in (prefix(4), all_ranges(3), given(np.eye(3)[:2]), tensor(identity(2), prefix(3))):
        assert workload.spectrum() is None
        with pytest.raises(NotApplicable, match="identities and ones"):
            solve_exchangeable(workload)
    nearly = np.eye(3)
    nearly[1, 2] = nearly[2, 1] = 1e-15
    assert Workload(name="nearly", terms=((nearly,),)).spectrum() is None


def test_a_dense_gram_matrix_that_is_too_large_is_refused():
    with pytest.raises(InvalidInput, match="terms"):
        marginals((200, 200), 1).gram()


@pytest.mark.parametrize("bad", [0, -1, 2.0, "3", None, True, np.nan])
@pytest.mark.parametrize("make", [identity, total, prefix, all_ranges])
def test_bad_sizes(make, bad):
    with pytest.raises(InvalidInput, match="whole number"):
        make(bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: marginals((2, 3), [3]),
        lambda: marginals((2, 3), -1),
        lambda: marginals((2, 3), []),
        lambda: marginals((2, 3), [0.5]),
        lambda: marginals((), 0),
        lambda: marginals((0, 3), 1),
        lambda: given(np.zeros((2, 2))),
        lambda: given([[np.nan]]),
        lambda: given([1.0, 2.0]),
        lambda: tensor(),
        lambda: union(),
        lambda: union(identity(2), identity(3)),
        lambda: Workload(name="none", terms=()),
        lambda: Workload(name="flat", terms=((np.ones(3),),)),
        lambda: Workload(name="mixed", terms=((np.eye(2),), (np.eye(3),))),
        lambda: Workload(name="no axis", terms=((),)),
        lambda: solve_exchangeable(identity(2), tolerance=0.0),
        lambda: solve_exchangeable(Workload(name="zero", terms=((np.zeros((2, 2)),),))),
        lambda: solve_exchangeable(Workload(name="indefinite", terms=((np.eye(3) - np.ones((3, 3)),),))),
    ],
)
def test_bad_input(make):
    with pytest.raises(InvalidInput):
        make()


def test_shared_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        workloads.prefix(3).terms[0][0][0, 0] = 5
