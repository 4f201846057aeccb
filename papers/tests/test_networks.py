"""The papers' networks: sizes, features, and that every record has a gradient of its own."""

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
opacus = pytest.importorskip("opacus")
from torch import nn  # noqa: E402

from matrixdp.errors import InvalidInput  # noqa: E402
from matrixdp_papers import networks  # noqa: E402

CODES = 50
# What Opacus's hooks say of a first layer, whose inputs need no gradient.
opacus_hooks = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def pictures(channels, side):
    return lambda count: torch.rand(count, channels, side, side)


def words(count):
    return torch.randint(CODES, (count, 7))


# What makes each network, its inputs, its parameters and its features.
NETWORKS = {
    "LeNet": (networks.LeNet, pictures(1, 28), 61_706, 400),
    "TutorialCNN": (networks.TutorialCNN, pictures(1, 28), 26_010, 32),
    "TutorialCIFAR": (networks.TutorialCIFAR, pictures(3, 32), 122_570, 64),
    "VGG16": (networks.VGG16, pictures(3, 32), 14_728_266, 512),
    "AlexNet": (networks.AlexNet, pictures(3, 32), 5_084_490, 1024),
    "ResNet18": (networks.ResNet18, pictures(3, 32), 11_173_962, 512),
    "MLP": (networks.MLP, lambda count: torch.rand(count, 105), 1298, 12),
    "LSTM": (lambda: networks.LSTM(codes=CODES, per_sample=True), words, CODES * 128 + 132_096 + 258, 128),
    "BiLSTM": (lambda: networks.BiLSTM(codes=CODES, per_sample=True), words, CODES * 128 + 123_000 + 302, 150),
}
WITH_ACTIVATION = [name for name in NETWORKS if "LSTM" not in name]


@pytest.fixture(autouse=True)
def repeatable():
    """The same draws, on one thread: the networks are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_features_and_scores_have_the_papers_sizes(name):
    make, inputs, parameters, features = NETWORKS[name]
    network, records = make(), inputs(3)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert isinstance(network, nn.Sequential)
    found = network[: networks.SPLIT](records)
    assert found.shape == (3, features)
    scores = network(records)
    assert scores.shape == (3, 2 if name in ("MLP", "LSTM", "BiLSTM") else 10)
    assert torch.equal(network[networks.SPLIT :](found), scores)


@pytest.mark.parametrize("name", WITH_ACTIVATION)
def test_the_hyperbolic_tangent_replaces_every_activation_and_bounds_the_features(name):
    make, inputs, _, _ = NETWORKS[name]
    network = make(activation=nn.Tanh)
    assert not any(isinstance(layer, nn.ReLU) for layer in network.modules())
    assert network[: networks.SPLIT](100 * inputs(2)).abs().max() <= 1


@pytest.mark.parametrize("name", ["LSTM", "BiLSTM"])
def test_the_states_of_the_recurrent_networks_are_bounded(name):
    make, inputs, _, _ = NETWORKS[name]
    network = make()
    with torch.no_grad():
        network.features[0].weight.mul_(100)
    assert 0.5 < network[: networks.SPLIT](inputs(5)).abs().max() <= 1


@opacus_hooks
@pytest.mark.parametrize("name", NETWORKS)
def test_opacus_finds_the_gradient_of_each_record(name):
    """Against one backward pass a record; a layer that mixes records, such as batch normalisation, fails here."""
    make, inputs, _, _ = NETWORKS[name]
    network, records, labels = make(), inputs(2), torch.tensor([1, 0])
    singly = []
    for record, label in zip(records, labels, strict=True):
        network.zero_grad()
        nn.functional.cross_entropy(network(record[None]), label[None]).backward()
        singly.append([p.grad.clone() for p in network.parameters()])
    network.zero_grad()
    wrapped = opacus.GradSampleModule(network, loss_reduction="sum")
    nn.functional.cross_entropy(wrapped(records), labels, reduction="sum").backward()
    for parameter, *wanted in zip(network.parameters(), *singly, strict=True):
        for found, alone in zip(parameter.grad_sample, wanted, strict=True):
            assert torch.dist(found, alone) <= 1e-4 * alone.norm() + 1e-7


def shapes(network):
    """The shape of each weight as a matrix, inputs x outputs: those of a convolution are a patch."""
    return {tuple(p.flatten(1).T.shape) for p in network.parameters() if p.ndim > 1}


def test_first_weights_as_tensorflow_makes_them():
    """Glorot: uniform up to sqrt(6 / (fan in + fan out)), and biases of zero; PyTorch's are smaller in a wide layer."""
    torch.manual_seed(0)
    layer = networks.as_tensorflow(networks.TutorialCNN()).features[7]
    bound = (6 / (512 + 32)) ** 0.5
    assert 0.99 * bound < layer.weight.abs().max() <= bound
    assert torch.all(layer.bias == 0)
    assert networks.TutorialCNN().features[7].weight.abs().max() < 0.5 * bound


def test_the_gradients_have_the_shapes_in_the_papers_tables():
    assert (400, 120) in shapes(networks.LeNet())
    assert (4608, 512) in shapes(networks.ResNet18())
    assert (105, 12) in shapes(networks.MLP())
    assert max(shapes(networks.AlexNet()), key=np.prod) == (4096, 512)
    for network in (networks.LSTM(), networks.BiLSTM()):
        assert network.features[0].weight.shape == (20_002, 128)


def test_no_network_normalises_over_the_batch():
    bare = networks.VGG16(normalised=False)
    assert not any(isinstance(layer, nn.GroupNorm) for layer in bare.modules())
    assert bare(torch.rand(1, 3, 32, 32)).shape == (1, 10)
    for make, *_ in NETWORKS.values():
        assert not any(isinstance(layer, nn.modules.batchnorm._NormBase) for layer in make().modules())


def test_both_kinds_of_recurrent_layer_are_the_same_network():
    for make in (networks.LSTM, networks.BiLSTM):
        plain, linear = make(codes=CODES), make(codes=CODES, per_sample=True)
        linear.features[0], linear.top = plain.features[0], plain.top
        linear.features[1].layer.load_state_dict(plain.features[1].layer.state_dict())
        records = words(4)
        assert torch.allclose(plain(records), linear(records), atol=1e-6)


def test_without_opacus_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.layers", None)
    assert networks.LSTM(codes=CODES)(words(1)).shape == (1, 2)
    with pytest.raises(InvalidInput, match="pip install"):
        networks.LSTM(codes=CODES, per_sample=True)


def test_a_table_may_have_any_widths():
    assert [layer.out_features for layer in networks.MLP(6, (5, 4), 3).modules() if isinstance(layer, nn.Linear)] == [
        5, 4, 3]  # fmt: skip
    assert networks.MLP(6, (), 3)(torch.rand(2, 6)).shape == (2, 3)
    for bad in ({"inputs": 0}, {"hidden": (12, 0)}, {"hidden": (1.5,)}, {"classes": True}):
        with pytest.raises(InvalidInput, match=next(iter(bad))):
            networks.MLP(**bad)


@pytest.fixture
def graph():
    """A graph with a hub, a node without neighbours, and an edge given both ways."""
    rng = np.random.default_rng(8)
    edges = rng.integers(0, 29, (40, 2))
    edges = np.concatenate([edges[edges[:, 0] != edges[:, 1]], [[0, k] for k in range(1, 20)], [[1, 0]]])
    return rng.random((30, 11)), edges


def test_the_graph_network_is_that_of_the_whole_graph(graph):
    X, edges = graph
    A = np.eye(30)
    A[edges[:, 0], edges[:, 1]] = A[edges[:, 1], edges[:, 0]] = 1
    root = np.diag(A.sum(axis=1) ** -0.5)
    S = root @ A @ root
    network = networks.GCN(X, edges, hidden=5, classes=3)
    W1, W2 = (p.detach().double().numpy().T for p in network.parameters())
    wanted = S @ np.maximum(S @ X @ W1, 0) @ W2
    assert np.abs(wanted).max() > 0.05
    for nodes in (torch.arange(30), torch.tensor([29]), torch.tensor([7, 0, 7])):
        np.testing.assert_allclose(network(nodes).detach().numpy(), wanted[nodes.numpy()], atol=1e-6)
    assert network(torch.zeros(0, dtype=torch.int64)).shape == (0, 3)


@opacus_hooks
def test_opacus_finds_the_gradient_of_each_node(graph):
    network = networks.GCN(*graph, hidden=5, classes=3)
    nodes, labels = torch.tensor([29, 0, 4]), torch.tensor([0, 1, 2])
    singly = []
    for node, label in zip(nodes, labels, strict=True):
        loss = nn.functional.cross_entropy(network(node[None]), label[None])
        singly.append(torch.autograd.grad(loss, tuple(network.parameters())))
    wrapped = opacus.GradSampleModule(network, loss_reduction="sum")
    nn.functional.cross_entropy(wrapped(nodes), labels, reduction="sum").backward()
    for parameter, *wanted in zip(network.parameters(), *singly, strict=True):
        assert torch.allclose(parameter.grad_sample, torch.stack(wanted), atol=1e-6)


def test_the_graph_network_has_the_papers_size_and_saves_its_weights_alone():
    network = networks.GCN(np.ones((4, 1433)), np.array([[0, 1]]))
    assert {name: tuple(p.shape) for name, p in network.state_dict().items()} == {
        "first.weight": (16, 1433),
        "second.weight": (7, 16),
    }


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        (np.array([[0, 4]]), "nodes 0 to 3"),
        (np.array([[-1, 0]]), "nodes 0 to 3"),
        (np.array([[0.0, 1.0]]), "pairs"),
        (np.array([0, 1]), "pairs"),
        (np.array([[0, 1, 2]]), "pairs"),
    ],
)
def test_edges_of_another_form_are_refused(edges, words):
    with pytest.raises(InvalidInput, match=words):
        networks.GCN(np.ones((4, 2)), edges)
    with pytest.raises(InvalidInput, match="features"):
        networks.GCN(np.full((4, 2), np.nan), np.array([[0, 1]]))
