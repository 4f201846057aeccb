"""Pictures of digits and of things."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from matrixdp.errors import InvalidInput
from matrixdp_papers.datasets.source import Folder, Labelled, Source, arrays, content

MNIST = tuple(
    Source(
        f"mnist-{name}.gz",
        "http://yann.lecun.com/exdb/mnist/",
        f"rename the file {name}.gz",
        sha256,
    )
    for name, sha256 in (
        ("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    )
)
CIFAR10 = tuple(
    Source(
        name,
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        f"save {what} as the arrays images (records x 32 x 32 x 3, uint8), labels and class_names",
        sha256,
    )
    for name, what, sha256 in (
        (
            "cifar10_train_batch1.npz",
            "data_batch_1",
            "a40168a75b33873eabf1cb53faf8edb62eff643092c4bc0f992c136a7ef3e7d9",
        ),
        (
            "cifar10_test_first2000.npz",
            "the first 2,000 pictures of test_batch",
            "b426863db4f00e8f91f8eb18773aa8532b269ebe7b688715a56a55971f7a17fa",
        ),
    )
)
SVHN = tuple(
    Source(f"{part}_32x32.mat", "http://ufldl.stanford.edu/housenumbers/", "take the file as it is", None)
    for part in ("train", "test")
)


def load_mnist(folder: Folder = None, *, test: bool = False) -> Labelled:
    """60,000 (test: 10,000) pictures of digits as rows of 784 pixels between 0 and 1."""
    images, labels = (np.frombuffer(content(source, folder), np.uint8) for source in MNIST[2 * test :][:2])
    return Labelled(images[16:].reshape(-1, 784) / 255.0, labels[8:].astype(np.int64))


def load_cifar10(folder: Folder = None, *, test: bool = False) -> Labelled:
    """A part of CIFAR-10: the first 10,000 of its 50,000 training pictures (test: the first 2,000 of 10,000).

    Returns:
        Pictures of three colours x 32 x 32 between 0 and 1 (float32), and the class, 0 (airplane) to 9 (truck).
    """
    found = arrays(CIFAR10[test], folder)
    pictures = found["images"].transpose(0, 3, 1, 2) / np.float32(255)
    return Labelled(pictures, found["labels"].astype(np.int64))


def load_svhn(folder: Folder = None, *, test: bool = False) -> Labelled:
    """The 73,257 (test: 26,032) house numbers, cut into digits; no checksum is known, so the format is checked.

    Returns:
        Pictures of three colours x 32 x 32 between 0 and 1 (float32), and the digit.
    """
    from scipy.io import loadmat

    source = SVHN[test]
    stream: Any = io.BytesIO(content(source, folder))  # the reader takes streams, its annotation only paths
    try:
        parts = loadmat(stream, variable_names=("X", "y"))
        pictures, label = parts["X"], parts["y"].ravel()
    except KeyError:
        raise InvalidInput(f"{source.name} has no array X or y; get it again from {source.page}") from None
    except Exception:  # a damaged file may fail anywhere in the reader
        raise InvalidInput(f"{source.name} cannot be read; get it again from {source.page}") from None
    if not (
        pictures.dtype == np.uint8
        and pictures.ndim == 4
        and pictures.shape[:3] == (32, 32, 3)
        and len(label) == pictures.shape[3] > 0
        and np.all(np.isin(label, range(1, 11)))
    ):
        raise InvalidInput(
            f"{source.name} must hold X (32 x 32 x 3 x records, uint8) and a class y from 1 to 10 for each, got X "
            f"{pictures.shape} {pictures.dtype} and {len(label)} classes; see {source.page}"
        )
    # The class 10 stands for the digit 0.
    return Labelled(pictures.transpose(3, 2, 0, 1) / np.float32(255), label.astype(np.int64) % 10)
