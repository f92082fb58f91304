"""Control who may send requests to an HTTP server of DOLL, and open its socket: without a token, only on loopback.

A person who can reach the server may open a page of a foreign web site. The page's requests have the name of that site
as their `Host`, even if the name resolves to this machine (DNS rebinding). A server without a token therefore answers
only requests for names of the loopback interface. A server with a token does not check the name, because the page does
not know the token, and a browser does not send cookies of one name to another. The page may also send requests to an
address of this machine, without seeing the answer; a browser marks such requests (`is_of_a_foreign_page`).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

from doll.errors import ConfigError
from doll.records.bounded import read_text

LOOPBACK: Final = "127.0.0.1"
MIN_TOKEN_CHARS: Final = 16
_MAX_TOKEN_BYTES: Final = 1_000
_BACKLOG: Final = 1_024


class Right(IntEnum):
    """The right that an endpoint needs. It includes the ones above it."""

    OPEN = 0  # nothing: the log-in, and probes of a load balancer
    READ = 1  # read what the server shows
    ACT = 2  # ask for answers of a model, which are computed and logged


@dataclass(frozen=True)
class Tokens:
    """The token with all rights, and that of those who may only read; "": nobody has it. Both: everyone may act."""

    act: str = field(default="", repr=False)
    read: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.act or self.read)

    def right_of(self, given: str, of: Callable[[str], str] = str) -> Right:
        """Return the right of the client that has sent `given`, which is `of` its token. Both tokens are compared, so
        that the time does not depend on them."""
        if not self:
            return Right.ACT
        may_act, may_read = (bool(token) & is_token(given, of(token)) for token in (self.act, self.read))
        return Right.ACT if may_act else Right.READ if may_read else Right.OPEN


NO_TOKENS: Final = Tokens()


def read_tokens(act: Path | None, read: Path | None) -> Tokens:
    """Return the tokens in these files, as `read_token` reads them. Raise ConfigError also if both are equal."""
    return distinct(Tokens(*("" if path is None else read_token(path) for path in (act, read))))


def distinct(tokens: Tokens) -> Tokens:
    """Return `tokens`. Raise ConfigError if one text is the token for both rights."""
    if tokens.act and tokens.act == tokens.read:
        raise ConfigError("expected another token for reading than for acting, got the same text twice")
    return tokens


def bearer(header: str) -> str:
    """Return the token in an `Authorization` header; "" if it has none."""
    scheme, _, given = header.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def is_loopback(host: str) -> bool:
    """Return whether a name or an address belongs to the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(header: str) -> str:
    """Return the name or address in a `Host` header, without the port; "" if it has none.

    >>> host_name("localhost:8080"), host_name("[::1]:80"), host_name("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def is_of_a_foreign_page(origin: str, fetch_site: str, host: str) -> bool:
    """Return whether a browser sends the request on behalf of a page of another server. The page cannot read the
    answer, but the server would execute the request.

    Args:
        origin, fetch_site, host: the headers `Origin`, `Sec-Fetch-Site` and `Host`; "" if missing. Browsers send
            `Origin` with each POST from another site; other clients do not send it.

    >>> is_of_a_foreign_page("", "", "localhost:8000"), is_of_a_foreign_page("null", "", "localhost:8000")
    (False, True)
    """
    return fetch_site not in ("", "none", "same-origin") or origin.partition("://")[2] != (host if origin else "")


def read_token(path: Path) -> str:
    """Return the token in a file that only its owner can read. Raise ConfigError if it cannot be read, others may read
    it, or it is too short to be a secret."""
    try:
        if (mode := path.stat().st_mode & 0o777) & 0o077:
            raise ConfigError(f"{path}: expected a file that only you can read, got mode {mode:o}: chmod 600 {path}")
        token = read_text(path, max_bytes=_MAX_TOKEN_BYTES).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    return checked_token(token, path)


def checked_token(token: str, origin: object) -> str:
    """Return `token`. Raise ConfigError, which names `origin`, if it is too short or not valid in a header."""
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{origin}: expected a token of at least {MIN_TOKEN_CHARS} printable ASCII characters without spaces, as "
            "from openssl rand -hex 32"
        )
    return token


def is_token(given: str, token: str) -> bool:
    """Return whether both tokens are equal. The time of the comparison does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def listen(host: str, port: int, tokens: Tokens = NO_TOKENS, *, by_certificate: bool = False) -> socket.socket:
    """Return a socket that listens at `host`; `port` 0 selects a free port. Raise ConfigError if the address cannot be
    used, or if other machines could reach a server without a token (`by_certificate`: without client certificates)."""
    if not (tokens or by_certificate or is_loopback(host)):
        raise ConfigError(
            f"--host {host}: other machines would reach this server, so expected --token-file FILE with a secret; or "
            f"leave --host out, and use a tunnel: ssh -L {port or 8080}:{LOOPBACK}:{port or 8080} THIS-MACHINE"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}; --port names another") from error


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket, such as `http://127.0.0.1:8080`."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
