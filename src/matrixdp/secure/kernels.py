"""Drawing grid noise: blocks of words, look-ups, and the addition, in one pass over the values.

    out = std * step * (round(value / (std * step)) + K)

The work is done in blocks of 65,536 entries. A thread fills a buffer with the block's words, turns them into K level by
level, and adds the values; memory beyond the output is one megabyte per thread. The noise of a block depends only on
the key and the number of the block, so the result does not depend on the number of threads.

Time: the loops below have no branch that depends on a value or on the noise, only selections. Values so small that they
round to 0 are replaced by 0 first, because some processors are slow on subnormal numbers. Multiplication is used where
the time of a division might depend on its operands. Only a tie, one look-up in 2^52, takes longer: for an observer of
timing, the total-variation error is larger than Grid's by up to 2^-52 per look-up. The tables (16 KiB each) stay in the
first-level cache. An attacker who shares that cache and times single look-ups is outside this model.

The loops are plain functions; numba is imported, and compiles them, at the first draw.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp._compiled import compiled
from matrixdp.errors import InvalidInput
from matrixdp.secure.entropy import Key, Words
from matrixdp.secure.grid import FINEST, LIMIT, REFINEMENT, Grid

Floats = npt.NDArray[np.floating[Any]]
T = TypeVar("T")

BLOCK = 1 << 16
"""Entries per block; another number would change the noise of a key."""

_STREAM_ENTRIES = 1 << 20  # in a chunk of `stream`, by default
_SCAN = 16  # blocks that a thread can scan in the time of drawing one, at least


def _look_up(words: Words, table: Words, carry: float, unit: float, noise: Array) -> int:
    """noise = carry * noise + unit * K, one word per entry; returns how many words equal their threshold (ties).

    With 2^11 columns, a word's lower 11 bits are its column, the next is the sign, and the upper 52 are compared with
    the threshold: by comparing the whole word with the packed column, its lower 12 bits cleared. The lower 11 bits of
    the packed column are the alias, so one selection between word and column gives |K|. All masks are computed from the
    table, because cached machine code is not recompiled when a constant elsewhere changes.
    """
    sign_bit = np.uint64(table.size)
    size_bits = sign_bit - np.uint64(1)
    threshold_bits = ~(sign_bit | size_bits)
    met = 0
    for j in range(words.size):
        word = words[j]
        column = table[word & size_bits]
        chosen = word if word < (column & threshold_bits) else column
        size = np.int64(chosen & size_bits)
        noise[j] = carry * noise[j] + unit * np.float64(size if word & sign_bit == 0 else -size)
        met += (word ^ column) & threshold_bits == 0
    return met


def _add(values: Floats, unit: float, noise: Array, out: Floats) -> None:
    """out = unit * (round(values / unit) + noise), half to even."""
    inverse, vanishing = 1.0 / unit, 0.25 * unit
    for j in range(values.size):
        value = np.float64(values[j])
        kept = value if abs(value) > vanishing else 0.0
        out[j] = unit * (np.rint(kept * inverse) + noise[j])


def _largest(bits: npt.NDArray[np.signedinteger[Any]], magnitude: np.signedinteger[Any]) -> np.signedinteger[Any]:
    """The largest absolute value, as bits: without the sign, floats are ordered as integers are, and NaN comes last."""
    largest = magnitude & ~magnitude
    for j in range(bits.size):
        largest = max(largest, bits[j] & magnitude)
    return largest


def prepare(std: float, grid: Grid, dtype: npt.DTypeLike = np.float64) -> None:
    """Imports, compiles and builds everything that `add_noise` needs, by one draw on zeros that is discarded.

    Args:
        std: The standard deviation that will be drawn.
        grid: The grid, in units of std.
        dtype: The type of the values and of the result, float64 or float32.

    Raises:
        MatrixDPError: if the noise cannot be drawn on this machine.
    """
    zeros = np.zeros(1, dtype=dtype)
    largest(zeros)
    _draw(zeros, _unit(std, grid, zeros.dtype), grid, None, np.empty_like(zeros), workers=1)


def limit(std: float, grid: Grid, dtype: np.dtype[Any]) -> float:
    """The bound on the absolute values, so that they fit the grid and a result of this type."""
    return min(LIMIT * _unit(std, grid, dtype), float(np.finfo(dtype).max) / 2)


def largest(values: Floats, threads: int | None = None) -> float:
    """The largest absolute value, infinite or NaN if an entry is, in one pass without a temporary array.

    Args:
        values: A non-empty float64 or float32 array; copied first unless contiguous in C or Fortran order.
        threads: How many threads work; all processors by default.
    """
    flat = _read_only(values.ravel(order="K"))
    whole = np.dtype(f"i{flat.dtype.itemsize}").type
    scan, bits = compiled(_largest), flat.view(whole)
    magnitude = whole(np.iinfo(whole).max)

    def work(blocks: range) -> int:
        return max(int(scan(bits[block * BLOCK : (block + 1) * BLOCK], magnitude)) for block in blocks)

    found = max(_share(work, flat.size, _workers(threads, -(-flat.size // _SCAN))))
    return float(whole(found).view(flat.dtype))


def add_noise(
    values: npt.ArrayLike,
    std: float,
    grid: Grid,
    key: Key | None = None,
    out: Floats | None = None,
    threads: int | None = None,
    drawn: Array | None = None,
) -> Floats:
    """Puts values on the grid and adds Gaussian noise of this standard deviation.

    Args:
        values: float64 or float32, finite, below LIMIT grid steps; copied first unless C-contiguous.
        std: The standard deviation of the noise, from 2^-900 to 2^900.
        grid: The grid, in units of std.
        key: The entropy, used up by this call; a new one from the operating system by default.
        out: Where the result goes: a C-contiguous float64 or float32 array, or `values` itself; new by default.
        threads: How many threads work; all processors by default. The result is the same for any number.
        drawn: A contiguous float64 array for the noise alone, bit for bit what the key gives on zeros; optional.

    Returns:
        The noisy values, in the type of `values` unless `out` is given.

    Guarantee: that of `Grid`, with values and differences in units of std. Rounding to float32 is post-processing.

    Raises:
        InvalidInput: before anything is drawn or written, if an argument is invalid. For values that are not finite or
            too large, whether it is raised depends on the values, but the message does not show them.
    """
    source = np.asarray(_check.array_of("values", values), order="C")
    if source.dtype not in (np.float64, np.float32) or not source.size > 0:
        kind = _check.entries(source.dtype)
        raise InvalidInput(f"values must be a non-empty array of floats, got {kind} of shape {source.shape}")
    target = np.empty_like(source) if out is None else _checked_out(source, out)
    workers = _workers(threads, source.size)
    unit = _unit(std, grid, target.dtype)
    if not largest(source, threads) < limit(std, grid, target.dtype):
        raise InvalidInput(
            f"values must be finite and below {LIMIT:.3g} grid steps of {unit:.6g}; use a coarser grid, or clip or "
            "rescale the values"
        )
    _draw(source.reshape(-1), unit, grid, key, target.reshape(-1), workers, drawn)
    return target


def standard(shape: Shape, grid: Grid, key: Key | None = None, threads: int | None = None) -> Array:
    """Standard Gaussian noise on the grid, `add_noise` to zeros with std 1: exact multiples of grid.step."""
    out = np.empty(_check.any_shape(shape))
    _draw(None, grid.step, grid, key, out.reshape(-1), _workers(threads, out.size))
    return out


def stream(
    values: Any,
    std: float,
    grid: Grid,
    key: Key | None = None,
    rows: int | None = None,
    threads: int | None = None,
) -> Iterator[Floats]:
    """`add_noise` chunk by chunk, for values that need not fit into memory.

    Args:
        values: Anything with a shape that gives arrays of floats for slices of rows: an array, a memory map, a data set
            on disk. `numpy.broadcast_to(0.0, shape)` gives noise alone, and takes no memory.
        rows: Rows in a chunk, about a million entries by default.
        std, grid, key, threads: As for `add_noise`. Chunk i is drawn with `key.derive(i)`.

    Returns:
        An iterator over noisy chunks, each drawn when requested. If `add_noise` refuses a chunk, its error ends the
        iterator; the chunks before it have been released by then.
    """
    shape = _check.shape(tuple(int(side) for side in values.shape))
    entries = shape[1] if len(shape) == 2 else 1
    height = max(1, _STREAM_ENTRIES // entries) if rows is None else _check.count("rows", rows)
    _unit(std, grid, np.dtype(np.float64))
    _workers(threads, 1)
    keys = (Key() if key is None else key).split()
    chunks = (np.asarray(values[first : first + height]) for first in range(0, shape[0], height))
    return (add_noise(chunk, std, grid, part, threads=threads) for chunk, part in zip(chunks, keys, strict=False))


def _draw(
    values: Floats | None,
    unit: float,
    grid: Grid,
    key: Key | None,
    out: Floats,
    workers: int,
    drawn: Array | None = None,
) -> None:
    """Adds noise to the values, or to zeros, in all blocks; writes the noise alone to `drawn` if given."""
    look_up, add = compiled(_look_up), compiled(_add)
    entropy = (Key() if key is None else key).stream()

    def draw(block: int, noise: Array, words: Words) -> None:
        for level, table in enumerate(grid.tables):
            entropy.fill(words, block, level)
            if look_up(words, table.packed, float(REFINEMENT) if level else 0.0, 1.0, noise):
                more = np.empty_like(words)
                entropy.fill(more, block, FINEST + level)
                noise += table.ties_broken(words, more)
        if drawn is not None:
            np.multiply(noise, unit, out=drawn[block * BLOCK : block * BLOCK + noise.size])

    _add_in_blocks(draw, lambda given, noise, to: add(given, unit, noise, to), values, out, workers)


def _add_in_blocks(
    draw: Callable[[int, Array, Words], None],
    add: Callable[[Any, Array, Any], None],
    values: Floats | None,
    out: npt.NDArray[Any],
    workers: int,
) -> None:
    """out = add(values, noise), block by block; `draw` writes the noise of a block, with a buffer for its words."""
    room = min(BLOCK, out.size)
    given = _read_only(np.zeros(room) if values is None else values)

    def work(blocks: range) -> None:
        words, noise = np.empty(room, dtype=np.uint64), np.zeros(room)
        for block in blocks:
            place = slice(block * BLOCK, min((block + 1) * BLOCK, out.size))
            count = place.stop - place.start
            draw(block, noise[:count], words[:count])
            add(given[:count] if values is None else given[place], noise[:count], out[place])

    _share(work, out.size, workers)


def _read_only(values: Floats) -> Floats:
    """A read-only view, so that numba always sees the type of values for which `prepare` has compiled."""
    view = values.view()
    view.flags.writeable = False
    return view


def _share(work: Callable[[range], T], size: int, workers: int) -> list[T]:
    """Distributes the blocks over threads, which end with the call, so that none is lost in a fork."""
    blocks = -(-size // BLOCK)
    if workers == 1:
        return [work(range(blocks))]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, [range(first, blocks, workers) for first in range(workers)]))


def _workers(threads: int | None, size: int) -> int:
    """How many threads are worth starting."""
    if threads is None:
        available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        threads = len(available)
    return min(_check.count("threads", threads), -(-size // BLOCK))


def _unit(std: float, grid: Grid, dtype: np.dtype[Any]) -> float:
    """The grid's step in the units of the values; exact, because it is std times a power of two."""
    if not isinstance(grid, Grid):
        raise InvalidInput(f"grid must be a Grid, got {_check.kind(grid)}; use matrixdp.secure.grid.plan")
    highest = min(2.0**900, float(np.finfo(dtype).max) / 256)
    if not 2.0**-900 <= _check.positive("std", std) <= highest:
        raise InvalidInput(
            f"std must lie between 2^-900 and {highest:.3g} for {dtype}, got {std!r}; rescale the values"
        )
    return float(std) * grid.step


def _checked_out(values: Floats, out: Floats) -> Floats:
    """The caller's array; raises InvalidInput if the result cannot be written there."""
    if not isinstance(out, np.ndarray) or out.dtype not in (np.float64, np.float32) or out.shape != values.shape:
        raise InvalidInput(
            f"out must be an array of floats of shape {values.shape}, got {type(out).__name__} {np.shape(out)}"
        )
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise InvalidInput("out must be C-contiguous and writeable; leave it out to get a new array")
    in_place = out.dtype == values.dtype and out.ctypes.data == values.ctypes.data
    if not in_place and np.may_share_memory(values, out):
        raise InvalidInput("out must be values itself or share no memory with it; leave it out to get a new array")
    return out
