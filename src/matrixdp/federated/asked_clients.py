"""Who was asked in which round, in a file: written before anyone is asked, so that a server that dies forgets nobody.

A round that was asked but not finished has released nothing, and is begun again; those asked at either time count as
asked in it. The file is a `streams.state.State`: mode 0600, refused when it is a copy or was put back.
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
        setting: what fixes the rounds; another one is refused.
        origin: of the ledger that is charged; None without one. It must stay the same.
        moved: the file was moved on purpose, and the original is gone for good.
    """

    def __init__(self, path: Path, setting: Mapping[str, Any], origin: str | None, *, moved: bool = False) -> None:
        self._state, text = State(path, "federation", moved=moved), json.dumps(setting, sort_keys=True)
        self._state.create(text, origin)
        with self._state.transaction() as connection:
            _, _, known, charged, _ = self._state.fixed(connection)
        if known != text or charged != origin:
            raise InvalidInput(
                f"the rounds in {path} were begun with other settings, another file of noise, or another ledger; use "
                "those, or another state for rounds of their own"
            )

    def rounds(self) -> list[list[int]]:
        """Who was asked, round by round."""
        with self._state.transaction() as connection:
            rows = connection.execute("SELECT fingerprint FROM days ORDER BY number").fetchall()
        return [json.loads(row) for (row,) in rows]

    def write(self, number: int, clients: Collection[int]) -> None:
        """Adds those who are asked in a round, from 1."""
        with self._state.transaction() as connection:
            known = connection.execute("SELECT fingerprint FROM days WHERE number = ?", (number,)).fetchone()
            asked = {*clients, *(json.loads(known[0]) if known else ())}
            connection.execute("REPLACE INTO days VALUES (?, ?, NULL)", (number, json.dumps(sorted(asked))))
