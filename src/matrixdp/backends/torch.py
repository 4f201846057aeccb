"""The backend for PyTorch tensors: on a CUDA device most Gaussian noise is drawn there, all other noise on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from matrixdp._check import Array
from matrixdp.backends import numpy
from matrixdp.backends.numpy import TOO_LARGE
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Blocks, Covariance, FullCovariance, Isotropic, Kronecker, kronecker
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy.drawing import Drawing
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import LIMIT, Grid
from matrixdp.sensitivity import RankOne, Sensitivity

FLOATS = (torch.float32, torch.float64)


def checked(value: Tensor, sensitivity: Sensitivity) -> Tensor:
    """A detached copy of the tensor: float32 or float64, finite, and for RankOne symmetric."""
    tensor = value.detach().clone()
    if tensor.dtype not in FLOATS:
        raise InvalidInput(f"value must be a float32 or float64 tensor, got {tensor.dtype}; convert it first")
    if tensor.numel() == 0:
        raise InvalidInput(f"value must not be empty, got shape {tuple(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise InvalidInput("value must be finite; drop or fill the records that are not before the query")
    if isinstance(sensitivity, RankOne):
        sensitivity.fits(tuple(tensor.shape))
        # kept in double precision, so that no later rounding moves it off the symmetric matrices
        return torch.from_numpy(numpy.symmetric(to_array(tensor))).to(tensor.device)
    return tensor


def prepared(
    value: Tensor, law: NoiseLaw, drawing: Drawing, rng: np.random.Generator | None, original: Tensor
) -> Callable[[], Tensor]:
    """Does everything that can fail, and returns the call that draws; see `Backend`."""
    if rng is None and value.is_cuda and isinstance(law, Gaussian) and drawing.grid is not None:
        factor = factor_of(law.covariance, value.device)
        if factor is not None:
            finish_there = _prepared_on_device(value, factor, drawing, drawing.grid)
            return lambda: finish_there().to(original.dtype)
    finish = numpy.prepared(to_array(value), law, drawing, rng)
    return lambda: like(finish(), original)


def _prepared_on_device(value: Tensor, factor: Factor, drawing: Drawing, grid: Grid) -> Callable[[], Tensor]:
    flat, same = value.reshape(-1), _one_std(factor)
    white = (factor.whiten(flat.to(torch.float64)) if same is None else flat).contiguous()
    std = 1.0 if same is None else same
    longest = drawing.largest_norm if drawing.float_safe else None
    too_long = longest is not None and not float(white.norm()) <= longest
    if too_long or not float(white.abs().max()) / std / grid.step < LIMIT:
        raise InvalidInput(TOO_LARGE)
    add_grid_noise(white.new_zeros(1), 1.0, grid)  # compiles the kernel, before anything is spent
    noisy = torch.empty_like(white)

    def draw() -> Tensor:
        add_grid_noise(white, std, grid, noisy)
        return (factor.color(noisy) if same is None else noisy).reshape(value.shape)

    return draw


def draw(value: Tensor, law: NoiseLaw, drawing: Drawing) -> Tensor:
    """The tensor with one draw of the noise; the caller has checked that it fits the grid."""
    factor = factor_of(law.covariance, value.device) if value.is_cuda and isinstance(law, Gaussian) else None
    if factor is None or drawing.grid is None:
        return like(numpy.draw(to_array(value), law, drawing), value)
    flat = value.reshape(-1).clone()
    add_noise(flat, factor, drawing.grid)
    return flat.reshape(value.shape)


def to_array(tensor: Tensor) -> Array:
    """The values as a float64 array in main memory."""
    return np.asarray(tensor.cpu().numpy(), dtype=np.float64)


def like(noisy: Array, tensor: Tensor) -> Tensor:
    """An array as a tensor of the same type, on the same device; rounding to float32 is post-processing."""
    return torch.from_numpy(noisy).to(device=tensor.device, dtype=tensor.dtype)


# --- covariances on a device ---


class Factor(Protocol):
    """A factor of a covariance, on a device; it acts on flat vectors."""

    def whiten(self, values: Tensor) -> Tensor:
        """A vector in units of the noise."""

    def color(self, white: Tensor) -> Tensor:
        """The inverse of `whiten`."""


class _Scaled:
    """Independent noise: one standard deviation, or one for each entry."""

    def __init__(self, std: Any, device: torch.device) -> None:
        self.std = std if isinstance(std, float) else torch.tensor(std, dtype=torch.float64, device=device)

    def whiten(self, values: Tensor) -> Tensor:
        return values / self.std

    def color(self, white: Tensor) -> Tensor:
        return white * self.std


def _one_std(factor: Factor) -> float | None:
    """The standard deviation of i.i.d. noise, which is drawn in one pass; None for other noise."""
    return factor.std if isinstance(factor, _Scaled) and isinstance(factor.std, float) else None


class _Turned:
    """Correlated rows and columns."""

    def __init__(self, covariance: Kronecker, device: torch.device) -> None:
        self.shape = covariance.shape
        self.rows, self.columns = (_side(spectrum, device) for spectrum in (covariance.rows, covariance.columns))

    def whiten(self, values: Tensor) -> Tensor:
        return cast(Tensor, kronecker.whiten(values.reshape(self.shape), self.rows, self.columns)).reshape(-1)

    def color(self, white: Tensor) -> Tensor:
        return cast(Tensor, kronecker.color(white.reshape(self.shape), self.rows, self.columns)).reshape(-1)


def _side(spectrum: Spectrum, device: torch.device) -> tuple[Any, Any]:
    stds, directions = kronecker.side(spectrum)
    on_device = [None if part is None else torch.tensor(part, device=device) for part in (stds, directions)]
    return on_device[0], on_device[1]


class _InParts:
    """Several factors, each on its part of the vector."""

    def __init__(self, parts: Sequence[Factor], places: Sequence[slice]) -> None:
        self.parts = list(zip(parts, places, strict=True))

    def whiten(self, values: Tensor) -> Tensor:
        return torch.cat([part.whiten(values[place]) for part, place in self.parts])

    def color(self, white: Tensor) -> Tensor:
        return torch.cat([part.color(white[place]) for part, place in self.parts])


def factor_of(covariance: Covariance, device: torch.device) -> Factor | None:
    """A factor of the covariance on a device; None for a covariance that is drawn in main memory."""
    if isinstance(covariance, Isotropic):
        return _Scaled(covariance.std, device)
    if isinstance(covariance, FullCovariance) and covariance.independent:
        return _Scaled(np.sqrt(covariance.variances()).ravel(), device)
    if isinstance(covariance, Kronecker):
        return _Turned(covariance, device)
    if isinstance(covariance, Blocks):
        parts = [factor_of(part, device) for part in covariance.parts]
        known = [part for part in parts if part is not None]
        return _InParts(known, covariance.places) if len(known) == len(parts) else None
    return None


def add_grid_noise(
    flat: Tensor,
    std: float,
    grid: Grid,
    out: Tensor | None = None,
    key: Key | None = None,
    drawn: Tensor | None = None,
) -> None:
    """Rounds a contiguous vector to the grid and adds noise, from a fresh key by default; in place without `out`.

    `drawn` receives the noise alone, bit for bit what the key gives on zeros.
    """
    target, key = flat if out is None else out, Key() if key is None else key
    if flat.is_cuda:
        try:
            from matrixdp.secure import cuda
        except ImportError as reason:
            raise MatrixDPError(
                f"noise cannot be drawn on the CUDA device, because its kernel cannot be imported ({reason}); install "
                "triton, or move the tensor to the processor first"
            ) from None
        again = Key.from_bytes(key.expose())
        cuda.add_noise(flat, std, grid, key, out=target)
        if drawn is not None:
            cuda.add_noise(drawn.zero_(), std, grid, again)
        return
    from matrixdp.secure import kernels  # numba, when it is needed

    noise = None if drawn is None else drawn.numpy()
    kernels.add_noise(flat.numpy(), std, grid, key, out=target.numpy(), drawn=noise)


def add_noise(flat: Tensor, factor: Factor, grid: Grid) -> None:
    """Adds coloured grid noise to a contiguous vector, in place; in one pass where the noise is i.i.d."""
    same = _one_std(factor)
    if same is not None:
        add_grid_noise(flat, same, grid)
        return
    white = factor.whiten(flat.to(torch.float64)).contiguous()
    add_grid_noise(white, 1.0, grid)
    flat.copy_(factor.color(white))
