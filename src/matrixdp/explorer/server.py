"""Runs the page on this machine alone."""

from __future__ import annotations

import socket
import tempfile
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from html import escape
from pathlib import Path

import uvicorn

from matrixdp.errors import InvalidInput
from matrixdp.explorer.access import Access
from matrixdp.explorer.app import Given, application

HOST = "127.0.0.1"


def serve(given: Given, *, port: int = 0, browser: bool = True, say: Callable[[str], None] = print) -> None:
    """Serves the page until it is interrupted.

    Args:
        given: what the forms contain at first.
        port: of 127.0.0.1; 0 takes one that is free.
        browser: whether to open the page.
        say: called with the address.

    Raises:
        InvalidInput: if the port cannot be used.
    """
    if not 0 <= port <= 65535:
        raise InvalidInput(f"port must be 0 (any that is free) to 65535, got {port}")
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            listening.bind((HOST, port))
            listening.listen(128)
        except OSError as reason:
            raise InvalidInput(f"port {port} of {HOST} cannot be used ({reason.strerror}); leave --port out") from None
        access = Access(application(given), listening.getsockname()[1])
        # No access log: it would hold the token.
        config = uvicorn.Config(
            access,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="websockets-sansio",
        )
        say(access.address)
        if browser:
            _open(access.address, stack)
        uvicorn.Server(config).run(sockets=[listening])


def _open(address: str, stack: ExitStack) -> None:
    """Opens the page through a file that only its owner can read, since other users can see arguments of programs."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="matrixdp-", ignore_cleanup_errors=True))
    page = Path(folder, "open.html")
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(address)}">', encoding="utf-8")
    webbrowser.open(page.as_uri())
