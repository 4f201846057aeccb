"""What the studies of federated learning share: the paper's division of a budget, and the noise of an upload.

It needs PyTorch. Studies import it only when they run, so that they can be listed without PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Blocks, FullCovariance
from matrixdp.learn.noise import ParameterNoise, as_matrix, balanced, propose
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import mu_of_each, sized_for_mu
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate
from matrixdp.sensitivity import Counts, Entrywise
from matrixdp_papers import composition
from matrixdp_papers.studies import noise_per_step
from matrixdp_papers.studies.federated_report import ADDED_UP, PER_ELEMENT
from matrixdp_papers.studies.recalibrated import recalibrated

WHOLE = ("classic", "analytic", "mvg", "mgm", "udn", "idn")
"""Mechanisms whose claim is for a matrix as a whole."""

OPTIONS: dict[str, dict[str, Any]] = {"mvg": {"precision": "binary"}, "classic": {"beyond_proof": True}}
"""Their options; MVG favours the first row, since the singular vectors that the paper uses are private."""

# Above the first epsilon per step, Theorem 3.4 is basic composition; above the second, the hyperbolic sine of Theorem 6
# is the exponential.
_ADDS_UP, _EXPONENTIAL = 10.0, 500.0
# Laws whose noise differs by less count as equal.
SAME = 1e-6


# --- the paper's accounting ---


def round_budget(epsilon: float, delta: float, rounds: int) -> Budget:
    """The budget of each of `rounds` releases by the paper's composition; half of delta is slack.

    Source: kairouz2017composition, Theorem 3.4; yang2023matrix, section 8.2.
    """
    if not epsilon / rounds > _ADDS_UP:
        return noise_per_step.step_budget(epsilon, delta, rounds)
    return Budget(epsilon / rounds, noise_per_step.step_budget(1.0, delta, rounds).delta)


def before_sampling(budget: Budget, sampling_rate: float) -> Budget:
    """The budget of a release on a sample, by the paper's Theorem 6, although that is for delta = 0.

    Source: yang2023matrix, Theorem 6.
    """
    if budget.epsilon < _EXPONENTIAL:
        return Budget(composition.before_sampling_pure(budget.epsilon, sampling_rate), budget.delta)
    return Budget(budget.epsilon + math.log((1 - sampling_rate) / sampling_rate), budget.delta)


def published(name: str, shape: Shape, width: float, each: Budget, element: Budget) -> Gaussian:
    """The law of a mechanism, as the paper describes it, for a matrix whose entries change by up to `width`.

    Args:
        name: one of WHOLE, the matrix mechanism, or Gaussian noise on each element: with the claimed epsilon for every
            single one, or such that all of them add up to it.
        shape: of the matrix.
        width: how much an entry can change; values lie within half of it.
        each: the budget of the matrix.
        element: the budget of an element in the paper's Gaussian mechanism.
    """
    size, one = math.prod(shape), Counts(1, width)
    options = {"shape": shape, "sensitivity": Entrywise(width), "budget": each, **OPTIONS.get(name, {})}
    if name == "mvg":
        options |= {"gamma": width / 2 * math.sqrt(size)}
    elif name == "matrix-mechanism":
        options |= {"sensitivity": one, "workload": "identity"}
    elif name in (PER_ELEMENT, ADDED_UP):
        share = Budget(each.epsilon / size, each.delta / size)
        options |= {"sensitivity": one, "budget": element if name == PER_ELEMENT else share, "beyond_proof": True}
        name = "classic"
    law = calibrate(name, **options)
    assert isinstance(law, Gaussian)
    return law


def shaped(name: str) -> dict[str, Any]:
    """Options of a mechanism whose noise is rescaled later, so that MVG's bound on the value has no effect."""
    return {**OPTIONS.get(name, {}), **({"gamma": 1.0} if name == "mvg" else {})}


def layered(shapes: Iterable[Shape], of_layer: Callable[[Shape], Gaussian]) -> Gaussian:
    """Noise for each parameter of a network, read as a matrix."""
    laws = [of_layer(as_matrix(shape)) for shape in shapes]
    parts = [law.covariance for law in laws if isinstance(law.covariance, FullCovariance)]
    return Gaussian(Blocks(tuple(parts)), source=laws[0].source, note="layer by layer")


def composed(certificate: Certificate, releases: float, delta: float) -> float:
    """The epsilon of all releases together; for noise that is not Gaussian, of one release alone."""
    if certificate.mu is None:
        return certificate.epsilon(delta)
    return float(gaussian.epsilon(certificate.mu * math.sqrt(releases), delta))


# --- the uploads of horizontal learning ---


class Point(NamedTuple):
    """A way to make the uploads private.

    Attributes:
        series: the mechanism.
        epsilon: the claimed epsilon of all rounds.
        noise: of an upload; None for no noise.
        each: the epsilon that the mechanism was given for a round.
        truth: the true epsilon of all uploads of a client together, at client level; for R1SMG, of one round.
        exact: whether the noise was scaled by its certificate.
        ratio: its std over that of i.i.d. noise, at the same true guarantee.
    """

    series: str
    epsilon: float
    noise: ParameterNoise | None
    each: float | None = None
    truth: float | None = None
    exact: bool = False
    ratio: float | None = None


class Uploads(NamedTuple):
    """What the noise of an upload depends on.

    Attributes:
        network: whose update is uploaded.
        clip: the largest entry of an update.
        rounds: how many uploads a client makes.
        delta: for all of them.
        sampling_rate: the share of a client's records in a batch.
        generator: of the noise.
    """

    network: nn.Module
    clip: float
    rounds: int
    delta: float
    sampling_rate: float
    generator: torch.Generator

    @property
    def box(self) -> Entrywise:
        """The sensitivity set of a clipped update, adjacency replace."""
        return Entrywise(2 * self.clip, adjacency="replace")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters."""
        return [tuple(p.shape) for p in self.network.parameters()]

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(math.prod(shape) for shape in self.shapes)

    def noise(self, law: NoiseLaw) -> ParameterNoise:
        """A law, ready to be drawn."""
        largest = self.clip * math.sqrt(self.size)
        return ParameterNoise(law, self.box, largest, generator=self.generator)


def published_points(uploads: Uploads, names: Iterable[str], epsilon: float) -> list[Point]:
    """The paper's accounting: Theorem 3.4 over the rounds, Theorem 6 for the batches, and each layer by itself.

    The paper names no composition for its Gaussian mechanism: its epsilon is that of an element in a round. R1SMG,
    which is younger than the paper, is on all parameters at once.
    """
    whole = Budget(epsilon, uploads.delta)
    element = before_sampling(whole, uploads.sampling_rate)
    each = before_sampling(round_budget(epsilon, uploads.delta, uploads.rounds), uploads.sampling_rate)
    points = []
    for name in names:
        law: NoiseLaw
        if name == "r1smg":
            law = calibrate(name, shape=(uploads.size,), sensitivity=uploads.box, budget=each)
        else:
            of_layer = partial(published, name, width=2 * uploads.clip, each=each, element=element)
            law = layered(uploads.shapes, of_layer)
        noise = uploads.noise(law)
        spent = element.epsilon if name == PER_ELEMENT else each.epsilon
        points.append(Point(name, epsilon, noise, spent, composed(noise.certificate, uploads.rounds, uploads.delta)))
    return points


def exact_points(uploads: Uploads, names: Iterable[str], epsilon: float) -> list[Point]:
    """Noise scaled so that all uploads of a client together keep the budget.

    Mechanisms whose rescaled noise is i.i.d. have no separate point. R1SMG has noise that is enough for a single round;
    for all rounds it would need even more.
    """
    budget = Budget(epsilon, uploads.delta)
    mu = mu_of_each(budget, uploads.rounds)
    points, least = list[Point](), math.nan
    for name in ("analytic", *(name for name in names if name in WHOLE and name != "analytic")):
        proposed = propose(name, uploads.shapes, uploads.box, by_layer=True, **shaped(name))
        assert isinstance(proposed, Gaussian)
        noise = uploads.noise(sized_for_mu(balanced(proposed, uploads.box), uploads.box, mu).law)
        least = noise.law.root_mean_square if name == "analytic" else least
        ratio = noise.law.root_mean_square / least
        if name == "analytic" or abs(ratio - 1) > SAME:
            truth = composed(noise.certificate, uploads.rounds, uploads.delta)
            points.append(Point(name, epsilon, noise, truth=truth, exact=True, ratio=ratio))
    if "r1smg" in names:
        law = calibrate("r1smg", shape=(uploads.size,), sensitivity=uploads.box, budget=budget)
        noise = uploads.noise(recalibrated(law, uploads.box, budget))
        ratio, truth = noise.law.root_mean_square / least, composed(noise.certificate, 1, uploads.delta)
        points.append(Point("r1smg", epsilon, noise, truth=truth, exact=True, ratio=ratio))
    return points
