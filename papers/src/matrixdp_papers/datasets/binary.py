"""Binary records: places visited, goods bought, hospital stays."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp.errors import InvalidInput
from matrixdp_papers.datasets.source import Folder, Labelled, Source, arrays, content

PAGE = "https://github.com/privacytrustlab/datasets"

LOCATION = Source(
    "location30.npz",
    PAGE,
    "save dataset_location as the arrays features_packed (5010 x 56, the bits of 446 features by numpy.packbits), "
    "n_features and label (1 to 30)",
    "3ca7dbb541ece793aff4f8210c729fdf2831375d19a4540bbf60a6d63557c290",
)
PURCHASE100 = Source("dataset_purchase", PAGE, "unpack the file from dataset_purchase.tgz", None)
TEXAS100 = tuple(
    Source(f"texas/100/{part}", PAGE, "unpack the folder texas from dataset_texas.tgz", None)
    for part in ("feats", "labels")
)


def load_location(folder: Folder = None) -> Labelled:
    """5,010 people: which of 446 places (and kinds of them) each went to, as 0 or 1 (float32), and a class 0 to 29."""
    found = arrays(LOCATION, folder)
    bits = np.unpackbits(found["features_packed"], axis=1, count=int(found["n_features"]))
    return Labelled(bits.astype(np.float32), found["label"].astype(np.int64) - 1)


def load_purchase100(folder: Folder = None) -> Labelled:
    """197,324 people: which of 600 goods each bought, as 0 or 1 (float32), and a class 0 to 99.

    No checksum is known for it: what is in every cell is checked, how many records there are is not.
    """
    table = _whole_numbers(PURCHASE100, folder)
    return _checked(PURCHASE100, table[:, 1:], table[:, 0], features=(600,))


def load_texas100(folder: Folder = None) -> Labelled:
    """67,330 hospital stays of 6,169 facts as 0 or 1 (float32; some papers count 6,170), and the treatment, 0 to 99.

    No checksum is known for it: what is in every cell is checked, how many records there are is not.
    """
    records, label = (_whole_numbers(source, folder) for source in TEXAS100)
    if label.shape != (len(records), 1):
        raise InvalidInput(
            f"{TEXAS100[1].name} must hold one class for each of the {len(records)} records of {TEXAS100[0].name}, "
            f"got a table of {label.shape}; one of them was cut short: get both again from {PAGE}"
        )
    return _checked(TEXAS100[0], records, label[:, 0], features=(6169, 6170))


def _checked(
    source: Source, records: npt.NDArray[Any], label: npt.NDArray[Any], *, features: tuple[int, ...]
) -> Labelled:
    """The records if all are 0 or 1 and the classes 1 to 100, which become 0 to 99."""
    wrong = int(np.sum((records != 0) & (records != 1)))
    if not (records.shape[1] in features and wrong == 0 and np.all(np.isin(label, range(1, 101)))):
        raise InvalidInput(
            f"{source.name} must hold {' or '.join(map(str, features))} features of 0 or 1 and classes from 1 to 100, "
            f"got {records.shape[1]} features and {wrong} entries neither 0 nor 1, or other classes; see {source.page}"
        )
    return Labelled(records.astype(np.float32), label.astype(np.int64) - 1)


def _whole_numbers(source: Source, folder: Folder) -> npt.NDArray[np.int8]:
    """A CSV file of whole numbers that fit into a byte, without a header; read in parts to save memory."""
    import pandas

    found = io.BytesIO(content(source, folder))
    parts = []
    try:
        for part in pandas.read_csv(found, header=None, dtype=np.int64, chunksize=10_000):
            numbers = part.to_numpy()
            parts.append(numbers.astype(np.int8))
            if not np.array_equal(parts[-1], numbers):
                raise ValueError("some do not fit into a byte")
    except (ValueError, OverflowError):
        raise InvalidInput(f"{source.name} is not a table of whole numbers below 128; see {source.page}") from None
    return np.concatenate(parts)
