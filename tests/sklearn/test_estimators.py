"""The estimators: scikit-learn's own checks, what they learn, and what they refuse."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator

from matrixdp import Budget, Certificate, Ledger, queries
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.queries.histograms import grid_counts
from matrixdp.sklearn import (
    PrivateCovariance,
    PrivateHistogram,
    PrivateKBins,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePCA,
    PrivateRidge,
    PrivateStandardScaler,
)

# Fits with a random_state warn, as they should; here they are wanted.
pytestmark = pytest.mark.filterwarnings("ignore:release with a generator")

BUDGET = Budget(1.0, 1e-6)
LAX = Budget(50.0, 0.1)
GRID = (np.linspace(-3, 3, 7), np.linspace(-3, 3, 5))
ESTIMATORS = [
    PrivatePCA(n_components=1, budget=BUDGET, norm=3.0),
    PrivateCovariance(budget=BUDGET, norm=3.0),
    PrivateHistogram(np.linspace(-3, 3, 7), columns=[0], epsilon=1.0, delta=1e-6),
    PrivateLinearRegression(low=-3, high=3, target_low=-3, target_high=3, budget=BUDGET),
    PrivateRidge(2.0, low=-3, high=3, target_low=-3, target_high=3, budget=BUDGET),
    PrivateStandardScaler(low=-3, high=3, budget=BUDGET),
    PrivateKBins(3, low=-3, high=3, budget=BUDGET),
    PrivateLogisticRegression(low=-3, high=3, classes="from y", steps=2, budget=BUDGET),
]


# All of scikit-learn's checks, none expected to fail; a list, as pytest wants, where parametrize_with_checks of older
# versions hands over an iterator.
CHECKS = [pair for estimator in ESTIMATORS for pair in estimator_checks_generator(estimator)]


def name_of(part):
    return part.func.__name__ if hasattr(part, "func") else type(part).__name__


@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=name_of)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture
def records():
    axes = np.array([3.0, 1.0, 0.3])
    return np.random.default_rng(1).normal(size=(4000, 3)) * axes / 4


def test_pca_finds_the_axes_and_carries_its_certificate(records):
    pca = PrivatePCA(2, budget=BUDGET, norm=2.0, random_state=0).fit(records)
    assert abs(pca.components_[0, 0]) > 0.99
    assert abs(pca.components_[1, 1]) > 0.9
    assert pca.certificate_.meets(BUDGET)
    assert pca.certificate_.relation == "replace"
    assert pca.explained_variance_[0] == pytest.approx(9 / 16, rel=0.1)
    np.testing.assert_allclose(pca.components_ @ pca.components_.T, np.eye(2), atol=1e-12)
    assert pca.transform(records).shape == (4000, 2)
    assert list(pca.get_feature_names_out()) == ["privatepca0", "privatepca1"]


def test_pca_moves_by_the_center_and_back(records):
    center = np.array([5.0, -1.0, 2.0])
    pca = PrivatePCA(budget=BUDGET, norm=2.0, center=center, random_state=0).fit(records + center)
    np.testing.assert_allclose(pca.inverse_transform(pca.transform(records)), records, atol=1e-12)
    assert abs(pca.components_[0, 0]) > 0.99


def test_the_noise_is_that_of_the_certificate_and_not_less(records):
    # 400 fits of a 3 x 3 covariance; the trace of the released matrix must spread as the noise law says.
    traces = [np.trace(PrivateCovariance(budget=BUDGET, norm=2.0, mechanism="analytic", random_state=seed)
                       .fit(records).released_) for seed in range(400)]  # fmt: skip
    certificate = PrivateCovariance(budget=BUDGET, norm=2.0, mechanism="analytic").fit(records).certificate_
    radius = 2 * 2.0 * np.sqrt(3999 / 4000) / np.sqrt(4000)
    expected = np.sqrt(3) * np.sqrt(2) * radius**2 / certificate.mu
    # the std of 400 normals lies within 18 % of the truth but for one time in a million
    assert np.std(traces) == pytest.approx(expected, rel=0.18)
    assert np.std(traces) != pytest.approx(expected * 0.7, rel=0.18)


def test_covariance_is_positive_semidefinite_and_close_under_a_lax_budget(records):
    fitted = PrivateCovariance(budget=LAX, norm=3.0, random_state=0).fit(records)
    assert np.all(np.linalg.eigvalsh(fitted.covariance_) >= -1e-12)
    np.testing.assert_allclose(fitted.covariance_, np.cov(records.T), atol=0.02)


def test_histogram_is_a_density(records):
    fitted = PrivateHistogram(GRID, columns=[0, 1], budget=LAX, random_state=0).fit(records)
    assert np.all(fitted.counts_ >= 0)
    assert fitted.counts_.shape == (6, 4)
    middles = np.stack(np.meshgrid(*[(e[1:] + e[:-1]) / 2 for e in GRID], indexing="ij"), axis=-1).reshape(-1, 2)
    points = np.c_[middles, np.zeros(len(middles))]
    assert np.sum(np.exp(fitted.score_samples(points))) * 1.0 * 1.5 == pytest.approx(1.0)
    assert np.all(fitted.score_samples([[9.0, 0.0, 0.0], [0.0, -3.1, 0.0]]) == -np.inf)
    # the last border belongs to the last cell
    assert fitted.score_samples([[3.0, 3.0, 0.0]]) == fitted.score_samples([[2.9, 2.9, 0.0]])


class Refuses:
    def spend(self, certificate, note=""):
        raise BudgetExceeded(f"{note} refused")


class Remembers:
    def __init__(self):
        self.spent = []

    def spend(self, certificate, note=""):
        self.spent.append((note, certificate.mu))


def test_every_fit_is_charged_once_and_a_refusal_leaves_nothing(records):
    ledger = Remembers()
    pca = PrivatePCA(budget=BUDGET, norm=2.0, mechanism="optimal")
    pipeline = make_pipeline(FunctionTransformer(), pca)
    pipeline.fit(records, privatepca__ledger=ledger)
    assert ledger.spent == [("PrivatePCA.fit", pca.certificate_.mu)]
    fresh = clone(pca)
    with pytest.raises(BudgetExceeded):
        fresh.fit(records, ledger=Refuses())
    assert not hasattr(fresh, "components_")
    assert not hasattr(fresh, "certificate_")


def test_clones_charge_the_ledger_of_the_estimator(records):
    ledger = Remembers()
    pca = PrivatePCA(budget=BUDGET, norm=2.0, ledger=ledger)
    for _ in range(2):
        clone(pca).fit(records)
    pca.fit(records, ledger=(other := Remembers()))
    assert (len(ledger.spent), len(other.spent)) == (2, 1)


def line(records, noise=0.1, seed=2):
    return records @ np.array([1.0, -0.5, 0.0]) + 0.2 + np.random.default_rng(seed).normal(0, noise, len(records))


def test_regression_is_near_least_squares_with_intervals_and_one_charge(records):
    y, ledger = line(records), Remembers()
    bounds = {"low": [-4, -1.3, -0.4], "high": [4, 1.3, 0.4], "target_low": -4, "target_high": 4}
    fitted = PrivateLinearRegression(**bounds, budget=Budget(5.0, 1e-6), ledger=ledger, level=1 - 1e-9)
    fitted.fit(records, y)
    truth = np.linalg.lstsq(np.column_stack([np.ones(len(records)), records]), y, rcond=None)[0]
    assert np.all(fitted.standard_errors_[:2] < 0.1)
    assert np.all((fitted.intervals_[0] <= truth) & (truth <= fitted.intervals_[1]))  # at 1e-9 each
    assert fitted.coef_ == pytest.approx(truth[1:], abs=6 * fitted.standard_errors_.max())
    assert fitted.reliable_
    assert fitted.score(records, y) > 0.9
    assert ledger.spent == [("PrivateLinearRegression.fit", fitted.certificate_.mu)]
    assert fitted.certificate_.verify()
    shrunk = PrivateRidge(1e6, **bounds, budget=BUDGET).fit(records, y)
    assert np.all(np.abs(shrunk.coef_) < 0.01)


def test_delta_0_is_kept_by_moments(records):
    """By noise on products; the components of a record of norm 1 have the l1 norm that the set says, at most."""
    pure = Budget(4.0, 0.0)
    target = line(records)
    fitted = [
        PrivatePCA(2, budget=pure, norm=3.0).fit(records),
        PrivatePCA(2, budget=pure, norm=3.0, adjacency="add/remove", size=4000).fit(records),
        PrivateCovariance(budget=pure, norm=3.0, center=0.0).fit(records),
        PrivateLinearRegression(low=-3, high=3, target_low=-3, target_high=3, budget=pure).fit(records, target),
    ]
    assert all(abs(pca.components_[0, 0]) > 0.99 for pca in fitted[:2])
    np.testing.assert_allclose(fitted[2].covariance_, records.T @ records / 4000, atol=0.3)
    np.testing.assert_allclose(fitted[3].coef_[0], 1.0, atol=0.5)
    for each in fitted:
        assert each.certificate_.meets(pure)
        assert Certificate.from_json(each.certificate_.to_json()).verify()
    with pytest.raises(InvalidInput, match="center"):
        PrivateCovariance(budget=pure, norm=3.0).fit(records)
    ends = np.eye(3)[:2]
    worst = np.array([[1, 1, 1], [1, 1, -1]]) / np.sqrt(3)
    for row in (*ends, *worst):
        answer = queries.moment_entries(row[None], norm=1.0)
        assert answer.sensitivity.contains(answer.value, 0.0)
    assert np.sum(np.abs(answer.value)) > 0.99 * answer.sensitivity.radius


def test_scaler_and_bins_are_near_those_of_the_records(records):
    budget = Budget(20.0, 1e-6)  # 0.03 is 14 standard errors
    scaler = PrivateStandardScaler(low=-2, high=2, budget=budget).fit(records)
    assert scaler.mean_ == pytest.approx([0, 0, 0], abs=0.02)
    assert scaler.scale_[:2] == pytest.approx([0.75, 0.25], abs=0.03)
    assert scaler.inverse_transform(scaler.transform(records)) == pytest.approx(records)
    assert scaler.certificate_.verify()
    public = PrivateStandardScaler(low=-2, high=2, budget=budget, adjacency="replace").fit(records)
    assert public.scale_[:2] == pytest.approx([0.75, 0.25], abs=0.03)
    bins = PrivateKBins(4, low=-2, high=2, budget=Budget(5.0, 1e-6)).fit(records)
    shares = np.bincount(bins.transform(records)[:, 0].astype(int)) / len(records)
    assert shares == pytest.approx(np.full(4, 0.25), abs=0.05)
    assert bins.certificate_.verify()
    pure = PrivateKBins(4, low=-2, high=2, budget=Budget(1.0, 0.0)).fit(records)
    for column in pure.transform(records).T:  # the error of each border is some 9 of 4,000 ranks, and below 120
        shares = np.bincount(column.astype(int)) / len(records)
        assert shares == pytest.approx(np.full(4, 0.25), abs=0.06)
    assert pure.certificate_.meets(Budget(1.0, 0.0))
    counted = PrivateKBins(4, low=-2, high=2, grid=64, mechanism="laplace", budget=Budget(5.0, 1e-6)).fit(records)
    assert counted.bin_edges_[0] == pytest.approx(bins.bin_edges_[0], abs=0.2)


@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
def test_neighbours_of_binned_records_lie_in_the_set(records, adjacency):
    ends = np.full(3, -1.0), np.full(3, 1.0)
    one, other = (grid_counts(rows, *ends, 8, adjacency) for rows in (records[:50], records[1:51]))
    if adjacency == "add/remove":
        other = grid_counts(records[:51], *ends, 8, adjacency)
    difference = other.value - one.value
    assert one.sensitivity.contains(difference)
    assert np.abs(difference).sum() > (3 if adjacency == "replace" else 2)


def test_logistic_regression_learns_and_is_charged_once(records):
    odds = 4 * records[:, 0] - 6 * records[:, 1] + 0.5
    y = np.random.default_rng(3).random(len(records)) < 1 / (1 + np.exp(-odds))
    ledger = Remembers()
    public = {"low": -2, "high": 2, "classes": [False, True]}
    model = PrivateLogisticRegression(100.0, **public, budget=Budget(5.0, 1e-6), ledger=ledger)
    model.fit(records, y)
    assert model.coef_[0, :2] == pytest.approx([4, -6], rel=0.35)
    assert model.score(records, y) > 0.75
    composition = model.certificate_
    assert composition.meets(Budget(5.0, 1e-6))
    assert composition.verify()
    ((note, mu),) = ledger.spent
    assert note == "PrivateLogisticRegression.fit"
    assert composition.mu <= mu <= composition.mu * (1 + 1e-9)
    with pytest.raises(BudgetExceeded):
        clone(model).fit(records, y, ledger=Refuses())
    with pytest.raises(InvalidInput, match="classes are missing"):
        PrivateLogisticRegression(low=-2, high=2, budget=BUDGET).fit(records, y)
    with pytest.raises(InvalidInput, match="binary"):
        clone(model).set_params(classes="from y").fit(records, np.arange(len(records)) % 3)
    # with public classes, no label in y decides whether there is an error, or what the classes are
    for labels in (np.zeros(len(y)), np.arange(len(y)) % 3, np.full(len(y), "x"), y + 0.5):
        assert clone(model).set_params(steps=2).fit(records, labels).classes_.tolist() == [False, True]
    with pytest.raises(InvalidInput, match="exclude"):
        clone(model).set_params(random_state=0).fit(records, y)


def test_a_random_state_is_warned_of(records):
    with pytest.warns(UserWarning, match="can remove the noise"):
        PrivatePCA(budget=BUDGET, norm=2.0, random_state=0).fit(records)


def test_two_fits_differ_without_a_random_state(records):
    first, second = (PrivatePCA(budget=BUDGET, norm=2.0).fit(records).components_ for _ in range(2))
    assert not np.array_equal(first, second)
    for state in (7, np.random.RandomState(7), np.random.default_rng(7)):
        pca = PrivatePCA(budget=BUDGET, norm=2.0, random_state=state)
        assert pca.fit(records).components_.shape == (3, 3)


@pytest.mark.parametrize(
    ("estimator", "word"),
    [
        (PrivatePCA(norm=1.0), "budget"),
        (PrivatePCA(norm=1.0, epsilon=1.0), "budget"),
        (PrivatePCA(norm=1.0, budget=BUDGET, epsilon=1.0), "not both"),
        (PrivatePCA(norm=1.0, budget=1.0), "budget"),
        (PrivatePCA(norm=1.0, epsilon=np.nan, delta=1e-6), "epsilon"),
        (PrivatePCA(budget=BUDGET), "norm"),
        (PrivatePCA(budget=BUDGET, norm=np.nan), "norm"),
        (PrivatePCA(4, budget=BUDGET, norm=1.0), "n_components"),
        (PrivatePCA(0, budget=BUDGET, norm=1.0), "n_components"),
        (PrivatePCA(budget=BUDGET, norm=1.0, relation="add/remove"), "size"),
        (PrivatePCA(budget=BUDGET, norm=1.0, center=[0.0, 1.0]), "center"),
        (PrivatePCA(budget=BUDGET, norm=1.0, mechanism="best"), "mechanism"),
        (PrivatePCA(budget=BUDGET, norm=1.0, random_state="x"), "random_state"),
        (PrivateCovariance(budget=BUDGET), "norm"),
        (PrivateHistogram(budget=BUDGET), "edges"),
        (PrivateHistogram(np.linspace(0, 1, 3), budget=BUDGET), "columns"),
        (PrivateHistogram(5, columns=[0], budget=BUDGET), "edges"),
        (PrivateStandardScaler(budget=BUDGET), "low and high"),
        (PrivateStandardScaler(low=1, high=0, budget=BUDGET), "low and high"),
        (PrivateKBins(0, low=0, high=1, budget=BUDGET), "n_bins"),
        (PrivateKBins(3, low=0, high=1, grid=0, budget=BUDGET), "grid"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_learned(estimator, word, records):
    with pytest.raises(InvalidInput, match=word):
        estimator.fit(records)
    assert not hasattr(estimator, "certificate_")


def test_masked_records_are_refused_and_text_is_not_quoted():
    edges = [0.0, 1.0, 2.0]
    masked = np.ma.masked_array(np.ones((9, 1)), mask=True)
    with pytest.raises(InvalidInput, match="masked"):
        PrivateHistogram(edges=edges, epsilon=1.0, delta=1e-6).fit(masked)
    with pytest.raises(InvalidInput, match="text in it") as caught:
        PrivateHistogram(edges=edges, epsilon=1.0, delta=1e-6).fit([["SECRET"], ["1.0"]])
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda each: type(each).__name__)
def test_records_with_ids_are_certified_for_units(estimator, records, tmp_path):
    rows = records[:300]
    ids, target = np.repeat(np.arange(60), 5), (rows[:, 0] > 0).astype(float)
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    chosen = {"adjacency": "add/remove"} | ({"size": 100} if "size" in estimator.get_params() else {})
    model = clone(estimator).set_params(**chosen, budget=BUDGET, epsilon=None, delta=None)
    one = clone(model).fit(rows, target)
    model.fit(rows, target, ids=ids, contributions=3, ledger=ledger)
    assert [entry.unit for entry in ledger.history()] == ["unit"]
    assert model.certificate_.verify()
    certificates = [each.certificate_ for each in (one, model)]
    laws = [(each.parts[0].certificate if hasattr(each, "parts") else each).law for each in certificates]
    assert laws[1].expected_squared_error() >= 7 * laws[0].expected_squared_error()  # three times the noise
    with pytest.raises(InvalidInput, match="go together"):
        clone(model).fit(rows, target, ids=ids)
    for known in (ids, [1] + [None] * 299, [None] * 300):  # how many have an id is private, and changes no error
        clone(model).fit(rows, target, ids=known, contributions=3)
        with pytest.raises(InvalidInput, match="adjacency must be add/remove for units"):
            clone(model).set_params(adjacency="replace").fit(rows, target, ids=known, contributions=2)


def test_a_real_ledger_knows_who_asked(records, tmp_path):
    Ledger(tmp_path / "budget.db", Budget(3.0, 1e-6)).set_quota("ada", Budget(1.2, 1e-6))
    ledger = Ledger(tmp_path / "budget.db", analyst="ada", purpose="report")
    pca = PrivatePCA(budget=BUDGET, norm=2.0, ledger=ledger).fit(records)
    (entry,) = ledger.history()
    assert (entry.analyst, entry.purpose, entry.note) == ("ada", "report", "PrivatePCA.fit")
    assert entry.certificate.mu == pca.certificate_.mu
    with pytest.raises(BudgetExceeded, match="quota 'ada'"):
        clone(pca).fit(records)
