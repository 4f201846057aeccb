"""Noise for the parameters of a network: one law on the flat gradient, as a whole or layer by layer, drawn in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.covariance import Blocks, Covariance, FullCovariance, Isotropic, Kronecker, Spectrum
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms import calibrate
from matrixdp.mechanisms.base import HEADROOM
from matrixdp.mechanisms.mvg import Released
from matrixdp.noise.grid import LIMIT, Grid
from matrixdp.noise.laws import Gaussian, NoiseLaw, Spherical
from matrixdp.noise.sampler import TOO_LARGE, Sampling, draw, sampling_for
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.sensitivity import Entrywise, Frobenius, Sensitivity

# A recipe gives noise its shape; its size comes later, from the certificate. So any budget will do to ask for it.
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
    """What a mechanism proposes for the parameters of a network, laid out one after the other in one vector.

    Args:
        mechanism: a name in the registry.
        shapes: the shapes of the parameters.
        sensitivity: what a neighbour can change in the whole vector: Frobenius or Entrywise with one bound.
        budget: what the recipe is asked for, of the whole vector or of each layer.
        by_layer: calls the recipe for each parameter, read as a matrix: a weight has a row for each output, a bias is
            one column. What the layers guarantee together is for the certificate to say.
        **options: options of the mechanism.
    """
    one_bound = isinstance(sensitivity, Entrywise) and np.ndim(sensitivity.bound) == 0
    if not (isinstance(sensitivity, Frobenius) or one_bound):
        raise InvalidInput(f"sensitivity must be Frobenius, or Entrywise with one bound, got {type(sensitivity)}")
    if any(isinstance(value, Released) for value in options.values()):
        raise InvalidInput(
            "directions must be a public matrix here: the noise gets its size later, and what an earlier release cost "
            "would be left out; take its eigenvectors yourself, and account for that release beside the training"
        )
    if not by_layer:
        size = sum(math.prod(shape) for shape in shapes)
        return calibrate(mechanism, shape=(size,), sensitivity=sensitivity, budget=budget, **options)
    parts: list[FullCovariance] = []
    for shape in shapes:
        law = calibrate(mechanism, shape=as_matrix(shape), sensitivity=sensitivity, budget=budget, **options)
        if not (isinstance(law, Gaussian) and isinstance(law.covariance, FullCovariance)):
            raise InvalidInput(
                f"mechanism {mechanism!r} is not Gaussian noise on all entries; use it with by_layer=False"
            )
        parts.append(law.covariance)
    return Gaussian(Blocks(tuple(parts)), source=law.source, note="layer by layer")


def as_matrix(shape: Shape) -> Shape:
    """A parameter's shape as that of a matrix: outputs x everything else."""
    return shape[0] if shape else 1, math.prod(shape[1:])


def with_mu(law: Gaussian, sensitivity: Sensitivity, mu: float) -> tuple[Gaussian, Sampling]:
    """The law in the size at which its certificate, drawing included, has this mu, and how to draw it.

    Layers are weighed against each other first, for the least total error: under one norm for all, each may have the
    whole mu; under a bound for each entry, the squares of their mu add up to it.
    """
    balanced = _balanced(law, sensitivity)
    sampling = sampling_for(balanced, sensitivity, mu)
    reference = certify(balanced, sensitivity).mu
    assert reference is not None
    return balanced.scaled(reference / (mu - sampling.enlargement) * HEADROOM), sampling


def _balanced(law: Gaussian, sensitivity: Sensitivity) -> Gaussian:
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
        sampling: how to draw it; worked out when it is left out.
        generator: for reproducible studies only; the noise is then drawn in floating point and hides nothing from those
            who know the seed.
    """

    def __init__(
        self,
        law: NoiseLaw,
        sensitivity: Sensitivity,
        largest_norm: float,
        *,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if len(law.shape) != 1:
            raise InvalidInput(f"noise must be a law on a vector of all parameters, got shape {law.shape}")
        if generator is not None:
            sampling = Sampling(reproducible=True)
        elif sampling is None:
            sampling = sampling_for(law, sensitivity, certify(law, sensitivity).mu)
        self.law, self.sampling, self.generator = law, sampling, generator
        self.certificate: Certificate = certify(law, sensitivity, sampling=sampling)
        self._check_room(_check.positive("largest_norm", largest_norm))
        self._draws: dict[torch.device, _Draw] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise InvalidInput(f"{name} is part of the guarantee and cannot be changed; make a new ParameterNoise")
        super().__setattr__(name, value)

    def _check_room(self, largest_norm: float) -> None:
        """Every vector will fit the grid, so that no step is refused for what is in the data."""
        if self.sampling.grid is None or not isinstance(self.law, Gaussian):
            return
        assert isinstance(self.law.covariance, FullCovariance)
        whitened = largest_norm / self.law.covariance.smallest_std
        if not (whitened / self.sampling.grid.step < LIMIT and whitened <= self.sampling.largest_norm):
            raise InvalidInput(TOO_LARGE)

    def add_(self, flat: torch.Tensor) -> None:
        """Adds one draw to a contiguous vector of float32 or float64, where it lies."""
        right = tuple(flat.shape) == self.law.shape and flat.is_contiguous()
        if not (right and flat.dtype in (torch.float32, torch.float64)):
            raise InvalidInput(
                f"flat must be a contiguous vector of {self.law.shape[0]} numbers, float32 or float64, got "
                f"{flat.dtype} of shape {tuple(flat.shape)}"
            )
        if flat.device not in self._draws:
            self._draws[flat.device] = _draw_on(flat.device, self.law, self.sampling)
        self._draws[flat.device](flat, self.generator)


_Draw = Callable[[torch.Tensor, torch.Generator | None], None]


def _draw_on(device: torch.device, law: NoiseLaw, sampling: Sampling) -> _Draw:
    """What draws the law there."""
    if isinstance(law, Spherical):
        return lambda flat, generator: _add_spherical(flat, law, generator)
    assert isinstance(law, Gaussian)
    factor = _factor(law.covariance, device)
    if factor is None:
        return lambda flat, generator: _add_on_host(flat, law, sampling, generator)
    return lambda flat, generator: _add_gaussian(flat, factor, sampling.grid, generator)


class _Factor(Protocol):
    """A factor of a covariance, on a device."""

    def whiten(self, values: torch.Tensor) -> torch.Tensor:
        """A vector in units of the noise."""

    def color(self, white: torch.Tensor) -> torch.Tensor:
        """The vector again."""


class _Scaled:
    """Independent noise: a standard deviation, or one for each entry."""

    def __init__(self, std: Any, device: torch.device) -> None:
        self.std = std if isinstance(std, float) else torch.tensor(std, dtype=torch.float64, device=device)

    def whiten(self, values: torch.Tensor) -> torch.Tensor:
        return values / self.std

    def color(self, white: torch.Tensor) -> torch.Tensor:
        return white * self.std


class _Turned:
    """Correlated rows and columns, each by variances along directions; as Kronecker has it, on a device."""

    def __init__(self, covariance: Kronecker, device: torch.device) -> None:
        self.shape = covariance.shape
        self.sides = [_side(spectrum, device) for spectrum in (covariance.rows, covariance.columns)]

    def whiten(self, values: torch.Tensor) -> torch.Tensor:
        turned = values.reshape(self.shape)
        for roots, directions in self.sides:
            turned = ((turned if directions is None else directions.T @ turned) / roots).T
        return turned.reshape(-1)

    def color(self, white: torch.Tensor) -> torch.Tensor:
        turned = white.reshape(self.shape)
        for roots, directions in self.sides:
            turned = (turned * roots if directions is None else directions @ (turned * roots)).T
        return turned.reshape(-1)


def _side(spectrum: Spectrum, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    roots = torch.from_numpy(np.sqrt(spectrum.variances))[:, None].to(device)
    return roots, None if spectrum.directions is None else torch.tensor(spectrum.directions, device=device)


class _InParts:
    """Several of these, one after the other."""

    def __init__(self, parts: Sequence[_Factor], places: Sequence[slice]) -> None:
        self.parts = list(zip(parts, places, strict=True))

    def whiten(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.whiten(values[place]) for part, place in self.parts])

    def color(self, white: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.color(white[place]) for part, place in self.parts])


def _factor(covariance: Covariance, device: torch.device) -> _Factor | None:
    """None for a covariance that is drawn on the host."""
    if isinstance(covariance, Isotropic):
        return _Scaled(covariance.std, device)
    if isinstance(covariance, FullCovariance) and covariance.independent:
        return _Scaled(np.sqrt(covariance.variances()).ravel(), device)
    if isinstance(covariance, Kronecker):
        return _Turned(covariance, device)
    if isinstance(covariance, Blocks):
        parts = [_factor(part, device) for part in covariance.parts]
        known = [part for part in parts if part is not None]
        return _InParts(known, covariance.places) if len(known) == len(parts) else None
    return None


def _add_gaussian(flat: torch.Tensor, factor: _Factor, grid: Grid | None, generator: torch.Generator | None) -> None:
    """Whitened values on the grid, with grid noise, coloured again; in one pass where the noise is i.i.d."""
    if generator is not None:
        normal = torch.randn(flat.shape, generator=generator, device=flat.device, dtype=torch.float64)
        flat.add_(factor.color(normal))
        return
    assert grid is not None
    if isinstance(factor, _Scaled) and isinstance(factor.std, float):
        _add_grid_noise(flat, factor.std, grid)
        return
    white = factor.whiten(flat.to(torch.float64)).contiguous()
    _add_grid_noise(white, 1.0, grid)
    flat.copy_(factor.color(white))


def _add_grid_noise(flat: torch.Tensor, std: float, grid: Grid) -> None:
    """In place, from a fresh key."""
    if flat.is_cuda:
        from matrixdp.noise import cuda

        cuda.add_noise(flat, std, grid, out=flat)
        return
    from matrixdp.noise import kernels  # numba, when it is needed

    values = flat.numpy()
    kernels.add_noise(values, std, grid, out=values)


def _add_on_host(flat: torch.Tensor, law: Gaussian, sampling: Sampling, generator: torch.Generator | None) -> None:
    values = flat.detach().cpu().numpy().astype(np.float64).reshape(law.shape)
    noisy = draw(values, law, sampling, None if generator is None else _numpy_generator(generator))
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
