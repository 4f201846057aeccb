"""Reviews of films as sequences of word codes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from matrixdp import _check
from matrixdp_papers.datasets.source import Folder, Labelled, Source, arrays

IMDB = tuple(
    Source(
        f"imdb_{part}.npz",
        "https://ai.stanford.edu/~amaas/data/sentiment/",
        f"save the reviews of the folder {part}, negative before positive and by number, as the arrays tokens (joined "
        "word codes: 2 and up by falling frequency in the training set, 1 for words beyond 20,000), offsets, label, "
        "rating and review_id",
        sha256,
    )
    for part, sha256 in (
        ("train", "1bcea5224a74452903dda018590f93d4a7d683f37fe975cdcf340267fb65c405"),
        ("test", "3cd560ea8ad3f1173fe5390b45328ba3deddaf04713f9574b0e7153fb076a171"),
    )
)

IMDB_CODES = 20_002
"""How many codes there are: 0 for padding, 1 for rare words, and the 20,000 most frequent words of the training set."""


def load_imdb(folder: Folder = None, *, test: bool = False, length: int = 200) -> Labelled:
    """25,000 reviews as rows of `length` word codes (int64), and whether the review is positive (1) or negative (0).

    A longer review keeps its last words; a shorter one has zeros before it, so that a network that reads from left to
    right ends on the last word. Negative reviews come first: shuffle, or sample, before training. The list of frequent
    words was made from the training set, and is taken as public.
    """
    _check.count("length", length)
    found = arrays(IMDB[test], folder)
    tokens = found["tokens"]
    rows = np.zeros((len(found["label"]), length), dtype=np.int64)
    for row, (start, stop) in zip(rows, pairwise(found["offsets"].tolist()), strict=True):
        kept = tokens[max(start, stop - length) : stop]
        row[length - len(kept) :] = kept
    return Labelled(rows, found["label"].astype(np.int64))
