"""Tables of numbers: pickups, heart traces, blood tests, signal strengths and swarms."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput
from matrixdp_papers.datasets.source import Folder, Labelled, Source, arrays, content

UBER = Source(
    "uber-raw-data-apr14.csv.gz",
    "https://github.com/fivethirtyeight/uber-tlc-foil-response",
    "gzip the file uber-raw-data-apr14.csv as it is",
    "4c92b95b9918e73ae84bade0bffef6e758e792c247469523130d3c1ad7b646e0",
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
    """Uber pickups of April 2014, one per record."""

    time: npt.NDArray[np.datetime64]
    latitude: Array
    longitude: Array
    base: npt.NDArray[np.str_]


class Sequences(NamedTuple):
    """Signal strengths, one time step per row, and the sequence that each belongs to."""

    rss: Array
    sequence: npt.NDArray[np.int64]


def load_uber(folder: Folder = None) -> Pickups:
    """All 564,516 pickups; the first 3,829 are those of base B02512 on 1 to 3 April."""
    import pandas

    frame = pandas.read_csv(io.BytesIO(content(UBER, folder)))
    time = pandas.to_datetime(frame["Date/Time"], format="%m/%d/%Y %H:%M:%S").to_numpy(dtype="datetime64[s]")
    base = frame["Base"].to_numpy(dtype=np.str_)
    return Pickups(time, frame["Lat"].to_numpy(dtype=np.float64), frame["Lon"].to_numpy(dtype=np.float64), base)


def load_cardiotocography(folder: Folder = None) -> Labelled:
    """2,126 records of 21 features in their own units, and the state 1 (normal), 2 (suspect) or 3 (pathologic)."""
    table = _table(CARDIOTOCOGRAPHY, folder)
    return Labelled(table[:, :21], table[:, -1].astype(np.int64))


def load_liver(folder: Folder = None) -> Array:
    """345 records of five blood tests and, last, the daily drinks, in their own units."""
    return _table(LIVER, folder)[:, :6]


def load_movement(folder: Folder = None) -> Sequences:
    """13,197 time steps of four signal strengths between -1 and 1, in 314 sequences."""
    found = arrays(MOVEMENT, folder)
    return Sequences(found["rss"].astype(np.float64), found["sequence_id"].astype(np.int64))


def load_swarm(folder: Folder = None) -> Labelled:
    """Records of 2,400 features of a swarm in their own units, and whether it flocks; no checksum is known for it."""
    import pandas

    found = content(SWARM, folder)
    try:
        frame = pandas.read_csv(io.BytesIO(found))
    except ValueError:
        raise InvalidInput(f"{SWARM.name} is not a table; see {SWARM.page}") from None
    table = frame.apply(pandas.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    if table.shape[1] != 2401 or not np.all(np.isfinite(table)) or not np.all(np.isin(table[:, -1], (0, 1))):
        raise InvalidInput(
            f"{SWARM.name} must hold 2,400 numbers and a class of 0 or 1 in each record, got {table.shape[1]} columns "
            f"and {int(np.sum(~np.isfinite(table)))} cells that are no numbers; see {SWARM.page}"
        )
    return Labelled(table[:, :-1], table[:, -1].astype(np.int64))


def _table(source: Source, folder: Folder) -> Array:
    """A CSV file of numbers below a header."""
    found = content(source, folder)
    with _check.withheld(f"reading {source.name}"):
        return np.loadtxt(io.BytesIO(found), delimiter=",", skiprows=1)
