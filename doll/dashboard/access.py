"""Access control of a page: checks each request first, and sets headers that restrict the use of the answer in
browsers."""

from __future__ import annotations

import hashlib
from http.cookies import CookieError, SimpleCookie
from typing import Final

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from doll.process.http_access import NO_TOKENS, Right, Tokens, bearer, host_name, is_loopback

LOGIN: Final = "/login"
COOKIE: Final = "doll_page"
_OPEN: Final = frozenset({LOGIN, "/page.css"})  # paths that need no token
# Scripts, styles, pictures and connections only from this server; no frames; forms only to this server.
_HEADERS: Final = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-accel-buffering", b"no"),  # a proxy then forwards events without delay
]


def cookie_of(token: str) -> str:
    """Return the cookie that a browser stores instead of the token."""
    return hashlib.sha256(f"doll page {token}".encode()).hexdigest()


class Access:
    """An ASGI application that wraps another one and forwards only requests of allowed readers.

    Args:
        tokens: tokens that readers may have. None: no token, but the `Host` must be a name of the loopback interface.
            Nothing on a page acts, so both tokens allow the same.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens = NO_TOKENS) -> None:
        self.app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
                if not any(name == b"cache-control" for name, _ in message["headers"]):
                    message["headers"].append((b"cache-control", b"no-store"))
            await send(message)

        await (self._refusal(scope) or self.app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that is refused; None if the request is allowed."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        if method not in ("GET", "HEAD") and (path, method) != (LOGIN, "POST"):
            return PlainTextResponse("this page only answers: expected GET\n", 405, {"Allow": "GET, HEAD"})
        if not self._tokens:
            name = host_name(headers.get(b"host", ""))
            if not is_loopback(name):
                return PlainTextResponse(f"expected localhost or 127.0.0.1 as Host, got {name[:100]!r}\n", 421)
        elif path not in _OPEN and not self._may_read(headers):
            if path == "/":
                return RedirectResponse(LOGIN, 303)
            text = "expected the token of this page: Authorization: Bearer TOKEN, or log in at /login\n"
            return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        return None

    def _may_read(self, headers: dict[bytes, str]) -> bool:
        if self._tokens.right_of(bearer(headers.get(b"authorization", ""))) >= Right.READ:
            return True
        try:
            cookie = SimpleCookie(headers.get(b"cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and self._tokens.right_of(cookie.value, cookie_of) >= Right.READ
