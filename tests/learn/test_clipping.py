"""A clip that follows the norms: what one record changes, the count that is paid for, and where the clip goes."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from matrixdp import Budget
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients, PrivateSGD, QuantileClip, make_private
from matrixdp.learn.clipping import largest_change

BUDGET = Budget(3.0, 1e-5)
CLIP = QuantileClip(start=0.7, quantile=0.5, weight=0.4)

pytestmark = pytest.mark.usefixtures("one_thread")


def squares(outputs, targets):
    return (outputs - targets).square().sum(1)


class Scaled(nn.Module):
    """A model with a parameter of its own, which runs one record at a time."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([0.3, -0.2, 0.5]))

    def forward(self, inputs):
        return inputs * self.factor


def linear():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 3, bias=False))


def batch(records=20):
    generator = torch.Generator().manual_seed(3)
    size = torch.logspace(-2, 2, records)[:, None]
    return size * torch.randn(records, 3, generator=generator), torch.zeros(records, 3)


def vectors(model, inputs, targets):
    """Each record's gradient, by autograd, in float64."""
    parameters = list(model.parameters())
    rows = [
        torch.autograd.grad(squares(model(inputs[k : k + 1]), targets[k : k + 1]).sum(), parameters)
        for k in range(len(inputs))
    ]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).double()


@pytest.mark.filterwarnings("ignore:records run one at a time")
@pytest.mark.parametrize("make", [linear, Scaled])
@pytest.mark.parametrize("threshold", [0.05, 0.7, 30.0])
def test_sum_and_count_are_those_of_the_definition(make, threshold):
    model, (inputs, targets) = make(), batch()
    gradients = ClippedGradients(model, squares, clip=CLIP)
    gradients.threshold = threshold
    gradients.accumulate(inputs[:8], targets[:8])
    gradients.accumulate(inputs[8:], targets[8:])
    rows = vectors(model, inputs, targets)
    norms = rows.norm(dim=1, keepdim=True)
    expected = CLIP.start / threshold * (rows * (threshold / norms).clamp(max=1)).sum(0)
    torch.testing.assert_close(gradients.flat[:-1], expected, rtol=2e-2, atol=1e-4)
    below = int((norms <= threshold).sum())
    assert 0 < below < 20
    assert float(gradients.flat[-1]) == pytest.approx(CLIP.weight * CLIP.start * (below - 10))


@pytest.mark.filterwarnings("ignore:records run one at a time")
@pytest.mark.parametrize("make", [linear, Scaled])
def test_one_record_changes_at_most_the_radius_and_more_than_the_clip(make):
    model, (inputs, targets) = make(), batch()
    changes = []
    for threshold in (0.05, 0.7, 30.0):
        gradients = ClippedGradients(model, squares, clip=CLIP)
        gradients.threshold = threshold

        def summed(rows, gradients=gradients):
            gradients.zero()
            gradients.accumulate(inputs[rows], targets[rows])
            return gradients.flat.clone()

        every = summed(list(range(20)))
        changes += [float((every - summed([k for k in range(20) if k != left])).norm()) for left in range(20)]
    bound = largest_change(gradients.radius, 20)
    assert bound == pytest.approx(CLIP.start * math.sqrt(1 + CLIP.weight**2 / 4), rel=1e-6)
    assert max(changes) <= bound
    assert max(changes) > largest_change(CLIP.start, 20)  # so the count must be paid for


def test_a_record_that_is_not_finite_adds_neither_gradient_nor_count():
    inputs, targets = batch(3)
    inputs[1] = math.inf
    gradients = ClippedGradients(linear(), squares, clip=CLIP)
    assert gradients.accumulate(inputs, targets) == 1
    both = gradients.flat.clone()
    gradients.zero()
    gradients.accumulate(inputs[[0, 2]], targets[[0, 2]])
    torch.testing.assert_close(gradients.flat, both)


def test_the_clip_goes_to_the_quantile():
    model, (inputs, targets) = linear(), batch(21)
    gradients = ClippedGradients(model, squares, clip=CLIP)
    for _ in range(200):
        clip = gradients.threshold
        gradients.zero()
        gradients.accumulate(inputs, targets)
        gradients.flat.div_(21)
        gradients.adapt()
    rows = vectors(model, inputs, targets)
    norms = rows.norm(dim=1, keepdim=True)
    assert gradients.threshold == pytest.approx(float(norms.median()), rel=0.3)
    # in the unit of gradients again: as if they had been clipped at the threshold
    expected = (rows * (clip / norms).clamp(max=1)).mean(0)
    torch.testing.assert_close(gradients.flat[:-1], expected, rtol=2e-2, atol=1e-4)


def test_the_clip_stays_in_bounds_whatever_the_count():
    clip = CLIP.start
    for _ in range(1000):
        clip = CLIP.following(clip, 1e30)
    assert 0 < clip < 1e-5
    for _ in range(1000):
        clip = CLIP.following(clip, -1e30)
    assert 1e5 < clip < math.inf


def trainer(**options):
    model, (inputs, targets) = linear(), batch(60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"budget": BUDGET, "batch_size": 20, "clip": CLIP, "steps": 9} | options
    return PrivateSGD(model, optimizer, TensorDataset(inputs, targets), squares, **given)


def test_training_accounts_for_the_count_in_each_step():
    private, fixed = trainer(), trainer(clip=CLIP.start)
    assert private.noise.law.shape == (10,)
    assert fixed.noise.law.shape == (9,)
    larger = math.sqrt(1 + CLIP.weight**2 / 4)
    assert private.sensitivity.frobenius_radius((10,)) == pytest.approx(
        larger * fixed.sensitivity.frobenius_radius((9,))
    )
    assert private.noise.law.root_mean_square == pytest.approx(larger * fixed.noise.law.root_mean_square, rel=1e-4)
    seen = set()
    for drawn in private.batches(3):
        private.step(drawn)
        seen.add(private.gradients.threshold)
    assert 0 < private.epsilon() <= BUDGET.epsilon
    assert seen != {CLIP.start}  # all of 9 noisy counts on one point of their grid: below 1e-40
    assert private.composition().verify()
    other = trainer()
    other.load_state_dict(private.state_dict())
    assert other.gradients.threshold == private.gradients.threshold


@pytest.mark.parametrize("noise", ["analytic", "mgm"])
def test_layer_by_layer_the_count_is_a_layer(noise):
    private = trainer(noise=noise, by_layer=True)
    private.train()
    assert private.noise.law.shape == (10,)


@pytest.mark.filterwarnings("ignore:make_private takes data set")
@pytest.mark.parametrize("trust_loop", [False, True])
def test_make_private_takes_it(trust_loop):
    model, (inputs, targets) = linear(), batch(60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=20)
    given = {"budget": BUDGET, "clip": CLIP, "steps": 3}
    seen = set()
    if trust_loop:
        model, optimizer, batches = make_private(model, optimizer, loader, trust_loop=True, **given)
        private = batches.trainer
        for x, y in batches:
            squares(model(x), y).mean().backward()
            optimizer.step()
            seen.add(private.gradients.threshold)
    else:
        private = make_private(model, optimizer, loader, loss=squares, **given)
        for drawn in private.batches():
            private.step(drawn)
            seen.add(private.gradients.threshold)
    assert private.steps == 3
    assert seen != {CLIP.start}  # all of 3 noisy counts on one point of their grid: below 1e-13


@pytest.mark.parametrize(
    "wrong",
    [{"start": 0.0}, {"start": math.nan}, {"quantile": 0.0}, {"quantile": 1.0}, {"quantile": math.nan},
     {"learning_rate": 0.0}, {"weight": -1.0}, {"weight": math.inf}],
)  # fmt: skip
def test_bad_settings_are_refused(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        QuantileClip(**wrong)


def test_entries_cannot_be_clipped_by_a_quantile():
    with pytest.raises(InvalidInput, match="l2 norm alone"):
        trainer(clipping="linf")
