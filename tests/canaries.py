"""Records with canaries in cells, headers and labels, wrong in every way that was thought of, and what a call says.

Canaries are put together at run time, so that the lines of source in a traceback do not hold them.
"""

import datetime
import io
import logging
import re
import traceback
import warnings
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import scipy.sparse
import torch

TEXT = "-".join(("CAN" + "ARY", "q7" + "xz"))
WHOLE = int("9182" + "73645")
NUMBER = WHOLE / 1000
DAY = datetime.date(1900 + 71, 3, 4)
# Any part of a canary, and a number as other formats write it.
MARKS = re.compile(r"can.?ary|q7xz|9[.,_]?18[.,_]?2[.,_]?7|9\.18\d*e|9\.2e\+0*[58]|1971.?0?3.?0?4", re.IGNORECASE)


class Loud:
    """An object that says what it holds, in its repr and wherever numpy asks."""

    def __init__(self):
        self.text = TEXT

    def __repr__(self):
        return self.text

    def __array__(self, *_, **__):
        raise ValueError(self.text)


def table(*cells, dtype=object):
    made = np.empty((2, len(cells)), dtype=dtype)
    for place in np.ndindex(made.shape):
        made[place] = cells[place[1]]
    return made


def frame(cells, **options):
    return pd.DataFrame({TEXT: cells, WHOLE: [NUMBER] * len(cells)}, index=[WHOLE, WHOLE + 1], **options)


HOLES = {
    "NaN": table(NUMBER, np.nan, dtype=float),
    "infinite": table(NUMBER, -np.inf, dtype=float),
    "long double": np.array([[NUMBER, 1]], dtype=np.longdouble) * np.longdouble("1e4000"),
    "frame, NaN": frame([NUMBER, np.nan]),
    "frame, Int64": frame(pd.array([WHOLE, None], dtype="Int64")),
    "frame, arrow": frame(pd.array([NUMBER, None], dtype=pd.ArrowDtype(pa.float64()))),
    "frame, sparse": frame(pd.arrays.SparseArray([NUMBER, np.nan], fill_value=NUMBER)),
    "labels of text": pd.DataFrame({"a": [1.0, np.nan]}, index=[TEXT, TEXT]),
    "columns of two levels": pd.DataFrame([[1.0, np.nan]], columns=pd.MultiIndex.from_tuples([(TEXT, 1), (WHOLE, 2)])),
    "columns of days": pd.DataFrame([[NUMBER, np.nan]], columns=pd.to_datetime([DAY, DAY + datetime.timedelta(1)])),
    "series": pd.Series([NUMBER, np.nan], name=TEXT, index=[WHOLE, TEXT]),
}
TYPES = {
    "text": table(TEXT, str(NUMBER), dtype=str),
    "bytes": table(TEXT.encode(), b"1", dtype="S40"),
    "objects": table({TEXT: NUMBER}, Loud()),
    "text and NaN": table(TEXT, np.nan),
    "decimals": table(Decimal(str(NUMBER)), Decimal("NaN")),
    "fractions": table(Fraction(WHOLE, 7), Fraction(1)),
    "huge": table(WHOLE * 10**400, 1),
    "whole": table(WHOLE * 10**9, 1, dtype=np.uint64),
    "complex": table(NUMBER + 2j, 1j, dtype=complex),
    "days": table(DAY, DAY, dtype="M8[D]"),
    "fields": np.array([(NUMBER, 1.0)], dtype=[(TEXT, float), ("b", float)]),
    "masked": np.ma.masked_array(table(NUMBER, 1.0, dtype=float), mask=True),
    "sparse": scipy.sparse.csr_matrix(table(NUMBER, 1.0, dtype=float)),
    "tensor with gradient": torch.full((2, 2), NUMBER, requires_grad=True),
    "tensor of holes": torch.tensor([[NUMBER, float("nan")]] * 2),
    "frame, text": frame([TEXT, TEXT]),
    "frame, mixed": frame([NUMBER, TEXT]),
    "frame, categories": frame(pd.Categorical([TEXT, str(NUMBER)])),
    "frame, days": frame(pd.to_datetime([DAY, DAY])),
    "frame, intervals": frame(pd.arrays.IntervalArray.from_tuples([(0, NUMBER), (NUMBER, 1e6)])),
    "frame, structs": frame(pd.array([{TEXT: 1}] * 2, dtype=pd.ArrowDtype(pa.struct([(TEXT, pa.int64())])))),
    "frame, same names": pd.DataFrame([[1.0, 2.0]], columns=[TEXT, TEXT]),
    "dictionary": {TEXT: [NUMBER]},
    "set": {TEXT, NUMBER},
    "lists of dictionaries": [{TEXT: NUMBER}],
    "object": Loud(),
    "array of such": [Loud(), 1.0],
}
SHAPES = {
    "one dimension": np.full(4, NUMBER),
    "number": np.float64(NUMBER),
    "three dimensions": np.full((2, 2, 2), NUMBER),
    "ragged": [[NUMBER, 1.0], [NUMBER]],
    "ragged text": [[TEXT], [TEXT, NUMBER]],
    "empty with names": pd.DataFrame({TEXT: [], WHOLE: []}),
    "other names": pd.DataFrame(np.full((2, 2), NUMBER), columns=[TEXT, "b"]),
    "five columns": np.full((3, 5), NUMBER),
    "large": table(NUMBER * 1e30, -NUMBER * 1e300, dtype=float),
}
TEXTS = {
    "content of a file": f"{TEXT};{DAY}\n{NUMBER};1.csv",
    "long content": f"{TEXT},{NUMBER}" * 200,
    "long content that ends like a path": f"{TEXT},{NUMBER}" * 200 + ".parquet",
}
RECORDS = HOLES | TYPES | SHAPES | TEXTS
# What may be given by mistake where a public argument is expected, and not be shown; a word or a number may.
PUBLIC = {name: given for name, given in RECORDS.items() if not isinstance(given, (str, float))}


def leak(text):
    """The first canary in a text; addresses of objects are left out, for they are hexadecimal numbers by chance."""
    return MARKS.search(re.sub(r"0x[0-9a-f]+", "", text))


@contextmanager
def few_digits():
    """Arrays print one digit after the point: enough to see a canary, and too few for noise to look like one."""
    kept = torch._tensor_str.PRINT_OPTS.precision
    torch.set_printoptions(precision=1, sci_mode=False)
    try:
        with np.printoptions(precision=1, suppress=True):
            yield
    finally:
        torch.set_printoptions(precision=kept, sci_mode=None)


def said(call, *arguments, **options):
    """Everything that a call says: its error with all that hangs on it, its warnings, its log, its result's repr."""
    with few_digits():
        return _said(call, *arguments, **options)


def _said(call, *arguments, **options):
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    logging.getLogger().addHandler(handler)
    logging.getLogger("flwr").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = call(*arguments, **options)
                text = "" if isinstance(result, (np.ndarray, torch.Tensor)) else f"{result!r} {result}"
            except Exception as error:
                text = "".join(traceback.format_exception(error)) + repr((error, error.args, vars(error)))
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger("flwr").removeHandler(handler)
    numeric = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    assert not numeric, f"warnings that depend on cells: {set(numeric)}"
    return text + "".join(f"{w.message!r} {w.message}" for w in caught) + heard.getvalue()
