"""Arrays from callers: what is copied, what is refused, and what looking at them takes."""

import tracemalloc

import numpy as np
import pytest

from matrixdp import _check
from matrixdp.errors import InvalidInput

VALUES = np.random.default_rng(0).normal(size=(40, 50))
LAYOUTS = {
    "C": VALUES,
    "Fortran": np.asfortranarray(VALUES),
    "reversed": VALUES[::-1].copy()[::-1],
    "strided": np.repeat(VALUES, 3, axis=1)[:, ::3],
    "big-endian": VALUES.astype(">f8"),
    "unaligned": np.frombuffer(b"x" + VALUES.tobytes(), dtype=np.uint8)[1:].view(np.float64).reshape(40, 50),
}


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_numbers(layout, copy):
    found = _check.finite("value", LAYOUTS[layout], copy=copy)
    assert found.dtype == np.float64
    assert found.dtype.isnative
    assert found.flags.aligned
    assert np.array_equal(found, VALUES)
    assert copy or found.flags.c_contiguous


def test_a_copy_is_the_default_and_the_value_itself_is_used_only_on_request():
    assert not np.shares_memory(_check.finite("value", VALUES), VALUES)
    assert _check.finite("value", VALUES, copy=False) is VALUES
    whole = np.arange(6)
    assert _check.finite("value", whole, copy=False).dtype == np.float64


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("layout", ["C", "Fortran", "strided"])
@pytest.mark.parametrize(("bad", "word"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
def test_a_number_that_is_not_finite_is_found_anywhere(bad, word, layout, copy):
    for place in ((0, 0), (39, 49), (17, 3)):
        values = LAYOUTS[layout].copy(order="K")
        values[place] = bad
        with pytest.raises(InvalidInput, match=rf"got {word} at \({place[0]}, {place[1]}\) \(1 such entries\)"):
            _check.finite("value", values, copy=copy)


def test_one_bad_entry_is_found_in_every_piece_of_a_large_array():
    values = np.zeros(300_000)
    for place in (0, 65_535, 65_536, 200_000, 299_999):
        values[place] = np.nan
        with pytest.raises(InvalidInput, match=rf"NaN at \({place},\)"):
            _check.finite("value", values, copy=False)
        values[place] = 0.0


def test_looking_at_a_large_value_takes_no_memory_of_its_size():
    values = np.zeros((2048, 1024))
    _check.finite("value", values, copy=False)

    def peak(task):
        tracemalloc.start()
        try:
            task()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(lambda: _check.finite("value", values, copy=False)) < 1 << 20
    assert peak(lambda: np.isfinite(values)) > 1 << 20
