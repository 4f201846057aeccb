"""The Python and the commands that do what a view does."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Snippet:
    """Code that does the same as a view.

    Attributes:
        python: a program.
        commands: lines for a shell.
    """

    python: str
    commands: str


def command(*words: Any, **options: Any) -> str:
    """A command of matrixdp with its words quoted; options that are None are left out, True is a flag."""
    given = [str(word) for word in words]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        given += [] if value is None else [flag] if value is True else [flag, str(value)]
    return shlex.join(["matrixdp", *given])


def call(function: str, *arguments: Any, named: Mapping[str, Any] | None = None) -> str:
    """A call in Python; arguments are shown by their repr, those by name only if they are not None."""
    given = [repr(each) for each in arguments]
    given += [f"{name}={value!r}" for name, value in (named or {}).items() if value is not None]
    return f"{function}({', '.join(given)})"


def without_password(address: str) -> str:
    """The address of a database without its password, to be shown; the driver can read passwords from its own file."""
    scheme, found, rest = address.partition("://")
    if not found:
        return address
    names, found, place = rest.partition("?")[0].rpartition("@")
    return f"{scheme}://{names.partition(':')[0]}{found}{place}"


def lines(*parts: str | Iterable[str]) -> str:
    """Lines of a program, one below the other."""
    found = [each for part in parts for each in ([part] if isinstance(part, str) else part)]
    return "\n".join(found) + "\n"
