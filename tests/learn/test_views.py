"""Several views of a record are averaged before they are clipped, and count as one."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from matrixdp import Budget
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients, PrivateSGD, make_private
from matrixdp.learn.clipping import largest_change
from matrixdp.learn.record_independence import below

VIEWS, CLIP = 4, 0.5

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:records run one at a time"),
]


def squares(outputs, targets):
    return (outputs - targets).square().sum(1)


def noisy(image):
    return image + 0.5 * torch.randn_like(image)


class Squared(nn.Module):
    """A model with a parameter of its own, which runs one record at a time."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 32).view(16, 2))

    def forward(self, inputs):
        return inputs.flatten(1) @ self.weight


def convolution():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2))


def batch(records=6):
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(records, 1, 4, 4, generator=generator), torch.ones(records, 2)


@pytest.mark.parametrize("clip", [CLIP, 1e3])
@pytest.mark.parametrize("make", [convolution, Squared])
def test_the_average_over_views_is_clipped(make, clip):
    model, (inputs, targets) = make(), batch()
    gradients = ClippedGradients(model, squares, clip=clip, augment=noisy, views=VIEWS)
    gradients.prepare(inputs, targets)
    torch.manual_seed(9)
    views = [view for (view,) in gradients._seen((inputs,))]
    assert len(views) == VIEWS
    assert not torch.equal(views[0], views[1])
    expected = 0
    for record in range(len(inputs)):
        loss = sum(squares(model(view[record : record + 1]), targets[:1]) for view in views).sum() / VIEWS
        row = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))]).double()
        expected = expected + row * min(1, clip / row.norm())
    torch.manual_seed(9)
    gradients.accumulate(inputs, targets)
    torch.testing.assert_close(gradients.flat, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("make", [convolution, Squared])
def test_one_record_with_all_its_views_changes_at_most_the_clip(make):
    inputs, targets = batch(1)
    gradients = ClippedGradients(make(), squares, clip=CLIP, augment=noisy, views=VIEWS)
    gradients.accumulate(100 * inputs, targets)
    once = float(gradients.flat.norm())
    assert 0.9 * CLIP < once <= largest_change(CLIP, 1)
    # views that are clipped one by one, and summed, would change more: the bound above sees it
    separately = ClippedGradients(make(), squares, clip=CLIP, augment=noisy)
    for _ in range(VIEWS):
        separately.accumulate(100 * inputs, targets)
    assert float(separately.flat.norm()) > largest_change(CLIP, 1)


def test_an_augmentation_sees_one_record():
    shapes = []

    def centred(image):
        shapes.append(tuple(image.shape))
        return image - image.mean()

    inputs, targets = batch()
    gradients = ClippedGradients(convolution(), squares, clip=CLIP, augment=centred, views=2)
    gradients.accumulate(inputs, targets)
    assert set(shapes) == {(1, 4, 4)}
    every = gradients.flat.clone()
    gradients.zero()
    gradients.accumulate(inputs[1:], targets[1:])
    rest = gradients.flat.clone()
    gradients.zero()
    gradients.accumulate(inputs[:1], targets[:1])
    torch.testing.assert_close(gradients.flat + rest, every)


def test_an_augmentation_that_reads_or_keeps_values_is_refused():
    kept = []

    def reads(image):
        return -image if image.sum() > 0 else image

    def keeps(image):
        kept.append(image * 2)
        return image

    def keeps_as_given(image):
        kept.append(image)
        return kept[0] + 0  # in a later step, a record of the first

    inputs, targets = batch()
    for augment in (reads, keeps, keeps_as_given):
        kept.clear()
        gradients = ClippedGradients(convolution(), squares, clip=CLIP, augment=augment)
        with pytest.raises(InvalidInput, match=r"one record at a time|keeps tensors"):
            gradients.accumulate(inputs, targets)
        assert not gradients.flat.any()


def test_a_loss_or_model_that_keeps_records_as_they_are_given_is_refused():
    kept = []

    class Keeps(Squared):
        def forward(self, inputs):
            kept.append(inputs)
            return super().forward(inputs)

    def keeping(outputs, targets):
        kept.append(targets)
        return squares(outputs, targets)

    for model, loss in ((Keeps(), squares), (Squared(), keeping)):
        gradients = ClippedGradients(model, loss, clip=CLIP)
        with pytest.raises(InvalidInput, match="keeps tensors"):
            gradients.accumulate(*batch())
        assert not gradients.flat.any()


def test_an_augmentation_cannot_change_the_shapes_that_were_checked():
    """A graph whose rules hold for one shape may mix records of another."""
    calls = []

    def halves(image):
        calls.append(1)
        return image if len(calls) == 1 else image[:, :2]

    inputs, targets = batch()
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    gradients = ClippedGradients(model, squares, clip=CLIP, augment=halves)
    with pytest.raises(InvalidInput, match="same shapes"):
        gradients.accumulate(inputs, targets)
    assert not gradients.flat.any()


def test_several_inputs_are_augmented_together():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, left, right):
            return self.layer(left + right)

    gradients = ClippedGradients(Two(), squares, clip=CLIP, augment=lambda pair: (pair[0] * 2, pair[1]), views=2)
    plain = ClippedGradients(gradients.model, squares, clip=CLIP)
    left, right = torch.randn(5, 3), torch.randn(5, 3)
    gradients.accumulate((left, right), torch.zeros(5, 2))
    found = gradients.flat.clone()
    plain.accumulate((left * 2, right), torch.zeros(5, 2))
    torch.testing.assert_close(found, plain.flat, rtol=1e-3, atol=1e-6)


def private(data, **options):
    model = convolution()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"budget": Budget(3.0, 1e-5), "clip": CLIP, "steps": 3, "augment": noisy, "views": VIEWS} | options
    if isinstance(data, DataLoader):
        return make_private(model, optimizer, data, **given)
    return PrivateSGD(model, optimizer, data, squares, batch_size=20, **given)


@pytest.mark.filterwarnings("ignore:make_private takes data set")
def test_views_cost_nothing_in_a_training():
    data = TensorDataset(*batch(60))
    several, one = private(data), private(data, augment=None, views=1)
    assert several.noise.law.root_mean_square == one.noise.law.root_mean_square
    several.train()
    made = private(DataLoader(data, batch_size=20), loss=squares)
    made.train()
    assert several.steps == made.steps == 3
    with pytest.raises(InvalidInput, match="trust_loop"):
        private(DataLoader(data, batch_size=20), trust_loop=True)


@pytest.mark.parametrize("views", [0, -1, 1.5, "2"])
def test_bad_numbers_of_views_are_refused(views):
    with pytest.raises(InvalidInput, match="views"):
        ClippedGradients(convolution(), squares, clip=CLIP, augment=noisy, views=views)


def test_several_views_need_an_augmentation():
    with pytest.raises(InvalidInput, match="augment must be given"):
        ClippedGradients(convolution(), squares, clip=CLIP, views=2)


def test_the_rows_of_a_person_can_be_one_item():
    """As docs/learning.md says: the weighted mean over a person's rows is clipped as one."""

    def loss(outputs, targets):
        truth, weights = targets
        return ((outputs - truth).square().sum(2) * weights).sum(1)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    rows, truth = 50 * torch.randn(7, 5, 3), torch.ones(7, 5, 2)
    weights = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]).expand(7, 5)  # four rows, and one that pads
    gradients = ClippedGradients(model, loss, clip=CLIP)
    assert gradients.prepare(rows, (truth, weights))  # the fast way
    gradients.accumulate(rows, (truth, weights))
    every = gradients.flat.clone()
    gradients.zero()
    gradients.accumulate(rows[1:], (truth[1:], weights[1:]))
    assert 0 < float((every - gradients.flat).norm()) <= largest_change(CLIP, 7)


def test_what_kept_a_record_never_runs_again():
    """The pass that kept it is refused; a caller who goes on all the same must not let it meet a later batch."""
    seen, kept = [], []

    def augment(x):
        seen.append(1)
        if len(seen) == 2:  # the first call is on zeros
            kept.append(x)
        return kept[0] + 0 if len(seen) > 2 else x + 0

    gradients = ClippedGradients(nn.Linear(2, 1, bias=False), squares, clip=1.0, augment=augment)
    with pytest.raises(InvalidInput, match="keeps tensors of records"):
        gradients.accumulate(torch.tensor([[1.0, 0.0]]), torch.ones(1, 1))
    for _ in range(2):
        gradients.zero()
        with pytest.raises(InvalidInput, match="refused here before"):
            gradients.accumulate(torch.zeros(1, 2), torch.ones(1, 1))
        assert not gradients.flat.any()


@pytest.mark.parametrize(("seconds", "kept"), [(0.3, False), (30.0, True)])
def test_a_thread_that_lets_go_late_keeps_nothing(seconds, kept, monkeypatch):
    """As that of a CUDA device's backward pass, which lets go of its tensors after it has answered.

    By a clock that runs while the pass waits for it.
    """
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    over, threads, clock = threading.Event(), [], [0.0]

    def sleep(waited):
        clock[0] += waited
        if clock[0] >= seconds:
            let_go()

    def let_go():
        over.set()
        for thread in threads:
            thread.join()

    monkeypatch.setattr(below, "time", SimpleNamespace(sleep=sleep))

    def hold(box):
        over.wait()
        box.clear()

    def augment(x):
        threads.append(threading.Thread(target=hold, args=([x + 0],), daemon=True))
        threads[-1].start()
        return x + 1

    gradients = ClippedGradients(nn.Linear(2, 1, bias=False), squares, clip=1.0, augment=augment)
    with pytest.raises(InvalidInput, match="keeps tensors") if kept else contextlib.nullcontext():
        gradients.accumulate(torch.tensor([[1.0, 0.0]]), torch.ones(1, 1))
    assert over.is_set() != kept
    let_go()
