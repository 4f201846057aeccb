"""Features that are designed, and averaged weights: each image by itself, and against their definitions."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp.errors import InvalidInput
from matrixdp.learn.recipes import Scattering, average_weights, shift_and_flip

pytestmark = pytest.mark.usefixtures("one_thread")


def images(count=3, side=20, channels=2):
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def test_features_are_those_of_the_definition():
    """Convolutions as sums over pixels, of a wavelet and the average that are written down here again."""
    image = images(1, 12, 1)[0, 0].numpy()
    padded = np.pad(image, 4, mode="reflect")
    side = len(padded)
    places = np.fft.fftfreq(side, 1 / side)
    y, x = np.meshgrid(places, places, indexing="ij")

    def convolved(values, kernel):
        rows = np.arange(side)
        return sum(
            kernel[i, j] * values[np.ix_((rows - i) % side, (rows - j) % side)]
            for i in range(side) for j in range(side)
        )  # fmt: skip

    angle = math.pi / 2
    along, across = math.cos(angle) * x + math.sin(angle) * y, math.cos(angle) * y - math.sin(angle) * x
    bell = np.exp(-(along**2 + (2 * across) ** 2) / (2 * 0.8**2))
    wave = bell * np.exp(0.75j * math.pi * along)
    wavelet = (wave - bell * wave.sum() / bell.sum()) / bell.sum()
    bump = np.exp(-(x**2 + y**2) / (2 * 0.8**2))
    expected = convolved(np.abs(convolved(padded, wavelet)), bump / bump.sum())[4:-4:2, 4:-4:2]
    found = Scattering(scales=1, directions=2)(torch.from_numpy(image)[None, None])
    assert found.shape == (1, 3, 6, 6)
    np.testing.assert_allclose(found[0, 2], expected, atol=1e-12)


def test_each_row_is_that_of_one_image():
    found = Scattering(scales=2, directions=4)(images())
    assert found.shape == (3, 2 * (1 + 8 + 16), 5, 5)
    assert bool(torch.isfinite(found).all())
    alone = torch.cat([Scattering(scales=2, directions=4)(image[None]) for image in images()])
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-13)


def test_a_constant_image_has_its_mean_alone():
    found = Scattering()(torch.full((1, 1, 28, 28), 0.5))
    torch.testing.assert_close(found[:, 0], torch.full((1, 7, 7), 0.5))
    assert float(found[:, 1:].abs().max()) < 1e-6


def test_features_move_less_than_pixels_when_an_image_moves():
    image = images(1, 28, 1)
    moved = image.roll(1, dims=3)
    first, second = Scattering()(image), Scattering()(moved)
    inside = (..., slice(1, -1), slice(1, -1))  # away from the borders
    change = (first[inside] - second[inside]).norm() / first[inside].norm()
    assert float(change) < 0.3 * float((image - moved).norm() / image.norm())


@pytest.mark.parametrize("shape", [(28, 28), (1, 1, 27, 28), (1, 1, 8, 8)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(InvalidInput, match="multiples of 4"):
        Scattering()(torch.zeros(shape))


def test_averaged_weights_follow_each_step():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averaged = average_weights(model, optimizer, decay=0.75)
    expected = None
    for _ in range(4):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        now = model.weight.detach().clone()
        expected = now if expected is None else 0.75 * expected + 0.25 * now
    torch.testing.assert_close(averaged.module.weight, expected)


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_a_bad_decay_is_refused(decay):
    model = nn.Linear(2, 1)
    with pytest.raises(InvalidInput, match="decay"):
        average_weights(model, torch.optim.SGD(model.parameters()), decay)


def test_shifts_and_flips_are_those_of_the_padded_image():
    image = torch.arange(1.0, 17).view(1, 4, 4)
    seen = torch.func.vmap(lambda one: shift_and_flip(one, 1), randomness="different")(image.expand(400, 1, 4, 4))
    padded = nn.functional.pad(image, (1, 1, 1, 1))
    shifted = [padded[:, i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    possible = {tuple(view.flatten().tolist()) for part in shifted for view in (part, part.flip(2))}
    # each of 18 views is missing with a probability of 18 (17 / 18)^400 < 1e-8
    assert {tuple(view.flatten().tolist()) for view in seen} == possible


def example():
    path = Path(__file__).parents[2] / "examples" / "train_recipes.py"
    spec = importlib.util.spec_from_file_location("train_recipes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_learns_on_a_small_set():
    labels = torch.arange(600) % 10
    stripes = torch.sin(torch.arange(12.0) * (labels[:, None] + 1) / 3)
    pictures = stripes[:, None, None, :] * torch.ones(12, 1) + 0.1 * torch.randn(600, 1, 12, 12)
    data = TensorDataset(Scattering()(pictures), labels)
    setting = {"epsilon": 8.0, "delta": 1e-5, "batch_size": 600, "epochs": 20, "clip": 0.1, "learning_rate": 4.0}
    module = example()
    model, trainer = module.train(data, **setting, momentum=0.9, decay=0.5, groups=9)
    assert trainer.epsilon() <= 8.0
    assert module.accuracy(model, *data.tensors) > 0.6  # a guess has 0.1
