"""Grid noise on a CUDA device: the tables of grid.py, words from ChaCha20, one Triton kernel.

Every lane makes one ChaCha20 block (eight 64-bit words) per level and turns it into noise for eight entries. The key of
a release is expanded for this purpose alone. The block counter is made of lane and level, so no word is used twice; its
highest bit marks the blocks that break ties, where a word equals its threshold.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import COLUMNS, REFINEMENT, SIGN_BIT, Grid

LANES = 128
"""Lanes per program; each lane draws eight entries."""

_COLUMN = tl.constexpr(COLUMNS - 1)
_SIGN = tl.constexpr(SIGN_BIT)
_REFINEMENT = tl.constexpr(REFINEMENT)


@triton.jit
def _rotate(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotate(d ^ a, 16)
    c += d
    b = _rotate(b ^ c, 12)
    a += b
    d = _rotate(d ^ a, 8)
    c += d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _look_up(low, high, table):
    """One word to K, as in kernels.py, and whether it meets its threshold.

    The upper 52 bits are compared with the threshold, the lower 11 are the column.
    """
    word = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    column = tl.load(table + (low & _COLUMN).to(tl.int32)).to(tl.uint64, bitcast=True)
    chosen = tl.where((word >> 12) < (column >> 12), word, column)
    size = (chosen & _COLUMN).to(tl.int32)
    sign = ((low >> _SIGN) & 1).to(tl.int32)
    return ((size ^ -sign) + sign).to(tl.float64), (word >> 12) == (column >> 12)


@triton.jit
def _tie(low, high, more_low, more_high, met, table, ties):
    """The change of K where a word equals its threshold: a second word decides."""
    place = (low & _COLUMN).to(tl.int32)
    more = more_low.to(tl.uint64) | (more_high.to(tl.uint64) << 32)
    own = met & (more < tl.load(ties + place).to(tl.uint64, bitcast=True))
    alias = (tl.load(table + place) & _COLUMN).to(tl.int32)
    sign = 1 - 2 * ((low >> _SIGN) & 1).to(tl.int32)
    return tl.where(own, sign * (place - alias), 0).to(tl.float64)


@triton.jit
def _chacha(key, counter, zero):
    """The 16 words of one ChaCha20 block; the counter has 64 bits, the nonce is 0."""
    k0 = zero + tl.load(key)
    k1 = zero + tl.load(key + 1)
    k2 = zero + tl.load(key + 2)
    k3 = zero + tl.load(key + 3)
    k4 = zero + tl.load(key + 4)
    k5 = zero + tl.load(key + 5)
    k6 = zero + tl.load(key + 6)
    k7 = zero + tl.load(key + 7)
    c0 = zero + 0x61707865
    c1 = zero + 0x3320646E
    c2 = zero + 0x79622D32
    c3 = zero + 0x6B206574
    n0 = counter.to(tl.uint32)
    n1 = (counter >> 32).to(tl.uint32)
    x0, x1, x2, x3 = c0, c1, c2, c3
    x4, x5, x6, x7 = k0, k1, k2, k3
    x8, x9, x10, x11 = k4, k5, k6, k7
    x12, x13, x14, x15 = n0, n1, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + n0, x13 + n1, x14, x15,
    )  # fmt: skip


@triton.jit
def _finish(values, out, place, size, noise, unit, inverse):
    """out = unit * (round(value / unit) + K) for one entry per lane."""
    inside = place < size
    value = tl.load(values + place, mask=inside, other=0.0).to(tl.float64)
    result = unit * (libdevice.rint(value * inverse) + noise)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])  # one compilation serves all sizes
def _add_noise(values, out, size, key, tables, all_ties, scale, LEVELS: tl.constexpr, LANES: tl.constexpr):
    unit, inverse = tl.load(scale), tl.load(scale + 1)
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.uint32)
    n0 = (lane * 0).to(tl.float64)
    n1, n2, n3, n4, n5, n6, n7 = n0, n0, n0, n0, n0, n0, n0
    for level in tl.static_range(LEVELS):
        counter = ((program * LANES + lane) * LEVELS + level).to(tl.uint64)
        w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha(key, counter, zero)
        table, ties = tables + level * (_COLUMN + 1), all_ties + level * (_COLUMN + 1)
        k0, m0 = _look_up(w0, w1, table)
        k1, m1 = _look_up(w2, w3, table)
        k2, m2 = _look_up(w4, w5, table)
        k3, m3 = _look_up(w6, w7, table)
        k4, m4 = _look_up(w8, w9, table)
        k5, m5 = _look_up(w10, w11, table)
        k6, m6 = _look_up(w12, w13, table)
        k7, m7 = _look_up(w14, w15, table)
        if tl.max((m0 | m1 | m2 | m3 | m4 | m5 | m6 | m7).to(tl.int32), axis=0) > 0:
            t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15 = _chacha(
                key, counter | (1 << 63), zero
            )
            k0 += _tie(w0, w1, t0, t1, m0, table, ties)
            k1 += _tie(w2, w3, t2, t3, m1, table, ties)
            k2 += _tie(w4, w5, t4, t5, m2, table, ties)
            k3 += _tie(w6, w7, t6, t7, m3, table, ties)
            k4 += _tie(w8, w9, t8, t9, m4, table, ties)
            k5 += _tie(w10, w11, t10, t11, m5, table, ties)
            k6 += _tie(w12, w13, t12, t13, m6, table, ties)
            k7 += _tie(w14, w15, t14, t15, m7, table, ties)
        n0 = n0 * _REFINEMENT + k0
        n1 = n1 * _REFINEMENT + k1
        n2 = n2 * _REFINEMENT + k2
        n3 = n3 * _REFINEMENT + k3
        n4 = n4 * _REFINEMENT + k4
        n5 = n5 * _REFINEMENT + k5
        n6 = n6 * _REFINEMENT + k6
        n7 = n7 * _REFINEMENT + k7
    first = program * (8 * LANES) + lane
    _finish(values, out, first, size, n0, unit, inverse)
    _finish(values, out, first + LANES, size, n1, unit, inverse)
    _finish(values, out, first + 2 * LANES, size, n2, unit, inverse)
    _finish(values, out, first + 3 * LANES, size, n3, unit, inverse)
    _finish(values, out, first + 4 * LANES, size, n4, unit, inverse)
    _finish(values, out, first + 5 * LANES, size, n5, unit, inverse)
    _finish(values, out, first + 6 * LANES, size, n6, unit, inverse)
    _finish(values, out, first + 7 * LANES, size, n7, unit, inverse)


@cache
def _tables(levels: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of a grid on a device, one after the other, and their ties."""
    tables = Grid(levels).tables
    columns = ([table.packed for table in tables], [table.ties for table in tables])
    packed, ties = (torch.from_numpy(np.concatenate(parts).view(np.int64)).to(device) for parts in columns)
    return packed, ties


def add_noise(
    values: torch.Tensor, std: float, grid: Grid, key: Key | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`kernels.add_noise` for a contiguous float32 or float64 tensor on a CUDA device, where the result stays.

    The caller has checked that the values are finite and fit the grid, and that `out`, if given, is contiguous and of
    the same shape (it may be `values` itself). Entry i is drawn by lane i % 128 of program i // 1024, from the blocks
    of that lane.
    """
    device, size = values.device, values.numel()
    out = torch.empty_like(values) if out is None else out
    unit = std * grid.step
    secret = (Key() if key is None else key).chacha_key()
    # key and scale in one transfer
    sent = torch.from_numpy(np.frombuffer(secret + np.array([unit, 1 / unit]).tobytes(), dtype=np.int32).copy())
    received = sent.to(device)
    programs = triton.cdiv(size, 8 * LANES)
    with torch.cuda.device(device):
        _add_noise[(programs,)](
            values,
            out,
            size,
            received[:8].view(torch.uint32),
            *_tables(grid.levels, device),
            received[8:].view(torch.float64),
            LEVELS=grid.levels,
            LANES=LANES,
            num_warps=4,
        )
    return out
