"""Noise over time for a training: the sampled certificate against all patterns, bands, and what is refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from matrixdp import Budget
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.adjacency import ADD_REMOVE, ZERO_OUT
from matrixdp.distributions.time_workloads import schedule
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.learn import QuantileClip, make_private
from matrixdp.learn.time_plan import plan
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Participation
from time_cases import correlated, over_time, public
from training_cases import BUDGET, DATA, LOSS, SIZE, network, trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def true_delta(strategy, groups, rate, epsilon):
    """The larger delta of both directions, of a record of group 0 that always adds the same unit vector, by quadrature.

    Its turns are the columns 0, groups, ... of C, here two; outside the plane of these columns nothing changes.
    """
    turns = strategy[:, ::groups]
    assert turns.shape[1] == 2
    means = np.linalg.qr(turns)[1]
    ends = [means @ np.array(pattern) for pattern in itertools.product((0, 1), repeat=2)]
    weights = [np.prod([rate if taken else 1 - rate for taken in p]) for p in itertools.product((0, 1), repeat=2)]
    line = np.arange(-12.0, 12.0, 0.02)
    x, y = np.meshgrid(line, line)
    density = [np.exp(-((x - a) ** 2 + (y - b) ** 2) / 2) / (2 * np.pi) * 0.02**2 for a, b in ends]
    present = sum(weight * each for weight, each in zip(weights, density, strict=True))
    absent, factor = density[0], math.exp(epsilon)
    return max(np.maximum(p - factor * q, 0).sum() for p, q in ((present, absent), (absent, present)))


def claimed_delta(law, groups, rate, epsilon):
    account = Accountant()
    turns = math.ceil(law.shape[0] / groups)
    account.add(certify(law, Participation(1.0, adjacency=ADD_REMOVE)), turns, rate)
    return account.delta(epsilon)


@pytest.mark.parametrize(
    ("coefficients", "steps", "groups"),
    [([0.8], 2, 1), ([1.0, 0.6], 4, 2), ([0.7, 0.5, 0.4], 6, 3), ([0.9, 0.5], 6, 3), ([1.0, -0.7], 4, 2)],
    ids=str,
)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_sampled_guarantee_is_that_of_the_worst_record(coefficients, steps, groups, rate):
    law = over_time(coefficients, steps, 1)
    for epsilon in (0.1, 0.5, 1.5):
        true = true_delta(law.covariance.strategy(), groups, rate, epsilon)
        claimed = claimed_delta(law, groups, rate, epsilon)
        assert true <= claimed * (1 + 1e-6)
        assert claimed <= 1.02 * true + 1e-9  # its last turn may be cut short; here none is


def test_more_bands_than_groups_would_be_a_false_claim_and_are_refused():
    law = over_time([0.6, 0.6, 0.6], 4, 1)
    assert true_delta(law.covariance.strategy(), 2, 0.1, 1.5) > 1.2 * claimed_delta(law, 2, 0.1, 1.5)
    with pytest.raises(InvalidInput, match="bands must be at most 2, the groups"):
        correlated(bands=3, groups=2)
    with pytest.raises(InvalidInput, match="bands must be at most 2, the groups"):
        correlated(noise=over_time([1.0, 0.5, 0.2], 12, SIZE, 9.0), bands=None, groups=2)


def test_a_dense_strategy_is_not_sampled():
    dense = over_time([1.0, -0.5], 12, SIZE, 9.0, inverse=True)
    for noise in ("inverse-banded", dense):
        with pytest.raises(InvalidInput, match=r"sampl"):
            correlated(noise=noise, bands=None)


def test_no_pattern_of_a_fixed_order_is_worse_than_its_certificate():
    run = correlated("fixed", steps=15)
    covariance, clip = run.noise.law.covariance, run.sensitivity.clip
    worst = max(np.linalg.norm(covariance.strategy()[:, first::5].sum(axis=1)) for first in range(5))
    assert run.certificate.adjacency == ZERO_OUT
    assert run.certificate.exact
    assert clip * worst / covariance.std <= run.certificate.mu <= 1.003 * clip * worst / covariance.std


@pytest.mark.parametrize("order", ["sampled", "fixed"])
@pytest.mark.parametrize("bands", [1, 4])
def test_the_noise_uses_the_budget_and_no_more(order, bands):
    run = correlated(order, bands=bands)
    assert 0.98 * BUDGET.epsilon <= run._costs.after(12).epsilon(BUDGET.delta) <= BUDGET.epsilon
    composition = run.composition()
    assert composition.meets(BUDGET)
    assert composition.verify()
    run.train(1)
    assert run.epsilon() <= BUDGET.epsilon
    assert "epsilon" in str(run)


def test_a_turn_that_has_begun_counts():
    training = public(records=40, batch_size=5)
    found = [training.releases(4, steps) for steps in (0, 1, 4, 5, 16)]
    assert found == [(0, 0.5), (1, 0.5), (1, 0.5), (2, 0.5), (4, 0.5)]
    assert [public(order="fixed").releases(1, steps) for steps in (0, 1, 16)] == [(0, 1.0), (1, 1.0), (1, 1.0)]


def test_one_band_with_sampling_is_private_sgd():
    ours, usual = correlated(bands=1), trainer(batch_size=8, steps=12)
    assert (ours.rate, ours.noise.groups) == (usual.rate, 1)
    assert math.isclose(ours.noise.law.covariance.std * ours.noise.law.covariance.coefficients.ravel()[0] ** -1,
                        usual.noise.law.covariance.std, rel_tol=3e-3)  # fmt: skip


@pytest.mark.parametrize(("order", "mechanism"), [("sampled", "toeplitz"), ("fixed", "banded"),
                                                  ("fixed", "toeplitz"), ("fixed", "inverse-banded")])  # fmt: skip
def test_the_number_of_bands_is_chosen_by_the_error_and_never_worse_than_one(order, mechanism):
    training = public(order=order, records=64, batch_size=8, steps=24)

    def error(bands):
        certificate, _ = plan(training, mechanism, BUDGET, bands=bands, workload="momentum:0.5")
        return certificate.law.expected_squared_error(workload="momentum:0.5")

    assert error("auto") == min(error(bands) for bands in (1, 2, 4, 8))
    assert error("auto") < error(1)


def test_only_rows_that_a_record_touches_are_accounted_for():
    law, times = over_time([1.0, 0.5], 100, 10, 4.0), Participation(1.0, separation=50, times=2)
    drawing = plan(public(order="fixed", records=100, batch_size=2, steps=100, size=10), "toeplitz", BUDGET, bands=2)[
        0
    ].drawing
    assert drawing.total_variation <= 2 * 2 * 10 * drawing.grid.total_variation * (1 + 1e-9)
    assert certify(law, times).mu == pytest.approx(math.sqrt(2 * 1.25) / 4, rel=1e-9)


def test_a_law_that_does_not_keep_the_budget_needs_the_word_of_the_caller():
    law = over_time([1.0, 0.5], 12, SIZE, 0.01)
    for order in ("sampled", "fixed"):
        with pytest.raises(BudgetExceeded, match="too small to take one step"):
            correlated(order, noise=law, bands=None)
        run = correlated(order, noise=law, bands=None, accept_violation=True)
        assert run._costs.after(12).epsilon(BUDGET.delta) > BUDGET.epsilon


def test_momentum_is_in_the_workload():
    model = network()
    plain, heavy = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=m) for m in (0.0, 0.9))
    loader = DataLoader(DATA, batch_size=8)
    options = {"loss": LOSS, "budget": BUDGET, "clip": 0.5, "steps": 12, "noise": "banded", "bands": 4}
    with pytest.warns(UserWarning, match="Poisson sampling"):
        laws = [make_private(model, o, loader, **options).noise.law for o in (plain, heavy)]
    with pytest.warns(UserWarning, match="Poisson sampling"):
        rates = make_private(model, plain, loader, workload=schedule(np.linspace(1, 0.1, 12)), **options).noise.law
    prefix, momentum = ({w: law.expected_squared_error(workload=w) for w in ("prefix", "momentum:0.9")} for law in laws)
    assert prefix["prefix"] < momentum["prefix"]
    assert momentum["momentum:0.9"] < prefix["momentum:0.9"]
    assert rates.expected_squared_error(workload="prefix") > prefix["prefix"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"bands": 6}, InvalidInput, "bands must be at most 5, the records over batch_size"),
        ({"groups": 6}, InvalidInput, "groups must be at most 5"),
        ({"groups": 0}, InvalidInput, "groups"),
        ({"groups": 4, "order": "fixed"}, InvalidInput, "groups are for"),
        ({"bands": 0}, InvalidInput, "bands"),
        ({"bands": 2.5}, InvalidInput, "bands"),
        ({"bands": "many"}, InvalidInput, "bands"),
        ({"bands": 13, "order": "fixed", "noise": "toeplitz"}, InvalidInput, "bands must be at most the number"),
        ({"bands": 6, "order": "fixed"}, InvalidInput, "bands must be at most the separation"),
        ({"order": "shuffled"}, InvalidInput, "order must be one of"),
        ({"workload": np.ones((12, 12))}, InvalidInput, "lower triangular"),
        ({"workload": "sums"}, InvalidInput, "workload must be one of"),
        ({"steps": None}, InvalidInput, "epochs or steps"),
        ({"clipping": "linf"}, InvalidInput, "clipping"),
        ({"by_layer": True}, InvalidInput, "by_layer"),
        ({"clip": QuantileClip(start=1.0)}, InvalidInput, "a fixed clip"),
        ({"gamma": 1.0}, InvalidInput, "bands, workload and memory"),
        ({"memory": "none"}, InvalidInput, "memory must be one of"),
        ({"memory": "redrawn"}, InvalidInput, "memory='redrawn' is for"),
        ({"noise": "analytic", "bands": None, "state": "file"}, InvalidInput, "state is for noise over time"),
        (
            {"noise": "analytic", "order": "fixed", "bands": None},
            InvalidInput,
            "order and groups are for noise over time",
        ),
        ({"noise": "analytic", "groups": 2, "bands": None}, InvalidInput, "order and groups are for noise over time"),
        ({"noise": over_time([1.0], 11, SIZE, 9.0), "bands": None}, InvalidInput, "of shape"),
        ({"noise": over_time([1.0], 12, SIZE, 9.0), "bands": 2}, InvalidInput, "used as it is"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_settings_are_refused(changes, error, words, tmp_path):
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    with pytest.raises(error, match=words):
        correlated(ledger=ledger, **changes)
    assert ledger.history() == []
