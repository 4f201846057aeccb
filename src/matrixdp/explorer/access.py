"""Access to the page: only for a browser on this machine that was given the address with the token.

Guarantee: a request is answered only if
1. its Host is the address that the server is bound to, so that no other host name can be pointed here (DNS rebinding);
2. its Origin, if it has one, is that address; websockets and uploads must have one, so that no other site can make
   them;
3. it has the cookie. The address with the token sets it, and is answered by a page that leads on without the token.

The cookie is HttpOnly and SameSite=Strict. Browsers send cookies to every port of a host, so its Path is a random
folder that contains the whole page: browsers do not request that folder from other servers on this machine. All answers
forbid the page to load from, connect to or be framed by any other origin.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "matrixdp_explore"
REFUSED = (
    "403: this page is for the browser that was given its address. Open the address, with its token, that "
    "`matrixdp explore` printed.\n"
)


class Access:
    """An ASGI application that passes only requests of its own browser to another application.

    Args:
        inner: the other application.
        port: the port of 127.0.0.1 that the server is bound to.
    """

    def __init__(self, inner: Application, port: int) -> None:
        self._inner = inner
        self._host = f"127.0.0.1:{port}"
        self._token, self._cookie = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._folder = f"/{secrets.token_hex(16)}"
        # Inline scripts do not run. Shiny has two, for busy indicators and for dates; neither is needed.
        self._policy = (
            "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
            f"img-src 'self' data:; font-src 'self'; connect-src 'self' ws://{self._host}; form-action 'self'; "
            "base-uri 'none'; frame-ancestors 'none'"
        )

    @property
    def address(self) -> str:
        """The address with the token; whoever has it may release data and spend the budget."""
        return f"http://{self._host}/?token={self._token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        if not self._is_ours(scope, headers):
            await self._refuse(scope, send)
        elif scope["type"] == "http" and scope["path"] == "/" and self._has_token(scope):
            await self._admit(send)
        elif scope["path"].startswith(f"{self._folder}/") and self._has_cookie(headers):
            inside = {**scope, "path": scope["path"][len(self._folder) :], "root_path": ""}
            inside["raw_path"] = inside["path"].encode()
            await self._inner(inside, receive, self._guarded(send))
        else:
            await self._refuse(scope, send)

    def _is_ours(self, scope: Scope, headers: dict[str, list[str]]) -> bool:
        if headers.get("host") != [self._host]:
            return False
        origins = headers.get("origin", [])
        needed = scope["type"] == "websocket" or scope.get("method") not in ("GET", "HEAD")
        return (not origins and not needed) or origins == [f"http://{self._host}"]

    def _has_token(self, scope: Scope) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return len(given) == 1 and _equal(given[0], self._token)

    def _has_cookie(self, headers: dict[str, list[str]]) -> bool:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load("; ".join(headers.get("cookie", [])))
        except CookieError:
            return False
        return COOKIE in cookies and _equal(cookies[COOKIE].value, self._cookie)

    async def _admit(self, send: Send) -> None:
        """Sets the cookie and refreshes to the page.

        It is a page and not an HTTP redirect: after one, a browser that came from another site would not send a Strict
        cookie.
        """
        cookie = f"{COOKIE}={self._cookie}; Path={self._folder}/; HttpOnly; SameSite=Strict"
        text = (
            f'<!doctype html><meta http-equiv="refresh" content="0;url={self._folder}/"><link rel="icon" href="data:,">'
            "<title>matrixdp</title>\n"
        )
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"set-cookie", cookie.encode())]
        await _answer(self._guarded(send), 200, headers, text)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(self._guarded(send), 403, [(b"content-type", b"text/plain; charset=utf-8")], REFUSED)

    def _guarded(self, send: Send) -> Send:
        """The same, with the security headers of every answer."""
        added = [
            (b"content-security-policy", self._policy.encode()),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cache-control", b"no-store"),
        ]
        replaced = {name for name, _ in added}

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message.get("headers", []) if name.lower() not in replaced]
                message = {**message, "headers": [*kept, *added]}
            await send(message)

        return guarded


def _equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], text: str) -> None:
    body = text.encode()
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
