"""Keys: used once, silent, bound to their process; streams: disjoint by block and part, reproducible by derivation."""

import contextlib
import copy
import itertools
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from matrixdp.errors import InvalidInput
from matrixdp.secure.entropy import Key, Stream


def words_of(stream, count, block=0, part=0):
    words = np.empty(count, dtype=np.uint64)
    stream.fill(words, block, part)
    return words


def test_the_stream_is_aes_256_in_counter_mode():
    secret = bytes(range(32))
    encryptor = Cipher(algorithms.AES(secret), modes.CTR((5 << 64 | 3 << 48).to_bytes(16, "big"))).encryptor()
    expected = np.frombuffer(encryptor.update(bytes(8000)), dtype=np.uint64)
    assert np.array_equal(words_of(Stream(secret), 1000, 5, 3), expected)


def test_a_long_fill_starts_with_the_words_of_a_short_one():
    stream = Key().stream()
    assert np.array_equal(words_of(stream, 200_001)[:777], words_of(stream, 777))


def test_a_key_opens_once():
    key = Key()
    key.stream()
    for use in (key.stream, key.split):
        with pytest.raises(InvalidInput, match="has been used"):
            use()


def test_of_many_threads_one_gets_the_stream():
    key, opened = Key(), []

    def attempt():
        with contextlib.suppress(InvalidInput):
            opened.append(key.stream())

    threads = [threading.Thread(target=attempt) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1


def test_derived_keys_are_reproducible_and_all_different():
    key = Key()
    indices = [(0,), (1,), (256,), (0, 0), (0, 1), (1, 0), (2**64 - 1,), (0, 0, 0)]
    first = [words_of(key.derive(*index).stream(), 64) for index in indices]
    again = [words_of(key.derive(*index).stream(), 64) for index in indices]
    assert np.array_equal(first, again)
    everything = np.concatenate([*first, words_of(key.stream(), 64)])
    assert len(np.unique(everything)) == everything.size


def test_derivation_is_the_expanding_step_of_hkdf():
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    key = Key()
    info = b"matrixdp derive" + (7).to_bytes(8, "big") + (9).to_bytes(8, "big")
    assert key.derive(7, 9).expose() == HKDFExpand(SHA256(), 32, info).derive(key.expose())


def test_splitting_gives_the_derived_keys_in_order():
    key = Key()
    parts = [part.expose() for part in itertools.islice(key.split(), 3)]
    assert parts == [key.derive(i).expose() for i in range(3)]


@pytest.mark.parametrize("index", [(), (-1,), (2**64,), (1.0,), (True,), ("1",), (None,), (0, -1)])
def test_bad_index(index):
    with pytest.raises(InvalidInput, match="index"):
        Key().derive(*index)


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33), "x" * 32, None, 7])
def test_bad_secret(secret):
    with pytest.raises(InvalidInput, match="secret"):
        Key.from_bytes(secret)


@pytest.mark.parametrize("place", [(-1, 0), (2**64, 0), (0, -1), (0, 2**16)])
def test_bad_block_or_part(place):
    with pytest.raises(InvalidInput, match="block"):
        Key().stream().fill(np.empty(4, dtype=np.uint64), *place)


@pytest.mark.parametrize("words", [np.empty(4), np.empty(8, dtype=np.uint64)[::2], np.empty(4, dtype=np.int64)])
def test_bad_buffer(words):
    with pytest.raises(InvalidInput, match="words"):
        Key().stream().fill(words, 0)


def test_secrets_are_not_shown():
    key = Key()
    secret, stream = key.expose(), key.stream()
    for text in (repr(key), str(key), f"{key}", repr(stream)):
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_keys_and_streams_cannot_be_duplicated(duplicate):
    for secret in (Key(), Key().stream()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            duplicate(secret)


def test_an_exposed_key_gives_the_same_stream_elsewhere():
    key = Key()
    elsewhere = Key.from_bytes(key.derive(4).expose())
    assert np.array_equal(words_of(elsewhere.stream(), 32), words_of(key.derive(4).stream(), 32))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_process_refuses_inherited_keys_and_makes_its_own():
    script = """
import os
from matrixdp.errors import InvalidInput
from matrixdp.secure.entropy import Key
import numpy as np

key, words = Key(), np.empty(4, dtype=np.uint64)
stream = Key().stream()
child = os.fork()
name = "parent" if child else "child"
uses = [lambda: stream.fill(words, 0), key.expose, lambda: key.derive(0), key.split]
refused = 0
for use in uses:
    try:
        use()
    except InvalidInput as error:
        assert "fork" in str(error)
        refused += 1
if child:
    os.waitpid(child, 0)
print(name, refused, Key().expose().hex(), flush=True)
os._exit(0)
"""
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    (_, by_child, child_key), (_, by_parent, parent_key) = (line.split() for line in lines[:2])
    assert (by_child, by_parent) == ("4", "0")
    assert child_key != parent_key


def test_no_word_repeats_across_blocks_parts_and_keys():
    """2^22 uniform words hold an equal pair with probability 2^-21 < 1e-6."""
    places = list(itertools.product((0, 1, 2, 2**32, 2**63), (0, 1, 2, 3)))
    each = (1 << 22) // (2 * len(places))
    streams = [Key().stream(), Key().stream()]
    drawn = np.concatenate([words_of(stream, each, *place) for stream in streams for place in places])

    def repeats(words):
        return bool((np.diff(np.sort(words)) == 0).any())

    assert not repeats(drawn)
    drawn[-1] = drawn[0]
    assert repeats(drawn)


def test_every_bit_is_fair_and_uncorrelated_between_blocks():
    """64 bits and 64 correlations, each beyond 6.1 standard deviations with probability 1e-9: 1.3e-7 together."""
    count = 1 << 15
    stream = Key().stream()
    first, second = (words_of(stream, count, block) for block in (0, 1))

    def largest(a, b):
        bits = [2.0 * ((w[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)) - 1 for w in (a, b)]
        scores = [np.abs(bits[0].sum(0)), np.abs((bits[0] * bits[1]).sum(0))]
        return max(score.max() for score in scores) / np.sqrt(count)

    assert largest(first, second) < 6.1
    assert largest(first, np.where(np.arange(count) % 20 == 0, first, second)) > 6.1  # one word in 20 repeated
    assert largest(first | (second & (second >> np.uint64(1)) & (second >> np.uint64(2))), second) > 6.1
