"""Drawing discrete noise on a grid: whole numbers of steps, added to values that were floored to the grid.

    out = floor(value / step) + K,      P(K = j) prop. to exp(-(|j| / scale)^exponent),      in whole steps.

Floor moves neighbouring values that differ by at most m steps to whole numbers that differ by at most m, so nothing has
to be added to the sensitivity; rounding half to even would need more (0.5 -> 0, 1.5 -> 2). The step is a power of two,
so the quotient is exact; whole numbers need no step. All sums stay below 2^53 steps, which floats hold exactly.

K is drawn from alias tables (tables.py): one word and one look-up per table, no rejection. As in kernels.py, the loops
have no branch that depends on values or noise; only a tie takes longer, one look-up in 2^(63-c) with 2^c columns.
Tables of 2^11 columns stay in the first-level cache, larger ones (1 < exponent < 2 and large scales) in the second.
The noise is within `total_variation` of the law, so delta = 0 is not possible.

For delta = 0 discrete Laplace noise is drawn exactly, with unbounded support: from such tables, and, in some ties, from
what their whole numbers leave out (exact_tables.py). **The time of a tie depends on the noise**, and for delta = 0 no
guarantee covers that.

The same key gives the same noise on every machine and for any number of threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp._compiled import compiled
from matrixdp.errors import InvalidInput
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key, Stream, Words
from matrixdp.secure.exact_tables import exact_digits
from matrixdp.secure.tables import Digits, Whole, checked_exponent, checked_scale, digits

LIMIT = 2**51
"""Values must stay below this many steps, so that floats hold them and the noise exactly."""

_TIES = 64  # parts of the stream from this number on break ties
_REFINING = 128  # and from this one on draw what an exact table leaves out


@dataclass(frozen=True)
class Sampler:
    """A sampler of whole numbers of steps.

    Guarantee: let the law be (epsilon, delta)-private for neighbours that change k entries. Then the drawn noise is
        (epsilon, delta + (1 + e^epsilon) (1 - (1 - total_variation)^k))-private: the other entries have the same law
        under both neighbours. With `exact` the law of K is exact if the words are uniform (proof in exact_tables.py):
        a total difference of m steps is (m/scale, 0)-private.
    Source: ghosh2012universally and canonne2020discrete, for the law of exact draws and its use.
    Deviates: canonne2020discrete draws from fair coins by rejection, for rational scales; here a table of whole numbers
        below the law is used, and the rest of the law for the words that the table leaves out.

    Attributes:
        exponent: from 1 (discrete Laplace) to 2 (discrete Gaussian).
        scale: in steps, at most `tables.largest_scale(exponent)`.
        exact: whether to draw without any error, as delta = 0 needs; known for exponent 1 alone.
    """

    exponent: float
    scale: float
    exact: bool = False

    def __post_init__(self) -> None:
        checked_scale(checked_exponent(self.exponent), self.scale, "scale")
        if self.exact and self.exponent != 1.0:
            raise InvalidInput(f"exact draws are known for exponent 1 alone, got {_check.shown(self.exponent)}")

    def __reduce__(self) -> tuple[type[Sampler], tuple[float, float, bool]]:
        return Sampler, (self.exponent, self.scale, self.exact)  # the tables are built where they are needed

    @cached_property
    def digits(self) -> Digits:
        """The tables of the law."""
        return exact_digits(float(self.scale)) if self.exact else digits(float(self.exponent), float(self.scale))

    @property
    def total_variation(self) -> float:
        """An upper bound on the total-variation error of one entry."""
        return 0.0 if self.exact else self.digits.total_variation

    def draw(self, stream: Stream, block: int, noise: Array, words: Words) -> None:
        """Writes the noise of a block, as floats that are whole numbers; `words` is a buffer of the same size."""
        look_up = compiled(kernels._look_up)
        for part, (table, shift) in enumerate(zip(self.digits.tables, self.digits.shifts, strict=True)):
            stream.fill(words, block, part)
            if look_up(words, table.packed, 1.0 if part else 0.0, float(1 << shift), noise):
                more = np.empty_like(words)
                stream.fill(more, block, _TIES + part)
                noise += table.ties_broken(words, more) << shift
                if self.digits.remainders:
                    further = partial(_further, stream, block, _REFINING + part)
                    noise += self.digits.remainders[part].changes(words, more, further) << shift


def _further(stream: Stream, block: int, part: int, place: int) -> Iterator[int]:
    """More words for one entry."""
    words = np.empty(place + 1, dtype=np.uint64)
    for depth in itertools.count():
        stream.fill(words, block, part + 64 * depth)
        yield int(words[place])


def noise(
    shape: Shape, exponent: float, scale: float, key: Key | None = None, threads: int | None = None, exact: bool = False
) -> Whole:
    """Noise alone, in whole steps, from a fresh key unless one is given."""
    out = np.empty(_check.any_shape(shape), dtype=np.int64)
    _draw(Sampler(exponent, scale, exact), None, 1.0, out.reshape(-1), key, kernels._workers(threads, out.size))
    return out


def add_noise(
    values: npt.ArrayLike,
    step: float,
    source: Sampler,
    key: Key | None = None,
    threads: int | None = None,
    out: Array | None = None,
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
        InvalidInput: before anything is drawn, if an argument is invalid. For values that are not finite or too large,
            whether it is raised depends on the values, but the message does not show them.
    """
    given = np.asarray(_check.array_of("values", values), order="C")
    if given.dtype.kind not in "iuf" or given.dtype.itemsize > 8 or not given.size > 0:
        kind = _check.entries(given.dtype)
        raise InvalidInput(f"values must be a non-empty array of floats or whole numbers, got {kind} {given.shape}")
    if math.frexp(_check.positive("step", step))[0] != 0.5 or not 2.0**-900 <= step <= 2.0**900:
        raise InvalidInput(f"step must be a power of two from 2^-900 to 2^900, got {_check.shown(step)}")
    if given.dtype.kind in "iu" and step != 1.0:
        raise InvalidInput("step must be 1 for whole numbers, which are steps themselves; divide them, or use floats")
    numbers = given.astype(np.float64, copy=False)  # exact for whole numbers below the limit, and others stay above it
    if not kernels.largest(numbers, threads) < LIMIT * step:
        raise InvalidInput(f"values must be finite and below 2^51 steps of {step:g}; clip them or use a coarser grid")
    target = np.empty(given.shape, dtype=np.int64) if out is None else kernels._checked_out(given, out)
    _draw(source, numbers.reshape(-1), step, target.reshape(-1), key, kernels._workers(threads, target.size))
    return target


def _draw(
    source: Sampler, values: Array | None, step: float, out: npt.NDArray[Any], key: Key | None, workers: int
) -> None:
    """Adds noise to the values, or to zeros, in all blocks: in steps, or in the units of the values if out is float."""
    stream, add = (Key() if key is None else key).stream(), compiled(_add)
    unit = 1.0 if out.dtype == np.int64 else step
    kernels._add_in_blocks(
        partial(source.draw, stream), lambda given, noise, to: add(given, step, unit, noise, to), values, out, workers
    )


def _add(values: Array, step: float, unit: float, noise: Array, out: npt.NDArray[Any]) -> None:
    """out = unit * (floor(values / step) + noise), exactly: the step is a power of two.

    Tiny values are replaced by -1/4 of a step if negative, else by 0, as subnormal numbers are slow.
    """
    inverse, vanishing = 1.0 / step, 0.25 * step
    for j in range(values.size):
        value = values[j]
        small = -vanishing if value < 0.0 else 0.0
        kept = value if abs(value) > vanishing else small
        out[j] = unit * (np.floor(kept * inverse) + noise[j])
