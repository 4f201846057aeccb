"""Two participants with halves of the attributes: their networks, the noise on their features, and the training.

It needs PyTorch. Studies import it only when they run, so that they can be listed without PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from matrixdp.distributions import Gaussian, NoiseLaw, Spherical
from matrixdp.distributions.covariance import Isotropic, Kronecker
from matrixdp_papers.studies import training
from matrixdp_papers.studies.parallel_training import ParallelNetworks, orders, seed_of

PARTICIPANTS = 2


class Joined(nn.Module):
    """A local network with tanh at its end for each half of the attributes, and the server's layers on top of both.

    The first of the server's layers is the interactive one, which joins the features.

    Args:
        widths: how many attributes each half has.
        hidden: the widths of the layers before the features.
        features: of each half.
        classes: the number of classes.
    """

    def __init__(self, widths: Sequence[int], hidden: Sequence[int], features: int, classes: int) -> None:
        super().__init__()
        self.widths, self.features = list(widths), features
        self.local = nn.ModuleList(
            nn.Sequential(
                *(layer for sides in pairwise((width, *hidden, features)) for layer in (nn.Linear(*sides), nn.Tanh()))
            )
            for width in widths
        )
        joined = features * len(self.widths)
        self.top = nn.Sequential(nn.Linear(joined, features), nn.Tanh(), nn.Linear(features, classes))

    def forward(self, records: Tensor, noise: Tensor, scale: Tensor) -> Tensor:
        """The classes, from features with noise, which the server scales to about 1."""
        parts = torch.split(records, self.widths, dim=-1)
        features = torch.cat([local(part) for local, part in zip(self.local, parts, strict=True)], dim=-1)
        answers: Tensor = self.top((features + noise) * scale)
        return answers


def draws(law: NoiseLaw, count: int, generator: torch.Generator) -> Tensor:
    """`count` independent draws of a law on matrices, at once; not floating-point-safe, for studies only."""
    normal = torch.randn(count, *law.shape, generator=generator, device=generator.device)

    def like(values: Any) -> Tensor:
        return torch.tensor(values, dtype=normal.dtype, device=normal.device)

    if isinstance(law, Spherical):
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        powers = np.random.default_rng(seed).standard_gamma(law.k / law.p, count) ** (1 / law.p)
        lengths: Tensor = torch.linalg.vector_norm(normal, dim=(1, 2), keepdim=True)
        return normal * (like(law.scale * powers)[:, None, None] / lengths)
    assert isinstance(law, Gaussian)
    covariance = law.covariance
    if isinstance(covariance, Isotropic):
        return normal * covariance.std
    assert isinstance(covariance, Kronecker)
    for spectrum in (covariance.rows, covariance.columns):
        normal = normal * like(np.sqrt(spectrum.variances))[:, None]
        if spectrum.directions is not None:
            normal = like(spectrum.directions) @ normal
        normal = normal.transpose(1, 2)
    return normal


class Release(NamedTuple):
    """How the features of both participants are released.

    Attributes:
        law: of a matrix of features with one row per record; None for no noise.
        learns: whether the local networks are trained, or keep their initial parameters.
        once: whether each record is released once, and its noisy features are used in all epochs.
        update_std: of the noise in the local training; None trains without clipping and noise.
    """

    law: NoiseLaw | None
    learns: bool = True
    once: bool = False
    update_std: float | None = None


class Schedule(NamedTuple):
    """How long and how fast to train: passes, the size of a batch, SGD's learning rate, and a record's clip norm."""

    epochs: int
    lot: int
    learning_rate: float
    clip: float


def train(
    make: Callable[[], Joined],
    releases: Sequence[Release],
    records: Tensor,
    label: Tensor,
    schedule: Schedule,
    seeds: Sequence[int],
) -> tuple[ParallelNetworks, Tensor, Tensor]:
    """Trains with every release at once; all of one seed share their batches and first weights.

    Releases either all have noise in the local training, or none has.

    Returns:
        The networks, their weights (seeds x releases x parameters), and the scale of each release.
    """
    networks: list[Any] = [training.seeded_network(make, seed) for seed in seeds]
    parallel, device = ParallelNetworks(networks[0]), records.device
    first = torch.stack([torch.cat([p.detach().flatten() for p in network.parameters()]) for network in networks])
    weights = first[:, None].repeat(1, len(releases), 1)
    stds = torch.tensor(
        [0.0 if release.law is None else release.law.root_mean_square for release in releases], device=device
    )
    scale = (1 + stds**2).rsqrt()
    moving = torch.tensor([float(release.learns) for release in releases], device=device)
    update_stds = torch.tensor([release.update_std or 0.0 for release in releases], device=device)
    private = any(release.update_std is not None for release in releases)
    rule = clipped_rule(parallel, schedule.clip) if private else None
    random = training.generator(seeds[0])
    shape = len(seeds), len(label), networks[0].features
    kept = [_noise(release.law, shape, random) if release.once else None for release in releases]
    scales = scale[None, :, None].expand(len(seeds), -1, -1)
    for epoch in range(schedule.epochs):
        order = orders(len(label), [seed_of(seed, epoch) for seed in seeds], device)
        noise = torch.stack(
            [
                _noise(release.law, shape, random) if fixed is None else _in_order(fixed, order)
                for release, fixed in zip(releases, kept, strict=True)
            ],
            dim=1,
        )
        for batch, drawn in zip(
            torch.split(order, schedule.lot, dim=1), torch.split(noise, schedule.lot, dim=2), strict=True
        ):
            found = parallel.gradients(weights, records[batch], label[batch], drawn, scales, rule=rule)
            for name in parallel.shapes:
                if name.startswith("local."):
                    sides = (1, -1) + (1,) * len(parallel.shapes[name])
                    if private:
                        normal = torch.randn(found[name].shape, generator=random, device=device)
                        found[name] = (found[name] + normal * update_stds.view(sides)) / schedule.lot
                    found[name] = found[name] * moving.view(sides)
            parallel.step_(weights, found, schedule.learning_rate)
    return parallel, weights, scale


def clipped_rule(parallel: ParallelNetworks, clip: float) -> Callable[..., dict[str, Tensor]]:
    """Gradients of one network whose participants train privately.

    The server's are those of the mean loss; a participant's are summed over the records, each with a norm of at most
    `clip`.
    """

    def of_record(parameters: dict[str, Tensor], record: Tensor, label: Tensor, noise: Tensor, scale: Tensor) -> Tensor:
        return parallel.loss(parameters, record[None], label[None], noise[None], scale)

    each = vmap(grad(of_record), in_dims=(None, 0, 0, 0, None))

    def rule(
        parameters: dict[str, Tensor], records: Tensor, label: Tensor, noise: Tensor, scale: Tensor
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = each(parameters, records, label, noise, scale)
        gradients = {name: gradient.mean(dim=0) for name, gradient in found.items()}
        for participant in range(PARTICIPANTS):
            names = [name for name in found if name.startswith(f"local.{participant}.")]
            squares = torch.stack([found[name].flatten(1).square().sum(dim=1) for name in names]).sum(dim=0)
            factor = (clip / squares.sqrt().clamp(min=1e-30)).clamp(max=1.0)
            gradients |= {name: torch.tensordot(factor, found[name], dims=1) for name in names}
        return gradients

    return rule


def _noise(law: NoiseLaw | None, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """For the features of all records in the order of their release: seeds x records x features of all participants.

    Args:
        law: of a matrix with one row per record; the last matrix may be truncated.
        shape: seeds, records, features of a participant.
        generator: of the noise.
    """
    seeds, records, features = shape
    if law is None:
        return torch.zeros(seeds, records, PARTICIPANTS * features, device=generator.device)
    rows = law.shape[0]
    matrices = -(-records // rows)
    drawn = draws(law, seeds * PARTICIPANTS * matrices, generator)
    drawn = drawn.reshape(seeds, PARTICIPANTS, matrices * rows, features)[:, :, :records]
    return drawn.transpose(1, 2).flatten(2)


def _in_order(noise: Tensor, order: Tensor) -> Tensor:
    """Noise that belongs to the records, in the order in which they come."""
    return torch.gather(noise, 1, order[:, :, None].expand(-1, -1, noise.shape[2]))


def accuracy(parallel: ParallelNetworks, weights: Tensor, scale: Tensor, records: Tensor, label: Tensor) -> Tensor:
    """The share of new records classified right, seeds x releases; their features have no noise."""
    networks = weights.flatten(0, 1)
    scales = scale.repeat(len(weights))[:, None]
    return parallel.accuracy(networks, records, label, torch.zeros_like(scales), scales).view(weights.shape[:2])
