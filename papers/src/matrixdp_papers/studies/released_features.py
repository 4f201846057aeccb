"""Features of a network whose front is trained on public records: computed, released with noise, and trained on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from matrixdp._check import Array
from matrixdp.distributions import Gaussian, NoiseLaw, Spherical
from matrixdp.distributions.covariance import Blocks, FullCovariance
from matrixdp.sensitivity import Frobenius
from matrixdp_papers.datasets import Labelled
from matrixdp_papers.studies.splits import Split

if TYPE_CHECKING:  # PyTorch is imported by a run alone, so that every install can list the study
    from torch import Tensor, nn

SEED = 2021
BATCH = 256
PUBLIC = 0.2
"""The share of the training records that counts as public: the front is trained on them; they are not released."""
# MVG's binary allocation: this share of the precision for this share of the features.
PRECISION, FAVOURED = 0.9, 0.25
MOMENTUM = 0.9
# Of the front, on the public records.
FRONT_BATCH = 64
# Of a smoke run.
SMOKE_BATCH = 16


class Network(NamedTuple):
    """A network of table 1.

    Attributes:
        name: of the data set.
        model: in matrixdp_papers.networks.
        tanh: whether its activation is to be replaced by tanh, so that the features lie in [-1, 1].
        front_epochs: for which the whole network is trained on the public records.
        epochs: for which the top is trained on the released features.
        paper_epochs: the paper's.
        front_rate: of Adam, for the whole network.
        rate: of SGD, for the top.
        records: the paper's, to train on.
    """

    name: str
    model: str
    tanh: bool
    front_epochs: int
    epochs: int
    paper_epochs: int
    records: int
    front_rate: float = 1e-3
    rate: float = 0.02


class Features(NamedTuple):
    """Features of one network: of the private records, in whole batches, and of the test records."""

    network: Network
    top: Callable[[], nn.Module]
    private: Tensor
    label: Tensor
    test: Tensor
    test_label: Tensor
    shares: Array
    alone: float
    batch: int


def features(network: Network, split: Split, smoke: bool) -> Features:
    """Trains the whole network on the public records and makes the features of the others, which it has never seen."""
    import torch
    from torch import nn

    from matrixdp_papers import networks
    from matrixdp_papers.studies import training

    options = {"activation": nn.Tanh} if network.tanh else {}
    factory = getattr(networks, network.model)
    whole: Any = training.seeded_network(lambda: factory(**options), SEED)
    order = np.random.default_rng(SEED).permutation(len(split.train.label))
    cut = round(PUBLIC * len(order))
    public, private = (_part(split.train, rows) for rows in (order[:cut], order[cut:]))
    epochs = 1 if smoke else network.front_epochs
    shown, kept, test = (training.on_device(part) for part in (public, private, split.test))
    optimizer = torch.optim.Adam(whole.parameters(), lr=network.front_rate)
    trained = training.passes(whole, optimizer, shown, epochs=epochs, lot=FRONT_BATCH, seed=SEED)
    alone = training.at_end(trained, test)
    front = whole[: networks.SPLIT].eval()

    def rows(data: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            parts = [front(data[first : first + training.CHUNK]) for first in range(0, len(data), training.CHUNK)]
            return torch.cat(parts).flatten(1)

    batch = SMOKE_BATCH if smoke else BATCH
    size = len(kept) // batch * batch
    template: nn.Module = whole[networks.SPLIT :]

    def top() -> nn.Module:
        new = copy.deepcopy(template).cpu()  # where a seed gives the same numbers on all machines
        for module in new.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        return new

    return Features(
        network=network,
        top=top,
        private=rows(kept.tensors[0][:size]),
        label=kept.tensors[1][:size],
        test=rows(test.tensors[0]),
        test_label=test.tensors[1],
        shares=binary_shares(rows(shown.tensors[0]).double().cpu().numpy()),
        alone=alone,
        batch=batch,
    )


def _part(data: Labelled, rows: npt.NDArray[np.int64]) -> Labelled:
    return Labelled(data.records[rows], data.label[rows])


def score(found: Features, law: NoiseLaw | None, epochs: int, seed: int) -> float:
    """Draws the noise of every batch once, trains a new top on the noisy features, and tests it on clean features."""
    import torch
    from torch.utils.data import TensorDataset

    from matrixdp_papers.studies import training

    noisy = found.private.clone()
    if law is not None:
        add_noise(noisy, law, found.batch, seed)
    # A public constant keeps the inputs of the top of order one, whatever the noise.
    scale = 1.0 if law is None else 1 / math.sqrt(1 + law.root_mean_square**2)
    top = training.seeded_network(found.top, seed)
    data, test = TensorDataset(noisy * scale, found.label), TensorDataset(found.test * scale, found.test_label)
    optimizer = torch.optim.SGD(top.parameters(), lr=found.network.rate, momentum=MOMENTUM)
    networks = training.passes(top, optimizer, data, epochs=epochs, lot=found.batch, seed=seed)
    return training.at_end(networks, test)


def add_noise(rows: Tensor, law: NoiseLaw, batch: int, seed: int) -> None:
    """Adds a draw of the law to every batch of rows, in place."""
    from matrixdp.learn.noise import ParameterNoise
    from matrixdp_papers.studies import training

    flat: NoiseLaw
    if isinstance(law, Spherical):
        flat = replace(law, shape=(math.prod(law.shape),))
    else:
        assert isinstance(law, Gaussian)
        assert isinstance(law.covariance, FullCovariance)
        flat = replace(law, covariance=Blocks((law.covariance,)))
    # The certificates are made elsewhere, from the sets; this only draws.
    noise = ParameterNoise(flat, Frobenius(1.0), 1.0, generator=training.generator(seed))
    for part in rows.view(-1, batch * rows.shape[1]):
        noise.add_(part)


def binary_shares(public: Array) -> Array:
    """Most of MVG's precision for the features that vary most among the public records."""
    spread = np.var(public, axis=0)
    favoured = spread >= np.sort(spread)[-max(1, round(FAVOURED * len(spread)))]
    shares = np.where(favoured, PRECISION / np.sum(favoured), (1 - PRECISION) / max(1, np.sum(~favoured)))
    return np.asarray(shares / np.sum(shares))
