"""The loaders: what they refuse without data, and what they read with it."""

import gzip
import os
from dataclasses import replace

import numpy as np
import pytest
from scipy.io import savemat

from matrixdp.errors import InvalidInput
from matrixdp_papers import datasets

LOADERS = {
    datasets.load_uber: datasets.UBER,
    datasets.load_mnist: datasets.MNIST[0],
    datasets.load_cardiotocography: datasets.CARDIOTOCOGRAPHY,
    datasets.load_liver: datasets.LIVER,
    datasets.load_movement: datasets.MOVEMENT,
    datasets.load_swarm: datasets.SWARM,
    datasets.load_adult: datasets.ADULT[0],
    datasets.load_cifar10: datasets.CIFAR10[0],
    datasets.load_svhn: datasets.SVHN[0],
    datasets.load_location: datasets.LOCATION,
    datasets.load_purchase100: datasets.PURCHASE100,
    datasets.load_texas100: datasets.TEXAS100[0],
    datasets.load_cora: datasets.CORA,
    datasets.load_imdb: datasets.IMDB[0],
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


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Lets a loader read a small file that the test writes, whatever its sum."""

    def allow(module, name):
        place = f"matrixdp_papers.datasets.{module}.{name}"
        source = getattr(datasets, name)
        if isinstance(source, tuple):
            monkeypatch.setattr(place, tuple(replace(one, sha256=None) for one in source))
        else:
            monkeypatch.setattr(place, replace(source, sha256=None))
        return tmp_path

    return allow


@pytest.mark.parametrize(
    ("loader", "sources"),
    [
        (datasets.load_adult, datasets.ADULT),
        (datasets.load_cifar10, datasets.CIFAR10),
        (datasets.load_svhn, datasets.SVHN),
        (datasets.load_imdb, datasets.IMDB),
    ],
)
def test_the_test_set_has_a_file_of_its_own(loader, sources, tmp_path):
    with pytest.raises(InvalidInput, match=sources[1].name):
        loader(tmp_path, test=True)


PERSON = {
    "age": 50, "workclass": "State-gov", "fnlwgt": 750_000, "education": "Masters", "education-num": 16,
    "marital-status": "Widowed", "occupation": "Sales", "relationship": "Wife", "race": "Other", "sex": "Male",
    "capital-gain": 99_999, "capital-loss": 0, "hours-per-week": 99, "native-country": "Peru", "income": ">50K",
}  # fmt: skip


def adult(path, *people):
    lines = [PERSON, *({**PERSON, **person}.values() for person in people)]
    text = "\n".join(",".join(map(str, line)) for line in lines)
    (path / datasets.ADULT[0].name).write_bytes(gzip.compress(text.encode()))


def test_adult_is_encoded_by_public_lists_and_ranges_alone(made_up):
    path = made_up("adult", "ADULT")
    adult(path, {}, {"workclass": "?", "occupation": "?", "native-country": "?", "income": "<=50K"}, {"age": 300})
    found = datasets.load_adult(path)
    assert found.records.shape == (3, 105)
    assert found.label.tolist() == [1, 0, 1]
    columns = datasets.ADULT_COLUMNS
    numbers = {"age": 0.5, "fnlwgt": 0.5, "education-num": 1, "capital-gain": 1, "capital-loss": 0, "hours-per-week": 1}
    for name, values in datasets.ADULT_ATTRIBUTES.items():
        wanted = [numbers[name]] if name in numbers else [float(PERSON[name] == value) for value in values]
        assert found.records[0, columns[name]].tolist() == wanted
    missing = [columns[name] for name in ("workclass", "occupation", "native-country")]
    assert all(np.all(found.records[1, one] == 0) for one in missing)
    assert found.records[0].sum() - found.records[1].sum() == 3
    # Out of its range a number is cut, and a record changes no row but its own.
    assert found.records[2, columns["age"]] == 1
    assert np.array_equal(np.delete(found.records[2], columns["age"]), np.delete(found.records[0], columns["age"]))


def test_the_halves_of_adult_are_seven_attributes_each():
    names, (first, second) = list(datasets.ADULT_COLUMNS), datasets.ADULT_TWO_PARTS
    assert len(names) == 14
    assert (first.start, first.stop) == (0, datasets.ADULT_COLUMNS[names[6]].stop) == (0, 48)
    assert (second.start, second.stop) == (datasets.ADULT_COLUMNS[names[7]].start, 105) == (48, 105)
    assert datasets.ADULT_COLUMNS[names[-1]].stop == 105


@pytest.mark.parametrize("change", [{"race": "Martian"}, {"income": "?"}, {"sex": ""}])
def test_a_category_that_no_list_has_is_refused(made_up, change):
    path = made_up("adult", "ADULT")
    adult(path, {}, change)
    with pytest.raises(InvalidInput, match=f"unknown value as {next(iter(change))} in record 1"):
        datasets.load_adult(path)


def test_reviews_are_cut_or_padded_in_front(made_up):
    path = made_up("texts", "IMDB")
    tokens = np.arange(2, 12, dtype=np.uint16)
    np.savez(path / datasets.IMDB[0].name, tokens=tokens, offsets=[0, 1, 1, 5, 10], label=[0, 0, 1, 1])
    found = datasets.load_imdb(path, length=4)
    assert found.records.tolist() == [[0, 0, 0, 2], [0, 0, 0, 0], [3, 4, 5, 6], [8, 9, 10, 11]]
    assert found.records.dtype == found.label.dtype == np.int64
    with pytest.raises(InvalidInput, match="length"):
        datasets.load_imdb(path, length=0)


def test_a_graph_and_places_are_unpacked(made_up):
    path = made_up("graphs", "CORA")
    indices = {"train_index": [0], "val_index": [1], "test_index": [2]}
    np.savez(path / datasets.CORA.name, feature_indptr=[0, 2, 2, 3], feature_indices=[0, 3, 1], n_features=4,
             label=[6, 0, 1], edges=[[0, 2]], **indices)  # fmt: skip
    graph = datasets.load_cora(path)
    assert graph.features.tolist() == [[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert [part.tolist() for part in graph[1:]] == [[6, 0, 1], [[0, 2]], [0], [1], [2]]
    made_up("binary", "LOCATION")
    np.savez(path / datasets.LOCATION.name, features_packed=np.array([[192, 64]], np.uint8), n_features=10, label=[30])
    places = datasets.load_location(path)
    assert places.records.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 0, 1]]
    assert places.label.tolist() == [29]


def test_colours_come_first(made_up):
    path = made_up("pictures", "CIFAR10")
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    np.savez(path / datasets.CIFAR10[0].name, images=images, labels=np.array([3, 9], np.uint8))
    found = datasets.load_cifar10(path)
    assert found.records.shape == (2, 3, 32, 32)
    assert found.records.dtype == np.float32
    assert found.records[1, 2, 5, 7] == np.float32(images[1, 5, 7, 2]) / np.float32(255)
    assert found.label.tolist() == [3, 9]


def svhn(path, images=None, **changes):
    images = np.zeros((32, 32, 3, 4), np.uint8) if images is None else images
    arrays = {"X": images, "y": np.array([[1], [10], [9], [2]], np.uint8), **changes}
    savemat(path / datasets.SVHN[0].name, {name: array for name, array in arrays.items() if array is not None})


def test_house_numbers_are_read_when_they_are_there(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    svhn(tmp_path, images)
    found = datasets.load_svhn(tmp_path)
    assert found.records.shape == (4, 3, 32, 32)
    assert found.records[3, 2, 5, 7] == np.float32(images[5, 7, 2, 3]) / np.float32(255)
    assert found.label.tolist() == [1, 0, 9, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"images": np.zeros((32, 32, 3, 5), np.uint8)},
        {"images": np.zeros((32, 32, 1, 4), np.uint8)},
        {"images": np.zeros((4, 3072), np.uint8)},
        {"images": np.zeros((32, 32, 3, 4))},
        {"y": np.array([[1], [11], [9], [2]])},
        {"y": np.array([[1], [0], [9], [2]])},
        {"y": np.array([[1], [np.nan], [9], [2]])},
        {"images": np.zeros((32, 32, 3, 0), np.uint8), "y": np.zeros((0, 1))},
    ],
)
def test_house_numbers_of_another_form_are_refused(tmp_path, changes):
    svhn(tmp_path, **changes)
    with pytest.raises(InvalidInput, match="must hold X"):
        datasets.load_svhn(tmp_path)


def test_house_numbers_that_are_damaged_are_refused(tmp_path):
    svhn(tmp_path, y=None)
    with pytest.raises(InvalidInput, match="no array X or y"):
        datasets.load_svhn(tmp_path)
    svhn(tmp_path)
    path = tmp_path / datasets.SVHN[0].name
    whole = path.read_bytes()
    for part in (b"", whole[:100], whole[:200], whole[:-70], b"<html>" * 100):
        path.write_bytes(part)
        with pytest.raises(InvalidInput, match=r"cannot be read|no array"):
            datasets.load_svhn(tmp_path)


def bits(rows, columns):
    return np.random.default_rng(0).integers(0, 2, (rows, columns))


def write(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(path, table, fmt="%g", delimiter=",")


def test_purchases_are_read_when_they_are_there(tmp_path):
    goods = bits(3, 600)
    write(tmp_path / "dataset_purchase", np.c_[[1, 100, 7], goods])
    found = datasets.load_purchase100(tmp_path)
    assert np.array_equal(found.records, goods)
    assert found.records.dtype == np.float32
    assert found.label.tolist() == [0, 99, 6]


@pytest.mark.parametrize("features", [6169, 6170])
def test_hospital_stays_are_read_when_they_are_there(tmp_path, features):
    stays = bits(3, features)
    write(tmp_path / "texas/100/feats", stays)
    with pytest.raises(InvalidInput, match="texas/100/labels"):
        datasets.load_texas100(tmp_path)
    write(tmp_path / "texas/100/labels", [100, 1, 50])
    found = datasets.load_texas100(tmp_path)
    assert np.array_equal(found.records, stays)
    assert found.label.tolist() == [99, 0, 49]
    write(tmp_path / "texas/100/labels", [100, 1])
    with pytest.raises(InvalidInput, match="cut short"):
        datasets.load_texas100(tmp_path)


@pytest.mark.parametrize(
    ("row", "column", "value", "words"),
    [
        (1, 5, 2, "1 entries neither"),
        (1, 5, -1, "1 entries neither"),
        (1, 5, 257, "whole numbers"),
        (1, 5, 0.5, "whole numbers"),
        (1, 5, np.nan, "whole numbers"),
        (0, 0, 0, "other classes"),
        (0, 0, 101, "other classes"),
    ],
)
def test_cells_of_another_form_are_refused(tmp_path, row, column, value, words):
    table = np.c_[[1, 2, 3], bits(3, 600)].astype(float)
    table[row, column] = value
    write(tmp_path / "dataset_purchase", table)
    with pytest.raises(InvalidInput, match=words):
        datasets.load_purchase100(tmp_path)


def test_tables_of_another_width_are_refused(tmp_path):
    write(tmp_path / "dataset_purchase", np.c_[[1, 2, 3], bits(3, 599)])
    with pytest.raises(InvalidInput, match="got 599 features"):
        datasets.load_purchase100(tmp_path)
    write(tmp_path / "dataset_purchase", np.c_[[1, 2, 3], bits(3, 600)])
    whole = (tmp_path / "dataset_purchase").read_bytes()
    for part in (b"", whole[:-100], whole + b"1,0,1" * 700):
        (tmp_path / "dataset_purchase").write_bytes(part)
        with pytest.raises(InvalidInput, match="not a table"):
            datasets.load_purchase100(tmp_path)


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


def test_adult(folder):
    train, test = datasets.load_adult(folder), datasets.load_adult(folder, test=True)
    assert train.records.shape == (32_561, 105)
    assert test.records.shape == (16_281, 105)
    assert np.bincount(train.label).tolist() == [24_720, 7841]
    assert np.bincount(test.label).tolist() == [12_435, 3846]
    for found, missing in ((train, 2399), (test, 1221)):
        assert found.records.min() == 0
        assert found.records.max() == 1
        categories = [datasets.ADULT_COLUMNS[x] for x, v in datasets.ADULT_ATTRIBUTES.items() if isinstance(v, list)]
        present = np.stack([found.records[:, one].sum(axis=1) for one in categories])
        assert set(present.ravel()) == {0, 1}
        assert np.sum(present.min(axis=0) == 0) == missing


def test_cifar10(folder):
    train, test = datasets.load_cifar10(folder), datasets.load_cifar10(folder, test=True)
    assert train.records.shape == (10_000, 3, 32, 32)
    assert test.records.shape == (2000, 3, 32, 32)
    assert np.bincount(train.label).tolist() == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    # The means of the colours over the whole set are known.
    assert train.records.mean(axis=(0, 2, 3), dtype=float) == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-3)


def test_imdb(folder):
    for test in (False, True):
        found = datasets.load_imdb(folder, test=test)
        assert found.records.shape == (25_000, 200)
        assert 0 < found.records.max() < datasets.IMDB_CODES
        assert found.records[:, -1].min() > 0
        assert np.bincount(found.label).tolist() == [12_500, 12_500]


def test_cora_and_location(folder):
    graph = datasets.load_cora(folder)
    assert graph.features.shape == (2708, 1433)
    assert graph.features.sum() == 49_216
    assert np.bincount(graph.label).tolist() == [351, 217, 418, 818, 426, 298, 180]
    assert graph.edges.shape == (5278, 2)
    assert np.all(graph.edges[:, 0] < graph.edges[:, 1])
    assert [len(part) for part in graph[3:]] == [140, 500, 1000]
    assert len(np.unique(np.concatenate(graph[3:]))) == 1640
    places = datasets.load_location(folder)
    assert places.records.shape == (5010, 446)
    assert places.records.mean() == pytest.approx(0.1204, abs=1e-4)
    assert np.unique(places.label).tolist() == list(range(30))
