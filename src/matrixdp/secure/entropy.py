"""Cryptographic entropy: a secret key from the operating system, and the random words derived from it.

The words are the key stream of AES-256 in counter mode. A key serves one release: its stream can be opened once, it
cannot be copied or pickled, it is redacted in repr, and a forked process refuses its parent's keys. Blocks of a release
have disjoint ranges of the counter, so they can be drawn in any order and on any number of threads.

To draw the same blocks again, or the parts of one release in several places, derive keys: `key.derive(i)` is the same
key for the same i, and reveals nothing about the others. Use each index for one part only.
"""

from __future__ import annotations

import hmac
import itertools
import os
import secrets
import threading
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from matrixdp.errors import InvalidInput

Words = npt.NDArray[np.uint64]

_SECRET_BYTES = 32
_BLOCK_SHIFT, _PART_SHIFT = 64, 48  # the counter: 64 bits of block, 16 bits of part, 48 bits that count inside a part
_ZEROS = memoryview(bytes(1 << 19))  # the plaintext: the ciphertext of zeros is the key stream


class _Secret:
    """Holds a secret: redacted in repr, never copied, and bound to the process that made it."""

    __slots__ = ("_process", "_secret")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._process = os.getpid()

    def _reveal(self) -> bytes:
        if os.getpid() != self._process:
            raise InvalidInput(
                f"key belongs to process {self._process} and was inherited by process {os.getpid()} through a fork, "
                "where it would repeat the parent's noise; make a new Key() here, or pass key.derive(i).expose()"
            )
        return self._secret

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: secret>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied; pass key.derive(i).expose() on purpose")


class Key(_Secret):
    """The entropy of one release: 256 bits from the operating system."""

    __slots__ = ("_unused",)

    def __init__(self) -> None:
        super().__init__(secrets.token_bytes(_SECRET_BYTES))
        self._unused = threading.Lock()

    @classmethod
    def from_bytes(cls, secret: bytes) -> Key:
        """The key that another process exposed for this one."""
        if not isinstance(secret, bytes) or len(secret) != _SECRET_BYTES:
            raise InvalidInput(f"secret must be the {_SECRET_BYTES} bytes that key.expose() gave; it is not shown here")
        key = cls()
        key._secret = secret
        return key

    def expose(self) -> bytes:
        """The bare secret, to hand to another process. Whoever sees it can remove the noise."""
        return self._reveal()

    def derive(self, *index: int) -> Key:
        """The key of one part of a release, such as block (i, j): the same key for the same index.

        Guarantee: keys of different indices (also of different lengths) and this key's own stream are independent, if
            HMAC-SHA256 is a pseudorandom function; this is the expansion step of HKDF.
        """
        if not index or not all(type(i) is int and 0 <= i < 1 << 64 for i in index):
            raise InvalidInput(f"index must be whole numbers from 0 to 2^64 - 1, at least one, got {index!r}")
        return Key.from_bytes(self._expand(b"derive" + b"".join(i.to_bytes(8, "big") for i in index)))

    def fingerprint(self, content: bytes) -> bytes:
        """A keyed hash of 32 bytes: without the key, it reveals only whether two contents are equal."""
        return hmac.digest(self.derive(0).expose(), content, "sha256")

    def derive_for(self, content: bytes, *index: int) -> Key:
        """The key of one part of a release: the same key for the same content, independent keys for others."""
        words = np.frombuffer(self.fingerprint(content), dtype=np.uint64)
        return self.derive(*index, *(int(word) for word in words))

    def stream(self) -> Stream:
        """Opens the key's stream of words. This can be done once."""
        self._use()
        return Stream(self._expand(b"stream"))

    def chacha_key(self) -> bytes:
        """Uses the key up and returns the 32-byte key for ChaCha20 on an accelerator."""
        self._use()
        return self._expand(b"chacha")

    def split(self) -> Iterator[Key]:
        """Uses the key up and yields derive(0), derive(1), ... for the parts of one release."""
        self._use()
        return map(self.derive, itertools.count())

    def _use(self) -> None:
        self._reveal()
        if not self._unused.acquire(blocking=False):  # a lock that is never released: exactly one caller gets it
            raise InvalidInput(
                "key has been used, and using it again would repeat the noise; make a new Key(), "
                "or use key.derive(i) with an index of its own for each part of a release"
            )

    def _expand(self, purpose: bytes) -> bytes:
        return hmac.digest(self._reveal(), b"matrixdp " + purpose + b"\x01", "sha256")


class Stream(_Secret):
    """The words of one key, by block and part. It has no position, so threads can share it."""

    __slots__ = ()

    def fill(self, words: Words, block: int, part: int = 0) -> None:
        """Fills the array with the first words of one part of one block: the same words every time.

        Guarantee: words of different (block, part) never share a counter. Up to AES's own security they are uniform
            and independent; over n words the counter mode adds n^2 / 2^131 to the total-variation error.
        """
        if not (words.dtype == np.uint64 and words.flags.c_contiguous and words.nbytes >> 4 < 1 << _PART_SHIFT):
            raise InvalidInput(f"words must be a contiguous array of uint64, got {words.dtype} of shape {words.shape}")
        if not (0 <= block < 1 << 64 and 0 <= part < 1 << _BLOCK_SHIFT - _PART_SHIFT):
            raise InvalidInput(f"block must lie in [0, 2^64) and part in [0, 2^16), got {block!r} and {part!r}")
        counter = block << _BLOCK_SHIFT | part << _PART_SHIFT
        encryptor = Cipher(AES256(self._reveal()), CTR(counter.to_bytes(16, "big"))).encryptor()
        target = words.reshape(-1).view(np.uint8)
        for first in range(0, target.size, len(_ZEROS)):
            piece = target[first : first + len(_ZEROS)]
            encryptor.update_into(_ZEROS[: piece.size], piece.data)
