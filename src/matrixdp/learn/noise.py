"""Noise for the parameters of a network: one law on the flat gradient, as a whole or layer by layer, drawn in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.backends.numpy import TOO_LARGE, draw
from matrixdp.backends.torch import Factor, add_noise, factor_of, to_array
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, Spherical
from matrixdp.distributions.covariance import Blocks, FullCovariance
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms import calibrate_gaussian
from matrixdp.mechanisms.mvg import Released
from matrixdp.privacy.certificate import Certificate, certify, drawn
from matrixdp.privacy.drawing import Drawing, drawing_for
from matrixdp.secure.grid import LIMIT, Grid
from matrixdp.sensitivity import Entrywise, Frobenius, Sensitivity

# A recipe gives noise its shape; the certificate decides its size later. So the recipe can be asked with any budget.
ANY_BUDGET = Budget(0.5, 1e-6)


def propose(
    mechanism: str,
    shapes: Sequence[Shape],
    sensitivity: Sensitivity,
    budget: Budget = ANY_BUDGET,
    *,
    by_layer: bool = False,
    **options: Any,
) -> NoiseLaw:
    """The law that a mechanism proposes for the parameters of a network, concatenated into one vector.

    Args:
        mechanism: a name in the registry.
        shapes: the shapes of the parameters.
        sensitivity: what a neighbour can change in the whole vector: Frobenius or Entrywise with one bound.
        budget: that the recipe is asked with, for the whole vector or for each layer.
        by_layer: calls the recipe for each parameter as a matrix: a weight has a row for each output, a bias is one
            column. The certificate says what all layers guarantee together.
        **options: options of the mechanism.
    """
    one_bound = isinstance(sensitivity, Entrywise) and np.ndim(sensitivity.bound) == 0
    if not (isinstance(sensitivity, Frobenius) or one_bound):
        raise InvalidInput(f"sensitivity must be Frobenius, or Entrywise with one bound, got {type(sensitivity)}")
    if any(isinstance(value, Released) for value in options.values()):
        raise InvalidInput(
            "directions must be a public matrix here: the noise gets its size later, and what an earlier release cost "
            "would be left out; take its eigenvectors yourself, and account for that release separately"
        )
    if not by_layer:
        size = sum(math.prod(shape) for shape in shapes)
        whole = calibrate_gaussian(mechanism, shape=(size,), sensitivity=sensitivity, budget=budget, **options)
        check_drawable(whole)
        return whole
    parts: list[FullCovariance] = []
    for shape in shapes:
        law = calibrate_gaussian(mechanism, shape=as_matrix(shape), sensitivity=sensitivity, budget=budget, **options)
        if not (isinstance(law, Gaussian) and isinstance(law.covariance, FullCovariance)):
            raise InvalidInput(
                f"mechanism {mechanism!r} is not Gaussian noise on all entries; use it with by_layer=False"
            )
        parts.append(law.covariance)
    return Gaussian(Blocks(tuple(parts)), source=law.source, note="layer by layer")


def check_drawable(law: NoiseLaw) -> None:
    """Raises InvalidInput for laws that cannot be drawn on parameters: all but Gaussian and spherical ones."""
    if not isinstance(law, (Gaussian, Spherical)):
        raise InvalidInput(f"noise on parameters must be Gaussian, got {law.describe()}; use 'analytic'")


def as_matrix(shape: Shape) -> Shape:
    """The shape of a parameter as a matrix: outputs x everything else."""
    return shape[0] if shape else 1, math.prod(shape[1:])


def balanced(law: Gaussian, sensitivity: Sensitivity) -> Gaussian:
    """The law with layers scaled against each other for the least total error.

    Under one norm for all layers, each may use the whole mu; under a bound on entries, the squares of their mu add up.
    """
    if not isinstance(law.covariance, Blocks):
        return law
    parts = law.covariance.parts
    mus = [certify(Gaussian(part), sensitivity).mu or 0.0 for part in parts]
    if isinstance(sensitivity, Frobenius):
        factors = mus
    else:
        # the least sum of error_l m_l^2 / mu_l^2 with sum mu_l^2 = 1 has mu_l^2 in proportion to sqrt(error_l) m_l
        factors = [mu / math.sqrt(math.sqrt(part.trace()) * mu) for mu, part in zip(mus, parts, strict=True)]
    scaled = tuple(part.scaled(factor) for part, factor in zip(parts, factors, strict=True))
    return replace(law, covariance=Blocks(scaled))


class ParameterNoise:
    """A law on a flat vector of parameters, ready to be drawn in place on a device.

    Guarantee: `certificate`, for vectors that differ by a member of the set and whose norm is at most `largest_norm`.

    Args:
        law: the noise, on a vector.
        sensitivity: what a neighbour can change.
        largest_norm: a bound on the norm of the vectors that the noise will be added to, whatever the data.
        drawing: how to draw it; by default computed from the law.
        generator: for reproducible studies only; the noise is then drawn in floating point and is not private.
    """

    def __init__(
        self,
        law: NoiseLaw,
        sensitivity: Sensitivity,
        largest_norm: float,
        *,
        drawing: Drawing | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if len(law.shape) != 1:
            raise InvalidInput(f"noise must be a law on a vector of all parameters, got shape {law.shape}")
        check_drawable(law)
        undrawn = certify(law, sensitivity)
        if generator is not None:
            drawing = Drawing(reproducible=True)
        elif drawing is None:
            drawing = drawing_for(law, sensitivity, undrawn.mu)
        self.law, self.drawing, self.generator = law, drawing, generator
        self.certificate: Certificate = drawn(undrawn, drawing)
        check_room(law, drawing, _check.positive("largest_norm", largest_norm))
        self._draws: dict[torch.device, _Draw] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise InvalidInput(f"{name} is part of the guarantee and cannot be changed; make a new ParameterNoise")
        super().__setattr__(name, value)

    def warm_up(self, flat: torch.Tensor) -> None:
        """Imports and compiles the sampler, by a draw that is discarded."""
        self.add_(torch.zeros_like(flat))

    def add_(self, flat: torch.Tensor) -> None:
        """Adds one draw to a contiguous vector of float32 or float64, in place."""
        right = tuple(flat.shape) == self.law.shape and flat.is_contiguous()
        if not (right and flat.dtype in (torch.float32, torch.float64)):
            raise InvalidInput(
                f"flat must be a contiguous vector of {self.law.shape[0]} numbers, float32 or float64, got "
                f"{flat.dtype} of shape {tuple(flat.shape)}"
            )
        if flat.device not in self._draws:
            self._draws[flat.device] = _draw_on(flat.device, self.law, self.drawing)
        self._draws[flat.device](flat, self.generator)


def check_room(law: NoiseLaw, drawing: Drawing, largest_norm: float) -> None:
    """Raises InvalidInput unless every value of this norm fits the grid, so that no step is refused for its data."""
    if drawing.grid is None or not (isinstance(law, Gaussian) and isinstance(law.covariance, FullCovariance)):
        return
    white = largest_norm / law.covariance.smallest_std
    if not (white / drawing.grid.step < LIMIT and white <= (drawing.largest_norm or math.inf)):
        raise InvalidInput(TOO_LARGE)


_Draw = Callable[[torch.Tensor, torch.Generator | None], None]


def _draw_on(device: torch.device, law: NoiseLaw, drawing: Drawing) -> _Draw:
    """A function that draws the law on this device."""
    if isinstance(law, Spherical):
        return lambda flat, generator: _add_spherical(flat, law, generator)
    assert isinstance(law, Gaussian)
    factor = factor_of(law.covariance, device)
    if factor is None:
        return lambda flat, generator: _add_in_main_memory(flat, law, drawing, generator)
    return lambda flat, generator: _add_gaussian(flat, factor, drawing.grid, generator)


def _add_gaussian(flat: torch.Tensor, factor: Factor, grid: Grid | None, generator: torch.Generator | None) -> None:
    if generator is not None:
        normal = torch.randn(flat.shape, generator=generator, device=flat.device, dtype=torch.float64)
        flat.add_(factor.color(normal))
        return
    assert grid is not None
    add_noise(flat, factor, grid)


def _add_in_main_memory(flat: torch.Tensor, law: Gaussian, drawing: Drawing, generator: torch.Generator | None) -> None:
    values = to_array(flat.detach()).reshape(law.shape)
    noisy = draw(values, law, drawing, None if generator is None else _numpy_generator(generator))
    flat.copy_(torch.from_numpy(noisy.ravel()))


def _add_spherical(flat: torch.Tensor, law: Spherical, generator: torch.Generator | None) -> None:
    if generator is None:
        flat.add_(torch.from_numpy(law.sample()).to(flat.device))
        return
    direction = torch.randn(flat.shape, generator=generator, device=flat.device, dtype=torch.float64)
    power = _numpy_generator(generator).standard_gamma(law.k / law.p)
    flat.add_(direction * (law.scale * power ** (1 / law.p) / direction.norm()))


def _numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """A numpy generator seeded by torch's."""
    seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    return np.random.default_rng(int(seed))
