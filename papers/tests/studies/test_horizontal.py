"""The study of horizontal federated learning."""

import math
import subprocess
import sys

import numpy as np
import pytest

from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp_papers.datasets import Labelled
from matrixdp_papers.studies import horizontal
from matrixdp_papers.studies.base import Mean, silent
from matrixdp_papers.studies.splits import Split

torch = pytest.importorskip("torch")

from matrixdp.budget import Budget  # noqa: E402
from matrixdp.federated.local_training import LocalTraining  # noqa: E402
from matrixdp.federated.tensors import flat, load  # noqa: E402
from matrixdp_papers import networks  # noqa: E402
from matrixdp_papers.studies import federated_noise, parallel_training, training  # noqa: E402

SHAPES = {"MNIST": ((1, 28, 28), 10), "Adult": ((105,), 2), "IMDB": ((12,), 2), "CIFAR-10": ((3, 32, 32), 10)}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small(rng):
    def part(name, count):
        shape, classes = SHAPES[name]
        codes = rng.integers(0, 20_002, (count, *shape)) if name == "IMDB" else rng.random((count, *shape))
        return Labelled(codes, np.arange(count) % classes)

    return {name: Split(part(name, 50), part(name, 20)) for name in SHAPES}


@pytest.fixture
def uploads():
    network = networks.MLP(6, (4,), 3)
    return federated_noise.Uploads(network, 0.015, 10, 1e-5, 64 / 6512, training.generator(1))


@pytest.mark.slow
def test_it_runs_on_small_data(small):
    found = horizontal.run(small, True, silent)
    assert set(found.figures) == {"figure-2"}
    assert len(found.tables) == 2 * len(small) + 2  # and DP-SGD for two of them
    for table in found.tables:
        for row in table.rows:
            assert all(math.isfinite(cell) for cell in row if isinstance(cell, float)), row
            assert isinstance(row[-1], Mean)
            assert 0 <= row[-1].mean <= 1
    for name in small:
        assert f"| {name}: " in found.found
    assert "on each element" in found.difference
    horizontal.STUDY.report(found)


WITHOUT_PYTORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(name)

sys.meta_path.insert(0, Missing())
from matrixdp_papers.studies import horizontal, vertical
"""


def test_the_studies_can_be_listed_without_pytorch():
    subprocess.run([sys.executable, "-c", WITHOUT_PYTORCH], check=True)


def test_budgets_of_a_round_by_hand():
    # ten rounds: of the three terms of Theorem 3.4 the least is adding up, for x sqrt(20 ln(2e5)) is 15.6 x
    each = federated_noise.round_budget(1.0, 1e-5, 10)
    assert each.epsilon == pytest.approx(0.1, rel=1e-9)
    assert each.delta == pytest.approx(5e-7, rel=1e-4)
    # fifty rounds: the second term, with x tanh(x/2) = x^2/2
    x = federated_noise.round_budget(1.0, 1e-5, 50).epsilon
    assert x * math.sqrt(100 * math.log(math.e + math.sqrt(50) * x / 5e-6)) + 25 * x**2 == pytest.approx(1, rel=1e-4)
    assert x > 1.4 / 50  # more than by adding up
    # far above what the theorem can be evaluated at, it adds up
    assert federated_noise.round_budget(1e6, 1e-5, 10).epsilon == 1e5
    assert federated_noise.round_budget(1e6, 1e-5, 10).delta == each.delta


def test_sampling_by_hand():
    q, each = 64 / 6512, Budget(0.1, 5e-7)
    star = federated_noise.before_sampling(each, q)
    mixed = (math.exp(each.epsilon) - 1) / (
        math.exp(star.epsilon) + math.exp(each.epsilon) - math.exp(each.epsilon - star.epsilon) - 1
    )
    assert mixed == pytest.approx(q, rel=1e-9)
    assert star.delta == each.delta
    below, above = (federated_noise.before_sampling(Budget(epsilon, 1e-6), q).epsilon for epsilon in (499.99, 500.01))
    assert above - below == pytest.approx(0.02, rel=1e-6)


def test_the_paper_s_gaussian_by_hand():
    element, each = Budget(1.0, 1e-5), Budget(2.0, 1e-6)
    per_element = federated_noise.published(federated_noise.PER_ELEMENT, (12, 105), 0.03, each, element)
    assert per_element.root_mean_square == pytest.approx(0.03 * math.sqrt(2 * math.log(1.25e5)), rel=1e-12)
    added_up = federated_noise.published(federated_noise.ADDED_UP, (12, 105), 0.03, each, element)
    assert added_up.root_mean_square == pytest.approx(
        0.03 * math.sqrt(2 * math.log(1.25e6 * 1260)) * 1260 / 2, rel=1e-12
    )
    # table 4: IDN has less noise than that, and more than Gaussian noise for the matrix as a whole
    idn, whole = (
        federated_noise.published(name, (12, 105), 0.03, each, element).root_mean_square for name in ("idn", "analytic")
    )
    assert whole < idn < added_up.root_mean_square
    # the matrix mechanism is Gaussian noise on each element
    mm = federated_noise.published("matrix-mechanism", (12, 105), 0.03, Budget(1.0, 1e-5), element)
    assert 0.7 < mm.root_mean_square / per_element.root_mean_square < 1


def test_the_claims_and_the_truth(uploads):
    names = (*horizontal.ALL, "udn", "matrix-mechanism")
    published = {point.series: point for point in federated_noise.published_points(uploads, names, 1.0)}
    assert published[federated_noise.PER_ELEMENT].truth > 100
    assert published["r1smg"].truth > 20
    exact = federated_noise.exact_points(uploads, names, 1.0)  # the others are the analytic Gaussian
    assert [point.series for point in exact] == ["analytic", "mvg", "r1smg"]
    assert all(0.99 < point.truth <= 1.0 for point in exact)
    # all layers and rounds, by hand: every entry changes by up to two clip values
    size, std = uploads.size, exact[0].noise.law.root_mean_square
    mu = 2 * uploads.clip * math.sqrt(size * uploads.rounds) / std
    assert federated_noise.composed(exact[0].noise.certificate, 10, 1e-5) == pytest.approx(
        float(federated_noise.gaussian.epsilon(mu, 1e-5)), rel=1e-9
    )


def test_side_by_side_is_a_plain_loop(rng):
    torch.manual_seed(3)
    network = networks.MLP(6, (4,), 3)
    records = torch.tensor(rng.normal(size=(2, 10, 6)), dtype=torch.float32)
    label = torch.tensor(rng.integers(0, 3, (2, 10)))
    clients = parallel_training.SideBySide(network, records, label, epochs=2, lot=4, learning_rate=0.3)
    size = len(flat(network))
    weights = torch.tensor(0.5 * rng.normal(size=(2, 3, size)), dtype=torch.float32)
    found = clients.updates(weights.clone(), turn=5)
    assert found.shape == (2, 3, 2, size)
    for repeat, configuration, client in [(0, 0, 0), (1, 2, 1), (0, 1, 1)]:
        load(network, weights[repeat, configuration])
        optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
        for epoch in range(2):
            seed = parallel_training.seed_of(2 * repeat + client, 5, epoch)
            for batch in parallel_training.orders(10, [seed], records.device)[0].split(4):
                optimizer.zero_grad()
                outputs = network(records[client, batch])
                torch.nn.functional.cross_entropy(outputs, label[client, batch]).backward()
                optimizer.step()
        update = flat(network) - weights[repeat, configuration]
        torch.testing.assert_close(found[repeat, configuration, client], update, rtol=1e-4, atol=1e-6)


def test_convolutions_side_by_side(rng):
    network = networks.LeNet()
    records, label = torch.tensor(rng.random((1, 6, 1, 28, 28)), dtype=torch.float32), torch.arange(6)[None]
    weights = torch.stack([flat(networks.LeNet()) for _ in range(2)])[None]
    clients = parallel_training.SideBySide(network, records, label, epochs=1, lot=6, learning_rate=0.1)
    found = clients.updates(weights, 0)
    for place in range(2):
        load(network, weights[0, place])
        update = LocalTraining(batch_size=6, learning_rate=0.1).update(network, records[0], label[0])
        torch.testing.assert_close(found[0, place, 0], update, rtol=1e-3, atol=1e-6)


def test_accuracy_side_by_side_and_one_by_one_agree(rng):
    network = networks.MLP(6, (4,), 3)
    weights = torch.tensor(rng.normal(size=(5, len(flat(network)))), dtype=torch.float32)
    weights[4] = math.nan
    records, label = torch.tensor(rng.normal(size=(30, 6)), dtype=torch.float32), torch.tensor(rng.integers(0, 3, 30))
    kinds = [
        kind(network, records[None], label[None], 1, 4, 0.1)
        for kind in (parallel_training.SideBySide, parallel_training.OneByOne)
    ]
    first, second = (kind.accuracy(weights, records, label) for kind in kinds)
    torch.testing.assert_close(first, second)
    assert float(first[4]) == pytest.approx(float((label == 0).float().mean()))


def test_uploads_are_clipped_and_noisy(uploads, rng):
    updates = torch.tensor(rng.normal(size=(2, 5, uploads.size)), dtype=torch.float32)
    updates[0, 0, 0], updates[0, 1, 0] = math.nan, math.inf
    before = updates.clone()
    clean = horizontal.averaged(updates, federated_noise.Point("unperturbed", 1.0, None), uploads.clip)
    torch.testing.assert_close(updates, before, equal_nan=True)
    assert float(clean.abs().max()) <= uploads.clip * (1 + 1e-6)
    assert torch.isfinite(clean).all()


def test_the_mean_of_the_uploads_has_the_noise_of_the_law():
    network = networks.MLP(300, (100,), 2)
    uploads = federated_noise.Uploads(network, 0.01, 10, 1e-5, 0.01, training.generator(2))
    (point,) = federated_noise.exact_points(uploads, ("analytic",), 1.0)
    drawn = horizontal.averaged(torch.zeros(1, 5, uploads.size), point, uploads.clip)

    def fits(std):
        squares = float((drawn.double() / std).square().mean())
        return abs(squares - 1) < 5 * math.sqrt(2 / uploads.size)  # false alarms below 1e-6

    assert fits(point.noise.law.root_mean_square / math.sqrt(5))
    assert not fits(0.95 * point.noise.law.root_mean_square / math.sqrt(5))


def test_rounds_that_are_run(uploads):
    (point,) = federated_noise.exact_points(uploads, ("analytic",), 1.0)
    std = point.noise.law.root_mean_square
    for relative, rounds in [(101, 1), (99, 10), (0.011, 10), (0.009, 0)]:
        experiment = horizontal.EXPERIMENTS[1]._replace(clip=std / relative, rounds=10)
        assert horizontal.rounds_run(point, experiment) == rounds
    assert horizontal.rounds_run(federated_noise.Point("unperturbed", math.inf, None), experiment) == 10


def test_rounds_add_up(uploads, rng):
    class Constant:
        """Clients whose update is the number of the round, everywhere."""

        def updates(self, weights, turn):
            repeats, configurations, size = weights.shape
            return torch.full((repeats, configurations, 5, size), turn + 1.0)

    law = federated_noise.layered(uploads.shapes, lambda shape: Gaussian(Isotropic(shape, 1e-6)))
    points = [
        federated_noise.Point("unperturbed", math.inf, None),
        federated_noise.Point("noisy", 1.0, uploads.noise(law)),
    ]
    initial = torch.zeros(2, uploads.size)
    experiment = horizontal.EXPERIMENTS[1]._replace(clip=2.5, rounds=4)
    found = horizontal.federate(Constant(), points, experiment, initial, silent)
    torch.testing.assert_close(found, torch.full((2, 2, uploads.size), 1 + 2 + 2.5 + 2.5))  # too little noise to run
    fewer = horizontal.federate(Constant(), points, experiment._replace(rounds=3), initial, silent)
    torch.testing.assert_close(fewer, torch.full((2, 2, uploads.size), 1 + 2 + 2.5))
    experiment = experiment._replace(clip=1e-5)
    found = horizontal.federate(Constant(), points, experiment, initial, silent)
    torch.testing.assert_close(found[:, 0], torch.full((2, uploads.size), 4e-5))
    noise = (found[:, 1] - 4e-5) / (1e-6 * math.sqrt(4 / 5))
    assert abs(float(noise.square().mean()) - 1) < 5 * math.sqrt(2 / noise.numel())  # false alarms about 1e-6
