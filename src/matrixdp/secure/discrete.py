"""Drawing discrete noise on a grid: whole numbers of steps, added to values that were floored to the grid.

    out = floor(value / step) + K,      P(K = j) prop. to exp(-(|j| / scale)^exponent),      in whole steps.

Floor moves neighbouring values that differ by at most m steps to whole numbers that differ by at most m, so nothing has
to be added to the sensitivity; rounding half to even would need more (0.5 -> 0, 1.5 -> 2). The step is a power of two,
so the quotient is exact; whole numbers need no step.

There are two samplers.

- `Tabled` draws from alias tables (tables.py): one word and one look-up per table, no rejection. As in kernels.py, the
  loops have no branch that depends on values or noise; only a tie takes longer, one look-up in 2^(63-c) with 2^c
  columns. Tables of 2^11 columns stay in the first-level cache, larger ones (1 < exponent < 2 and large scales) in the
  second. What is drawn is within `total_variation` of the law, so delta = 0 is not possible.
- `ExactLaplace` draws discrete Laplace noise exactly, for delta = 0, with unbounded support. **Its time depends on the
  noise**: an entry that needs more random bits is drawn again more slowly (one in 2^18 or fewer, up to scales of a
  million). An observer of such fine timing learns that some entry's noise was close to a step.

The same key gives the same noise on every machine and for any number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.errors import InvalidInput
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key, Stream, Words
from matrixdp.secure.kernels import BLOCK
from matrixdp.secure.tables import LEAST_SCALE, Digits, Whole, digits, largest_scale

LIMIT = 2**51
"""Values must stay below this many steps, so that floats hold them exactly, with room to shift them."""

LARGEST_EXACT = 2.0**30
"""The largest scale of exact draws, in steps; above, too many would take the slow way."""

_SHIFT = 1.5 * 2.0**52  # between 2^52 and 2^53 floats are the whole numbers, and so are their bits, shifted
_ORIGIN = int(np.float64(_SHIFT).view(np.int64))  # the bits of _SHIFT, read as a whole number
_TIES = 64  # parts of the stream from here on break ties
_REFINING = 128  # and from here on refine exact draws
_FINE = 2.0**-42  # of the scale: closer to a whole number, an exact draw takes more bits


class Sampler(Protocol):
    """A sampler of whole numbers of steps."""

    @property
    def total_variation(self) -> float:
        """An upper bound on the total-variation distance of one entry's noise from its law."""

    def add(self, stream: Stream, block: int, origin: int, out: Whole, words: Words) -> None:
        """Adds the noise of a block to what is there, less the origin; `words` is room for as many words."""


@dataclass(frozen=True)
class Tabled:
    """Noise from tables.

    Guarantee: let the law be (epsilon, delta)-private for neighbours that change k entries. Then what is drawn is
        (epsilon, delta + (1 + e^epsilon) (1 - (1 - total_variation)^k))-private: other entries have the same law for
        both.

    Attributes:
        exponent: from 1 (discrete Laplace) to 2 (discrete Gaussian).
        scale: in steps, at most `tables.largest_scale(exponent)`.
    """

    exponent: float
    scale: float

    def __post_init__(self) -> None:
        if not 1.0 <= _check.number("exponent", self.exponent) <= 2.0:
            raise InvalidInput(f"exponent must lie between 1 and 2, got {_check.shown(self.exponent)}")
        highest = largest_scale(self.exponent)
        if not LEAST_SCALE <= _check.positive("scale", self.scale) <= highest:
            raise InvalidInput(
                f"scale must lie between 2^-10 and {highest:.6g} steps, got {self.scale!r}; change the step"
            )

    def __reduce__(self) -> tuple[type[Tabled], tuple[float, float]]:
        return Tabled, (self.exponent, self.scale)  # the tables are built where they are needed

    @cached_property
    def digits(self) -> Digits:
        """The tables of the law."""
        return digits(float(self.exponent), float(self.scale))

    @property
    def total_variation(self) -> float:
        """An upper bound on the total-variation distance of one entry's noise from its law."""
        return self.digits.total_variation

    def add(self, stream: Stream, block: int, origin: int, out: Whole, words: Words) -> None:
        """Adds the noise of a block to what is there, less the origin."""
        look_up = kernels._compiled(_add_look_up)
        for part, (table, shift) in enumerate(zip(self.digits.tables, self.digits.shifts, strict=True)):
            stream.fill(words, block, part)
            if look_up(words, table.packed, np.uint64(shift), np.int64(0 if part else origin), out):
                more = np.empty_like(words)
                stream.fill(more, block, _TIES + part)
                out += table.ties_broken(words, more) << shift


@dataclass(frozen=True)
class ExactLaplace:
    """Discrete Laplace noise, exactly: P(K = j) prop. to e^(-|j| / scale), with unbounded support and no error.

    K = A - B with A, B geometric, and A = floor(-scale log U) with U uniform on (0, 1), as P(A >= a) = P(U <= q^a) =
    q^a. The bits of U are drawn as they are needed: 64 of them give an interval, and if -scale log U has the same floor
    all over it, that is A. Otherwise 64 more are drawn, and so on, in arithmetic with as many digits as that takes. Of
    floats only this is assumed: numpy's logarithm is correct to 2^-45.

    Guarantee: the law of K is exact if the words are uniform; so a difference of m steps in all is kept
        (m/scale, 0)-private.
    Source: the law and its use are those of ghosh2012universally and canonne2020discrete.
    Deviates: canonne2020discrete, which draws from fair coins by rejection and for rational scales, is not followed:
        bits of one uniform number are compared with the exact edges, which is as exact, and faster.
    """

    scale: float

    def __post_init__(self) -> None:
        if not LEAST_SCALE <= _check.positive("scale", self.scale) <= LARGEST_EXACT:
            raise InvalidInput(f"scale must lie between 2^-10 and 2^30 steps, got {self.scale!r}; change the step")

    @property
    def total_variation(self) -> float:
        """0: the law is exact."""
        return 0.0

    def add(self, stream: Stream, block: int, origin: int, out: Whole, words: Words) -> None:
        """Adds the noise of a block to what is there, less the origin."""
        for part, sign in enumerate((1, -1)):
            stream.fill(words, block, part)
            out += sign * self._geometric(words, stream, block, part)
        out -= origin

    def _geometric(self, words: Words, stream: Stream, block: int, part: int) -> Whole:
        logs = 64.0 * math.log(2.0) - np.log(np.maximum(words, np.uint64(1)).astype(np.float64))
        sizes, margin = self.scale * logs, self.scale * _FINE * (1.0 + logs)
        found = np.floor(sizes - margin)
        # where 44 leading bits are 0, the interval is wide
        open_ = np.flatnonzero((found != np.floor(sizes + margin)) | (words < np.uint64(1 << 44)))
        result = found.astype(np.int64)
        bits = {int(place): int(words[place]) for place in open_}
        for depth in range(1, 200):
            if not bits:
                return result
            stream.fill(words, block, _REFINING + 2 * depth + part)
            bits = {place: known << 64 | int(words[place]) for place, known in bits.items()}
            for place, known in list(bits.items()):
                decided = self._decided(known, 64 * (depth + 1))
                if decided is not None:
                    result[place] = decided
                    del bits[place]
        raise ArithmeticError("12,800 random bits have not decided a draw")  # of probability 2^-12000

    def _decided(self, known: int, length: int) -> int | None:
        """floor(-scale log U) if it is the same for all U with these leading bits, else None."""
        if known == 0:
            return None
        context = Context(prec=30 + length // 3)
        margin = Decimal(10) ** -(10 + length // 3)
        low, high = (
            context.multiply(
                Decimal(self.scale),
                context.subtract(context.multiply(length, context.ln(2)), context.ln(Decimal(number))),
            )
            for number in (known + 1, known)
        )
        below, above = (math.floor(edge) for edge in (context.subtract(low, margin), context.add(high, margin)))
        return below if below == above and below >= 0 else None


def sampler(exponent: float, scale: float, *, exact: bool = False) -> Sampler:
    """The sampler of a law; `exact` for delta = 0, which is known for exponent 1 alone."""
    if not exact:
        return Tabled(exponent, scale)
    if exponent != 1.0:
        raise InvalidInput(f"exact draws are known for exponent 1 alone, got {_check.shown(exponent)}")
    return ExactLaplace(scale)


def noise(
    shape: Shape, exponent: float, scale: float, key: Key | None = None, threads: int | None = None, exact: bool = False
) -> Whole:
    """Noise alone, in whole steps, from a fresh key unless one is given."""
    out = np.empty(_check.any_shape(shape), dtype=np.int64)
    _draw(sampler(exponent, scale, exact=exact), None, 1.0, out.reshape(-1), key, kernels._workers(threads, out.size))
    return out


def add_noise(
    values: npt.ArrayLike,
    step: float,
    source: Sampler,
    key: Key | None = None,
    threads: int | None = None,
    out: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[Any]:
    """Floors values to the grid and adds noise.

    Args:
        values: floats, finite and below 2^51 steps; or whole numbers, which are in steps already (step = 1).
        step: of the grid, a power of two from 2^-900 to 2^900.
        source: what draws the noise, in steps.
        key: the entropy, used up by this call; a new one from the operating system by default.
        threads: how many threads work; all processors by default. The result is the same for any number.
        out: where the result goes, in the units of the values: a C-contiguous float64 array, or `values` itself.

    Returns:
        Whole numbers of steps; `out` if it was given.

    Raises:
        InvalidInput: before anything is drawn. That there is a refusal depends on the values; the message does not show
            them.
    """
    given = np.asarray(_check.array_of("values", values), order="C")
    if given.dtype.kind not in "iuf" or given.dtype.itemsize > 8 or not given.size > 0:
        kind = _check.entries(given.dtype)
        raise InvalidInput(f"values must be a non-empty array of floats or whole numbers, got {kind} {given.shape}")
    if math.frexp(_check.positive("step", step))[0] != 0.5 or not 2.0**-900 <= step <= 2.0**900:
        raise InvalidInput(f"step must be a power of two from 2^-900 to 2^900, got {_check.shown(step)}")
    if given.dtype.kind in "iu":
        if step != 1.0:
            raise InvalidInput(
                "step must be 1 for whole numbers, which are steps themselves; divide them, or use floats"
            )
        if given.dtype == np.uint64 and not int(given.max()) < LIMIT:
            raise InvalidInput("values must be below 2^51 in size; use a coarser grid")
        numbers: npt.NDArray[Any] = given.astype(np.int64, copy=False)
        if not kernels._compiled(_bits)(kernels._read_only(numbers.reshape(-1))) < LIMIT:
            raise InvalidInput("values must be below 2^51 in size; use a coarser grid")
    else:
        numbers = given.astype(np.float64, copy=False)
        if not kernels.largest(numbers, threads) < LIMIT * step:
            raise InvalidInput(
                f"values must be finite and below 2^51 steps of {step:g}; clip them or use a coarser grid"
            )
    target = np.empty(given.shape, dtype=np.int64) if out is None else kernels._checked_out(given, out)
    _draw(source, numbers.reshape(-1), step, target.reshape(-1), key, kernels._workers(threads, target.size))
    return target


def _draw(
    source: Sampler, values: npt.NDArray[Any] | None, step: float, out: npt.NDArray[Any], key: Key | None, workers: int
) -> None:
    """Noise for all blocks, on top of the values or of zeros: whole steps, or multiples of the step where out is float.

    Multiples of the step are computed block by block: no whole numbers of the size of the result are kept.
    """
    stream, floors = (Key() if key is None else key).stream(), kernels._compiled(_floors)

    def work(blocks: range) -> None:
        words = np.empty(min(BLOCK, out.size), dtype=np.uint64)
        whole = None if out.dtype == np.int64 else np.empty(words.size, dtype=np.int64)
        for block in blocks:
            place = slice(block * BLOCK, min((block + 1) * BLOCK, out.size))
            target, origin = out[place], 0
            here = target if whole is None else whole[: target.size]
            if values is None:
                here[:] = 0
            elif values.dtype == np.int64:
                here[:] = values[place]
            else:
                floors(kernels._read_only(values[place]), step, here.view(np.float64))
                origin = _ORIGIN
            source.add(stream, block, origin, here, words[: here.size])
            if whole is not None:
                np.multiply(here, step, out=target)

    kernels._share(work, out.size, workers)


def _add_look_up(words: Words, table: Words, shift: np.uint64, origin: np.int64, out: Whole) -> int:
    """out += (K << shift) - origin, one word per entry; returns how many words have met their threshold exactly.

    As kernels._look_up, in whole numbers and for any power of two of columns.
    """
    sign_bit = np.uint64(table.size)
    size_bits = sign_bit - np.uint64(1)
    threshold_bits = ~(sign_bit | size_bits)
    met = 0
    for j in range(words.size):
        word = words[j]
        column = table[word & size_bits]
        chosen = word if word < (column & threshold_bits) else column
        size = np.int64((chosen & size_bits) << shift)
        out[j] += (size if word & sign_bit == 0 else -size) - origin
        met += (word ^ column) & threshold_bits == 0
    return met


def _bits(values: Whole) -> np.int64:
    """All bits that some value has, or its complement if it is negative: less than 2^n exactly if all sizes are."""
    bits = np.int64(0)
    for j in range(values.size):
        bits |= values[j] ^ (values[j] >> np.int64(63))
    return bits


def _floors(values: npt.NDArray[np.float64], step: float, shifted: npt.NDArray[np.float64]) -> None:
    """floor(values / step) + _SHIFT, exactly: the step is a power of two, and tiny values are replaced by -1/4 or 0."""
    inverse, vanishing, origin = 1.0 / step, 0.25 * step, 6755399441055744.0
    for j in range(values.size):
        value = values[j]
        small = -vanishing if value < 0.0 else 0.0
        kept = value if abs(value) > vanishing else small
        shifted[j] = np.floor(kept * inverse) + origin
