"""Training with noise over time: the sampled certificate against all patterns, the law drawn, and steps taken again."""

import contextlib
import io
import itertools
import math
import os
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from matrixdp import Budget
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.adjacency import ADD_REMOVE, ZERO_OUT
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import OverTime
from matrixdp.distributions.time_workloads import schedule
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.learn import ClippedGradients, PrivateSGD, QuantileClip, make_private
from matrixdp.learn.correlated_noise import CorrelatedNoise, Training, plan
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Participation

FALSE_ALARMS = 1e-6
RECORDS, SIZE = 40, 27
BUDGET = Budget(3.0, 1e-5)
LOSS = nn.CrossEntropyLoss(reduction="none")
INPUTS = 3 * torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())

pytestmark = pytest.mark.usefixtures("one_thread")


def public(**changes):
    """What is public of a small training."""
    usual = {"records": 40, "batch_size": 5, "steps": 16, "size": 30, "change": 1.0, "order": "sampled"}
    return Training(**(usual | changes))


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))


def trainer(model=None, **changes):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return PrivateSGD(model, optimizer, DATA, LOSS, **({"budget": BUDGET, "batch_size": 8, "clip": 0.5} | changes))


def parameters(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def saved(run):
    """A checkpoint that was written and read."""
    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_a_child(function):
    """What a forked process says."""
    pipe, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(end, said.encode())
        os._exit(0)
    os.close(end)
    os.waitpid(child, 0)
    with os.fdopen(pipe, "rb") as file:
        return file.read().decode()


def over_time(coefficients, steps, size, std=1.0, **options):
    return Gaussian(OverTime(np.asarray(coefficients, dtype=float), (steps, size), std, **options))


def correlated(order="sampled", **changes):
    """A quick trainer with noise over time."""
    settings = {"noise": "banded", "bands": 4, "order": order, "steps": 12} | changes
    if settings["bands"] is None:
        del settings["bands"]
    return trainer(**settings)


# --- the sampled certificate ---


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


# --- batches ---


def test_a_record_takes_part_at_the_turns_of_its_group():
    noise = CorrelatedNoise(public(records=400, batch_size=50, steps=48), over_time([1.0, 0.5], 48, 30, 9.0), 4)
    batches = [set(noise.batch(step)) for step in range(48)]
    groups = [set.union(*batches[turn::4]) for turn in range(4)]
    assert 390 < len(set.union(*groups)) == sum(map(len, groups))  # one in 4096 records never takes part
    count, mean = sum(map(len, batches)), 48 / 4 * noise.rate * 400
    assert noise.rate == 0.5
    assert abs(count - mean) < stats.norm.isf(FALSE_ALARMS / 2) * math.sqrt(mean * 0.5)
    assert batches[0] != batches[4]
    assert batches[7] == set(noise.batch(7))  # a step that is taken again has the same batch
    smallest = stats.binom.isf(1 - FALSE_ALARMS / 8, 400, 0.25)
    assert all(len(group) >= smallest for group in groups)


def test_a_fixed_order_uses_each_record_once_per_epoch():
    noise = CorrelatedNoise(public(records=43, order="fixed"), over_time([1.0, 0.5], 16, 30, 9.0), 1)
    batches = [noise.batch(step) for step in range(18)]
    assert sorted(itertools.chain(*batches[:9])) == list(range(43))
    assert batches[9:] == batches[:9]
    assert list(itertools.chain(*batches[:9])) != list(range(43))


def test_a_batch_of_another_step_is_refused():
    run = correlated()
    first, second = run.batches(), run.batches()
    other = next(second)
    run.step(next(first))
    with pytest.raises(InvalidInput, match="another step than the next one, 2"):
        run.step(other)
    run.step(next(first))
    assert run.steps == 2


# --- the law drawn ---

STRATEGIES = {
    "Toeplitz": over_time([1.0, 0.6, 0.3], 7, 4000, 2.0),
    "banded": over_time(np.tril(np.linspace(1.5, 0.4, 21).reshape(7, 3), 2) * [1, 0.5, 0.2]
                        * (np.arange(3) <= np.arange(7)[:, None]), 7, 4000, 0.5),
    "inverse": over_time([1.0, -0.5, -0.2], 7, 4000, 2.0, inverse=True),
    "one band": over_time([2.0], 7, 4000, 1.0),
}  # fmt: skip


def decoded(law, rows):
    """What the noise makes of rows, step by step."""
    noise = CorrelatedNoise(public(steps=7, size=4000, order="fixed"), law, 1)
    flats = [torch.tensor(row) for row in rows]
    for flat in flats:
        noise.add_(flat)
    return torch.stack(flats).numpy()


def is_rejected(law, result, rows):
    """Whether C (x^ - x) / std are not 7 x 4000 independent standard normal numbers."""
    white = law.covariance.whiten(result - rows)
    moments = white @ white.T
    low, high = stats.chi2.ppf([FALSE_ALARMS / 4, 1 - FALSE_ALARMS / 4], white.size)
    off = moments[np.triu_indices(7, 1)] / math.sqrt(4000)
    return not low < np.trace(moments) < high or np.max(np.abs(off)) > stats.norm.isf(FALSE_ALARMS / 4 / 21)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_decoded_has_the_noise_of_the_law(name):
    law, rows = STRATEGIES[name], np.random.default_rng(1).normal(0, 0.05, (7, 4000))
    assert not is_rejected(law, decoded(law, rows), rows)
    assert is_rejected(law, decoded(law.scaled(0.95), rows), rows)
    if name != "one band":
        independent = rows + law.covariance.std * np.random.default_rng(2).normal(size=rows.shape)
        assert is_rejected(law, independent, rows)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_goes_on_the_grid_is_off_by_less_than_is_accounted_for(name, monkeypatch):
    """v is on the grid; m, of rows chosen in view of x^, is within the room of the certificate of the exact one."""
    law = STRATEGIES[name]
    noise = CorrelatedNoise(public(steps=7, size=4000, order="fixed"), law, 1)
    means, released, real = [], [], noise._noisy
    monkeypatch.setattr(noise, "_noisy", lambda mean: (means.append(mean[:3].numpy().copy()),
                                                       released.append(real(mean)), released[-1])[2])  # fmt: skip
    rows, estimates, flat = [], [], torch.full((4000,), 0.1, dtype=torch.float64)
    for _ in range(7):
        rows.append(flat[:3].numpy().copy())
        noise.add_(flat)
        estimates.append(flat[:3].numpy().copy())
        flat = flat / 100 + 0.1  # the next row looks at what was released
    step = law.covariance.std * noise.drawing.grid.step
    assert all(torch.equal(torch.round(v / step), v / step) for v in released)
    strategy = [[Fraction(float(c)) for c in row] for row in law.covariance.strategy()]
    exact = []
    for t in range(7):
        if law.covariance.inverse:  # r as B and the releases give it, without rounding
            bands = [Fraction(float(c)) for c in law.covariance.bands_at(t)]
            mixed = sum(bands[j] * (Fraction(float(released[t - j][0])) - exact[t - j]) for j in range(1, len(bands)))
            exact.append((Fraction(float(rows[t][0])) + mixed) / bands[0])
        else:
            before = sum(
                strategy[t][i] * (Fraction(float(estimates[i][0])) - Fraction(float(rows[i][0]))) for i in range(t)
            )
            exact.append(strategy[t][t] * Fraction(float(rows[t][0])) - before)
    worst = max(abs(float(Fraction(float(means[t][0])) - exact[t])) for t in range(7))
    allowed = noise.drawing.enlargement * law.covariance.std
    assert worst * math.sqrt(7 * 4000) * 2 <= allowed + 4000 * 2.0**-40 * (name == "one band")


def test_rows_that_cannot_be_rounded_safely_are_refused_before_anything_is_drawn():
    with pytest.raises(InvalidInput, match="rounded safely"):
        CorrelatedNoise(public(change=1e12), over_time([1.0, 0.5], 16, 30), 2)


def test_only_rows_that_a_record_touches_are_accounted_for():
    law, times = over_time([1.0, 0.5], 100, 10, 4.0), Participation(1.0, separation=50, times=2)
    drawing = plan(public(order="fixed", records=100, batch_size=2, steps=100, size=10), "toeplitz", BUDGET, bands=2)[
        0
    ].drawing
    assert drawing.total_variation <= 2 * 2 * 10 * drawing.grid.total_variation * (1 + 1e-9)
    assert certify(law, times).mu == pytest.approx(math.sqrt(2 * 1.25) / 4, rel=1e-9)


# --- a training ---


@pytest.mark.parametrize("order", ["sampled", "fixed"])
def test_without_noise_a_step_is_that_of_plain_sums(order):
    law = over_time([1.0, 0.5, 0.25], 12, SIZE, 1e-5)
    run = correlated(order, noise=law, bands=None, accept_violation=True)
    reference = ClippedGradients(run.model, LOSS, clip=0.5)
    for batch in run.batches(2):
        reference.zero()
        reference.accumulate(*batch.drawn)
        expected = reference.flat / 8
        run.step(batch)
        assert torch.allclose(run.gradients.flat, expected, atol=1e-4)
        if run.steps == 10:
            break


def test_a_law_that_does_not_keep_the_budget_needs_the_word_of_the_caller():
    law = over_time([1.0, 0.5], 12, SIZE, 0.01)
    for order in ("sampled", "fixed"):
        with pytest.raises(BudgetExceeded, match="too small to take one step"):
            correlated(order, noise=law, bands=None)
        run = correlated(order, noise=law, bands=None, accept_violation=True)
        assert run._costs.after(12).epsilon(BUDGET.delta) > BUDGET.epsilon


def dropout():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 2))


@pytest.mark.parametrize("order", ["sampled", "fixed"])
def test_a_training_that_is_resumed_is_the_same_training(order):
    """A process that is killed after a checkpoint loses steps; taken again, they have the same noise, not a second."""
    first = correlated(order, model=dropout())
    batches = first.batches(3)
    for batch in itertools.islice(batches, 4):
        first.step(batch)
    state, grads = saved(first), []
    for batch in itertools.islice(batches, 8):
        first.step(batch)
        grads.append(first.gradients.flat.clone())
    again = correlated(order, model=dropout())
    again.load_state_dict(state)
    assert (again.steps, again.epsilon()) == (4, correlated_epsilon(again, 4))
    taken = []
    for batch in itertools.islice(again.batches(3), 8):
        again.step(batch)
        taken.append(again.gradients.flat.clone())
    assert all(map(torch.equal, grads, taken))
    assert torch.equal(parameters(first), parameters(again))
    with pytest.raises(BudgetExceeded):
        again.train()


def correlated_epsilon(run, steps):
    return run._costs.after(steps).epsilon(BUDGET.delta)


def test_another_sum_at_the_same_step_has_other_noise():
    first, second = correlated("fixed"), correlated("fixed")
    second.noise.load_state_dict(first.noise.state_dict())
    zeros, ones = torch.zeros(SIZE, dtype=torch.float64), torch.full((SIZE,), 2.0**-9, dtype=torch.float64)
    first.noise.add_(zeros)
    second.noise.add_(ones)
    assert float((ones - 2.0**-9 - zeros).abs().min()) > 0


def test_trainings_have_noise_and_groups_of_their_own():
    first, second = correlated(), correlated()
    assert [first.noise.batch(t) for t in range(8)] != [second.noise.batch(t) for t in range(8)]
    first.train(1)
    second.train(1)
    assert not torch.equal(parameters(first), parameters(second))


def test_the_ledger_is_charged_once_before_the_first_noise(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    run = correlated(ledger=ledger)
    assert ledger.history() == []
    seen, real = [], run.noise.add_
    monkeypatch.setattr(run.noise, "add_", lambda flat: (seen.append(len(ledger.history())), real(flat)))
    run.train(1)
    assert seen == [1] * 5
    assert [(e.count, e.planned, e.sampling_rate) for e in ledger.history()] == [(3, 3, 0.8)]
    assert run._costs.after(12).epsilon(1e-5) <= ledger.spent()


@pytest.mark.parametrize("charged", [True, False])
def test_a_ledger_allows_no_second_run_from_a_checkpoint(tmp_path, charged):
    """Each would release the same steps with another sum, and the charge is for one run."""
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    run = correlated(ledger=ledger if charged else None)
    run.step(next(iter(run)))
    state, history, again = saved(run), ledger.history(), correlated(ledger=ledger)
    before = parameters(again)
    with pytest.raises(InvalidInput, match=r"with a ledger, .* start a new training"):
        again.load_state_dict(state)
    assert (again.steps, again.noise.step, ledger.history()) == (0, 0, history)
    assert torch.equal(parameters(again), before)
    with pytest.raises(BudgetExceeded) if charged else contextlib.nullcontext():
        again.train(1)  # a training of its own, with a charge of its own
    assert "second release" in str(again)


def test_batches_drawn_before_a_checkpoint_was_loaded_are_refused():
    """It brings other coins: a record of a batch drawn before could be in the next one too."""
    other, run = correlated("fixed"), correlated("fixed")
    other.step(next(iter(other)))
    state, batches = saved(other), run.batches()
    batch = next(batches)
    run.load_state_dict(state)
    for old in (batch, next(batches)):
        with pytest.raises(InvalidInput, match=r"Draw batches anew|left out"):
            run.step(old)
    assert (run.steps, run.noise.step) == (1, 1)
    run.train(1)
    assert run.steps == 6


def test_trainings_from_one_checkpoint_without_a_step_share_no_coins(tmp_path):
    """Each has a ledger of its own, which takes its batches for independent of all others."""
    state, runs = saved(correlated()), []
    for name in ("one", "two"):
        run = correlated(ledger=Ledger(tmp_path / name, Budget(4.0, 1e-5)))
        run.load_state_dict(state)
        runs.append(run)
    assert runs[0].noise._key.expose() != runs[1].noise._key.expose()
    assert [runs[0].noise.batch(t) for t in range(8)] != [runs[1].noise.batch(t) for t in range(8)]
    runs[0].train(1)
    assert len(runs[0].ledger.history()) == 1


def test_a_ledger_without_room_allows_no_step(tmp_path):
    ledger = Ledger(tmp_path / "ledger", Budget(1.0, 1e-5))
    run = correlated(ledger=ledger)
    with pytest.raises(BudgetExceeded):
        run.train(1)
    assert (run.steps, run.noise.step, ledger.history()) == (0, 0, [])


def test_checkpoints_of_other_trainings_are_refused():
    run = correlated()
    run.train(1)
    state = saved(run)
    for other in (trainer(batch_size=8, steps=12), correlated(bands=2), correlated("fixed"), correlated(steps=13)):
        with pytest.raises(InvalidInput):
            other.load_state_dict(state)
        assert other.steps == 0
    with pytest.raises(InvalidInput, match="before the first step"):
        run.load_state_dict(state)
    with pytest.raises(InvalidInput, match="not of a training with noise over time"):
        correlated().load_state_dict(saved(trainer(batch_size=8, steps=12)))
    with pytest.raises(InvalidInput, match="part of the guarantee"):
        run.noise.groups = 2


def test_a_checkpoint_fits_one_strategy_and_one_number_of_records():
    """The rest of what is public can agree: with the same size of noise, mu is the same for many strategies."""
    law = over_time([1.0, 0.5], 12, SIZE, 9.0)
    run = CorrelatedNoise(public(size=SIZE, steps=12), law, 4)
    run.add_(torch.zeros(SIZE, dtype=torch.float64))
    state = run.state_dict()
    CorrelatedNoise(run.training, law, 4).load_state_dict(state)
    others = (
        (public(size=SIZE, steps=12), over_time([0.5, 1.0], 12, SIZE, 9.0), 4),
        (public(size=SIZE, steps=12), over_time([1.0, 0.5], 12, SIZE, 9.0, inverse=True), 4),
        (public(size=SIZE, steps=12), over_time([1.0, 0.5], 12, SIZE, 9.5), 4),
        (public(size=SIZE, steps=12), law, 2),
        (public(size=SIZE, steps=12, records=39), law, 4),
        (public(size=SIZE, steps=12, batch_size=6), law, 4),
    )
    for training, noise, groups in others:
        other = CorrelatedNoise(training, noise, groups)
        with pytest.raises(InvalidInput, match="another training"):
            other.load_state_dict(state)
        assert other.step == 0
    with pytest.raises(InvalidInput, match="another training"):
        CorrelatedNoise(run.training, law, 4).load_state_dict({k: v for k, v in state.items() if k != "law"})


def test_a_damaged_checkpoint_is_refused_and_changes_nothing():
    run = correlated("fixed")
    run.train(1)
    damages = ({"step": 0}, {"step": 13}, {"history": None}, {"history": torch.zeros(2, SIZE)}, {"key": "00"})
    for damage in damages:
        other, state = correlated("fixed"), saved(run)
        state["over_time"].update(damage)
        with pytest.raises(InvalidInput):
            other.load_state_dict(state)
        assert (other.steps, other.noise.step) == (0, 0)
        assert other.state_dict()["charged"] == 0


def test_a_forked_process_takes_no_step():
    run = correlated()
    batch = next(iter(run))
    assert in_a_child(lambda: run.step(batch)).startswith("InvalidInput: the trainer belongs to process")
    assert in_a_child(lambda: run.noise.batch(0)).startswith("InvalidInput: key belongs to process")


@pytest.mark.filterwarnings("ignore:training with a generator of your own")
def test_a_seeded_training_repeats_itself_and_is_marked():
    runs = [correlated(generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    for run in runs:
        run.train(2)
        assert run.noise.drawing.reproducible
        assert saved(run)["over_time"]["key"] == ""
    assert torch.equal(*map(parameters, runs))


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


def test_a_loop_of_its_own_can_have_it():
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="the same batches"):
        model, optimizer, loader = make_private(
            model, optimizer, DataLoader(DATA, batch_size=8), budget=BUDGET, clip=0.5, steps=5, trust_loop=True,
            noise="toeplitz", order="fixed", bands=4,
        )  # fmt: skip
    sizes = []
    for inputs, targets in loader:
        sizes.append(len(inputs))
        optimizer.zero_grad()
        LOSS(model(inputs), targets).mean().backward()
        optimizer.step()
    assert sizes == [8] * 5
    assert loader.trainer.noise.step == 5


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
        ({"gamma": 1.0}, InvalidInput, "bands and workload"),
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
