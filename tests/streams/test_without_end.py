"""Streams without an end: their parts, blocks and totals of blocks."""

import math
import subprocess
import sys
from contextlib import closing
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import chi2

from matrixdp import Budget, Participation
from matrixdp.errors import InvalidInput, NumericalFailure, StreamError
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key
from matrixdp.streams import Stream, blocks, noise, rows, state

BUDGET = Budget(1.0, 1e-6)
ONCE = Participation(1.0)


def endless(**others):
    return Stream(**{"steps": None, "sensitivity": ONCE, "budget": BUDGET, **others})


@pytest.fixture
def small(monkeypatch):
    """Parts of 2 and 4 days, blocks of 4 days, and totals in parts of 2, 4, 4, ... blocks."""
    monkeypatch.setattr(noise, "FIRST_PART", 2)
    monkeypatch.setattr(noise, "LONGEST_PART", 4)


@pytest.fixture
def one_key(monkeypatch):
    """All streams have the same key, so that they can be compared."""
    known = SimpleNamespace(token_hex=lambda count: "0" * 2 * count, token_bytes=lambda count: bytes(range(count)))
    monkeypatch.setattr(state, "secrets", known)


def test_a_stream_without_an_end():
    """The error at day 500 is far below that of independent noise, and each part keeps the guarantee."""
    stream = endless(shape=(200,))
    answers = [stream.add(np.ones(200)) for _ in range(100)]
    low, high = chi2.isf([1 - 5e-8, 5e-8], 200)  # false alarm 1e-7 a day
    for answer in (answers[0], answers[31], answers[32], answers[95], answers[99]):
        square = np.sum(((answer.value - answer.step) / answer.standard_error) ** 2)
        assert low < square < high
    unit = answers[0].standard_error
    for answer in answers:
        assert answer.standard_error <= unit * (1 + np.log2(answer.step)) ** 1.5
    assert answers[99].standard_error < unit * np.sqrt(100) / 3
    with stream._state.transaction() as connection:
        for number in (0, 1):
            part = stream._part(connection, number)
            assert part.mu <= stream.certificate.mu
            assert part.total_variation <= stream.certificate.total_variation
    assert stream.certificate.meets(BUDGET)


def test_a_part_that_begins_with_a_refused_day_is_in_the_state(tmp_path):
    """The refusal takes back what its transaction wrote, and the next day writes it again."""
    stream = endless(state=tmp_path / "s.stream", shape=(1,))
    for _ in range(32):
        stream.add([1.0])
    with pytest.raises(InvalidInput):
        stream.add([1e300])
    stream.add([1.0])
    with stream._state.transaction() as connection:
        assert connection.execute("SELECT number FROM parts ORDER BY number").fetchall() == [(0,), (1,)]


def test_a_first_day_with_too_many_cells_leaves_no_shape(tmp_path):
    stream = endless(state=tmp_path / "stream", budget=Budget(0.001, 1e-9))
    with pytest.raises(NumericalFailure):
        stream.add(np.zeros(10**6))
    assert stream.shape is None
    assert Stream.resume(tmp_path / "stream").shape is None
    assert stream.add([1.0, 2.0]).value.shape == (2,)


def test_parts_of_other_lengths_are_refused(tmp_path, monkeypatch):
    """As another version could have them: a day would be put into the wrong part."""
    path = tmp_path / "stream"
    stream = endless(state=path, shape=(1,))
    for _ in range(70):
        stream.add(1.0)
    monkeypatch.setattr(noise, "LONGEST_PART", 32)
    with pytest.raises(StreamError, match="parts of other lengths"):
        Stream.resume(path).add(1.0)
    monkeypatch.undo()
    assert len(Stream.resume(path)) == 70
    assert Stream.resume(path).add(1.0).step == 71


# --- blocks ---


def test_answers_over_blocks_have_their_standard_error(small):
    """Chi-square over cells that are independent; false alarm 1e-6 in all, and noise a tenth short is told apart."""
    size = 8000
    low, high = chi2.ppf([1e-6 / 80, 1 - 1e-6 / 80], size)
    assert 0.9**2 * high < low  # noise that is a tenth short is rejected
    stream, truth = endless(shape=(size,)), np.zeros(size)
    for day, row in enumerate(np.random.default_rng(4).uniform(-1e4, 1e5, (40, size)), 1):
        answer, truth = stream.add(row), truth + row
        assert answer.step == day
        square = np.sum(((answer.value - truth) / answer.standard_error) ** 2)
        assert low < square < high
    with stream._state.transaction() as connection:
        stored = connection.execute("SELECT number FROM parts ORDER BY number").fetchall()
        assert connection.execute("SELECT count(*) FROM blocks").fetchone() == (8,)
    assert stored == [(number,) for number in range(6)]  # days 2, 4; blocks; totals 2, 4, 4


def replayed(values, day, outputs):
    """All rows before their noise, where `day` has one record more; what is released is given, or drawn and kept."""
    white, released = [], []

    def add_noise(row, std, grid, key):
        white.append(row.copy())
        released.append(ADD_NOISE(row, std, grid, key) if outputs is None else outputs[len(released)])
        return released[-1]

    stream = endless(shape=(1,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows.kernels, "add_noise", add_noise)
        for step, value in enumerate(values, 1):
            stream.add([value + (step == day)])
    return np.array(white), released, stream.certificate.mu


ADD_NOISE = kernels.add_noise


def most_shifted():
    """How far a record moves all rows together, given all that was released, over mu; on the day where it is most."""
    values = np.random.default_rng(5).integers(0, 1000, 31).astype(float)
    without, released, mu = replayed(values, 0, None)
    assert len(released) == 31 + 6  # and a total for each block
    return max(np.linalg.norm(replayed(values, day, released)[0] - without) / mu for day in range(1, 32))


def test_a_record_moves_days_and_totals_by_mu_at_most(small):
    assert 0.9 < most_shifted() <= 1


@pytest.mark.parametrize("level", ["block", "totals"])
def test_a_level_with_all_of_mu_is_found(small, planted, level):
    planted("SHARES", {**noise.SHARES, level: (1.0, 0.5)})
    assert most_shifted() > 1.1


def summed(values, estimate, largest):
    with closing(state.sqlite3.connect(":memory:")) as connection:
        for day, value in enumerate(values):
            blocks.add_day(connection, np.array([value]), first=day == 0)
        return float(blocks.remainder(connection, np.array([estimate]), largest)[0])


def test_sums_of_blocks_are_exact_to_second_order():
    """Within 2^-53 of itself and g^2 of all sizes, where adding one after the other is not."""
    generator, plain_fails = np.random.default_rng(6), 0
    for _ in range(50):
        values = generator.normal(size=64) * 10.0 ** generator.integers(-3, 12, 64)
        estimate = float(np.sum(values)) + generator.normal()
        exact = sum(map(Fraction, values)) - Fraction(estimate)
        g = Fraction(64, 2**53 - 64)
        bound = abs(exact) / 2**53 + g**2 * sum(abs(Fraction(value)) for value in (*values, estimate))
        assert abs(Fraction(summed(values, estimate, 1e300)) - exact) <= bound
        plain = 0.0
        for value in (*values, -estimate):
            plain += float(value)
        plain_fails += abs(Fraction(plain) - exact) > bound
    assert plain_fails > 40


def test_the_remainder_of_a_block_is_bounded_and_moves_no_two_apart():
    assert summed([3.0, 4.0], 1e9, 5.0) == -5.0
    assert summed([3.0, 4.0], -1e9, 5.0) == 5.0
    for one, other in ((0.0, 1.0), (4.5, 5.5), (-6.0, -4.0), (-9.0, 9.0)):
        found = abs(summed([one], 0.0, 5.0) - summed([other], 0.0, 5.0))
        assert found <= abs(one - other)


def test_large_days_end_their_blocks_and_too_large_ones_are_refused(small):
    stream = endless(shape=(1,))
    for _ in range(6):
        stream.add(1.0)
    with stream._state.transaction() as connection:
        certificate = stream._part(connection, 2)
    limit = kernels.limit(1.0, certificate.drawing.grid, np.dtype(float))
    longest = min(limit, noise.longest_row(certificate)) * certificate.law.covariance.std
    with pytest.raises(InvalidInput, match="too large"):
        stream.add(1.001 * longest)
    assert longest > 1e9
    for _ in range(9):  # two blocks and a day
        stream.add(0.3 * longest)
    assert len(stream) == 15
    assert abs(stream.answer(14).value - 6 - 8 * 0.3 * longest) < 1e-4 * longest


def test_days_around_the_end_of_a_block_are_resumed(small, one_key, tmp_path):
    """Every day by another object, from the file alone, and some by another process: as one that was not resumed."""
    values = np.random.default_rng(7).uniform(0, 50, (24, 2))
    whole = endless(shape=(2,))
    expected = [whole.add(row) for row in values]
    path = tmp_path / "stream"
    endless(state=path, shape=(2,))
    for day, row in enumerate(values, 1):
        if day in (10, 14):  # ends of blocks, the second one of a part of totals too
            other_process(path, row)
        answer = Stream.resume(path).add(row, step=day)
        np.testing.assert_array_equal(answer.value, expected[day - 1].value)
        assert answer.standard_error == expected[day - 1].standard_error
    again = Stream.resume(path)
    for day, row in enumerate(values, 1):
        np.testing.assert_array_equal(again.add(row, step=day).value, expected[day - 1].value)
        np.testing.assert_array_equal(again.answer(day).value, expected[day - 1].value)
        with pytest.raises(InvalidInput, match="with another value"):
            again.add(row + 1, step=day)
    assert len(again) == 24


def other_process(path, row):
    code = (
        "from matrixdp.streams import Stream, noise\n"
        "noise.FIRST_PART, noise.LONGEST_PART = 2, 4\n"
        f"Stream.resume({str(path)!r}).add({row.tolist()!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_row_has_noise_of_its_own(small, monkeypatch):
    """No two rows, of days or of totals, have a purpose and a number in common: their noise comes from other keys."""
    found, derive_for = [], Key.derive_for

    def recorded(key, content, *index):
        found.append((content[:13], *index))
        return derive_for(key, content, *index)

    monkeypatch.setattr(Key, "derive_for", recorded)
    stream = endless(shape=(1,))
    for _ in range(31):
        stream.add(0.0)
    assert len(found) == len(set(found)) == 31 + 6


def test_private_sums_of_blocks_are_deleted_when_they_are_no_longer_needed(small, tmp_path):
    """Rows and sums of more than a page: overwritten at the end of a block, and after the last one of its part."""
    path = tmp_path / "stream"
    stream = endless(state=path, shape=(900,))
    present, carried, rows_left = [], [], []
    for _ in range(14):
        stream.add(np.full(900, 1234567.25))
        content = path.read_bytes()
        present.append([days for days in (1, 2, 3, 4) if np.float64(1234567.25 * days).tobytes() * 2 in content])
        with stream._state.transaction() as connection:
            rows_left += connection.execute("SELECT count(*) FROM carried").fetchone()
            if len(present) > 6:
                stored = connection.execute("SELECT number FROM carried_blocks ORDER BY number")
                carried.append([number for (number,) in stored])
    assert present[4:10] == [[1], [], [1], [1, 2], [1, 3], []]  # the row of the first day is needed to the end
    assert rows_left == [1, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert carried == [[0], [0], [0], [1], [0, 1], [0, 1], [0, 1], []]
    assert present[13] == []


def test_noise_of_another_version_is_refused(small, planted, tmp_path):
    """As a version without blocks left it: days of the same length, at all of mu."""
    path = tmp_path / "stream"
    planted("SHARES", {**noise.SHARES, "block": (1.0, 1.0)})
    stream = endless(state=path, shape=(1,))
    for _ in range(8):
        stream.add(1.0)
    planted("SHARES", SHARES)
    for attempt in (lambda: Stream.resume(path).add(1.0), lambda: Stream.resume(path).answer(8)):
        with pytest.raises(StreamError, match="with other noise"):
            attempt()
    assert len(Stream.resume(path)) == 8


SHARES = dict(noise.SHARES)


def predicted(day):
    """The standard error of a day by its parts; and by parts of one length, without blocks."""
    found = plain = 0.0
    for part in noise.parts(1, ONCE, BUDGET):
        made = noise.over_time(noise.of_part(part, 1, ONCE, BUDGET)).answer_variances("prefix")
        if part.level == "days":
            found += made[min(day - part.before, part.length) - 1]
            plain += made[-1]
            last, left = made, day - part.before - part.length
        elif part.level == "block":
            complete, days = divmod(left, part.length)
            found += made[days - 1] if days else 0.0
        elif part.before < complete:
            found += made[min(complete - part.before, part.length) - 1]
        else:
            break
    whole, rest = divmod(left, len(last))
    plain += whole * last[-1] + (last[rest - 1] if rest else 0.0)
    return math.sqrt(found), math.sqrt(plain)


def test_the_error_grows_with_the_logarithm():
    """Up to a million days: below log^(3/2), where parts of one length have an error that grows as the root."""
    days = (10**4, 10**5, 10**6)
    found, plain = zip(*map(predicted, days), strict=True)
    for day, error in zip(days, found, strict=True):
        assert error / found[0] <= (math.log(day) / math.log(days[0])) ** 1.5
    assert plain[2] / plain[0] > 7  # the root of 100 is 10
    assert found[0] < plain[0]
    assert found[2] < plain[2] / 6


def test_the_predicted_error_is_the_stated_one(small):
    stream = endless(shape=(1,))
    answers = [stream.add(0.0) for _ in range(40)]
    assert [answer.standard_error for answer in answers[6:]] == pytest.approx(
        [predicted(day)[0] for day in range(7, 41)]
    )
