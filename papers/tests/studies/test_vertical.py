"""The study of vertical federated learning."""

import math

import numpy as np
import pytest

from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic, Kronecker
from matrixdp.mechanisms import calibrate
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import Entrywise
from matrixdp_papers.datasets import Labelled
from matrixdp_papers.studies import vertical
from matrixdp_papers.studies.base import Mean, silent
from matrixdp_papers.studies.splits import Split

torch = pytest.importorskip("torch")

from matrixdp.federated import SplitPlan  # noqa: E402
from matrixdp.learn import ClippedGradients  # noqa: E402
from matrixdp_papers.studies import one_feature, split_learning, training  # noqa: E402
from matrixdp_papers.studies.parallel_training import ParallelNetworks, orders, seed_of  # noqa: E402

ADULT, LOCATION = vertical.EXPERIMENTS[0], vertical.EXPERIMENTS[2]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small(rng):
    def part(width, classes, count):
        label = np.arange(count) % classes
        return Labelled(rng.random((count, width)) + 2 * np.eye(width)[label], label)

    return {
        "Adult": vertical.Task(Split(part(105, 2, 80), part(105, 2, 40)), 48),
        "Location": vertical.Task(Split(part(446, 5, 80), part(446, 5, 40)), 223),
    }


@pytest.fixture
def batch(rng):
    records = torch.tensor(rng.normal(size=(12, 7)), dtype=torch.float32)
    return records, torch.tensor(rng.integers(0, 3, 12))


def make():
    return split_learning.Joined((3, 4), (5,), 2, 3)


def test_it_runs_on_small_data(small):
    found = vertical.run(small, True, silent)
    assert set(found.figures) == {"figure-3"}
    assert len(found.tables) == 5
    assert "Adult: one feature of each half, at true epsilons" in found.found
    for table in found.tables:
        for row in table.rows:
            assert all(math.isfinite(cell) for cell in row if isinstance(cell, float)), row
            assert isinstance(row[-1], Mean)
            assert 0 <= row[-1].mean <= 1
    assert "Purchase-100, Texas-100" in found.setting["not run, data not available"]
    assert "Did not run, as the data are not available" in found.difference
    vertical.STUDY.report(found)


def test_one_feature_in_two_epochs_by_hand(small):
    split, budget = small["Adult"].split, Budget(8.0, 1e-5)
    found = one_feature.measured(split.train, split.test, [slice(0, 50), slice(50, 105)], budget)
    assert 0.99 * 8 < found.epsilon <= 8
    # a row of one feature in [-1, 1], twice, with 70 % of mu^2; the grid costs a little
    mu = float(gaussian.mu(8.0, 1e-5)) * math.sqrt(0.7 / 2)
    assert 2 / mu <= found.std <= 2 / mu * 1.02


def test_the_paper_s_budgets_by_hand():
    points = {point.series: point for point in vertical.published_points(ADULT, 32_561, 1.0)}
    # Theorem 6 with q = 2/32561: sinh((epsilon* - 1/2)) = (1/q - 1) sinh(1/2)
    star = 0.5 + math.asinh((32_561 / 2 - 1) * math.sinh(0.5))
    assert points["idn"].each == pytest.approx(star, rel=1e-9)
    element = 2 * math.sqrt(2 * math.log(1.25e5)) / star
    assert points[vertical.PER_ELEMENT].std == pytest.approx(element, rel=1e-9)
    # IDN, Theorem 3: s = 2 sqrt(20), and z by Laurent and Massart
    z = math.sqrt(20 + 2 * math.sqrt(20 * math.log(1e5)) + 2 * math.log(1e5))
    assert points["idn"].std == pytest.approx(2 * math.sqrt(20) / (math.sqrt(z**2 + 2 * star) - z), rel=1e-9)
    # over all releases, 16,281 in each of five epochs, an epsilon of a release is small
    assert points[vertical.COMPOSED].each < points["idn"].each


def test_the_truth_by_hand():
    points = {point.series: point for point in vertical.published_points(ADULT, 32_561, 1.0)}
    std = points[vertical.PER_ELEMENT].std
    row = 2 * math.sqrt(10) / std * math.sqrt(5)
    whole = 2 * math.sqrt(20) / std * math.sqrt(5 * 16_281)
    assert points[vertical.PER_ELEMENT].record == pytest.approx(float(gaussian.epsilon(row, 1e-5)), rel=1e-9)
    assert points[vertical.PER_ELEMENT].participant == pytest.approx(float(gaussian.epsilon(whole, 1e-5)), rel=1e-9)
    assert points[vertical.PER_ELEMENT].record > 10
    for name, point in points.items():
        assert point.record <= point.participant, name


def test_equal_guarantees_are_those_of_the_federated_room():
    points = vertical.exact_points(LOCATION, 1_600, 5.0)
    private = [point.series for point in points if "private" in point.series]
    assert private == ["analytic, private training", "mvg, private training"]  # the others are the analytic Gaussian
    assert all(0.99 * 5 < point.record <= 5 for point in points)
    by_name = {point.series: point for point in points}
    given = {"records": 1_600, "epochs": 30, "batch_size": 100, "budget": Budget(5.0, 1e-5), "clip": vertical.CLIP}
    plan = SplitPlan(**given, update_share=vertical.UPDATE_SHARE)
    assert by_name["analytic, private training"].std == pytest.approx(
        plan.feature_noise(128).law.root_mean_square, rel=1e-3
    )
    update = plan.update_noise(make().local[0]).law.root_mean_square
    assert by_name["analytic, private training"].release.update_std == pytest.approx(update, rel=1e-2)
    plan = SplitPlan(**given, update_share=0.0)
    assert by_name["analytic, networks fixed"].std == pytest.approx(
        plan.feature_noise(128).law.root_mean_square, rel=1e-3
    )
    plan = SplitPlan(**given, unit="participant")
    assert by_name["analytic, whole participant"].std == pytest.approx(
        plan.feature_noise(128).law.root_mean_square, rel=1e-3
    )


def _loop(seed, release_noise, scale, records, label, schedule):
    """Plain SGD on the whole network with noise added to the features."""
    network = training.seeded_network(make, seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=schedule.learning_rate)
    for epoch in range(schedule.epochs):
        order = orders(len(label), [seed_of(seed, epoch)], records.device)[0]
        for batch in order.split(schedule.lot):
            optimizer.zero_grad()
            outputs = network(records[batch], release_noise[batch], torch.tensor(scale))
            torch.nn.functional.cross_entropy(outputs, label[batch]).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def test_parallel_networks_are_a_plain_loop(batch):
    records, label = batch
    schedule = split_learning.Schedule(3, 5, 0.4, 1.0)
    law = Gaussian(Isotropic((12, 2), 1.5))
    releases = [
        split_learning.Release(None),
        split_learning.Release(law, once=True),
        split_learning.Release(law, learns=False),
    ]
    _, weights, _ = split_learning.train(make, releases, records, label, schedule, [7, 8])
    expected = _loop(7, torch.zeros(12, 4), 1.0, records, label, schedule)
    torch.testing.assert_close(weights[0, 0], expected, rtol=1e-4, atol=1e-6)
    # the noise of a record that is released once is the same in every epoch, and is the first to be drawn
    kept = split_learning.draws(law, 4, training.generator(7)).view(2, 2, 12, 2).transpose(1, 2).flatten(2)
    expected = _loop(7, kept[0], 1 / math.sqrt(1 + 1.5**2), records, label, schedule)
    torch.testing.assert_close(weights[0, 1], expected, rtol=1e-4, atol=1e-6)
    network = training.seeded_network(make, 8)
    names = [name for name, _ in network.named_parameters()]
    named = ParallelNetworks(network).named(weights[1, 2])
    stayed = [name for name in names if torch.equal(named[name], dict(network.named_parameters())[name])]
    assert stayed == [name for name in names if name.startswith("local.")]


def test_clipped_gradients_are_those_of_the_learning_room(batch):
    records, label = batch
    network = make()
    together = ParallelNetworks(network)
    weights = torch.cat([p.detach().flatten() for p in network.parameters()])[None, None]
    noise, scale = torch.randn(1, 1, 12, 4, generator=training.generator(1)), torch.tensor([[0.7]])
    rule = split_learning.clipped_rule(together, 0.02)
    found = together.gradients(weights, records[None], label[None], noise, scale[..., None], rule=rule)
    features = torch.cat([local(half) for local, half in zip(network.local, records.split([3, 4], 1), strict=True)], 1)
    sent = features.detach() + noise[0, 0]
    sent.requires_grad_()
    loss = torch.nn.functional.cross_entropy(network.top(sent * 0.7), label, reduction="sum")
    back = torch.autograd.grad(loss, sent)[0]
    for place, local in enumerate(network.local):
        part = back[:, 2 * place : 2 * place + 2]
        gradients = ClippedGradients(local, lambda outputs, sent_back: (outputs * sent_back).sum(1), clip=0.02)
        gradients.zero()
        gradients.accumulate(records[:, [slice(0, 3), slice(3, 7)][place]], part)
        mine = torch.cat([found[f"local.{place}.{name}"].flatten() for name, _ in local.named_parameters()])
        torch.testing.assert_close(mine, gradients.flat.float(), rtol=1e-3, atol=1e-6)
        assert float(mine.norm()) > 0.02  # several records, clipped one by one


def test_private_training_has_its_noise(batch):
    records, label = batch
    release, seeds = split_learning.Release(None, update_std=3.0), range(60)
    together, weights, _ = split_learning.train(
        make, [release], records, label, split_learning.Schedule(1, 12, 0.4, 1e-9), seeds
    )
    found = together.named(weights[:, 0])
    before = [dict(training.seeded_network(make, seed).named_parameters()) for seed in seeds]
    moved = torch.cat(
        [(found[name] - torch.stack([b[name].detach() for b in before])).flatten() for name in found if "local" in name]
    )

    def fits(std):
        return abs(float((moved / std).square().mean()) - 1) < 5 * math.sqrt(2 / len(moved))  # false alarms about 1e-6

    assert fits(0.4 * 3.0 / 12)
    assert not fits(0.9 * 0.4 * 3.0 / 12)


@pytest.mark.parametrize(
    "law",
    [
        Gaussian(Isotropic((2, 3), 0.4)),
        Gaussian(Kronecker(np.array([[2.0, 0.8], [0.8, 1.0]]), np.array([1.0, 4.0, 0.3]))),
        calibrate("r1smg", shape=(2, 3), sensitivity=Entrywise(2.0), budget=Budget(1.0, 1e-5)),
    ],
    ids=["isotropic", "kronecker", "r1smg"],
)
def test_draws_have_the_moments_of_their_law(law):
    count = 40_000
    drawn = split_learning.draws(law, count, training.generator(5)).double().numpy().reshape(count, -1)
    theirs = np.stack([law.sample(np.random.default_rng(seed)).ravel() for seed in range(4_000)])
    assert np.mean(np.sum(drawn**2, axis=1)) == pytest.approx(law.expected_squared_error(), rel=0.1)
    covariance, expected = np.cov(drawn.T), np.cov(theirs.T)
    if isinstance(law, Gaussian):
        # 4,000 draws: a standard error of at most sqrt(2/4000) of a variance, 5.5 of them are 1e-6 for 36 entries
        tolerance = 5.5 * math.sqrt(2 / 4_000) * np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
        assert np.all(np.abs(covariance - expected) < tolerance)
        swapped = np.diag(expected)[::-1]
        if not isinstance(law.covariance, Isotropic):
            assert not np.all(np.abs(np.diag(covariance) - swapped) < np.diag(tolerance))
    else:
        lengths = np.linalg.norm(drawn, axis=1)
        # half-normal: the median is 0.6745 of the root of the mean square; 4.9 standard errors
        ratio = np.median(lengths) / math.sqrt(law.expected_squared_error())
        assert ratio == pytest.approx(0.6745, abs=4.9 * 1.25 / math.sqrt(count))
