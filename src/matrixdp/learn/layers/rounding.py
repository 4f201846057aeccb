"""Rounding: computed norms that are upper bounds, and the error of a sum of clipped gradients.

Rounding within a record. Let u be the unit roundoff of the parameters' type. A sum of n products, in any order, has an
error of at most gamma_n(u) = n u / (1 - n u) times the sum of their sizes; where numbers are too small to square, each
has an error of at most the smallest normal number. Let record i have the gradient G_i = sum_t g_t a_t^T over its T
tokens (see `base`). The norm of an explicit gradient is a sum of squares, hence accurate up to a factor. The terms of
a factored norm can cancel: its Gram matrices have errors of gamma_n |a_s| |a_t| and the like, so its error is some
gamma S^2, where S = sum_t |a_t| |g_t|, however small the norm is. If G_i is formed in this type, it has an error of
gamma_(T+8) S. Both are included, so that every N_i bounds the norm of what is added to the sum later:

    |G_i| <= N_i = sqrt(computed + max(gamma, k_T^2) S^2) + gamma_(T+8) S,   k_T = CANCELLATION max(1, T / TERMS).

If PyTorch may shorten the factors of a matrix product (`torch.set_float32_matmul_precision`), that is included too.
Convolutions on a GPU shorten them to 11 significant bits unless `torch.backends.cudnn.allow_tf32` is off, and so do the
gradients of convolutions here; norm and sum are both those of the shortened gradient. If it is explicit, both read the
same numbers. If the norm is factored (`cuda_kernels`), the factors are shortened once, before both, so that every
product is exact; sums on tensor cores may be truncated, so u is four times as large there.

Rounding of the sum over records. One record can change how the sum of all others is rounded, so the error of all n
records counts, not of one. All sums end in float64, whose unit roundoff is v = 2^-53:

    explicit        w_i G_i is added for each entry of the parameter: one product and at most n - 1 additions. Kernels
                    that form G_i for the sum and do not keep it do the same.
    one token       w_i g_i a_i^T likewise: two products and at most n - 1 additions.
    several tokens  the products of whole records are summed separately, at most max(TERMS, T) at a time; then these
                    sums, at most n in all, are added.

Adding zero is exact, and a sum of n numbers, in any order, rounds each of them at most n - 1 times. Hence for the first
two, with w_i S_i = w_i |G_i| <= w_i N_i, the error is at most gamma_(n+1)(v) sum_i w_i N_i in norm. For the last, the
inner sums have an error of at most h sum_i w_i N_i, h = gamma_(TERMS+2)(v) / CANCELLATION, as k_T S_i <= N_i and
gamma_(m+1)(v) / k_T <= h for m = max(TERMS, T); and the outer one of gamma_n(v) (1 + h) sum_i w_i N_i. Over all
parameters w_i N_i <= clip, and errors of parameters add up as the norms do, in squares (triangle inequality over the
records). So the norm of the error of the whole sum is at most e clip, with

    e = n (gamma_(n+2)(v) + h) (1 + 2^-10)       (`sum_error`),

and likewise in each entry if entries are clipped. Underflow is below 1e-150 and covered by the last factor.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

TERMS = 2048
"""The most products that a matrix product sums in float64, unless a record has more tokens."""

CANCELLATION = 2.0**-10
"""Norms include at least this part of S, which bounds how far the products of one record can cancel."""

# Twice the error of TF32, which may truncate, and of bfloat16, which rounds.
_SHORT_FACTORS = {"highest": 0.0, "high": 2.0**-9, "medium": 2.0**-7}
_WIDE = 2.0**-53  # the unit roundoff of float64


def roundoff(tensor: Tensor) -> float:
    """The relative error of one operation."""
    return float(torch.finfo(tensor.dtype).eps) / 2


def rounded_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of that type that is not above the value."""
    nearest = torch.tensor(value, dtype=dtype)
    return float(nearest if float(nearest) <= value else torch.nextafter(nearest, torch.zeros_like(nearest)))


def gamma(terms: int, unit: float) -> float:
    """The relative error of a sum of `terms` products, in any order."""
    return terms * unit / (1 - terms * unit)


def factor_roundoff(tensor: Tensor) -> float:
    """The relative error of both factors in a matrix product, if PyTorch may shorten them."""
    return _SHORT_FACTORS[torch.get_float32_matmul_precision()] if tensor.dtype == torch.float32 else 0.0


def slow_products(tensor: Tensor) -> bool:
    """Whether matrix products are many times slower in float64 than in float32, as on consumer GPUs."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return False
    return torch.cuda.get_device_capability(tensor.device) not in {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


def sum_error(records: int) -> float:
    """A bound on the error of the computed sum of `records` clipped gradients, in units of clip; proved at the top.

    Leaving out one of them changes it by at most clip (1 + 2 sum_error), replacing one by 2 clip (1 + sum_error).
    """
    inner = gamma(TERMS + 2, _WIDE) / CANCELLATION
    return records * (gamma(records + 2, _WIDE) + inner) * (1 + 2.0**-10)


def squared_norm(values: Tensor) -> Tensor:
    """An upper bound on the sum of squares of each row, over all dimensions but the first."""
    rows = values.flatten(1)
    entries, info = rows.shape[1], torch.finfo(values.dtype)
    # Long sums end in float64, to limit their error; only the ends, as a copy in float64 takes long.
    if entries <= 1 << 14 or values.dtype == torch.float64:
        total, terms = torch.linalg.vector_norm(rows, dim=1).square_(), entries
    elif block := _block(entries):
        blocks = torch.linalg.vector_norm(rows.view(rows.shape[0], -1, block), dim=2).square_()
        total, terms = blocks.sum(1, dtype=torch.float64).to(values.dtype), block
    else:
        total, terms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_().to(values.dtype), 0
    return torch.add(entries * info.tiny, total, alpha=1 + gamma(terms + 8, info.eps / 2))


@functools.cache
def _block(entries: int) -> int | None:
    """A length of at most 4096 that divides a long row, if there is one of at least 64."""
    return next((entries // n for n in range(-(-entries // 4096), entries // 64 + 1) if entries % n == 0), None)


def gram_norm(inputs: Tensor, outputs: Tensor, *, terms: int) -> Tensor:
    """|sum_t g_t a_t^T|^2 from the Gram matrix of a (each entry a sum of `terms` terms) and g: (batch, tokens, out).

    An upper bound, also for the weight gradient as it is rounded; see the top of the file.
    """
    tokens, width = outputs.shape[1:]
    factors, tiny = factor_roundoff(outputs), torch.finfo(outputs.dtype).tiny
    unit = roundoff(outputs) * (4 if factors else 1)  # where factors are short, sums may be truncated
    gram = torch.bmm(outputs, outputs.transpose(1, 2))
    # The diagonals may have been rounded down, and underflow must count even after a factor of unit.
    sizes = inputs.diagonal(dim1=1, dim2=2).mul(1 + gamma(terms, unit) + factors).add_(terms * tiny / unit)
    sizes = sizes * gram.diagonal(dim1=1, dim2=2).mul(1 + gamma(width, unit) + factors).add_(width * tiny / unit)
    absolute = sizes.sqrt_().sum(1).mul_(1 + gamma(tokens + 4, unit))
    products = gram.mul_(inputs).sum((1, 2), dtype=torch.float64)
    return gram_bound(products, absolute, tokens=tokens, terms=terms + width, unit=unit, factors=factors).to(
        outputs.dtype
    )


def gram_bound(
    products: Tensor, absolute: Tensor, *, tokens: int, terms: int, unit: float, factors: float = 0.0
) -> Tensor:
    """N_i^2 from the sum of the products of two Gram matrices, in float64, and from S_i; see the top of the file.

    Args:
        products: one per record; overwritten.
        absolute: an upper bound on S_i.
        tokens: how many a record has.
        terms: how many roundings the entries of both matrices had together.
        unit: the relative error of an addition.
        factors: the relative error of the two factors of a product.
    """
    cancellation = CANCELLATION * max(1, tokens / TERMS)
    part = max(gamma(terms + 16, unit) + 2.1 * factors, cancellation**2)
    wide = products.clamp_(min=0).add_(absolute.square(), alpha=part).sqrt_()
    return wide.add_(absolute, alpha=gamma(tokens + 8, unit) + factors).square_().mul_(1 + 8 * unit)
