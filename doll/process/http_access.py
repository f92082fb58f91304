"""Who may ask an HTTP server of DOLL, and the socket that it listens at: this machine alone, unless there is a token.

A page of a foreign web site runs in the browser of somebody who may reach the server. Its requests carry the name of
that site as their `Host`, also if that name was made to point at this machine (DNS rebinding): a server without a
token answers names of the loopback interface only. With a token the name does not matter, since such a page does not
know it, and a browser sends no cookie of one name to another. A page may also ask an address of this machine by its
own name, without seeing the answer: a browser says so (`is_of_a_foreign_page`).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from pathlib import Path
from typing import Final

from doll.errors import ConfigError
from doll.records.bounded import read_text

LOOPBACK: Final = "127.0.0.1"
MIN_TOKEN_CHARS: Final = 16
_MAX_TOKEN_BYTES: Final = 1_000
_BACKLOG: Final = 1_024


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(header: str) -> str:
    """The name or address in a `Host` header, without the port; "" if it has none.

    >>> host_name("localhost:8080"), host_name("[::1]:80"), host_name("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def is_of_a_foreign_page(origin: str, fetch_site: str, host: str) -> bool:
    """Whether a browser sends a request for a page that is not of this server: such a page sees no answer, but what it
    asks would be done.

    Args:
        origin, fetch_site, host: the headers `Origin`, `Sec-Fetch-Site` and `Host`; "": there is none. Browsers send
            `Origin` with each POST of another site, the others do without.

    >>> is_of_a_foreign_page("", "", "localhost:8000"), is_of_a_foreign_page("null", "", "localhost:8000")
    (False, True)
    """
    return fetch_site not in ("", "none", "same-origin") or origin.partition("://")[2] != (host if origin else "")


def read_token(path: Path) -> str:
    """The token in a file, which only its owner can read; raises ConfigError if it cannot be read, others may read it,
    or it is too short to be a secret."""
    try:
        if (mode := path.stat().st_mode & 0o777) & 0o077:
            raise ConfigError(f"{path}: expected a file that only you can read, got mode {mode:o}: chmod 600 {path}")
        token = read_text(path, max_bytes=_MAX_TOKEN_BYTES).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    return checked_token(token, path)


def checked_token(token: str, origin: object) -> str:
    """`token`; raises ConfigError, which names its `origin`, if it is too short to be a secret, or cannot be in a
    header."""
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{origin}: expected a token of at least {MIN_TOKEN_CHARS} printable ASCII characters without spaces, as "
            "from openssl rand -hex 32"
        )
    return token


def is_token(given: str, token: str) -> bool:
    """Whether they are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def listen(host: str, port: int, token: str, *, by_certificate: bool = False) -> socket.socket:
    """A socket that listens at `host`; `port` 0 takes one that is free. Raises ConfigError if other machines would
    reach a server without a token (or, `by_certificate`, without certificates of clients), or the address cannot be
    used."""
    if not (token or by_certificate or is_loopback(host)):
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
    """`http://127.0.0.1:8080` of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
