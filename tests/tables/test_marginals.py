"""Marginals together: against dense brute force, a semidefinite solver and the coverage of what is released."""

import itertools
import math
import re

import numpy as np
import pytest
from scipy.stats import binom, chi2

from matrixdp import Budget, Certificate, Ledger, certify, release
from matrixdp import residuals as residuals_module
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic, ResidualNoise
from matrixdp.errors import InvalidInput, NotApplicable, NotCertifiable
from matrixdp.mechanisms.solvers import design, workloads
from matrixdp.mechanisms.solvers import marginals as solver
from matrixdp.postprocess import whole_numbers
from matrixdp.privacy import gaussian
from matrixdp.residuals import ResidualBasis, Residuals
from matrixdp.tables import plan_marginals

ONE = Budget(1.0, float(gaussian.delta(1.0, 1.0)))  # mu = 1
SIZES = {"age": 5, "sex": 2, "region": 3}
FAMILIES = [("sex", "age"), ("region",), ("sex", "region")]
FALSE_ALARM = 1e-6


def codes(count=500, sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, n, count) for n in sizes.values()], axis=1)


def counted(records, names, sizes=SIZES):
    columns = [list(sizes).index(name) for name in names]
    table = np.zeros([sizes[name] for name in names], dtype=int)
    np.add.at(table, tuple(records[:, columns].T), 1)
    return table if names else np.array(len(records))


def dense(basis):
    """The linear map from the joint table to the residuals, written with Kronecker products."""
    parts = []
    for subset in basis:
        factors = [basis.matrix(i) if i in subset else np.ones((1, n)) for i, n in enumerate(basis.sizes)]
        whole = np.ones((1, 1))
        for factor in factors:
            whole = np.kron(whole, factor)
        parts.append(whole)
    return np.concatenate(parts)


def brute_force_mu(basis, law, adjacency):
    white = dense(basis) / law.covariance.std[:, None]
    if adjacency == "replace":
        pairs = itertools.combinations(white.T, 2)
        return max(float(np.linalg.norm(a - b)) for a, b in pairs)
    return float(np.max(np.linalg.norm(white, axis=0)))


# --- the optimum ---


@pytest.mark.parametrize(("columns", "rmse"), [(10, 9.348111), (100, 303.21611)])
def test_the_published_optimum(columns, rmse):
    plan = plan_marginals({f"c{i}": 10 for i in range(columns)}, up_to=3, budget=ONE)
    assert plan.rmse == pytest.approx(rmse, rel=1e-7)
    assert 1 - 1e-9 <= plan.certificate.mu <= 1 + 1e-9
    assert plan.certificate.exact


def semidefinite_optimum(sizes, tables, weights, replace):
    """The least summed variance over all Gaussian noise on the joint table."""
    cp = pytest.importorskip("cvxpy")
    cells = list(np.ndindex(*sizes))
    gram = np.array(
        [
            [sum(w * all(a[k] == b[k] for k in t) for t, w in zip(tables, weights, strict=True)) for b in cells]
            for a in cells
        ]
    )
    unit = np.eye(len(cells))
    basis = np.linalg.qr(np.column_stack([np.ones(len(cells)), unit[:, :-1]]))[0][:, 1:] if replace else unit
    differences = [unit[i] - unit[j] for i in range(len(cells)) for j in range(i)] if replace else list(unit)
    noise = cp.Variable((basis.shape[1],) * 2, symmetric=True)
    limits = []
    for difference in differences:
        column = (basis.T @ difference)[:, None]
        limits.append(cp.bmat([[noise, column], [column.T, np.ones((1, 1))]]) >> 0)
    problem = cp.Problem(cp.Minimize(cp.trace(basis.T @ gram @ basis @ noise)), limits)
    problem.solve(solver=cp.CLARABEL)
    return float(problem.value)


@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 5, 1, 0.2)])
def test_no_gaussian_noise_is_better(adjacency, weights):
    names, places = [(), ("a",), ("b",), ("a", "b")], [(), (0,), (1,), (0, 1)]
    given = dict(zip(names, weights, strict=True))
    plan = plan_marginals({"a": 2, "b": 3}, up_to=2, weights=given, budget=ONE, adjacency=adjacency)
    cells = {(): 1, ("a",): 2, ("b",): 3, ("a", "b"): 6}
    error = sum(given[table] * cells[table] * plan.variance(table) for table in names)
    assert error == pytest.approx(semidefinite_optimum((2, 3), places, weights, adjacency == "replace"), rel=1e-6)


def test_replace_needs_its_own_plan():
    """All tables of attributes with 2 and 3 values: 24 by the convex program, 37 with the noise for add/remove."""
    sizes = {"a": 2, "b": 3}
    plan = plan_marginals(sizes, up_to=2, budget=ONE, adjacency="replace")
    assert plan.rmse**2 * 12 == pytest.approx(24.0, rel=1e-6)
    other = plan_marginals(sizes, up_to=2, budget=ONE)
    basis = ResidualBasis((2, 3), other.basis.subsets)
    mu = certify(other.law, Residuals(basis, 1, "replace")).mu
    assert other.rmse**2 * 12 * mu**2 == pytest.approx(37.1419, rel=1e-4)


def test_targets_and_the_largest_variance_are_those_of_a_convex_program():
    cp = pytest.importorskip("cvxpy")
    tables = [(), ("age",), ("sex",), ("region",), ("age", "sex"), ("age", "region"), ("sex", "region")]
    free = plan_marginals(SIZES, up_to=2, budget=ONE)
    basis = free.basis
    p = basis.products([1 - 1 / n for n in basis.sizes])
    unit = np.eye(len(p))
    plans = [_with_variances(free, row) for row in unit]
    rows = np.array([[plan.variance(table) for plan in plans] for table in tables])  # the variance of each is linear
    cells = np.array([math.prod(SIZES[name] for name in table) for table in tables])
    targets = {
        ("age",): 0.95 * free.variance(("age",)) ** 0.5,
        ("sex", "region"): 0.95 * free.variance(("sex", "region")) ** 0.5,
    }
    precision = cp.Variable(len(p))
    variances = [row @ cp.inv_pos(precision) for row in rows]
    bounds = [variances[tables.index(t)] <= target**2 for t, target in targets.items()]
    mean = cp.Problem(
        cp.Minimize(sum(n * v for n, v in zip(cells, variances, strict=True))), [p @ precision <= 1, *bounds]
    )
    mean.solve(solver=cp.CLARABEL)
    plan = plan_marginals(SIZES, up_to=2, budget=ONE, targets=targets)
    assert plan.rmse**2 * cells.sum() == pytest.approx(mean.value, rel=1e-5)
    assert all(plan.variance(table) <= target**2 * (1 + 1e-6) for table, target in targets.items())
    worst = cp.Problem(cp.Minimize(cp.maximum(*variances)), [p @ precision <= 1])
    worst.solve(solver=cp.CLARABEL)
    plan = plan_marginals(SIZES, up_to=2, budget=ONE, objective="largest")
    assert max(plan.variance(table) for table in tables) == pytest.approx(worst.value, rel=1e-5)
    with pytest.raises(NotApplicable, match="larger budget"):
        plan_marginals(SIZES, up_to=2, budget=ONE, targets={("age",): 0.1})


def _with_variances(plan, variances):
    """The same plan with other noise, nearly none where the variance is 0."""
    law = Gaussian(ResidualNoise(plan.basis, np.sqrt(np.maximum(variances, 1e-30))))
    certificate = certify(law, plan.certificate.sensitivity)
    return type(plan)(names=plan.names, incidence=plan.incidence, budget=plan.budget, certificate=certificate)


def test_noise_for_ranges_is_better_for_ranges_and_not_for_cells():
    sizes = {"age": 24, "sex": 2}
    plain = plan_marginals(sizes, up_to=2, budget=ONE)
    ranged = plan_marginals(sizes, up_to=2, budget=ONE, ordered={"age": "ranges"})
    half = np.arange(24) < 12
    errors = [plan.release(codes(50, sizes)).sum({"age": half})[1] for plan in (plain, ranged)]
    assert errors[1] < 0.8 * errors[0]
    assert plain.variance(("age",)) < ranged.variance(("age",))
    assert ranged.certificate.mu == pytest.approx(1, rel=1e-9)


# --- what one record can change ---


def random_basis(rng, ordered):
    sizes = tuple(int(n) for n in rng.integers(2, 5, 3))
    subsets = np.array([[-1, -1, -1], [0, -1, -1], [2, -1, -1], [0, 1, -1], [1, 2, -1], [0, 1, 2]])
    given = rng.integers(-5, 6, (sizes[1] - 1, sizes[1]))
    given[:, -1] -= given.sum(axis=1)
    while np.linalg.matrix_rank(given) < sizes[1] - 1:
        given = np.eye(sizes[1] - 1, sizes[1], dtype=int) - np.eye(sizes[1] - 1, sizes[1], 1, dtype=int)
    return ResidualBasis(sizes, subsets, (None, given, None) if ordered else ())


@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_mu_is_that_of_brute_force(adjacency, ordered, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    basis = random_basis(rng, ordered)
    law = Gaussian(ResidualNoise(basis, np.exp(rng.uniform(-2, 2, len(basis.subsets)))))
    sensitivity, truth = Residuals(basis, 1, adjacency), brute_force_mu(basis, law, adjacency)
    certificate = certify(law, sensitivity)
    assert certificate.exact
    assert truth * (1 - 1e-13) <= certificate.mu <= truth * (1 + 1e-8)
    assert np.linalg.norm(law.covariance.whiten(certificate.witness)) == pytest.approx(truth, rel=1e-9)
    assert sensitivity.contains(certificate.witness)
    assert not sensitivity.contains(1.001 * certificate.witness)
    isotropic = Gaussian(Isotropic((basis.length,), 2.0))
    plain = Gaussian(ResidualNoise(basis, np.full(len(basis.subsets), 1.0)))
    scale = plain.covariance.std[:, None] / 2.0
    white = dense(basis) / plain.covariance.std[:, None] * scale
    ends = itertools.combinations(white.T, 2) if adjacency == "replace" else ((x, 0) for x in white.T)
    longest = max(float(np.linalg.norm(a - b)) for a, b in ends)
    assert certify(isotropic, sensitivity).mu == pytest.approx(longest, rel=1e-8)
    monkeypatch.setattr(residuals_module, "MOST_PAIRS", 1)
    bounded = certify(law, Residuals(basis, 1, adjacency))
    assert bounded.exact == (adjacency == "add/remove")
    assert truth <= bounded.mu <= 2.5 * truth


def test_several_records_of_one_person_may_coincide():
    rng = np.random.default_rng(3)
    basis = random_basis(rng, ordered=False)
    law = Gaussian(ResidualNoise(basis, np.exp(rng.uniform(-1, 1, len(basis.subsets)))))
    one, three = (certify(law, Residuals(basis, k)).mu for k in (1, 3))
    assert three == pytest.approx(3 * one, rel=1e-9)
    white = dense(basis) / law.covariance.std[:, None]
    three_cells = [
        np.linalg.norm(white[:, list(c)].sum(axis=1)) for c in itertools.product(range(white.shape[1]), repeat=3)
    ]
    assert max(three_cells) == pytest.approx(three, rel=1e-9)
    plan = plan_marginals(SIZES, up_to=2, budget=ONE, contributions=3)
    assert plan.certificate.mu == pytest.approx(1, rel=1e-9)
    assert plan.rmse == pytest.approx(3 * plan_marginals(SIZES, up_to=2, budget=ONE).rmse, rel=1e-9)


def test_the_worst_pair_need_not_differ_everywhere():
    basis = ResidualBasis((2, 2), np.array([[0, -1], [1, -1], [0, 1]]))
    law = Gaussian(ResidualNoise(basis, np.array([3.0, 3.0, 0.5])))
    witness = certify(law, Residuals(basis, 1, "replace")).witness
    assert witness[0] == 0 or witness[1] == 0  # one attribute stays
    assert certify(law, Residuals(basis, 1, "replace")).mu == pytest.approx(
        brute_force_mu(basis, law, "replace"), rel=1e-9
    )


def test_noise_answers_like_its_dense_covariance():
    rng = np.random.default_rng(5)
    noise = ResidualNoise(random_basis(rng, ordered=True), np.exp(rng.uniform(-1, 1, 6)))
    std = noise.std
    assert noise.shape == std.shape
    for power in (-1, 1, 2):
        assert noise.power_trace(power) == pytest.approx(np.sum(std ** (2 * power)), rel=1e-12)
    assert noise.smallest_std == pytest.approx(std.min(), rel=1e-14)
    assert noise.variance_range() == pytest.approx((std.min() ** 2, std.max() ** 2), rel=1e-13)
    assert noise.times(np.ones(len(std))) == pytest.approx(std**2)
    assert noise.condition() == pytest.approx(std.max() / std.min(), rel=1e-14)
    assert noise.whiten(noise.color(np.ones(len(std)))) == pytest.approx(1)
    assert noise.scaled(2.0).std == pytest.approx(2 * std)
    assert np.linalg.norm(noise.whiten(noise.least_noise_direction())) == pytest.approx(1 / std.min())
    with pytest.raises(InvalidInput):
        list(noise.lines(0))


def test_other_noise_is_not_certified():
    basis = random_basis(np.random.default_rng(0), ordered=False)
    other = ResidualBasis(basis.sizes, basis.subsets[1:])
    with pytest.raises(InvalidInput, match="vector of"):
        certify(Gaussian(ResidualNoise(other, np.ones(len(other.subsets)))), Residuals(basis))
    swapped = ResidualBasis(basis.sizes, basis.subsets[::-1])
    with pytest.raises(NotCertifiable):
        certify(Gaussian(ResidualNoise(swapped, np.ones(len(swapped.subsets)))), Residuals(basis))


# --- releases ---


@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
@pytest.mark.parametrize("ordered", [None, {"age": "prefix"}, {"age": "ranges"}])
def test_tables_are_true_consistent_and_have_the_variance_that_they_state(adjacency, ordered):
    plan = plan_marginals(SIZES, families=FAMILIES, budget=ONE, ordered=ordered, adjacency=adjacency)
    records = codes()
    answer = plan.answer(records)
    assert np.array_equal(answer.value, np.round(answer.value))
    basis = plan.basis
    assert np.array_equal(answer.value, dense(basis) @ counted(records, SIZES).ravel())
    out = plan.release(records)
    exact = type(out)(plan=plan, release=_Exact(answer.value, out.release.noise), total=out.total)
    for table in [*FAMILIES, ("age",), ("sex",), ()]:
        assert exact.table(table) == pytest.approx(counted(records, table), abs=1e-9)
    assert out.table(("sex", "age")).sum(axis=1) == pytest.approx(out.table(("sex",)), abs=1e-9)
    assert out.table(("sex", "region")).sum(axis=1) == pytest.approx(out.table(("sex",)), abs=1e-9)
    assert out.table(("age", "sex")) == pytest.approx(out.table(("sex", "age")).T, abs=1e-9)
    # the map from residuals to a table, column by column
    for table in FAMILIES:
        decode = np.stack(
            [
                type(out)(plan=plan, release=_Exact(e, None), total=0.0).table(table).ravel()
                for e in np.eye(basis.length)
            ]
        )
        std = out.release.noise.covariance.std
        assert out.variance(table).ravel() == pytest.approx(np.sum((decode * std[:, None]) ** 2, axis=0), rel=1e-9)
        mean = np.mean(
            (decode * plan.law.covariance.std[:, None]) ** 2 @ np.ones(decode.shape[1]) / decode.shape[1]
        ) * len(std)
        assert plan.variance(table) == pytest.approx(mean, rel=1e-9)
    weights = {"age": [1, 1, 0, 0, 2], "sex": [1, -1]}
    value, error = out.sum(weights)
    outer = np.outer(*weights.values())
    assert value == pytest.approx(np.sum(outer * out.table(("age", "sex"))), abs=1e-9)
    decode = np.stack(
        [
            type(out)(plan=plan, release=_Exact(e, None), total=0.0).table(("age", "sex")).ravel()
            for e in np.eye(basis.length)
        ]
    )
    assert error == pytest.approx(np.linalg.norm((decode @ outer.ravel()) * out.release.noise.covariance.std), rel=1e-9)
    if adjacency == "replace":
        assert out.table(()) == len(records)


def test_tables_that_do_not_fit_into_memory_are_refused_before_anything_is_spent():
    sizes = {f"c{i}": 1000 for i in range(5)}
    plan = plan_marginals(sizes, up_to=5, budget=ONE)
    with pytest.raises(InvalidInput, match="memory"):
        plan.release(codes(3, sizes))


class _Exact:
    """A release without noise."""

    def __init__(self, value, noise):
        self.value, self.noise = value, noise


def test_certificates_go_to_json_and_back_and_are_charged(tmp_path):
    for extra in ({}, {"ordered": {"age": "ranges"}}, {"adjacency": "replace"}, {"contributions": 2}):
        plan = plan_marginals(SIZES, families=FAMILIES, budget=ONE, **extra)
        assert Certificate.from_json(plan.certificate.to_json()).verify()
        certificate = plan.release(codes()).certificate
        assert certificate.float_safe
        assert certificate.meets(ONE)
        text = certificate.to_json()
        assert Certificate.from_json(text).verify()
        smaller = re.sub(r'("age",\s+)5', r"\g<1>4", text)
        assert smaller != text
        assert not Certificate.from_json(smaller).verify()
        if "adjacency" not in extra:
            k = extra.get("contributions", 1)
            assert not Certificate.from_json(text.replace(f'"records": {k},', f'"records": {3 - k},')).verify()
    names = {"kind": 2, "array": 3, "float": 2}  # which JSON uses for itself
    assert Certificate.from_json(plan_marginals(names, up_to=2, budget=ONE).certificate.to_json()).verify()
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-3))
    plan = plan_marginals(SIZES, up_to=2, budget=Budget(1.0, 1e-6))
    out = plan.release(codes(), ledger=ledger, note="marginals")
    (entry,) = ledger.history()
    assert entry.note == "marginals"
    assert out.certificate.mu == pytest.approx(float(gaussian.mu(1.0, 1e-6)), rel=1e-3)


def test_answers_go_straight_into_release():
    plan = plan_marginals(SIZES, up_to=2, budget=ONE)
    answer = plan.answer(codes())
    out = release(*answer, ONE, query=answer.query)
    assert out.certificate.source.startswith("marginals")
    ratio = out.noise.covariance.stds / plan.law.covariance.stds
    assert ratio == pytest.approx(ratio[0], rel=1e-9)  # every table counts alike, as in the plan
    assert 1 <= ratio[0] < 1.002


def test_released_noise_has_the_law_that_is_stated():
    """Sums of squares of whitened noise: chi-squared; noise of 0.9 times the size must show."""
    plan = plan_marginals(SIZES, up_to=2, budget=ONE, ordered={"age": "prefix"})
    records = codes()
    value = plan.answer(records).value
    noise = np.stack([(out := plan.release(records)).release.value - value for _ in range(400)])
    white = noise / out.release.noise.covariance.std
    count = white.size
    low, high = chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count)
    assert low < np.sum(white**2) < high
    assert not low < np.sum((0.9 * white) ** 2) < high


def test_intervals_cover():
    plan, records = plan_marginals(SIZES, up_to=2, budget=ONE), codes()
    truth = counted(records, ("age", "region"))[3, 1]
    inside = 0
    for _ in range(200):
        interval = plan.release(records).interval(("age", "region"), 0.9)
        inside += interval.low[3, 1] <= truth <= interval.high[3, 1]
    assert binom.ppf(FALSE_ALARM / 2, 200, 0.9) <= inside <= binom.ppf(1 - FALSE_ALARM / 2, 200, 0.9)


def test_counts_may_come_as_tables_or_from_a_function():
    plan, records = plan_marginals(SIZES, families=FAMILIES, budget=ONE), codes()
    value = plan.answer(records).value
    listed = {("age", "sex"): counted(records, ("age", "sex")), ("sex", "region"): counted(records, ("sex", "region"))}
    assert np.array_equal(plan.answer(listed).value, value)
    assert np.array_equal(plan.answer(lambda columns: counted(records, columns)).value, value)
    asked = []
    plan.answer(lambda columns: asked.append(columns) or counted(records, columns))
    assert set(asked) == {("age", "sex"), ("sex", "region")}  # nothing larger than what was asked for


def test_places_that_do_not_exist_are_left_out_or_moved():
    records = codes()
    odd = np.concatenate([records, [[-1, 0, 0], [0, 7, 0], [4, 1, 3]]])
    plan = plan_marginals(SIZES, up_to=1, budget=ONE)
    assert np.array_equal(plan.answer(odd).value, plan.answer(records).value)
    moved = np.concatenate([records, [[0, 0, 0], [0, 1, 0], [4, 1, 2]]])
    plan = plan_marginals(SIZES, up_to=1, budget=ONE, adjacency="replace")
    assert np.array_equal(plan.answer(odd).value, plan.answer(moved).value)


def test_tables_without_negative_cells_and_of_whole_numbers():
    plan = plan_marginals(SIZES, up_to=2, budget=Budget(0.1, 1e-6))
    out = plan.release(codes(40))
    total = float(out.table(()))
    table = out.table(("age", "region"), at_least_zero=True)
    assert table.min() >= 0
    assert table.sum() == pytest.approx(max(0.0, total))
    whole = out.table(("age", "region"), at_least_zero=True, whole=True)
    assert np.array_equal(whole, np.round(whole))
    assert whole.min() >= 0
    assert whole.sum() == round(max(0.0, total))
    assert np.array_equal(whole_numbers(np.array([0.5, 0.3, 0.2])), [1, 0, 0])


def test_the_domain_is_never_formed():
    sizes = {f"c{i}": 50 for i in range(40)}  # 50^40 cells
    records = codes(1000, sizes)
    out = plan_marginals(sizes, families=[("c0", "c1"), ("c1", "c39"), ("c7",)], budget=ONE).release(records)
    error = out.table(("c39", "c1")) - counted(records, ("c39", "c1"), sizes)
    assert np.max(np.abs(error)) < 7 * np.max(out.standard_error(("c39", "c1")))
    plan = plan_marginals(sizes, up_to=2, budget=ONE, adjacency="replace")
    assert not plan.certificate.exact  # too many pairs of cells: a bound
    assert plan.certificate.mu == pytest.approx(1, rel=1e-9)


def test_ordered_contrasts_are_whole_and_near_the_best():
    for kind in ("prefix", "ranges"):
        contrasts = solver.ordered_contrasts(16, kind)
        assert np.array_equal(contrasts.sum(axis=1), np.zeros(15))
        assert np.linalg.matrix_rank(contrasts) == 15
        basis = ResidualBasis((16,), np.array([[0]]), (contrasts,))
        task = workloads.prefix(16).gram() if kind == "prefix" else workloads.all_ranges(16).gram()
        inverse, vectors = basis.inverse(0), ResidualBasis((16,), np.array([[0]]))
        flat = vectors.matrix(0) / vectors.units(0)[:, None]
        least = design.solve(flat @ task @ flat.T, vertices=flat.T, tolerance=1e-4).lower_bound
        assert least <= np.sum(inverse * (task @ inverse)) * np.max(np.diag(basis.kernel(0))) <= 1.005 * least
    assert np.max(np.abs(solver.ordered_contrasts(16, "prefix", 9))) <= 40


def test_many_ordered_columns_in_one_table():
    sizes = {f"c{i}": 4 for i in range(5)}
    plan = plan_marginals(sizes, up_to=5, budget=ONE, ordered=dict.fromkeys(sizes, "prefix"))
    records = codes(3000, sizes)
    out = plan.release(records)
    error = out.table(tuple(sizes)) - counted(records, tuple(sizes), sizes)
    assert np.max(np.abs(error) / out.standard_error(tuple(sizes))) < 7
