"""Triton kernels for gradients per record on a CUDA device: no patches are unfolded, nothing is copied to float64.

Factors of matrix products have 11 significant bits, as in PyTorch's own convolutions (TF32). A record's gradient is
summed in float32, from that record alone, in an order that depends on its shape only; the sum over records is in
float64. `rounding` covers what this means for norms and sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from matrixdp.learn.layers.rounding import gamma, gram_bound, roundoff

MOST_PIXELS = 64
"""The most pixels of an output for which one program holds the Gram matrices."""

_RECORDS = 128  # that one program sums
_COLUMNS = 1024
_CHANNELS = 64  # that a Gram matrix sums at a time
_LARGEST_GROUP = 1 << 14
_SHORT = -(1 << 13)  # keeps sign, exponent and 10 of the 23 bits of a float32


def shortened(values: Tensor) -> Tensor:
    """The numbers truncated to what tensor cores multiply, so that every kernel multiplies the same ones."""
    return values.contiguous().view(torch.int32).bitwise_and(_SHORT).view(torch.float32)


# --- sums over records ---


@triton.jit(do_not_specialize=["records", "size"])
def _sum_rows(values, weights, sums, records, size, RECORDS: tl.constexpr, COLUMNS: tl.constexpr):
    blocks = tl.cdiv(size, COLUMNS)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    total = tl.zeros((COLUMNS,), tl.float64)
    for record in range(part * RECORDS, tl.minimum((part + 1) * RECORDS, records)):
        weight = tl.load(weights + record)
        value = tl.load(values + record * size + column, mask=column < size, other=0.0)
        total += tl.where(weight != 0, value, 0.0).to(tl.float64) * weight
    tl.store(sums + part * size + column, total, mask=column < size)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """The sum of the rows of a contiguous matrix in float32, each times its weight; in float64.

    Rows with weight zero add exactly zero, also where they are not finite.
    """
    records, size = values.shape
    each = _RECORDS if size > 1 << 15 else _RECORDS // 8
    parts = triton.cdiv(records, each)
    sums = weights.new_empty(parts, size)
    grid = (triton.cdiv(size, _COLUMNS) * parts,)
    _sum_rows[grid](values, weights, sums, records, size, RECORDS=each, COLUMNS=_COLUMNS)
    return sums.sum(0)


# --- convolutions in two dimensions ---


@triton.jit
def _seen(
    pixel, entry, PIXELS: tl.constexpr, OUT_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, STEP_DOWN: tl.constexpr,
    STEP_RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """The pixel of the input that an entry of the kernel reads for a pixel of the output, and whether it exists."""
    y = (pixel // OUT_WIDTH) * STEP_DOWN + (entry // KERNEL_WIDTH) * DOWN - TOP
    x = (pixel % OUT_WIDTH) * STEP_RIGHT + (entry % KERNEL_WIDTH) * RIGHT - LEFT
    return y * WIDTH + x, (pixel < PIXELS) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)


@triton.jit(do_not_specialize=["records"])
def _convolution(
    inputs, outputs, weights, found, records,
    CHANNELS: tl.constexpr, FILTERS: tl.constexpr, KERNEL: tl.constexpr, RECORDS: tl.constexpr, SUM: tl.constexpr,
    TILE_IN: tl.constexpr, TILE_OUT: tl.constexpr, TILE_PIXELS: tl.constexpr,
    PIXELS: tl.constexpr, OUT_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, STEP_DOWN: tl.constexpr,
    STEP_RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """One entry of the kernel, for a tile of filters and channels, of some records: each, or their weighted sum."""
    across: tl.constexpr = (CHANNELS + TILE_IN - 1) // TILE_IN
    tiles: tl.constexpr = KERNEL * across * ((FILTERS + TILE_OUT - 1) // TILE_OUT)
    part = (tl.program_id(0) // tiles).to(tl.int64)
    entry = tl.program_id(0) % tiles % KERNEL
    tile = tl.program_id(0) % tiles // KERNEL
    channel = (tile % across) * TILE_IN + tl.arange(0, TILE_IN)
    filter = (tile // across) * TILE_OUT + tl.arange(0, TILE_OUT)
    there = (filter < FILTERS)[:, None] & (channel < CHANNELS)[None, :]
    place = (entry * FILTERS + filter)[:, None] * CHANNELS + channel[None, :]
    size: tl.constexpr = KERNEL * FILTERS * CHANNELS
    total = tl.zeros((TILE_OUT, TILE_IN), tl.float64)
    for record in range(part * RECORDS, tl.minimum((part + 1) * RECORDS, records)):
        gradient = tl.zeros((TILE_OUT, TILE_IN), tl.float32)
        for start in range(0, PIXELS, TILE_PIXELS):
            pixel = start + tl.arange(0, TILE_PIXELS)
            met, inside = _seen(pixel, entry, PIXELS, OUT_WIDTH, HEIGHT, WIDTH, KERNEL_WIDTH, DOWN, RIGHT, STEP_DOWN,
                                STEP_RIGHT, TOP, LEFT)  # fmt: skip
            left = tl.load(
                outputs + (record * FILTERS + filter)[:, None] * PIXELS + pixel[None, :],
                mask=(filter < FILTERS)[:, None] & (pixel < PIXELS)[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                inputs + (record * CHANNELS + channel)[:, None] * (HEIGHT * WIDTH) + met[None, :],
                mask=(channel < CHANNELS)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            gradient = tl.dot(left, tl.trans(right), gradient, input_precision="tf32")
        if SUM:
            weight = tl.load(weights + record)
            total += tl.where(weight != 0, gradient, 0.0).to(tl.float64) * weight
        else:
            tl.store(found + record * size + place, gradient, mask=there)
    if SUM:
        tl.store(found + part * size + place, total, mask=there)


def _geometry(layer: Any, inputs: Tensor, outputs: Tensor) -> dict[str, int]:
    (height, width), (out_height, out_width) = inputs.shape[2:], outputs.shape[2:]
    return {
        "PIXELS": out_height * out_width,
        "OUT_WIDTH": out_width,
        "HEIGHT": height,
        "WIDTH": width,
        "KERNEL_WIDTH": layer.kernel_size[1],
        "DOWN": layer.dilation[0],
        "RIGHT": layer.dilation[1],
        "STEP_DOWN": layer.stride[0],
        "STEP_RIGHT": layer.stride[1],
        "TOP": layer.padding[0],
        "LEFT": layer.padding[1],
    }


def _tile(size: int, most: int) -> int:
    return int(min(most, max(16, triton.next_power_of_2(size))))


def _run(layer: Any, inputs: Tensor, outputs: Tensor, weights: Tensor | None) -> Tensor:
    records, channels, filters = *inputs.shape[:2], outputs.shape[1]
    kernel, geometry = layer.kernel_size[0] * layer.kernel_size[1], _geometry(layer, inputs, outputs)
    each = 1 if weights is None else _RECORDS
    parts = triton.cdiv(records, each)
    found = (inputs if weights is None else weights).new_empty(parts, *layer.kernel_size, filters, channels)
    tile_in, tile_out = _tile(channels, 64), _tile(filters, 128 if weights is None else 64)
    tiles = kernel * triton.cdiv(filters, tile_out) * triton.cdiv(channels, tile_in)
    _convolution[(tiles * parts,)](
        inputs.contiguous(), outputs.contiguous(), weights, found, records,
        CHANNELS=channels, FILTERS=filters, KERNEL=kernel, RECORDS=each, SUM=weights is not None,
        TILE_IN=tile_in, TILE_OUT=tile_out, TILE_PIXELS=_tile(geometry["PIXELS"], 32 if weights is None else 64),
        num_warps=4, num_stages=3, **geometry,
    )  # fmt: skip
    return found


def convolution_gradients(layer: Any, inputs: Tensor, outputs: Tensor) -> Tensor:
    """The gradient of the weight for each record: (records, *kernel, filters, channels)."""
    return _run(layer, inputs, outputs, None)


def convolution_sum(layer: Any, inputs: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of these gradients in float64: (filters, channels, *kernel); weight zero adds zero."""
    return _run(layer, inputs, outputs, weights).sum(0).permute(2, 3, 0, 1)


@triton.jit
def _gram(
    inputs, outputs, products, sizes, in_scale, in_floor, out_scale, out_floor,
    CHANNELS: tl.constexpr, FILTERS: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    PIXELS: tl.constexpr, OUT_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, STEP_DOWN: tl.constexpr,
    STEP_RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """One record: the sum of the products of both Gram matrices, and the sum of |a_t| |g_t| over its pixels."""
    record = tl.program_id(0).to(tl.int64)
    pixel, row = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    patches = tl.zeros((TOKENS, TOKENS), tl.float32)
    for first in range(0, CHANNELS, BLOCK):
        channel = first + row
        for entry in range(0, KERNEL):
            met, inside = _seen(pixel, entry, PIXELS, OUT_WIDTH, HEIGHT, WIDTH, KERNEL_WIDTH, DOWN, RIGHT, STEP_DOWN,
                                STEP_RIGHT, TOP, LEFT)  # fmt: skip
            values = tl.load(
                inputs + (record * CHANNELS + channel)[:, None] * (HEIGHT * WIDTH) + met[None, :],
                mask=(channel < CHANNELS)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            patches += tl.dot(tl.trans(values), values, input_precision="tf32")
    gradients = tl.zeros((TOKENS, TOKENS), tl.float32)
    for first in range(0, FILTERS, BLOCK):
        filter = first + row
        values = tl.load(
            outputs + (record * FILTERS + filter)[:, None] * PIXELS + pixel[None, :],
            mask=(filter < FILTERS)[:, None] & (pixel < PIXELS)[None, :], other=0.0,
        )  # fmt: skip
        gradients += tl.dot(tl.trans(values), values, input_precision="tf32")
    products_here = (patches * gradients).to(tl.float64)
    same = pixel[:, None] == pixel[None, :]
    size = tl.sum(tl.where(same, patches, 0.0), 1) * in_scale + in_floor
    size = size * (tl.sum(tl.where(same, gradients, 0.0), 1) * out_scale + out_floor)
    tl.store(products + record, tl.sum(products_here))
    tl.store(sizes + record, tl.sum(tl.where(pixel < PIXELS, tl.sqrt_rn(size), 0.0)))


def convolution_norms(layer: Any, inputs: Tensor, outputs: Tensor) -> Tensor:
    """Upper bounds on squared norms from two Gram matrices, as `rounding.gram_norm`; both factors are `shortened`."""
    records, channels, filters = *inputs.shape[:2], outputs.shape[1]
    kernel, geometry = layer.kernel_size[0] * layer.kernel_size[1], _geometry(layer, inputs, outputs)
    block = _CHANNELS
    # Sums of `block` products on tensor cores, which may truncate, and then sums of these.
    unit, tiny = 4 * roundoff(inputs), float(torch.finfo(inputs.dtype).tiny)
    terms, width = block + triton.cdiv(channels, block) * kernel, block + triton.cdiv(filters, block)
    products, sizes = inputs.new_empty(records, dtype=torch.float64), inputs.new_empty(records)
    _gram[(records,)](
        inputs, outputs, products, sizes,
        1 + gamma(terms, unit), channels * kernel * tiny / unit, 1 + gamma(width, unit), filters * tiny / unit,
        CHANNELS=channels, FILTERS=filters, KERNEL=kernel,
        BLOCK=block, TOKENS=_tile(geometry["PIXELS"], MOST_PIXELS), num_warps=4, **geometry,
    )  # fmt: skip
    absolute = sizes.mul_(1 + gamma(geometry["PIXELS"] + 4, unit))
    return gram_bound(products, absolute, tokens=geometry["PIXELS"], terms=terms + width, unit=unit).to(inputs.dtype)


# --- normalization ---


@triton.jit
def _group(inputs, outputs, weight, bias, eps, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
           TILE_CHANNELS: tl.constexpr, TILE_PIXELS: tl.constexpr):  # fmt: skip
    """One group of one record."""
    group = tl.program_id(0).to(tl.int64)
    channel, pixel = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_PIXELS)
    there = (channel < CHANNELS)[:, None] & (pixel < PIXELS)[None, :]
    place = (group * CHANNELS + channel)[:, None] * PIXELS + pixel[None, :]
    value = tl.load(inputs + place, mask=there, other=0.0)
    gradient = tl.load(outputs + place, mask=there, other=0.0)
    mean = tl.sum(value) / (CHANNELS * PIXELS)
    centred = tl.where(there, value - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred) / (CHANNELS * PIXELS) + eps)
    by_weight = tl.sum(gradient * centred, 1) * scale
    tl.store(weight + group * CHANNELS + channel, by_weight, mask=channel < CHANNELS)
    tl.store(bias + group * CHANNELS + channel, tl.sum(gradient, 1), mask=channel < CHANNELS)


def group_gradients(inputs: Tensor, outputs: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor] | None:
    """Gradients of weight and bias of a group norm, (records, channels) each; None where groups are too large."""
    records, channels = inputs.shape[:2]
    within, pixels = channels // groups, inputs[0, 0].numel()
    tiles = triton.next_power_of_2(within), triton.next_power_of_2(pixels)
    if tiles[0] * tiles[1] > _LARGEST_GROUP:
        return None
    weight, bias = inputs.new_empty(records, channels), inputs.new_empty(records, channels)
    warps = max(1, min(8, tiles[0] * tiles[1] // 512))
    _group[(records * groups,)](
        inputs.contiguous(), outputs.contiguous(), weight, bias, eps,
        CHANNELS=within, PIXELS=pixels, TILE_CHANNELS=tiles[0], TILE_PIXELS=tiles[1], num_warps=warps,
    )  # fmt: skip
    return weight, bias
