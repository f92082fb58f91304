"""Servers without authentication may listen on loopback only."""

from __future__ import annotations

import ipaddress

from doll.errors import ConfigError


def require_loopback(host: str, *, authenticated: bool, what: str) -> str:
    """`host`, if a server without authentication may listen there.

    Args:
        host: an IP address or `localhost`; other names count as public, since they may resolve to any address.
        what: the server, for the message.

    Raises:
        ConfigError: it is not loopback, and the server has no authentication.
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not authenticated:
        raise ConfigError(
            f"{what}: {host or 'every address'} is reachable from other machines without authentication: "
            "expected 127.0.0.1; put a proxy with authentication in front of it"
        )
    return host
