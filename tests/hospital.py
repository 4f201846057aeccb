"""A made hospital file with the messes of real ones: missing cells, typing errors, several visits per patient."""

import numpy as np
import pandas

from matrixdp.tables import Boolean, Categorical, Date, Domain, Numeric, Ordered

REGIONS = ("north", "south", "east", "west")
DIAGNOSES = ("asthma", "diabetes", "fracture", "hypertension", "influenza")
MISSES = (None, "", "  ", "NA", "?")


def hospital(patients, seed=0):
    """Visits as a frame of texts, one to six per patient; some cells missing, misspelt, impossible or odd."""
    rng = np.random.default_rng(seed)
    visits = np.repeat(np.arange(patients), rng.choice([1, 1, 1, 2, 3, 6], size=patients))
    count = len(visits)
    columns = {
        "patient_id": [f"P{number:06d}" for number in visits],
        "age": rng.integers(0, 99, size=patients)[visits].astype(str).tolist(),
        "sex": rng.choice(["f", "m"], size=patients)[visits].tolist(),
        "region": rng.choice(REGIONS, p=[0.4, 0.3, 0.2, 0.1], size=patients)[visits].tolist(),
        "diagnosis": rng.choice(DIAGNOSES, size=count).tolist(),
        "severity": rng.choice(["low", "medium", "high"], size=count).tolist(),
        "cost": np.round(rng.lognormal(6, 1.5, size=count), 2).astype(str).tolist(),
        "visit": np.datetime_as_string(np.datetime64("2026-01-01") + rng.integers(0, 365, size=count)).tolist(),
        "smoker": rng.choice(["yes", "no", "Y", "N", "TRUE"], size=count).tolist(),
    }
    messes = {
        "age": ("-1", "999", "4O", "1e400", "NaN", "forty"),
        "region": (" north", "NORTH", "Süd", "north;south"),
        "cost": ("-5", "inf", "1_000", "12,50"),
        "visit": ("2026-02-30", "1899-01-01", "01/02/2026", "2026-13-01"),
        "smoker": ("maybe", "2"),
        "diagnosis": ("=cmd()", "astma", "x" * 500),
        "patient_id": ("",),
    }
    for name, cells in columns.items():
        for share, choices in ((0.02, MISSES if name != "patient_id" else ("",)), (0.01, messes.get(name, ()))):
            for row in np.flatnonzero(rng.random(count) < share) if choices else ():
                cells[row] = choices[rng.integers(len(choices))]
    return pandas.DataFrame(columns, dtype=object)


def domain(**policies):
    """What the columns can say, from the hospital's forms."""
    given = {"missing_values": ("NA", "?"), **policies}
    return Domain(
        {
            "age": Numeric(0, 110, bins=[0, 18, 40, 65, 80, 110], **given),
            "sex": Categorical(["f", "m"], **given),
            "region": Categorical(REGIONS, **given),
            "diagnosis": Categorical(DIAGNOSES, **given),
            "severity": Ordered(["low", "medium", "high"], **given),
            "cost": Numeric(0, 5000, bins=5, **given),
            "visit": Date("2026-01-01", "2026-12-31", **given),
            "smoker": Boolean(**given),
        }
    )
