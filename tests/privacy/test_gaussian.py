"""delta, epsilon and mu of Gaussian noise: against 50-digit truth, one another, the limits, and bad input."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.privacy import arithmetic, gaussian

TOLERANCE = Fraction(1, 10**12)
GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden", "gaussian.json").read_text())
ARGUMENTS = {"delta": ("mu", "epsilon"), "epsilon": ("mu", "delta"), "mu": ("epsilon", "delta")}
SMALLEST = 5e-324


def compared(name, part, *, as_array=False):
    """(arguments, got, truth) of one function for every golden row, exactly."""
    function = getattr(gaussian, name)
    inputs = [[float.fromhex(row[argument]) for argument in ARGUMENTS[name]] for row in GOLDEN[part]]
    found = function(*np.array(inputs).T).tolist() if as_array else [function(*pair) for pair in inputs]
    return [
        (pair, Fraction(got), Fraction(row[f"true_{name}"]))
        for pair, got, row in zip(inputs, found, GOLDEN[part], strict=True)
    ]


def excess(name, got, truth):
    """How far an answer lies on the private side, relative to the truth; negative is a broken promise."""
    distance = truth - got if name == "mu" else got - truth
    return distance / truth if truth else distance


@pytest.mark.parametrize("as_array", [False, True], ids=["scalar", "array"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_inside_the_range_the_truth_is_met_from_the_private_side(name, as_array):
    rows = compared(name, "rows", as_array=as_array)
    assert len(rows) > 300
    for arguments, got, truth in rows:
        assert 0 <= excess(name, got, truth) <= TOLERANCE, (arguments, float(got), float(truth))


@pytest.mark.parametrize("as_array", [False, True], ids=["scalar", "array"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_beyond_the_range_answers_stay_private(name, as_array):
    for arguments, got, truth in compared(name, "beyond", as_array=as_array):
        assert excess(name, got, truth) >= 0, (arguments, float(got), float(truth))
        if name == "delta":
            assert got <= min(1, truth * (1 + TOLERANCE) + Fraction(SMALLEST))
        if name == "mu":
            assert got >= truth * Fraction(7, 8) - Fraction(SMALLEST)


@pytest.mark.parametrize(
    ("name", "constant", "value"),
    [
        ("delta", "_GUARD", 0.0),
        ("delta", "_DROP_GUARD", 0.0),
        ("delta", "_BASE_GUARD", -1e-15),
        ("epsilon", "_GUARD", -1e-13),
        ("epsilon", "_SHIFT", -4e-15),
        ("epsilon", "_BASE_GUARD", -(2.0**-70)),
        ("mu", "_GUARD", 0.0),
        ("mu", "_SHIFT", -4e-15),
    ],
)
def test_a_missing_margin_does_not_go_unnoticed(monkeypatch, name, constant, value):
    monkeypatch.setattr(gaussian, constant, value)
    try:
        wrong = min(excess(name, got, truth) for _, got, truth in compared(name, "rows")) < 0
    except NumericalFailure:  # the check of the root against its own delta was there first
        wrong = True
    assert wrong


def powers_of_ten(low, high):
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


EPSILONS = st.one_of(powers_of_ten(-8, 3), powers_of_ten(-323, 308), st.just(0.0))
DELTAS = st.one_of(
    powers_of_ten(-300, math.log10(0.5)),
    powers_of_ten(-12, math.log10(0.5)),
    powers_of_ten(-16, -0.3).map(lambda x: 1.0 - x),
    st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
).filter(lambda x: 0.0 < x < 1.0)
MUS = st.one_of(powers_of_ten(-9, 2), powers_of_ten(-323, 154))


@settings(max_examples=600, deadline=None)
@given(EPSILONS, DELTAS)
@example(0.0, SMALLEST)
@example(1e-8, 1e-300)
@example(1e3, 1e-300)
@example(1.7e308, 0.5)
def test_mu_keeps_its_own_budget(epsilon, delta):
    mu = gaussian.mu(epsilon, delta)
    assert mu > 0
    assert gaussian.delta(mu, epsilon) <= delta


@settings(max_examples=600, deadline=None)
@given(MUS, DELTAS)
@example(SMALLEST, SMALLEST)
@example(1.0, 0.3829249225480262)
@example(40.0, 1 - 2.0**-53)
def test_epsilon_keeps_its_own_delta(mu, delta):
    epsilon = gaussian.epsilon(mu, delta)
    assert gaussian.delta(mu, epsilon) <= delta
    assert (epsilon == 0.0) == (delta >= gaussian.delta(mu, 0.0))


@settings(max_examples=600, deadline=None)
@given(powers_of_ten(-9, 0.3), powers_of_ten(-12, 0.2))
def test_epsilon_keeps_a_delta_that_hardly_depends_on_it(mu, ratio):
    delta = gaussian.delta(mu, ratio * mu)
    epsilon = gaussian.epsilon(mu, delta)
    assert gaussian.delta(mu, epsilon) <= delta
    assert epsilon <= ratio * mu * (1 + 1e-10) + 1e-26 * mu


def test_arrays_keep_the_same_promises():
    generator = np.random.default_rng(11)
    epsilon, delta = 10 ** generator.uniform(-8, 3, 20_000), 10 ** generator.uniform(-300, math.log10(0.5), 20_000)
    delta[::2] = 10 ** generator.uniform(-15, math.log10(0.5), 10_000)
    mu = gaussian.mu(epsilon, delta)
    assert (gaussian.delta(mu, epsilon) <= delta).all()
    found = gaussian.epsilon(mu, delta)
    assert (gaussian.delta(mu, found) <= delta).all()
    # mu was moved down by at most 1e-12, epsilon up: together they nearly cancel where epsilon is well conditioned
    well = epsilon > 0.1 * mu
    np.testing.assert_allclose(found[well], epsilon[well], rtol=2e-11)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_number_and_an_array_give_the_same(name):
    for part in GOLDEN:
        scalar, array = compared(name, part), compared(name, part, as_array=True)
        for (arguments, one, truth), (_, many, _) in zip(scalar, array, strict=True):
            if part == "rows":
                assert abs(one - many) <= TOLERANCE / 5 * truth, arguments


def test_limits():
    assert gaussian.delta(0.0, 0.0) == gaussian.delta(0.0, 3.0) == 0.0
    assert gaussian.epsilon(0.0, 1e-6) == 0.0
    assert gaussian.delta(math.inf, 0.0) == gaussian.delta(math.inf, 1e308) == gaussian.delta(1e200, 1.0) == 1.0
    assert gaussian.epsilon(math.inf, 1e-6) == gaussian.epsilon(1e200, 0.5) == math.inf
    assert gaussian.delta(1e-3, 1e3) == gaussian.delta(SMALLEST, 1.7e308) == SMALLEST
    assert gaussian.delta(1e-300, 0.0) == pytest.approx(1e-300 / math.sqrt(2 * math.pi), rel=1e-12)
    assert gaussian.delta(30.0, 0.0) == 1.0
    assert gaussian.mu(0.0, 0.5) == pytest.approx(1.3489795003921634, rel=1e-12)
    np.testing.assert_array_equal(gaussian.delta([0.0, math.inf, 1e-3], [1.0, 1.0, 1e3]), [0.0, 1.0, SMALLEST])
    np.testing.assert_array_equal(gaussian.epsilon([0.0, math.inf, 1e-3], 0.5), [0.0, math.inf, 0.0])


def test_epsilon_is_zero_exactly_from_delta_at_zero():
    for mu in (1e-280, 1e-9, 0.3, 1.9, 2.0, 7.0):
        edge = gaussian.delta(mu, 0.0)
        assert gaussian.epsilon(mu, edge) == 0.0
        assert gaussian.epsilon(mu, math.nextafter(edge, 0.0)) > 0.0


def test_kinds_of_argument():
    expected = gaussian.mu(1.0, 1e-6)
    assert type(expected) is float
    for one in (1, np.float64(1.0), np.float32(1.0), np.int8(1), np.array(1.0)):
        answer = gaussian.mu(one, 1e-6)
        assert type(answer) is float
        assert answer == expected
    assert gaussian.mu([1.0, 2.0], [[1e-6], [1e-9], [0.1]]).shape == (3, 2)
    assert gaussian.mu([], 1e-6).shape == (0,)
    given = np.array([1.0, 2.0])
    result = gaussian.epsilon(given, 1e-6)
    assert isinstance(result, np.ndarray)
    assert result.dtype == np.float64
    np.testing.assert_array_equal(given, [1.0, 2.0])


def test_every_block_of_a_long_array_is_computed():
    size = 2 * arithmetic._BLOCK + 3
    epsilon = np.linspace(0.1, 5.0, size)
    result = gaussian.mu(epsilon, 1e-6)
    assert (np.diff(result) > 0).all()
    np.testing.assert_allclose(
        result[[0, size // 2, -1]], [gaussian.mu(x, 1e-6) for x in epsilon[[0, size // 2, -1]].tolist()], rtol=1e-12
    )


def test_no_floating_point_error_leaks_out():
    with np.errstate(all="raise"):
        mu = gaussian.mu([0.0, 1e-300, 1e308, 1.0], [SMALLEST, 1e-300, 0.9, 1e-310])
        gaussian.delta(mu, [1e308, 0.0, 1.0, 1e-300])
        gaussian.epsilon(mu, 1e-310)


BAD = {
    "mu": [math.nan, -1.0, -SMALLEST, "1", None, True, 1j, object(), {}, 10**400, [1.0, math.nan], [[1.0], [1.0, 2.0]]],
    "epsilon": [
        math.nan,
        -1.0,
        math.inf,
        -math.inf,
        "1",
        None,
        False,
        1j,
        np.array([None]),
        np.array([True]),
        [1.0, math.inf],
    ],
    "delta": [
        math.nan,
        0.0,
        1.0,
        -1e-6,
        1.5,
        math.inf,
        "1e-6",
        None,
        True,
        1j,
        np.array(["a"]),
        [0.5, 0.0],
        [0.5, math.nan],
    ],
}


@pytest.mark.parametrize(
    ("argument", "bad"),
    [(argument, bad) for argument, values in BAD.items() for bad in values],
    ids=lambda value: "object" if type(value) is object else repr(value),  # an address differs between processes
)
@pytest.mark.parametrize("other", [0.5, np.array([0.25, 0.5])], ids=["scalar", "array"])
def test_bad_input_is_refused_by_name(argument, bad, other):
    for name, arguments in ARGUMENTS.items():
        if argument in arguments:
            with pytest.raises(InvalidInput, match=f"^{argument} must"):
                getattr(gaussian, name)(*(bad if each == argument else other for each in arguments))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInput, match=r"mu \(2,\) and epsilon \(3,\)"):
        gaussian.delta([1.0, 2.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("arguments", [(1.0, 1e-6), ([1.0, 2.0], 1e-6)], ids=["scalar", "array"])
def test_an_unconverged_root_is_never_returned(monkeypatch, arguments):
    monkeypatch.setattr(arithmetic, "_ITERATIONS", 1)
    with pytest.raises(NumericalFailure):
        gaussian.mu(*arguments)
    with pytest.raises(NumericalFailure):
        gaussian.epsilon(*arguments)
