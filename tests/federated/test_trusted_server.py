"""Central privacy without Flower: what one client can change, whom a round asks, and what is charged."""

import copy
import json
import math
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from matrixdp import Accountant, Budget, Ledger
from matrixdp.adjacency import ZERO_OUT
from matrixdp.errors import BudgetExceeded, InvalidInput, MatrixDPError, StreamError
from matrixdp.federated import CentralPrivacy, TrustedServer, trusted_server

BUDGET = Budget(3.0, 1e-5)
SIZE = 5


def privacy(**changes):
    return CentralPrivacy(**{"budget": BUDGET, "rounds": 6, "clients": 10, "clip": 0.5, **changes})


def updates(number, step, size=SIZE):
    return np.random.default_rng([number, step]).normal(size=size)


@pytest.fixture
def no_noise(monkeypatch):
    """The sums of the rounds, before the noise."""

    monkeypatch.setattr(trusted_server, "draw", lambda total, law, drawing: total)
    monkeypatch.setattr(trusted_server._OverRounds, "added", lambda self, total: total)


def sums(server, liar=None, lies=None):
    """What each round sums up, where one client sends something else, or nothing."""
    rows = []
    for step in range(server.privacy.rounds):
        sent = {n: updates(n, step) for n in server.choose(range(server.privacy.clients))}
        if liar in sent:
            sent.pop(liar)
            if lies is not None:
                sent[liar] = lies[step % len(lies)]
        rows.append(server.finish(sent)[0] * server.privacy.cohort)
    return np.array(rows)


LIES = [
    np.full(SIZE, 1e6),
    np.full(SIZE, 1e300),
    np.full(SIZE, np.nan),
    np.array([np.inf, *np.zeros(SIZE - 1)]),
    np.zeros(SIZE + 1),
    np.array(["a"] * SIZE),
    np.full(SIZE, 1e-320),
    [1.0] * SIZE,
    None,
]


@pytest.mark.parametrize("settings", [{}, {"separation": 2}, {"separation": 2, "times": 2, "mechanism": "toeplitz"}])
def test_a_client_that_lies_changes_no_more_than_the_certificate_says(no_noise, settings):
    agreed = privacy(rounds=9, **settings)
    change = sums(TrustedServer(agreed, SIZE), 3, LIES) - sums(TrustedServer(agreed, SIZE), 3)
    norms = np.linalg.norm(change, axis=1)
    assert np.all(norms <= agreed.radius)
    assert norms.max() >= agreed.clip * (1 - 1e-9)
    if agreed.participation is not None:
        assert agreed.participation.contains(change)


def test_lies_are_named_and_count_as_zero(no_noise):
    for lie in (LIES[2], LIES[3], LIES[4], LIES[5], LIES[7], LIES[8]):
        server = TrustedServer(privacy(), SIZE)
        server.choose(range(10))
        mean, refused = server.finish({0: np.full(SIZE, 0.1), 1: lie})
        assert list(refused) == [1]
        assert np.allclose(mean, 0.01)


def test_the_denominator_is_public(no_noise):
    """A client that does not answer leaves it as it is."""
    server = TrustedServer(privacy(), SIZE)
    server.choose(range(10))
    assert np.allclose(server.finish({0: np.full(SIZE, 0.1)})[0], 0.1 / 10)
    server.choose(range(4))
    assert np.allclose(server.finish({n: np.full(SIZE, 0.1) for n in range(4)})[0], 0.4 / 10)
    assert privacy(sampling_rate=0.25).cohort == 2.5
    assert privacy(separation=3).cohort == 4


def test_a_round_without_any_client_has_noise_like_the_others():
    server = TrustedServer(privacy(sampling_rate=1e-3), 20000)
    assert server.choose([]) == []
    assert is_std(server.finish({})[0], server.certificate.law.covariance.std / 0.01)


def is_std(values, std, alarms=2e-7):
    """Whether so many normal numbers may have this standard deviation; a false no with probability `alarms`."""
    low, high = stats.chi2.ppf([alarms / 2, 1 - alarms / 2], values.size - 1)
    return low < values.size * np.var(values) / std**2 < high


def test_noise_has_the_size_that_is_certified():
    for settings in ({}, {"sampling_rate": 0.2}):
        server = TrustedServer(privacy(**settings), 20000)
        server.choose(range(10))
        std = server.certificate.law.covariance.std
        noise = server.finish({})[0] * server.privacy.cohort
        assert is_std(noise, std)
        assert not is_std(0.95 * noise, std)
        assert server.certificate.mu >= server.privacy.clip / std


def test_noise_is_correlated_over_separated_rounds():
    server, rows = TrustedServer(privacy(separation=3, rounds=12), 4000), []
    for _ in range(12):
        server.choose([])
        rows.append(server.finish({})[0] * server.privacy.cohort)
    law = server.certificate.law.covariance
    assert law.bands > 1
    for values, variances in (
        (np.array(rows), law.variances()[:, 0]),
        (np.cumsum(rows, axis=0), law.answer_variances("prefix")),
    ):
        assert all(is_std(row, math.sqrt(v), alarms=2e-8) for row, v in zip(values, variances, strict=True))


def test_all_rounds_together_keep_the_budget():
    for settings in ({}, {"sampling_rate": 0.1}, {"separation": 2}):
        server = TrustedServer(privacy(**settings), SIZE)
        total = Accountant()
        rate = server.privacy.sampling_rate
        total.add(server.certificate, 6 if server.privacy.separation is None else 1, rate)
        assert total.delta(BUDGET.epsilon) <= BUDGET.delta
        assert 2.8 < server.guarantees.epsilon <= BUDGET.epsilon
    full, sampled = (TrustedServer(privacy(sampling_rate=q), SIZE).certificate.law.covariance.std for q in (1.0, 0.1))
    assert sampled < 0.5 * full


def test_clients_are_sampled_one_by_one_and_in_secret():
    agreed = privacy(clients=1000, rounds=200, sampling_rate=0.1, clip=1.0)
    server, asked = TrustedServer(agreed, 1), []
    for _ in range(200):
        asked.append(server.choose(range(500)))  # the others are away
        server.finish({})
    counts = np.array([len(chosen) for chosen in asked])
    assert max(map(max, asked)) < 500
    # sums of 100,000 coins, and of 500: false alarms 6e-7 and 2e-7
    assert abs(counts.sum() - 10000) < 5 * math.sqrt(9000)
    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], 199)
    assert low < 200 * counts.var() / 45 < high  # 45 for coins; 0 for a fixed number
    again = TrustedServer(agreed, 1)
    assert again.choose(range(500)) != asked[0]


def test_a_client_is_asked_as_often_as_agreed_and_no_sooner():
    server = TrustedServer(privacy(rounds=12, separation=3, times=3), SIZE)
    rounds = []
    for number in range(1, 13):
        if 4 in server.choose([4]):
            rounds.append(number)
        _, refused = server.finish({4: np.zeros(SIZE)})
        if rounds[-1] != number:
            assert refused == {4: "is back too early, or too often"}
    assert rounds == [1, 4, 7]


def test_rounds_go_to_those_that_have_waited_longest():
    server = TrustedServer(privacy(rounds=6, separation=3), SIZE)
    asked = []
    for _ in range(6):
        asked.append(server.choose(range(10)))
        server.finish({})
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("ends", ["by another round", "by an error"])
def test_a_round_that_is_not_finished_does_not_bring_a_client_back_earlier(ends, monkeypatch):
    """It has no row in the matrix of sums, so it must not count for the distance between two rounds."""
    server = TrustedServer(privacy(rounds=6, clients=2, separation=2), SIZE)
    assert server.choose([0]) == [0]
    server.finish({0: np.zeros(SIZE)})
    assert server.choose([1]) == [1]
    if ends == "by an error":
        with monkeypatch.context() as patch:
            patch.setattr(server._noise, "added", lambda total: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                server.finish({})
    assert server.choose([0]) == []
    server.finish({})
    assert server.choose([0]) == [0]
    server.finish({})
    assert server.round == server._noise.rounds == 3


def test_all_rounds_are_charged_at_once_and_for_clients(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    server = TrustedServer(privacy(sampling_rate=0.5), SIZE, ledger=ledger)
    assert ledger.history() == []
    server.choose([])
    (entry,) = ledger.history()
    assert (entry.unit, entry.planned, entry.sampling_rate) == ("client", 6, 0.5)
    assert server.guarantees.epsilon == pytest.approx(ledger.spent(), rel=1e-6)
    server.finish({})
    server.choose([])
    assert server.guarantees.epsilon == pytest.approx(ledger.spent(), rel=1e-6)
    with pytest.raises(BudgetExceeded):
        TrustedServer(privacy(sampling_rate=0.5), SIZE, ledger=ledger).choose([])


def test_separated_rounds_are_charged_once(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET, adjacency=ZERO_OUT)
    server = TrustedServer(privacy(separation=2), SIZE, ledger=ledger)
    for _ in range(3):
        server.choose(range(10))
        server.finish({})
    assert [entry.unit for entry in ledger.history()] == ["client"]
    with pytest.raises(InvalidInput, match="series is for rounds that are not separated"):
        TrustedServer(privacy(separation=2), SIZE, ledger=ledger, series="run")


KILLED = """
import os, signal, sys
from matrixdp import Budget, Ledger
from matrixdp.federated import CentralPrivacy, TrustedServer, trusted_server

drawn = trusted_server.draw
def draw(*arguments):
    if server.round == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return drawn(*arguments)
trusted_server.draw = draw
privacy = CentralPrivacy(budget=Budget(3.0, 1e-5), rounds=6, clients=10, clip=0.5)
server = TrustedServer(privacy, 5, ledger=Ledger(sys.argv[1], privacy.budget), series="run")
for _ in range(2):
    server.choose(range(10))
    print(server.finish({})[0].tolist(), flush=True)
"""


@pytest.mark.slow
def test_a_server_that_was_killed_has_the_rounds_that_are_left(tmp_path):
    """It is killed between the charge of its second round and the noise."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "budget.db")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (released,) = ended.stdout.splitlines()
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    assert len(ledger.history()) == 2
    again = TrustedServer(privacy(), SIZE, ledger=ledger, series="run")
    means = [json.loads(released)]
    for number in range(3, 7):
        again.choose(range(10))
        assert again.round == number
        means.append(again.finish({})[0].tolist())
    assert len(np.unique(means, axis=0)) == 5  # no noise serves twice; one equal coordinate has a chance of 0.5 %
    assert sum(entry.count for entry in ledger.history()) == 6
    assert ledger.spent() <= BUDGET.epsilon
    with pytest.raises(BudgetExceeded, match="all were used"):
        again.choose(range(10))
    with pytest.raises(BudgetExceeded, match="all were used"):
        TrustedServer(privacy(), SIZE, ledger=ledger, series="run").choose(range(10))


def test_two_servers_of_one_series_have_its_rounds_together(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    servers = [TrustedServer(privacy(), SIZE, ledger=ledger, series="run") for _ in range(2)]
    for step in range(6):
        servers[step % 2].choose(range(10))
        servers[step % 2].finish({})
    for server in servers:
        with pytest.raises(BudgetExceeded):
            server.choose(range(10))
    with pytest.raises(MatrixDPError):  # other noise is another plan
        TrustedServer(privacy(clip=0.4), SIZE, ledger=ledger, series="run").choose(range(10))


def test_the_guarantee_names_the_unit_and_who_is_trusted():
    text = str(TrustedServer(privacy(), SIZE).guarantees)
    assert "client-level: epsilon 2.99" in text
    assert "one client added or removed" in text
    assert "record-level: not stated" in text
    assert "trusted: the server" in text
    assert "replaced by zero" in str(TrustedServer(privacy(separation=2), SIZE).guarantees)


def test_more_rounds_than_planned_are_refused():
    server = TrustedServer(privacy(rounds=1), SIZE)
    with pytest.raises(InvalidInput, match="choose whom to ask"):
        server.finish({})
    server.choose([])
    server.finish({})
    with pytest.raises(InvalidInput, match="finished once"):
        server.finish({})
    with pytest.raises(BudgetExceeded, match="all were used"):
        server.choose([])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"budget": 3.0}, "budget must be a Budget"),
        ({"rounds": 0}, "rounds must be"),
        ({"clients": -1}, "clients must be"),
        ({"clip": math.nan}, "clip must be"),
        ({"sampling_rate": 0.0}, "sampling_rate must be above 0"),
        ({"sampling_rate": math.nan}, "sampling_rate must be"),
        ({"separation": 7}, "separation must be at most"),
        ({"separation": 2, "sampling_rate": 0.5}, "exclude each other"),
        ({"times": 2}, "give separation="),
        ({"mechanism": "banded"}, "give separation="),
        ({"separation": 2, "times": 0}, "times must be"),
    ],
)
def test_settings_that_cannot_work_say_so(changes, text):
    with pytest.raises(InvalidInput, match=text):
        privacy(**changes)


def test_a_forked_process_releases_no_round(monkeypatch):
    """Each child would release the same updates with noise of its own, for one charge."""
    server = TrustedServer(privacy(), SIZE)
    server.choose(range(10))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        for attempt in (lambda: server.finish({}), lambda: server.choose(range(10))):
            with pytest.raises(InvalidInput, match="the server belongs to process"):
                attempt()
    assert server.round == 1
    server.finish({})


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_server_cannot_be_copied(duplicate):
    with pytest.raises(TypeError, match="paid for once"):
        duplicate(TrustedServer(privacy(), SIZE))


def test_an_update_beyond_doubles_counts_as_zero(no_noise):
    server = TrustedServer(privacy(), SIZE)
    server.choose(range(10))
    mean, refused = server.finish({0: np.full(SIZE, np.longdouble(10) ** 4000), 1: np.full(SIZE, 0.1)})
    assert refused == {0: "sent an update that is not finite"}
    np.testing.assert_allclose(mean * server.privacy.cohort, 0.1)


# --- separated rounds with a state ---


def durable(folder, **changes):
    settings = {"rounds": 6, "separation": 3, "mechanism": "toeplitz", **changes}
    ledger = settings.pop("ledger", None) or Ledger(folder / "ledger", Budget(3.5, 1e-5))
    return TrustedServer(privacy(**settings), SIZE, ledger=ledger, state=folder / "rounds")


def one_round(server):
    asked = server.choose(range(10))
    return asked, server.finish({n: updates(n, server.round) for n in asked})[0]


def test_a_server_that_dies_goes_on_with_the_next_round(tmp_path):
    """Nobody is asked too early, no round is released twice, and all are charged once."""
    asked, means = zip(*(one_round(durable(tmp_path)) for _ in range(6)), strict=True)
    last = durable(tmp_path)
    for number, mean in enumerate(means, start=1):
        np.testing.assert_array_equal(last.published(number), mean)
    with pytest.raises(BudgetExceeded):
        last.choose(range(10))
    assert len(Ledger(tmp_path / "ledger").history()) == 1
    for first in range(4):
        three = [client for clients in asked[first : first + 3] for client in clients]
        assert len(three) == len(set(three))


def test_a_round_that_was_asked_but_not_finished_is_begun_again(tmp_path):
    first = durable(tmp_path)
    asked = first.choose(range(10))
    again = durable(tmp_path)
    assert again.round == 0
    assert again.choose(range(10)) == asked
    again.finish({n: updates(n, 1) for n in asked})
    with pytest.raises(InvalidInput, match="step 1 was released with another value"):
        first.finish({n: updates(n, 2) for n in asked})
    third = durable(tmp_path)
    third._asked.write(2, [7])
    assert 7 not in third._asked_at
    third.choose(set(range(10)) - {7})
    assert 7 in third._asked.rounds()[1]


def test_rounds_do_not_begin_anew_when_one_of_two_files_is_lost(tmp_path):
    """New noise under the charge for the first run would be a second run for nothing; both lost: a new charge."""
    noise, asked = tmp_path / "rounds", tmp_path / "rounds.asked"
    for _ in range(6):
        one_round(durable(tmp_path))
    for lost, text in ((noise, "rounds is lost"), (asked, "fewer rounds than were released")):
        kept = lost.rename(tmp_path / "kept")
        there = sorted(tmp_path.iterdir())
        with pytest.raises(StreamError, match=text):
            durable(tmp_path)
        assert sorted(tmp_path.iterdir()) == there  # an error leaves nothing
        kept.rename(lost)
        assert durable(tmp_path).round == 6
    assert len(Ledger(tmp_path / "ledger").history()) == 1
    noise.unlink()
    kept = asked.rename(tmp_path / "kept")
    with pytest.raises(BudgetExceeded):
        durable(tmp_path)
    kept.rename(asked)
    with pytest.raises(InvalidInput, match="another file of noise"):
        durable(tmp_path)


def test_states_of_rounds_that_do_not_fit_are_refused(tmp_path):
    one_round(durable(tmp_path))
    earlier = (tmp_path / "rounds.asked").read_bytes()
    one_round(durable(tmp_path))
    for changes in ({"clip": 0.25}, {"clients": 11}, {"rounds": 7}, {"separation": 2}, {"mechanism": "banded"}):
        with pytest.raises(InvalidInput, match="other settings"):
            durable(tmp_path, **changes)
    with pytest.raises(InvalidInput, match="another ledger"):
        durable(tmp_path, ledger=Ledger(tmp_path / "second", BUDGET))
    (tmp_path / "rounds.asked").write_bytes(earlier)
    with pytest.raises(StreamError, match="reset to an earlier state"):
        durable(tmp_path)
    (tmp_path / "rounds.asked.mark").unlink()
    with pytest.raises(StreamError, match="fewer rounds than were released"):
        durable(tmp_path)
    with pytest.raises(InvalidInput, match="state is for separated rounds"):
        TrustedServer(privacy(), SIZE, state=tmp_path / "others")
    with pytest.raises(InvalidInput, match="separated round that was finished"):
        TrustedServer(privacy(separation=2), SIZE).published(1)
