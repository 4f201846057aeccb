"""Every statistic of a table by brute force: leaving any row or unit out changes it by a member of its set at most.

Cells are as odd as cells can be, and policies are drawn. Set, query, labels and type must not depend on a cell either.
"""

import numpy as np
import pandas
import pytest

from matrixdp.sensitivity import RankOne
from matrixdp.tables import Boolean, Categorical, Domain, Numeric, Table

NUMBERS = [
    0,
    10,
    -3,
    1e308,
    -1e308,
    np.inf,
    -np.inf,
    np.nan,
    None,
    "",
    "abc",
    "5",
    "1e3",
    10**400,
    True,
    9.99,
    pandas.NaT,
]
TEXTS = ["a", "b", "z", None, "", " a ", "A", 1, 1.0, "1", True, np.nan]
TRUTHS = [True, False, "yes", "no", "maybe", None, 1, 0, "T"]

ASKED = {
    "counts": lambda table: table.counts("x", "c"),
    "rows": lambda table: table.counts(),
    "cell states": lambda table: table.cell_states(),
    "means": lambda table: table.means("x", by=("c", "b")),
    "sums": lambda table: table.sums("y"),
    "quantiles": lambda table: table.quantiles("x", [0.25, 0.5], bins=8),
    "variances": lambda table: table.variances("x", "y"),
    "covariance": lambda table: table.covariance("x", "y", "b"),
    "components": lambda table: table.pca("x", "y"),
    "regression": lambda table: table.regression("x", ("y", "c", "b")),
    "marginals": lambda table: table.marginals(("x", "c"), ("c", "b")),
}


def drawn(rng):
    """A small table and its domain."""
    rows = int(rng.integers(1, 12))

    def cells(pool):
        return pandas.Series([pool[place] for place in rng.integers(len(pool), size=rows)], dtype=object)

    def policies(fill):
        names = ("missing", "unexpected")
        return {name: ["category", "out", {"fill": fill}][rng.integers(3)] for name in names}

    ids = pandas.Series([f"p{i}" if i < 4 else None for i in rng.integers(6, size=rows)], dtype=object)
    frame = pandas.DataFrame(
        {"x": cells(NUMBERS), "y": cells(NUMBERS), "c": cells(TEXTS), "b": cells(TRUTHS), "id": ids}
    )
    outside = ["clip", "unexpected"][rng.integers(2)]
    columns = {
        "x": Numeric(-1, 10, bins=[-1, 0, 3, 10], outside=outside, **policies(5)),
        "y": Numeric(0, 8, bins=4, **policies(8)),
        "c": Categorical(["a", "b", "1"], **policies("a")),
        "b": Boolean(**policies(True)),
    }
    return frame, Domain(columns)


def is_member(sensitivity, change):
    if not isinstance(sensitivity, RankOne):
        return sensitivity.contains(change)
    values = np.linalg.eigvalsh(change)  # several rows of a unit: semidefinite, and of bounded trace; see `of_units`
    return values[0] >= -1e-9 * values[-1] and values.sum() <= sensitivity.radius**2 * (1 + 1e-12)


@pytest.mark.parametrize("unit", [None, "id"])
@pytest.mark.parametrize("name", ASKED)
def test_leaving_one_out_changes_a_member_of_the_set(name, unit):
    rng, largest = np.random.default_rng(3), 0.0
    for _ in range(8):
        frame, domain = drawn(rng)
        most = max([1, *frame["id"].value_counts()])  # so that all rows of a unit count, and no choice is random
        options = {} if unit is None else {"unit": unit, "contributions": most}
        whole = ASKED[name](Table(frame, domain, **options))
        others = [frame.drop(row) for row in frame.index]
        if unit is not None:
            others = [frame[frame["id"] != each] for each in frame["id"].dropna().unique()]
        for left in others:
            part = ASKED[name](Table(left, domain, **options))
            change = np.asarray(whole.value, dtype=np.float64) - part.value
            assert is_member(whole.sensitivity, change)
            largest = max(largest, float(np.abs(change).sum()))
            pure = getattr(whole, "pure", None)
            assert pure is None or pure.sensitivity.contains(pure.value - part.pure.value)
            assert repr(whole.sensitivity) == repr(part.sensitivity)
            assert (str(whole.query), whole.axes, whole.value.dtype) == (str(part.query), part.axes, part.value.dtype)
    assert largest > 0


def test_one_row_more_than_counts_is_not_a_member():
    """So that the test above can fail."""
    frame, domain = pandas.DataFrame({"c": ["a"] * 3, "id": ["p"] * 3}), Domain({"c": Categorical(["a"])})
    two = Table(frame, domain, unit="id", contributions=2).counts("c")
    assert is_member(two.sensitivity, two.value)
    assert not is_member(two.sensitivity, Table(frame, domain).counts("c").value)
