"""Blocks of days in the state of a stream without an end; `noise` explains them.

Public are the estimate of each block's total and the noisy row of its error. Private are the sum of the current block,
kept as two floats per cell (`noise` bounds the rounding), and the rows that later blocks of the same part need.
"""

from __future__ import annotations

import sqlite3

import numpy as np

from matrixdp._check import Array

TABLES = (
    "CREATE TABLE IF NOT EXISTS blocks (number INTEGER PRIMARY KEY, estimate BLOB, noisy BLOB)",
    "CREATE TABLE IF NOT EXISTS carried_blocks (number INTEGER PRIMARY KEY, private BLOB)",  # 0 is the current sum
)


def add_day(connection: sqlite3.Connection, row: Array, *, first: bool) -> None:
    """Adds a day to the sum of its block."""
    if first:
        for statement in TABLES:
            connection.execute(statement)
    total = _plus(np.zeros((2, len(row))) if first else _sum(connection), row)
    connection.execute("INSERT OR REPLACE INTO carried_blocks VALUES (0, ?)", (total.tobytes(),))


def remainder(connection: sqlite3.Connection, estimate: Array, largest: float) -> Array:
    """The sum of the current block minus its estimate, each cell clamped to [-largest, largest]."""
    high, low = _plus(_sum(connection), -estimate)
    return np.asarray(np.clip(high + low, -largest, largest))


def carried(connection: sqlite3.Connection, size: int) -> Array:
    """The private rows of earlier blocks that the next one needs, the latest first."""
    stored = connection.execute("SELECT private FROM carried_blocks WHERE number > 0 ORDER BY number DESC")
    return np.array([np.frombuffer(blob) for (blob,) in stored]).reshape(-1, size)


def write(
    connection: sqlite3.Connection, number: int, estimate: Array, noisy: Array, kept: Array, *, last: bool
) -> None:
    """Writes a complete block, numbered from 1; after the last one of a part, its private rows are deleted."""
    connection.execute("INSERT INTO blocks VALUES (?, ?, ?)", (number, estimate.tobytes(), noisy.tobytes()))
    connection.execute("INSERT INTO carried_blocks VALUES (?, ?)", (number, kept.tobytes()))
    connection.execute("DELETE FROM carried_blocks WHERE number <= ?", (number if last else 0,))


def read(connection: sqlite3.Connection, before: int, count: int) -> tuple[Array, Array]:
    """The estimates and noisy rows of `count` blocks, after the first `before` blocks."""
    stored = connection.execute(
        "SELECT estimate, noisy FROM blocks WHERE number > ? AND number <= ? ORDER BY number", (before, before + count)
    )
    found = np.array([[np.frombuffer(blob) for blob in row] for row in stored])
    return found[:, 0], found[:, 1]


def _sum(connection: sqlite3.Connection) -> Array:
    (stored,) = connection.execute("SELECT private FROM carried_blocks WHERE number = 0").fetchone()
    return np.frombuffer(stored).reshape(2, -1)


def _plus(total: Array, row: Array) -> Array:
    """Adds a number to a sum of two floats per cell: the rounding error of the first is added to the second."""
    high, low = total
    after = high + row
    gained = after - high
    return np.stack([after, low + ((high - (after - gained)) + (row - gained))])
