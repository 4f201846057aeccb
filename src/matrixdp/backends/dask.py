"""Dask arrays, which may be larger than any machine: noise block by block, on the workers.

Each release has one key, drawn in this process. Each block has its own key, derived from that key and the block's
index; only the block's key is sent, inside its task. So a block that is computed again, because a worker was lost or
the result is computed twice, has the same noise. No worker can remove the noise of blocks that it did not compute.
Releases share no keys.

The same noise on other values would reveal their difference. So the array must have the same values whenever it is
computed: if its files or tasks may change, `persist()` it before the release.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable
from typing import Any, TypeGuard

import dask
import dask.array
import numpy as np
from dask.array.core import slices_from_chunks
from dask.highlevelgraph import HighLevelGraph

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.backends import numpy
from matrixdp.backends.numpy import TOO_LARGE
from matrixdp.distributions import Gaussian, NoiseLaw, Product
from matrixdp.distributions.covariance import Covariance, Diagonal, Isotropic, Kronecker
from matrixdp.errors import InvalidInput
from matrixdp.privacy.drawing import Drawing
from matrixdp.secure import discrete
from matrixdp.secure.discrete import Sampler
from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import Grid
from matrixdp.secure.kernels import Floats, add_noise
from matrixdp.sensitivity import RankOne, Sensitivity

Independent = Isotropic | Diagonal | Kronecker
"""Covariances whose noise can be drawn block by block; of Kronecker ones, those with diagonal factors."""


class BlockKey:
    """The key of one block on its way to a worker: redacted in repr, pickled on purpose."""

    __slots__ = ("_name", "_secret")

    def __init__(self, name: str, secret: bytes) -> None:
        self._name = name
        self._secret = secret

    def open(self) -> Key:
        """A fresh copy of the key each time, so that the block can be drawn again."""
        return Key.from_bytes(self._secret)

    def __repr__(self) -> str:
        return "<BlockKey: secret>"

    def __reduce__(self) -> tuple[type[BlockKey], tuple[str, bytes]]:
        return BlockKey, (self._name, self._secret)

    def __dask_tokenize__(self) -> str:
        return self._name  # Dask would otherwise hash the secret into the names of tasks


def checked(value: Any, sensitivity: Sensitivity) -> Any:
    """A Dask array of real numbers of known shape."""
    if not isinstance(value, dask.array.Array):
        raise InvalidInput(f"value must be a Dask array, got {type(value).__name__}; distributed.identity() makes one")
    if any(math.isnan(side) for side in value.shape):
        raise InvalidInput("value must have a known shape; call compute_chunk_sizes() on the array first")
    if value.dtype.kind not in "iuf":
        raise InvalidInput(f"value must hold real numbers, got dtype {_check.entries(value.dtype)}; convert it first")
    if isinstance(sensitivity, RankOne):
        raise InvalidInput(
            "sensitivity must not be RankOne for a Dask array: no block can see whether the matrix is symmetric; "
            "compute() the value first, or use Frobenius"
        )
    return value


def prepared(
    value: Any, law: NoiseLaw, drawing: Drawing, rng: np.random.Generator | None = None, original: Any = None
) -> Callable[[], Any]:
    """The noisy array as a graph of tasks; noise is drawn when it is computed. See `Backend`.

    Guarantee: that of the certificate, for everything that is ever computed from the result. Whoever can read the
        memory of the client, the scheduler or a worker, or the connections between them, is outside this guarantee.

    A block whose values are not finite, or do not fit the grid, is refused when it is computed. The release then fails,
    and its budget stays spent.
    """
    if rng is not None:
        raise InvalidInput("rng cannot be given for a Dask array: its noise is drawn on the workers, from secure keys")
    if isinstance(law, Product):
        source = numpy.discrete_sampler(law, drawing)
        noisy_steps = _block_by_block(value, Key(), noisy_discrete_block, lambda place: (law.step, source))
        return lambda: noisy_steps
    if not (isinstance(law, Gaussian) and _independent(law.covariance) and drawing.grid is not None):
        raise InvalidInput(
            f"only noise with independent entries can be drawn block by block, got {law.describe()}; use "
            'mechanism="analytic", "laplace" or "discrete", or compute() the value first'
        )
    if law.value_shape is not None and not isinstance(law.covariance, Isotropic):
        raise InvalidInput(
            "noise that differs between entries is drawn block by block on vectors and matrices, got shape "
            f"{law.shape}; reshape() the value first"
        )
    numpy.prepare(law, drawing, _dtype(value))
    noisy = add_block_noise(value, law.covariance, drawing.grid, Key())  # tasks; no block is drawn yet
    return lambda: noisy


def add_block_noise(values: Any, covariance: Independent, grid: Grid, key: Key) -> Any:
    """A Dask array of the values with grid noise: block (i, j) is drawn as one machine would, with `key.derive(i, j)`.

    The name of the array is random and reveals nothing about the key.
    """
    return _block_by_block(values, key, noisy_block, lambda place: (*_scale(covariance, place), grid))


def _block_by_block(
    values: Any, key: Key, draw: Callable[..., Floats], arguments: Callable[[tuple[slice, ...]], tuple[Any, ...]]
) -> Any:
    """One task per block: draw(block, *arguments(place), the block's key, index, shape)."""
    name = f"released-{secrets.token_hex(16)}"
    tasks = {}
    indices = itertools.product(*map(range, values.numblocks))
    for index, place in zip(indices, slices_from_chunks(values.chunks), strict=True):
        block_key = BlockKey(f"{name}-{index}", key.derive(*(index or (0,))).expose())  # of a scalar, block 0
        shape = tuple(side.stop - side.start for side in place)
        tasks[(name, *index)] = (
            draw, (values.name, *index), *arguments(place), block_key, index, shape,
        )  # fmt: skip
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=[values])
    return dask.array.Array(graph, name, values.chunks, dtype=_dtype(values))


def noisy_block(
    block: Any, std: float, factors: list[Array], grid: Grid, key: BlockKey, index: Shape, shape: Shape
) -> Floats:
    """One block with noise of standard deviation std times all factors; runs on a worker."""

    def drawn(white: Floats) -> Floats:
        for factor in factors:
            white = white / factor
        noisy = add_noise(white, std, grid, key.open(), threads=1)
        for factor in factors:
            noisy *= factor
        return noisy

    return _noisy(block, index, shape, drawn)


def noisy_discrete_block(block: Any, step: float, source: Sampler, key: BlockKey, index: Shape, shape: Shape) -> Floats:
    """One block, floored to the grid, with discrete noise; runs on a worker."""

    def drawn(values: Floats) -> Floats:
        return discrete.add_noise(values, step, source, key.open(), threads=1, out=np.empty(values.shape))

    return _noisy(block, index, shape, drawn)


def _noisy(block: Any, index: Shape, shape: Shape, drawn: Callable[[Floats], Floats]) -> Floats:
    """Applies `drawn` to the floats of a block, which must have the declared shape."""
    if np.shape(block) != shape:
        raise InvalidInput(f"block {index} of value: has shape {np.shape(block)} where {shape} was declared")
    plain = type(block) is np.ndarray and block.dtype in (np.float32, np.float64)
    values = block if plain else _check.finite(f"block {index} of value", block)
    if not values.size > 0:
        return values
    with np.errstate(over="ignore"):  # values that overflow are refused; noisy values may overflow in single precision
        try:
            noisy = drawn(values)
        except InvalidInput:
            raise InvalidInput(f"block {index} of value: not finite, or {TOO_LARGE}. The release stays spent") from None
        return noisy.astype(values.dtype, copy=False)


def _dtype(values: Any) -> np.dtype[Any]:
    """The dtype of the noisy blocks."""
    return np.dtype(values.dtype if values.dtype in (np.float32, np.float64) else np.float64)


def _independent(covariance: Covariance) -> TypeGuard[Independent]:
    return isinstance(covariance, (Isotropic, Diagonal, Kronecker)) and covariance.independent


def _scale(covariance: Independent, place: tuple[slice, ...]) -> tuple[float, list[Array]]:
    """The standard deviations of the entries in one place, as a number and arrays of factors.

    The factors are those of `covariance.whiten`, in the same order, so that a block is rounded as on one machine.
    """
    if isinstance(covariance, Isotropic):
        return covariance.std, []
    if isinstance(covariance, Diagonal):
        return 1.0, [covariance.std[place]]
    rows, columns = covariance.rows.variances[place[0]], covariance.columns.variances[place[1]]
    alike = rows[:1] if np.all(rows == rows[:1]) else rows  # one number to send for a tall matrix, not one per row
    return 1.0, [np.sqrt(alike)[:, None], np.sqrt(columns)]
