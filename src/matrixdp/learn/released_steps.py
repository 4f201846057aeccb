"""Resuming a training with noise over time in another process: a file of the sums that steps were released with.

The noise of a step follows from a key and from the sum that it is added to (`correlated_noise`). So a step that is
repeated with the same sum is the same release; with another sum it would be a second one, which the charge for the
training does not cover. The file has the key, and for every step a fingerprint of its sum, on the disk before the noise
is drawn. A step whose sum does not match its fingerprint is refused. Hence everything that any process releases with
this file is one run: it does not matter how often it was killed, from which checkpoint it was resumed, or how many
processes resume it at the same time.

Which steps a record takes part in follows from the key and from its position in the data. So the data must be the same,
in the same order, in every process: otherwise a record could take part more often than was charged. The file has a
fingerprint of the data (`content_of`), under the key, and other data are refused. A data set that is not a
TensorDataset is not read as a whole; that it gives the same record at the same position is then assumed.

The file is a `streams.state.State`: mode 0600, refused when it is a copy or an older state, as far as that can be seen.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import TensorDataset

from matrixdp.errors import InvalidInput, StreamError
from matrixdp.learn.units import Units
from matrixdp.secure.entropy import Key
from matrixdp.streams.state import State, checked_path


def content_of(data: Any, units: Units | None) -> bytes:
    """A digest of the units of all records, in order, and of the values in a TensorDataset; other data are not read."""
    found = hashlib.sha256()
    for tensor in data.tensors if type(data) is TensorDataset else ():
        found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if units is not None:
        found.update(b"units" + units.numbers.tobytes())
    return found.digest()


class ReleasedSteps:
    """The steps of one training that were released, in a file.

    Args:
        path: the file; it is created if there is none.
        setting: the settings that fix the training; others are refused.
        origin: of the ledger that is charged; None without one. It must stay the same.
        content: a digest of the data (`content_of`). It must stay the same.
        moved: the file was moved on purpose, and the original no longer exists.

    Raises:
        InvalidInput: if the file belongs to another training, other data or another ledger.
        StreamError: if the file is a copy or an older state, others can read it, or it cannot be used.
    """

    def __init__(
        self, path: Any, setting: Mapping[str, Any], origin: str | None, content: bytes = b"", *, moved: bool = False
    ) -> None:
        file = checked_path(path)
        self._state = State(file, "training", moved=moved)
        text = json.dumps(setting, sort_keys=True)
        self._state.create(text, origin)
        with self._state.transaction() as connection:
            identity, secret, known, charged, _ = self._state.fixed(connection)
            if known != text:
                raise InvalidInput(
                    f"the training {file} was begun with other settings; use those, or another file for another one"
                )
            if charged != origin:
                raise InvalidInput("ledger must be the one that the training was begun with; nothing was released")
            self.identity, self._secret = str(identity), bytes(secret)
            fingerprint = self.key().fingerprint(b"data" + content)
            connection.execute("INSERT OR IGNORE INTO carried VALUES (0, 0, ?)", (fingerprint,))
            (first,) = connection.execute("SELECT private FROM carried WHERE number = 0").fetchone()
            if not hmac.compare_digest(bytes(first), fingerprint):
                raise InvalidInput(
                    f"the training {file} was begun with other data, another order of them, or other ids; a record "
                    "could take part more often than is paid for. Use the same, or another file for another training"
                )

    def key(self) -> Key:
        """The key from which groups, coins, dropout and noise are derived."""
        return Key.from_bytes(self._secret)

    def __len__(self) -> int:
        """How many steps were released."""
        with self._state.transaction() as connection:
            return self._state.days(connection)

    def admit(self, step: int, fingerprint: bytes) -> None:
        """Writes the fingerprint of a step, from 0, before the step is released.

        Raises:
            InvalidInput: if the step was released with another fingerprint.
            StreamError: if the file cannot be used, or lacks steps before this one.
        """
        with self._state.transaction() as connection:
            known = connection.execute("SELECT fingerprint FROM days WHERE number = ?", (step,)).fetchone()
            if not step <= self._state.days(connection):
                raise StreamError("the state of the training is an older one: steps before this one are missing")
            if known is None:
                connection.execute("INSERT INTO days VALUES (?, ?, NULL)", (step, fingerprint))
            elif not hmac.compare_digest(bytes(known[0]), fingerprint):
                raise InvalidInput(
                    f"step {step + 1} was released with another sum of gradients, and is not released again: model, "
                    "data and checkpoint must be those of the first time, on a device that computes the same in every "
                    "bit. Load a checkpoint of a later step, or begin another training"
                )
