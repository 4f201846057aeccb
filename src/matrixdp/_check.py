"""Checks of arguments. Each predicate is written so that NaN fails, and each message says what to do.

Messages end up in logs, so none quotes what may be a record: messages describe an argument by `shown` or `kind`, and
`withheld` replaces the errors of other software, which quote the input that they fail on.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from matrixdp.errors import InvalidInput, MatrixDPError

Array = npt.NDArray[np.float64]
Shape = tuple[int, ...]

# Lengths and standard deviations lie in this range, so that no square of them overflows or loses digits.
SMALLEST, LARGEST = 1e-75, 1e75

# Names of the kinds of entries in messages. The dtype itself reveals more: the length of the longest text, the names
# of fields, the value that a sparse column is filled with.
_ENTRIES = {
    "b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex", "O": "object", "U": "str", "T": "str",
    "S": "bytes", "M": "datetime64", "m": "timedelta64", "V": "void",
}  # fmt: skip


def entries(dtype: Any) -> str:
    """The kind of entries that an array or a column of this dtype has."""
    return _ENTRIES.get(getattr(dtype, "kind", "O"), "object")


def kind(value: Any) -> str:
    """What a message may say about any object: its type, and its shape or length."""
    name = type(value).__name__
    try:
        shape = tuple(value.shape)
    except Exception:  # it has none, or quotes what it holds
        shape = None
    if shape is not None and all(type(side) is int for side in shape):
        return f"{name} of shape {shape}"
    return f"{name} of length {len(value)}" if isinstance(value, (list, tuple, set, dict)) else name


def shown(value: Any) -> str:
    """What a message says about a public argument: a number as it is, all else by its kind, as it may hold records."""
    plain = value is None or isinstance(value, (bool, np.bool_, float, np.floating, np.integer))
    plain = plain or (isinstance(value, int) and value.bit_length() <= 64)
    known = type(value).__module__ in ("builtins", "numpy")  # a class of others may print what it likes
    return repr(value) if plain and known else kind(value)


def library(value: Any) -> str:
    """The library that an object's type is from, such as "torch"."""
    return type(value).__module__.partition(".")[0]


def origin(error: BaseException) -> str:
    """The type of an error and the line that raised it, for an error whose text may quote a record."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return type(error).__name__ + "".join(f" in {Path(frame.filename).name}, line {frame.lineno}" for frame in last)


@contextmanager
def withheld(what: str) -> Iterator[None]:
    """Replaces errors of other software by one without their text, which may quote a record; names type and place."""
    try:
        yield
    except (MatrixDPError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's; its text has sizes alone, and callers catch it
            raise
        raise InvalidInput(
            f"{what} failed: {origin(error)}. Its message is withheld, as it may quote a record; to see it, run the "
            "same on made-up records"
        ) from None


def spend_of(ledger: Any) -> Callable[..., object]:
    """The `spend` method of a ledger; raises InvalidInput for anything else, such as a path."""
    found = getattr(ledger, "spend", None)
    if not callable(found):
        raise InvalidInput(f"ledger must be a Ledger, such as Ledger(path), got {kind(ledger)}; nothing was released")
    return cast(Callable[..., object], found)


def number(name: str, value: Any) -> float:
    """A finite real number; booleans and strings are not numbers here."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise InvalidInput(f"{name} must be a number, got {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    except Exception:
        raise InvalidInput(f"{name} must be a number, got {kind(value)}, which cannot be made a float") from None
    if not math.isfinite(found):
        raise InvalidInput(f"{name} must be finite, got {shown(value)}")
    return found


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    if not number(name, value) > 0:
        raise InvalidInput(f"{name} must be above 0, got {shown(value)}")
    return float(value)


def length(name: str, value: Any) -> float:
    """A positive number that can be squared safely: a radius, a bound, a standard deviation."""
    found = positive(name, value)
    if not SMALLEST <= found <= LARGEST:
        raise InvalidInput(f"{name} must lie between {SMALLEST:g} and {LARGEST:g}, got {found!r}; change the units")
    return found


def lengths(name: str, values: Array) -> Array:
    """An array of such numbers, made read-only."""
    inside = (values >= SMALLEST) & (values <= LARGEST)
    if not np.all(inside):
        wrong = int(np.sum(~inside))
        raise InvalidInput(
            f"{name} must be above 0 (between {SMALLEST:g} and {LARGEST:g}) in every entry; {wrong} of {values.size} "
            "are not"
        )
    values.flags.writeable = False
    return values


def norm(array: Array) -> float:
    """The Frobenius norm by pairwise sums, whose error hardly grows with the number of entries, unlike that of BLAS."""
    with np.errstate(over="ignore"):
        return math.sqrt(float(np.sum(np.square(array))))


def at_least_zero(name: str, value: Any) -> float:
    """A finite number, 0 or above."""
    if not number(name, value) >= 0:
        raise InvalidInput(f"{name} must be 0 or above, got {shown(value)}")
    return float(value)


def delta(value: Any) -> float:
    """The delta of a guarantee: at least 0, and below 1."""
    if not 0 <= number("delta", value) < 1:
        raise InvalidInput(
            f"delta must be 0 (pure differential privacy) or above, and below 1, got {shown(value)}; 1e-6 is a common "
            "choice"
        )
    return abs(float(value))  # -0.0 is 0


def probability(name: str, value: Any) -> float:
    """A number strictly between 0 and 1."""
    if not 0 < number(name, value) < 1:
        usual = {"delta": "; 1e-6 is a common choice", "level": "; 0.95 is a common choice"}.get(name, "")
        raise InvalidInput(f"{name} must lie strictly between 0 and 1, got {shown(value)}{usual}")
    return float(value)


def count(name: str, value: Any) -> int:
    """A whole number, 1 or above."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not int(value) >= 1:
        raise InvalidInput(f"{name} must be a whole number, 1 or above, got {shown(value)}")
    return int(value)


def choice(name: str, value: Any, options: Iterable[str]) -> str:
    """One of the listed words."""
    listed = list(options)
    if not isinstance(value, str) or value not in listed:
        word = repr(value) if isinstance(value, str) and len(value) <= 40 else kind(value)
        raise InvalidInput(f"{name} must be one of {', '.join(listed)}, got {word}")
    return value


def any_shape(value: Any) -> Shape:
    """The shape of a released value, of any number of dimensions: () for a scalar."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidInput(f"shape must be a tuple such as (rows, columns), or () for a scalar, got {shown(value)}")
    return tuple(count("each entry of shape", side) for side in value)


def shape(value: Any) -> Shape:
    """The shape of a vector or a matrix: (n,) or (rows, columns)."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) not in (1, 2):
        raise InvalidInput(f"shape must be (n,) or (rows, columns), got {shown(value)}")
    return any_shape(value)


def finite(name: str, value: Any, *, ndim: int | tuple[int, ...] | None = (1, 2), copy: bool = True) -> Array:
    """A non-empty array of finite real numbers as float64: a copy, which the caller cannot change later.

    With ndim=None it may have any number of dimensions. With copy=False, for a value that is used at once, the caller's
    own array is returned if it is float64 in C order.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidInput(f"{name} must not be a masked array; fill or drop what is masked first")
    given = array_of(name, value)
    if given.dtype.kind not in "iuf":
        raise InvalidInput(f"{name} must be an array of real numbers, got dtype {entries(given.dtype)}; convert it")
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if allowed is not None and given.ndim not in allowed:
        dimensions = " or ".join(str(d) for d in allowed)
        raise InvalidInput(f"{name} must have {dimensions} dimensions, got {given.ndim} (shape {given.shape})")
    if not given.size > 0:
        raise InvalidInput(f"{name} must not be empty, got shape {given.shape}")
    if given.dtype.kind in "iu" and given.dtype.itemsize == 8 and max(int(given.max()), -int(given.min())) > 2**53:
        raise InvalidInput(f"{name} holds whole numbers above 2^53, which floats cannot tell apart; scale it first")
    with np.errstate(over="ignore"):  # a long double may become infinite, which is refused next
        array = np.array(given, dtype=np.float64) if copy else np.require(given, np.float64, ["C", "A"])
    if given.dtype.kind == "f" and not _all_finite(array):
        bad = ~np.isfinite(array)
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        state = "NaN" if np.isnan(array[place]) else "infinity"
        raise InvalidInput(
            f"{name} must be finite, got {state} at {place} ({int(bad.sum())} such entries); "
            "drop or fill those records before the query"
        )
    return array


def _all_finite(array: Array) -> bool:
    """Whether all entries are finite; tests some at a time, so that no second array of this size is made."""
    some = np.nditer(array, flags=["external_loop", "buffered"], order="K", buffersize=1 << 16)
    return all(bool(np.isfinite(part).all()) for part in some)


def array_of(name: str, value: Any) -> npt.NDArray[Any]:
    """The value as a numpy array; errors do not repeat numpy's text, which quotes what it cannot read."""
    try:
        return np.asarray(value)
    except MemoryError:
        raise
    except Exception:
        raise InvalidInput(
            f"{name} cannot be read as an array of numbers, got {kind(value)}; its rows must have one length"
        ) from None


def broadcast(name: str, value: Any, target: Shape) -> Array:
    """A number, or an array of the target shape, as a finite array of that shape."""
    array = np.asarray(number(name, value)) if array_of(name, value).ndim == 0 else finite(name, value, ndim=None)
    if array.shape not in ((), target):
        raise InvalidInput(f"{name} must have shape {target} or be a single number, got shape {array.shape}")
    return np.broadcast_to(array, target)


def weights(value: Any, target: Shape) -> Array:
    """Weights of squared errors, one number or one per entry, none below 0."""
    array = broadcast("weights", value, target)
    if not np.all(array >= 0):
        raise InvalidInput("weights must be 0 or above everywhere")
    return array
