"""The public data of the papers' experiments, from a local folder; nothing is downloaded.

Every loader takes the folder as an argument or from the environment variable MATRIXDP_DATA. It checks the file's sha256
or, where none is known, its contents. If a file is missing or differs, it raises InvalidInput, which says where the
data are published.
"""

from matrixdp_papers.datasets.adult import ADULT, ADULT_ATTRIBUTES, ADULT_COLUMNS, ADULT_TWO_PARTS, load_adult
from matrixdp_papers.datasets.binary import (
    LOCATION,
    PURCHASE100,
    TEXAS100,
    load_location,
    load_purchase100,
    load_texas100,
)
from matrixdp_papers.datasets.graphs import CORA, Graph, load_cora
from matrixdp_papers.datasets.pictures import CIFAR10, MNIST, SVHN, load_cifar10, load_mnist, load_svhn
from matrixdp_papers.datasets.source import VARIABLE, Folder, Labelled, Source, find, has
from matrixdp_papers.datasets.tables import (
    CARDIOTOCOGRAPHY,
    LIVER,
    MOVEMENT,
    SWARM,
    UBER,
    Pickups,
    Sequences,
    load_cardiotocography,
    load_liver,
    load_movement,
    load_swarm,
    load_uber,
)
from matrixdp_papers.datasets.texts import IMDB, IMDB_CODES, load_imdb

__all__ = [
    "ADULT",
    "ADULT_ATTRIBUTES",
    "ADULT_COLUMNS",
    "ADULT_TWO_PARTS",
    "CARDIOTOCOGRAPHY",
    "CIFAR10",
    "CORA",
    "IMDB",
    "IMDB_CODES",
    "LIVER",
    "LOCATION",
    "MNIST",
    "MOVEMENT",
    "PURCHASE100",
    "SVHN",
    "SWARM",
    "TEXAS100",
    "UBER",
    "VARIABLE",
    "Folder",
    "Graph",
    "Labelled",
    "Pickups",
    "Sequences",
    "Source",
    "find",
    "has",
    "load_adult",
    "load_cardiotocography",
    "load_cifar10",
    "load_cora",
    "load_imdb",
    "load_liver",
    "load_location",
    "load_mnist",
    "load_movement",
    "load_purchase100",
    "load_svhn",
    "load_swarm",
    "load_texas100",
    "load_uber",
]
