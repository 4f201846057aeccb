"""Optional dependencies: a missing one is named with the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec

from matrixdp.errors import MissingExtra


def require(extra: str, *modules: str) -> None:
    """Raises MissingExtra unless these modules, which belong to an extra of matrixdp, are installed."""
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtra(f"this needs {module}, which is not installed: pip install 'matrixdp[{extra}]'")
