"""Plans, shared budgets and named parts: what is fixed together keeps the budget together, and nothing else does."""

import math
from fractions import Fraction

import numpy as np
import pytest

from matrixdp import (
    L1,
    Accountant,
    Budget,
    Counts,
    Entrywise,
    Frobenius,
    Ledger,
    Plan,
    RankOne,
    Vertices,
    calibrate,
    certify,
    release,
)
from matrixdp.accounting.composition import Composition, Part
from matrixdp.accounting.domination import lies_under
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.methods import Use
from matrixdp.errors import BudgetExceeded, InvalidInput, MatrixDPError
from matrixdp.pipeline import sized_together
from matrixdp.privacy import gaussian
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile

BUDGET = Budget(1.0, 1e-6)


@pytest.fixture(scope="module")
def mixed():
    return BUDGET.plan([Counts(1)] * 3 + [Frobenius(1.0)], shapes=[(10,)] * 3 + [(4, 4)])


def test_laws_sized_for_copies_of_themselves_overspend_and_a_plan_does_not(mixed):
    """Three Laplace and one Gaussian, each for four copies of itself: 149 times delta."""
    laplace = BUDGET.plan([Counts(1)] * 4).laws[0]
    normal = calibrate("analytic", shape=(4,), sensitivity=Frobenius(1.0), budget=BUDGET).scaled(2.0)
    naive = Accountant()
    naive.add(certify(laplace, Counts(1)), 3)
    naive.add(certify(normal, Frobenius(1.0)))
    assert 140 * BUDGET.delta < naive.delta(1.0) < 160 * BUDGET.delta
    together = Accountant()
    for part in mixed:
        together.add(release(np.zeros(part.noise.shape), part.sensitivity, part).certificate)
    assert 0.9 * BUDGET.delta < together.delta(1.0) <= BUDGET.delta


def test_a_mixed_plan_beats_gaussian_noise_and_named_parts(mixed):
    error = sum(law.expected_squared_error() for law in mixed.laws)
    roots = [math.sqrt(10.0)] * 3 + [4.0]  # of the errors at mu = 1; the best Gaussian plan has their sum, squared
    assert error < 0.9 * sum(roots) ** 2 / float(gaussian.mu(1.0, 1e-6)) ** 2
    halves = BUDGET.split(tables=1, matrix=1)
    apart = 3 * halves["tables"].plan([Counts(1)] * 3, shapes=[(10,)] * 3).laws[0].expected_squared_error()
    apart += calibrate(
        "analytic", shape=(4, 4), sensitivity=Frobenius(1.0), budget=halves["matrix"]
    ).expected_squared_error()
    assert error < apart


@pytest.mark.parametrize(
    ("budget", "releases", "variance"),
    [
        *[(BUDGET, *each) for each in ((1, 1.842), (4, 31.84), (8, 117.5), (16, 274.0), (32, 566.0))],
        *[(Budget(0.5, 1e-7), *each) for each in ((1, 7.836), (2, 31.84), (4, 127.9), (8, 512.0))],
    ],
)
def test_reach(budget, releases, variance):
    planned = budget.plan([Counts(1)] * releases)
    assert {law.variance for law in planned.laws} == {planned.laws[0].variance}
    assert planned.laws[0].variance <= variance
    one = release(np.zeros(5), Counts(1), planned[0])
    shared = release(np.zeros(5), Counts(1), budget.shared(releases, like=Counts(1)))
    assert one.noise.variance == shared.noise.variance == planned.laws[0].variance
    account = Accountant()
    account.add(one.certificate, releases)
    assert account.delta(budget.epsilon) <= budget.delta


def test_one_kind_of_gaussian_release_is_the_known_optimum():
    planned = BUDGET.plan([Frobenius(1.0)] * 4 + [Frobenius(2.0)])
    mus = [certify(law, part.sensitivity).mu for law, part in zip(planned.laws, planned, strict=True)]
    assert math.hypot(*mus) == pytest.approx(float(gaussian.mu(1.0, 1e-6)), rel=1e-4)
    assert mus[4] / mus[0] == pytest.approx(math.sqrt(2.0), rel=1e-6)  # the root of the root of 4 times the error


@pytest.mark.parametrize(
    "sets",
    [
        (Entrywise([1.0, 8.0]), Entrywise([8.0, 1.0])),
        (Vertices([8.0, 0.0], [0.0, 1.0]), Vertices([0.0, 8.0], [1.0, 0.0])),
    ],
)
def test_sets_that_differ_only_in_the_order_of_their_bounds_are_planned_apart(sets):
    plan = BUDGET.plan(sets, shapes=[(2,), (2,)])
    for part, planned in zip(plan, sets, strict=True):
        assert part.sensitivity is planned
        release(np.zeros(2), planned, part)


def test_weights_move_noise():
    plain = BUDGET.plan([Counts(1), Counts(1)])
    heavy = BUDGET.plan([Counts(1), Counts(1)], weights=[100.0, 1.0])
    assert heavy.laws[0].variance < plain.laws[0].variance < heavy.laws[1].variance


def test_a_plan_is_data(mixed):
    assert mixed.certificate is mixed.composition
    assert Composition.from_json(mixed.to_json()).verify()
    again = Plan.from_json(mixed.to_json())
    sizes = [sorted(law.root_mean_square for law in plan.laws) for plan in (again, mixed)]
    assert sizes[0] == pytest.approx(sizes[1], rel=2e-3)
    with pytest.raises(InvalidInput, match="does not verify"):
        Plan.from_json(mixed.to_json().replace('"count": 3', '"count": 2'))
    assert len(list(mixed)) == len(mixed) == 4


def test_a_plan_without_shapes_takes_any_shape_and_the_planned_set():
    planned = BUDGET.plan([Counts(1), RankOne(1.0)])
    assert release(np.zeros((3, 4)), Counts(1), planned[0]).noise.shape == (3, 4)
    assert release(np.zeros((3, 4, 2)), Counts(1), planned[0]).noise.shape == (3, 4, 2)
    assert release(np.zeros((3, 3)), RankOne(1.0), planned[1]).certificate.mu > 0
    for value, sensitivity, part in (
        (np.zeros(3), Counts(2), planned[0]),
        (np.zeros((3, 3)), RankOne(1.5), planned[1]),
        (np.zeros(3), Counts(1, adjacency="replace"), planned[0]),
    ):
        with pytest.raises(InvalidInput, match="must lie under"):
            release(value, sensitivity, part)
    with pytest.raises(InvalidInput, match="shapes must be given"):
        BUDGET.plan([Entrywise(1.0)])


def test_the_plan_fixes_the_noise(mixed):
    for given in ("analytic", mixed.laws[0]):
        with pytest.raises(InvalidInput, match="fixed by the plan"):
            release(np.zeros(10), Counts(1), mixed[0], given)
    with pytest.raises(InvalidInput, match="shape that was planned"):
        release(np.zeros(11), Counts(1), mixed[0])
    with pytest.raises(InvalidInput, match="whole budget, not a part of a plan"):
        sized_together(calibrate("analytic", shape=(2,), sensitivity=Counts(1), budget=BUDGET), Counts(1), mixed[0], 3)
    with pytest.raises(InvalidInput, match="whole budget"):
        mixed[0].plan([Counts(1)])
    assert calibrate("auto", shape=(10,), sensitivity=Counts(1), budget=mixed[0]) is mixed.laws[0]


# --- ledgers count ---


def test_a_ledger_charges_a_plan_once_and_each_part_is_used_once(tmp_path, mixed):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    release(np.zeros(10), Counts(1), mixed[0], ledger=ledger)
    spent = ledger.spent()
    assert 0.99 < spent <= 1.0
    for part in mixed[1:]:
        release(np.zeros(part.noise.shape), part.sensitivity, part, ledger=Ledger(ledger.path))
    assert ledger.spent() == spent
    for part in (mixed[0], mixed[3]):
        with pytest.raises(BudgetExceeded, match="was planned for"):
            release(np.zeros(part.noise.shape), part.sensitivity, part, ledger=ledger)
    with pytest.raises(BudgetExceeded):
        ledger.plan([Counts(1)])
    lines = ledger.export()
    found = verify_export(lines)
    assert found, str(found)
    first = next(line for line in lines if line.get("plan"))
    document = first["documents"][first["plan"]]
    document["parts"][0]["count"] += 1
    assert not verify_export(lines)


def test_a_plan_of_a_ledger_fits_and_nothing_comes_after_it(tmp_path):
    for adaptive in (True, False):
        ledger = Ledger(tmp_path / f"{adaptive}.db", BUDGET, adaptive=adaptive)
        planned = ledger.plan([Counts(1)] * 2)
        for part in planned:
            release(np.zeros(3), Counts(1), part, ledger=ledger)
        with pytest.raises(BudgetExceeded):
            release(np.zeros(3), Counts(1), Budget(0.1, 1e-8), "laplace", ledger=ledger)


def test_a_shared_budget_is_counted_by_a_ledger(tmp_path):
    ledger, shared = Ledger(tmp_path / "budget.db", BUDGET), BUDGET.shared(3, like=Counts(1))
    for size in (3, 4, 5):
        release(np.zeros(size), Counts(1), shared, ledger=ledger)
    with pytest.raises(BudgetExceeded, match="planned for 3 releases"):
        release(np.zeros(3), Counts(1), shared, ledger=ledger)
    assert verify_export(ledger.export())


def test_what_shares_a_budget_lies_under_one_reference():
    shared = BUDGET.shared(12)
    assert shared.reference.mu == pytest.approx(float(gaussian.mu(1.0, 1e-6)) / math.sqrt(12), rel=1e-4)
    for sensitivity in (Frobenius(2.0), Counts(3), RankOne(1.0)):
        value = np.zeros((3, 3))
        certificate = release(value, sensitivity, shared).certificate
        assert lies_under(Use(certificate.profile), Use(shared.reference.profile))
    discrete = BUDGET.shared(12, like=Counts(1))
    certificate = release(np.zeros(5), Counts(2), discrete).certificate  # two cells, hence larger noise
    for epsilon in np.linspace(0.0, 2.0, 41):
        assert certificate.profile.delta(epsilon) <= discrete.reference.profile.delta(epsilon) * (1 + 1e-9)
    with pytest.raises(InvalidInput, match="no noise for this set"):
        release(np.zeros((3, 3)), Frobenius(1.0), discrete)


# --- domination ---

LAPLACE = DiscreteProfile(1.0, 4.0, 2, 2)


@pytest.mark.parametrize(
    ("profile", "reference", "expected"),
    [
        (LAPLACE, LAPLACE, True),
        (DiscreteProfile(1.0, 4.0, 1, 2), LAPLACE, True),
        (DiscreteProfile(1.0, 4.0, 1, 1, ((2, 1),)), LAPLACE, True),
        (DiscreteProfile(1.0, 5.0, 2, 2), LAPLACE, True),
        (DiscreteProfile(1.0, 4.0, 2, 3), LAPLACE, False),
        (DiscreteProfile(1.0, 9.0), DiscreteProfile(1.5, 4.0, 2, 2), True),  # on points
        (DiscreteProfile(1.0, 4.0, 4, 1), LAPLACE, False),  # the whole change in one entry is worse
        (DiscreteProfile(1.0, 3.9, 2, 2), LAPLACE, False),
        (DiscreteProfile(1.5, 4.0, 2, 2), DiscreteProfile(1.5, 4.1, 2, 2), False),
        (DiscreteProfile(1.5, 4.2, 2, 2), DiscreteProfile(1.5, 4.0, 2, 2), False),  # a larger scale need not be better
        (DiscreteProfile(1.5, 4.0, 1, 2), DiscreteProfile(1.5, 4.0, 2, 2), True),
        (GaussianProfile(0.5), GaussianProfile(0.5), True),
        (GaussianProfile(0.51), GaussianProfile(0.5), False),
        (GaussianProfile(0.01), LAPLACE, False),  # no Gaussian noise has a delta of 0
        (DiscreteProfile(1.0, 4.0), GaussianProfile(0.35), True),
        (DiscreteProfile(1.0, 4.0), GaussianProfile(0.2), False),
        (DiscreteProfile(1.5, 40.0), GaussianProfile(0.5), False),  # may be true, and is not shown
    ],
)
def test_domination(profile, reference, expected):
    assert lies_under(Use(profile), Use(reference)) == expected
    below = all(profile.delta(e) <= reference.delta(e) * (1 + 1e-9) for e in np.linspace(0.0, 3.0, 301))
    assert below or not expected


def test_samplers_and_rates_count_in_domination():
    assert not lies_under(Use(LAPLACE, 1e-10), Use(LAPLACE, 1e-11))
    assert not lies_under(Use(LAPLACE, 0.0, 0.5), Use(LAPLACE))


# --- named parts, and what cannot be planned ---


PURE = Budget(1.0, 0)


def test_named_parts_of_a_pure_budget_are_pure():
    assert PURE.split(a=1, b=3)["b"].delta == 0.0


@pytest.mark.parametrize("shaped", [False, True])
def test_a_pure_plan_uses_its_epsilon_to_the_last_digit_and_for_the_least_error(shaped, tmp_path):
    sets, shapes = [Counts(1), Counts(8), L1(3, 1, step=1)], [(4,), (8, 2), (5,)]
    plan = PURE.plan(sets, weights=[1, 1, 2], shapes=shapes if shaped else None)
    total = plan.composition
    assert total.verify()
    assert total.meets(PURE)
    assert 1 - 1e-12 < total.epsilon(0) <= 1
    scales = [law.scale for law in plan.laws]
    steps, weights = np.array([1, 8, 3]), np.array([1, 1, 2]) * (np.array([4, 16, 5]) if shaped else 1)
    best = np.cbrt(steps / weights)  # of sum w s^2 with sum m / s given
    assert np.allclose(scales / best, np.sum(steps / best), rtol=1e-12)
    ledger = Ledger(tmp_path / "budget.db", PURE)
    for shape, each, part in zip(shapes, sets, plan, strict=True):
        out = release(np.ones(shape, dtype=int), each, part, ledger=ledger)
        assert out.certificate.drawing.exact
    assert ledger.spent() == total.epsilon(0)
    with pytest.raises(MatrixDPError, match="planned"):
        release(np.ones(4, dtype=int), Counts(1), plan[0], ledger=ledger)


def test_a_shared_pure_budget_takes_any_pure_noise(tmp_path):
    shared = PURE.shared(4, like=Counts(1))
    assert shared.composition.epsilon(0) == 1.0
    ledger = Ledger(tmp_path / "budget.db", PURE)
    for value, each in (([3], Counts(1)), ([3, 4], Counts(2)), ([1.5, 2.5], Entrywise(1.0)), ([3, 4], L1(3, step=1))):
        out = release(value, each, shared, ledger=ledger)
        assert out.certificate.epsilon(0) == 0.25
    assert ledger.spent() == 1.0
    with pytest.raises(MatrixDPError, match="planned"):
        release([3], Counts(1), shared, ledger=ledger)
    assert not lies_under(Use(DiscreteProfile(1.0, 3.999)), Use(shared.reference.profile))
    assert not lies_under(Use(DiscreteProfile(1.2, 400.0)), Use(shared.reference.profile))


def test_what_has_no_pure_noise_is_refused_before_anything_is_spent(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", PURE)
    for refused in (
        lambda: PURE.plan([Counts(1), Frobenius(1.0)]),
        lambda: ledger.plan([RankOne(1.0)]),
        lambda: release(np.zeros((2, 2)), Frobenius(1.0), PURE.shared(2), ledger=ledger),
        lambda: release([3], Counts(1), Budget(0.5, 1e-9), "laplace", ledger=ledger),  # from tables
        lambda: release(np.zeros(3), Frobenius(1.0), Budget(0.5, 1e-9), ledger=ledger),
        lambda: ledger.record({"mu": 0.1}, adjacency="add/remove"),
        lambda: ledger.record({"epsilon": 0.1, "delta": 1e-9}, adjacency="add/remove"),
    ):
        with pytest.raises((InvalidInput, BudgetExceeded), match=r"pure|no noise|Gaussian"):
            refused()
    assert ledger.spent() == 0.0
    assert ledger.history() == []


def test_named_parts_add_up():
    parts = BUDGET.split(tables=3, model=1)
    assert parts["tables"].epsilon == pytest.approx(0.75)
    assert sum(part.epsilon for part in parts.values()) <= 1.0
    assert sum(part.delta for part in parts.values()) <= 1e-6
    for weights in ({}, {"a": 0.0}, {"a": math.nan}):
        with pytest.raises(InvalidInput):
            BUDGET.split(**weights)


@pytest.mark.parametrize(
    "arguments",
    [
        ([],),
        ([3],),
        ([Counts(1)], [1.0, 2.0]),
        ([Counts(1)], [math.nan]),
        ([Counts(1)], [-1.0]),
        ([Counts(1), Counts(1, adjacency="replace")],),
        ([Counts(1)], None, [(3,), (4,)]),
        ([RankOne(1.0)], None, [(3, 4)]),
    ],
)
def test_plans_that_make_no_sense_are_refused(arguments):
    with pytest.raises(InvalidInput):
        BUDGET.plan(*arguments)


@pytest.mark.parametrize(("releases", "like"), [(0, None), (2.5, None), (-1, None), (3, "counts")])
def test_shared_budgets_that_make_no_sense_are_refused(releases, like):
    with pytest.raises(InvalidInput):
        BUDGET.shared(releases, like=like)


def test_a_plan_that_breaks_its_own_budget_is_not_read():
    loose = Budget(10.0, 1e-6).plan([Counts(1)] * 4, shapes=[(5,)] * 4)
    for composition in (
        Composition(loose.composition.parts, Budget(1.0, 1e-6)),
        Composition(
            (Part(release(np.zeros(5), Counts(1), Budget(3.0, 1e-6)).certificate, 2, 0.01),), Budget(1.0, 1e-6)
        ),
    ):
        assert composition.verify()  # its numbers are true
        with pytest.raises(InvalidInput, match="plan"):
            Plan.from_json(composition.to_json())


def test_parts_that_change_by_the_same_are_added_up():
    """Written apart they would be compared one by one, and six entries would lie under one."""
    with pytest.raises(InvalidInput, match="each shift once"):
        DiscreteProfile(1.0, 4.0, 1, 5, ((1, 1),))


def test_a_part_of_a_plan_is_no_budget_for_others(tmp_path):
    part = Budget(1.0, 1e-6).plan([Counts(1)] * 4)[0]
    for refused in (
        lambda: part.split(a=1, b=1),
        lambda: part.plan([Counts(1)]),
        lambda: part.shared(2),
        lambda: Ledger(tmp_path / "budget.db", part),
    ):
        with pytest.raises(InvalidInput, match="part"):
            refused()
    assert not (tmp_path / "budget.db").exists()


def test_named_parts_never_exceed_the_whole():
    parts = Budget(1.0, 1e-6).split(big=1.0, **{f"p{i}": 1e-16 for i in range(2000)})
    assert sum(Fraction(part.epsilon) for part in parts.values()) <= 1
    assert sum(Fraction(part.delta) for part in parts.values()) <= Fraction(1e-6)


def test_one_set_is_no_list_of_sets():
    with pytest.raises(InvalidInput, match="sets must be a list"):
        Budget(1.0, 1e-6).plan(Counts(1))
