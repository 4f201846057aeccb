"""Parses shapes, sensitivity sets, options and bin edges from the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixdp._check import Shape
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import (
    L1,
    Counts,
    Entrywise,
    Frobenius,
    OneColumn,
    OneRow,
    Participation,
    RankOne,
    Sensitivity,
    Vertices,
)

if TYPE_CHECKING:
    from matrixdp.budget import Budget
    from matrixdp.privacy.certificate import Certificate


def _l1(radius: float, largest_entry: float | None = None, step: float | None = None, **adjacency: Any) -> L1:
    return L1(radius, largest_entry, step=step, **adjacency)


SETS: dict[str, tuple[Callable[..., Sensitivity], tuple[str, ...]]] = {
    "frobenius": (Frobenius, ("RADIUS",)),
    "entrywise": (Entrywise, ("BOUND",)),
    "onecolumn": (OneColumn, ("NORM", "LOW,HIGH")),
    "onerow": (OneRow, ("NORM", "LOW,HIGH")),
    "counts": (Counts, ("CELLS", "CELLS,BOUND")),
    "l1": (_l1, ("RADIUS", "RADIUS,LARGEST_ENTRY", "RADIUS,LARGEST_ENTRY,STEP")),
    "rankone": (RankOne, ("NORM",)),
    "vertices": (Vertices, ("FILE.npy",)),
    "participation": (Participation, ("CLIP", "CLIP,SEPARATION,TIMES")),
    "cyclic": (partial(Participation, cyclic=True), ("CLIP,SEPARATION",)),
}
"""The kinds of sensitivity sets, and what may follow the colon."""

MOST_ENTRIES = 10**9
"""The most entries of a shape: some mechanisms need memory for every row and column."""

FORMS = ", ".join(f"{kind}:{' or '.join(forms)}" for kind, (_, forms) in SETS.items())


def shape(text: str) -> Shape:
    """A shape: `89x89`, `100` for a vector, `12x24x7`, or `scalar`."""
    if text.strip().lower() == "scalar":
        return ()
    sides = text.lower().split("x")
    if not all(side.strip().isdecimal() for side in sides):
        raise InvalidInput(f"shape must look like 89x89, 100 for a vector, 12x24x7, or scalar, got {text!r}")
    found = tuple(int(side) for side in sides)
    if math.prod(found) > MOST_ENTRIES:
        raise InvalidInput(f"shape must have at most {MOST_ENTRIES:.0e} entries here, got {text!r}")
    return found


def sensitivity(text: str, adjacency: str | None = None) -> Sensitivity:
    """A sensitivity set: `kind:numbers`, as FORMS lists them; without an adjacency, the set's own default holds."""
    kind, _, rest = text.partition(":")
    if kind not in SETS:
        raise InvalidInput(f"sensitivity must start with one of {', '.join(SETS)}, got {text!r}; the forms: {FORMS}")
    build, forms = SETS[kind]
    if kind == "vertices":
        listed = array_file("vertices", rest)
        if listed.ndim not in (2, 3):
            raise InvalidInput(f"vertices must be an array of k changes, k x shape, got shape {listed.shape} in {rest}")
        given: Sequence[Any] = [list(listed)]
    else:
        given = numbers("sensitivity", rest) if rest else []
        if len(given) not in {len(form.split(",")) for form in forms}:
            raise InvalidInput(f"sensitivity {kind} is written {kind}:{' or '.join(forms)}, got {text!r}")
    return build(*given) if adjacency is None else build(*given, adjacency=adjacency)


def options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options of a mechanism from `key=value` texts."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        name = key.strip().replace("-", "_")
        if not (equals and name.isidentifier()):
            raise InvalidInput(f"option must look like key=value, got {pair!r}")
        if name in found:
            raise InvalidInput(f"option {name!r} is given twice")
        found[name] = _option_value(text.strip())
    return found


def mechanism_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options of mechanisms; any other name is refused, as it could be another argument of the function called."""
    from matrixdp.mechanisms import RECIPES

    found = options(pairs)
    known = sorted({name for recipe in RECIPES.values() for name in recipe.options})
    for name in found:
        if name not in known:
            raise InvalidInput(f"no mechanism has an option {name!r}; there are: {', '.join(known)}")
    return found


def certificate(
    mechanism: str, shape_text: str, changes: Sensitivity, budget: Budget, pairs: Sequence[str] | None
) -> Certificate:
    """The certificate of the noise that a mechanism proposes, with its options as texts."""
    from matrixdp.mechanisms import calibrate
    from matrixdp.privacy.certificate import certify

    chosen = mechanism_options(pairs or [])
    law = calibrate(mechanism, shape=shape(shape_text), sensitivity=changes, budget=budget, **chosen)
    return certify(law, changes, budget)


def _option_value(text: str) -> Any:
    """A whole number, a number, a list of numbers, true or false, the array in a .npy file, or else the text itself."""
    if text in ("true", "false"):
        return text == "true"
    if text.endswith(".npy"):
        return array_file("option", text)
    try:
        found = numbers("option", text)
    except InvalidInput:
        return text
    return np.asarray(found) if "," in text else found[0]


def edges(text: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Bin edges: `start:stop:count` for that many equal bins, or a comma list of the edges themselves."""
    if ":" not in text:
        return np.asarray(numbers("edges", text), dtype=np.float64)
    parts = text.split(":")
    if not (len(parts) == 3 and parts[2].strip().isdecimal() and int(parts[2]) >= 1):
        raise InvalidInput(f"edges must look like start:stop:count (count bins) or a comma list, got {text!r}")
    start, stop = (numbers("edges", part)[0] for part in parts[:2])
    return np.linspace(start, stop, int(parts[2]) + 1)


def bounds(name: str, text: str | None) -> Any:
    """One bound, or one for every column; None where nothing was given."""
    if text is None:
        return None
    found = numbers(name, text)
    return found[0] if len(found) == 1 else np.asarray(found, dtype=np.float64)


def columns(text: str) -> list[str | int]:
    """Columns from a comma list: names, or positions from 0."""
    return [int(name) if name.isdecimal() else name for name in map(str.strip, text.split(","))]


def numbers(name: str, text: str) -> list[int | float]:
    """Finite numbers from a comma list; those written without a point stay whole."""
    found: list[int | float] = []
    for part in text.split(","):
        try:
            number: int | float = int(part)
        except ValueError:
            try:
                number = float(part)
            except ValueError:
                raise InvalidInput(f"{name} must be numbers separated by commas, got {text!r}") from None
        if not math.isfinite(number):
            raise InvalidInput(f"{name} must be finite, got {text!r}")
        found.append(number)
    return found


def array_file(name: str, path: str) -> np.ndarray[Any, np.dtype[Any]]:
    """The array in a .npy file; never a pickle, which could run code."""
    try:
        loaded = np.load(Path(path), allow_pickle=False)
    except FileNotFoundError:
        raise InvalidInput(f"{name}: there is no file {path!r}") from None
    except (OSError, ValueError, EOFError):  # numpy's own text quotes the head of the file
        raise InvalidInput(f"{name}: {path!r} is not a .npy file that can be read; save an array of numbers") from None
    if not isinstance(loaded, np.ndarray):
        raise InvalidInput(f"{name}: {path!r} holds several arrays; save one with numpy.save")
    return loaded
