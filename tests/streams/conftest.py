"""Fixtures for streams without an end."""

import pytest

from matrixdp.streams import noise


@pytest.fixture
def planted(monkeypatch):
    """Sets a constant of the noise, and forgets what was found with another one."""

    def plant(name, value):
        monkeypatch.setattr(noise, name, value)
        for found in (noise._has_room, noise._below):
            found.cache_clear()

    yield plant
    monkeypatch.undo()
    for found in (noise._has_room, noise._below):
        found.cache_clear()
