"""A file of the clients asked in each round, written before they are asked, so that a server crash loses none.

A round that was begun but not finished has released nothing, and is begun again; clients asked in either attempt count
as asked in it. The file is a `streams.state.State`: mode 0600, refused when it is a copy or an older state.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from matrixdp.errors import InvalidInput
from matrixdp.streams.state import State


class AskedClients:
    """The clients that were asked, by round.

    Args:
        path: the file; it is created if there is none.
        setting: the settings of the rounds; a file with other settings is refused.
        origin: the identity of the ledger that is charged, which must stay the same; None without a ledger.
        moved: the file was moved on purpose, and the original no longer exists.
    """

    def __init__(self, path: Path, setting: Mapping[str, Any], origin: str | None, *, moved: bool = False) -> None:
        self._state, text = State(path, "federation", moved=moved), json.dumps(setting, sort_keys=True)
        self._state.create(text, origin)
        with self._state.transaction() as connection:
            _, _, known, charged, _ = self._state.fixed(connection)
        if known != text or charged != origin:
            raise InvalidInput(
                f"the rounds in {path} were begun with other settings, another file of noise, or another ledger; use "
                "those, or another state for new rounds"
            )

    def rounds(self) -> list[list[int]]:
        """The clients asked, round by round."""
        with self._state.transaction() as connection:
            rows = connection.execute("SELECT fingerprint FROM days ORDER BY number").fetchall()
        return [json.loads(row) for (row,) in rows]

    def write(self, number: int, clients: Collection[int]) -> None:
        """Adds the clients asked in a round; rounds are numbered from 1."""
        with self._state.transaction() as connection:
            known = connection.execute("SELECT fingerprint FROM days WHERE number = ?", (number,)).fetchone()
            asked = {*clients, *(json.loads(known[0]) if known else ())}
            connection.execute("REPLACE INTO days VALUES (?, ?, NULL)", (number, json.dumps(sorted(asked))))
