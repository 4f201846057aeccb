"""The data folder, the files in it, and their contents after the checksum."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from matrixdp.errors import InvalidInput

VARIABLE = "MATRIXDP_DATA"
"""The environment variable that names the folder."""

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Source:
    """A file that a loader reads.

    Attributes:
        name: its name in the folder.
        page: where it is published.
        form: how to make it from what is published there.
        sha256: of the file, or of what is inside a .gz file (how it was compressed does not matter); None if unknown.
    """

    name: str
    page: str
    form: str
    sha256: str | None


class Labelled(NamedTuple):
    """Records, one per row, and the class of each."""

    records: npt.NDArray[Any]
    label: npt.NDArray[np.int64]


def find(folder: Folder = None) -> Path:
    """The data folder: the one given, or that of the environment."""
    given = folder if folder is not None else os.environ.get(VARIABLE) or None
    if given is None:
        raise InvalidInput(f"no data folder was given; name it (--data on the command line) or set {VARIABLE}")
    path = Path(given)
    if not path.is_dir():
        raise InvalidInput(f"the data folder {str(path)!r} does not exist; create it, or name another")
    return path


def has(source: Source, folder: Folder = None) -> bool:
    """Whether a file is in the folder, for optional data."""
    return (find(folder) / source.name).is_file()


def content(source: Source, folder: Folder) -> bytes:
    """The bytes of a file, decompressed for a .gz file, after the checksum."""
    place = find(folder)
    path = place / source.name
    try:
        found = path.read_bytes()
        if path.suffix == ".gz":
            found = gzip.decompress(found)
    except FileNotFoundError:
        raise InvalidInput(
            f"{source.name} is not in {str(place)!r}; it is published at {source.page}: {source.form}, and put "
            "the result there. Nothing is downloaded for you"
        ) from None
    except (OSError, EOFError, zlib.error) as reason:
        raise InvalidInput(f"{path} cannot be read ({reason}); get it again from {source.page}") from None
    sha256 = hashlib.sha256(found).hexdigest()
    if source.sha256 is not None and sha256 != source.sha256:
        raise InvalidInput(
            f"{path} is damaged or another version: sha256 {sha256}, expected {source.sha256}; see {source.page}"
        )
    return found


def arrays(source: Source, folder: Folder) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file by name."""
    with np.load(io.BytesIO(content(source, folder)), allow_pickle=False) as found:
        return dict(found)
