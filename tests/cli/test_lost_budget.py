"""All that can fail is done before the spend: a release that cannot be written costs nothing."""

import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

from matrixdp import Budget, Ledger, certify, release
from matrixdp._compiled import compiled
from matrixdp.cli import files
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import Frobenius

BUDGET = ("--epsilon", "1", "--delta", "1e-7")
SUM = ("--query", "sum", "--norm", "1", *BUDGET)


@pytest.fixture
def ledger(tmp_path):
    (tmp_path / "account").mkdir()
    return Ledger(tmp_path / "account" / "budget.db", Budget(10.0, 1e-6))


@pytest.fixture
def costs_nothing(refused, people, ledger):
    """Calls a release that must be refused, and gives the line; nothing is charged and nothing left behind."""

    def invoke(*arguments, output="out.csv"):
        before = sorted(people.parent.iterdir())
        line = refused("release", people, *arguments, "--output", people.with_name(output), "--ledger", ledger.path)
        assert ledger.history() == []
        assert sorted(people.parent.iterdir()) == before
        return line

    return invoke


def stated(shape):
    return certify(Gaussian(Isotropic(shape, 1.0)), Frobenius(1.0))


def failing(*given, **named):
    raise PermissionError(1, "Operation not permitted")


def test_hard_links_are_not_needed(call, people, ledger, monkeypatch):
    monkeypatch.setattr(os, "link", failing)
    output = people.with_name("out.csv")
    result = call("release", people, *SUM, "--output", output, "--ledger", ledger.path)
    assert result.exit_code == 0, result.stderr
    assert len(ledger.history()) == 1
    assert np.loadtxt(output).shape == (2,)
    assert files.certificate_path(output).stat().st_size > 0


@pytest.mark.parametrize("step", ["TemporaryDirectory", "_fill", "os.open"])
def test_a_folder_that_cannot_be_written_to(costs_nothing, monkeypatch, step):
    opened = os.open

    def read_only(path, flags, *more, **named):
        return failing() if flags & os.O_CREAT and str(path).endswith(".json") else opened(path, flags, *more, **named)

    if step == "os.open":
        monkeypatch.setattr(os, "open", read_only)
    else:
        monkeypatch.setattr(files, step, failing)
    line = costs_nothing(*SUM)
    assert "cannot be written (Operation not permitted)" in line
    assert "nothing was released or charged" in line


@pytest.mark.parametrize("output", ["out.csv", "out.npy", "out.parquet"])
def test_a_disk_without_room(costs_nothing, output):
    """No file may grow beyond 400 kB, and 90,000 cells need more in any format."""
    cells = ("--query", "histogram", "--edges", "0:1:300", "--edges", "0:1:300", *BUDGET)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))
    try:
        line = costs_nothing(*cells, output=output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in line


def test_a_format_whose_library_is_missing(costs_nothing, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pyarrow cannot be imported" in costs_nothing(*SUM, output="out.parquet")


def test_noise_that_cannot_be_drawn(costs_nothing, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled.cache_clear()
    assert "numba cannot be imported" in costs_nothing(*SUM)


@pytest.mark.parametrize("mechanism", ["l2", "spherical", "r1smg"])
def test_noise_without_a_guarantee(costs_nothing, mechanism):
    line = costs_nothing("--query", "second-moment", "--norm", "1", *BUDGET, "--mechanism", mechanism)
    assert ("theorem that is false" if mechanism == "r1smg" else "not floating-point-safe") in line


@pytest.mark.parametrize("other", ["out.csv", "out.npy"])
def test_a_writer_that_comes_second_is_told_before_it_spends(costs_nothing, people, other):
    """Both names share one certificate."""
    with files.reserved(people.with_name("out.csv"), stated((2,))) as place:
        assert "a release reserves it now" in costs_nothing(*SUM, output=other)
        place.publish(np.zeros(2))
    assert np.loadtxt(place.output).shape == (2,)
    assert "exists already" in costs_nothing(*SUM)


def test_of_many_writers_one_is_charged(tmp_path, ledger):
    start, refusals = threading.Barrier(8), []

    def attempt():
        start.wait()
        try:
            with files.reserved(tmp_path / "out.npy", stated((2,))) as place:
                out = release(np.zeros(2), Frobenius(1.0), Budget(1.0, 1e-7), ledger=ledger)
                place.publish(out.value)
        except InvalidInput as reason:
            refusals.append(str(reason))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refusals) == 7
    assert all("exists already" in line for line in refusals)
    assert len(ledger.history()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["account", "out.certificate.json", "out.npy"]


def test_a_process_that_is_killed_leaves_no_half_matrix(tmp_path):
    """Its names stay reserved, and empty."""
    script = (
        "import os, numpy, pathlib; from matrixdp.cli import files\n"
        "from matrixdp import Frobenius, calibrate, certify, Budget\n"
        "law = calibrate('analytic', shape=(2,), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6))\n"
        "def die(*_): os._exit(7)\n"
        "files._write_certificate = die\n"
        "stated = certify(law, Frobenius(1.0))\n"
        "with files.reserved(pathlib.Path('out.csv'), stated) as place: place.publish(numpy.ones(2))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False).returncode == 7
    assert (tmp_path / "out.csv").stat().st_size == 0
    assert (tmp_path / "out.certificate.json").stat().st_size == 0
    with pytest.raises(InvalidInput, match="remove it if none is running"):
        files.check_free(tmp_path / "out.csv")


@pytest.mark.parametrize("suffix", files.FORMATS)
@pytest.mark.parametrize("shape", [(1,), (5000,), (1, 700), (700, 1), (200, 300), (200_000, 1)])
def test_the_space_that_is_reserved_is_enough(tmp_path, shape, suffix):
    value = -np.random.default_rng(0).random(shape) * 1e-300  # as many digits as there can be
    with files.reserved(tmp_path / f"out{suffix}", stated(shape)) as place:
        room = place.drafts[place.output].stat().st_size
        place.publish(value)
    assert place.output.stat().st_size <= room


def test_a_failure_after_the_spend_says_that_it_was_charged(call, people, ledger, monkeypatch):
    monkeypatch.setattr(files, "_write_certificate", failing)
    result = call("release", people, *SUM, "--output", people.with_name("out.csv"), "--ledger", ledger.path)
    assert result.exit_code == 2
    assert "has been charged" in result.stderr
