"""PyTorch tensors in, tensors out, on their device; torch is imported only when a tensor comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from matrixdp._check import Array, Shape
from matrixdp.covariance import Isotropic
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.noise import sampler
from matrixdp.noise.grid import LIMIT, Grid
from matrixdp.noise.laws import Gaussian, NoiseLaw
from matrixdp.noise.sampler import TOO_LARGE, Sampling


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def checked(value: Any) -> Any:
    """The tensor without its gradient; float32 or float64, finite, a vector or a matrix."""
    import torch

    tensor = value.detach().clone()
    if tensor.dtype not in (torch.float32, torch.float64):
        raise InvalidInput(f"value must be a float32 or float64 tensor, got {tensor.dtype}; convert it first")
    if tensor.ndim not in (1, 2) or tensor.numel() == 0:
        raise InvalidInput(f"value must be a vector or a matrix and not empty, got shape {tuple(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise InvalidInput("value must be finite; drop or fill the records that are not before the query")
    return tensor


def shape_of(value: Any) -> Shape:
    """The shape as whole numbers."""
    return tuple(int(side) for side in value.shape)


def to_array(tensor: Any) -> Array:
    """The values as a float64 array in main memory."""
    return np.asarray(tensor.cpu().numpy(), dtype=np.float64)


def like(noisy: Array, tensor: Any) -> Any:
    """An array as a tensor of the same type, on the same device; rounding to float32 is post-processing."""
    import torch

    return torch.from_numpy(noisy).to(device=tensor.device, dtype=tensor.dtype)


def stays_on_device(tensor: Any, law: NoiseLaw, sampling: Sampling) -> bool:
    """Whether the noise can be drawn on the tensor's CUDA device: i.i.d. Gaussian noise on a grid."""
    isotropic = isinstance(law, Gaussian) and isinstance(law.covariance, Isotropic)
    return bool(tensor.is_cuda) and isotropic and sampling.grid is not None


def prepared(tensor: Any, law: Gaussian, sampling: Sampling) -> Callable[[], Any]:
    """`sampler.prepared` for i.i.d. noise on the tensor's CUDA device."""
    prepare(tensor, law, sampling)
    assert isinstance(law.covariance, Isotropic)
    assert sampling.grid is not None
    if not float(tensor.abs().max()) / law.covariance.std / sampling.grid.step < LIMIT:
        raise InvalidInput(TOO_LARGE)
    values, std, grid = tensor.contiguous(), law.covariance.std, sampling.grid
    noisy = values.new_empty(values.shape)
    return lambda: _add_noise(values, std, grid, noisy)


def prepare(tensor: Any, law: NoiseLaw, sampling: Sampling) -> None:
    """`sampler.prepare` for noise that will be added to such a tensor, where the tensor lies."""
    if sampling.grid is None or not isinstance(law, Gaussian):
        return
    if not tensor.is_cuda:
        sampler.prepare(law, sampling, str(tensor.dtype).removeprefix("torch."))
        return
    _add_noise(tensor.new_zeros(1), 1.0, sampling.grid)


def draw(tensor: Any, law: Gaussian, sampling: Sampling) -> Any:
    """The tensor with one draw of i.i.d. noise, on its CUDA device."""
    assert isinstance(law.covariance, Isotropic)
    assert sampling.grid is not None
    return _add_noise(tensor.contiguous(), law.covariance.std, sampling.grid)


def _add_noise(tensor: Any, std: float, grid: Grid, out: Any = None) -> Any:
    """Draws on the CUDA device."""
    try:
        from matrixdp.noise import cuda
    except ImportError as reason:
        raise MatrixDPError(
            f"noise cannot be drawn on the CUDA device, because its kernel cannot be imported ({reason}); install "
            "triton, or move the tensor to the processor first"
        ) from None
    return cuda.add_noise(tensor, std, grid, out=out)
