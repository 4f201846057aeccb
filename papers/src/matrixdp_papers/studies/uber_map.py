"""The pickups of R1SMG's first case study: the private map, and what is public about it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from matrixdp import queries
from matrixdp._check import Array
from matrixdp.budget import Budget
from matrixdp.sensitivity import Counts
from matrixdp_papers import datasets

Mask = npt.NDArray[np.bool_]

BUDGET = Budget(0.5, 1e-7)
"""The budget of the paper's comparison."""

ADJACENCIES = {"add/remove": Counts(1), "replace": Counts(2, adjacency="replace")}
"""The sensitivity sets by adjacency; the paper's squared sensitivity of 2 is that of replace."""

CELLS = 89
# Manhattan and LaGuardia. The paper does not give its borders; with these the fullest cell holds 27, as in the paper.
LATITUDE = (40.70, 40.82)
LONGITUDE = (-74.03, -73.85)
BASE = "B02512"
FIRST_DAY = np.datetime64("2014-04-01")
OTHER_FIRST_DAYS = tuple(np.datetime64(f"2014-04-{day:02}") for day in (8, 15, 22))  # the same days of the week
DAYS = np.timedelta64(3, "D")


class Data(NamedTuple):
    """A private map and what is public about it.

    Attributes:
        counts: the private counts.
        other: counts of other days, on which methods and post-processings are chosen.
        valid: the cells where pickups are known to happen.
        records: the number of private records, inside the map or not.
    """

    counts: Array
    other: tuple[Array, ...]
    valid: Mask
    records: int


def load(folder: datasets.Folder) -> Data:
    """The pickups of one base on three days, and a map of valid cells from all other records of the month.

    The other records (other bases, other days) serve as public knowledge: no record that is counted here affects
    which cells are valid, so setting the others to 0 is post-processing.
    """
    pickups = datasets.load_uber(folder)
    private, *others = (
        (pickups.base == BASE) & (pickups.time >= first) & (pickups.time < first + DAYS)
        for first in (FIRST_DAY, *OTHER_FIRST_DAYS)
    )
    places = np.c_[pickups.latitude, pickups.longitude]
    edges = (np.linspace(*LATITUDE, CELLS + 1), np.linspace(*LONGITUDE, CELLS + 1))
    counts, known, *other = (queries.histogram(places[m], edges=edges).value for m in (private, ~private, *others))
    return Data(counts, tuple(other), known > 0, int(np.sum(private)))


def on_valid(noisy: Array, valid: Mask) -> Array:
    """The map with 0 where no pickups can be."""
    return np.where(valid, noisy, 0.0)
