"""Noise over time in a training: its batches, the law that is drawn, and how old noise is remembered."""

import itertools
import math
from fractions import Fraction
from operator import mul

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader

from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.learn import ClippedGradients, make_private
from matrixdp.learn.correlated_noise import CorrelatedNoise
from matrixdp.secure.entropy import Key
from time_cases import correlated, over_time, public
from training_cases import BUDGET, DATA, LOSS, SIZE, in_a_child, parameters, saved, seeds

pytestmark = pytest.mark.usefixtures("one_thread")

FALSE_ALARMS = 5e-7
STRATEGIES = {
    "Toeplitz": over_time([1.0, 0.6, 0.3], 7, 4000, 2.0),
    "banded": over_time(np.tril(np.linspace(1.5, 0.4, 21).reshape(7, 3), 2) * [1, 0.5, 0.2]
                        * (np.arange(3) <= np.arange(7)[:, None]), 7, 4000, 0.5),
    "inverse": over_time([1.0, -0.5, -0.2], 7, 4000, 2.0, inverse=True),
    "one band": over_time([2.0], 7, 4000, 1.0),
}  # fmt: skip


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
    """What is released, less its noise, is within the room of the certificate of C x, of rows chosen in view of x^."""
    law = STRATEGIES[name]
    noise = CorrelatedNoise(public(steps=7, size=4000, order="fixed"), law, 1)
    released, drawn, real = [], [], noise._noisy

    def watched(mean, kept):
        noisy, secret = real(mean, kept)
        released.append(noisy.clone())
        noise._draw_again(secret, room := torch.empty_like(mean))
        assert kept is None or torch.equal(kept, room)
        drawn.append(Fraction(float(room[0])))
        return noisy, secret

    monkeypatch.setattr(noise, "_noisy", watched)
    rows, estimates, flat = [], [], torch.full((4000,), 0.1, dtype=torch.float64)
    for _ in range(7):
        rows.append(Fraction(float(flat[0])))
        noise.add_(flat)
        estimates.append(Fraction(float(flat[0])))
        flat = flat / 100 + 0.1  # the next row looks at what was released
    step = law.covariance.std * noise.drawing.grid.step
    assert all(torch.equal(torch.round(v / step), v / step) for v in released)
    full = law.covariance._inverse if law.covariance.inverse else law.covariance.strategy()
    matrix = [[Fraction(float(entry)) for entry in row] for row in full]
    # C x^ is what is released, and C x what it should be without noise
    off = [estimate - row for estimate, row in zip(estimates, rows, strict=True)]
    white = solved(matrix, off) if law.covariance.inverse else [sum(map(mul, row, off)) for row in matrix]
    worst = max(abs(float(found - noise_of)) for found, noise_of in zip(white, drawn, strict=True))
    allowed = noise.drawing.enlargement * law.covariance.std
    changed = min(7, law.covariance.bands) * 4000  # by a record, which takes part once
    assert worst * math.sqrt(changed) * 2 <= allowed


def solved(matrix, right):
    """The solution of a lower-triangular system, without rounding."""
    found = []
    for row, value in zip(matrix, right, strict=True):
        found.append((value - sum(map(mul, row, found))) / row[len(found)])
    return found


def test_rounding_that_adds_up_over_the_rows_is_accounted_for():
    """Of an inverse strategy: rows that are always rounded the same way, which a record can bring about."""
    law = over_time([1.0, -1.0], 64, 30, 4.0, inverse=True)  # C x are running sums
    noise = CorrelatedNoise(public(steps=64, order="fixed"), law, 1)
    step, total, off = 4.0 * noise.drawing.grid.step, 0.0, []
    for _ in range(64):
        flat = torch.full((30,), 0.49 * step, dtype=torch.float64)
        past = noise._with_old_noise(torch.zeros_like(flat), [-1.0]) if noise.step else torch.zeros(30)
        flat -= past - step * torch.round(past / step)  # so that the mean has this remainder
        row = flat.clone()
        noise.add_(flat)
        total = total + row - flat  # - C e, which is x^ less all that was drawn so far
        off.append(total + noise._history[0])
    found = float(torch.stack(off).norm()) / 4.0
    unaccounted = noise.drawing.grid.displacement * math.sqrt(64 * 30)
    assert unaccounted < found < noise.drawing.enlargement


def test_noise_that_is_drawn_again_gives_the_same_training(tmp_path):
    """In every bit, with the same key; nothing as large as the model is kept."""
    runs = [correlated("fixed", noise="inverse-banded", memory=memory) for memory in ("kept", "redrawn")]
    kept, redrawn = runs
    redrawn.noise._begin(Key.from_bytes(kept.noise._key.expose()))
    for run in runs:
        run.train(2)
    assert torch.equal(*map(parameters, runs))
    assert (kept.noise._history.shape, redrawn.noise._history, len(redrawn.noise._secrets)) == ((3, SIZE), None, 3)
    assert kept.certificate.to_json() == redrawn.certificate.to_json()
    again = correlated("fixed", noise="inverse-banded", memory="redrawn")
    again.load_state_dict(saved(redrawn))
    for run in (redrawn, again):
        for batch in itertools.islice(run.batches(), 2):
            run.step(batch)
    assert torch.equal(parameters(redrawn), parameters(again))
    redrawn.noise._secrets[-1] = bytes(32)  # other noise than was drawn makes another sum
    zeros = torch.zeros(SIZE, dtype=torch.float64)
    assert not torch.equal(*(run.noise._with_old_noise(zeros, [-0.5]) for run in (redrawn, again)))


@pytest.mark.parametrize("noise", ["banded", "toeplitz"])
def test_noise_of_a_banded_strategy_is_not_drawn_again(noise):
    with pytest.raises(InvalidInput, match=r"memory='redrawn' is for .* noise of all earlier steps"):
        correlated("fixed", noise=noise, memory="redrawn")


def test_rows_that_cannot_be_rounded_safely_are_refused_before_anything_is_drawn():
    with pytest.raises(InvalidInput, match="rounded safely"):
        CorrelatedNoise(public(change=1e12), over_time([1.0, 0.5], 16, 30), 2)


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


def test_a_ledger_without_room_allows_no_step(tmp_path):
    ledger = Ledger(tmp_path / "ledger", Budget(1.0, 1e-5))
    run = correlated(ledger=ledger)
    with pytest.raises(BudgetExceeded):
        run.train(1)
    assert (run.steps, run.noise.step, ledger.history()) == (0, 0, [])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of a fork while other threads run
def test_a_forked_process_takes_no_step():
    run = correlated()
    batch = next(iter(run))
    assert in_a_child(lambda: run.step(batch)).startswith("InvalidInput: the trainer belongs to process")
    assert in_a_child(lambda: run.noise.batch(0)).startswith("InvalidInput: key belongs to process")


@seeds
def test_a_seeded_training_repeats_itself_and_is_marked():
    runs = [correlated(generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    for run in runs:
        run.train(2)
        assert run.noise.drawing.reproducible
        assert saved(run)["over_time"]["key"] == ""
    assert torch.equal(*map(parameters, runs))


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
