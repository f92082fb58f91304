"""Where our own servers may listen: on loopback, or anywhere once who asks is known."""

from __future__ import annotations

import ipaddress

from doll.errors import ConfigError


def require_loopback(host: str, *, authenticated: bool, what: str) -> str:
    """`host`, if a server without authentication may listen there.

    Args:
        host: an IP address or `localhost`; other names may mean anything tomorrow, so they count as public.
        what: the server, for the message.

    Raises:
        ConfigError: it is not loopback and nobody would be asked who they are.
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not authenticated:
        raise ConfigError(
            f"{what}: {host or 'every address'} can be reached from outside and nobody would be asked who they are: "
            "expected 127.0.0.1; put a proxy with authentication in front of it"
        )
    return host
