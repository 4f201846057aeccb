"""The loaders: what they refuse without data, and what they read with it."""

import gzip
import os

import numpy as np
import pytest

from matrixdp import datasets
from matrixdp.errors import InvalidInput

LOADERS = {
    datasets.load_uber: datasets.UBER,
    datasets.load_mnist: datasets.MNIST[0],
    datasets.load_cardiotocography: datasets.CARDIOTOCOGRAPHY,
    datasets.load_liver: datasets.LIVER,
    datasets.load_movement: datasets.MOVEMENT,
    datasets.load_swarm: datasets.SWARM,
}


def by_name(loader):
    return loader.__name__


@pytest.fixture
def folder():
    found = os.environ.get(datasets.VARIABLE)
    if not found:
        pytest.skip(f"NO DATA: set {datasets.VARIABLE} to the folder with the public data sets to run this test")
    return found


@pytest.mark.parametrize("loader", LOADERS, ids=by_name)
def test_a_missing_file_says_where_it_is_published_and_changes_nothing(loader, tmp_path):
    with pytest.raises(InvalidInput) as refusal:
        loader(tmp_path)
    for part in (LOADERS[loader].name, LOADERS[loader].page, str(tmp_path)):
        assert part in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loader", [x for x in LOADERS if LOADERS[x].sha256], ids=by_name)
def test_a_file_with_another_content_is_refused(loader, tmp_path):
    path = tmp_path / LOADERS[loader].name
    path.write_bytes(gzip.compress(b"1,2\n3,4\n") if path.suffix == ".gz" else b"1,2\n3,4\n")
    with pytest.raises(InvalidInput, match="sha256"):
        loader(tmp_path)


def test_a_damaged_archive_is_refused(tmp_path):
    (tmp_path / datasets.UBER.name).write_bytes(gzip.compress(b"x" * 1000)[:-20])
    with pytest.raises(InvalidInput, match="cannot be read"):
        datasets.load_uber(tmp_path)


def test_the_folder_comes_from_the_argument_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(datasets.VARIABLE, raising=False)
    with pytest.raises(InvalidInput, match=datasets.VARIABLE):
        datasets.find()
    monkeypatch.setenv(datasets.VARIABLE, str(tmp_path))
    assert datasets.find() == tmp_path
    with pytest.raises(InvalidInput, match="does not exist"):
        datasets.find(tmp_path / "nowhere")
    assert not datasets.has(datasets.SWARM)


def swarm(path, rows, columns=2401):
    table = np.c_[np.random.default_rng(0).normal(size=(rows, columns - 1)), np.arange(rows) % 2]
    np.savetxt(path / datasets.SWARM.name, table, delimiter=",", header=",".join(map(str, range(columns))), comments="")


def test_swarm_is_read_when_it_is_there(tmp_path):
    swarm(tmp_path, rows=4)
    assert datasets.has(datasets.SWARM, tmp_path)
    found = datasets.load_swarm(tmp_path)
    assert found.records.shape == (4, 2400)
    assert found.label.tolist() == [0, 1, 0, 1]


def test_swarm_of_another_form_is_refused(tmp_path):
    swarm(tmp_path, rows=4, columns=2400)
    with pytest.raises(InvalidInput, match="2400 columns"):
        datasets.load_swarm(tmp_path)
    swarm(tmp_path, rows=4)
    path = tmp_path / datasets.SWARM.name
    written = path.read_text()
    path.write_text(written.replace("\n", "\nword", 1))
    with pytest.raises(InvalidInput, match="1 cells that are no numbers"):
        datasets.load_swarm(tmp_path)
    path.write_text(written + "1,2,3\n" + written.splitlines()[1] + ",0\n")
    with pytest.raises(InvalidInput, match="not a table"):
        datasets.load_swarm(tmp_path)


def test_uber(folder):
    pickups = datasets.load_uber(folder)
    assert len(pickups.time) == 564_516
    first = (pickups.base == "B02512") & (pickups.time < np.datetime64("2014-04-04"))
    assert first.sum() == 3829
    assert first[:3829].all()
    assert pickups.time[0] == np.datetime64("2014-04-01T00:11:00")


def test_mnist(folder):
    train, test = datasets.load_mnist(folder), datasets.load_mnist(folder, test=True)
    assert train.records.shape == (60_000, 784)
    assert test.records.shape == (10_000, 784)
    assert train.records.mean() == pytest.approx(0.1307, abs=1e-4)
    assert np.bincount(train.label).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_the_small_sets(folder):
    heart, liver, movement = (load(folder) for load in (
        datasets.load_cardiotocography, datasets.load_liver, datasets.load_movement))  # fmt: skip
    assert heart.records.shape == (2126, 21)
    assert np.bincount(heart.label).tolist() == [0, 1655, 295, 176]
    assert liver.shape == (345, 6)
    assert liver[:, -1].max() == 20
    assert movement.rss.shape == (13197, 4)
    assert np.abs(movement.rss).max() == 1
    assert np.flatnonzero(movement.sequence == 80)[-1] == 2020
