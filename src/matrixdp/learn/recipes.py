"""Building blocks for accurate private training; `docs/recipes.md` says when to use them, and why.

Noise grows with the number of trained parameters. So what need not be learned should be fixed: `Scattering` gives
features of images that are designed, not trained, and a linear model on them does better under usual budgets than a
network on pixels. `average_weights` averages noise out of the last iterates. Neither uses budget: one is computed from
each record alone, the other from released weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from matrixdp import _check
from matrixdp.errors import InvalidInput


class Scattering(nn.Module):
    """Image features without trained parameters: local averages of the magnitudes of wavelet coefficients.

    An image is convolved with wavelets of several scales and directions, and magnitudes are taken; each magnitude is
    convolved with the wavelets of all coarser scales, and magnitudes are taken again. Image and magnitudes are smoothed
    by a Gaussian, and every 2^scales-th pixel is kept. Images of (batch, channels, height, width) become (batch,
    channels K, height / 2^scales, width / 2^scales), with K = 1 + L J + L^2 J (J - 1) / 2 for J scales and L
    directions: 81 by default.

    Guarantee: each row of the result is a function of one image alone, so all records may be transformed at once before
    training.

    Args:
        scales: how many octaves; height and width must be multiples of 2^scales.
        directions: how many directions between 0 and 180 degrees.

    Source: bruna2013invariant; tramer2021differentially for private training on such features.
    Deviates: 1. images are mirrored at their borders; 2. magnitudes are not subsampled before they are averaged.
    """

    def __init__(self, scales: int = 2, directions: int = 8) -> None:
        super().__init__()
        self.scales, self.directions = _check.count("scales", scales), _check.count("directions", directions)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The features of each image."""
        step = 2**self.scales
        border = 2 * step
        if images.ndim != 4 or any(side % step or side <= border for side in images.shape[2:]):
            raise InvalidInput(
                f"images must have shape (batch, channels, height, width), with sides above {border} that are "
                f"multiples of {step}, got {tuple(images.shape)}; pad or crop them, or use fewer scales"
            )
        padded = functional.pad(images, (border, border, border, border), mode="reflect")
        wavelets, bump = self._filters(padded)

        def averaged(part: Tensor) -> Tensor:
            smooth: Tensor = torch.fft.ifft2(torch.fft.fft2(part) * bump).real
            return smooth[..., border:-border:step, border:-border:step]

        found, finer = [averaged(padded)], []
        for scale in range(self.scales):
            for first in _magnitudes(padded, wavelets[scale]):
                found.append(averaged(first))
                for coarser in wavelets[scale + 1 :]:
                    finer += [averaged(second) for second in _magnitudes(first, coarser)]
        return torch.stack(found + finer, dim=2).flatten(1, 2)

    def _filters(self, images: Tensor) -> tuple[list[list[Tensor]], Tensor]:
        """Wavelets by scale and direction, and the low-pass filter, all in the frequency domain."""
        rows, columns = torch.meshgrid(
            *(torch.fft.fftfreq(side, 1 / side, dtype=torch.float64) for side in images.shape[2:]), indexing="ij"
        )

        def factors(filtered: Tensor) -> Tensor:
            found: Tensor = torch.fft.fft2(filtered)
            return found.to(images.device, torch.promote_types(images.dtype, torch.complex64))

        turns = [math.pi * k / self.directions for k in range(self.directions)]
        wavelets = [
            [factors(_morlet(rows, columns, 2**scale, turn, 4 / self.directions)) for turn in turns]
            for scale in range(self.scales)
        ]
        bump = torch.exp(-(rows**2 + columns**2) / (2 * (0.8 * 2 ** (self.scales - 1)) ** 2))
        return wavelets, factors(bump / bump.sum())


def _magnitudes(images: Tensor, wavelets: list[Tensor]) -> list[Tensor]:
    frequencies = torch.fft.fft2(images)
    return [torch.fft.ifft2(frequencies * wavelet).abs() for wavelet in wavelets]


def _morlet(rows: Tensor, columns: Tensor, scale: int, turn: float, slant: float) -> Tensor:
    """A Morlet wavelet: a wave under a Gaussian window, with mean zero."""
    along = math.cos(turn) * columns + math.sin(turn) * rows
    across = math.cos(turn) * rows - math.sin(turn) * columns
    bell = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * (0.8 * scale) ** 2))
    wave = bell * torch.exp(0.75j * math.pi / scale * along)
    return (wave - bell * (wave.sum() / bell.sum())) / bell.sum()


def shift_and_flip(image: Tensor, pixels: int = 4) -> Tensor:
    """One image (channels, height, width), shifted by up to `pixels` and mirrored at random: for `augment`."""
    height, width = image.shape[-2:]
    padded = functional.pad(image, (pixels, pixels, pixels, pixels))
    down, right = (torch.randint(0, 2 * pixels + 1, (1,), device=image.device) for _ in range(2))
    rows, columns = (torch.arange(side, device=image.device) for side in (height, width))
    columns = torch.where(torch.rand(1, device=image.device) < 0.5, columns, width - 1 - columns)
    return padded[:, (rows + down)[:, None], columns + right]


def average_weights(model: nn.Module, optimizer: torch.optim.Optimizer, decay: float = 0.99) -> AveragedModel:
    """A copy of the model whose weights are an exponential average of the model's weights after each step.

    Guarantee: computed from released weights alone, so it is post-processing and uses no budget.

    Args:
        model: the model that is trained.
        optimizer: its optimizer, whose steps are followed.
        decay: the weight of the past at each step; the average reaches back about 1 / (1 - decay) steps.

    Source: de2022unlocking.
    """
    if not 0 <= _check.number("decay", decay) < 1:
        raise InvalidInput(f"decay must be at least 0 and below 1, got {decay!r}")
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]

    def follow(*_: Any) -> None:
        averaged.update_parameters(model)

    optimizer.register_step_post_hook(follow)
    return averaged
