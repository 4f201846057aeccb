"""The census records of Adult, with an encoding that does not depend on the records.

Every category and every range is written here, from the documentation of the data set and the codes of the census, so
that the encoding is public: it reveals nothing about the records, and one record changes only its own row.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

from matrixdp.errors import InvalidInput
from matrixdp_papers.datasets.source import Folder, Labelled, Source, content

ADULT = tuple(
    Source(
        f"adult_{part}.csv.gz",
        "https://archive.ics.uci.edu/dataset/2/adult",
        f"take the records of {name}, put a line with the 14 attributes and income before them, remove the spaces "
        "after commas and the points after the classes, and gzip the result",
        sha256,
    )
    for part, name, sha256 in (
        ("train", "adult.data", "f2c62076f19504d99a38b22badf445a7f42530ade6b827acf78dd143fbce38bb"),
        ("test", "adult.test", "f6b1801c5d231515ea5ff04d4444997bacd57e04876e94710cb9b9bd5549c033"),
    )
)

_VALUES: dict[str, tuple[float, float] | str] = {
    "age": (0, 100),
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    "fnlwgt": (0, 1_500_000),
    "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
    "1st-4th 10th Doctorate 5th-6th Preschool",
    "education-num": (1, 16),
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
    "Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
    "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv "
    "Armed-Forces",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "capital-gain": (0, 99_999),
    "capital-loss": (0, 5_000),
    "hours-per-week": (0, 99),
    "native-country": "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India "
    "Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland "
    "France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand "
    "Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands",
}
ADULT_ATTRIBUTES = {name: values.split() if isinstance(values, str) else values for name, values in _VALUES.items()}
"""The 14 attributes in the order of the file: the range of a number, or the categories."""


def _columns() -> dict[str, slice]:
    """One column for a number, one for each category."""
    columns, start = {}, 0
    for name, values in ADULT_ATTRIBUTES.items():
        stop = start + (len(values) if isinstance(values, list) else 1)
        columns[name] = slice(start, stop)
        start = stop
    return columns


ADULT_COLUMNS = _columns()
"""Which columns of the encoded records belong to an attribute."""

ADULT_TWO_PARTS = (slice(0, ADULT_COLUMNS["relationship"].start), slice(ADULT_COLUMNS["relationship"].start, 105))
"""The columns of the first seven attributes and of the last seven, for two parties that share the records."""


def load_adult(folder: Folder = None, *, test: bool = False) -> Labelled:
    """32,561 (test: 16,281) people, and whether the income is above 50,000 dollars (1) or not (0).

    A number is clipped to its range and scaled to [0, 1]. A category is one-hot encoded; a missing one leaves its
    columns at 0. There are 105 columns in [0, 1].
    """
    import pandas

    source = ADULT[test]
    frame = pandas.read_csv(io.BytesIO(content(source, folder)))
    parts = [_encoded(source, name, frame[name].to_numpy()) for name in ADULT_ATTRIBUTES]
    income = _one_hot(source, "income", frame["income"].to_numpy(), ["<=50K", ">50K"])
    return Labelled(np.column_stack(parts), income[:, 1].astype(np.int64))


def _encoded(source: Source, name: str, values: npt.NDArray[np.object_]) -> npt.NDArray[np.float64]:
    """The columns of one attribute."""
    known = ADULT_ATTRIBUTES[name]
    if isinstance(known, list):
        return _one_hot(source, name, values, [*known, "?"])[:, :-1]
    low, high = known
    return np.clip((values[:, None].astype(np.float64) - low) / (high - low), 0, 1)


def _one_hot(source: Source, name: str, values: npt.NDArray[np.object_], known: list[str]) -> npt.NDArray[np.float64]:
    """A column for each value that may occur."""
    found: npt.NDArray[np.bool_] = values[:, None] == np.array(known, dtype=object)
    unknown = ~found.any(axis=1)
    if unknown.any():
        place = int(np.argmax(unknown))
        raise InvalidInput(f"{source.name} has an unknown value as {name} in record {place}; see {source.page}")
    return found.astype(np.float64)
