"""Control the clients of a server and the number of its connections; close connections that are idle for long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from doll.credentials import secret
from doll.errors import ConfigError
from doll.process.http_access import NO_TOKENS, Tokens, checked_token, distinct, read_token

TOKEN_ENV: Final = "DOLL_SERVE_TOKEN"
READ_TOKEN_ENV: Final = "DOLL_SERVE_READ_TOKEN"
CERT_ENV: Final = "DOLL_SERVE_CERT"
KEY_ENV: Final = "DOLL_SERVE_KEY"
CLIENT_CA_ENV: Final = "DOLL_SERVE_CLIENT_CA"

KEEP_ALIVE_S: Final = 75.0
"""Seconds for which a connection may stay open without a request. This is longer than the time of load balancers (60 s
with ALB and nginx), which could otherwise send a request over a connection that is being closed."""
IDLE_S: Final = 30.0  # maximum time for which a client does not read an answer
_LOOK_S: Final = 1.0
_MAX_CONNECTIONS: Final = 8192
_MAX_HEAD_BYTES: Final = 65_536  # limit of the request head: the parser has none
_PIECE_BYTES: Final = 8_192  # bytes that the parser gets at once, so bytes after a body are not counted as its part
_OTHER_FILES: Final = 256  # files that a process has open in addition to connections


class ServerAccess(NamedTuple):
    """The clients that may send requests to a server."""

    tokens: Tokens = NO_TOKENS
    by_certificate: bool = False  # clients must have certificates
    tls: Mapping[str, Any] = {}  # settings of uvicorn; empty: connections are not encrypted


def find_access(token_file: Path | None = None, read_token_file: Path | None = None) -> ServerAccess:
    """Return the access settings of the environment; a file replaces a token of the environment. Raise ConfigError if a
    file cannot be used, or a token is not a secret."""
    tokens = distinct(Tokens(_token(TOKEN_ENV, token_file), _token(READ_TOKEN_ENV, read_token_file)))
    cert, key, ca = (os.environ.get(name) or None for name in (CERT_ENV, KEY_ENV, CLIENT_CA_ENV))
    if cert is None and (key or ca):
        raise ConfigError(f"{CERT_ENV}: expected a PEM file with the server's certificate, got none")
    tls: dict[str, Any] = {} if cert is None else {"ssl_certfile": cert, "ssl_keyfile": key}
    if ca is not None:
        tls |= {"ssl_ca_certs": ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    if cert is not None:
        _try_files(cert, key, ca)
    return ServerAccess(tokens, ca is not None, tls)


def _token(name: str, path: Path | None) -> str:
    if path is not None:
        return read_token(path)
    token = secret(name) or ""
    return checked_token(token, name) if token else ""


def _try_files(cert: str, key: str | None, ca: str | None) -> None:
    """Load these files once, so that problems with them raise ConfigError before anything starts."""
    for name, path in ((CERT_ENV, cert), (KEY_ENV, key), (CLIENT_CA_ENV, ca)):
        if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise ConfigError(f"{name}: expected a PEM file that can be read, got {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_password() -> str:  # without this OpenSSL would ask for it on the terminal
        raise ConfigError(
            f"{KEY_ENV if key else CERT_ENV}: expected a private key without a password, in {key or cert}"
        )

    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as exc:
        where = (
            f"{cert}, and its private key in {key}"
            if key
            else f"{cert}, with its private key ({KEY_ENV} names another file)"
        )
        raise ConfigError(f"{CERT_ENV}: expected the server's certificate in {where}: {_reason(exc)}") from None
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except ssl.SSLError as exc:
        wanted = "certificates of the authority that signs those of clients"
        raise ConfigError(f"{CLIENT_CA_ENV}: expected {wanted}, in {ca}: {_reason(exc)}") from None


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason, such as `key values mismatch`; without one, the file is not a PEM file."""
    return (error.reason or "no PEM file").lower().replace("_", " ")


def _refusal(status: str, reason: str) -> bytes:
    body = f'{{"error": "{reason}"}}'
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


_FULL: Final = _refusal("503 Service Unavailable", "too many connections")
_LONG_HEAD: Final = _refusal(
    "431 Request Header Fields Too Large", f"expected headers of at most {_MAX_HEAD_BYTES} bytes"
)


class BoundedProtocol(HttpToolsProtocol):
    """A connection. If there are too many connections, it answers with an error and is closed."""

    max_connections = _MAX_CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.idle_since_s = self.loop.time()
        self.message_since_s: float | None = None  # start time of the request that is not complete yet
        self.in_head = False
        self.head_bytes = 0
        if len(self.connections) > self.max_connections:
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if len(data) <= _PIECE_BYTES:
            self._parse(data)
            return
        for at in range(0, len(data), _PIECE_BYTES):
            if not self.transport.is_closing():
                self._parse(data[at : at + _PIECE_BYTES])

    def _parse(self, data: bytes) -> None:
        is_between = self.message_since_s is None
        if self.in_head:
            self.head_bytes += len(data)
            if self.head_bytes > _MAX_HEAD_BYTES:
                self.transport.write(_LONG_HEAD)
                self.transport.close()
                return
        super().data_received(data)
        if is_between and self.in_head:  # a head after a body is counted from the next piece on
            self.head_bytes = len(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.message_since_s = self.loop.time()
        self.in_head = True
        self.head_bytes = 0

    def on_headers_complete(self) -> None:
        self.in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.message_since_s = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since_s = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.idle_since_s = self.loop.time()

    def close_if_idle(self, now_s: float, time_limit_s: float) -> None:
        """Close a connection whose next request is not complete in time, or whose client does not read an answer."""
        if self.message_since_s is not None and now_s - self.message_since_s > time_limit_s:
            if self.in_head or not self.cycle.response_started:
                self.transport.write(_refusal("408 Request Timeout", f"expected the body within {time_limit_s:g} s"))
            self.transport.close()
            return
        limit_s = IDLE_S if self.flow.write_paused else self.timeout_keep_alive
        is_idle = self.cycle is None or self.cycle.response_complete or self.flow.write_paused
        if is_idle and now_s - self.idle_since_s > limit_s:
            self.transport.abort()


class BoundedServer(uvicorn.Server):
    """A server that closes idle connections, and leaves the handling of signals to its owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the owner sets `should_exit`."""
        yield

    async def close_idle(self, time_limit_s: float) -> None:
        """Until it is cancelled, close idle connections and connections whose request takes longer than
        `time_limit_s`."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.close_if_idle(loop.time(), time_limit_s)


def allow_many_files() -> None:
    """Raise this process's limit of open files to the system's limit, so that it can have more connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_CONNECTIONS + _OTHER_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY:
        BoundedProtocol.max_connections = max(1, min(_MAX_CONNECTIONS, soft - _OTHER_FILES))
