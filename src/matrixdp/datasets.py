"""The public data of the papers' experiments, from a folder that the caller names; nothing is downloaded.

Every loader takes the folder as an argument or from the environment variable MATRIXDP_DATA, checks the file's sha256,
and raises InvalidInput, which says where the data are published, when a file is missing or is another one.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from matrixdp._check import Array
from matrixdp.errors import InvalidInput

VARIABLE = "MATRIXDP_DATA"
"""The environment variable that names the folder."""

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Source:
    """A file that a loader reads.

    Attributes:
        name: what it is called in the folder.
        page: where it is published.
        form: how to make it from what is published there.
        sha256: of the file, or of what is inside a .gz file (how it was compressed does not matter); None if unknown.
    """

    name: str
    page: str
    form: str
    sha256: str | None


UBER = Source(
    "uber-raw-data-apr14.csv.gz",
    "https://github.com/fivethirtyeight/uber-tlc-foil-response",
    "gzip the file uber-raw-data-apr14.csv as it is",
    "4c92b95b9918e73ae84bade0bffef6e758e792c247469523130d3c1ad7b646e0",
)
MNIST = tuple(
    Source(
        f"mnist-{name}.gz",
        "http://yann.lecun.com/exdb/mnist/",
        f"rename the file {name}.gz",
        sha256,
    )
    for name, sha256 in (
        ("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    )
)
CARDIOTOCOGRAPHY = Source(
    "cardiotocography.csv",
    "https://archive.ics.uci.edu/dataset/193/cardiotocography",
    "save the 2,126 records of the sheet Data of CTG.xls as CSV: columns LB to Tendency, A to SUSP, CLASS and NSP",
    "61a20ae3cf014bc40902c716eb2c12bd60da6e340b2439ffc347d8c5a173c0af",
)
LIVER = Source(
    "liver_disorders.csv",
    "https://archive.ics.uci.edu/dataset/60/liver+disorders",
    "put the line mcv,alkphos,sgpt,sgot,gammagt,drinks,selector before the 345 records of bupa.data",
    "ab7c9f801a6fc0568605bda3796a3962d0b940a19ced4060fb1e2ff98438b5cc",
)
MOVEMENT = Source(
    "movement_aal_rss.npz",
    "https://archive.ics.uci.edu/dataset/348/indoor+user+movement+prediction+from+rss+data",
    "join the 314 sequences in order into the arrays rss (13197 x 4), sequence_id, length, target, dataset_id, path_id",
    "dd397fc4b81de6fd8c2063f8926ec7eab7450f7447b9c04d2bb4b98428d9a8a5",
)
SWARM = Source(
    "Flocking.csv",
    "https://archive.ics.uci.edu/dataset/524/swarm+behaviour",
    "take the file from the archive as it is: a header, 2,400 features and the class in the last column",
    None,
)


class Pickups(NamedTuple):
    """Uber pickups of April 2014, one a record."""

    time: npt.NDArray[np.datetime64]
    latitude: Array
    longitude: Array
    base: npt.NDArray[np.str_]


class Labelled(NamedTuple):
    """Records, one a row, and the class of each."""

    records: Array
    label: npt.NDArray[np.int64]


class Sequences(NamedTuple):
    """Signal strengths, one time step a row, and the sequence that each belongs to."""

    rss: Array
    sequence: npt.NDArray[np.int64]


def load_uber(folder: Folder = None) -> Pickups:
    """All 564,516 pickups; the first 3,829 are those of base B02512 on 1 to 3 April."""
    import pandas

    frame = pandas.read_csv(io.BytesIO(_content(UBER, folder)))
    time = pandas.to_datetime(frame["Date/Time"], format="%m/%d/%Y %H:%M:%S").to_numpy(dtype="datetime64[s]")
    base = frame["Base"].to_numpy(dtype=np.str_)
    return Pickups(time, frame["Lat"].to_numpy(dtype=np.float64), frame["Lon"].to_numpy(dtype=np.float64), base)


def load_mnist(folder: Folder = None, *, test: bool = False) -> Labelled:
    """60,000 (test: 10,000) pictures of digits as rows of 784 pixels between 0 and 1."""
    images, labels = (np.frombuffer(_content(source, folder), np.uint8) for source in MNIST[2 * test :][:2])
    return Labelled(images[16:].reshape(-1, 784) / 255.0, labels[8:].astype(np.int64))


def load_cardiotocography(folder: Folder = None) -> Labelled:
    """2,126 records of 21 features in their own units, and the state 1 (normal), 2 (suspect) or 3 (pathologic)."""
    table = _table(CARDIOTOCOGRAPHY, folder)
    return Labelled(table[:, :21], table[:, -1].astype(np.int64))


def load_liver(folder: Folder = None) -> Array:
    """345 records of five blood tests and, last, the daily drinks, in their own units."""
    return _table(LIVER, folder)[:, :6]


def load_movement(folder: Folder = None) -> Sequences:
    """13,197 time steps of four signal strengths between -1 and 1, in 314 sequences."""
    with np.load(io.BytesIO(_content(MOVEMENT, folder)), allow_pickle=False) as arrays:
        return Sequences(arrays["rss"].astype(np.float64), arrays["sequence_id"].astype(np.int64))


def load_swarm(folder: Folder = None) -> Labelled:
    """Records of 2,400 features of a swarm in their own units, and whether it flocks; no checksum is known for it."""
    import pandas

    content = _content(SWARM, folder)
    try:
        frame = pandas.read_csv(io.BytesIO(content))
    except ValueError as reason:
        raise InvalidInput(f"{SWARM.name} is not a table ({reason}); see {SWARM.page}") from None
    table = frame.apply(pandas.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    if table.shape[1] != 2401 or not np.all(np.isfinite(table)) or not np.all(np.isin(table[:, -1], (0, 1))):
        raise InvalidInput(
            f"{SWARM.name} must hold 2,400 numbers and a class of 0 or 1 in each record, got {table.shape[1]} columns "
            f"and {int(np.sum(~np.isfinite(table)))} cells that are no numbers; see {SWARM.page}"
        )
    return Labelled(table[:, :-1], table[:, -1].astype(np.int64))


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
    """Whether a file is in the folder, for data that a study can do without."""
    return (find(folder) / source.name).is_file()


def _content(source: Source, folder: Folder) -> bytes:
    """The bytes of a file, those inside it for a .gz file, after the checksum."""
    path = find(folder) / source.name
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise InvalidInput(
            f"{source.name} is not in {str(path.parent)!r}; it is published at {source.page}: {source.form}, and put "
            "the result there. Nothing is downloaded for you"
        ) from None
    except (OSError, EOFError, zlib.error) as reason:
        raise InvalidInput(f"{path} cannot be read ({reason}); get it again from {source.page}") from None
    found = hashlib.sha256(content).hexdigest()
    if source.sha256 is not None and found != source.sha256:
        raise InvalidInput(
            f"{path} is damaged or another version: sha256 {found}, expected {source.sha256}; see {source.page}"
        )
    return content


def _table(source: Source, folder: Folder) -> Array:
    """A CSV file of numbers below a header."""
    return np.loadtxt(io.BytesIO(_content(source, folder)), delimiter=",", skiprows=1)
