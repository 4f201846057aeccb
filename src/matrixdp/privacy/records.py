"""Laws, sets and the other parts of a certificate, to JSON and back.

A record is a JSON object with a `kind` and one entry for each field of the class that the kind names. Floats are
written with all their digits, so they are read back unchanged. Small arrays are nested lists; larger ones are written
as their bytes (little-endian float64, base64), or kept in a file beside the document and named by their SHA-256.
Reading builds objects through their constructors, which check every argument: nothing in a document is trusted.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from matrixdp import _check, sensitivity
from matrixdp._check import Array
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, Product, QuantileSearch, Spherical, covariance
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.residuals import ResidualBasis, Residuals
from matrixdp.secure.grid import Grid

LISTED = 64
"""The largest number of entries of an array that is written as a list."""

BESIDE = 1 << 16
"""The smallest number of entries of an array that is kept in a file beside the document, if there is such a file."""

Store = Callable[[bytes], str]
"""Keeps the bytes of an array and returns their SHA-256."""

Fetch = Callable[[str], bytes]
"""Returns the bytes with this SHA-256."""


def _one_line(kind: type[sensitivity.OneRow] | type[sensitivity.OneColumn]) -> Callable[..., Any]:
    def build(*, radius: Any, width: Any, adjacency: str) -> Any:
        extent = {"radius": radius} if width is None else {"low": 0.0, "high": width}
        return kind(**extent, adjacency=adjacency)

    return build


def _spectrum(*, variances: Any, directions: Any, slack: float) -> Spectrum:
    """A spectrum with the stated slack, unless that is less than the slack computed from the numbers."""
    found = Spectrum(variances, directions)
    if _check.at_least_zero("slack", slack) >= found.slack * (1 - 1e-9):
        object.__setattr__(found, "slack", float(slack))
    return found


_BUILD: dict[str, Callable[..., Any]] = {}
_KINDS: dict[type, str] = {}
_OPTIONAL: dict[type, tuple[str, ...]] = {}
# Fields that follow from the others are not written, except the slack, which depends on how a spectrum was computed.
_WRITTEN: dict[type, tuple[str, ...]] = {Spectrum: ("variances", "directions", "slack")}


def register(
    kind: str, record: type, build: Callable[..., Any] | None = None, *, optional: tuple[str, ...] = ()
) -> None:
    """Makes a dataclass a kind of record.

    Args:
        kind: its name in JSON.
        record: the class.
        build: makes an object from its fields; the class itself by default.
        optional: fields that are written only if they are not None, since earlier documents do not have them.
    """
    if kind in _BUILD or record in _KINDS:
        raise InvalidInput(f"kind {kind!r} or the class {record.__name__} is registered already; choose another name")
    if not is_dataclass(record):
        raise InvalidInput(f"{record.__name__} must be a dataclass: its fields are what is written")
    _BUILD[kind], _KINDS[record], _OPTIONAL[record] = build or record, kind, optional


for _kind, _record in {
    "budget": Budget,
    "grid": Grid,
    "frobenius": sensitivity.Frobenius,
    "entrywise": sensitivity.Entrywise,
    "counts": sensitivity.Counts,
    "rank-one": sensitivity.RankOne,
    "participation": sensitivity.Participation,
    "spherical": Spherical,
    "product": Product,
    "quantile-search": QuantileSearch,
    "isotropic": covariance.Isotropic,
    "diagonal": covariance.Diagonal,
    "kronecker": covariance.Kronecker,
    "dense": covariance.Dense,
    "blocks": covariance.Blocks,
    "symmetric": covariance.Symmetric,
    "over-time": covariance.OverTime,
    "residual-basis": ResidualBasis,
    "residuals": Residuals,
    "residual-noise": covariance.ResidualNoise,
    "symmetric-entries": covariance.SymmetricEntries,
}.items():
    register(_kind, _record)
register("gaussian", Gaussian, optional=("value_shape",))
register("one-row", sensitivity.OneRow, _one_line(sensitivity.OneRow))
register("one-column", sensitivity.OneColumn, _one_line(sensitivity.OneColumn))
register("l1", sensitivity.L1, lambda *, bound, **fields: sensitivity.L1(largest_entry=bound, **fields))
register(
    "vertices",
    sensitivity.Vertices,
    lambda *, differences, adjacency: sensitivity.Vertices(list(differences), adjacency=adjacency),
)
register("spectrum", Spectrum, _spectrum)


QUERIES: dict[str, Callable[..., Any]] = {}
"""By query name: from its public parameters and the shape of its value to its set; filled in by the queries."""

LATER: list[Callable[[], object]] = []
"""Imports of further queries, called when a query name is not known yet."""


def change_of(query: str) -> Callable[..., Any] | None:
    """The entry of QUERIES for a query; None if there is no query of this name."""
    if query not in QUERIES:
        for load in LATER:
            load()
    return QUERIES.get(query)


def kind_of(value: Any) -> str | None:
    """The kind of an object; None if its class is not registered."""
    return _KINDS.get(type(value))


def encode(value: Any, store: Store | None = None) -> Any:
    """An object as JSON.

    Args:
        value: a record, an array, a number, a string, or a mapping or sequence of these.
        store: keeps large arrays outside the document; by default they are written into it.
    """
    if value is None or isinstance(value, (bool, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, np.ndarray):
        return _encoded_array(value, store)
    if isinstance(value, Mapping):
        return {str(name): encode(part, store) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(part, store) for part in value]
    kind = kind_of(value)
    if kind is None:
        raise InvalidInput(
            f"{type(value).__name__} has no JSON form; register it first: a noise law with matrixdp.register_law"
        )
    written = _WRITTEN.get(type(value)) or [field.name for field in fields(value) if field.init]
    fields_of = {name: getattr(value, name) for name in written}
    left_out = [name for name in _OPTIONAL[type(value)] if fields_of[name] is None]
    return {"kind": kind, **{name: encode(part, store) for name, part in fields_of.items() if name not in left_out}}


def decode(content: Any, fetch: Fetch | None = None) -> Any:
    """The object that `encode` wrote.

    Raises:
        InvalidInput: if the content is not what `encode` writes, or does not pass the checks of a constructor.
    """
    if isinstance(content, list):
        return [decode(part, fetch) for part in content]
    if not isinstance(content, dict):
        return content
    if "array" in content:
        return _decoded_array(content["array"], fetch)
    if set(content) == {"float"}:
        return float(content["float"])
    parts = {name: decode(part, fetch) for name, part in content.items() if name != "kind"}
    kind = content.get("kind")
    if kind is None:
        return parts
    if kind not in _BUILD:
        raise InvalidInput(
            f"kind {_check.shown(kind)} is unknown here; if it is a noise law of yours, register it first"
        )
    try:
        return _BUILD[kind](**{name: tuple(part) if isinstance(part, list) else part for name, part in parts.items()})
    except MatrixDPError:
        raise
    except (TypeError, ValueError, ArithmeticError) as reason:
        raise InvalidInput(f"a record of kind {kind!r} cannot be read ({type(reason).__name__})") from None


def _encoded_array(array: Array, store: Store | None) -> dict[str, Any]:
    values = np.ascontiguousarray(array, dtype="<f8")
    if values.size <= LISTED:
        return {"array": values.tolist()}
    shape = [int(side) for side in values.shape]
    if store is not None and values.size >= BESIDE:
        return {"array": {"shape": shape, "sha256": store(values.tobytes())}}
    return {"array": {"shape": shape, "float64": base64.b64encode(values.tobytes()).decode()}}


def _decoded_array(content: Any, fetch: Fetch | None) -> Array:
    if isinstance(content, list):
        return np.array(content, dtype=np.float64)
    try:
        shape = tuple(_check.count("a side of an array", side) for side in content["shape"])
        if "float64" in content:
            content_bytes = base64.b64decode(content["float64"], validate=True)
        else:
            if fetch is None:
                raise InvalidInput("an array is in a file beside this document; read it with Certificate.load(path)")
            content_bytes = fetch(content["sha256"])
            if digest(content_bytes) != content["sha256"]:
                raise InvalidInput("the file of arrays beside this document is not the one that it was written with")
        return np.frombuffer(content_bytes, dtype="<f8").astype(np.float64).reshape(shape)
    except MatrixDPError:
        raise
    except (KeyError, TypeError, ValueError) as reason:
        raise InvalidInput(f"an array cannot be read ({type(reason).__name__})") from None


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
